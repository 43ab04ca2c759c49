"""Stacked weights that layers cast to a narrower dtype are cast once, before the loop over microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import meshpar as mp
from meshpar._src.program import pipeline
from meshpar.errors import UnsupportedError

LAYERS, EMBED, MICRO = 4, 16, 4
KERNEL = (LAYERS, EMBED, EMBED)
DIMS = {"params/*": "layers embed _", "x": "batch embed"}


def step(params, x):
    """One step of layers in bfloat16; the norms' weights are also read in float32."""

    def layer(h, w):
        scale = w["scale"] * jnp.mean(w["scale"].astype(h.dtype).astype(jnp.float32))
        y = jnp.tanh(h @ w["kernel"].astype(h.dtype)).astype(jnp.float32) * scale[0]
        return h + y.astype(h.dtype), None

    def loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICRO)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def plain(params, x):
    """One step of layers in the dtype of their weights."""

    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, params)
        return jnp.mean(h**2)

    value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICRO)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


PLAIN_DIMS = {"params/up": "layers embed mlp", "params/down": "layers mlp embed", "x": "batch embed"}


def plain_arguments():
    r = np.random.default_rng(0)
    params = {"up": r.normal(size=(LAYERS, EMBED, 8)) / 4, "down": r.normal(size=(LAYERS, 8, EMBED)) / 4}
    return params, r.normal(size=(16, EMBED))


def arguments():
    r = np.random.default_rng(0)
    params = {"kernel": r.normal(size=KERNEL) / 4, "scale": 1 + r.normal(size=(LAYERS, EMBED, 1)) / 4}
    return jax.tree.map(np.float32, (params, r.normal(size=(16, EMBED))))


def test_weights_that_layers_only_cast_are_cast_once_and_no_number_changes(monkeypatch):
    args = arguments()
    where = {"mesh": "stage=2, data=2", "layout": "batch: data; layers: stage", "dims": DIMS}
    cast = mp.plan(step, *args, **where).program
    stacks = [n for op, n in cast.root.walk_counted() if op.primitive.family == "cast" and op.outs[0].shape == KERNEL]
    assert stacks == [1]
    monkeypatch.setattr(pipeline, "cast_stacks", lambda *_: None)
    uncast = mp.plan(step, *args, **where).program
    results = (jax.jit(jaxpr_as_fun(p.closed))(*jax.tree.leaves(args)) for p in (cast, uncast))
    jax.tree.map(np.testing.assert_array_equal, *results)


FSDP = {"mesh": "stage=2, data=2, idle=2", "layout": "batch: data; embed: data; layers: stage", "dims": PLAIN_DIMS}


@pytest.mark.parametrize("rounds", [1, 2])
def test_gathered_once_a_step(rounds):
    """FSDP: the weights of the layers are all-gathered once, and their gradients reduce-scattered once."""
    moves = {}
    for gather in ("microbatch", "step"):
        layout = f"{FSDP['layout']}*{rounds}"
        plan = mp.plan(plain, *plain_arguments(), **{**FSDP, "layout": layout}, gather=gather)
        assert plan.replan().request.gather == gather
        moves[gather] = [
            c for c in plan.collectives if c.axes == ("data",) and c.op in ("all-gather", "reduce-scatter")
        ]
    assert sorted((c.op, c.count) for c in moves["step"]) == [("all-gather", 1)] * 2 + [("reduce-scatter", 1)] * 2
    bytes_sent = {gather: sum(c.bytes * c.count for c in of) for gather, of in moves.items()}
    assert bytes_sent["step"] * MICRO <= bytes_sent["microbatch"]


@pytest.mark.parametrize(
    ("embed", "topology", "gather"), [(1024, "v5e:4x2", "step"), (12288, "v5e:4x2", "microbatch"), (1024, None, "step")]
)
def test_gathered_by_time_and_memory(embed, topology, gather):
    """Once a step takes less time, and does not fit if the weights of a stage are as large as the memory of the chip."""
    shapes = {"up": (LAYERS, embed, 4 * embed), "down": (LAYERS, 4 * embed, embed)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    args = params, jax.ShapeDtypeStruct((64, embed), np.float32)
    how = {**FSDP, "mesh": "stage=2, data=4", "topology": topology, "donate_argnums": 0}
    auto, once, each = (mp.plan(plain, *args, **how, gather=choice) for choice in ("auto", "step", "microbatch"))
    assert auto.pipeline.gather == gather
    chosen, other = (once, each) if gather == "step" else (each, once)
    assert auto.bytes_sent == chosen.bytes_sent != other.bytes_sent
    if topology is not None:
        assert (once.memory.peak <= once.chip.per_device().hbm) == (gather == "step")
        assert once.seconds < each.seconds
    assert auto.replan().request.gather == "auto"


def test_an_unknown_gather():
    with pytest.raises(UnsupportedError, match="gather"):
        mp.plan(plain, *plain_arguments(), **FSDP, gather="once")

"""Updates of optimizers that people use: the numbers of the unsharded run."""

import functools

import covering
import jax
import lowered
import numpy as np
import optax
import optimizers
import pytest

import meshpar as mp

RNG = np.random.default_rng(0)


def normal(*shape, scale=None):
    scale = shape[-2] ** -0.5 if scale is None and len(shape) > 1 else scale or 1.0
    return (RNG.normal(size=shape) * scale).astype(np.float32)


same = functools.partial(lowered.same, meshes=["data=2, model=2, idle=2"], lowerings=("shard_map", "jit"))


def layer_norm(x, g):
    return jax.nn.standardize(x, -1) * g


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "sm3": lambda: optax.sm3(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "rmsprop": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(1e-2, momentum=0.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lowering"), covering.each(OPTIMIZERS, ["shard_map", "jit"]))
def test_optimizers(name, lowering):
    optimizer = OPTIMIZERS[name]()
    params = {"up": normal(2, 16, 32), "down": normal(2, 32, 16), "norm": np.ones((2, 16), np.float32)}
    dims = {"up": "_ embed mlp", "down": "_ mlp embed", "norm": "_ embed"}
    dims = {f"state/params/{name}": text for name, text in dims.items()} | {"x": "batch _"}

    def loss_of(p, x):
        y = jax.nn.gelu(layer_norm(x, p["norm"][1]) @ p["up"][1]) @ p["down"][0]
        return ((x + y) ** 2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}, loss, grads

    state = {"params": params, "opt_state": optimizer.init(params)}
    embed = "opt.embed" if name == "lamb" else "embed"
    how = {"layout": f"batch: data; mlp: model; {embed}: data", "dims": dims, "lowerings": [lowering]}
    same(step, state, normal(8, 16, scale=1.0), **how)


NEW = {
    "schedule-free AdamW": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "Sophia": lambda: optax.contrib.sophia(1e-2, update_interval=1),
    "Dion": lambda: optimizers.dion(1e-2, rank=4),
    "SOAP": lambda: optimizers.soap(1e-2),
}


@pytest.mark.parametrize("name", NEW)
def test_states_are_sharded_like_the_parameters_and_a_second_step_is_that_of_one_device(name):
    case, optimizer, dims = optimizers.CASES[name], NEW[name](), optimizers.DIMS
    step, x = optimizers.step_of(optimizer), normal(16, 8, scale=1.0)
    state, _ = jax.jit(step)(optimizers.create(optimizer, 4, 8, jax.random.key(0)), x)
    places = ("data=4, idle=2", case.fsdp, ("shard_map", "jit")), ("data=2, model=4", case.tensor, ("shard_map",))
    for mesh, layout, lowerings in places:
        lowered.same(step, state, -x, layout=layout, meshes=[mesh], lowerings=lowerings, dims=dims)
        plan = mp.plan(step, state, x, mesh=mesh, layout=layout, dims=dims)
        specs = {v.path: v.spec for v in plan.inputs}
        moments = [v for v in plan.inputs if v.kind == "opt" and v.shape == (4, 8, 32)]
        assert len(moments) >= 2
        if "opt." not in layout:
            assert {v.spec for v in moments} == {specs["state/params/up"]}
        assert optimizers.share_of_state(plan) < (1.01 if layout != optimizers.TENSOR else 1.5)

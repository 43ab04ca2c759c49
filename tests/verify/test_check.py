"""``mp.check``: equal runs pass, rounding that the program blows up is explained, a wrong op is named with its line."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

import meshpar as mp
from meshpar._src.entry.api import check
from meshpar._src.lower import LOWERINGS
from meshpar._src.rules import PRIMITIVES, registry
from meshpar._src.verify.check import _default_meshes
from meshpar._src.verify.numbers import compare, copies
from meshpar.errors import CheckError, DivisibilityError

EMBED, MLP, BATCH = 16, 32, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
DIMS = {"*params/w1": "embed mlp", "*params/b1": "mlp", "*params/w2": "mlp embed", "x": "batch embed"}
LAYOUT = "batch: data; mlp: model; embed: data"
MESHES = ("data=1, model=8", "data=2, model=4", "data=2, model=2, idle=2")


def loss(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - x) ** 2)


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state["params"], x)
    updates, opt = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt}, value


@pytest.fixture(scope="module")
def state():
    a, b = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(a, (EMBED, MLP)) / 4,
        "b1": jnp.zeros(MLP),
        "w2": jax.random.normal(b, (MLP, EMBED)) / 4,
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((BATCH, EMBED)).astype(np.float32)


def break_lowering(monkeypatch, hook, when=lambda plan: True):
    """Replace every lowering by a wrong one of `jit`: the hook may change the results of every top-level op."""
    right = LOWERINGS["jit"]

    def run(jaxpr, consts, args):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit"):
                ins = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
                outs = run(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, ins)
            else:
                names = [v for v in eqn.invars if not isinstance(v, Literal)]
                one = jaxpr.replace(constvars=[], invars=names, eqns=[eqn], outvars=eqn.outvars)
                outs = hook(eqn, jaxpr_as_fun(ClosedJaxpr(one, ()))(*[env[v] for v in names]))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def wrong(plan, mesh, bound=()):
        flat, ins, outs = right(plan, mesh, bound)

        def broken(*xs):
            closed = jax.make_jaxpr(flat)(*xs)
            return run(closed.jaxpr, closed.consts, xs)

        return (broken if when(plan) else flat), ins, outs

    for name in LOWERINGS:
        monkeypatch.setitem(LOWERINGS, name, wrong)


def scale_weight_gradient(eqn, outs):
    """1 % too much for the gradient of ``w2``: the contraction over the batch."""
    if eqn.primitive.name == "dot_general" and set(outs[0].shape) == {EMBED, MLP}:
        return [1.01 * outs[0]]
    return outs


# -- equal


def test_train_step_is_equal_on_every_mesh(state, x):
    report = check(step, state, x, layout=LAYOUT, mesh=MESHES, dims=DIMS)
    assert report.ok
    assert [r.leaves for r in report.rows] == [len(jax.tree.leaves(state)) + 1] * 3
    assert all(r.difference < 1e-5 and r.explained == () for r in report.rows)
    assert "3 of 3 runs of" in str(report)


def test_one_mesh_or_several(x):
    for given, rows in (("data=8", 1), (["data=8"], 1), (["data=8", {"data": 4, "idle": 2}], 2)):
        assert len(check(jnp.tanh, x, layout="batch: data", dims={"*": "batch _"}, mesh=given).rows) == rows


def test_default_meshes_fit_the_axes_of_the_layout():
    def shapes(layout):
        return [dict(m.shape) for m in _default_meshes(mp.Layout(layout))]

    three = [{"data": 1, "model": 8}, {"data": 2, "model": 4}, {"data": 2, "model": 2, "idle": 2}]
    assert shapes("batch: data; mlp: model") == three
    assert shapes("batch: data") == [{"data": 8}, {"data": 4, "idle": 2}, {"data": 2, "idle": 4}]
    assert shapes("a: x; b: y; c: z") == [{"x": 1, "y": 8, "z": 1}, {"x": 2, "y": 4, "z": 1}, {"x": 2, "y": 2, "z": 2}]
    assert shapes("batch: idle") == [{"idle": 8}, {"idle": 4, "idle_0": 2}, {"idle": 2, "idle_0": 4}]
    assert shapes("") == [{"idle": 8}]


def test_default_meshes_that_do_not_divide_are_skipped_and_listed():
    four, three = np.ones((4, 3), np.float32), np.ones((3, 3), np.float32)
    options = {"layout": "batch: data", "dims": {"*": "batch _"}}
    report = check(jnp.tanh, four, **options)
    assert report.ok
    assert [m for m, _, _ in report.skipped] == ["data=8"]
    assert "dim `batch` of size 4 does not divide over data=8" in str(report)
    with pytest.raises(DivisibilityError):
        check(jnp.tanh, four, **options, mesh="data=8")
    with pytest.raises(DivisibilityError):
        check(jnp.tanh, three, **options)


def test_donated_and_static_arguments(x):
    kept = jnp.asarray(x)

    def run(x, power):
        return x**power

    donating = jax.jit(run, donate_argnums=0, static_argnums=1)
    report = check(donating, kept, 3, layout="batch: data", mesh="data=8", dims={"x": "batch _"}, static_argnums=1)
    assert report.ok
    assert not kept.is_deleted()
    sharded = mp.jit(run, mesh=mp.mesh("data=8"), layout="batch: data", dims={"x": "batch _"}, static_argnums=1)
    assert sharded.check(kept, 3).ok
    own = check(sharded, kept, 3)
    assert [(row.mesh, row.layout) for row in own.rows] == [("data=8", "batch: data")]
    assert [row.mesh for row in check(sharded, kept, 3, mesh="data=4, idle=2").rows] == ["data=4, idle=2"]
    elsewhere = jax.device_put(x, jax.NamedSharding(mp.mesh("other=8"), jax.P(None, "other")))
    assert check(sharded, elsewhere, 3, layout="batch: data", mesh="data=4, idle=2").ok
    assert not elsewhere.is_deleted()


def test_a_step_without_a_layout_or_devices_is_not_checked(x):
    with pytest.raises(mp.errors.UnsupportedError, match=r"mp\.check needs a layout") as e:
        check(jnp.tanh, x, mesh="data=8")
    assert 'layout="batch: data"' in str(e.value)
    with pytest.raises(mp.errors.UnsupportedError, match=r"mp\.hardware\.calibrate needs a layout"):
        mp.hardware.calibrate(jnp.tanh, x, mesh="data=8")
    abstract = jax.sharding.AbstractMesh((8,), ("data",))
    with pytest.raises(mp.errors.MeshError, match=r"no devices to run on, and mp\.check runs the step"):
        check(mp.jit(jnp.tanh, mesh=abstract, layout="batch: data", dims={"*": "batch _"}), x)


# -- keys and nnx


def test_keys_and_random_bits_are_equal():
    def sample(key, x):
        key, use = jax.random.split(key)
        keep = jax.random.bernoulli(use, 0.5, x.shape)
        return key, jnp.where(keep, x, 0), keep

    x = np.ones((8, 16), np.float32)
    report = check(sample, jax.random.key(1), x, layout="batch: data", mesh="data=4, idle=2", dims={"x": "batch _"})
    assert report.ok
    assert report.rows[0].leaves == 3


class Net(nnx.Module):
    def __init__(self, rngs):
        def init(*dims):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), dims)

        self.up = nnx.Linear(EMBED, MLP, use_bias=False, kernel_init=init("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, use_bias=False, kernel_init=init("mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def train_net(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def test_nnx_state_is_compared_and_left_alone(x):
    with nnx.use_eager_sharding(False):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    before = np.asarray(model.up.kernel[...])
    report = check(train_net, model, optimizer, x, mesh=MESHES[2], layout=LAYOUT, dims={"x": "batch embed"})
    state = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    assert report.rows[0].leaves == len(state) + 1  # and the loss
    assert np.array_equal(model.up.kernel[...], before)


# -- explained


def attention_step(params, opt, x):
    def loss(p):
        q = jnp.einsum("bse,ehk->bshk", x, p["query"])
        k = jnp.einsum("bse,ehk->bshk", x, p["query"]) + p["key_bias"]
        w = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
        return jnp.mean(jnp.einsum("bhqt,bthk->bqhk", w, q) ** 2)

    updates, opt = OPTIMIZER.update(jax.grad(loss)(params), opt, params)
    return {"params": optax.apply_updates(params, updates), "opt": opt}


def attention_case():
    params = {"query": jax.random.normal(jax.random.key(2), (EMBED, 2, 8)) / 4, "key_bias": jnp.zeros((2, 8))}
    x = np.random.default_rng(3).standard_normal((BATCH, 6, EMBED)).astype(np.float32)
    dims = {"*query": "embed heads head_dim", "*key_bias": "heads head_dim", "x": "batch seq embed"}
    return (params, OPTIMIZER.init(params), x), dims


def test_a_gradient_that_is_zero_but_for_rounding_is_explained(monkeypatch):
    args, dims = attention_case()
    layout, mesh = "batch: data; heads: model", "data=2, model=2, idle=2"
    report = check(attention_step, *args, layout=layout, mesh=mesh, dims=dims)
    assert report.ok
    explained = report.rows[0].explained
    assert explained
    assert "\nrounding, no error" in str(report)
    assert report.rows[0].rounding > 1e-5
    assert f"{len(explained)} by up to {report.rows[0].rounding:.1e}, which is rounding" in " ".join(
        str(report).split()
    )
    assert all(path.endswith("key_bias") for path in explained)
    assert report.rows[0].rounding_path in explained

    def wrong_update(eqn, outs):
        """Adam's square root is off for the bias: that its gradient is rounding is no excuse."""
        return [1.5 * outs[0]] if eqn.primitive.name == "sqrt" and outs[0].shape == (2, 8) else outs

    break_lowering(monkeypatch, wrong_update)
    with pytest.raises(CheckError, match=r"first wrong op: sqrt → float32\[2, 8\]"):
        check(attention_step, *args, layout=layout, mesh=mesh, dims=dims)


# -- caught


def test_a_wrong_gradient_is_named_with_path_op_and_line(state, x, monkeypatch):
    break_lowering(monkeypatch, scale_weight_gradient)
    report = check(step, state, x, layout=LAYOUT, mesh=MESHES[2], dims=DIMS, raises=False)
    assert not report.ok
    e = report.rows[0].error
    text = str(e)
    assert " ".join(text.split()) in " ".join(str(report).split())
    assert f"the layout `{LAYOUT}` changes `0/opt_state/1/0/mu/b1` on the mesh {MESHES[2]}" in text
    assert e.path == "0/opt_state/1/0/mu/b1"
    assert e.shape == (MLP,)
    assert e.dims == "mlp"
    assert "the first wrong op: dot_general" in text
    assert e.source is not None
    assert e.source in text
    assert "test_check.py:" in e.source
    assert "(loss)" in e.source
    assert "0.01 of the largest value" in text
    assert "allowed: 1e-05" in text
    assert "results differ: 0/opt_state/1/0/mu/b1, " in text


def test_a_wrong_integer_is_caught(monkeypatch):
    def count(x):
        return {"mean": jnp.mean(x), "positive": jnp.sum(x > 0)}

    x = np.random.default_rng(0).standard_normal((800, 4)).astype(np.float32)

    def one_more(eqn, outs):
        return [o + 1 if o.dtype == jnp.int32 and eqn.primitive.name == "reduce_sum" else o for o in outs]

    assert check(count, x, layout="batch: data", mesh="data=8", dims={"x": "batch _"}).ok
    break_lowering(monkeypatch, one_more)
    with pytest.raises(
        CheckError, match=r"changes `positive`.*\n.*largest difference 1 .*allowed: 0\n.*reduce_sum → int32\[\]"
    ):
        check(count, x, layout="batch: data", mesh="data=8", dims={"x": "batch _"})


def accumulate(w, x):
    """Matmuls in bfloat16, added in a loop whose result is float32."""

    def add(total, x):
        return total + (x.astype(jnp.bfloat16).T @ w.astype(jnp.bfloat16)).astype(jnp.float32), None

    return jax.lax.scan(add, jnp.zeros((EMBED, EMBED), jnp.float32), x)[0]


ROUNDED = {"layout": "batch: data", "mesh": "data=8", "dims": {"x": "micro batch embed", "w": "batch mlp"}}


@pytest.fixture(scope="module")
def batches():
    r = np.random.default_rng(0)
    return r.standard_normal((64, EMBED)).astype("f"), r.standard_normal((64, 64, EMBED)).astype("f")


def test_rounding_of_bfloat16_inside_a_loop_is_no_error(batches):
    report = check(accumulate, *batches, **ROUNDED, lowerings=("jit", "shard_map"))
    assert report.ok
    rows = [row for row in report.rows if row.explained]
    assert rows  # the compiler rounds otherwise in one run than in the other
    assert all(1e-5 < row.rounding < 0.02 for row in rows)
    assert "the step computes in bfloat16, which rounds by up to 3.9e-03 of a value" in " ".join(str(report).split())


@pytest.mark.parametrize("by", [1.2, np.nan])
def test_an_error_inside_a_loop_of_bfloat16_is_reported(batches, monkeypatch, by):
    def wrong(eqn, outs):
        return [outs[0] * by] if eqn.primitive.name == "scan" else outs

    break_lowering(monkeypatch, wrong)
    with pytest.raises(
        CheckError, match=r"(?s)first wrong op: scan .*in float32 the sharded run is off by .*please report it"
    ):
        check(accumulate, *batches, **ROUNDED)


def test_a_wrong_rule_is_reported_in_bfloat16(monkeypatch):
    """A rule that takes a maximum over a split dim for a sum: found, though bfloat16 allows for much."""

    def loss(x):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c) + jnp.max(x, 0), None), jnp.zeros(EMBED, jnp.bfloat16), x)[0]

    right = PRIMITIVES["reduce_max"]

    def summed(*args):
        rule = right.rule(*args)
        rule.kinds = ["sum" if kind == "max" else kind for kind in rule.kinds]
        return rule

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, EMBED)), jnp.bfloat16)
    options = {"layout": "batch: data", "mesh": "data=8", "dims": {"x": "steps batch embed"}}
    options["lowerings"] = ("shard_map",)
    assert check(loss, x, **options).ok
    monkeypatch.setitem(registry._entries, "reduce_max", dataclasses.replace(right, rule=summed))
    with pytest.raises(CheckError, match="please report it"):
        check(loss, x, **options)


def test_float64_has_no_wider_dtype(monkeypatch):
    break_lowering(monkeypatch, lambda eqn, outs: [1.01 * o for o in outs] if eqn.primitive.name == "sin" else outs)
    with jax.enable_x64(True), pytest.raises(CheckError, match="there is no wider dtype") as caught:
        check(jnp.sin, np.ones((8, 4)), layout="batch: data", mesh="data=8", dims={"x": "batch _"})
    assert "first wrong op: sin" in str(caught.value)


def test_a_difference_that_vanishes_when_all_values_are_returned(state, x, monkeypatch):
    break_lowering(monkeypatch, scale_weight_gradient, when=lambda plan: len(plan.program.outputs) == 3)
    with pytest.raises(CheckError, match="the difference vanishes") as caught:
        check(jax.grad(loss), state["params"], x, layout="batch: data", mesh="data=8", dims=DIMS)
    assert caught.value.path == "w1"
    assert caught.value.source is None


def test_copies_that_differ_between_devices_are_seen():
    mesh = mp.mesh("data=2, idle=4")
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    parts = [jnp.full(2, float(i == 5)) for i in range(8)]
    placed = [jax.device_put(p, d) for p, d in zip(parts, mesh.devices.flat, strict=True)]
    found = list(copies(jax.make_array_from_single_device_arrays((4,), sharding, placed)))
    assert [c.tolist() for c in found] == [[0, 0, 0, 0], [0, 0, 1, 1]]


# -- the parts


def test_compare():
    f = np.float32
    a = np.array([1, np.nan, np.inf, 100], f)
    assert compare(a, a, 1e-5).ok
    assert compare(a + np.array([0, 0, 0, 5e-4], f), a, 1e-5).ok
    bad = compare(np.array([1, 2, np.inf, 100], f), a, 1e-5)
    assert not bad.ok
    assert bad.at == (1,)
    assert not compare(np.array([1, np.nan, -np.inf, 100], f), a, 1e-5).ok
    assert not compare(np.array([1e-9], f), np.array([0], f), 1e-5).ok
    assert compare(np.zeros((0, 3), f), np.zeros((0, 3), f), 1e-5).ok
    assert not compare(np.array([2**53 + 1]), np.array([2**53 + 2]), 1e-5).ok
    assert not compare(np.array([True]), np.array([False]), 1e-5).ok
    assert not compare(np.zeros(2, f), np.zeros(3, f), 1e-5).ok
    half = np.array([1.0, 2.0], jnp.bfloat16)
    assert compare(half, np.array([1.03, 2.0], jnp.bfloat16), 1e-5).ok
    assert not compare(2 * half, half, 1e-5).ok

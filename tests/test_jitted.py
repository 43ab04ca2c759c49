"""What ``mp.jit`` caches, by which keys and for how long, compared with ``jax.jit``."""

import contextlib
import copy
import gc
import weakref
from dataclasses import dataclass

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar._src.entry import jitted as module

HOW = {"mesh": "data=4, model=2", "layout": "batch: data", "dims": {"x": "batch _"}}
LOWERINGS = pytest.mark.parametrize("lowering", ["jit", "shard_map"])


def x():
    return jnp.arange(32.0).reshape(8, 4)


def step(fn, lowering, **options):
    return mp.jit(fn, **{**HOW, **options}, lowering=lowering)


# -- static arguments


@dataclass(frozen=True)
class Config:
    rate: float
    name: str = "sgd"


class Node:
    """A pytree node with an attribute that is no array, as a module's function or name is."""

    def __init__(self, w, scale):
        self.w, self.scale = w, scale


jax.tree_util.register_pytree_with_keys(
    Node,
    lambda n: (((jax.tree_util.GetAttrKey("w"), n.w), (jax.tree_util.GetAttrKey("scale"), n.scale)), None),
    lambda _, leaves: Node(*leaves),
)


def test_leaves_that_are_no_arrays_are_compared_by_type():
    run = step(lambda x, n: x.astype(int) * n.w * n.scale.rate, "shard_map")
    w = jnp.ones(4, int)
    for rate, dtype in ((1, jnp.int32), (1.0, jnp.float32), (True, jnp.int32)):
        assert run(x(), Node(w, Config(rate))).dtype == dtype, rate


def test_names_of_static_and_donated_arguments_may_go_into_kwargs():
    def fn(x, **options):
        return x * options["by"] + options.get("add", 0)

    run = step(fn, "shard_map", static_argnames="by", donate_argnames="add")
    np.testing.assert_array_equal(run(x(), by=2, add=x()), x() * 3)
    how = {"static_argnames": "by", "dims": {"args/0": "batch _"}}
    wrapped = step(lambda *args, **kwargs: fn(*args, **kwargs), "shard_map", **how)
    np.testing.assert_array_equal(wrapped(x(), by=2), x() * 2)


def test_static_and_donated_arguments_that_are_refused():
    for how in ({"static_argnums": 0, "donate_argnames": "x"}, {"static_argnames": "x", "donate_argnums": (0,)}):
        with pytest.raises(ValueError, match="intersect"):
            jax.jit(lambda x: x, **how)
        with pytest.raises(mp.errors.UnsupportedError, match="both static and donated"):
            step(lambda x: x, "shard_map", **how)


# -- the context of a call


@LOWERINGS
def test_the_size_of_an_outer_axis_is_part_of_the_key(lowering):
    run = step(lambda x: x.sum() / lax.axis_size("i") + lax.psum(x, "i").sum(), lowering)
    for n in (2, 4, 2):
        ones = jnp.ones((n, 8, 4))
        np.testing.assert_array_equal(jax.vmap(run, axis_name="i")(ones), np.full(n, 32 / n + 32 * n))
    with pytest.raises(mp.errors.UnsupportedError, match="`i` is not an axis"):
        run(x())


JAX_012 = jax.__version_info__ >= (0, 12)


@jax.custom_vjp
def square(x):
    """Whose gradient is three times its operand."""
    return x * x


square.defvjp(lambda x: (square(x), x), lambda x, g: (3 * g * x,))

COLLECTIVES = {
    "sum": lambda x: x.sum(),
    "lookup": lambda x: x[jnp.array([7, 0])].sum(),
    "scan": lambda x: jnp.cumsum(x, 0)[-1],
    "max": lambda x: x.max(0),
    "own axis": lambda x: lax.psum(x, "data").sum(0),
    "custom gradient": lambda x: square(x).sum(),
    "both": lambda x: jax.vmap(lambda r: lax.pmax(r, ("data", "j")), axis_name="j", out_axes=None)(x),
}


@pytest.mark.parametrize(
    ("what", "lowering"), [*covering.each(COLLECTIVES, ["shard_map", "jit"]), ("lookup", "shard_map"), ("sum", "jit")]
)
def test_an_outer_axis_with_the_name_of_a_mesh_axis(lowering, what):
    fn = COLLECTIVES[what]
    two = jnp.stack([x(), 3 * x()])
    run = step(fn, lowering)
    expected = jax.vmap(fn, axis_name="data")(two)
    np.testing.assert_array_equal(jax.vmap(run, axis_name="data")(two), expected)
    if what not in ("own axis", "both"):
        np.testing.assert_array_equal(run(x()), fn(x()))
        loss = lambda f: jax.grad(lambda a: (jax.vmap(f, axis_name="data")(a) ** 2).sum())  # noqa: E731
        if JAX_012 and what in (
            "lookup",
            "scan",
        ):  # JAX lowers a sharding over the axes' other names without the sharding
            with pytest.raises(jax.errors.JaxRuntimeError, match="sharding attribute"):
                loss(run)(two)
        else:
            np.testing.assert_allclose(loss(run)(two), loss(fn)(two))


OUTER = {
    "gather": lambda x: lax.all_gather(x, "i"),
    "gather, tiled": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "scatter": lambda x: lax.psum_scatter(x, "i", scatter_dimension=1),
    "scatter, tiled": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "exchange": lambda x: lax.all_to_all(x, "i", 0, 2),
    "exchange of one dim": lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True),
    "permute": lambda x: lax.ppermute(x, "i", [(n, (n + 1) % 4) for n in range(4)]),
}


@pytest.mark.parametrize(("what", "lowering"), covering.each(OUTER, ["shard_map", "jit"]))
def test_collectives_over_an_outer_axis(what, lowering):
    """Dims that they exchange are gathered; others stay sharded."""
    fn = lambda x: OUTER[what](x * 2) + 1  # noqa: E731
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4, 4, 8)))
    run = mp.jit(fn, mesh="x=2, y=2, z=2", layout="a: y; b: x; c: z", dims={"x": "a b c"}, lowering=lowering)
    np.testing.assert_allclose(jax.vmap(run, axis_name="i")(x), jax.vmap(fn, axis_name="i")(x), rtol=1e-6)


def test_matmuls_of_empty_arrays_over_axes_in_another_order():
    run = mp.jit(lambda x, w: x @ w, mesh="x=2, y=2, z=2", layout="d: z+y", dims={"x": "d _"}, lowering="jit")
    np.testing.assert_array_equal(run(jnp.ones((8, 0)), jnp.ones((0, 3))), np.zeros((8, 3)))


# -- arguments


@pytest.mark.parametrize(("lowering", "impl"), [("jit", "threefry2x32"), ("shard_map", "rbg")])
def test_typed_keys_are_moved_as_arrays_are(lowering, impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    other = mp.jit(lambda k: k, mesh="d=8", layout="n: d", dims={"k": "n"})(keys)
    alone = jax.device_put(keys, jax.devices()[3])
    draw = lambda ks: jax.vmap(jax.random.uniform)(ks)  # noqa: E731
    use = mp.jit(draw, mesh="data=4, model=2", layout="batch: data", dims={"ks": "batch"}, lowering=lowering)
    np.testing.assert_array_equal(use(other), draw(keys))
    with pytest.warns(mp.errors.ReshardedWarning, match=r"reshards `ks`: .* for ks, from 1 device to P\('data',\)"):
        np.testing.assert_array_equal(use(alone), draw(keys))
    np.testing.assert_array_equal(use(keys), draw(keys))


def spread(spec, name="x", count=8):
    """A matrix of 64 × 64 over ``count`` devices."""
    mesh = mp.mesh({name: count}, devices=jax.devices()[:count])
    return jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("given", "source", "received"),
    [
        (lambda: spread(jax.P("x")), "P('x',)", 64 * 8 * 4 * 7 // 8),  # of [64, 8] a device has 8 rows
        # devices 4–7 have nothing
        (lambda: spread(jax.P(None, "y"), "y", 4), "P(None, 'y') on other devices", 64 * 8 * 4),
        (lambda: jax.device_put(jnp.ones((64, 64)), jax.devices()[3]), "1 device", 64 * 8 * 4),
        (lambda: spread(jax.P(None, "y"), "y"), None, 0),  # the same shards under another name
        (lambda: spread(jax.P()), None, 0),  # a local slice
        (lambda: jnp.ones((64, 64)), None, 0),  # on no device by choice
        (lambda: np.ones((64, 64), np.float32), None, 0),
    ],
)
@LOWERINGS
def test_arguments_that_every_call_reshards(lowering, given, source, received):
    """The plan has their bytes; the second call warns once, with a fix that works."""
    f = mp.jit(lambda p, v: v @ p["w"], mesh="x=8", layout="mlp: x", dims={"p/w": "embed mlp"}, lowering=lowering)
    p, v = {"w": given()}, jnp.ones((2, 64))
    plan = f.plan(p, v)
    assert [(a.path, a.source, a.bytes) for a in plan.arrivals] == [("p/w", source, received)] * bool(received)
    assert plan.bytes_sent == 0
    assert ("before the step" in str(plan)) == bool(received)
    f(p, v)
    warns = pytest.warns(mp.errors.ReshardedWarning, match=r"p = step.put\(p=p\)")
    with warns if received else contextlib.nullcontext():
        f(p, v)
    for moved in (p, f.put(p=p)):  # once
        np.testing.assert_array_equal(f(moved, v), np.full((2, 64), 64.0))
    assert not f.plan(f.put(p=p), v).arrivals


def test_an_argument_that_one_call_reshards_is_no_reason_to_warn():
    f = mp.jit(lambda w: w * 2, mesh="x=8", layout="mlp: x", dims={"w": "embed mlp"})
    f(f(f(spread(jax.P("x")))))
    plan = mp.plan(lambda w: w * 2, spread(jax.P("x")), mesh="x=16", layout="mlp: x", dims={"w": "embed mlp"})
    assert not plan.arrivals  # the plan is for other devices


@LOWERINGS
def test_arrays_of_64_bits_made_under_x64(lowering):
    with jax.enable_x64(True):
        wide = jnp.arange(32.0, dtype=jnp.float64).reshape(8, 4)
    run = step(lambda x: x * 2, lowering)
    for given in (wide, x(), wide):
        out = run(given)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out, 2 * x())
    with jax.enable_x64(True):
        assert run(wide).dtype == jnp.float64


def test_a_number_and_a_weakly_typed_scalar_share_a_program():
    traces = []
    run = step(lambda x, s: traces.append(0) or x * s, "shard_map")
    for scale in (2.0, jnp.asarray(3.0), 4.0):
        np.testing.assert_array_equal(run(x().astype(jnp.float16), scale), x() * scale)
    assert len(traces) == 1
    assert run(x().astype(jnp.float16), jnp.float32(2)).dtype == jnp.float32
    assert len(traces) == 2


def test_names_of_arguments_may_be_self_or_equal():
    run = mp.jit(lambda **k: k["self"] * 2, mesh="data=4, model=2", layout="")
    np.testing.assert_array_equal(run(self=x()), 2 * x())
    assert run.plan(self=x()).inputs[0].path == "self"
    assert run.eval_shape(self=x()).shape == (8, 4)
    run = mp.jit(lambda x, /, **k: x * k["x"], mesh="data=8", layout="")
    np.testing.assert_array_equal(run(x(), x=2), 2 * x())


# -- what a function keeps alive

FUNCTIONS = {
    "plain": lambda big: lambda x: x + big,
    "loop": lambda big: lambda x: lax.fori_loop(0, 3, lambda i, c: c + big, x),
    "matmul": lambda big: lambda x: x @ big.T,
}


@pytest.mark.parametrize(
    ("lowering", "what", "use"), covering.each(["shard_map", "jit"], FUNCTIONS, ["call", "grad", "plan", "lower"])
)
def test_nothing_outlives_its_use(lowering, what, use):
    """Arguments are freed with the last reference of the caller, a function and its closure with the function: without the
    garbage collector, as from ``jax.jit``. Since JAX 0.12 a jaxpr holds the arrays that the function closes over, and the ops of a
    program, which refer to its values and these to them, hold the jaxpr: the arrays are freed by the collector."""
    gc.freeze()  # the collector looks at objects of this test only
    gc.disable()
    try:
        big, given = jnp.ones((8, 4)) * 3, jnp.ones((8, 4))
        fn = FUNCTIONS[what](big)
        run = step(fn, lowering)
        argument, *rest = (weakref.ref(o) for o in (given, fn, big))
        if use == "call":
            run(given)
        elif use == "grad":
            jax.grad(lambda a: run(a).sum())(given)  # noqa: F821
        elif use == "plan":
            assert run.plan(given).memory.peak
        else:
            run.lower(given)
        del given
        assert argument() is None
        assert None not in [r() for r in rest]
        del fn, big, run
        if JAX_012:
            gc.collect()
        assert [r() for r in rest] == [None, None]
    finally:
        gc.enable()
        gc.unfreeze()


def test_caches_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_CALLS", 3)
    traces = []
    run = step(lambda x, s: traces.append(s) or x * s, "shard_map", static_argnames="s")
    for s in range(5):
        np.testing.assert_array_equal(run(x(), s), x() * s)
    assert [len(c) for c in (run._caches.programs, run._caches.plans, run._caches.compiled)] == [3, 3, 3]
    for s in (2, 3, 4):
        run(x(), s)
    assert traces == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(run(x(), 0), 0 * x())
    assert traces == [0, 1, 2, 3, 4, 0]


@LOWERINGS
def test_a_called_function_can_be_copied(lowering):
    run = step(lambda x: x * 2, lowering)
    first = run(x())
    for other in (copy.copy(run), copy.deepcopy(run), copy.deepcopy({"a": [run]})["a"][0]):
        np.testing.assert_array_equal(other(x()), first)
        assert (other.lowering, str(other.layout)) == (lowering, str(run.layout))


# -- modes of JAX, effects, mutable arrays


@LOWERINGS
def test_mutable_arrays_inside_a_step(lowering):
    def fn(x):
        r = jax.new_ref(x)
        r[0] = r[1] * 2

        @jax.jit
        def write(i, row):
            r[i] += row

        lax.fori_loop(2, 4, lambda i, c: write(i, x[i] + c) or c, 1.0)
        return jax.nn.relu(r[...] - 5)

    run = step(fn, lowering)
    np.testing.assert_array_equal(run(x()), jax.jit(fn)(x()))
    np.testing.assert_array_equal(jax.grad(lambda a: run(a).sum())(x()), jax.grad(lambda a: fn(a).sum())(x()))


def test_mutable_arrays_of_the_caller_are_refused():
    ref = jax.new_ref(x())
    with pytest.raises(mp.errors.UnsupportedError, match=r"(?s)x: a mutable array \(jax.Ref\).*fix .*ref\[\.\.\.\]"):
        step(lambda x: x[...] * 2, "shard_map")(ref)
    with pytest.raises(mp.errors.UnsupportedError, match=r"(?s)closes over a mutable array.*fix"):
        step(lambda x: x + ref[...], "shard_map")(x())


@LOWERINGS
def test_ordered_effects_are_refused_with_the_line(lowering):
    def fn(x):
        return lax.cond(x[0, 0] > 0, lambda: jax.debug.print("{}", x.sum(), ordered=True) or x, lambda: x)

    with pytest.raises(mp.errors.UnsupportedError, match=r"(?s)ordered=True.*test_jitted.py:\d+.*fix .*ordered"):
        step(fn, lowering)(x())
    one = mp.jit(fn, mesh="data=1", layout="batch: data", dims={"x": "batch _"}, lowering=lowering)
    np.testing.assert_array_equal(one(x()), x())


# -- donation


@LOWERINGS
def test_unused_arguments_of_any_kind_are_left_out(lowering):
    def fn(x, key, n):
        return x * 2

    run = step(fn, lowering)
    key = jax.random.split(jax.random.key(0), 3)
    for f in (jax.jit(fn), run):
        main = next(line for line in f.lower(x(), key, 3).as_text().splitlines() if "@main" in line)
        assert main.count("%arg") == 1
    primal, tangent = jax.jvp(lambda a, b: run(a, key, b), (x(), 1.5), (x(), 2.5))
    np.testing.assert_array_equal(primal, 2 * x())
    np.testing.assert_array_equal(tangent, 2 * x())


# -- names, attributes, types of results


def test_eval_shape_has_weak_types():
    def fn(x, s):
        return x * s, s + 1, jnp.asarray(s, jnp.float32)

    got, expected = (f.eval_shape(x(), 2.0) for f in (step(fn, "shard_map"), jax.jit(fn)))
    assert [(s.shape, s.dtype, s.weak_type) for s in got] == [(s.shape, s.dtype, s.weak_type) for s in expected]
    with pytest.raises(mp.errors.UnsupportedError, match="must have a hash"):
        step(fn, "shard_map", static_argnums=1).eval_shape(x(), [2.0])


@pytest.mark.parametrize(("where", "devices"), [({}, 4), ({"mesh": "data=2"}, 2), ({"mesh": "data=2, model=4"}, 8)])
def test_compile_is_for_the_mesh_of_the_call_or_of_the_object(where, devices, monkeypatch):
    monkeypatch.setattr(module, "compile_lowered", lambda lowered, **options: (lowered, options))
    fn = mp.jit(lambda x: x * 2, mesh="data=4", layout="batch: data", dims={"x": "batch _"})
    lowered, options = fn.compile(jax.ShapeDtypeStruct((8, 4), jnp.float32), **where)
    assert options["mesh"].size == options["plan"].mesh.size == devices
    assert f"mhlo.num_partitions = {devices} " in lowered.as_text()

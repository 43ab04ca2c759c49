"""The shard_map lowering: the same numbers as the unsharded run, and exactly the collectives that the plan lists."""

import contextlib
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import planned_transformer
import pytest
from arrays import weights
from dependencies import bodies
from jax import lax
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from lowered import MESHES, assert_sends_the_plan, group_of, jaxpr_of, lowered, of_kind, same, sent_by
from same_results import assert_close

import meshpar as mp
from meshpar._src.lower import LOWERINGS, shard_map
from meshpar._src.rules.mesh_in_shard_map import Grid
from meshpar.errors import UnsupportedError

RNG = np.random.default_rng(0)


normal = functools.partial(weights, RNG)


# -- what is sent


@pytest.mark.parametrize("layout", planned_transformer.LAYOUTS)
def test_sends_what_the_plan_lists_kind_by_kind_and_byte_by_byte(layout):
    model = planned_transformer
    step = functools.partial(model.train_step, rename=layout == "seq: data")
    plan = assert_sends_the_plan(step, model.STATE, model.TOKENS, layout=layout, dims=model.DIMS)
    assert plan.collectives


# -- ops


X, W, V = normal(8, 16), normal(16, 32), normal(32, 16)
DIMS = {"x": "batch embed", "w": "embed mlp", "v": "mlp embed"}
LAYOUTS = ["batch: data; mlp: model; embed: data", "batch: data; embed: model"]


def reductions(x, w, v):
    del w, v
    bits = (x * 100).astype(np.int32)
    return (
        x.sum(0), x.mean(1), x.std(), x.max(0), x.min(1), x.argmax(1), x.prod(0), (x > 0).any(0), (x > 0).all(1),
        lax.reduce_and_p.bind(bits, axes=(0,)), jax.nn.softmax(x), jax.nn.logsumexp(x, 0),
    )  # fmt: skip


def shapes(x, w, v):
    del w, v
    return (
        x.reshape(4, 2, 16), x.reshape(-1), x.reshape(16, 8), x.T, x[:, 3:], x[1:-1, :8], x[::2], jnp.pad(x, 1),
        jnp.concatenate([x, 2 * x], 1), jnp.tile(x, (2, 1)), jnp.roll(x, 3, 1), x[::-1], jnp.cumsum(x, 1),
        jnp.sort(x, 0), lax.top_k(x, 3), lax.associative_scan(jnp.add, x, axis=1), x.sum(0).reshape(4, 4).T * 0.5,
        lax.dynamic_update_slice(x, x[:2] * 2, (3, 0)), lax.dynamic_slice(x, (x.argmax(), 0), (2, 16)),
    )  # fmt: skip


def generated(x, w, v):
    del w, v
    mask = jnp.tril(jnp.ones((8, 16), bool))
    return jnp.where(mask, x, 0), x + jnp.arange(16), mask.sum(0) + x, jnp.arange(8), jnp.eye(8), 3.0


def random(x, w, v):
    del w, v
    keys = jax.random.split(jax.random.key(2), 8)
    return (
        x + jax.random.normal(jax.random.key(0), x.shape),
        jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0),
        x.astype(jnp.bfloat16) * jax.random.uniform(jax.random.key(1), x.shape, jnp.bfloat16),
        x * jax.random.normal(jax.random.key(0, impl="rbg"), x.shape),
        jax.vmap(lambda k, row: row * jax.random.uniform(k, row.shape))(keys, x),
        keys,
    )


def loops(x, w, v):
    def layer(y, _):
        return jnp.tanh(y @ w) @ v, (y.sum(), y)

    def microbatch(g, part):
        loss, one = jax.value_and_grad(lambda w: ((jnp.tanh(part @ w) @ v) ** 2).mean())(w)
        return g + one, loss

    def layers(x):
        return lax.scan(jax.checkpoint(layer), x, None, length=3)

    literal = lax.scan(lambda c, y: ((0.0, c[1] + 1, jnp.zeros(16)), (y, 1.0, c[0])), (1.0, 0, jnp.ones(16)), x)
    return (
        layers(x), jax.grad(lambda x: (layers(x)[0] ** 2).sum())(x),
        lax.scan(microbatch, jnp.zeros_like(w), x.reshape(2, 4, 16)), literal,
        lax.scan(lambda c, y: (c * 0.5 + y, c), jnp.zeros(16), x, reverse=True),
        lax.while_loop(lambda s: (s[0] < 3) & (abs(s[1]).sum() > 0), lambda s: (s[0] + 1, jnp.tanh(s[1] @ w) @ v), (0, x)),
        lax.cond(x[0, 0] > 9, lambda y: (y @ w @ v, 1.0), lambda y: (y * 2, 0.0), x),
    )  # fmt: skip


def calls(x, w, v):
    block = jax.checkpoint(lambda w, v, x: jnp.tanh(x @ w) @ v)
    saved = jax.checkpoint(lambda x: jnp.tanh(x @ w) @ v, policy=jax.checkpoint_policies.dots_saveable)

    @jax.custom_vjp
    def own(x):
        return x @ w

    own.defvjp(lambda x: (x @ w, x), lambda r, g: (g @ w.T,))
    gram = x.T @ x
    return (
        jax.grad(lambda p: (block(*p, block(*p, x)) ** 2).mean())((w, v)),
        jax.grad(lambda x: saved(x).sum())(x),
        jax.checkpoint(lambda x: (x @ w, jnp.arange(16.0)))(x),
        jax.grad(lambda x: (own(x) ** 2).sum())(x),
        jax.jit(lambda x: jax.nn.silu(x @ w))(x),
        jax.grad(lambda w: (jax.checkpoint(jnp.matmul)(gram, w) ** 2).sum())(w),
    )


@pytest.mark.parametrize("fn", [random, loops, calls])
def test_ops(fn):
    """In three programs: both layouts, and one of them in the other lowering; other ops: `tests/rules/test_rules.py`."""
    layouts = [layout.replace("mlp: model; ", "") for layout in LAYOUTS] if fn is random else LAYOUTS
    options = {"dims": DIMS, "meshes": MESHES[1:], "tolerance": 5e-6}
    same(fn, X, W, V, layout=layouts[0], lowerings=("shard_map", "jit"), **options)
    same(fn, X, W, V, layout=layouts[1], **options)


@pytest.mark.parametrize("fn", [reductions, shapes, generated, random, calls])
def test_ops_send_what_the_plan_lists(fn):
    for layout in LAYOUTS:
        assert_sends_the_plan(fn, X, W, V, layout=layout, dims=DIMS, mesh="data=2, model=4")


def test_random_bits_are_made_where_they_are_used():
    def step(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    text = str(lowered(step, X, layout="batch: data; embed: model", dims={"x": DIMS["x"]})[1])
    assert "threefry2x32" in text
    assert "random_bits" not in text
    assert "u32[8,16]" not in text


def test_an_op_without_a_rule_is_replicated():
    def step(x):
        return jnp.linalg.lstsq(x, x[:, 0])[0]

    same(step, X, layout="batch: data", dims={"x": DIMS["x"]}, meshes=MESHES[1:], tolerance=1e-4)


def test_what_cannot_run_inside_shard_map_says_so():
    mesh = mp.mesh("data=2, model=4")

    @custom_partitioning
    def twice(x):
        return x * 2

    twice.def_partition(lambda mesh, ins, out: (mesh, twice, ins, out), sharding_rule="i j -> i j")
    step = lambda x: twice(x)  # noqa: E731
    plan = mp.plan(step, X, mesh=mesh, layout="batch: data", dims={"x": DIMS["x"]}, lowering="shard_map")
    with pytest.raises(UnsupportedError, match="custom_partitioning has no factor rule") as caught:
        LOWERINGS["shard_map"](plan, mesh)
    assert "test_shard_map.py" in caught.value.source
    assert 'lowering="jit"' in caught.value.fixes[0]


# -- an axis that runs along several torus dimensions


@pytest.mark.parametrize(("algorithm", "topology"), [("staged", "v4:2x2x2"), ("hierarchical", "2x v5p:2x2x1")])
def test_scatters_are_made_as_the_plan_says(algorithm, topology):
    """Over one torus dimension after the other, inside slices before it crosses them; the user's mesh stays."""

    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["w"]) @ p["v"]).sum())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    args = {"w": normal(64, 2048), "v": normal(2048, 64)}, normal(16, 64)
    dims = {"p/w": "embed mlp", "p/v": "mlp embed", "x": "batch embed"}
    plan = mp.plan(
        step, *args, mesh="data=8", topology=topology, layout="batch: data; embed: data", dims=dims,
        lowering="shard_map", overlap="off",
    )  # fmt: skip
    assert {c.algorithm for c in plan.collectives if c.op == "reduce-scatter"} == {algorithm}
    assert {c.algorithm for c in plan.collectives if c.op != "reduce-scatter"} == {"native"}

    mesh = mp.mesh("data=8")  # of CPUs, which have no torus
    run, ins, outs = LOWERINGS["shard_map"](plan, mesh)
    got = jax.jit(run, in_shardings=ins, out_shardings=outs)(*jax.tree.leaves(args))
    assert_close(got, jax.jit(step)(*args), 1e-5, 1e-5)
    assert {s.mesh for s in outs} == {mesh}

    sizes = {"data": 8, **{f"data.{k}": s.size for k, s in enumerate(plan.torus["data"])}}
    jaxpr = jaxpr_of(plan, mesh)
    scatters = of_kind(jaxpr, "reduce_scatter")
    assert [group_of(eqn, sizes) for eqn in scatters] == [2, 2, 2] * 2
    sent = sum(b * n for (kind, b), n in sent_by(jaxpr, sizes).items() if kind == "reduce-scatter")
    assert sent == sum(c.total_bytes for c in plan.collectives if c.op == "reduce-scatter")
    order = {"staged": "012", "hierarchical": "120"}[algorithm]
    assert ["".join(eqn.params["axis_name"])[-1] for eqn in scatters] == [*order] * 2


# -- callbacks


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_callbacks_are_given_full_arrays_and_effects_happen_once(lowering):
    seen = []

    def step(x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")
        jax.debug.callback(lambda a: seen.append(np.array(a)), x)
        io_callback(lambda a: seen.append(np.array(a)), None, x)
        return y.sum(0)

    run = mp.jit(step, mesh=MESHES[0], layout=LAYOUTS[1], dims={"x": DIMS["x"]}, lowering=lowering)
    np.testing.assert_allclose(run(X), np.sin(X).sum(0), rtol=1e-5)
    jax.effects_barrier()
    assert len(seen) == 2
    assert all(np.array_equal(a, X) for a in seen)
    causes = [c.cause for c in run.plan(X).collectives]
    assert any("pure_callback needs all of `batch`, which `batch: data` splits" in c for c in causes)


@pytest.mark.parametrize(
    ("transform", "lowering"), [(jnp.fft.fft, "jit"), (lambda x: jnp.fft.rfft2(x, axes=(-2, -1)), "shard_map")]
)
def test_a_transform_of_shards_with_one_row(transform, lowering):
    def gradient(x):
        def loss(x):
            y = jnp.abs(transform(jnp.split(x, 2, 1)[1]) + 1.5j)
            return (y * jnp.arange(y.size).reshape(y.shape)).sum()

        return jax.grad(loss)(x)

    x = RNG.normal(size=(8, 4, 5, 3)).astype(np.float32)
    with jax.enable_x64(True):
        expected = np.asarray(gradient(x.astype(np.float64)))
    found = mp.jit(gradient, mesh="data=4, model=2", layout="c: model", dims={"x": "_ c _ _"}, lowering=lowering)(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# -- sharding constraints on local arrays


def attention_gradient(w, x):
    """Plain attention with materialized scores, and a loss of all positions but the last."""

    def loss(w):
        q, k = jnp.einsum("bsd,dh->bsh", x, w["q"]), jnp.einsum("bsd,dh->bsh", x, w["k"])
        p = jax.nn.softmax(jnp.einsum("bqh,bkh->bqk", q, k) * 0.5, -1)
        y = jnp.swapaxes(jnp.einsum("bqk,bkh->bhq", p, k), 1, 2)
        return (y[:, :-1] ** 2).mean()

    return jax.grad(loss)(w)


ATTENTION = {"w/*": "embed head", "x": "batch seq embed"}


@pytest.fixture
def accelerators(monkeypatch):
    """Lower as for TPUs and GPUs: on CPUs there are no constraints."""

    class Accelerators(Grid):
        def __init__(self, sizes, torus, cpu=False, *rest):
            super().__init__(sizes, torus, False, *rest)

    monkeypatch.setattr(shard_map, "Grid", Accelerators)


def test_the_lowerings_constrain_the_results_of_the_same_ops(accelerators):
    """XLA moves transposes and slices through what has no constraint."""
    args = {"q": weights(RNG, 8, 4), "k": weights(RNG, 8, 4)}, weights(RNG, 8, 6, 8)
    mesh = mp.mesh("data=8")
    plan = mp.plan(attention_gradient, *args, mesh=mesh, layout="batch: data", dims=ATTENTION, lowering="shard_map")

    def constrained(lowering):
        run, _, _ = LOWERINGS[lowering](plan, mesh)
        inputs = [jax.ShapeDtypeStruct(v.shape, v.aval.dtype) for v in plan.program.inputs]
        found = Counter()
        for body in bodies(jax.make_jaxpr(run)(*inputs).jaxpr):
            makers = {v: e.primitive.name for e in body.eqns for v in e.outvars}
            constraints = ("sharding_constraint", "local_constraint")
            kinds = [makers.get(e.invars[0]) for e in body.eqns if e.primitive.name in constraints]
            found.update(k for k in kinds if k in ("dot_general", "slice", "pad", "reduce_max", "reduce_sum"))
        return found

    ours, theirs = constrained("shard_map"), constrained("jit")
    del theirs["dot_general"]  # weights' gradients, which are all-reduced
    assert {"slice", "pad", "reduce_max", "reduce_sum"} <= set(theirs)
    assert ours["dot_general"] > 4
    assert {k: n for k, n in ours.items() if k in theirs} == theirs


@pytest.mark.parametrize("transform", ["vmap", "grad", "set_mesh"])
def test_constraints_change_no_number(transform, accelerators):
    w, x = {"q": weights(RNG, 8, 4), "k": weights(RNG, 8, 4)}, weights(RNG, 8, 6, 8)
    options = {"mesh": "data=4, model=2", "layout": "batch: data; head: model", "dims": ATTENTION}
    run = mp.jit(attention_gradient, lowering="shard_map", **options)
    changed = {
        "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])),
        "grad": lambda f: jax.grad(lambda w, x: sum(jnp.sum(g**2) for g in f(w, x).values())),
        "set_mesh": lambda f: f,
    }[transform]
    context = jax.set_mesh(mp.mesh("data=4, model=2")) if transform == "set_mesh" else contextlib.nullcontext()
    with context:
        got = jax.jit(changed(run))(w, x)
    assert_close(got, jax.jit(changed(attention_gradient))(w, x), 2e-4, 1e-6)
    assert of_kind(jax.make_jaxpr(run)(w, x).jaxpr, "local_constraint")

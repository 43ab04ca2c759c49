"""Kernels with a declared rule: the notation, and equal numbers under every layout and both lowerings."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

import meshpar as mp
from meshpar._src.program.kernels import parse_rule
from meshpar.errors import LayoutSyntaxError, RankError, UnsupportedError


def test_notation():
    rule = parse_rule("batch (kv_heads group) seq! d!, batch kv_heads seq d -> batch (kv_heads group) seq d")
    assert rule.ins == (
        (("batch",), ("kv_heads", "group"), ("seq",), ("d",)),
        (("batch",), ("kv_heads",), ("seq",), ("d",)),
    )
    assert [rule.kind(f) for f in ("batch", "group", "seq")] == ["pass_through", "pass_through", "need_replication"]
    assert parse_rule("m k, k n -> m n").kind("k") == "sum"
    assert parse_rule("tokens~ e -> tokens e").kind("tokens") == "permutation"
    assert parse_rule("batch _ _ -> _! batch").ins == ((("batch",), (), ()),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a b", "no `->`"),
        ("a a -> a", "`a` occurs twice"),
        ("a! , a~ -> a", "marked in two ways"),
        ("a-b -> c", "'a-b' is not a dim"),
        ("(a _) -> a", "'_' is not a dim"),
        ("_~ -> a", "'_~' is not a dim"),
        ("tokens~ -> tokens", "`tokens~` needs `local=`"),
    ],
)
def test_text_that_is_no_rule(text, says):
    with pytest.raises(LayoutSyntaxError) as error:
        mp.kernel_rule(text)
    assert says in str(error.value)


def test_operands_that_do_not_fit():
    @mp.kernel_rule("m k, k n -> m n")
    def product(x, w):
        return x @ w

    with pytest.raises(RankError, match="3 operands"):
        product(jnp.ones((2, 3)), jnp.ones((3, 2)), 1.0)
    with pytest.raises(RankError, match="array of rank 1"):
        product(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(UnsupportedError, match="a dim of size 4 is not `k`"):
        product(jnp.ones((2, 3)), jnp.ones((4, 2)))
    with pytest.raises(UnsupportedError, match="a dim of size 6 is not `m k`"):
        mp.kernel_rule("(m k) -> (m k)")(jnp.sin)(jnp.ones(6))

    @mp.kernel_rule("m k, k n -> m n, m")
    def too_few(x, w):
        return x @ w

    with pytest.raises(RankError, match="1 results"):
        too_few(jnp.ones((2, 3)), jnp.ones((3, 2)))


@mp.kernel_rule("tokens embed, embed mlp -> tokens mlp")
def product(x, w):
    return x @ w


def _experts(x, up, down):
    return jnp.einsum("xtf,xfe->te", jnp.tanh(jnp.einsum("te,xef->xtf", x, up)), down)


def _experts_local(x, up, down, *, axes):
    tokens, expert = axes["tokens"], axes["expert"]
    x = lax.all_gather(x, tokens, axis=0, tiled=True) if tokens else x
    y = _experts(x, up, down)
    y = lax.psum(y, expert) if expert else y
    if not tokens:
        return y
    n = y.shape[0] // lax.axis_size(tokens)
    return lax.dynamic_slice_in_dim(y, lax.axis_index(tokens) * n, n, 0)


def _experts_send(avals, parts):
    x = avals[0]
    whole = (x.shape[0] * parts["tokens"], x.shape[1])
    return [
        mp.types.KernelSend("all-gather", ("tokens",), x.shape, x.dtype, "all tokens"),
        mp.types.KernelSend("all-reduce", ("expert",), whole, x.dtype, "sums over experts"),
    ]


experts = mp.kernel_rule(
    "tokens~ embed!, expert~ embed! mlp!, expert~ mlp! embed! -> tokens~ embed!",
    local=_experts_local,
    sends=_experts_send,
)(_experts)


def step(p, x):
    def loss(p):
        return jnp.square(experts(product(x, p["w"]), p["up"], p["down"])).mean()

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value


DIMS = {"p/w": "in embed", "p/up": "expert embed mlp", "p/down": "expert mlp embed", "x": "tokens in"}


@pytest.fixture(scope="module")
def case():
    r = np.random.default_rng(0)
    shapes = {"w": (8, 16), "up": (8, 16, 4), "down": (8, 4, 16)}
    p = {k: r.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    x = r.normal(size=(32, 8)).astype(np.float32)
    return p, x, jax.jit(step)(p, x)


@pytest.mark.parametrize(
    ("layout", "lowering"),
    [
        ("tokens: data; expert: data+model", "jit"),
        ("expert: model; embed: data; tokens: data", "jit"),
        ("tokens: data+model; expert: model+data", "shard_map"),
        ("mlp: data; in: model; tokens: data", "shard_map"),
    ],
)
def test_no_layout_changes_a_number(case, layout, lowering):
    p, x, want = case
    got = mp.jit(step, mesh=mp.mesh("data=4, model=2"), layout=layout, dims=DIMS, lowering=lowering)(p, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_plan_lists_what_the_local_function_sends(case):
    p, x, _ = case
    plan = mp.plan(step, p, x, mesh=mp.mesh("data=4, model=2"), layout="tokens: data; expert: data", dims=DIMS)
    mine = [c for c in plan.collectives if c.tensor.startswith("_experts")]
    # forward, forward again in the backward pass, and its transposes
    assert [(c.op, c.axes, c.bytes) for c in mine[:2]] == [
        ("all-gather", ("data",), 8 * 16 * 4 * 4 * 3 / 4),
        ("all-reduce", ("data",), 2 * 32 * 16 * 4 * 3 / 4),
    ]
    assert [c.op for c in mine[2:]] == ["all-gather", "all-reduce", "reduce-scatter", "all-reduce"]
    assert "sums over experts" in mine[1].cause


def test_vmap_and_static_arguments():
    @mp.kernel_rule("m k, k n -> m n")
    def scaled(x, w, *, by):
        return by * (x @ w)

    x, w = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4), np.ones((4, 5), np.float32)
    np.testing.assert_allclose(jax.vmap(lambda a: scaled(a, w, by=3.0))(x), 3 * x @ w)
    g = jax.grad(lambda a: jax.vmap(lambda b: scaled(b, w, by=3.0))(a).sum())(x)
    np.testing.assert_allclose(g, np.full_like(x, 15.0))
    how = {"mesh": "data=2", "layout": "rows: data", "dims": {"a": "rows m k"}, "lowering": "shard_map"}
    np.testing.assert_allclose(mp.jit(lambda a: jax.vmap(lambda b: scaled(b, w, by=2.0))(a), **how)(x), 2 * x @ w)


@pytest.mark.parametrize(
    ("rule", "lowering"), [("batch _ _ -> batch _ _", "jit"), ("batch seq! _ -> batch seq _", "shard_map")]
)
def test_a_dim_without_a_name_is_never_split(rule, lowering):
    """The norm of all dims but the first, and its gradient, where the layout splits each of them."""
    axes = tuple(range(1, len(rule.split("->")[0].split())))

    def norm(x):
        return x / jnp.sqrt((x * x).sum(axes, keepdims=True))

    def with_gradient(norm, x):
        return norm(x), jax.grad(lambda x: (norm(x) * jnp.cos(x)).sum())(x)

    x = np.random.default_rng(0).normal(size=(4, 6, 8)[: len(axes) + 1]).astype(np.float32)
    want, step = with_gradient(norm, x), functools.partial(with_gradient, mp.kernel_rule(rule)(norm))
    for layout in ("batch: data; seq: model; embed?: model", "batch: model; seq: data; embed?: data"):
        dims = {"x": "batch seq embed"[: None if len(axes) == 2 else 9]}
        got = mp.jit(step, mesh="data=2, model=2", layout=layout, dims=dims, lowering=lowering)(x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def counted(traces):
    @mp.kernel_rule("m k, k n -> m n")
    def product(x, w):
        traces.append(x.shape)
        return x @ w

    return product


def test_an_eager_kernel_is_compiled_once():
    traces: list[tuple[int, ...]] = []
    product = counted(traces)
    x = jnp.ones((4, 4))
    for call in (product, jax.grad(lambda x, w: product(x, w).sum())):
        call(x, x)
        before = len(traces)
        for _ in range(3):
            call(x, x)
        assert len(traces) == before


def test_a_kernel_dies_with_its_function(few_objects):
    product = counted([])
    arrays = np.ones((4, 4), np.float32)
    kernel = weakref.ref(jax.make_jaxpr(product)(arrays, arrays).eqns[0].params["call_jaxpr"].eqns[0].params["kernel"])
    product(arrays, arrays)
    jax.grad(lambda x, product=product: product(x, arrays).sum())(arrays)
    mp.plan(product, arrays, arrays, mesh="data=2", layout="", dims={"x": "m k"})
    assert kernel() is not None
    del product
    jax.clear_caches()  # what JAX itself has traced
    gc.collect()
    assert kernel() is None


@mp.kernel_rule("a b -> a b")
def _doubled(x):
    """An op with custom partitioning inside, as cuDNN's attention is."""

    @custom_partitioning
    def double(x):
        return 2 * x

    double.def_partition(
        partition=lambda mesh, args, result: (mesh, lambda x: 2 * x, result.sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="a b -> a b",
    )
    return double(x)


def test_a_kernel_with_custom_partitioning_runs_under_plain_jit():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(_doubled)(x), 2 * np.asarray(x))
    np.testing.assert_array_equal(
        jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: _doubled(x), x))(x), 4 * np.asarray(x)
    )


def rows_over_sum(x):
    """A kernel that needs all of its last dim: each row of x over its sum."""
    from jax.experimental import pallas as pl

    def body(x, y):
        y[...] = x[...] / x[...].sum(-1, keepdims=True)

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_a_kernel_without_a_rule_runs_on_gathered_operands_with_a_warning(lowering):
    x = np.random.default_rng(0).uniform(0.5, 2, (16, 32)).astype(np.float32)
    options = {"mesh": "data=4, model=2", "layout": "batch: data; embed: model", "dims": {"x": "batch embed"}}

    def step(kernel):
        return mp.jit(lambda x: jnp.log(kernel(x * 3)), lowering=lowering, **options)

    sent = 3 / 4 * x.nbytes / 2 + x.nbytes / 2  # rows over `data`, then columns over `model`
    with pytest.warns(mp.errors.ReplicatedWarning, match="pallas_call has no factor rule") as caught:
        plan = step(rows_over_sum).plan(x)
    assert plan.bytes_sent == sent
    (text,) = (str(w.message) for w in caught)
    assert "1.79 kB sent by each device" in text
    assert "test_kernels.py" in text
    assert "`!` marks a dim that may not" in text
    with pytest.warns(mp.errors.ReplicatedWarning):
        got = step(rows_over_sum)(x)
    np.testing.assert_allclose(got, np.log(x / x.sum(-1, keepdims=True)), rtol=1e-5, atol=1e-5)
    ruled = mp.kernel_rule(text.partition('mp.kernel_rule("')[2].partition('"')[0])(rows_over_sum)
    better = step(ruled)  # the rule that the warning proposes is right: only columns are gathered
    np.testing.assert_allclose(better(x), got, rtol=1e-6)
    assert 0 < better.plan(x).bytes_sent < sent / 4
    alone = mp.jit(rows_over_sum, mesh="data=4", layout="embed?: data", dims={"x": "batch _"}, lowering=lowering)
    alone(x)  # no warning

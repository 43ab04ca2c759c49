"""``mp.layers.attention``: no layout changes a number, and the compiled program sends what the plan lists."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_results import assert_close

import meshpar as mp
from meshpar._src.hardware.topology import described_mesh
from meshpar._src.layers import attention as layer
from meshpar._src.lower import lower_to_jit, lower_to_shard_map
from meshpar._src.verify.hlo import collectives
from meshpar._src.verify.prove.claims import equations
from meshpar_kernels import zigzag

RNG = np.random.default_rng(0)
KEYS = "batch seq kv_heads head_dim"
DIMS = {"q": "batch seq heads head_dim", "k": KEYS, "v": KEYS, "ids": "batch seq"}
CONTEXT = "batch: data; seq: context"


@pytest.fixture(scope="module")
def grid():
    return mp.mesh("data=2, context=4")


def arrays(batch=2, seq=32, heads=8, kv_heads=4):
    shapes = ((batch, seq, heads, 4), (batch, seq, kv_heads, 4), (batch, seq, kv_heads, 4))
    ids = np.sort(RNG.integers(0, 3, (batch, seq)), -1).astype(np.int32)
    return *(RNG.normal(size=s).astype(np.float32) for s in shapes), ids


def step(q, k, v, ids, *, segments=False, **options):
    """The loss and the gradients of q, k and v."""

    def loss(q, k, v):
        y = mp.layers.attention(q, k, v, segment_ids=ids if segments else None, **options)
        return (jnp.sin(y) * y).mean()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def plain(q, k, v, ids, *, segments=False, causal=False, window=None, **_):
    """The same with all scores, by JAX's own op."""
    n = q.shape[1]
    i, j = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
    seen = jnp.ones((1, n, n), bool)
    seen &= (j <= i) | (not causal)
    seen &= (abs(i - j) < window) if window else True
    seen = seen & (ids[:, :, None] == ids[:, None, :]) if segments else seen

    def loss(q, k, v):
        with jax.default_matmul_precision("float32"):
            y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None])
        return (jnp.sin(y) * y).mean()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


close = functools.partial(assert_close, rtol=2e-5, atol=2e-6)


CASES = [
    ("ring", "heads, kv_heads: data; seq: context", "shard_map", {"causal": True, "segments": True}),
    ("ulysses", CONTEXT, "jit", {"window": 6}),
    ("gathered", "seq: data+context", "shard_map", {"causal": True, "window": 9}),
    (None, "seq: context; heads: data", "jit", {"causal": True}),  # kv_heads have no rule: heads are gathered or follow
    ("ring", "batch: data; head_dim: context", "shard_map", {}),  # nothing of the sequence is split
    (
        "ring",
        "seq: context+data",
        "shard_map",
        {"causal": True, "balance": True},
    ),  # the axes in another order than in the mesh
    ("ring+ulysses", "seq: context+data", "shard_map", {"causal": True, "segments": True}),
]


@pytest.mark.parametrize(("strategy", "layout", "lowering", "mask"), CASES)
def test_no_layout_changes_a_number(grid, strategy, layout, lowering, mask):
    args = arrays()
    fn = functools.partial(step, strategy=strategy, chunks=(6, 5), **mask)
    close(mp.jit(fn, mesh=grid, layout=layout, dims=DIMS, lowering=lowering)(*args), plain(*args, **mask))


@pytest.mark.parametrize(("lowering", "mask"), [("jit", {"segments": True}), ("shard_map", {"window": 9})])
def test_a_ring_in_another_order_of_devices_changes_no_number(grid, monkeypatch, lowering, mask):
    """A window of 9 ends the ring after one device, which is the one below in positions."""
    asked = []
    monkeypatch.setattr(layer, "ring_order", lambda stages: asked.append(stages) or (0, 3, 1, 2)[: 4 * len(stages)])
    args, mask = arrays(), {"causal": True, **mask}
    run = mp.jit(
        functools.partial(step, strategy="ring", **mask), mesh=grid, layout=CONTEXT, dims=DIMS, lowering=lowering
    )
    close(run(*args), plain(*args, **mask))
    assert any(asked) == ("window" not in mask)


def test_zigzag_says_where_tokens_belong(grid):
    """Tokens in zig-zag order for 4 devices: the same numbers as in order, put there, on 2 devices."""
    args = arrays()
    shuffled = [zigzag(jnp.asarray(x), 4) for x in args]
    loss, grads = plain(*args, causal=True)
    want = loss, [zigzag(g, 4) for g in grads]
    fn = functools.partial(step, causal=True, zigzag=4, strategy="ring")
    close(mp.jit(fn, mesh=grid, layout="seq: data", dims=DIMS, lowering="shard_map")(*shuffled), want)


def layers(q, k, v, ids, **options):
    """Two layers as one loop, there and back: two loops, so that XLA cannot share what both passes send."""

    def loss(q, k, v):
        def layer(q, xs):
            k, v, ids = xs
            return q + mp.layers.attention(q, k, v, segment_ids=ids, **options), None

        y, _ = jax.lax.scan(layer, q, (k, v, ids))
        return jnp.sin(y).mean()

    return jax.grad(loss, (0, 1, 2))(q, k, v)


@pytest.mark.parametrize(
    ("strategy", "layout", "op"),
    [
        ("ring", CONTEXT, "collective-permute"),
        pytest.param(
            *("ring+ulysses", "seq: context+data", "all-to-all"),
            marks=pytest.mark.skipif(
                jax.__version_info__ >= (0, 12),
                reason="XLA for CPUs (0.12) gives the operands of an all-to-all of this program two layouts, and refuses it",
            ),
        ),
        ("ulysses", CONTEXT, "all-to-all"),
        ("gathered", "seq: data+context", "all-gather"),
    ],
)
def test_the_plan_lists_what_is_sent(grid, strategy, layout, op):
    """Kinds and bytes of the compiled program, forward and backward pass, with segment ids."""
    q, k, v, ids = arrays()
    args = q, np.stack([k, v]), np.stack([v, k]), np.stack([ids, ids + 1])
    dims = {"q": DIMS["q"], "k": f"layers {KEYS}", "v": f"layers {KEYS}", "ids": "layers batch seq"}
    fn = functools.partial(layers, strategy=strategy, causal=True, balance=True)
    run = mp.jit(fn, mesh=grid, layout=layout, dims=dims, lowering="shard_map")
    expected, found = Counter(), Counter()
    for c in run.plan(*args).collectives:
        expected[c.op] += c.total_bytes
    for c in collectives(run.lower(*args).compile().as_text()):
        found[c.op] += c.total_bytes
    assert found == pytest.approx(expected)
    assert expected[op] > 0


def test_the_plan_says_why_and_counts_the_backward_pass(grid):
    args = arrays()

    def permutes(**options):
        fn = functools.partial(step, strategy="ring", causal=True, **options)
        plan = mp.plan(fn, *args, mesh=grid, layout=CONTEXT, dims=DIMS)
        return [c for c in plan.collectives if c.op == "collective-permute"]

    mine = permutes()
    # each device: 8 of 32 tokens of one of 2 rows; half goes up and half down, 3 hops each
    half = 1 * 4 * 4 * 4 * 4
    assert [(c.bytes, c.count) for c in mine[:4]] == [(half, 3)] * 4
    assert mine[0].cause == "`seq: context` splits `seq`, and attention works along it: keys go up the ring"
    # keys and values, up and down, there and back; float32 gradients two hops on and one home
    assert sum(c.total_bytes for c in mine) == 2 * (4 * 3 * half) + 4 * (2 + 1) * half
    # a window of 9, and 8 tokens on each device: a device needs the keys of the one before only
    assert [c.count for c in permutes(window=9)] == [1] * 6


def test_a_ring_of_a_long_sequence_balances_itself():
    """64K causal tokens over 8 chips: the exchanges are in the plan, and the operands' hides behind the local keys."""
    q, k = (jax.ShapeDtypeStruct((1, 65536, n, 128), jnp.bfloat16) for n in (32, 8))
    dims = {"q": DIMS["q"], "k": KEYS, "v": KEYS}

    def planned(mesh, layout, **options):
        fn = functools.partial(mp.layers.attention, causal=True, **options)
        return mp.plan(fn, q, k, k, mesh=mesh, layout=layout, dims=dims, topology="v5e:2x4")

    even, uneven = (planned("context=8", "seq: context", strategy="ring", balance=b) for b in (None, False))
    swaps = [c for c in even.collectives if "mirrored" in c.cause or "back to" in c.cause]
    assert [c.bytes for c in swaps] == [4096 * 32 * 128 * 2, 4096 * 32 * 128 * 2, 4096 * 32 * 4]
    assert [c.hidden == c.seconds for c in swaps] == [True, False, False]
    assert planned("context=8", "seq: context").seconds == even.seconds < 0.026 < 0.042 < uneven.seconds
    assert "queries of the mirrored device" in str(even)
    around = [c for c in even.collectives if "the ring, a cycle of neighbours" in c.cause]
    half = 4096 * 8 * 128 * 2  # of K or V; each crosses one link, in both directions at once
    assert [(c.count, c.bytes, c.seconds) for c in around] == [
        (7, half, pytest.approx(half / 2 / swaps[0].bytes * swaps[0].seconds / 2))
    ] * 4
    near = planned("context=8", "seq: context", strategy="ring", balance=False, window=8192)
    assert [c.count for c in near.collectives] == [1, 1]
    assert not [c for c in near.collectives if "neighbours" in c.cause]
    # 32 heads do not divide over 64 devices: the heads limit the inner axis only
    wide = planned("ring=4, uly=2", "seq: ring+uly", strategy="ring+ulysses")
    assert wide.seconds < uneven.seconds


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v5e:2x4"])
def test_the_program_runs_the_strategy_that_is_planned(topology):
    """Also over an axis that is three dimensions of a torus, over which a ring and Ulysses together would be possible. Each step of
    the ring is to a chip with a link, under both lowerings."""

    def gradients(q, k, v):
        attend = lambda *xs: mp.layers.attention(*xs, causal=True, implementation="xla")  # noqa: E731
        return jax.grad(lambda *xs: jnp.sum(attend(*xs).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    x = jax.ShapeDtypeStruct((1, 65536, 4, 128), jnp.bfloat16)
    where = {
        "mesh": "context=8",
        "topology": topology,
        "layout": "seq: context",
        "dims": {"*": "batch seq heads head_dim"},
    }
    plan, of_jit = (mp.plan(gradients, x, x, x, lowering=lowering, **where) for lowering in ("shard_map", "jit"))
    assert {c.op for c in plan.collectives} == {"collective-permute"}
    assert not [cause for cause in plan.prove().failed if cause.op == "plan"]
    places = np.array([d.coords for d in described_mesh({"context": 8}, topology).devices.flat])
    for fn in (lower_to_shard_map(plan, plan.mesh)[0], lower_to_jit(of_jit, of_jit.mesh)[0]):
        permutes = [e for e, _ in equations(jax.make_jaxpr(fn)(x, x, x).jaxpr) if e.primitive.name == "ppermute"]
        rings = {pairs for e in permutes if (7, 0) not in (pairs := e.params["perm"])}  # not between mirrored devices
        assert len(rings) == 2
        for pairs in rings:
            assert {np.abs(places[a] - places[b]).sum() for a, b in pairs} == {1}


def test_tokens_of_packed_documents_in_a_balanced_order(grid):
    q, k, v, ids = arrays()
    order = mp.data.balance(ids, devices=4, blocks=4)
    assert sorted(order) == list(range(32)) != order.tolist()

    def fn(q, k, v, ids, order):
        def loss(q, k, v):
            y = mp.layers.attention(q, k, v, causal=True, segment_ids=ids, positions=order, strategy="ring")
            return (jnp.sin(y) * y).mean()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    run = mp.jit(fn, mesh=grid, layout=CONTEXT, dims={**DIMS, "order": "seq"}, lowering="shard_map")
    loss, grads = run(*(x[:, order] for x in (q, k, v, ids)), order)
    want, expected = plain(q, k, v, ids, causal=True, segments=True)
    close((loss, grads), (want, [x[:, order] for x in expected]))


def test_other_lengths_gather_the_sequence(grid):
    q, k, v, _ = arrays()
    k, v = k[:, :20], v[:, :20]
    keys = "batch kv kv_heads head_dim"
    fn, dims = functools.partial(mp.layers.attention, causal=True), {"q": DIMS["q"], "k": keys, "v": keys}
    run = mp.jit(fn, mesh=grid, layout=CONTEXT, dims=dims, lowering="shard_map")
    np.testing.assert_allclose(run(q, k, v), jax.jit(fn)(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "attention: window=0 must be at least 1"),
        ({"strategy": "rnig"}, "attention: strategy must be one of"),
        ({"zigzag": 3}, "zig-zag order is made of 2·3 blocks, but there are 32 queries"),
        ({"segment_ids": np.zeros((2, 31), np.int32)}, "segment ids of the queries must be int"),
    ],
)
def test_bad_input(options, says):
    q, k, v, _ = arrays()
    with pytest.raises(mp.errors.MeshparError, match=says):
        mp.layers.attention(q, k, v, **options)


def test_ranks_and_heads_that_do_not_fit(grid):
    q, k, v, ids = arrays(heads=6, kv_heads=2)
    with pytest.raises(mp.errors.RankError, match=r"q must be .* rank 3"):
        mp.layers.attention(q[0], k, v)
    fn = functools.partial(step, strategy="ulysses")
    with pytest.raises(mp.errors.MeshparError, match=r"6 heads do not divide over 4 devices; .*take any heads"):
        mp.plan(fn, q, k, v, ids, mesh=grid, layout=CONTEXT, dims=DIMS)

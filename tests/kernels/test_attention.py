"""Ring, Ulysses and gathered attention on 8 virtual devices against NumPy in float64: every mask, order and head count."""

import functools
from dataclasses import replace

import attention_oracle as oracle
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import mesh_of

from meshpar_kernels import ContextParallel, ring_attention, unzigzag, zigzag
from meshpar_kernels.attention import api

A, B, S, H, D = 4, 2, 48, 8, 4
RNG = np.random.default_rng(0)
STRATEGIES = ("ring", "ulysses", "ring+ulysses", "gathered")
SPLIT = P(None, ("a", "b"))

# uneven segments, one of which a window of others lies within, and one token alone
SEGMENTS = np.stack([np.repeat([3, 0, 7, 1], [5, 20, 1, 22]), np.repeat([0, 1, 0], [30, 9, 9])]).astype(np.int32)
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": 5},
    "all": {"causal": True, "window": 7, "segments": True},
}


def draw(kv_heads, width=D, tokens=S, dtype=np.float32):
    shapes = ((B, S, H, D), (B, tokens, kv_heads, D), (B, tokens, kv_heads, width), (B, S, H, width))
    return [RNG.normal(size=s).astype(dtype) for s in shapes]


def on_devices(f, arrays=6, check=True):
    return jax.shard_map(f, mesh=mesh_of(2, 2), in_specs=(SPLIT,) * arrays, out_specs=SPLIT, check_vma=check)


@functools.cache
def runner(strategies, segments, parallel, options):
    """jit of (result, gradients) for each strategy."""

    def run(q, k, v, read, q_seg, k_seg):
        out = []
        for strategy in strategies:

            def attend(q, k, v, q_seg, k_seg, strategy=strategy):
                ids = (q_seg, k_seg) if segments else None
                how = {"chunks": (4, 5), "parallel": replace(parallel, strategy=strategy), **dict(options)}
                return ring_attention(q, k, v, ("a", "b"), segment_ids=ids, **how)

            f = on_devices(attend, 5)
            y, back = jax.vjp(lambda q, k, v, f=f: f(q, k, v, q_seg, k_seg), q, k, v)
            out.append((y, back(read)))
        return out

    return jax.jit(run)


def run(arrays, strategies=STRATEGIES, segments=None, order="contiguous", both_ways=True, **options):
    ids = segments if segments is not None else (np.zeros((B, 1), int).repeat(x.shape[1], 1) for x in arrays[:2])
    arrays = [*arrays, *(np.asarray(x, np.int32) for x in ids)]
    if order == "zigzag":
        arrays = [x[:, oracle.zigzag_order(x.shape[1], A)] for x in arrays]
    parallel = ContextParallel(order=order, both_ways=both_ways)
    got = runner(strategies, segments is not None, parallel, tuple(sorted(options.items())))(*arrays)
    if order == "zigzag":
        got = jax.tree.map(lambda x: np.asarray(x)[:, np.argsort(oracle.zigzag_order(x.shape[1], A))], got)
    return dict(zip(strategies, got, strict=True))


def expect(got, arrays, tolerance=2e-5, **mask):
    want = oracle.attention(*arrays, **mask)
    for strategy, found in got.items():
        for name, a, b in zip("out d_q d_k d_v".split(), jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=f"{strategy} {name}")


ORDERS = ("contiguous", "zigzag")


@pytest.mark.parametrize(("name", "order"), covering.each(MASKS, ORDERS))
def test_every_strategy_is_attention(name, order):
    """Results and gradients; 8, 4, 2 and 1 K/V heads take turns."""
    kv_heads = (8, 4, 2, 1)[list(MASKS).index(name)]
    mask = dict(MASKS[name])
    arrays = draw(kv_heads)
    segments = (SEGMENTS, SEGMENTS) if mask.pop("segments", False) else None
    got = run(arrays, segments=segments, order=order, **mask)
    ids = {} if segments is None else {"q_seg": SEGMENTS, "k_seg": SEGMENTS}
    expect(got, arrays, **mask, **ids)


LAST = np.repeat([2, 0, 1, -1], [9, 17, 3, 19])[None].repeat(B, 0).astype(np.int32)  # 19 tokens of padding
EXACT = {
    "two devices": ((2,), {"causal": True}, 2),
    "a window": ((4,), {"causal": True, "window": 29}, 8),
    "documents": ((8,), {"causal": True, "segments": True}, 1),
    "of Ulysses": ((4, 2), {"causal": True, "segments": True}, 2),
    "given positions": ((4,), {"causal": True, "segments": True, "placed": True}, 4),
}


@pytest.mark.parametrize("case", EXACT)
def test_balanced_rings_are_exact_in_float64(case):
    """Contiguous tokens, queries exchanged between mirrored devices; and tokens in any order, by their positions."""
    sizes, options, kv_heads = EXACT[case]
    axes, options = ("a", "b")[: len(sizes)], dict(options)
    segments, placed = options.pop("segments", False), options.pop("placed", False)
    arrays, ids = draw(kv_heads, dtype=np.float64), {"q_seg": LAST, "k_seg": LAST} if segments else {}
    order = np.random.default_rng(1).permutation(S) if placed else np.arange(S)
    strategy, balance = "ring+ulysses" if len(sizes) > 1 else "ring", None if placed else True

    def attend(q, k, v, seg, pos):
        parallel = ContextParallel(strategy=strategy, balance=balance, order=pos if placed else "contiguous")
        ids = seg if segments else None
        return ring_attention(q, k, v, axes, segment_ids=ids, chunks=(4, 5), parallel=parallel, **options)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), axes)
    f = jax.shard_map(attend, mesh=mesh, in_specs=(P(None, axes),) * 4 + (P(axes),), out_specs=P(None, axes))
    with jax.enable_x64(True):
        *x, read, seg = (jnp.asarray(a[:, order]) for a in (*arrays, LAST))
        run = jax.jit(lambda *x: jax.vjp(lambda q, k, v: f(q, k, v, seg, jnp.asarray(order, jnp.int32)), *x[:3]))
        y, back = run(*x)
        got = jax.tree.map(lambda a: np.asarray(a)[:, np.argsort(order)], (y, back(read)))
    expect({case: got}, arrays, 1e-12, **options, **ids)


AROUND = (0, 2, 7, 5, 4, 6, 3, 1)  # along the edge of a 2x4 grid, in JAX's order of its devices
IN_ANY_ORDER = {
    "all see all": ((8,), AROUND, {}, 8, S),
    "balanced, documents": ((8,), AROUND, {"causal": True, "segments": True}, 2, S),
    "zig-zag": ((8,), AROUND[::-1], {"causal": True, "zigzag": 8}, 1, S),
    "a wide window, blocks of 2 and 3 keys": ((8,), AROUND, {"window": 47, "both_ways": True}, 2, 40),
    "one way": ((8,), AROUND, {"causal": True, "both_ways": False, "balance": False}, 4, S),
    "of Ulysses": ((4, 2), (0, 2, 3, 1), {"causal": True, "strategy": "ring+ulysses"}, 2, S),
}


@pytest.mark.parametrize("case", IN_ANY_ORDER)
def test_rings_in_any_order_of_devices_are_exact_in_float64(case):
    sizes, order, options, kv_heads, tokens = IN_ANY_ORDER[case]
    axes, options = ("a", "b")[: len(sizes)], {"strategy": "ring", "balance": None, **options}
    segments, devices = options.pop("segments", False), int(np.prod(sizes))
    arrays, ids = draw(kv_heads, dtype=np.float64, tokens=tokens), {"q_seg": LAST, "k_seg": LAST} if segments else {}
    moved = [oracle.zigzag_order(n, devices) if "zigzag" in options else np.arange(n) for n in (S, tokens)]

    def attend(q, k, v, read, seg):
        x = api.Operands(q, k, v, seg if segments else None)
        found = api.plan(x, dict(zip(axes, sizes, strict=True)), api.Options(**options, chunks=(4, 5)))
        visiting = found._replace(context=replace(found.context, order=order))
        out, lse = api.forward(visiting, x)
        return out, api.backward(visiting, x, out, lse, read)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(sizes), axes)
    with jax.enable_x64(True):
        q, k, v, read = (jnp.asarray(a)[:, moved[n]] for a, n in zip(arrays, (0, 1, 1, 0), strict=True))
        f = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=P(None, axes), out_specs=P(None, axes)))
        out, (d_q, d_k, d_v) = f(q, k, v, read, jnp.asarray(LAST))
        got = [np.asarray(a)[:, np.argsort(moved[n])] for a, n in zip((out, d_q, d_k, d_v), (0, 0, 1, 1), strict=True)]
    mask = {name: options[name] for name in ("causal", "window") if name in options}
    expect({case: got}, arrays, 1e-12, **mask, **ids)


@pytest.mark.slow
def test_softcap_scale_other_lengths_and_widths():
    """Keys of another length (5 and then 10 a device), values of another width; the ring one way."""
    arrays = draw(2, width=6, tokens=80)
    options = {"causal": True, "softcap": 1.5, "scale": 0.7}
    expect(run(arrays, both_ways=False, **options), arrays, **options)


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients():
    arrays = draw(4)
    q_seg = SEGMENTS.copy()
    q_seg[:, 7:20] = 99  # no key has it
    k_seg = np.full_like(SEGMENTS, 3)
    k_seg[1] = -5  # nobody in the second row sees any
    got = run(arrays, segments=(q_seg, k_seg), causal=True)
    expect(got, arrays, causal=True, q_seg=q_seg, k_seg=k_seg)
    for y, (d_q, d_k, d_v) in got.values():
        assert not np.asarray(y)[:, 7:20].any()
        assert not np.asarray(d_q)[:, 7:20].any()
        assert not any(np.asarray(x)[1].any() for x in (y, d_q, d_k, d_v))


def test_large_scores_do_not_overflow():
    arrays = draw(4)
    arrays[0] *= 100.0
    arrays[1] *= 100.0
    expect(run(arrays, ("ring",), causal=True), arrays, tolerance=5e-3, causal=True)


@pytest.mark.slow
def test_bfloat16():
    arrays = [np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in draw(2)]
    got = run(arrays, ("ring", "gathered"), causal=True)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(got))
    got = jax.tree.map(lambda x: np.asarray(x, np.float64), got)
    expect(got, arrays, tolerance=3e-2, causal=True)


@pytest.mark.parametrize("implementation", ["reference", None])
def test_one_device_needs_no_axis(implementation):
    arrays = draw(2)
    y, back = jax.vjp(
        lambda *x: ring_attention(
            *x, None, causal=True, window=6, softcap=2.0, implementation=implementation, chunks=(7, 10)
        ),
        *(jnp.asarray(x) for x in arrays[:3]),
    )
    expect({"local": (y, back(jnp.asarray(arrays[3])))}, arrays, causal=True, window=6, softcap=2.0)


def test_gradients_of_what_is_alike_on_all_devices_are_summed():
    """A value that does not vary over the mesh, under check_vma: its cotangent is the sum over devices."""
    q, k, v, read = draw(8)

    def loss(bias, q, k, v, read):
        y = ring_attention(q + bias, k, v, ("a", "b"), causal=True, parallel=ContextParallel(strategy="ring"))
        return jax.lax.psum((y * read).sum(), ("a", "b"))

    sharded = jax.shard_map(loss, mesh=mesh_of(4, 2), in_specs=(P(), *(SPLIT,) * 4), out_specs=P())
    bias = np.full((D,), 0.3, np.float32)
    got = jax.jit(jax.grad(sharded))(bias, q, k, v, read)
    _, (d_q, _, _) = oracle.attention(q + bias, k, v, read, causal=True)
    np.testing.assert_allclose(got, d_q.sum((0, 1, 2)), rtol=2e-5, atol=2e-5)


def test_zigzag_there_and_back():
    x = np.arange(2 * 32 * 3).reshape(2, 32, 3)
    np.testing.assert_array_equal(zigzag(jnp.asarray(x), 8), x[:, oracle.zigzag_order(32, 8)])
    np.testing.assert_array_equal(unzigzag(zigzag(jnp.asarray(x), 4, axis=-2), 4), x)
    np.testing.assert_array_equal(zigzag(jnp.asarray(x), 1), x)
    first = np.asarray(zigzag(jnp.arange(16), 4, 0)).reshape(4, 4)
    np.testing.assert_array_equal(first[0], [0, 1, 14, 15])  # device 0: the first block, and the last


def local(**options):
    """Call it with shapes of one device, for its checks."""
    shapes = {"q": (2, 6, 8, 4), "k": (2, 6, 8, 4), "v": (2, 6, 8, 4), **options.pop("shapes", {})}
    dtypes = options.pop("dtypes", {})
    parallel = {name: options.pop(name) for name in ("strategy", "order", "scatter", "balance") if name in options}

    def call(x):
        arrays = {n: jnp.zeros(s, dtypes.get(n, jnp.float32)) + 0 * x.sum().astype(int) for n, s in shapes.items()}
        arrays = {n: a.astype(dtypes.get(n, jnp.float32)) for n, a in arrays.items()}
        return ring_attention(*arrays.values(), ("a", "b"), **options, parallel=ContextParallel(**parallel))

    f = jax.shard_map(call, mesh=mesh_of(4, 2), in_specs=P(("a", "b")), out_specs=P(None, ("a", "b")), check_vma=False)
    jax.eval_shape(f, jnp.zeros(8))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shapes": {"q": (6, 8, 4)}}, r"must be \[B, S, H, D\]"),
        ({"shapes": {"k": (2, 6, 8, 5)}}, r"do not fit: they are \[B, Sq, H, D\]"),
        ({"shapes": {"v": (2, 5, 8, 4)}}, "do not fit"),
        ({"shapes": {"k": (2, 6, 3, 4), "v": (2, 6, 3, 4)}}, "8 heads of q are no multiple of the 3 heads"),
        ({"dtypes": {"k": jnp.bfloat16}}, "must have one dtype"),
        ({"dtypes": dict.fromkeys("qkv", jnp.int32)}, "must have one dtype, float32, bfloat16, float16, float64"),
        ({"order": np.zeros(6)}, r"positions must be int32 \[6\], of as many .*got float64\[6\]"),
        (
            {"causal": True, "strategy": "ring", "balance": True, "shapes": dict.fromkeys("qkv", (2, 5, 8, 4))},
            "an even number",
        ),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"window": -3}, "window=-3 must be at least 1"),
        ({"softcap": 0.0}, "softcap=0.0 must be above 0"),
        ({"strategy": "rnig"}, "strategy must be one of"),
        ({"order": "zig-zag"}, "order must be one of"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
        ({"chunks": (0, 4)}, "chunks="),
        ({"scatter": "nccl"}, "scatter must be 'xla', 'ring' or None, got 'nccl'"),
        ({"segment_ids": np.zeros((2, 5), np.int32)}, r"segment ids of the queries must be int \[2, 6\]"),
        ({"segment_ids": (np.zeros((2, 6), np.int32), np.zeros((2, 6)))}, "segment ids of the keys must be int"),
        (
            {"strategy": "ulysses", "shapes": dict.fromkeys("qkv", (2, 6, 6, 4))},
            r"6 heads do not divide over 8 devices; .* take any heads",
        ),
        (
            {"strategy": "ulysses", "shapes": {"q": (2, 6, 24, 4), "k": (2, 6, 12, 4), "v": (2, 6, 12, 4)}},
            "12 K/V heads neither divide over 8 devices nor can be copied",
        ),
        (
            {"order": "zigzag", "shapes": dict.fromkeys("qkv", (2, 5, 8, 4))},
            r"made of 2·8 blocks, but there are 40 queries \(5 on each of 8 devices\); pad to a multiple of 16",
        ),
    ],
)
def test_bad_input(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        local(**options)


def test_zigzag_of_a_length_that_does_not_divide():
    with pytest.raises(ValueError, match=r"20 tokens \(axis 1 of \[2, 20\]\) do not divide into 2·8 blocks; pad"):
        zigzag(jnp.zeros((2, 20)), 8)
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        unzigzag(jnp.zeros((2, 20)), 0)


def test_gradients_of_gathered_keys_go_round_rings_over_several_axes():
    """Where XLA for TPUs makes all-reduces of its reduce-scatters: permutes of half the bytes, and the same gradients."""
    q, k, v, read = draw(2)

    def gradients(axes, scatter):
        def attend(q, k, v):
            parallel = ContextParallel(strategy="gathered", scatter=scatter)
            return ring_attention(q, k, v, axes, causal=True, parallel=parallel)

        split = jax.shard_map(attend, mesh=mesh_of(4, 2), in_specs=P(None, axes), out_specs=P(None, axes))
        return jax.jit(lambda *x: jax.vjp(split, *x[:3])[1](x[3])).lower(q, k, v, read)

    both, one = ("a", "b"), ("a",)
    lowered = {case: gradients(*case) for case in ((both, None), (both, "xla"), (one, None), (one, "ring"))}
    rings = {
        case: ("collective_permute" in text, "reduce_scatter" in text)
        for case, text in ((case, x.as_text()) for case, x in lowered.items())
    }
    assert rings == {
        (both, None): (True, False),
        (both, "xla"): (False, True),
        (one, None): (False, True),
        (one, "ring"): (True, False),
    }
    got, want = (lowered[both, s].compile()(q, k, v, read) for s in (None, "xla"))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

"""`grouped_matmul` and its transpose without kernels: against NumPy, gradients, bad input."""

import functools

import covering
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from jax.test_util import check_grads
from kernel_cases import RNG, SIZES, quantized

from meshpar_kernels import grouped_matmul, grouped_matmul_transpose, warn_about_group_sizes

M, K, N, G = 40, 12, 10, 4
IMPLEMENTATIONS = ["reference", "xla"]
INDICES = jnp.asarray([*RNG.integers(0, 24, M - 3), -1, 24, 1000], jnp.int32)


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SIZES)
def test_both_matmuls_equal_the_definition(name, implementation):
    sizes = SIZES[name]
    lhs, rhs, grad = normal(M, K), normal(G, K, N), normal(M, N)
    used = (oracle.group_of_row(sizes, M) >= 0).sum()
    dirty = lhs.at[used:].set(jnp.nan)  # rows of no group may hold anything
    got = grouped_matmul(dirty, rhs, jnp.asarray(sizes), implementation=implementation)
    np.testing.assert_allclose(got, oracle.grouped_matmul(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)
    got = grouped_matmul_transpose(dirty, grad, jnp.asarray(sizes), implementation=implementation)
    want = oracle.grouped_matmul_transpose(lhs, grad, sizes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


OPTIONS = {
    "transposed": {"transpose_rhs": True},
    "swiglu": {"activation": "silu", "gated": True},
    "geglu": {"activation": "gelu", "gated": True},
    "relu": {"activation": "relu"},
    "bilinear": {"gated": True},
    "scaled": {"row_scale": normal(M)},
    "gathered": {"lhs_indices": INDICES},
    "all": {
        "transpose_rhs": True, "activation": "silu", "gated": True, "row_scale": normal(M), "lhs_indices": INDICES,
        "group_offset": 1,
    },
}  # fmt: skip


def operands(options):
    lhs = normal(24 if "lhs_indices" in options else M, K)
    groups = 2 if "group_offset" in options else G
    shape = (groups, N, K) if options.get("transpose_rhs") else (groups, K, N)
    rhs = (normal(*shape), normal(*shape)) if options.pop("gated", False) else normal(*shape)
    return lhs, rhs, jnp.asarray(SIZES["uneven"])


@pytest.mark.parametrize(("name", "implementation"), [*covering.each(OPTIONS, IMPLEMENTATIONS), ("all", "reference")])
def test_options(name, implementation):
    options = dict(OPTIONS[name])
    lhs, rhs, sizes = operands(options)
    got = grouped_matmul(lhs, rhs, sizes, implementation=implementation, **options)
    want = oracle.grouped_matmul(lhs, rhs, sizes, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("offset", "implementation"), covering.each([-3, 0, 1, 3, 9], IMPLEMENTATIONS))
def test_group_offset(offset, implementation):
    """Two local groups of four; where the offset is out of range there are none of them."""
    lhs, rhs, grad, sizes = normal(M, K), normal(2, K, N), normal(M, N), jnp.asarray([9, 11, 5, 9])
    clipped = min(max(offset, 0), 4)
    call = functools.partial(grouped_matmul, implementation=implementation)
    got = call(lhs, rhs, sizes, group_offset=jnp.asarray(offset))
    want = oracle.grouped_matmul(lhs, rhs, sizes, group_offset=clipped)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    got = grouped_matmul_transpose(lhs, grad, sizes, groups=2, group_offset=offset, implementation=implementation)
    want = oracle.grouped_matmul_transpose(lhs, grad, sizes, groups=2, group_offset=clipped)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_float32_and_out_dtype_holds(implementation):
    lhs, rhs = jnp.ones((3, 1024), jnp.bfloat16), jnp.ones((1, 1024, 8), jnp.bfloat16)
    rhs = rhs.at[:, 0].set(1 / 256)
    out = grouped_matmul(lhs, rhs, jnp.array([3]), out_dtype=jnp.float32, implementation=implementation)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 1023 + 1 / 256)
    assert grouped_matmul(lhs, rhs, jnp.array([3])).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["transposed", "bilinear", "all"])
def test_gradients(name):
    options = dict(OPTIONS[name])
    lhs, rhs, sizes = operands(options)
    scale = options.pop("row_scale", None)

    @jax.jit
    def matmul(lhs, rhs, scale):
        return grouped_matmul(lhs, rhs, sizes, row_scale=scale, implementation="xla", **options)

    check_grads(matmul, (lhs, rhs, scale), order=1, modes=["rev"], atol=3e-2, rtol=3e-2)


def test_nothing_leaks_into_gradients():
    """Rows of no group hold NaN, in lhs, in the scale and in the cotangent."""
    sizes, rhs = jnp.asarray([9, 0, 11, 5]), normal(G, K, N)
    lhs, scale, cotangent, up = normal(M, K), normal(M), normal(M, N), normal(G, K, N)

    def pull(lhs, scale, cotangent):
        def matmul(lhs, rhs, scale):
            return grouped_matmul(lhs, (rhs, up), sizes, row_scale=scale, activation="silu")

        return jax.vjp(matmul, lhs, rhs, scale)[1](cotangent)

    want = jax.jit(pull)(lhs, scale, cotangent)
    got = jax.jit(pull)(*(x.at[25:].set(jnp.nan) for x in (lhs, scale, cotangent)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(got[1][1], 0)  # an empty group
    np.testing.assert_array_equal(got[0][25:], 0)


QUANTIZED = {
    "a column": (jnp.int8, (G, N), {}),
    "blocks of 4": (jnp.float8_e4m3fn, (G, 3, N), {"row_scale": normal(M)}),
    "transposed": (jnp.int8, (G, 6, N), {"transpose_rhs": True, "lhs_indices": INDICES}),
    "gated": (jnp.int8, (2, 2, N), {"gated": True, "activation": "silu", "group_offset": 1}),
}


@pytest.mark.parametrize(
    ("name", "implementation"), [*covering.each(QUANTIZED, IMPLEMENTATIONS), ("gated", "reference")]
)
def test_quantized_weights(name, implementation):
    """Values, and lhs's gradient through the weights times their scales."""
    dtype, shape, options = QUANTIZED[name]
    options = dict(options)
    scale = jnp.asarray(RNG.uniform(0.01, 0.02, shape), jnp.float32)
    lhs, like, sizes = operands(options)
    gated = isinstance(like, tuple)
    rhs, scale = quantized(dtype, *(like[0] if gated else like).shape), (scale, scale[::-1]) if gated else scale
    rhs = (rhs, rhs[::-1]) if gated else rhs

    def matmul(lhs, rhs, **more):
        return grouped_matmul(lhs, rhs, sizes, implementation=implementation, **options, **more)

    got, pull = jax.vjp(lambda lhs: matmul(lhs, rhs, rhs_scale=scale), lhs)
    want = oracle.grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, **options)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    def dense(matrix, scale):
        transposed = options.get("transpose_rhs")
        matrix = np.asarray(matrix, np.float64)
        found = oracle.dequantized(matrix.swapaxes(1, 2) if transposed else matrix, scale)
        return jnp.asarray(found.swapaxes(1, 2) if transposed else found, jnp.float32)

    same = tuple(map(dense, rhs, scale)) if gated else dense(rhs, scale)
    want = jax.vjp(lambda lhs: matmul(lhs, same), lhs)[1](jnp.cos(got))[0]
    np.testing.assert_allclose(pull(jnp.cos(got))[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [6, 4])
def test_transpose_of_lhs_gradient_by_quantized_weights_is_the_matmul(k):
    """A second derivative; K = N too, where scales of the other dim have the right shape."""
    rhs, scale = quantized(jnp.int8, 2, k, 4), jnp.asarray(RNG.uniform(0.01, 0.02, (2, 2, 4)), jnp.float32)
    lhs, sizes = normal(5, k), jnp.asarray([2, 3])

    def matmul(lhs):
        return grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, implementation="xla")

    pull = jax.vjp(lambda grad: jax.vjp(matmul, lhs)[1](grad)[0], normal(5, 4))[1]
    np.testing.assert_allclose(pull(lhs)[0], matmul(lhs), rtol=1e-5)


def test_quantized_weights_are_constants_and_are_checked():
    lhs, rhs, sizes, scale = normal(M, K), quantized(jnp.int8, G, K, N), jnp.full(G, 10), jnp.ones((G, N))

    def refuses(words, lhs=lhs, rhs=rhs, **options):
        with pytest.raises(ValueError, match=words):
            grouped_matmul(lhs, rhs, sizes, **options)

    refuses("rhs is int8, and there is no rhs_scale")
    refuses(r"must be \[G, N\]=\[4, 10\].*divides K=12; got \[4, 5, 10\]", rhs_scale=jnp.ones((G, 5, N)))
    refuses("one array for each of rhs, 1", rhs_scale=(scale, scale))
    refuses("rhs_scale must be floating-point", rhs_scale=jnp.ones((G, N), int))
    refuses("rhs must be int8 or float8_e4m3fn", rhs=rhs.astype(jnp.float32), rhs_scale=scale)
    with pytest.raises(NotImplementedError, match="rhs is int8 with scales"):
        grouped_matmul(lhs, rhs, sizes, rhs_scale=scale, implementation="pallas_gpu")
    with pytest.raises(NotImplementedError, match="blocks of 4 elements have scales of their own"):
        grouped_matmul(lhs, rhs, sizes, rhs_scale=jnp.ones((G, 3, N)), implementation="pallas_tpu")
    loss = jax.jit(lambda lhs, rhs, scale: grouped_matmul(lhs, rhs, sizes, rhs_scale=scale).sum())
    assert np.isfinite(jax.grad(loss)(lhs, rhs, scale)).all()
    with pytest.raises(ValueError, match=r"rhs_scale\[4, 1, 10\] is differentiated"):
        jax.grad(loss, 2)(lhs, rhs, scale)
    with pytest.raises(ValueError, match=r"rhs\[4, 12, 10\] is differentiated"):
        jax.grad(loss, 1)(lhs, rhs.astype(jnp.float8_e4m3fn), scale)


@pytest.mark.parametrize("shape", [(0, K, N), (M, 0, N), (M, K, 0)])
def test_empty(shape):
    m, k, n = shape
    lhs, rhs, sizes = jnp.ones((m, k)), jnp.ones((G, k, n)), jnp.zeros(G, jnp.int32)
    out, pull = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), lhs, rhs)
    assert out.shape == (m, n)
    assert [g.shape for g in pull(out)] == [lhs.shape, rhs.shape]


def test_group_sizes_are_checked_at_run_time():
    check = jax.jit(functools.partial(warn_about_group_sizes, rows=M))

    def run(*sizes):
        check(jnp.asarray(sizes))
        jax.effects_barrier()

    with pytest.warns(UserWarning, match="more than the 40 rows"):
        run(50, 1, -2, 0)
    run(10, 1, 2, 0)  # a warning would be an error


def test_what_is_wrong_is_said():
    lhs, rhs, sizes = jnp.ones((M, K)), jnp.ones((G, K, N)), jnp.zeros(G, jnp.int32)

    def refuses(words, error=ValueError, **changes):
        arguments = {"lhs": lhs, "rhs": rhs, "group_sizes": sizes} | changes
        with pytest.raises(error, match=words):
            grouped_matmul(**arguments)

    refuses(r"lhs must be \[M, K\]", lhs=lhs[0])
    refuses(r"has K=11.*has K=12", lhs=lhs[:, 1:])
    refuses(r"as \[G, N, K\] has K=10", transpose_rhs=True)
    refuses("one floating-point dtype", lhs=lhs.astype(jnp.bfloat16))
    refuses("3 group sizes for 4 groups", group_sizes=sizes[:3])
    refuses(r"group_sizes must be int \[G\]", group_sizes=jnp.zeros(G))
    refuses("activation must be one of", activation="swiglu")
    refuses(r"a pair of one shape, got \[\[4, 12, 10\], \[4, 12, 9\]\]", rhs=(rhs, rhs[:, :, 1:]))
    refuses("one floating-point dtype", rhs=(rhs, rhs.astype(jnp.bfloat16)))
    refuses("the inverse of lhs_indices must be int", lhs_indices=(jnp.zeros(M, int), jnp.zeros((3, 1), int)))
    refuses("row_scale must be", row_scale=jnp.ones(3))
    refuses("lhs_indices must be int", lhs_indices=jnp.ones(3))
    refuses("no implementation 'dense'", implementation="dense")
    refuses("operands are float32; the tensor cores", NotImplementedError, implementation="pallas_gpu")
    half = {"lhs": lhs.astype(jnp.float16), "rhs": rhs.astype(jnp.float16), "implementation": "pallas_tpu"}
    refuses(r"float16(.|\n)*These can: pallas_gpu, xla, reference", NotImplementedError, **half)
    with pytest.raises(ValueError, match=r"rhs \[M, N\]"):
        grouped_matmul_transpose(lhs, lhs[1:], sizes)


def test_under_shard_map_the_weights_gradient_is_summed(mesh):
    """Rows split over `data`, weights whole, with the check of varying axes on."""
    spec = jax.sharding.PartitionSpec
    lhs, rhs = normal(64, K), normal(2, K, N)
    sizes = jnp.asarray([[5, 9], [16, 0], [0, 3], [7, 7]])

    def local(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes[0])

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(spec("data"), spec(), spec("data")), out_specs=spec("data"))

    def whole(lhs, rhs, sizes):
        return jnp.concatenate([grouped_matmul(lhs[16 * i : 16 * i + 16], rhs, sizes[i]) for i in range(4)])

    def grads(function):
        def loss(lhs, rhs):
            return (function(lhs, rhs, sizes) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(lhs, rhs)

    got, want = grads(sharded), grads(whole)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize("case", ["pair", "indices", "rows", "transpose"])
def test_second_derivatives(case):
    """Along a direction in all operands, against dense matmuls with a mask for each group."""
    rng = np.random.default_rng(3)
    lhs, scale = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((12, 5), 12))
    rhs = jnp.asarray(rng.normal(size=(2, 3, 5, 4)), jnp.float32)
    sizes, index = jnp.asarray([3, 0, 7]), jnp.asarray([4, 0, 11, 1, -1, 2, 3, 5, 6, 8, 10, 7])
    rows = jnp.full((12, 1), -1).at[jnp.where(index < 0, 12, index)].set(jnp.arange(12)[:, None], mode="drop")
    masks = jnp.asarray([[0 <= i < 3, False, 3 <= i < 10] for i in range(12)], jnp.float32)

    def kernels(lhs, rhs, scale):
        if case == "transpose":
            return grouped_matmul_transpose(lhs, lhs[:, :4], sizes, row_scale=scale)
        options = {"indices": {"lhs_indices": index}, "rows": {"lhs_indices": (index, rows)}}.get(case, {})
        options |= {"activation": "silu"} if case == "pair" else {}
        return grouped_matmul(lhs, (rhs[0], rhs[1]) if case == "pair" else rhs[0], sizes, row_scale=scale, **options)

    def dense(lhs, rhs, scale):
        if case == "transpose":
            return jnp.einsum("mg,mk,mn,m->gkn", masks, lhs, lhs[:, :4], scale)
        if case in ("indices", "rows"):
            lhs = jnp.where((index >= 0)[:, None], lhs[index], 0)
        gate, up = (jnp.einsum("mg,mk,gkn->mn", masks, lhs, matrix) for matrix in rhs)
        return (jax.nn.silu(gate) * up if case == "pair" else gate) * scale[:, None]

    arguments = (lhs, rhs, scale)
    directions = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in arguments]

    def along(function):
        gradient = jax.grad(lambda *a: jnp.sin(function(*a)).sum(), (0, 1, 2))
        return jax.grad(lambda *a: sum((g * d).sum() for g, d in zip(gradient(*a), directions, strict=True)), (0, 1, 2))

    with jax.default_matmul_precision("highest"):
        pairs = zip(jax.jit(along(kernels))(*arguments), jax.jit(along(dense))(*arguments), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())

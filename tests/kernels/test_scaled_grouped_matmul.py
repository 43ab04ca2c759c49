"""Grouped matmul of 8-bit operands with block scales on CPU, against float64: values, the stated error, gradients, and invalid
arguments."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_cases import mesh_of, stated_error

from meshpar_kernels import Config, quantized_grouped_matmul, scaled_grouped_matmul

RNG = np.random.default_rng(7)
CODES = ["int8", "float8_e4m3fn"]
M, K, N, G = 40, 256, 128, 4
SIZES = [9, 0, 17, 10]


def arrays(dtype):
    """(lhs, lhs_scale, rhs, rhs_scale) and, in float64, the values of lhs and rhs."""
    lhs = jnp.asarray(RNG.integers(-100, 100, (M, K)), dtype)
    rhs = jnp.asarray(RNG.integers(-100, 100, (G, N, K)), dtype)
    lhs_scale = RNG.uniform(0.1, 3, (M, K // 128)).astype(np.float32)
    rhs_scale = RNG.uniform(0.1, 3, (G, N // 128, K // 128)).astype(np.float32)
    wide = np.asarray(lhs, np.float64) * np.repeat(lhs_scale, 128, 1)
    weights = np.asarray(rhs, np.float64) * np.repeat(np.repeat(rhs_scale, 128, 1), 128, 2)
    return (lhs, lhs_scale, rhs, rhs_scale), wide, weights


@pytest.mark.parametrize(("dtype", "offset"), [("int8", None), ("float8_e4m3fn", 1)])
def test_the_matmul_of_the_dequantized_operands(dtype, offset):
    operands, lhs, rhs = arrays(dtype)
    sizes = np.asarray(SIZES if offset is None else [4, *SIZES, 0], np.int32)
    got = scaled_grouped_matmul(*operands, jnp.asarray(sizes), group_offset=offset, out_dtype=jnp.float32)
    want = oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs=True, group_offset=offset or 0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(("dtype", "transposed"), [("int8", True), ("float8_e4m3fn", False)])
def test_quantization_is_within_the_stated_error(dtype, transposed):
    lhs, rhs = RNG.normal(size=(M, K)), RNG.normal(size=(G, N, K)) * 10.0 ** RNG.integers(-3, 3, (G, 1, 1))
    given = jnp.asarray(rhs if transposed else rhs.swapaxes(1, 2), jnp.float32)
    sizes = jnp.asarray(SIZES)
    got = quantized_grouped_matmul(jnp.asarray(lhs, jnp.float32), given, sizes, dtype=dtype, transpose_rhs=transposed)
    want = oracle.grouped_matmul(lhs, rhs, SIZES, transpose_rhs=True)
    left, right = stated_error(lhs, dtype, (128,)), stated_error(rhs, dtype, (128, 128))
    allowed = oracle.grouped_matmul(left, np.abs(rhs), SIZES, transpose_rhs=True)
    allowed += oracle.grouped_matmul(np.abs(lhs) + left, right, SIZES, transpose_rhs=True)
    assert (np.abs(got - want) <= allowed + 1e-5 * np.abs(want).max()).all()
    assert np.abs(got - want).max() > 1e-3 * np.abs(want).max()  # it is quantized


@pytest.mark.parametrize("dtype", CODES)
def test_gradients(dtype):
    """Of lhs: within the error of the quantized cotangent and weights; of rhs: of the quantized lhs, since rhs's is exact."""
    lhs, rhs, grad = RNG.normal(size=(M, K)), RNG.normal(size=(G, K, N)), RNG.normal(size=(M, N))
    sizes = jnp.asarray(SIZES)

    def matmul(x, w):
        return quantized_grouped_matmul(x, w, sizes, dtype=dtype)

    pulled = jax.vjp(matmul, *(jnp.asarray(x, jnp.float32) for x in (lhs, rhs)))[1](jnp.asarray(grad, jnp.float32))
    want = oracle.grouped_matmul(grad, rhs, SIZES, transpose_rhs=True)
    left, right = stated_error(grad, dtype, (128,)), stated_error(rhs, dtype, (128, 128))
    allowed = oracle.grouped_matmul(left, np.abs(rhs), SIZES, transpose_rhs=True)
    allowed += oracle.grouped_matmul(np.abs(grad) + left, right, SIZES, transpose_rhs=True)
    assert (np.abs(pulled[0] - want) <= allowed + 1e-5 * np.abs(want).max()).all()
    want = oracle.grouped_matmul_transpose(lhs, grad, SIZES)
    allowed = oracle.grouped_matmul_transpose(stated_error(lhs, dtype, (128,)), np.abs(grad), SIZES)
    assert (np.abs(pulled[1] - want) <= allowed + 1e-5 * np.abs(want).max()).all()
    assert [g.dtype for g in pulled] == [jnp.float32] * 2


def test_in_shard_map_the_gradient_of_shared_weights_is_summed():
    lhs, rhs = (jnp.asarray(RNG.normal(size=shape), jnp.bfloat16) for shape in ((2 * M, K), (G, K, N)))
    sizes = jnp.asarray(SIZES)

    def loss(w, x):
        return quantized_grouped_matmul(x, w, sizes, out_dtype=jnp.float32).sum()

    def shared(w, x):
        return jax.lax.psum(loss(w, x), "a")

    mapped = jax.shard_map(shared, mesh=mesh_of(2), in_specs=(P(), P("a")), out_specs=P())
    got = jax.jit(jax.grad(mapped))(rhs, lhs).astype(jnp.float32)
    alone = jax.jit(jax.grad(loss))
    want = sum(alone(rhs, x).astype(jnp.float32) for x in (lhs[:M], lhs[M:]))
    np.testing.assert_allclose(got, want, atol=2**-7 * np.abs(want).max())


def test_codes_have_no_derivative():
    (lhs, lhs_scale, rhs, rhs_scale), *_ = arrays("int8")

    def loss(scale):
        return scaled_grouped_matmul(lhs, scale, rhs, rhs_scale, jnp.asarray(SIZES)).sum()

    with pytest.raises(ValueError, match=r"no derivative.*Differentiate quantized_grouped_matmul"):
        jax.grad(loss)(jnp.asarray(lhs_scale))


def call(function, *shapes, **options):
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.eval_shape(lambda *x: function(*x, **options), *structs)


F32, I8, I32 = jnp.float32, jnp.int8, jnp.int32
LHS, RHS, SIZE = ((8, 256), I8), ((2, 128, 256), I8), ((2,), I32)
SCALES = ((8, 2), F32), ((2, 1, 2), F32)


@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        ((LHS, SCALES[0], ((2, 128, 128), I8), SCALES[1], SIZE), {}, r"lhs must be \[M, K\] and rhs \[G, N, K\]"),
        ((((8, 64), I8), ((8, 1), F32), ((2, 128, 64), I8), ((2, 1, 1), F32), SIZE), {}, "K=64 is no multiple of 128"),
        ((((8, 256), F32), SCALES[0], RHS, SCALES[1], SIZE), {}, "quantized_grouped_matmul quantizes wider arrays"),
        ((LHS, ((8, 1), F32), RHS, SCALES[1], SIZE), {}, r"lhs_scale must be float32 \[8, 2\], got float32\[8, 1\]"),
        ((LHS, SCALES[0], RHS, ((2, 2), F32), SIZE), {}, r"rhs_scale must be float32 \[2, 1, 2\]"),
        ((LHS, *SCALES[:1], RHS, SCALES[1], ((3,), I32)), {}, "3 group sizes for 2 groups"),
        ((LHS, SCALES[0], RHS, SCALES[1], ((2,), F32)), {}, r"group_sizes must be int \[G\]"),
        ((LHS, SCALES[0], RHS, SCALES[1], SIZE), {"config": Config(stages=3)}, "config has stages; num_sms is the only"),
        ((LHS, SCALES[0], RHS, SCALES[1], SIZE), {"implementation": "ring"}, "no implementation 'ring'"),
    ],
)  # fmt: skip
def test_invalid_codes_and_scales_are_stated_error(shapes, options, says):
    with pytest.raises(ValueError, match=says):
        call(scaled_grouped_matmul, *shapes, **options)


@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        ((((8, 256), F32), ((2, 128, 256), F32), SIZE), {}, r"rhs \[G, K, N\]"),
        ((((8, 256), F32), ((2, 100, 256), F32), SIZE), {"transpose_rhs": True}, "N=100 is no multiple of 128"),
        ((LHS, ((2, 256, 128), F32), SIZE), {}, "lhs is int8; it must be float32"),
        ((((8, 256), F32), ((2, 256, 128), F32), SIZE), {"dtype": "int4"}, "dtype=int4 must be int8 or float8_e4m3fn"),
    ],
)
def test_invalid_arrays_are_stated_error(shapes, options, says):
    with pytest.raises(ValueError, match=says):
        call(quantized_grouped_matmul, *shapes, **options)

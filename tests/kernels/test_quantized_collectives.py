"""Quantized all-gather, reduce-scatter and all-to-all on CPU devices, against float64: values within the stated errors, gradients,
odd shapes, non-finite elements, and invalid arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import mesh_of, on_devices, simulated, stated_error

from meshpar_kernels import quantized_all_gather, quantized_all_to_all, quantized_reduce_scatter

RNG = np.random.default_rng(5)
CODES = ["int8", "float8_e4m3fn"]
SHAPES = [((8, 256), "int8"), ((16, 3, 5), "float8_e4m3fn"), ((8, 700), "float8_e4m3fn"), ((24,), "int8")]
"""Of x and its codes; the last dim is a multiple of the block of 128, or the blocks are of the flattened array."""


def bound(x, dtype, leading=1, block=128):
    """The stated error of each element of x, quantized in blocks of the flattened dims after the leading ones."""
    flat = x.reshape(*x.shape[:leading], -1)
    size = flat.shape[-1]
    padded = np.pad(flat, [(0, 0)] * leading + [(0, -size % block)])
    return stated_error(padded, dtype, (block,))[..., :size].reshape(x.shape)


def draw(*shape, dtype=np.float32):
    """Numbers of many magnitudes, and a block of zeros."""
    x = RNG.normal(size=shape) * 10.0 ** RNG.integers(-6, 6, shape)
    x[1] = 0
    return x.astype(dtype)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_results_are_within_the_stated_error(shape, dtype):
    """Of a reduce-scatter the sum of the errors of the addends; the sums themselves are of float32."""
    x, mesh, axes = draw(8, *shape), mesh_of(4, 2), ("b", "a")
    got = on_devices(lambda v: quantized_all_gather(v, axes, dtype=dtype), mesh, x, order=axes)
    want = x.reshape(-1, *shape[1:])
    assert (np.abs(got - want) <= bound(x, dtype).reshape(want.shape)).all()
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
    got = on_devices(lambda v: quantized_reduce_scatter(v, axes, dtype=dtype), mesh, x, order=axes)
    parts = x.reshape(8, 8, -1, *shape[1:])
    want = parts.astype(np.float64).sum(0)
    allowed = bound(parts, dtype, 2).sum(0) + 1e-6 * np.abs(parts).sum(0)
    assert (np.abs(got - want) <= allowed).all()
    assert np.abs(got - want).max() > 0  # it is quantized
    got = on_devices(lambda v: quantized_all_to_all(v, axes, dtype=dtype), mesh, x, order=axes)
    np.testing.assert_array_less(np.abs(got - swapped(x)), swapped(bound(parts, dtype, 2).reshape(x.shape)) + 1e-30)


def test_other_dims_dtypes_and_blocks():
    x = draw(8, 4, 16, 64).astype(jnp.bfloat16)
    wide = x.astype(np.float64)
    got = on_devices(lambda v: quantized_all_gather(v, "a", axis=1, block=32), mesh_of(8), x)
    assert got.dtype == jnp.bfloat16
    want = np.concatenate(list(wide), 1)
    assert np.abs(got - want).max() <= np.abs(wide).max() * (1 / 254 + 2**-8)
    got = on_devices(lambda v: quantized_reduce_scatter(v, "a", axis=-1, block=8), mesh_of(8), x)
    want = np.stack(np.split(wide.sum(0), 8, -1))
    assert np.abs(got - want).max() <= np.abs(wide).max((1, 2, 3)).sum() * (1 / 254 + 2**-8)


def swapped(x):
    """The all-to-all of 8 devices along dim 1 of x, whose dim 0 is the device."""
    return x.reshape(8, 8, -1, *x.shape[2:]).swapaxes(0, 1).reshape(x.shape)


@pytest.mark.parametrize("backward", [None, *CODES])
def test_gradients_are_the_transposes_of_the_exact_collectives(backward):
    x, c = draw(8, 16, 128), RNG.normal(size=(8, 128, 128)).astype(np.float32)

    def pull(op, *arrays):
        def one(v, c):
            return jax.vjp(lambda v: op(v, "a", backward_dtype=backward), v)[1](c)[0]

        return on_devices(one, mesh_of(8), *arrays)

    parts = c.reshape(8, 8, 16, 128)
    got, want = pull(quantized_all_gather, x, c), parts.astype(np.float64).sum(0)
    allowed = (0 if backward is None else bound(parts, backward, 2).sum(0)) + 1e-5
    assert (np.abs(got - want) <= allowed).all()
    got, want = pull(quantized_reduce_scatter, c, x), x.reshape(-1, 128)
    allowed = 0 if backward is None else bound(x, backward).reshape(want.shape)
    assert (np.abs(got - want) <= allowed).all()
    got, want = pull(quantized_all_to_all, x, x), swapped(x)
    allowed = 0 if backward is None else swapped(bound(x.reshape(8, 8, 2, 128), backward, 2).reshape(x.shape))
    assert (np.abs(got - want) <= allowed).all()


def test_a_block_with_a_nan_or_an_infinity_is_nan_and_no_other():
    x = RNG.normal(size=(8, 8, 256)).astype(np.float32)
    x[3, 2, 7], x[5, 1, 200] = np.nan, np.inf
    got = on_devices(lambda v: quantized_all_gather(v, "a"), mesh_of(8), x)[0].reshape(8, 8, 2, 128)
    bad = np.zeros((8, 8, 2), bool)
    bad[3, 2, 0] = bad[5, 1, 1] = True
    np.testing.assert_array_equal(np.isnan(got).all(-1), bad)
    np.testing.assert_array_equal(np.isnan(got).any(-1), bad)
    got = on_devices(lambda v: quantized_reduce_scatter(v, "a"), mesh_of(8), x).reshape(8, 2, 128)
    np.testing.assert_array_equal(np.isnan(got).any(-1), bad.any(0))


def test_codes_may_be_sent_by_rings_and_by_kernels():
    """Bit for bit as with XLA's collectives; kernels in the TPU interpreter."""
    x = draw(8, 8, 128)
    want = on_devices(lambda v: quantized_all_gather(v, "a"), mesh_of(8), x)
    got = on_devices(lambda v: quantized_all_gather(v, "a", implementation="ring"), mesh_of(8), x)
    np.testing.assert_array_equal(got, want)
    x = draw(4, 32, 128)
    for op in (quantized_all_gather, quantized_reduce_scatter, quantized_all_to_all):
        want = on_devices(lambda v, op=op: op(v, "a"), mesh_of(4), x)
        np.testing.assert_array_equal(simulated(lambda v, op=op: op(v, "a", implementation="pallas"), (4,), x), want)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda v: quantized_all_gather(v, "a", dtype="int4"), "dtype=int4 must be int8 or float8_e4m3fn"),
        (lambda v: quantized_all_gather(v, "a", backward_dtype="int16"), "backward_dtype=int16 must be int8"),
        (lambda v: quantized_all_gather(v, "a", block=0), "block=0 must be at least 1"),
        (lambda v: quantized_all_gather(v, "a", axis=2), "has no dimension 2"),
        (lambda v: quantized_all_gather(v, "a", implementation="hierarchical"), "once for each axis"),
        (
            lambda v: quantized_reduce_scatter(v, "a", implementation="ring"),
            "no implementation 'ring'; there are 'native'",
        ),
        (lambda v: quantized_reduce_scatter(v, "a", axis=1), "no multiple of the 8 devices of a; pad it"),
        (lambda v: quantized_all_to_all(v, "a", axis=1), "quantized_all_to_all: dimension 1 .* no multiple of the 8"),
        (lambda v: quantized_reduce_scatter(v.astype(int), "a"), "x is int32; it must be float32, bfloat16 or float16"),
    ],
)
def test_invalid_arguments_are_errors(call, says):
    with pytest.raises(ValueError, match=says):
        on_devices(call, mesh_of(8), np.zeros((8, 8, 5), np.float32))

"""The small all-reduce over NVLink without GPUs: one device of three in JAX's GPU interpreter, and what is refused."""

import gpu_virtual
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import has_gpu_interpreter
from jax.sharding import PartitionSpec as P

from meshpar_kernels import all_reduce_small
from meshpar_kernels.collectives import gpu

RNG = np.random.default_rng(8)
DEVICES, RANK = 3, 1

interpreted = pytest.mark.skipif(
    not has_gpu_interpreter(), reason="the interpreter for Mosaic GPU kernels came with jax 0.11"
)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_everyone_gets_this_devices_array_and_sums_are_in_order(dtype, monkeypatch):
    """Bit for bit what NumPy adds up in float32, one device after the other; an array that fills no piece, for two blocks."""
    monkeypatch.setattr(gpu, "BLOCKS", 2)
    size = 3 * 2048 * (2 if dtype == "bfloat16" else 1) - 700
    draw = RNG.integers(-9, 9, (DEVICES, size)) if dtype == "int32" else RNG.normal(size=(DEVICES, size))
    arrays = np.asarray(jnp.asarray(draw, dtype))
    padded = -(-size // (8192 // arrays.itemsize)) * (8192 // arrays.itemsize)
    came = jnp.asarray(np.pad(arrays, ((0, 0), (0, padded - size))))
    x = jnp.asarray(arrays[RANK].reshape(4, -1))
    found, sent = gpu_virtual.run(monkeypatch, RANK, DEVICES, came, gpu.all_reduce_small, x, ("a",), (DEVICES,))
    wide = arrays.astype(np.int32 if dtype == "int32" else np.float32)
    want = ((wide[0] + wide[1]) + wide[2]).astype(arrays.dtype).reshape(4, -1)
    np.testing.assert_array_equal(np.asarray(found), want)
    for receiver in range(DEVICES):
        np.testing.assert_array_equal(sent[receiver, RANK], came[RANK])


def traced(x, **options):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def call(x):
        return all_reduce_small(x, ("a", "b"), implementation="pallas_gpu", **options)

    return str(jax.make_jaxpr(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(x))


def test_several_axes_are_one_group():
    assert "meshpar_all_reduce_small" in traced(jnp.zeros((3, 5)))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (jnp.zeros(4, jnp.int8), "x is int8; the kernel takes float32, bfloat16, float16 and int32"),
        (jnp.zeros(1 << 21, jnp.float32), "x has 8388608 bytes, more than 4 MiB: use all_reduce"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(x, says):
    with pytest.raises(NotImplementedError, match=says):
        traced(x)

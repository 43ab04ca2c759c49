"""The TPU collectives and dense exchanges in the TPU interpreter, with race detection; larger groups: `test_protocols`."""

import functools

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from kernel_cases import mesh_of, on_devices, simulated
from test_exchange import exchanged, permuted

from meshpar_kernels import all_to_all, collective_permute
from meshpar_kernels.collectives import all_gather, all_reduce_small, reduce_scatter, ring_tpu
from meshpar_kernels.collectives.schedule_table import table_of

P = PartitionSpec
MODES = ("on_wait", "eager")


def names_of(shape):
    return tuple("abc"[: len(shape)])


def draw(shape, *block, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(int(np.prod(shape)), *block)).astype(dtype)


def test_all_gather():
    x = draw((4,), 24, 128)
    got = simulated(lambda v: all_gather(v, "a", implementation="pallas"), (4,), x)
    np.testing.assert_array_equal(got, np.broadcast_to(x.reshape(1, -1, 128), got.shape))


def test_reduce_scatter(monkeypatch):
    """In more blocks than there are buffers."""
    monkeypatch.setattr(ring_tpu, "TILE_BYTES", 8 * 128 * 4)
    x = draw((2, 2), 24 * 4, 128)
    got = simulated(lambda v: reduce_scatter(v, ("a", "b"), implementation="pallas"), (2, 2), x, mode="eager")
    np.testing.assert_allclose(got, x.astype(np.float64).sum(0).reshape(4, 24, 128), atol=1e-5)


def test_odd_blocks_and_bfloat16():
    """5 rows of 3 are padded; sums are rounded once a hop."""
    x = draw((4,), 20, 3, dtype=jnp.bfloat16)
    got = simulated(lambda v: reduce_scatter(v, "a", implementation="pallas"), (4,), x)
    assert got.dtype == jnp.bfloat16
    want = x.astype(np.float64).sum(0).reshape(4, 5, 3)
    np.testing.assert_allclose(got.astype(np.float64), want, atol=3 * 2**-8 * np.abs(x.astype(np.float64)).sum(0).max())


@pytest.mark.parametrize(("dtype", "mode"), covering.each([np.float32, jnp.bfloat16, np.int32], MODES))
def test_all_reduce_small(dtype, mode):
    """Bit for bit what the gathered form gives, which sums in the same order; and so the same on all devices."""
    x = (10 * draw((2, 2), 30, 50)).astype(dtype)
    got = simulated(lambda v: all_reduce_small(v, ("a", "b"), implementation="pallas"), (2, 2), x, mode=mode)
    want = on_devices(lambda v: all_reduce_small(v, ("a", "b")), mesh_of(2, 2), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
    exact = x.astype(np.float64).sum(0)
    np.testing.assert_allclose(got[0].astype(np.float64), exact, atol=1e-5 if dtype != jnp.bfloat16 else 0.3)


@pytest.mark.parametrize(("shape", "mode"), [((4,), "on_wait"), ((2, 2), "eager")])
def test_all_to_all(shape, mode):
    """Blocks of 3 × 128, and blocks that are flattened and padded to rows of 128."""
    devices = int(np.prod(shape))
    for block, split, concat in (((3 * devices, 128), 0, 0), ((5, 3 * devices), 1, 0)):
        x = draw(shape, *block)
        how = {"axis_name": names_of(shape), "split_axis": split, "concat_axis": concat, "implementation": "pallas"}
        got = simulated(functools.partial(all_to_all, **how), shape, x, mode=mode)
        np.testing.assert_array_equal(got, exchanged(x, split, concat))


def test_collective_permutes_follow_each_other():
    """Three of one kernel and group, each of the array that the one before received: a ring, to some devices, and to themselves."""
    steps = [[(0, 1), (1, 2), (2, 3), (3, 0)], [(1, 2), (2, 1), (0, 0), (3, 3)], [(0, 2), (1, 1), (2, 3)]]
    x = draw((4,), 7, 9, dtype=jnp.bfloat16)
    want = functools.reduce(permuted, steps, x)

    def chain(v):
        for pairs in steps:
            v = collective_permute(v, "a", pairs, implementation="pallas")
        return v

    np.testing.assert_array_equal(simulated(chain, (4,), x), want)


def test_what_the_kernels_refuse():
    lines = ring_tpu.unsupported(table_of("all_gather", (4,), (False,)), (8, 128), jnp.float32)
    assert len(lines) == 1
    assert "does not wrap around" in lines[0]
    odd = ring_tpu.unsupported(table_of("all_gather", (4,), (True,)), (8, 100), np.dtype(np.float16))
    assert [*map(str, odd)] == [
        "x is float16; the kernel takes float32 and bfloat16, and int8",
        "a slot is [8, 100], and must be [rows, columns] in multiples of 16 and 128",
    ]

    def call(size, dtype=jnp.float32, implementation="pallas"):
        one = functools.partial(all_reduce_small, axis_name="a", implementation=implementation)
        jax.eval_shape(jax.shard_map(one, mesh=mesh_of(8), in_specs=P(), out_specs=P("a")), jnp.zeros(size, dtype))

    with pytest.raises(NotImplementedError, match="more than 4 MiB: use all_reduce"):
        call(2**21)
    with pytest.raises(NotImplementedError, match=r"tpu: x is int8; .*\n.*gpu: x is int8; .*\n.*These can: gather"):
        call(8, jnp.int8)
    with pytest.raises(ValueError, match="no implementation 'psum'"):
        call(8, implementation="psum")

"""The TPU collectives in the TPU interpreter, with race detection, on 8 devices."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import race_detection
from jax.sharding import Mesh, PartitionSpec

from meshpar_kernels._collective_ids import COLLECTIVE_IDS, MESH_AXES
from meshpar_kernels.collectives import all_gather, all_reduce, all_reduce_small, reduce_scatter, ring_tpu
from meshpar_kernels.collectives.table import table_of

P = PartitionSpec
MODES = ("on_wait", "eager")
CASES = [
    ((4,), "on_wait"),
    ((2, 2), "eager"),
]  # larger groups take longer in the interpreter; test_tpu_protocols has them


def names_of(shape):
    return tuple("abc"[: len(shape)])


def simulated(function, shape, x, mode="on_wait", seed=0):
    """`function` of x[rank] on every device, in the interpreter; raises if it races."""
    names = names_of(shape)
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)
    spec = P(names)
    mapped = jax.shard_map(lambda v: function(v[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with race_detection(dma_execution_mode=mode, random_seed=seed):
        return np.asarray(jax.block_until_ready(jax.jit(mapped)(jnp.asarray(x))))


def draw(shape, *block, dtype=np.float32):
    return np.random.default_rng(0).normal(size=(int(np.prod(shape)), *block)).astype(dtype)


@pytest.mark.parametrize(("shape", "mode"), CASES)
def test_all_gather(shape, mode):
    x = draw(shape, 24, 128)
    got = simulated(lambda v: all_gather(v, names_of(shape), implementation="pallas"), shape, x, mode)
    np.testing.assert_array_equal(got, np.broadcast_to(x.reshape(1, -1, 128), got.shape))


@pytest.mark.parametrize(("shape", "mode"), CASES)
def test_reduce_scatter(shape, mode):
    ranks = int(np.prod(shape))
    x = draw(shape, 24 * ranks, 128)
    got = simulated(lambda v: reduce_scatter(v, names_of(shape), implementation="pallas"), shape, x, mode)
    want = x.astype(np.float64).sum(0).reshape(ranks, 24, 128)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_odd_blocks_and_bfloat16():
    """5 rows of 3 are padded; sums are rounded once a hop."""
    x = draw((4,), 20, 3, dtype=jnp.bfloat16)
    got = simulated(lambda v: reduce_scatter(v, "a", implementation="pallas"), (4,), x)
    assert got.dtype == jnp.bfloat16
    want = x.astype(np.float64).sum(0).reshape(4, 5, 3)
    np.testing.assert_allclose(got.astype(np.float64), want, atol=3 * 2**-8 * np.abs(x.astype(np.float64)).sum(0).max())


@pytest.mark.slow
def test_blocks_are_added_piece_by_piece(monkeypatch):
    """More blocks than buffers, in a box of several slots."""
    monkeypatch.setattr(ring_tpu, "TILE_BYTES", 8 * 128 * 4)
    x = draw((2, 2), 4 * 48, 128)
    got = simulated(lambda v: reduce_scatter(v, ("a", "b"), implementation="pallas"), (2, 2), x)
    np.testing.assert_allclose(got, x.astype(np.float64).sum(0).reshape(4, 48, 128), atol=1e-5)


@pytest.mark.slow
def test_all_reduce():
    x = draw((2, 2), 7, 9)
    got = simulated(lambda v: all_reduce(v, ("a", "b"), implementation="pallas"), (2, 2), x)
    np.testing.assert_allclose(got, np.broadcast_to(x.astype(np.float64).sum(0), got.shape), atol=1e-5)
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))


@pytest.mark.parametrize(("dtype", "mode"), covering.each([np.float32, jnp.bfloat16, np.int32], MODES))
def test_all_reduce_small(dtype, mode):
    """Bit for bit what the gathered form gives, which sums in the same order; and so the same on all devices."""
    x = (10 * draw((2, 2), 30, 50)).astype(dtype)
    got = simulated(lambda v: all_reduce_small(v, ("a", "b"), implementation="pallas"), (2, 2), x, mode)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    plain = jax.shard_map(
        lambda v: all_reduce_small(v[0], ("a", "b"))[None], mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b"))
    )
    want = np.asarray(jax.jit(plain)(jnp.asarray(x)))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))
    exact = x.astype(np.float64).sum(0)
    np.testing.assert_allclose(got[0].astype(np.float64), exact, atol=1e-5 if dtype != jnp.bfloat16 else 0.3)


def test_what_the_kernels_refuse():
    lines = ring_tpu.unsupported(table_of("all_gather", (4,), (False,)), (8, 128), jnp.float32)
    assert len(lines) == 1
    assert "does not wrap around" in lines[0]
    odd = ring_tpu.unsupported(table_of("all_gather", (4,), (True,)), (8, 100), np.dtype(np.float16))
    assert [*map(str, odd)] == [
        "x is float16; the kernel takes float32 and bfloat16, and int8",
        "a slot is [8, 100], and must be [rows, columns] in multiples of 16 and 128",
    ]
    mesh = Mesh(np.array(jax.devices()), ("a",))

    def lower(x):
        call = jax.shard_map(
            lambda v: all_reduce_small(v, "a", implementation="pallas"), mesh=mesh, in_specs=P(), out_specs=P("a")
        )
        jax.eval_shape(call, x)

    with pytest.raises(NotImplementedError, match="more than 4 MiB: use all_reduce"):
        lower(jax.ShapeDtypeStruct((2**21,), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"tpu: x is int8; .*\n.*gpu: x is int8; .*\n.*These can: gather"):
        lower(jax.ShapeDtypeStruct((8,), jnp.int8))
    with pytest.raises(ValueError, match="no implementation 'psum'"):
        jax.eval_shape(
            jax.shard_map(
                lambda v: all_reduce_small(v, "a", implementation="psum"), mesh=mesh, in_specs=P(), out_specs=P("a")
            ),
            jax.ShapeDtypeStruct((8,), jnp.float32),
        )


def test_every_kernel_has_barriers_of_its_own():
    assert len(set(COLLECTIVE_IDS.values())) == len(COLLECTIVE_IDS)
    assert min(COLLECTIVE_IDS.values()) >= 2**MESH_AXES
    assert all(n % 2**MESH_AXES == 0 for n in COLLECTIVE_IDS.values())

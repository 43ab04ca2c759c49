"""The fused TPU matmuls in the TPU interpreter, with race detection, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from kernel_cases import mesh_of, near, simulated

from meshpar_kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from meshpar_kernels.collective_matmul import tpu_common as tpu

P = PartitionSpec
K, N = 128, 256
slow = pytest.mark.slow


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gathered(x, w):
    return x.astype(np.float64).reshape(-1, x.shape[-1]) @ w.astype(np.float64)


def scattered(x, w):
    whole = (x.astype(np.float64) @ w.astype(np.float64)).sum(0)
    return whole.reshape(len(x), -1, whole.shape[-1])


def test_both_matmuls(monkeypatch):
    """Opposite halves in three tiles, which is an uneven cut; odd rings: `test_protocols`."""
    monkeypatch.setattr(tpu, "pick_tile", lambda *args: tpu.Tile(8, 128))
    devices, rows = 4, 24
    w = draw(devices, K, N, seed=1)
    for function, x, want in (
        (all_gather_matmul, draw(devices, rows, K), gathered),
        (matmul_reduce_scatter, draw(devices, devices * rows, K), scattered),
    ):
        call = functools.partial(function, axis_name="a", implementation="pallas", precision="highest")
        np.testing.assert_allclose(simulated(call, (devices,), x, w), want(x, w), atol=1e-4)


def test_blocks_of_a_matmul(monkeypatch):
    """Loops over blocks of rows, K and columns, with something left over in each."""
    monkeypatch.setattr(tpu, "BLOCK", (128, 128, 128))
    monkeypatch.setattr(tpu, "pick_tile", lambda *args: tpu.Tile(200, 384))
    x, w = draw(2, 200, 384), draw(2, 384, 384, seed=1)
    got = simulated(lambda x, w: all_gather_matmul(x, w, "a", implementation="pallas", precision="highest"), (2,), x, w)
    np.testing.assert_allclose(got, gathered(x, w), atol=3e-4)


@slow
@pytest.mark.parametrize("function", [all_gather_matmul, matmul_reduce_scatter])
def test_gradients(function, monkeypatch):
    """As those of the ring; with respect to x the other kernel makes them, whether it is chosen by name or by the variable."""
    x, w = draw(4, 8 if function is all_gather_matmul else 32, K), draw(4, K, K, seed=1)

    def gradient(implementation):
        def loss(x, w):
            return (function(x, w, "a", implementation=implementation, precision="highest") ** 2).sum()

        return jax.grad(loss, (0, 1))

    specs = {"mesh": mesh_of(4), "in_specs": P(), "out_specs": P("a"), "check_vma": False}

    def kernels(implementation):
        text = str(jax.make_jaxpr(jax.shard_map(gradient(implementation), **specs))(x[0], w[0]))
        return [text.count(f"name=meshpar_{name}\n") for name in ("all_gather_matmul", "matmul_reduce_scatter")]

    monkeypatch.delenv("MESHPAR_KERNELS", raising=False)
    assert (kernels(None), kernels("pallas_tpu")) == ([0, 0], [1, 1])
    monkeypatch.setenv("MESHPAR_KERNELS", "pallas")
    assert kernels(None) == [1, 1]
    for found in zip(*(simulated(gradient(name), (4,), x, w) for name in ("pallas", "ring")), strict=True):
        near(*found, 1e-5)


def test_what_the_kernels_refuse():
    def refuses(words, function, x, implementation="pallas_tpu", dtype=jnp.float32, **options):
        call = functools.partial(function, axis_name="a", implementation=implementation, **options)
        mapped = jax.shard_map(call, mesh=mesh_of(4), in_specs=P(), out_specs=P("a"))
        with pytest.raises(NotImplementedError, match=words):
            jax.eval_shape(mapped, jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct((x[1], 128), dtype))

    gather, scatter = all_gather_matmul, matmul_reduce_scatter
    refuses(r"K=100 and the 128 resulting columns(.|\n)*These can: ring", gather, (8, 100), implementation="pallas")
    refuses("the operands are float16 and float16", gather, (16, 128), dtype=jnp.float16)
    refuses("no tile of a block of 12 rows, K=128 and 128 columns fits 48 MiB", scatter, (48, 128))
    refuses("comm_dtype is float16", scatter, (32, 128), comm_dtype=jnp.float16)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit(itemsize):
    """Llama-3 8B and 70B layers over 8 and 16 devices: a tile is found, in chip memory, with at least 128 rows."""
    for rows, k, n in [(1024, 4096, 1792), (512, 4096, 768), (1024, 8192, 3584), (512, 1792, 4096), (1024, 3584, 8192)]:
        tile = tpu.pick_tile(rows, k, n, 8, itemsize)
        assert tile is not None
        assert tile.m >= 128
        assert itemsize * 2 * (tile.m * k + k * tile.n) < 48 << 20

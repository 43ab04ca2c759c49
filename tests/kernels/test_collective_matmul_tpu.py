"""The fused TPU matmuls in the TPU interpreter, with race detection, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import race_detection
from jax.sharding import Mesh, PartitionSpec

from meshpar_kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter, tpu

P = PartitionSpec
K, N = 128, 256
slow = pytest.mark.slow


def simulated(function, x, w, shape=None, mode="on_wait", seed=0):
    """`function` of x[rank] and w[rank] on every device, in the interpreter; raises if it races."""
    shape = (len(x),) if shape is None else shape
    names = tuple("abc"[: len(shape)])
    mesh = Mesh(np.array(jax.devices()[: len(x)]).reshape(shape), names)
    axis = names[0] if len(names) == 1 else names
    spec = P(names)
    mapped = jax.shard_map(
        lambda x, w: jax.tree.map(lambda y: y[None], function(x[0], w[0], axis)),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    with race_detection(dma_execution_mode=mode, random_seed=seed):
        return jax.tree.map(np.asarray, jax.block_until_ready(jax.jit(mapped)(x, w)))


def draw(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def gathered(x, w):
    return x.astype(np.float64).reshape(-1, x.shape[-1]) @ w.astype(np.float64)


def scattered(x, w):
    whole = (x.astype(np.float64) @ w.astype(np.float64)).sum(0)
    return whole.reshape(len(x), -1, whole.shape[-1])


def narrow(monkeypatch, rows):
    """Tiles of a few rows and 128 columns: several of each."""
    monkeypatch.setattr(tpu, "pick_tile", lambda *args: tpu.Tile(rows, 128))


# devices, rows of a block, rows of a tile: opposite halves in three tiles (an uneven cut), an odd ring; more: `test_tpu_protocols`
EACH = [(4, 24, 8, "on_wait"), (3, 8, 8, "eager")]


@pytest.mark.parametrize(("devices", "rows", "height", "mode"), EACH)
def test_gather(devices, rows, height, mode, monkeypatch):
    narrow(monkeypatch, height)
    x, w = draw(devices, rows, K), draw(devices, K, N, seed=1)
    got = simulated(
        lambda x, w, a: all_gather_matmul(x, w, a, implementation="pallas", precision="highest"), x, w, mode=mode
    )
    np.testing.assert_allclose(got, gathered(x, w), atol=1e-4)


@pytest.mark.parametrize(("devices", "rows", "height", "mode"), EACH)
def test_scatter(devices, rows, height, mode, monkeypatch):
    narrow(monkeypatch, height)
    x, w = draw(devices, devices * rows, K), draw(devices, K, N, seed=1)
    got = simulated(
        lambda x, w, a: matmul_reduce_scatter(x, w, a, implementation="pallas", precision="highest"), x, w, mode=mode
    )
    np.testing.assert_allclose(got, scattered(x, w), atol=1e-4)


@slow
def test_several_axes_bfloat16_and_wire():
    """A ring over two mesh axes, major first; tiles as they are picked; sums rounded to bfloat16 once a hop."""
    x, w = draw(4, 16, K, dtype=jnp.bfloat16), draw(4, K, N, dtype=jnp.bfloat16, seed=1)
    got = simulated(lambda x, w, a: all_gather_matmul(x, w, a, implementation="pallas"), x, w, (2, 2))
    assert got.dtype == jnp.bfloat16
    want = gathered(x, w)
    np.testing.assert_allclose(got.astype(np.float64), want, atol=2**-8 * np.abs(want).max())
    x = draw(4, 64, K, dtype=jnp.bfloat16)
    for wire in (None, jnp.bfloat16):
        got = simulated(
            lambda x, w, a, wire=wire: matmul_reduce_scatter(x, w, a, implementation="pallas", comm_dtype=wire),
            x,
            w,
            (2, 2),
        )
        want = scattered(x, w)
        np.testing.assert_allclose(
            got.astype(np.float64), want, atol=(1 if wire is None else 4) * 2**-8 * np.abs(want).max()
        )


def test_blocks_of_a_matmul(monkeypatch):
    """Loops over blocks of rows, K and columns, with something left over in each."""
    monkeypatch.setattr(tpu, "BLOCK", (128, 128, 128))
    monkeypatch.setattr(tpu, "pick_tile", lambda *args: tpu.Tile(200, 384))
    x, w = draw(2, 200, 384), draw(2, 384, 384, seed=1)
    got = simulated(lambda x, w, a: all_gather_matmul(x, w, a, implementation="pallas", precision="highest"), x, w)
    np.testing.assert_allclose(got, gathered(x, w), atol=3e-4)


@slow
@pytest.mark.parametrize("function", [all_gather_matmul, matmul_reduce_scatter])
def test_gradients(function):
    """As those of the ring; with respect to x the other kernel makes them."""
    x, w = draw(4, 8 if function is all_gather_matmul else 32, K), draw(4, K, K, seed=1)

    def gradient(implementation):
        def call(x, w, axis):
            def loss(x, w):
                return (function(x, w, axis, implementation=implementation, precision="highest") ** 2).sum()

            return jax.grad(loss, (0, 1))(x, w)

        return call

    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    mapped = jax.shard_map(
        lambda x, w: gradient("pallas_tpu")(x, w, "a"), mesh=mesh, in_specs=P(), out_specs=P("a"), check_vma=False
    )
    text = str(jax.make_jaxpr(mapped)(x[0], w[0]))
    assert text.count("name=meshpar_all_gather_matmul\n") == text.count("name=meshpar_matmul_reduce_scatter\n") == 1
    for got, want in zip(simulated(gradient("pallas"), x, w), simulated(gradient("ring"), x, w), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_what_the_kernels_refuse():
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))

    def refused(function, x, w, implementation="pallas_tpu", **options):
        call = jax.shard_map(
            lambda x, w: function(x, w, "a", implementation=implementation, **options),
            mesh=mesh,
            in_specs=P(),
            out_specs=P("a"),
        )
        jax.eval_shape(call, jax.ShapeDtypeStruct(*x), jax.ShapeDtypeStruct(*w))

    f32 = jnp.float32
    with pytest.raises(NotImplementedError, match=r"K=100 and the 128 resulting columns(.|\n)*These can: ring"):
        refused(all_gather_matmul, ((8, 100), f32), ((100, 128), f32), implementation="pallas")
    with pytest.raises(NotImplementedError, match="the operands are float16 and float16"):
        refused(all_gather_matmul, ((16, 128), jnp.float16), ((128, 128), jnp.float16))
    with pytest.raises(NotImplementedError, match="no tile of a block of 12 rows, K=128 and 128 columns fits 48 MiB"):
        refused(matmul_reduce_scatter, ((48, 128), f32), ((128, 128), f32))
    with pytest.raises(NotImplementedError, match="comm_dtype is float16"):
        refused(matmul_reduce_scatter, ((32, 128), f32), ((128, 128), f32), comm_dtype=jnp.float16)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit(itemsize):
    """Llama-3 8B and 70B layers over 8 and 16 devices: a tile is found, in chip memory, with at least 128 rows."""
    for rows, k, n in [(1024, 4096, 1792), (512, 4096, 768), (1024, 8192, 3584), (512, 1792, 4096), (1024, 3584, 8192)]:
        tile = tpu.pick_tile(rows, k, n, 8, itemsize)
        assert tile is not None
        assert tile.m >= 128
        assert itemsize * 2 * (tile.m * k + k * tile.n) < 48 << 20

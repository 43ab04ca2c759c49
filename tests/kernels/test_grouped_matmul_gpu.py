"""The GPU kernels of grouped matmul in JAX's GPU interpreter, with race detection, against NumPy."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from interpreters import gpu_race_detection, has_gpu_interpreter
from kernel_cases import lowered, mesh_of, near

from meshpar_kernels import Config, _compat, grouped_matmul, grouped_matmul_transpose

RNG = np.random.default_rng(4)
M, K, N, G = 200, 64, 192, 4
UNEVEN = [129, 0, 30, 21]
BF16 = jnp.dtype(jnp.bfloat16)

interpreted = pytest.mark.skipif(
    not has_gpu_interpreter(), reason="the interpreter for Mosaic GPU kernels came with jax 0.11"
)


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """Each is a thread of the interpreter for every warpgroup."""
    monkeypatch.setattr(_compat, "multiprocessors", lambda: 2)


def normal(*shape, dtype=BF16):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def run(function, *args, **options):
    with gpu_race_detection():
        return jax.block_until_ready(function(*args, implementation="pallas", **options))


def close(got, want):
    """bfloat16 has eight bits."""
    near(got, want, 1e-2)


OPTIONS = {"activation": "gelu", "transpose_rhs": True, "row_scale": normal(M, dtype=jnp.float32), "group_offset": 1}


def on(architecture, monkeypatch):
    """Trace for another GPU than the interpreter's Hopper."""
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: architecture)
    jax.clear_caches()


both_kernels = pytest.mark.parametrize("architecture", [(9, 0), (10, 0)], ids=["hopper", "blackwell"])


@interpreted
@both_kernels
def test_grouped_matmul(architecture, monkeypatch):
    """N that fills no tile, groups that end within one, NaN in the rows of no group; other forms: `test_gpu_copies`."""
    on(architecture, monkeypatch)
    rhs = normal(2, N, K), normal(2, N, K)
    lhs = normal(M, K).at[sum(UNEVEN) :].set(jnp.nan)
    got = run(grouped_matmul, lhs, rhs, jnp.asarray(UNEVEN), **OPTIONS)
    assert got.dtype == BF16
    close(got, oracle.grouped_matmul(lhs, rhs, UNEVEN, **OPTIONS))


@interpreted
@both_kernels
def test_transpose(architecture, monkeypatch):
    """The next group's rows in the last step are masked, in both operands."""
    on(architecture, monkeypatch)
    lhs, rhs = (normal(M, width).at[sum(UNEVEN) :].set(jnp.nan) for width in (K, N))
    scale = normal(M, dtype=jnp.float32)
    got = run(grouped_matmul_transpose, lhs, rhs, jnp.asarray(UNEVEN), row_scale=scale)
    close(got, oracle.grouped_matmul_transpose(lhs, rhs, UNEVEN, row_scale=scale))
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), 0)


@pytest.mark.parametrize(("k", "n"), [(1440, 720), (12, 64)])
def test_misaligned_sizes_take_the_kernel(k, n):
    """720: no multiple of a tile's columns."""

    def gradients(lhs, rhs, sizes):
        return jax.grad(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum(), (0, 1))(lhs, rhs)

    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in (((64, k), BF16), ((2, k, n), BF16), ((2,), jnp.int32))]
    text = lowered(gradients, *arguments)
    assert "mosaic_gpu" in text
    assert "stablehlo.while" not in text


def refuses(words, *, dtype=BF16, k=K, out_dtype=None, **config):
    arguments = (jnp.zeros((8, k), dtype), jnp.zeros((G, k, 64), dtype), jnp.zeros(G, int))
    with pytest.raises(NotImplementedError, match=words):
        grouped_matmul(*arguments, implementation="pallas_gpu", out_dtype=out_dtype, config=Config(**config))


def test_refusals_carry_the_reason(monkeypatch):
    refuses(r"float32; the tensor cores.*(.|\n)*These can: pallas_tpu, xla, reference", dtype=jnp.float32)
    refuses(r"tile \(64, 64, 64\): the kernel takes 128 rows", tile=(64, 64, 64))
    grad = jnp.zeros((8, 256), BF16)
    for config, words in (
        (Config(pingpong=True, stages=5), "5 stages: with pingpong each of two warpgroups has half of them"),
        (Config((64, 128, 256), pingpong=True), r"tile \(128, 64, 256\): .* at most 128 with pingpong"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            grouped_matmul_transpose(grad, grad, jnp.zeros(G, int), implementation="pallas_gpu", config=config)
    refuses("pingpong: the kernel of grouped_matmul_transpose has it", pingpong=True)
    refuses("two stages of it do not fit", tile=(128, 512, 256))
    refuses("a cluster of 3 blocks: the kernel takes 1 or 2", cluster=3)
    refuses("the result is float64|the result is int32", out_dtype=jnp.int32)
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (8, 0))
    refuses("the GPU is sm_80; there is a kernel for sm_90a and sm_100a")


def test_under_shard_map_results_vary_as_their_operands():
    """All platforms' branches are traced, and must agree; gradients too."""
    split, whole = jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec()
    local = jax.shard_map(grouped_matmul, mesh=mesh_of(1), in_specs=(split, whole, split), out_specs=split)

    def loss(lhs, rhs, sizes):
        return local(lhs, rhs, sizes).astype(jnp.float32).sum()

    arguments = (normal(16, 64), normal(2, 64, 64), jnp.asarray([9, 7]))
    shapes = jax.eval_shape(jax.grad(loss, (0, 1)), *arguments)
    assert [s.shape for s in shapes] == [(16, 64), (2, 64, 64)]

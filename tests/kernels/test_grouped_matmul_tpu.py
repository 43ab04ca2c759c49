"""The TPU kernels of grouped matmul in the TPU interpreter, with race detection, against NumPy."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from kernel_cases import SIZES

from meshpar_kernels import _compat, grouped_matmul, grouped_matmul_transpose
from meshpar_kernels.grouped_matmul import tpu
from meshpar_kernels.shapes import MATMULS

RNG = np.random.default_rng(2)
M, K, N, G = 300, 256, 256, 4
UNEVEN = [129, 0, 100, 40]


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def close(got, want, dtype=jnp.float32):
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-5
    scale = np.abs(want).max() or 1.0
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance * scale, rtol=0)


def run(function, *args, **options):
    with _compat.race_detection():
        return jax.block_until_ready(function(*args, implementation="pallas", **options))


CASES = {
    "plain": {"tile": (128, K, 128)},
    "transposed": {"transpose_rhs": True},
    "swiglu": {"activation": "swiglu", "tile": (256, K, 128)},
    "everything": {
        "activation": "swiglu",
        "transpose_rhs": True,
        "row_scale": normal(M),
        "group_offset": 1,
    },
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("plain", jnp.float32),
        ("transposed", jnp.bfloat16),
        ("swiglu", jnp.bfloat16),
        ("everything", jnp.float32),
    ],
)
def test_grouped_matmul(name, dtype):
    options = CASES[name]
    groups = 2 if "group_offset" in options else G
    shape = (groups, N, K) if options.get("transpose_rhs") else (groups, K, N)
    lhs, rhs, sizes = normal(M, K, dtype=dtype), normal(*shape, dtype=dtype), jnp.asarray(UNEVEN)
    got = run(grouped_matmul, lhs.at[sum(UNEVEN) :].set(jnp.nan), rhs, sizes, **options)
    assert got.dtype == dtype
    options = {name: value for name, value in options.items() if name != "tile"}
    close(got, oracle.grouped_matmul(lhs, rhs, UNEVEN, **options), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_transpose(dtype):
    lhs, rhs, scale = normal(M, K, dtype=dtype), normal(M, 128, dtype=dtype), normal(M)
    dirty = [x.at[sum(UNEVEN) :].set(jnp.nan) for x in (lhs, rhs, scale)]
    got = run(
        grouped_matmul_transpose,
        dirty[0],
        dirty[1],
        jnp.asarray(UNEVEN),
        row_scale=dirty[2],
        tile=(256, 128, 128),
    )
    close(got, oracle.grouped_matmul_transpose(lhs, rhs, UNEVEN, row_scale=scale), dtype)
    np.testing.assert_array_equal(got[1], 0)


@pytest.mark.parametrize("name", ["uneven", "none", "too many"])
def test_odd_sizes_and_groups(name):
    """40 rows, K and N that are no multiple of 128."""
    sizes = SIZES[name]
    lhs, rhs, grad = normal(40, 24), normal(G, 24, 136), normal(40, 136)
    with _compat.race_detection():
        one, two = jax.block_until_ready(
            jax.jit(
                lambda lhs, rhs, grad, sizes: (
                    grouped_matmul(lhs, rhs, sizes, implementation="pallas_tpu"),
                    grouped_matmul_transpose(lhs, grad, sizes, implementation="pallas_tpu"),
                )
            )(lhs, rhs, grad, jnp.asarray(sizes))
        )
    close(one, oracle.grouped_matmul(lhs, rhs, sizes))
    close(two, oracle.grouped_matmul_transpose(lhs, grad, sizes))


def test_inner_blocks(monkeypatch):
    """Loops over blocks of rows, K and N, with something left over in each."""
    monkeypatch.setattr(tpu, "BLOCK", (128, 128, 128))
    monkeypatch.setattr(tpu, "TRANSPOSE_BLOCK", (128, 128))
    lhs, rhs, grad = normal(256, 328), normal(2, 328, 200), normal(256, 200)
    sizes, options = [256, 0], {"tile": (256, 328, 200)}
    close(
        run(grouped_matmul, lhs, rhs, jnp.asarray(sizes), **options),
        oracle.grouped_matmul(lhs, rhs, sizes),
    )
    close(
        run(grouped_matmul_transpose, lhs, grad, jnp.asarray(sizes), **options),
        oracle.grouped_matmul_transpose(lhs, grad, sizes),
    )


def test_gathered_rows():
    lhs, rhs = normal(17, 128, dtype=jnp.bfloat16), normal(G, 128, 128, dtype=jnp.bfloat16)
    indices = jnp.asarray([*RNG.integers(0, 17, 38), -1, 17], jnp.int32)
    got = run(grouped_matmul, lhs, rhs, jnp.asarray(SIZES["full"]), lhs_indices=indices)
    want = oracle.grouped_matmul(lhs, rhs, SIZES["full"], lhs_indices=indices)
    close(got, want, jnp.bfloat16)


def test_gradients_use_the_kernels():
    lhs, rhs, sizes = normal(128, 128), normal(G, 128, 128), jnp.asarray([50, 0, 50, 9])

    def loss(lhs, rhs, implementation):
        return (grouped_matmul(lhs, rhs, sizes, implementation=implementation) ** 2).sum()

    grad = jax.grad(loss, (0, 1))
    text = str(jax.make_jaxpr(grad, static_argnums=2)(lhs, rhs, "pallas_tpu"))
    assert text.count("name=meshpar_grouped_matmul\n") == 2
    assert text.count("name=meshpar_grouped_matmul_transpose\n") == 1
    want = jax.jit(grad, static_argnums=2)(lhs, rhs, "xla")
    with _compat.race_detection():
        got = jax.block_until_ready(jax.jit(grad, static_argnums=2)(lhs, rhs, "pallas_tpu"))
    jax.tree.map(close, got, want)


def test_without_a_kernel_for_the_platform_the_loop_runs():
    """None never refuses; "pallas" does where the platform has no kernel."""
    lhs, rhs, sizes = normal(16, 128), normal(1, 128, 128), jnp.asarray([16])
    text = jax.jit(grouped_matmul).lower(lhs, rhs, sizes).as_text()
    assert "tpu_custom_call" not in text
    assert "stablehlo.while" in text
    with pytest.raises(NotImplementedError):
        jax.jit(lambda *a: grouped_matmul(*a, implementation="pallas")).lower(lhs, rhs, sizes)


def test_lowered_for_a_tpu_the_kernel_is_taken():
    lhs, rhs, sizes = normal(16, 128), normal(1, 128, 128), jnp.asarray([16])
    lowered = jax.jit(grouped_matmul).trace(lhs, rhs, sizes).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize("name", MATMULS)
def test_tiles_fit_and_read_the_weights_once(name):
    shape = MATMULS[name]
    for itemsize in (2, 4):
        tile = tpu.pick_tile(shape.m, shape.k, shape.n, shape.groups, itemsize, 1)
        assert tile is not None
        assert tile.k == shape.k
        back = tpu.pick_transpose_tile(shape.m, shape.k, shape.n, shape.groups, itemsize)
        assert back is not None
        assert 2 * itemsize * (tile.m * tile.k + tile.k * tile.n) < tpu.VMEM_BYTES


def test_no_tile_is_a_reason():
    shape = jax.ShapeDtypeStruct((8192, 100_001), jnp.float32)
    weights = jax.ShapeDtypeStruct((2, 100_001, 100_003), jnp.float32)
    with pytest.raises(NotImplementedError, match="fits 48 MiB of VMEM"):
        jax.eval_shape(
            lambda a, b: grouped_matmul(a, b, jnp.zeros(2, int), implementation="pallas"),
            shape,
            weights,
        )

"""The TPU kernels of grouped matmul in the TPU interpreter, with race detection, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest
from interpreters import race_detection
from kernel_cases import SIZES, near, quantized

from meshpar_kernels import Config, _compat, grouped_matmul, grouped_matmul_transpose
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.published_model_shapes import MATMULS
from meshpar_kernels.tuning_table import MatmulKey

RNG = np.random.default_rng(2)
M, K, N, G = 300, 256, 256, 4
UNEVEN = [129, 0, 100, 40]


def normal(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def close(got, want, dtype=jnp.float32):
    near(got, want, 2e-2 if dtype == jnp.bfloat16 else 2e-5)


def run(function, *args, **options):
    with race_detection():
        return jax.block_until_ready(function(*args, implementation="pallas", **options))


CASES = {
    "plain": (jnp.float32, {"config": Config((128, K, 128))}),
    "transposed": (jnp.bfloat16, {"transpose_rhs": True}),
    "swiglu": (jnp.bfloat16, {"activation": "silu", "config": Config((256, K, 128))}),
    "everything": (
        jnp.float32,
        {"activation": "gelu", "transpose_rhs": True, "row_scale": normal(M), "group_offset": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_grouped_matmul(name):
    dtype, options = CASES[name]
    groups = 2 if "group_offset" in options else G
    shape = (groups, N, K) if options.get("transpose_rhs") else (groups, K, N)
    lhs, rhs, sizes = normal(M, K, dtype=dtype), normal(*shape, dtype=dtype), jnp.asarray(UNEVEN)
    rhs = (rhs, normal(*shape, dtype=dtype)) if "activation" in options else rhs
    got = run(grouped_matmul, lhs.at[sum(UNEVEN) :].set(jnp.nan), rhs, sizes, **options)
    assert got.dtype == dtype
    options = {name: value for name, value in options.items() if name != "config"}
    close(got, oracle.grouped_matmul(lhs, rhs, UNEVEN, **options), dtype)


def test_transpose():
    lhs, rhs, scale = normal(M, K, dtype=jnp.bfloat16), normal(M, 128, dtype=jnp.bfloat16), normal(M)
    *dirty, dirty_scale = (x.at[sum(UNEVEN) :].set(jnp.nan) for x in (lhs, rhs, scale))
    how = {"row_scale": dirty_scale, "config": Config((256, 128, 128))}
    got = run(grouped_matmul_transpose, *dirty, jnp.asarray(UNEVEN), **how)
    close(got, oracle.grouped_matmul_transpose(lhs, rhs, UNEVEN, row_scale=scale), jnp.bfloat16)
    np.testing.assert_array_equal(got[1], 0)


def test_odd_sizes_and_groups():
    """40 rows, which the groups exceed; K and N that are no multiple of 128."""
    sizes = SIZES["too many"]
    lhs, rhs, grad = normal(40, 24), normal(G, 24, 136), normal(40, 136)
    with race_detection():
        how = {"group_sizes": jnp.asarray(sizes), "implementation": "pallas_tpu"}
        one = jax.block_until_ready(grouped_matmul(lhs, rhs, **how))
        two = jax.block_until_ready(grouped_matmul_transpose(lhs, grad, **how))
    close(one, oracle.grouped_matmul(lhs, rhs, sizes))
    close(two, oracle.grouped_matmul_transpose(lhs, grad, sizes))


def test_inner_blocks(monkeypatch):
    """Loops over blocks of rows, K and N, with something left over in each."""
    monkeypatch.setattr(tpu_tiles, "BLOCK", (128, 128, 128))
    monkeypatch.setattr(tpu_tiles, "TRANSPOSE_BLOCK", (128, 128))
    lhs, rhs, grad = normal(192, 200), normal(2, 200, 136), normal(192, 136)
    sizes, options = [192, 0], {"config": Config((192, 200, 136))}
    close(run(grouped_matmul, lhs, rhs, jnp.asarray(sizes), **options), oracle.grouped_matmul(lhs, rhs, sizes))
    got = run(grouped_matmul_transpose, lhs, grad, jnp.asarray(sizes), **options)
    close(got, oracle.grouped_matmul_transpose(lhs, grad, sizes))


@pytest.mark.parametrize(
    ("dtype", "mode", "options"),
    [
        (jnp.bfloat16, "eager", {"activation": "silu", "transpose_rhs": True, "group_offset": 1}),
        (jnp.float32, "on_wait", {"row_scale": normal(40)}),
    ],
)
def test_gathered_rows(dtype, mode, options):
    """Two tiles, two stretches of columns, indices out of range, and a NaN row that nobody asks for."""
    rows, sizes = 40, [17, 0, 12, 7]
    groups = 2 if "group_offset" in options else G
    shape = (groups, N, 128) if options.get("transpose_rhs") else (groups, 128, N)
    lhs, rhs = normal(17, 128, dtype=dtype).at[5].set(jnp.nan), normal(*shape, dtype=dtype)
    rhs = (rhs, normal(*shape, dtype=dtype)) if "activation" in options else rhs
    indices = RNG.integers(-1, 19, rows)
    options = options | {"lhs_indices": jnp.asarray(np.where(indices == 5, 6, indices), jnp.int32)}
    with race_detection(dma_execution_mode=mode):
        how = {"implementation": "pallas", "config": Config((32, 128, 128))}
        got = jax.block_until_ready(grouped_matmul(lhs, rhs, jnp.asarray(sizes), **how, **options))
    close(got, oracle.grouped_matmul(lhs.at[5].set(0), rhs, sizes, **options), dtype)


@pytest.mark.parametrize(
    ("dtype", "blocks", "transposed", "more"),
    [
        (jnp.int8, 2, False, {"config": Config((64, K, 128)), "activation": "silu"}),
        (jnp.float8_e4m3fn, 2, True, {"row_scale": normal(64)}),
        (jnp.int8, None, False, {"lhs_indices": jnp.asarray(RNG.integers(-1, 65, 64), jnp.int32)}),
    ],
)
def test_quantized_weights(dtype, blocks, transposed, more, monkeypatch):
    """Two blocks of K with scales of their own, in a loop; and lhs's gradient, of which they are blocks of columns."""
    monkeypatch.setattr(tpu_tiles, "SCALED_STEP", 128)
    n, sizes, groups = 136, [25, 0, 30], 3
    scale = jnp.asarray(RNG.uniform(0.01, 0.02, (groups, *([blocks] if blocks else []), n)), jnp.float32)
    lhs, rhs = normal(64, K, dtype=jnp.bfloat16), quantized(dtype, groups, *((n, K) if transposed else (K, n)))
    how = {"transpose_rhs": transposed, "rhs_scale": scale}
    if "activation" in more:
        rhs, how["rhs_scale"] = (rhs, rhs[::-1]), (scale, scale[::-1])
    got = run(grouped_matmul, lhs.at[sum(sizes) :].set(jnp.nan), rhs, jnp.asarray(sizes), **how, **more)
    more = {name: value for name, value in more.items() if name != "config"}
    if "lhs_indices" in more:
        known = np.asarray(more["lhs_indices"]) < sum(sizes)  # the others hold NaN
        more["lhs_indices"], got = np.where(known, more["lhs_indices"], -1), jnp.where(known[:, None], got, 0)
    close(got, oracle.grouped_matmul(lhs, rhs, sizes, **how, **more), jnp.bfloat16)
    if "activation" in more or "lhs_indices" in more:
        return
    grad = normal(64, n, dtype=jnp.bfloat16)

    def pulled(lhs, implementation):
        def matmul(lhs):
            return grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation=implementation, **how, **more)

        return jax.vjp(matmul, lhs)[1](grad.astype(lhs.dtype))[0]

    with race_detection():
        got = jax.block_until_ready(pulled(lhs, "pallas"))
    close(got, np.asarray(pulled(lhs.astype(jnp.float32), "reference"), np.float64), jnp.bfloat16)


def test_every_row_chunk_of_a_shared_tile():
    """Groups of many sizes in one tile; both matmuls, in bfloat16 and by each row's own group."""
    sizes = [1, 15, 32, 49, 97, 106]
    rows = sum(sizes)
    lhs, rhs = normal(rows, 128, dtype=jnp.bfloat16), normal(len(sizes), 128, 128, dtype=jnp.bfloat16)
    grad, scale = normal(rows, 128, dtype=jnp.bfloat16), normal(rows)
    got = run(grouped_matmul, lhs, rhs, jnp.asarray(sizes), row_scale=scale, config=Config((512, 128, 128)))
    close(got, oracle.grouped_matmul(lhs, rhs, sizes, row_scale=scale), jnp.bfloat16)
    got = run(grouped_matmul_transpose, lhs, grad, jnp.asarray(sizes), config=Config((512, 128, 128)))
    close(got, oracle.grouped_matmul_transpose(lhs, grad, sizes), jnp.bfloat16)


def test_a_tile_that_is_no_multiple_of_16_rows_is_refused():
    with pytest.raises(NotImplementedError, match="tile of 24 rows"):
        run(grouped_matmul, normal(40, 128), normal(1, 128, 128), jnp.asarray([40]), config=Config((24, 128, 128)))


def test_gradients_use_the_kernels():
    lhs, rhs, sizes = normal(128, 128), normal(G, 128, 128), jnp.asarray([50, 0, 50, 9])

    def loss(lhs, rhs, implementation):
        return (grouped_matmul(lhs, rhs, sizes, implementation=implementation) ** 2).sum()

    grad = jax.grad(loss, (0, 1))
    text = str(jax.make_jaxpr(grad, static_argnums=2)(lhs, rhs, "pallas_tpu"))
    assert text.count("name=meshpar_grouped_matmul\n") == 2
    assert text.count("name=meshpar_grouped_matmul_transpose\n") == 1
    want = jax.jit(grad, static_argnums=2)(lhs, rhs, "xla")
    with race_detection():
        got = jax.block_until_ready(jax.jit(grad, static_argnums=2)(lhs, rhs, "pallas_tpu"))
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("name", MATMULS)
def test_tiles_fit_and_read_the_weights_once(name, monkeypatch):
    """Where two cores share a kernel (v4 and v5p), both have tiles; of 2,880 columns they had one between them."""
    shape = MATMULS[name]
    assert _compat.tpu_cores() == 1  # no TPU is traced for here

    def tiles(n, itemsize):
        key = MatmulKey("grouped_matmul", shape.m, shape.k, n, shape.groups)
        keys = key, dataclasses.replace(key, op="grouped_matmul_transpose")
        found = [tpu_tiles.pick_tile(one, itemsize) for one in keys]
        assert None not in found
        return found

    for itemsize in (2, 4):
        tile, _ = tiles(shape.n, itemsize)
        assert tile.k == shape.k
        assert 2 * itemsize * (tile.m * tile.k + tile.k * tile.n) < 48 << 20
    monkeypatch.setattr(_compat, "tpu_cores", lambda: 2)
    for n in {shape.n, 2880}:
        forward, back = tiles(n, 2)
        assert tpu_tiles.cdiv(n, forward.n) % 2 == 0
        steps = tpu_tiles.cdiv(shape.k, back.k), tpu_tiles.cdiv(n, back.n)
        assert (steps[0] if steps[0] > 1 else steps[1]) % 2 == 0


def test_a_last_tile_of_columns_that_is_narrower():
    """As two cores have them: 192 columns in tiles of 128, of the result and of the weights' gradient."""
    lhs, rhs, grad = normal(136, 192), normal(G, 192, 192), normal(136, 192)
    sizes = [70, 0, 30, 20]
    for transposed in (False, True):
        how = {"config": Config((128, 192, 128)), "transpose_rhs": transposed}
        got = run(grouped_matmul, lhs, rhs, jnp.asarray(sizes), **how)
        close(got, oracle.grouped_matmul(lhs, rhs, sizes, transpose_rhs=transposed))
    got = run(grouped_matmul_transpose, lhs, grad, jnp.asarray(sizes), config=Config((128, 128, 128)))
    close(got, oracle.grouped_matmul_transpose(lhs, grad, sizes))


def test_no_tile_is_a_reason():
    shape = jax.ShapeDtypeStruct((8192, 100_001), jnp.float32)
    weights = jax.ShapeDtypeStruct((2, 100_001, 100_003), jnp.float32)
    with pytest.raises(NotImplementedError, match="fits 48 MiB of VMEM"):
        jax.eval_shape(lambda a, b: grouped_matmul(a, b, jnp.zeros(2, int), implementation="pallas"), shape, weights)

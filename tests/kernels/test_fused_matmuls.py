"""Matmuls of any rank by the fused TPU kernels, in the interpreter with race detection, against NumPy in float64; what they
refuse, and what they copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import simulated

from meshpar_kernels.collective_matmul import Dot
from meshpar_kernels.collective_matmul import tpu_common as tpu
from meshpar_kernels.collective_matmul.tpu_fused_dot_general import FusedGather, FusedScatter

ROWS_COLUMNS = (((2,), (0,)), ((), ()))  # [b, s, K] · [K, …]
ROWS_ROWS = (((2,), (1,)), ((), ()))  # [b, s, K] · [n, K]
HIGHEST = "highest"


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gathered(x):
    """[A, b, s, …] → [b, A·s, …]"""
    return np.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]).astype(np.float64)


def test_matmuls_that_share_a_gather_and_the_gathered_operand(monkeypatch):
    """Two matmuls of [2, 8, 128] over 4 devices, one with a narrow result of two dims; the blocks' dim is the second."""
    monkeypatch.setattr(tpu, "pick_tile", lambda *args, **options: tpu.Tile(8, 128))
    x, w, v = draw(4, 2, 8, 128), draw(4, 128, 96, seed=1), draw(4, 128, 4, 8, seed=2)
    dots = [Dot(ROWS_COLUMNS, 0, HIGHEST), Dot(ROWS_COLUMNS, 0, HIGHEST)]
    fused = FusedGather.of(x[0], [w[0], v[0]], dots, 1, 4, keep=True)
    assert isinstance(fused, (FusedGather, FusedScatter))
    first, second, kept = simulated(lambda x, w, v: fused(x, [w, v], "a"), (4,), x, w, v)
    np.testing.assert_allclose(kept, np.broadcast_to(gathered(x), kept.shape))
    np.testing.assert_allclose(first, np.einsum("bsk,akn->absn", gathered(x), w.astype(np.float64)), atol=1e-4)
    np.testing.assert_allclose(second, np.einsum("bsk,aknh->absnh", gathered(x), v.astype(np.float64)), atol=1e-4)
    # both weights are put side by side; rows of two blocks are interleaved, of the result and of what is kept
    result, keeps = 4 * 2 * 8 * 128 * 4, 4 * 2 * 8 * 128 * 4
    assert fused.copied == 2 * (4 * 128 * (96 + 32) + result + keeps)


def test_what_is_gathered_may_stand_right_and_weights_may_be_transposed():
    """[n, K] · [8, 128]ᵀ: the result is [n, A·8]."""
    x, w = draw(2, 8, 128), draw(2, 128, 128, seed=1)
    dot = Dot((((1,), (1,)), ((), ())), 1, HIGHEST)
    fused = FusedGather.of(x[0], [w[0]], [dot], 0, 2)
    (got,) = simulated(lambda x, w: fused(x, [w], "a"), (2,), x, w)
    rows = x.reshape(16, 128).astype(np.float64)
    np.testing.assert_allclose(got, np.einsum("ank,sk->ans", w.astype(np.float64), rows), atol=1e-4)
    assert fused.copied == 2 * 4 * 16 * 128  # the result is turned


def test_a_sum_of_matmuls_is_scattered():
    """[2, 4·8, K] · [n, K]: two matmuls, of 128 and of 256 summed columns; the scattered dim is the second."""
    xs = draw(4, 2, 32, 128), draw(4, 2, 32, 256, seed=1)
    ws = draw(4, 128, 128, seed=2), draw(4, 128, 256, seed=3)
    dots = [Dot(ROWS_ROWS, 0, HIGHEST)] * 2
    pairs = [(x[0], w[0]) for x, w in zip(xs, ws, strict=True)]
    fused = FusedScatter.of(pairs, dots, [1, 1], 4, jnp.float32, jnp.float32)
    assert isinstance(fused, (FusedGather, FusedScatter))
    got = simulated(lambda x, w, y, v: fused([(x, w), (y, v)], "a"), (4,), xs[0], ws[0], xs[1], ws[1], mode="eager")
    whole = sum(np.einsum("absk,ank->bsn", x.astype(np.float64), w) for x, w in zip(xs, ws, strict=True))
    want = np.moveaxis(whole.reshape(2, 4, 8, 128), 1, 0)
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert fused.copied == 2 * 4 * (2 * 32 * 384 + 128 * 384)


@pytest.mark.slow
def test_gradients_equal_those_of_the_matmuls():
    x, w = draw(2, 1, 8, 128), draw(2, 128, 128, seed=1)
    fused = FusedGather.of(x[0], [w[0]], [Dot(ROWS_COLUMNS, 0, HIGHEST)], 1, 2)

    def gradient(x, w):
        return jax.grad(lambda x, w: jnp.sum(fused(x, [w], "a")[0] ** 2) / 2, (0, 1))(x, w)

    dx, dw = simulated(gradient, (2,), x, w)
    rows, wide = x.reshape(16, 128).astype(np.float64), w.astype(np.float64)
    out = rows @ wide  # [A, 16, n]
    np.testing.assert_allclose(dw, rows.T @ out, atol=1e-2)
    np.testing.assert_allclose(dx[:, 0], np.einsum("asn,akn->sk", out, wide).reshape(2, 8, 128), atol=1e-2)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_what_the_kernels_do_not_take_is_said():
    x, w = shape(4, 256, 4096), shape(4096, 1792)
    gather = lambda x, w, dot, dim=1: FusedGather.of(x, [w], [dot], dim, 8)  # noqa: E731
    assert isinstance(gather(x, w, Dot(ROWS_COLUMNS)), FusedGather)
    assert gather(x, w, Dot(ROWS_COLUMNS), dim=2)[0].startswith("the gathered dim is contracted")
    assert "multiples of 128" in gather(x, shape(4096, 100), Dot(ROWS_COLUMNS))[0]
    assert gather(x, shape(4096, 128, dtype=jnp.float32), Dot(ROWS_COLUMNS)) == ("matmuls of several dtypes",)
    batched = Dot((((2,), (1,)), ((0,), (0,))))
    assert gather(x, shape(4, 4096, 128), batched) == ("a matmul has batch dims",)
    mixed = FusedGather.of(x, [w, w], [Dot(ROWS_COLUMNS), Dot(ROWS_COLUMNS, 0, HIGHEST)], 1, 8)
    assert mixed == ("matmuls of several precisions",)
    scatter = lambda *pairs: FusedScatter.of(  # noqa: E731
        pairs, [Dot(ROWS_COLUMNS)] * len(pairs), [1] * len(pairs), 8, "bfloat16", "float32"
    )
    assert scatter((shape(4, 250, 1792), shape(1792, 4096))) == ("250 rows do not divide over 8 devices",)
    assert scatter((x, w), (shape(4, 512, 4096), w)) == ("the matmuls of the sum have different shapes",)

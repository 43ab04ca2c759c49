"""Linear algebra on split matrices, batches and right-hand sides: equal to NumPy."""

import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp

RNG = np.random.default_rng(2)
LOWERINGS = ["shard_map", "jit"]
MESHES = {
    "data=4, model=2": "batch: data; sides: model",
    "data=2, model=2, idle=2": "sides: data; batch: model",
}


normal = functools.partial(arrays.normal, RNG)


def run(step, *args, mesh, layout, dims, lowering):
    return mp.jit(step, mesh=mp.mesh(mesh), layout=layout, dims=dims, lowering=lowering)(*args)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_triangular_solve(mesh, lowering):
    a, b = np.tril(normal(8, 6, 6)) + 4 * np.eye(6, dtype=np.float32), normal(8, 6, 4)

    def step(a, b):
        solve = lax.linalg.triangular_solve
        return {
            "left": solve(a, b, left_side=True, lower=True),
            "transposed": solve(a, b, left_side=True, lower=True, transpose_a=True),
            "right": solve(a, jnp.swapaxes(b, 1, 2), lower=True),
            "gradients": jax.grad(lambda a, b: (solve(a, b, left_side=True, lower=True) ** 2).sum(), (0, 1))(a, b),
        }

    dims = {"a": "batch _ _", "b": "batch _ sides"}
    got = run(step, a, b, mesh=mesh, layout=MESHES[mesh], dims=dims, lowering=lowering)
    at = np.swapaxes(a, 1, 2)
    x = np.linalg.solve(a, b)
    np.testing.assert_allclose(got["left"], x, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["transposed"], np.linalg.solve(at, b), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["right"], np.swapaxes(np.linalg.solve(at, b), 1, 2), rtol=2e-5, atol=2e-5)
    back = np.linalg.solve(at, 2 * x)  # of b; of a it is -back xᵀ, in the triangle that is read
    np.testing.assert_allclose(got["gradients"][1], back, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["gradients"][0], -np.tril(back @ np.swapaxes(x, 1, 2)), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_triangular_solve_gathers_matrices_that_are_split(lowering):
    """All-to-alls split the batch instead, and only the result is all-gathered: 216 bytes instead of 240 for two all-gathers."""
    a, b = np.tril(normal(8, 6, 6)) + 4 * np.eye(6, dtype=np.float32), normal(8, 6, 4)
    run = mp.jit(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        mesh=mp.mesh("data=4, model=2"),
        layout="batch: data; rows: model",
        dims={"a": "batch rows _", "b": "batch rows _"},
        lowering=lowering,
    )
    np.testing.assert_allclose(run(a, b), np.linalg.solve(a, b), rtol=2e-5, atol=2e-5)
    sent = run.plan(a, b).collectives
    assert {c.axes for c in sent} == {("model",)}
    half = [2 * 6 * n * 4 / 2 for n in (4, 6)]  # what a device lacks of the two operands
    assert sorted((c.op, c.bytes) for c in sent) == [
        ("all-gather", half[0]), ("all-to-all", half[0] / 2), ("all-to-all", half[1] / 2),
    ]  # fmt: skip


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("layout", ["batch: data; features: model", "features: data", "batch: data; rows: model"])
def test_symmetric_product(layout, lowering):
    """If contracted columns are split, the other operand is added on one device only."""
    a, c = normal(4, 6, 8), normal(4, 6, 6)

    def step(a, c):
        return lax.linalg.symmetric_product(a, c, alpha=2.0, beta=3.0)

    dims = {"a": "batch rows features", "c": "batch rows _"}
    got = run(step, a, c, mesh="data=4, model=2", layout=layout, dims=dims, lowering=lowering)
    np.testing.assert_allclose(got, 2 * a @ np.swapaxes(a, 1, 2) + 3 * c, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_batches_of_factorizations(lowering):
    x = normal(8, 6, 4)
    spd = x @ np.swapaxes(x, 1, 2) + 4 * np.eye(6, dtype=np.float32)

    def step(x, spd):
        q, r, p = lax.linalg.qr(x, pivoting=True, full_matrices=False)
        return q @ r, p, jnp.linalg.cholesky(spd), jnp.fft.fft(x, axis=1)

    dims = {"x": "batch rows columns", "spd": "batch rows _"}
    got = run(step, x, spd, mesh="data=4, model=2", layout="batch: data; rows: model", dims=dims, lowering=lowering)
    np.testing.assert_allclose(got[0], np.take_along_axis(x, np.asarray(got[1])[:, None], 2), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[2], np.linalg.cholesky(spd), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got[3], np.fft.fft(x, axis=1), rtol=2e-5, atol=2e-5)

"""Linear algebra on split matrices, batches and right-hand sides: equal to NumPy."""

import functools

import arrays
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar._src.verify.hlo import collectives

RNG = np.random.default_rng(2)
LOWERINGS = ["shard_map", "jit"]
MESHES = {"data=4, model=2": "batch: data; sides: model", "data=2, model=2, idle=2": "sides: data; batch: model"}


normal = functools.partial(arrays.normal, RNG)


def run(step, *args, mesh, layout, dims, lowering):
    return mp.jit(step, mesh=mesh, layout=layout, dims=dims, lowering=lowering)(*args)


def triangular_solve(a, b):
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


@pytest.mark.parametrize(("mesh", "lowering"), covering.each(MESHES, LOWERINGS))
def test_triangular_solve(mesh, lowering):
    a, b = np.tril(normal(8, 6, 6)) + 4 * np.eye(6, dtype=np.float32), normal(8, 6, 4)

    def step(a, b):
        solve = lax.linalg.triangular_solve
        return {
            "left": triangular_solve(a, b),
            "transposed": solve(a, b, left_side=True, lower=True, transpose_a=True),
            "right": solve(a, jnp.swapaxes(b, 1, 2), lower=True),
            "gradients": jax.grad(lambda a, b: (triangular_solve(a, b) ** 2).sum(), (0, 1))(a, b),
        }

    dims = {"a": "batch _ _", "b": "batch _ sides"}
    assert not mp.plan(triangular_solve, a, b, mesh=mesh, layout=MESHES[mesh], dims=dims).collectives
    got = run(step, a, b, mesh=mesh, layout=MESHES[mesh], dims=dims, lowering=lowering)
    at = np.swapaxes(a, 1, 2)
    x = np.linalg.solve(a, b)
    np.testing.assert_allclose(got["left"], x, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["transposed"], np.linalg.solve(at, b), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["right"], np.swapaxes(np.linalg.solve(at, b), 1, 2), rtol=2e-5, atol=2e-5)
    back = np.linalg.solve(at, 2 * x)  # of b; of a it is -back xᵀ, in the triangle that is read
    np.testing.assert_allclose(got["gradients"][1], back, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(got["gradients"][0], -np.tril(back @ np.swapaxes(x, 1, 2)), rtol=2e-4, atol=2e-4)


def sent(compiled):
    """Bytes that a device sends in a compiled program."""
    return sum(c.bytes * (c.count or 1) for c in collectives(compiled.as_text()))


def solutions(a, b):
    """Of symmetric matrices ``a`` and vectors ``b``, by solvers that JAX builds from its linear solve or batches as vectors."""
    half, inverse = 0.5 * b, jax.vmap(jnp.linalg.inv)(a)
    pivoted = jax.vmap(lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b))
    again = lax.scan(lambda x, _: (jax.vmap(jnp.linalg.solve)(a, x), None), b, None, length=2)[0]
    return {
        "solve": jax.vmap(jnp.linalg.solve)(a, b),
        "lu": pivoted(a, b),
        "twice": again,
        "inverse": inverse,
        "exponential": jax.scipy.linalg.expm(a / 16),
        "gradient of det": jax.grad(lambda a: jnp.linalg.det(a).sum())(a),
        "gradient of solve": jax.grad(lambda b: (jax.vmap(jnp.linalg.solve)(a, b) ** 2).sum())(b),
        "tangent": jax.jvp(lambda a: jax.vmap(jnp.linalg.solve)(a, b), (a,), (a,))[1],
        "tridiagonal": lax.linalg.tridiagonal_solve(half, jnp.ones_like(b) * 4, half, b[..., None])[..., 0],
    }


def expected_solutions(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    x, inverse = np.linalg.solve(a, b[..., None])[..., 0], np.linalg.inv(a)
    values, vectors = np.linalg.eigh(a / 16)
    off = 0.5 * b
    matrix = 4 * np.eye(b.shape[1]) + np.stack([np.diag(r[1:], -1) + np.diag(r[:-1], 1) for r in off])
    return {
        "solve": x,
        "lu": x,
        "twice": np.einsum("bij,bj->bi", inverse, x),
        "inverse": inverse,
        "exponential": np.einsum("bij,bj,bkj->bik", vectors, np.exp(values), vectors),
        "gradient of det": np.linalg.det(a)[:, None, None] * inverse,
        "gradient of solve": np.einsum("bij,bj->bi", inverse, 2 * x),
        "tangent": -x,
        "tridiagonal": np.linalg.solve(matrix, b[..., None])[..., 0],
    }


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_small_systems_of_a_batch_send_nothing(lowering):
    a = normal(8, 6, 6)
    a, b = a @ np.swapaxes(a, 1, 2) / 6 + 2 * np.eye(6, dtype=np.float32), normal(8, 6)
    dims = {"a": "batch _ _", "b": "batch _"}
    step = mp.jit(solutions, mesh="data=4, model=2", layout="batch: data", dims=dims, lowering=lowering)
    compiled = step.lower(a, b).compile()
    got, want = compiled(a, b), expected_solutions(a, b)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=2e-4, atol=2e-4 * np.abs(x).max(), err_msg=name)
    assert step.plan(a, b).collectives == ()
    assert sent(compiled) == 0


@pytest.mark.parametrize(("solver", "lowering"), covering.each(["cg", "gmres"], LOWERINGS))
def test_iterations_over_split_rows_send_what_plain_jit_sends(solver, lowering):
    """Normal equations: an iteration all-reduces a vector of features; and so do gradients."""
    t, y = 0.2 * normal(64, 8), normal(64)

    def fit(t, y):
        return getattr(jax.scipy.sparse.linalg, solver)(lambda v: t.T @ (t @ v) + v, t.T @ y, tol=1e-6)[0]

    def gradient(t, y):
        return jax.grad(lambda y: (fit(t, y) ** 2).sum())(y)

    where = {"mesh": "data=4, model=2", "layout": "batch: data", "dims": {"t": "batch _", "y": "batch"}}
    step, inside = (mp.jit(f, lowering=lowering, **where) for f in (fit, gradient))
    m, x = np.asarray(t, np.float64), np.linalg.solve(t.T.astype(np.float64) @ t + np.eye(8), t.T @ y)
    back = m @ np.linalg.solve(m.T @ m + np.eye(8), 2 * x)
    np.testing.assert_allclose(jax.grad(lambda y: (step(t, y) ** 2).sum())(y), back, rtol=1e-3, atol=1e-4)
    for run, want in ((step, x), (inside, back)):
        ours = run.lower(t, y).compile()
        np.testing.assert_allclose(ours(t, y), want, rtol=1e-3, atol=1e-4)
        shardings = {"in_shardings": ours.input_shardings[0], "out_shardings": ours.output_shardings}
        assert 0 < sent(ours) <= 1.1 * sent(jax.jit(run.__wrapped__, **shardings).lower(t, y).compile())
        assert {c.op for c in run.plan(t, y).collectives} == {"all-reduce"}
        (note,) = (n for n in run.plan(t, y).notes if "number of iterations" in n)
        assert "test_linalg.py" in note

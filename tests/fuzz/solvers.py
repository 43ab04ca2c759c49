"""Statements of random programs that solve linear systems: of a batch, by iterations over rows, by own functions."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from statements import statement
from writer import Writer


@statement(0.8)
def solver(w: Writer) -> None:
    """Well-conditioned systems, since rounding of others differs by the order of summation: ``2 + a aᵀ / n`` and near it."""
    x = w.pick(ranks=(2, 3), such=lambda v: v.shape[-1] <= 16)
    n = x.shape[-1]
    name = f"f{w.name()[1:]}"
    before = [
        f"{name}_a = jnp.tanh({x.name})",
        f"{name}_m = {name}_a[..., :, None] * {name}_a[..., None, :] / {n} + 2 * jnp.eye({n}, dtype=F)",
    ]
    w.emit(w.of([
        f"jnp.linalg.solve({name}_m, {name}_a[..., None])[..., 0]", f"jnp.linalg.inv({name}_m)",
        f"jnp.vectorize(jnp.linalg.solve, signature='(n,n),(n)->(n)')({name}_m, {name}_a)",
        f"jnp.linalg.slogdet({name}_m)[1]", f"jax.scipy.linalg.expm(0.25 * {name}_m)",
        f"jax.vmap(lambda m, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(m), b))({name}_m.reshape(-1, {n}, {n}), {name}_a.reshape(-1, {n}))",
        f"lax.linalg.tridiagonal_solve({name}_a, {name}_a + 4, {name}_a, {x.name}[..., None])",
        f"lax.scan(lambda c, _: (jnp.linalg.solve({name}_m, c), c.sum()), {name}_a[..., None], None, length=2)",
    ]), 4.0, before=before)  # fmt: skip


@statement(0.8)
def iteration(w: Writer) -> None:
    """Normal equations whose rows may be split, by iterations; the system of each element of a batch under ``vmap``."""
    x = w.pick(ranks=(2, 3), such=lambda v: v.shape[-1] <= 16)
    name = f"f{w.name()[1:]}"
    how = w.of(["cg", "cg", "bicgstab", "own"])
    if how == "own":  # Jacobi's iteration, with an auxiliary result
        solve = "lambda f, b: (lax.fori_loop(0, 24, lambda i, v: v + 0.4 * (b - f(v)), b), b.sum())"
        solved = f"lax.custom_linear_solve({name}_f(a), a.mean(0), {solve}, {solve}, symmetric=True, has_aux=True)[0]"
    else:
        solved = f"jax.scipy.sparse.linalg.{how}({name}_f(a), a.mean(0), tol=1e-7, maxiter=12)[0]"
    before = [
        f"{name}_f = lambda a: lambda v: a.T @ (a @ v) / {x.shape[-2]} / {x.shape[-1]} + 2 * v",
        f"{name} = lambda a: {solved}",
    ]
    a = f"jnp.tanh({x.name})"
    w.emit(f"{name}({a})" if len(x.shape) == 2 else f"jax.vmap({name})({a})", 2.0, before=before)

"""Statements at the edges: functions without a derivative at zero, functions as parameters of ops."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from lookups import indices
from statements import statement
from writer import Writer


@statement(1.2)
def singular(w: Writer) -> None:
    """Views of positive data; outside of them, where padding and idle slots compute, the derivatives are infinite."""
    x = w.pick(ranks=(1, 2), such=lambda v: v.top <= 64 and v.shape[0] > 2)
    name = f"f{w.name()[1:]}"
    views = [(f"{name}[1:]", f"{name}[:-1]"), (f"{name}[2:]", f"{name}[:-2]"), (f"jnp.roll({name}, 1, 0)", name)]
    late, early = w.of(views)
    w.emit(w.of([
        f"jnp.log({late} / {early})", f"jnp.log({late}).std()", f"1.0 / {late}", f"jnp.cbrt({late} / {early})", f"lax.rsqrt({late}) * {early}", f"jnp.power({late}, -0.5)",
        f"{late} / jnp.sqrt(({late} ** 2).sum(-1, keepdims=True))", f"lax.digamma({late} / {early})", f"jnp.sqrt({early} @ jnp.full({x.shape[-1]}, 0.5, F))" if len(x.shape) == 2 else f"jnp.sqrt({early})",
        f"jnp.log(nn.softmax(jnp.log({late}), 0)).var()",
    ]), 16.0, before=[f"{name} = 0.5 + jnp.abs(jnp.tanh({x.name}))"])  # fmt: skip


@statement(1)
def applied(w: Writer) -> None:
    """A function of the elements at indices; JAX does not differentiate it."""
    x = w.pick(ranks=(2,), such=lambda v: v.top <= 16)
    n, m = x.shape
    ids = indices(w, (1,))
    i = f"{ids.name}[0]"
    where = w.of([f"{w.rng.randrange(n)}", "-1", "..., -1", f":, {w.rng.randrange(m)}", f"{i} % {n}", f":, {i} % {m}", f"{i} % {n}, {i} % {m}", f"jnp.array([{w.rng.randrange(n)}])", f"{w.rng.randrange(n)}:", f"jnp.array([0, {n - 1}])"])  # fmt: skip
    fn = w.of(["jnp.square", "jnp.sin", "jnp.negative", "lambda v: v * 2 + 1"])
    mode = w.of(["", ", mode='drop'", ", mode='clip'"])
    w.emit(f"lax.stop_gradient({x.name}).at[{where}].apply({fn}{mode})", max(x.top**2, 2 * x.top + 1))

"""Statements whose ops take or return several arrays, which may want the same mesh axis for different dims."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from statements import statement
from writer import Var, Writer


def several(w: Writer, n: int = 3) -> list[Var]:
    """Arrays of any shapes, among them inputs with other dims."""
    found = [w.pick(ranks=(1, 2, 3)) for _ in range(n - 1)]
    found.append(w.fresh((w.split_size(), w.of([2, 4]))) if w.chance(0.5) else w.pick(ranks=(1, 2)))
    return found


@statement(1)
def barriers(w: Writer) -> None:
    xs = several(w)
    top = max(x.top * x.shape[0] for x in xs)
    forms = ([x.name, f"{x.name} * 2", f"{x.name}.sum(0)", f"lax.stop_gradient({x.name}).max(0)"] for x in xs)
    parts = ", ".join(map(w.of, forms))
    w.emit(f"list(lax.optimization_barrier(({parts},)))", 2 * top, scale=False, kind="o" if top > 32 else None)


@statement(0.8)
def sorted_together(w: Writer) -> None:
    x = w.pick(ranks=(1, 2), exact=True, such=lambda v: v.top <= 64)
    axis = w.axis(x)
    keys = w.of([1, 2])
    text = f"jnp.round({x.name}), {x.name} * 2 + 1, jnp.flip({x.name})"
    w.emit(f"list(lax.sort(({text}), dimension={axis}, num_keys={keys}))", 2 * x.top + 1, x.bits, scale=False)


@statement(0.8)
def reduced_together(w: Writer) -> None:
    """``lax.reduce`` and ``lax.reduce_window`` of several arrays."""
    x = w.pick(ranks=(1, 2, 3), exact=True, such=lambda v: v.top <= 16)
    axis = w.axis(x)
    a, name = f"lax.stop_gradient({x.name})", f"f{w.name()[1:]}"
    window = tuple(min(2, n) if k == axis else 1 for k, n in enumerate(x.shape))
    before = w.of([
        [f"{name} = lambda a, b: (a[0] + b[0], lax.max(a[1], b[1]))", f"{name}_i = (F(0), F(-100))"],
        [f"{name} = lambda a, b: (lax.min(a[0], b[0]), a[1] + b[1])", f"{name}_i = (F(100), F(0))"],
        [f"{name} = lambda a, b: (lax.select(a[0] >= b[0], a[0], b[0]), lax.select(a[0] >= b[0], a[1], b[1]))", f"{name}_i = (F(-100), F(-100))"],
    ])  # fmt: skip
    second = f"{a} * 2" if "select" in before[0] else f"jnp.flip({a})"  # ties must not show
    w.emit(w.of([
        f"list(lax.reduce(({a}, {second}), {name}_i, lambda a, b: {name}(a, b), ({axis},)))",
        f"list(lax.reduce_window(({a}, {second}), {name}_i, lambda a, b: {name}(a, b), {window}, {window}, 'VALID'))",
    ]), 2 * x.top * x.shape[axis], before=before, scale=False, kind="o")  # fmt: skip


@statement(0.8)
def branches_of_tuples(w: Writer) -> None:
    """Several values into and out of cond, switch, scan and while."""
    x, y = several(w, 2)
    ids = w.ids()
    p = f"{ids.name}.sum() % 2 == 0"
    a, b = f"jnp.tanh({x.name})", f"jnp.tanh({y.name})"
    w.emit(w.of([
        f"list(lax.cond({p}, lambda a, b: (a * 2, b.sum(0), b), lambda a, b: (a, b[0], b * 0.5), {a}, {b}))",
        f"list(lax.switch({ids.name}[0] % 3, [lambda a, b: (a, b), lambda a, b: (a * 2, b), lambda a, b: (a * a.sum(), jnp.flip(b))], {a}, {b}))",
        f"list(lax.scan(lambda c, i: ((c[0] * 0.5 + c[1].mean(), c[1] + i), None), ({a}, {b}), jnp.arange(3.0, dtype=F))[0])",
        f"list(lax.fori_loop(0, 3, lambda i, c: (c[0] + c[1].sum() * 0.125, c[1] * 0.5), ({a}, {b})))",
        f"list(jax.checkpoint(lambda a, b: (jnp.sin(a) * b.sum(), jnp.cos(b)))({a}, {b}))",
    ]), 64.0, scale=False)  # fmt: skip


@statement(0.5)
def random_words(w: Writer) -> None:
    """The random bits' own primitive, which has two results."""
    x = w.pick(ranks=(1, 2), exact=True, such=lambda v: v.top <= 64)
    bits = f"(jnp.abs({x.name}) * 4).astype(jnp.uint32)"
    w.emit(f"list(threefry2x32({bits}, {bits} + 1, {bits} ^ 5, jnp.flip({bits})))", scale=False, kind="o")

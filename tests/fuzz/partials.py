"""Statements on partial values: a reduction, ops that move its elements, then one that commutes with some reductions only."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from statements import statement
from writer import Skip, Writer

INTEGERS = ("jnp.int32", "jnp.int8", "jnp.uint8", "jnp.int16", "jnp.uint32")

MOVED = (
    "{}",
    "{}",
    "{}",
    "jnp.flip({})",
    "{}.T",
    "{}[None]",
    "lax.optimization_barrier({})",
    "{}.reshape(-1)",
    "({0}, {0})[0]",
)

FLOATS = (  # reductions of floats, exact for small multiples of powers of two
    "{x}.sum({a})", "{x}.sum({a})", "{x}.max({a})", "{x}.min({a})", "jnp.abs({x}).max({a})", "jnp.prod(1.0 + ({x} > 0.5), {a})",
    "jnp.einsum('...i,...i->...', jnp.moveaxis({x}, {a}, -1), jnp.moveaxis({x}, {a}, -1))",
    "jax.vmap(lambda r: lax.psum(r, 'p'), in_axes={a}, out_axes=None, axis_name='p')({x})",
    "jax.vmap(lambda r: lax.pmax(r, 'p'), in_axes={a}, out_axes=None, axis_name='p')(lax.stop_gradient({x}))",
    "jax.ops.segment_sum(jnp.moveaxis({x}, {a}, 0), jnp.arange({n}) // 3, {n} // 3 + 1)",
)  # fmt: skip
AFTER_FLOATS = (  # what follows, in f32
    "jnp.cumsum({}, -1)", "jnp.cumsum({}, -1)", "jnp.cumsum({}, -1)", "jnp.cumsum({}, -1)", "lax.cumsum({}, {}.ndim - 1, reverse=True)", "lax.cummax({}, {}.ndim - 1)", "jnp.cumprod({} * 0.125 + 1, -1)", "lax.cumlogsumexp({} * 0.125, {}.ndim - 1)",
    "jnp.sign({})", "jnp.abs({})", "-{}", "1.0 / (1.0 + jnp.abs({}))", "2.0 / ({} + 1000.0)", "{} * {s}", "{s} * {} + {}", "{} / (1.0 + jnp.square({s}))", "{} * 0.25", "{} / 3", "lax.div({}, jnp.asarray(3, {}.dtype))", "jnp.square({})",
    "jnp.where(jnp.arange({}.shape[-1]) % 2 == 0, {}, 0)", "jnp.where(jnp.arange({}.shape[-1]) % 2 == 0, {}, 1)", "jnp.where({} > 2, {}, 0)", "jnp.pad({}, 1, constant_values=0.5)",
    "jnp.concatenate([{}, {} * 2], -1)", "{} @ jnp.arange(float({}.shape[-1])).astype(F)", "lax.rev({}, (0,))", "jnp.clip({}, -1.0, 1.5)", "lax.reduce_precision({}, 8, 3)", "{}.sum()", "{}.max()", "lax.integer_pow({}, 2) * 0.125",
    "jnp.zeros({}.shape, F).at[0].add({}[0]) + 1", "jnp.ones({}.shape, F).at[:1].multiply({}[:1])", "lax.dynamic_update_slice(jnp.ones({}.shape, F), {}[:1], ({i},) + (np.zeros((), {i}.dtype),) * ({}.ndim - 1))", "jnp.sort({}, -1)", "jnp.float32(1.0) - {}", "{} - {s}",
)  # fmt: skip
WHOLES = (  # reductions of integers
    "{x}.sum({a}, dtype={t})", "{x}.sum({a}, dtype={t})", "{x}.max({a})", "{x}.min({a})", "lax.reduce_or({x}, ({a},))", "lax.reduce_and({x}, ({a},))", "lax.reduce_xor({x}, ({a},))", "jnp.prod({x}, {a}, dtype={t})",
    "jnp.einsum('...i,...i->...', jnp.moveaxis({x}, {a}, -1), jnp.moveaxis({x}, {a}, -1))", "jax.vmap(lambda r: lax.psum(r, 'p'), in_axes={a}, out_axes=None, axis_name='p')({x})",
    "jnp.einsum('...i,...i->...', jnp.moveaxis({x}, {a}, -1), jnp.moveaxis({x}, {a}, -1), preferred_element_type=jnp.int32)",
    "jax.ops.segment_sum(jnp.moveaxis({x}, {a}, 0), jnp.arange({n}) // 3, {n} // 3 + 1)",
)  # fmt: skip
AFTER_WHOLES = (
    "lax.div({}, jnp.asarray(3, {}.dtype))", "lax.div({}, jnp.asarray(3, {}.dtype))", "lax.div({} * 2, jnp.full({}.shape, 5, {}.dtype))", "lax.rem({}, jnp.asarray(3, {}.dtype))", "{} // 3", "{} % 5", "jnp.cumsum({}, -1, dtype={}.dtype)", "lax.cummin({}, {}.ndim - 1)",
    "lax.shift_right_arithmetic({}, jnp.asarray(1, {}.dtype))", "{} << 1", "{} & 6", "{} | 1", "~{}", "jnp.sign({})", "{}.astype(F) / 3", "{}.astype(jnp.int8)", "{}.astype(jnp.int32)", "{}.astype(bool)", "{} * 3 + 1", "-{}", "jnp.abs({})",
    "lax.bitcast_convert_type({}, {}.dtype)", "lax.population_count({})", "jnp.where({} > 2, {}, 0)", "lax.max({}, jnp.asarray(3, {}.dtype))", "jnp.maximum({}, 3)", "{}.sum()", "{}.max()", "lax.mul({}, jnp.asarray(2, {}.dtype))",
)  # fmt: skip


def reducible(w: Writer) -> tuple[str, int, int, float]:
    """(an exact operand, the dim to reduce, its size, a bound on the operand's values)."""
    x = w.pick(ranks=(2, 3), exact=True, such=lambda v: v.top <= 16 and (v.bits or 0) <= 4)
    axis = w.axis(x)
    return x.name, axis, x.shape[axis], x.top


def moved(w: Writer, text: str) -> str:
    form = w.of(MOVED)
    return form.replace("{0}", text).replace("{}", text)


def then(w: Writer, forms: tuple[str, ...], made: str) -> str:
    """One of ``forms`` on the value ``made``."""
    text = w.of(forms)
    if "{s}" in text:  # known only at run time
        scale = w.pick(ranks=(1, 2), exact=True, such=lambda v: v.top <= 8)
        text = text.replace("{s}", f"{scale.name}.reshape(-1)[0]")
    if "{i}" in text:
        text = text.replace("{i}", f"{w.ids().name}[0]")
    return text.replace("{}", made)


@statement(2.5)
def partial_float(w: Writer) -> None:
    """Sums, extrema and products of floats."""
    x, axis, n, top = reducible(w)
    name = f"{w.name()}r"
    made = moved(w, w.of(FLOATS).replace("{x}", x).replace("{a}", str(axis)).replace("{n}", str(n)))
    text = then(w, AFTER_FLOATS, name)
    w.emit(text, (top * top + 2) * n * n * 16, before=[f"{name} = {made}"], scale="1.0 /" not in text)


@statement(2)
def partial_integer(w: Writer) -> None:
    """Sums, extrema, products and bitwise reductions of integers of any width, and of booleans."""
    x, axis, n, _ = reducible(w)
    t = w.of(INTEGERS)
    name = f"{w.name()}r"
    size = f"jnp.abs({x})" if "uint" in t else x
    before = [f"{name}_x = ({size} * 4).astype({t})"]
    made = w.of(WHOLES).replace("{x}", f"{name}_x").replace("{a}", str(axis)).replace("{t}", t).replace("{n}", str(n))
    made = moved(w, made)
    w.emit(then(w, AFTER_WHOLES, name), before=[*before, f"{name} = {made}"], scale=False, kind="o")


@statement(0.8)
def partial_bool(w: Writer) -> None:
    x, axis, _, _ = reducible(w)
    name = f"{w.name()}r"
    made = w.of([f"jnp.any({x} > 0.5, {axis})", f"jnp.all({x} > -1.5, {axis})", f"lax.reduce_xor({x} > 0, ({axis},))"])
    text = w.of(["~{}", "{} | (jnp.arange({}.shape[-1]) == 1)", "{}.astype(jnp.int32) * 2 + 1", "jnp.cumsum({}, -1)", "{}.sum()", "jnp.where({}, 2.0, 3.0)", "{} & {}[::-1]", "{}.astype(F) - 0.5", "{}.any()", "{} ^ True"])  # fmt: skip
    w.emit(text.replace("{}", name), before=[f"{name} = {moved(w, made)}"], scale=False, kind="o")


@statement(1)
def cast_and_reduce(w: Writer) -> None:
    """Casts before and after reductions: widening, narrowing, between integers and floats."""
    x, axis, n, _ = reducible(w)
    narrow = w.of(["BF16", "F16", "jnp.int8", "jnp.int16", "bool"])
    wide = w.of(["F", "F", "jnp.int32", "BF16"])
    a, name = f"{x}.astype({narrow})", f"{w.name()}r"
    made = w.of([
        f"{a}.sum({axis}, dtype={wide})", f"{a}.astype({wide}).sum({axis})", f"{a}.sum({axis}).astype({wide})", f"{x}.sum({axis}).astype({narrow})", f"{a}.max({axis}).astype({wide})", f"{x}.max({axis}).astype({narrow})",
        f"jnp.einsum('...i,...i->...', jnp.moveaxis({a}, {axis}, -1).astype(F), jnp.ones({n}, F)).astype({narrow})",
        f"({a}.astype({wide}) * 2).sum({axis}).astype(F) / 3", f"{x}.sum({axis}).astype({wide}).astype(jnp.int32)", f"(jnp.cumsum({x}.sum({axis}), -1)).astype({wide})",
    ])  # fmt: skip
    w.emit(f"{name} * 2" if w.chance(0.5) else name, before=[f"{name} = {made}"], scale=False, kind="o")


@statement(0.7)
def accumulated(w: Writer) -> None:
    """Partial values in the carry and in the stacked results of a loop, narrow and wide."""
    x = w.pick(ranks=(3,), exact=True, such=lambda v: v.top <= 8)
    t = w.of(["F", "BF16", "jnp.int32"])
    name = f"f{w.name()[1:]}"
    sums = [f"r.astype({t}).sum(0).astype(F)", f"r.sum(0).astype({t}).astype(F)"]
    part = w.of([*sums, "r.max(0)", "jnp.einsum('ij,ij->j', r, r)"])
    step = w.of(["c + p", "c + p", "c * 0.5 + p", "jnp.maximum(c, p)", "c + jnp.where(p > 0, p, 0)", "c - p"])
    before = [f"def {name}(c, r):", f"    p = {part}", f"    return {step}, {w.of(['p', 'c', 'None', 'p * 2', 'jnp.cumsum(p)'])}",
              f"{name}_out = jax.tree.leaves(lax.scan({name}, jnp.full({x.shape[-1]}, 0.5, F), lax.stop_gradient({x.name})))"]  # fmt: skip
    if x.shape[0] > 16:
        raise Skip
    w.emit(f"{name}_out", 64.0, before=before, scale=False, kind="o")

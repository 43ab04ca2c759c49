"""Statements on data that is not small finite floats: NaN, infinities, signed zeros, other dtypes, typed keys, empty arrays."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from lookups import indices
from statements import statement
from writer import Var, Writer


def unusual(w: Writer) -> Var:
    """f32 with NaN, infinities or signed zeros."""
    if w.chance(0.4) and any(v.kind == "s" and len(v.shape) in (1, 2, 3) for v in w.vars):
        return w.pick("s", ranks=(1, 2, 3))
    return w.fresh((w.split_size(), *w.of([(), (4,), (4,), (w.split_size(),), (3, 2)])), "s")


@statement(2)
def extremes(w: Writer) -> None:
    """Reductions and running ops of NaN and infinities."""
    x = unusual(w)
    a = w.axis(x)
    t = w.of(["F", "F", "F", "BF16", "F16"])
    y = f"{x.name}.astype({t})"
    w.emit(w.of([
        f"{y}.max({a})", f"{y}.min({a})", f"jnp.abs({y}).max({a})", f"jnp.isnan({y}.max())", f"{y}.max()", f"{y}.min()", f"jnp.nanmax({y}, {a})", f"jnp.argmax({y}, {a})", f"jnp.argmin({y}, {a})", f"lax.cummax({y}, {a})", f"lax.cummin({y}, {a}, reverse=True)",
        f"jnp.sort({y}, {a})", f"jnp.linalg.norm({y}.astype(F).ravel(), jnp.inf)", f"jnp.isfinite({y}).all({a})", f"jnp.prod(jnp.sign({y}), {a})", f"lax.reduce_max(jnp.maximum({y}, 0), ({a},))", f"nn.softmax({x.name}, {a})",
        f"jnp.where(jnp.isnan({y}), 0, {y}).max({a})", f"lax.pmax({y}, 'p')" if t == "none" else f"jax.vmap(lambda r: lax.pmax(r, 'p'), in_axes={a}, out_axes=None, axis_name='p')({y})", f"jnp.round({x.name} / jnp.abs({x.name}).max() * 127)",
        f"lax.associative_scan(jnp.maximum, {y}, axis={a})", f"jnp.median({x.name}, {a})", f"lax.reduce_window({x.name}, -jnp.inf, lax.max, {tuple(2 if k == a and n > 1 else 1 for k, n in enumerate(x.shape))}, {(1,) * len(x.shape)}, 'SAME')",
    ]), scale=False, kind="o")  # fmt: skip


@statement(1.5)
def scaled_sums(w: Writer) -> None:
    """Sums that are scaled by 0, infinity or NaN, by constants and by values known only at run time."""
    x = unusual(w)
    a = w.axis(x)
    other = w.fresh((4,), "s") if w.chance(0.5) else x
    s = f"{other.name}.reshape(-1)[{w.rng.randrange(2)}]"
    part = w.of([
        f"{x.name}.sum({a})", f"{x.name}.sum({a})", f"jnp.tensordot({x.name}, jnp.ones({x.shape[a]}, F), ((({a},), (0,))))",
        f"(({x.name} * 100).astype(F16).sum({a}))", f"{x.name}.sum()", f"jnp.nansum({x.name}, {a})",
    ])  # fmt: skip
    w.emit(w.of([
        f"{part} * jnp.inf", f"{part} / 0.0", f"{part} * {s}", f"{part} / {s}", f"{s} * {part}", f"{part}.astype(F) * 1e38 * 10.0", f"{part} * 0.0", f"({part} * 2000).astype(F)", f"{part} / jnp.abs({s})", f"jnp.where(jnp.isnan({s}), {part}, {part} * {s})",
        f"{part}.astype(F16) * 60000", f"-{part} * jnp.inf", f"{part} * jnp.nan", f"jnp.where({part} > 0, {part}, 0) * jnp.inf",
    ]), scale=False, kind="o")  # fmt: skip


@statement(0.8)
def overflow(w: Writer) -> None:
    """Gradients in f16 that only together are small enough to be scaled."""
    n, k = w.split_size(), w.of([4, 8])
    x, u = w.fresh((n, k)), w.fresh((k, w.of([4, 8])))
    name = f"f{w.name()[1:]}"
    scale = w.of(["2000", "60000", f"(jnp.abs({x.name}[0, 0]) * 8 + 30000)"])
    before = [
        f"{name}_x = jnp.where(jnp.arange({n})[:, None] < {n // 2}, -10, 10) + jnp.zeros(({n}, {k}), F16)",
        f"{name}_g = jax.grad(lambda u: (({name}_x + 0 * {x.name}.astype(F16)) @ u).astype(F).sum())({u.name}.astype(F16))",
    ]
    w.emit(f"{name}_g * jnp.asarray({scale}, {name}_g.dtype)", before=before, scale=False, kind="o")


@statement(2)
def signed_zeros(w: Writer) -> None:
    """Ops that only move elements keep the sign of a zero, and NaN where it is."""
    x = unusual(w)
    a, n = (i := w.axis(x)), x.shape[i]
    lead = ":, " * a
    ids = indices(w, (1,))
    text = w.of([
        f"{x.name}[{lead}{n // 2}]", f"{x.name}[{lead}-1]", f"{x.name}[{lead}{ids.name} % {n}]", f"jnp.take({x.name}, {ids.name} % {n}, {a})", f"{x.name}[{lead}1:]", f"jnp.roll({x.name}, 1, {a})", f"jnp.flip({x.name}, {a})", f"{x.name}.at[{lead}{ids.name}].get(mode='fill', fill_value=-0.0)",
        f"lax.dynamic_index_in_dim({x.name}, {ids.name}[0], {a}, keepdims=False)", f"lax.dynamic_slice_in_dim({x.name}, {ids.name}[0], {min(2, n)}, {a})", f"{x.name}.at[{lead}0].set({x.name}[{lead}{n - 1}])", f"jnp.pad({x.name}, 1, constant_values=-0.0)", f"jnp.diagonal({x.name})" if len(x.shape) == 2 else f"{x.name}[{lead}0]",
        f"jnp.concatenate([{x.name}, {x.name}], {a})", f"{x.name}[{lead}::2]", f"jnp.take_along_axis({x.name}, jnp.zeros({tuple(1 if k == a else m for k, m in enumerate(x.shape))}, jnp.int32) + {ids.name}[0] % {n}, {a})", f"-{x.name}", f"jnp.squeeze({x.name}[{lead}:1])",
        f"lax.dynamic_update_slice_in_dim({x.name}, -{x.name}[{lead}:1], {ids.name}[0], {a})", f"{x.name}.at[{lead}{ids.name} % {n}].multiply(-1.0)", f"jnp.sort({x.name}, {a})",
    ])  # fmt: skip
    if w.chance(0.4):
        t = w.of(["BF16", "F16", "E4M3"])
        text = text.replace(x.name, f"{x.name}.astype({t})")
        w.emit(f"({text}).astype(F)", scale=False, kind="s")
        return
    w.emit(text if w.chance(0.5) else f"1 / ({text})", scale=False, kind="s")


TYPES = (
    "jnp.int8", "jnp.uint8", "jnp.uint8", "jnp.uint32", "jnp.int16", "bool", "BF16", "F16", "jnp.float8_e8m0fnu", "jnp.complex64",
    "jnp.complex64", "E4M3",
)  # fmt: skip
LEAST = {"bool": "False", "jnp.int8": "jnp.int8(-128)", "jnp.int16": "jnp.int16(-32768)"}
LEAST |= {"BF16": "BF16(-jnp.inf)", "F16": "F16(-jnp.inf)"}


@statement(2)
def other_dtypes(w: Writer) -> None:
    """Slices, lookups, windows and reductions of integers, booleans, narrow floats and complex numbers; values are not 0 at edges."""
    x = w.pick(ranks=(1, 2), exact=True, such=lambda v: v.top <= 16) if w.chance(0.7) else w.fresh((w.split_size(), 3))
    a, n = (i := w.axis(x)), x.shape[i]
    t = w.of(TYPES)
    lead, ids, name = ":, " * a, indices(w, (1,)), f"{w.name()}r"
    signed = t in ("jnp.int8", "jnp.int16", "BF16", "F16", "E4M3")
    number = f"jnp.round({x.name}) - 3" if signed else f"jnp.abs(jnp.round({x.name})) + 1"
    before = [f"{name} = ({number}).astype({t})" if t != "bool" else f"{name} = {x.name} > 0.25"]
    if "complex" in t:
        before = [f"{name} = lax.complex(jnp.round({x.name}), {x.name} * 0.5)"]
    if "e8m0" in t:
        before = [f"{name} = jnp.exp2(jnp.round(jnp.clip({x.name}, -3, 3))).astype({t})"]
    part = w.of([name, f"{name}[{lead}1:]", f"{name}[{lead}:-1]", f"{name}[{lead}::2]"]) if n > 2 else name
    plain = [
        f"{name}[{lead}{n // 2}]", f"{name}[{lead}{ids.name} % {n}]", f"{part}", f"jnp.roll({name}, 1, {a})", f"{name}.at[{lead}0].set({name}[{lead}-1])", f"lax.dynamic_slice_in_dim({name}, {ids.name}[0], {min(2, n)}, {a})", f"jnp.concatenate([{name}, {part}], {a})", f"jnp.flip({part}, {a})",
        f"jnp.repeat({name}, 2, {a})", f"{name}.T.reshape(-1)", f"lax.dynamic_update_slice_in_dim({name}, {name}[{lead}:1], {ids.name}[0], {a})", f"{name}.at[{lead}{ids.name} % {n}].set({name}[{lead}:1])",
    ]  # fmt: skip
    integral, real, byte = "int" in t or t == "bool", "complex" not in t, t in ("E4M3", "jnp.float8_e8m0fnu")
    if "e8m0" not in t:
        plain += [f"{part}.sum({a})", f"jnp.cumsum({part}, {a})", f"jnp.pad({name}, 1, constant_values=1)", f"{name}.at[{lead}{ids.name} % {n}].{'max' if t == 'bool' else 'add'}({name}[{lead}:1])", f"jnp.prod({part}, {a})", f"jnp.where({name} == {name}[{lead}:1], {name}, 1)"]  # fmt: skip
        if t != "bool":
            trailing = (-1,) + (1,) * (len(x.shape) - 1 - a)
            plain += [f"{part} + lax.iota({name}.dtype, {n})[:{part}.shape[{a}]].reshape({trailing})"]
        plain += [f"{part}.max({a})", f"{part}.min({a})"] * 2 if not byte else []
        if real and not byte:
            window = tuple(min(2, k) if d == a else 1 for d, k in enumerate(x.shape))
            low, most = LEAST.get(t, f"{t}(0)"), "max" if t != "bool" else "bitwise_or"
            plain += [f"jnp.argmax({part}, {a})", f"jnp.sort({part}, {a})"]
            plain += [f"lax.reduce_window({name}, {low}, lax.{most}, {window}, {(1,) * len(window)}, 'SAME')"]
    if integral:
        plain += [f"lax.reduce_{op}({part}, ({a},))" for op in ("and", "or", "xor")] * 2
    w.emit(w.of(plain), before=before, scale=False, kind="o")


@statement(0.9)
def key_arrays(w: Writer) -> None:
    """Arrays of typed keys: sliced, looked up, moved, used."""
    n = w.split_size()
    found = [v for v in w.vars if v.kind == "k" and v.shape]
    ks = w.of(found) if found and w.chance(0.5) else w.fresh((n, *w.of([(), (), (2,)])), "k")
    w.used.add(ks.name)
    n, rest = ks.shape[0], ks.shape[1:]
    ids = indices(w, (1,))
    part = w.of([
        ks.name, f"{ks.name}[{n // 2}]", f"{ks.name}[1:]", f"{ks.name}[{ids.name} % {n}]", f"{ks.name}[{ids.name}[0]]", f"jnp.take({ks.name}, {ids.name} % {n}, 0)", f"jnp.roll({ks.name}, 1, 0)", f"jnp.concatenate([{ks.name}, {ks.name}[:1]])", f"{ks.name}[::-1]",
        f"{ks.name}[jnp.array([1, 0])]", f"lax.dynamic_slice_in_dim({ks.name}, {ids.name}[0], 1, 0)", f"{ks.name}.reshape(-1)", f"jnp.stack([{ks.name}, {ks.name}])", f"lax.dynamic_update_slice_in_dim({ks.name}, {ks.name}[1:2], {ids.name}[0], 0)",
        f"{ks.name}.at[{ids.name}[0] % {n}].set({ks.name}[0])", f"jnp.where(jnp.arange({n}).reshape({(-1,) + (1,) * len(rest)}) % 2 == 0, {ks.name}, {ks.name}[::-1])", f"jnp.broadcast_to({ks.name}, {(2, *ks.shape)})",
    ])  # fmt: skip
    w.emit(w.of([f"jax.random.key_data({part})", f"jnp.vectorize(lambda k: jax.random.uniform(k, (), jnp.float32), signature='()->()')({part})", f"jax.random.key_data(jax.vmap(jax.random.split)({part}.reshape(-1)))"]), scale=False, kind="o")  # fmt: skip


@statement(0.9)
def empty(w: Writer) -> None:
    """Arrays of size zero, and what is made of them."""
    x = w.pick(ranks=(1, 2)) if w.chance(0.7) else w.fresh((w.split_size(), 4))
    a = w.axis(x)
    lead, n = ":, " * a, x.shape[a]
    nothing = w.of([
        f"{x.name}[{lead}:0]", f"{x.name}[{lead}{n}:]", f"jnp.tile({x.name}, {tuple(0 if k == a else 1 for k in range(len(x.shape)))})", f"lax.pad({x.name}, F(0.5), {[(-n, 0, 0) if k == a else (0, 0, 0) for k in range(len(x.shape))]})",
        f"{x.name}[..., None][..., :0]", f"jnp.zeros({(0, *x.shape)}, F) + {x.name}", f"jnp.broadcast_to({x.name}, {(0, *x.shape)})", f"jnp.repeat({x.name}, 0, {a})", f"{x.name}[jnp.zeros((0,), jnp.int32)]",
    ])  # fmt: skip
    w.emit(w.of([
        nothing, nothing, f"({nothing}).sum({a})", f"jnp.concatenate([{x.name}.reshape(-1), ({nothing}).reshape(-1)])", f"{x.name}.reshape({x.shape[0]}, -1)[:, :0] @ jnp.ones((0, 3), F)", f"jnp.sort({nothing}, -1)", f"({nothing}).astype(jnp.int32) + 1", f"jnp.cumsum({nothing}, 0)",
        f"({nothing}).prod()", f"({nothing}).reshape(-1)", f"lax.scan(lambda c, r: (c + r.sum(), r * 2), F(0.5), {nothing})[0]", f"jnp.any({nothing} > 0)", f"jnp.exp({nothing}).T",
    ]), scale=False, kind="o")  # fmt: skip


@statement(0.3)
def empty_operand(w: Writer) -> None:
    """An input of size zero."""
    x = w.fresh((w.split_size(), 0)) if w.chance(0.5) else w.fresh((0, 4))
    w.emit(w.of([f"{x.name} * 2", f"{x.name}.sum(0)", f"{x.name}.sum(1)", f"{x.name} @ jnp.ones(({x.shape[1]}, 3), F)", f"jnp.concatenate([{x.name}, jnp.ones(({x.shape[0]}, 2), F)], 1)", f"{x.name}.T", f"jnp.pad({x.name}, 1, constant_values=0.5)"]), scale=False, kind="o")  # fmt: skip

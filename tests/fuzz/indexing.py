"""Statements with indices known only at run time: every mode, index type and form, along dims that may be split."""
# ruff: noqa: E501   programs are text on one line

from __future__ import annotations

from lookups import indices
from statements import statement
from writer import Var, Writer

TYPES = ("jnp.int32", "jnp.int32", "jnp.uint32")
"""Of indices; of narrower ones XLA's partitioner ends the process under ``lowering="jit"``."""


def at(w: Writer, ids: Var, n: int, mode: str, kind: str = "jnp.int32") -> str:
    """Indices into ``n`` elements; out of bounds on both sides, unless the mode promises otherwise."""
    if mode == "promise_in_bounds":
        return f"({ids.name} % {n}).astype({kind})"
    return f"({w.of([f'{ids.name} * 3 - 5', f'{ids.name} * 2 - 2', f'{ids.name} % {n}', f'{n} - {ids.name}', f'{ids.name} * 20 - 60'])}).astype({kind})"


def operand(w: Writer) -> tuple[Var, int, int]:
    known = w.chance(0.8)
    x = w.pick(ranks=(2,), such=lambda v: v.top <= 64 and min(v.shape) > 1) if known else w.fresh((w.split_size(), 4))
    return x, *x.shape


@statement(1.6)
def gathered(w: Writer) -> None:
    """``lax.gather``."""
    mode = w.of(["clip", "fill", "promise_in_bounds"])
    t = w.of(TYPES)
    x, n, m = operand(w)
    ids = indices(w, (1,))
    i, k = at(w, ids, n, mode, t), ids.shape[0]
    j = f"({ids.name}[::-1] % {m}).astype({t})" if mode == "promise_in_bounds" else at(w, ids, m, mode, t)
    two, big = min(2, n), min(n, w.of([2, 3, n // 2 + 1, n]))
    forms = [  # (indices, dimension numbers, sizes of a slice)
        (f"{i}[:, None]", "(1,), (0,), (0,)", (1, m)), (f"{i}[:, None]", "(1,), (0,), (0,)", (1, max(1, m - 1))), (f"jnp.stack([{i}, {j}], 1)", "(), (0, 1), (0, 1)", (1, 1)),
        (f"jnp.stack([{j}, {i}], 1)", "(), (0, 1), (1, 0)", (1, 1)), (f"jnp.stack([{j}, {i}], 0)", "(), (0, 1), (1, 0)", (1, 1)), (f"({i} % {n - two + 1})[:, None]", "(1, 2), (), (0,)", (two, m)),
        (f"({i} % {n - big + 1})[:, None]" if mode == "promise_in_bounds" else f"{i}[:, None]", "(1, 2), (), (0,)", (big, m)), (f"{j}[:, None]", "(), (0, 1), (1,)", (1, 1)), (f"{i}[:, None]", "(), (0, 1), (0,)", (1, 1)),
    ]  # fmt: skip
    if k == n:  # a row of its own for each index
        batched = "(), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)"
        forms += [(f"{j}[:, None]", batched, (1, 1))] * 2
    if "stack([" in (form := w.of(forms))[0] and form[0].endswith("0)"):
        form = (f"{form[0]}.T", *form[1:])
    name, dn, sizes = x.name, form[1], form[2]
    text = f"lax.gather({name}, {form[0]}, lax.GatherDimensionNumbers({dn}), {sizes}, mode='{mode}'{', fill_value=0.5' if mode == 'fill' else ''})"
    w.emit(text, max(x.top, 1), None if x.bits is None else max(x.bits, 1))


@statement(1.8)
def scattered(w: Writer) -> None:
    """``lax.scatter*`` and ``x.at[]`` into arrays that are not zero."""
    mode = w.of(["clip", "fill", "promise_in_bounds"])
    t = w.of(TYPES)
    x, n, m = operand(w)
    ids = indices(w, (1,))
    k = ids.shape[0]
    i, j = at(w, ids, n, mode, t), at(w, ids, m, mode, t)
    op = w.of(["add", "add", "sub", "mul", "min", "max", "set"])
    two = min(2, n)
    forms = [  # (indices, shape of the updates, dimension numbers)
        (f"{i}[:, None]", (k, m), "(1,), (0,), (0,)"), (f"jnp.stack([{i}, {j}], 1)", (k,), "(), (0, 1), (0, 1)"), (f"jnp.stack([{i}, {j}], 1)", (k,), "(), (0, 1), (0, 1)"), (f"jnp.stack([{j}, {i}], 1)", (k,), "(), (0, 1), (1, 0)"),
        (f"{j}[:, None]", (k,), "(), (0, 1), (1,)"), (f"{i}[:, None]", (k,), "(), (0, 1), (0,)"), (f"({i} % {n - two + 1})[:, None]" if mode == "promise_in_bounds" else f"{i}[:, None]", (k, two, m), "(1, 2), (), (0,)"),
        (f"{i}[:, None]", (k, max(1, m - 1)), "(1,), (0,), (0,)"),
    ]  # fmt: skip
    if k == n:
        batched = "(), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,)"
        forms += [(f"{j}[:, None]", (k,), batched)] * 2
    where, shape, dn = w.of(forms)
    value = w.of(["0.5", "0.5", "-1.5", "2.0"])
    updates, target = f"jnp.full({shape}, {value}, F)", x.name
    if op in ("add", "sub") and w.chance(0.5):
        updates = f"({updates} * (jnp.arange({shape[0]}) % 3 + 1).astype(F).reshape({(-1, *(1,) * (len(shape) - 1))}))"
    if op in ("mul", "min", "max"):
        target = f"lax.stop_gradient({target})"
    fn = "lax.scatter" if op == "set" else f"lax.scatter_{op}"
    top = 64.0 if op == "mul" else x.top + 6 * k
    if op == "mul":
        updates = updates.replace(value, "0.5")
    options = f"mode='{mode}'"
    if w.chance(0.35) and (len(shape) == 1 or shape == (k, m)):  # as people write it
        index = f"[{i}, {j}]" if shape == (k,) else f"[{i}]"
        method = {"add": "add", "sub": "subtract", "mul": "multiply", "min": "min", "max": "max", "set": "set"}[op]
        text = f"{target}.at{index.replace(f'.astype({t})', '')}.{method}({updates}, {options})"
    else:
        text = f"{fn}({target}, {where}, {updates}, lax.ScatterDimensionNumbers({dn}), {options})"
    w.emit(text, top, None if x.bits is None or op == "mul" else max(x.bits, 1))


@statement(1.5)
def windows(w: Writer) -> None:
    """Slices and updates of several elements at run-time starts, one by one and mapped; they may lie across blocks."""
    x, n, m = operand(w)
    ids = indices(w, shape=(n,)) if w.chance(0.6) else indices(w, (1,))
    k = w.of([1, 2, 3, max(1, n // 2 + 1)])
    k = min(k, n)
    c = min(w.of([1, 2, 3]), m)
    i, j = f"({ids.name}[0] - 1)", f"({ids.name}[-1] * 2 - 3)"
    zero = f"np.zeros((), {ids.name}.dtype)"  # starts are of one type, also where others are 64-bit
    forms = [
        f"lax.dynamic_slice({x.name}, ({i}, {j}), ({k}, {c}))", f"lax.dynamic_update_slice({x.name}, jnp.full(({k}, {c}), 0.5, F), ({i}, {j}))", f"lax.dynamic_update_slice({x.name}, {x.name}[:{k}] + 1, ({j}, {zero}))",
        f"lax.dynamic_slice_in_dim({x.name}, {i}, {c}, axis=1)", f"lax.dynamic_update_slice_in_dim({x.name}, {x.name}[:, :{c}] * 0.5, {i}, axis=1)", f"{x.name}[{i}]", f"{x.name}[:, {j}]", f"{x.name}[{i}, {j}]",
        f"{x.name}.at[{i}].set({x.name}[{j}])", f"{x.name}.at[{i}].add(1.0, mode='drop')", f"{x.name}.at[:, {j}].add({x.name}[:, {i}])", f"{x.name}.at[{i}, {j}].set(1.5, mode='clip')",
        f"lax.scan(lambda c, t: (lax.dynamic_update_slice(c, t[1][None] * 0.5, (t[0], {zero})), c[t[0]]), {x.name}, ({ids.name}, jnp.resize({x.name}, ({ids.shape[0]}, {m}))))[w_]".replace("w_", str(w.rng.randrange(2))),
    ]  # fmt: skip
    if ids.shape[0] == n:
        forms += [
            f"jax.vmap(lambda r, i: lax.dynamic_slice(r, (i - 1,), ({c},)))({x.name}, {ids.name})", f"jax.vmap(lambda r, i: lax.dynamic_update_slice(r, r[:{c}] + 1, (i * 2 - 3,)))({x.name}, {ids.name})",
            f"jax.vmap(lambda r, i: r.at[i - 2].set(0.5))({x.name}, {ids.name})", f"jax.vmap(lambda r, i: r[i])({x.name}, {ids.name})", f"jax.vmap(lambda i: lax.dynamic_slice({x.name}, (i, {zero}), ({k}, {c})))({ids.name})",
            f"jnp.take_along_axis({x.name}, ({ids.name} % {m})[:, None], 1)", f"jnp.take_along_axis({x.name}, ({ids.name} % {n})[:, None] + jnp.zeros({m}, jnp.int32), 0)", f"jnp.put_along_axis({x.name}, ({ids.name} % {m})[:, None], 0.5, 1, inplace=False)",
        ] * 2  # fmt: skip
    w.emit(w.of(forms), 2 * x.top + 2, None if x.bits is None else x.bits + 1)

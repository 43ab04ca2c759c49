"""Matmuls and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, out_dtype, out_shape, require
from ..term import Term, frozen
from .table import lemma


def together(rels: Sequence[Rel], dims: Sequence[int], what: str) -> tuple[int, tuple[str, ...]]:
    """(global size, axes) of one dim of several operands, which are sharded alike along it."""
    found = {(r.term.shape[d], r.spec[d]) for r, d in zip(rels, dims, strict=True) if r.term.shape[d] != 1}
    names = " and ".join(sorted("×".join(axes) or "no axis" for _, axes in found))
    require(len(found) <= 1, f"{what} sharded over {names}", refused=True)
    return found.pop() if found else (1, ())


def one_partial(x: Rel, y: Rel, op: str) -> Rel | None:
    """The partial operand of a bilinear op, of which at most one is."""
    require(not (x.partial and y.partial), f"{op} of two partial values", refused=True)
    some = x if x.partial else y if y.partial else None
    require(some is None or some.kind == "sum", f"{op} of a partial extremum", refused=True)
    return some


@lemma("dot_general")
def dot_general(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Σ_k x[b, i, k] y[b, k, j]: sharded along b, i and j as the operands are; partial over the axes of k."""
    x, y = rels
    (xc, yc), (xb, yb) = eqn.params["dimension_numbers"]
    some = one_partial(x, y, "a matmul")
    summed: set[str] = set()
    for i, j in zip(xc, yc, strict=True):
        if x.term.shape[i] == y.term.shape[j] == 1:
            x, y = ctx.expanded(x, [i]), ctx.expanded(y, [j])
        _, axes = together((x, y), (i, j), "a contracted dim")
        summed |= set(axes)
    batch = [together((x, y), d, "a batch dim") for d in zip(xb, yb, strict=True)]
    free = [[d for d in range(len(r.shape)) if d not in c and d not in b] for r, c, b in ((x, xc, xb), (y, yc, yb))]
    spec = [axes for _, axes in batch] + [r.spec[d] for r, dims in zip((x, y), free, strict=True) for d in dims]
    params = frozen(
        {k: v for k, v in eqn.params.items() if k not in ("dimension_numbers", "out_sharding") and v is not None}
    )
    labels = [[""] * len(x.shape), [""] * len(y.shape)]
    for k, (i, j) in enumerate(zip(xc, yc, strict=True)):
        labels[0][i] = labels[1][j] = f"c{k}"
    for k, (i, j) in enumerate(zip(xb, yb, strict=True)):
        labels[0][i] = labels[1][j] = f"b{k}"
    for side, dims in enumerate(free):
        for d in dims:
            labels[side][d] = f"f{side}.{d}"
    out = [f"b{k}" for k in range(len(xb))] + [f"f{side}.{d}" for side, dims in enumerate(free) for d in dims]
    term = einsum(ctx, (x.term, y.term), labels, out, params, out_dtype(eqn))
    result = Rel(term, out_shape(eqn), tuple(a if n != 1 else () for a, n in zip(spec, term.shape, strict=True)))
    overlap = summed & (some.partial if some else frozenset())
    require(not overlap, "a contraction over axes that an operand is partial over", refused=True)
    return [replace(result, partial=frozenset(summed) | (some.partial if some else frozenset()))]


def einsum(
    ctx: Context, args: tuple[Term, Term], labels: Sequence[list[str]], out: Sequence[str], params: Any, dtype: Any
) -> Term:
    """The term of a product of two arrays with labelled dims, transposed to ``out``.

    In normal form the operands are not transposed and in the order of their numbers, and the labels are numbered as they occur.
    """
    sides: list[tuple[Term, list[str]]] = []
    for term, names in zip(args, labels, strict=True):
        if term.op == "transpose":
            order: Any = term.params
            undone: list[str] = [names[order.index(d)] for d in range(len(order))]
            sides.append((term.args[0], undone))
        else:
            sides.append((term, list(names)))
    sizes = {n: max(s, 1) for term, names in sides for n, s in zip(names, term.shape, strict=True)}
    for term, names in sides:
        for n, s in zip(names, term.shape, strict=True):
            sizes[n] = max(sizes[n], s)

    def form(sides: Sequence[tuple[Term, list[str]]]) -> tuple[Any, list[str]]:
        number: dict[str, int] = {}
        for _, names in sides:
            for n in names:
                number.setdefault(n, len(number))
        key = tuple(tuple(number[n] for n in names) for _, names in sides)
        return key, [n for n in number if n in out]

    orders = [sides, sides[::-1]]
    if sides[0][0] is sides[1][0]:
        chosen = min(orders, key=lambda s: form(s)[0])
    else:
        chosen = min(orders, key=lambda s: s[0][0].number)
    key, natural = form(chosen)
    kept = tuple(n for n, name in enumerate(dict.fromkeys(n for _, names in chosen for n in names)) if name in out)
    shape = [sizes[n] for n in natural]
    term = ctx.terms.make("einsum", (key, kept, params), (chosen[0][0], chosen[1][0]), shape, dtype)
    return ctx.terms.transpose(term, [natural.index(n) for n in out])


@lemma("conv_general_dilated")
def convolution(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A matmul over the input features, for each offset of the window; batch and output features are carried along."""
    x, y = rels
    p = eqn.params
    some = one_partial(x, y, "a convolution")
    numbers = p["dimension_numbers"]
    (xb, xf, *xs), (yo, yi, *ys), (ob, of, *_) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = p["feature_group_count"], p["batch_group_count"]
    x, y = ctx.expanded(x, [xb, xf, *xs]), ctx.expanded(y, [yo, yi, *ys])
    for r, dims in ((x, xs), (y, ys)):
        for d in dims:
            require(not r.spec[d], f"a window along dim {d}, which is sharded over {', '.join(r.spec[d])}")
    if groups == (1, 1):
        require(x.spec[xf] == y.spec[yi], "input features sharded differently")
        summed = x.spec[xf]
    else:
        require(not any(r.spec[d] for r, d in ((x, xb), (x, xf), (y, yo), (y, yi))), "sharded groups of features")
        summed = ()
    shape = list(out_shape(eqn))
    spec: list[tuple[str, ...]] = [()] * len(x.shape)
    for d, r, k in ((ob, x, xb), (of, y, yo)):
        spec[d] = r.spec[k]
        shape[d] *= ctx.size(spec[d])
    params = frozen({k: str(v) if k == "dimension_numbers" else v for k, v in p.items() if v is not None})
    term = ctx.terms.make("conv", params, (x.term, y.term), shape, out_dtype(eqn))
    own = some.partial if some else frozenset()
    require(not own & set(summed), "a sum over axes that an operand is partial over", refused=True)
    partial = frozenset(summed) | own
    spec = [a if n != 1 else () for a, n in zip(spec, shape, strict=True)]
    return [Rel(term, out_shape(eqn), tuple(spec), partial)]

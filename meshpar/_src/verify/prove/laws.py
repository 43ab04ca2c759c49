"""The two laws that most lemmas consist of: the effect of an op on dims, and its effect on partial values."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from ...compat.jax import aval_of
from .relation import Context, Fragments, Rel, Unverified, require
from .term import Term, is_zero

Labels = Sequence[Sequence[Hashable]]
ALL = range(64)
"""The labels of all dims, if they are the dims' numbers."""

COMMUTATIVE = frozenset("add mul max min and or xor eq ne add_any eq_to".split())
ZERO_OF_ZEROS = frozenset("add sub mul max min abs sign sin tanh square sqrt expm1 log1p".split())
"""Ops by element whose result is 0 where all operands are 0."""


def axes_text(axes: Iterable[str]) -> str:
    return ", ".join(axes if isinstance(axes, tuple) else sorted(axes)) or "no axis"


def act(
    ctx: Context,
    eqn: JaxprEqn,
    rels: Sequence[Rel],
    *,
    ins: Labels | None = None,
    outs: Labels | None = None,
    unsharded: Container[Hashable] = (),
    params: Hashable = (),
    partial: Rel | None = None,
    op: str = "",
    by_element: bool = False,
    avals: Sequence[Any] = (),
    term: Term | None = None,
) -> list[Rel]:
    """The results of an op whose dims have labels, as in an einsum.

    Dims of one label are carried along: they are sharded alike, or constant, in all operands, and so in the results. The op acts
    along the dims of the labels ``unsharded``, which may have another size in each operand and result. If a result lacks the
    label of a dim that is sharded, it is for the lemma to say what the devices have.

    Args:
      ins, outs: the labels of the dims of each operand and result; None: their numbers.
      params: of the op; independent of the sizes of dims that are carried along.
      partial: the operand like which the results are partial.
      op: its name, if it differs from the equation's; by_element: it is of elements at one index.
      avals: shapes and dtypes of the results, if they differ from the equation's.
      term: of the result, if it is not the op of its operands.
    """
    name, avals = op or eqn.primitive.name, avals or [aval_of(v) for v in eqn.outvars]
    ins = ins or [range(len(r.shape)) for r in rels]
    outs = outs or [range(len(a.shape)) for a in avals]
    rels = [ctx.expanded(r, [d for d, n in enumerate(ns) if n in unsharded]) for r, ns in zip(rels, ins, strict=True)]
    zeros = by_element and name in ZERO_OF_ZEROS
    dims: dict[Hashable, tuple[int, tuple[str, ...]]] = {}
    for r, names in zip(rels, ins, strict=True):
        for d, (n, size, axes) in enumerate(zip(names, r.term.shape, r.spec, strict=True)):
            if n in unsharded:
                require(not axes, f"{name} along dim {n}, which is sharded over {axes_text(axes)}")
            elif size != 1:
                complete = not isinstance(axes, Fragments) or axes.complete
                outside = isinstance(axes, Fragments) and axes.zero_outside
                complete = complete or (zeros and outside and all(q.spec[d] == axes for q in rels))
                require(complete, f"{name} of values outside of an array, or of incomplete sums")
                found = dims.setdefault(n, (size, axes))
                if found != (size, axes):
                    both = f"{axes_text(found[1])} and {axes_text(axes)}"
                    fragments = any(isinstance(s, Fragments) for s in (found[1], axes))
                    refused = name != "conv_general_dilated" and not fragments and found[0] == size
                    raise Unverified(f"operands of {name} sharded over {both} along dim {n}", refused)
    results = []
    for k, (aval, names) in enumerate(zip(avals, outs, strict=True)):
        sizes = [m if n in unsharded else dims.get(n, (1,))[0] for m, n in zip(aval.shape, names, strict=True)]
        spec = tuple(dims[n][1] if n in dims else () for n in names)
        key = params if k == 0 else (params, k)
        make = ctx.terms.pointwise if by_element else ctx.terms.make
        value = term or make(name, key, [r.term for r in rels], sizes, aval.dtype, by_element and name in COMMUTATIVE)
        result = Rel(value, tuple(aval.shape), spec)
        if partial is not None:
            own = partial.source if partial.kind.endswith("*") else result.source
            result = replace(result, partial=partial.partial, kind=partial.kind, source=own)
        results.append(result)
    return results


def not_partial(rels: Iterable[Rel], op: str) -> None:
    """Refuse partial operands of an op that is not linear in them."""
    for rel in rels:
        require(not rel.partial, f"{op} of a value that is partial over {axes_text(rel.partial)}", refused=True)


def partial_of(rels: Sequence[Rel], op: str, kind: str = "") -> Rel | None:
    """Σ x + Σ y = Σ (x + y), and max(max_k x_k, y) = max_k max(x_k, y): the first partial operand of an op that is linear, or
    monotone, in its operands together; None if there is none.

    All partial operands are partial by one reduction over the same axes. The others are 0 in a sum; in another reduction they are
    equal on all devices along its axes. Functions of partial values (``*``) are of the same values.

    Args:
      kind: the reduction by which they may be partial; "": by any.
    """
    some = next((r for r in rels if r.partial), None)
    if some is None:
        return None
    for r in rels:
        if r.partial:
            fits = (r.partial, r.kind) == (some.partial, some.kind) and kind in ("", r.kind)
            fits &= r.source == some.source or not r.kind.endswith("*")
        else:
            fits = some.kind != "sum" and not r.varying & some.partial
        if not fits and not (some.kind == "sum" and is_zero(r.term)):
            over = f"partial by {some.kind} over {axes_text(some.partial)}"
            blocks = any(q.sharded & some.partial for q in rels)  # what one device has may be a block of a padded array
            raise Unverified(f"{op} of a value that is {over} and one that is not, or differently", not blocks)
    return some


def one_partial(rels: Sequence[Rel], op: str) -> Rel | None:
    """(Σ x) y = Σ (x y): the partial operand of a product, of which there is at most one."""
    some = [r for r in rels if r.partial]
    fits = len(some) < 2 and all(r.kind == "sum" for r in some)
    require(fits, f"{op} of two partial values, or extrema", refused=True)
    return some[0] if some else None

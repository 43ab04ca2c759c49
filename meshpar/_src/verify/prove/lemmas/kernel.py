"""Kernels: their local form is assumed to compute their global form on blocks, as their rule declares. The report lists them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel, aval_of, not_partial, out_dtype, out_shape, require
from .table import lemma


@lemma("kernel")
def kernel(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A kernel of the function as it was written: one term for each result."""
    require(not ctx.sizes, "a kernel within a per-device program")
    rels = [ctx.expanded(r, range(len(r.shape))) for r in rels]
    own = eqn.params["kernel"]
    found = ctx.kernels.setdefault((own.name, *(r.term.number for r in rels)), eqn)
    number = id(found)
    shapes = [aval_of(v).shape for v in eqn.outvars]
    args = [r.term for r in rels]
    return [
        ctx.replicated(ctx.terms.make("kernel", (number, k), args, s, out_dtype(eqn, k)), s)
        for k, s in enumerate(shapes)
    ]


def on_blocks(ctx: Context, name: str, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The results of a kernel's local form on blocks: sharded along the dims of each factor as the operands are, and partial
    over the axes of factors that it does not have. A factor marked ``!`` is not sharded."""
    not_partial(rels, f"kernel {name}")
    rels = [ctx.expanded(r, [d for d, n in enumerate(r.shape) if not r.spec[d]]) for r in rels]
    written = ctx.kernels.get((name, *(r.term.number for r in rels)))
    require(written is not None, f"a kernel {name} that the function as written does not have, of these operands")
    assert written is not None
    own: Any = written.params["kernel"]
    notation, sizes = (
        own.notation,
        own.sizes([aval_of(v).shape for v in written.invars], [aval_of(v).shape for v in written.outvars]),
    )
    axes: dict[str, tuple[str, ...]] = {}
    pairs = [(f, a) for r, dims in zip(rels, notation.ins, strict=True) for f, a in zip(dims, r.spec, strict=True)]
    for factors, spec in sorted(pairs, key=lambda p: len(p[0])):
        left = spec
        for f in factors:
            mine = axes.get(f)
            if mine is None:
                n = 0
                while n < len(left) and sizes[f] % ctx.size(left[: n + 1]) == 0:
                    n += 1
                mine = axes[f] = left[:n]
            require(left[: len(mine)] == mine, f"`{f}` sharded over {mine} and {left} in kernel {name}", refused=True)
            left = left[len(mine) :]
        require(not left, f"a dim of kernel {name} sharded over {spec}", refused=True)
    for f, a in axes.items():
        require(not a or notation.marks[f] != "!", f"`{f}` of kernel {name} sharded over {a}", refused=True)
    partial_marks = ("", "~") if own.permutation_partial else ("",)
    out = []
    for k, (dims, var) in enumerate(zip(notation.outs, written.outvars, strict=True)):
        given = {f for factors in dims for f in factors}
        partial = frozenset(a for f in axes if f not in given and notation.marks[f] in partial_marks for a in axes[f])
        spec = tuple(tuple(a for f in factors for a in axes.get(f, ())) for factors in dims)
        partial -= {
            a for own in spec for a in own
        }  # an axis of two factors: the local form exchanges along one of them
        term = ctx.terms.make(
            "kernel", (id(written), k), (r.term for r in rels), aval_of(var).shape, aval_of(var).dtype
        )
        spec = tuple(a if n != 1 else () for a, n in zip(spec, term.shape, strict=True))
        out.append(Rel(term, out_shape(eqn, k), spec, partial))
    return out

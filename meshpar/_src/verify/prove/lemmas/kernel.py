"""Kernels: their local form is assumed to compute their global form on blocks, as their rule declares. The report lists them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of
from ..laws import ALL, act, axes_text, not_partial
from ..relation import Context, Rel, axes_of_dims, require
from .table import LOCAL_FORM, lemma


@lemma("kernel")
def kernel(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """A kernel of the function as it was written: one term for each result."""
    require(not ctx.sizes, "a kernel within a per-device program")
    own, terms = eqn.params["kernel"], [ctx.filled(r.term, r.shape) for r in rels]
    known = ctx.kernels.setdefault(own.name, [])
    found = next((e for e, args in known if e.params["kernel"] is own and args == terms), eqn)
    known += [(eqn, terms)] * (found is eqn)
    rels = [ctx.replicated(t, r.shape) for t, r in zip(terms, rels, strict=True)]
    return act(ctx, eqn, rels, unsharded=ALL, params=id(found))


@lemma(LOCAL_FORM)
def on_blocks(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The results of a kernel's local form on blocks: sharded along the dims of each factor as the operands are, and partial
    over the axes of factors that it does not have. A factor marked ``!`` is not sharded."""
    name = str(eqn.params["name"]).removeprefix(LOCAL_FORM)
    not_partial(rels, f"kernel {name}")
    found = []
    for written, terms in ctx.kernels.get(name, ()):
        same = len(terms) == len(rels) and all(
            ctx.filled(r.term, t.shape) is t for r, t in zip(rels, terms, strict=True)
        )
        found += [(written, terms)] * same
    require(bool(found), f"a kernel {name} that the function as written does not have, of these operands")
    require(len(found) == 1, f"one of several kernels {name} of these operands")
    ((written, terms),) = found
    own: Any = written.params["kernel"]
    ins, outs = ([aval_of(v) for v in vs] for vs in (written.invars, written.outvars))
    notation, sizes = own.notation, own.sizes([a.shape for a in ins], [a.shape for a in outs])
    axes: dict[str, tuple[str, ...]] = {}
    pairs, constant = [], []  # (factors, axes) of dims; (factors, sizes on a device and in all) of dims of constants
    for r, term, dims in zip(rels, terms, notation.ins, strict=True):
        for factors, size, n, full, spec in zip(dims, r.term.shape, r.shape, term.shape, r.spec, strict=True):
            constant += [(factors, n, full)] * (size != full)
            pairs += [(factors, spec)] * (size == full)
    for factors, spec in sorted(pairs, key=lambda p: len(p[0])):
        for f in factors:
            fits = [n for n in range(len(spec) + 1) if sizes[f] % ctx.size(spec[:n]) == 0]
            mine = axes.setdefault(f, spec[: max(fits)])  # as many axes as divide it
            require(spec[: len(mine)] == mine, f"`{f}` sharded over {mine} and {spec} in kernel {name}", refused=True)
            spec = spec[len(mine) :]
        require(not spec, f"a dim of kernel {name} sharded over {axes_text(spec)}", refused=True)
    for factors, n, full in constant:
        split = [a for f in factors for a in axes.get(f, ())]
        require(n * ctx.size(split) == full, f"a constant block of {n} of {full} elements in kernel {name}")
    for f, a in axes.items():
        require(not a or notation.marks[f] != "!", f"`{f}` of kernel {name} sharded over {a}", refused=True)
    partial_marks = ("", "~") if own.permutation_partial else ("",)
    results = []
    for k, (dims, aval) in enumerate(zip(notation.outs, outs, strict=True)):
        given = {f for factors in dims for f in factors}
        spec = tuple(tuple(a for f in factors for a in axes.get(f, ())) for factors in dims)
        partial = axes_of_dims(axes[f] for f in axes if f not in given and notation.marks[f] in partial_marks)
        partial -= {a for own in spec for a in own}  # of two factors: the local form exchanges along one of them
        params = id(written) if k == 0 else (id(written), k)
        term = ctx.terms.make("kernel", params, terms, aval.shape, aval.dtype)
        shape = tuple(n // ctx.size(a) for n, a in zip(aval.shape, spec, strict=True))
        spec = tuple(a if n != 1 else () for a, n in zip(spec, term.shape, strict=True))
        results.append(Rel(term, shape, spec, partial))
    # a call has only the results that are read: the ones of these shapes and dtypes
    have = [(tuple(a.shape), str(a.dtype)) for a in map(aval_of, eqn.outvars)]
    fits = [rs for rs in itertools.combinations(results, len(have)) if [(r.shape, r.term.dtype) for r in rs] == have]
    require(len(fits) == 1, f"some results of kernel {name}, of several with these shapes")
    return list(fits[0])

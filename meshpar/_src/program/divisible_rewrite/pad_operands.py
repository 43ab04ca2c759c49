"""Rewrites ops on views whose dims do not divide: the operands are padded, and the results are views without the padding.

A padded dim is a factor of the op's rule. The padded op is computed by the op's local form, as a shard is: both have other sizes
than the program's op. Padding has any values, and is overwritten by the identity of the reduction where an op contracts it.

Program: the next-token loss of a sharded sequence, whose logits ``x[:, :-1] @ w`` are reduced over the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var

from ...rules import OpRule, run_local
from ...rules.mesh_in_shard_map import Factors
from ...rules.reduce import REDUCTION_KINDS, identity
from ..ir import Op
from ..primitives import name_dims_p
from .rewriter import Site
from .views import PaddedDim

CONTRACTED = frozenset(REDUCTION_KINDS.values())
"""The kinds of factors along which padding is overwritten."""


def by_factors(site: Site) -> bool:
    """Rewrite an op on padded operands; False if none has to be padded, or if a padded dim is no factor of its own."""
    op, padded = site.op, dict[int, PaddedDim]()  # by factor
    operands = [site.padded_dims(k) for k in range(len(op.ins))]
    rule = _rule(op) if any(operands) and not site.has_extended_dtype() else None
    if rule is None:
        return False
    for dims, factors in zip(operands, rule.ins, strict=True):
        for d, dim in dims.items():
            own = factors[d] if factors else ()
            if len(own) != 1 or rule.kinds[own[0]] not in {"pass_through", *CONTRACTED}:
                return False
            if padded.setdefault(own[0], dim).padded_size != dim.padded_size:
                return False
            if rule.kinds[own[0]] == "pass_through" and not any(own[0] in f for out in rule.outs for f in out):
                return False  # a dim of size 1 that is broadcast
    if any(len(own) > 1 and not padded.keys().isdisjoint(own) for array in (*rule.ins, *rule.outs) for own in array):
        return False

    def padded_dims(array: Sequence[Factors]) -> dict[int, PaddedDim]:
        return {d: padded[own[0]] for d, own in enumerate(array) if own and own[0] in padded}

    atoms = []
    for k, factors in enumerate(rule.ins):
        dims = padded_dims(factors)
        atom = site.read_padded(k, dims)
        for kind in CONTRACTED:
            own = {d: dim for d, dim in dims.items() if rule.kinds[factors[d][0]] == kind}
            atom = site.emit_masked(atom, own, identity(kind, atom.aval.dtype)) if own else atom
        atoms.append(atom)
    results = [padded_dims(factors) for factors in rule.outs]
    for k, (atom, dims) in enumerate(zip(_emit(site, rule, atoms, results), results, strict=True)):
        site.define_padded(k, atom, dims)
    return True


def _rule(op: Op) -> OpRule | None:
    """The factor rule of an op, also of an elementwise one; None if it cannot be computed with other sizes."""
    entry = op.primitive
    if op.rule is not None:
        return op.rule if op.rule.known and entry.local and entry.family not in ("kernel", "shard_map") else None
    if not (entry.elementwise or op.eqn.primitive is name_dims_p) or len(op.eqn.outvars) > 1:
        return None
    rule, shape = OpRule(), op.eqn.outvars[0].aval.shape
    dims = rule.factors(shape)
    ins = [
        tuple(f if n == m else () for f, n, m in zip(dims, v.aval.shape, shape, strict=False)) for v in op.eqn.invars
    ]
    return rule.maps(ins, [dims])


def _emit(site: Site, rule: OpRule, atoms: Sequence[Any], results: Sequence[dict[int, PaddedDim]]) -> list[Any]:
    """Append the op with padded results, and return their atoms."""
    eqn = site.op.eqn
    outvars = []
    for var, dims in zip(eqn.outvars, results, strict=True):
        shape = tuple(dims[d].padded_size if d in dims else n for d, n in enumerate(var.aval.shape))
        outvars.append(Var(var.aval.update(shape=shape)))
    unordered = {name: False for name in ("indices_are_sorted", "unique_indices") if name in eqn.params}
    op = copy.copy(site.op)
    op.eqn, op.rule = eqn.replace(outvars=outvars, params={**eqn.params, **unordered}), rule
    return site.rewriter.emit_all(lambda *xs: run_local(op, ((),) * len(rule.sizes), xs, {}), *atoms)

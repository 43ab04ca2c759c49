"""Reductions of dims, and of the axes of a ``vmap``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of, bind
from .local_forms import LocalOp, on_shards
from .partial import MOVES, along
from .registry import SplitOp, register
from .rule import Kind, OpRule, same_dims

_KINDS: tuple[Kind, ...] = ("sum", "max", "min", "prod", "and", "or")
REDUCTION_KINDS: dict[str, Kind] = {f"reduce_{kind}": kind for kind in _KINDS}
"""By primitive, how it combines elements."""


def identity(kind: Kind, dtype: Any) -> np.ndarray:
    """The scalar that leaves the other operand of a reduction unchanged: 0 for a sum, the lowest number of the dtype for a maximum.

    The lowest float is -inf, or the lowest finite number of a dtype that has no infinity (``float8_e4m3fn``).
    """
    if kind not in ("max", "min"):
        ones = np.bitwise_not(np.zeros((), dtype)) if kind == "and" else 0
        return np.asarray({"sum": 0, "or": 0, "prod": 1}.get(kind, ones), dtype)
    if dtype == np.bool_:
        return np.asarray(kind == "min")
    if not jnp.issubdtype(dtype, jnp.integer):
        infinite = np.asarray(-np.inf if kind == "max" else np.inf, dtype)
        if np.isinf(infinite.astype(np.float64)):
            return infinite
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return np.asarray(info.min if kind == "max" else info.max, dtype)


def reduced_dims(ins, axes, kind: Kind) -> OpRule:
    """A rule in which the reduced dims ``axes`` are factors of a kind, and the others pass through."""
    r = OpRule()
    dims = r.factors(ins[0], kind, axes)
    return r.maps([dims], [tuple(d for i, d in enumerate(dims) if i not in axes)])


def reduce(eqn, ins, outs) -> OpRule:
    """The result is partial over split dims that are reduced."""
    return reduced_dims(ins, eqn.params["axes"], REDUCTION_KINDS[eqn.primitive.name])


def _is_bitwise(op: SplitOp) -> bool:
    """Whether a bitwise reduction of integers is split: XLA does not have that all-reduce on every backend."""
    return op.eqn.outvars[0].aval.dtype != bool and any(op.axes)


def _over_ones(eqn: JaxprEqn) -> bool:
    """Whether all reduced dims have size 1: the reduction only removes them."""
    return all(aval_of(eqn.invars[0]).shape[a] == 1 for a in eqn.params["axes"])


for _name, _kind in REDUCTION_KINDS.items():
    _law = along(_kind, when="smaller")
    _laws = replace(_law, holds=_over_ones, when="always"), _law
    _manual = _is_bitwise if _kind in ("and", "or") else None
    register(_name, rule=reduce, local=on_shards, family="reduction", manual=_manual, partial=_laws)


_POSITIONAL: dict[str, Kind] = {"psum": "sum", "pmax": "max", "pmin": "min"}
"""The kinds of reductions over the axis of a ``vmap``.

Their axes are integers, for dims of operands, if the ``vmap`` is part of the traced program, and names otherwise. Without axes they
are identities.
"""


def positional(eqn, ins, outs) -> OpRule:
    """The rule of ``psum``, ``pmax`` and ``pmin`` over the axis of a ``vmap``: result k is operand k without its
    reduced dims, partial over those that are split."""
    axes = [a for a in eqn.params["axes"] if isinstance(a, int)]
    if not axes and eqn.params["axes"]:  # in the body of a shard_map, or over the axis of a vmap around the step
        return same_dims(eqn, ins, outs)
    r = OpRule(strong=not axes)
    operands = [r.factors(shape, _POSITIONAL[eqn.primitive.name], axes) for shape in ins]
    return r.maps(operands, [tuple(d for i, d in enumerate(dims) if i not in axes) for dims in operands])


def _local_positional(op: LocalOp, *xs: Any) -> list[Any]:
    """Reduces this device's shards over dims, and over axes that an outer ``vmap`` names."""
    combine = getattr(lax, f"reduce_{_POSITIONAL[op.name]}")
    axes = tuple(a for a in op.params["axes"] if isinstance(a, int))
    names = tuple(a for a in op.params["axes"] if not isinstance(a, int))
    xs = tuple(combine(x, axes) if axes else x for x in xs)
    return bind(op.eqn, xs, {**op.params, "axes": names}) if names else list(xs)


_WITHOUT_AXES = replace(MOVES, holds=lambda eqn: not eqn.params["axes"])

for _name, _kind in _POSITIONAL.items():
    _laws = _WITHOUT_AXES, along(_kind, when="smaller")
    register(_name, rule=positional, local=_local_positional, family="reduction", partial=_laws)


def reduce_general(eqn, ins, outs) -> OpRule:
    """The rule of ``reduce``, a reduction by the user's own computation, and of ``reduce_xor``, of which XLA has no
    all-reduce: the reduced dims need replication."""
    axes, n = eqn.params["dimensions" if eqn.primitive.name == "reduce" else "axes"], len(outs)
    r = reduced_dims(ins[:1], axes, "need_replication")
    return r.maps(r.ins * n + [()] * (len(ins) - n), r.outs * n)


register("reduce", "reduce_xor", rule=reduce_general, local=on_shards)

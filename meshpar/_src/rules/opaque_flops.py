"""FLOPs of the matmuls inside opaque equations: kernels, ``pallas_call``, and the user's own ``shard_map``.

``model``: only the FLOPs that the model needs, as :func:`cost.flops.model_flops` counts them, without recomputed ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from meshpar_kernels._choose import OUTLINE

from ..compat.jax import equations, in_recomputation, jaxprs_in, make_jaxpr
from .registry import bodies, primitive

_BACKWARD = re.compile(r"dq|dkv|bwd|backward")
"""In names or scopes of Pallas kernels for the backward pass of attention (splash and flash attention of JAX, ``mha`` on GPUs)."""
_NEEDED_MATMULS = {3: 1, 4: 3, 5: 4, 7: 4}
"""Matmuls of such a kernel → those that the model needs. All recompute the scores; the kernel of the gradient of queries (3) also
recomputes the gradient of the scores, which counts in the kernel of keys and values (4; with the queries 5 or 7)."""


def kernel_flops(eqn: JaxprEqn, model: bool = False) -> float:
    """FLOPs of a kernel of :func:`meshpar.kernel_rule`: as it declares, else of its traced function."""
    return _kernel_flops(eqn.params["kernel"], [v.aval for v in eqn.invars], model)


def _kernel_flops(kernel: Any, avals: Sequence[Any], model: bool) -> float:
    if model and kernel.forward is not None:
        forward, operands = kernel.forward
        return 2.0 * _kernel_flops(forward, operands or avals[: len(forward.notation.ins)], model)
    if (work := kernel.work(avals, {}, {})) is not None and work.flops is not None:
        return work.model_flops if model and work.model_flops is not None else work.flops
    key = kernel_flops, model, *((a.shape, str(a.dtype)) for a in avals)
    if key not in kernel.memo:
        with OUTLINE(True):
            kernel.memo[key] = jaxpr_flops(make_jaxpr(kernel.jitted, *avals).jaxpr, model)
    return kernel.memo[key]


def pallas_flops(eqn: JaxprEqn, model: bool = False) -> float:
    """FLOPs of a ``pallas_call``: its ``cost_estimate``, else the FLOPs of its body times the steps of its grid."""
    p, share = eqn.params, 1.0
    if model and _BACKWARD.search(f"{p.get('name')} {eqn.source_info.name_stack}"):
        names = [e.primitive.name for e in equations(p["jaxpr"])]
        if {"exp", "exp2"}.intersection(names) and (dots := names.count("dot_general")):
            share = _NEEDED_MATMULS.get(dots, dots) / dots
    if p.get("cost_estimate") is not None:
        return share * float(p["cost_estimate"].flops)
    return share * jaxpr_flops(p["jaxpr"]) * math.prod(n for n in p["grid_mapping"].grid if isinstance(n, int))


def shard_map_flops(eqn: JaxprEqn, model: bool = False) -> float:
    """FLOPs of a ``shard_map`` of the user, of all devices together."""
    p = eqn.params
    return jaxpr_flops(p["jaxpr"], model) * math.prod(p["mesh"].shape[a] for a in p["newly_manual_axes"])


def jaxpr_flops(jaxpr: Jaxpr, model: bool = False) -> float:
    """FLOPs of the matmuls of a jaxpr: loops times their trip count if it is known, of a ``cond`` the largest branch."""
    return sum(_equation_flops(eqn, model) for eqn in jaxpr.eqns)


def _equation_flops(eqn: JaxprEqn, model: bool) -> float:
    """FLOPs of the matmuls of an equation and of its bodies."""
    entry, p = primitive(eqn.primitive.name), eqn.params
    if model and in_recomputation(eqn):
        return 0.0
    if entry.matmul or entry.nested_flops is not None:
        return entry.flops(eqn, model)
    inner = [jaxpr_flops(body, model) for body in bodies(eqn) or jaxprs_in(eqn)]
    if entry.family == "cond":
        return max(inner)
    return sum(inner) * (p["length"] if entry.family == "scan" else 1)

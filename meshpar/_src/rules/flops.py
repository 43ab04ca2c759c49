"""FLOPs of the matmuls inside opaque equations: kernels, ``pallas_call``, and the user's own ``shard_map``."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from meshpar_kernels._choose import OUTLINE

from ..compat.jax import jaxprs_in, make_jaxpr
from .registry import bodies, primitive


def kernel_flops(eqn: JaxprEqn) -> float:
    """FLOPs of a kernel of :func:`meshpar.kernel_rule`: as it declares, else of its traced function."""
    kernel = eqn.params["kernel"]
    avals: list[Any] = [v.aval for v in eqn.invars]
    if (work := kernel.work(avals, {}, {})) is not None and work.flops is not None:
        return work.flops
    key = kernel_flops, *((a.shape, str(a.dtype)) for a in avals)
    if key not in kernel.memo:
        with OUTLINE(True):
            kernel.memo[key] = jaxpr_flops(make_jaxpr(kernel.jitted, *avals).jaxpr)
    return kernel.memo[key]


def pallas_flops(eqn: JaxprEqn) -> float:
    """FLOPs of a ``pallas_call``: its ``cost_estimate``, else the FLOPs of its body times the steps of its grid."""
    p = eqn.params
    if p.get("cost_estimate") is not None:
        return float(p["cost_estimate"].flops)
    return jaxpr_flops(p["jaxpr"]) * math.prod(n for n in p["grid_mapping"].grid if isinstance(n, int))


def shard_map_flops(eqn: JaxprEqn) -> float:
    """FLOPs of a ``shard_map`` of the user, of all devices together."""
    p = eqn.params
    return jaxpr_flops(p["jaxpr"]) * math.prod(p["mesh"].shape[a] for a in p["newly_manual_axes"])


def jaxpr_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of the matmuls of a jaxpr: loops times their trip count if it is known, of a ``cond`` the largest branch."""
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(eqn: JaxprEqn) -> float:
    """FLOPs of the matmuls of an equation and of its bodies."""
    entry, p = primitive(eqn.primitive.name), eqn.params
    if entry.matmul or entry.nested_flops is not None:
        return entry.flops(eqn)
    inner = map(jaxpr_flops, bodies(eqn) or jaxprs_in(eqn))
    if entry.family == "cond":
        return max(inner)
    return sum(inner) * (p["length"] if entry.family == "scan" else 1)

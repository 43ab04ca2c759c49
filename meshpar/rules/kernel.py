"""Opaque kernels: the factor rule and the local function come with the equation, from the user."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from .flops import kernel_flops
from .local import LocalOp
from .registry import always, register
from .rule import OpRule

SMALL = 1 / 8
"""Results of a kernel that are so small beside the first one are made together with it."""


def kernel(eqn, ins, outs) -> OpRule:
    return eqn.params["kernel"].op_rule(ins, outs, [v.aval.dtype for v in eqn.invars])


def _local_kernel(at: LocalOp, *xs: Any) -> list[Any]:
    kernel = at.params["kernel"]
    names = kernel.sizes([v.aval.shape for v in at.eqn.invars], [v.aval.shape for v in at.eqn.outvars])
    first, *others = kernel.on_shards(*xs, axes={f: at.of((i,)) for i, f in enumerate(names)})
    small = [k for k, x in enumerate(others) if _bytes(x) < SMALL * _bytes(first)]
    if small:  # perhaps columns of larger, padded arrays: cut out when these are made, not where they are read
        first, few = lax.optimization_barrier((first, [others[k] for k in small]))
        for k, x in zip(small, few, strict=True):
            others[k] = x
    return [first, *others]


def _bytes(x: Any) -> int:
    return math.prod(np.shape(x)) * x.dtype.itemsize


register(
    "kernel", rule=kernel, local=_local_kernel, manual=always, fixed_factors=True,
    label=lambda eqn: eqn.params["kernel"].name, kernel=True, nested_flops=kernel_flops,
)  # fmt: skip

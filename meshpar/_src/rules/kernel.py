"""Opaque kernels, whose equation has the factor rule and the local function that the user has given.

Small results of a kernel are computed together with its first one, behind an optimization barrier: XLA would slice them from padded
arrays where they are read, and keep these until then.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from .local_forms import LocalOp
from .mesh_in_shard_map import Grid, GroupedAxes, fine_names
from .opaque_flops import kernel_flops
from .registry import always, register
from .rule import OpRule

MAX_SMALL_FRACTION = 1 / 8
"""Results of fewer bytes, relative to the first result, are computed together with it, by an optimization barrier."""


def kernel(eqn, ins, outs) -> OpRule:
    """The user's rule for operands of these shapes and dtypes."""
    return eqn.params["kernel"].op_rule(ins, outs, [v.aval.dtype for v in eqn.invars])


def _local_kernel(op: LocalOp, *xs: Any) -> list[Any]:
    """The results of the user's local function on this device's shards, and the axes of every factor name."""
    kernel = op.params["kernel"]
    kernel = (kernel, *kernel.forms)[op.form]
    names = kernel.sizes([v.aval.shape for v in op.eqn.invars], [v.aval.shape for v in op.eqn.outvars])
    split = [[a for a in axes if op.sizes[a] > 1] for axes in op.axes[: len(names)]]
    torus = op.sizes.torus if isinstance(op.sizes, Grid) else {}
    groups = [{a: fine_names((a,), op.sizes) for a in own} for own in split]
    axes = {f: GroupedAxes(own, torus) for f, own in zip(names, groups, strict=True)}

    def local(*xs: Any) -> Any:
        return kernel.on_shards(*xs, axes=axes)

    local.__name__ = f"kernel of {kernel.name}"  # by which a proof finds it in the per-device program
    first, *others = jax.jit(local)(*xs)
    small = [k for k, x in enumerate(others) if _bytes(x) < MAX_SMALL_FRACTION * _bytes(first)]
    if small:  # perhaps columns of larger, padded arrays: sliced when the arrays are computed, not where they are read
        first, few = lax.optimization_barrier((first, [others[k] for k in small]))
        for k, x in zip(small, few, strict=True):
            others[k] = x
    return [first, *others]


def _bytes(x: Any) -> int:
    return math.prod(np.shape(x)) * x.dtype.itemsize


register("kernel", family="kernel", rule=kernel, local=_local_kernel, manual=always, nested_flops=kernel_flops)

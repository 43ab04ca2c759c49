"""Matmuls and convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..compat.jax import aval_of
from ..compat.quirks import not_a_group
from .halo import ShardWindow, dilate, fetch_window, sliding_window
from .local_forms import LocalOp, on_shards
from .partial import CONTRACTS
from .registry import SplitOp, always, register
from .rule import OpRule, exchange_kind, with_halo_sends


def _numbers_of(eqn: JaxprEqn) -> tuple[Any, Any, Sequence[int]]:
    """(contracted, batch) dims of both operands of a matmul, and the dims of the groups of a ragged one's right operand."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        return (*eqn.params["dimension_numbers"], ())
    return (*ragged.dot_dimension_numbers, ragged.rhs_group_dimensions)


def dot_general(eqn, ins, outs) -> OpRule:
    """Batch and free dims pass through; the result is partial over contracted dims (k of ``[m, k] @ [k, n]``). The dims of groups
    of the right operand need replication, and are not in the result."""
    lhs, rhs = ins[:2]
    (lc, rc), (lb, rb), groups = _numbers_of(eqn)
    r = OpRule()
    left = {i: r.factor(lhs[i]) for i in lb}
    right = dict(zip(rb, left.values(), strict=True))
    left |= {i: r.factor(n) for i, n in enumerate(lhs) if i not in left and i not in lc}
    free = {
        j: r.factor(n, "need_replication" if j in groups else "pass_through")
        for j, n in enumerate(rhs)
        if j not in right and j not in rc
    }
    result = [*left.values(), *(f for j, f in free.items() if j not in groups)]
    right |= free
    for i, j in zip(lc, rc, strict=True):
        left[i] = right[j] = r.factor(lhs[i], "sum")
    operands = [tuple((factors[d],) for d in range(len(factors))) for factors in (left, right)]
    return r.maps(operands, [tuple((f,) for f in result)])


def _is_mixed(op: SplitOp) -> bool:
    """Whether a batched matmul is reduce-scattered over one axis and all-reduced over another (quirk ``BATCHED_CONTRACTION``)."""
    return op.mixed and bool(op.eqn.params["dimension_numbers"][1][0])


def _matmul_dims(eqn: JaxprEqn, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, int, int, int]:
    """(batch, rows, columns, contracted) sizes of a matmul, or of each group's in a ragged one."""
    (lc, rc), (lb, rb), groups = _numbers_of(eqn)
    m = math.prod(n for i, n in enumerate(lhs) if i not in lc and i not in lb)
    n = math.prod(n for i, n in enumerate(rhs) if i not in rc and i not in rb and i not in groups)
    return math.prod(lhs[i] for i in lb), m, n, math.prod(lhs[i] for i in lc)


_DOT: dict[str, Any] = {"family": "dot", "matmul_dims": _matmul_dims, "partial": (CONTRACTS,)}
register("dot_general", rule=dot_general, local=on_shards, manual=_is_mixed, **_DOT)


def ragged_dot_general(eqn, ins, outs) -> OpRule:
    """The rule of ``ragged_dot_general``: as a matmul. The dim of the groups needs replication; ragged rows pass
    through if they have one vector of group sizes.

    Each device then computes the sizes of the groups within its shard. If the rows are contracted (the gradient of the right
    operand), the result is partial.
    """
    dn = eqn.params["ragged_dot_dimension_numbers"]
    r = dot_general(eqn, ins, outs)
    r.ins += [()] * (len(ins) - 2)
    _, (batch, _) = dn.dot_dimension_numbers
    if len(ins[2]) != 1 or {*dn.lhs_ragged_dimensions} & {*batch}:
        for d in dn.lhs_ragged_dimensions:
            r.kinds[r.ins[0][d][0]] = "need_replication"
    if len(outs[0]) > len(r.outs[0]):  # a contracted or batch dim is ragged: one result per group
        r.outs = [((r.factor(outs[0][0], "need_replication"),), *r.outs[0])]
    return r


def _local_ragged(op: LocalOp, lhs: Any, rhs: Any, sizes: Any, *rest: Any) -> list[Any]:
    """A ragged matmul of this device's rows: groups ``[3, 5]`` in 2 shards of 4 rows have sizes ``[3, 1]`` and ``[0, 4]`` there."""
    (rows,) = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    factors, n = op.rule.ins[0][rows], lhs.shape[rows]
    if op.axes_of(factors):
        start = lax.convert_element_type(op.offset(factors, n), sizes.dtype)
        ends = jnp.clip(jnp.cumsum(sizes, dtype=sizes.dtype) - start, 0, n)
        sizes = jnp.diff(ends, prepend=jnp.zeros(1, sizes.dtype))
    return op.run(lhs, rhs, sizes, *rest)


register(
    "ragged_dot_general", family="ragged_dot", rule=ragged_dot_general, local=_local_ragged, matmul_dims=_matmul_dims
)


def conv_general_dilated(eqn, ins, outs) -> OpRule:
    """The rule of ``conv_general_dilated``: batch, output features and feature groups pass through; input features are
    contracted.

    A spatial dim with a window of 1 (and no stride, padding or dilation) passes through. Along other spatial dims devices exchange
    halos: the elements outside their shard that their windows read. In the gradient of a kernel, the cotangent is the window and
    is contracted: each device slides its shard of it over its window of the input, and the result is partial.
    """
    p = eqn.params
    dn = p["dimension_numbers"]
    lhs, rhs = ins
    (out,) = outs
    ls, rs, os = dn.lhs_spec, dn.rhs_spec, dn.out_spec  # (batch, feature, *spatial), (out, in, *spatial)
    groups, batch_groups, moves = p["feature_group_count"], p["batch_group_count"], exchange_kind(eqn)
    r = OpRule([()], [()])
    left: dict[int, tuple[int, ...]] = {}
    right: dict[int, tuple[int, ...]] = {}
    result: dict[int, tuple[int, ...]] = {}
    batch = r.factor(out[os[0]])
    in_features = r.factor(rhs[rs[1]], "sum")
    count = max(groups, batch_groups)  # at most one of them is not 1
    group = (r.factor(count),) if count > 1 else ()
    left[ls[0]] = (*(group if batch_groups > 1 else ()), batch)
    left[ls[1]] = (*(group if groups > 1 else ()), in_features)
    right[rs[0]] = result[os[1]] = (*group, r.factor(rhs[rs[0]] // count))
    right[rs[1]] = (in_features,)
    result[os[0]] = (batch,)
    for k, (i, j, o) in enumerate(zip(ls[2:], rs[2:], os[2:], strict=True)):
        window = rhs[j]
        plain = p["window_strides"][k] == 1 and p["lhs_dilation"][k] == 1 and tuple(p["padding"][k]) == (0, 0)
        if window == 1 and plain:
            left[i] = result[o] = (r.factor(lhs[i]),)
            right[j] = (r.factor(1),)
        elif plain and out[o] == 1 and lhs[i] == window:  # the window is as large as the input: contracted
            left[i] = right[j] = (r.factor(lhs[i], "sum"),)
            result[o] = (r.factor(1),)
        else:
            moved = r.factor(lhs[i], moves)
            left[i] = (moved,)
            if is_kernel_gradient(p, k, window, out[o]):
                right[j], result[o] = (r.factor(window, "sum"),), (r.factor(out[o], "need_replication"),)
                r.sharded_like.append((moved, right[j][0]))
            else:
                right[j] = (r.factor(window, "need_replication"),)
                result[o] = (r.follower(moved, out[o], moves),)
            r.windows[0, i] = functools.partial(_conv_window, p, k, lhs[i], window, out[o])
    r.ins = [tuple(left[i] for i in range(len(lhs))), tuple(right[j] for j in range(len(rhs)))]
    r.outs = [tuple(result[i] for i in range(len(out)))]
    return with_halo_sends(r, eqn, "elements of other shards that windows read", alike=True)


def is_kernel_gradient(params, k: int, window: int, count: int) -> bool:
    """Whether the window of a convolution along spatial dim k is a cotangent, and the result the gradient of a kernel.

    Such a window spans more positions than the results (the taps of the kernel) do; for a small input as many, dilated by the
    stride.

    Args:
      params: of the equation.
      window, count: sizes of the window and of the result.
    """
    spanned = (window - 1) * params["rhs_dilation"][k], (count - 1) * params["window_strides"][k]
    return spanned[0] > spanned[1] or (spanned[0] == spanned[1] and params["rhs_dilation"][k] > 1)


def _conv_window(params, k: int, size: int, window: int, count: int, shards: int) -> ShardWindow:
    """The windows of the input that devices read along spatial dim k, for their results (in a kernel's gradient: their taps)."""
    slid, tapped = (count, params["window_strides"][k]), (window, params["rhs_dilation"][k])
    if is_kernel_gradient(params, k, window, count):
        slid, tapped = tapped, slid
    (n, stride), (taps, tap_dilation) = slid, tapped
    low, dilation = params["padding"][k][0], params["lhs_dilation"][k]
    return sliding_window(size // shards, shards, n // shards, stride, taps, tap_dilation, low, dilation)


def _local_conv(op: LocalOp, lhs: Any, rhs: Any) -> list[Any]:
    """A convolution of the window of the input that this device reads; the group count is divided by the shards of the groups."""
    p, (spec, rhs_spec, _) = op.params, op.params["dimension_numbers"]
    changed: dict[str, Any] = {}
    for key, d in (("feature_group_count", spec[1]), ("batch_group_count", spec[0])):
        if p[key] > 1:
            changed[key] = p[key] // op.shard_count(op.rule.ins[0][d][:1])
    padding, dilation = list(p["padding"]), list(p["lhs_dilation"])
    for dim, axes, read in op.windows(0):
        k = spec[2:].index(dim)
        lhs = fetch_window(lhs, dim, axes, read)
        if len(set(read.before)) == 1:  # the convolution itself dilates
            low = read.before[0]
            padding[k] = (low, read.extent - low - (lhs.shape[dim] - 1) * read.dilation - 1)
        else:
            lhs, padding[k], dilation[k] = dilate(lhs, dim, axes, read, 0), (0, 0), 1
    for k, stride in enumerate(p["window_strides"]):
        if p["rhs_dilation"][k] == 1:
            window = rhs.shape[rhs_spec[2 + k]]
            lhs, padding[k] = not_a_group(lhs, spec[2 + k], window, stride, padding[k], dilation[k])
    return op.run(lhs, rhs, padding=tuple(padding), lhs_dilation=tuple(dilation), **changed)


def _conv_dims(eqn: JaxprEqn, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, int, int, int]:
    """The sizes of the matmul with the FLOPs of a convolution: (1, positions, output features, kernel elements of each).

    The positions are the positions of the result; for a dilated input (the gradient of a strided convolution) of the input, because
    the elements between are zeros: every element of the input is multiplied by every tap.
    """
    p, dn = eqn.params, eqn.params["dimension_numbers"]
    shape, out = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    rows, window = lhs[dn.lhs_spec[0]], rhs[dn.rhs_spec[1]]
    for k, (i, j, o) in enumerate(zip(dn.lhs_spec[2:], dn.rhs_spec[2:], dn.out_spec[2:], strict=True)):
        dilated = p["lhs_dilation"][k] > 1
        if is_kernel_gradient(p, k, aval_of(eqn.invars[1]).shape[j], out[o]):
            rows, window = rows * out[o], window * (lhs[i] if dilated else rhs[j])
        else:
            rows, window = rows * (lhs[i] if dilated else out[o] * lhs[i] // shape[i]), window * rhs[j]
    return 1, rows // p["batch_group_count"], rhs[dn.rhs_spec[0]], window


_CONV: dict[str, Any] = {"family": "conv", "matmul_dims": _conv_dims, "manual": always}
register("conv_general_dilated", rule=conv_general_dilated, local=_local_conv, **_CONV)

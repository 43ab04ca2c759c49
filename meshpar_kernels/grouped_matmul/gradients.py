"""Gradients of `grouped_matmul` and its transpose: each is computed by the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels import _compat
from meshpar_kernels.grouped_matmul.matmuls import Options, gather, matmul, transpose_matmul
from meshpar_kernels.grouped_matmul.reference import activate
from meshpar_kernels.grouped_matmul.schedule import group_bounds
from meshpar_kernels.tuning import Config


def _no_tangent(x):
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)


def _row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)


def _in_a_group(x: jax.Array, rows: int, group_sizes, group_offset, groups: int) -> jax.Array:
    """x [M], with 0 in rows of no local group."""
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)
    return jnp.where((row >= bounds[0]) & (row < bounds[-1]), x, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _constant(name, x):
    """x. Differentiating it raises ValueError."""
    del name
    return x


def _constant_fwd(name, x):
    """Forward rule of `_constant`.

    Raises:
      ValueError: x is differentiated.
    """
    if x.perturbed:
        raise ValueError(
            f"grouped_matmul: {name}{list(x.value.shape)} is differentiated, and quantized weights are constants. Leave them out "
            f"of what jax.grad differentiates, or pass jax.lax.stop_gradient({name})"
        )
    return x.value, None


_constant.defvjp(_constant_fwd, lambda name, _, grad: (grad,), symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, lhs, rhs, rhs_scale, group_sizes, group_offset, lhs_indices, index_rows, row_scale):
    del index_rows
    rows = gather(options, lhs, lhs_indices)
    return matmul(options, rows, rhs, group_sizes, group_offset, row_scale, rhs_scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(options, lhs, indices, index_rows):
    """`gather(options, lhs, indices)` with its gradient; `index_rows` as in `_to_sources`."""
    del index_rows
    return gather(options, lhs, indices)


def _rows_bwd(options, saved, grad: Any):
    """Gradient of the gathered rows, by `_to_sources`."""
    (rows, dtype), indices, index_rows = saved
    if indices is not None:
        grad = _to_sources(options, grad, indices, index_rows, rows).astype(dtype)
    return grad, _no_tangent(indices), _no_tangent(index_rows)


def _to_sources(options, grad, indices, index_rows, rows: int) -> Any:
    """The gradient of lhs [rows, K] from the gradient of `gather(options, lhs, indices)`: rows of it are gathered and
    summed by `index_rows`, the inverse of `indices`; if that is None, they are scattered, summed in float32."""
    if index_rows is not None:
        return _rows(options, grad, index_rows, None)
    target = jnp.where((indices >= 0) & (indices < rows), indices, rows).reshape(len(grad), -1)
    addend = jnp.broadcast_to(grad.astype(jnp.float32)[:, None], (*target.shape, grad.shape[1]))
    return jnp.zeros((rows, grad.shape[1]), jnp.float32).at[target].add(addend, mode="drop")


class _Rows(tuple):
    """Static (rows, dtype) of an operand among the residuals of `_rows`."""


jax.tree_util.register_static(_Rows)
_rows.defvjp(
    lambda options, lhs, i, j: (_rows(options, lhs, i, j), (_Rows((lhs.shape[0], lhs.dtype)), i, j)), _rows_bwd
)


def _plain(options: Options, lhs: jax.Array) -> Options:
    """The options of another matmul: without activation, with a result of lhs's dtype, and with its own tile."""
    config = Config(num_sms=options.config.num_sms)
    return dataclasses.replace(options, activation=None, out_dtype=lhs.dtype, config=config)


def _activated(options: Options, matmuls: Sequence[jax.Array]):
    """`activate` in float32, and its pullback."""
    return jax.vjp(lambda *p: activate(p, options.activation), *(p.astype(jnp.float32) for p in matmuls))


def _matmul_fwd(options, *args):
    """Forward rule. With an activation the matmuls are saved, in lhs's dtype: their recomputation would cost a third of
    the forward pass."""
    lhs, rhs, rhs_scale, group_sizes, group_offset, indices, _, row_scale = args
    if options.activation is None and len(rhs) == 1:
        return _matmul(options, *args), ([], *args)
    rows: Any = _rows(options, lhs, indices, args[6])
    matmuls: Any = [
        _matmul(_plain(options, lhs), rows, (m,), s, group_sizes, group_offset, None, None, None)
        for m, s in _with_scales(rhs, rhs_scale)
    ]
    value = _activated(options, matmuls)[0]
    if row_scale is not None:
        scale = _in_a_group(row_scale.astype(jnp.float32), len(rows), group_sizes, group_offset, rhs[0].shape[0])
        value = value * scale[:, None]
    return value.astype(options.out_dtype), (matmuls, *args)


def _with_scales(rhs: Sequence[jax.Array], rhs_scale: Sequence[jax.Array]):
    """Each matrix with its scales: none or one."""
    return zip(rhs, [(s,) for s in rhs_scale] or [()] * len(rhs), strict=True)


def _matmul_bwd(options, saved, grad):
    """Backward rule: gradients of lhs, rhs and row_scale; quantized weights and indices get zeros."""
    matmuls, lhs, rhs, rhs_scale, group_sizes, group_offset, indices, index_rows, row_scale = saved
    plain = _plain(options, lhs)
    back = dataclasses.replace(plain, transpose_rhs=not options.transpose_rhs, transpose_scale=True)
    groups = rhs[0].shape[0]
    rows: Any = _rows(options, lhs, indices, index_rows)
    total = rows.shape[0]

    grad_scale, scale, grads = None, row_scale, [grad]
    if matmuls:
        value, pull = _activated(options, matmuls)
        grad = grad.astype(jnp.float32)
        if row_scale is not None:
            grad_scale = _row_dots(grad, value)
            grad = grad * row_scale.astype(jnp.float32)[:, None]
        grads, scale = pull(grad), None
    grads = [g.astype(lhs.dtype) for g in grads]

    parts: Any = [
        _matmul(back, g, (m,), s, group_sizes, group_offset, None, None, None)
        for g, (m, s) in zip(grads, _with_scales(rhs, rhs_scale), strict=True)
    ]
    grad_rows = parts[0]
    if len(parts) == 2:
        grad_rows = (parts[0].astype(jnp.float32) + parts[1].astype(jnp.float32)).astype(lhs.dtype)
    if scale is not None:
        grad_scale = _row_dots(grad_rows, rows)
        factor = _in_a_group(scale.astype(jnp.float32), total, group_sizes, group_offset, groups)
        grad_rows = (grad_rows.astype(jnp.float32) * factor[:, None]).astype(lhs.dtype)
    grad_rhs = None
    if not rhs_scale:
        weights = dataclasses.replace(plain, transpose_rhs=False, out_dtype=rhs[0].dtype)
        pairs = [(g, rows) if options.transpose_rhs else (rows, g) for g in grads]
        grad_rhs = tuple(_transpose(weights, groups, *pair, group_sizes, group_offset, scale) for pair in pairs)
    if grad_scale is not None and row_scale is not None:
        grad_scale = _in_a_group(grad_scale, total, group_sizes, group_offset, groups)
        grad_scale = grad_scale.astype(row_scale.dtype)
    grad_lhs = grad_rows if indices is None else _to_sources(options, grad_rows, indices, index_rows, lhs.shape[0])
    return (
        grad_lhs.astype(lhs.dtype),
        grad_rhs,
        None,
        _no_tangent(group_sizes),
        _no_tangent(group_offset),
        _no_tangent(indices),
        _no_tangent(index_rows),
        grad_scale,
    )


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _transpose(options, groups, lhs, rhs, group_sizes, group_offset, row_scale):
    return transpose_matmul(options, groups, lhs, rhs, group_sizes, group_offset, row_scale)


def _transpose_fwd(options, groups, *args):
    return _transpose(options, groups, *args), args


def _transpose_bwd(options, groups, saved, grad):
    """With S_g = Σ s_i lhs_iᵀ rhs_i: the gradients are s_i rhs_i·Gᵀ, s_i lhs_i·G and
    lhs_i·G·rhs_iᵀ."""
    lhs, rhs, group_sizes, group_offset, row_scale = saved
    grad = grad.astype(lhs.dtype)
    forward = _plain(options, lhs)
    back = dataclasses.replace(forward, transpose_rhs=True)
    grad_lhs: Any = _matmul(back, rhs, (grad,), (), group_sizes, group_offset, None, None, row_scale)
    grad_rhs: Any = _matmul(forward, lhs, (grad,), (), group_sizes, group_offset, None, None, None)
    grad_scale = None
    if row_scale is not None:
        total = lhs.shape[0]
        grad_scale = _row_dots(grad_rhs, rhs)
        grad_scale = _in_a_group(grad_scale, total, group_sizes, group_offset, groups)
        grad_scale = grad_scale.astype(row_scale.dtype)
        factor = row_scale.astype(jnp.float32)
        factor = _in_a_group(factor, total, group_sizes, group_offset, groups)
        grad_rhs = (grad_rhs.astype(jnp.float32) * factor[:, None]).astype(rhs.dtype)
    return grad_lhs, grad_rhs, _no_tangent(group_sizes), _no_tangent(group_offset), grad_scale


_transpose.defvjp(_transpose_fwd, _transpose_bwd)


@functools.partial(jax.jit, static_argnums=0)
def matmul_with_gradient(options, lhs, rhs, rhs_scale, *args):
    """`grouped_matmul` with its gradients, under `jax.jit`; `options` are static.

    Scales, and weights in a floating-point dtype that have scales, are constants: differentiating them raises
    ValueError. All operands are made varying over the same mesh axes.
    """
    if rhs_scale:
        floats = jnp.issubdtype(rhs[0].dtype, jnp.floating)
        rhs = tuple(_constant("rhs", m) for m in rhs) if floats else rhs
        rhs_scale = tuple(_constant("rhs_scale", s) for s in rhs_scale)
    leaves, tree = jax.tree.flatten((lhs, rhs, rhs_scale, *args), is_leaf=lambda x: x is None)
    return _matmul(options, *jax.tree.unflatten(tree, _compat.same_varying(*leaves)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def transpose_with_gradient(options, groups, *args):
    return _transpose(options, groups, *_compat.same_varying(*args))

"""Gradients of `grouped_matmul` and its transpose: each is computed by the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._numerics import no_tangent, row_dots
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul.activations import activate
from meshpar_kernels.grouped_matmul.choose_implementation import Options, gather, run
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, Problem, TransposeProblem


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
def _matmul(options: Options, p: MatmulProblem, indices, index_rows):
    """The matmul of the rows `indices` of lhs (None: of all in their order); `index_rows` as in `_to_sources`."""
    del index_rows
    return run(options, dataclasses.replace(p, lhs=gather(options, p.lhs, indices)))


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
    return grad, no_tangent(indices), no_tangent(index_rows)


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


def _own_tile(options: Options) -> Options:
    """The options of another matmul, which has its own tile."""
    return Options(options.implementation, Config(num_sms=options.config.num_sms))


def _linear(p: MatmulProblem, rows: jax.Array) -> MatmulProblem:
    """The problem of these rows without activation and row scales, with a result of lhs's dtype."""
    return dataclasses.replace(p, lhs=rows, row_scale=None, activation=None, out_dtype=p.lhs.dtype)


def _each_matrix(p: MatmulProblem) -> list[MatmulProblem]:
    """The problem of each matrix of a group."""
    scales = [(s,) for s in p.rhs_scale] or [()] * len(p.rhs)
    return [dataclasses.replace(p, rhs=(m,), rhs_scale=s) for m, s in zip(p.rhs, scales, strict=True)]


def _activated(p: MatmulProblem, matmuls: Sequence[jax.Array]):
    """`activate` in float32, and its pullback."""
    return jax.vjp(lambda *m: activate(m, p.activation), *(m.astype(jnp.float32) for m in matmuls))


def _matmul_fwd(options, p: MatmulProblem, indices, index_rows):
    """Forward rule. With an activation the matmuls are saved, in lhs's dtype: their recomputation would cost a third of
    the forward pass."""
    if p.activation is None and len(p.rhs) == 1:
        return _matmul(options, p, indices, index_rows), ([], p, indices, index_rows)
    rows: Any = _rows(options, p.lhs, indices, index_rows)
    linear = _linear(p, rows)
    matmuls: Any = [_matmul(_own_tile(options), one, None, None) for one in _each_matrix(linear)]
    value = _activated(p, matmuls)[0]
    if p.row_scale is not None:
        value = value * linear.in_a_group(p.row_scale.astype(jnp.float32))[:, None]
    return value.astype(p.out_dtype), (matmuls, p, indices, index_rows)


def _matmul_bwd(options, saved, grad):
    """Backward rule: gradients of lhs, rhs and row_scale; quantized weights and indices get zeros."""
    matmuls, p, indices, index_rows = saved
    dtype, own_tile = p.lhs.dtype, _own_tile(options)
    rows: Any = _rows(options, p.lhs, indices, index_rows)
    linear = _linear(p, rows)

    grad_scale, scale, grads = None, p.row_scale, [grad]
    if matmuls:
        value, pull = _activated(p, matmuls)
        grad = grad.astype(jnp.float32)
        if p.row_scale is not None:
            grad_scale = row_dots(grad, value)
            grad = grad * p.row_scale.astype(jnp.float32)[:, None]
        grads, scale = pull(grad), None
    grads = [g.astype(dtype) for g in grads]

    back = dataclasses.replace(linear, transpose_rhs=not p.transpose_rhs, transpose_scale=not p.transpose_scale)
    parts: Any = [
        _matmul(own_tile, dataclasses.replace(one, lhs=g), None, None)
        for g, one in zip(grads, _each_matrix(back), strict=True)
    ]
    grad_rows = parts[0]
    if len(parts) == 2:
        grad_rows = (parts[0].astype(jnp.float32) + parts[1].astype(jnp.float32)).astype(dtype)
    if scale is not None:
        grad_scale = row_dots(grad_rows, rows)
        factor = linear.in_a_group(scale.astype(jnp.float32))
        grad_rows = (grad_rows.astype(jnp.float32) * factor[:, None]).astype(dtype)
    grad_rhs = None
    if not p.rhs_scale:
        pairs = [(g, rows) if p.transpose_rhs else (rows, g) for g in grads]
        grad_rhs = tuple(
            _transpose(own_tile, TransposeProblem(*pair, p.group_sizes, p.group_offset, scale, p.key.groups, m.dtype))
            for pair, m in zip(pairs, p.rhs, strict=True)
        )
    if grad_scale is not None and p.row_scale is not None:
        grad_scale = linear.in_a_group(grad_scale).astype(p.row_scale.dtype)
    grad_lhs = grad_rows if indices is None else _to_sources(options, grad_rows, indices, index_rows, p.lhs.shape[0])
    gradient = _cotangent(p, lhs=grad_lhs.astype(dtype), rhs=grad_rhs, row_scale=grad_scale)
    return gradient, no_tangent(indices), no_tangent(index_rows)


def _cotangent(p: Problem, **gradients: Any) -> Problem:
    """The cotangent of a problem with these gradients; None is zero."""
    none = {"rhs_scale": None} if isinstance(p, MatmulProblem) else {}
    sizes, offset = no_tangent(p.group_sizes), no_tangent(p.group_offset)
    return dataclasses.replace(p, group_sizes=sizes, group_offset=offset, **none, **gradients)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transpose(options: Options, p: TransposeProblem):
    return run(options, p)


def _transpose_bwd(options, p: TransposeProblem, grad):
    """With S_g = Σ s_i lhs_iᵀ rhs_i: the gradients are s_i rhs_i·Gᵀ, s_i lhs_i·G and
    lhs_i·G·rhs_iᵀ."""
    dtype, own_tile = p.lhs.dtype, _own_tile(options)
    matrices = (grad.astype(dtype),)
    forward = MatmulProblem(p.lhs, matrices, p.group_sizes, p.group_offset, out_dtype=dtype)
    back = dataclasses.replace(forward, lhs=p.rhs, row_scale=p.row_scale, transpose_rhs=True)
    grad_lhs: Any = _matmul(own_tile, back, None, None)
    grad_rhs: Any = _matmul(own_tile, forward, None, None)
    grad_scale = None
    if p.row_scale is not None:
        grad_scale = p.in_a_group(row_dots(grad_rhs, p.rhs)).astype(p.row_scale.dtype)
        factor = p.in_a_group(p.row_scale.astype(jnp.float32))
        grad_rhs = (grad_rhs.astype(jnp.float32) * factor[:, None]).astype(p.rhs.dtype)
    return (_cotangent(p, lhs=grad_lhs, rhs=grad_rhs, row_scale=grad_scale),)


_transpose.defvjp(lambda options, p: (_transpose(options, p), p), _transpose_bwd)


@functools.partial(jax.jit, static_argnums=0)
def matmul_with_gradient(options: Options, p: MatmulProblem, indices, index_rows):
    """`grouped_matmul` with its gradients, under `jax.jit`; `options` are static.

    Scales, and weights in a floating-point dtype that have scales, are constants: differentiating them raises
    ValueError. All operands are made varying over the same mesh axes.
    """
    if p.rhs_scale:
        floats = jnp.issubdtype(p.rhs[0].dtype, jnp.floating)
        rhs = tuple(_constant("rhs", m) for m in p.rhs) if floats else p.rhs
        p = dataclasses.replace(p, rhs=rhs, rhs_scale=tuple(_constant("rhs_scale", s) for s in p.rhs_scale))
    return _matmul(options, *_all_varying((p, indices, index_rows)))


@functools.partial(jax.jit, static_argnums=0)
def transpose_with_gradient(options: Options, p: TransposeProblem):
    return _transpose(options, _all_varying(p))


def _all_varying(operands: Any) -> Any:
    """The pytree, all of whose arrays vary over the same mesh axes."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, _compat.same_varying(*leaves))

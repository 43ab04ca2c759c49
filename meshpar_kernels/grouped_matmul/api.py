"""`grouped_matmul` and its transpose: checks, choice of implementation, gradients."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels import _compat
from meshpar_kernels._choose import dispatch, refuse_sharded
from meshpar_kernels.grouped_matmul import gpu, reference, tpu, xla
from meshpar_kernels.grouped_matmul.schedule import group_bounds
from meshpar_kernels.routing import gpu as routing_gpu
from meshpar_kernels.routing import tpu as routing_tpu

__all__ = ["grouped_matmul", "grouped_matmul_transpose"]

ACTIVATIONS = (None, "swiglu")


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed while tracing."""

    transpose_rhs: bool
    activation: str | None
    out_dtype: jnp.dtype
    implementation: str | None
    tile: tuple[int, int, int] | None


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_offset: jax.Array | int | None = None,
    activation: str | None = None,
    lhs_indices: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    tile: tuple[int, int, int] | None = None,
    debug: bool = False,
) -> jax.Array:
    """Multiply the rows of each group by that group's matrix.

    The first `group_sizes[0]` rows of lhs are multiplied by `rhs[0]`, the next `group_sizes[1]` by
    `rhs[1]`, and so on. Rows of no group become 0, whatever lhs holds there. Products are summed
    in float32; float32 operands are multiplied in full precision. No dense fallback, and no copy
    of the weights, in either direction.

    Source: the expert products of MegaBlocks (Gale et al. 2022) without its padding; the walk over
      (tile, group) pairs is that
    of group offsets in a CSR matrix.

    Args:
      lhs: [M, K], or [T, K] with `lhs_indices`. float32 or bfloat16 in the kernels.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; lhs's dtype.
      group_sizes: int [G] or, with a `group_offset`, of all groups. Negative sizes count as 0;
        what goes past M is cut off.
      transpose_rhs: contract rhs's last dimension.
      group_offset: rhs holds the groups from this one on (int or int32 []); rows of the others
        become 0.
      activation: "swiglu": rhs's N columns are a gate and an up matrix side by side, and the
        result is silu(gate product) · up product, [M, N/2].
      lhs_indices: int [M], row i is `lhs[lhs_indices[i]]`; a zero row where the index is out of
        range.
      row_scale: [M], factor on each row of the result (after the activation), in float32.
      out_dtype: dtype of the result; None: lhs's.
      implementation: None takes "pallas_tpu" where the program is lowered for a TPU, "pallas_gpu" where for
        an NVIDIA GPU, and the kernel can take these arguments, else "xla", a loop over tiles. "reference"
        multiplies all rows by all groups. "pallas" is the kernel of the platform, or an error: what it cannot
        take (float32 on a GPU, a GPU before Hopper) is said there and not hidden.
      tile: (rows, K, N) of one step of the Pallas kernel; None: the one that moves the fewest
        bytes.
      debug: warn at run time about group sizes that are negative or go past M.

    Returns:
      [M, N] (with "swiglu" [M, N/2]). Differentiable with respect to lhs, rhs and row_scale; both
      gradients of the product use the same implementation. The gradient of an empty group is zero.
      With "swiglu" the backward pass computes the two products again instead of keeping them.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or operands sharded outside of
        `shard_map`.
      NotImplementedError: the implementation asked for cannot take these arguments; with every
        reason.
    """
    op = "grouped_matmul"
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(f"{op}: lhs must be [M, K] and rhs [G, K, N], got {lhs.shape}, {rhs.shape}")
    _check_groups(op, lhs, rhs, group_sizes, rhs.shape[0], group_offset)
    k, n = (rhs.shape[2], rhs.shape[1]) if transpose_rhs else (rhs.shape[1], rhs.shape[2])
    if lhs.shape[1] != k:
        layout = "[G, N, K]" if transpose_rhs else "[G, K, N]"
        raise ValueError(f"{op}: lhs{list(lhs.shape)} has K={lhs.shape[1]}, rhs{list(rhs.shape)} as {layout} has K={k}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
    if activation == "swiglu" and n % 2:
        raise ValueError(f"{op}: swiglu needs an even N (gate and up side by side), got N={n}")
    if lhs_indices is not None and (lhs_indices.ndim != 1 or not jnp.issubdtype(lhs_indices.dtype, jnp.integer)):
        raise ValueError(f"{op}: lhs_indices must be int [M], got {lhs_indices.dtype}{list(lhs_indices.shape)}")
    rows = lhs.shape[0] if lhs_indices is None else lhs_indices.shape[0]
    _check_scale(op, row_scale, rows)
    refuse_sharded(op, lhs=lhs, rhs=rhs, group_sizes=group_sizes, lhs_indices=lhs_indices, row_scale=row_scale)
    if debug:
        _check_sizes_at_run_time(group_sizes, rows)
    options = _Options(
        transpose_rhs=transpose_rhs,
        activation=activation,
        out_dtype=jnp.dtype(lhs.dtype if out_dtype is None else out_dtype),
        implementation=implementation,
        tile=tile,
    )
    return _matmul_jit(options, lhs, rhs, group_sizes, _as_offset(group_offset), lhs_indices, row_scale)


def grouped_matmul_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    groups: int | None = None,
    group_offset: jax.Array | int | None = None,
    row_scale: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    tile: tuple[int, int, int] | None = None,
    debug: bool = False,
) -> jax.Array:
    """Sum lhs[i]ᵀ · rhs[i] over the rows i of each group: the transpose of `grouped_matmul` in its
    weights.

    Args:
      lhs: [M, K], float32 or bfloat16 in the kernels.
      rhs: [M, N], lhs's dtype.
      group_sizes: as in `grouped_matmul`. Rows of no group are not looked at: they may hold NaN.
      groups: G, how many groups from `group_offset` on are summed; None: all.
      group_offset: first group.
      row_scale: [M], factor on each row's product, in float32.
      out_dtype: dtype of the result; None: lhs's.
      implementation, tile, debug: as in `grouped_matmul`.

    Returns:
      [G, K, N], summed in float32; zero for an empty group. Differentiable with respect to lhs and
      rhs and row_scale.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or operands sharded outside of
        `shard_map`.
      NotImplementedError: the implementation asked for cannot take these arguments; with every
        reason.
    """
    op = "grouped_matmul_transpose"
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[0] != rhs.shape[0]:
        raise ValueError(f"{op}: lhs must be [M, K] and rhs [M, N], got {lhs.shape}, {rhs.shape}")
    groups = group_sizes.shape[0] if groups is None else groups
    if groups < 1:
        raise ValueError(f"{op}: groups={groups} must be at least 1")
    _check_groups(op, lhs, rhs, group_sizes, groups, group_offset)
    _check_scale(op, row_scale, lhs.shape[0])
    refuse_sharded(op, lhs=lhs, rhs=rhs, group_sizes=group_sizes, row_scale=row_scale)
    if debug:
        _check_sizes_at_run_time(group_sizes, lhs.shape[0])
    options = _Options(
        transpose_rhs=False,
        activation=None,
        out_dtype=jnp.dtype(lhs.dtype if out_dtype is None else out_dtype),
        implementation=implementation,
        tile=tile,
    )
    return _transpose_jit(options, groups, lhs, rhs, group_sizes, _as_offset(group_offset), row_scale)


def _check_groups(op, lhs, rhs, group_sizes, groups, group_offset) -> None:
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"{op}: lhs and rhs must have one floating-point dtype, got {lhs.dtype} and {rhs.dtype}")
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{op}: group_sizes must be int [G], got {group_sizes.dtype}{list(group_sizes.shape)}")
    if group_offset is None and group_sizes.shape[0] != groups:
        raise ValueError(
            f"{op}: {group_sizes.shape[0]} group sizes for {groups} groups; "
            f"say which of them these are with group_offset"
        )


def _check_scale(op: str, row_scale: jax.Array | None, rows: int) -> None:
    if row_scale is not None and row_scale.shape != (rows,):
        raise ValueError(f"{op}: row_scale must be [M]=[{rows}], got shape {row_scale.shape}")


def _check_sizes_at_run_time(group_sizes: jax.Array, rows: int) -> None:
    def look(sizes):
        sizes = np.asarray(sizes, np.int64)
        if (sizes < 0).any() or sizes.sum() > rows:
            warnings.warn(
                f"group sizes {sizes.tolist()} are negative or sum to more than the {rows} rows "
                f"there are: negative ones count as 0, and the rest is cut off",
                stacklevel=2,
            )

    jax.debug.callback(look, group_sizes)


def _as_offset(group_offset: jax.Array | int | None) -> jax.Array | None:
    return None if group_offset is None else jnp.asarray(group_offset, jnp.int32)


# --- one product, without gradient ---------------------------------------------------------------


def _gather(options: _Options, lhs: jax.Array, indices: jax.Array | None) -> jax.Array:
    """`lhs[indices]` by the implementation asked for."""
    if indices is None or 0 in lhs.shape or 0 in indices.shape:
        return reference.gather_rows(lhs, indices)
    name = options.implementation

    def by_kernel(lhs, indices):
        return routing_tpu.gather_sum(lhs, indices.astype(jnp.int32)[:, None], None)

    def by_gpu_kernel(lhs, indices):
        return routing_gpu.gather_sum(lhs, indices[:, None], None)

    functions = {
        "pallas_tpu": routing_tpu.gather_sum_unsupported(lhs, indices[:, None]) or by_kernel,
        "pallas_gpu": routing_gpu.gather_sum_unsupported(lhs, indices[:, None]) or by_gpu_kernel,
        "xla": reference.gather_rows,
        "reference": reference.gather_rows,
    }
    return dispatch("grouped_matmul's lhs_indices", name, functions, "xla", lhs, indices)


def _product(options: _Options, lhs, rhs, group_sizes, group_offset, row_scale) -> jax.Array:
    """`grouped_matmul` of rows that lie in order."""
    halves = 1 if options.activation is None else 2
    k, n = lhs.shape[1], (rhs.shape[1] if options.transpose_rhs else rhs.shape[2]) // halves
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((lhs.shape[0], n), options.out_dtype)
    groups, itemsize = rhs.shape[0], lhs.dtype.itemsize
    tile = (
        tpu.pick_tile(lhs.shape[0], k, n, groups, itemsize, halves) if options.tile is None else tpu.Tile(*options.tile)
    )
    gpu_tile = (
        gpu.pick_tile(n, itemsize, halves) if options.tile is None else gpu.make_tile(*options.tile, itemsize, halves)
    )
    kwargs = {
        "transpose_rhs": options.transpose_rhs,
        "activation": options.activation,
        "out_dtype": options.out_dtype,
    }

    def plain(function):
        def call(lhs, rhs, group_sizes, group_offset, row_scale):
            return function(lhs, rhs, group_sizes, group_offset, None, row_scale, **kwargs)

        return call

    functions = {
        "pallas_tpu": tpu.unsupported(lhs, rhs, n, tile, halves)
        or functools.partial(tpu.grouped_matmul, tile=tile, **kwargs),
        "pallas_gpu": gpu.unsupported(lhs, options.out_dtype, gpu_tile, halves, K=k, N=halves * n, columns=n)
        or functools.partial(gpu.grouped_matmul, tile=gpu_tile, **kwargs),
        "xla": plain(xla.grouped_matmul),
        "reference": plain(reference.grouped_matmul),
    }
    return dispatch(
        "grouped_matmul",
        options.implementation,
        functions,
        "xla",
        lhs,
        rhs,
        group_sizes,
        group_offset,
        row_scale,
    )


def _transpose_product(options: _Options, groups: int, lhs, rhs, group_sizes, group_offset, row_scale) -> jax.Array:
    k, n = lhs.shape[1], rhs.shape[1]
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((groups, k, n), options.out_dtype)
    tile = (
        tpu.pick_transpose_tile(lhs.shape[0], k, n, groups, lhs.dtype.itemsize)
        if options.tile is None
        else tpu.Tile(*options.tile)
    )
    itemsize = lhs.dtype.itemsize
    gpu_tile = gpu.pick_tile(n, itemsize) if options.tile is None else gpu.make_transpose_tile(options.tile, itemsize)
    kwargs = {"groups": groups, "out_dtype": options.out_dtype}
    functions = {
        "pallas_tpu": tpu.unsupported(lhs, rhs, n, tile)
        or functools.partial(tpu.grouped_matmul_transpose, tile=tile, **kwargs),
        "pallas_gpu": gpu.unsupported(lhs, options.out_dtype, gpu_tile, K=k, N=n)
        or functools.partial(gpu.grouped_matmul_transpose, tile=gpu_tile, **kwargs),
        "xla": functools.partial(xla.grouped_matmul_transpose, **kwargs),
        "reference": functools.partial(reference.grouped_matmul_transpose, **kwargs),
    }
    return dispatch(
        "grouped_matmul_transpose",
        options.implementation,
        functions,
        "xla",
        lhs,
        rhs,
        group_sizes,
        group_offset,
        row_scale,
    )


# --- gradients -----------------------------------------------------------------------------------


def _no_tangent(x):
    return None if x is None else np.zeros(x.shape, jax.dtypes.float0)


def _row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(-1)


def _in_a_group(x: jax.Array, rows: int, group_sizes, group_offset, groups: int) -> jax.Array:
    """x[M], with 0 where a row is in no local group."""
    bounds = group_bounds(group_sizes, rows, group_offset, groups)
    row = jnp.arange(rows)
    return jnp.where((row >= bounds[0]) & (row < bounds[-1]), x, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, lhs, rhs, group_sizes, group_offset, lhs_indices, row_scale):
    lhs = _gather(options, lhs, lhs_indices)
    return _product(options, lhs, rhs, group_sizes, group_offset, row_scale)


def _matmul_fwd(options, *args):
    return _matmul(options, *args), args


def _matmul_bwd(options, saved, grad):
    lhs, rhs, group_sizes, group_offset, indices, row_scale = saved
    plain = dataclasses.replace(options, activation=None, out_dtype=lhs.dtype, tile=None)
    back = dataclasses.replace(plain, transpose_rhs=not options.transpose_rhs)
    groups = rhs.shape[0]
    rows = _gather(options, lhs, indices)
    total = rows.shape[0]

    grad_scale = None
    scale = row_scale
    if options.activation == "swiglu":
        product = _product(plain, rows, rhs, group_sizes, group_offset, None)
        gate, up = jnp.split(product.astype(jnp.float32), 2, axis=-1)
        sigmoid = jax.nn.sigmoid(gate)
        grad = grad.astype(jnp.float32)
        if row_scale is not None:
            grad_scale = _row_dots(grad, gate * sigmoid * up)
            grad = grad * row_scale.astype(jnp.float32)[:, None]
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad = jnp.concatenate([grad_gate, grad * gate * sigmoid], axis=-1)
        scale = None
    grad = grad.astype(lhs.dtype)

    grad_rows = _product(back, grad, rhs, group_sizes, group_offset, None)
    if scale is not None:
        grad_scale = _row_dots(grad_rows, rows)
        factor = _in_a_group(scale.astype(jnp.float32), total, group_sizes, group_offset, groups)
        grad_rows = (grad_rows.astype(jnp.float32) * factor[:, None]).astype(lhs.dtype)
    pair = (grad, rows) if options.transpose_rhs else (rows, grad)
    weights = dataclasses.replace(plain, transpose_rhs=False, out_dtype=rhs.dtype)
    grad_rhs = _transpose_product(weights, groups, *pair, group_sizes, group_offset, scale)
    if grad_scale is not None and row_scale is not None:
        grad_scale = _in_a_group(grad_scale, total, group_sizes, group_offset, groups)
        grad_scale = grad_scale.astype(row_scale.dtype)
    grad_lhs = grad_rows
    if indices is not None:
        here = (indices >= 0) & (indices < lhs.shape[0])
        target = jnp.where(here, indices, lhs.shape[0])
        grad_lhs = jnp.zeros(lhs.shape, jnp.float32).at[target].add(grad_rows.astype(jnp.float32), mode="drop")
    return (
        grad_lhs.astype(lhs.dtype),
        grad_rhs,
        _no_tangent(group_sizes),
        _no_tangent(group_offset),
        _no_tangent(indices),
        grad_scale,
    )


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _transpose(options, groups, lhs, rhs, group_sizes, group_offset, row_scale):
    return _transpose_product(options, groups, lhs, rhs, group_sizes, group_offset, row_scale)


def _transpose_fwd(options, groups, *args):
    return _transpose(options, groups, *args), args


def _transpose_bwd(options, groups, saved, grad):
    """With S_g = Σ s_i lhs_iᵀ rhs_i: the gradients are s_i rhs_i·Gᵀ, s_i lhs_i·G and
    lhs_i·G·rhs_iᵀ."""
    lhs, rhs, group_sizes, group_offset, row_scale = saved
    grad = grad.astype(lhs.dtype)
    forward = dataclasses.replace(options, out_dtype=lhs.dtype, tile=None)
    back = dataclasses.replace(forward, transpose_rhs=True)
    grad_lhs = _product(back, rhs, grad, group_sizes, group_offset, row_scale)
    grad_rhs = _product(forward, lhs, grad, group_sizes, group_offset, None)
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
def _matmul_jit(options, *args):
    return _matmul(options, *_compat.same_varying(*args))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _transpose_jit(options, groups, *args):
    return _transpose(options, groups, *_compat.same_varying(*args))

"""`grouped_matmul` and `grouped_matmul_transpose`: the public functions, and checks of their arguments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels._choose import refuse_sharded
from meshpar_kernels.config import Config, keywords_in_config
from meshpar_kernels.grouped_matmul.activations import ACTIVATIONS
from meshpar_kernels.grouped_matmul.choose_implementation import Options
from meshpar_kernels.grouped_matmul.gradients import matmul_with_gradient, transpose_with_gradient
from meshpar_kernels.grouped_matmul.problem import QUANTIZED, MatmulProblem, TransposeProblem


@keywords_in_config("tile", "stages", "num_sms", "cluster")
def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array | tuple[jax.Array, jax.Array],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool = False,
    group_offset: jax.Array | int | None = None,
    activation: str | None = None,
    lhs_indices: jax.Array | tuple[jax.Array, jax.Array | None] | None = None,
    row_scale: jax.Array | None = None,
    rhs_scale: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Multiply the rows of each group by that group's matrix.

    The first `group_sizes[0]` rows of lhs are multiplied by `rhs[0]`, the next `group_sizes[1]` by `rhs[1]`, and so on.
    Rows of no group become 0, whatever lhs contains in them. Matmuls are accumulated in float32; float32 operands are
    multiplied in full precision. There is no dense fallback, and no copy of the weights, forward or backward.

    Source: the grouped matmuls of MegaBlocks (Gale et al. 2022) without its padding. The kernels iterate over (row
    tile, group) pairs, found from the group offsets as in a CSR matrix.

    Args:
      lhs: [M, K], or [T, K] with `lhs_indices`. float32 or bfloat16 in the kernels.
      rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; lhs's dtype. Or a pair (gate, up) of them: the result is
        act(lhs · gate) · (lhs · up). They are separate arrays, so that sharding N gives a device the same columns of
        both.
      group_sizes: int [G] or, with a `group_offset`, of all groups. Negative sizes count as 0; rows past M are ignored.
      transpose_rhs: contract rhs's last dim.
      group_offset: first group of rhs (int or int32 []); rows of other groups become 0.
      activation: act, in float32: "silu" (of a pair: SwiGLU), "gelu" (with tanh), "relu", or None for the identity.
      lhs_indices: int [M], row i is `lhs[lhs_indices[i]]`; a zero row if the index is out of range. Rows are gathered
        before the matmul: with "pallas" by the kernel of `permute`, with None by XLA unless `MESHPAR_KERNELS=pallas`.
        Or a pair of them and their inverse (`Dispatch.lhs_indices` is one), int [T, j]: the rows of the result that use
        each row of lhs, -1 for none. The inverse changes no result. With it, lhs's gradient is gathered and summed, in
        the same order in every run; without it (or with None), scattered.
      row_scale: [M], factor on each row of the result (after the activation), in float32.
      rhs_scale: scales of quantized weights (rhs of int8 or float8_e4m3fn): float [G, N], or [G, B, N] for B blocks of
        K (B divides K), whatever `transpose_rhs`; a pair if rhs is one. The weights are rhs · rhs_scale, and are
        constants: lhs has a gradient, they have none. A kernel converts and scales tiles in VMEM, "xla" the weights of
        one group at a time, so that the weights are never dequantized all at once. The TPU kernel needs B = 1 or blocks
        of a multiple of 128; there is no GPU kernel for scales.
      out_dtype: dtype of the result; None: lhs's.
      implementation: None selects "pallas_tpu" if the program is lowered for a TPU, "pallas_gpu" if for an NVIDIA GPU,
        if the kernel can take these arguments; else "xla", a loop over tiles (and always with
        `MESHPAR_KERNELS=reference`). "reference" multiplies all rows by all groups. "pallas" is the kernel of the
        platform, or an error that lists the arguments that it does not support (float32 on a GPU, a GPU before Hopper).
        "tokamax": tokamax's `ragged_dot`, forward and backward, by the kernel that tokamax picks for the device of the
        process; it takes no `group_offset` and no `rhs_scale`, copies weights with `transpose_rhs` (as for lhs's gradient),
        and needs the extra `tokamax`.
      config: tile, stages and blocks of the Pallas kernel. Each field that is None, and without a config each field, is
        taken from the tuning table's entry for this matmul on this device, else chosen by rule (see `Config`). Gradients
        use its `num_sms` alone.

    Returns:
      [M, N]. Differentiable with respect to lhs, rhs (if it has no scales) and row_scale; both gradients use the same
      implementation. The gradient of an
      empty group is zero. With an activation, or a pair, differentiation saves the matmuls, [M, N] each in lhs's dtype.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, operands sharded outside of `shard_map`, or a derivative of
        quantized weights or their scales.
      NotImplementedError: the requested implementation cannot take these arguments; with every reason.
    """
    op = "grouped_matmul"
    matrices = rhs if isinstance(rhs, tuple) else (rhs,)
    k = _check_matmul(op, lhs, matrices, group_sizes, group_offset, transpose_rhs, quantized=rhs_scale is not None)
    scales = () if rhs_scale is None else _block_scales(op, matrices, rhs_scale, k)
    lhs_indices, inverse = lhs_indices if isinstance(lhs_indices, tuple) else (lhs_indices, None)
    _check_options(op, lhs, activation, lhs_indices, inverse)
    rows = lhs.shape[0] if lhs_indices is None else lhs_indices.shape[0]
    _check_scale(op, row_scale, rows)
    others = {"group_sizes": group_sizes, "lhs_indices": lhs_indices, "row_scale": row_scale}
    for i, matrix in enumerate(matrices):
        refuse_sharded(op, lhs=lhs, rhs=matrix, **({"rhs_scale": scales[i]} if scales else {}), **others)
    problem = MatmulProblem(
        lhs, tuple(matrices), group_sizes, as_offset(group_offset), row_scale, scales, transpose_rhs, activation,
        jnp.dtype(lhs.dtype if out_dtype is None else out_dtype),
    )  # fmt: skip
    return matmul_with_gradient(Options(implementation, config or Config()), problem, lhs_indices, inverse)


def _check_matmul(
    op: str,
    lhs: jax.Array,
    matrices: Sequence[jax.Array],
    group_sizes,
    group_offset,
    transpose_rhs: bool,
    quantized: bool,
) -> int:
    """K. Raises ValueError if the operands of `grouped_matmul` do not fit together."""
    if len(matrices) not in (1, 2) or any(m.shape != matrices[0].shape for m in matrices):
        raise ValueError(
            f"{op}: rhs must be one array, or a pair of one shape, got {[list(m.shape) for m in matrices]}"
        )
    first = matrices[0]
    if lhs.ndim != 2 or first.ndim != 3:
        raise ValueError(f"{op}: lhs must be [M, K] and rhs [G, K, N], got {lhs.shape}, {first.shape}")
    for matrix in matrices:
        _check_groups(op, lhs, matrix, group_sizes, matrix.shape[0], group_offset, quantized=quantized)
    k = first.shape[2 if transpose_rhs else 1]
    if lhs.shape[1] != k:
        layout = "[G, N, K]" if transpose_rhs else "[G, K, N]"
        raise ValueError(
            f"{op}: lhs{list(lhs.shape)} has K={lhs.shape[1]}, rhs{list(first.shape)} as {layout} has K={k}"
        )
    return k


def _check_options(op: str, lhs: jax.Array, activation: str | None, lhs_indices, inverse) -> None:
    """Check the activation, the indices and their inverse, of `grouped_matmul`. Raises ValueError."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
    if lhs_indices is not None and (lhs_indices.ndim != 1 or not jnp.issubdtype(lhs_indices.dtype, jnp.integer)):
        raise ValueError(f"{op}: lhs_indices must be int [M], got {lhs_indices.dtype}{list(lhs_indices.shape)}")
    if inverse is None:
        return
    if inverse.ndim != 2 or inverse.shape[0] != lhs.shape[0] or not jnp.issubdtype(inverse.dtype, jnp.integer):
        raise ValueError(
            f"{op}: the inverse of lhs_indices must be int [T, j], T={lhs.shape[0]}; got {inverse.dtype}{list(inverse.shape)}"
        )


@keywords_in_config("tile", "stages", "num_sms", "cluster", "pingpong")
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
    config: Config | None = None,
) -> jax.Array:
    """Sum lhs[i]ᵀ · rhs[i] over the rows i of each group: the transpose of `grouped_matmul` with respect to its
    weights.

    Args:
      lhs: [M, K], float32 or bfloat16 in the kernels.
      rhs: [M, N], lhs's dtype.
      group_sizes: as in `grouped_matmul`. Rows of no group are not read: they may contain NaN.
      groups: G, number of groups from `group_offset` on; None: all.
      group_offset: first group.
      row_scale: [M], float32 factor on each row of lhs.
      out_dtype: dtype of the result; None: lhs's.
      implementation, config: as in `grouped_matmul`.

    Returns:
      [G, K, N], accumulated in float32; zero for an empty group. Differentiable with respect to lhs, rhs and row_scale.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or operands sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot take these arguments; with every reason.
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
    dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    problem = TransposeProblem(lhs, rhs, group_sizes, as_offset(group_offset), row_scale, groups, dtype)
    return transpose_with_gradient(Options(implementation, config or Config()), problem)


def _block_scales(
    op: str, matrices: Sequence[jax.Array], rhs_scale: jax.Array | tuple[jax.Array, jax.Array], k: int
) -> tuple[jax.Array, ...]:
    """The scales of each matrix as float32 [G, B, N]. Raises ValueError for shapes or dtypes that do not fit."""
    scales = rhs_scale if isinstance(rhs_scale, tuple) else (rhs_scale,)
    groups, n = matrices[0].shape[0], matrices[0].size // max(matrices[0].shape[0] * k, 1)
    if len(scales) != len(matrices) or any(s.shape != scales[0].shape for s in scales):
        shapes = [list(s.shape) for s in scales]
        raise ValueError(
            f"{op}: rhs_scale must be one array for each of rhs, {len(matrices)}, of one shape, got {shapes}"
        )
    for scale in scales:
        blocks = 1 if scale.ndim == 2 else scale.shape[1] if scale.ndim == 3 else 0
        if (scale.shape[0], scale.shape[-1]) != (groups, n) or not blocks or k % blocks:
            raise ValueError(
                f"{op}: rhs_scale must be [G, N]=[{groups}, {n}], or [G, B, N] where B divides K={k}; got {list(scale.shape)}"
            )
        if not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(f"{op}: rhs_scale must be floating-point, got {scale.dtype}")
    return tuple(s.astype(jnp.float32).reshape(groups, -1, n) for s in scales)


def _check_groups(op, lhs, rhs, group_sizes, groups, group_offset, *, quantized: bool = False) -> None:
    """Check dtypes and group arguments of `grouped_matmul` and its transpose.

    Args:
      groups: G.
      quantized: rhs has scales.

    Raises:
      ValueError: operand dtypes do not fit, `group_sizes` is no int [G], or there are not G of them without a
        `group_offset`.
    """
    if quantized:
        if rhs.dtype not in QUANTIZED or lhs.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"{op}: with rhs_scale, rhs must be int8 or float8_e4m3fn, and lhs bfloat16, float16 or float32; got {rhs.dtype} "
                f"and {lhs.dtype}"
            )
    elif rhs.dtype == jnp.int8:
        raise ValueError(f"{op}: rhs is int8, and there is no rhs_scale")
    elif lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"{op}: lhs and rhs must have one floating-point dtype, got {lhs.dtype} and {rhs.dtype}")
    check_group_sizes(op, group_sizes, groups, group_offset)


def check_group_sizes(op: str, group_sizes: jax.Array, groups: int, group_offset: Any) -> None:
    """Raises ValueError if `group_sizes` is no int [G], or there are not G of them without a `group_offset`."""
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


def warn_about_group_sizes(group_sizes: jax.Array, rows: int) -> None:
    """Warn at run time, by a debug callback, if a group size is negative or their sum exceeds `rows`.

    Args:
      group_sizes: int [G], as in `grouped_matmul`, which counts negative ones as 0 and ignores rows past `rows`.
      rows: M.
    """

    def look(sizes):
        """The callback: warns about the sizes, int [G]."""
        sizes = np.asarray(sizes, np.int64)
        if (sizes < 0).any() or sizes.sum() > rows:
            warnings.warn(
                f"group sizes {sizes.tolist()} are negative or sum to more than the {rows} rows "
                f"there are: negative ones count as 0, and the rest is cut off",
                stacklevel=2,
            )

    jax.debug.callback(look, group_sizes)


def as_offset(group_offset: jax.Array | int | None) -> jax.Array | None:
    return None if group_offset is None else jnp.asarray(group_offset, jnp.int32)

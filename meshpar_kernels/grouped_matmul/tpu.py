"""Grouped matmul on TPU (Mosaic): the grid iterates over tile steps, whose row tile and group are read from scalar
memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import cdiv
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels._numerics import dot
from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
from meshpar_kernels.grouped_matmul.activations import activate
from meshpar_kernels.grouped_matmul.problem import MatmulProblem
from meshpar_kernels.grouped_matmul.schedule import row_tile_steps
from meshpar_kernels.grouped_matmul.tpu_tile_matmul import by_rows, call_by_tile_steps, in_blocks, row_mask
from meshpar_kernels.grouped_matmul.tpu_tile_sizes import Tile


class _Form(NamedTuple):
    """Static arguments of the kernel.

    Attributes:
      transpose_rhs: rhs is [G, N, K].
      num_rhs: 1, or 2 for a gated activation.
      activation: of the matmuls.
      scaled: there are row scales.
      quantized: there are scales of the weights.
      transpose_scale: these belong to blocks of columns of the result, not to blocks of K.
      scale_block: elements of one such block.
      steps: limits of the sizes of one `dot_general`.
    """

    transpose_rhs: bool
    num_rhs: int
    activation: str | None
    scaled: bool
    quantized: bool
    transpose_scale: bool
    scale_block: int
    steps: tpu_tiles.Steps


class _Operands(NamedTuple):
    """The blocks of lhs, of each rhs and of its scales that one grid step has in VMEM, as refs;
    `column_tile` is of `width` columns of the result."""

    form: _Form
    lhs: Any
    rhs: Sequence[Any]
    scales: Sequence[Any]
    column_tile: Any
    width: int

    def _pair(self, half: int, row_slice: Any, inner: Any, columns: Any) -> tuple[Any, Any]:
        weights = self.rhs[half].at[0]
        return self.lhs[row_slice, inner], weights[(columns, inner) if self.form.transpose_rhs else (inner, columns)]

    def _factors(self, half: int, position: Any, lanes: Any) -> Any:
        """The scales of the block that contains `position`: float32 [1, lanes]."""
        blocks = self.scales[half].shape[1]
        block = jnp.minimum(lax.div(position, self.form.scale_block), blocks - 1) if blocks > 1 else 0
        return self.scales[half][0, pl.ds(block, 1), lanes]

    def matmul(self, half: int, row_slice: Any, first_k: Any, length: int, columns: Any) -> jax.Array:
        """float32 [rows, columns]: lhs · rhs of `length` contracted elements from `first_k` on; quantized weights are
        dequantized.

        Scales of blocks of K multiply the float32 result of each block; scales of blocks of columns multiply an
        operand.
        """
        transpose_rhs = self.form.transpose_rhs
        contract = (1, 1 if transpose_rhs else 0)
        if not self.form.quantized:
            return dot(*self._pair(half, row_slice, pl.ds(first_k, length), columns), contract)
        if self.form.transpose_scale:  # one block of columns; the scales vary along the contracted dim
            left, right = self._pair(half, row_slice, pl.ds(first_k, length), columns)
            scale = self._factors(half, self.column_tile * self.width + columns.start, pl.ds(first_k, length))
            if transpose_rhs:
                return dot(left, (right.astype(jnp.float32) * scale).astype(left.dtype), contract)
            return dot((left.astype(jnp.float32) * scale).astype(left.dtype), right.astype(left.dtype), contract)
        step = self.form.steps.unit_k if self.scales[half].shape[1] > 1 else length
        parts = []
        for begin in range(0, length, step):
            left, right = self._pair(half, row_slice, pl.ds(first_k + begin, step), columns)
            parts.append(dot(left, right.astype(left.dtype), contract) * self._factors(half, first_k + begin, columns))
        return functools.reduce(jnp.add, parts)

    def matmuls(self, row_slice: Any, columns: Any, acc: Sequence[Any]) -> list[jax.Array]:
        """float32 [rows, columns] with each rhs, over all of K; `acc`: a ref of an accumulator for each, if K is split."""
        k = self.lhs.shape[1]
        if not acc:
            return [self.matmul(half, row_slice, 0, k, columns) for half in range(self.form.num_rhs)]
        totals = [total.at[: row_slice.size, : columns.size] for total in acc]
        for total in totals:
            total[...] = jnp.zeros_like(total)

        def add(first, length):
            for half, total in enumerate(totals):
                total[...] += self.matmul(half, row_slice, first, length, columns)

        in_blocks(k, self.form.steps.most_k, add, self.form.steps.unit_k)
        return [total[...] for total in totals]


def _matmul_kernel(tile_of, group_of, start, end, live, lhs_ref, *refs, form: _Form):
    """One grid step: rows [start, end) of a row tile times the weights of one group, for one column tile.

    The grid is (column tile, tile step). Rows of other groups in the output block keep the values that earlier grid
    steps wrote.

    Args:
      tile_of, group_of: scalar prefetch int32 [tile steps]: row tile and group.
      start, end: scalar prefetch int32 [tile steps]: the group's rows in the row tile, counted over all rows.
      live: scalar prefetch int32 [tile steps]: 1, or 0 for rows of no group, whose result is zero.
      lhs_ref: VMEM input [tile rows, K].
      refs: inputs in VMEM: `num_rhs` blocks of rhs [1, K, columns] ([1, columns, K] with `transpose_rhs`), with
        `quantized` as many blocks of scales, with `scaled` the row scales [1, tile rows]; output: [tile rows, columns];
        scratch: float32 accumulators [rows, columns] if K is split, [tile rows, 1] for the row scales.
      form: static arguments.
    """
    del group_of  # the block specs read it
    refs = list(refs)
    rhs_refs = [refs.pop(0) for _ in range(form.num_rhs)]
    rhs_scales = [refs.pop(0) for _ in range(form.num_rhs)] if form.quantized else []
    scale_ref: Any = refs.pop(0) if form.scaled else None
    out_ref = refs.pop(0)
    column_tile, tile_step = pl.program_id(0), pl.program_id(1)
    scale_column = refs.pop() if form.scaled else None
    rows, n = out_ref.shape
    low = start[tile_step] - tile_of[tile_step] * rows
    high = end[tile_step] - tile_of[tile_step] * rows
    operands = _Operands(form, lhs_ref, rhs_refs, rhs_scales, column_tile, n)

    def multiply(first_row, size, begin):
        """Compute `size` rows of the output block from `first_row` on; with `begin` only rows of the group from `begin`
        on are written."""
        row_slice = pl.ds(first_row, size)

        def one_block(first_column, width):
            """Compute `width` columns of these rows: matmul, activation, row scale, masked write."""
            columns = pl.ds(first_column, width)
            value = activate(operands.matmuls(row_slice, columns, refs), form.activation)
            if scale_column is not None:
                value = value * scale_column[row_slice]
            value = value.astype(out_ref.dtype)
            if begin is not None:
                in_group = row_mask(first_row, size, jnp.maximum(low, begin), high)
                value = jnp.where(in_group, value, out_ref[row_slice, columns])
            out_ref[row_slice, columns] = value

        in_blocks(n, form.steps.most_n, one_block, form.steps.unit_n)

    @pl.when(live[tile_step] > 0)
    def _():
        if scale_column is not None:
            scale_column[...] = scale_ref[...].T
        by_rows(low, high, rows, tpu_tiles.ROW_CHUNKS, tpu_tiles.pack(lhs_ref.dtype.itemsize), multiply)

    @pl.when(live[tile_step] == 0)
    def _():
        in_group = row_mask(0, rows, low, high)
        out_ref[...] = jnp.where(in_group, jnp.zeros_like(out_ref), out_ref[...])


def grouped_matmul(p: MatmulProblem, *, tile: Tile) -> jax.Array:
    """As `reference.grouped_matmul`.

    Grid: (column tiles of the result, tile steps). The rows of a tile with one group go through the matrix unit in
    large blocks; of a tile that groups share, about the rows of the tile step's group do (`tpu_blocks.by_rows`).

    Quantized weights stay quantized in HBM, and are converted in VMEM. Scales of blocks of K multiply the float32
    partial result of each block. Scales of blocks of columns (`transpose_scale`, in the gradient of lhs) multiply the
    operand that has these columns, which is then rounded to the dtype of lhs.
    """
    (rows, k, n, _), num_rhs = p.key.shape, len(p.rhs)
    tm, _, tn = tile
    steps_n = cdiv(n, tn)
    tile_steps = row_tile_steps(p.bounds(), rows, tm)

    if p.transpose_rhs:
        rhs_spec = pl.BlockSpec((1, tn, k), lambda i, v, t, g, *_: (g[v], i, 0))
    else:
        rhs_spec = pl.BlockSpec((1, k, tn), lambda i, v, t, g, *_: (g[v], 0, i))

    operands = [(p.lhs, pl.BlockSpec((tm, k), lambda i, v, t, *_: (t[v], 0))), *((m, rhs_spec) for m in p.rhs)]
    blocks = p.rhs_scale[0].shape[1] if p.rhs_scale else 0
    wide = (1, blocks, k if p.transpose_scale else tn)
    scale_spec = pl.BlockSpec(wide, lambda i, v, t, g, *_: (g[v], 0, 0 if p.transpose_scale else i))
    operands += [(scale, scale_spec) for scale in p.rhs_scale]
    scale_block = (n if p.transpose_scale else k) // max(blocks, 1)
    steps = tpu_tiles.steps(k, tn, blocks, scale_block, p.transpose_scale)
    most_rows = min(tm, max(tpu_tiles.BLOCK[0], tpu_tiles.ROW_CHUNKS[-1]))
    acc = pltpu.VMEM((most_rows, min(tn, tpu_tiles.BLOCK[2])), jnp.float32)
    scaled = p.row_scale is not None
    form = _Form(
        p.transpose_rhs, num_rhs, p.activation, scaled, bool(p.rhs_scale), p.transpose_scale, scale_block, steps
    )
    cost = pl.CostEstimate(
        flops=2 * rows * k * n * num_rhs,
        transcendentals=rows * n * (p.activation is not None),
        bytes_accessed=p.lhs.dtype.itemsize * steps_n * rows * k
        + sum(matrix.nbytes for matrix in p.rhs)
        + sum(scale.nbytes for scale in p.rhs_scale) * (steps_n if p.transpose_scale else 1)
        + p.out_dtype.itemsize * rows * n,
    )
    return call_by_tile_steps(
        functools.partial(_matmul_kernel, form=form), "grouped_matmul", p, tile_steps, (steps_n,), operands,
        pl.BlockSpec((tm, tn), lambda i, v, t, *_: (t[v], i)), [acc] * (num_rhs if k > steps.most_k else 0), cost,
    )  # fmt: skip

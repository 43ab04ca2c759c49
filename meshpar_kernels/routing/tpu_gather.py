"""Rows gathered and summed on TPU (Mosaic): the kernel of `permute`, `combine` and their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._numerics import cost

BLOCK = 256
"""Most rows of `x` that are fetched for a block, beyond the 16 result rows that it has at least."""


def _block(index_shape: tuple[int, ...], block: int) -> tuple[int, int]:
    """(result rows of a block, k) for indices of this shape [rows, k], and about `block` fetched rows."""
    total_rows, k = index_shape
    return min(max(16, block // k // 16 * 16), pl.cdiv(total_rows, 16) * 16), k


def _slabs(width: int, rows: int, k: int, itemsize: int) -> int:
    """The fewest slabs of columns, each at most 4096 columns wide if the width divides, that fit VMEM twice; 0: none fits.
    A megacore chip has two or more, one for each core."""
    slabs = 2 if width % 4096 == 0 else 1

    def fits() -> bool:
        return 2 * rows * (width // slabs) * (4 * k + itemsize) + (1 << 20) <= _compat.tpu_vmem_limit()

    while (width // slabs > 4096 or not fits()) and width % (256 * slabs) == 0:
        slabs *= 2
    return slabs if fits() else 0


def gather_sum_unsupported(x: jax.Array, index: jax.Array) -> Unsupported:
    """Reasons why the TPU kernel cannot gather these rows; empty if it can."""
    reasons = []
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"rows are {x.dtype}; the kernel takes float32 and bfloat16")
    if index.shape[1] > 32:
        reasons.append(f"k={index.shape[1]} rows to sum are more than 32")
    if x.shape[1] % 128:
        reasons.append(f"H={x.shape[1]} is not a multiple of 128: a row is copied register by register")
    elif not _slabs(x.shape[1], *_block(index.shape, BLOCK), x.dtype.itemsize):
        reasons.append(
            f"H={x.shape[1]}, k={index.shape[1]}: a block of rows exceeds {_compat.tpu_vmem_limit() >> 20} MiB of VMEM"
        )
    return Unsupported(reasons)


def as_words(x: jax.Array) -> jax.Array:
    """bfloat16 [N, H] → int32 [N/2, H] with row 2i in the low halves, as the TPU packs them.

    In a compiled kernel this is a bitcast of the same memory (`Ref.bitcast`), which the interpreter does not support.
    """
    rows, width = x.shape
    pairs = x.reshape(rows // 2, 2, width).swapaxes(1, 2)
    return lax.bitcast_convert_type(pairs, jnp.int32)


def _gather_sum_kernel(
    now_smem, next_smem, *refs, rows: int, k: int, limit: int, packed: bool, view: bool, weighted: bool
):
    """One grid step: computes one block of result rows and one slab of columns, each row as a (weighted) sum of k rows
    of `x`.

    The grid is (slabs of columns, blocks of rows). The rows of the next block are in flight while the rows of this one
    are summed.

    Args:
      now_smem, next_smem: SMEM int32 [1, k, rows]: rows to fetch for this block and for the next one.
      refs: inputs: indices VMEM int32 [1, k, rows], with `weighted` weights float32 [1, k, rows], x in HBM; output VMEM
        [rows, slab]; scratch: VMEM [2, k · rows, slab], DMA semaphores [2], VMEM [rows, k] for the indices and, with
        `weighted`, for the weights.
      rows: result rows of a block.
      k: rows of x for each result row.
      limit: rows of x; an index outside of [0, limit) counts as a row of zeros.
      packed: x has int32 words of two bfloat16 rows.
      view: x is bfloat16 in HBM, and is bitcast to int32 words in the kernel.
    """
    if weighted:
        index_ref, weight_ref, x_ref, out_ref, buffer, arrived, index_col, weight_col = refs
        weight_col[...] = weight_ref[0].T
    else:
        index_ref, x_ref, out_ref, buffer, arrived, index_col = refs
        weight_col = None
    index_col[...] = index_ref[0].T
    slab, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    width = out_ref.shape[1]
    words = x_ref.bitcast(jnp.int32) if view else x_ref

    def fetch(indices, slot):
        """Start one DMA for each of the k · rows rows of a block, to `buffer[slot]`."""
        together = 8 if k <= 8 else 1  # the rows of a register: their addresses are offsets from one address

        def some_rows(block, _):
            """Start the copies for one block of result rows: k copies for each row."""
            first = block * together
            for j in range(k):
                targets = buffer.at[slot, pl.ds(pl.multiple_of(j * rows + first, together), together)]
                for r in range(together):
                    row = indices[0, j, first + r]
                    pltpu.make_async_copy(
                        words.at[pl.ds(row, 1), pl.ds(slab * width, width)], targets.at[pl.ds(r, 1)], arrived.at[slot]
                    ).start()
            return 0

        lax.fori_loop(0, rows // together, some_rows, 0)

    @pl.when(step == 0)
    def _():
        fetch(now_smem, 0)

    @pl.when(step + 1 < steps)
    def _():
        fetch(next_smem, (step + 1) % 2)

    slot = step % 2
    pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

    def one_strip(s, _):
        """Sum 16 result rows in float32, with weights if there are any, and write them."""
        first = pl.multiple_of(s * 16, 16)
        index = index_col[pl.ds(first, 16), :]
        for left in range(0, width, 512):
            lanes = slice(left, min(left + 512, width))
            total = jnp.zeros((16, lanes.stop - lanes.start), jnp.float32)
            for j in range(k):
                word = buffer[slot, pl.ds(pl.multiple_of(j * rows + first, 16), 16), lanes]
                selected = index[:, j : j + 1]
                if packed:
                    odd = (selected & 1) > 0
                    word = jnp.where(odd, word & jnp.int32(-65536), word << 16)
                    word = lax.bitcast_convert_type(word, jnp.float32)
                if weight_col is not None:
                    word = word * weight_col[pl.ds(first, 16), j : j + 1]
                total += jnp.where((selected >= 0) & (selected < limit), word, 0.0)
            out_ref[pl.ds(first, 16), lanes] = total.astype(out_ref.dtype)
        return 0

    lax.fori_loop(0, rows // 16, one_strip, 0)


def gather_sum(x: jax.Array, index: jax.Array, weight: jax.Array | None, *, block: int = BLOCK) -> jax.Array:
    """As `reference.gather_sum`: one copy for each row from HBM to VMEM, where rows are summed in float32; each result
    row is written once.

    Two bfloat16 rows share 32-bit words in HBM, and a copy moves 32-bit words: so bfloat16 reads twice the bytes that
    it needs. About `block` rows are in flight while as many are summed. Unused choices (-1) fetch row 0 and are masked.
    An odd number of bfloat16 rows is padded by one first.
    """
    packed = x.dtype == jnp.bfloat16
    if packed and x.shape[0] % 2:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    total_rows = index.shape[0]
    limit, width = x.shape
    rows, k = _block(index.shape, block)
    steps = pl.cdiv(total_rows, rows)
    padding = steps * rows - total_rows

    def by_block(values, fill):
        values = jnp.pad(values.T, ((0, 0), (0, padding)), constant_values=fill)
        return values.reshape(k, steps, rows).swapaxes(0, 1)

    slabs = _slabs(width, rows, k, x.dtype.itemsize)
    slab = width // slabs
    view = packed and not _compat.interpreting()
    # computed in advance, since the copies are limited by the scalar core's work for each
    fetched = by_block(jnp.clip(index, 0, limit - 1) >> int(packed), 0)
    block_shape = (1, k, rows)
    operands = [fetched, fetched, by_block(index, -1)]
    in_specs = [
        pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(block_shape, lambda h, i: (jnp.minimum(i + 1, steps - 1), 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0)),
    ]
    columns = [pltpu.VMEM((rows, k), jnp.int32)]
    if weight is not None:
        operands.append(by_block(weight.astype(jnp.float32), 0.0))
        in_specs.append(pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0)))
        columns.append(pltpu.VMEM((rows, k), jnp.float32))
    operands.append(as_words(x) if packed and not view else x)
    in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    word = jnp.int32 if packed else jnp.float32
    return pl.pallas_call(
        functools.partial(
            _gather_sum_kernel, rows=rows, k=k, limit=limit, packed=packed, view=view, weighted=weight is not None
        ),
        grid=(slabs, steps),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((rows, slab), lambda h, i: (i, h)),
        out_shape=_compat.out_struct((total_rows, width), x.dtype, *operands),
        scratch_shapes=[pltpu.VMEM((2, k * rows, slab), word), pltpu.SemaphoreType.DMA((2,)), *columns],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_compat.tpu_vmem_limit(),
            disable_bounds_checks=True,  # the checks take more than half the bundles of a copy; row indices are clipped above
        ),
        cost_estimate=cost(2 * total_rows * k * width, total_rows * (4 * k + x.dtype.itemsize) * width),
        name="meshpar_gather_sum",
    )(*operands)

"""The fused TPU matmuls for a compiler: `lax.dot_general`s of any rank, reshaped to the two-dim operands that the
kernels take.

Rows are the free dims of the gathered (or scattered) operand, columns the free dims of the other operand. The kernels
concatenate blocks along the first dim, so another block dim is transposed to the front. Several matmuls of one gathered
operand become one matmul with more columns; a sum of matmuls becomes one matmul with a longer contraction. Both copy
operands; the copied bytes are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._choose import Unsupported
from meshpar_kernels.collective_matmul import ring, tpu_gather, tpu_scatter
from meshpar_kernels.collective_matmul import tpu_common as tpu
from meshpar_kernels.collective_matmul.dot_dims import Axes, Dot


class _Sides(NamedTuple):
    """The dims of a `dot_general`, by operand: the operand with the rows, and the other one. Contracted dims of both
    are in the same order.

    Attributes:
      free, summed: free and contracted dims of the operand with the rows.
      other_free, other_summed: free and contracted dims of the other operand.
    """

    free: tuple[int, ...]
    summed: tuple[int, ...]
    other_free: tuple[int, ...]
    other_summed: tuple[int, ...]


def _sides(dot: Dot, side: int, ranks: tuple[int, int]) -> _Sides:
    """The dims of `dot`, whose operand number `side` has the rows; contracted dims in the order of that operand.
    `ranks`: of lhs and rhs."""
    (lc, rc), _ = dot.dimension_numbers
    own, others = ((lc, rc), (rc, lc))[side]
    order = sorted(range(len(own)), key=lambda i: own[i])
    free = [tuple(d for d in range(n) if d not in c) for n, c in zip(ranks, (lc, rc), strict=True)]
    return _Sides(free[side], tuple(own[i] for i in order), free[1 - side], tuple(others[i] for i in order))


def _sorted(dims: Sequence[int]) -> bool:
    return list(dims) == sorted(dims)


def _size(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _bytes(x: Any) -> float:
    return float(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize)


def _reasons(pairs: Sequence[tuple[Any, Any]], dots: Sequence[Dot], sides: Sequence[int]) -> Unsupported:
    """Reasons why the kernels cannot run these matmuls as one; empty if they can.

    Args:
      pairs: (lhs, rhs) of every matmul: arrays, or `jax.ShapeDtypeStruct`s.
      dots: dimension numbers of every matmul.
      sides: for every matmul, which operand has the rows: 0 or 1.
    """
    reasons = []
    if any(dot.dimension_numbers[1][0] for dot in dots):
        reasons.append("a matmul has batch dims")
    if len(set(sides)) > 1:
        reasons.append("the rows are in the left operand of one matmul and in the right operand of another")
    if len({str(dot.precision) for dot in dots}) > 1:
        reasons.append("matmuls of several precisions")
    dtypes = {jnp.dtype(dot.dtype(*pair)) for dot, pair in zip(dots, pairs, strict=True)}
    if len(dtypes) > 1 or len({x.dtype for pair in pairs for x in pair}) > 1:
        reasons.append("matmuls of several dtypes")
    return Unsupported(reasons)


class _Fused:
    """Base class of `FusedGather` and `FusedScatter`: the matmuls, and how their second operands are concatenated. There is
    an object only of matmuls that the kernel can run (`of`).

    Attributes:
      rows, k, n: sizes of the kernel's matmul: rows of a block, contracted and resulting columns.
      tile: of the kernel.
      dtype: of the result.
      copied: bytes read and written to transpose and concatenate operands and results.
      held: bytes of the copies of operands. Results are not counted: by the compiled peak memory, XLA rather chooses
        another layout for them than copies them.
    """

    rows: int
    k: int
    n: int
    tile: tpu.Tile
    dtype: Any

    def __init__(self, pairs: Sequence[tuple[Any, Any]], dots: Sequence[Dot], side: int, devices: int):
        """Find an order of the dims of the matmuls; arguments as of `_reasons`, one side for all."""
        self.dots, self.side, self.devices, self.after = list(dots), side, devices, 0.0
        self.parts = [_sides(dot, side, (lhs.ndim, rhs.ndim)) for dot, (lhs, rhs) in zip(dots, pairs, strict=True)]
        self.own = [pair[side] for pair in pairs]
        self.others = [pair[1 - side] for pair in pairs]
        first = self.parts[0]
        self.transposed = not _sorted((*first.other_summed, *first.other_free))
        joined = len(self.parts) > 1
        copied = [w for p, w in zip(self.parts, self.others, strict=True) if joined or not _sorted(self._order(p))]
        self.copied = sum((2 * _bytes(w) for w in copied), 0.0)

    @property
    def held(self) -> float:
        return (self.copied - self.after) / 2

    def _order(self, p: _Sides) -> tuple[int, ...]:
        if self.transposed:
            return (*p.other_free, *p.other_summed)
        return (*p.other_summed, *p.other_free)

    def weights(self, others: Sequence[jax.Array], join_rows: bool) -> jax.Array:
        """The other operands as one: [K, n], or [n, K] if `transposed`; joined along K with `join_rows`, else along n."""
        flat = []
        for p, w in zip(self.parts, others, strict=True):
            k = _size(w.shape, p.other_summed)
            w = lax.transpose(w, self._order(p))
            flat.append(lax.reshape(w, (w.size // k, k) if self.transposed else (k, w.size // k)))
        return flat[0] if len(flat) == 1 else lax.concatenate(flat, int(join_rows == self.transposed))

    def _with_tile(self, out_dtype: Any, keep: bool = False) -> Unsupported:
        """Choose the tile. Returns the reasons why the kernel cannot run with these sizes and dtypes; empty if it can."""
        x, w = self.own[0], self.others[0]
        itemsize = jnp.dtype(x.dtype).itemsize
        tile = tpu.pick_tile(self.rows, self.k, self.n, self.devices, itemsize, keep=keep)
        reasons = tpu.unsupported(x, w, self.rows, self.k, self.n, self.devices, tile, out_dtype)
        if tile is not None:
            self.tile = tile
        return reasons


class FusedGather(_Fused):
    """Matmuls of a gathered operand, by the kernel of `all_gather_matmul`.

    Args:
      x: this device's block of the gathered operand; like the others an array, or an object with its shape and dtype.
      others: the second operand of every matmul.
      dots: dimension numbers of every matmul; ``side`` says which operand ``x`` is.
      dim: dim of x that is sharded over the mesh axis.
      devices: of the ring.
      keep: return the gathered operand too.
    """

    dim: int
    keep: bool
    columns: list[int]

    @classmethod
    def of(
        cls, x: Any, others: Sequence[Any], dots: Sequence[Dot], dim: int, devices: int, keep: bool = False
    ) -> FusedGather | Unsupported:
        """The kernel, or the reasons why it cannot run these matmuls; arguments as of the class."""
        pairs = [(x, w) if d.side == 0 else (w, x) for d, w in zip(dots, others, strict=True)]
        if reasons := _reasons(pairs, dots, [d.side for d in dots]):
            return reasons
        self = cls(pairs, dots, dots[0].side, devices)
        summed = self.parts[0].summed
        if dim in summed or any(p.summed != summed for p in self.parts):
            return Unsupported(("the gathered dim is contracted, or the matmuls contract different dims",))
        return self._sized(x, dim, keep) or self

    def _sized(self, x: Any, dim: int, keep: bool) -> Unsupported:
        """Set the sizes, the tile and the copied bytes. Returns the reasons against them."""
        first, self.dim, self.keep = self.parts[0], dim, keep
        dtype = jnp.dtype(self.dots[0].dtype(self.own[0], self.others[0]))
        self.rows, self.k = _size(x.shape, first.free), _size(x.shape, first.summed)
        self.columns = [_size(w.shape, p.other_free) for p, w in zip(self.parts, self.others, strict=True)]
        self.n = sum(self.columns)
        self.copied += 2 * _bytes(x) * (not _sorted((*first.free, *first.summed)))
        moved = _size(x.shape, first.free[: first.free.index(dim)]) > 1
        if moved or len(self.dots) > 1 or self.side == 1:
            self.after += 2.0 * self.devices * self.rows * self.n * dtype.itemsize
        if keep and (moved or not _sorted((*first.free, *first.summed))):
            self.after += 2 * self.devices * _bytes(x)
        self.copied += self.after
        self.dtype = dtype
        return self._with_tile(dtype, keep)

    def __call__(self, x: jax.Array, others: Sequence[jax.Array], axis_name: Axes) -> list[jax.Array]:
        """As `meshpar_kernels.collective_matmul.gather_dots`; its gradient is computed by the ring."""

        def plain(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
            return ring.gather_dots(x, others, self.dots, axis_name, self.dim, keep=self.keep)

        return _with_gradient_of(plain, lambda x, *others: self._run(x, others, axis_name))(x, *others)

    def _run(self, x: jax.Array, others: Sequence[jax.Array], axis_name: Axes) -> list[jax.Array]:
        """The matmuls by the kernel, in their own shapes; with `keep` the gathered operand after them."""
        first = self.parts[0]
        flat = lax.reshape(lax.transpose(x, (*first.free, *first.summed)), (self.rows, self.k))
        out, *saved = tpu_gather.all_gather_matmul(
            flat, self.weights(others, False), axis_name, tile=self.tile, out_dtype=self.dtype,
            transposed=self.transposed, precision=self.dots[0].precision, keep=self.keep,
        )  # fmt: skip
        results, at = [], 0
        for p, w, n in zip(self.parts, others, self.columns, strict=True):
            y = self._blocks_in_place(out[:, at : at + n], x.shape, [w.shape[d] for d in p.other_free])
            if self.side == 1:
                rows = len(first.free)
                y = lax.transpose(y, (*range(rows, y.ndim), *range(rows)))
            results.append(y)
            at += n
        for rows in saved:
            y = self._blocks_in_place(rows, x.shape, [x.shape[d] for d in first.summed])
            order = (*first.free, *first.summed)
            results.append(lax.transpose(y, [order.index(d) for d in range(len(order))]))
        return results

    def _blocks_in_place(self, y: jax.Array, shape: Sequence[int], columns: Sequence[int]) -> jax.Array:
        """[A·rows, columns] → [row dims of x, with `dim` A times as long; dims of the columns]."""
        free = self.parts[0].free
        at, sizes = free.index(self.dim), [shape[d] for d in free]
        y = lax.reshape(y, (self.devices, *sizes, *columns))
        y = lax.transpose(y, (*range(1, at + 1), 0, *range(at + 1, y.ndim)))
        sizes[at] *= self.devices
        return lax.reshape(y, (*sizes, *columns))


class FusedScatter(_Fused):
    """A reduce-scattered sum of matmuls, by the kernel of `matmul_reduce_scatter`.

    Args:
      operands: (lhs, rhs) of every matmul: arrays, or `jax.ShapeDtypeStruct`s.
      dots: dimension numbers of every matmul.
      dims: for every matmul, the dim of its result that is scattered.
      devices: of the ring.
      dtype: of the result.
      comm_dtype: dtype in which partial results are sent.
    """

    dims: list[int]
    wire: Any
    at: int

    @classmethod
    def of(
        cls, operands: Sequence[tuple[Any, Any]], dots: Sequence[Dot], dims: Sequence[int], devices: int, dtype: Any,
        comm_dtype: Any,
    ) -> FusedScatter | Unsupported:  # fmt: skip
        """The kernel, or the reasons why it cannot run these matmuls; arguments as of the class."""
        owners = [
            int(dim >= lhs.ndim - len(dot.dimension_numbers[0][0]))
            for (lhs, _), dot, dim in zip(operands, dots, dims, strict=True)
        ]
        if reasons := _reasons(operands, dots, owners):
            return reasons
        self = cls(operands, dots, owners[0], devices)
        self.dims, self.dtype, self.wire = list(dims), jnp.dtype(dtype), jnp.dtype(comm_dtype)
        return self._sized() or self

    def _sized(self) -> Unsupported:
        """Set the sizes, the tile and the copied bytes. Returns the reasons against them."""
        results = {
            (tuple(x.shape[d] for d in p.free), tuple(w.shape[d] for d in p.other_free))
            for p, x, w in zip(self.parts, self.own, self.others, strict=True)
        }
        first, x = self.parts[0], self.own[0]
        # of the operand that has the rows, the dim that is scattered
        self.at = self.dims[0] - (0 if self.side == 0 else len(first.other_free))
        if len(results) > 1 or len(set(self.dims)) > 1:
            return Unsupported(("the matmuls of the sum have different shapes",))
        full = x.shape[first.free[self.at]]
        if full % self.devices:
            return Unsupported((f"{full} rows do not divide over {self.devices} devices",))
        self.rows = _size(x.shape, first.free) // self.devices
        self.k = sum(_size(a.shape, p.summed) for p, a in zip(self.parts, self.own, strict=True))
        self.n = _size(self.others[0].shape, first.other_free)
        moved = len(self.dots) > 1 or _size(x.shape, first.free[: self.at]) > 1
        for p, a in zip(self.parts, self.own, strict=True):
            self.copied += 2 * _bytes(a) * (moved or not _sorted((*p.free, *p.summed)))
        if self.side == 1:
            self.after = 2.0 * self.rows * self.n * self.dtype.itemsize
        self.copied += self.after
        reasons = self._with_tile(self.dtype)
        if self.wire not in (jnp.float32, jnp.bfloat16):
            reasons = Unsupported((*reasons, f"comm_dtype is {self.wire}"))
        return reasons

    def __call__(self, operands: Sequence[tuple[jax.Array, jax.Array]], axis_name: Axes) -> jax.Array:
        """This device's block of the reduce-scattered sum of the matmuls. The gradient is computed by the ring."""

        def plain(*flat: jax.Array) -> jax.Array:
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            return ring.dots_scatter(
                pairs, self.dots, self.dims, axis_name, self.dims[0], self.dtype, comm_dtype=self.wire
            )

        def run(*flat: jax.Array) -> jax.Array:
            return self._run(list(zip(flat[::2], flat[1::2], strict=True)), axis_name)

        return _with_gradient_of(plain, run)(*(a for pair in operands for a in pair))

    def _run(self, operands: Sequence[tuple[jax.Array, jax.Array]], axis_name: Axes) -> jax.Array:
        """This device's block of the sum, by the kernel, in the shape of the matmuls' results."""
        flat = [self._rows(pair[self.side], p) for pair, p in zip(operands, self.parts, strict=True)]
        others = [pair[1 - self.side] for pair in operands]
        y = tpu_scatter.matmul_reduce_scatter(
            flat[0] if len(flat) == 1 else lax.concatenate(flat, 1), self.weights(others, True), axis_name,
            tile=self.tile, out_dtype=self.dtype, comm_dtype=self.wire, transposed=self.transposed,
            precision=self.dots[0].precision,
        )  # fmt: skip
        first, x = self.parts[0], operands[0][self.side]
        rows = [x.shape[d] for d in first.free]
        rows[self.at] //= self.devices
        y = lax.reshape(y, (*rows, *(others[0].shape[d] for d in first.other_free)))
        return y if self.side == 0 else lax.transpose(y, (*range(len(rows), y.ndim), *range(len(rows))))

    def _rows(self, x: jax.Array, p: _Sides) -> jax.Array:
        """[A·rows, K], the blocks of the first device first."""
        k, at = _size(x.shape, p.summed), self.at
        x = lax.transpose(x, (*p.free, *p.summed))
        x = lax.reshape(x, (*x.shape[:at], self.devices, x.shape[at] // self.devices, *x.shape[at + 1 :]))
        x = lax.transpose(x, (at, *range(at), *range(at + 1, x.ndim)))
        return lax.reshape(x, (self.devices * self.rows, k))


def _with_gradient_of(plain: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, with the gradient of `plain`, which equals it."""
    call = jax.custom_vjp(run)
    call.defvjp(lambda *xs: (run(*xs), xs), lambda xs, g: jax.vjp(plain, *xs)[1](g))
    return call

"""Fragments: the elements of a dim that each device has, where they are no block of it.

Halos and rings of matmuls give devices slices of other shards, windows that extend beyond the array, and sums over some of the
devices. Tables say for each device which elements it has, and ops that move elements move the entries of the tables: a table is
evaluated, not matched. One that is that of a block is replaced by the axes of the block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from .device_values import order_of, orders
from .relation import Context, Rel, require

ALL = -1
"""The bits of an element that is complete."""
MAX_BITS = 62
Fill = tuple[str, Any]
"""Op and params of a number, or of ``empty``."""
OF_FRAGMENTS = frozenset(
    "slice split gather dynamic_slice dynamic_update_slice concatenate pad transpose ppermute all_gather dot_general "
    "conv_general_dilated reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add".split()
)
"""Primitives whose lemmas take operands in fragments, besides elementwise ops."""
ZEROS = ("0.0", "-0.0", "0", "False")


@dataclass(frozen=True, slots=True)
class Fragments:
    """The elements of one dim on all devices, in place of the axes of its blocks.

    Attributes:
      axes: along which devices have different elements, in the order of the mesh.
      table: int64[devices along axes, elements, 2]: the index of an element, -1 for one outside of the array; and the blocks of a
        contraction whose sum it is, as bits, :data:`ALL` of a complete one.
      devices: the number of devices.
      fill: the value of elements outside of the array: a number, or ``empty``.
      origin: of incomplete sums: (the number of blocks, the contractions).
    """

    axes: tuple[str, ...]
    table: bytes
    devices: int
    fill: Fill | None = None
    origin: tuple[int, Hashable] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.table, np.int64).reshape(self.devices, -1, 2)

    @property
    def complete(self) -> bool:
        """Whether all elements are complete, and in the array."""
        return self.fill is None and self.origin is None


def has_fragments(x: Rel) -> bool:
    """Whether a dim is in fragments."""
    return any(isinstance(s, Fragments) for s in x.spec)


def require_zeros_outside(x: Rel, by: str) -> None:
    """Require that fragments are 0 outside of the array, so that a multiple or a cast of them is one of the array."""
    fills = [s.fill for s in x.spec if isinstance(s, Fragments) and s.fill is not None]
    require(all(f[1] in ZEROS for f in fills), f"{by} of numbers outside of an array")


def without_dim(x: Rel, d: int) -> tuple[Any, ...]:
    """The relation, except one dim."""
    return x.term, x.partial, x.kind, x.origin, x.spec[:d], x.spec[d + 1 :], x.shape[:d], x.shape[d + 1 :]


def in_mesh_order(ctx: Context, *axes: Iterable[str]) -> tuple[str, ...]:
    """All of some axes, in the order of the mesh."""
    every = {a for one in axes for a in one}
    return tuple(a for a in ctx.sizes if a in every)


def rows_for_axes(ctx: Context, values: np.ndarray, axes: Sequence[str], every: Sequence[str]) -> np.ndarray:
    """Rows for devices along ``axes`` as rows for devices along ``every``, which has these axes."""
    index = np.broadcast_to(np.asarray(ctx.linear(axes, ctx.coordinates(every))), (ctx.size(every),))
    return values[index] if axes else values


def element_table(ctx: Context, x: Rel, d: int, axes: Sequence[str], at: np.ndarray | None = None) -> np.ndarray:
    """The table of a dim, for devices along axes among which are its own; ``at``: of elements at these positions of each device."""
    entry, devices = x.spec[d], ctx.size(axes)
    at = np.arange(x.shape[d]) if at is None else at
    at = np.broadcast_to(at, (devices, at.shape[-1]))
    index = np.broadcast_to(np.asarray(ctx.linear(tuple(entry), ctx.coordinates(axes))), (devices,))[:, None]
    if isinstance(entry, Fragments):
        return entry.array[index, at]
    return np.stack([index * x.shape[d] + at, np.full(at.shape, ALL)], -1)


def common_fill(fill: Fill | None, d: int, *values: Rel) -> tuple[Fill | None, Any]:
    """(the one value of elements outside of arrays, the one origin) of the fragments of values along a dim."""
    found = [s for x in values for s in [x.spec[d]] if isinstance(s, Fragments)]
    fills = {f for f in (fill, *(s.fill for s in found)) if f is not None}
    origins = {s.origin for s in found if s.origin is not None}
    require(
        len(fills) < 2 and len(origins) < 2, "fragments with several numbers outside of an array, or of several sums"
    )
    return next(iter(fills), None), next(iter(origins), None)


def fill_of(x: Rel) -> Fill | None:
    """The value of all elements: a number, or ``empty``."""
    return (x.term.op, x.term.params) if x.term.op in ("literal", "empty") and not x.partial else None


def with_table(
    ctx: Context, x: Rel, d: int, axes: tuple[str, ...], table: np.ndarray, fill: Fill | None = None, origin: Any = None
) -> Rel:
    """``x`` with the elements of a table along a dim: as a block, or a slice that all devices have, if they are one."""
    if x.term.op == "pad" and fill is None and origin is None:  # a window of a padded array
        own: Any = x.term.params
        inner, value = x.term.args
        if [k for k, _ in own] == [d] and value.op == "literal" and inner.shape[d] > 1:
            low, _, gap = own[0][1]
            index, rest = np.divmod(table[..., 0] - low, gap + 1)
            inside = (index >= 0) & (index < inner.shape[d]) & (rest == 0)
            table = np.where(inside[..., None], np.stack([index, table[..., 1]], -1), -1)
            return with_table(ctx, replace(x, term=inner), d, axes, table, (value.op, value.params))
    index, n, total = table[..., 0], table.shape[1], x.term.shape[d]
    require(not x.partial or fill is None or fill[1] in (None, *ZEROS), "a partial value, and a number")
    if origin is not None:
        full = (1 << origin[0]) - 1
        table = np.where((table == full) & [False, True], ALL, table)
        origin = None if (table[..., 1] == ALL).all() else origin
    shape, term = x.resized(d, n), x.term
    if (index < 0).all() and fill is not None and n:
        return ctx.replicated(ctx.terms.make(*fill, (), (1,) * len(shape), term.dtype), shape)
    order = None
    if (index >= 0).all():
        fill = None
        consecutive = origin is None and n > 0 and (np.diff(index, axis=1) == 1).all()
        if consecutive and (index == index[:1]).all():
            order = ()
            term = ctx.terms.take(term, d, index[0])
        elif consecutive:
            found = order_of(ctx, axes, index[:, 0], n)
            order = found[0] if found is not None and not found[1] and n * ctx.size(found[0]) == total else None
        if order is None and origin is None:
            for some in orders(axes):  # a block of the elements in another order, which the function as written has
                block = np.broadcast_to(np.asarray(ctx.linear(some, ctx.coordinates(axes))), (len(table),))
                every = np.zeros((ctx.size(some), n), np.int64)
                every[block] = index
                wanted = ctx.terms.take(term, d, every.ravel())
                if (every[block] == index).all() and ctx.terms.is_known(wanted):
                    term, order = wanted, some
                    break
    require(order is not None or total != 1, "fragments of one element")  # which would be a constant
    data = np.ascontiguousarray(table, np.int64).tobytes()
    spec = Fragments(axes, data, len(table), fill, origin) if order is None else order
    return replace(x, term=term, shape=shape, spec=(*x.spec[:d], cast(Any, spec), *x.spec[d + 1 :]))


def take_positions(ctx: Context, x: Rel, d: int, at: np.ndarray, axes: Sequence[str] = ()) -> Rel:
    """The elements at positions of each device along axes."""
    every = in_mesh_order(ctx, axes, x.spec[d])
    at = rows_for_axes(ctx, at, axes, every)
    return with_table(ctx, x, d, every, element_table(ctx, x, d, every, at), *common_fill(None, d, x))


def update_fragments(ctx: Context, x: Rel, update: Rel, d: int, starts: np.ndarray, axes: Sequence[str]) -> Rel:
    """``x``, a constant or fragments of the same array, with an update from a position of each device on."""
    every, value = in_mesh_order(ctx, axes, x.spec[d], update.spec[d]), fill_of(x)
    starts, axes = rows_for_axes(ctx, starts, axes, every), every
    update = ctx.expanded(update, [d])
    require(value is not None or without_dim(x, d) == without_dim(update, d), "an update of another array")
    table = np.full((ctx.size(axes), x.shape[d], 2), -1) if value is not None else element_table(ctx, x, d, axes).copy()
    at = np.broadcast_to(starts, (len(table),))[:, None] + np.arange(update.shape[d])
    table[np.arange(len(table))[:, None], at] = element_table(ctx, update, d, axes)
    return with_table(ctx, update, d, axes, table, *common_fill(value, d, x, update))


def concatenate_fragments(ctx: Context, rels: Sequence[Rel], d: int) -> Rel | None:
    """Fragments of one array, and constants, one after the other; None if no dim is in fragments."""
    parts = [r for r in rels if r.spec[d]]
    if not parts:
        return None
    like, axes, fill = parts[0], in_mesh_order(ctx, *(r.spec[d] for r in rels)), None
    tables = []
    for r in rels:
        value = fill_of(r)
        if value is not None:
            fill, _ = value, require(fill in (None, value), "fragments and several numbers")
            tables.append(np.full((ctx.size(axes), r.shape[d], 2), -1))
        else:
            require(without_dim(r, d) == without_dim(like, d), "fragments of different arrays side by side")
            tables.append(element_table(ctx, r, d, axes))
    return with_table(ctx, like, d, axes, np.concatenate(tables, 1), *common_fill(fill, d, *parts))


def pad_fragments(ctx: Context, x: Rel, d: int, config: Sequence[int], value: Rel) -> Rel:
    """A dim in fragments, with a number before, after and between its elements."""
    (low, high, gap), fill = config, fill_of(value)
    require(fill is not None and min(low, high) >= 0, "negative padding of fragments, or not by a number")
    axes = in_mesh_order(ctx, x.spec[d])
    own = element_table(ctx, x, d, axes)
    table = np.full((len(own), low + high + max((own.shape[1] - 1) * (gap + 1) + 1, 0), 2), -1)
    table[:, low : table.shape[1] - high : gap + 1] = own
    return with_table(ctx, x, d, axes, table, *common_fill(fill, d, x))


def mask_fragments(ctx: Context, x: Rel, d: int, keep: np.ndarray, axes: tuple[str, ...], value: Fill) -> Rel:
    """``x`` where the mask ``keep[devices along axes, elements]`` is true, else a number, as all elements outside of the array."""
    every = in_mesh_order(ctx, axes, x.spec[d])
    table = element_table(ctx, x, d, every)
    keep = rows_for_axes(ctx, keep, axes, every)
    inside = common_fill(None, d, x)[1] is None and not (keep & (table[..., 0] < 0)).any()
    require(inside, "a choice of elements outside of the array, or of incomplete sums")
    return with_table(ctx, x, d, every, np.where(keep[..., None], table, -1), value)


def permute_fragments(ctx: Context, x: Rel, axes: Sequence[str], sources: np.ndarray) -> Rel:
    """Each device along axes gets the elements of another one, or zeros (source -1)."""
    dims = [k for k, s in enumerate(x.spec) if set(s) & set(axes)]
    require(len(dims) == 1, "a permutation of a value without one dim that is sharded")
    (d,) = dims
    every = in_mesh_order(ctx, axes, x.spec[d])
    at = ctx.coordinates(every)
    source = sources[ctx.linear(axes, at)]
    come = dict(at) | {a: c[source] for a, c in ctx.coordinates(axes).items()}
    table = element_table(ctx, x, d, every)[ctx.linear(every, come)]
    table[source < 0] = -1
    zero = fill_of(ctx.replicated(ctx.terms.literal(0, x.term.dtype), ())) if (source < 0).any() else None
    return with_table(ctx, x, d, every, table, *common_fill(zero, d, x))


def contraction_blocks(ctx: Context, x: Rel, d: int, axes: tuple[str, ...]) -> np.ndarray:
    """For devices along axes, the blocks of a dim that they have, as bits, where the dim has as many blocks as devices have it."""
    count, total = ctx.size(x.spec[d]), x.term.shape[d]
    require(total % count == 0 and count <= MAX_BITS, "a sum over fragments that are not blocks")
    index, n = np.sort(element_table(ctx, x, d, axes)[..., 0], 1), total // count
    blocks = index[:, ::n] // n
    blocked = index.shape[1] % n == 0 and (index == (blocks[..., None] * n + np.arange(n)).reshape(index.shape)).all()
    require(bool(blocked and (np.diff(blocks, axis=1) > 0).all()), "a sum over fragments that are not blocks")
    return np.bitwise_or.reduce(1 << blocks.astype(np.int64), axis=1)


def sum_over_blocks(
    ctx: Context, result: Rel, axes: tuple[str, ...], bits: np.ndarray, origin: tuple[int, Hashable]
) -> Rel:
    """``result``, of which each device along axes has the sum over some blocks of a contraction."""
    own = [k for k, s in enumerate(result.spec) if set(s) & set(axes)]
    free = [k for k, n in enumerate(result.term.shape) if n != 1]
    require(len(own) < 2 and bool(own or free), "a sum over fragments that several dims depend on")
    d = (own or free)[0]
    every = in_mesh_order(ctx, axes, result.spec[d])
    table = element_table(ctx, result, d, every).copy()
    table[..., 1] &= rows_for_axes(ctx, bits, axes, every)[:, None]
    return with_table(ctx, result, d, every, table, origin=origin)


def as_own_block(ctx: Context, x: Rel) -> Rel:
    """A partial matmul as the sum over the block of each device."""
    if x.origin is None or not set(x.origin[0]) <= x.partial:
        return x
    (order, origin), axes = x.origin, in_mesh_order(ctx, x.origin[0])
    bits = 1 << np.broadcast_to(np.asarray(ctx.linear(order, ctx.coordinates(axes))), (ctx.size(axes),)).astype(
        np.int64
    )
    return sum_over_blocks(ctx, replace(x, partial=x.partial - set(axes), origin=None), axes, bits, origin)


def add_incomplete_sums(ctx: Context, x: Rel, y: Rel) -> Rel | None:
    """The sum of two incomplete sums: over the blocks of both, if they are different blocks of one contraction; of two
    contractions, if they are the same blocks. None if none is incomplete."""
    if not any(isinstance(s, Fragments) and s.origin for r in (x, y) for s in r.spec):
        return None
    x, y = as_own_block(ctx, x), as_own_block(ctx, y)
    dims = [k for k, pair in enumerate(zip(x.spec, y.spec, strict=True)) if any(isinstance(s, Fragments) for s in pair)]
    require(len(dims) == 1, "a sum of fragments along several dims")
    (d,) = dims
    require(without_dim(replace(x, term=y.term), d) == without_dim(y, d), "a sum of fragments of different blocks")
    axes = in_mesh_order(ctx, x.spec[d], y.spec[d])
    left, right = (element_table(ctx, r, d, axes) for r in (x, y))
    (fill, one), (other, two) = (common_fill(None, d, r) for r in (x, y))
    alike = one is not None and two is not None and one[0] == two[0] and fill is other is None
    require(alike, "a sum of complete and incomplete sums")
    assert one is not None
    assert two is not None
    require(bool((left[..., 0] == right[..., 0]).all()), "a sum of fragments at different places")
    disjoint, equal = not (left[..., 1] & right[..., 1]).any(), (left == right).all()
    if x.term is y.term and one == two and disjoint:
        return with_table(ctx, x, d, axes, left | right * [0, 1], None, one)
    require(bool(equal), "a sum of the sums over different blocks of different contractions")
    both = replace(x, term=ctx.terms.add(x.term, y.term))
    return with_table(
        ctx, both, d, axes, left, None, (one[0], frozenset([(x.term.number, one[1]), (y.term.number, two[1])]))
    )


def gather_fragments(ctx: Context, x: Rel, axes: Sequence[str], d: int) -> Rel:
    """The elements of all devices along axes, one after the other."""
    every = in_mesh_order(ctx, axes, x.spec[d])
    own, at, count = element_table(ctx, x, d, every), ctx.coordinates(every), ctx.size(axes)
    come = [dict(at) | {a: np.full(len(own), c[k]) for a, c in ctx.coordinates(axes).items()} for k in range(count)]
    table = np.concatenate([own[ctx.linear(every, c)] for c in come], 1)
    return with_table(ctx, x, d, every, table, *common_fill(None, d, x))

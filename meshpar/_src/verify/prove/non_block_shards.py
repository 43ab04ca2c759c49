"""Fragments: the elements of a dim that each device has, where they are no block of it.

Halos and rings of matmuls give devices slices of other shards, windows that extend beyond the array, and sums over some of the
devices. Tables say for each device which elements it has, and ops that move elements move the entries of the tables: a table is
evaluated, not matched. One that is that of a block is replaced by the axes of the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from .device_values import axes_of, evaluate, leaves, order_of, orders
from .relation import Context, Fill, Fragments, Rel, Unverified, require
from .term import Term

ALL = -1
"""The bits of an element that is complete."""
MAX_BITS = 62
OF_FRAGMENTS = frozenset(
    "broadcast_in_dim slice split rev reduce_sum reduce_max reduce_min gather dynamic_slice dynamic_update_slice concatenate pad "
    "transpose ppermute all_gather all_to_all dot_general conv_general_dilated reduce_window_max reduce_window_min "
    "reduce_window_sum select_and_scatter_add".split()
)
"""Primitives whose lemmas take operands in fragments, besides elementwise ops."""
ZEROS = ("0.0", "-0.0", "0", "False")


def map_elements(ctx: Context, x: Rel, fn: Callable[[Term], Term]) -> Rel:
    """A function of each element, also of the numbers outside of the array."""

    def of(entry: Any) -> Any:
        if not isinstance(entry, Fragments) or entry.fill is None or entry.fill[0] == "empty":
            return entry
        number = fn(ctx.terms.make(*entry.fill, (), (), x.term.dtype))
        require(number.op == "literal", "a function of numbers outside of an array")
        return replace(entry, fill=(number.op, number.params))

    return replace(x, term=fn(x.term), spec=tuple(map(of, x.spec)))


def without_dim(x: Rel, d: int) -> tuple[Any, ...]:
    """The relation, except one dim."""
    source = 0 if x.kind in ("sum", "one") else x.source  # of whose elements others may be functions
    return x.term, x.partial, x.kind, source, x.origin, x.spec[:d], x.spec[d + 1 :], x.shape[:d], x.shape[d + 1 :]


def in_mesh_order(ctx: Context, *axes: Iterable[str]) -> tuple[str, ...]:
    """All of some axes, in the order of the mesh."""
    every = {a for one in axes for a in one}
    return tuple(a for a in ctx.sizes if a in every)


def element_table(ctx: Context, x: Rel, d: int, axes: Sequence[str], at: np.ndarray | None = None) -> np.ndarray:
    """The table of a dim, for devices along axes among which are its own; ``at``: of elements at these positions of each device."""
    entry, devices = x.spec[d], ctx.size(axes)
    at = np.arange(x.shape[d]) if at is None else at
    at = np.broadcast_to(at, (devices, at.shape[-1]))
    index = ctx.index(tuple(entry), axes)[:, None]
    if isinstance(entry, Fragments):
        return entry.array[index, at]
    return np.stack([index * x.shape[d] + at, np.full(at.shape, ALL)], -1)


def part_table(ctx: Context, x: Rel, d: int, axes: Sequence[str], like: Rel) -> np.ndarray:
    """The table of a dim of a part of the array of ``like``, or of a constant, which is outside of every array."""
    if fill_of(x) is not None:
        return np.full((ctx.size(axes), x.shape[d], 2), -1)
    require(without_dim(x, d) == without_dim(like, d), "fragments of different arrays")
    return element_table(ctx, x, d, axes)


def common_fill(fill: Fill | None, d: int, *values: Rel) -> tuple[Fill | None, Any]:
    """(the one value of elements outside of arrays, the one origin) of the fragments of values along a dim."""
    found = [s for x in values for s in [x.spec[d]] if isinstance(s, Fragments)]
    fills = {f for f in (fill, *(s.fill for s in found)) if f is not None}
    origins = {s.origin for s in found if s.origin is not None}
    reason = "fragments with several numbers outside of an array, or of several sums"
    require(len(fills) < 2 and len(origins) < 2, reason)
    return next(iter(fills), None), next(iter(origins), None)


def fill_of(x: Rel) -> Fill | None:
    """The value of all elements: a number, or ``empty``."""
    return (x.term.op, x.term.params) if x.term.op in ("literal", "empty") and not x.partial else None


def with_table(
    ctx: Context, x: Rel, d: int, axes: tuple[str, ...], table: np.ndarray, fill: Fill | None = None, origin: Any = None
) -> Rel:
    """``x`` with the elements of a table along a dim: as a block, or a slice that all devices have, if they are one."""
    index, n, total = table[..., 0], table.shape[1], x.term.shape[d]
    others = {s.fill for k, s in enumerate(x.spec) if k != d and isinstance(s, Fragments)} - {None}
    require(fill is None or others <= {fill}, "fragments along several dims, with several numbers outside of the array")
    first = order_of(ctx, axes, index[:, 0], n) if n and (np.diff(index, axis=1) == 1).all() else None
    block = first[0] if first is not None and not first[1] and n * ctx.size(first[0]) == total else None
    padded = x.term.op == "pad" and (block is None or not ctx.terms.is_known(x.term))
    if padded and fill is None and origin is None:  # a window of a padded array
        inner, value = x.term.args
        own = [k for k, _ in x.term.params] == [d] and others <= {(value.op, value.params)}
        if own and value.op == "literal" and inner.shape[d] > 1:
            index = positions(x.term, table[..., 0])
            table = np.where(index[..., None] >= 0, np.stack([index, table[..., 1]], -1), -1)
            return with_table(ctx, replace(x, term=inner), d, axes, table, (value.op, value.params))
    require(not x.partial or fill is None or fill[1] in (None, *ZEROS), "a partial value, and a number")
    if origin is not None:
        full = (1 << origin[0]) - 1
        table = np.where((table == full) & [False, True], ALL, table)
        origin = None if (table[..., 1] == ALL).all() else origin
    shape, term = x.resized(d, n), x.term
    if (index < 0).all() and fill is not None and n:
        return ctx.replicated(ctx.terms.make(*fill, (), (1,) * len(shape), term.dtype), shape)
    order = None
    for padded in known_pads(ctx, term, fill, d) if fill is not None and origin is None else ():
        inner = positions(padded, np.arange(padded.shape[d]))
        for some in orders(axes):
            if n * ctx.size(some) == len(inner) and (inner.reshape(-1, n)[ctx.index(some, axes)] == index).all():
                return replace(x.placed({d: some}), term=padded, shape=shape)
    if (index >= 0).all():
        fill = None
        consecutive = origin is None and n > 0 and (np.diff(index, axis=1) == 1).all()
        if origin is None and n > 0 and (index == index[:1]).all():
            order = ()
            term = ctx.terms.take(term, d, index[0])
        elif consecutive:
            order = block
    require(order is not None or total != 1, "fragments of one element")  # which would be a constant
    data = np.ascontiguousarray(table, np.int64).tobytes()
    spec = Fragments(axes, data, len(table), fill, origin) if order is None else order
    return reordered(ctx, replace(x, term=term, shape=shape, spec=(*x.spec[:d], cast(Any, spec), *x.spec[d + 1 :])))


def reordered(ctx: Context, x: Rel) -> Rel:
    """Fragments as blocks of the elements in another order, if the function as written has this array; else ``x``."""
    dims, choices = x.fragmented, []
    for d in dims:
        entry, choice = cast(Fragments, x.spec[d]), []
        index = entry.array[..., 0]
        for some in orders(entry.axes) if entry.complete else ():
            block, every = ctx.index(some, entry.axes), np.zeros((ctx.size(some), x.shape[d]), np.int64)
            every[block] = index
            if (every[block] == index).all():
                choice.append((some, every.ravel()))
        choices.append(choice)
    for found in itertools.product(*choices) if dims else ():
        term = x.term
        for d, (_, at) in zip(dims, found, strict=True):
            term = ctx.terms.take(term, d, at)
        if ctx.terms.is_known(term):
            return replace(x.placed({d: some for d, (some, _) in zip(dims, found, strict=True)}), term=term)
    return x


def positions(padded: Term, at: np.ndarray) -> np.ndarray:
    """The elements of the operand of a ``pad`` along one dim at positions of its result; -1 where it has the number."""
    ((d, (low, _, gap)),) = padded.params
    index, rest = np.divmod(at - low, gap + 1)
    return np.where((index >= 0) & (index < padded.args[0].shape[d]) & (rest == 0), index, -1)


def known_pads(ctx: Context, term: Term, fill: Fill, d: int) -> Iterator[Term]:
    """The arrays of the function as written that are a term, padded along one dim with a number."""
    value = ctx.terms.make(*fill, (), (), term.dtype)
    for padded in ctx.terms.uses.get(("pad", term.number, value.number), ()):
        if ctx.terms.is_known(padded) and [k for k, _ in padded.params] == [d]:
            yield padded


def take_positions(ctx: Context, x: Rel, d: int, at: np.ndarray, axes: Sequence[str] = ()) -> Rel:
    """The elements at positions of each device along axes."""
    every = in_mesh_order(ctx, axes, x.spec[d])
    table = element_table(ctx, x, d, every, at[ctx.index(axes, every)])
    return with_table(ctx, x, d, every, table, *common_fill(None, d, x))


def update_fragments(ctx: Context, x: Rel, update: Rel, d: int, starts: np.ndarray, axes: Sequence[str]) -> Rel:
    """``x``, a constant or fragments of the same array, with an update from a position of each device on."""
    every, value = in_mesh_order(ctx, axes, x.spec[d], update.spec[d]), fill_of(x)
    starts, axes = starts[ctx.index(axes, every)], every
    update = ctx.expanded(update, [d])
    table, at = part_table(ctx, x, d, axes, update).copy(), starts[:, None] + np.arange(update.shape[d])
    table[np.arange(len(table))[:, None], at] = element_table(ctx, update, d, axes)
    return with_table(ctx, update, d, axes, table, *common_fill(value, d, x, update))


def concatenate_fragments(ctx: Context, rels: Sequence[Rel], d: int) -> Rel | None:
    """Fragments of one array, and constants, one after the other; None if no dim is in fragments."""
    parts = [r for r in rels if r.spec[d]]
    if not parts:
        return None
    axes, fills = in_mesh_order(ctx, *(r.spec[d] for r in rels)), {fill_of(r) for r in rels} - {None}
    require(len(fills) < 2, "fragments and several numbers")
    table = np.concatenate([part_table(ctx, r, d, axes, parts[0]) for r in rels], 1)
    return with_table(ctx, parts[0], d, axes, table, *common_fill(next(iter(fills), None), d, *parts))


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
    table, keep = element_table(ctx, x, d, every), keep[ctx.index(axes, every)]
    fill, origin = common_fill(None, d, x)
    inside = origin is None and (fill == value or not (keep & (table[..., 0] < 0)).any())
    require(inside, "a choice of elements outside of the array, or of incomplete sums")
    return with_table(ctx, x, d, every, np.where(keep[..., None], table, -1), value)


def permute_fragments(ctx: Context, x: Rel, axes: Sequence[str], sources: np.ndarray) -> Rel:
    """Each device along axes gets the elements of another one, or zeros (source -1)."""
    dims = [k for k, s in enumerate(x.spec) if set(s) & set(axes)]
    require(bool(dims), "a permutation of a value that is not sharded")
    for d in dims:
        every = in_mesh_order(ctx, axes, x.spec[d])
        source = sources[ctx.index(axes, every)]
        come = {a: c[source] for a, c in ctx.coordinates(axes).items()}
        table = element_table(ctx, x, d, every)[ctx.index(every, every, come)]
        table[source < 0] = -1
        zero = fill_of(ctx.replicated(ctx.terms.literal(0, x.term.dtype), ())) if (source < 0).any() else None
        x = with_table(ctx, x, d, every, table, *common_fill(zero, d, x))
    return x


def of_chosen_device(ctx: Context, mask: Term, x: Rel, wanted: bool) -> Rel | None:
    """Blocks or fragments along several dims on the one device where a mask is ``wanted``, as a value that is partial over all
    devices; None: the mask is another one."""
    axes, dims = axes_of(ctx, mask), [d for d, s in enumerate(x.spec) if mask.axes.intersection(s)]
    if len(dims) < 2 or x.term.axes or x.incomplete or math.prod(mask.shape) != 1 or leaves(mask):
        return None
    (chosen,) = np.nonzero((evaluate(ctx, axes, [mask])[0] == wanted)[:, 0])
    if len(chosen) != 1 or not all(mask.axes.issuperset(x.spec[d]) for d in dims):
        return None
    term = x.term
    for d in dims:
        (index,) = element_table(ctx, x, d, axes)[chosen, :, 0]
        require(bool((index >= 0).all()), "a choice of elements outside of the array")
        term = ctx.terms.take(term, d, index)
    return Rel(term, x.shape, x.placed(dict.fromkeys(dims, ())).spec, mask.axes)


def of_one_device(ctx: Context, x: Rel) -> Rel:
    """Fragments of which one device has each element, and the others 0, as the partial value that they are; else ``x``."""
    entry = x.spec[x.fragmented[0]] if len(x.fragmented) == 1 and x.kind == "sum" else None
    if not isinstance(entry, Fragments) or entry.origin is not None or entry.fill is None or entry.fill[1] not in ZEROS:
        return x
    (d,), index = x.fragmented, entry.array[..., 0]
    if ((index >= 0).sum(0) != 1).any():
        return x
    kind = "one" if entry.fill[1] == "-0.0" and not x.partial else "sum"
    term, spec = ctx.terms.take(x.term, d, index.max(0)), x.placed({d: ()}).spec
    return Rel(term, x.shape, spec, x.partial | set(entry.axes), kind)


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
    table[..., 1] &= bits[ctx.index(axes, every)][:, None]
    return with_table(ctx, result, d, every, table, origin=origin)


def as_own_block(ctx: Context, x: Rel) -> Rel:
    """A partial matmul as the sum over the block of each device."""
    if x.origin is None or not set(x.origin[0]) <= x.partial:
        return x
    (order, origin), axes = x.origin, in_mesh_order(ctx, x.origin[0])
    own = replace(x, partial=x.partial - set(axes), origin=None)
    return sum_over_blocks(ctx, own, axes, 1 << ctx.index(order, axes), origin)


def add_incomplete_sums(ctx: Context, x: Rel, y: Rel) -> Rel | None:
    """The sum of two incomplete sums: over the blocks of both, if they are different blocks of one contraction; of two
    contractions, if they are the same blocks. None if none is incomplete."""
    if not x.incomplete and not y.incomplete:
        return union_of_fragments(ctx, x, y)
    x, y = as_own_block(ctx, x), as_own_block(ctx, y)
    d, *more = {*x.fragmented, *y.fragmented}
    require(not more, "a sum of fragments along several dims")
    require(without_dim(replace(x, term=y.term), d) == without_dim(y, d), "a sum of fragments of different blocks")
    axes = in_mesh_order(ctx, x.spec[d], y.spec[d])
    left, right = (element_table(ctx, r, d, axes) for r in (x, y))
    (fill, one), (other, two) = (common_fill(None, d, r) for r in (x, y))
    if one is None or two is None or one[0] != two[0] or not fill is other is None:
        raise Unverified("a sum of complete and incomplete sums")
    require(bool((left[..., 0] == right[..., 0]).all()), "a sum of fragments at different places")
    disjoint, equal = not (left[..., 1] & right[..., 1]).any(), (left == right).all()
    if x.term is y.term and one == two and disjoint:
        return with_table(ctx, x, d, axes, left | right * [0, 1], None, one)
    require(bool(equal), "a sum of the sums over different blocks of different contractions")
    both = replace(x, term=ctx.terms.add(x.term, y.term))
    origin = one[0], frozenset([(x.term.number, one[1]), (y.term.number, two[1])])
    return with_table(ctx, both, d, axes, left, None, origin)


def union_of_fragments(ctx: Context, x: Rel, y: Rel) -> Rel | None:
    """The sum of fragments of one array that have no element at one position, and 0 outside; None: it is another sum."""
    if len(x.fragmented) != 1 or x.fragmented != y.fragmented or x.term is not y.term:
        return None
    (d,) = x.fragmented
    entries = [cast(Fragments, r.spec[d]) for r in (x, y)]
    axes, zeros = in_mesh_order(ctx, *entries), all(s.zero_outside and s.fill is not None for s in entries)
    left, right = (element_table(ctx, r, d, axes) for r in (x, y))
    if not zeros or without_dim(x, d) != without_dim(y, d) or ((left >= 0) & (right >= 0))[..., 0].any():
        return None
    return with_table(ctx, x, d, axes, np.where(left[..., :1] >= 0, left, right), *common_fill(None, d, x, y))


def gather_fragments(ctx: Context, x: Rel, axes: Sequence[str], d: int) -> Rel:
    """The elements of all devices along axes, one after the other."""
    every = in_mesh_order(ctx, axes, x.spec[d])
    own, at = element_table(ctx, x, d, every), ctx.coordinates(axes)
    come = [{a: np.full(len(own), c[k]) for a, c in at.items()} for k in range(ctx.size(axes))]
    table = np.concatenate([own[ctx.index(every, every, c)] for c in come], 1)
    return with_table(ctx, x, d, every, table, *common_fill(None, d, x))

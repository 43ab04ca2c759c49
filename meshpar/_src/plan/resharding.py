"""Resharding: the moves that change the spec of an array.

- *slice*: an unused axis is appended to a dim; every device slices its shard, and nothing is sent;
- *all-gather* over the last axes of a dim;
- *all-to-all*: the last axes of one dim become the last axes of another;
- *collective-permute*: devices exchange shards, or, if these change their shape, as many parts of each.

Of several sequences of moves, the one that sends the fewest bytes is used; of equal ones, the one with the smallest array between
two moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..hardware.collective_ops import wire_bytes
from ..layout import Spec
from .shard_shapes import local_shape, shard_count

MoveOp = Literal["slice", "all-gather", "all-to-all", "collective-permute"]

MAX_PERMUTES = 8
"""The largest number of collective-permutes that exchange the parts of one array."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a resharding.

    Attributes:
      op: a collective, or ``"slice"``, which sends nothing.
      axes: the mesh axes that it runs over, major to minor.
      group: number of devices that exchange shards: the product of the sizes of ``axes``.
      before, after: the spec before and after it, without axes of size 1.
      times: number of collective-permutes, each of one part of the shard; 1 for other moves.
    """

    op: MoveOp
    axes: tuple[str, ...]
    group: int
    before: Spec
    after: Spec
    times: int = 1

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose axes change."""
        return tuple(i for i, (a, b) in enumerate(zip(self.before, self.after, strict=True)) if a != b)

    def bytes(self, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
        """Bytes that each device sends each time, for an array of this global shape; a dim that a spec does not divide counts as
        padded."""
        if self.op == "slice":
            return 0.0
        spec = self.after if self.op == "all-gather" else self.before
        return wire_bytes(self.op, itemsize * math.prod(local_shape(shape, spec, sizes)) / self.times, self.group)


def reshard(have: Spec, need: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves that change the spec of an array from ``have`` to ``need``.

    Axes that ``need`` adds are sliced off first, axes that it drops are all-gathered last, and the shards are exchanged in between.
    A device sends at most one shard of ``need`` in all, unless a dim of an array between the moves would not divide.

    Given ``(("x",), ())`` to ``((), ("x",))``: one all-to-all. ``(("x",), ())`` to ``((), ())``: one all-gather. ``((), ())`` to
    ``(("x",), ())``: one slice. ``(("x",), ("y",))`` to ``(("y",), ("x",))`` with equal sizes: one collective-permute; with sizes
    of 4 and 2: two, each of half a shard.

    Args:
      have, need: for every dim, its axes, major to minor.
      shape: of the unsharded array.
      sizes: axis → size of the mesh.
    """
    if have == need:
        return ()
    most = math.prod(sizes.values())
    return _reshard(have, need, tuple(math.gcd(n, most) for n in shape), tuple(sizes.items()))


def reshard_bytes(have: Spec, need: Spec, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
    """Bytes that each device sends in a resharding."""
    return sum(m.bytes(shape, itemsize, sizes) * m.times for m in reshard(have, need, shape, sizes))


@lru_cache(maxsize=65536)
def _reshard(have: Spec, need: Spec, parts: tuple[int, ...], mesh: tuple[tuple[str, int], ...]) -> tuple[Move, ...]:
    """As :func:`reshard`, cached; a dim divides over axes if the product of their sizes divides its entry of ``parts``."""
    sizes = dict(mesh)
    have, need = (tuple(tuple(a for a in entry if sizes[a] > 1) for entry in spec) for spec in (have, need))
    paths = [_move_or_gather(have, need, sizes)]
    if len(paths[0]) > 1:
        paths += filter(None, (_permutes(have, need, sizes), _exchange_between(have, need, parts, sizes)))
    return min(paths, key=lambda path: _cost(path, sizes))


def _cost(path: Sequence[Move], sizes: Mapping[str, int]) -> tuple[float, float, int]:
    """(bytes sent, bytes of the largest array between two moves, number of collectives), for an array of one byte."""
    if not path:
        return 0.0, 0.0, 0
    one = [math.prod(sizes.values())] * len(path[0].before)
    itemsize = 1 / math.prod(one)
    sent = sum(m.bytes(one, itemsize, sizes) * m.times for m in path)
    between = max((math.prod(local_shape(one, m.after, sizes)) for m in path[:-1]), default=0)
    return round(sent, 12), between * itemsize, sum(m.times for m in path if m.op != "slice")


def _exchange_between(
    have: Spec, need: Spec, parts: Sequence[int], sizes: Mapping[str, int]
) -> tuple[Move, ...] | None:
    """The slices to the axes that ``need`` adds, exchanges of the shards, and the all-gathers of the axes that it drops.

    Given ``(("x",), ("y",), ())`` to ``(("y",), ("z",), ())``: a slice to ``(("x",), ("y", "z"), ())``, an exchange to
    ``(("y", "x"), ("z",), ())``, and an all-gather over ``x``. None: no such exchange divides the dims.
    """
    old, new = ([a for entry in spec for a in entry] for spec in (have, need))
    sliced = _appended(have, [a for a in new if a not in old], parts, sizes)
    gathered = list(_appended(need, [a for a in old if a not in new], parts, sizes))
    paths = [
        (*_slice_and_gather(have, first, sizes), *exchange, *_slice_and_gather(last, need, sizes))
        for first in sliced
        for last in gathered
        if (exchange := _exchange(first, last, parts, sizes)) is not None
    ]
    return min(paths, key=lambda path: _cost(path, sizes), default=None)


def _appended(spec: Spec, axes: Sequence[str], parts: Sequence[int], sizes: Mapping[str, int]) -> Iterator[Spec]:
    """The specs in which each of ``axes`` is appended to a dim that it divides."""
    for dims in itertools.product(range(len(spec)), repeat=len(axes)):
        new = tuple((*e, *(a for a, d in zip(axes, dims, strict=True) if d == i)) for i, e in enumerate(spec))
        if _divides(new, parts, sizes):
            yield new


def _divides(spec: Spec, parts: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether all dims of a spec divide."""
    return all(n % shard_count(e, sizes) == 0 for n, e in zip(parts, spec, strict=True))


def _exchange(have: Spec, need: Spec, parts: Sequence[int], sizes: Mapping[str, int]) -> tuple[Move, ...] | None:
    """The exchanges from ``have`` to ``need``, of the same axes: an all-to-all or collective-permutes; where these are more than
    :data:`MAX_PERMUTES`, also all-to-alls before and after them. None: none divides."""
    if have == need:
        return ()
    firsts, lasts = ([m for m in _all_to_alls(spec, sizes) if _divides(m.after, parts, sizes)] for spec in (have, need))
    direct = next((m for m in firsts if m.after == need), None)
    if direct is not None:
        return (direct,)
    if (permutes := _permutes(have, need, sizes)) is not None:
        return permutes
    starts = [((), have), *(((m,), m.after) for m in firsts)]
    ends = [((), need), *(((Move(m.op, m.axes, m.group, m.after, need),), m.after) for m in lasts)]
    paths = [
        (*before, *between, *after)
        for before, first in starts
        for after, last in ends
        if (between := _permutes(first, last, sizes)) is not None
    ]
    return min(paths, key=lambda path: _cost(path, sizes), default=None)


def _all_to_alls(spec: Spec, sizes: Mapping[str, int]) -> Iterator[Move]:
    """The all-to-alls that are possible from a spec."""
    for i, entry in enumerate(spec):
        for k, j in itertools.product(range(len(entry)), range(len(spec))):
            if i != j:
                moved = {i: entry[:k], j: (*spec[j], *entry[k:])}
                after = tuple(moved.get(d, e) for d, e in enumerate(spec))
                yield Move("all-to-all", entry[k:], shard_count(entry[k:], sizes), spec, after)


def _permutes(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Move, ...] | None:
    """The collective-permutes from ``have`` to ``need``; None: shards have different numbers of elements, or too many parts.

    If shards keep their shape, there is one. Otherwise a device cuts its shard along the dims that are split further, and sends one
    part in each. Devices exchange only with those of equal index along the first axes that a dim has in both specs: from
    ``(("slice", "x", "y"), ())`` to ``(("slice", "y"), ("x",))``, the axes are ``x`` and ``y``.
    """
    if have == need:
        return ()
    pairs = [(shard_count(h, sizes), shard_count(n, sizes)) for h, n in zip(have, need, strict=True)]
    times = math.prod(n // h for h, n in pairs if n % h == 0)
    same = {a for e in have for a in e} == {a for e in need for a in e}
    if any(h % n and n % h for h, n in pairs) or math.prod(h // n for h, n in pairs if h % n == 0) != times:
        return None
    if times > (MAX_PERMUTES if same else 1):
        return None
    equal = {a for h, n in zip(have, need, strict=True) for a in h[: _common_prefix(h, n)]}
    axes = tuple(a for a in sizes if a not in equal and any(a in entry for spec in (have, need) for entry in spec))
    return (Move("collective-permute", axes, shard_count(axes, sizes), have, need, times),)


def _move_or_gather(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves from ``have`` to ``need``: all-to-alls as long as one applies, then slices and all-gathers."""
    moves: list[Move] = []
    now = have
    while (move := next((m for m in _all_to_alls(now, sizes) if _is_final(m, need)), None)) is not None:
        moves.append(move)
        now = move.after
    common = tuple(h[: _common_prefix(h, n)] for h, n in zip(now, need, strict=True))
    lost, gained = ({a for e, c in zip(spec, common, strict=True) for a in e[len(c) :]} for spec in (now, need))
    if not lost & gained and all(c in (h, n) for h, n, c in zip(now, need, common, strict=True)):
        return (*moves, *_slice_and_gather(now, need, sizes))
    return (*moves, *_slice_and_gather(now, common, sizes), *_slice_and_gather(common, need, sizes))


def _is_final(move: Move, need: Spec) -> bool:
    """Whether an all-to-all appends its axes to the dim, and in the place, in which ``need`` has them."""
    return any(n[: len(e)] == e for n, e, old in zip(need, move.after, move.before, strict=True) if len(e) > len(old))


def _common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common prefix of two sequences."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _slice_and_gather(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves from ``have`` to ``need``, of which every dim only gains or only loses last axes: slices, then
    all-gathers.

    Slices come first because they make the shard small.
    """
    moves: list[Move] = []
    now = have
    for op in ("slice", "all-gather"):
        for i, (h, n) in enumerate(zip(have, need, strict=True)):
            axes = n[len(h) :] if op == "slice" else h[len(n) :]
            if axes:
                after = (*now[:i], n, *now[i + 1 :])
                moves.append(Move(op, axes, shard_count(axes, sizes), now, after))
                now = after
    return tuple(moves)

"""Resharding: the moves that change the spec of an array.

- *slice*: an unused axis is appended to a dim; every device slices its shard, and nothing is sent;
- *all-gather* over the last axes of a dim;
- *all-to-all*: the last axes of one dim become the last axes of another;
- *collective-permute*: shards keep their shape, and devices exchange them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..hardware.collective_ops import wire_bytes
from ..layout import Spec
from .spec import local_shape, shard_count

MoveOp = Literal["slice", "all-gather", "all-to-all", "collective-permute"]


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a resharding.

    Attributes:
      op: a collective, or ``"slice"``, which sends nothing.
      axes: the mesh axes that it runs over, major to minor.
      group: number of devices that exchange shards: the product of the sizes of ``axes``.
      before, after: the spec before and after it, without axes of size 1.
    """

    op: MoveOp
    axes: tuple[str, ...]
    group: int
    before: Spec
    after: Spec

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims whose axes change."""
        return tuple(i for i, (a, b) in enumerate(zip(self.before, self.after, strict=True)) if a != b)

    def bytes(self, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
        """Bytes that each device sends, for an array of this global shape; a dim that a spec does not divide counts as padded."""
        if self.op == "slice":
            return 0.0
        spec = self.after if self.op == "all-gather" else self.before
        return wire_bytes(self.op, itemsize * math.prod(local_shape(shape, spec, sizes)), self.group)


def reshard(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves that change the spec of an array from ``have`` to ``need``.

    Axes that an all-to-all can move to their new dim are moved so; the others are gathered and sliced. If shards keep their shape
    and one collective-permute sends less, that is used instead.

    Given ``(("x",), ())`` to ``((), ("x",))``: one all-to-all. ``(("x",), ())`` to ``((), ())``: one all-gather. ``((), ())`` to
    ``(("x",), ())``: one slice. ``(("x",), ("y",))`` to ``(("y",), ("x",))`` with equal sizes: one collective-permute.

    Args:
      have, need: for every dim, its axes, major to minor.
      sizes: axis → size of the mesh.
    """
    return () if have == need else _reshard(have, need, tuple(sizes.items()))


def reshard_bytes(have: Spec, need: Spec, shape: Sequence[int], itemsize: float, sizes: Mapping[str, int]) -> float:
    """Bytes that each device sends in a resharding."""
    return sum(m.bytes(shape, itemsize, sizes) for m in reshard(have, need, sizes))


@lru_cache(maxsize=65536)
def _reshard(have: Spec, need: Spec, mesh: tuple[tuple[str, int], ...]) -> tuple[Move, ...]:
    """As :func:`reshard`, cached."""
    sizes = dict(mesh)
    have, need = (tuple(tuple(a for a in entry if sizes[a] > 1) for entry in spec) for spec in (have, need))
    moves = _move_or_gather(have, need, sizes)
    if [shard_count(e, sizes) for e in have] == [shard_count(e, sizes) for e in need]:
        # bytes sent for shards of one byte; gathered intermediate arrays are larger
        shape = [shard_count(e, sizes) for e in have]
        if sum(m.bytes(shape, 1, sizes) for m in moves) > 1:
            axes = tuple(a for a in sizes if any(a in entry for spec in (have, need) for entry in spec))
            return (Move("collective-permute", axes, shard_count(axes, sizes), have, need),)
    return moves


def _move_or_gather(have: Spec, need: Spec, sizes: Mapping[str, int]) -> tuple[Move, ...]:
    """The moves from ``have`` to ``need``: all-to-alls as long as one applies, then slices and all-gathers."""
    moves: list[Move] = []
    now = have
    while (exchange := _all_to_all(now, need)) is not None:
        axes, after = exchange
        moves.append(Move("all-to-all", axes, shard_count(axes, sizes), now, after))
        now = after
    common = tuple(h[: _common_prefix(h, n)] for h, n in zip(now, need, strict=True))
    lost, gained = ({a for e, c in zip(spec, common, strict=True) for a in e[len(c) :]} for spec in (now, need))
    if not lost & gained and all(c in (h, n) for h, n, c in zip(now, need, common, strict=True)):
        return (*moves, *_slice_and_gather(now, need, sizes))
    return (*moves, *_slice_and_gather(now, common, sizes), *_slice_and_gather(common, need, sizes))


def _all_to_all(now: Spec, need: Spec) -> tuple[tuple[str, ...], Spec] | None:
    """(axes, spec after it) of an all-to-all that moves as many last axes of a dim as possible to their new dim; else None."""
    place = {a: i for i, entry in enumerate(need) for a in entry}
    for i, entry in enumerate(now):
        for k in range(len(entry)):
            last, j = entry[k:], place.get(entry[k], i)
            if j != i and need[j][: len(now[j]) + len(last)] == (*now[j], *last):
                moved = {i: entry[:k], j: (*now[j], *last)}
                return last, tuple(moved.get(d, e) for d, e in enumerate(now))
    return None


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

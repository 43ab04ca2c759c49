"""Schedules of collectives as tables: which rank sends which slot to which rank, in which step.

Each rank of a group has a buffer of slots. A group of sizes (s0, s1, …) over torus dims, with C chunks, has s0·s1·…·C
slots: slot (i0, i1, …, c) is chunk c of the block that belongs to rank (i0, i1, …). A table only has the movements of
slots, so that a simulator can check it and several backends can execute it.

A reduce-scatter is an all-gather in reverse, with additions instead of copies: in an all-gather each slot reaches each
rank once, along a tree; in reverse that tree is a reduction.

Sources: the ring of Patarasuk and Yuan (2009), known from Baidu's all-reduce; one torus dim after another
(BlueConnect, Cho et al. 2019; Mikami et al. 2018); the same concurrently in as many orders as there are dims, so that
all links are busy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

Line = Literal["ring", "line"]
"""How one dim is gathered: on a bidirectional ring, or on a line without wrap-around."""


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """The sends of all ranks over one channel in one step: a (partial) permutation.

    Attributes:
      channel: index of the pair of semaphores. A channel has the same sender and receiver in every step.
      to: int [A], the rank to which each rank sends; -1: it sends nothing.
      slots: int [A, w], the slots that a rank sends. The receiver writes them to the same slots.
      add: whether they are added to the content of the receiver's slots.
    """

    channel: int
    to: np.ndarray
    slots: np.ndarray
    add: bool

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(sender, receiver) of every rank that sends."""
        return [(r, int(d)) for r, d in enumerate(self.to) if d >= 0]

    def received(self) -> np.ndarray:
        """int [A, w]: the slots that each rank receives; -1 for ranks that receive nothing."""
        into = np.full_like(self.slots, -1)
        sends = self.to >= 0
        into[self.to[sends]] = self.slots[sends]
        return into


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A schedule of a collective.

    Attributes:
      kind: "all_gather", "reduce_scatter" or "all_reduce".
      sizes: ranks along each dim; ranks are numbered row-major.
      chunks: number of parts into which a block is cut.
      steps: the transfers of each step.
    """

    kind: str
    sizes: tuple[int, ...]
    chunks: int
    steps: tuple[tuple[Transfer, ...], ...]

    @property
    def ranks(self) -> int:
        """A, the size of the group."""
        return math.prod(self.sizes)

    @property
    def slots(self) -> int:
        """Slots of a rank's buffer."""
        return self.ranks * self.chunks

    @property
    def channels(self) -> int:
        """Number of channels."""
        return 1 + max((t.channel for step in self.steps for t in step), default=-1)

    def reversed(self) -> Table:
        """The reduce-scatter that is this all-gather in reverse."""
        steps = []
        for transfers in reversed(self.steps):
            back = []
            for t in transfers:
                origin = np.full_like(t.to, -1)
                for source, target in t.pairs:
                    origin[target] = source
                slots = np.where(origin[:, None] >= 0, t.slots[origin], 0)
                back.append(Transfer(t.channel, origin, slots, True))
            steps.append(tuple(back))
        return Table("reduce_scatter", self.sizes, self.chunks, tuple(steps))

    def then(self, other: Table) -> Table:
        """This reduce-scatter followed by an all-gather: an all-reduce."""
        channels = self.channels
        moved = tuple(tuple(dataclasses.replace(t, channel=t.channel + channels) for t in step) for step in other.steps)
        return Table("all_reduce", self.sizes, self.chunks, self.steps + moved)


class Hop(NamedTuple):
    """The sends along one dimension of n ranks in one step and one direction.

    Attributes:
      direction: index of the channel among the channels of the dimension.
      to: int [n], rank to which each rank of the dimension sends; -1: none.
      blocks: int [n, w], the blocks that each rank sends.
    """

    direction: int
    to: np.ndarray
    blocks: np.ndarray


def hops_along(n: int, form: Line) -> list[list[Hop]]:
    """An all-gather along one dim of n ranks: the sends of each step.

    Raises:
      ValueError: `form` is unknown.
    """
    position = np.arange(n)
    steps: list[list[Hop]] = []
    if form == "ring":
        back = (n - 1) // 2
        for t in range(n - 1 - back):
            hops = [Hop(0, (position + 1) % n, (position - t)[:, None] % n)]
            if t < back:
                hops.append(Hop(1, (position - 1) % n, (position + t)[:, None] % n))
            steps.append(hops)
    elif form == "line":
        for t in range(n - 1):
            right = (position + 1 < n) & (position - t >= 0)
            left = (position - 1 >= 0) & (position + t < n)
            steps.append(
                [
                    Hop(0, np.where(right, position + 1, -1), np.maximum(position - t, 0)[:, None]),
                    Hop(1, np.where(left, position - 1, -1), np.minimum(position + t, n - 1)[:, None]),
                ]
            )
    else:
        raise ValueError(f"no form {form!r} of a dimension; there are {Line.__args__}")
    return steps


def chunks_of(dims: int, coloured: bool) -> list[tuple[int, ...]]:
    """For each chunk the order in which it gathers the dims: minor first; if coloured, one chunk for each rotation."""
    order = tuple(reversed(range(dims)))
    return [order[k:] + order[:k] for k in range(dims if coloured else 1)]


def gather_table(sizes: Sequence[int], forms: Sequence[Line], orders: Sequence[Sequence[int]] | None = None) -> Table:
    """An all-gather over torus dims, one after another, with an order of its own for each chunk.

    Args:
      sizes: ranks along each dim, major first.
      forms: how each dim is gathered.
      orders: for each chunk the dims in the order in which it gathers them; None: one chunk, minor dim first.

    Raises:
      ValueError: a size is below 1, or an order is no permutation of the dims.
    """
    sizes = tuple(int(n) for n in sizes)
    orders = [tuple(reversed(range(len(sizes))))] if orders is None else [tuple(o) for o in orders]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be at least 1, got {sizes}")
    if any(sorted(o) != list(range(len(sizes))) for o in orders) or len(forms) != len(sizes):
        raise ValueError(f"{len(sizes)} dimensions need as many forms, and orders over them; got {forms}, {orders}")
    shape = (*sizes, len(orders))
    coords = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=1)
    steps: list[list[Transfer]] = []
    channel = 0
    for chunk, order in enumerate(orders):
        at = 0
        gathered: list[int] = []
        for dim in order:
            directions = 0
            for t, hops in enumerate(hops_along(sizes[dim], forms[dim])):
                while len(steps) <= at + t:
                    steps.append([])
                for hop in hops:
                    directions = max(directions, hop.direction + 1)
                    steps[at + t].append(_spread(shape, coords, dim, hop, gathered, chunk, channel + hop.direction))
            at += len(hops_along(sizes[dim], forms[dim]))
            channel += directions
            gathered.append(dim)
    return Table("all_gather", sizes, len(orders), tuple(tuple(s) for s in steps))


def _spread(shape, coords: np.ndarray, dim: int, hop: Hop, gathered: list[int], chunk: int, channel: int) -> Transfer:
    """A hop along one dim as a transfer of the full group, with the blocks of all dims that were gathered before."""
    ranks, sizes = len(coords), shape[:-1]
    target_position = hop.to[coords[:, dim]]
    target_coords = coords.copy()
    target_coords[:, dim] = np.maximum(target_position, 0)
    to = np.where(target_position >= 0, np.ravel_multi_index(tuple(target_coords.T), sizes), -1)
    index: list[np.ndarray] = []
    wide = [d for d in range(len(sizes)) if d in gathered or d == dim]
    for d in range(len(sizes)):
        if d == dim:
            values = hop.blocks[coords[:, dim]]
        elif d in gathered:
            values = np.broadcast_to(np.arange(sizes[d]), (ranks, sizes[d]))
        else:
            index.append(coords[:, d].reshape(ranks, *[1] * len(wide)))
            continue
        position = [1] * len(wide)
        position[wide.index(d)] = values.shape[1]
        index.append(values.reshape(ranks, *position))
    slots = np.ravel_multi_index(tuple(np.broadcast_arrays(*index, np.int64(chunk))), shape)
    return Transfer(channel, to, slots.reshape(ranks, -1), False)


@functools.lru_cache(maxsize=64)
def table_of(kind: str, sizes: tuple[int, ...], rings: tuple[bool, ...]) -> Table:
    """The table of bidirectional rings, with one chunk for each dimension.

    Args:
      kind: "all_gather", "reduce_scatter", "all_reduce".
      sizes: ranks along each dimension.
      rings: whether each dimension wraps around; a ring is run as a line where it does not.

    Raises:
      ValueError: no such kind.
    """
    forms: list[Line] = ["ring" if wraps or n <= 2 else "line" for n, wraps in zip(sizes, rings, strict=True)]
    gather = gather_table(sizes, forms, chunks_of(len(sizes), all(n > 1 for n in sizes)))
    if kind == "all_gather":
        return gather
    if kind == "reduce_scatter":
        return gather.reversed()
    if kind == "all_reduce":
        return gather.reversed().then(gather)
    raise ValueError(f"no collective {kind!r}; there are 'all_gather', 'reduce_scatter', 'all_reduce'")

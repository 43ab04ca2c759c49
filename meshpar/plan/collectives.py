"""Collectives: what a plan records of each, and how an unreduced value is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax.numpy as jnp

from ..hardware.algorithms import ALGORITHMS, Algorithm, AlgorithmName
from ..hardware.collective_ops import CollectiveOp
from ..hardware.topology import Torus
from ..layout import Spec
from ..program.ir import Op
from ..rules.partial import dtype_class
from ..rules.rule import ADDED


@dataclass(frozen=True, eq=False, slots=True)
class Collective:
    """One collective of a plan.

    Attributes:
      op: its kind.
      axes: the mesh axes it runs over.
      tensor: what it moves, by path or by the op that made it.
      dims: the names of the dims of that tensor.
      shape: its global shape.
      dtype: its dtype.
      bytes: sent by each device, once: ``V·(g-1)/g`` for an all-gather of V gathered bytes, a reduce-scatter or an
        all-to-all of V local bytes, twice that for an all-reduce, V local bytes for a permute; g devices take part.
      count: how often it runs in a step; None where a loop's trips are not known.
      cause: the rule that brought it about, in words.
      origin: the op that needs it.
      algorithm: one of :data:`meshpar.hardware.algorithms.ALGORITHMS`: ``native``: one collective over all axes; ``staged``: one
        a torus dimension, one after the other; ``hierarchical``: staged, between slices last; ``all_reduce``: an all-reduce where a
        reduce-scatter would do, of which each device cuts its block out; ``ring``: a hop of a ring, beside products, of which
        half go each way; ``pallas``: one that a kernel sends.
      why: why it takes that algorithm; empty where there is no other.
      seconds: None: not estimated.
      first: it runs over the torus dimensions of its axes from this one on (a ring has those before it).
    """

    op: CollectiveOp
    axes: tuple[str, ...]
    tensor: str
    dims: str
    shape: tuple[int, ...]
    dtype: str
    bytes: float
    count: int | None
    cause: str
    origin: Op | None = field(default=None, repr=False)
    seconds: float | None = None
    algorithm: AlgorithmName = "native"
    why: str = ""
    first: int = 0

    @property
    def entry(self) -> Algorithm:
        """Its algorithm, with bytes and traits."""
        return ALGORITHMS[self.algorithm]

    @property
    def total_bytes(self) -> float:
        """Bytes in a step; loops of unknown length count once."""
        return self.bytes * (1 if self.count is None else self.count)

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``; looked up when asked for, since that takes longer than planning."""
        return self.origin.source if self.origin is not None else ""

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("origin", "first")}
        return {**values, "source": self.source}


def dcn_bytes_sent(collective: Collective, torus: Torus) -> float:
    """Bytes that a device sends to other slices (or nodes) in one run of a collective; 0 if its group is within a slice."""
    stages = [s for a in collective.axes for s in torus.get(a, ()) if s.size > 1][collective.first :]
    return collective.entry.dcn_bytes(collective.op, collective.bytes, stages)


def split_reduction(
    have: Spec, rest: Spec, axes: Sequence[str], kind: str
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """How an unreduced value is reduced: (dim → axes over which it is reduce-scattered, axes over which it is all-reduced).

    A sum is scattered over the axes that its layout puts next on a dim.

    Args:
      have, rest: the spec in which it is unreduced, and the one in which it rests.
      axes: over which it is unreduced; kind: how its terms combine.
    """
    held = [list(entry) for entry in have]
    place = {a: i for i, entry in enumerate(rest) for a in entry}
    scatter: dict[int, tuple[str, ...]] = {}
    for a in axes:
        i = place.get(a)
        if kind in ADDED and i is not None and rest[i][: len(held[i]) + 1] == (*held[i], a):
            held[i].append(a)
            scatter[i] = (*scatter.get(i, ()), a)
    return scatter, tuple(a for a in axes if not any(a in s for s in scatter.values()))


def is_all_reducible(kind: str, dtype: Any) -> bool:
    """Whether an all-reduce combines such partial values; else they are gathered, and combined locally.

    Gathered are products, bits of integers, and extrema of complex numbers and of 8-bit floating-point types, for which not every
    backend has an all-reduce.
    """
    if kind in ("max", "min"):
        return dtype_class(dtype) != "complex" and not (dtype_class(dtype) == "narrow" and jnp.finfo(dtype).bits < 16)
    return kind in ADDED or (kind in ("and", "or") and dtype_class(dtype) == "bool")

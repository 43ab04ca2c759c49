"""The record of a collective of a plan, and the collectives that reduce a partial value."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field, fields
from itertools import takewhile
from typing import Any

import jax.numpy as jnp

from ..hardware.collective_algorithms import ALGORITHMS, Algorithm, AlgorithmName
from ..hardware.collective_ops import CollectiveOp
from ..hardware.topology import Stage, Torus
from ..layout import Spec
from ..program.ir import Op
from ..records import record
from ..rules.partial import dtype_class
from ..rules.rule import ADDED

Text = str | Callable[[], str]
"""A text for reports, or a function that makes it."""


@record
class Collective:
    """One collective of a plan.

    Attributes:
      op: the kind of collective.
      axes: the mesh axes that it runs over.
      tensor: the array, by its path or the op that made it.
      dims: the names of the dims of the array.
      shape: its global shape.
      dtype: its dtype.
      bytes: sent by each of g devices in one run: ``V·(g-1)/g`` for an all-gather of V gathered bytes, a reduce-scatter or an
        all-to-all of V local bytes, twice that for an all-reduce, V local bytes for a collective-permute.
      count: runs per step; None: a loop's trip count is not known.
      wording: the cause, or a function that returns it.
      origin: the op that needs it.
      algorithm: one of :data:`hardware.collective_algorithms.ALGORITHMS`:

        - ``native``: one collective over all axes;
        - ``staged``: one per torus dimension, sequentially; ``hierarchical``: staged, inter-slice stage last;
        - ``all_reduce``: an all-reduce followed by a local slice, for a reduce-scatter;
        - ``ring``: ring steps overlapped with matmuls, half in each direction; ``pallas``: remote DMA of a kernel.
      why: why it has this algorithm, the main reason first, up to a semicolon; empty: there is no other.
      seconds: estimated for one run; None: not estimated.
      content: (index of an operand of the op, key of its elements that are sent), as :attr:`rules.mesh_in_shard_map.Send.content`.
      hidden: of the seconds of one run, those during which its own op computes.
      first: index of the first torus dimension of its axes that it runs over (a ring runs over those before).
    """

    op: CollectiveOp
    axes: tuple[str, ...]
    tensor: str
    dims: str
    shape: tuple[int, ...]
    dtype: str
    bytes: float
    count: int | None
    wording: Text = field(repr=False)
    origin: Op | None = field(default=None, repr=False)
    seconds: float | None = None
    algorithm: AlgorithmName = "native"
    why: str = ""
    first: int = 0
    content: tuple[int, Hashable] | None = field(default=None, repr=False)
    hidden: float = 0.0

    @property
    def cause(self) -> str:
        """A sentence with the rule of the layout that needs it, which is made when it is read first."""
        if not isinstance(self.wording, str):
            object.__setattr__(self, "wording", self.wording())
        return str(self.wording)

    @property
    def entry(self) -> Algorithm:
        """Its algorithm, with bytes and traits."""
        return ALGORITHMS[self.algorithm]

    @property
    def replaces(self) -> str:
        """The collective that the cause calls for and that this one replaces, with the main reason, as a clause; "" if it replaces
        no other."""
        if self.entry.slices_locally:
            return f"all-reduce and local slice, {self.why.partition('; ')[0]}"
        return self.why if self.entry.ring_step else ""

    @property
    def explanation(self) -> str:
        """The cause, and the collective that this one replaces."""
        return "; ".join(filter(None, (self.cause, self.replaces)))

    @property
    def total_bytes(self) -> float:
        """Bytes sent per step; a loop of unknown length counts once."""
        return self.bytes * self.runs

    @property
    def runs(self) -> int:
        """Runs per step; 1 in a loop of unknown length."""
        return 1 if self.count is None else self.count

    @property
    def total_seconds(self) -> float:
        """Seconds per step, alone on the links; 0 if the chip is not known."""
        return (self.seconds or 0.0) * self.runs

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``; computed on access, because the lookup takes longer than planning."""
        return self.origin.source if self.origin is not None else ""

    @property
    def module(self) -> str:
        """The path of the Flax modules and named scopes that need it, ``ViT/encoder/layer_0/attention``; "" without any.

        ``source`` is a line of the user's own, so it is the same for all layers of a model from a package.
        """
        return self.origin.module if self.origin is not None else ""

    @property
    def package_line(self) -> str:
        """The line of an installed package that needs it, ``transformers/…/modeling_flax_vit.py:192 (__call__)``; "" if that is the
        user's own."""
        return self.origin.package_line if self.origin is not None else ""

    @property
    def location(self) -> str:
        """``module`` and ``source``, or ``source`` and ``package_line``, as reports show them (:attr:`Op.location`)."""
        return self.origin.location if self.origin is not None else ""

    def to_dict(self) -> dict[str, Any]:
        skipped = ("origin", "first", "content", "hidden")
        names = ("cause" if f.name == "wording" else f.name for f in fields(self) if f.name not in skipped)
        values = {name: getattr(self, name) for name in names}
        return {**values, "source": self.source, "module": self.module, "package_line": self.package_line}


def stage_bytes_sent(collective: Collective, torus: Torus) -> list[tuple[Stage, float]]:
    """(stage of the group, bytes that a device sends over its links in one run of a collective)."""
    stages = [s for a in collective.axes for s in torus.get(a, ()) if s.size > 1][collective.first :]
    return collective.entry.stage_bytes(collective.op, collective.bytes, stages)


def dcn_bytes_sent(collective: Collective, torus: Torus) -> float:
    """Bytes that a device sends to other slices (or nodes) in one run of a collective; 0 if its group is within a slice."""
    return sum(sent for stage, sent in stage_bytes_sent(collective, torus) if stage.between)


def split_reduction(
    have: Spec, stored: Spec, axes: Sequence[str], kind: str
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """(dim → axes of its reduce-scatter, axes of the all-reduce) with which a partial value is reduced.

    A sum is reduce-scattered over the axes that come next in the stored spec of a dim, and all-reduced over the other axes.

    Given a sum partial over ``("data", "model")`` with ``have = ((), ())`` and ``stored = (("data",), ())``, returns
    ``({0: ("data",)}, ("model",))``; with ``stored = (("model", "data"), ())``, returns ``({0: ("model", "data")}, ())``.

    Args:
      have: the spec of the partial value; stored: its stored spec.
      axes: over which it is partial; kind: the reduction of its terms.
    """
    dim_of = {a: i for i, entry in enumerate(stored) for a in entry}
    scatter: dict[int, tuple[str, ...]] = {}
    for i in dict.fromkeys(dim_of[a] for a in axes if kind in ADDED and a in dim_of):
        n = len(have[i])
        over = tuple(takewhile(axes.__contains__, stored[i][n:])) if stored[i][:n] == have[i] else ()
        if over:
            scatter[i] = over
    return scatter, tuple(a for a in axes if not any(a in s for s in scatter.values()))


def is_all_reducible(kind: str, dtype: Any) -> bool:
    """Whether there is an all-reduce for a reduction and dtype; if not, the terms are all-gathered and combined locally.

    Not every backend has one for products, bitwise operations on integers, and extrema of complex numbers and of 8-bit
    floating-point types.
    """
    if kind in ("max", "min"):
        return dtype_class(dtype) != "complex" and not (dtype_class(dtype) == "narrow" and jnp.finfo(dtype).bits < 16)
    return kind in ADDED or (kind in ("and", "or") and dtype_class(dtype) == "bool")

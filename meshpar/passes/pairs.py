"""What a plan records of products beside collectives: the decision for each pair, and how those in blocks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from ..layout import Spec
from ..program.ir import Op, Value

Choice = Literal["xla", "ring", "pallas"]
BLOCKS = 4
"""Blocks of a sum on a ring that are there at once: two leave, the next two are made."""


@dataclass(eq=False, slots=True)
class Overlap:
    """A decision: how a gather before products, or a reduce-scatter after them, is made.

    Attributes:
      kind: ``gather`` or ``scatter``.
      choice: ``xla``: a collective of its own; ``ring``: in blocks, each sent while another is multiplied;
        ``pallas``: the same in one kernel.
      reason: why, in words.
      tensor, axes: what is moved, over what.
      products: how many products the blocks are of.
      count: how often in a step; None: not known.
      exposed: seconds, once, in which nothing is multiplied, by choice (``pallas`` where a kernel takes it); None: the chip is
        not known.
      origin: the first product.
    """

    kind: Literal["gather", "scatter"]
    choice: Choice
    reason: str
    tensor: str
    axes: tuple[str, ...]
    products: int
    count: int | None
    exposed: dict[str, float] | None
    origin: Op | None = None

    @property
    def gain(self) -> float | None:
        """Seconds of a step that the choice saves over ``xla``."""
        if self.exposed is None:
            return None
        return (self.exposed["xla"] - self.exposed[self.choice]) * (1 if self.count is None else self.count)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "choice": self.choice, "reason": self.reason, "gain": self.gain, "tensor": self.tensor,
            "axes": list(self.axes), "products": self.products, "count": self.count, "exposed": self.exposed,
            "source": self.origin.source if self.origin is not None else "",
        }  # fmt: skip


@dataclass(eq=False, slots=True)
class GatherRing:
    """A gather that is sent block by block, each multiplied as it arrives.

    Attributes:
      value, need: what is gathered, and into which spec.
      dim, axes: the dim that is gathered, over these axes.
      dots: (product, which operand is the gathered one).
      before: ops that stand after its first use and make operands of the products: they run before it.
      keep: others use the gathered value too.
      fused: the kernel that runs it; None: a ring.
    """

    value: Value
    need: Spec
    dim: int
    axes: tuple[str, ...]
    dots: list[tuple[Op, int]]
    before: list[Op]
    keep: bool
    fused: FusedGather | None = None


@dataclass(eq=False, slots=True)
class ScatterRing:
    """A partial sum of products that is settled block by block.

    Attributes:
      value: the sum.
      dim, axes: the dim over which it is scattered, and over what.
      leaves: the products, each with the dim of its result that is scattered.
      fused: the kernel that runs it; None: a ring.
    """

    value: Value
    dim: int
    axes: tuple[str, ...]
    leaves: list[tuple[Op, int]]
    fused: FusedScatter | None = None


@dataclass(eq=False, slots=True)
class Rings:
    """How the pairs that were decided for run.

    Attributes:
      gathers: by ``id`` of each of their products.
      kept: those whose gathered value others use as well, by (``id(frame)``, ``id(value)``, spec).
      scatters: by ``id`` of the value that is settled.
      pending: ids of the values that are made in blocks when they are settled, and not before.
      parts: how many blocks each of them has.
      sent: ids of the collectives that belong to rings: their time is in the decisions.
    """

    gathers: dict[int, GatherRing] = field(default_factory=dict)
    kept: dict[tuple[int, int, Spec], GatherRing] = field(default_factory=dict)
    scatters: dict[int, ScatterRing] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    parts: dict[int, int] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)


def beside(pair: GatherRing | ScatterRing, block: float, devices: int) -> float:
    """Bytes that a device holds while a pair runs, beside its operands, its results, and of a sum :data:`BLOCKS` blocks.

    A kernel has two buffers each way, whatever the number of devices, and its copies of what it cannot take as it lies. Around a
    ring two blocks of what is gathered leave while two arrive (the first that leave are the device's own); of a sum, the
    blocks that leave and the next ones are in :data:`BLOCKS`, so that those which arrive are left.

    Args:
      block: bytes of a block of what is sent.
      devices: of the ring.
    """
    gather = isinstance(pair, GatherRing)
    if pair.fused is not None:
        return (4 if gather else 4 - min(BLOCKS, devices)) * block + pair.fused.held
    return (min(4, devices - 1) if gather else min(2, devices - 1)) * block


def describe(axes: Sequence[str]) -> str:
    """Axes for people."""
    return "+".join(f"`{a}`" for a in axes)

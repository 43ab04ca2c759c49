"""The plan: the spec of every value, every collective with its cause, and what each device holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from .._compat import source_line
from ..layout import AnyMesh, Layout, Spec
from ..program.graph import Program
from ..program.rules.rule import Kind
from .collectives import Collective


@dataclass(slots=True)
class Held:
    """An input or output of the program, as each device holds it."""

    path: str
    dims: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes: float
    kind: str | None

    def to_dict(self) -> dict[str, Any]:
        spec = [list(e) if isinstance(e, tuple) else e for e in self.spec]
        return {"path": self.path, "dims": self.dims, "shape": list(self.shape), "dtype": self.dtype,
                "spec": spec, "bytes": self.bytes, "kind": self.kind}  # fmt: skip


@dataclass(slots=True)
class OpPlan:
    """How one op works: the spec it needs each operand in, the spec in which its results come out, partial over which axes.

    ``factor_axes`` are the axes of its factors (None for elementwise ops); ``kind`` is how its partial results combine.
    """

    ins: list[Spec | None]
    outs: list[Spec]
    partial: tuple[str, ...] = ()
    factor_axes: list[tuple[str, ...]] | None = None
    kind: Kind = "sum"


@dataclass(eq=False)
class Plan:
    """What a layout makes each device hold and send, and why. Made without devices, and without compiling.

    Attributes:
      program, layout, mesh: what it was made from.
      inputs, outputs: how each is held: path, dims, spec, bytes on a device.
      collectives: every collective of the step, with dims, axes, bytes, count, source line and cause.
      notes: what could not be split, and why.
      specs: the spec of every value at rest, by ``id(value)``.
      settled: ids of the values whose partial sums are settled where they are made.
      ops: how every op works, by ``id(op)``.
      passed: for the results of ops through which a partial sum passes unsettled, by ``id(result)``: how the op works.
      generated: ids of the values made from no data (iotas, masks): each device makes the part that it needs.
    """

    program: Program
    layout: Layout
    mesh: AnyMesh
    inputs: list[Held] = field(default_factory=list)
    outputs: list[Held] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    specs: dict[int, Spec] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    unsettled: dict[int, tuple[str, ...]] = field(default_factory=dict)
    ops: dict[int, OpPlan] = field(default_factory=dict)
    passed: dict[int, OpPlan] = field(default_factory=dict)
    out_specs: list[Spec] = field(default_factory=list)
    generated: set[int] = field(default_factory=set)

    @property
    def sizes(self) -> dict[str, int]:
        """axis → size of the mesh."""
        return dict(self.mesh.shape)

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in one step; loops of unknown length count once."""
        return sum(c.total_bytes for c in self.collectives)

    def held(self, kind: str | None = None) -> float:
        """Bytes of the inputs on each device, all or of one kind (``params``, ``opt``, ``other``)."""
        return sum(h.bytes for h in self.inputs if kind is None or (h.kind or "other") == kind)

    @property
    def joins(self) -> list[Any]:
        """Pairs of names that turned out to be one dim of the program."""
        return self.program.joins

    @property
    def unnamed(self) -> list[str]:
        """The dims larger than 1 that have no name: op, shape, dim and source line."""
        _, _, missing = self.program.coverage()
        return [f"{op.name} {list(v.shape)} dim {i} at {source_line(op.eqn)}" for op, v, i in missing]

    def to_json(self) -> str:
        """The plan as JSON: mesh, layout, inputs, outputs, collectives, joins, notes, unnamed dims."""
        named, total, _ = self.program.coverage()
        return json.dumps(
            {
                "mesh": self.sizes,
                "layout": str(self.layout),
                "inputs": [h.to_dict() for h in self.inputs],
                "outputs": [h.to_dict() for h in self.outputs],
                "collectives": [c.to_dict() for c in self.collectives],
                "joins": [str(j) for j in self.joins],
                "notes": self.notes,
                "dims": {"named": named, "all": total, "unnamed": self.unnamed},
            }
        )

    def __str__(self) -> str:
        from ..report.text import plan_text

        return plan_text(self)

    def __rich__(self) -> Any:
        from ..report.text import plan_renderable

        return plan_renderable(self)

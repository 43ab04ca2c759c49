"""The plan: the spec of every value, every collective with its cause, and what each device holds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import JoinWarning, UnsupportedError
from ..layout import AnyMesh, Layout, Spec
from ..mesh import parse_topology
from ..program.graph import Frame, Op, Program, Value
from ..program.rules.rule import Kind
from .collectives import Collective, Form
from .fusion import Region
from .hardware import CHIPS, Chip, chip_of, dcn_bytes_of
from .kernels import kernels_of
from .memory import Memory, memory_of
from .order import Order
from .pairs import Overlap, Rings
from .time import Time, time_of
from .torus import Torus, torus_of, torus_of_slices


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

    ``partial`` has the axes of every result (empty: none is partial); ``factor_axes`` are the axes of its factors (None for
    elementwise ops); ``kind`` is how its partial results combine.
    """

    ins: list[Spec | None]
    outs: list[Spec]
    partial: list[tuple[str, ...]] = field(default_factory=list)
    factor_axes: list[tuple[str, ...]] | None = None
    kind: Kind = "sum"


@dataclass(eq=False, slots=True)
class Sent:
    """A value that a plan gathers for the ops of a frame, or settles: what may run beside the products around it.

    Attributes:
      value: what is moved.
      have, need: where it lies before and after.
      frame: the body in which that happens.
      count: how often in a step; None: not known.
      collectives: what it sends, entries of the plan's list.
      users: the ops that it is gathered for; none where a partial sum is settled.
    """

    value: Value
    have: Spec
    need: Spec
    frame: Frame
    count: int | None
    collectives: list[Collective]
    users: list[Op] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A loop carry that is a partial sum: where it lies, and over which axes it is to be summed."""

    spec: Spec
    axes: tuple[str, ...]


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
      accumulators: the carries of loops that stay partial sums, by ``id(carry in the body)``.
      waiting: results of loops that are partial sums, by ``id(result)``: over which axes.
      hoisted: the specs in which a loop finds what it only reads, moved before it, by ``id(value in the body)``.
      torus: the stages of every axis on the slice's torus.
      generated: ids of the values made from no data (iotas, masks): each device makes the part that it needs.
      topology: the slices that the mesh lies on, as text, where its devices do not say.
      donated: positions of the flat inputs whose memory the results may take.
      asked: the layout as it was asked for; ``layout`` has rules before it for dims that are called after axes.
      forms: how the sum of a value is scattered, by ``id(value)`` and dim.
      sent: the gathers and settled sums that products stand beside.
      overlap: what was asked for of them; ``overlaps``: what was decided, each with its reason; ``rings``: how those run that
        are sent on a ring (:mod:`meshpar.plan.overlap`).
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
    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    waiting: dict[int, tuple[str, ...]] = field(default_factory=dict)
    hoisted: dict[int, list[Spec]] = field(default_factory=dict)
    torus: Torus = field(default_factory=dict)
    topology: str | None = None
    donated: frozenset[int] = frozenset()
    asked: Layout | None = None
    forms: dict[int, dict[int, Form]] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    overlap: str = "off"
    overlaps: list[Overlap] = field(default_factory=list)
    rings: Rings = field(default_factory=Rings)

    def __post_init__(self) -> None:
        if self.topology is not None:
            slices, kind, chips = parse_topology(self.topology)
            self.torus = torus_of_slices(self.sizes, slices, kind, chips, CHIPS[kind].devices)
        else:
            self.torus = self.torus or torus_of(self.mesh)

    @cached_property
    def chip(self) -> Chip | None:
        """The chip that the plan is for; None: not known (CPUs, an abstract mesh without a topology)."""
        return chip_of(self.topology or self.mesh)

    @cached_property
    def order(self) -> Order:
        """The order of ops, where it is not that of the program."""
        return Order(self)

    @cached_property
    def kernels(self) -> Region:
        """What the program is fused into: the kernels that read and write memory."""
        return kernels_of(self)

    @cached_property
    def memory(self) -> Memory:
        """Bytes on a device over a step: the peak, its line, by kind."""
        return memory_of(self, self.kernels)

    @cached_property
    def time(self) -> Time | None:
        """Seconds of a step by what takes them; None where the chip is not known."""
        return None if self.chip is None else time_of(self, self.chip, self.kernels)

    @property
    def seconds(self) -> float | None:
        """The estimate of a step's seconds (:attr:`meshpar.plan.time.Time.seconds` says how); None: chip not known."""
        return None if self.time is None else self.time.seconds

    def replan(
        self, *, layout: Any = None, mesh: AnyMesh | None = None, topology: str | None = None, strict: bool = False,
        overlap: str | None = None,
    ) -> Plan:  # fmt: skip
        """The plan of the same program under another layout or on another mesh: nothing is traced or named again.

        Args:
          layout: as in :func:`meshpar.plan`; default: this plan's.
          mesh: a mesh; default: this plan's, with its topology.
          topology: the slice that ``mesh`` lies on, if it is abstract.
          overlap: as in :func:`meshpar.plan`; default: this plan's.

        Raises:
          UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
        """
        from .planner import make_plan

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JoinWarning)  # this plan has told
            return make_plan(
                self.program,
                (self.asked or self.layout) if layout is None else Layout(layout),
                self.mesh if mesh is None else mesh,
                strict=strict,
                topology=self.topology if mesh is None and topology is None else topology,
                donated=self.donated,
                overlap=self.overlap if overlap is None else overlap,
            )

    @property
    def sizes(self) -> dict[str, int]:
        """axis → size of the mesh."""
        return dict(self.mesh.shape)

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in one step; loops of unknown length count once."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def dcn_bytes(self) -> float:
        """Of :attr:`bytes_sent`, what crosses to other slices (or nodes of GPUs)."""
        return sum(dcn_bytes_of(c, self) * (1 if c.count is None else c.count) for c in self.collectives)

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
        return [f"{op.name} {list(v.shape)} dim {i} at {op.source}" for op, v, i in missing]

    def to_json(self) -> str:
        """The plan as JSON: mesh, layout, inputs, outputs, collectives, memory, time, joins, notes, unnamed dims."""
        named, total, _ = self.program.coverage()
        return json.dumps(
            {
                "mesh": self.sizes,
                "topology": self.topology,
                "chip": None if self.chip is None else self.chip.name,
                "layout": str(self.layout),
                "inputs": [h.to_dict() for h in self.inputs],
                "outputs": [h.to_dict() for h in self.outputs],
                "collectives": [c.to_dict() for c in self.collectives],
                "memory": self.memory.to_dict(),
                "time": None if self.time is None else self.time.to_dict(),
                "overlap": [o.to_dict() for o in self.overlaps],
                "joins": [str(j) for j in self.joins],
                "notes": self.notes,
                "dims": {"named": named, "all": total, "unnamed": self.unnamed},
            }
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: ``.html``, a page of its own (nothing from the network); ``.json``; ``.txt``.

        Raises:
          UnsupportedError: another suffix.
        """
        save(self, path, {".html": REPORTS["html"], ".json": lambda plan: plan.to_json(), ".txt": REPORTS["text"]})

    def diff(self, other: Plan) -> Any:
        """The two plans side by side: a :class:`meshpar.report.diff.PlanDiff`; print it, ``save("diff.html")`` it."""
        return REPORTS["diff"](self, other)

    def __str__(self) -> str:
        return REPORTS["text"](self)

    def __rich__(self) -> Any:
        return REPORTS["rich"](self)

    def _repr_html_(self) -> str:
        return REPORTS["cell"](self)


REPORTS: dict[str, Callable[..., Any]] = {}
"""How plans are shown: ``text``, ``rich``, ``html``, ``cell``, ``diff``. :mod:`meshpar.report` fills it; plans know no reports."""


def save(what: Any, path: str | Path, writers: Mapping[str, Callable[[Any], str]]) -> None:
    """Write something to a file in the form that its suffix asks for.

    Raises:
      UnsupportedError: a suffix that ``writers`` does not have.
    """
    path = Path(path)
    if path.suffix not in writers:
        raise UnsupportedError(
            f"{path.name}: cannot be saved as `{path.suffix}`", fixes=[f"suffixes are {', '.join(writers)}"]
        )
    path.write_text(writers[path.suffix](what), encoding="utf8")

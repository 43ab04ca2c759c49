"""The plan: the steps of every device, where each value lies, and what each device holds; a frozen record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from jax.sharding import PartitionSpec

from ..dims import Dims, format_dims
from ..hardware.calibration import Calibrations
from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp
from ..hardware.compiler import CompilerModel, compiler_model
from ..hardware.options import Options
from ..hardware.topology import Torus
from ..layout import AnyMesh, Layout, Spec, to_partition_spec
from ..program.ir import Join, Op, Program, Value
from .collectives import Collective, dcn_bytes_sent
from .spec import value_bytes
from .steps import Body, Run, Shard


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """An input or output of the program, as each device holds it.

    Attributes:
      path: in the tree of arguments or results.
      dims: the name of every dim; None: it has none.
      shape: the global shape.
      dtype: its name.
      spec: how it is split.
      bytes: on a device.
      kind: ``params``, ``opt``, ``constant``, or None.
      on_host: it lies in the host's memory, so that a device holds no bytes of it.
    """

    path: str
    dims: Dims
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes: float
    kind: str | None
    on_host: bool = False

    @classmethod
    def of(cls, program: Program, value: Value, spec: Spec, sizes: Mapping[str, int], kind: str | None) -> ShardedArray:
        """A value of a program as it lies in a spec, over axes of these sizes."""
        host = value.on_host
        size = 0.0 if host else value_bytes(value, spec, sizes)
        return cls(
            value.path or "",
            program.dims(value),
            value.shape,
            str(value.aval.dtype),
            to_partition_spec(spec),
            size,
            kind,
            host,
        )

    @property
    def split(self) -> list[tuple[str | None, tuple[str, ...]]]:
        """(name, axes) of every dim."""
        entries = [*self.spec, *(None,) * (len(self.shape) - len(self.spec))]
        axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
        return list(zip(self.dims, axes, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; dims as text."""
        spec = [list(e) if isinstance(e, tuple) else e for e in self.spec]
        return {"path": self.path, "dims": format_dims(self.dims), "shape": list(self.shape), "dtype": self.dtype,
                "spec": spec, "bytes": self.bytes, "kind": self.kind, "on_host": self.on_host}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """How one value lies: ``made``: as the step that makes it leaves it, perhaps unreduced; ``stored``: its stored sharding."""

    made: Shard
    stored: Shard


Choice = Literal["xla", "ring", "pallas"]


@dataclass(frozen=True, eq=False, slots=True)
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
      together: it was decided together with all that activations are gathered and scattered for over these axes.
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
    together: bool = False

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


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """A copy between a device's memory and the host's.

    Attributes:
      to: ``host`` or ``device``.
      tensor, dims, shape, dtype: what is copied.
      bytes: of a device, once.
      count: how often in a step; None: not known.
      source: the user's line.
    """

    to: Literal["host", "device"]
    tensor: str
    dims: str
    shape: tuple[int, ...]
    dtype: str
    bytes: float
    count: int | None
    source: str

    @property
    def total_bytes(self) -> float:
        """In one step; a loop of unknown length counts once."""
        return self.bytes * (1 if self.count is None else self.count)

    def to_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__}


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What a layout makes each device hold and send, and why. Made without devices, and without compiling.

    Attributes:
      program, mesh: what it was made from.
      layout: the rules, with those for dims that are called after axes before the ones of ``asked``.
      topology: the slices that the mesh lies on, as text, where its devices do not say.
      torus: the stages of every axis on the slice's torus.
      chip: what it is for; None: not known (CPUs, an abstract mesh without a topology; but for those that were measured).
      donated: positions of the flat inputs whose memory the results may take.
      body: the steps, and the shards of inputs (constants of the program before its arguments) and outputs.
      placements: how every value lies.
      inputs, outputs: how each argument and result is held.
      notes: what could not be split, and why.
      lowering: what makes the program: ``"shard_map"`` sends what the plan has; under ``"jit"`` XLA partitions, and the plan's
        figures are estimates.
      lowering_reason: why ``lowering="auto"`` is ``"jit"`` for this program; None where it is not, or was not asked for.
      overlap: how all-gathers before matmuls and reduce-scatters after them are made; ``overlaps``: what was decided.
      requested_lowering, requested_overlap: as they were asked for: ``"auto"``; None: the default of the lowering.
      options: the compiler's options that it is made for.
      calibrations: what was measured of devices; ``chip`` has what concerns its own.
    """

    program: Program
    layout: Layout
    requested_layout: Layout
    mesh: AnyMesh
    topology: str | None
    torus: Torus
    chip: Chip | None
    donated: frozenset[int]
    body: Body
    placements: dict[Value, Placement]
    inputs: tuple[ShardedArray, ...]
    outputs: tuple[ShardedArray, ...]
    notes: tuple[str, ...]
    lowering: str = "shard_map"
    lowering_reason: str | None = None
    overlap: str = "off"
    requested_lowering: str = "auto"
    requested_overlap: str | None = "off"
    options: Options = field(default_factory=Options)
    overlaps: tuple[Overlap, ...] = ()
    calibrations: Calibrations = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """axis → size of the mesh."""
        return dict(self.mesh.shape)

    def shard_bytes(self, shard: Shard) -> float:
        """Bytes of a shard on one device; uneven shards rounded up."""
        return value_bytes(shard.value, shard.spec, self.sizes)

    @cached_property
    def constants(self) -> tuple[ShardedArray, ...]:
        """The arrays that the function closes over: parts of the compiled program, whole on every device."""
        program, shards = self.program, self.body.inputs[: len(self.program.constants)]
        return tuple(ShardedArray.of(program, s.value, s.spec, self.sizes, "constant") for s in shards)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the step, with dims, axes, bytes, count, source line and cause, in the order of the steps."""
        return self.body.sends

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every copy between the device's memory and the host's, in the order of the steps."""
        return tuple(self._transfers(self.body, 1))

    def _transfers(self, body: Body, count: int | None) -> Iterator[Transfer]:
        for step in body.steps:
            for inner in step.bodies:
                yield from self._transfers(
                    inner, None if count is None or inner.trip_count is None else count * inner.trip_count
                )
            if not isinstance(step, Run) or not step.op.primitive.transfer:
                continue
            for source, out in zip(step.operands, step.results, strict=True):
                if out.on_host == (source is not None and source.on_host):
                    continue
                value = out.value
                yield Transfer(
                    "host" if out.on_host else "device", value.path or (source and source.value.path) or step.op.name,
                    format_dims(self.program.dims(value)), value.shape, str(value.aval.dtype),
                    self.shard_bytes(out), count, step.op.source,
                )  # fmt: skip

    @property
    def runs(self) -> dict[Op, Run]:
        """The step that runs an op; ops on values made from no data have one for every use, of which the first is here."""
        return self.body.runs

    @property
    def compiler(self) -> CompilerModel:
        """Measured constants of the compiler for the chip; those of a TPU without measurements if the chip is not known."""
        return compiler_model(None) if self.chip is None else self.chip.compiler

    @cached_property
    def sync_collectives(self) -> frozenset[CollectiveOp]:
        """The collectives that its programs wait for, on its chip and with its options of the compiler."""
        return self.options.sync_collectives(self.chip)

    def is_async(self, op: CollectiveOp) -> bool:
        """Whether its programs go on beside collectives of a kind, where something is there to do."""
        return op not in self.sync_collectives

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in one step; loops of unknown length count once."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def dcn_bytes(self) -> float:
        """Of :attr:`bytes_sent`, what crosses to other slices (or nodes of GPUs)."""
        return sum(dcn_bytes_sent(c, self.torus) * (1 if c.count is None else c.count) for c in self.collectives)

    def argument_bytes(self, kind: str | None = None) -> float:
        """Bytes of the inputs and constants on each device, all or of one kind (``params``, ``opt``, ``constant``, ``other``)."""
        return sum(h.bytes for h in (*self.inputs, *self.constants) if kind is None or (h.kind or "other") == kind)

    @property
    def joins(self) -> list[Join]:
        """Pairs of names that turned out to be one dim of the program."""
        return self.program.joins

    @property
    def unnamed(self) -> list[str]:
        """The dims larger than 1 that have no name: op, shape, dim and source line."""
        _, _, missing = self.program.coverage()
        return [f"{op.name} {list(v.shape)} dim {i} at {op.source}" for op, v, i in missing]

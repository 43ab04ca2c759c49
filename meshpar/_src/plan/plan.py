"""The plan: a frozen record of the steps of every device, the sharding of every value, and the bytes of arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from jax.sharding import PartitionSpec

from ..compat.jax import axes_of_spec
from ..dims import Dims, format_dims
from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp
from ..hardware.compiler_constants import CompilerModel, compiler_model
from ..hardware.compiler_options import Options
from ..hardware.topology import Torus
from ..layout import AnyMesh, Layout, Rule, Spec, to_partition_spec
from ..program.ir import Join, Op, Program, Value
from ..program.pipeline import Pipeline
from ..records import record
from .collectives import Collective, dcn_bytes_sent
from .request import PlanRequest
from .shard_shapes import value_bytes
from .steps import Body, Loop, Run, Shard


@dataclass(frozen=True, slots=True)
class ShardedArray:
    """The sharding and bytes of an argument, result or constant of the program.

    Attributes:
      path: in the tree of arguments or results.
      dims: the name of every dim; None: it has none.
      shape: the global shape.
      dtype: its name.
      spec: as a ``PartitionSpec``.
      bytes: of the shard of one device; 0 for an array in host memory.
      kind: ``params``, ``opt``, ``constant``, or None.
      on_host: it is in host memory.
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
        """The record of a value of a program, with a spec, on a mesh with axes of these sizes; ``kind``: ``params``,
        ``opt``, ``constant`` or None."""
        path, dtype, host = value.path or "", str(value.aval.dtype), value.on_host
        size = 0.0 if host else value_bytes(value, spec, sizes)
        return cls(path, program.dims(value), value.shape, dtype, to_partition_spec(spec), size, kind, host)

    @property
    def split(self) -> list[tuple[str | None, tuple[str, ...]]]:
        """(name, axes) of every dim."""
        return list(zip(self.dims, axes_of_spec(self.spec, len(self.shape)), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form, with dims as text."""
        spec = [list(e) if isinstance(e, tuple) else e for e in self.spec]
        return {"path": self.path, "dims": format_dims(self.dims), "shape": list(self.shape), "dtype": self.dtype,
                "spec": spec, "bytes": self.bytes, "kind": self.kind, "on_host": self.on_host}  # fmt: skip


@record
class Placement:
    """The shardings of a value: ``made`` by the step of its op, maybe partial, and ``stored``, which later steps read."""

    made: Shard
    stored: Shard


Choice = Literal["xla", "ring", "pallas"]


@dataclass(frozen=True, eq=False, slots=True)
class Overlap:
    """How an all-gather before matmuls, or a reduce-scatter after them, is lowered.

    Attributes:
      kind: ``gather`` or ``scatter``.
      choice: ``xla``: a separate collective; ``ring``: blocks that are sent while others are multiplied, as collective-permutes;
        ``pallas``: the same ring in one kernel.
      reason: a sentence.
      tensor, axes: the name of the array, and the mesh axes of the collective.
      matmuls: the number of matmuls that the ring is overlapped with.
      count: runs per step; None: not known.
      exposed: choice → exposed seconds of one run (``pallas`` only if a kernel supports it); None: the chip is not known.
      origin: the first matmul.
      together: decided jointly for all activations that are gathered or scattered over these axes.
    """

    kind: Literal["gather", "scatter"]
    choice: Choice
    reason: str
    tensor: str
    axes: tuple[str, ...]
    matmuls: int
    count: int | None
    exposed: dict[str, float] | None
    origin: Op | None = None
    together: bool = False

    @property
    def gain(self) -> float | None:
        """Seconds per step that the choice saves compared with ``xla``; None: the chip is not known."""
        if self.exposed is None:
            return None
        return (self.exposed["xla"] - self.exposed[self.choice]) * (1 if self.count is None else self.count)

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON data: its attributes and ``gain``; ``source`` and ``module`` are the first matmul's, or ""."""
        return {
            "kind": self.kind, "choice": self.choice, "reason": self.reason, "gain": self.gain, "tensor": self.tensor,
            "axes": list(self.axes), "matmuls": self.matmuls, "count": self.count, "exposed": self.exposed,
            "source": self.origin.source if self.origin is not None else "",
            "module": self.origin.module if self.origin is not None else "",
        }  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class Transfer:
    """A copy between device memory and host memory.

    Attributes:
      to: ``host`` or ``device``.
      tensor, dims, shape, dtype: of the array.
      bytes: of one device in one run.
      count: runs per step; None: not known.
      source: the user's line, and the part of the model (:attr:`Op.location`).
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
        """Bytes per step; a loop of unknown length counts once."""
        return self.bytes * (1 if self.count is None else self.count)

    def to_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__}


@dataclass(frozen=True, slots=True)
class Arrival:
    """An argument whose array has another sharding than the step needs, so that each call reshards it before the step runs.

    Attributes:
      path: in the tree of arguments.
      source: the sharding of the array: a spec, or its devices in words.
      spec: the sharding that the step needs.
      bytes: that a device receives in each call, at most.
    """

    path: str
    source: str
    spec: PartitionSpec
    bytes: float

    @property
    def argument(self) -> str:
        """The name of the argument."""
        return self.path.partition("/")[0]

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "source": self.source, "spec": str(self.spec), "bytes": self.bytes}


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A program under a layout on a mesh: what each device stores, computes and sends, and why.

    A plan is made without devices and without compiling.

    Attributes:
      program: of the plan.
      request: its purpose: mesh, layout and options as requested.
      layout: the rules of ``requested_layout``, then rules for names of Flax metadata that are axes of the mesh.
      torus: axis → the stages of its devices on the torus of a slice.
      chip: of the devices; None: not known (CPUs that were not measured, an abstract mesh without a topology).
      body: the steps, with the shards of inputs (constants of the program, then its arguments) and outputs.
      placements: the shardings of every value.
      inputs, outputs: sharding and bytes of each argument and result.
      notes: sentences about dims that could not be sharded, and the like.
      arrivals: of a plan for arrays, those that each call reshards before the step runs; no other number of the plan includes them.
      lowering: ``"shard_map"``: the compiled program has the collectives of the plan; ``"jit"``: XLA partitions the program, and
        the numbers of the plan are estimates.
      lowering_reason: why ``lowering="auto"`` chose ``"jit"``: an op without a local form, or the seconds of both plans; None: it
        did not, or another lowering was requested.
      overlap: how all-gathers before matmuls and reduce-scatters after them are lowered; ``overlaps``: each decision.
      options: the compiler options.
      unsharded: bytes of the unsharded gradients that a device adds up over microbatches.
    """

    program: Program
    request: PlanRequest
    layout: Layout
    torus: Torus
    chip: Chip | None
    body: Body
    placements: dict[Value, Placement]
    inputs: tuple[ShardedArray, ...]
    outputs: tuple[ShardedArray, ...]
    notes: tuple[str, ...]
    lowering: str = "shard_map"
    lowering_reason: str | None = None
    overlap: str = "off"
    options: Options = field(default_factory=Options)
    overlaps: tuple[Overlap, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    unsharded: float = 0.0

    @property
    def mesh(self) -> AnyMesh:
        """The mesh."""
        return self.request.mesh

    @property
    def topology(self) -> str | None:
        """The slices of the mesh as text (``"v5p:8x8x8"``), if its devices do not tell."""
        return self.request.topology

    @property
    def donated(self) -> frozenset[int]:
        """Indices of the flat inputs whose memory the results may reuse."""
        return self.request.donated

    @property
    def requested_layout(self) -> Layout:
        """The layout as the user gave it."""
        return self.request.layout

    @cached_property
    def sizes(self) -> dict[str, int]:
        """axis → its size."""
        return dict(self.mesh.shape)

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The loops over layers that run as pipelines, with the bytes that a device sends to other stages in a step."""
        rolls = ("rearrange", "concatenate", "slice")  # of jnp.roll, by which activations move to the next stage
        moves = [c for c in self.collectives if c.origin is not None and c.origin.name in rolls]
        sent = {
            p.axes: sum(c.bytes * (c.count or 1) for c in moves if set(c.axes) <= set(p.axes))
            for p in self.program.pipelines
        }
        return tuple(replace(p, bytes_between_stages=sent[p.axes]) for p in self.program.pipelines)

    @property
    def pipeline(self) -> Pipeline | None:
        """The first of the ``pipelines``; None: the plan has none."""
        return self.pipelines[0] if self.program.pipelines else None

    def shard_bytes(self, shard: Shard) -> float:
        """Bytes of a shard on one device; uneven shards rounded up."""
        return value_bytes(shard.value, shard.spec, self.sizes)

    @cached_property
    def constants(self) -> tuple[ShardedArray, ...]:
        """The arrays that the function closes over; they are part of the compiled program, replicated."""
        program, shards = self.program, self.body.inputs[: len(self.program.constants)]
        return tuple(ShardedArray.of(program, s.value, s.spec, self.sizes, "constant") for s in shards)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of the step, with dims, axes, bytes, count, source line and cause, in the order of the steps."""
        return self.body.sends

    def rule_of(self, collective: Collective) -> Rule | None:
        """The first rule of the layout that the cause of a collective names; None: it names none."""
        at = {rule: collective.cause.find(f"`{rule}`") for rule in self.layout.rules}
        return min((r for r, n in at.items() if n >= 0), key=at.__getitem__, default=None)

    def scope_name(self, collective: Collective) -> str:
        """The name scope of a collective in the compiled program and in profiles: ``all-gather embed mlp | embed: data``. It has
        the kind, the names of the dims, and the rule that causes it (without one, the axes)."""
        rule = self.rule_of(collective)
        words = [collective.op, *filter(None, [collective.dims]), "|", str(rule or "+".join(collective.axes))]
        return " ".join(words).replace("/", "-").replace('"', "")

    def loop_name(self, loop: Loop) -> str:
        """The name scope of a loop in the compiled program and in profiles: ``loop over layers``, with the name of the dim that it
        slices; ``loop`` if it has none."""
        dims = (self.program.dim_name(shard.value, 0) for shard in loop.stacks)
        name = next(filter(None, dims), None)
        return f"loop over {name}" if name else "loop"

    @cached_property
    def uncounted_loops(self) -> tuple[Loop, ...]:
        """The loops that send bytes or have matmuls, and whose number of iterations is not known (``jax.lax.while_loop``).

        Bytes, FLOPs and times of a plan count one iteration of each.
        """
        return tuple(
            loop
            for loop in self.body.loops
            if loop.body.trip_count is None
            and (loop.body.sends or any(step.op.primitive.matmul_dims for step in loop.body.runs.values()))
        )

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every copy between device memory and host memory, in the order of the steps."""
        return tuple(self._transfers(self.body, 1))

    def _transfers(self, body: Body, count: int | None) -> Iterator[Transfer]:
        """The transfers of a body that runs ``count`` times per step (None: not known)."""
        for step in body.steps:
            for inner in step.bodies:
                yield from self._transfers(
                    inner, None if count is None or inner.trip_count is None else count * inner.trip_count
                )
            if not isinstance(step, Run) or step.op.primitive.family != "transfer":
                continue
            for source, out in zip(step.operands, step.results, strict=True):
                if out.on_host == (source is not None and source.on_host):
                    continue
                value = out.value
                yield Transfer(
                    "host" if out.on_host else "device", value.path or (source and source.value.path) or step.op.name,
                    format_dims(self.program.dims(value)), value.shape, str(value.aval.dtype),
                    self.shard_bytes(out), count, step.op.location,
                )  # fmt: skip

    @property
    def runs(self) -> dict[Op, Run]:
        """op → the first step that runs it; ops on input-independent values run once per use."""
        return self.body.runs

    @property
    def compiler(self) -> CompilerModel:
        """Measured constants of the compiler for the chip; the ones of a TPU without measurements if the chip is not known."""
        return compiler_model(None) if self.chip is None else self.chip.compiler

    @cached_property
    def sync_collectives(self) -> frozenset[CollectiveOp]:
        """The kinds of collectives that are synchronous on its chip with its compiler options."""
        return self.options.sync_collectives(self.chip)

    def is_async(self, op: CollectiveOp) -> bool:
        """Whether collectives of a kind are asynchronous, so that kernels may run concurrently."""
        return op not in self.sync_collectives

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in one step; loops of unknown length count once."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def dcn_bytes(self) -> float:
        """The part of :attr:`bytes_sent` that goes to other slices (or nodes of GPUs)."""
        return sum(dcn_bytes_sent(c, self.torus) * c.runs for c in self.collectives)

    @property
    def comm_seconds(self) -> float:
        """Seconds of all collectives of one step, run sequentially; loops of unknown length count once."""
        return sum(c.total_seconds for c in self.collectives)

    def argument_bytes(self, kind: str | None = None) -> float:
        """Bytes of the inputs and constants on each device, all or of one kind (``params``, ``opt``, ``constant``, ``other``)."""
        return sum(h.bytes for h in (*self.inputs, *self.constants) if kind is None or (h.kind or "other") == kind)

    @property
    def joins(self) -> list[Join]:
        """Pairs of names that inference joined into one dim of the program."""
        return self.program.joins

    @property
    def unnamed(self) -> list[str]:
        """The dims larger than 1 of results of ops that have no name: op, shape, dim and source line."""
        _, _, missing = self.program.coverage()
        return [f"{op.name} {list(v.shape)} dim {i} at {op.location}" for op, v, i in missing]

"""The steps of a plan: what every device runs, in order, in SSA form, nested by body.

Every step reads shards and makes shards; every shard is made once. The steps fully determine the ``"shard_map"`` lowering:
collectives, their algorithms and order, and optimization barriers. The ``"jit"`` lowering uses their specs as sharding constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from jax.extend.core import JaxprEqn

from meshpar_kernels.collective_matmul import Dot, FusedGather, FusedScatter

from ..hardware.collective_algorithms import ALGORITHMS, Algorithm, AlgorithmName
from ..iterables import operands_first
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from ..records import record
from ..rules.rule import Kind
from .collectives import Collective
from .resharding import Move


@record
class Shard:
    """A value with a sharding, made by one step.

    Attributes:
      value: the value of the program.
      spec: for every dim, the axes that shard it.
      partial: the axes over which it is partial: devices along them have terms that still have to be combined.
      kind: the reduction that combines these terms.
      is_constant: it is input-independent (iotas, masks, zeros): each device computes its shard.
    """

    value: Value
    spec: Spec
    partial: tuple[str, ...] = ()
    kind: Kind = "sum"
    is_constant: bool = False

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory, as the program has its value there."""
        return self.value.on_host

    def copy(self) -> Shard:
        """Another shard of the same value with the same sharding, for a step that returns its operand."""
        return Shard(self.value, self.spec, self.partial, self.kind)


@record
class Step:
    """Base class of the steps of a plan.

    Attributes:
      op: the op of the program that the step belongs to; None: none, as for the resharding of a result of the program.
    """

    op: Op | None

    @property
    def reads(self) -> tuple[Shard, ...]:
        """The shards that the step reads."""
        return ()

    @property
    def makes(self) -> tuple[Shard, ...]:
        """The shards that the step makes."""
        return ()

    @property
    def sends(self) -> tuple[Collective, ...]:
        """The collectives of the step itself, in order, without the collectives of its bodies."""
        return ()

    @property
    def bodies(self) -> tuple[Body, ...]:
        """The bodies of a loop, branch or call; empty for other steps."""
        return ()


StepKind = TypeVar("StepKind", bound=Step)


@dataclass(frozen=True, eq=False)
class Body:
    """The steps of the program, of a loop's body, of a branch or of a call.

    Attributes:
      frame: the jaxpr at this call site.
      inputs: the arguments of the program; of a loop's body the carries, then the slices of its stacks. Other shards that its steps
        read are made by steps before the loop, branch or call.
      steps: in order.
      outputs: the results; None: no later step reads this one.
      trip_count: number of runs each time the loop runs; 1 for branches and calls; None: not known.
    """

    frame: Frame
    inputs: tuple[Shard, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Shard | None, ...]
    trip_count: int | None = 1

    @cached_property
    def all_steps(self) -> tuple[Step, ...]:
        """All steps in order; after a loop, branch or call come the steps of its bodies."""
        out: list[Step] = []
        after = 0
        for k in self.nested:
            out += self.steps[after : k + 1]
            after = k + 1
            for body in self.steps[k].bodies:
                out += body.all_steps
        return (*out, *self.steps[after:])

    def walk(self, count: int = 1) -> Iterator[tuple[Step, int]]:
        """(step, number of runs) of all steps; before a loop, branch or call come the steps of its bodies.

        Args:
          count: how often the body runs. A loop of unknown length counts once.
        """
        for step in self.steps:
            for body in step.bodies:
                yield from body.walk(count * (1 if body.trip_count is None else body.trip_count))
            yield step, count

    @cached_property
    def sends(self) -> tuple[Collective, ...]:
        """The collectives of :attr:`all_steps`, in order."""
        return tuple(c for step in self.all_steps for c in step.sends)

    @cached_property
    def runs(self) -> dict[Op, Run]:
        """op → the first step that runs it."""
        first: dict[Op, Run] = {}
        for step in self.all_steps:
            if isinstance(step, Run):
                first.setdefault(step.op, step)
        return first

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The loops of :attr:`all_steps`, in order."""
        return tuple(step for step in self.all_steps if isinstance(step, Loop))

    @cached_property
    def nested(self) -> tuple[int, ...]:
        """The indices of the steps with bodies."""
        return tuple(k for k, step in enumerate(self.steps) if isinstance(step, Loop | Branch | Call))

    @cached_property
    def made(self) -> tuple[Shard, ...]:
        """The shards that its steps make."""
        return tuple(s for step in self.steps for s in step.makes)

    @cached_property
    def free(self) -> tuple[Shard, ...]:
        """The shards that its steps read, but that neither its steps nor its inputs have."""
        made: set[Shard] = set(self.inputs)
        free: dict[Shard, None] = {}
        for step in self.steps:
            for inner in step.bodies:
                free.update((s, None) for s in inner.free if s not in made)
            if not isinstance(step, Call):
                free.update((s, None) for s in step.reads if s not in made)
            made.update(step.makes)
        return tuple(free)

    @cached_property
    def with_calls(self) -> tuple[Step, ...]:
        """The steps in order, with every call replaced by its steps, as JAX inlines them."""
        out: list[Step] = []
        after = 0
        for k in self.nested:
            if isinstance(step := self.steps[k], Call):
                out += (*self.steps[after:k], *step.body.with_calls)
                after = k + 1
        return (*out, *self.steps[after:])

    def with_steps(self, steps: Sequence[Step]) -> Body:
        """The body with other steps; the same object if they are equal."""
        steps = tuple(steps)
        return self if steps == self.steps else replace(self, steps=steps)


@record
class Constant(Step):
    """Makes a device's shard of a literal or of a constant of a jaxpr."""

    result: Shard
    array: Any

    @property
    def makes(self) -> tuple[Shard, ...]:
        return (self.result,)


def dot_of(eqn: JaxprEqn, side: int) -> Dot:
    """A ``dot_general`` whose operand ``side`` is gathered, as :mod:`meshpar_kernels` describes it."""
    p = eqn.params
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    numbers = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
    return Dot(numbers, side, p["precision"], p["preferred_element_type"])


@record
class GatherRing:
    """An all-gather as a ring: each block is multiplied as it arrives.

    Attributes:
      dim, axes: the dim that is gathered, and over which axes.
      dots: (the step of a matmul that reads the gathered array, the index of this operand).
      keep_gathered: other steps read the gathered array too, so the blocks are also concatenated.
      fused: the Pallas kernel that runs it; None: it is a loop of collective-permutes.
    """

    dim: int
    axes: tuple[str, ...]
    dots: tuple[tuple[Run, int], ...]
    keep_gathered: bool
    fused: FusedGather | None = None


@record
class ReduceRing:
    """A reduce-scatter of a sum of matmuls as a ring: each block is sent while the next one is computed.

    Attributes:
      dim, axes: the dim that is scattered, and over which axes.
      leaves: (result, dim that is scattered) of each matmul.
      num_blocks: the number of blocks.
      fused: the Pallas kernel that runs it; None: it is a loop of collective-permutes.
    """

    dim: int
    axes: tuple[str, ...]
    leaves: tuple[tuple[Shard, int], ...]
    num_blocks: int
    fused: FusedScatter | None = None


@record
class ShardingChange(Step):
    """Base class of the steps that change the sharding of a value.

    Attributes:
      source, result: the shard before and after.
      path: the moves, in order.
      collectives: the collectives of the step, in order.
    """

    source: Shard
    result: Shard
    path: tuple[Move, ...]
    collectives: tuple[Collective, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the shards that it makes, in order; all but the last one exist within the step only."""
        return tuple(m.after for m in self.path)

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (self.source,)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return (self.result,)

    @property
    def sends(self) -> tuple[Collective, ...]:
        return self.collectives


@record
class Reshard(ShardingChange):
    """The step that changes the spec of a value, by slices and collectives.

    Attributes:
      copy: the result is a copy for the steps that read it; otherwise it is the current shard of the value from this step on.
      ring: the all-gather is overlapped with matmuls as a ring; None: it is a separate collective.
      separate_buffer: the gathered array is copied to another buffer.
    """

    copy: bool = False
    ring: GatherRing | None = None
    separate_buffer: bool = False

    @property
    def reads(self) -> tuple[Shard, ...]:
        dots = () if self.ring is None else self.ring.dots
        return (self.source, *(s for run, side in dots if (s := run.operands[1 - side]) is not None))


@record
class Scatter:
    """One reduce-scatter of a dim over mesh axes, by an algorithm."""

    dim: int
    axes: tuple[str, ...]
    algorithm: AlgorithmName

    @property
    def entry(self) -> Algorithm:
        """Its algorithm, with traits."""
        return ALGORITHMS[self.algorithm]


def spec_after(spec: Spec, scatters: Iterable[Scatter]) -> Spec:
    """The spec of a partial shard with the spec ``spec`` after some reduce-scatters."""
    for s in scatters:
        spec = tuple((*entry, *s.axes) if i == s.dim else entry for i, entry in enumerate(spec))
    return spec


@record
class Reduce(ShardingChange):
    """Reduces a partial value: reduce-scatters, an all-reduce over the other axes, then the moves of ``path``.

    Attributes:
      scatters: the reduce-scatters, in order.
      over: axes of the all-reduce; reductions without one all-gather the terms and combine them locally.
      ring: the first reduce-scatter is overlapped with the matmuls that it sums, as a ring; None: it is a separate collective.
    """

    scatters: tuple[Scatter, ...] = ()
    over: tuple[str, ...] = ()
    ring: ReduceRing | None = None

    @property
    def scattered(self) -> Spec:
        """The spec after the reduce-scatters."""
        return spec_after(self.source.spec, self.scatters)

    @property
    def specs(self) -> tuple[Spec, ...]:
        first, ends = self.source.spec, range(1, len(self.scatters) + 1)
        scattered = [spec_after(first, self.scatters[:k]) for k in ends]
        return (*scattered, *([self.scattered] if self.over else []), *(m.after for m in self.path))


@record
class Run(Step):
    """The step that runs an op on the shards of each device.

    Attributes:
      operands: its shards; None: a literal of the equation.
      results: its shards.
      axes: the axes of every factor of the op's rule; None: the op is elementwise.
      collectives: sent by its local form (halo exchanges, all-to-alls).
      in_ring: ``"gather"``: the ring that gathers one of its operands computes it; ``"reduce"``: the ring that reduces its result
        computes it; None: it is computed by itself.
      rows: of a matmul with one row, the number of rows with which it is computed; 1: as it is.
      form: of a kernel with several forms, 0 or one more than an index of :attr:`program.kernels.Kernel.forms`.
    """

    op: Op
    operands: tuple[Shard | None, ...]
    results: tuple[Shard, ...]
    axes: tuple[tuple[str, ...], ...] | None = None
    collectives: tuple[Collective, ...] = ()
    in_ring: str | None = None
    rows: int = 1
    form: int = 0

    @property
    def reads(self) -> tuple[Shard, ...]:
        operands = self.operands
        return operands if None not in operands else tuple(s for s in operands if s is not None)  # type: ignore[return-value]

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.results

    @property
    def sends(self) -> tuple[Collective, ...]:
        return self.collectives


@record
class Loop(Step):
    """The step that runs a ``scan`` or ``while``.

    Attributes:
      consts: loop-invariant shards that its bodies read.
      hoisted: resharded copies of loop-invariant values, made before the loop.
      inits: first values of the carries. If the carry is partial in the body and the first value is not, devices with index 0 along
        these axes start with it, the others with zeros.
      stacks: of a scan, the arrays that it slices.
      inner: of a scan its body; of a while its condition and its body.
      results: last values of the carries, then the arrays that the loop stacks.
    """

    op: Op
    consts: tuple[Shard, ...]
    hoisted: tuple[Shard, ...]
    inits: tuple[Shard, ...]
    stacks: tuple[Shard, ...]
    inner: tuple[Body, ...]
    results: tuple[Shard, ...]

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (*self.consts, *self.hoisted, *self.inits, *self.stacks)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.results

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.inner

    @property
    def body(self) -> Body:
        """The body of a scan or while, not its condition."""
        return self.inner[-1]


@record
class Branch(Step):
    """The step that runs one branch of a ``cond``.

    Attributes:
      index: the index of the branch that runs; None: a literal of the equation.
      operands: the shards that the branches read.
      branches: their bodies.
    """

    op: Op
    index: Shard | None
    operands: tuple[Shard, ...]
    branches: tuple[Body, ...]
    results: tuple[Shard, ...]

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (*(() if self.index is None else (self.index,)), *self.operands)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.results

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.branches


@record
class Call(Step):
    """A call (``jit``, ``checkpoint``, ``custom_jvp``, …): the steps of its body run once.

    Later steps read the shards that the body makes; its outputs are the shards of the function's results.
    """

    op: Op
    body: Body

    @property
    def reads(self) -> tuple[Shard, ...]:
        return self.body.free

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.body.made

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.body,)


@record
class Barrier(Step):
    """An optimization barrier: the results equal the sources, but are available only after the shards in ``after``.

    Attributes:
      opaque: the compiler can't move a cast, slice or copy of the sources across it either.
    """

    sources: tuple[Shard, ...]
    results: tuple[Shard, ...]
    after: tuple[Shard, ...] = ()
    opaque: bool = False

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (*self.sources, *self.after)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.results


def is_deferred(step: Step) -> bool:
    """Whether a step is placed just before the first one that reads its result: copies, constants, input-independent values."""
    if isinstance(step, Run):
        return bool(step.results) and step.results[0].is_constant
    return isinstance(step, Constant) or (isinstance(step, Reshard) and step.copy)


def topological_order(
    steps: Sequence[Step], outputs: Iterable[Shard | None] = (), deferred: Callable[[Step], bool] = is_deferred
) -> tuple[Step, ...]:
    """The steps sorted so that each follows the steps whose results it reads, otherwise in the given order.

    Deferred steps are placed just before the first step that reads their result; those that no step reads are left out.

    Args:
      outputs: shards that are read after all steps.
      deferred: whether a step is deferred.
    """
    maker: dict[Shard, Step] = {}
    for step in steps:
        for shard in step.makes:
            maker.setdefault(shard, step)
    missing = set(maker)  # shards of steps that are not placed yet
    placed: dict[Step, None] = {}

    def read_by(step: Step) -> list[Step]:
        """The steps whose results a step reads."""
        return [maker[shard] for shard in step.reads if shard in maker]

    def place(ordered: Iterable[Step]) -> None:
        """Place steps after the others."""
        for step in ordered:
            placed[step] = None
            missing.difference_update(step.makes)

    for step in steps:
        if step not in placed and not deferred(step):
            place([step] if missing.isdisjoint(step.reads) else operands_first(step, read_by, placed))
    for shard in outputs:
        if shard in maker:
            place(operands_first(maker[shard], read_by, placed))
    return tuple(placed)


def without_unread(steps: Sequence[Step], read: set[Shard | None]) -> tuple[Step, ...]:
    """Steps in order, without ops and changes of shardings whose results nobody reads, as an op that its readers recompute.

    Args:
      read: shards that are read after the steps; those that the steps read are added.
    """
    needed: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Call):  # later steps read the shards of its body
            needed.append(with_bodies(step, (step.body.with_steps(without_unread(step.body.steps, read)),)))
            continue
        pure = isinstance(step, Constant | ShardingChange) or (isinstance(step, Run) and not step.op.eqn.effects)
        if not pure or not read.isdisjoint(step.makes):
            read.update(step.reads)
            needed.append(step)
    return tuple(reversed(needed))


def rewrite_bodies(body: Body, change: Callable[[Body], Body]) -> Body:
    """A body after ``change`` of all bodies inside it, innermost first, then of itself; the same object if nothing changed."""
    if body.nested:
        steps = list(body.steps)
        for k in body.nested:
            steps[k] = with_bodies(steps[k], tuple(rewrite_bodies(b, change) for b in steps[k].bodies))
        body = body.with_steps(steps)
    return change(body)


def replace_steps(
    body: Body, kinds: type[StepKind] | tuple[type[StepKind], ...], change: Callable[[StepKind], Iterable[Step]]
) -> Body:
    """A body with every step of some kinds replaced by ``change(step)``, also in its calls; the same object if nothing changed."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, kinds):
            steps += change(step)
        elif isinstance(step, Call):
            steps.append(with_bodies(step, (replace_steps(step.body, kinds, change),)))
        else:
            steps.append(step)
    return body.with_steps(steps)


def with_bodies(step: Step, bodies: tuple[Body, ...]) -> Step:
    """A step with other bodies; the same object if they are the same."""
    if bodies == step.bodies:
        return step
    if isinstance(step, Loop):
        return replace(step, inner=bodies)
    if isinstance(step, Branch):
        return replace(step, branches=bodies)
    assert isinstance(step, Call)
    return replace(step, body=bodies[0])

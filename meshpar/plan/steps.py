"""The steps of a plan: what every device runs, in order, in SSA form and nested by body.

Every step reads shards and makes shards, each of them once. Nothing is left to whoever reads the steps: what is sent, by which
algorithm, where, in which order and behind which barrier stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from ..hardware.algorithms import ALGORITHMS, Algorithm, AlgorithmName
from ..layout import Spec
from ..program.ir import Frame, Op, Value
from ..rules.rule import Kind
from .collectives import Collective
from .resharding import Move


@dataclass(frozen=True, eq=False, slots=True)
class Shard:
    """One value as every device holds it between two steps.

    Attributes:
      value: the value of the program.
      spec: of every dim, the axes that split it.
      partial: the axes over which it is unreduced: devices along them hold terms, not copies.
      kind: how these terms combine.
      is_constant: it follows from no data (iotas, masks, zeros): each device makes the part that it needs.
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


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """What all steps have.

    Attributes:
      op: the op of the program that the step is for.
    """

    op: Op | None

    @property
    def reads(self) -> tuple[Shard, ...]:
        """The shards that it reads."""
        return ()

    @property
    def makes(self) -> tuple[Shard, ...]:
        """The shards that it makes."""
        return ()

    @property
    def sends(self) -> tuple[Collective, ...]:
        """The collectives of the step itself, in order; those of its bodies are in their steps."""
        return ()

    @property
    def bodies(self) -> tuple[Body, ...]:
        return ()


StepKind = TypeVar("StepKind", bound=Step)


@dataclass(frozen=True, eq=False)
class Body:
    """The steps of the program, of a loop's body, of a branch or of a call.

    Attributes:
      frame: the jaxpr at this call site.
      inputs: what it is given: arguments of the program; what a loop carries, then slices of what it runs over. All else that its
        steps read is made by steps before the body.
      steps: in order.
      outputs: what it returns; None: nothing that a later step reads.
      trip_count: how often it runs each time the step that holds it runs; None: not known.
    """

    frame: Frame
    inputs: tuple[Shard, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Shard | None, ...]
    trip_count: int | None = 1

    @cached_property
    def all_steps(self) -> tuple[Step, ...]:
        """All steps in order, those of bodies after the step that holds them."""
        out: list[Step] = []
        after = 0
        for k in self.nested:
            out += self.steps[after : k + 1]
            after = k + 1
            for body in self.steps[k].bodies:
                out += body.all_steps
        return (*out, *self.steps[after:])

    def walk(self, count: int = 1) -> Iterator[tuple[Step, int]]:
        """(step, number of runs) of all steps, those of bodies before the step that has them.

        Args:
          count: how often the body runs. A loop of unknown length counts once.
        """
        for step in self.steps:
            for body in step.bodies:
                yield from body.walk(count * (1 if body.trip_count is None else body.trip_count))
            yield step, count

    @cached_property
    def sends(self) -> tuple[Collective, ...]:
        """What its steps send, in order, those of bodies after the step that holds them."""
        return tuple(c for step in self.all_steps for c in step.sends)

    @cached_property
    def runs(self) -> dict[Op, Run]:
        """The first step that runs each op."""
        found: dict[Op, Run] = {}
        for step in self.all_steps:
            if isinstance(step, Run):
                found.setdefault(step.op, step)
        return found

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops in order, those of bodies after the step that holds them."""
        out: list[Loop] = []
        for step in (self.steps[k] for k in self.nested):
            out += (step,) if isinstance(step, Loop) else ()
            for body in step.bodies:
                out += body.loops
        return tuple(out)

    @cached_property
    def nested(self) -> tuple[int, ...]:
        """The places of steps with bodies."""
        return tuple(k for k, step in enumerate(self.steps) if isinstance(step, Loop | Branch | Call))

    @cached_property
    def made(self) -> tuple[Shard, ...]:
        """What its steps make."""
        return tuple(s for step in self.steps for s in step.makes)

    @cached_property
    def free(self) -> tuple[Shard, ...]:
        """What its steps read and do not make, its inputs aside."""
        return free_shards(self)

    @cached_property
    def with_calls(self) -> tuple[Step, ...]:
        """The steps in order, those of calls in place of the call: what JAX traces into one body."""
        out: list[Step] = []
        after = 0
        for k in self.nested:
            if isinstance(step := self.steps[k], Call):
                out += (*self.steps[after:k], *step.body.with_calls)
                after = k + 1
        return (*out, *self.steps[after:])

    def with_steps(self, steps: Sequence[Step]) -> Body:
        """The body with other steps; the same object where these are the same."""
        steps = tuple(steps)
        return self if steps == self.steps else replace(self, steps=steps)


@dataclass(frozen=True, eq=False, slots=True)
class Constant(Step):
    """This device's part of a literal or of a constant of a jaxpr."""

    result: Shard
    array: Any

    @property
    def makes(self) -> tuple[Shard, ...]:
        return (self.result,)


@dataclass(frozen=True, eq=False, slots=True)
class RingDot:
    """A product of a gather that is sent block by block.

    Attributes:
      op: the product.
      side: which of its operands is gathered.
      other: the other one, as the product takes it; None: a literal.
      result: what it makes.
    """

    op: Op
    side: int
    other: Shard | None
    result: Shard


@dataclass(frozen=True, eq=False, slots=True)
class GatherRing:
    """An all-gather that is sent block by block, each multiplied as it arrives.

    Attributes:
      dim, axes: the dim that is gathered, over these axes.
      dots: the products.
      keep_gathered: others read the gathered value too.
      fused: the kernel that runs it; None: a ring of permutes.
    """

    dim: int
    axes: tuple[str, ...]
    dots: tuple[RingDot, ...]
    keep_gathered: bool
    fused: FusedGather | None = None


@dataclass(frozen=True, eq=False, slots=True)
class ReduceRing:
    """A sum of products that is reduce-scattered block by block, each sent while the next is made.

    Attributes:
      dim, axes: the dim over which it is scattered, and over what.
      leaves: the results of the products, each with its dim that is scattered.
      num_blocks: the number of blocks.
      fused: the kernel that runs it; None: a ring of permutes.
    """

    dim: int
    axes: tuple[str, ...]
    leaves: tuple[tuple[Shard, int], ...]
    num_blocks: int
    fused: FusedScatter | None = None


@dataclass(frozen=True, eq=False, slots=True)
class ShardingChange(Step):
    """A value comes to lie otherwise.

    Attributes:
      source, result: how it lies before and after.
      path: the moves, in order.
      collectives: what is sent, in order.
    """

    source: Shard
    result: Shard
    path: tuple[Move, ...]
    collectives: tuple[Collective, ...]

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (self.source,)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return (self.result,)

    @property
    def sends(self) -> tuple[Collective, ...]:
        return self.collectives


@dataclass(frozen=True, eq=False, slots=True)
class Reshard(ShardingChange):
    """A value is brought into another spec.

    Attributes:
      copy: for the steps that read it; otherwise it is where the value rests from then on.
      ring: it is sent block by block, beside products.
      separate_buffer: what is gathered is put into other memory than it was gathered in.
    """

    copy: bool = False
    ring: GatherRing | None = None
    separate_buffer: bool = False

    @property
    def reads(self) -> tuple[Shard, ...]:
        others = () if self.ring is None else self.ring.dots
        return (self.source, *(dot.other for dot in others if dot.other is not None))


@dataclass(frozen=True, eq=False, slots=True)
class Scatter:
    """One reduce-scatter of a dim over mesh axes, by an algorithm."""

    dim: int
    axes: tuple[str, ...]
    algorithm: AlgorithmName

    @property
    def entry(self) -> Algorithm:
        """Its algorithm, with traits."""
        return ALGORITHMS[self.algorithm]


@dataclass(frozen=True, eq=False, slots=True)
class Reduce(ShardingChange):
    """Terms are combined over the axes over which a value is unreduced; then it goes along the path to where it rests.

    Attributes:
      scatters: reduce-scatters, the first ones; over: axes over which it is all-reduced then (or gathered, and combined).
      ring: the first reduce-scatter is sent block by block, beside the products that it sums.
    """

    scatters: tuple[Scatter, ...] = ()
    over: tuple[str, ...] = ()
    ring: ReduceRing | None = None

    @property
    def scattered(self) -> Spec:
        """The spec after the reduce-scatters."""
        spec = self.source.spec
        for s in self.scatters:
            spec = tuple((*entry, *s.axes) if i == s.dim else entry for i, entry in enumerate(spec))
        return spec


@dataclass(frozen=True, eq=False, slots=True)
class Run(Step):
    """One device's part of an op.

    Attributes:
      operands: None: a literal of the equation.
      axes: of every factor of the op's rule; None: an elementwise op.
      collectives: what its local form sends itself.
      in_ring: ``"gather"``: made by the ring that gathers one of its operands; ``"reduce"``: made block by block when the sum that
        it is a term of is reduced.
    """

    op: Op
    operands: tuple[Shard | None, ...]
    results: tuple[Shard, ...]
    axes: tuple[tuple[str, ...], ...] | None = None
    collectives: tuple[Collective, ...] = ()
    in_ring: str | None = None

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


@dataclass(frozen=True, eq=False, slots=True)
class Loop(Step):
    """A ``scan`` or ``while``.

    Attributes:
      consts: what its bodies only read, and which copies of that are made before it (``hoisted``).
      inits: the first values of what it carries. Where the body's input is unreduced and this is not, the devices along the first
        of those axes bring it, the others zeros.
      stacks: of a scan, what it runs over.
      bodies: of a scan the body; of a while the condition and the body.
      results: last values of what it carries, then what it stacks up.
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
        """The body proper."""
        return self.inner[-1]


@dataclass(frozen=True, eq=False, slots=True)
class Branch(Step):
    """A ``cond``: one of its bodies runs.

    Attributes:
      index: which one; None: a literal of the equation.
      operands: what the branches read.
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


@dataclass(frozen=True, eq=False, slots=True)
class Call(Step):
    """A function that the program calls (``jit``, ``checkpoint``, ``custom_jvp``, …): its steps run in place.

    Its body's outputs are the shards of the function's results, as later steps read them.
    """

    op: Op
    body: Body

    def with_body(self, body: Body) -> Call:
        """The call with another body; the same object where that is the same."""
        return self if body is self.body else Call(self.op, body)

    @property
    def reads(self) -> tuple[Shard, ...]:
        return self.body.free

    @property
    def makes(self) -> tuple[Shard, ...]:
        return self.body.made

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.body,)


@dataclass(frozen=True, eq=False, slots=True)
class Barrier(Step):
    """The results are the sources, to be had only once ``after`` are there too.

    Attributes:
      opaque: no cast, place or copy of the sources can be read through it either.
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


@dataclass(frozen=True, eq=False, slots=True)
class Order(Step):
    """The result is the source, lying in memory with its dims in an order: the outermost first."""

    source: Shard
    result: Shard
    order: tuple[int, ...]

    @property
    def reads(self) -> tuple[Shard, ...]:
        return (self.source,)

    @property
    def makes(self) -> tuple[Shard, ...]:
        return (self.result,)


def free_shards(body: Body) -> tuple[Shard, ...]:
    """What the steps of a body read and do not make, its inputs aside."""
    made: set[Shard] = set(body.inputs)
    found: dict[Shard, None] = {}
    for step in body.steps:
        for inner in step.bodies:
            found.update((s, None) for s in inner.free if s not in made)
        if not isinstance(step, Call):
            found.update((s, None) for s in step.reads if s not in made)
        made.update(step.makes)
    return tuple(found)


def is_deferred(step: Step) -> bool:
    """Whether a step stands wherever its result is first read: copies, constants, and what is made from no data."""
    if isinstance(step, Run):
        return bool(step.results) and step.results[0].is_constant
    return isinstance(step, Constant) or (isinstance(step, Reshard) and step.copy)


def topological_order(steps: Sequence[Step], outputs: Iterable[Shard | None] = ()) -> tuple[Step, ...]:
    """The steps in an order in which each comes after those whose results it reads: theirs, as far as that allows.

    Steps that are :func:`is_deferred` come just before the first that reads them, or not at all.

    Args:
      outputs: what is read after them.
    """
    maker: dict[Shard, Step] = {}
    for step in steps:
        for shard in step.makes:
            maker.setdefault(shard, step)
    missing = set(maker)  # what steps make that have no place yet
    out: list[Step] = []
    done: set[Step] = set()

    def place(first: Step) -> None:
        todo: list[tuple[Step, Iterator[Shard]]] = [(first, iter(first.reads))]
        done.add(first)
        while todo:
            step, reads = todo[-1]
            for shard in reads:
                needed = maker.get(shard)
                if needed is not None and needed not in done:
                    done.add(needed)
                    todo.append((needed, iter(needed.reads)))
                    break
            else:
                out.append(step)
                missing.difference_update(step.makes)
                todo.pop()

    for step in steps:
        if step in done or is_deferred(step):
            continue
        if missing.isdisjoint(step.reads):
            done.add(step)
            out.append(step)
            missing.difference_update(step.makes)
        else:
            place(step)
    for shard in outputs:
        needed = None if shard is None else maker.get(shard)
        if needed is not None and needed not in done:
            place(needed)
    return tuple(out)


def with_deferred(steps: Sequence[Step], floating: Sequence[Step], outputs: Iterable[Shard | None]) -> tuple[Step, ...]:
    """Steps in their order, each behind those of the floating steps whose results it is the first to read."""
    if not floating:
        return tuple(steps)
    left: dict[Shard, Step] = {}
    for step in floating:
        for shard in step.makes:
            left.setdefault(shard, step)
    out: list[Step] = []

    def place(reads: Iterable[Shard]) -> None:
        todo: list[tuple[Step | None, Iterator[Shard]]] = [(None, iter(reads))]
        while todo:
            step, shards = todo[-1]
            for shard in shards:
                needed = left.get(shard)
                if needed is not None:
                    for made in needed.makes:
                        if left.get(made) is needed:
                            del left[made]
                    todo.append((needed, iter(needed.reads)))
                    break
            else:
                todo.pop()
                if step is not None:
                    out.append(step)

    for step in steps:
        reads = step.reads
        if not left.keys().isdisjoint(reads):
            place(reads)
        out.append(step)
    place(s for s in outputs if s is not None)
    return tuple(out)


def rewrite_bodies(body: Body, change: Callable[[Body], Body]) -> Body:
    """A body with every body inside it, then itself, changed; the same object where nothing is."""
    if body.nested:
        steps = list(body.steps)
        for k in body.nested:
            steps[k] = _with_bodies(steps[k], tuple(rewrite_bodies(b, change) for b in steps[k].bodies))
        body = body.with_steps(steps)
    return change(body)


def replace_steps(
    body: Body, kinds: type[StepKind] | tuple[type[StepKind], ...], change: Callable[[StepKind], Iterable[Step]]
) -> Body:
    """A body with others in place of every step of some kinds, in its calls too; the same object where nothing is changed."""
    steps: list[Step] = []
    for step in body.steps:
        if isinstance(step, kinds):
            steps += change(step)
        elif isinstance(step, Call):
            steps.append(step.with_body(replace_steps(step.body, kinds, change)))
        else:
            steps.append(step)
    return body.with_steps(steps)


def _with_bodies(step: Step, bodies: tuple[Body, ...]) -> Step:
    if bodies == step.bodies:
        return step
    if isinstance(step, Loop):
        return replace(step, inner=bodies)
    if isinstance(step, Branch):
        return replace(step, branches=bodies)
    assert isinstance(step, Call)
    return replace(step, body=bodies[0])

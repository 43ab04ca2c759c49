"""The schedule of each computation: its kernels, collectives and copies to and from the host, with start and end.

A list schedule of one run of a computation (the program, or the body of a loop) on these resources: the compute units, the links
between chips, and each direction of the link to the host. Time, memory and the report read it:

- :func:`async_collectives` lists the collectives of weights and gradients that no kernel of the computation has to wait for;
- :func:`concurrent_matmuls` finds, for each other asynchronous collective, the matmuls that can run meanwhile;
- :func:`schedules` orders the kernels, and gives kernels and collectives their seconds.

All follow from the plan, its chip and its compiler options. ``Plan.is_async`` says which kinds of collectives are asynchronous.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import TypeVar

from ..hardware.collective_ops import CollectiveOp
from ..iterables import operands_first
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.shard_shapes import itemsize
from ..plan.steps import Reduce, Reshard, Run, Step
from .buffer_roles import buffer_roles
from .caching import cached_on_plan
from .collective_matmul import merged_seconds, vector_seconds
from .device_computation import computation_of
from .fusion import Buffer, Computation, Kernel, Kind
from .kernel_time import PACKED, kernel_times

T = TypeVar("T", bound=Hashable)
MIN_MERGING_DEVICES = 64
"""The fewest devices for which the TPU compiler (libtpu 0.0.42) was observed to merge collectives of a computation."""


@dataclass(frozen=True, slots=True)
class AsyncCollective:
    """How a collective overlaps whose result no kernel of its computation depends on, or whose operand none computes.

    Attributes:
      prefetched: its operand comes from outside the computation (an all-gather of a weight), so that it is sent before it is
        needed. Otherwise its result only leaves the computation, or is a gradient.
      until_end: its operand is live until the computation ends, since it is sent there.
      postponed: the matmul that computes its operand runs at the end of the computation.
      separate_result: its result has a buffer of its own, other than its operand's.
    """

    prefetched: bool
    until_end: bool = False
    postponed: bool = False
    separate_result: bool = False


@cached_on_plan
def async_collectives(plan: Plan) -> dict[Computation, dict[Kernel, AsyncCollective]]:
    """Computation → its ``MOVE`` kernels whose collectives other kernels need not wait for → how each overlaps.

    With reductions on the SparseCores, the TPU compiler (libtpu 0.0.42, default effort) runs the matmuls of gradients at the end of
    a loop body, whatever barriers precede them. It sends reductions of gradients that block programs at the end of the body.
    """
    chip, role_of = plan.chip, buffer_roles(plan)
    tpu = chip is not None and bool(chip.torus)

    def of_result(move: Kernel) -> AsyncCollective:
        """How the collective of a kernel overlaps, if no kernel of its computation reads its result."""
        if not tpu or not isinstance(move.step, Reduce):
            return AsyncCollective(False)
        sends, leaves = move.step.sends, _only_leaves(move)
        offloaded = any(on_sparse_cores(plan, c.op) for c in sends)
        separate = offloaded and any(s.entry.slices_locally for s in move.step.scatters)
        is_async = any(plan.is_async(c.op) for c in sends)
        return AsyncCollective(False, leaves and not is_async, leaves and offloaded, separate)

    out: dict[Computation, dict[Kernel, AsyncCollective]] = {}
    for computation in computation_of(plan).with_bodies():
        inside, cache = set(computation.nodes), dict[Buffer, bool]()
        overlapped = out.setdefault(computation, {})
        for kernel in computation.kernels:
            if kernel.kind is not Kind.MOVE:
                continue
            if not any(_is_computed(buffer, computation, inside, cache) for buffer in kernel.ins):
                overlapped[kernel] = AsyncCollective(True)
            elif _only_leaves(kernel) or all(role_of(buffer) == "gradients" for buffer in kernel.outs):
                overlapped[kernel] = of_result(kernel)
    return out


def _only_leaves(move: Kernel) -> bool:
    """Whether the result of a collective is only written into the stack of a loop (``STACK``)."""
    return all(reader.kind is Kind.STACK for buffer in move.outs for reader in buffer.readers)


def separate_collectives(step: Step) -> Sequence[Collective]:
    """The collectives of a step without the ones of its ring (a collective matmul), whose exposed time is in ``Plan.overlaps``."""
    if isinstance(step, Reshard | Reduce) and step.ring is not None:
        return [c for c in step.sends if not c.entry.ring_step and not c.first]
    return step.sends


@cached_on_plan
def concurrent_matmuls(plan: Plan) -> dict[Computation, dict[Kernel, tuple[Kernel, ...]]]:
    """For every computation, its ``MOVE`` kernels that matmuls depend on → the matmuls concurrent with their collectives.

    Only asynchronous collectives (``Plan.is_async``) have any. A matmul is concurrent with one collective at most,
    neither computes its operand nor reads its result, and all of these choices hold in one order of the kernels.

    As in the TPU compiler's schedules (libtpu 0.0.42) of backward layers of Llama: the recomputed forward pass runs during the
    all-gather of a cotangent, the matmuls of weight gradients during the reduction of the next cotangent; all-reduces are
    asynchronous where reduce-scatters are, on the SparseCores. The compiler schedules from the end of a body: the last collective
    takes the last matmuls. It assumes a short latency of a reduction on the SparseCores (v5p, v6e): one matmul is concurrent with
    it, and none if no matmul follows from its result.
    """
    return {c: _concurrent_in(plan, c, overlapped) for c, overlapped in async_collectives(plan).items()}


def _concurrent_in(
    plan: Plan, computation: Computation, overlapped: Mapping[Kernel, AsyncCollective]
) -> dict[Kernel, tuple[Kernel, ...]]:
    """:func:`concurrent_matmuls` of one computation."""
    times = kernel_times(plan)
    moves: dict[Kernel, float] = {}
    for kernel in computation.nodes:
        if kernel.kind is Kind.MOVE and kernel.step is not None and kernel not in overlapped:
            sent = separate_collectives(kernel.step)
            seconds = sum(c.seconds or 0.0 for c in sent if _is_concurrent(plan, c))
            if seconds:
                moves[kernel] = seconds
    if not moves:
        return {}
    matmuls = [kernel for kernel in computation.nodes if kernel.matmuls and kernel not in moves and kernel in times]
    both = [*moves, *matmuls]
    bits = {kernel: 1 << k for k, kernel in enumerate(both)}
    ancestors: dict[Kernel, int] = {}  # sets of moves and matmuls, as bits; each with itself
    for kernel in computation.nodes:
        mask = bits.get(kernel, 0)
        for buffer in kernel.ins:
            if buffer.made_by is not None:
                mask |= ancestors.get(buffer.made_by, 0)
        ancestors[kernel] = mask
    before = [ancestors[kernel] for kernel in both]
    followed = functools.reduce(operator.or_, before[len(moves) :], 0)
    free = list(range(len(moves), len(both)))[::-1]
    out: dict[Kernel, tuple[Kernel, ...]] = {}
    for n, (move, seconds) in reversed([*enumerate(moves.items())]):
        left, taken, bit = seconds, list[Kernel](), bits[move]
        offloaded = move.step is not None and any(on_sparse_cores(plan, c.op) for c in separate_collectives(move.step))
        limit = int(bool(followed & bit)) if offloaded else len(matmuls)
        candidates = [k for k in free if not before[k] & bit and not before[n] >> k & 1] if limit else []
        while candidates and left > 0 and len(taken) < limit:
            k, *candidates = candidates
            left -= times[both[k]].seconds
            taken.append(both[k])
            free.remove(k)
            # each starts when the operands of both exist; what depends on one of them depends on both
            pair, ancestors_of_both = bit | 1 << k, before[n] | before[k]
            before = [mask | ancestors_of_both if mask & pair else mask for mask in before]
            candidates = [k for k in candidates if not before[k] & bit and not before[n] >> k & 1]
        out[move] = tuple(taken)
    return out


def on_sparse_cores(plan: Plan, op: CollectiveOp) -> bool:
    """Whether compiler options put reductions of this kind on the SparseCores: the chip's default is a synchronous one."""
    by_default = frozenset() if plan.chip is None else plan.chip.compiler.sync_collectives
    return op in ("all-reduce", "reduce-scatter") and op in by_default and plan.is_async(op)


def _is_concurrent(plan: Plan, c: Collective) -> bool:
    """Whether matmuls may run during a collective that other kernels of its computation wait for."""
    return c.op in ("all-gather", "reduce-scatter", "all-reduce") and plan.is_async(c.op)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective on the links, in seconds from the start of a run of its computation.

    Attributes:
      kernel: the ``MOVE`` kernel that it belongs to, or the op that sends.
      is_async: other kernels run meanwhile.
    """

    collective: Collective
    kernel: Kernel
    start: float
    end: float
    is_async: bool


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One copy between device and host memory, in seconds from the start of a run of its computation.

    Attributes:
      kernel: the ``TRANSFER`` kernel.
      to_host: its direction.
      bytes: of one device.
    """

    kernel: Kernel
    to_host: bool
    bytes: float
    start: float
    end: float


@dataclass(slots=True)
class Schedule:
    """One run of a computation on one device.

    Attributes:
      kernels: in the order in which they run.
      starts: of each kernel, in seconds from the start of the run; of one that sends, after the collectives that it waits for.
      transfers: the collectives, in the order in which they are sent; of a ring (collective matmul), the first step of each kind.
      host_copies: the copies between device and host memory, in the order in which they start.
      seconds: of the run, loops inside it with all their iterations.
      last_read: buffer → index of the last kernel that reads it.
      in_flight: index of a kernel → the buffers that stay live during it because a collective in flight reads or writes them.
    """

    kernels: list[Kernel]
    starts: list[float] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    seconds: float = 0.0
    last_read: dict[Buffer, int] = field(default_factory=dict)
    in_flight: dict[int, list[Buffer]] = field(default_factory=dict)


@cached_on_plan
def schedules(plan: Plan) -> dict[Computation, Schedule]:
    """Computation → its schedule, for the program and for the body of every loop and branch.

    Kernels run one at a time, in program order; in loop bodies, matmuls that are concurrent with a collective
    (:func:`concurrent_matmuls`) run between it and the kernels that read its result. (Without loops, ResNet-50 with split features
    on v5e, the compiler has the peak of the program's order.) Kernels wait for these collectives for as long as they last longer
    than their matmuls, and for synchronous ones to their end.

    The links send one of the other asynchronous collectives at a time (:func:`async_collectives`). A prefetched weight is sent from
    the start of the matmul before the last one, and the next kernel waits for it. A gradient is sent during the next matmul; the
    matmul after that waits for it, and so does the end of the computation. Large gradients next to short matmuls are therefore
    exposed, however long the loop is.

    A copy to or from the host starts when its operand exists and the link is free in its direction; kernels that read its result
    wait for it, and so does the end of the computation. XLA starts these copies as early (libtpu 0.0.42).

    A prefetched weight is live from the matmul before its reader, the operand of a gradient's reduction until the next matmul ends:
    the TPU compiler (libtpu 0.0.42, default effort) was observed to schedule about one collective before and one after. The operand
    of another collective is live until its concurrent matmuls end.
    """
    out: dict[Computation, Schedule] = {}
    program, concurrent = computation_of(plan), concurrent_matmuls(plan)
    for computation in reversed(program.with_bodies()):  # a body before the computation of its loop
        reordered = {} if computation is program else concurrent[computation]
        late = "LATE_RESULTS" in plan.compiler.quirks and computation is program
        schedule = Schedule(_late_results_last(computation) if late else _in_order(computation, reordered))
        _Clock(plan, computation, out).run(schedule)
        _add_in_flight(schedule, async_collectives(plan)[computation], reordered)
        out[computation] = schedule
    return out


class _Clock:
    """The compute units, the links and the link to the host while the kernels of a computation run.

    Args:
      bodies: the schedules of the computation's loops.

    Attributes:
      now: seconds at which the last kernel ended.
      links_free: ... at which the last collective of :func:`async_collectives` ends.
      host_free: ... at which the last copy to the host (True) and to the device (False) ends.
      made: buffer → seconds at which its kernel or copy ended.
      starts: of the last two matmuls.
      sent: the ends of the gradients' collectives that started since the last matmul; awaited: of those before, for which the next
        matmul waits.
    """

    def __init__(self, plan: Plan, computation: Computation, bodies: Mapping[Computation, Schedule]):
        """A clock at 0 seconds for the kernels of ``computation``."""
        self.plan, self.bodies, self.concurrent = plan, bodies, concurrent_matmuls(plan)[computation]
        self.times, self.overlapped = kernel_times(plan), async_collectives(plan)[computation]
        self.now = self.links_free = 0.0
        self.host_free = {True: 0.0, False: 0.0}
        self.made: dict[Buffer, float] = {}
        self.starts = (0.0, 0.0)
        self.sent: list[float] = []
        self.awaited: list[float] = []

    def run(self, schedule: Schedule) -> None:
        """Run the kernels of a schedule in their order, and set all of its seconds."""
        copies = any(kernel.kind is Kind.TRANSFER for kernel in schedule.kernels)
        for kernel in schedule.kernels:
            if kernel.kind is Kind.TRANSFER:
                schedule.starts.append(self.now)
                schedule.host_copies.append(self.copy(kernel))
                continue
            if copies:
                self.now = max([self.now, *(self.made.get(buffer, 0.0) for buffer in kernel.reads)])
            if kernel.matmuls and kernel in self.times:
                self.now = max([self.now, *self.awaited])
                # a gradient is sent during one matmul; the matmul after that waits for it
                self.awaited, self.sent = self.sent, []
                self.starts = (self.starts[1], self.now)
            if kernel.step is not None and not kernel.bodies:
                schedule.transfers += self.send(kernel, kernel.step)
            schedule.starts.append(self.now)
            for body in kernel.bodies:
                self.now += self.bodies[body].seconds * (1 if body.trip_count is None else body.trip_count)
                self.starts = self.now, self.now  # what is sent does not overlap with a loop
            if kernel in self.times:
                self.now += self.times[kernel].seconds
            if copies:
                self.made.update(dict.fromkeys(kernel.writes, self.now))
        schedule.seconds = max(self.now, self.links_free, *self.host_free.values())

    def copy(self, kernel: Kernel) -> HostCopy:
        """Start the copy of a ``TRANSFER`` kernel; it ends after its bytes over the link to the host."""
        assert isinstance(kernel.step, Run)
        results = kernel.step.results
        to_host, size = results[0].on_host, sum(map(self.plan.shard_bytes, results))
        start = max([self.host_free[to_host], *(self.made.get(buffer, 0.0) for buffer in kernel.reads)])
        end = start + host_seconds(self.plan, size)
        self.host_free[to_host] = end
        self.made.update(dict.fromkeys(kernel.writes, end))
        return HostCopy(kernel, to_host, size, start, end)

    def zeros_seconds(self, kernel: Kernel) -> float:
        """Seconds of filling the result of a kernel with zeros."""
        assert self.plan.chip is not None
        return sum(vector_seconds(self.plan.chip, PACKED * b.bytes / itemsize(b.value.aval)) for b in kernel.writes)

    def send(self, kernel: Kernel, step: Step) -> Iterator[Transfer]:
        """Send the collectives of a kernel, one after the other."""
        separate, how, start = separate_collectives(step), self.overlapped.get(kernel), self.now
        hidden_by = math.fsum(self.times[matmul].seconds for matmul in self.concurrent.get(kernel, ()))
        for c in step.sends:
            seconds, during = c.seconds or 0.0, c.hidden if self.plan.is_async(c.op) else 0.0
            if c not in separate:
                yield Transfer(c, kernel, self.now, self.now + seconds, True)
                continue
            is_async = self.plan.is_async(c.op) if how is not None else hidden_by > 0.0 and _is_concurrent(self.plan, c)
            if how is not None and _is_merged(self.plan, c):
                is_async, seconds = False, merged_seconds(self.plan, c)
                if c.op == "all-gather":
                    seconds += self.zeros_seconds(kernel)
            if not is_async:
                start = max(start, self.now)
                self.now = start + seconds - during
            elif how is None:
                hidden, hidden_by = min(seconds, hidden_by), max(0.0, hidden_by - seconds)
                self.now += seconds - hidden
            elif how.prefetched:
                start = max(self.links_free, self.starts[0])
                self.links_free = start + seconds
                self.now = max(self.now, self.links_free)
            else:
                start = max(self.links_free, self.now)
                self.links_free = start + seconds
                self.sent.append(self.links_free)
            yield Transfer(c, kernel, start, start + seconds, is_async)
            start += seconds - during


def _is_merged(plan: Plan, c: Collective) -> bool:
    """Whether the TPU compiler makes a collective, for which no kernel waits, a part of a synchronous all-reduce.

    It merges synchronous all-reduces of a computation, and makes all-gathers of small weights parts of such ones, with zeros in
    place of other devices' shards.
    """
    devices = math.prod(plan.sizes[a] for a in c.axes)
    most = plan.compiler.merged_gather_bytes
    if not most or devices < MIN_MERGING_DEVICES or any(s.between for a in c.axes for s in plan.torus[a]):
        return False
    if c.op == "all-gather":
        return c.bytes <= most
    return c.op == "all-reduce" and not plan.is_async(c.op)


def host_seconds(plan: Plan, size: float) -> float:
    """Seconds of a copy of ``size`` bytes between a device and its host; 0 if the rate of the chip's link is not known."""
    rate = 0.0 if plan.chip is None else plan.chip.per_device().host_link
    return size / rate if rate else 0.0


def _add_in_flight(
    schedule: Schedule, overlapped: Mapping[Kernel, AsyncCollective], concurrent: Mapping[Kernel, Sequence[Kernel]]
) -> None:
    """Set the last reads of a schedule, and the buffers of its collectives in flight."""
    kernels, in_flight = schedule.kernels, schedule.in_flight
    for k, kernel in enumerate(kernels):
        for buffer in kernel.reads:
            schedule.last_read[buffer] = k
    heavy = [i for i, k in enumerate(kernels) if k.matmuls or k.traits.family == "kernel"]
    index = {kernel: k for k, kernel in enumerate(kernels)}
    taken = {matmul for matmuls in concurrent.values() for matmul in matmuls}
    for move, how in overlapped.items():
        k, buffers = index[move], [*move.reads]
        first, end = k + 1, next((i + 1 for i in heavy if i > k), len(kernels))
        if how.prefetched:
            buffers, first, end = [*move.writes], max((i for i in heavy if i < k), default=k), k
        elif how.until_end:
            end = len(kernels)
        elif how.separate_result:
            buffers += [Buffer(b.bytes, b.value, move) for b in move.reads]
        for i in range(first, end):
            in_flight.setdefault(i, []).extend(buffers)
        for matmul in (m for b in move.reads if how.postponed and (m := b.made_by) in index and m not in taken):
            for i in range(index[matmul] + 1, len(kernels)):
                in_flight.setdefault(i, []).extend(matmul.reads)
    for move, matmuls in concurrent.items():
        for k in map(index.__getitem__, matmuls):
            if k > index[move]:
                in_flight.setdefault(k, []).extend(move.reads)


def _late_results_last(computation: Computation) -> list[Kernel]:
    """The kernels of the program in its order, but after the last matmul or loop those on which none depends and that no barrier
    awaits: what reduces an array to a smaller result, with all that follows, and before a loop also reductions of gradients.

    :func:`passes.barriers.compute_results_early` and :func:`passes.barriers.serialize_loops` add such barriers.
    """
    kernels = computation.kernels
    needed = {buffer for kernel in kernels for buffer in kernel.writes if buffer.awaited}
    last = last_loop = -1
    for k, kernel in reversed([*enumerate(kernels)]):
        if kernel.matmuls or kernel.bodies or kernel.traits.family == "kernel":
            last, last_loop = max(last, k), max(last_loop, k if kernel.bodies else -1)
            needed.update(kernel.reads)
        elif needed.intersection(kernel.writes):
            needed.update(kernel.reads)
    late: dict[Kernel, None] = {}
    for k, kernel in enumerate(kernels[:last]):
        if kernel.matmuls or kernel.bodies or needed.intersection(kernel.writes):
            continue
        largest, size = max((b.bytes for b in kernel.reads), default=0.0), sum(b.bytes for b in kernel.writes)
        reduces = kernel.kind is Kind.OP and size * 8 <= largest
        is_sum = k < last_loop and isinstance(kernel.step, Reduce)
        if reduces or is_sum or any(b.made_by in late for b in kernel.reads):
            late[kernel] = None
    return [*(k for k in kernels[: last + 1] if k not in late), *late, *kernels[last + 1 :]]


def _in_order(computation: Computation, concurrent: Mapping[Kernel, Sequence[Kernel]]) -> list[Kernel]:
    """The kernels in program order, but concurrent matmuls between their collective and the kernels that read its result."""
    kernels = computation.kernels
    if not any(concurrent.values()):
        return kernels
    index = {kernel: k for k, kernel in enumerate(kernels)}
    maker = {buffer: kernel for kernel in kernels for buffer in kernel.writes}
    before = {kernel: {maker[b] for b in kernel.reads if b in maker} - {kernel} for kernel in kernels}
    for move, matmuls in concurrent.items():
        for matmul in matmuls:
            before[matmul].add(move)
        for reader in (r for buffer in move.writes for r in buffer.readers if r in before):
            before[reader].update(matmuls)
    return sorted_by_dependencies(before, index)


def sorted_by_dependencies(before: Mapping[T, Iterable[T]], position: Mapping[T, int]) -> list[T]:
    """The keys of ``before``, each after the ones it maps to; of those that can come next, the one with the lowest position.

    Raises:
      CycleError: no such order exists.
    """
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ready: list[tuple[int, T]] = []
    out: list[T] = []
    while sorter.is_active():
        for item in sorter.get_ready():
            heapq.heappush(ready, (position[item], item))
        out.append(heapq.heappop(ready)[1])
        sorter.done(out[-1])
    return out


def _is_computed(buffer: Buffer, computation: Computation, inside: set[Kernel], cache: dict[Buffer, bool]) -> bool:
    """Whether a buffer is carried by the computation's loop, or follows from a kernel inside that is not light."""

    def operands(b: Buffer) -> Sequence[Buffer]:
        return b.made_by.ins if b.made_by in inside and b.made_by.is_light else ()

    for b in operands_first(buffer, operands, cache):
        if b.made_by not in inside:
            cache[b] = b.carried and b in computation.inputs
        else:
            cache[b] = not b.made_by.is_light or any(cache[i] for i in b.made_by.ins)
    return cache[buffer]

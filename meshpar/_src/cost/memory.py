"""The memory of a plan: the bytes that are live on a device after every kernel, by role, and the line of the peak.

Arguments are live from the start, as are arrays that the function closes over; the results that alias donated arguments replace
them. A kernel's result is live until its last reader; a kernel may overwrite an operand of the same size that ends with it. A loop
has its operands, carries and stacks live, and once the buffers of its body. Intermediates inside a kernel are not in memory
(:mod:`cost.fusion`). Opaque kernels may declare scratch memory (``works=``), and collective matmuls have buffers
(:func:`ring_buffer_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..hardware.topology import devices_of
from ..plan.plan import Plan
from ..plan.shard_shapes import value_bytes
from ..plan.steps import GatherRing, Reduce, ReduceRing, Reshard, Run, Step
from ..program.ir import Value
from .buffer_roles import ROLES, buffer_roles
from .caching import P, cached_on_plan, with_shared_results
from .device_computation import REDUCE_RING_BUFFERS, computation_of
from .donation import aliased_inputs, donatable, gathered_then_copied
from .flops import local_work
from .fusion import Buffer, Computation, Kernel, Kind, array_scattered_into, array_written
from .schedule import schedules


@dataclass(slots=True)
class Memory:
    """Bytes on one device over a step.

    Attributes:
      peak: the largest sum of live bytes.
      by_kind: the bytes at the peak by role: parameters, optimizer state, gradients, saved activations, temporaries, other inputs,
        constants (arrays that the function closes over); without those that are zero.
      padding: bytes of ``by_kind`` that are padding of arrays to the tiles of the chip's memory, by role; without zeros.
      host: the largest sum of bytes in host memory, for each device.
      points: (index of the op in program order, live bytes, kernel) after every kernel; loop bodies once.
      largest: (name, bytes, role, bytes that are padding) of the twelve largest buffers at the peak.
      at: the kernel of the peak.
      live: (buffer, bytes) of all buffers at the peak.
      events: (buffer, bytes) of every allocation, (buffer, None) of every free, in order.
      marks: of each of ``points``, the number of events before it, and the buffers of collectives in flight with their bytes.
    """

    peak: float = 0.0
    host: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)
    padding: dict[str, float] = field(default_factory=dict)
    points: list[tuple[int, float, Kernel]] = field(default_factory=list, repr=False)
    largest: list[tuple[str, float, str, float]] = field(default_factory=list, repr=False)
    at: Kernel | None = field(default=None, repr=False)
    live: list[tuple[Buffer, float]] = field(default_factory=list, repr=False)
    events: list[tuple[Buffer, float | None]] = field(default_factory=list, repr=False)
    marks: list[tuple[int, list[tuple[Buffer, float]]]] = field(default_factory=list, repr=False)

    @property
    def peak_source(self) -> str:
        """The user's line of the kernel at the peak, and the part of the model (:attr:`Op.location`)."""
        return "" if self.at is None else self.at.source

    @property
    def curve(self) -> list[tuple[int, float, str]]:
        """(index of the op in program order, live bytes, primitive) after every kernel."""
        return [(i, n, node.name) for i, n, node in self.points]

    def to_dict(self) -> dict[str, Any]:
        """All of this as JSON: peak, host bytes, line and buffers of the peak, bytes and padding by role, curve."""
        keys = ("peak", "host", "peak_source", "by_kind", "padding", "largest", "curve")
        return {key: getattr(self, key) for key in keys}


@cached_on_plan
def memory_of(plan: Plan) -> Memory:
    """The live bytes on a device over a step of the plan."""
    walk = _Live(plan)
    walk.program(computation_of(plan))
    return walk.result()


def with_donated(plan: P, donated: frozenset[int]) -> P:
    """The plan with other donated inputs, for its memory: it has the same steps, and shares the cached kernels and schedules."""
    request = replace(plan.request, donated=donated)
    return with_shared_results(plan, aliased_inputs, donatable, memory_of, request=request)


def memory_by_role(plan: Plan) -> list[dict[str, float]]:
    """The live bytes of each role at each of :attr:`Memory.points`; they add up to the point's bytes."""
    memory, roles = memory_of(plan), buffer_roles(plan)
    live: dict[Buffer, float] = {}
    total: dict[str, float] = dict.fromkeys(ROLES, 0.0)
    done, out = 0, list[dict[str, float]]()

    for count, in_flight in memory.marks:
        for item, size in memory.events[done:count]:
            total[roles(item)] += -live.pop(item) if size is None else live.setdefault(item, size)
        done, now = count, dict(total)
        for item, size in in_flight:
            now[roles(item)] += size
        out.append(now)
    return out


class _Live:
    """Allocates and frees the buffers of a plan in the order of its schedules.

    Attributes:
      memory: the result so far.
      live: buffer → its allocated bytes, and those in host memory; total, on_host: of all of them.
      best: the entry of :attr:`Memory.marks` of the peak.
      in_chunks: values that rings compute or gather in chunks.
      rings: result of a matmul in a gather ring → the all-gather and its ring.
    """

    def __init__(self, plan: Plan):
        """The state before the program's first kernel: no buffer is live."""
        self.plan, self.kind_of = plan, buffer_roles(plan)
        chip = plan.chip
        self.tpu = chip is not None and bool(chip.torus)
        self.postpones = self.tpu and plan.is_async("all-gather")
        self.schedules = schedules(plan)
        self.memory = Memory()
        self.live: dict[Buffer, tuple[float, float]] = {}
        self.total = self.on_host = 0.0
        self.best: tuple[int, list[tuple[Buffer, float]]] = (0, [])
        self.aliased: set[Buffer] = set()
        self.in_chunks: set[Value] = set()
        self.rings: dict[Value, tuple[Step, GatherRing]] = {}
        for step in plan.body.all_steps:
            if isinstance(step, Reshard) and step.ring is not None:
                made = [out for run, _ in step.ring.dots for out in run.op.outs]
                self.rings.update((v, (step, step.ring)) for v in made)
                if step.ring.fused is None:
                    self.in_chunks.update([*made, *([step.result.value] if step.ring.keep_gathered else [])])

    def add(self, item: Buffer, size: float | None = None) -> None:
        """Allocate a buffer, if it is not live yet; ``size``: bytes of the device, other than its own, with none on the host."""
        if item not in self.live:
            n, host = (item.live_bytes, item.host_bytes) if size is None else (size, 0.0)
            self.live[item] = (n, host)
            self.memory.events.append((item, n))
            self.total += n
            self.on_host += host
            self.memory.host = max(self.memory.host, self.on_host)

    def drop(self, item: Buffer) -> None:
        """Free a buffer, if it is live."""
        if item in self.live:
            size, host = self.live.pop(item)
            self.memory.events.append((item, None))
            self.total -= size
            self.on_host -= host

    def sample(self, node: Kernel, in_flight: Sequence[Buffer] = ()) -> None:
        """Record the live bytes after a kernel, with the buffers of collectives in flight."""
        more, memory = {i: i.live_bytes for i in in_flight if i not in self.live}, self.memory
        total = self.total + sum(more.values())
        memory.points.append((node.position, total, node))
        memory.marks.append((len(memory.events), [*more.items()]))
        if memory.at is None or total > memory.peak:
            memory.peak, memory.at, self.best = total, node, memory.marks[-1]

    def program(self, region: Computation) -> None:
        """Run the program: arguments and constants are live from its start, results to its end."""
        for item in (*region.constants, *region.inputs):
            self.add(item)
        donated = {region.inputs[i] for i in aliased_inputs(self.plan).values()}
        self.aliased = {region.outputs[k] for k in aliased_inputs(self.plan)}
        if self.tpu:  # libtpu 0.0.42 allocates the stacks of saved activations at the start of the program
            loops = [node for node in region.kernels if node.bodies]
            carried = {out for node in loops for _, out in node.carries}
            for item in (out for node in loops for out in node.writes if out not in carried):
                if self.kind_of(item) == "saved activations":
                    self.add(item)
            # it starts copies of arguments from the host before the loops of the forward or backward pass
            inputs = {item for item in region.inputs if item.host_bytes}
            for node in region.kernels:
                if node.kind is Kind.TRANSFER and inputs.intersection(node.reads):
                    for out in node.writes:
                        self.add(out)
        self.region(region, set(region.inputs) - donated | set(region.outputs))
        if self.memory.at is None and region.nodes:
            self.sample(region.nodes[0])

    def region(self, region: Computation, retained: set[Buffer]) -> None:
        """Allocate and free the buffers of a computation, in its schedule's order; ``retained`` stay live to its end."""
        own = set(region.inputs)
        schedule = self.schedules[region]
        for index, node in enumerate(schedule.kernels):
            own.update(node.writes)
            ends = [i for i in node.reads if schedule.last_read[i] == index and i in own and i not in retained]
            carried = [i for i in node.reads if i.carried and schedule.last_read[i] == index]
            if node.bodies:
                self.loop(node, ends, retained, carried)
            else:
                # elementwise kernels and collectives overwrite an operand that ends with them
                free = list(ends) if node.traits.fusible or node.kind is Kind.MOVE else []
                if self.tpu:  # but not one that was copied from the host (libtpu 0.0.42)
                    free = [i for i in free if i.made_by is None or i.made_by.kind is not Kind.TRANSFER]
                array = array_written(node) or array_scattered_into(node)
                if array in carried:
                    self.add(node.outs[0], 0.0)  # in the memory of the loop's result
                elif array in ends:
                    free.append(array)
                for out in node.writes:
                    fits = (i for i in free if (i.bytes, i.host_bytes) == (out.bytes, out.host_bytes))
                    over = None if self.tpu and out.transposed else next(fits, None)
                    if over is not None:
                        free.remove(over)
                        self.drop(over)
                    self.add(out)
                held = self.inside(node) or self.gathered(node) or self.between_moves(node, ends)
                if held is not None:
                    self.add(held)
                self.sample(node, schedule.in_flight.get(index, ()))
                if held is not None:
                    self.drop(held)
            for item in ends:
                self.drop(item)
            for out in node.writes:
                if schedule.last_read.get(out, -1) <= index and out not in retained:
                    self.drop(out)

    def inside(self, node: Kernel) -> Buffer | None:
        """The scratch memory of a kernel as one buffer: declared by an opaque kernel, or chunks of a ring in flight; None: none."""
        if node.traits.family != "kernel" and node.kind is not Kind.MOVE and not node.matmuls:
            return None
        work = local_work(node.step, self.plan.sizes) if isinstance(node.step, Run) and node.kind is Kind.OP else None
        size = self.blocks(node) if work is None else work.memory
        return None if (work is None and not size) or not node.outs else Buffer(size, node.outs[0].value, node)

    def between_moves(self, node: Kernel, ends: Sequence[Buffer]) -> Buffer | None:
        """The buffers that exist only between the moves of a resharding or reduction, as one; None without such buffers.

        While a move runs, its operand and its result are live. The operand of the step is freed after the first move if nothing
        reads it later (it is in ``ends``). A part that is exchanged arrives in a further buffer.
        """
        step = node.step
        if node.kind is not Kind.MOVE or not isinstance(step, Reshard | Reduce) or step.ring is not None:
            return None
        out = node.writes[0]
        specs, value = step.specs, step.result.value
        sizes = [value_bytes(value, spec, self.plan.sizes) for spec in specs[:-1]]
        times = [m.times for m in step.path]
        times = [1] * (len(specs) - len(times)) + times
        if not sizes and max(times) == 1:
            return None
        source = sum(i.live_bytes for i in node.ins)
        allocated = out.live_bytes + sum(i.live_bytes for i in node.ins if i in self.live)
        made = [*sizes, out.live_bytes]
        most = 0.0
        for k, (size, parts) in enumerate(zip(made, times, strict=True)):
            before = made[k - 1] if k else 0.0
            first = source if k == 0 or any(i not in ends for i in node.ins) else 0.0
            most = max(most, before + first + size * (1 + 1 / parts if parts > 1 else 1))
        return Buffer(most - allocated, out.value, node) if most > allocated else None

    def blocks(self, node: Kernel) -> float:
        """Bytes of a ring's chunks in flight while a kernel runs its matmuls, or while it reduces their sum."""
        total = 0.0
        for step, ring in dict(
            self.rings[run.results[0].value] for run in node.matmuls if run.in_ring == "gather"
        ).items():
            assert isinstance(step, Reshard)
            devices = devices_of(self.plan.torus, ring.axes)
            size = self.plan.shard_bytes(step.result)
            total += ring_buffer_bytes(ring, size / devices, devices)
        if isinstance(node.step, Reduce) and node.step.ring is not None:
            ring = node.step.ring
            size = self.plan.shard_bytes(node.step.result)
            total += ring_buffer_bytes(ring, size, ring.num_blocks)
        return total

    def gathered(self, node: Kernel) -> Buffer | None:
        """The buffer into which XLA for TPUs gathers a result that aliases an argument, before it copies it; None: none.

        With asynchronous all-gathers there are two: the next one starts before the last one is copied (libtpu 0.0.42: ZeRO-1 on v5p
        peaks at 40.3 GB with synchronous all-gathers, at 52.3 with asynchronous ones).
        """
        if node.kind is not Kind.MOVE or node.writes[0] not in self.aliased:
            return None
        (out,) = node.writes
        copied = gathered_then_copied(self.plan, out.bytes, sum(i.bytes for i in node.reads))
        return Buffer((2 if self.postpones else 1) * out.bytes, out.value, node) if copied else None

    def loop(self, node: Kernel, ends: list[Buffer], retained: set[Buffer], carried_outside: list[Buffer]) -> None:
        """Allocate a loop's results (but stacks without readers), then allocate and free the buffers of each of its bodies.

        Args:
          ends: the operands that nothing reads later.
          carried_outside: the carries of a loop around this one that nothing else in its body reads later.
        """
        ended = set(ends)
        for first, out in node.carries:  # the carry overwrites its first value
            if first is not None and first in ended and (first.bytes, first.host_bytes) == (out.bytes, out.host_bytes):
                ended.discard(first)
                self.drop(first)
            elif first in carried_outside and (first.bytes, first.host_bytes) == (out.bytes, out.host_bytes):
                self.add(out, 0.0)  # in the memory of the outer loop's result
        kept = retained | {out for _, out in node.carries}
        for out in node.writes:
            if out.readers or out in kept:
                self.add(out)
        self.sample(node)
        for region in node.bodies:
            inside = {i for k in region.kernels if k.kind is Kind.LEAVE for i in k.reads}
            before = self.total
            for item in region.inputs:  # they share the memory of the loop's results
                self.add(item, 0.0)
            # libtpu 0.0.42 allocates the buffers that rings fill in chunks at the start of a loop body
            for node in region.kernels:
                for item in node.writes if node.kind is Kind.MOVE or node.matmuls else ():
                    if item.value in self.in_chunks:
                        self.add(item)
            self.region(region, inside.union(region.inputs))
            for k in region.kernels:
                for item in (*k.writes, *region.inputs):
                    self.drop(item)
            assert abs(self.total - before) < 1 + 1e-9 * before

    def result(self) -> Memory:
        """The memory, with the buffers that are live at the peak."""
        memory = self.memory
        live: dict[Buffer, float] = {}
        before_peak, more = self.best
        for item, size in memory.events[:before_peak]:
            if size is None:
                del live[item]
            else:
                live[item] = size
        memory.live = [*live.items(), *more]
        kinds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        padding: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        largest = []
        for item, size in memory.live:
            if size:
                kind = self.kind_of(item)
                kinds[kind] += size
                padding[kind] += size * item.padding
                largest.append((size, kind, item))
        largest.sort(key=lambda x: -x[0])
        memory.largest = [(_name(self.plan, i), size, kind, size * i.padding) for size, kind, i in largest[:12]]
        memory.by_kind, memory.padding = ({k: v for k, v in of.items() if v} for of in (kinds, padding))
        return memory


def ring_buffer_bytes(ring: GatherRing | ReduceRing, block: float, devices: int) -> float:
    """Bytes of the buffers of a ring, besides operands, results, and the :data:`REDUCE_RING_BUFFERS` chunks of a reduction.

    A fused kernel has two buffers each way, whatever the number of devices, and copies of operands whose layout it does not take.
    In a gather ring two chunks are sent while two arrive (the first two sent are the device's own shard). In a reduction, the sent
    chunks and the next ones are the :data:`REDUCE_RING_BUFFERS`, and those that arrive are counted here.

    Args:
      block: bytes of a chunk.
      devices: of the ring.
    """
    gather = isinstance(ring, GatherRing)
    if ring.fused is not None:
        return (4 if gather else 4 - min(REDUCE_RING_BUFFERS, devices)) * block + ring.fused.held
    return (min(4, devices - 1) if gather else min(2, devices - 1)) * block


def _name(plan: Plan, item: Buffer) -> str:
    value = item.value
    made = value.op.name if value.op is not None else "constant" if value in plan.program.constants else "slice"
    dims = " ".join(d or "_" for d in plan.program.dims(value))
    return f"{value.path or made} {value.aval.dtype}[{dims}]"

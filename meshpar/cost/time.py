"""The time of a planned step on a chip: what each kernel computes and reads, what each collective sends, and what limits.

A kernel's products at the matrix unit's rate, its traffic with HBM, and the way of its elements through the vector units overlap
(:func:`meshpar.cost.exposed.kernel_seconds`). Traffic is what :mod:`meshpar.cost.fusion` says a kernel reads and writes: each
array once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.collectives import Collective, duration, human
from ..plan.plan import Plan
from ..plan.spec import itemsize
from ..plan.steps import Reduce, Reshard, Run, Step
from ..program.ir import Op
from .donation import gathered_apart, in_place
from .exposed import kernel_seconds, later_stages
from .flight import Flight, flights_of, goes_on
from .flops import OPAQUE, flops_on, local_opaque_flops, model_flops
from .fusion import SLICES, Item, Node, Region, line_of
from .kernels import kernels_of
from .memo import once_per_plan


@dataclass(slots=True)
class OpTime:
    """One kernel on one device.

    Attributes:
      name: the primitive whose result it is.
      flops: of its products, once, dims rounded up to the matrix unit.
      bytes: to and from HBM, once.
      seconds: once.
      count: how often it runs in a step; loops of unknown length count once.
      origin: its op.
    """

    name: str
    flops: float
    bytes: float
    seconds: float
    count: int
    origin: Op | None = None

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``."""
        return line_of(self.origin)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "flops": self.flops, "bytes": self.bytes, "seconds": self.seconds, "count": self.count,
                "source": self.source}  # fmt: skip


@dataclass(slots=True)
class Time:
    """Seconds of a step on one device (all do the same).

    Attributes:
      compute: all products at the matrix unit's rate.
      memory: all traffic at HBM's rate.
      communication: all collectives, one after the other.
      seconds: the estimate: the kernels one after the other; collectives of
        weights and gradients, which wait for nothing else in their loop, behind the kernels of that loop as far as those last,
        if its programs go on beside them (``Plan.waits``; of a staged sum beside its first stage); the other collectives on
        top; of what runs in blocks, what its products do not hide.
      model_flops: of the products that the model asks for, on all devices together: without recomputation, without what
        devices do twice, nothing rounded up.
      ops: every kernel.
    """

    compute: float
    memory: float
    communication: float
    seconds: float
    model_flops: float
    peak_flops: float
    ops: list[OpTime] = field(default_factory=list, repr=False)
    bottleneck: str = ""

    @property
    def overlapped(self) -> float:
        """The lower bound: the longest of compute, memory and communication, the others hidden behind it."""
        return max(self.compute, self.memory, self.communication)

    @property
    def serial(self) -> float:
        """The upper bound: nothing overlaps."""
        return self.compute + self.memory + self.communication

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the estimate: ``model_flops / (seconds · peak FLOP/s of all devices)``."""
        return self.model_flops / (self.seconds * self.peak_flops) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Seconds by part, bounds, estimate, utilisation, bottleneck, and the ten kernels that take longest."""
        top = sorted(self.ops, key=lambda o: -o.seconds * o.count)[:10]
        return {
            "compute": self.compute, "memory": self.memory, "communication": self.communication,
            "overlapped": self.overlapped, "serial": self.serial, "seconds": self.seconds, "mfu": self.mfu,
            "model_flops": self.model_flops, "bottleneck": self.bottleneck, "ops": [o.to_dict() for o in top],
        }  # fmt: skip


@once_per_plan
def time_of(plan: Plan) -> Time | None:
    """The time of a step on the plan's chip; None: it is not known."""
    if plan.chip is None:
        return None
    chip, region = plan.chip, kernels_of(plan)
    device = chip.per_device()
    ops: list[OpTime] = []
    compute = memory = model = 0.0
    flops_of = flops_on(plan, chip.lanes)
    took: dict[int, float] = {}
    results = {id(region.outputs[k]) for k in in_place(plan)} if chip.torus else set()
    kernels = list(kernels_with_counts(region))
    home = {id(node): loop for node, loop, _ in kernels}
    stacked: dict[int, float] = {}
    for node, loop, _ in kernels if chip.torus else ():
        made = _product_of_stack(node)
        if made is not None and home.get(id(made)) == loop:
            stacked[id(made)] = stacked.get(id(made), 0.0) + node.reads[0].bytes
            stacked[id(node)] = 0.0
    for node, _, count in kernels:
        if node.regions or stacked.get(id(node)) == 0.0:
            continue
        flops = sum(map(flops_of, node.products))
        if node.name in OPAQUE and isinstance(node.step, Run):
            flops += local_opaque_flops(node.step, plan.sizes)
        traffic = 0.0
        if node.name not in ("move!", "leave!"):
            traffic = sum(item.bytes for item in node.writes) + sum(read_bytes(node, item) for item in node.reads)
            traffic += sum(i.bytes for i in node.ins) if node.name == "stack!" else 0.0
            traffic += stacked.get(id(node), 0.0)
        elif any(id(i) in results and gathered_apart(i.bytes, sum(j.bytes for j in node.reads)) for i in node.writes):
            traffic = 2 * node.writes[0].bytes  # it is gathered into other memory, and copied to its place
        rate = device.flops
        if node.products:
            rate = device.matmul_rate(str(node.products[0].op.eqn.invars[0].aval.dtype))
        busy, moved = flops / (rate * chip.matmul_efficiency), traffic / (device.hbm_bandwidth * chip.hbm_efficiency)
        if not busy and not moved:
            continue
        compute += busy * count
        memory += moved * count
        seconds = kernel_seconds(chip, busy, moved, _elements(node) if moved else 0.0)
        took[id(node)] = seconds
        name = node.products[0].op.name if node.products else node.name.rstrip("!")
        origin = node.products[0].op if node.products else node.op
        ops.append(OpTime(name, flops, traffic, seconds, count, origin))
    model = model_flops(plan)
    communication = sum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives)
    seconds = _estimate(plan, region, took)
    devices = 1
    for n in plan.sizes.values():
        devices *= n
    out = Time(compute, memory, communication, seconds, model, device.flops * devices, ops)
    out.bottleneck = _bottleneck(out, plan.collectives)
    return out


def kernels_with_counts(region: Region, count: int = 1, loop: int = 0) -> Iterator[tuple[Node, int, int]]:
    """(kernel, id of its region, how often it runs in a step); loops of unknown length once, every branch of a condition."""
    loop = id(region)
    for node in region.kernels:
        yield node, loop, count
        for body in node.regions:
            yield from kernels_with_counts(body, count * (1 if body.trips is None else body.trips))


def _product_of_stack(node: Node) -> Node | None:
    """The product whose result this kernel writes into the stack of a loop: on TPUs it writes there itself (libtpu 0.0.42)."""
    if node.name != "stack!" or node.products or len(node.reads) != 1 or node.reads[0].bytes != node.ins[0].bytes:
        return None
    made = node.reads[0].node
    return made if made is not None and made.products else None


def _elements(node: Node) -> float:
    """Elements that go through the vector units in a kernel: what it writes, or what it reads to add up."""
    written = sum(item.bytes / itemsize(item.value.aval) for item in node.writes)
    if node.products or node.name == "kernel":
        return written
    return max([written, *(read_bytes(node, item) / itemsize(item.value.aval) for item in node.reads)])


def read_bytes(node: Node, item: Item) -> float:
    """What a kernel reads of an array: all of it, or of a stack the slice that it works on."""
    if node.name in ("slice", "dynamic_slice") and item in node.ins:
        return min(item.bytes, sum(out.bytes for out in node.outs))
    if not item.sliced or any(item is i for i in node.ins):
        return item.bytes
    todo, least = list(node.ins), item.bytes
    seen: set[int] = set()
    while todo:
        i = todo.pop()
        if id(i) in seen or (i.stored and not i.through) or i.node is None:
            continue
        seen.add(id(i))
        if i.node.name in SLICES and any(j is item for j in i.node.ins):
            least = min(least, i.bytes)
        todo += i.node.ins
    return least


def _estimate(plan: Plan, region: Region, took: Mapping[int, float]) -> float:
    """The step: what its loops take on a clock, what collectives of their own leave exposed, what rings do."""
    exposed = sum(
        o.exposed[o.choice] * (o.count or 1) for o in plan.overlaps if o.choice != "xla" and o.exposed is not None
    )
    where = hides(plan)
    beside = dict(_beside_products(plan, region, took, where))
    for step in plan.body.every:
        for c in _own(step):
            if c not in where:
                exposed += (c.seconds or 0.0) * (c.count or 1) * beside.get(step, 1.0)
    return exposed + _clock(plan, region, took, where, flights_of(plan))


def _own(step: Step) -> Sequence[Collective]:
    """The collectives of a step that are sent by themselves: those of rings are in the decisions."""
    if isinstance(step, Reshard | Reduce) and step.ring is not None:
        return [c for c in step.sends if c.algorithm not in ("ring", "pallas") and not c.first]
    return step.sends


def _beside_products(
    plan: Plan, region: Region, took: Mapping[int, float], where: Mapping[Collective, int]
) -> Iterator[tuple[Step, float]]:
    """(step, the part of its collectives' time that stays exposed), where programs go on beside them.

    A collective that products wait for is under way beside those of its region that neither make what it sends nor follow from
    what it gives, each beside one. So the TPU compiler (libtpu 0.0.42) has it in backward layers of Llama: beside what is gathered
    of a cotangent runs the recomputed forward pass, beside the sum of the next one the gradients of the weights; all-reduces are
    asynchronous where reduce-scatters are, on cores of their own.
    """
    bits: dict[Node, int] = {}
    before: dict[Node, int] = {}
    products: dict[Node, None] = {}
    moves: dict[Node, float] = {}
    for node in region.nodes:
        for body in node.regions:
            yield from _beside_products(plan, body, took, where)
        seconds = 0.0
        if node.name == "move!" and node.step is not None:
            seconds = sum(c.seconds or 0.0 for c in _own(node.step) if c not in where and _goes_on(plan, c))
        if seconds:
            moves[node] = seconds
        elif node.products and id(node) in took:
            products[node] = None
        mine = 1 << len(bits) if seconds or node in products else 0
        if mine:
            bits[node] = mine
        for item in node.ins:
            if item.node is not None:
                mine |= before.get(item.node, 0)
        before[node] = mine
    for node, seconds in moves.items():
        left = seconds
        for other in [k for k in products if not (before[node] & bits[k] or before[k] & bits[node])]:
            if left > 0:
                left -= took[id(other)]
                del products[other]
        assert node.step is not None
        yield node.step, max(0.0, left) / seconds


def _goes_on(plan: Plan, c: Collective) -> bool:
    """Whether programs go on beside a collective, where something is there to do."""
    return c.op in ("all-gather", "reduce-scatter", "all-reduce") and goes_on(plan, c.op)


def _clock(
    plan: Plan, region: Region, took: Mapping[int, float], where: Mapping[Collective, int],
    flights: Mapping[Region, Mapping[Node, Flight]],
) -> float:  # fmt: skip
    """Seconds of one run of a region's kernels and of what hides behind them.

    Collectives that hide go one after the other. What is sent for ahead is on its way from when the product before the last one
    began, and the next kernel waits for it. A gradient is sent while the next product runs; the one after that waits for it,
    and so does the loop's end (:func:`meshpar.cost.flight.flights_of`). So large gradients beside short products are exposed,
    however long their loop is.
    """
    now = links = 0.0
    begun = [0.0, 0.0]  # when the last two products began
    sent: list[float] = []  # when gradients arrive that are under way: before the last product, and since
    waiting: list[float] = []
    for node in region.kernels:
        for body in node.regions:
            now += _clock(plan, body, took, where, flights) * (1 if body.trips is None else body.trips)
        if node.name == "move!" and node.step is not None:
            for c in _own(node.step):
                if c not in where:
                    continue
                seconds, late = c.seconds or 0.0, later_stages(plan, c)
                if flights[region][node].ahead:
                    links = max(links, begun[0]) + seconds
                    now = max(now, links)
                else:
                    links = max(links, now) + seconds - late
                    sent.append(links)
                    now += late
        if id(node) in took:
            if node.products:
                now = max([now, *waiting])
                waiting, sent = sent, []
                begun = [begun[1], now]
            now += took[id(node)]
    return max(now, links)


@once_per_plan
def hides(plan: Plan) -> dict[Collective, int]:
    """The collectives that hide behind kernels, and the loop (the id of its region) whose kernels they are.

    They are those under way beside kernels of their region (:func:`meshpar.cost.flight.flights_of`), unless programs wait for them.
    """
    return {
        c: id(region)
        for region, flights in flights_of(plan).items()
        for node in flights
        if node.step is not None
        for c in node.step.sends
        if goes_on(plan, c.op)
    }


def _bottleneck(time: Time, collectives: Sequence[Collective]) -> str:
    """What limits, in words, with the largest collective and its cause, or the largest kernel."""
    parts = {"communication": time.communication, "compute": time.compute, "memory traffic": time.memory}
    name, most = max(parts.items(), key=lambda x: x[1])
    if most == 0:
        return "nothing to do"
    others = ", ".join(f"{k} {duration(v)}" for k, v in parts.items() if k != name)
    if name == "communication":
        groups: dict[Any, float] = {}
        for c in collectives:
            key = (c.op, c.axes, c.cause)
            groups[key] = groups.get(key, 0.0) + (c.seconds or 0.0) * (c.count or 1)
        (op, axes, cause), seconds = max(groups.items(), key=lambda x: x[1])
        return (f"communication: {duration(most)} of collectives ({others}); most of it, {duration(seconds)}, is {op} over "
                f"{'+'.join(axes)}: {cause}")  # fmt: skip
    if name == "compute":
        top = max(time.ops, key=lambda o: o.flops * o.count)
        return f"compute: {duration(most)} of products ({others}); the largest is {top.name} at {top.source}"
    top = max(time.ops, key=lambda o: o.bytes * o.count)
    return (f"memory traffic: {duration(most)} ({others}); most of it, {human(top.bytes * top.count)}, by {top.name} at "
            f"{top.source}")  # fmt: skip

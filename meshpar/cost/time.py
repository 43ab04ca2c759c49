"""The time of a planned step on a chip: what each kernel computes and reads, what each collective sends, and what limits.

A kernel takes the longer of its products at the matrix unit's rate and its traffic with HBM; elementwise arithmetic is not
counted, it hides behind the traffic. Traffic is what :mod:`meshpar.cost.fusion` says a kernel reads and writes: each array once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..hardware.chips import Chip
from ..plan.collectives import Collective, duration, human
from ..program.ir import Op
from .flight import ahead_of, behind
from .flops import local_opaque_flops, model_flops, padded_flops
from .fusion import FUSED, PRODUCTS, VIEWS, Item, Node, Region, line_of
from .memory import kinds_of

if TYPE_CHECKING:
    from ..plan.plan import Plan


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
      seconds: the estimate: the kernels one after the other, each the longer of its products and its traffic; collectives of
        weights and gradients, which wait for nothing else in their loop, behind the kernels of that loop as far as those
        last, if programs for the chip go on beside them (``Chip.waits``); the other collectives on top; of what runs in blocks,
        what its products do not hide.
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


def time_of(plan: Plan, chip: Chip, region: Region) -> Time:
    """The time of a step.

    Args:
      chip: what it runs on, per chip; efficiencies as it has them.
      region: the plan's kernels.
    """
    device = chip.per_device()
    ops: list[OpTime] = []
    compute = memory = model = 0.0
    by_loop: dict[int, float] = {}
    for node, loop, count in kernels_with_counts(region):
        if node.regions:
            continue
        flops = sum(padded_flops(op, plan, chip.lanes) for op in node.products)
        if (
            node.op is not None and node.name == node.op.name
        ):  # the kernel itself, and no move of what it takes or gives
            flops += local_opaque_flops(node.op, plan)
        traffic = 0.0
        if node.name not in ("move!", "leave!"):
            traffic = sum(item.bytes for item in node.writes) + sum(read_bytes(node, item) for item in node.reads)
            traffic += sum(i.bytes for i in node.ins) if node.name == "stack!" else 0.0
        rate = device.flops
        if node.products:
            rate = device.matmul_rate(str(node.products[0].eqn.invars[0].aval.dtype))
        busy, moved = flops / (rate * chip.matmul_efficiency), traffic / (device.hbm_bandwidth * chip.hbm_efficiency)
        if not busy and not moved:
            continue
        compute += busy * count
        memory += moved * count
        by_loop[loop] = by_loop.get(loop, 0.0) + max(busy, moved) * count
        name = node.products[0].name if node.products else node.name.rstrip("!")
        origin = node.products[0] if node.products else node.op
        ops.append(OpTime(name, flops, traffic, max(busy, moved), count, origin))
    model = model_flops(plan)
    communication = sum((c.seconds or 0.0) * (c.count or 1) for c in plan.collectives)
    seconds = _estimate(plan, region, by_loop)
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


def read_bytes(node: Node, item: Item) -> float:
    """What a kernel reads of an array: all of it, or of a stack the slice that it works on."""
    if any(item is i for i in node.ins):
        return item.bytes
    todo, least = list(node.ins), item.bytes
    seen: set[int] = set()
    while todo:
        i = todo.pop()
        if id(i) in seen or i.stored or i.node is None:
            continue
        seen.add(id(i))
        if i.node.name in ("slice", "dynamic_slice", "gather") and any(j is item for j in i.node.ins):
            least = min(least, i.bytes)
        todo += i.node.ins
    return least


def _estimate(plan: Plan, region: Region, by_loop: dict[int, float]) -> float:
    """Kernels loop by loop, collectives that can hide behind them hidden as far as they last, the others added."""
    hidden: dict[int, float] = {}
    exposed = sum(
        o.exposed[o.choice] * (o.count or 1) for o in plan.overlaps if o.choice != "xla" and o.exposed is not None
    )
    where = hides(plan, region)
    waits = frozenset() if plan.chip is None else plan.chip.waits
    for c in plan.collectives:
        if id(c) in plan.rings.sent:
            continue
        seconds = (c.seconds or 0.0) * (c.count or 1)
        loop = where.get(c.place)
        if loop is None or c.op in waits:
            exposed += seconds
        else:
            hidden[loop] = hidden.get(loop, 0.0) + seconds
    loops = {**dict.fromkeys(hidden, 0.0), **by_loop}
    return exposed + sum(max(seconds, hidden.get(loop, 0.0)) for loop, seconds in loops.items())


def hides(plan: Plan, region: Region) -> dict[tuple[int, tuple[int, ...]], int | None]:
    """(equation, shape) → the loop behind whose kernels a collective hides, or None: it waits for them, or they for it.

    One that moves what its loop reads but does not make (a weight) can be sent for ahead; one whose result only leaves its
    loop, or is a gradient, can be sent while the next kernels run.
    """
    out: dict[tuple[int, tuple[int, ...]], int | None] = {}
    kind_of = kinds_of(plan)

    def walk(r: Region) -> None:
        ahead = ahead_of(r)
        for node in r.nodes:
            for body in node.regions:
                walk(body)
            if node.name != "move!" or node.op is None:
                continue
            made = made_by(node)
            found = id(r) if ahead(node) or behind(node, kind_of) else None
            for op in (node.op, made if made is not None else node.op):
                for o in node.outs:
                    key = (id(op.eqn), o.value.shape)
                    out[key] = found if key not in out or out[key] == found else None

    walk(region)
    return out


def made_by(move: Node) -> Op | None:
    """The op that made the partial sum that a move settles: before the views through which it passed unsettled."""
    node = move
    while len(node.ins) == 1 and node.name not in PRODUCTS and (node is move or node.name in FUSED | VIEWS):
        if node.ins[0].node is None:
            break
        node = node.ins[0].node
    return node.op


def _bottleneck(time: Time, collectives: list[Collective]) -> str:
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

"""How much of its communication a compiled TPU program leaves exposed, by its own final schedule.

The scheduled instructions of every computation are gone through in order, with a clock. What computes takes the compiler's own
``estimated_cycles``. An asynchronous collective (start and end, a chain of fusions, a call on the SparseCores) occupies its links
from its start for the time that the hardware table gives it; where its end is waited for and has not come, the wait is
exposed. Those of one kind over the same devices go one after the other, others that are under way at once share the links that
both need. A synchronous collective is exposed for as long as it takes. Loops multiply; what a loop starts it ends.

Kernels of which the compiler states no cycles (Pallas) count as nothing: what runs beside them counts as exposed. Local copies are
not looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp
from ..hardware.collective_time import seconds_of
from ..hardware.topology import Places, Stage
from .hlo import HloCollective, branches_of, collective_of, estimate, inside
from .hlo_text import Instruction, Module, parse
from .loops import Scope, trip_count

_PRODUCTS = frozenset({"convolution", "dot"})


@dataclass(slots=True)
class Exposed:
    """Seconds of a step on one device.

    Attributes:
      seconds: of communication in which nothing is computed.
      sent: of all communication, were it one after the other.
      compute: of what computes.
      products: cycles of what holds matrix products.
      in_loops: of ``seconds``, those inside loops: of scanned layers, without what stands before and after them.
      by_kind: exposed seconds by kind of collective, asynchronous ones as ``all-gather (async)``.
    """

    seconds: float = 0.0
    sent: float = 0.0
    compute: float = 0.0
    products: float = 0.0
    in_loops: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def schedule(self) -> float:
        """What computes, and what is exposed."""
        return self.compute + self.seconds

    def wait(self, kind: str, seconds: float) -> None:
        self.seconds += seconds
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds

    def add(self, other: Exposed, times: float) -> None:
        self.seconds += other.seconds * times
        self.sent += other.sent * times
        self.compute += other.compute * times
        self.products += other.products * times
        self.in_loops += other.in_loops * times
        for kind, n in other.by_kind.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0.0) + n * times


def exposed(text: str, chip: Chip, places: Places, *, unknown: int = 1) -> Exposed:
    """What a final, scheduled HLO module leaves exposed; of a condition the longest branch.

    Args:
      text: the module.
      chip: what it runs on; its ``clock`` must be known.
      places: of its devices, in the order of the partitions.
      unknown: trips of a loop whose number is not known.

    Raises:
      ValueError: the text is no HLO module, or the chip's clock is not known.
    """
    if not chip.compiler.clock_hz:
        raise ValueError(f"the clock of {chip.name} is not known, so cycles are no seconds")
    module = parse(text)
    return _Timeline(module, chip, places, unknown).run(Scope(module, module.computations[module.entry], ()))


def wire_seconds(c: HloCollective, chip: Chip, places: Places) -> float:
    """Seconds of one collective of a compiled program, alone on its links."""
    if not c.bytes or not c.members:
        return 0.0
    if c.op == "collective-permute":
        stage, hops = places.hop(c.members)
        return max(chip.latency * hops, hops * seconds_of("collective-permute", c.bytes, [stage], chip))
    stages: Sequence[Stage] = places.stages(c.members)
    share = (c.group - 1) / c.group
    kinds: dict[str, CollectiveOp] = {
        "all-gather": "all-gather",
        "reduce-scatter": "reduce-scatter",
        "all-reduce": "all-reduce",
    }
    kind = kinds.get(c.op, "all-to-all")
    volume = c.bytes / share
    volume = volume / 2 if kind == "all-reduce" else volume * c.group if kind == "all-to-all" else volume
    return seconds_of(kind, volume, stages, chip)


@dataclass(eq=False, slots=True)
class _Flight:
    """A collective under way: its queue, the links that it needs, and the seconds that it would yet take alone on them."""

    kind: str
    queue: Any
    links: frozenset[tuple[str, int]]
    left: float


class _Wires:
    """The links of a device: the first collective of every queue is sent, and those that need one link share it."""

    def __init__(self) -> None:
        self.flights: list[_Flight] = []  # in the order in which they began

    def send(self, kind: str, queue: Any, links: frozenset[tuple[str, int]], seconds: float) -> _Flight:
        flight = _Flight(kind, queue, links, seconds)
        if seconds:
            self.flights.append(flight)
        return flight

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        while self.flights and seconds > 0:
            seconds -= self._step(seconds)

    def until(self, flight: _Flight) -> float:
        """Let time pass until a collective has ended; returns the seconds."""
        passed = 0.0
        while any(f is flight for f in self.flights):
            passed += self._step(math.inf)
        return passed

    def _step(self, most: float) -> float:
        """Go on to the next end of a collective, or for so many seconds; returns the seconds."""
        heads = list({f.queue: f for f in reversed(self.flights)}.values())
        users = Counter(link for f in heads for link in f.links)
        shares = [(f, max((users[link] for link in f.links), default=1)) for f in heads]
        first, share = min(shares, key=lambda x: x[0].left * x[1])
        seconds = min(most, first.left * share)
        for f, n in shares:
            f.left -= seconds / n
        if seconds < most:
            first.left = 0.0  # whatever rounding leaves of it
        self.flights = [f for f in self.flights if f.left > 0]
        return seconds


class _Timeline:
    def __init__(self, module: Module, chip: Chip, places: Places, unknown: int):
        self.module, self.chip, self.places, self.unknown = module, chip, places, unknown

    def run(self, scope: Scope) -> Exposed:
        """One run of a computation, from idle links to idle links."""
        out = Exposed()
        wires = _Wires()
        flights: dict[str, _Flight] = {}  # asynchronous collectives under way, the last of each start

        def wait(flight: _Flight) -> None:
            seconds = wires.until(flight)
            if seconds:
                out.wait(flight.kind, seconds)

        for i in scope.computation:
            role, sent = self.role(i, scope)
            if role == "done":
                flight = flights.pop(_begun(i, scope, set(flights)), None)
                if flight is not None:
                    wait(flight)
                continue
            for c in sent:
                seconds = wire_seconds(c, self.chip, self.places) * (1 if c.count is None else c.count)
                out.sent += seconds
                links = self.places.links(c.members or (), c.pairs)
                kind = f"{c.op} (async)" if role == "start" else c.op
                flight = wires.send(kind, (c.op, c.members), links, seconds)
                if role == "start":
                    flights[i.name] = flight
                else:
                    wait(flight)
            if i.opcode in ("while", "conditional", "call"):
                inner = self.inner(i, scope)
                out.add(inner, 1)
                wires.pass_by(inner.schedule)
                continue
            cycles = estimate(i)
            if cycles:
                wires.pass_by(cycles / self.chip.compiler.clock_hz)
                out.compute += cycles / self.chip.compiler.clock_hz
                out.products += cycles * self.multiplies(i)
        for flight in flights.values():
            wait(flight)
        return out

    def role(self, i: Instruction, scope: Scope) -> tuple[str, list[HloCollective]]:
        """(``start``, ``done`` or neither; the collectives that begin here)."""
        if i.opcode.endswith("-done"):
            return ("done" if not i.opcode.startswith(("copy", "slice", "recv", "send", "dynamic")) else ""), []
        if i.opcode == "fusion":
            if i.name.startswith("async-collective-done"):
                return "done", []
            found = inside(self.module, i, scope)
            if i.name.startswith("async-collective-start"):
                return "start", found[:1]
            # a product that moves a collective on has a part of its chain: the start has counted it
            return "", [] if any(_CHAIN in x.attributes for x in self.instructions(i)) else found
        if i.opcode in ("while", "conditional", "call"):
            return "", []
        c = collective_of(self.module, i, scope)
        if c is not None:
            return ("start" if i.opcode.endswith("-start") else ""), [c]
        if i.opcode in ("async-start", "call-start"):
            found = inside(self.module, i, scope)
            return ("start" if found else ""), found if i.opcode == "call-start" else found[:1]
        return "", []

    def instructions(self, i: Instruction) -> list[Instruction]:
        called = self.module.computations.get(i.called or "")
        found = list(called) if called else []
        return found + [x for inner in found if inner.opcode == "fusion" for x in self.instructions(inner)]

    def multiplies(self, i: Instruction) -> bool:
        return i.opcode in _PRODUCTS or any(x.opcode in _PRODUCTS for x in self.instructions(i))

    def inner(self, i: Instruction, scope: Scope) -> Exposed:
        out = Exposed()
        if i.opcode == "while":
            trips, fixed = trip_count(scope, i)
            body = scope.inner(i.attribute("body"), [lambda: fixed.get])
            if body is not None:
                out.add(self.run(body), self.unknown if trips is None else trips)
            out.in_loops = out.seconds
            return out
        names = branches_of(i) if i.opcode == "conditional" else [i.called or ""]
        arguments = [] if i.opcode == "conditional" else [lambda x=x: scope.value(x) for x in i.operands]
        runs = [self.run(s) for name in names if (s := scope.inner(name, arguments)) is not None]
        return max(runs, key=lambda e: e.schedule, default=out)


_CHAIN = "chain_id="
"""What XLA writes on the parts of one collective that several fusions share."""


def _begun(i: Instruction, scope: Scope, under_way: set[str]) -> str:
    """The start that an end belongs to: among what its operands are made of, else the one with its number."""
    todo, seen = list(i.operands), set[str]()
    while todo:
        name = todo.pop().partition("#")[0]
        if name in under_way:
            return name
        if name in seen or len(seen) > 64:
            continue
        seen.add(name)
        made = scope.computation.get(name)
        if made is not None and made.opcode in ("get-tuple-element", "bitcast", "tuple", "fusion", "async-update"):
            todo += made.operands
    return i.name.replace("-done", "-start", 1)


def places_of(devices: Sequence[Any]) -> Places:
    """The places of a program's devices on their slice, in the order of the partitions."""
    return Places.of(np.asarray(devices, object))

"""Exposed communication of a compiled TPU program, from its final schedule.

The scheduled instructions of every computation are simulated in order. A computing instruction takes the compiler's
``estimated_cycles``. An asynchronous collective (start and done, a chain of fusions, a call on the SparseCores) occupies its links
from its start for the time of the hardware table; if its done instruction is reached earlier, the remaining time is exposed.
Collectives of one kind over the same devices run sequentially; others that are in flight at the same time share their common links.
A synchronous collective is exposed for its full duration. Loop bodies count with their trip counts; a collective that a loop body
starts also ends in it.

Kernels without an estimate of the compiler (Pallas) take no time: collectives that overlap with them count as exposed. Local copies
are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp, collective_volume
from ..hardware.collective_time import seconds_of
from ..hardware.topology import Places
from .hlo import HloCollective, branches_of, collective_of, estimate, inside
from .hlo_text import Instruction, Module, parse
from .trip_counts import Scope, trip_count

_MATMULS = frozenset({"convolution", "dot"})


@dataclass(slots=True)
class Exposed:
    """Seconds of a step on one device.

    Attributes:
      seconds: exposed communication.
      sent: all communication, run sequentially.
      compute: computing instructions.
      matmul_cycles: cycles of instructions that contain matmuls or convolutions.
      in_loops: the part of ``seconds`` that is inside loops, such as a scan over layers.
      by_kind: exposed seconds by kind of collective; asynchronous ones as ``all-gather (async)``.
    """

    seconds: float = 0.0
    sent: float = 0.0
    compute: float = 0.0
    matmul_cycles: float = 0.0
    in_loops: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)

    @property
    def schedule(self) -> float:
        """Compute and exposed communication."""
        return self.compute + self.seconds

    def add_exposed(self, kind: str, seconds: float) -> None:
        """Count exposed seconds of a kind of collective."""
        self.seconds += seconds
        self.by_kind[kind] = self.by_kind.get(kind, 0.0) + seconds

    def add(self, other: Exposed, times: float) -> None:
        """Add the times of a computation that runs ``times`` times."""
        for kind, seconds in other.by_kind.items():
            self.add_exposed(kind, seconds * times)
        self.sent += other.sent * times
        self.compute += other.compute * times
        self.matmul_cycles += other.matmul_cycles * times
        self.in_loops += other.in_loops * times


def exposed(text: str, chip: Chip, places: Places, *, unknown: int = 1) -> Exposed:
    """Exposed communication of a final, scheduled HLO module; a conditional counts with its longest branch.

    Args:
      text: the module.
      chip: the chip of its devices; its clock must be known.
      places: the torus positions of its devices, in the order of the partitions.
      unknown: trip count of loops whose trip count is not known.

    Raises:
      ValueError: the text is no HLO module, or the chip's clock is not known.
    """
    if not chip.compiler.clock_hz:
        raise ValueError(f"the clock of {chip.name} is not known, so that cycles cannot be converted to seconds")
    module = parse(text)
    return _Timeline(module, chip, places, unknown).run(Scope(module, module.computations[module.entry], ()))


def wire_seconds(c: HloCollective, chip: Chip, places: Places) -> float:
    """Seconds of one execution of a collective of a compiled program, without other traffic on its links."""
    if not c.bytes or not c.members:
        return 0.0
    if c.op == "collective-permute":
        stage, hops = places.hop(c.members)
        return max(chip.latency * hops, hops * seconds_of("collective-permute", c.bytes, [stage], chip))
    kinds: dict[str, CollectiveOp] = {x: x for x in ("all-gather", "reduce-scatter", "all-reduce")}
    kind = kinds.get(c.op, "all-to-all")
    return seconds_of(kind, collective_volume(kind, c.bytes, c.group), places.stages(c.members), chip)


@dataclass(eq=False, slots=True)
class _Transfer:
    """A collective in flight.

    Attributes:
      queue: collectives with the same queue run sequentially.
      links: the links that it uses.
      left: remaining seconds without other traffic on its links.
    """

    kind: str
    queue: Any
    links: frozenset[tuple[str, int]]
    left: float


class _Links:
    """The links of a device. The first collective of every queue is being sent; those with a common link share it equally."""

    def __init__(self) -> None:
        self.transfers: list[_Transfer] = []  # in the order of their starts

    def start(self, kind: str, queue: Any, links: frozenset[tuple[str, int]], seconds: float) -> _Transfer:
        """Start a collective that takes ``seconds`` without other traffic."""
        transfer = _Transfer(kind, queue, links, seconds)
        if seconds:
            self.transfers.append(transfer)
        return transfer

    def advance(self, seconds: float) -> None:
        """Advance the clock by some seconds."""
        while self.transfers and seconds > 0:
            seconds -= self._step(seconds)

    def wait_for(self, transfer: _Transfer) -> float:
        """Advance the clock until a collective has ended; returns the seconds."""
        passed = 0.0
        while any(t is transfer for t in self.transfers):
            passed += self._step(math.inf)
        return passed

    def _step(self, most: float) -> float:
        """Advance to the next end of a collective, at most by ``most`` seconds; returns the seconds."""
        heads = list({t.queue: t for t in reversed(self.transfers)}.values())
        users = Counter(link for t in heads for link in t.links)
        shares = [(t, max((users[link] for link in t.links), default=1)) for t in heads]
        first, share = min(shares, key=lambda x: x[0].left * x[1])
        seconds = min(most, first.left * share)
        for t, n in shares:
            t.left -= seconds / n
        if seconds < most:
            first.left = 0.0  # without a rounding error
        self.transfers = [t for t in self.transfers if t.left > 0]
        return seconds


class _Timeline:
    """Simulates the scheduled instructions of a module."""

    def __init__(self, module: Module, chip: Chip, places: Places, unknown: int):
        self.module, self.chip, self.places, self.unknown = module, chip, places, unknown

    def run(self, scope: Scope) -> Exposed:
        """One execution of a computation; no collective is in flight before and after it."""
        out = Exposed()
        network = _Links()
        in_flight: dict[str, _Transfer] = {}  # by the name of the start instruction

        def wait(transfer: _Transfer) -> None:
            seconds = network.wait_for(transfer)
            if seconds:
                out.add_exposed(transfer.kind, seconds)

        for i in scope.computation:
            role, sent = self.role(i, scope)
            if role == "done":
                transfer = in_flight.pop(_start_of(i, scope, set(in_flight)), None)
                if transfer is not None:
                    wait(transfer)
                continue
            for c in sent:
                seconds = wire_seconds(c, self.chip, self.places) * (1 if c.count is None else c.count)
                out.sent += seconds
                links = self.places.links(c.members or (), c.pairs)
                kind = f"{c.op} (async)" if role == "start" else c.op
                transfer = network.start(kind, (c.op, c.members), links, seconds)
                if role == "start":
                    in_flight[i.name] = transfer
                else:
                    wait(transfer)
            if i.opcode in ("while", "conditional", "call"):
                inner = self.inner(i, scope)
                out.add(inner, 1)
                network.advance(inner.schedule)
                continue
            cycles = estimate(i)
            if cycles:
                network.advance(cycles / self.chip.compiler.clock_hz)
                out.compute += cycles / self.chip.compiler.clock_hz
                has_matmul = i.opcode in _MATMULS or any(x.opcode in _MATMULS for x in self.instructions(i))
                out.matmul_cycles += cycles * has_matmul
        for transfer in in_flight.values():
            wait(transfer)
        return out

    def role(self, i: Instruction, scope: Scope) -> tuple[str, list[HloCollective]]:
        """(``start``, ``done`` or "", and the collectives that the instruction starts)."""
        if i.opcode.endswith("-done"):
            return ("" if i.opcode.startswith(("copy", "slice", "recv", "send", "dynamic")) else "done"), []
        if i.opcode == "fusion":
            if i.name.startswith("async-collective-done"):
                return "done", []
            inner = inside(self.module, i, scope)
            if i.name.startswith("async-collective-start"):
                return "start", inner[:1]
            # a matmul fusion may contain a step of a chain, whose collective the start has counted
            return "", [] if any(_CHAIN in x.attributes for x in self.instructions(i)) else inner
        if i.opcode in ("while", "conditional", "call"):
            return "", []
        c = collective_of(self.module, i, scope)
        if c is not None:
            return ("start" if i.opcode.endswith("-start") else ""), [c]
        if i.opcode in ("async-start", "call-start"):
            inner = inside(self.module, i, scope)
            return ("start" if inner else ""), inner if i.opcode == "call-start" else inner[:1]
        return "", []

    def instructions(self, i: Instruction) -> list[Instruction]:
        """The instructions of a fusion, nested fusions included."""
        called = self.module.computations.get(i.called or "")
        own = list(called) if called else []
        return own + [x for inner in own if inner.opcode == "fusion" for x in self.instructions(inner)]

    def inner(self, i: Instruction, scope: Scope) -> Exposed:
        """The times of a loop with its trip count, of the longest branch of a conditional, or of a call."""
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
"""Attribute of the fusions that execute one collective together."""


def _start_of(i: Instruction, scope: Scope, in_flight: set[str]) -> str:
    """The name of the start that a done instruction belongs to: from its operands, else from its own name."""
    todo, seen = list(i.operands), set[str]()
    while todo:
        name = todo.pop().partition("#")[0]
        if name in in_flight:
            return name
        if name in seen or len(seen) > 64:
            continue
        seen.add(name)
        source = scope.computation.get(name)
        if source is not None and source.opcode in ("get-tuple-element", "bitcast", "tuple", "fusion", "async-update"):
            todo += source.operands
    return i.name.replace("-done", "-start", 1)

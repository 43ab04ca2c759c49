"""Collectives and cycles of compiled programs, from their HLO text, with loop trip counts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..hardware.collective_ops import wire_bytes
from .hlo_text import CALLS, Instruction, Module, arrays, byte_size, closing, parse
from .trip_counts import Scope, trip_count

_GROUPED = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")
KINDS = (*_GROUPED, "ragged-all-to-all", "collective-permute", "collective-broadcast")
_DCN = {"ONE_TO_ONE": "collective-permute", **{kind.upper().replace("-", "_"): kind for kind in _GROUPED}}
_SLICE = 100_000  # the TPU runtime numbers the chips of slice k (from 1) from k times this on


@dataclass(slots=True)
class HloCollective:
    """One collective instruction of a compiled program.

    Attributes:
      op: its kind, ``"all-gather"`` …; a TPU ``all-reduce-scatter`` fusion is a reduce-scatter.
      group: devices per group; 0 for a collective-permute, which has pairs.
      members: partition numbers of the first group (of the first pair); None if the text does not list them.
      shape: the gathered result of an all-gather, else the operands: ``bf16[4096,2048]``.
      bytes: sent by each device in one execution. With g devices in a group: all-gather result·(g-1)/g; reduce-scatter and
        all-to-all operand·(g-1)/g; all-reduce 2·operand·(g-1)/g; collective-permute the operand; ragged all-to-all at most the
        smaller of input and output·(g-1)/g.
      count: executions in a step; None if a trip count is not known.
      dcn: whether it is between slices. The final TPU program has such collectives as transfers of the runtime, and
        those within a slice with device numbers of one slice.
      name: name of the instruction.
      op_name: JAX's name of the op.
      source: the user's source line; "" if the text does not have it.
      pairs: of a collective-permute: (source, target) pairs of different devices.
    """

    op: str
    group: int
    members: tuple[int, ...] | None
    shape: str
    bytes: float
    count: int | None
    dcn: bool
    name: str
    op_name: str
    source: str
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def total_bytes(self) -> float:
        """Bytes in a step; loops of unknown length count once."""
        return self.bytes * (1 if self.count is None else self.count)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes along which its members differ, for a mesh of these sizes in the program's device order."""
        if not self.members:
            return ()
        coordinates = np.unravel_index(self.members, tuple(sizes.values()))
        return tuple(a for a, along in zip(sizes, coordinates, strict=True) if len(set(along.tolist())) > 1)


@dataclass(slots=True)
class Run:
    """An instruction of a compiled program, with its computation and the number of its executions.

    Attributes:
      scope: of its computation.
      count: executions in a step; None if a trip count is not known.
      fused: inside a fusion or on another thread, so that its estimated cycles do not count.
      scattered: inside an all-reduce-scatter fusion.
    """

    instruction: Instruction
    scope: Scope
    count: int | None
    fused: bool
    scattered: bool


def collectives(text: str) -> list[HloCollective]:
    """Every collective of an HLO module (right after partitioning, or final; any platform), in order of execution.

    Counts include loop trip counts; a conditional counts with the branch that sends most; a TPU collective that is executed by
    several fusions (a chain) is listed once, at its start. Remote copies inside Pallas kernels are not collectives.

    Raises:
      ValueError: the text is no HLO module.
    """
    module = parse(text)
    runs = walk(module, lambda runs: sum(c.total_bytes for c in _collectives(module, runs)))
    return _collectives(module, list(runs))


def total(text: str, of: Callable[[Run], float], unknown: int = 1) -> float:
    """A quantity of instructions in a step: of each one times its executions, of conditionals in the branch with most of it.

    Args:
      text: an HLO module.
      of: the quantity of one execution.
      unknown: trip count of loops whose trip count is not known.

    Raises:
      ValueError: the text is no HLO module.
    """

    def cost(runs: Iterable[Run]) -> float:
        return sum(n * (unknown if r.count is None else r.count) for r in runs if (n := of(r)))

    return float(cost(walk(parse(text), cost)))


def cycles(text: str) -> float:
    """The TPU compiler's estimate of the cycles of a step: ``estimated_cycles`` of every fusion times its executions.

    It does not include communication. Loops of unknown length count once.
    """
    return total(text, lambda r: 0 if r.fused else estimate(r.instruction))


def estimate(i: Instruction) -> int:
    """The TPU compiler's cycles of an instruction; 0 if there is no estimate, or the largest integer (SparseCore copies)."""
    m = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return int(m[1]) if m and int(m[1]) < 2**63 - 1 else 0


def walk(module: Module, cost: Callable[[Sequence[Run]], float]) -> Iterator[Run]:
    """Every instruction of a module, also inside fusions, calls and loops, and in the most expensive branch of conditionals."""
    entry = Scope(module, module.computations[module.entry], ())
    yield from _visit(entry, 1, False, False, cost)


def _visit(
    scope: Scope, count: int | None, fused: bool, scattered: bool, cost: Callable[[Sequence[Run]], float]
) -> Iterator[Run]:
    """The instructions of a computation and of the computations that it calls, with their counts."""
    for i in scope.computation:
        yield Run(i, scope, count, fused, scattered)
        if i.opcode == "while":
            trips, fixed = trip_count(scope, i)
            times = None if trips is None or count is None else count * trips
            for part in ("condition", "body"):
                inner = scope.inner(i.attribute(part), [lambda fixed=fixed: fixed.get])
                if inner:
                    yield from _visit(inner, times, fused, scattered, cost)
        elif i.opcode == "conditional":
            branches = [
                list(_visit(inner, count, fused, scattered, cost))
                for name in branches_of(i)
                if (inner := scope.inner(name, ())) is not None
            ]
            yield from max(branches, key=cost, default=[])
        elif i.opcode in ("fusion", "async-start", "custom-call", *CALLS) and i.called:
            inner = scope.inner(i.called, [lambda x=x: scope.value(x) for x in i.operands])
            if inner:
                within = scattered or "all-reduce-scatter" in inner.computation.name
                yield from _visit(inner, count, fused or i.opcode in ("fusion", "call-start"), within, cost)


def branches_of(i: Instruction) -> list[str]:
    """The computations of a conditional."""
    m = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
    if m:
        return re.findall(r"%?([\w.\-]+)", m[1])
    return [name for key in ("true_computation", "false_computation") if (name := i.attribute(key))]


def _collectives(module: Module, runs: Sequence[Run]) -> list[HloCollective]:
    """The collectives among some instructions; a chain is listed once, at its start."""
    sending = [(r, kind) for r in runs if (kind := _kind(r.instruction))]
    chains: dict[tuple[str, ...], list[Run]] = {}
    for run, kind in sending:
        chain = re.search(r'chain_id="(\d+)"', run.instruction.attributes)
        if chain and run.fused:
            chains.setdefault((kind, chain[1], run.instruction.attribute("channel_id") or ""), []).append(run)
    skipped: set[int] = set()
    for chain_runs in chains.values():
        starts = [r for r in chain_runs if any('"AsyncCollectiveStart"' in i.attributes for i in r.scope.computation)]
        listed = starts or [min(chain_runs, key=lambda r: math.inf if r.count is None else r.count)]
        skipped |= {id(r) for r in chain_runs} - {id(r) for r in listed}
    return [_record(module, r, kind) for r, kind in sending if id(r) not in skipped]


def collective_of(module: Module, i: Instruction, scope: Scope) -> HloCollective | None:
    """The collective that an instruction is or starts, with a count of 1; None if it is not a collective."""
    kind = _kind(i)
    return None if kind is None else _record(module, Run(i, scope, 1, False, False), kind)


def inside(module: Module, i: Instruction, scope: Scope) -> list[HloCollective]:
    """The collectives inside a fusion or an asynchronous call, with their counts in one execution of it."""
    inner = scope.inner(i.called, [lambda x=x: scope.value(x) for x in i.operands])
    if inner is None:
        return []
    scattered = "all-reduce-scatter" in inner.computation.name
    runs = list(_visit(inner, 1, True, scattered, lambda runs: float(len(runs))))
    return [_record(module, r, kind) for r in runs if (kind := _kind(r.instruction)) is not None]


def _kind(i: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts; None if it is not a collective."""
    if i.opcode == "send":
        m = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.attributes)
        return _DCN.get(m[1]) if m else None
    op = i.opcode.removesuffix("-start")
    return op if op in KINDS else None


def _record(module: Module, run: Run, kind: str) -> HloCollective:
    """The collective of ``kind`` that an instruction runs, with its group, bytes and source."""
    i = run.instruction
    if i.opcode == "send":
        return _between_slices(module, run, kind)
    group, members = _group(i.attributes, module.devices)
    if kind == "all-reduce" and run.scattered:
        kind = "reduce-scatter"
    shapes = [arrays(o.shape) for x in i.operands if (o := run.scope.computation.get(x))]
    shown = [a for s in shapes for a in s]
    size, remote = byte_size(shown), ()
    if kind == "all-gather":
        result = arrays(i.shape)
        shown = result[len(i.operands) :] if i.opcode.endswith("-start") else result
        size = byte_size(shown)
    elif kind == "collective-permute":
        pairs = _pairs(i.attributes)
        remote = tuple(p for p in pairs if p[0] != p[1])
        group, members, shown = 0, (*remote, *pairs, None)[0], shapes[0]
        size = size if remote or not pairs else 0.0
    elif kind == "ragged-all-to-all":
        shown, size = shapes[0], min(map(byte_size, shapes[:2]))
    sent = wire_bytes(kind, size, group)
    return HloCollective(
        kind, group, members, _shapes(shown), sent, run.count, False, i.name, i.op_name, module.source(i), remote
    )


def _shapes(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{t}[{','.join(map(str, dims))}]" for t, dims in shapes)


def _between_slices(module: Module, run: Run, kind: str) -> HloCollective:
    """A transfer over DCN, from its ``send`` instruction: the data of one device, and the target slices (or chips)."""
    i = run.instruction
    operand = run.scope.computation.get(i.operands[0])
    data = arrays(operand.shape) if operand else []
    target = i.attributes[i.attributes.find("_xla_megascale_target=") :]
    first = re.search(r"\{([\d,>\-]+)\}", target)
    numbers = [int(n) for n in re.findall(r"\d+", first[1])] if first else []
    slices = [n // _SLICE if n >= _SLICE else n for n in numbers]
    g = len(slices)
    sent = wire_bytes(kind, byte_size(data) * (g if kind == "all-gather" else 1), g) if g else 0.0
    members = tuple((s - 1) * module.devices for s in slices) or None
    group, source = 0 if kind == "collective-permute" else g, module.source(i)
    return HloCollective(kind, group, members, _shapes(data), sent, run.count, True, i.name, i.op_name, source)


def _pairs(attributes: str) -> list[tuple[int, int]]:
    """The (source, target) pairs of a collective-permute."""
    at = attributes.find("source_target_pairs=")
    if at < 0:
        return []
    at += len("source_target_pairs=")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", attributes[at : closing(attributes, at)])]


def _group(attributes: str, devices: int) -> tuple[int, tuple[int, ...] | None]:
    """(size of a replica group, members of the first group), from any of XLA's notations."""
    at = attributes.find("replica_groups=")
    text = "" if at < 0 else attributes[at + len("replica_groups=") :]
    if text.startswith("mesh["):
        return _mesh_group(text)
    if text.startswith("["):  # [groups,size]<=[sizes]T(permutation)
        m = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
        assert m is not None, text[:80]
        sizes = [int(n) for n in m[2].split(",")]
        order = [int(n) for n in m[3].split(",")] if m[3] else list(range(len(sizes)))
        size = int(m[1].split(",")[-1])
        numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()
        return size, tuple(numbers[:size].tolist())
    listed = re.match(r"\{\s*\{([\d,\s]+)\}", text)
    if listed:
        members = tuple(int(n) for n in listed[1].split(","))
        return len(members), members
    return devices, tuple(range(devices))


def _mesh_group(text: str) -> tuple[int, tuple[int, ...] | None]:
    """As :func:`_group`, for ``mesh['x'=2,'y'=4] {'x'}``; a sub-axis is ``'x':(pre-size)size``."""
    end = closing(text, 4)
    sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", text[4:end])}
    brace = text.find("{", end)
    strides = {a: math.prod(list(sizes.values())[k + 1 :]) for k, a in enumerate(sizes)}
    used = []
    for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text[brace : closing(text, brace)]):
        n = int(size) if size else sizes[axis]
        used.append((n, strides[axis] * (sizes[axis] // (int(before) * n) if size else 1)))
    members = [0]
    for n, stride in used:
        members = [m + k * stride for m in members for k in range(n)]
    return len(members), None if "device_ids" in text[:brace] else tuple(members)

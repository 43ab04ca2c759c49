"""Reads traces of ``jax.profiler``: which instructions of which compiled program ran when, on which device.

A trace is a folder that ``jax.profiler.trace`` wrote, or one of its ``.xplane.pb`` files. JAX reads the events of these files, but
not the compiled programs that the profiler adds to them. The few fields of these that are needed are read here, by the numbers
of fields in XLA's ``hlo.proto`` and in the profiler's ``xplane.proto``.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ..errors import UnsupportedError

_METADATA_PLANE = "/host:metadata"
_MODULE_LINE = "XLA Modules"


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
      opcode: as in HLO.
      op_name: JAX's name of its op.
      sizes: bytes of the arrays of its result, one for each element of a tuple.
      reduction: JAX's name of the op that has the reduction computation of a collective; "" without one. The TPU compiler replaces
        some reduce-scatters by an all-reduce without an ``op_name``, whose reduction still has the name.
    """

    opcode: str
    op_name: str
    sizes: tuple[int, ...] = ()
    reduction: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """One run of an instruction.

    Attributes:
      name: of the instruction.
      device: the device that ran it.
      start, end: in seconds.
    """

    name: str
    device: str
    start: float
    end: float


@dataclass(slots=True)
class ProgramTrace:
    """The events of one compiled program in a trace.

    Attributes:
      name: of the program: ``jit_train_step``.
      instructions: name → instruction.
      events: the runs of its instructions.
      runs: number of times that a device ran the program.
    """

    name: str
    instructions: dict[str, Instruction]
    events: list[Event] = field(default_factory=list)
    runs: int = 0

    @property
    def devices(self) -> set[str]:
        """The devices that ran it."""
        return {e.device for e in self.events}


def read_trace(path: str | Path) -> list[ProgramTrace]:
    """The compiled programs of a trace that ran, with the runs of their instructions.

    Args:
      path: a ``.xplane.pb`` file, or a folder with such files below it, one for each process.

    Raises:
      UnsupportedError: there is no such file, or it has no compiled programs.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"))
    if not files:
        raise UnsupportedError(
            f"{path}: there is no trace", fixes=["trace some steps with `with jax.profiler.trace(folder):`"]
        )
    with warnings.catch_warnings():  # jaxlib 0.12: a type without __module__, and it aborts if this is an error
        warnings.simplefilter("ignore", DeprecationWarning)
        programs = [p for file in files for p in _programs(file)]
    if not programs:
        raise UnsupportedError(
            f"{path}: the trace has no runs of compiled programs",
            fixes=["call the step inside of `jax.profiler.trace`, and wait for it"],
        )
    return programs


def _programs(file: Path) -> Iterator[ProgramTrace]:
    """The programs of one file that ran."""
    data = file.read_bytes()
    programs = {name: ProgramTrace(name.partition("(")[0], body) for name, body in _modules(data)}
    runs: dict[str, dict[str, set[Any]]] = {name: {} for name in programs}  # program → device → runs
    profile = jax.profiler.ProfileData.from_serialized_xspace(data)  # its planes do not keep it alive
    for plane in profile.planes:
        lines = {line.name: line for line in plane.lines} if plane.name.startswith("/device:") else {}
        spans = [(e.start_ns, e.end_ns, e.name) for e in lines[_MODULE_LINE].events] if _MODULE_LINE in lines else []
        for start, _, name in spans:
            runs.get(name, {}).setdefault(plane.name, set()).add(start)
        for line in plane.lines:
            if line.name in (_MODULE_LINE, "python"):
                continue
            for event in line.events:
                stats = dict(event.stats) if not spans else {}
                name = _program(event, stats, spans)
                instruction = str(stats.get("hlo_op") or re.match(r"%?([\w.\-]*)", event.name)[1])  # type: ignore[index]
                if name not in programs or instruction not in programs[name].instructions:
                    continue
                device = f"{plane.name}:{stats['device_ordinal']}" if "device_ordinal" in stats else plane.name
                programs[name].events.append(
                    Event(instruction, device, event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)
                )
                if "run_id" in stats:
                    runs[name].setdefault(device, set()).add(stats["run_id"])
    for name, program in programs.items():
        program.runs = max(map(len, runs[name].values()), default=0)
        if program.events and program.runs:
            yield program


def _program(event: Any, stats: dict[str, Any], spans: list[tuple[float, float, str]]) -> str:
    """The program that an event belongs to, as the metadata of the trace calls it; "" if the trace does not tell.

    On TPUs it is the one that ran on the device at that time; events of CPUs and GPUs have its name and number.
    """
    if spans:
        return next((name for start, end, name in spans if start <= event.start_ns < end), "")
    return f"{stats['hlo_module']}({stats['program_id']})" if "hlo_module" in stats and "program_id" in stats else ""


def _modules(data: bytes) -> Iterator[tuple[str, dict[str, Instruction]]]:
    """(name with number, instructions) of the compiled programs in the metadata of a file."""
    for plane in _messages(data, 1):
        if not any(name == _METADATA_PLANE.encode() for name in _messages(plane, 2)):
            continue
        for entry in _messages(plane, 4):
            for metadata in _messages(entry, 2):
                for stat in _messages(metadata, 5):
                    for proto in _messages(stat, 6):
                        (name,) = _messages(metadata, 2)
                        yield name.decode(), {k: i for module in _messages(proto, 1) for k, i in _instructions(module)}


def _instructions(module: bytes) -> Iterator[tuple[str, Instruction]]:
    """(name, instruction) of a serialized ``HloModuleProto``."""
    computations = _messages(module, 3)
    reductions = {number: c for c in computations for number in _numbers(c, 5)}
    for computation in computations:
        for instruction in _messages(computation, 2):
            (name,), (opcode,) = _messages(instruction, 1), _messages(instruction, 2)
            sizes = tuple(size for shape in _messages(instruction, 3) for size in _array_sizes(shape))
            reduction = ""
            if opcode.decode().startswith(("all-reduce", "reduce-scatter")):
                called = (reductions[n] for n in _numbers(instruction, 38) if n in reductions)
                reduction = next((text for c in called for i in _messages(c, 2) if (text := _op_name(i))), "")
            yield name.decode(), Instruction(opcode.decode(), _op_name(instruction), sizes, reduction)


def _op_name(instruction: bytes) -> str:
    """JAX's name of the op of a serialized ``HloInstructionProto``; "" without one."""
    texts = (text for metadata in _messages(instruction, 7) for text in _messages(metadata, 2))
    return next(texts, b"").decode()


_ELEMENT_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 2,
    8: 4,
    9: 8,
    10: 2,
    11: 4,
    12: 8,
    15: 8,
    16: 2,
    18: 16,
    19: 1,
    20: 1,
}
"""XLA's ``PrimitiveType`` (booleans, integers, floating-point and complex numbers) → bytes of an element."""


def _array_sizes(shape: bytes) -> Iterator[int]:
    """Bytes of the arrays of a serialized ``ShapeProto``; of an element type that is not known, 0."""
    elements = _messages(shape, 4)
    if elements:
        for element in elements:
            yield from _array_sizes(element)
        return
    (dtype,) = _numbers(shape, 2) or [0]
    yield math.prod(_numbers(shape, 3)) * _ELEMENT_BYTES.get(dtype, 0)


def _numbers(data: bytes, number: int) -> list[int]:
    """The integers with a number of a serialized protocol buffer message, packed or not."""
    out: list[int] = []
    for value in _fields(data, number):
        if isinstance(value, int):
            out.append(value)
        else:
            out += _varints(value)
    return out


def _varints(data: bytes) -> Iterator[int]:
    """The integers of a packed field."""
    result = shift = 0
    for byte in data:
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield result
            result = shift = 0


def _messages(data: bytes, number: int) -> list[bytes]:
    """The fields with a number of a serialized protocol buffer message that are messages, texts or bytes."""
    return [value for value in _fields(data, number) if isinstance(value, bytes)]


def _fields(data: bytes, number: int) -> list[bytes | int]:
    """The fields with a number of a serialized protocol buffer message that are integers, messages, texts or bytes."""
    out: list[bytes | int] = []
    at = 0

    def varint() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = data[at]
            at += 1
            result |= (byte & 127) << shift
            if byte < 128:
                return result
            shift += 7

    while at < len(data):
        key = varint()
        wire = key & 7
        size = {0: 0, 1: 8, 5: 4}.get(wire)
        if wire == 0:
            value = varint()
            if key >> 3 == number:
                out.append(value)
        elif size is None:
            size = varint()
            if key >> 3 == number:
                out.append(data[at : at + size])
        at += size or 0
    return out

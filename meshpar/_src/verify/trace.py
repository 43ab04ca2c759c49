"""Reads traces of ``jax.profiler``: which instructions of which compiled program ran when, on which device.

A trace is a folder that ``jax.profiler.trace`` wrote, or one of its ``.xplane.pb`` files. JAX reads the events of these files, but
not the metadata in which the profiler stores the compiled programs: these are found here, by the numbers of fields in the
profiler's ``xplane.proto`` and XLA's ``hlo.proto``, and printed by XLA.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from ...errors import UnsupportedError
from ..compat.compile_only_devices import hlo_text
from .hlo_text import Module, parse

_METADATA_PLANE = b"/host:metadata"
_MODULE_LINE = "XLA Modules"


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
      module: its instructions.
      events: the runs of its instructions.
      runs: number of times that a device ran the program.
    """

    name: str
    module: Module
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
    programs = {name: ProgramTrace(name.partition("(")[0], module) for name, module in _modules(data)}
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
                if name not in programs or instruction not in programs[name].module.instructions:
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


def _modules(data: bytes) -> Iterator[tuple[str, Module]]:
    """(name with number, instructions) of the compiled programs in the metadata of a file."""
    for plane in _fields(data, 1):
        if _METADATA_PLANE in _fields(plane, 2):
            for metadata in _fields(plane, 4, 2):
                (name,) = _fields(metadata, 2)
                for module in _fields(metadata, 5, 6, 1):
                    yield name.decode(), parse(hlo_text(module))


def _fields(message: bytes, number: int, *inner: int) -> list[bytes]:
    """The fields of a serialized protocol buffer message with a number that are messages, texts or bytes.

    Args:
      inner: numbers of fields of these, which are returned in their place.
    """
    out: list[bytes] = []
    at = 0

    def varint() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = message[at]
            at += 1
            result |= (byte & 127) << shift
            if byte < 128:
                return result
            shift += 7

    while at < len(message):
        key = varint()
        match key & 7:
            case 0:
                varint()
            case 2:
                size = varint()
                if key >> 3 == number:
                    out.append(message[at : at + size])
                at += size
            case fixed:
                at += {1: 8, 5: 4}[fixed]
    return [field for part in out for field in _fields(part, *inner)] if inner else out

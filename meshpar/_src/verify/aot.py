"""``mp.compile``: ahead-of-time compilation with the real compiler, for devices that need not be attached."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Group
from rich.text import Text

from ...errors import CompilerError, MeshError, UnsupportedError
from ..compat.compile_only_devices import is_compile_only, lowered_parts
from ..compat.jax import without_gc
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..hardware.compiler_options import flags_text
from ..hardware.topology import Places, chip_of, topology_devices, topology_of
from ..iterables import grouped_by
from ..layout import AnyMesh
from ..mesh import MeshLike, context_mesh
from ..mesh import mesh as make_mesh
from ..plan.plan import Plan
from ..report.data import calibration_rates
from ..report.document import Document
from ..report.facts import calibration_text, kernel_seconds, layout_text
from ..report.tables import Cell, PathText, Table, Wrapped, ratio
from ..units import format_bytes, format_memory, format_seconds
from . import hlo
from .compilation_jobs import Archive, Job, Progress, compile_job
from .compiler_process import FINAL, PARTITIONED
from .exposed import Exposed, exposed
from .hlo import HloCollective
from .hlo_flops import flops
from .out_of_memory_error import capacity_of, out_of_memory

Effort = Literal["fast", "full"]


@dataclass(frozen=True)
class Memory:
    """Bytes that the compiler allocates on one device.

    ``peak`` must fit. The other attributes need not be live at the same time: ``outputs`` include the ``aliased`` bytes of
    donated arguments; ``code`` is the executable. ``host`` is allocated in the host's memory and part of no other attribute.
    On CPUs, where XLA reports no peak, ``peak`` is the sum of arguments, outputs and temporaries.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int = 0


@dataclass(eq=False)
class Compiled(Document):
    """A program compiled by the real compiler for a topology whose devices need not be attached; print it, show it in a notebook,
    or save it as a page.

    Attributes:
      name: of the function.
      topology: ``"v5e:16x16"``.
      effort: ``"fast"`` or ``"full"``. Quote memory at full effort: at fast effort the peak of train steps of 7B to 50B models
        was 0 to 16 % lower; small programs may differ more. Cycles and exposed communication at fast effort say nothing about
        full effort: kernels are not optimized.
      memory: bytes of one device.
      capacity: bytes of memory of a device; None: not known.
      plan: the plan of the program; None for a program that meshpar did not lower.
      mesh: the mesh of the program, which names the axes of collectives; None: not known.
      compile_seconds: time of the compilation, also if the result is cached.
      cached: whether the result was read from the cache.
    """

    name: str
    topology: str
    effort: Effort
    memory: Memory
    capacity: float | None
    plan: Plan | None
    mesh: AnyMesh | None
    compile_seconds: float
    cached: bool
    _archive: Archive = field(repr=False)

    def as_text(self) -> str:
        """The final HLO of the program."""
        return self._archive.text(FINAL)

    def partitioned_text(self) -> str:
        """The HLO right after XLA's partitioner; empty for a program on one device."""
        return self._archive.text(PARTITIONED)

    @functools.cached_property
    def collectives(self) -> list[HloCollective]:
        """The collectives right after partitioning, before XLA combines, pipelines or rewrites them."""
        text = self.partitioned_text()
        return hlo.collectives(text) if text else []

    @functools.cached_property
    def final_collectives(self) -> list[HloCollective]:
        """The collectives of the final program."""
        return hlo.collectives(self.as_text())

    @functools.cached_property
    def cycles(self) -> float | None:
        """The TPU compiler's estimate of the cycles of a step, with loop trip counts and without communication; None elsewhere."""
        return hlo.cycles(self.as_text()) or None

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of a device in a step: matmuls and convolutions of the final program with loop trip counts,
        and the cost estimates of custom kernels."""
        return flops(self.as_text())

    @functools.cached_property
    def exposed(self) -> Exposed | None:
        """Exposed communication in the final schedule; None if the clock of the chip is not known."""
        if not isinstance(self.mesh, Mesh) or (chip := chip_of(self.mesh)) is None or not chip.compiler.clock_hz:
            return None
        return exposed(self.as_text(), chip, Places.of(self.mesh.devices.reshape(-1)))

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of exposed communication in a step, by the final schedule (:attr:`exposed` has the details)."""
        return None if self.exposed is None else self.exposed.seconds

    @property
    def scheduled_seconds(self) -> float | None:
        """Seconds of a step by the final schedule, with exposed communication; None if the clock of the chip is not known."""
        return None if self.exposed is None else self.exposed.compute + self.exposed.seconds

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in a step, in the final program."""
        return sum(c.total_bytes for c in self.final_collectives)

    def to_json(self) -> str:
        """Memory, bytes and seconds of the compiled program as JSON, with the plan's, its mesh, layout and options."""
        own = ("name", "topology", "effort", "capacity", "bytes_sent", "exposed_seconds", "compile_seconds")
        out = {**{name: getattr(self, name) for name in own}, "memory": asdict(self.memory)}
        if (plan := self.plan) is not None:
            out |= {"mesh": plan.sizes, "layout": str(plan.layout), "lowering": plan.lowering}
            out |= {"options": plan.options.to_dict(), "calibration": calibration_rates(plan)}
            out["planned"] = {"bytes_sent": plan.bytes_sent, "memory": memory_of(plan).peak}
        return json.dumps(out)

    def _title(self) -> str:
        return f"{self.name} compiled for {self.topology}"

    def _html(self) -> str:
        layout = "" if self.plan is None else f"<p><code>{escape(layout_text(self.plan))}</code></p>"
        sent = _collectives_table(self)
        notes = "".join(f"<li>{escape(text)}</li>" for text, _ in _notes(self))
        return (
            f'<h1>{escape(self.name)} <span class="dim">compiled for {escape(self.topology)}</span></h1>{layout}'
            f"{_comparison(self).html()}<p>{escape(_memory_text(self))}</p>"
            f"<h2>{escape(sent.title)}</h2>{sent.html() if sent.rows else ''}<ul>{notes}</ul>"
        )

    def __rich__(self) -> Any:
        """The report for a terminal: planned and compiled numbers, collectives of the final program, notes about both."""
        head = Text.assemble(("compiled", "bold"), f"  {self.name} for {self.topology}, {_effort_text(self)}")
        memory, sent = Text.assemble(("memory", "bold"), f"    {_memory_text(self)}"), _collectives_table(self)
        parts: list[Any] = [head, Text(), _comparison(self).terminal(), Text(), Wrapped([memory], hang=10)]
        if self.effort == "full" and self.cycles:
            parts.append(Text.assemble(("cycles", "bold"), f"    {self.cycles:.4g} a step, without communication"))
        parts += [Text(), sent.terminal() if sent.rows else Text(sent.title, style="bold")]
        return Group(*parts, *(Wrapped([Text(text, style)], hang=4) for text, style in _notes(self)[:-1]))


def compile_lowered(
    program: Any, *args: Any, effort: Effort = "fast", timeout: float | None = None, cache: bool = True,
    progress: Progress = "auto", compiler_options: Mapping[str, Any] | None = None, name: str | None = None,
    plan: Plan | None = None, mesh: AnyMesh | None = None, kwargs: Mapping[str, Any] | None = None, **keywords: Any,
) -> Compiled:  # fmt: skip
    """Compile any JAX program as :func:`meshpar.compile` does: a hand-written ``jax.jit`` or ``shard_map`` one, for instance.

    Args:
      program: a ``jax.stages.Lowered``, or an object with ``.lower``, which is called with the arguments. Its shardings
        determine the devices: of a mesh made by :func:`meshpar.mesh` with ``topology``, or CPU devices.
      *args: arguments for ``.lower``.
      **keywords: keyword arguments for ``.lower``.
      kwargs: keyword arguments for ``.lower`` whose names are options of this function.
      name, plan, mesh: for the report; the mesh names the axes of collectives.
      effort, timeout, cache, progress, compiler_options: as in :func:`meshpar.compile`.

    Raises:
      MeshparError: as :func:`meshpar.compile`.
    """
    if effort not in ("fast", "full"):
        raise UnsupportedError(f"there is no effort {effort!r}", fixes=['effort="fast" or effort="full"'])
    if hasattr(program, "lower"):
        with without_gc():
            program = program.lower(*args, **keywords, **(kwargs or {}))
    module, content, devices, facts = lowered_parts(program)
    topology, ids = _topology(devices), {d.id: d.id for d in devices}
    if topology.startswith("cpu:"):  # the devices of other processes have ids far from these
        ids = {d.id: i for i, d in enumerate(sorted(jax.devices("cpu"), key=lambda d: d.id))}
    order, options = tuple(ids[d.id] for d in devices), dict(compiler_options or {})
    job = Job(name or "step", module, content, topology, order, facts, options, effort == "fast")
    archive = compile_job(job, timeout=timeout, cache=cache, progress=progress)
    capacity = capacity_of(topology)
    error = archive.facts.get("error")
    if error is not None:
        if error.startswith("RESOURCE_EXHAUSTED"):
            raise out_of_memory(error, topology, plan, capacity)
        fix = 'the error\'s `log` has the complete output of the compiler; another layout, or lowering="jit", may avoid it'
        headline = f"the compiler for {topology} refuses this program: {error.splitlines()[0]}"
        refused = CompilerError(headline, fixes=[fix])
        refused.log = error
        raise refused
    memory = Memory(**archive.facts["memory"])
    if capacity is not None and memory.peak > capacity:
        raise out_of_memory("", topology, plan, capacity, needed=memory.peak)
    seconds = archive.facts["compile_seconds"]
    return Compiled(job.name, topology, effort, memory, capacity, plan, mesh, seconds, archive.cached, archive)


def _topology(devices: list[Any]) -> str:
    """The topology of a program's devices, all of which must be used."""
    if not devices:
        raise MeshError(
            "the devices of this program are unknown: its arguments have no shardings",
            fixes=["give them shardings over mp.mesh(…, topology=…)"],
        )
    topology = topology_of(devices)
    if topology is not None:
        count = len(topology_devices(topology))
        if count != len(devices):
            raise MeshError(
                f"this program uses {len(devices)} of the {count} devices of {topology}",
                fixes=["a mesh that fills the topology, or a smaller topology"],
            )
        return topology
    if is_compile_only(devices[0]):
        raise MeshError(
            f"devices of kind {devices[0].device_kind!r} belong to a topology that mp.mesh does not know",
            fixes=['compile for one that mp.mesh knows: topology="v5e:4x4"'],
        )
    if devices[0].platform == "cpu":
        ids = [d.id for d in sorted(jax.devices("cpu"), key=lambda d: d.id)]
        return f"cpu:{max(ids.index(d.id) for d in devices) + 1}"
    raise MeshError(
        f"mp.compile compiles for a topology or for CPUs, not for attached {devices[0].device_kind} devices",
        fixes=[
            'name their topology: mp.mesh("data=8", topology="h200:8"), or mp.compile(…, topology="v5e:16x16")',
            "or compile for the attached devices: mp.jit(…).lower(…).compile()",
        ],
    )


def mesh_to_compile_for(mesh: MeshLike | None, topology: str | None) -> Mesh:
    """The mesh over the devices of a topology, or the mesh itself if it has devices.

    Raises:
      MeshError: the mesh has no devices and no topology is given, or the mesh and the topology have different devices.
    """
    if isinstance(mesh, str | Mapping):
        return make_mesh(mesh, topology=topology)
    mesh = context_mesh(topology) if mesh is None else mesh
    if topology is None:
        if not isinstance(mesh, Mesh):
            raise MeshError("an abstract mesh has no devices to compile for", fixes=['add topology="v5e:16x16"'])
        return mesh
    own = topology_of(list(np.ravel(mesh.devices))) if isinstance(mesh, Mesh) else None
    if isinstance(mesh, Mesh) and own is not None:
        if topology_devices(topology) != topology_devices(own):
            raise MeshError(
                f"the devices of the mesh are {own}, but topology={topology!r}", fixes=["leave topology out"]
            )
        return mesh
    return make_mesh(dict(mesh.shape), topology=topology)


# -- reports

MAX_ROWS = 16
"""Collectives that a report lists one by one."""


def _effort_text(c: Compiled) -> str:
    """The effort of the compiler and its time."""
    when = "from the cache; it took" if c.cached else "in"
    return f"{c.effort} effort, {when} {c.compile_seconds:.1f} s"


def _memory_text(c: Compiled) -> str:
    """The parts of the memory of a device."""
    m = c.memory
    host = f"; {format_memory(m.host)} in the host's memory" if m.host else ""
    return (
        f"arguments {format_memory(m.arguments)}, outputs {format_memory(m.outputs)} ({format_memory(m.aliased)} in place of "
        f"arguments), temporaries {format_memory(m.temporaries)}, code {format_memory(m.code)}{host}"
    )


def _notes(c: Compiled) -> list[tuple[str, str]]:
    """(text, style) of notes: collectives after partitioning, options, calibration, what fast effort means, and, for pages, the
    effort."""
    notes: list[tuple[str, str]] = []
    if c.collectives:
        kinds: dict[str, float] = {}
        for x in c.collectives:
            kinds[x.op] = kinds.get(x.op, 0.0) + x.total_bytes
        text = ", ".join(f"{op} {format_bytes(n)}" for op, n in sorted(kinds.items(), key=lambda k: -k[1]))
        notes.append((f"right after partitioning: {text}", "dim"))
    if c.plan is not None:
        notes += [(f"options left out ({group.name}): {reason}", "yellow") for group, reason in c.plan.options.left_out]
        if values := c.plan.options.values:
            notes.append((f"compiler options: {flags_text(values)}", "dim"))
        notes.append((calibration_text(c.plan), "dim"))
    if c.effort == "fast":
        notes.append((FAST, "dim"))
    return [note for note in notes if note[0]] + [(_effort_text(c), "dim")]


FAST = (
    'fast effort: --effort full (effort="full") may give another peak, 0 to 16 % higher for models of 7B to 50B and 20 % lower for '
    "one of 1B, and a schedule with times: at fast effort kernels are not optimized, and may take ten times as long"
)
"""What to know about numbers of fast effort."""


def _comparison(c: Compiled) -> Table:
    """The table of peak memory, bytes sent and, of a schedule at full effort, seconds: planned, compiled, and their ratio."""
    exposed = c.exposed if c.effort == "full" else None
    plan, of = c.plan, f", of {format_memory(c.capacity)} on a device" if c.capacity else ""
    time = None if plan is None else time_of(plan)
    rows: list[tuple[str, Callable[[float], str], float | None, float | None]] = [
        (f"peak memory{of}", format_memory, None if plan is None else memory_of(plan).peak, c.memory.peak),
        ("sent in a step", format_bytes, None if plan is None else plan.bytes_sent, c.bytes_sent),
    ]
    if exposed is not None:
        waits = None if time is None else time.seconds - kernel_seconds(time)
        rows += [
            ("step", format_seconds, time and time.seconds, c.scheduled_seconds),
            ("  kernels", format_seconds, time and kernel_seconds(time), exposed.compute),
            ("  communication not hidden", format_seconds, waits, exposed.seconds),
        ]
    elif time is not None:
        rows.append(("step", format_seconds, time.seconds, None))
    cells = []
    for name, form, *both in rows:
        cells.append([Cell(name), *(Cell("–" if x is None else form(x), x) for x in both), ratio(both[1], both[0])])
    return Table([("", ""), ("planned", "n"), ("compiled", "n"), ("ratio", "n")], cells)


def _collectives_table(c: Compiled) -> Table:
    """The collectives of the final program, those that send most first: bytes in a step, calls, bytes per call, shape, line."""
    sizes = dict(c.mesh.shape) if c.mesh is not None else {}

    def axes(x: HloCollective) -> str:
        names = "+".join(x.axes(sizes)) if sizes else f"{x.group} devices" if x.group else "pairs"
        return names + " (DCN)" * x.dcn

    def sizes_of(group: list[HloCollective]) -> tuple[str, str, str]:
        total = sum(x.total_bytes for x in group)
        calls = None if any(x.count is None for x in group) else sum(x.count or 0 for x in group)
        return format_bytes(total), "?" if calls is None else str(calls), format_bytes(total / calls) if calls else ""

    groups = grouped_by(c.final_collectives, lambda x: (x.op, axes(x), x.shape, x.source))
    groups.sort(key=lambda g: -sum(x.total_bytes for x in g))
    rows = [(g[0].op, axes(g[0]), *sizes_of(g), g[0].shape, _short(g[0].source)) for g in groups[:MAX_ROWS]]
    smaller = [x for g in groups[MAX_ROWS:] for x in g]
    if smaller:
        rows.append(("smaller ones", "", *sizes_of(smaller)[:2], "", "", ""))
    words, numbers = (("", "word"), ("axes", "word")), ((name, "n") for name in ("total", "calls", "per call"))
    columns = [*words, *numbers, ("shape", ""), ("source", "")]
    sent = f"{format_bytes(c.bytes_sent)} a step, in the final program" if rows else "nothing"
    title = f"each device sends {sent}"
    cells = [[*map(Cell, others), Cell(path, terminal=PathText(path))] for *others, path in rows]
    return Table(columns, cells, title)


def _short(source: str) -> str:
    """A source line without its function, relative to the working directory or the folder of installed packages."""
    source = source.rpartition(" (")[0] or source
    return source.removeprefix(os.getcwd() + os.sep).rpartition(f"{os.sep}site-packages{os.sep}")[2]

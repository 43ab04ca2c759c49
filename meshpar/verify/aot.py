"""``mp.compile``: the real compiler, ahead of time, for devices that need not be here."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..compat.devices import is_compile_only, lowered_parts
from ..compat.jax import without_gc
from ..cost.memory import memory_of
from ..errors import CompilerError, MeshError, UnsupportedError
from ..hardware.topology import chip_of, topology_devices, topology_of
from ..layout import AnyMesh
from ..mesh import MeshLike, context_mesh
from ..mesh import mesh as make_mesh
from ..options import options_apart
from ..plan.plan import Plan
from ..report.facts import rates
from ..report.text import plain
from ..units import format_bytes, format_memory, format_seconds
from . import hlo
from .compiler import FINAL, PARTITIONED
from .exposed import Exposed, exposed, places_of
from .flops import flops
from .hlo import HloCollective
from .jobs import Archive, Job, Progress, compile_job
from .memory import capacity_of, out_of_memory

Effort = Literal["fast", "full"]


@dataclass(frozen=True)
class Memory:
    """Bytes that the compiler allocates on one device.

    ``peak`` must fit; the others are parts that may overlap in time: ``outputs`` include the ``aliased`` bytes of donated
    arguments. ``code`` is the program itself. ``host`` is what the program allocates in the host's memory for the device: no
    other attribute includes it. On CPUs, for which XLA reports no peak, ``peak`` is the sum of arguments, outputs and temporaries.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int = 0


@dataclass(eq=False)
class Compiled:
    """A program that a real compiler has compiled, for devices that need not be here.

    Attributes:
      name: of the function.
      topology: ``"v5e:16x16"``.
      effort: ``"fast"`` or ``"full"``. Memory is to be quoted at full effort: at fast effort the peak of train steps of 7B to 50B
        models came out 0 to 16 % lower, and that of small programs may differ more.
      memory: bytes of one device.
      capacity: bytes that a device has, where that is known.
      plan: what meshpar planned; None for a program that it did not lower.
      mesh: the mesh of the program, where it is known: names for the axes of collectives.
      compile_seconds: what the compiler took, then.
      cached: whether the result came from the cache.
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
        """The collectives of the final program: what is really sent."""
        return hlo.collectives(self.as_text())

    @functools.cached_property
    def cycles(self) -> float | None:
        """The TPU compiler's estimate of the cycles of a step, loops counted, communication left out; None on other platforms."""
        return hlo.cycles(self.as_text()) or None

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of a device in a step: matrix products and convolutions of the final program, loops counted,
        and what kernels state."""
        return flops(self.as_text())

    @functools.cached_property
    def exposed(self) -> Exposed | None:
        """Communication beside which nothing is computed, by the final schedule; None where the clock is not known."""
        if not isinstance(self.mesh, Mesh) or (chip := chip_of(self.mesh)) is None or not chip.compiler.clock_hz:
            return None
        return exposed(self.as_text(), chip, places_of(list(self.mesh.devices.flat)))

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of a step in which a device waits for its links, by the final schedule (:attr:`exposed` has the parts)."""
        return None if self.exposed is None else self.exposed.seconds

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in a step, in the final program."""
        return sum(c.total_bytes for c in self.final_collectives)

    def __str__(self) -> str:
        return compiled_text(self)

    def __rich__(self) -> Any:
        return compiled_renderable(self)


@options_apart
def compile_lowered(
    program: Any, *args: Any, effort: Effort = "fast", timeout: float | None = None, cache: bool = True,
    progress: Progress = None, compiler_options: Mapping[str, Any] | None = None, name: str | None = None,
    plan: Plan | None = None, mesh: AnyMesh | None = None, kwargs: Mapping[str, Any] | None = None, **keywords: Any,
) -> Compiled:  # fmt: skip
    """Compile any JAX program as :func:`meshpar.compile` does: a hand-written ``jax.jit`` or ``shard_map`` one, for instance.

    Args:
      program: a ``jax.stages.Lowered``, or something with ``.lower``, which gets the arguments. Its shardings say the devices:
        those of a mesh made by :func:`meshpar.mesh` with ``topology``, or CPU devices.
      *args: arguments for ``.lower``.
      **keywords: those by keyword.
      kwargs: those called as an option is.
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
    job = Job(
        name or "step", module, content, topology, tuple(ids[d.id] for d in devices), facts,
        dict(compiler_options or {}), effort == "fast",
    )  # fmt: skip
    archive = compile_job(job, timeout=timeout, cache=cache, progress=progress)
    capacity = capacity_of(job.topology)
    error = archive.facts.get("error")
    if error is not None:
        if error.startswith("RESOURCE_EXHAUSTED"):
            raise out_of_memory(error, job.topology, plan, capacity)
        headline = f"the compiler for {job.topology} refuses this program: {error.splitlines()[0]}"
        refused = CompilerError(
            headline,
            fixes=[
                'the error\'s `log` has all that the compiler said; another layout, or lowering="jit", may avoid it'
            ],
        )
        refused.log = error
        raise refused
    memory = Memory(**archive.facts["memory"])
    if capacity is not None and memory.peak > capacity:
        raise out_of_memory("", job.topology, plan, capacity, needed=memory.peak)
    return Compiled(
        job.name, job.topology, effort, memory, capacity, plan, mesh, archive.facts["compile_seconds"], archive.cached,
        archive,
    )  # fmt: skip


def _topology(devices: list[Any]) -> str:
    """The topology of a program's devices, all of which must be used."""
    if not devices:
        raise MeshError(
            "this program says no devices: its arguments have no shardings",
            fixes=["give them shardings over mp.mesh(…, topology=…)"],
        )
    found = topology_of(devices)
    if found is not None:
        whole = len(topology_devices(found))
        if whole != len(devices):
            raise MeshError(
                f"this program uses {len(devices)} of the {whole} devices of {found}",
                fixes=["a mesh that fills the topology, or a smaller topology"],
            )
        return found
    if is_compile_only(devices[0]):
        raise MeshError(
            f"devices of kind {devices[0].device_kind!r} belong to no topology that mp.mesh knows",
            fixes=['compile for one that mp.mesh knows: topology="v5e:4x4"'],
        )
    if devices[0].platform == "cpu":
        ids = [d.id for d in sorted(jax.devices("cpu"), key=lambda d: d.id)]
        return f"cpu:{max(ids.index(d.id) for d in devices) + 1}"
    raise MeshError(
        f"mp.compile compiles for devices that are described, or for CPUs; these are {devices[0].device_kind} devices in use",
        fixes=[
            'describe them: mp.mesh("data=8", topology="h200:8"), or mp.compile(…, topology="v5e:16x16")',
            "or compile for the ones here: mp.jit(…).lower(…).compile()",
        ],
    )


def mesh_to_compile_for(mesh: MeshLike | None, topology: str | None) -> Mesh:
    """A mesh over the devices of a topology, or over those it has.

    Raises:
      MeshError: neither says any devices, or they are different ones.
    """
    if isinstance(mesh, str | Mapping):
        return make_mesh(mesh, topology=topology)
    mesh = context_mesh(topology) if mesh is None else mesh
    if topology is None:
        if not isinstance(mesh, Mesh):
            raise MeshError("an abstract mesh has no devices to compile for", fixes=['add topology="v5e:16x16"'])
        return mesh
    if isinstance(mesh, Mesh) and topology_of(list(np.ravel(mesh.devices))) is not None:
        made = topology_of(list(np.ravel(mesh.devices)))
        if topology_devices(topology) != topology_devices(made or ""):
            raise MeshError(
                f"the mesh is of {made}, but topology={topology!r} is asked for", fixes=["leave topology out"]
            )
        return mesh
    return make_mesh(", ".join(f"{a}={n}" for a, n in dict(mesh.shape).items()), topology=topology)


# -- in the terminal: does it fit, and what is really sent

ROWS = 16
"""Collectives that a report lists one by one."""


def compiled_text(compiled: Compiled, width: int = 120) -> str:
    """The report as plain text of at most ``width`` columns."""
    return plain(compiled_renderable(compiled), width)


def compiled_renderable(c: Compiled) -> Any:
    """The report for rich: memory, cycles, and the collectives of the final program beside those of the partitioner."""
    m = c.memory
    fits = f" of {format_memory(c.capacity)}" if c.capacity else ""
    host = f"; {format_memory(m.host)} in the host's memory" if m.host else ""
    when = "from the cache; it took" if c.cached else "in"
    head = Text.assemble(
        ("compiled", "bold"), f"  {c.name} for {c.topology}, {c.effort} effort, {when} {c.compile_seconds:.1f} s\n",
        ("memory", "bold"), f"    peak {format_memory(m.peak)}{fits} a device: arguments {format_memory(m.arguments)}, "
        f"outputs {format_memory(m.outputs)} "
        f"({format_memory(m.aliased)} in place of arguments), temporaries {format_memory(m.temporaries)}, "
        f"code {format_memory(m.code)}{host}",
    )  # fmt: skip
    if c.effort == "fast":
        head.append(
            "\n          (full effort may give another peak: 0 to 16 % higher for models of 7B to 50B)", style="dim"
        )
    if c.cycles:
        head.append("\ncycles", style="bold")
        head.append(f"    {c.cycles:.4g} a step, by the compiler's estimate, communication left out")
    if c.exposed is not None:
        head.append("\nschedule", style="bold")
        head.append(
            f"  {format_seconds(c.exposed.compute)} of computation, {format_seconds(c.exposed.seconds)} of communication exposed"
        )
    parts: list[Any] = [head, Text(), _sent_table(c, c.final_collectives, "sent by each device, in the final program")]
    if c.collectives:
        kinds: dict[str, float] = {}
        for x in c.collectives:
            kinds[x.op] = kinds.get(x.op, 0.0) + x.total_bytes
        text = ", ".join(f"{op} {format_bytes(n)}" for op, n in sorted(kinds.items(), key=lambda k: -k[1]))
        parts.append(Text(f"right after partitioning: {text}", style="dim"))
    if c.plan is not None:
        for group, reason in c.plan.options.left_out:
            parts.append(Text(f"options left out ({group.name}): {reason}", style="yellow"))
        if c.plan.options.groups:
            names = ", ".join(g.name for g in c.plan.options.groups)
            parts.append(Text(f"options of the compiler: {names}", style="dim"))
        text = f"planned: {format_bytes(c.plan.bytes_sent)} sent, peak {format_memory(memory_of(c.plan).peak)}"
        parts.append(Text(text, style="dim"))
        if priced := rates(c.plan):
            parts.append(Text(priced, style="dim"))
    return Group(*parts)


def _sent_table(c: Compiled, found: list[HloCollective], title: str) -> Any:
    rows: dict[tuple[Any, ...], list[HloCollective]] = {}
    sizes = dict(c.mesh.shape) if c.mesh is not None else {}
    for x in found:
        axes = "+".join(x.axes(sizes)) if sizes else f"{x.group} devices" if x.group else "pairs"
        axes += " (DCN)" if x.dcn else ""
        rows.setdefault((x.op, axes, x.shape, x.source), []).append(x)
    total = sum(x.total_bytes for x in found)
    if not found:
        return Text("each device sends nothing", style="bold")
    table = Table(
        title=f"{format_bytes(total)} {title}", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for name, justify in (
        ("", "left"),
        ("axes", "left"),
        ("times", "right"),
        ("bytes", "right"),
        ("", "left"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    ranked = sorted(rows.items(), key=lambda r: -sum(x.total_bytes for x in r[1]))
    for (op, axes, shape, source), group in ranked[:ROWS]:
        table.add_row(op, axes, _times(group), format_bytes(sum(x.total_bytes for x in group)), shape, _short(source))
    rest = [x for _, group in ranked[ROWS:] for x in group]
    if rest:
        table.add_row(
            "smaller ones", "", _times(rest), format_bytes(sum(x.total_bytes for x in rest)), "", "", style="dim"
        )
    return table


def _short(source: str) -> str:
    """A line of a file without the folder that is the current one, or that of installed packages."""
    here = os.getcwd() + os.sep
    return source.removeprefix(here).rpartition(f"{os.sep}site-packages{os.sep}")[2]


def _times(group: list[HloCollective]) -> str:
    if any(x.count is None for x in group):
        return "?"
    return f"{sum(x.count or 0 for x in group)} ×"

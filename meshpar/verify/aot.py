"""``mp.compile``: the real compiler, ahead of time, for devices that need not be here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from .._compat import without_gc
from .._compat_devices import is_compile_only, lowered_parts
from ..errors import CompilerError, MeshError, UnsupportedError
from ..jitted import Jitted
from ..layout import AnyMesh
from ..mesh import mesh as make_mesh
from ..mesh import topology_devices, topology_of
from ..plan import Plan
from ..plan.hardware import chip_of
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
    """Bytes of one device, as the compiler allots them.

    ``peak`` is the figure that must fit; the others are parts that may overlap in time: ``outputs`` include the ``aliased`` bytes
    of donated arguments. ``code`` is the program itself. On CPUs, for which XLA gives no peak, it is the sum of all that is held.
    """

    peak: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int


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
        if not isinstance(self.mesh, Mesh) or (chip := chip_of(self.mesh)) is None or not chip.clock:
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
        from ..report.compiled import compiled_text

        return compiled_text(self)

    def __rich__(self) -> Any:
        from ..report.compiled import compiled_renderable

        return compiled_renderable(self)


def compile(
    fn: Callable[..., Any], *args: Any, mesh: AnyMesh | str | None = None, layout: Any = None, dims: Any = None,
    lowering: Literal["jit", "shard_map"] = "jit", overlap: Any = None, topology: str | None = None, effort: Effort = "fast",
    timeout: float | None = None, cache: bool = True, progress: Progress = None,
    compiler_options: Mapping[str, Any] | None = None, strict: bool = False, keep_unused: bool = False,
    static_argnums: Any = None, static_argnames: Any = None, donate_argnums: Any = None, donate_argnames: Any = None,
    **kwargs: Any,
) -> Compiled:  # fmt: skip
    """Compile a function under a layout with the real compiler, ahead of time and without the hardware.

    The compiler runs in a process of its own, so that its crash is an error here; one at a time on a small machine
    (``MESHPAR_COMPILES`` at once, else one for every four cores). Results are kept by content in ``MESHPAR_CACHE``, else in the
    user's cache folder: source lines do not count as content, so that those of a cached result are of the first compilation.

    Args:
      fn: a function, or what :func:`meshpar.jit` returned (then layout, dims, lowering, static and donated arguments are its own).
      *args, **kwargs: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      mesh: a mesh, an abstract mesh, or text (``"data=16, model=16"``) with ``topology``.
      layout, dims, lowering, overlap, strict, keep_unused, static_argnums, static_argnames, donate_argnums, donate_argnames: as in
        :func:`meshpar.jit`; what is donated matters to the peak memory.
      topology: ``"v5e:16x16"``, ``"v5p:8x8x8"``, ``"tpu7x:4x4x4"``, ``"2x v6e:16x16"``, ``"h200:8"``, ``"b200:8"``. Left out, the
        mesh says it. A mesh of CPU devices without ``topology`` is compiled for CPUs.
      effort: ``"fast"``, or ``"full"``: the compiler's default.
      timeout: seconds the compiler may take.
      cache: whether to look on disk, and to write there.
      progress: a line on stderr; None: on a terminal only; or a function of its text.
      compiler_options: XLA options.

    Returns:
      A :class:`Compiled`.

    Raises:
      OutOfMemoryError: it does not fit; with what is held, and the rules that would hold less.
      CompilerError: the compiler refuses, crashed, or took too long.
      MeshError: an unknown topology, a mesh that does not fill it, or a compiler that is not installed.
    """
    if isinstance(fn, Jitted):
        if mesh is None:
            mesh, topology = fn.mesh, topology or fn.topology
        jitted = fn if mesh is fn.mesh and topology is None and isinstance(mesh, Mesh) else fn.on(_mesh(mesh, topology))
    else:
        if layout is None or mesh is None:
            raise UnsupportedError(
                f"mp.compile needs {'a layout' if layout is None else 'a mesh'}",
                fixes=['mp.compile(step, state, batch, mesh="data=16, model=16", topology="v5e:16x16", layout=…)'],
            )
        from ..api import jit

        jitted = jit(
            fn, mesh=_mesh(mesh, topology), layout=layout, dims=dims, lowering=lowering, overlap=overlap, strict=strict,
            keep_unused=keep_unused, static_argnums=static_argnums, static_argnames=static_argnames,
            donate_argnums=donate_argnums, donate_argnames=donate_argnames,
        )  # fmt: skip
    options = {**(jitted.compiler_options or {}), **(compiler_options or {})}
    plan = jitted.plan(*args, **kwargs)
    return compile_lowered(
        jitted.lower(*args, **kwargs), effort=effort, timeout=timeout, cache=cache, progress=progress,
        compiler_options=options, name=getattr(jitted.fn, "__name__", "step"), plan=plan, mesh=jitted.mesh,
    )  # fmt: skip


def compile_lowered(
    program: Any, *args: Any, effort: Effort = "fast", timeout: float | None = None, cache: bool = True,
    progress: Progress = None, compiler_options: Mapping[str, Any] | None = None, name: str | None = None,
    plan: Plan | None = None, mesh: AnyMesh | None = None, **kwargs: Any,
) -> Compiled:  # fmt: skip
    """Compile any JAX program as :func:`compile` does: a hand-written ``jax.jit`` or ``shard_map`` one, for instance.

    Args:
      program: a ``jax.stages.Lowered``, or something with ``.lower``, which gets the arguments. Its shardings say the devices:
        those of a mesh made by :func:`meshpar.mesh` with ``topology``, or CPU devices.
      *args, **kwargs: arguments for ``.lower``.
      name, plan, mesh: for the report; the mesh names the axes of collectives.
      effort, timeout, cache, progress, compiler_options: as in :func:`compile`.

    Raises:
      as :func:`compile`.
    """
    if effort not in ("fast", "full"):
        raise UnsupportedError(f"there is no effort {effort!r}", fixes=['effort="fast" or effort="full"'])
    if hasattr(program, "lower"):
        with without_gc():
            program = program.lower(*args, **kwargs)
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
        refused = CompilerError(headline)
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
            raise MeshError(f"this program uses {len(devices)} of the {whole} devices of {found}")
        return found
    if is_compile_only(devices[0]):
        raise MeshError(f"devices of kind {devices[0].device_kind!r} belong to no topology that mp.mesh knows")
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


def _mesh(mesh: AnyMesh | str, topology: str | None) -> AnyMesh:
    if isinstance(mesh, str):
        return make_mesh(mesh, topology=topology)
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

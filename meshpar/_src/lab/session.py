"""The session behind the pages of a lab: requests with drafts of layouts, replies with plans as JSON. Text is never evaluated."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import MeshError, MeshparError, TargetError
from ..dims import parse_names, parse_pairs
from ..hardware.topology import device_count, parse_topology
from ..iterables import grouped
from ..layout import BETWEEN_SLICES, Layout, characteristic_dims
from ..layouts import PRESETS
from ..lower import LOWERINGS
from ..mesh import parse_mesh, planned_mesh
from ..plan_api import Plan
from ..program.names_as_path_patterns import patterns_of
from ..report.colours import AxisColours
from ..report.facts import USABLE_FRACTION, kernel_seconds
from ..report.inferred_names_table import names_table
from ..search import SearchOptions, search
from ..search.result import quiet
from ..search.space import meshes
from ..units import format_bytes, format_memory, format_seconds, mesh_text
from ..verify.aot import Compiled
from . import view
from .jobs import Job, Turns, as_json

log = logging.getLogger(__name__)

MAX_DEVICES = 1 << 20
MAX_SIZE = 1 << 40
"""The largest batch, sequence length, … of a target."""
MAX_CACHED = 16
"""Plans, and ended jobs, that a session retains."""
MAX_RUNNING = 16
"""Jobs that run at a time."""
MAX_SIZES = 4
"""Programs of other sizes that a session retains."""
MAX_MESHES = 24
"""Meshes on which a known layout is planned, the most even first."""
SEARCH_SECONDS = 20.0
"""Time limit of a search."""

Compile = Callable[["Draft", Callable[[str], None]], Compiled]
"""Compiles a draft with the real compiler; the function reports progress."""


class RequestError(Exception):
    """A request that cannot be answered; its text is for the user."""


@dataclass(frozen=True)
class Draft:
    """A mesh, its topology, a layout and sizes, as the text that a user typed; a key of the cached plans.

    Attributes:
      lowering: "": the lowering of the session's first plan.
      sizes: ``"batch=32, seq=4096"``, options of the target that differ from the session's; "": none.
      names: ``"mlp=ffn"``, inferred names → other names for them; "": none.
    """

    mesh: str
    topology: str | None
    layout: str
    lowering: str = ""
    sizes: str = ""
    names: str = ""


@dataclass(frozen=True)
class _Row:
    """A row of the page's rule editor: its text, whether it is enabled, and its rules or the error of its text."""

    text: str
    on: bool
    layout: Layout | None
    error: MeshparError | None

    @property
    def axes(self) -> list[str] | None:
        """The axes of its rules; None if its text is not a layout."""
        return None if self.layout is None else list(self.layout.axes)

    def has(self, rule: str | None) -> bool:
        """Whether it is enabled, and its text or one of its rules is ``rule``."""
        return self.on and self.layout is not None and rule in {self.text.strip(), *map(str, self.layout.rules)}


class Session:
    """State of one lab: a program, the drafts that were planned, and background jobs. Its methods may be called from
    any thread.

    :func:`meshpar.lab` makes it; the pages of the browser and the widget of the notebook send it requests by
    :meth:`handle`.

    Args:
      base: a plan of the program, from which drafts are replanned.
      name: the name of the function.
      start: the first draft of the page; it may be invalid.
      layouts: name → the user's layouts, listed before the known schemes.
      compile: runs the real compiler.

    Attributes:
      shown: the last draft that could be planned.
      title: of the page; by default the function's name.
      sizes: integer options of the program's target, which the page offers to change.
      resized: makes the session of the same program with other values of ``sizes``.
      chooses: whether the page opens with the best of the known layouts, as nobody gave one.
      patterns: tree-path patterns → dims, as names were inferred; empty if they are the user's.
      renamed: makes the session of the same program with other ``patterns``.
    """

    def __init__(self, base: Plan, *, name: str, start: Draft, layouts: Mapping[str, str], compile: Compile):
        """A session without plans or jobs; the arguments are described in the docstring of the class."""
        self.base, self.name, self.start, self.shown = base, name, start, start
        self.title = name
        self.sizes: Mapping[str, int] = {}
        self.resized: Callable[[Mapping[str, Any]], Session] | None = None
        self.chooses = False
        self.patterns: Mapping[str, str] = patterns_of(base.program.traced) if base.program.traced.inferred else {}
        self.renamed: Callable[[Mapping[str, str]], Session] | None = None
        self._layouts, self._compile = dict(layouts), compile
        self._turns = Turns()
        self._plan = functools.lru_cache(MAX_CACHED)(self._replanned)
        self._sized = functools.lru_cache(MAX_SIZES)(self._resized)
        self._named = functools.lru_cache(MAX_SIZES)(self._renamed)
        self._jobs: dict[int, Job] = {}
        self._jobs_lock, self._numbers = threading.Lock(), itertools.count(1)  # pages ask from several threads
        self._answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "plan": self._planned,
            "start": self._start,
            "suggest": self._suggest,
            "compile": self._ask_compiler,
            "job": lambda request: self._job_of(request).view(),
            "stop": lambda request: self._job_of(request).stop(),
        }

    def handle(self, request: Any) -> dict[str, Any]:
        """The reply to a request, both as JSON data; ``{"failed": text}`` for a request that cannot be answered."""
        try:
            return self._answers[request["ask"]](request)
        except RequestError as e:
            return {"failed": str(e)}
        except Exception as e:
            log.exception("a request of a page fails")
            return {"failed": f"{type(e).__name__}: {e}"}

    def plan(self) -> Plan:
        """The plan of the last valid draft.

        Raises:
          MeshparError: no draft was valid so far; the error of the first.
        """
        with self._turns.turn():
            return self._plan(self.shown)

    # -- plans

    def _open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to ``open``, as JSON data: title, the first draft, the program's dims with their sizes, and the time
        limit of a search."""
        program = self.base.program
        pairs = (pair for v in program.inputs for pair in zip(program.dims(v), v.shape, strict=True))
        sizes = grouped(dict.fromkeys((dim, n) for dim, n in pairs if dim is not None))
        return {
            "title": self.title,
            "lowering": self.base.request.lowering,
            "lowerings": ["auto", *LOWERINGS],
            "sizes": dict(self.sizes),
            "chooses": self.chooses,
            "names": [[cell.text for cell in row] for row in names_table(program.traced).rows],
            "mesh": self.start.mesh,
            "topology": self.start.topology,
            "layout": self.start.layout,
            "dims": [[d, n] for d, n in sizes.items()],
            "seconds": SEARCH_SECONDS,
        }

    def _planned(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to ``plan``: the plan of a draft, or its errors by row."""
        began = time.perf_counter()
        draft, rows = _draft(request), [_row(row["text"], row["on"]) for row in request["rules"]]
        pinned = [_draft(d) for d in request.get("pinned") or ()]
        at_rules: list[Any] = [row.error and as_json(row.error) if row.on else None for row in rows]
        errors: dict[str, Any] = {"mesh": None, "layout": None, "sizes": None, "names": None, "rules": at_rules}
        out: dict[str, Any] = {"errors": errors, "plan": None, "sizes": None, "axes": [row.axes for row in rows]}

        @contextlib.contextmanager
        def errors_at(place: Any, where: Any) -> Iterator[None]:
            """A context that stores its error as ``place[where]``, for the page."""
            try:
                yield
            except MeshparError as e:
                place[where] = as_json(e)

        with errors_at(errors, "mesh"):
            mesh = draft.mesh
            if request.get("fit") is True:  # after a change of the topology: the first axis takes the remaining devices
                mesh = mesh_text({a: n if k else -1 for k, (a, n) in enumerate(parse_mesh(mesh).items())})
            where = _place(mesh, draft.topology)
            out["colours"] = AxisColours(where.shape).of
            out["mesh"], out["sizes"] = mesh_text(where.shape), [[a, n] for a, n in dict(where.shape).items()]
            for k, row in enumerate(rows):
                if row.on and row.layout is not None:
                    with errors_at(at_rules, k):
                        row.layout.check_axes(where)
        with self._turns.turn(), errors_at(errors, "sizes"):
            sized = self._sized(draft.sizes)
            with errors_at(errors, "names"):
                sized._named(draft.names)
        if all(errors[what] is None for what in ("mesh", "sizes", "names")) and not any(at_rules):
            layout = "\n".join(row.text for row in rows if row.on and row.text.strip())
            draft = replace(draft, mesh=out["mesh"], layout=layout)
            try:
                with self._turns.turn():
                    plan = self._plan(draft)
                    self.shown = replace(draft, layout=str(plan.requested_layout))
                    out["plan"] = self._view(plan, [self._plan(d) for d in pinned], rows, self._of(draft).patterns)
            except MeshparError as e:
                at_fault = next((k for k, row in enumerate(rows) if row.has(e.rule)), None)
                if at_fault is None:
                    errors["layout"] = as_json(e)
                else:
                    at_rules[at_fault] = as_json(e)
        out["ms"] = 1e3 * (time.perf_counter() - began)
        return out

    def _replanned(self, draft: Draft) -> Plan:
        """The plan of a draft. :attr:`_plan` is the same, with a cache."""
        where, base = _place(draft.mesh, draft.topology), self._of(draft).base
        topology, lowering = draft.topology or "", draft.lowering or None
        with quiet():
            return base.replan(layout=draft.layout, mesh=where, topology=topology, lowering=lowering)

    def _of(self, draft: Draft) -> Session:
        """The session of the program with the sizes and names of a draft. :attr:`_sized` and :attr:`_named` are :meth:`_resized`
        and :meth:`_renamed`, with a cache.

        Raises:
          MeshparError: as these.
        """
        return self._sized(draft.sizes)._named(draft.names)

    def _renamed(self, names: str) -> Session:
        """The session of the program with other names for inferred ones: this one, or the one that :attr:`renamed` makes.

        Raises:
          MeshparError: a text that is not a name, or a name that an array has already.
        """
        if not names:
            return self
        if self.renamed is None or not self.patterns:
            raise TargetError(
                f"`{names}`: the dims of this target have names of their own, which the lab does not change",
                fixes=["change them in the target's dims=, metadata or names="],
            )
        new = parse_names(names)
        if unknown := new.keys() - {dim for dims in self.patterns.values() for dim in dims.split()}:
            text = f"`{min(unknown)}` is no inferred name of this target"
            raise TargetError(text, fixes=["`meshpar names` lists them"])
        patterns = {p: " ".join(new.get(dim, dim) for dim in dims.split()) for p, dims in self.patterns.items()}
        session = self.renamed(patterns)
        session.patterns = patterns
        return session

    def _resized(self, sizes: str) -> Session:
        """The session of the program with these sizes: this one, or the one that :attr:`resized` makes.

        Raises:
          MeshparError: the text is no list of sizes, or the target fails with them.
        """
        changed = {name: n for name, n in _parse_sizes(sizes).items() if self.sizes.get(name) != n}
        if unknown := ", ".join(sorted(changed.keys() - self.sizes.keys())):
            fix = f"its sizes are {', '.join(self.sizes) or '(none)'}"
            raise TargetError(f"`{unknown}` is no size of this target", fixes=[fix])
        return self if self.resized is None or not changed else self.resized(changed)

    def _view(
        self, plan: Plan, pinned: Sequence[Plan], rows: Sequence[_Row], patterns: Mapping[str, str]
    ) -> dict[str, Any]:
        """A plan as JSON data for the page: metrics, HTML sections, effects of ``rows``, colours, layout, names and Python
        code."""
        layouts = [row.layout for row in rows if row.on and row.layout is not None]
        effects = iter(view.row_effects(plan, [layout.rules for layout in layouts]))
        return {
            "metrics": view.metrics(plan),
            "html": view.page(plan),
            "pinned": [view.comparison(before, plan) for before in pinned],
            "rules": [next(effects) if row.on and row.layout is not None else None for row in rows],
            "layout": str(plan.requested_layout),
            "dims": view.mapping(patterns),
            "python": view.python(self.name, plan, mesh_text(plan.sizes), patterns),
        }

    # -- jobs

    def _begin(self, run: Callable[[Job], Any]) -> dict[str, Any]:
        """Start a job that runs ``run`` in the background; returns ``{"job": number}``, a number that no other job
        gets.

        Raises:
          RequestError: ``MAX_RUNNING`` jobs are running.
        """
        with self._jobs_lock:
            if sum(job.running for job in self._jobs.values()) >= MAX_RUNNING:
                raise RequestError(f"{MAX_RUNNING} jobs are running: stop one, or wait until one has ended")
            number = next(self._numbers)
            for ended in [n for n, job in self._jobs.items() if not job.running][:-MAX_CACHED]:
                del self._jobs[ended]
            self._jobs[number] = Job(self._turns, run)
        return {"job": number}

    def _job_of(self, request: Mapping[str, Any]) -> Job:
        """The job whose number is in a request."""
        with self._jobs_lock:
            return self._jobs[request["job"]]

    def _start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Start the job that plans the known layouts, for the first table of the page."""
        return self._begin(lambda job: self._known(job, _draft(request)))

    def _known(self, job: Job, where: Draft) -> list[dict[str, Any]]:
        """Rows of the known layouts, as JSON data, each on the mesh that is best for it.

        Left out are layouts that cannot be planned, schemes for dims that the model lacks, and layouts with the same mesh and costs
        as an earlier row. Without a topology they are for as many devices as the first draft has.

        Args:
          where: a draft with the topology, the lowering and the sizes.
        """
        topology = where.topology
        devices = math.prod(parse_mesh(self.start.mesh).values()) if topology is None else device_count(topology)
        slices = 1 if topology is None else parse_topology(topology).slices
        rows: list[dict[str, Any]] = []
        names = self._of(where).base.program.all_names()
        for name, text in {**self._layouts, **{n: str(p()) for n, p in PRESETS.items()}}.items():
            layout = Layout(text)
            axes = list(layout.axes)
            asks = grouped((rule.axes, rule.dim) for rule in layout.rules)
            lacks = any(names.isdisjoint(dims) for dims in (*asks.values(), characteristic_dims(layout)))
            if lacks or (slices == 1 and BETWEEN_SLICES in axes):
                continue  # a scheme whose dims the model lacks, such as experts, or for several slices
            if slices == 1:
                axes.sort(key=lambda a: a != "data")
            best: dict[str, Any] | None = None
            for mesh in _meshes_of(axes, devices):
                job.tell(f"{name} on {mesh}")
                row = self._row(name, replace(where, mesh=mesh, layout=text))
                if row is not None and (best is None or _better(row) < _better(best)):
                    best = row
            same = ("mesh", "seconds", "peak", "sent")
            if best is not None and not any(all(best[k] == row[k] for k in same) for row in rows):
                rows = [*rows, best]
                job.result = rows
        return rows

    def _row(self, name: str, draft: Draft) -> dict[str, Any] | None:
        """The row of a layout for the page's table, as JSON data; None if the draft cannot be planned."""
        try:
            plan = self._replanned(draft)
        except MeshparError:
            return None
        return _as_row(name, draft.mesh, draft.layout, plan.seconds, plan.memory.peak, plan.bytes_sent, plan)

    def _suggest(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to ``suggest``: start a job that searches for the best layout; returns ``{"job": number}``."""
        where = _draft(request)
        topology, lowering = where.topology, where.lowering
        if topology is None:
            raise RequestError("a search needs a topology, which step times depend on")

        def run(job: Job) -> list[dict[str, Any]]:
            """Search for at most ``SEARCH_SECONDS``; returns the candidates as rows, the best first."""
            base, layouts = self._of(where).base, self._layouts.values()
            if base.chip is None or base.topology != topology or lowering not in ("", base.request.lowering):
                mesh = _place("data=-1", topology)
                with quiet():
                    base = base.replan(layout="", mesh=mesh, topology=topology, lowering=lowering or None)
            options = SearchOptions(layouts=tuple(map(Layout, layouts)), time_limit=SEARCH_SECONDS)
            found = search({"": base}, topology, options, tell=job.tell)
            rows = [found.best, *(row for row in found.rows if row != found.best)]
            names = ["search result", *(row.name for row in rows[1:])]
            return [
                _as_row(name, row.mesh, row.layout, row.seconds, row.peak, row.sent, base)
                for name, row in zip(names, rows, strict=True)
            ]

        return self._begin(run)

    def _ask_compiler(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Reply to ``compile``: start a job that compiles a draft and compares the result with its plan; returns
        ``{"job": number}``."""
        draft = _draft(request)

        def run(job: Job) -> dict[str, Any]:
            """Compile the draft; returns JSON data with rows of (quantity, planned, compiled) and the compiled peak
            memory in bytes."""
            with quiet():
                plan = self._plan(draft)
                peak, took = plan.memory.peak, plan.time

            def report(text: str) -> None:
                job.leave()  # from now on the compiler's process does the work
                job.tell(text)

            compiled = self._of(draft)._compile(draft, report)
            of = compiled.exposed
            rows = [
                ("peak memory of a device", format_memory(peak), format_memory(compiled.memory.peak)),
                ("sent by each device", format_bytes(plan.bytes_sent), format_bytes(compiled.bytes_sent)),
            ]
            if of is not None and took is not None:
                exposed = took.seconds - kernel_seconds(took)
                times = {
                    "exposed communication": (exposed, of.seconds),
                    "step time, by the compiler's schedule": (took.seconds, of.schedule),
                }
                rows += [(what, *map(format_seconds, seconds)) for what, seconds in times.items()]
            how = "from the cache" if compiled.cached else f"in {compiled.compile_seconds:.0f} s"
            head = f"compiled for {compiled.topology}, {compiled.effort} effort, {how}"
            return {"head": head, "rows": rows, "peak": compiled.memory.peak}

        return self._begin(run)


# -- requests


def _draft(request: Mapping[str, Any]) -> Draft:
    """The draft in a request, as the page sent it: its texts are not parsed.

    Raises:
      RequestError: a lowering that does not exist.
    """
    lowering = request.get("lowering") or ""
    if lowering not in ("", "auto", *LOWERINGS):
        raise RequestError(f"`lowering` is one of auto, {', '.join(LOWERINGS)}")
    topology = (request.get("topology") or "").strip() or None
    texts = {key: request.get(key) or "" for key in ("mesh", "layout", "sizes", "names")}
    return Draft(topology=topology, lowering=lowering, **texts)


def _parse_sizes(text: str) -> dict[str, int]:
    """``"batch=32, seq=4096"`` → name → size.

    Raises:
      TargetError: another text, or a size that is not from 1 to ``MAX_SIZE``.
    """

    def wrong(part: str) -> TargetError:
        text = f"`{part}` is not `name=size` with a size from 1 to {MAX_SIZE}"
        return TargetError(text, fixes=["batch=32, seq=4096"])

    pairs = parse_pairs(text, wrong)
    for name, value in pairs.items():
        if not (value.isascii() and value.isdigit() and 0 < int(value) <= MAX_SIZE):
            raise wrong(f"{name}={value}")
    return {name: int(value) for name, value in pairs.items()}


def _row(text: str, on: bool) -> _Row:
    try:
        return _Row(text, on, Layout(text), None)
    except MeshparError as e:
        return _Row(text, on, None, e)


def _place(mesh: str, topology: str | None) -> Any:
    """The abstract mesh that a text describes, over the devices of ``topology`` if one is given.

    Raises:
      MeshparError: the text is not a mesh, the mesh does not fill its topology, or has too many devices.
    """
    sizes = parse_mesh(mesh)
    if math.prod(sizes.values()) > MAX_DEVICES:
        fix = f"a mesh of at most {MAX_DEVICES} devices"
        raise MeshError(f"mesh ({mesh}) has more than {MAX_DEVICES} devices", fixes=[fix])
    return planned_mesh(mesh, topology)


# -- known layouts


def _meshes_of(axes: Sequence[str], devices: int) -> Iterator[str]:
    """Meshes of these axes, the most even first; by default, all devices on the first axis."""
    axes = axes or ("data",)
    sizes = [[n for _, n in mesh] for mesh in meshes(devices, 1, len(axes)) if len(mesh) == len(axes)]
    for mesh in (sizes or [[devices, *(1 for _ in axes[1:])]])[:MAX_MESHES]:
        yield mesh_text(dict(zip(axes, mesh, strict=True)))


def _as_row(
    name: str, mesh: str, layout: str, seconds: float | None, peak: float, sent: float, of: Plan
) -> dict[str, Any]:
    """A row of layouts for the page: texts and numbers of its step time (seconds), peak memory and bytes sent, and the
    bytes of a device that a search uses; ``of``: a plan on the same chip."""
    capacity = None if of.chip is None else USABLE_FRACTION * of.chip.per_device().hbm
    return {
        "name": name,
        "mesh": mesh,
        "layout": layout,
        "seconds": seconds,
        "peak": peak,
        "sent": sent,
        "fits": None if capacity is None else peak <= capacity,
        "capacity": None if capacity is None else [capacity, format_memory(capacity)],
        "texts": [format_seconds(seconds) if seconds is not None else "–", format_memory(peak)],
    }


def _better(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key, best first: rows that fit, then by step time, then by peak."""
    return (row["fits"] is False, row["seconds"] or 0.0, row["peak"])

"""The forecast of a training run on one or several topologies, and its report."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.text import Text

from ...errors import UnsupportedError
from ..cost.time import time_of
from ..dims import did_you_mean
from ..hardware.chips import CHIPS
from ..keywords_and_flags import option
from ..plan.plan import Plan, ShardedArray
from ..report.document import Document
from ..report.facts import fits, layout_text, step_range, step_tokens, title
from ..report.tables import Cell, Table, hanging, html_picture, number
from ..units import (
    format_bytes,
    format_count,
    format_duration,
    format_memory,
    format_seconds,
    mesh_text,
    parse_duration,
)
from .failures import KEPT, Job

DAY = 86400.0
MIN_GOODPUT = 0.01
"""Fraction of productive time below which a run is refused: its end could not be simulated in reasonable time."""
MAX_SAVE_LOSS = 0.01
"""Fraction by which the longest save interval that is reported lengthens the run."""
MIN_COPIES_GAIN = 0.01
"""Fraction of the days of a run from which on copies in memory are said to pay."""
PARTS = {"ink": "productive", "m0": "saves", "m2": "repeated", "wait": "restarts"}
"""CSS class → part of the time of a run."""
SOURCES = {
    "mtbf": "of a chip; H100s of Llama 3: 419 unexpected interruptions in 54 days of 16,384 GPUs (Dubey et al. 2024)",
    "restart": "until a failure is detected and the job starts again; MegaScale: less than 10 minutes (Jiang et al. 2024)",
    "compile_time": "an assumption; `compile_seconds` of mp.compile is a measurement",
    "save_time": "the bytes on a device over its link to the host; Checkpoints writes in the background",
    "bandwidth": "of a chip to and from storage; Llama 3: 2 TB/s sustained for 16,384 GPUs (Dubey et al. 2024)",
}
"""Option → the source of its default."""


@dataclass(frozen=True)
class RunOptions:
    """Parameters of a run; ``SOURCES`` has the sources of the defaults. Durations are given as seconds or as text, ``"10m"``."""

    step_tokens: float | None = option(None, "tokens of a step (default: of its largest int argument)", type=str)
    mtbf: float = option(50000 * 3600.0, "mean time between failures of one chip (50000h)", type=str)
    restart: float = option(600.0, "from a failure until the job starts again (10m)", type=str)
    compile_time: float = option(60.0, "at each start (1m)", type=str)
    save_time: float | None = option(None, "a save blocks the job (default: for the copy to the host)", type=str)
    bandwidth: float = option(1.2e8, "bytes/s of each chip to and from storage (1.2e8)", type=str)
    trials: int = option(1000, "simulated runs of each topology (%(default)s)", type=str)
    price: Any = option(None, "a TOML or JSON file: chip = price of an hour", metavar="FILE")

    def __post_init__(self) -> None:
        """Read durations, numbers and the file of prices, as the command line gives them.

        Raises:
          UnsupportedError: text that is no duration or number, a value that is not positive, prices that cannot be read.
        """
        for name in ("mtbf", "restart", "compile_time", "save_time", "step_tokens", "bandwidth", "trials"):
            value, may_be_0 = getattr(self, name), name in ("restart", "compile_time", "save_time")
            if value is None:
                continue
            try:
                read = parse_duration(value) if may_be_0 or name == "mtbf" else float(value)
            except ValueError as error:
                raise UnsupportedError(f"{name}: {error}", fixes=[_EXAMPLE]) from None
            if not (0 < read < math.inf or (read == 0 and may_be_0)):
                raise UnsupportedError(f"{name}={value}: it must be positive and finite", fixes=[_EXAMPLE])
            object.__setattr__(self, name, read)
        object.__setattr__(self, "price", _prices(self.price))


_EXAMPLE = "durations such as mtbf='40000h', restart='10min'; bandwidth=2e9"
"""The fix of a parameter that is not a positive number."""


def _prices(given: Mapping[str, float] | str | Path | None) -> dict[str, float]:
    """Chip → price of an hour, from a mapping or a file of TOML or JSON.

    Raises:
      UnsupportedError: the file cannot be read, there is no such chip, or a price is no positive number.
    """
    found: Any = given
    fixes = ["a line of TOML for each chip: v5p = 4.2"]
    try:
        if isinstance(given, str | Path):
            found = (json if str(given).endswith(".json") else tomllib).loads(Path(given).read_text("utf8"))
        for chip, price in () if given is None else dict(found).items():
            if chip not in CHIPS:
                fixes = did_you_mean(chip, CHIPS, "chips")
                raise ValueError(f"there is no chip {chip!r}")
            if not (isinstance(price, int | float) and 0 < price < math.inf):
                raise ValueError("a price is a positive number")
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedError(f"price={str(given)!r}: {error}", fixes=fixes) from None
    return dict(found or {})


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The 5th, 50th and 95th percentile of a quantity over the simulated runs; of times and costs, the outer ones with the error of
    the step (:func:`report.facts.step_range`)."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray, error: tuple[float, float] = (1.0, 1.0)) -> Percentiles:
        """The percentiles of the entries of an array, the outer ones multiplied by ``error``."""
        low, median, high = (float(x) for x in np.percentile(values, (5, 50, 95)))
        return cls(error[0] * low, median, error[1] * high)

    def text(self, form: Callable[[float], str]) -> str:
        """``31.2 (31.0–31.5)``, where ``form`` is the text of a number."""
        return f"{form(self.median)} ({form(self.low)}–{form(self.high)})"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run on one topology.

    Attributes:
      topology, mesh, layout: as text; the topology of attached devices is "".
      chips: their number.
      fits: whether the plan fits into the memory of a device.
      job: seconds of a step, of saves and of restarts; the mean time between failures.
      mfu: of a step.
      error: smallest and largest time of a step, as fractions of the planned time, and their source.
      checkpoint_bytes: of the parameters and the optimizer state of all devices together.
      save_optimum: steps between two saves for the shortest expected time.
      save_every: the recommended steps between two saves; the expected time is :data:`MAX_SAVE_LOSS` longer, with fewer saves.
      days, goodput, failures, cost: of the run; the goodput is the fraction of the time that is productive. Cost in the currency of
        the prices; None: no price of the chip is given.
      parts: mean seconds of productive steps, saves, repeated steps, and the start with restarts.
      copies_days: expected days that copies in memory save: each host has a copy of the state of another host in its memory, from
        which the job restarts (Wang et al., Gemini, SOSP 2023); saves block as long as before.
      copies_bytes: of host memory for each chip at most, for copies of its own state and of its neighbour's.
    """

    topology: str
    mesh: str
    layout: str
    chips: int
    fits: bool
    job: Job
    mfu: float
    error: tuple[tuple[float, float], str]
    checkpoint_bytes: float
    save_optimum: int
    save_every: int
    days: Percentiles
    goodput: Percentiles
    failures: Percentiles
    cost: Percentiles | None
    parts: tuple[float, ...]
    copies_days: float
    copies_bytes: float

    @property
    def where(self) -> str:
        """The topology, or ``attached devices``."""
        return self.topology or "attached devices"

    @property
    def save_seconds(self) -> tuple[float, ...]:
        """Seconds from one save to the next, for ``save_optimum`` and for ``save_every``."""
        return tuple(n * self.job.step + self.job.save for n in (self.save_optimum, self.save_every))

    @property
    def copies_pay(self) -> bool:
        """Whether copies in memory save more than :data:`MIN_COPIES_GAIN` of the days."""
        return self.copies_days > MIN_COPIES_GAIN * self.days.median


@dataclass(frozen=True)
class RunPlan(Document):
    """The forecast of a run; print it, show it in a notebook, or save it.

    Attributes:
      name: of the step.
      tokens: of the run; ``step_tokens``: of a step.
      options: the parameters.
      rows: one for each topology.
    """

    name: str
    tokens: float
    step_tokens: float
    options: RunOptions
    rows: tuple[RunRow, ...]

    @property
    def best(self) -> RunRow:
        """The row that takes the least time, of those that fit if any does."""
        return min(self.rows, key=lambda row: (not row.fits, row.days.median))

    @property
    def cheapest(self) -> RunRow | None:
        """The row of the lowest cost, of those that fit and have a price; None: no row has a price."""
        with_cost = [(row.cost.median, k) for k, row in enumerate(self.rows) if row.cost is not None and row.fits]
        return self.rows[min(with_cost)[1]] if with_cost else None

    def to_json(self) -> str:
        """The forecast as JSON: parameters, and the rows with the seconds between saves."""
        options = {**asdict(self.options), "sources": self._sources()}
        rows = [{**asdict(row), "save_seconds": row.save_seconds, "copies_pay": row.copies_pay} for row in self.rows]
        return json.dumps({**asdict(self), "options": options, "rows": rows})

    def _title(self) -> str:
        steps = f"{format_count(self.rows[0].job.steps)} steps of {format_count(self.step_tokens)} tokens"
        return f"{self.name}: {format_count(self.tokens)} tokens in {steps}"

    def _sources(self) -> dict[str, str]:
        """Option → the source of its value."""
        own, default = vars(self.options), vars(RunOptions())
        return {name: text if own[name] == default[name] else "given" for name, text in SOURCES.items()}

    def _assumptions(self) -> list[tuple[str, str]]:
        """(name, value and source) of the parameters."""
        o, sources = self.options, self._sources()
        values = format_duration(o.restart), format_duration(o.compile_time), format_seconds(self.best.job.save)
        texts = f"{o.mtbf / 3600:,.0f} h", *values, f"{format_bytes(o.bandwidth)}/s"
        prices = ", ".join(f"{price:g} for an hour of a {chip}" for chip, price in o.price.items())
        out = [(k.replace("_", " "), f"{text}: {sources[k]}") for k, text in zip(SOURCES, texts, strict=True)]
        errors = dict.fromkeys(row.error for row in self.rows if row.error[1])
        out += [("step", f"{low:g} to {high:g} × the planned time: {source}") for (low, high), source in errors]
        return out + [("price", f"{prices}: given; costs are in the same currency")] * bool(prices)

    def _tables(self) -> list[Table]:
        """Days, goodput and cost of each topology; where the time goes; and saves, restarts and copies in memory."""
        several, with_cost = len(self.rows) > 1, any(row.cost for row in self.rows)
        texts = [r.where if r.fits else f"{r.where} (does not fit)" for r in self.rows]
        names = [
            Cell(t, terminal=Text(t, "bold" * (several and r == self.best)))
            for t, r in zip(texts, self.rows, strict=True)
        ]
        cells = [_cells(row, with_cost, self) for row in self.rows]

        def table(title: str, columns: Iterable[str]) -> Table:
            rows = [[name, *row[title].values()] for name, row in zip(names, cells, strict=True)]
            return Table([("topology", "word"), *((head, "n") for head in columns)], rows, title)

        return [table(title, columns) for title, columns in cells[0].items()]

    def _verdict(self) -> str:
        """The cheapest run, and the shortest one if it is another, each with its save interval; then those that do not fit."""
        lines, runs = [], {self.cheapest or self.best: "cheapest", self.best: "shortest"}
        for row, what in runs.items() if self.best.fits else ():
            cost = f", cost {format_count(row.cost.median)}" if row.cost else ""
            shortest, every = map(format_duration, row.save_seconds)
            save = f"save every {row.save_every:,} steps, {every} "
            save += f"(at most {100 * MAX_SAVE_LOSS:.0f} % longer than every {shortest})"
            which = f"{what} on " * (len(runs) > 1)
            lines.append(f"{which}{row.where}: {row.days.median:,.1f} days{cost}; {save}")
        return "; ".join([*lines, *(f"{r.where} does not fit into memory" for r in self.rows if not r.fits)])

    @property
    def _plans(self) -> dict[str, str]:
        """The mesh of each topology, each once, and the layout; topology → mesh and layout if the layouts differ."""
        if len({row.layout for row in self.rows}) > 1:
            return {row.where: f"{row.mesh}: {row.layout}" for row in self.rows}
        return {"mesh": "; ".join(dict.fromkeys(row.mesh for row in self.rows)), "layout": self.rows[0].layout}

    def _html(self) -> str:
        """Verdict, tables, the picture of the parts and of the loss by save interval, and the parameters with their sources."""
        runs, steps, shares, saves, copies = self._tables()
        parameters = Table([("parameter", ""), ("", "")], [[Cell(x) for x in row] for row in self._assumptions()])
        data = {"kinds": [*PARTS.items()], "rows": [_drawn(row) for row in self.rows]}
        picture = html_picture("drawRuns", "days of each run, and the loss by save interval", data)
        head = "<br>".join(f"{escape(name)} <code>{escape(text)}</code>" for name, text in self._plans.items())
        return (
            f'<h1>{escape(self._title())}</h1><p>{head}</p><p class="verdict">{escape(self._verdict())}</p>'
            f"<h2>{runs.title}</h2>{runs.html(sortable=True)}<h2>{steps.title}</h2>{steps.html(sortable=True)}"
            f"<h2>{shares.title}</h2>{picture}{shares.html()}"
            f"<h2>{saves.title}</h2>{saves.html()}<h2>{copies.title}</h2>{copies.html()}<h2>Parameters</h2>{parameters.html()}"
        )

    def __rich__(self) -> Any:
        """The forecast for the terminal."""
        facts = {"run": self._title(), **self._plans, "result": self._verdict()}
        head = hanging([(Text(name, "bold"), text) for name, text in facts.items()])
        notes = hanging([(Text(name, "dim"), Text(text, "dim")) for name, text in self._assumptions()])
        tables = (part for table in self._tables() for part in (Text(), table.terminal()))
        return Group(head, *tables, Text(), Text("Parameters", "bold"), notes)

    def __repr__(self) -> str:
        return f"<RunPlan of {self._title()}: {self._verdict()}>"


def _cells(r: RunRow, with_cost: bool, plan: RunPlan) -> dict[str, dict[str, Cell]]:
    """Title of a table of the report → heading → cell; with a cost if ``with_cost``."""

    def cell(form: Callable[[float], str], value: float) -> Cell:
        return number(form(value), value)

    def percent(value: float) -> str:
        return f"{100 * value:.2f} %"

    days = r.days.text(f"{{:,.{1 if r.days.median < 100 else 0}f}}".format)
    rate = plan.step_tokens / r.job.step
    run = {
        "days (range)": number(days, r.days.median),
        "goodput": cell(percent, r.goodput.median),
        "failures": cell("{:,.0f}".format, r.failures.median),
    }
    step = {
        "time": cell(format_seconds, r.job.step),
        "MFU": cell(lambda share: f"{100 * share:.0f} %", r.mfu),
        "tokens/s": cell(format_count, rate),
        "of a chip": cell("{:,.0f}".format, rate / r.chips),
    }
    if with_cost:
        none = number("–", 0.0)
        run["cost (range)"] = number(r.cost.text(format_count), r.cost.median) if r.cost else none
        step["cost of 1e12 tokens"] = cell(format_count, 1e12 / plan.tokens * r.cost.median) if r.cost else none
    every, at_most = r.save_seconds
    return {
        "Medians of the simulated runs": run,
        "A step": step,
        "Where the time goes, on average": {
            name: cell(percent, x / sum(r.parts)) for name, x in zip(PARTS.values(), r.parts, strict=True)
        },
        "Saves and restarts": {
            f"save every (+{100 * MAX_SAVE_LOSS:.0f} %)": cell(format_duration, at_most),
            "shortest run": cell(format_duration, every),
            "checkpoint": cell(format_memory, r.checkpoint_bytes),
            "a restart": cell(format_duration, r.job.restart),
        },
        "Copies in memory": {
            "worth it": Cell("yes" if r.copies_pay else "no", css="n"),
            "they save": number(f"{r.copies_days:.2f} days", r.copies_days),
            "host memory of a chip": cell(format_memory, r.copies_bytes),
        },
    }


def _drawn(row: RunRow) -> dict[str, Any]:
    """The picture of a row: days of its parts, and (seconds between saves, expected share that is not productive)."""
    job, longest = row.job, 4 * math.log2(row.save_every / row.save_optimum)
    grid = {max(1, round(row.save_optimum * 2 ** (k / 4))) for k in range(-12, math.ceil(max(20, longest)))}

    def point(every: int) -> tuple[float, float]:
        return every * job.step + job.save, 1 - job.step * job.steps / job.expected(every)

    curve = [point(n) for n in sorted(grid | {row.save_optimum, row.save_every}) if n <= job.steps]
    points = {"best": point(row.save_optimum), "longest": point(row.save_every), "curve": curve}
    return {"name": row.where, "parts": [x / DAY for x in row.parts], **points}


def run_plan_of(plans: Sequence[Plan], tokens: float, options: RunOptions) -> RunPlan:
    """The forecast of a run whose step has these plans; :meth:`meshpar.Plan.run_plan` describes it."""
    plan = plans[0]
    step = options.step_tokens or step_tokens(plan)
    if not 0 < tokens < math.inf:
        raise UnsupportedError(f"tokens={tokens:g}: a run has a positive number of tokens", fixes=["tokens=15e12"])
    if not step:
        fix = "step_tokens=, on the command line --step-tokens: tokens (or examples) of a step, of all devices together"
        raise UnsupportedError("the tokens of a step: no argument of integers has the dim `batch`", fixes=[fix])
    rows = tuple(_row(plan, math.ceil(tokens / step), options) for plan in plans)
    return RunPlan(title(plan), float(tokens), float(step), options, rows)


def _dtype(x: ShardedArray) -> Any:
    """The NumPy dtype of an argument; bool for extended dtypes of JAX."""
    return jnp.dtype("bool" if "<" in x.dtype else x.dtype)


def _row(plan: Plan, steps: int, options: RunOptions) -> RunRow:
    """The run of one plan.

    Raises:
      UnsupportedError: the chip is not known, the step has no state to save, or the run hardly progresses.
    """
    chip, time = plan.chip, time_of(plan)
    if chip is None or time is None:
        raise UnsupportedError("a run needs a chip, for the seconds of a step", fixes=["topology='v5p:8x8x8'"])
    state = [x for x in plan.inputs if x.kind in ("params", "opt")]
    size = float(sum(math.prod(x.shape) * _dtype(x).itemsize for x in state))
    if not any(x.kind == "params" for x in state):
        text = f"no argument of {title(plan)} is recognised as the parameters, which a checkpoint has"
        fix = 'call them `params`: an argument of this name, or {"params": …, "opt_state": …}'
        raise UnsupportedError(text, fixes=[fix, "plan a train step"])
    device, chips, local = chip.per_device(), math.ceil(plan.mesh.size / chip.devices), sum(x.bytes for x in state)
    save = local / device.host_link if options.save_time is None else options.save_time
    disk, again, memory = size / (chips * options.bandwidth), options.restart + options.compile_time, local / device.dcn
    job = Job(time.seconds, steps, options.mtbf / chips, save, disk, again + disk, options.compile_time)
    every, productive = job.best_interval(), job.step * steps
    if productive < MIN_GOODPUT * job.expected(every):
        raise UnsupportedError(
            f"the run hardly progresses on {plan.topology or 'the devices'}: one of {chips} chips fails every "
            f"{format_duration(job.mtbf)}, and a restart takes {format_duration(job.restart)}",
            fixes=["fewer chips, a longer mtbf=, a shorter restart= or a larger bandwidth="],
        )
    out = job.simulate(every, int(options.trials))
    repeated = out.seconds - productive - out.saving - out.restarting
    copies = replace(job, write=memory, restart=again + memory)
    price, error = options.price.get(chip.name), step_range(plan)
    return RunRow(
        topology=plan.topology or "",
        mesh=mesh_text(plan.sizes),
        layout=layout_text(plan),
        chips=chips,
        fits=fits(plan) is not False,
        job=job,
        mfu=time.mfu,
        error=error,
        checkpoint_bytes=size,
        save_optimum=every,
        save_every=job.longest_interval(MAX_SAVE_LOSS),
        days=Percentiles.of(out.seconds / DAY, error[0]),
        goodput=Percentiles.of(productive / out.seconds),
        failures=Percentiles.of(out.failures),
        cost=None if price is None else Percentiles.of(out.seconds / 3600 * chips * price, error[0]),
        parts=(productive, *(float(np.mean(x)) for x in (out.saving, repeated, out.restarting))),
        copies_days=(job.expected(every) - copies.expected(copies.best_interval())) / DAY,
        copies_bytes=2 * (KEPT + 1) * local * chip.devices,
    )

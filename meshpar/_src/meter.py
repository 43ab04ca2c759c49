"""Measures a training loop (seconds per step, tokens per second, utilisation, memory), and writes to logging libraries."""

from __future__ import annotations

import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax
import numpy as np

from ..errors import UnsupportedError
from .compat.jax import compilations
from .flax import flatten_named
from .plan_api import Plan
from .pods.audit import Audit, raise_faults
from .runs import Goodput
from .units import format_memory, format_seconds

Writer = Callable[[int, Mapping[str, float]], None]
"""A function of a step's number and of values by name."""
SLOW = 0.1
"""The fraction of a step for which the host of a process is busy longer than other hosts, if it is reported as slow."""


class Meter:
    """Measures the steps of a training loop, and writes the measurements together with the step's metrics.

    A step runs asynchronously, so the meter waits for the metrics of the step before the last one: the devices stay busy, and the
    time between two such waits is the time of a step. Steps are numbered from ``first``. The first step of a process, which
    compiles, is not measured. With ``every=10`` the means of steps 1 to 10, 11 to 20, … are written as steps 10, 20, …;
    :meth:`close` writes the rest.

    Values that it writes:

    - ``step_seconds``; with ``tokens``, ``tokens_per_second`` and ``tokens_per_second_per_device``;
    - where the plan's chip is known, ``planned_seconds``, and ``mfu``: the FLOPs of the model's matmuls (without recomputation) per
      second, over the peak rate of all devices;
    - ``bytes_sent``: by each device in a step, as planned;
    - ``peak_memory`` and ``peak_memory_share``: bytes in use at the peak on the first local device, and their fraction of its
      memory, where the backend reports them;
    - with ``path``, ``goodput``, the productive fraction of the time since the first start of the run, and ``restarts``,
      ``compile_seconds`` and ``repeated_steps`` (:class:`meshpar.types.Goodput`);
    - with ``audit``, ``audited_share``; in jobs of several processes also ``slowest_process``, which waited the least for its
      devices, and ``slowest_host_seconds``, the part of a step in which it did not wait: it loaded data, or started the step; and
      ``slow_process``, the same process, if this part exceeds the median of the others by 10 % of a step;
    - every scalar of the metrics.

    Example:
      >>> step = mp.jit(train_step, mesh=mesh, layout="batch: data; mlp: model", dims=dims)
      >>> meter = mp.log.Meter(step.plan(params, x), tokens=x.shape[0], every=2, writers=[])
      >>> for _ in range(4):
      ...     params, loss = step(params, x)
      ...     values = meter.step({"loss": loss})
      >>> meter.close()
      >>> sorted(values)[:2]
      ['bytes_sent', 'loss']
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tokens: float | None = None,
        every: int = 10,
        writers: Iterable[Any] | None = None,
        first: int = 0,
        path: str | Path | None = None,
        audit: int | None = None,
    ):
        """Measure the steps of a plan.

        Args:
          plan: of the step; ``step.plan(*args)``.
          tokens: tokens (or examples) of a step, on all devices together.
          every: number of steps of which the mean is written.
          writers: any of: a text stream (``sys.stdout``), to which one line is written; a ``SummaryWriter`` of TensorBoard; a
            writer of ``clu.metric_writers``; a :class:`MlLog`; a function of (step, values). Default: a line with ``print``. Only
            the first process of a job writes.
          first: number of the first step of this process: after a restart, the step after the restored checkpoint.
          path: a file of JSON with :attr:`goodput`, which the next start of the run reads. It is written with the other values.
          audit: after every ``audit`` steps the copies of replicated arrays of the state, which :meth:`step` is given, are
            compared by digests of their bits, on the devices. ``values["audited_share"]`` is the fraction of the state on a
            device that has copies. Of the other arrays the largest matrix represents a layer: three devices multiply a part of it
            by itself, and the results are compared.

        Raises:
          UnsupportedError: ``every`` or ``audit`` below 1, a writer of another kind, or a file at ``path`` of other content.
        """
        for name, steps in (("every", every), ("audit", audit)):
            if steps is not None and steps < 1:
                raise UnsupportedError(f"{name}={steps}: a number of steps is at least 1", fixes=[f"{name}=10"])
        self.plan, self.tokens, self.every = plan, tokens, every
        self._all = [_print] if writers is None else list(writers)
        self._writers = [_writer(w) for w in self._all] if jax.process_index() == 0 else []
        self._first, self._steps, self._written, self._pending, self._begin = first, first, first, None, 0.0
        self._path = None if path is None else Path(path)
        self.goodput = Goodput.start(self._path, first)
        """The time of the run by use, over all its starts; complete up to the last values that were written."""
        self._compiled, self._seconds = len(compilations()), (0.0, 0.0)
        self._audit, self._audit_every = Audit(plan), audit
        self._left = time.perf_counter()  # end of the last call of `step`
        self._host = 0.0  # seconds between calls since `_begin`
        self._save()
        self._planned = {"bytes_sent": float(plan.bytes_sent)}
        if plan.seconds is not None:
            self._planned["planned_seconds"] = plan.seconds

    def step(self, metrics: Any, /, **state: Any) -> dict[str, float] | None:
        """Count a step that was called.

        Args:
          metrics: results of the step that are not donated to the next: its loss, or a tree of metrics. The meter waits for them,
            and writes the scalars by their paths.
          **state: with ``audit``, argument of the step → the value that the step returned for it: ``state=state``. They may be
            donated to the next step.

        Returns:
          The values, if this call wrote them.

        Raises:
          DigestError: copies of an array differed in the audit after the step before; the error names devices, arrays and steps.
            It is raised in all processes.
          UnsupportedError: an audit without state, of arrays that are no argument of the step, or of which none has copies.
        """
        before, self._pending = self._pending, metrics
        self._host += time.perf_counter() - self._left
        self._steps += 1
        done = self._steps - 2  # number of the step that has just ended
        values = None if before is None else self._ended(done, before, write=done % self.every == 0)
        raise_faults(self._audit.finish())
        if self._audit_every is not None and (done + 1) % self._audit_every == 0:
            self._audit.start(done + 1, state, self._seconds)
        self._left = time.perf_counter()
        return values

    def _ended(self, done: int, metrics: Any, write: bool) -> dict[str, float] | None:
        """Wait for a step, and write the mean of the steps since the last that were written; returns the values that it wrote.

        Args:
          done, metrics: number and metrics of the step.
          write: whether to write.
        """
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        if done == self._first:
            self._begin, self._host = now, 0.0
        if done == self._written or not write:
            return None
        seconds, host = ((t / (done - self._written)) for t in (now - self._begin, self._host))
        self.goodput.add(self._written + (self._written > self._first), done, seconds)
        self._save()
        values = self._measured(seconds, metrics)
        self._begin, self._written, self._host = now, done, 0.0
        self._seconds = seconds, host
        for writer in self._writers:
            writer(done, values)
        return values

    def _save(self) -> None:
        """Count the compilations since the last call, and write the record of the run, in the first process."""
        seconds = compilations()
        self.goodput.compile_seconds += sum(seconds[self._compiled :])
        self._compiled = len(seconds)
        if self._path is not None and jax.process_index() == 0:
            self.goodput.save(self._path)

    def _measured(self, seconds: float, metrics: Any) -> dict[str, float]:
        """The values for a mean time of a step."""
        values = {"step_seconds": seconds}
        if self.tokens is not None:
            values["tokens_per_second"] = self.tokens / seconds
            values["tokens_per_second_per_device"] = self.tokens / seconds / self.plan.mesh.size
        if self.plan.time is not None:
            values["mfu"] = self.plan.time.model_flops / (seconds * self.plan.time.peak_flops)
        if self._path is not None:
            of = self.goodput
            values |= {"goodput": of.fraction, "restarts": of.starts - 1, "compile_seconds": of.compile_seconds}
            values["repeated_steps"] = of.repeated_steps
        stats = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            values["peak_memory"] = float(stats["peak_bytes_in_use"])
        if stats.get("bytes_limit"):
            values["peak_memory_share"] = values.get("peak_memory", 0.0) / stats["bytes_limit"]
        if self._audit.share:
            values["audited_share"] = self._audit.share
        if len(self._audit.seconds) > 1:
            hosts = {process: host for process, (_, host) in self._audit.seconds.items()}
            slowest = max(hosts, key=hosts.__getitem__)
            values |= {"slowest_process": slowest, "slowest_host_seconds": hosts[slowest]}
            others = statistics.median(host for process, host in hosts.items() if process != slowest)
            if hosts[slowest] - others > SLOW * seconds:
                values["slow_process"] = slowest
        return {**values, **self._planned, **_scalars(metrics)}

    def close(self, status: str = "success") -> None:
        """End the measurement: write the mean of the steps that are not written yet, and ``run_stop`` to an :class:`MlLog`.

        Args:
          status: ``"success"`` or ``"aborted"``, for the log. After ``"aborted"`` it waits for no step and writes no mean.

        Raises:
          DigestError: as for :meth:`step`.
        """
        last, self._pending = self._pending, None
        faults = []
        if last is not None and status == "success":
            self._ended(self._steps - 1, last, write=True)
            faults = self._audit.finish()
        for writer in self._all:
            if isinstance(writer, MlLog) and self._writers:
                writer.close(status)
        raise_faults(faults)

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """:meth:`close`; the status is ``"aborted"`` after an error."""
        self.close("success" if kind is None else "aborted")


class MlLog:
    """Writes lines of MLPerf's log format, ``:::MLLOG {…}``: ``run_start``, ``tracked_stats``, ``run_stop``.

    The format is defined by https://github.com/mlcommons/logging. A submission needs further keys, such as
    ``submission_benchmark`` and ``seed``, which are given as ``facts`` or written with :meth:`event`.

    Example:
      >>> log = mp.log.MlLog("log.txt", submission_benchmark="llama31_8b", global_batch_size=32)
      >>> plan = mp.plan(train_step, params, x, mesh=mesh, layout="batch: data", dims=dims)
      >>> meter = mp.log.Meter(plan, tokens=x.shape[0], writers=[log])
    """

    def __init__(self, path: str | Path, **facts: Any):
        """Open the file, and write the facts and ``run_start``.

        Args:
          path: of the log file, to which lines are added.
          **facts: key → value of events that are written first.
        """
        self.path = Path(path)
        self._started = False
        self._facts = facts

    def event(self, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any) -> None:
        """Write one line.

        Args:
          key, value: of the event; the value is JSON.
          kind: ``POINT_IN_TIME``, ``INTERVAL_START`` or ``INTERVAL_END``.
          **metadata: further entries of the line's metadata, besides the file and line that called this.
        """
        frame = inspect.stack(0)[1]
        where = {"file": frame.filename, "lineno": frame.lineno}
        line = {
            "namespace": "",
            "time_ms": int(time.time() * 1e3),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {**where, **metadata},
        }
        with self.path.open("a", encoding="utf8") as file:
            file.write(f":::MLLOG {json.dumps(line)}\n")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write ``tracked_stats`` of a step, and before the first one the facts and ``run_start``."""
        if not self._started:
            for key, value in self._facts.items():
                self.event(key, value)
            self.event("run_start", kind="INTERVAL_START")
            self._started = True
        self.event("tracked_stats", dict(values), step=step)

    def close(self, status: str = "success") -> None:
        """Write ``run_stop``; ``status``: ``"success"`` or ``"aborted"``."""
        if self._started:
            self.event("run_stop", kind="INTERVAL_END", status=status)
            self._started = False


def _scalars(metrics: Any) -> dict[str, float]:
    """The scalars of a tree of metrics, by their paths; a single one is the ``loss``."""
    return {x.path or "loss": float(x.value) for x in flatten_named(metrics) if np.ndim(x.value) == 0}


_FORMATS: dict[str, tuple[str, Callable[[float], str], int]] = {
    "step_seconds": ("{} a step", format_seconds, 7),
    "planned_ratio": ("{} × planned", "{:.2f}".format, 4),
    "tokens_per_second": ("{} tokens/s", "{:,.0f}".format, 10),
    "tokens_per_second_per_device": ("{} tokens/s/device", "{:,.0f}".format, 9),
    "mfu": ("MFU {}", "{:.1%}".format, 5),
    "peak_memory": ("peak memory {}", format_memory, 10),
    "peak_memory_share": ("({})", "{:.0%}".format, 4),
}
"""Value → (how lines of text show it, how its number is written, columns of the number)."""


def _line(step: int, values: Mapping[str, float]) -> str:
    """One line of text: ``step     20   loss     1.234   45.6 ms a step   1.05 × planned   …``.

    Columns have fixed widths. Figures of the plan, the same for every step, are left out.
    """
    planned = values.get("planned_seconds")
    shown = dict(values) if not planned else {**values, "planned_ratio": values["step_seconds"] / planned}
    own = [f"{name} {x:>9.4g}" for name, x in values.items() if name not in (*_FORMATS, *_PLANNED)]
    columns = [form.format(f"{text(shown[k]):>{width}}") for k, (form, text, width) in _FORMATS.items() if k in shown]
    return "   ".join([f"step {step:>6}", *own, *columns]).replace("   (", " (")


_PLANNED = ("bytes_sent", "planned_seconds", "audited_share", "slowest_process", "slowest_host_seconds")


def _print(step: int, values: Mapping[str, float]) -> None:
    print(_line(step, values), flush=True)


def _writer(writer: Any) -> Writer:
    """The function that writes values with an object of a logging library.

    Raises:
      UnsupportedError: an object of another kind.
    """
    if hasattr(writer, "write_scalars"):
        return lambda step, values: writer.write_scalars(step, dict(values))
    if hasattr(writer, "add_scalar"):

        def add(step: int, values: Mapping[str, float]) -> None:
            for name, x in values.items():
                writer.add_scalar(name, x, step)

        return add
    if callable(writer):
        return cast(Writer, writer)
    if hasattr(writer, "write"):
        return lambda step, values: print(_line(step, values), file=writer)
    raise UnsupportedError(
        f"a writer of a Meter is no {type(writer).__name__}",
        fixes=[
            "a text stream, TensorBoard's SummaryWriter, a writer of clu, an mp.log.MlLog, or a function of (step, values)"
        ],
    )

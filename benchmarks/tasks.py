"""Tasks in processes of their own, under time limits, with a record of JSON lines from which a command resumes.

`device.py` and `suite.py` run their tasks with it: a crash, an exception or a hang is recorded, and costs that task alone. One line
is appended to the record after each task and flushed to disk, so that a command that is killed loses nothing.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshpar_kernels.isolation import Worker, WorkerError

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "benchmarks")]


@dataclasses.dataclass(frozen=True)
class Task:
    """One request to a worker.

    Attributes:
      id: names it in the record.
      request: the keyword arguments of the worker's function.
      group: tasks of one group follow each other in one process.
      limit: seconds.
      checked_by: names of other tasks' subjects; the task does not run after a wrong one.
    """

    id: str
    request: Mapping[str, Any]
    group: str
    limit: float = 60.0
    checked_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a task.

    Attributes:
      status: "ok"; "wrong": its error exceeds the limit; or as in `meshpar_kernels.isolation.Status`.
      result: the worker's result.
      message: of the failure.
      seconds: wall time.
    """

    id: str
    status: str
    result: Any = None
    message: str = ""
    seconds: float = 0.0


Outcomes = dict[str, Outcome]


def read(file: Path) -> Outcomes:
    """The outcomes in a record; other lines, and a last line that was cut off, are ignored."""
    found: Outcomes = {}
    for line in file.read_text().splitlines():
        try:
            outcome = Outcome(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        found[outcome.id] = outcome
    return found


def append(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to a record, after a last line that was cut off on a line of its own, and flush it to disk."""
    cut_off = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a") as stream:
        stream.write("\n" * cut_off + json.dumps(line) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


@dataclasses.dataclass
class Runner:
    """Runs tasks in worker processes and records their outcomes.

    Args:
      record: the file to append to.
      deadline: on `time.monotonic`'s clock; no task starts after it, and one in flight is stopped without an outcome.
      outcomes: of the tasks that are not run again.
      target, environment, paths: of the worker.
      only: parts of ids: tasks run whose id contains one of them; empty: all.
      start_limit: least seconds for a task whose worker has to start first.
    """

    record: Path
    deadline: float
    outcomes: Outcomes
    target: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    paths: list[str] = dataclasses.field(default_factory=lambda: PATHS)
    only: Sequence[str] = ()
    start_limit: float = 0.0
    say: Callable[[str], None] = print
    lock: Any = dataclasses.field(default_factory=threading.Lock, repr=False)

    def run(self, tasks: Iterable[Task], always: bool = False, processes: int = 1) -> None:
        """Run the tasks that have no outcome yet.

        Args:
          always: whatever `only` says.
          processes: workers at a time. With several, their order is not kept.
        """
        if processes > 1:
            listed = list(tasks)
            with concurrent.futures.ThreadPoolExecutor(processes) as pool:
                list(pool.map(lambda n: self.run(listed[n::processes], always), range(processes)))
            return
        worker, group = None, None
        try:
            for task in tasks:
                if task.id in self.outcomes or not (always or self.wanted(task)) or self.excluded(task):
                    continue
                left = self.deadline - time.monotonic()
                if left <= 0:
                    return
                if worker is None or task.group != group:
                    if worker is not None:
                        worker.close()
                    worker, group = self.worker(), task.group
                limit = task.limit if worker.alive else max(task.limit, self.start_limit)
                outcome = self.outcome(worker, task, min(limit, left))
                if outcome.status == "timeout" and left <= limit:
                    return  # the budget ended it, not its own limit
                self.write(outcome)
                if outcome.status in ("failed", "wrong"):  # an error of the device may break later calls of its process
                    worker.close()
        finally:
            if worker is not None:
                worker.close()

    def worker(self) -> Worker:
        return Worker(self.target, paths=self.paths, environment=self.environment)

    def wanted(self, task: Task) -> bool:
        """Whether `only` names the task."""
        return not self.only or any(text in task.id for text in self.only)

    def excluded(self, task: Task) -> bool:
        """Whether a task does not run, for the outcome of another."""
        return False

    def judged(self, task: Task, result: Any) -> str:
        """The error of a result; empty if it is right."""
        return ""

    def shown(self, outcome: Outcome) -> str:
        """The end of the line that is printed for an outcome."""
        return outcome.message

    def outcome(self, worker: Worker, task: Task, limit: float) -> Outcome:
        """Run a task."""
        began = time.monotonic()
        try:
            result = worker.call(task.request, limit)
        except WorkerError as error:
            return Outcome(task.id, error.status, None, str(error), time.monotonic() - began)
        message = self.judged(task, result)
        return Outcome(task.id, "wrong" if message else "ok", result, message, time.monotonic() - began)

    def write(self, outcome: Outcome) -> None:
        """Append an outcome to the record and to `outcomes`."""
        with self.lock:
            append(self.record, dataclasses.asdict(outcome))
            self.outcomes[outcome.id] = outcome
        text = f"{outcome.status:<8} {outcome.seconds:5.1f} s  {outcome.id}  {' '.join(self.shown(outcome).split())}"
        self.say(text[:200])

"""``meshpar launch``: the processes of one machine, a log for each, and the first cause last.

It opens no backend and no connection: it starts processes, looks how they end, and starts them again. Across machines that is
the cluster's work (JobSet, Slurm), which starts the same script; see ``examples/pods``.

With ``--elastic`` the loss of a slice replaces the processes of the other slices as well. JAX cannot make a live group smaller: a
process blocks in the collective that the lost one does not join, the number of processes and their devices are fixed when a
backend opens, and a process whose coordinator (process 0) is gone is ended by the runtime; ``jax_enable_recoverability`` keeps the
others alive, but needs process 0. So a process is replaced by one that has imported its packages and waits, and the state comes
from the copies in the memory of the host, which are files that outlive both.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ...errors import TargetError
from ..compat.coordination import ADDRESS, CAUSES, COUNT, DEVICES, ELASTIC, LOSE, MEMORY, PROCESS, STUCK, TIMEOUT
from ..keywords_and_flags import option
from .copies_in_memory import host_memory
from .rendezvous import ended_file
from .stop import listening_file
from .watch import RESTARTABLE, USAGE

LOOK_SECONDS = 0.03
SETTLE_SECONDS = 3.0
"""How long the others may take to end by themselves, with the cause in their logs."""
_TAIL = 12
_GUARD = """
import contextlib, os, signal, sys
sys.stdin.read()
for group in map(int, sys.argv[1:]):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
"""
"""The program of a process that kills process groups when its standard input ends, as it does when the launcher is killed."""
_SPARE = """
import contextlib, importlib, json, os, runpy, sys
for name in ("meshpar", "flax.nnx", "optax", "orbax.checkpoint"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
variables, log, words = json.loads(sys.stdin.readline() or sys.exit())
os.environ.clear()
os.environ.update(variables)
for number, path, flags in ((0, os.devnull, os.O_RDONLY), *((k, log, os.O_WRONLY | os.O_APPEND) for k in (1, 2))):
    os.dup2(os.open(path, flags), number)
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv, sys.path[0], __file__ = words, os.path.dirname(os.path.abspath(words[0])), words[0]
    exec(compile(open(words[0], "rb").read(), words[0], "exec"))
"""
"""The program of a process that imports packages, and runs a script as ``python`` does when it receives its environment."""
SPARE_SECONDS = 5.0
"""Spare processes start so long after the processes of an attempt, which import the same packages."""


def _lost_slice(text: str) -> tuple[int, int]:
    which, at, call = text.partition("@")
    if not at or not which.isdecimal() or not call.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not SLICE@CALL, as 1@100")
    return int(which), int(call)


@dataclass(frozen=True)
class Job:
    """The processes that ``meshpar launch`` starts, watches and restarts, as its command line describes them.

    Attributes:
      command: of one process.
      processes: their number.
      devices: of all processes together (virtual CPU devices, or GPUs of this machine); None: set by the script.
      restarts: number of restarts after a loss.
      least: the smallest number of processes after a loss; None: always the initial number.
      timeout, stuck: as in :func:`meshpar.distributed`.
      grace: seconds between the request to stop (SIGTERM), or the first end with status 75, and the end of all.
      logs: folder; None: a temporary one, kept only after a failure.
      slices: groups of processes that are lost together.
      lose: (slice, call): kill this slice when a function is called for the n-th time, once.
      elastic: mesh axis over the slices: after a loss the run continues with the slices that remain; None: as ``least`` says.
      back: with ``elastic``, seconds from the loss of a slice until its hosts can be used again; None: never.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None = option(None, "of all processes: CPU stand-ins, or GPUs of this machine")
    restarts: int = option(0, "start again so often after a loss (%(default)s)")
    least: int | None = option(
        None, "continue with those that remain, at least so many (default: restart all)", flag="--min"
    )
    timeout: float = option(30.0, "seconds without a sign of life until a process is lost (%(default)s)")
    stuck: float = option(300.0, "seconds that a process may stay behind the others (%(default)s)")
    grace: float = option(30.0, "seconds to save after SIGTERM (%(default)s)")
    logs: Path | None = option(None, "where logs go (default: a temporary folder, kept after a failure)", metavar="DIR")
    slices: int = option(1, "groups of processes that are lost together (%(default)s)")
    lose: tuple[int, int] | None = option(
        None, "kill a slice at the n-th call of a function, as a rehearsal", type=_lost_slice, metavar="SLICE@CALL"
    )
    elastic: str | None = option(
        None, "mesh axis over the slices: after a loss the others continue at once", metavar="AXIS"
    )
    back: float | None = option(None, "with --elastic: a lost slice joins at the first save after so many seconds")

    @property
    def each(self) -> int:
        """The number of processes of a slice."""
        return self.processes // self.slices


@dataclass
class _End:
    """How one attempt ended: the status, the first cause, and the processes that were lost.

    ``joins``: none was lost; all have saved, so that slices that were lost before can join.
    """

    status: int
    cause: str = ""
    culprit: int | None = None
    lost: list[int] = field(default_factory=list)
    joins: bool = False


def launch(job: Job) -> int:
    """Run a job to its end; returns the exit status: 0, 75 (restartable, and no restarts left), 2, or the
    status of the script that failed."""
    _check(job)
    folder = job.logs or Path(tempfile.mkdtemp(prefix="meshpar-launch-"))
    count, left, attempt = job.processes, job.restarts, 0
    away: list[float] = []  # for each lost slice that returns, when it does
    with _stop_signals() as stop, _memory_folders(job) as memory, _spares() as spares:
        while True:
            logs = folder / f"attempt-{attempt}"
            logs.mkdir(parents=True, exist_ok=True)
            end = _attempt(_Attempt(job, count, attempt, logs, memory, spares), stop, min(away, default=float("inf")))
            if stop:
                _say(f"stopped by {signal.Signals(stop[-1]).name}; logs in {logs}")
                return 128 + signal.SIGINT if stop[-1] == signal.SIGINT else RESTARTABLE
            if end.status == 0:
                if job.logs is None:
                    shutil.rmtree(folder, ignore_errors=True)
                return 0
            slices = {p * len(memory) // count for p in end.lost}
            back = [t for t in away if t <= time.monotonic()] if end.joins else []
            after = count + job.each * len(back) if end.joins else _next_count(job, count, end, slices)
            # no restart: slices that join; or a number of processes that does not fit
            free = end.joins or (end.status == USAGE and attempt > 0)
            again = after is not None and (free or (end.status == RESTARTABLE and left > 0))
            _show(end, logs, f"starting again with {after} process{'es' * (after != 1)}" if again else None)
            if not again or after is None:
                return end.status
            left -= not free
            away = [t for t in away if t not in back]
            if job.slices > 1:
                _lose_memory(memory, slices, after < count)
                memory += [memory[0].with_name(f"slice-{attempt}-{k}") for k in range(len(back))]
            if job.back is not None:
                away += [time.monotonic() + job.back] * len(slices)
            count, attempt = after, attempt + 1


def _check(job: Job) -> None:
    """Raise TargetError if an option of the command line is out of range."""
    if job.processes < 1:
        raise TargetError(f"-n {job.processes}: at least one process", fixes=["-n 2"])
    if job.devices is not None and job.devices % job.processes:
        fix = f"--devices {max(1, job.devices // job.processes) * job.processes}"
        raise TargetError(f"--devices {job.devices} does not divide over {job.processes} processes", fixes=[fix])
    if job.slices < 1 or job.processes % job.slices:
        text = f"--slices {job.slices} does not divide {job.processes} processes"
        raise TargetError(text, fixes=["--slices that divides -n"])
    if job.least is not None and not 1 <= job.least <= job.processes:
        fix = f"--min {job.processes}: all of them"
        raise TargetError(f"--min {job.least}: between 1 and {job.processes}", fixes=[fix])
    if job.elastic is not None and (job.slices < 2 or job.restarts < 1):
        text = f"--elastic {job.elastic} with --slices {job.slices} --restarts {job.restarts}: no slice could be lost"
        raise TargetError(text, fixes=["--slices 2 --restarts 100: so many losses are survived"])
    if job.back is not None and job.elastic is None:
        raise TargetError(f"--back {job.back:g}: slices return to a run with --elastic AXIS", fixes=["--elastic slice"])
    if job.lose is not None and not 0 <= job.lose[0] < job.slices:
        fix = "--lose SLICE@CALL, with a slice below --slices"
        raise TargetError(f"--lose {job.lose[0]}@{job.lose[1]}: slices are 0 to {job.slices - 1}", fixes=[fix])


def _next_count(job: Job, count: int, end: _End, slices: set[int]) -> int | None:
    """How many processes to start next after the loss of these slices; None: too few are left."""
    least = job.least if job.elastic is None else (job.least or job.each)
    if least is None:
        return count if end.status != USAGE else None
    lost = job.each * max(1, len(slices)) if job.slices > 1 else max(1, len(end.lost))
    after = count - (1 if end.status == USAGE else lost)
    return after if after >= least else None


# -- one attempt


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A context in which SIGTERM, SIGINT and SIGHUP, which the user, the cluster or a closed terminal sends to the launcher, do
    not end it: the numbers of those that it receives are appended to the list."""
    received: list[int] = []
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    numbers = [s for s in stops if signal.getsignal(s) != signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {s: signal.signal(s, lambda number, _: received.append(number)) for s in numbers}
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextlib.contextmanager
def _memory_folders(job: Job) -> Iterator[list[Path]]:
    """For each slice the folder of copies of states (``mp.Checkpoints(memory=)``) in the memory of its hosts, deleted at the
    end."""
    with tempfile.TemporaryDirectory(prefix="meshpar-memory-", dir=host_memory(), ignore_cleanup_errors=True) as root:
        yield [Path(root, f"slice-{k}") for k in range(job.slices)]


def _lose_memory(memory: list[Path], lost: set[int], fewer: bool) -> None:
    """Delete the folders of lost slices, as their hosts are lost; each is removed from the list, or replaced by a new one."""
    for k in sorted(lost, reverse=True):
        shutil.rmtree(memory[k], ignore_errors=True)
        new = memory[k].with_name(f"{memory[k].name}-new")
        memory[k : k + 1] = [] if fewer else [new]


@contextlib.contextmanager
def _spares() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that run ``_SPARE``, which are killed at the end."""
    spares: list[subprocess.Popen[bytes]] = []
    try:
        yield spares
    finally:
        for child in spares:
            child.kill()
            child.communicate()


@dataclass(frozen=True)
class _Attempt:
    """One start of all processes.

    Attributes:
      count: of processes.
      number: of the attempt, from 0.
      memory: for each slice the folder of copies of states in the memory of its hosts.
      spares: processes that can run the script at once, which are used up.
    """

    job: Job
    count: int
    number: int
    logs: Path
    memory: Sequence[Path]
    spares: list[subprocess.Popen[bytes]]


def _attempt(of: _Attempt, stop: list[int], back: float) -> _End:
    """Start the processes, wait until all have ended, and return how the attempt ended.

    After the first failure, or ``job.grace`` seconds after a signal to stop, the processes that still run are killed. With
    ``--elastic``, they are killed at once after a loss, and end at the first save after ``back`` (``time.monotonic()``).
    ``stop`` has the signals that the launcher has received.
    """
    job, logs, port = of.job, of.logs, _free_port()
    running = {p: _start(of, p, port) for p in range(of.count)}
    spare_at = time.monotonic() + SPARE_SECONDS if job.elastic else float("inf")
    codes: dict[int, int] = {}  # process → exit code, in the order of the ends
    lost: list[int] = []  # killed, and not by this
    kill_at = float("inf")
    asked = killed = joining = False
    with _guard(running.values()), (logs / "process-0.log").open("rb") as log:
        try:
            while running:
                _show_more(log)
                for p, code in [(p, c) for p, child in running.items() if (c := child.poll()) is not None]:
                    codes[p] = code
                    child = running.pop(p)
                    if code == 0:
                        ended_file(logs, p).touch()
                        continue
                    _signal([child], signal.SIGKILL)  # its own children, such as workers of a data loader
                    if code == -signal.SIGKILL and not killed:
                        lost.append(p)
                    if kill_at == float("inf"):
                        # with 75 all end, after they have saved
                        wait = {-signal.SIGKILL: 0.0 if job.elastic else 1.0, RESTARTABLE: job.grace}
                        kill_at = time.monotonic() + wait.get(code, SETTLE_SECONDS)
                if stop and not asked:
                    asked = True
                    _signal([] if joining else running.values(), signal.SIGTERM)
                    kill_at = min(kill_at, time.monotonic() + job.grace)
                now = time.monotonic()
                ready = spare_at == float("inf")  # spare processes take over
                if now > back and ready and not joining and all(listening_file(logs, p).exists() for p in running):
                    joining = True
                    _signal(running.values(), signal.SIGTERM)
                if now > spare_at:
                    spare_at = float("inf")
                    of.spares.extend(_spare() for _ in range(job.processes - len(of.spares)))
                if now > kill_at:
                    killed = True
                    _signal(running.values(), signal.SIGKILL)
                    kill_at = time.monotonic() + 5
                time.sleep(LOOK_SECONDS)
        finally:
            _signal(running.values(), signal.SIGKILL)
            _show_more(log)
    if joining and not stop and RESTARTABLE in codes.values() and {*codes.values()} <= {0, RESTARTABLE}:
        return _End(RESTARTABLE, "a slice joins", joins=True)
    return _judge(codes, lost, logs)


def _judge(codes: dict[int, int], lost: list[int], logs: Path) -> _End:
    """The end of an attempt, from the exit codes of its processes and the processes that were killed.

    The first cause is a process that was killed, because of which the others fail, perhaps before its end is seen; else the
    earliest cause that a process noted; else the first exit code that is not 0.
    """
    p, code = next(((p, code) for p, code in codes.items() if (p in lost if lost else code)), (0, 0))
    if not code:
        return _End(0)
    noted = []
    for path in logs.glob("cause-*.json"):
        with contextlib.suppress(ValueError, OSError):
            noted.append(json.loads(path.read_text()))
    if code == -signal.SIGKILL:
        return _End(RESTARTABLE, f"process {p} was killed (SIGKILL)", p, lost)
    if noted:
        cause = min(noted, key=lambda c: c["at"])
        status, p = cause["status"], cause["process"]
        if cause["kind"] == "ended" and codes.get(p, 0) > 0:  # noted by another process, which cannot know this status
            status = codes[p]
        return _End(status, f"process {p}: {cause['text']}", p, [p] if status == RESTARTABLE else [])
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return _End(RESTARTABLE, f"process {p} was ended by {name}", p, [p])
    return _End(code, f"process {p} ended with exit status {code}", p, [p] if code == RESTARTABLE else [])


def _start(of: _Attempt, p: int, port: int) -> subprocess.Popen[bytes]:
    """Start process ``p``, with its settings in the environment and its output in ``process-<p>.log``."""
    job, count, slices = of.job, of.count, len(of.memory)
    own: dict[str, object] = {PROCESS: p, COUNT: count, ADDRESS: f"127.0.0.1:{port}", "MESHPAR_ATTEMPT": of.number}
    own |= {
        "PYTHONUNBUFFERED": 1,
        TIMEOUT: job.timeout,
        STUCK: job.stuck,
        CAUSES: of.logs,
        MEMORY: of.memory[p * slices // count],
    }
    if job.elastic is not None:
        own[ELASTIC] = f"{job.elastic}={slices}"
    if job.lose is not None and of.number == 0 and p * job.slices // count == job.lose[0]:
        own[LOSE] = job.lose[1]
    if devices := _devices_of_each(job):
        own[DEVICES] = devices
    env = {k: v for k, v in os.environ.items() if k != LOSE} | {k: str(v) for k, v in own.items()}
    path = of.logs / f"process-{p}.log"
    with path.open("wb") as log:
        while of.spares:
            child = of.spares.pop()
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended
                child.stdin.write(json.dumps([env, str(path), job.command[1:]]).encode() + b"\n")
                child.stdin.close()
                return child
        none, same = subprocess.DEVNULL, subprocess.STDOUT
        return subprocess.Popen(job.command, env=env, stdin=none, stdout=log, stderr=same, start_new_session=True)


def _spare() -> subprocess.Popen[bytes]:
    """Start a process that waits until :func:`_start` has it run the script."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words, none = [sys.executable, "-c", _SPARE], subprocess.DEVNULL
    return subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True)


@contextlib.contextmanager
def _guard(children: Iterable[subprocess.Popen[bytes]]) -> Iterator[None]:
    """A context in which processes and their children are killed if this process ends without leaving it, such as by SIGKILL."""
    words = [sys.executable, "-I", "-S", "-c", _GUARD, *(str(child.pid) for child in children)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _devices_of_each(job: Job) -> int | None:
    """Number of devices of each process: a share of ``--devices`` or of this machine's GPUs, also after a loss; None:
    not set."""
    if job.devices is not None:
        return job.devices // job.processes
    platforms = os.environ.get("JAX_PLATFORMS", "")
    gpus = [] if platforms and "cuda" not in platforms and "gpu" not in platforms else glob.glob("/dev/nvidia[0-9]*")
    return len(gpus) // job.processes or None


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _signal(children: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to processes and their children."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


# -- output


def _show_more(log: BinaryIO) -> None:
    """Copy the lines added to a log file since the last call to stdout."""
    shutil.copyfileobj(log, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _show(end: _End, logs: Path, then: str | None) -> None:
    """Print the end of an attempt to stderr: the last lines of the process at fault, the folder of logs, the cause, and
    ``then``, the next action of the launcher."""
    if end.culprit:  # process 0's lines were shown
        with contextlib.suppress(OSError):
            lines = (logs / f"process-{end.culprit}.log").read_text(errors="replace").splitlines()[-_TAIL:]
            _say(f"the last lines of process {end.culprit}:")
            for line in lines:
                print(f"  | {line}", file=sys.stderr)
    _say(f"logs of all processes: {logs}")
    _say("first cause: " * (not end.joins) + end.cause + (f"; {then}" if then else ""))


def _say(text: str) -> None:
    print(f"meshpar launch: {text}", file=sys.stderr, flush=True)

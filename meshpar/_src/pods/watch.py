"""Monitoring: every process reports its progress each second; if one is lost, hangs or fails, all processes end.

A process in a collective blocks forever if another process never joins it, and its main thread cannot be interrupted. So
background threads write three kinds of entries to the coordinator's key-value store:

- ``beat/P``: process P is alive; its last calls of compiled functions, numbered, each with a running hash of all calls;
- ``verdict``: the first failure that a process detects; it can be written once. Every process that reads it prints it and ends;
- ``ack/P``: process P has read the verdict. Process 0, which runs the store, waits for these.

Process 0 evaluates the beats. A second thread enforces the deadline, because a request to a stopped coordinator blocks.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from ...errors import AgreementError, CheckError, CompilerError, LostProcessError, MeshparError, StuckProcessError
from ..compat.coordination import CAUSES, Store, coordinator, process_count, process_index

RESTARTABLE, PROGRAM, USAGE = 75, 1, 2
"""Exit statuses: starting again may help (sysexits' EX_TEMPFAIL); the program failed; its arguments, mesh or layout are wrong."""

BEAT_SECONDS = 1.0
_RECENT_CALLS = 16
_DETECTIONS = {"stuck": 1, "undecided": 6}
"""Kind of a cause → successive detections before it ends the job; 2 of other kinds."""
_OUR_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION")
"""Runtime errors that a process makes by itself, not because another one has gone."""


@dataclass(frozen=True)
class Cause:
    """The reason why all processes of a job end: the first one that is published. Every process exits with its status.

    Attributes:
      process: whose fault it is.
      kind: ``raised``, ``lost``, ``stuck``, ``order``, ``values``, ``undecided``, ``ended``, ``disagreed``, ``absent``, ``port``.
      text: what happened, with the type of the error first.
      status: the exit status of all.
    """

    process: int
    kind: str
    text: str
    status: int

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str | bytes) -> Cause:
        return Cause(**json.loads(text))


@dataclass
class Calls:
    """The calls of compiled functions that this process has made, numbered from 1.

    ``recent`` has the last calls and every few of the older ones, so that processes at different calls have some in common.
    """

    count: int = 0
    chain: int = 0
    each: collections.Counter[str] = field(default_factory=collections.Counter)
    recent: dict[int, tuple[int, str, dict[str, int]]] = field(default_factory=dict)

    def note(self, function: str, values: Mapping[str, int]) -> None:
        """Count a call of ``function`` and record it with its host values (path → checksum); old records are thinned
        out."""
        self.count += 1
        self.each[function] += 1
        said = f"{function} {sorted(values.items())}".encode()
        self.chain = zlib.crc32(said, self.chain)
        self.recent[self.count] = (self.chain, f"call {self.each[function]} of `{function}`", dict(values))
        for old in [n for n in self.recent if not _worth_keeping(n, self.count)]:
            del self.recent[old]


def _worth_keeping(n: int, now: int) -> bool:
    """Whether the record of call ``n`` is retained at call ``now``: all recent ones, and older ones at multiples of 64
    and 1,024."""
    return any(n % every == 0 and now - n < every * _RECENT_CALLS for every in (1, 64, 1024))


CALLS = Calls()


class Watch:
    """Watches the other processes of a job from threads of this one; made by :func:`meshpar.distributed`.

    Args:
      timeout: seconds without a sign of life after which a process is lost.
      stuck: seconds that a process may stay behind the calls of the others.
    """

    def __init__(self, timeout: float, stuck: float):
        """A watch whose threads do not run yet."""
        self.timeout, self.stuck = timeout, stuck
        self.index, self.count = process_index(), process_count()
        self.store = Store()
        self.heard = time.monotonic()  # when the coordinator last answered
        self.ending = threading.Lock()
        self.over = False  # the script has come to its end
        self.failed = False  # the main thread shows an error of its own
        self.cause: Cause | None = None

    def start(self) -> None:
        """Install the exception and exit hooks, and start the threads: heartbeat, deadline, and in process 0 the judge."""
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._on_end)
        loops = [self._beat_loop, self._deadline_loop, *([self._judge_loop] if self.index == 0 else [])]
        for loop in loops:
            threading.Thread(target=loop, name=f"meshpar {loop.__name__.strip('_')}", daemon=True).start()

    # -- threads

    def _beat_loop(self) -> None:
        """Thread: write this process's heartbeat, and end the process when the store has a verdict."""
        n = 0
        while True:
            n += 1
            try:
                self.beat(n)
                text = self.store.peek("meshpar/verdict")
                self.heard = time.monotonic()
            except jax.errors.JaxRuntimeError:
                if self.over:
                    return  # the group has been left
                text = None
            if text is not None:
                self.end_with(Cause.of_json(text))
            time.sleep(BEAT_SECONDS)

    def beat(self, n: int) -> None:
        calls = [[k, *v] for k, v in list(CALLS.recent.items())]
        said = {"beat": n, "count": CALLS.count, "calls": calls, "over": self.over}
        self.store.put(f"meshpar/beat/{self.index}", json.dumps(said))

    def _deadline_loop(self) -> None:
        """Thread: end this process if the coordinator has not answered for ``timeout`` seconds."""
        before = time.monotonic()
        while True:
            time.sleep(min(0.25, self.timeout / 4))
            now = time.monotonic()
            if now - before > self.timeout / 2:  # this process was suspended: it reads the store first
                self.heard = now
            before = now
            if now - self.heard > self.timeout and not self.over:
                if self.index == 0:
                    self.heard = now
                    continue
                seconds = now - self.heard
                text = f"process 0, the coordinator at {coordinator()}, has not answered for {seconds:.0f} s"
                self.end_with(Cause(0, "lost", f"LostProcessError: {text}: it is stopped or cut off", RESTARTABLE))

    def _judge_loop(self) -> None:
        """Thread of process 0: read all heartbeats, and write the first verdict to the store."""
        judge = Judge(self.count, self.timeout, self.stuck)
        while True:
            time.sleep(BEAT_SECONDS / 2)
            try:
                beats = {int(p): json.loads(text) for p, text in self.store.folder("meshpar/beat").items()}
                cause = judge.verdict(beats, time.monotonic())
                if cause is not None and not (self.over and cause.kind == "lost"):
                    self.store.put_first("meshpar/verdict", cause.as_json())
                    return  # the thread that beats reads it
            except jax.errors.JaxRuntimeError:
                if self.over:
                    return

    # -- ends

    def publish(self, cause: Cause) -> Cause:
        """Make this the cause for all, unless another came first; returns the one that holds."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self.store.put_first("meshpar/verdict", cause.as_json()):
                text = self.store.peek("meshpar/verdict")
                return cause if text is None else Cause.of_json(text)
        return cause

    def end_with(self, cause: Cause) -> None:
        """Print the cause, and end this process without waiting for the others; called from a thread of the watch."""
        if self.failed and cause.process == self.index:
            time.sleep(10 * BEAT_SECONDS)  # the main thread ends it
        with self.ending:
            if cause.process != self.index or cause.kind not in ("raised", "disagreed"):
                say(f"meshpar: process {self.index} ends because of process {cause.process}: {cause.text}")
            self.leave(cause)

    def leave(self, cause: Cause) -> None:
        """End this process with the status of ``cause``, after the others could read the cause; does not return."""
        note_cause(cause, self.index)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self.index == 0 and cause.kind != "unreachable":
                self._wait_for_others(cause)
            elif cause.process != 0 or cause.kind != "lost":
                self.store.put(f"meshpar/ack/{self.index}", "read")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(cause.status)

    def _wait_for_others(self, cause: Cause) -> None:
        """Process 0: wait, for at most 2.5 heartbeats, until all other processes have read the cause; the store ends
        with process 0."""
        want = set(range(1, self.count)) - ({cause.process} if cause.kind == "lost" else set())
        until = time.monotonic() + 2.5 * BEAT_SECONDS
        while time.monotonic() < until:
            if want <= {int(p) for p in self.store.folder("meshpar/ack")}:
                time.sleep(0.2)  # they have read it, and are ending: JAX aborts a process whose coordinator is gone
                return
            time.sleep(0.05)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """``sys.excepthook``: print the exception, publish its cause, and end this process with the status of the first
        cause."""
        runtime = isinstance(error, jax.errors.JaxRuntimeError) and not any(s in str(error) for s in _OUR_OWN)
        self.failed = not runtime
        self._hook(kind, error, trace)
        if runtime:  # another process went away: wait until it is known which
            until = time.monotonic() + self.timeout + 2 * BEAT_SECONDS
            while time.monotonic() < until:
                time.sleep(0.1)
        first = str(error).strip().splitlines() or [""]
        text = f"{kind.__name__}: {first[0]}"
        how = "disagreed" if isinstance(error, AgreementError) else "raised"
        cause = Cause(self.index, how, text, RESTARTABLE if runtime else status_of(error))
        cause = self.publish(cause)
        with self.ending:
            self.leave(cause)

    def _on_end(self) -> None:
        self.over = True
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.beat(-1)


class Judge:
    """Decides on process 0, from the heartbeats of all processes, whether the job must end, and why."""

    def __init__(self, count: int, timeout: float, stuck: float):
        self.count, self.timeout, self.stuck = count, timeout, stuck
        self.beats: dict[int, tuple[int, float]] = {}  # process → its last beat, and when that was new
        self.progress: dict[int, tuple[int, float]] = {}  # process → its count of calls, and when that was new
        self.suspected: Cause | None = None
        self.detections = 0  # of this cause, one after the other

    def verdict(self, beats: Mapping[int, dict[str, Any]], now: float) -> Cause | None:
        """The cause to end the job with, by the heartbeats at ``now`` (seconds of a monotonic clock); None: the job is
        healthy.

        ``beats``: process → its last heartbeat. A lost process is reported at once; a mismatch between processes only
        when two successive calls detect the same one.
        """
        for p in range(self.count):
            said = beats.get(p, {"beat": 0, "count": 0, "calls": [], "over": False})
            for table, value in ((self.beats, said["beat"]), (self.progress, said["count"])):
                if table.get(p, (None,))[0] != value:
                    table[p] = (value, now)
            silent = now - self.beats[p][1]
            if silent > self.timeout and not said["over"]:
                last = f"after {_last(said)}" if said["calls"] else "before its first call"
                error = LostProcessError(
                    f"process {p} is lost: no sign of life for {silent:.0f} s, {last}; it died, was stopped or is cut off",
                    fixes=["start the job again: `meshpar launch` does, from the last checkpoint"],
                )
                return Cause(p, "lost", f"LostProcessError: {error}", RESTARTABLE)
        cause = self.order(beats) or self.behind(beats, now)
        self.detections = self.detections + 1 if cause == self.suspected else 1
        self.suspected = cause
        # reports in flight arrive between two detections; the next calls, which decide between two processes, a little later
        return cause if cause is not None and self.detections >= _DETECTIONS.get(cause.kind, 2) else None

    def order(self, beats: Mapping[int, dict[str, Any]]) -> Cause | None:
        """The first recorded call in which a process ran another function, or had other host values, than process 0,
        as a Cause; None: no such call.

        The fault is process 0's if most processes differ from it. If half of them do, as with two processes, it is of the one
        that skipped a call, because its call is the other's next one; if neither or both did, the text says that it is undecided.
        """
        calls = {p: {c[0]: c[1:] for c in beats[p]["calls"]} for p in sorted(beats)}
        mine = calls.get(0, {})
        first = {  # process → the first call that differs
            p: min(differ)
            for p, theirs in calls.items()
            if (differ := [n for n in mine.keys() & theirs.keys() if mine[n][0] != theirs[n][0]])
        }
        if not first:
            return None
        p, n = next(iter(first.items()))

        def skipped(a: int, b: int) -> bool:
            """Whether the call ``n`` of process ``a`` is the next call of process ``b``: the function, and the host values."""
            return n + 1 in calls[b] and _made(calls[a][n]) == _made(calls[b][n + 1])

        skips = skipped(0, p), skipped(p, 0)
        tie, is_skip = 2 * len(first) == len(beats), skips[0] != skips[1]
        odd, other = (0, p) if 2 * len(first) > len(beats) or (tie and is_skip and skips[0]) else (p, 0)
        (_, what, values), (_, what_other, values_other) = calls[odd][n], calls[other][n]
        kind = "undecided" if tie and not is_skip else "order" if what != what_other else "values"
        note = f": process {odd} skipped a call" if tie else ""
        if kind == "undecided":
            note = f": process {odd} or process {other} is wrong, which of them is undecided"
        if what != what_other:
            text = f"process {odd} is in {what} where process {other} is in {what_other}{note}"
            return Cause(odd, kind, f"AgreementError: {text}; both must make the same calls in the same order", PROGRAM)
        paths = ", ".join(f"`{k}`" for k in values_other if values_other.get(k) != values.get(k))
        wrong = f"other values of {paths}" if paths else "other values in an earlier call"
        text = (
            f"AgreementError: in {what} process {odd} has {wrong} than process {other}{note}; host arrays must be the same in "
            'every process: mp.data.put(…, rows="mine") takes each one\'s own rows'
        )
        return Cause(odd, kind, text, PROGRAM)

    def behind(self, beats: Mapping[int, dict[str, Any]], now: float) -> Cause | None:
        """The first process that has made fewer calls than another one, and whose script has ended, or that has made no call
        for ``stuck`` seconds, as a Cause, or None."""
        first = max(beats, key=lambda p: beats[p]["count"], default=0)
        for p, said in sorted(beats.items()):
            silent = now - self.progress[p][1]
            if said["count"] == beats[first]["count"]:
                continue
            if said["over"]:
                others = f"process {first} is in {_last(beats[first])}"
                text = f"process {p} ended its script after {_last(said)}, but {others}"
                return Cause(p, "ended", f"LostProcessError: {text}", PROGRAM)
            if silent > self.stuck:
                error = StuckProcessError(
                    f"process {p} is stuck: it is alive, but has not gone on from {_last(said)} for {silent:.0f} s, "
                    f"and process {first} waits in {_last(beats[first])}",
                    fixes=["its stack is in the log of the process; `--stuck SECONDS` waits longer"],
                )
                return Cause(p, "stuck", f"StuckProcessError: {error}", RESTARTABLE)
        return None


def _made(call: list[Any]) -> tuple[str, Any]:
    """(function, host values) of a recorded call, without its number."""
    return call[1].partition(" of ")[2], call[2]


def _last(said: Mapping[str, Any]) -> str:
    return max(said["calls"], default=[0, 0, "its start"])[2]


def status_of(error: BaseException) -> int:
    """The exit status for an exception that ends the script."""
    if isinstance(error, LostProcessError | StuckProcessError):
        return RESTARTABLE
    failed = isinstance(error, AgreementError | CheckError | CompilerError) or not isinstance(error, MeshparError)
    return PROGRAM if failed else USAGE


def note_cause(cause: Cause, index: int) -> None:
    """Write the cause to the file of process ``index`` for the launcher, which prints the first cause at the end."""
    folder = os.environ.get(CAUSES)
    if folder:
        with contextlib.suppress(OSError):
            said = {**asdict(cause), "at": time.time()}
            Path(folder, f"cause-{index}.json").write_text(json.dumps(said))


def say(text: str) -> None:
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)

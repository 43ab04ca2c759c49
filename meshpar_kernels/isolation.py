"""Call a function in another process, under a time limit, so that a crash or a hang costs that call alone.

A GPU kernel under test can end its process (an illegal memory access, an abort of the compiler) or never return. `Worker` runs
such calls in a child process and turns both outcomes into exceptions of the caller. The child stays alive between calls: its
devices, compiled programs and cached operands are reused until a call fails.

    worker = Worker("my_module:measure", paths=["benchmarks"])
    try:
        result = worker.call({"shape": "g64"}, limit=60)
    except WorkerError as error:      # an exception in the function, a crash, or a call over its limit
        print(error.status, error)
    finally:
        worker.close()

Requests and results are JSON values. The child runs this file, and imports the target's module at its first request.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Status = Literal["refused", "failed", "crashed", "timeout"]
"""`"refused"`: the function raised `NotImplementedError`; `"failed"`: another exception; `"crashed"`: the process ended;
`"timeout"`: the call exceeded its limit, and the process was killed."""

LOG_TAIL = 600
"""Characters of the child's output that the message of a crash quotes."""


class WorkerError(Exception):
    """A call ended without a result.

    Attributes:
      status: the kind of failure.
    """

    def __init__(self, status: Status, message: str):
        super().__init__(message)
        self.status: Status = status


class Worker:
    """A child process that calls one function, once per request.

    Args:
      target: `"module:function"`; the function takes the fields of a request as keyword arguments and returns a JSON value.
      paths: folders to put in front of the child's `PYTHONPATH`.
      environment: variables to set in the child in addition to this process's.
    """

    def __init__(self, target: str, *, paths: Sequence[str] = (), environment: Mapping[str, str] | None = None):
        """See the class. The process is started by the first call."""
        self.target = target
        package = str(Path(__file__).resolve().parents[1])
        joined = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")]), package])
        self._environment = {**os.environ, **(environment or {}), "PYTHONPATH": joined}
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._pending = b""

    @property
    def alive(self) -> bool:
        """Whether a process is running, so that the next call starts none."""
        return self._process is not None and self._process.poll() is None

    def call(self, request: Mapping[str, Any], limit: float) -> Any:
        """The function's result for a request; starts the process where none is alive.

        Args:
          limit: seconds, including the start of the process.

        Raises:
          WorkerError: the function raised, the process ended, or the call took longer than `limit`. After a crash or a
            timeout the next call starts a new process.
        """
        deadline = time.monotonic() + limit
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, deadline)
        except (BrokenPipeError, EOFError):
            process.wait()
            raise WorkerError("crashed", self._ending(process.returncode)) from None
        except TimeoutError:
            self.close()
            raise WorkerError("timeout", f"no result within {limit:g} s") from None
        reply = json.loads(line)
        if "status" in reply:
            raise WorkerError(reply["status"], reply["message"])
        return reply["result"]

    def close(self) -> None:
        """End the process, and every process that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()
        self._pending = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        """The child process; starts a new one if none is alive."""
        if not self.alive:
            self.close()
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close())
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, self.target],  # -P: without this file's folder on the path
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=self._environment,
                start_new_session=True,  # so that close() reaches the processes that it started
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes:
        """The next line that the child writes.

        Raises:
          TimeoutError: the deadline passed before.
          EOFError: the child closed its output.
        """
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    raise EOFError
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ending(self, code: int) -> str:
        """How the process ended, with the last lines of its output; `code` is its return code."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the process ended with {how}: {' | '.join(lines[-4:])[-LOG_TAIL:] or 'no output'}"


def _serve(target: str) -> None:
    """The child's loop: one request a line from standard input, one reply a line to standard output."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is written to the log
    module, _, name = target.partition(":")
    function: Any = None
    for line in sys.stdin:
        try:
            function = function or getattr(importlib.import_module(module), name)
            reply: dict[str, Any] = {"result": function(**json.loads(line))}
            text = json.dumps(reply)
        except NotImplementedError as error:
            text = json.dumps({"status": "refused", "message": str(error)})
        except Exception as error:
            text = json.dumps({"status": "failed", "message": f"{type(error).__name__}: {error}"})
        replies.write(text + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])

"""Worker processes: on virtual CPU devices, with logs of JSON lines, for `harnesses.py` and `primitives.py`; for `suite.py`."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tables import tables_of

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Environment variables of a worker: CPU devices, a fast XLA compiler, and this checkout first on the import path."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import quick

    flags = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}".strip()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def read_log(path: str | Path | None) -> list[dict[str, Any]]:
    """The lines of a log; empty if there is no file."""
    if not path or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line]


def append_to_log(path: str | Path | None, lines: Sequence[dict[str, Any]]) -> None:
    """Append lines to a log, if there is one."""
    if path:
        with open(path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class Worker:
    """A process that prints lines of JSON.

    Args:
      script: the Python script.
      request: the value of its option ``--worker``, as JSON.
      seconds: time limit, without one if None.
    """

    def __init__(self, script: str | Path, request: Any, seconds: float | None = None):
        self.command = [sys.executable, str(script), "--worker", json.dumps(request)]
        self.status: int | None = None
        self._limit = [] if seconds is None else ["timeout", str(seconds)]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines as they are printed; afterwards ``status`` is the exit status."""
        with subprocess.Popen(
            [*self._limit, *self.command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    yield json.loads(text)
        self.status = process.returncode


def tables_printed(command: Sequence[str]) -> dict[str, Any]:
    """Run a command in the root of the repository; the function of the suite's workers.

    Returns:
      ``tables``: the Markdown tables that it prints, each as its lines; ``cpu_seconds``: of its processes.

    Raises:
      RuntimeError: its exit status is not 0.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, **pipes)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-300:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"tables": tables_of(done.stdout), "cpu_seconds": round(seconds, 1)}

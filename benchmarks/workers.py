"""Worker processes on virtual CPU devices, and logs of JSON lines, for `harnesses.py` and `primitives.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

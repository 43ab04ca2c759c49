"""The lock of a folder of checkpoints: one run writes to it at a time."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from typing import Any

from ...errors import CheckpointError

NAME = "meshpar.lock"
RENEW_SECONDS = 5.0
STALE_SECONDS = 15.0
"""A lock of a process that cannot be seen from here, and that is not renewed for so long, is of a run that was killed."""


class Lock:
    """A file in the folder with the host and process of the run that writes there, renewed by a thread.

    Args:
      folder: an ``epath.Path`` that exists.

    Raises:
      CheckpointError: another run writes to the folder.
    """

    def __init__(self, folder: Any):
        """Take the lock. A lock of a process of this machine is valid while the process runs; one of another machine while
        it is renewed, for which this waits ``STALE_SECONDS``."""
        self.path = folder / NAME
        here = {"host": _host(), "process": os.getpid(), "started": _started(os.getpid())}
        self._closed = threading.Event()
        other = self._read()
        if other and _is_live(other, self):
            who, fix = f"process {other['process']} on {other['host'].split()[0]}", "wait for its end, or end it"
            if all(other.get(name) == value for name, value in here.items()):
                who, fix = "this process", "close() the other mp.Checkpoints first"
            text = f"another run writes to {folder}: {who}, since {other.get('since', '?')}"
            raise CheckpointError(text, fixes=[fix, "or save to another folder; reading by restore() needs no lock"])
        self._mine = {**here, "run": uuid.uuid4().hex, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._write(0)
        threading.Thread(target=self._renew, name="meshpar checkpoint lock", daemon=True).start()

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.path.read_text())
            if isinstance(found, dict) and isinstance(found.get("host"), str) and isinstance(found.get("process"), int):
                return found
        return {}

    def _write(self, renewed: int) -> None:
        self.path.write_text(json.dumps({**self._mine, "renewed": renewed}))

    def _renew(self) -> None:
        count = 0
        while not self._closed.wait(RENEW_SECONDS):
            count += 1
            with contextlib.suppress(OSError):  # a full disk: the save says so
                if self._read().get("run", self._mine["run"]) == self._mine["run"]:
                    self._write(count)

    def close(self) -> None:
        """Release it: delete the file."""
        self._closed.set()
        with contextlib.suppress(OSError):
            if self._read().get("run") == self._mine["run"]:
                self.path.unlink()


def _host() -> str:
    """The machine, and the namespace of its process ids: containers of one machine have their own."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _started(process: int) -> str | None:
    """When a process of this machine started, in clock ticks: ids are used again; None: it does not run."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, PermissionError):  # no /proc, so that the id has to do; or a process of another user
        return ""
    except (OSError, ValueError):
        return None
    return None if state == "Z" else rest[18]


def _is_live(other: dict[str, Any], lock: Lock) -> bool:
    if other["host"] == _host():
        started = _started(other["process"])
        return started is not None and started == other.get("started", started)
    until = time.monotonic() + STALE_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, STALE_SECONDS / 4))
        now = lock._read()
        if now.get("renewed") != other.get("renewed") or now.get("run") != other.get("run"):
            return bool(now)  # renewed; or released
    return False

"""Groups of processes for tests: forked from one that has imported everything and opened no backend, so that each starts at once.

``python processes.py`` is that one. It reads requests, a JSON line each, and says, a line each, which processes it started and
how they ended. A test names a function of a file; it runs in every process of the group, after ``mp.distributed()``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE = 90.0


# -- in the test


@dataclass
class Ended:
    """How a group ended: exit codes (negative: signals), what each wrote, what each returned, seconds after the last signal."""

    codes: list[int]
    texts: list[str]
    results: list[Any]
    after_signal: float


@dataclass
class Group:
    owner: Forker
    number: int
    folder: Path
    pids: list[int]
    codes: dict[int, int] = field(default_factory=dict)

    def signal(self, process: int, number: int) -> None:
        os.kill(self.pids[process], number)
        self.signalled = time.monotonic()

    def text(self, process: int) -> str:
        return (self.folder / f"{process}.log").read_text(errors="replace")

    def wait_for(self, text: str, process: int = 0) -> None:
        """Until a process has written this."""
        until = time.monotonic() + DEADLINE
        while text not in self.text(process):
            assert time.monotonic() < until, f"{text!r} never came:\n{self.text(process)}"
            assert process not in self.codes, self.text(process)
            self.owner.read(0.05)

    def end(self, without: tuple[int, ...] = ()) -> Ended:
        """Until all have ended, but for those that were stopped, which are killed then."""
        until = time.monotonic() + DEADLINE
        want = set(range(len(self.pids)))
        while want - set(without) - self.codes.keys():
            if time.monotonic() > until:
                for p in want - self.codes.keys():
                    os.kill(self.pids[p], signal.SIGKILL)
                raise AssertionError("a process hangs:\n" + "\n".join(self.text(p)[-2000:] for p in sorted(want)))
            self.owner.read(0.05)
        ended = time.monotonic()
        for p in without:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[p], signal.SIGKILL)
        while want - self.codes.keys():
            self.owner.read(0.05)
        files = [self.folder / f"{p}.json" for p in sorted(want)]
        results = [json.loads(f.read_text()) if f.exists() else None for f in files]
        codes, texts = [self.codes[p] for p in sorted(want)], [self.text(p) for p in sorted(want)]
        return Ended(codes, texts, results, ended - getattr(self, "signalled", ended))


class Forker:
    """The process that forks groups."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0
        self.groups: dict[int, Group] = {}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT
        )
        self.buffer = b""
        self.started: list[list[int]] = []  # the first stands for readiness
        while not self.started:
            self.read(1.0)

    def read(self, seconds: float) -> None:
        """Take in which processes have started and ended."""
        assert self.process.stdout is not None
        if select.select([self.process.stdout], [], [], seconds)[0]:
            new = os.read(self.process.stdout.fileno(), 1 << 16)
            assert new, "the process that forks has ended"
            *lines, self.buffer = (self.buffer + new).split(b"\n")
            for said in map(json.loads, lines):
                if "started" in said:
                    self.started.append(said["started"])
                else:
                    self.groups[said["group"]].codes[said["process"]] = said["code"]

    def start(
        self, count: int, function: Any, *args: Any, devices: int = 4, timeout: float = 4.0, stuck: float = 60.0,
        env: dict[str, str] | None = None, **options: Any,
    ) -> Group:  # fmt: skip
        """Start a group.

        Args:
          count: processes.
          function: a function of a module file of the tests; it gets ``args``, JSON values.
          devices: of all processes together.
          timeout, stuck: of ``mp.distributed``.
          env: variables for all; ``options`` go into the request.
        """
        self.number += 1
        folder = self.folder / str(self.number)
        folder.mkdir(parents=True)
        for p in range(count):
            (folder / f"{p}.log").touch()
        request = {
            "group": self.number, "count": count, "file": sys.modules[function.__module__].__file__, "name": function.__name__,
            "args": args, "devices": devices // count, "timeout": timeout, "stuck": stuck, "folder": str(folder),
            "env": env or {}, **options,
        }  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()
        group = self.groups[self.number] = Group(self, self.number, folder, [])
        while len(self.started) <= self.number:
            self.read(1.0)
        group.pids = self.started[self.number]
        return group

    def run(self, count: int, function: Any, *args: Any, **options: Any) -> Ended:
        return self.start(count, function, *args, **options).end()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


# -- in the process that forks


def serve() -> None:
    import jax  # noqa: F401
    import optax  # noqa: F401
    from jax.experimental import multihost_utils  # noqa: F401

    import meshpar  # noqa: F401

    with contextlib.suppress(ImportError):
        import orbax.checkpoint  # noqa: F401

    running: dict[int, tuple[int, int]] = {}
    say({"started": []})
    buffer = b""
    while True:
        if select.select([sys.stdin.buffer], [], [], 0.02)[0]:
            new = os.read(sys.stdin.fileno(), 1 << 16)
            if not new:
                return
            buffer += new
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                request = json.loads(line)
                port = free_port()
                pids = []
                for p in range(request["count"]):
                    pid = os.fork()
                    if pid == 0:
                        child(request, p, port)
                    pids.append(pid)
                    running[pid] = request["group"], p
                say({"started": pids})
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            group, p = running.pop(pid)
            say({"group": group, "process": p, "code": os.waitstatus_to_exitcode(status)})


def child(request: dict[str, Any], p: int, port: int) -> None:
    """One process of a group; never returns."""
    import quick

    log = os.open(f"{request['folder']}/{p}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 0
    os.environ.update(
        JAX_PLATFORMS="cpu", MESHPAR_PROCESS=str(p), MESHPAR_PROCESSES=str(request["count"]), MESHPAR_STUCK=str(request["stuck"]),
        MESHPAR_COORDINATOR=f"127.0.0.1:{port}", MESHPAR_DEVICES=str(request["devices"]), MESHPAR_TIMEOUT=str(request["timeout"]),
        XLA_FLAGS=quick.FLAGS,
    )  # fmt: skip
    os.environ.update(request["env"])
    if request.get("networks"):
        enter_network(request["networks"][p])
    try:
        import jax

        import meshpar as mp

        jax.config.update("jax_platforms", "cpu")
        mp.distributed(wait=request.get("wait", 60.0))
        out = function_of(request["file"], request["name"])(*request["args"])
        with open(f"{request['folder']}/{p}.json", "w") as f:
            json.dump(out, f)
        atexit._run_exitfuncs()
    except SystemExit as e:
        atexit._run_exitfuncs()
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as e:  # as the interpreter does
            code = e.code if isinstance(e.code, int) else 1
        except BaseException:
            traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def enter_network(name: str) -> None:
    """Move this process into a network namespace (``ip netns``)."""
    import ctypes

    with open(f"/var/run/netns/{name}") as f:
        if ctypes.CDLL(None, use_errno=True).setns(f.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def function_of(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[Path(file).stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def forker(folder: Path) -> Iterator[Forker]:
    made = Forker(folder)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    serve()

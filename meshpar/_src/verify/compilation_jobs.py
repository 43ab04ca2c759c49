"""Compilations in separate processes: one at a time on a small machine, with a time limit, cached on disk by content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import CompilerError
from ..compat.coordination import variable_number
from ..compat.installed_versions import installed_version
from ..progress import Progress, progress_line
from .compiler_process import FACTS, JOB, MODULE, RESULT

LOG_TAIL = 2000
"""Characters of a compiler's log that an error shows."""

FORMAT = 2
"""Version of the results of :mod:`verify.compiler_process`; cached results of other versions are not read."""


@dataclass(frozen=True)
class Job:
    """A program to be compiled by the real compiler, with all that its result depends on.

    Attributes:
      name: the name of the function, for messages.
      module: StableHLO as MLIR bytecode.
      content: the same without source lines; it identifies the program.
      topology: ``"v5e:16x16"``, ``"h200:8"``, or ``"cpu:8"``.
      devices: ids of its devices, in the order of the partitions.
      facts: what JAX stores with the module: shardings, donation and the like.
      options: XLA options.
      fast: at the lowest effort of the compiler.
    """

    name: str
    module: bytes
    content: bytes
    topology: str
    devices: tuple[int, ...]
    facts: dict[str, Any]
    options: dict[str, Any]
    fast: bool

    def key(self) -> str:
        """A hash of everything that the result depends on, including versions and flags."""
        facts = {k: v for k, v in asdict(self).items() if k not in ("name", "module", "content")}
        facts["format"] = FORMAT
        compilers = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
        facts["versions"] = [installed_version(p) or "" for p in compilers]
        facts["flags"] = [os.environ.get(k, "") for k in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        digest.update(self.content)
        return digest.hexdigest()[:40]


class Archive:
    """The result of a compilation: facts and texts in a zip archive."""

    def __init__(self, data: bytes, cached: bool):
        self.data, self.cached = data, cached
        self.facts: dict[str, Any] = json.loads(self.text(FACTS))

    def text(self, name: str) -> str:
        """A text of the result; "" if it has no text of that name."""
        with zipfile.ZipFile(io.BytesIO(self.data)) as z:
            return z.read(name).decode() if name in z.namelist() else ""


def cache_folder() -> Path:
    """The cache folder: ``$MESHPAR_CACHE``, else the platform's cache folder of the user."""
    given = os.environ.get("MESHPAR_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "meshpar"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "meshpar" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshpar"


def compile_job(job: Job, *, timeout: float | None = None, cache: bool = True, progress: Progress = "auto") -> Archive:
    """The result of a job: from the cache, or from a compiler in a separate process. ``progress`` receives progress
    texts.

    Raises:
      CompilerError: the compiler crashed, or took longer than ``timeout`` seconds; its job and log remain on disk.
    """
    path = cache_folder() / "compiled" / f"{job.key()}.zip" if cache else None
    archive = _read(path)
    if archive is not None:
        return archive
    title = f"compiling {job.name} for {job.topology}, {'fast' if job.fast else 'full'} effort"
    with progress_line(title, progress) as say, _slot(say):
        archive = _read(path)  # another process may have compiled the same program in the meantime
        if archive is not None:
            return archive
        data = _run(job, timeout, say)
        archive = Archive(data, False)
        error = archive.facts.get("error")
        if path is not None and (error is None or error.startswith("RESOURCE_EXHAUSTED")):
            with contextlib.suppress(OSError):  # without a writable cache only time is lost
                _write(path, data)  # before the slot is free, so that a process that waits for it finds the result
        return archive


def _read(path: Path | None) -> Archive | None:
    try:
        return Archive(path.read_bytes(), True) if path is not None else None
    except (OSError, zipfile.BadZipFile, ValueError, KeyError):
        return None  # missing or damaged: the program is compiled again


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
    os.replace(name, path)


def command(folder: Path) -> list[str]:
    """The command that compiles the job in a folder."""
    return [sys.executable, "-m", "meshpar._src.verify.compiler_process", str(folder)]


def environment() -> dict[str, str]:
    """The environment variables with which several compilers can run at the same time, without hardware."""
    env = dict(os.environ)
    root = str(Path(__file__).parents[3])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    flags = env.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:  # tuning needs the GPU
        env["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
    return env


def _run(job: Job, timeout: float | None, say: Callable[[str], None]) -> bytes:
    """Compile a job in a new process; returns the bytes of its result archive. ``say`` receives progress texts.

    Raises:
      CompilerError: the compiler crashed or exceeded the time limit.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshpar-compile-"))
    (folder / MODULE).write_bytes(job.module)
    request = ("topology", "devices", "facts", "options", "fast")
    (folder / JOB).write_text(json.dumps({k: getattr(job, k) for k in request}))
    log = folder / "log.txt"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment(),
            start_new_session=True,
        )  # fmt: skip
    late = False
    try:
        while process.poll() is None and not late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            say("")
            late = process.poll() is None and timeout is not None and time.monotonic() - began > timeout
    except BaseException:  # an interrupt
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _end(process)
    result = folder / RESULT
    if not late and result.exists():
        data = result.read_bytes()
        shutil.rmtree(folder, ignore_errors=True)
        return data
    failure = f"took longer than {timeout:g} s, and was stopped" if late else _exit(process.returncode)
    tail = log.read_text(errors="replace")[-LOG_TAIL:].strip()
    shown = "\n".join(f"  | {line}" for line in tail.splitlines()) or "  | (it wrote nothing)"
    fixes = [f"its program, dump and complete log are in {folder}"]
    if late:
        fixes.insert(0, 'give it more time, timeout=…, or less to do, effort="fast"')
    error = CompilerError(f"the compiler for {job.topology} {failure}; the end of its log:\n{shown}", fixes=fixes)
    error.log = tail
    raise error


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit(code: int) -> str:
    """How a process ended, for a message."""
    if code >= 0:
        return f"ended without a result (exit status {code})"
    return f"crashed ({signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'})"


@contextlib.contextmanager
def _slot(say: Callable[[str], None]) -> Iterator[None]:
    """Wait until a compilation may start: ``$MESHPAR_COMPILES`` run at a time on a machine, by default one per four cores."""
    try:
        import fcntl
    except ImportError:  # a platform without file locks has none of these compilers
        yield
        return
    slots = int(variable_number("MESHPAR_COMPILES", max(1, (os.cpu_count() or 1) // 4), 1))
    names = [Path(tempfile.gettempdir()) / f"meshpar-compile-{os.getuid()}-{k}.lock" for k in range(slots)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(name.open("w")) for name in names]

        def taken() -> bool:
            """Whether one of the lock files could be locked; the lock is released when it is closed."""
            for file in files:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
            return False

        while not taken():
            say("waiting for another compilation")
            time.sleep(0.2)
        yield

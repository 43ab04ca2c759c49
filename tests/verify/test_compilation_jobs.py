"""Compilations in other processes: crashes, time limits, the cache, and who waits for whom. No compiler runs here."""

import os
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshpar._src.verify import compilation_jobs as jobs
from meshpar._src.verify.compilation_jobs import Job, cache_folder, compile_job
from meshpar.errors import CompilerError

JOB = Job("step", b"module", b"content", "v5e:2x2", (0, 1, 2, 3), {}, {}, True)

SUCCEED = """
import json, os, sys, zipfile
folder, marks = sys.argv[1:]
open(os.path.join(marks, f"run-{os.getpid()}"), "w").close()
with zipfile.ZipFile(os.path.join(folder, "part"), "w") as z:
    z.writestr("facts.json", json.dumps({"pid": os.getpid()}))
    z.writestr("final.txt", open(os.path.join(folder, "module.mlir")).read())
os.rename(os.path.join(folder, "part"), os.path.join(folder, "result.zip"))
"""

ALONE = """
import os, sys, time
lock = os.path.join(sys.argv[2], "only-one")
os.close(os.open(lock, os.O_CREAT | os.O_EXCL))  # fails if another compilation is running
time.sleep(0.3)
os.unlink(lock)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Replace the compiler by a Python program, which is given the job's folder and a folder for marks."""
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def use(program: str) -> Path:
        monkeypatch.setattr(jobs, "command", lambda folder: [sys.executable, "-c", program, str(folder), str(marks)])
        return marks

    return use


def left_over() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("meshpar-compile-*/"))


def test_a_crash_is_an_error_here(runs):
    runs("import os, sys; print('Check failed: shape.IsArray()', flush=True); os.abort()")
    with pytest.raises(CompilerError) as error:
        compile_job(JOB)
    assert "the compiler for v5e:2x2 crashed (SIGABRT); the end of its log:" in str(error.value)
    assert "| Check failed: shape.IsArray()" in str(error.value)
    assert "Check failed" in error.value.log
    (folder,) = left_over()
    assert f"its program, dump and complete log are in {folder}" in str(error.value)
    assert (folder / "module.mlir").read_bytes() == b"module"


def test_an_end_without_a_result(runs):
    """Only the end of a long log is shown."""
    runs("raise SystemExit(3)")
    with pytest.raises(CompilerError) as error:
        compile_job(JOB)
    assert "ended without a result (exit status 3)" in str(error.value)
    assert "(it wrote nothing)" in str(error.value)
    (silent,) = left_over()
    runs("print('first\\n' + 'x' * 100_000 + '\\nlast'); raise SystemExit(1)")
    with pytest.raises(CompilerError) as error:
        compile_job(JOB)
    assert error.value.log.endswith("last")
    assert len(error.value.log) <= jobs.LOG_TAIL
    (folder,) = (f for f in left_over() if f != silent)
    assert "first" in (folder / "log.txt").read_text()


def test_a_compiler_that_takes_too_long_is_stopped(runs):
    marks = runs(
        "import os, sys, time; open(f'{sys.argv[2]}/{os.getpid()}', 'w').close()\n"
        "print('thinking', flush=True); time.sleep(60)"
    )
    with pytest.raises(CompilerError) as error:
        compile_job(JOB, timeout=1)
    assert "took longer than 1 s, and was stopped" in str(error.value)
    assert 'timeout=…, or less to do, effort="fast"' in str(error.value)
    assert "| thinking" in str(error.value)
    (pid,) = (int(p.name) for p in marks.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_results_are_kept_by_content(runs, tmp_path, monkeypatch):
    """A damaged result is recomputed; a cache that cannot be written loses nothing."""
    marks = runs(SUCCEED)
    assert not compile_job(JOB, cache=False).cached
    assert not cache_folder().exists()
    first = compile_job(JOB)
    again = compile_job(JOB)
    assert (first.cached, again.cached) == (False, True)
    assert first.facts == again.facts
    assert again.text("final.txt") == "module"
    assert again.text("partitioned.txt") == ""
    assert len(list(marks.iterdir())) == 2
    assert not compile_job(JOB, cache=False).cached
    (kept,) = cache_folder().rglob("*.zip")
    kept.write_bytes(kept.read_bytes()[:40])
    assert not compile_job(JOB).cached
    assert compile_job(JOB).cached
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHPAR_CACHE", str(tmp_path / "file"))
    assert compile_job(JOB).text("final.txt") == "module"
    assert left_over() == []


def test_what_makes_another_program(monkeypatch):
    before = JOB.key()
    topology, options = {"topology": "v6e:2x2"}, {"options": {"xla_x": 1}}
    for other in ({"content": b"other"}, topology, options, {"fast": False}, {"devices": (1, 0, 2, 3)}):
        assert replace(JOB, **other).key() != before
    assert replace(JOB, name="f", module=b"the same at other source lines").key() == before
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")
    assert JOB.key() != before


def test_one_at_a_time(runs, monkeypatch):
    """Compilations that fail if another one runs at the same time; two of the three are of one program, which is compiled once."""
    monkeypatch.setenv("MESHPAR_COMPILES", "1")
    marks = runs(ALONE + SUCCEED)
    done, errors = [], []

    def one(job):
        try:
            done.append(compile_job(job))
        except Exception as error:
            errors.append(error)

    other = replace(JOB, content=b"other")
    threads = [threading.Thread(target=one, args=(job,)) for job in (JOB, JOB, other)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert sorted(a.cached for a in done) == [False, False, True]
    assert len(list(marks.iterdir())) == 2


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("MESHPAR_CACHE", "~/somewhere")
    assert cache_folder() == Path.home() / "somewhere"
    monkeypatch.delenv("MESHPAR_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/x")
    assert cache_folder() == Path("/var/tmp/x/meshpar")


def test_compilers_run_without_hardware(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    env = jobs.environment()
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_autotune_level=0"
    assert (env["JAX_PLATFORMS"], env["ALLOW_MULTIPLE_LIBTPU_LOAD"]) == ("cpu", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=2")
    assert jobs.environment()["XLA_FLAGS"] == "--xla_gpu_autotune_level=2"

"""Checkpoints that cannot be read or written now: nothing is lost, and the error has the cause."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.pods import checkpoint, lock
from meshpar._src.pods.checkpoint import steps_of
from meshpar.errors import CheckpointError, CheckpointWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def init(mesh):
    return mp.init(lambda: {"w": jnp.zeros(8)}, mesh=mesh, layout="")


def save(folder, *steps):
    with mp.Checkpoints(folder, keep=None) as run:
        for n in steps:
            run.save(n, {"w": jnp.full(8, n, jnp.float32)})


def spoil(folder):
    os.truncate(folder / "meshpar" / "metadata", 100)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("where", "error"), [
    ("read_leaves", ValueError("PERMISSION_DENIED: Error opening \"zarr\" driver: NOT_FOUND is in this text as well")),
    ("read_leaves", ValueError("UNAUTHENTICATED: the credentials have expired")),
    ("read_leaves", OSError(errno.EIO, "Input/output error")),
    ("read_leaves", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes")),
    ("read_leaves", MemoryError()),
    ("read_leaves", TypeError("of a library")),
    ("facts_of", PermissionError(errno.EACCES, "Permission denied")),
    ("a file", PermissionError(errno.EACCES, "Permission denied")),
])  # fmt: skip
def test_what_cannot_be_read_now_is_not_renamed(tmp_path, monkeypatch, init, where, error):
    from etils.epath import gpath

    save(tmp_path, 0, 1)
    before = names(tmp_path)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(
            *((gpath._GPath, "read_bytes") if where == "a file" else (checkpoint, where)), fail, raising=False
        )
        for _ in range(2):  # also the next start
            with mp.Checkpoints(tmp_path) as run, pytest.raises(CheckpointError, match="cannot be read now") as caught:
                run.restore_or(init)
            assert caught.value.__cause__ is error
            assert type(error).__name__ in str(caught.value)
    assert names(tmp_path) == before
    with mp.Checkpoints(tmp_path) as run:
        state, at = run.restore_or(init)
    assert (at, float(state["w"][0])) == (2, 1.0)


def test_a_sharding_that_does_not_divide(tmp_path, mesh):
    save(tmp_path, 0)
    mesh = mp.mesh("data=3", devices=jax.devices()[:3])
    like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))}
    with pytest.raises(CheckpointError, match="`w` cannot be restored with the sharding of like") as caught:
        mp.Checkpoints(tmp_path).restore(like)
    assert caught.value.path == "w"
    assert steps_of(str(tmp_path)) == [0]


def test_no_new_run_next_to_damaged_checkpoints(tmp_path, init):
    save(tmp_path / "a", 0, 1)
    for n in range(2):
        spoil(tmp_path / "a" / str(n))
    run = mp.Checkpoints(tmp_path / "a")
    with (
        pytest.warns(CheckpointWarning, match=r"it is renamed to [01]\.damaged"),
        pytest.raises(CheckpointError) as first,
    ):
        run.restore_or(init)
    for _ in range(2):
        with pytest.raises(CheckpointError) as later:
            mp.Checkpoints(tmp_path / "a").restore_or(init)
        for error in (first.value, later.value):
            for n in range(2):
                assert f"{n}.damaged: checkpoint {n} in {tmp_path}/a is damaged: " in str(error)
            assert "to start a new run on purpose: another folder, or move the damaged ones elsewhere" in str(error)
    (tmp_path / "a" / "1.damaged").rename(tmp_path / "elsewhere")
    (tmp_path / "a" / "0.damaged").rename(tmp_path / "elsewhere2")
    with mp.Checkpoints(tmp_path / "a") as run:
        assert run.restore_or(init)[1] == 0


def test_other_folders_are_no_checkpoints(tmp_path, init):
    save(tmp_path, 3)
    for name in ("9", "08", "4.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "08" / "x").touch()
    (tmp_path / "7").touch()
    with mp.Checkpoints(tmp_path) as run:
        assert run.steps() == [3]
        assert run.restore_or(init)[1] == 4


def test_a_step_that_exists_and_a_file_in_place_of_the_folder(tmp_path, init):
    save(tmp_path / "a", 1, 2)
    with mp.Checkpoints(tmp_path / "a", keep=None) as run:
        run.restore({"w": jnp.zeros(8)}, step=1)
        with pytest.raises(CheckpointError, match="step 2 already exists") as caught:
            run.save(2, {"w": jnp.ones(8)})
        assert "continue in another folder" in caught.value.fixes[0]
        run.save(3, {"w": jnp.ones(8)})
    assert steps_of(str(tmp_path / "a")) == [1, 2, 3]
    (tmp_path / "file").touch()
    for use in (lambda run: run.restore_or(init), lambda run: run.save(0, {"w": jnp.ones(8)})):
        with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
            use(mp.Checkpoints(tmp_path / "file"))


THREADS_AT_END = not (3, 12) <= sys.version_info < (3, 12, 2)
"""Python 3.12.0 and 3.12.1 start no threads after the end of a script (gh-113964), which orbax needs to commit."""

FULL = """
import resource, signal, sys
import jax.numpy as jnp
import meshpar as mp
run = mp.Checkpoints(sys.argv[1])
run.save(0, {"w": jnp.ones(8)})
run.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
(_, most) = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
x = {"w": jnp.arange(1e6)}
run.save(1, x)
if sys.argv[2] == "wait":
    try:
        run.wait()
    except mp.errors.CheckpointError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    run.save(2, x)
"""


@pytest.mark.parametrize("then", ["wait", "end"])
def test_a_full_disk_and_a_script_without_close(tmp_path, then):
    """The error of a save that failed is raised by the next call; without one, the script fails. A last save without close()
    is completed at the end of the script."""
    end = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), then], capture_output=True, text=True)
    said = end.stdout if then == "wait" else end.stderr
    assert f"a checkpoint cannot be written to {tmp_path}" in said
    if then == "wait" or THREADS_AT_END:
        assert "free space on the disk" in said
    if not THREADS_AT_END:
        assert "end the script with close()" in end.stderr
    completed = then == "wait" and THREADS_AT_END
    assert end.returncode == (0 if completed else 1), end.stderr
    steps = steps_of(str(tmp_path))
    assert steps == ([0, 2] if completed else [0])
    assert all(checkpoint.verify(str(tmp_path), n) == [] for n in steps)
    assert not (tmp_path / lock.NAME).exists()


def test_a_second_run_is_refused_and_deletes_nothing(tmp_path, init):
    first = mp.Checkpoints(tmp_path)
    first.save(0, {"w": jnp.ones(8)})
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()  # it writes
    second = mp.Checkpoints(tmp_path)
    for use in (
        lambda: second.save(5, {"w": jnp.ones(8)}),
        lambda: second.restore_or(init) and second.save(5, {"w": jnp.ones(8)}),
    ):
        with pytest.raises(CheckpointError, match=r"another run writes to .*: this process"):
            use()
    assert (tmp_path / "1.orbax-checkpoint-tmp").exists()
    first.close()
    second.save(5, {"w": jnp.ones(8)})
    second.close()
    assert names(tmp_path) == ["0", "5"]


@pytest.fixture
def sleeping():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        yield child.pid
        child.kill()


@pytest.mark.parametrize("who", ["alive", "ended", "id used again", "other host, renewed", "other host, stale", "cut"])
def test_locks_of_other_processes(tmp_path, monkeypatch, sleeping, who):
    monkeypatch.setattr(lock, "STALE_SECONDS", 1.0)
    other = {"host": lock._host(), "process": sleeping, "started": lock._started(sleeping), "run": "x", "renewed": 1}
    if who == "ended":
        other["process"] = 2**22 + 1
    if who == "id used again":
        other["started"] = "1"
    if who.startswith("other"):
        other["host"] = "elsewhere pid:[1]"
    file = tmp_path / lock.NAME
    file.write_text("{" if who == "cut" else json.dumps(other))
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()
    live = who in ("alive", "other host, renewed")
    if who == "other host, renewed":
        threading.Timer(0.2, lambda: file.write_text(json.dumps({**other, "renewed": 2}))).start()
    run = mp.Checkpoints(tmp_path)
    if live:
        host = "elsewhere" if "host" in who else socket.gethostname()
        with pytest.raises(CheckpointError, match=f"another run writes to .*: process {sleeping} on {host}"):
            run.save(0, {"w": jnp.ones(8)})
        assert (tmp_path / "1.orbax-checkpoint-tmp").exists()
    else:
        run.save(0, {"w": jnp.ones(8)})
        run.wait()
        assert not (tmp_path / "1.orbax-checkpoint-tmp").exists()
    run.close()
    assert file.exists() == live


def test_a_lock_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.05)
    with mp.Checkpoints(tmp_path) as run:
        run.save(0, {"w": np.ones(8)})
        found = set()
        until = time.monotonic() + 10
        while len(found) < 3 and time.monotonic() < until:
            found.add(json.loads((tmp_path / lock.NAME).read_text() or "{}").get("renewed"))
        assert len(found) >= 3

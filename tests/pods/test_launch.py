"""``meshpar launch``: logs, the first cause printed last, exit statuses, and restarts on the remaining processes."""

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshpar._src.entry.cli import main
from meshpar._src.pods.launch import _SPARE, Job, _devices_of_each, _End, _judge, _next_count

ROOT = Path(__file__).parents[2]

QUICK = """
import os, signal, sys, time
p, n, attempt = (int(os.environ[f"MESHPAR_{x}"]) for x in ("PROCESS", "PROCESSES", "ATTEMPT"))
print(f"process {p} of {n}, attempt {attempt}", flush=True)
"""
"""A script without JAX in place of a training script: the launcher sees only how processes end."""


@pytest.fixture
def launch(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(body: str, *options: str, script: str = QUICK) -> tuple[int, str, Path]:
        (tmp_path / "script.py").write_text(script + body)
        code = main(["launch", "--logs", str(tmp_path / "logs"), *options, str(tmp_path / "script.py")])
        out, err = capfd.readouterr()
        return code, out + err, tmp_path / "logs"

    return run


def test_all_well(launch):
    code, text, logs = launch("print('seen', os.environ['MESHPAR_DEVICES'])", "-n", "3", "--devices", "6")
    assert code == 0
    assert "process 0 of 3, attempt 0\nseen 2\n" in text
    assert "process 1" not in text  # has a log of its own
    assert "process 2 of 3" in (logs / "attempt-0" / "process-2.log").read_text()


def test_a_program_that_fails_is_not_started_again(launch):
    code, text, _ = launch("if p == 1: print('bad luck'); sys.exit(3)\ntime.sleep(0.7)", "-n", "2", "--restarts", "5")
    assert code == 3
    assert "attempt 1" not in text
    assert text.rstrip().endswith("meshpar launch: first cause: process 1 ended with exit status 3")
    assert "  | bad luck" in text


@pytest.mark.parametrize(("least", "counts"), [(["--min", "2"], ["3", "2"]), ([], ["4"])])
def test_it_restarts_on_the_remaining_processes(launch, least, counts):
    """Or on all, which is the default."""
    body = """
if attempt == 0 and p == 2: os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0: time.sleep(0.7)
if n == 3: sys.exit(2)   # a mesh that three do not fit
"""
    code, text, _ = launch(body, "-n", "4", "--restarts", "1", *least)
    assert code == 0
    assert f"first cause: process 2 was killed (SIGKILL); starting again with {counts[0]} processes" in text
    assert re.findall(r"starting again with (\d)", text) == counts
    assert f"process 0 of {counts[-1]}, attempt {len(counts)}" in text


def wait_until(condition) -> None:
    until = time.monotonic() + 60
    while True:
        with contextlib.suppress(FileNotFoundError):
            if condition():
                return
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_stop_signal(launch, tmp_path):
    def send():
        log = tmp_path / "logs" / "attempt-0" / "process-1.log"
        wait_until(lambda: "ready" in log.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    body = "signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(0)))"
    threading.Thread(target=send).start()
    code, text, _ = launch(f"{body}\nprint('ready', flush=True)\ntime.sleep(30)", "-n", "2")
    assert code == 75
    assert "saved" in text
    assert "stopped by SIGTERM" in text


def test_children_of_a_killed_process_end_with_it(tmp_path):
    body = """
import subprocess
if p == 1:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[1], "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
"""
    (tmp_path / "script.py").write_text(QUICK + body)
    assert main(["launch", "-n", "2", str(tmp_path / "script.py"), str(tmp_path / "pid")]) == 75
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    wait_until(lambda: not child.exists() or child.read_text().rpartition(") ")[2].startswith("Z"))


def test_nothing_outlives_a_killed_launcher(tmp_path):
    body = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"{sys.argv[1]}.{p}", "w").write(f"{os.getpid()} {child.pid} ")
time.sleep(600)
"""
    (tmp_path / "script.py").write_text(QUICK + body)
    words = [sys.executable, "-m", "meshpar", "launch", "-n", "2", str(tmp_path / "script.py"), str(tmp_path / "pids")]
    launcher = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    wait_until(lambda: len([f for f in tmp_path.glob("pids.*") if f.read_text().endswith(" ")]) == 2)
    launcher.kill()
    launcher.wait()
    for number in " ".join(f.read_text() for f in tmp_path.glob("pids.*")).split():
        process = Path("/proc", number, "stat")
        wait_until(lambda process=process: not process.exists() or process.read_text().rpartition(") ")[2][0] == "Z")


def test_a_process_that_ends_before_it_connects(launch):
    code, text, _ = launch("", "-n", "2", "--restarts", "2", script=EARLY)
    assert code == 1
    assert "starting again" not in text
    assert "process 1: AgreementError: process 1 ended, with exit status 0, before it called mp.distributed()" in text


EARLY = """
import os, sys
if os.environ["MESHPAR_PROCESS"] == "1": sys.exit(0)
import meshpar as mp
mp.distributed()
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-n", "0"], "at least one process"),
        (["-n", "3", "--devices", "8"], "does not divide over 3 processes"),
        (["-n", "3", "--slices", "2"], "does not divide 3 processes"),
        (["-n", "2", "--slices", "0"], "does not divide 2 processes"),
        (["-n", "2", "--min", "3"], "between 1 and 2"),
        (["-n", "2", "--slices", "2", "--lose", "2@1"], "slices are 0 to 1"),
        (["-n", "2", "--elastic", "slice", "--restarts", "1"], "no slice could be lost"),
        (["-n", "2", "--slices", "2", "--elastic", "slice"], "no slice could be lost"),
        (["-n", "2", "--back", "3"], "slices return to a run with --elastic"),
    ],
)
def test_bad_input(capsys, options, says):
    assert main(["launch", *options, __file__]) == 2
    assert says in capsys.readouterr().err
    assert main(["launch", "-n", "2", "no_such.py"]) == 2


def test_the_status_of_a_script_that_another_process_saw_end(tmp_path):
    cause = {"process": 1, "kind": "ended", "text": "ended early", "status": 1, "at": 0.0}
    (tmp_path / "cause-0.json").write_text(json.dumps(cause))
    assert _judge({0: 1, 1: 3}, [], tmp_path).status == 3
    assert _judge({0: 1, 1: 0}, [], tmp_path).status == 1
    assert _judge({0: 1}, [], tmp_path).status == 1


def test_how_many_are_started_next():
    job = Job(("x",), 8, least=3)
    assert _next_count(job, 8, _End(75, lost=[1, 2]), {0}) == 6
    assert _next_count(job, 4, _End(2), set()) == 3
    assert _next_count(job, 3, _End(75, lost=[0]), {0}) is None
    assert _next_count(Job(("x",), 8, least=2, slices=4), 8, _End(75, lost=[1]), {0}) == 6
    assert _next_count(Job(("x",), 8), 8, _End(75, lost=[1, 2]), {0}) == 8
    elastic = Job(("x",), 8, slices=4, elastic="slice")
    assert _next_count(elastic, 8, _End(75, lost=[1, 7]), {0, 3}) == 4
    assert _next_count(elastic, 2, _End(75, lost=[1]), {0}) is None


ELASTIC = """
from pathlib import Path
folder, memory = (Path(os.environ[f"MESHPAR_{x}"]) for x in ("CAUSES", "MEMORY"))
print(os.environ["MESHPAR_ELASTIC"], sorted(p.name for p in memory.glob("*")), flush=True)
memory.mkdir(parents=True, exist_ok=True)
(memory / f"{attempt}.{p}").touch()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if attempt == 0 and p == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 1:
    (folder / f"listening-{p}").touch()
if attempt < 2:
    time.sleep(30)
"""


def test_a_lost_slice_joins_after_a_save(launch, monkeypatch):
    """Each slice has the memory that it had before, and the slice that returns has none."""
    monkeypatch.setattr("meshpar._src.pods.launch.SPARE_SECONDS", 0.0)
    quick = re.sub(r"for name in \(.*\):", "for name in ():", _SPARE)  # no import of JAX
    monkeypatch.setattr("meshpar._src.pods.launch._SPARE", quick)
    options = ["-n", "2", "--slices", "2", "--elastic", "slice", "--restarts", "1", "--back", "0.2"]
    code, text, logs = launch(ELASTIC, *options)
    assert code == 0, text
    assert "first cause: process 1 was killed (SIGKILL); starting again with 1 process" in text
    assert "meshpar launch: a slice joins; starting again with 2 processes" in text
    said = [path.read_text().splitlines()[1] for path in sorted(logs.glob("attempt-*/*.log"))]
    assert said == ["slice=2 []", "slice=2 []", "slice=1 ['0.0']", "slice=2 ['0.0', '1.0']", "slice=2 []"]


@pytest.mark.parametrize(
    ("devices", "platforms", "gpus", "share"),
    [
        *((8, "", 0, 2), (8, "cuda", 16, 2)),  # as the command line says
        *((None, "", 8, 2), (None, "cuda", 8, 2), (None, "gpu,cpu", 8, 2)),
        *((None, "cpu", 8, None), (None, "tpu", 8, None), (None, "", 0, None)),
        (None, "", 3, None),  # fewer than processes
    ],
)
def test_devices_are_shared_among_the_processes(devices, platforms, gpus, share, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    files = [f"/dev/nvidia{k}" for k in range(gpus)]
    monkeypatch.setattr(glob, "glob", lambda pattern: files if pattern.startswith("/dev/nvidia") else [])
    assert _devices_of_each(Job(("train.py",), processes=4, devices=devices)) == share

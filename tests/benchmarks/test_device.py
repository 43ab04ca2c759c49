"""`benchmarks/device.py` over a stub of a device: wrong, crashing and hanging tasks, resuming, the budget, and the report."""

from pathlib import Path

import device
import pytest

from meshpar_kernels import tuning_table
from meshpar_kernels.config import Config

HELPERS = str(Path(__file__).parents[1] / "helpers")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command with the stub; value tasks may take a second."""
    monkeypatch.setattr(device, "PATHS", [*device.PATHS, HELPERS])
    monkeypatch.setattr(device, "START_LIMIT", 5.0)
    monkeypatch.setenv("DEVICE_STUB_LOG", str(tmp_path / "log"))
    original = device.values
    limited = lambda names: [device.dataclasses.replace(t, limit=3.0) for t in original(names)]  # noqa: E731
    monkeypatch.setattr(device, "values", limited)

    def run(*arguments, out="out"):
        (tmp_path / "log").unlink(missing_ok=True)
        options = ["--out", str(tmp_path / out), "--target", "device_stub:run", "--compile-processes", "0", *arguments]
        status = device.main(options)
        log = (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []
        return status, device.read(tmp_path / out / "results.jsonl"), log

    return run


def statuses(outcomes, prefix):
    return {o.id.removeprefix(prefix): o.status for o in outcomes.values() if o.id.startswith(prefix)}


def test_a_failing_task_does_not_affect_others(command, tmp_path):
    """A wrong value, a crash and a hang leave the other values; our kernel is not timed after them, the baselines are."""
    status, outcomes, _ = command("--only", "value/")
    assert status == 1
    assert statuses(outcomes, "value/") == {
        "grouped_matmul: right": "ok",
        "grouped_matmul_transpose: wrong": "wrong",
        "route: crash": "crashed",
        "route: after a crash": "ok",
        "permute and combine: hang": "timeout",
        "grouped_matmul: refused": "refused",
    }
    assert "SIGABRT" in outcomes["value/route: crash"].message

    _, outcomes, log = command("--only", "g64/random", "--resume", str(tmp_path / "out" / "results.jsonl"), out="next")
    assert not [line for line in log if line.startswith("value ")]  # each has an outcome
    times = statuses(outcomes, "time/")
    assert times["forward/g64/random/meshpar"] == times["d lhs/g64/random/meshpar"] == "ok"
    assert "d rhs/g64/random/meshpar" not in times
    assert times["d rhs/g64/random/ragged_dot"] == "ok"
    assert times["forward/g64/random/tokamax"] == "refused"
    assert statuses(outcomes, "value/")["grouped_matmul: right"] == "ok"  # the new record is complete

    report = (tmp_path / "next" / "results.md").read_text()
    assert "2 of 6 right" in report
    assert "| forward | g64 | random | meshpar | 1.000 | 100 | 12 | 100 | 2 | 1.00 | 1.0e-03 | stub |" in report
    assert "- forward g64 random: ours takes 1.25 x torch" in report
    assert "- forward g64 random: the form `cluster` takes 1.20 x the default form" in report
    assert "x dense matmul" not in report  # a bound, not a baseline


def test_configurations_are_tuned_separately(command, tmp_path):
    """One that crashes is left out; tuned.json has the best with the time of the analytic choice."""
    status, outcomes, _ = command("--only", "forward/g64")
    assert status == 0
    found = statuses(outcomes, "tune/forward/g64/")
    assert sorted(found.values()) == ["crashed", "ok", "ok"]
    table = tuning_table.read(tmp_path / "out" / "tuned.json")
    (entry,) = (dtypes["bfloat16"] for dtypes in table["Stub"].values())
    assert entry == tuning_table.Entry(Config((128, 64, 128)), 1e-3, 2e-3, "0.11")


def test_without_an_accelerator_it_says_so(command, capsys, monkeypatch):
    monkeypatch.setenv("DEVICE_STUB_PLATFORM", "cpu")
    status, _, _ = command()
    assert status == 2
    assert "There is no GPU and no TPU" in capsys.readouterr().out

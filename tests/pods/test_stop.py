"""SIGTERM of a process alone: every open object reports it, handlers of the script run too, and none stays behind."""

import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.compat.coordination import CAUSES
from meshpar._src.pods.stop import StopRequest, listening_file

STATE = {"x": jnp.ones(4)}


@pytest.fixture
def heard():
    """The signals that the script's own handler has received."""
    for other in list(StopRequest._open):  # of tests that do not close
        other.close()
    StopRequest().close()
    received = []
    original = signal.signal(signal.SIGTERM, handler := lambda number, frame: received.append(number))
    yield received
    assert signal.getsignal(signal.SIGTERM) is handler  # ours is gone
    signal.signal(signal.SIGTERM, original)


def test_all_objects_save_and_the_handler_of_the_script_runs(tmp_path, heard):
    with mp.Checkpoints(tmp_path / "a", every=1000) as first, mp.Checkpoints(tmp_path / "b", every=1000) as second:
        assert not first.save(0, STATE)
        signal.raise_signal(signal.SIGTERM)
        assert first.save(1, STATE)
        assert second.save(1, STATE)
        assert first.steps() == second.steps() == [1]
        assert heard == [signal.SIGTERM]
        with pytest.raises(SystemExit) as end:  # the second time
            signal.raise_signal(signal.SIGTERM)
        assert end.value.code == 128 + signal.SIGTERM


def test_objects_closed_in_the_order_of_creation(tmp_path, monkeypatch, heard):
    """The launcher sees whether one listens."""
    monkeypatch.setenv(CAUSES, str(tmp_path))
    first, second = StopRequest(), StopRequest()
    first.close()
    signal.raise_signal(signal.SIGTERM)
    assert second.at(0)
    assert not first.asked
    assert listening_file(tmp_path, 0).exists()
    second.close()
    assert not listening_file(tmp_path, 0).exists()
    signal.raise_signal(signal.SIGTERM)
    assert len(heard) == 2


def test_a_with_block_that_fails_leaves_no_handler(tmp_path, heard):
    def script():
        with mp.Checkpoints(tmp_path / "a") as run:
            run.save(0, STATE)
            raise KeyError("of the step")

    with pytest.raises(KeyError):
        script()
    with mp.Checkpoints(tmp_path / "a") as run:  # nor a lock
        assert run.steps() == [0]
        run.save(1, STATE)


@pytest.mark.parametrize("chained", [False, True])
def test_a_handler_that_is_set_later_runs_as_well(heard, chained):
    original = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    ours = signal.getsignal(signal.SIGTERM)
    later = []

    def handler(number, frame):
        later.append(number)
        if chained:
            ours(number, frame)

    signal.signal(signal.SIGTERM, handler)
    assert not stop.at(0)
    signal.raise_signal(signal.SIGTERM)
    assert stop.at(1)
    assert later == [signal.SIGTERM]
    stop.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, original)


def test_the_documented_loop_ends_with_the_status_of_a_requeue(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "quickstart-pod.md").read_text()
    (block,) = [
        b.partition("\n```")[0] for b in text.split("```python\n")[1:] if "run.save(" in b.partition("\n```")[0]
    ]
    loop = "for n, batch in data.from_(at):\n"
    assert loop in block
    script = block.replace(loop, f"{loop}    if n == 3:\n        import signal; signal.raise_signal(signal.SIGTERM)\n")
    end = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert end.returncode == 75, end.stderr
    assert mp.Checkpoints(tmp_path / "runs" / "a").steps() == [3]

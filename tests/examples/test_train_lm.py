"""The main job, small: metrics, equal losses under two layouts and after a restart, readable errors."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import quick
import train_lm

import meshpar as mp
from lm.data import held_out_batches, read_stdlib, training_batches
from meshpar._src.entry.cli import main

ROOT = Path(__file__).parents[2]
TINY = "--layers=2 --embed=32 --steps=8 --batch=8 --seq=32 --lr=0.02 --eval-batches=2".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with the default layout."""
    return train_lm.main([*TINY, "--picture", str(tmp_path_factory.mktemp("lm") / "curve.png")])


@pytest.mark.slow
def test_loss_falls(run):
    assert len(run.losses) == 8
    assert run.losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert run.losses[-1] < 0.8 * run.losses[0]


@pytest.mark.slow
def test_it_resumes_with_fewer_processes(run, tmp_path, monkeypatch, capfd):
    """Two processes, of which one is killed at its fifth step; the other resumes from step 3. The losses are those of another
    layout in one process."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
    metrics = tmp_path / "metrics.jsonl"
    launch = "launch -n 2 --timeout 10 --slices 2 --lose 1@5 --restarts 1 --min 1".split()
    flags = ["--layout", "dp", "--checkpoint", str(tmp_path / "a"), "--every", "3", "--metrics", str(metrics)]
    flags += ["--picture", ""]
    assert main([*launch, str(ROOT / "examples" / "train_lm.py"), *TINY, *flags]) == 0
    said = capfd.readouterr()
    assert "first cause: process 1 was killed (SIGKILL); starting again with 1 process" in said.err
    assert "step     3 of 8" in said.out
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert len(lines) - 1 > len(losses) or lines[3]["step"] == 4
    np.testing.assert_allclose([losses[n] for n in range(1, 9)], run.losses, rtol=1e-4)
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layout", "megatorn"], ["'megatorn' is neither a preset", "did you mean megatron?"]),
        (["--steps", "0"], ["--steps", "'0' is not a whole number above 0"]),
        (["--batch", "many"], ["--batch", "'many' is not a whole number above 0"]),
        (["--lowering", "xla"], ["--lowering", "jit", "shard_map"]),
        (["--metrics", "/no/such/folder/m.jsonl"], ["there is no folder /no/such/folder"]),
    ],
)
def test_bad_flags_are_explained(flags, words, capsys):
    with pytest.raises(SystemExit):
        train_lm.main(flags)
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_the_default_mesh_has_the_axes_of_the_rules():
    assert dict(mp.mesh(train_lm.default_mesh(train_lm.LAYOUTS["fsdp"])).shape) == {"data": 8}
    megatron = mp.mesh(train_lm.default_mesh(train_lm.LAYOUTS["megatron"]))
    assert dict(megatron.shape) == {"data": 4, "model": 2}


def test_text_is_split_by_file(tmp_path):
    names = [f"package/module_{i}.py" for i in range(200)] + ["test/test_x.py", "readme.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    corpus = read_stdlib(tmp_path)
    assert corpus.files == 200
    train = set(corpus.train.tobytes().decode().split("\0"))
    held_out = set(corpus.held_out.tobytes().decode().split("\0"))
    assert train & held_out == {""}
    assert train | held_out == {"", *(f"<{name}>" for name in names[:200])}
    assert 2 < len(held_out) < 30
    again = read_stdlib(tmp_path)
    assert np.array_equal(again.train, corpus.train)


def test_targets_are_the_next_bytes():
    text = np.arange(100, dtype=np.uint8)
    inputs, targets = next(training_batches(text, batch=4, seq=10, seed=0))
    assert inputs.shape == targets.shape == (4, 10)
    assert np.array_equal(targets, inputs + 1)
    batches = held_out_batches(text, batch=2, seq=10, count=3)
    assert len(batches) == 3
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 99

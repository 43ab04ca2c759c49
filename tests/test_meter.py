"""Measurements of a training loop, with a clock that the test controls; the writers of logging libraries; MLPerf's log lines."""

import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar._src import meter as module
from meshpar.errors import UnsupportedError

DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}
PARAMS = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
X = jnp.ones((8, 16))


def forward(params, x):
    return jnp.mean((x @ params["up"] @ params["down"]) ** 2)


def plan_of(**options):
    return mp.plan(forward, PARAMS, X, mesh="data=4, model=2", layout="batch: data; mlp: model", dims=DIMS, **options)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass at each wait for a step."""
    now = [100.0]

    def wait(x):
        now[0] += 0.25
        return x

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.jax, "block_until_ready", wait)
    return now


def test_mean_of_several_steps(clock):
    seen = []
    meter = mp.log.Meter(
        plan_of(topology="v5e:2x4"), tokens=1000, every=4, writers=[lambda n, values: seen.append((n, values))]
    )
    returned = [meter.step({"loss": jnp.float32(n)}) for n in range(12)]
    assert [n for n, _ in seen] == [4, 8]  # the first step is not measured
    assert [n for n, values in enumerate(returned) if values is not None] == [5, 9]  # one call after the step
    values = seen[0][1]
    assert values["step_seconds"] == 0.25
    assert values["loss"] == 4
    assert values["tokens_per_second"] == 4000
    assert values["tokens_per_second_per_device"] == 500
    plan = plan_of(topology="v5e:2x4")
    flops = 2 * 8 * 16 * 32 * 2
    np.testing.assert_allclose(values["mfu"], flops / 0.25 / (8 * 197e12), rtol=1e-6)
    assert values["planned_seconds"] == plan.seconds
    assert values["bytes_sent"] == plan.bytes_sent


def test_close_writes_the_last_steps(clock):
    seen = []
    with mp.log.Meter(
        plan_of(), every=4, writers=[lambda n, values: seen.append((n, values["step_seconds"]))]
    ) as meter:
        for _ in range(8):
            meter.step(jnp.float32(1))
    assert seen == [(4, 0.25), (7, 0.25)]
    meter.close()
    assert len(seen) == 2
    with mp.log.Meter(plan_of(), writers=[lambda *_: seen.append(_)]) as meter:  # one step, which compiles
        meter.step(jnp.float32(1))
    meter = mp.log.Meter(plan_of(), writers=[lambda *_: seen.append(_)])
    for _ in range(3):
        meter.step(jnp.float32(1))
    meter.close("aborted")
    assert len(seen) == 2


def test_values_without_chip_and_tokens(clock):
    tree = {"loss": jnp.float32(1), "norms": {"up": jnp.float32(2), "all": jnp.ones(3)}}
    own = {"step_seconds", "bytes_sent"}
    for metrics, names in ((jnp.float32(1), {"loss"}), (tree, {"loss", "norms/up"})):  # scalars alone are written
        meter = mp.log.Meter(plan_of(), every=1, writers=[])
        values = [meter.step(metrics) for _ in range(3)][-1]
        assert set(values) == own | names
        assert values["loss"] == 1
    assert values["norms/up"] == 2


def test_lines_of_text(clock, capsys):
    stream = io.StringIO()
    for writers in (None, [stream]):
        meter = mp.log.Meter(plan_of(topology="v5e:2x4"), tokens=1000, every=1, writers=writers)
        for _ in range(3):
            meter.step({"loss": jnp.float32(0.5)})
    line = stream.getvalue()
    assert line == capsys.readouterr().out
    assert line.startswith("step      1   loss       0.5    250 ms a step   ")
    assert " × planned        4,000 tokens/s         500 tokens/s/device   MFU  0.0%" in line
    assert "sent" not in line  # the same for every step


def test_writers_of_libraries(clock):
    of_board, of_clu = [], []
    board = SimpleNamespace(add_scalar=lambda name, value, step: of_board.append((name, value, step)))
    clu = SimpleNamespace(write_scalars=lambda step, values: of_clu.extend((k, x, step) for k, x in values.items()))
    meter = mp.log.Meter(plan_of(), every=1, writers=[board, clu])
    for _ in range(3):
        meter.step({"loss": jnp.float32(0.5)})
    for written in (of_board, of_clu):
        assert ("loss", 0.5, 1) in written
        assert ("step_seconds", 0.25, 1) in written


def test_mlperf_log(clock, tmp_path):
    parser = pytest.importorskip("mlperf_logging.compliance_checker.mlp_parser")
    path = tmp_path / "log.txt"
    log = mp.log.MlLog(path, submission_benchmark="bert", global_batch_size=8)
    with mp.log.Meter(plan_of(), tokens=8, every=1, writers=[log]) as meter:
        for _ in range(4):
            meter.step({"loss": jnp.float32(0.5)})
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    keys = "submission_benchmark global_batch_size run_start tracked_stats tracked_stats tracked_stats run_stop"
    assert [e["key"] for e in events] == keys.split()
    assert [e["event_type"] for e in events[2:]] == ["INTERVAL_START", *["POINT_IN_TIME"] * 3, "INTERVAL_END"]
    assert events[0]["value"] == "bert"
    assert events[3]["value"]["loss"] == 0.5
    assert events[3]["metadata"]["step"] == 1
    assert events[-1]["metadata"]["status"] == "success"
    for e in events:
        assert set(e) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
        assert e["metadata"]["file"].endswith(".py")
        assert e["metadata"]["lineno"] > 0
    lines, errors = parser.parse_file(str(path), ruleset="5.1.0")
    assert not errors
    assert [line.key for line in lines] == keys.split()


def test_log_of_a_loop_that_fails(clock, tmp_path):
    def loop():
        with mp.log.Meter(plan_of(), every=1, writers=[mp.log.MlLog(tmp_path / "log.txt")]) as meter:
            for _ in range(3):
                meter.step({"loss": jnp.float32(0.5)})
            raise ValueError("a loss of NaN")

    with pytest.raises(ValueError, match="NaN"):
        loop()
    last = json.loads((tmp_path / "log.txt").read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert last["key"] == "run_stop"
    assert last["metadata"]["status"] == "aborted"


def test_bad_input():
    with pytest.raises(UnsupportedError, match="every=0"):
        mp.log.Meter(plan_of(), every=0)
    with pytest.raises(UnsupportedError, match="no int"):
        mp.log.Meter(plan_of(), writers=[3])


# -- the goodput of a run


def start(path, first, steps, **options):
    """One start of a run: its meter, and the last values that it wrote. Each step takes 0.25 s."""
    meter = mp.log.Meter(plan_of(), every=2, writers=[], first=first, path=path, **options)
    values = [meter.step(jnp.float32(n)) for n in range(first, first + steps)]
    return meter, next((v for v in reversed(values) if v is not None), None)


def test_the_goodput_over_restarts(clock, tmp_path, monkeypatch):
    """Eleven steps, a loss of four of them by a restart from step 6, then six steps of which four are repeated."""
    monkeypatch.setattr(module.time, "time", lambda: 1000.0 + 4 * (clock[0] - 100.0))
    path = tmp_path / "meter.json"
    meter, values = start(path, 0, 12)
    assert meter.goodput.steps == 11
    assert values["goodput"] == pytest.approx(11 * 0.25 / (4 * 11 * 0.25))
    assert (values["restarts"], values["repeated_steps"]) == (0, 0)
    clock[0] += 5.0  # detection, and a wait for devices
    meter, values = start(path, 7, 8)
    meter.close()
    stored = json.loads(path.read_text())
    assert (stored["starts"], stored["steps"], stored["repeated_steps"]) == (2, 15, 4)
    assert stored["productive_seconds"] == pytest.approx(15 * 0.25)
    assert stored["repeated_seconds"] == pytest.approx(4 * 0.25)
    assert meter.goodput.fraction == pytest.approx(15 * 0.25 / (4 * (clock[0] - 100.0)))


def test_seconds_of_the_compiler(tmp_path):
    path = tmp_path / "meter.json"
    meter = mp.log.Meter(plan_of(), every=1, writers=[], path=path)
    jax.jit(lambda x: jnp.cumsum(x * 3) + 17)(jnp.ones(5))
    meter.step(jnp.float32(0))
    meter.step(jnp.float32(0))
    values = meter.step(jnp.float32(0))
    assert values["compile_seconds"] > 0
    again = mp.log.Meter(plan_of(), writers=[], path=path)
    assert again.goodput.compile_seconds >= values["compile_seconds"]
    assert again.goodput.starts == 2


@pytest.mark.parametrize("text", ["", "[]", '{"begin": 1, "other": 2}', "{}"])
def test_a_file_that_is_no_record(tmp_path, text):
    path = tmp_path / "meter.json"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match="no record of a Meter"):
        mp.log.Meter(plan_of(), path=path)
    assert path.read_text() == text

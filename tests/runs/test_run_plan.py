"""Forecasts of runs: bytes, seconds and cost from a plan, prices, bad input, the report and its page."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.units import format_count, format_duration
from meshpar.errors import MeshError, UnsupportedError

DIMS = {"state/params/*": "vocab embed", "state/opt/*": "vocab embed", "tokens": "batch seq"}
W = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
M = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((512, 256), jnp.int32)


def train_step(state, tokens):
    def loss_of(w):
        return jnp.mean(jnp.square(w[tokens] @ w.T.astype(w.dtype)))

    loss, g = jax.value_and_grad(loss_of)(state["params"]["w"])
    m = 0.9 * state["opt"]["m"] + g
    return {"params": {"w": state["params"]["w"] - m.astype(g.dtype)}, "opt": {"m": m}}, loss


@pytest.fixture(scope="module")
def plan():
    return mp.plan(
        train_step, {"params": {"w": W}, "opt": {"m": M}}, TOKENS, mesh="data=-1", topology="v5p:4x4x4",
        layout="batch: data; embed: data", dims=DIMS, donate_argnames="state",
    )  # fmt: skip


def test_numbers_of_a_run(plan):
    chip = CHIPS["v5p"]
    run = plan.run_plan(1e15, mtbf="40000h", restart="5m", compile_time=30, bandwidth=1e8, price={"v5p": 4.2})
    assert run._sources()["bandwidth"] == "given" != run._sources()["save_time"]
    assert dict(run._assumptions())["mtbf"] == "40,000 h: given"
    (row,) = run.rows
    job, size = row.job, W.size * (2 + 4)
    assert (run.step_tokens, job.steps) == (512 * 256, -(-(10**15) // (512 * 256)))
    assert (row.chips, job.step, job.mtbf) == (64, plan.seconds, 40000 * 3600 / 64)
    assert row.checkpoint_bytes == size
    assert job.save == pytest.approx(size / 64 / chip.host_link)
    assert job.write == pytest.approx(size / 64 / 1e8)
    assert job.restart == pytest.approx(300 + 30 + job.write)
    out = job.simulate(row.save_optimum, 1000)
    assert row.days.median == pytest.approx(np.median(out.seconds) / 86400)
    assert row.days.low < row.days.median < row.days.high
    assert row.cost.median == pytest.approx(row.days.median * 24 * 64 * 4.2)
    days = np.percentile(out.seconds, (5, 95)) / 86400
    assert (row.days.low, row.days.high) == pytest.approx((days[0] * (1 - 0.24), days[1] * (1 + 0.24)))
    assert row.mfu == plan.time.mfu
    text = " ".join(str(run).split())
    assert f"{run.step_tokens / plan.seconds / 64:,.0f}" in text
    assert f"{format_count(row.cost.median / 1e3)}" in text  # of 1e12 of 1e15 tokens
    assert "step 0.76 to 1.24 × the planned time" in text
    assert row.goodput.median == pytest.approx(job.step * job.steps / np.median(out.seconds))
    assert sum(row.parts) == pytest.approx(np.mean(out.seconds))
    assert row.failures.median == pytest.approx(np.median(out.seconds) / job.mtbf, rel=0.1)
    assert min(row.parts) > 0
    least, longest, longer = map(job.expected, (row.save_optimum, row.save_every, row.save_every + 1))
    assert 1.0099 * least < longest <= 1.01 * least < longer
    assert row.copies_bytes == pytest.approx(6 * size / 64)


def test_copies_in_memory_pay_where_storage_is_slow(plan):
    """The gain, from Daly's formula with and without the read and the wait for a write."""
    slow, fast = (plan.run_plan(1e12, mtbf="1000h", bandwidth=rate).rows[0] for rate in (1e4, 1e9))
    assert slow.copies_pay
    assert not fast.copies_pay
    work = 86400 * slow.days.median
    waste = work * (2 * slow.job.write + slow.save_seconds[0] / 2) / slow.job.mtbf
    assert 86400 * slow.copies_days == pytest.approx(waste, rel=0.3)


def test_several_topologies(plan, tmp_path):
    run = plan.run_plan(1e12, topologies=["v5p:4x4x4", "2x v5e:8x8"], mesh="data=-1", price={"v5p": 4.2, "v5e": 0.1})
    found = [(r.topology, r.chips, r.mesh) for r in run.rows]
    assert found == [("v5p:4x4x4", 64, "data=64"), ("2x v5e:8x8", 128, "data=128")]
    assert run.best == min(run.rows, key=lambda r: r.days.median)
    assert run.cheapest == min(run.rows, key=lambda r: r.cost.median)
    for suffix in ("html", "json", "txt"):
        run.save(tmp_path / f"run.{suffix}")
    stored = json.loads((tmp_path / "run.json").read_text())
    assert [r["job"]["step"] for r in stored["rows"]] == [r.job.step for r in run.rows]
    assert stored["options"]["sources"]["mtbf"].startswith("of a chip")
    text = (tmp_path / "run.txt").read_text()
    assert all(r.topology in text for r in run.rows)
    shortest, longest = map(format_duration, run.best.save_seconds)
    save = f"; save every {run.best.save_every:,} steps, {longest} (at most 1 % longer than every {shortest})"
    assert save in " ".join(text.split())
    cheap, fast = run.cheapest, run.best
    assert cheap != fast
    verdict = f"result  cheapest on {cheap.topology}: {cheap.days.median:,.1f} days, cost "
    assert verdict in text
    assert f"; shortest on {fast.topology}: {fast.days.median:,.1f} days, cost " in " ".join(text.split())
    assert "price         4.2 for an hour of a v5p, 0.1 for an hour of a v5e: given" in text


@pytest.mark.parametrize(("name", "text"), [("p.toml", "v5p = 4.2"), ("p.json", '{"v5p": 4.2}')])
def test_prices_of_a_file(plan, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert plan.run_plan(1e12, price=tmp_path / name).rows[0].cost is not None


@pytest.mark.parametrize("text", ["v5p = 'x'", "v5p = -1", "v5p 4.2", "v5q = 4.2"])
def test_prices_that_cannot_be_read(plan, tmp_path, text):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UnsupportedError, match="price="):
        plan.run_plan(1e12, price=str(tmp_path / "p.toml"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mtbf": "40000 parsecs"}, "is no duration"),
        ({"mtbf": 0}, "mtbf=0"),
        ({"restart": "-3m"}, "is no duration"),
        ({"bandwidth": 0.0}, "bandwidth=0"),
        ({"step_tokens": "many"}, "step_tokens"),
        ({"price": "no-such-file"}, "price="),
        ({"trials": 0}, "trials=0"),
        ({"trials": "10m"}, "trials: could not convert"),
        ({"price": {"v5pp": 4.2}}, "there is no chip 'v5pp'"),
        ({"price": {"v5p": -4.2}}, "a price is a positive"),
        ({"mtbf": "1h"}, "hardly progresses"),
        ({"tokens": -1.0}, "positive number of tokens"),
    ],
)
def test_bad_parameters(plan, options, says):
    with pytest.raises(UnsupportedError, match=says):
        plan.run_plan(**{"tokens": 1e12, **options})


def test_plans_without_a_run(plan):
    with pytest.raises(MeshError):
        plan.run_plan(1e12, topologies=["v5p:4x4x4"], mesh="data=3")
    with pytest.raises(UnsupportedError, match="needs a chip"):
        plan.replan(mesh="data=8", topology="").run_plan(1e12)
    forward = mp.plan(lambda x: x * 2, M, mesh="data=4", topology="v5e:2x2", layout="", dims={"x": "batch embed"})
    with pytest.raises(UnsupportedError, match="no argument of integers"):
        forward.run_plan(1e12)
    with pytest.raises(
        UnsupportedError, match=r"(?s)no argument of .* is recognised as the parameters.*call them `params`"
    ):
        forward.run_plan(1e12, step_tokens=8)

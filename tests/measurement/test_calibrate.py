"""Layouts measured on CPU devices: measurements, comparisons, bad input. No test depends on timing."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar._src.hardware.calibration import JAXLIB, Calibration
from meshpar._src.measurement import Candidate, calibrate, request_as_measured
from meshpar._src.passes import replan

OPTIMIZER = optax.adam(1e-2)
DIMS = {"state/*/up": "embed mlp", "state/*/down": "mlp embed", "x": "batch embed"}
LAYOUTS = ["batch: data", "batch: data; mlp: model", "batch, embed: data; mlp: model"]
MESH = "data=4, model=2"


def train_step(state, x):
    def loss(p):
        return jnp.mean(jnp.square(jax.nn.relu(x @ p["up"]) @ p["down"] - x))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def arguments():
    rng = np.random.default_rng(0)
    params = {
        "up": jnp.asarray(0.1 * rng.standard_normal((16, 32)), jnp.float32),
        "down": jnp.asarray(0.1 * rng.standard_normal((32, 16)), jnp.float32),
    }
    x = jnp.asarray(rng.standard_normal((8, 16)), jnp.float32)
    return {"params": params, "opt_state": OPTIMIZER.init(params)}, x


def test_layouts_are_measured_and_the_arguments_left_alone(tmp_path):
    state, x = arguments()
    messages = []
    how = {"dims": DIMS, "donate_argnames": "state"}
    found = mp.hardware.calibrate(
        train_step, state, x, layout=LAYOUTS, mesh=MESH, rounds=2, progress=messages.append, **how
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, x)))
    assert {r.layout for r in found.rows} == {str(mp.Layout(text)) for text in LAYOUTS}
    assert [r.seconds for r in found.rows] == sorted(r.seconds for r in found.rows)
    assert found.best == found.rows[0]
    assert (found.device_kind, found.devices, found.rounds, found.listed) == ("cpu", 8, 2, False)
    assert (found.calibration.device_kind, found.calibration.jaxlib) == ("cpu", JAXLIB)
    found.calibration.save(tmp_path / "cpu.json")
    for row in found.rows:  # plans with the calibration have the fitted seconds
        where = {"mesh": row.mesh, "layout": row.layout, "lowering": "shard_map"}
        plan = mp.plan(train_step, state, x, calibration=tmp_path / "cpu.json", **where, **how)
        assert plan.seconds == pytest.approx(row.fitted)
    assert any("run 6" in text for text in messages)
    text = str(found)
    assert len(text.splitlines()) < 24
    assert all(row.layout in text for row in found.rows)
    found.save(tmp_path / "found.json")
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["best"]["ratio"] == found.best.seconds / found.best.planned
    assert found._repr_html_().count("<tr>") == 1 + len(found.rows)


def ticking(order):
    """A clock, and a step of which each run takes as long as its layout has rules, whatever the machine does."""
    now = [0.0]

    def clock():
        return now[0]

    def taking(candidate, seconds, disturbed):
        subject = candidate.subject
        inner = subject.sharded
        runs = itertools.count()

        def sharded(xs):
            order.append(candidate.layout)
            now[0] += seconds * (10 if next(runs) in disturbed else 1)
            return inner(xs)

        return Candidate(candidate.layout, dataclasses.replace(subject, sharded=sharded))

    return clock, taking


def test_rounds_are_interleaved_and_medians_taken():
    order = []
    clock, taking = ticking(order)
    x = jnp.ones((8, 8))
    candidates = []
    for k, layout in enumerate(["a: data", "b: data", ""]):
        step = mp.jit(lambda x: x + 1, mesh="data=8", layout=mp.Layout(layout, optional=True), dims={"x": "a b"})
        with step._check_subject((x,), {}) as subject:
            candidates.append(taking(Candidate(layout, subject), k + 1.0, {4}))
    found = calibrate(candidates, rounds=3, tolerance=1e-5, tell=lambda text: None, clock=clock)
    assert [(r.layout, r.seconds) for r in found.rows] == [("a: data", 1), ("b: data", 2), ("", 3)]
    assert all(r.spread > 0 for r in found.rows)
    firsts = [order[3 + 6 * r] for r in range(3)]  # the first runs compare; then two runs each, all in every round
    assert firsts == ["a: data", "b: data", ""]
    assert [sorted(order[3 + 6 * r : 9 + 6 * r]) for r in range(3)] == [sorted(2 * ["a: data", "b: data", ""])] * 3


def test_the_fit_predicts_the_implementation_that_was_measured():
    """Whether rings pay depends on the efficiencies; the program that was measured does not."""

    def mlp(x, up, down):
        return jax.nn.relu((x - x.mean(-1, keepdims=True)) @ up) @ down

    def choices(plan):
        return {o.choice for o in plan.overlaps}

    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 2048, 4096), (4096, 28672), (28672, 4096))]
    measured = mp.plan(
        mlp, *args, mesh="data=16, model=16", topology="v5e:16x16", layout="batch: data; mlp: model; seq: model",
        dims={"x": "batch seq embed", "up": "embed mlp", "down": "mlp embed"}, overlap="auto",
    )  # fmt: skip
    (choice,) = choices(measured)
    free, pinned = set[str](), set[str]()
    for efficiencies in itertools.product((0.1, 1.0), repeat=3):
        with_them = {"calibrations": (Calibration("TPU v5 lite", JAXLIB, *efficiencies),)}
        free |= choices(replan(measured, dataclasses.replace(measured.request, **with_them)))
        pinned |= choices(replan(measured, dataclasses.replace(request_as_measured(measured), **with_them)))
    assert free == {"ring", "xla"}
    assert pinned == {choice}


def test_numbers_that_differ_are_caught():
    traced = itertools.count(1)

    def step(x):
        return {"loss": jnp.sum(x), "bad": x * next(traced)}  # other meshes are traced anew

    layouts = [("data=8", "a: data"), ("rows=8", "a: rows")]
    with pytest.raises(mp.errors.CheckError) as caught:
        mp.hardware.calibrate(step, jnp.ones((8, 4)), layout=layouts, dims={"x": "a b"}, rounds=1)
    assert caught.value.path == "bad"


def test_rounding_that_adam_blows_up_is_no_difference():
    """A gradient that is zero but for rounding becomes a full step of either sign."""

    def step(state, x):
        loss = lambda p: jnp.mean((x @ p["up"] - x @ p["up"]) ** 2) + jnp.sum(x @ p["down"].T - x @ p["down"].T)  # noqa: E731
        gradients = jax.grad(loss)(state["params"])
        updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
        return optax.apply_updates(state["params"], updates), opt_state

    found = mp.hardware.calibrate(step, *arguments(), layout=LAYOUTS[:2], mesh=MESH, dims=DIMS, rounds=1)
    assert len(found.rows) == 2


def test_modules_are_measured_and_not_updated():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)), out_sharding=("embed", "mlp"), eager_sharding=False)

    def step(model, x):
        model.w[...] = model.w[...] - 0.1 * jnp.mean(x)
        return jnp.sum(x @ model.w[...])

    model = Model()
    layouts = ["batch: data", "mlp: data"]
    found = mp.hardware.calibrate(step, model, jnp.ones((8, 8)), layout=layouts, dims={"x": "batch embed"}, rounds=1)
    assert len(found.rows) == 2
    np.testing.assert_array_equal(model.w[...], np.ones((8, 8)))


def test_what_jit_returned_and_pairs_and_searches():
    state, x = arguments()
    step = mp.jit(train_step, mesh=MESH, layout="", dims=DIMS, donate_argnames="state")
    one, other = ("data=8", "batch: data"), ("data=2, model=4", "batch: data; mlp: model")
    pairs = [one, (mp.mesh(other[0]), mp.Layout(other[1])), one]
    found = mp.hardware.calibrate(step, state, x, layout=pairs, rounds=1)
    assert {(r.mesh, r.layout) for r in found.rows} == {one, other}
    searched = mp.search(train_step, state, x, topology="v5e:2x4", dims=DIMS, donate_argnames="state", max_plans=8)
    again = mp.hardware.calibrate(train_step, state, x, layout=searched, max_layouts=1, dims=DIMS, rounds=1)
    assert [(r.mesh, r.layout) for r in again.rows] == [(r.mesh, r.layout) for r in searched.rows[:1]]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"layout": []}, mp.errors.UnsupportedError, "no layouts"),
        ({"layout": "batch: data; mlp: model", "mesh": None}, mp.errors.MeshError, "no mesh says their sizes"),
        ({"layout": "batch: data", "mesh": "data=1"}, mp.errors.MeshError, "one device"),
        ({"layout": "batch: data", "mesh": "data=16"}, mp.errors.MeshError, "needs 16 devices"),
        ({"layout": ["batch: data", "batch: rows"]}, mp.errors.UnknownAxisError, "rows"),
        ({"layout": "batch: data+model; embed: data", "mesh": "data=8, model=3"}, mp.errors.MeshError, "24"),
        ({"layout": [("data=3", "batch: data")], "mesh": None}, mp.errors.DivisibilityError, "batch"),
        ({"layout": [("data=8", "batch: data")]}, mp.errors.MeshError, "have their own meshes"),
        ({"layout": "batch: data", "rounds": 0}, mp.errors.UnsupportedError, "rounds=0"),
        ({"layout": "batch: data", "lowering": "gspmd"}, mp.errors.UnsupportedError, "no lowering"),
    ],
)
def test_bad_input(options, error, says):
    with pytest.raises(error, match=says):
        mp.hardware.calibrate(train_step, *arguments(), dims=DIMS, **{"mesh": MESH, **options})

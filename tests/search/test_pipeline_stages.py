"""Searches over layouts with stages: their rows are plans, and the result says whether stages pay."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.program.pipeline import SCHEDULES
from meshpar._src.search.pipeline_stages import LayerStack, staged_meshes

LAYERS = 8
DIMS = {
    "params/embedding": "vocab embed",
    "params/head": "embed vocab",
    "params/up": "layers embed mlp",
    "params/down": "layers mlp embed",
    "tokens": "batch seq",
}


def arguments(batch, seq=1024, embed=4096, mlp=16384, vocab=2048):
    shapes = {"embedding": (vocab, embed), "head": (embed, vocab)}
    shapes |= {"up": (LAYERS, embed, mlp), "down": (LAYERS, mlp, embed)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return params, jax.ShapeDtypeStruct((batch, seq), jnp.int32)


def step_of(microbatches):
    def loss(p, tokens):
        layer = lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None)  # noqa: E731
        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embedding"][tokens], (p["up"], p["down"]))
        logits = jax.nn.log_softmax((x @ p["head"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    def step(params, tokens):
        gradient = jax.value_and_grad(loss)
        if microbatches > 1:
            gradient = mp.train.accumulate_gradients(gradient, microbatches)
        value, gradients = gradient(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


SMALL = {"seq": 4096, "embed": 1024, "mlp": 4096}


def search(microbatches, batch, sizes={}, **options):  # noqa: B006
    options = {"topology": "v5e:4x4", "dims": DIMS, "donate_argnames": "params", "max_axes": 2, **options}
    return mp.search(step_of(microbatches), *arguments(batch, **sizes), **options)


@pytest.fixture(scope="module")
def many_small_microbatches():
    """A sequence in each microbatch: without stages, all devices share the matmuls of one sequence."""
    return search(64, 64, SMALL, forbid="seq", max_plans=50)


def test_stages_pay_where_a_microbatch_cannot_be_divided_otherwise(many_small_microbatches, tmp_path):
    """The result says so everywhere."""
    found = many_small_microbatches
    assert "stage" in found.best.mesh
    assert found.stages.startswith("stages pay with these microbatches")
    assert found.best.seconds <= min(row.seconds for row in found.rows if "stage" not in row.mesh and row.fits)
    options = {"mesh": found.best.mesh, "layout": found.best.layout, **found.best.stages}
    args = arguments(64, **SMALL)
    plan = mp.plan(step_of(64), *args, topology="v5e:4x4", dims=DIMS, donate_argnames="params", **options)
    assert plan.pipeline is not None
    assert plan.pipeline.microbatches == 64
    assert (plan.seconds, plan.memory.peak) == (found.best.seconds, found.best.peak)
    assert found.plan().pipeline == plan.pipeline
    assert found.stages in str(found)
    assert json.loads(found.to_json())["stages"] == found.stages
    found.save(tmp_path / "search.html")
    assert found.stages[1:] in (tmp_path / "search.html").read_text("utf8")


def test_every_row_is_the_plan_of_its_text(many_small_microbatches):
    found = many_small_microbatches
    staged = [row for row in found.rows if "stage" in row.mesh]
    assert len(staged) > 3
    for row in staged[:6]:
        plan = found.plan(row)
        assert (plan.seconds, plan.memory.peak) == (row.seconds, row.peak)
        assert plan.pipeline is not None
        assert (plan.request.schedule, plan.pipeline.gather) == (row.schedule, row.gather)


def test_all_schedules_are_tried_for_the_best_candidate(many_small_microbatches):
    found = many_small_microbatches
    best = {row.schedule: row for row in reversed(found.rows) if row.schedule and row.mesh == found.best.mesh}
    assert set(best) == set(SCHEDULES)
    assert best["gpipe"].peak > best["1f1b"].peak
    assert min(row.seconds for row in best.values()) == min(row.seconds for row in found.rows if row.fits)
    assert f"schedule={found.best.schedule}" in str(found)
    assert json.loads(found.to_json())["best"]["schedule"] == found.best.schedule
    assert not [row for row in found.rows if row.schedule and "stage" not in row.mesh]


def test_stages_do_not_pay_where_the_batch_is_large():
    found = search(4, 256, max_plans=30)
    assert "stage" not in found.best.mesh
    assert found.stages.startswith("stages do not pay with these microbatches")
    staged = min((row for row in found.rows if "stage" in row.mesh), key=lambda row: row.seconds, default=None)
    assert staged is None or staged.seconds > found.best.seconds


NO_STAGES = [(1, {}), (16, {"forbid": "layers"}), (16, {"fixed": "layers: none"}), (16, {"mesh": "data=16"})]


@pytest.mark.parametrize(("microbatches", "options"), NO_STAGES)
def test_searches_without_stages(microbatches, options):
    found = search(microbatches, 16, max_plans=4, **options)
    assert found.stages == ""
    assert not [row for row in found.rows if "stage" in row.mesh]


def test_rules_and_layouts_of_the_users_with_stages():
    """As fixed rules on a mesh, or as one of the layouts."""
    options = {"mesh": "stage=4, data=4", "max_plans": 8}
    assert search(16, 16, fixed="layers: stage", **options).plan().pipeline is not None
    own = search(16, 16, layouts=["layers: stage; batch: data"], **options)
    row = next(row for row in own.rows if row.name == "yours")
    assert own.plan(row).pipeline is not None


def test_numbers_of_stages():
    """They divide the layers and the devices, and more than half of the slots are busy."""
    plan = mp.plan(step_of(4), *arguments(16), mesh="data=4", topology="v5e:2x2", layout="batch: data", dims=DIMS)
    stack = LayerStack.of(plan.program)
    assert stack is not None
    assert (stack.dims, stack.layers, stack.microbatches) == (("layers",), LAYERS, 4)
    assert stack.stage_counts(64) == [2, 4]
    assert stack.stage_counts(6) == [2]
    assert stack.slowdown(4) == 7 / 4
    assert LayerStack.of(plan.program.traced) is not None


def test_meshes_with_stages_in_a_slice_and_between_slices():
    found = [dict(sizes) for sizes in staged_meshes(4, 32, 2, 2)]
    assert {tuple(sizes) for sizes in found} >= {("stage", "data"), ("slice", "stage", "data")}
    assert {(sizes["stage"], math.prod(sizes.values())) for sizes in found} == {(4, 32)}
    assert not [sizes for sizes in staged_meshes(3, 24, 2, 2) if next(iter(sizes)) == ("stage", 3)]

"""What reports add to a plan: the effect of every rule, the loops over time, the largest values; against hand arithmetic."""

import itertools
import re

import jax
import jax.numpy as jnp
import lab_program
import pytest

import meshpar as mp
from meshpar._src.report.facts import (
    MEASURED_GPU_STEPS,
    PUBLISHED_GPU_STEP,
    TORCHTITAN_GPU_STEPS,
    argument_dims,
    parallelism,
    rule_effects,
)
from meshpar._src.report.timeline import COMPUTE, timeline

BATCH, EMBED, MLP, LAYERS = 4096, 1024, 4096, 6
DIMS = {"w/up": "layers embed mlp", "w/down": "layers mlp embed", "x": "batch embed"}
SHAPES = {"up": (LAYERS, EMBED, MLP), "down": (LAYERS, MLP, EMBED), "x": (BATCH, EMBED)}
UP, DOWN, X = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES.values())
ARGS = ({"up": UP, "down": DOWN}, X)


def step(w, x):
    def loss(w):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jax.lax.scan(layer, x, w)[0].mean()

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def planned(layout: str, mesh: str = "data=4, model=2", **more) -> mp.Plan:
    return mp.plan(step, *ARGS, mesh=mesh, layout=layout, dims=DIMS, **more)


def sizes(effect) -> tuple[int, float, float]:
    """Number, global bytes and bytes on a device of the arguments that a rule shards."""
    return len(effect.arguments.members), effect.arguments.global_bytes, effect.arguments.bytes


def test_what_a_rule_splits_and_sends():
    plan = planned("batch: data; mlp: model; embed: data")
    batch, mlp, embed = rule_effects(plan)
    weights = 2 * LAYERS * EMBED * MLP * 4
    assert sizes(batch) == (1, BATCH * EMBED * 4, BATCH * EMBED * 4 / 4)
    assert sizes(mlp) == sizes(embed) == (2, weights, weights / 8)
    gathered = 2 * weights / 2 * 3 / 4  # twice a step, of each device's half along mlp
    assert embed.collectives.bytes == pytest.approx(gathered)
    assert batch.collectives.bytes == pytest.approx(weights / 2 * 3 / 4, rel=1e-3)  # gradients, scattered
    activations = 2 * LAYERS * BATCH // 4 * EMBED * 4  # forward and back
    assert mlp.collectives.bytes == pytest.approx(activations, rel=0.2)
    assert sum(e.collectives.bytes for e in (batch, mlp, embed)) == pytest.approx(plan.bytes_sent)
    assert batch.collectives.seconds == 0  # no chip is known
    up = next(h for h in plan.inputs if h.path == "w/up")
    assert argument_dims(up) == [("layers", ()), ("embed", ("data",)), ("mlp", ("model",))]


def test_a_rule_without_effect_and_one_in_a_scope():
    plan = planned("batch: data; opt.embed: data; mlp: model")
    _, scoped, _ = rule_effects(plan)
    assert (str(scoped.rule), sizes(scoped), scoped.collectives.bytes) == ("opt.embed: data", (0, 0, 0), 0)


def test_a_rule_for_paths_splits_what_the_layout_splits():
    """A leading `*/` stands for nothing too, as everywhere."""
    dims = {"embedding": "vocab embed", "x": "batch seq"}
    args = jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.int32)
    layout = '"*/embedding".vocab: model'
    plan = mp.plan(lambda embedding, x: embedding[x], *args, mesh="model=2", layout=layout, dims=dims)
    (effect,) = rule_effects(plan)
    assert plan.inputs[0].split == [("vocab", ("model",)), ("embed", ())]
    assert sizes(effect) == (1, 64 * 8 * 4, 32 * 8 * 4)


def loop_bodies(plan):
    """The timelines of one iteration of the loops, with their trip counts."""
    return [(span.body, span.trips) for span, _ in timeline(plan).walk() if span.body is not None]


def test_the_layers_over_time_add_up():
    plan = planned("batch: data; embed: data", "data=8", topology="v5e:2x4", overlap="xla")
    effects = [e.collectives.seconds for e in rule_effects(plan)]
    assert min(effects) > 0
    assert sum(effects) == pytest.approx(plan.comm_seconds)
    (forward, once), (backward, again) = loop_bodies(plan)
    assert once == again == LAYERS
    assert [s.name for s in forward.spans if s.axes] == ["all-gather"] * 2
    assert sorted(s.name for s in backward.spans if s.axes) == ["all-gather"] * 2 + ["reduce-scatter"] * 2
    for body in (forward, backward):
        waits = [s for s in body.spans if s.axes and s.exposed > (1 - 1e-9) * s.seconds]
        for in_flight in (False, True):  # kernels and the collectives that they wait for; the links
            spans = [s for s in body.spans if (bool(s.axes) and s not in waits) == in_flight]
            spans.sort(key=lambda s: (s.start, s.seconds))
            assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
        # weights are sent for ahead; gradients only leave, but programs for v5e do not go on while they are scattered
        assert {s.name for s in waits} == ({"reduce-scatter"} if body is backward else set())
    in_loops = sum(s.seconds * LAYERS for b in (forward, backward) for s in b.spans if s.lane == COMPUTE)
    assert in_loops == pytest.approx(sum(o.seconds * o.count for o in plan.time.ops if o.count == LAYERS))


def test_what_a_repl_shows_fits_a_screen():
    """Lines of a REPL's width, and no object's address."""
    plan = planned("batch: data; mlp: model; embed: data", "data=4, model=2", topology="v5e:2x4")
    step = mp.jit(globals()["step"], mesh="data=1, model=1", layout="batch: data", dims=DIMS)
    for thing, most in ((plan, 160), (step, 160), (plan.time, 600), (plan.memory, 600), (plan.collectives[0], 600)):
        text = repr(thing)
        assert len(text) <= most, text
        assert "\n" not in text
        assert " at 0x" not in text
    assert "data=4, model=2" in repr(plan)
    assert "batch: data" in repr(plan)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("batch: data; embed: data", ["data parallel", "FSDP"]),
        ("embed: data; batch: data", ["", "data parallel"]),  # activations are sharded along `embed`: not FSDP
        ("batch: data; opt.embed: data", ["data parallel", "ZeRO-1"]),
        ("batch: data; mlp: model; seq: model", ["data parallel", "tensor parallel", "sequence parallel"]),
        ("batch: data; seq: context", ["data parallel", "context parallel"]),
        ("experts: expert; batch: data+expert", ["expert parallel", "data parallel"]),
        ("batch: data; embed: model; layers: data; mlp: none", ["data parallel", "", "", ""]),
    ],
)
def test_the_parallelism_of_a_rule(layout, names):
    rules = mp.Layout(layout).rules
    assert [parallelism(rule, rules[:k]) for k, rule in enumerate(rules)] == names


def test_plans_for_gpus_have_the_measured_ratios(pytestconfig):
    table = (pytestconfig.rootpath / "benchmarks/results/device.md").read_text()
    rows = re.findall(r"\| (?:llama|moe) \| (?:shard_map|jit) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", table)
    ratios = [float(measured) / float(planned) for measured, planned in rows]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == MEASURED_GPU_STEPS
    table = (pytestconfig.rootpath / "benchmarks/results/published.md").read_text()
    (ratio,) = re.findall(r"\| llama2_7b, h100:8 \|.*\| ([\d.]+) \| [\d.]+ GiB \|", table)
    assert round(1 / float(ratio), 2) == PUBLISHED_GPU_STEP
    rows = re.findall(r"\| llama3_\d+b, (?:\d+x )?h100:8 \|.*\| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ GiB \|", table)
    ratios = [float(measured) / float(planned) for measured, planned in rows]
    assert (round(min(ratios), 2), round(max(ratios), 2)) == TORCHTITAN_GPU_STEPS
    gpu, tpu = (str(lab_program.planned("data=8", "batch: data", topology)) for topology in ("h100:8", "v5e:2x4"))
    text = "measured steps took 1.0 to 1.03 times as long as planned on one H200, 1.14 times on eight H100s (MaxText, by NVIDIA), "
    text += "1.55 to 1.76 times on H100s limited to 500 W (torchtitan, in PyTorch)"
    assert (text in " ".join(gpu.split()), text in " ".join(tpu.split())) == (True, False)


@pytest.mark.parametrize(("seq", "extra"), [("", ""), ("; seq?: model", ", split over model")])
def test_tokens_that_a_step_shifts_by_one_have_the_size_of_the_activations(seq, extra):
    """The optional rule does not divide the 17 tokens of a sequence, and does divide the 16 of which a step predicts the next."""

    def loss(table, tokens):
        x = jnp.tanh(table[tokens[:, :-1]])
        return jnp.mean(x @ table.T * jnp.tanh(x).sum())

    table, tokens = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((8, 17), jnp.int32)
    dims = {"table": "vocab embed", "tokens": "batch seq"}
    plan = mp.plan(loss, table, tokens, mesh="data=2, model=4", layout=f"batch: data{seq}", dims=dims)
    assert f"inputs    batch 8 × seq 17 (16 in activations{extra})\n" in str(plan)
    found = mp.search(
        loss, table, tokens, topology="v5e:2x4", dims=dims, layouts=["batch: data; seq?: model"], max_axes=2
    )
    assert found.rows
    assert not [row.undivided for row in found.rows if "seq" in row.undivided]

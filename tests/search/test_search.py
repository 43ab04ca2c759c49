"""The best layout: answers that are known, figures that are plans', bad input."""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import meshpar as mp
from meshpar._src.entry.cli_target import load_target
from meshpar._src.entry.jitted import Jitted
from meshpar._src.hardware.topology import parse_topology
from meshpar._src.mesh import parse_mesh
from meshpar._src.plan.assignment import AxisAssignment
from meshpar._src.search.evaluation import Evaluation, Settings
from meshpar._src.search.result import MAX_TERMINAL_ROWS
from meshpar._src.search.row import Row
from meshpar._src.search.selection import Candidate, _choice, one_per_kind
from meshpar._src.search.space import Point, Space, meshes

OPTIMIZER = optax.adam(1e-3)
V5E = parse_topology("v5e:4x4").chip.per_device().hbm


def weight(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def train_step(state, tokens):
    """A table, one block, a head."""

    def loss(p):
        x = p["table"][tokens]
        x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        return optax.softmax_cross_entropy_with_integer_labels((x @ p["head"]).astype(jnp.float32), tokens).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


DIMS = {
    "state/*/table": "vocab embed",
    "state/*/head": "embed vocab",
    "state/*/up": "embed mlp",
    "state/*/down": "mlp embed",
    "tokens": "batch seq",
}


def model(batch, seq=1024, embed=4096, mlp=16384, vocab=1024):
    """Arguments of the step, of shapes alone."""
    shapes = {"table": (vocab, embed), "head": (embed, vocab), "up": (embed, mlp), "down": (mlp, embed)}
    params = {name: weight(*shape) for name, shape in shapes.items()}
    state = {"params": params, "opt_state": jax.eval_shape(OPTIMIZER.init, params)}
    return state, weight(batch, seq, dtype=jnp.int32)


def space_of(plan, fixed="", forbid=()):
    return Space.of(plan.program, meshes(16), mp.Layout(fixed), forbid)


def planned(batch=64, layout="", **options):
    options = {"mesh": "data=4, model=4", "topology": "v5e:4x4", "lowering": "shard_map", **options}
    return mp.plan(train_step, *model(batch), layout=layout, dims=DIMS, **options)


@pytest.fixture(scope="module")
def space():
    return space_of(planned(mesh="data=16"))


@functools.cache
def found(topology="v5e:4x4", batch=64, options=(), **sizes):
    options = {"max_plans": 120, "max_axes": 2, **dict(options)}
    return mp.search(
        train_step, *model(batch, **sizes), topology=topology, dims=DIMS, donate_argnames="state", **options
    )


def test_a_product_whose_sizes_divide_in_one_way_only():
    args, options = (weight(10, 5), weight(5, 20)), {"dims": {"x": "a b", "y": "b c"}, "objective": "memory"}
    got = mp.search(lambda x, y: x @ y, *args, topology="v5e:4x2", mesh="four=4, two=2", **options)
    assert {str(r) for r in mp.Layout(got.best.layout).rules} == {"a: two", "c: four"}


@pytest.mark.filterwarnings("ignore::meshpar.errors.TorusWarning")
def test_figures_are_those_of_the_plan():
    got = found()
    for row in got.rows[:5]:
        plan = planned(mesh=row.mesh, layout=row.layout, lowering="auto", overlap="auto", donate_argnames="state")
        assert (row.seconds, row.peak, row.sent) == (plan.seconds, plan.memory.peak, plan.bytes_sent)
    assert got.plan().seconds == got.best.seconds


def test_nothing_planned_fits_and_is_shorter_by_more_than_a_tie():
    for batch in (64, 512):
        got = found(batch=batch)
        assert got.fits
        assert got.best.seconds <= 1.03 * min(r.seconds for r in got.rows if r.fits)
        assert got.best.seconds <= 1.002 * min(r.seconds for r in got.rows if r.fits and r.name)
        assert {"data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor"} <= {r.name for r in got.rows}
        assert got.front
        for a, b in itertools.product(got.rows, got.front):
            assert not (a.seconds < b.seconds and a.peak < b.peak)


@pytest.mark.filterwarnings("ignore::meshpar.errors.TorusWarning")
def test_it_is_as_good_as_planning_every_layout():
    """All axes for batch, embed and mlp, in every order of the rules."""
    choices = ["", "data", "model", "data+model"]
    base = planned(batch=4, donate_argnames="state")
    least: dict[object, float] = {}
    for dims in itertools.permutations(["batch", "embed", "mlp"]):
        for axes in itertools.product(choices, repeat=3):
            layout = "; ".join(f"{d}?: {a}" for d, a in zip(dims, axes, strict=True) if a)
            answers = AxisAssignment(base.program, mp.Layout(layout), dict(base.sizes)).axes
            if answers not in least:
                least[answers] = base.replan(layout=layout).seconds or 0.0
    got = found(batch=4, options=(("mesh", "data=4, model=4"), ("forbid", "seq, vocab")))
    assert len(least) > 30
    assert got.best.seconds <= 1.03 * min(least.values())


def test_schemes_on_two_slices(space):
    """HSDP gathers weights within a slice; schemes of one axis are sharded over all devices."""
    points = {name: point.layout for name, point in space.presets((("slice", 2), ("data", 8)))}
    assert points["hsdp"] == "batch?: slice+data; embed?: data"
    assert points["fsdp"] == "batch?, embed?: slice+data"
    assert points["fsdp_tensor"].startswith("batch?: slice; ")
    points = {name: point.layout for name, point in space.presets((("slice", 2), ("data", 4), ("model", 2)))}
    assert points["fsdp_tensor"] == "batch?: slice+data; mlp?, vocab?: model; embed?: slice+data"
    assert "hsdp" not in points


def test_a_small_model_on_few_chips_is_data_parallel():
    """Nothing but ZeRO-1 and FSDP, which are shorter by what their updates read less, is chosen before it, by less than a tie."""
    got = found(topology="h100:4", batch=64, embed=256, mlp=1024)
    parallel = next(r for r in got.rows if r.name == "data_parallel")
    assert parallel.seconds <= 1.03 * got.best.seconds
    assert str(got.best.layout) in ("batch: data", "batch, opt.embed: data", "batch, embed: data")
    assert got.best.mesh == "data=4"


def test_a_model_that_fits_only_with_split_optimizer_state():
    """Weights of 1.1 GB a device fit whole; with their moments they do not."""
    sizes = {"batch": 64, "embed": 8192, "mlp": 32768}
    whole = found(**sizes, options=(("memory_fraction", 1.0), ("max_plans", 20)))
    replicated = next(r for r in whole.rows if r.name == "data_parallel")
    margin = 0.9 * replicated.peak / V5E
    got = found(**sizes, options=(("memory_fraction", margin), ("forbid", "mlp, vocab")))
    assert got.fits
    assert not next(r for r in got.rows if r.name == "data_parallel").fits
    assert got.best.peak <= margin * V5E


def test_fsdp_against_megatron_on_both_sides_of_the_tokens_a_chip():
    """Gathered weights cost the same whatever the batch is, reduced activations grow with it."""
    for batch, first, second in ((4, "tensor_parallel", "fsdp"), (1024, "fsdp", "tensor_parallel")):
        got = found(batch=batch, options=(("max_plans", 40),))
        least = {name: min(r.seconds for r in got.rows if r.name == name) for name in (first, second)}
        assert least[first] < least[second]


def test_nothing_fits_names_the_slice_on_which_it_would():
    options = (("memory_fraction", 0.2), ("max_plans", 12))
    got = found(topology="v5e:2x2", batch=64, embed=8192, mlp=32768, options=options)
    assert not got.fits
    assert got.best.peak <= 1.03 * min(r.peak for r in got.rows)
    assert str(got).startswith("NOTHING FITS  the smallest peak is")
    assert "GiB of saved activations; this" in " ".join(str(got).split())
    topology, mesh = got.larger
    assert f"this layout fits on {topology} with the mesh {mesh}" in str(got)
    assert "ended early" in str(got)
    assert json.loads(got.to_json())["larger"] == [topology, mesh]
    there = got._bases[""].replan(layout=got.best.layout, mesh=mesh, topology=topology)
    assert there.memory.peak <= got.usable < got.best.peak
    assert found().larger is None


@pytest.mark.filterwarnings("ignore::meshpar.errors.TorusWarning")
def test_equal_answers_to_the_claims_are_equal_plans():
    base = planned(overlap="auto", lowering="auto")
    rng = random.Random(0)
    by_answers = {}
    dims = ["batch", "seq", "embed", "mlp", "vocab"]
    for _ in range(60):
        rng.shuffle(dims)
        rules = [
            f"{rng.choice(['', '', 'opt.'])}{d}?: {'+'.join(rng.sample(['data', 'model'], rng.randint(1, 2)))}"
            for d in dims[: rng.randint(0, 5)]
        ]
        layout = "; ".join(rules)
        plan = base.replan(layout=layout)
        figures = plan.seconds, plan.memory.peak, plan.bytes_sent
        assignment = AxisAssignment(base.program, mp.Layout(layout), dict(base.sizes))
        assert by_answers.setdefault((assignment.named_scopes, assignment.axes), figures) == figures
    assert 10 < len(by_answers) < 60


def test_weights_and_optimizer_state_have_rules_of_their_own():
    dims = space_of(planned(mesh="data=16"), "params.mlp: data", ["vocab"]).dims
    scopes = {scope: {d for d, s in dims if s == scope} for scope in (None, "opt", "params")}
    assert scopes == {None: {"batch", "seq", "embed", "mlp"}, "opt": {"embed", "mlp"}, "params": {"embed"}}


def test_the_best_candidate_without_rules_is_said_to_be_unsharded():
    got = found()
    row = replace(got.rows[0], layout="")
    got = replace(got, best=row, rows=(row, *got.rows[1:]))
    assert all("(nothing sharded)" in text for text in (repr(got), str(got), got._repr_html_()))


def test_the_report_says_what_became_of_the_plans_and_why_rows_are_not_chosen():
    got = found(batch=8)
    text = str(got)
    (counts,) = re.findall(r"search v5e:4x4: (\d+) layouts?: (.*?);", " ".join(text.split()))
    parts = [int(part.split()[0]) for part in counts[1].split(", ") if part[0].isdigit()]
    assert int(counts[0]) == got.planned == sum(parts)
    default = next(r for r in got.rows if r.name == "fsdp")
    assert default.undivided == "batch of 8 is not divisible by 16"
    sound = [r for r in got.rows if r.name and r.fits and not r.undivided and r.name != "fsdp"]
    known = min(sound, key=lambda r: r.seconds)
    faster = f"{known.seconds / got.best.seconds:.3g} × as fast as the best known scheme, {known.name} ("
    assert got._speedup.startswith(faster) or known == got.best
    divides = replace(default, undivided="", fits=True)
    got_with = replace(got, rows=tuple(divides if r == default else r for r in got.rows))
    ratio = default.seconds / got.best.seconds
    assert got_with._speedup.startswith(f"{ratio:.3g} × as fast as the default layout, fsdp (")
    alike = got._alike
    assert all(got._why_not(r).startswith("as fast, but less simple") for r in alike)
    shown = got._listed(MAX_TERMINAL_ROWS, alike)
    assert not set(alike) & set(shown)
    hidden = len(got.rows) - len(shown) - len(alike)
    listed = f" of the {len(got.points)} plans are listed; the page has {len(got.rows)}"
    assert (listed in " ".join(text.split())) == (hidden > 0 or bool(alike))
    plain = replace(got.best, layout="batch, embed?: data", seconds=1.001 * got.best.seconds, name="", front=False)
    folded = replace(got, rows=(*got.rows, plain))
    assert folded._alike == [*alike, plain]
    assert f"{len(alike) + 1} of them as good as ★" in " ".join(str(folded).split())
    for row in got.rows:
        assert row.mfu == pytest.approx(got.plan(row).time.mfu, rel=1e-6)
    less = replace(got.best, layout="batch: data", seconds=1.001 * got.best.seconds)
    simpler = less.complexity < got.best.complexity
    assert got._why_not(less) == "as fast" + ", but less simple" * (not simpler)
    assert got._why_not(replace(less, fits=False, peak=got.usable + 2**30)) == "too large by 1.00 GiB"
    assert got._why_not(got.best) == ""


def test_fixed_rules_come_first_and_forbidden_dims_are_whole():
    """A layout of the user's is among the rows."""
    own = "seq: model; batch: data; vocab: model"
    got = found(options=(("fixed", "seq: model"), ("forbid", "mlp"), ("layouts", (own,)), ("max_plans", 20)))
    for row in got.rows:
        rules = mp.Layout(row.layout).rules
        assert str(rules[0]) == "seq: model"
        assert all(r.dim != "mlp" for r in rules)
    assert any(r.name == "yours" and r.layout == own for r in got.rows)


def test_own_layouts_that_cannot_be_planned_are_said():
    illegal, elsewhere = "batch: data; embed: model", "batch: rows"
    got = found(batch=65, options=(("layouts", (illegal, elsewhere)), ("max_plans", 20)))
    assert len(got.refused) == 2
    assert got.refused[0].startswith(f"`{illegal}` could not be planned: tokens: dim `batch` of size 65")
    assert got.refused[1] == f"`{elsewhere}` could not be planned: no candidate mesh has exactly its axes"
    assert "no candidate mesh" in str(got)
    with pytest.raises(mp.errors.UnsupportedError, match="reads rules in order"):
        found(options=(("layouts", (mp.Layout("batch: data", resolve="cost"),)),))


def test_why_says_what_a_layout_costs():
    got = found()
    assert "longer than the best" in got.why("batch: data; mlp: model", "data=2, model=8")
    assert "all-" in got.why("mlp: data", "data=16")
    assert got.why("batch: nowhere").startswith("illegal: rule `batch: nowhere` names axis `nowhere`")
    assert 'found.why(layout, mesh="nowhere=…")' in got.why("batch: nowhere")
    alone = replace(got, best=next(row for row in got.rows if row.mesh == "data=16"))
    mesh = next(row.mesh for row in got.rows if {"data", "model"} <= parse_mesh(row.mesh).keys())
    assert alone.why("batch: data; mlp: model").startswith(f"on the mesh {mesh}:\n")
    big = found(batch=64, embed=16384, mlp=65536, options=(("max_plans", 8),))
    assert "does not fit" in big.why("batch: data", "data=16")
    assert "optimizer state" in big.why("batch: data", "data=16")


@pytest.mark.parametrize(("name", "note"), [("act_batch", True), ("batch", False)])
def test_a_search_of_a_program_without_a_dim_called_batch_says_so(name, note):
    args, dims = (weight(256, 64), weight(512, 256)), {"w": "embed mlp", "x": f"{name} embed"}
    got = mp.search(lambda w, x: x @ w, *args, topology="v5e:2x2", mesh="data=4", max_plans=4, dims=dims)
    says = f"no dim is called `batch`, which the known schemes shard; the batch arguments have `{name}`"
    assert (says in str(got)) == note


def test_interrupted_or_out_of_time_it_has_the_best_so_far():
    told = []

    def stop(text):
        told.append(text)
        if len(told) == 6:  # the first is that it begins
            raise KeyboardInterrupt

    got = mp.search(train_step, *model(64), topology="v5e:4x4", dims=DIMS, progress=stop)
    assert (got.ended, got.planned) == ("interrupted", 5)
    few = found(options=(("max_plans", 7),))
    assert (few.planned, few.ended) == (7, "stopped at 7 plans")
    short = found(options=(("time_limit", 1e-6),))
    assert (short.planned, short.ended) == (1, "stopped at the time limit")


def test_what_the_compiler_refuses_is_passed_over(monkeypatch):
    asked = []

    def compile(step, *args, mesh, effort, **options):
        asked.append((mesh, str(step.layout), effort))
        if len(asked) == 1:
            raise mp.errors.CompilerError("no")
        memory = type("Memory", (), {"peak": 1e9})
        exposed = type("Exposed", (), {"schedule": 0.25})
        return type("Compiled", (), {"memory": memory, "bytes_sent": 2e9, "exposed": exposed})

    monkeypatch.setattr(Jitted, "compile", compile)
    got = mp.search(train_step, *model(64), topology="v5e:4x4", dims=DIMS, verify=2, max_plans=40)
    assert [effort for *_, effort in asked] == ["full", "full", "fast"]
    assert got.rows[0].compiled == "refused: no"
    assert (got.best.mesh, got.best.layout) == asked[1][:2]
    assert got.best.compiled == "compiled: 0.93 GiB, sends 2 GB, 250 ms by its schedule"
    assert got.rows[2].compiled == "compiled: 0.93 GiB, sends 2 GB"


def test_programs_that_vary_are_chosen_from():
    """In four microbatches the activations need a quarter of the memory."""

    def loss(p, tokens):
        x = p["table"][tokens]
        x = x + jax.nn.relu(x @ p["up"]) @ p["down"]
        return optax.softmax_cross_entropy_with_integer_labels((x @ p["head"]).astype(jnp.float32), tokens).mean()

    def step(params, tokens, pieces=1):
        gradients = jax.value_and_grad(loss)
        return (mp.train.accumulate_gradients(gradients, pieces) if pieces > 1 else gradients)(params, tokens)

    params, tokens = model(64)[0]["params"], model(64)[1]
    dims = {k.replace("state/*/", "params/"): v for k, v in DIMS.items()}
    where = {"topology": "v5e:4x4", "dims": dims}
    options = {**where, "mesh": "data=4, model=4", "max_plans": 30}
    vary = {"pieces": [1, 4], "overlap": ["auto", "off"]}
    got = mp.search(step, params, tokens, choices=vary, objective="memory", **options)
    assert {r.variant for r in got.rows} == {f"pieces={n}, overlap={m}" for n in (1, 4) for m in ("auto", "off")}
    assert got.best.variant.startswith("pieces=4")
    for row in got.rows[:6]:
        pieces, mode = (p.split("=")[1] for p in row.variant.split(", "))
        alone = functools.partial(step, pieces=int(pieces))
        how: Any = {**where, "overlap": mode}
        plan = mp.plan(alone, params, tokens, mesh=row.mesh, layout=row.layout, lowering="shard_map", **how)
        assert (row.seconds, row.peak) == (plan.seconds, plan.memory.peak)
    text = " ".join(str(got).split())
    assert re.search(r"search v5e:4x4: \d+ layouts of 4 programs: .*; stopped at 30 plans of a program", text)
    assert f"with {got.best.variant}" in text
    other = got.why(got.best.layout, variant="pieces=1, overlap=off")
    assert "longer" in other or "as good" in other
    alone = mp.search({"a": step}, params, tokens, **options)
    assert {r.variant for r in alone.rows} == {"a"}
    with pytest.raises(mp.errors.UnsupportedError, match="was not searched"):
        got.why("batch: data", variant="pieces=2")


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_hash_seed():
    """Of another process it is another one than here, where it is random."""
    code = "import test_search as t; print(t.found(batch=16, options=(('max_plans', 8),)).to_json())"
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1])])
    env = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.splitlines()[-1] == found(batch=16, options=(("max_plans", 8),)).to_json()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"objective": "bytes"}, mp.errors.UnsupportedError, "objectives there are: memory, time"),
        ({"verify": -1}, mp.errors.UnsupportedError, "verify=-1: it is at least 0"),
        ({"memory_fraction": 0.0}, mp.errors.UnsupportedError, "memory_fraction=0.0"),
        ({"max_plans": 0}, mp.errors.UnsupportedError, "max_plans=0: it is at least 1"),
        ({"max_axes": 0}, mp.errors.UnsupportedError, "max_axes=0"),
        ({"time_limit": -1.0}, mp.errors.UnsupportedError, "time_limit=-1.0"),
        ({"fixed": "batch: data", "forbid": "seq, batch"}, mp.errors.UnsupportedError, "forbid='batch'"),
        ({"forbid": "batsh"}, mp.errors.UnknownDimError, "no such dim"),
        ({"fixed": "batsh: data"}, mp.errors.UnknownDimError, "batsh"),
        ({"fixed": "batch: rows"}, mp.errors.MeshError, "no candidate mesh has"),
        ({"topology": "v5e:3x5"}, mp.errors.MeshError, "v5e"),
        ({"mesh": "data=3"}, mp.errors.MeshError, "16"),
    ],
)
def test_bad_input(options, error, says):
    with pytest.raises(error, match=says):
        mp.search(train_step, *model(64), **{"topology": "v5e:4x4", "dims": DIMS, **options})


def test_axes_that_are_used_as_one_are_one_candidate():
    where = {"topology": "v5e:16x16"}
    base = planned(batch=256, mesh="data=256", overlap="auto", **where)
    evaluate = Evaluation(Settings("v5e:16x16"), "", base, space_of(base), 400)

    def row(layout, **sizes):
        return evaluate.plan(Point(tuple(sizes.items()), mp.Layout(layout).rules))

    whole = row("batch?, embed?: data+model", data=16, model=16)
    alike = row("batch?, embed?: data+model+third", data=16, model=4, third=4)
    assert evaluate.planned == 1
    assert (alike.seconds, alike.peak, alike.mesh) == (whole.seconds, whole.peak, "data=16, model=4, third=4")
    again = base.replan(layout=alike.layout, mesh=alike.mesh, **where)
    assert (again.seconds, again.memory.peak) == pytest.approx((alike.seconds, alike.peak), rel=1e-12)
    row("batch?, embed?: model+data", data=16, model=16)
    row("batch?: data; embed?: data+model", data=16, model=16)
    row("batch?: data+third; embed?: data+third", data=16, model=4, third=4)
    assert evaluate.planned == 4


@pytest.mark.filterwarnings("ignore::meshpar.errors.TorusWarning")
def test_rows_are_distinct_choices_that_can_be_planned_as_printed():
    got = found(options=(("max_axes", 3), ("max_plans", 60)))
    base = planned(mesh="data=16", lowering="auto", donate_argnames="state")
    assert len({(r.mesh, r.layout) for r in got.rows}) == len(got.rows)
    for row in got.rows:
        plan = base.replan(mesh=row.mesh, layout=row.layout)
        assert (plan.seconds, plan.memory.peak) == pytest.approx((row.seconds, row.peak), rel=1e-12)
        axes = dict.fromkeys(a for r in mp.Layout(row.layout).rules if r.dim == "batch" for a in r.axes)
        assert not axes or "data" in axes, row
        assert "third" not in row.mesh
        for rule in mp.Layout(row.layout).rules:
            if rule.optional:  # the mark is needed
                with pytest.raises(mp.errors.MeshparError):
                    base.replan(mesh=row.mesh, layout=row.layout.replace(f"{rule.dim}?", rule.dim))


def test_rows_of_one_kind_and_cost_are_one_row():
    def candidate(layout, seconds, peak=1.0, name="", **sizes):
        rules = mp.Layout(layout).rules
        row = Row(", ".join(sizes), layout, seconds, peak, 0.0, True, name)
        return Candidate(row, None, Point(tuple(sizes.items()), rules))

    best = candidate("batch: data; mlp: model", 1.0, data=4, model=4)
    same = candidate("batch: third; mlp: data+model", 1.005, data=2, model=2, third=4)
    named = candidate("batch: data; mlp: model", 1.005, name="tensor_parallel", data=2, model=8)
    other_kind = candidate("batch: data; embed: model", 1.0, data=4, model=4)
    slower, slower_too = (
        candidate("batch: data; mlp: model", t, **s)
        for t, s in ((1.1, {"data": 8, "model": 1, "third": 2}), (1.105, {"data": 8, "model": 2}))
    )
    smaller = candidate("batch: data; mlp: model", 1.0, peak=0.5, data=4, model=4)
    known, far = (candidate("batch: data; mlp: model", t, name="megatron", data=8, model=4) for t in (1.104, 1.109))
    shown = one_per_kind([best, same, named, other_kind, slower, slower_too, smaller])
    assert shown == [best, named, other_kind, slower, smaller]
    assert one_per_kind([best, slower, known]) == [best, known]  # as long: the known scheme in its place
    assert one_per_kind([best, slower, far]) == [best, slower, far]


@pytest.mark.parametrize("values", [2, "full", (), [], {1, 2}, None])
def test_choices_that_are_no_list_are_refused(values):
    bad: Any = {"remat": values}
    with pytest.raises(mp.errors.UnsupportedError, match="it is a list of values"):
        mp.search(lambda x, remat: x, jnp.ones(8), choices=bad, topology="v5e:2x2")


def test_a_choice_is_not_dominated_by_a_faster_and_smaller_candidate():
    """Of candidates within 3 % the simplest one, unless memory is scarce and another one is faster and needs much less of it."""

    def choice(peak, usable=150.0):
        evaluation: Any = SimpleNamespace(objective="time", usable=usable)
        simple = Row("data=8", "batch: data", 1.02, 100.0, 0.0, True)
        return _choice(
            evaluation, [Row("data=8", "batch: data; embed: data", 1.0, peak, 0.0, True), simple]
        ).complexity[0]

    assert choice(peak=95.0) == 1
    assert choice(peak=80.0) == 2
    assert choice(peak=80.0, usable=200.0) == 1


@pytest.mark.slow
def test_a_search_finds_no_worse_layout_than_a_known_one():
    """A layout of a mixture of experts that descents from schemes for dense models do not find."""
    examples = Path(__file__).parents[2] / "examples"
    target = load_target(f"{examples / 'mixtral.py'}:mixtral_8x7b", {"batch": 64})
    where = {"topology": "v5p:8x8x8", "dims": target.dims}
    found = mp.search(target.step, *target.args, **where)
    plan = mp.plan(target.step, *target.args, mesh="data=8, expert=8, model=8", layout="expert_tensor", **where)
    assert found.best.seconds <= 1.001 * plan.time.seconds


@pytest.mark.slow
def test_a_descent_passes_a_candidate_that_is_no_better():
    """`expert` in place of `mlp`, for a small batch of Mixtral on meshes with at most two axes."""
    examples = Path(__file__).parents[2] / "examples"
    target = load_target(f"{examples / 'mixtral.py'}:mixtral_8x7b", {"batch": 64, "layers": 2})
    found = mp.search(target.step, *target.args, topology="v5p:8x8x8", dims=target.dims, max_axes=2)
    (scheme,) = [row for row in found.rows if row.name == "fsdp_tensor"]
    assert found.best.seconds < 0.97 * scheme.seconds


def test_heads_are_exchanged_inside_of_a_ring_where_they_do_not_divide_over_all_devices():
    """24 heads and 32K tokens over 32 chips: Ulysses over 8 of them, inside of a ring over 4."""
    q, k = (jax.ShapeDtypeStruct((1, 32768, heads, 128), jnp.bfloat16) for heads in (24, 8))
    dims = {"q": "batch seq heads head_dim", **dict.fromkeys("kv", "batch seq kv_heads head_dim")}
    attend, where = functools.partial(mp.layers.attention, causal=True), {"topology": "v5p:2x4x4", "dims": dims}
    found = mp.search(attend, q, k, k, mesh="ring=4, uly=8", forbid="heads, kv_heads, head_dim", max_plans=20, **where)
    plan = found.plan()
    assert found.best.layout == "seq: ring+uly"
    assert {c.op for c in plan.collectives} == {"all-to-all", "collective-permute"}
    for strategy in (None, "ring"):
        fn = functools.partial(attend, strategy=strategy)
        assert plan.seconds < 0.95 * mp.plan(fn, q, k, k, mesh="context=32", layout="seq: context", **where).seconds

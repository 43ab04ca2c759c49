"""The timeline of a step: its spans add up to the step's seconds, in loops and pipelines; the trace has all of them."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import lab_program
import pytest

import meshpar as mp
from meshpar._src.report.facts import kernel_seconds
from meshpar._src.report.timeline import COMPUTE, LOOP, PHASES, step_bounds, timeline
from meshpar.errors import UnsupportedError

FSDP, TENSOR = "batch: data; embed: data", "batch: data; mlp: model; embed: data"


def batched(layout, topology, mesh="data=4, model=4", **options):
    return lab_program.planned(mesh, layout, topology, lab_program.batch_of(4096), **options)


@pytest.fixture(
    scope="module",
    params=["fsdp", "asynchronous", "rings", "pipeline", "gpu", "slices", "one device", "host"],
)
def plan(request):
    match request.param:
        case "fsdp":
            return batched(TENSOR, "v5e:4x4", overlap="xla")
        case "asynchronous":
            return batched(TENSOR, "v5p:2x2x4", overlap="xla", options="auto")
        case "rings":
            return batched(TENSOR, "v5p:4x4x4", "data=16, model=4", overlap="ring")
        case "pipeline":
            return lab_program.pipelined(stages=4, microbatches=8)
        case "gpu":
            return batched(TENSOR, "2x h100:8")
        case "slices":
            return batched(FSDP, "2x v5e:2x4")
        case "one device":
            return batched("", "v5e:1x1", "data=1")
    return batched("embed: data", "v5e:4x4")


def test_the_spans_add_up_to_the_step(plan):
    """Kernels and the communication that they wait for; no two kernels of a run at once, and every loop has its iterations."""
    line = timeline(plan)
    assert line.seconds == plan.seconds
    spans = list(line.walk())
    kernels = math.fsum(s.seconds * n for s, n in spans if s.lane == COMPUTE)
    assert kernels == pytest.approx(kernel_seconds(plan.time))
    exposed = math.fsum(s.exposed * n for s, n in spans)
    assert kernels + exposed == pytest.approx(plan.seconds, rel=1e-9)
    assert all(-1e-12 <= s.exposed <= s.seconds * (1 + 1e-9) for s, _ in spans)
    for run in (line, *(s.body for s, _ in spans if s.body is not None)):
        busy = [s for s in run.spans if s.lane in (COMPUTE, LOOP)]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(busy))
        assert max(s.end for s in run.spans) <= run.seconds * (1 + 1e-9)
    assert all(s.seconds == pytest.approx(s.trips * s.body.seconds) for s, _ in spans if s.body)
    bounds = step_bounds(plan)
    assert math.fsum(n for _, n in bounds) == pytest.approx(plan.seconds)
    assert bounds == sorted(bounds, key=lambda part: -part[1])


def test_the_trace_has_every_run_in_its_lane(plan, tmp_path):
    """Against a walk of its own through the timeline; events of a thread are nested or disjoint, else a viewer drops them."""
    plan.save(tmp_path / "plan.perfetto.json")
    events = json.loads((tmp_path / "plan.perfetto.json").read_text("utf8"))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    runs = [e for e in events if e["ph"] == "X"]
    spans = list(timeline(plan).walk())
    assert len(runs) == sum(n for _, n in spans)
    assert max(e["ts"] + e["dur"] for e in runs) == pytest.approx(1e6 * plan.seconds, abs=2e-3)
    for lane in {s.lane for s, _ in spans}:
        mine = [e for e in runs if lanes[e["tid"]].split(" (")[0] == lane]
        want = math.fsum(s.seconds * n for s, n in spans if s.lane == lane)
        assert math.fsum(e["dur"] for e in mine) == pytest.approx(1e6 * want, abs=1e-3 * len(mine))
    assert {e["cat"] for e in runs} <= set(PHASES)
    assert any(e["args"].get("dims") for e in runs)
    sent = [e for e in runs if e["args"].get("axes")]
    assert all(e["args"]["cause"] for e in sent)
    for thread in lanes:
        mine = sorted((e for e in runs if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
        if lanes[thread] != LOOP:
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(mine))


def test_the_passes_of_a_train_step_follow_each_other():
    line = timeline(batched(TENSOR, "v5e:4x4"))
    kernels = sorted((start, s.phase) for s, start in line.events() if s.lane == COMPUTE)
    assert [phase for phase, _ in itertools.groupby(phase for _, phase in kernels)] == list(PHASES)
    forward = timeline(mp.plan(lambda w, x: x @ w, lab_program.STATE["w"], lab_program.X, mesh="data=4", topology="v5e:2x2",
                               layout="batch: data", dims={"w": "layers embed mlp", "x": "batch embed"}))  # fmt: skip
    assert {s.phase for s, _ in forward.walk()} == {"forward"}


def test_what_bounds_a_step():
    bound, seconds = step_bounds(batched("", "v5e:1x1", "data=1"))[0]
    ops = batched("", "v5e:1x1", "data=1").time.ops
    by_traffic = sum(o.seconds * o.count for o in ops if o.traffic_seconds >= max(o.matmul_seconds, o.vector_seconds))
    assert (bound, seconds) == ("memory traffic", pytest.approx(by_traffic))
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    where = {"mesh": "data=1", "topology": "v5e:1x1", "layout": "", "dims": {"x": "batch embed", "w": "embed mlp"}}
    square = mp.plan(lambda x, w: x @ w, x, x, **where)
    assert step_bounds(square) == [("matmuls", pytest.approx(square.seconds))]
    sent = dict(step_bounds(batched("batch: data; mlp: model", "v5e:4x4")))
    assert sent["exposed communication over model"] > 0
    plan = lab_program.pipelined(stages=4, microbatches=8)
    in_loops = sum(o.seconds * o.count for o in plan.time.ops if o.count > 1)
    bubble = dict(step_bounds(plan))["pipeline bubble"]
    assert bubble == pytest.approx(plan.pipeline.bubble * in_loops)
    schedule = plan.pipeline.schedule
    own = [schedule.slot(i, 0, schedule.starts[i] + k) for i in range(schedule.loops) for k in range(schedule.slots(i))]
    said = f"idle in {own.count(None)} of its {len(own)} slots, {100 * own.count(None) / len(own):.1f} % of the layers' time, "
    assert said + f"{100 * bubble / plan.seconds:.0f} % of the step" in " ".join(str(plan).split())


def test_without_a_chip_there_is_no_timeline(tmp_path):
    plan = batched(FSDP, None)
    assert timeline(plan) is None
    assert step_bounds(plan) == []
    with pytest.raises(UnsupportedError, match="needs times"):
        plan.save(tmp_path / "plan.perfetto.json")
    assert not list(tmp_path.iterdir())

"""Plans compared with traces: of steps that ran on CPU devices, and of a trace with the events of a TPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import hlo

import meshpar as mp
from meshpar._src.verify.hlo import collectives
from meshpar._src.verify.profile import planned_name
from meshpar._src.verify.trace import read_trace
from meshpar.errors import UnsupportedError

LAYERS, RUNS, DEVICES = 2, 2, 4
DIMS = {"params/up": "layers embed mlp", "params/down": "layers mlp embed", "x": "batch embed"}
PARAMS = {"up": jnp.ones((LAYERS, 32, 64)) / 32, "down": jnp.ones((LAYERS, 64, 32)) / 64}
X = jnp.ones((16, 32))


def train_step(params, x):
    def loss_of(params):
        def layer(x, w):
            return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


LAYOUT = "batch: data; mlp: model; embed: data"


def sharded(layout=LAYOUT):
    return mp.jit(train_step, mesh="data=2, model=2", layout=layout, dims=DIMS)


def planned_for_tpu(layout=LAYOUT):
    options = {"mesh": "data=4, model=2", "topology": "v5e:2x4", "layout": layout, "dims": DIMS}
    return mp.plan(train_step, PARAMS, X, **options)


@pytest.mark.parametrize("layout", [LAYOUT, 'batch: data; "*/up".mlp: model'])
def test_compiled_collectives_carry_the_names_of_the_plan(layout):
    step = sharded(layout)
    plan = step.plan(PARAMS, X)
    names = set(map(plan.scope_name, plan.collectives))
    compiled = collectives(step.lower(PARAMS, X).compile().as_text())
    for name in names:
        kind = name.split()[0]
        assert any(c.op == kind and name in c.op_name for c in compiled), name
    for c in compiled:
        assert any(name in c.op_name for name in names), c.op_name


def test_names_have_kind_dims_and_rule():
    plan = sharded().plan(PARAMS, X)
    gathers = {f"all-gather {dims} | embed: data" for dims in ("embed mlp", "mlp embed")}
    scatters = {f"reduce-scatter {dims} | batch: data" for dims in ("embed mlp", "mlp embed")}
    reduces = {"all-reduce batch embed | mlp: model", "all-reduce | batch: data"}
    assert set(map(plan.scope_name, plan.collectives)) == gathers | scatters | reduces


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    step = sharded()
    state, _ = step(*step.put(PARAMS, X))
    jax.block_until_ready(state)
    with jax.profiler.trace(folder):
        for _ in range(RUNS):
            state, _ = step(state, X)
        jax.block_until_ready(state)
    plan = step.plan(PARAMS, X)
    return plan, folder, plan.compare(folder)


def test_trace_of_a_step(trace):
    plan, folder, report = trace
    assert report.runs == RUNS
    assert report.devices == DEVICES
    assert report.step.name == "jit_train_step"
    assert {m.name for m in report.collectives} == set(map(plan.scope_name, plan.collectives))
    assert not report.other
    for m in report.collectives:
        assert m.planned is None
        assert m.ratio is None
        assert 0 < m.measured < report.step.measured
    assert [(m.name, m.runs) for m in report.loops] == [
        ("loop over layers", LAYERS),
        ("loop over layers, backward pass", LAYERS),
    ]
    assert all(0 < m.measured < report.step.measured for m in report.loops)
    runs = {m.name: m.runs for m in report.collectives}
    assert runs["all-gather embed mlp | embed: data"] == 2 * LAYERS
    assert runs["all-reduce | batch: data"] == 1
    (program,) = [p for p in read_trace(folder) if p.name == "jit_train_step"]
    ops = program.module.instructions.items()
    gathers = [n for n, i in ops if "all-gather embed mlp" in i.op_name and i.opcode == "all-gather"]
    assert len(gathers) == 2  # forward and backward pass
    for name in gathers:
        assert sum(e.name == name for e in program.events) == RUNS * DEVICES * LAYERS  # runs, devices, layers
    assert all(e.end >= e.start for e in program.events)


def test_reports(trace, tmp_path):
    _, _, report = trace
    text = str(report)
    assert text.startswith(f"{RUNS} runs of the step on {DEVICES} devices")
    assert "all-gather embed mlp | embed: data" in text
    assert "loop over layers, backward pass" in text
    assert "mp.hardware.calibrate" in text  # which gives the planned times that this plan lacks
    for suffix in ("html", "json", "txt"):
        report.save(tmp_path / f"profile.{suffix}")
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["runs"] == RUNS
    assert {m["name"] for m in data["collectives"]} == {m.name for m in report.collectives}
    assert "all-gather embed mlp | embed: data" in (tmp_path / "profile.html").read_text()
    assert 'class="mp"' in report._repr_html_()
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        report.save(tmp_path / "profile.csv")


def test_other_traces(trace, tmp_path):
    plan, folder, _ = trace
    with pytest.raises(UnsupportedError, match="there is no trace"):
        plan.compare(tmp_path)
    other = sharded("batch: data; embed: model").plan(PARAMS, X)
    names = set(map(other.scope_name, other.collectives)) - set(map(plan.scope_name, plan.collectives))
    assert all(m.measured is None for m in other.compare(folder).collectives if m.name in names)
    tpu_trace(tmp_path, "copy.1 = f32[] copy(z)", [("%copy.1 = f32[] copy(%z)", 1000, 2000)])
    with pytest.raises(UnsupportedError, match="programs are jit_train_step"):
        plan.compare(tmp_path)


def varint(n):
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def tpu_trace(folder, instructions, events, reduction=""):
    """Write a trace of one TPU, which runs the program from 500 to 10,000 ns.

    Args:
      instructions: of the entry computation, as HLO text.
      events: (name, start, end in ns).
      reduction: op_name of the addition that all-reduces apply.
    """
    module = "jit_train_step(7)", 500, 10000
    text = f"""HloModule jit_train_step
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b), metadata={{op_name="{reduction}"}}
}}
cond {{
  s = (f32[]) parameter(0)
  ROOT r = pred[] constant(true)
}}
body {{
  ROOT s = (f32[]) parameter(0)
}}
ENTRY main {{
  p = f32[32,32] parameter(0)
  q = f32[4,32] parameter(1)
  z = f32[] parameter(2)
  t = (f32[]) tuple(z)
  {instructions}
  ROOT result = f32[] copy(z)
}}"""
    program = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    program = "".join(f"\\{byte:03o}" for byte in b"\n" + varint(len(program)) + program)
    names = {n: k for k, n in enumerate(dict.fromkeys([module[0], *(e[0] for e in events)]), 1)}

    def line(name, spans):
        made = (
            f"events {{ metadata_id: {names[n]} offset_ps: {start * 1000} duration_ps: {(end - start) * 1000} }}"
            for n, start, end in spans
        )
        return f'lines {{ name: "{name}" {" ".join(made)} }}'

    metadata = (f'event_metadata {{ key: {k} value {{ id: {k} name: "{n}" }} }}' for n, k in names.items())
    xspace = f"""planes {{
      name: "/host:metadata"
      event_metadata {{ key: 1 value {{ id: 1 name: "{module[0]}" stats {{ metadata_id: 1 bytes_value: "{program}" }} }} }}
    }}
    planes {{
      name: "/device:TPU:0" {line("XLA Modules", [module])} {line("XLA Ops", events)} {" ".join(metadata)}
    }}"""
    (folder / "vm.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(xspace))


def test_asynchronous_collectives_of_a_tpu(tmp_path):
    plan = planned_for_tpu()
    gather, total = "all-gather embed mlp | embed: data", "all-reduce | batch: data"
    path = "jit(train_step)/shard_map/jvp(loop over layers)/while/body/closed_call"
    instructions = f"""while.1 = (f32[]) while(t), condition=cond, body=body, metadata={{
      op_name="jit(train_step)/shard_map/jvp(loop over layers)/while"}}
  all-gather-start.3 = (f32[4,32], f32[16,32]) all-gather-start(q), dimensions={{0}}, metadata={{
      op_name="{path}/{gather}/all_gather"}}
  all-gather-done.3 = f32[16,32] all-gather-done(all-gather-start.3), metadata={{
      op_name="{path}/{gather}/all_gather"}}
  fusion.2 = f32[4,32] fusion(q), kind=kLoop, calls={{x = f32[4,32] parameter(0)}}, metadata={{
      op_name="{path}/dot_general"}}
  all-reduce.9 = f32[] all-reduce(z), replica_groups={{}}, to_apply=add"""
    events = [
        ("%while.1 = (f32[]) while(%tuple)", 1000, 9000),
        ("%all-gather-start.3 = f32[32,64] all-gather-start(%p)", 1000, 1500),
        ("%fusion.2 = f32[4,64] fusion(%p)", 1500, 4000),
        ("%all-gather-done.3 = f32[32,64] all-gather-done(%s)", 4000, 5000),
        ("%all-reduce.9 = (f32[]) all-reduce(%a)", 9000, 9500),
        ("%fusion.2 = f32[4,64] fusion(%p)", 20000, 21000),  # of another program
    ]
    tpu_trace(tmp_path, instructions, events)
    report = plan.compare(tmp_path)
    measured = {m.name: m.measured for m in report.collectives}
    assert report.runs == 1
    assert report.devices == 1
    np.testing.assert_allclose(measured[gather], 4000e-9)  # from its start to the end of done
    assert measured[total] is None
    assert report.other == [("all-reduce.9", pytest.approx(500e-9))]
    forward, backward = report.loops
    assert forward.measured == pytest.approx(8000e-9)
    assert backward.measured is None
    assert report.step.measured == pytest.approx(8500e-9)  # without idle time
    planned = {m.name: m.planned for m in report.collectives}
    assert planned[gather] == pytest.approx(
        sum(c.total_seconds for c in plan.collectives if plan.scope_name(c) == gather)
    )
    assert report.step.planned == plan.seconds
    assert 0 < forward.planned < plan.seconds
    ratio = next(m.ratio for m in report.collectives if m.name == gather)
    assert ratio == pytest.approx(measured[gather] / planned[gather])


def test_a_combined_collective_is_the_planned_ones_by_their_bytes(tmp_path):
    plan = planned_for_tpu("batch: data; mlp: model")
    up, down, loss = (f"all-reduce {dims}| batch: data" for dims in ("embed mlp ", "mlp embed ", ""))
    activations = "all-reduce batch embed | mlp: model"
    assert {up, down, loss, activations} <= set(map(plan.scope_name, plan.collectives))
    path = "jit(train_step)/shard_map/transpose(jvp(loop over layers))/while/body"
    instructions = f"""all-reduce.1 = (f32[32,32], f32[32,32], f32[]) all-reduce(p, p, z), replica_groups={{}}, to_apply=add,
      metadata={{op_name="{path}/{up}/psum"}}
  all-reduce.2 = (f32[4,32], f32[4,32]) all-reduce(q, q), replica_groups={{}}, to_apply=add,
      metadata={{op_name="{path}/{activations}/psum"}}"""
    events = [("%all-reduce.1 = (f32[]) all-reduce(%a)", 1000, 9196), ("%all-reduce.2 = () all-reduce(%b)", 9200, 9300)]
    tpu_trace(tmp_path, instructions, events)
    report = plan.compare(tmp_path)
    measured = {m.name: m.measured for m in report.collectives}
    np.testing.assert_allclose(measured[up], 8196e-9 * 4096 / 8196)
    np.testing.assert_allclose(measured[down], 8196e-9 * 4096 / 8196)
    np.testing.assert_allclose(measured[loss], 8196e-9 * 4 / 8196)
    np.testing.assert_allclose(measured[activations], 100e-9)  # over another axis
    assert not report.other


def test_a_name_that_begins_as_another():
    names = ["all-reduce | batch: data", "all-reduce | batch: data+model", "all-gather embed | embed: data"]
    assert planned_name("jit(f)/jvp(all-reduce | batch: data+model)/psum", names) == names[1]
    assert planned_name("jit(f)/jvp(all-reduce | batch: data)/psum", names) == names[0]
    assert planned_name("jit(f)/dot_general", names) is None

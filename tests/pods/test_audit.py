"""Audits of replicated arrays: flipped bits in the copy of one device are found and named, and clean states raise no alarm."""

import jax
import jax.numpy as jnp
import numpy as np
import pod_programs as programs
import pytest
from pod_programs import flipped

import llama
import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.pods import audit as audits
from meshpar._src.pods.audit import Audit, audit_function, replicated_axes
from meshpar.errors import DigestError, UnsupportedError

DIMS = {"state/w*": "embed mlp", "state/b": "mlp", "state/h": "embed mlp", "x": "batch embed"}
LAYOUT = "batch: data; mlp: model"
RANDOM = np.random.default_rng(5)


def arrays():
    """The leaves of a state: several dtypes and ranks."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "w1": jax.random.normal(keys[0], (16, 32)),
        "w2": jax.random.normal(keys[1], (8, 64)).astype(jnp.bfloat16),
        "b": jnp.arange(32) - 7.5,
        "h": jax.random.randint(keys[3], (4, 8), 0, 200).astype(jnp.uint8),
        "count": jnp.int32(3),
        "key": jax.random.key(9),
    }


def train_step(state, x):
    def loss_of(w, b):
        return jnp.mean((x @ w + b - 1) ** 2)

    loss, (dw, db) = jax.value_and_grad(loss_of, argnums=(0, 1))(state["w1"], state["b"])
    return {**state, "w1": state["w1"] - 0.01 * dw, "b": state["b"] - 0.01 * db, "count": state["count"] + 1}, loss


@pytest.fixture(scope="module")
def run():
    """(the step, the state on eight devices, an input)."""
    step = mp.jit(train_step, mesh=mp.mesh("data=4, model=2"), layout=LAYOUT, dims=DIMS)
    x = jax.random.normal(jax.random.key(1), (8, 16))
    state, x = step.put(arrays(), x)
    return step, state, x


def test_a_thousand_flips_are_named(run):
    """A flip in every array of the state at a time, each in the copy of another device."""
    step, state, x = run
    audit = Audit(step.plan(state, x))
    devices, named = step.plan(state, x).mesh.devices.reshape(-1), 0
    paths = [path for path in state if replicated_axes(state[path])]
    assert set(paths) == set(state)
    for n in range(1000 // len(paths) + 1):
        at = {path: (int(RANDOM.integers(8)), int(RANDOM.integers(1 << 20))) for path in paths}
        audit.start(n, {"state": {path: flipped(state[path], *at[path]) for path in paths}})
        faults = {fault.path.removeprefix("state/"): fault for fault in audit.finish()}
        assert set(faults) == set(paths)
        named += sum(faults[p].certain and faults[p].devices == (devices[at[p][0]],) for p in paths)
    assert named == (n + 1) * len(paths) > 1000


@pytest.mark.slow
def test_ten_thousand_audits_of_clean_states_raise_no_alarm(run):
    step, state, x = run
    audit = Audit(step.plan(state, x))
    for n in range(10_000):
        if n % 10 == 0:
            state, _ = step(state, x)
        audit.start(n, {"state": state})
        assert audit.finish() == []


def test_a_run_names_device_tensor_and_steps(run):
    """The flip persists through the steps until the next audit."""
    step, state, x = run
    meter = mp.log.Meter(step.plan(state, x), audit=4, writers=[])
    for n in range(9):
        state, loss = step(state, x)
        if n == 6:
            state["w1"] = flipped(state["w1"], 5, 3 * 32 + 22)
        meter.step(loss, state=state)
    state, loss = step(state, x)
    with pytest.raises(DigestError) as caught:
        meter.step(loss, state=state)
    text = str(caught.value)
    assert (
        "w1 (embed mlp): device 5 of process 0 differs from the majority of 4 copies; after step 4, by step 8" in text
    )
    assert "checkpoint of step 4 or before" in text
    assert caught.value.path == "state/w1"


def test_two_copies_have_no_majority():
    """Both devices are suspects; other shards of the array are not named."""
    step = mp.jit(lambda w: w * 2, mesh=mp.mesh("data=2, model=4"), layout="mlp: model", dims={"w": "embed mlp"})
    w = step.put(jnp.ones((4, 8)))
    audit = Audit(step.plan(w))
    audit.start(3, {"w": flipped(w, 6, 11)})
    (fault,) = audit.finish()
    assert {d.id for d in fault.devices} == {2, 6}
    assert not fault.certain
    assert "differ from each other, without a majority of 2 copies; by step 3" in str(fault)


def test_a_layer_is_repeated_where_weights_have_no_copies(monkeypatch):
    step = mp.jit(lambda s: s, mesh=mp.mesh("data=4, model=2"), layout="embed: data+model", dims={"s/*": "embed mlp"})
    state = step.put({"w": jax.random.normal(jax.random.key(0), (16, 8)), "h": jnp.ones((16, 4), jnp.bfloat16)})
    plan = step.plan(state)
    devices, before = plan.mesh.devices.reshape(-1), audits.layer
    meter = mp.log.Meter(plan, audit=1, every=1, writers=[])
    values = [meter.step(jnp.float32(0), s=state) for _ in range(4)][-1]
    assert "audited_share" not in values
    for k in (0, 3, 7):  # a device that computes other numbers, but has the right weights

        def wrong(w, k=k):
            return before(w).at[0, 0].add(jnp.where(jax.lax.axis_index(("data", "model")) == k, 1e-3, 0))

        monkeypatch.setattr(audits, "layer", wrong)
        audits.repeat_function.cache_clear()
        audit = Audit(plan)
        audit.start(2, {"s": state})
        (fault,) = audit.finish()
        assert (fault.path, fault.devices, fault.certain, fault.copies) == ("s/w", (devices[k],), True, 3)
    says = r"results of a repeated matmul differ: s/w \(embed mlp\): device 7 .* of 3 results"
    with pytest.raises(DigestError, match=says):
        audits.raise_faults([fault])
    audits.repeat_function.cache_clear()
    with pytest.raises(UnsupportedError, match="no array of s is replicated, or a matrix of floats"):
        Audit(plan).start(0, {"s": {}})


@pytest.mark.parametrize(
    ("hosts", "slow"), [([0.01, 0.22, 0.02], 1), ([0.01, 0.02], None), ([0.5, 0.5], None), ([0.3, 0.1, 0.1, 0.11], 0)]
)
def test_a_process_is_slow_if_its_host_is_busy_longer_than_the_others(run, hosts, slow):
    """The seconds of the processes at an audit, of steps of 1 s."""
    step, state, x = run
    meter = mp.log.Meter(step.plan(state, x), writers=[])
    meter._audit.seconds = {process: (1.0, host) for process, host in enumerate(hosts)}
    values = meter._measured(1.0, jnp.float32(0))
    assert values.get("slow_process") == slow
    assert values["slowest_process"] == int(np.argmax(hosts))


def test_all_processes_name_the_device_of_one(pods):
    """Two processes with two devices each: a fault on one of them, and the seconds of both."""
    end = pods.run(2, programs.audited)
    assert end.codes == [0, 0], end.texts
    for clean, text, values in end.results:
        assert clean
        assert "state/params/up (embed mlp): device " in text
        assert "of process 1 differs from the majority of 4 copies; after step 3, by step 4" in text
        assert values == [[0, [1.5, 0.25]], [1, [1.5, 0.5]]]


def test_bad_input(run):
    step, state, x = run
    plan = step.plan(state, x)
    with pytest.raises(UnsupportedError, match="audit=0"):
        mp.log.Meter(plan, audit=0)
    with pytest.raises(UnsupportedError, match="no argument 'stat/"):
        mp.log.Meter(plan, audit=1).step(jnp.float32(0), stat=state)
    with pytest.raises(UnsupportedError, match="audit: no array"):
        mp.log.Meter(plan, audit=1).step(jnp.float32(0))


def test_the_planned_time_of_an_audit():
    """Of the parameters and moments of Llama 3 8B under HSDP on two slices, against a hundred planned steps."""
    step, args, dims = llama.llama3_8b(batch=256)
    layout = llama.LAYOUTS["hsdp"]
    plan = mp.plan(step, *args, mesh="slice=2, data=64", topology="2x v5p:4x4x4", layout=layout, dims=dims)
    state = [x for x in plan.inputs if x.kind in ("params", "opt")]
    axes = [tuple(a for a in plan.sizes if a not in {b for _, over in x.split for b in over}) for x in state]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state]
    audit = audit_function(plan.mesh, tuple(x.spec for x in state), tuple(axes))
    numbers = jax.ShapeDtypeStruct((plan.mesh.size, 2), "float32")
    planned = mp.plan(audit, numbers, *shapes, mesh=plan.mesh, topology=plan.topology, layout="", dims={})
    read = sum(x.bytes for x in state) / CHIPS["v5p"].hbm_bandwidth
    assert read < planned.seconds < 1e-4 * 100 * plan.seconds

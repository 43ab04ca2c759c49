"""Local SGD over slices: the results of replicas that train independently, and nothing sent between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pod_programs as programs
import pytest
import replica_simulations as simulations
from jax.sharding import PartitionSpec as P

import meshpar as mp

DIMS = {"*params/up": "embed mlp", "*params/down": "mlp embed", "*params/bias": "mlp", "x": "batch embed"}
MESH = "slice=2, data=2, model=2"
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def train_step(state, x):
    return programs.train_step(state, x)


def local_sgd(step=train_step, **options):
    how = {"every": 2, "mesh": mp.mesh(MESH), "layout": "batch: data; embed: data", **options}
    return mp.train.local_sgd(step, **{"over": "slice", "outer": OUTER, "dims": DIMS, **how})


def by_hand(steps, every, fragments, blend, code):
    """Streaming DiLoCo on one device: (the states, the anchor, the losses of each step).

    Fragments are the weights in alphabetical order, of which ``up`` and ``down`` are the large ones.
    """
    start = programs.create(jax.random.key(0))
    states, anchor, losses = [start, start], start["params"], []
    groups = [["bias", "down"], ["up"]] if fragments == 2 else [["bias", "down", "up"]]
    outer = [OUTER.init({k: anchor[k] for k in group}) for group in groups]
    errors = {k: [np.zeros(x.shape)] * 2 for k, x in anchor.items()}
    for n in range(steps):
        halves = np.split(np.float64(programs.batch(n, 16)), 2)
        both = [programs.train_step(s, x) for s, x in zip(states, halves, strict=True)]
        states = [s for s, _ in both]
        losses.append([float(loss) for _, loss in both])
        for i, group in enumerate(groups):
            if (n + 1 + i * every // fragments) % every:
                continue
            moved = {}
            for k in group:
                changes = [np.asarray(anchor[k]) - np.asarray(s["params"][k]) for s in states]
                moved[k] = np.mean(changes, 0)
                if code is not None:
                    moved[k], errors[k] = simulations.coded_mean(changes, errors[k], code, [1, 1])
            part = {k: anchor[k] for k in group}
            updates, outer[i] = OUTER.update(jax.tree.map(jnp.asarray, moved), outer[i], part)
            part = optax.apply_updates(part, updates)
            anchor = {**anchor, **part}
            own = [{k: blend * part[k] + (1 - blend) * s["params"][k] for k in group} for s in states]
            states = [{**s, "params": {**s["params"], **o}} for s, o in zip(states, own, strict=True)]
    return states, anchor, losses


@pytest.mark.parametrize(
    ("fragments", "blend", "code", "lowering", "rows", "layout"),
    [
        (2, 0.5, "int8", "jit", "host", "batch: data; mlp: model; embed: data"),
        (1, 1.0, None, "shard_map", "global", "batch: data; embed: model"),
    ],
)
@pytest.mark.usefixtures("x64")
def test_it_is_what_replicas_do_by_hand(fragments, blend, code, lowering, rows, layout):
    """Also for fragments that are exchanged in codes and blended."""
    exchange = mp.replicas.coded(code) if code else None
    streaming = {"exchange": exchange, "fragments": fragments, "blend": blend} if code else {}
    run = local_sgd(every=4, layout=layout, lowering=lowering, **streaming)
    state = run.init(programs.create)(jax.random.key(0))
    losses = []
    for n in range(9):
        x = np.float64(programs.batch(n, 16))
        if rows == "global":
            x = mp.data.put(x, mesh=mp.mesh(MESH), layout="batch: slice+data", dims="batch _")
        state, loss = run(n, state, x)
        losses.append(np.asarray(loss).tolist())
    states, anchor, want = by_hand(9, 4, fragments, blend, code)
    assert {x.dtype for x in jax.tree.leaves((state["anchor"], anchor))} == {np.dtype(np.float64)}
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    close(losses, want)
    jax.tree.map(close, state["anchor"]["params"], anchor)
    for k, replica in enumerate(states):
        jax.tree.map(close, jax.tree.map(lambda x, k=k: x[k], state["inner"]), replica)
    if "mlp: model" in layout:
        spec = P("slice", "data", "model")
        assert state["exchange"][1].error["params"]["up"].sharding.spec == spec
        assert state["inner"]["params"]["up"].sharding.spec == spec


def test_an_exchange_of_a_fragment_sends_only_its_codes():
    """16 x 32 codes of `up`, a row of which has an exponent, on 2 x 2 devices of a slice."""
    layout = "batch: data; mlp: model; embed: data"
    run = local_sgd(every=4, exchange=mp.replicas.coded("int8"), fragments=2, layout=layout, lowering="shard_map")
    state = run.init(programs.create)(jax.random.key(0))
    state, _ = run(0, state, programs.batch(0, 16))
    plan = run.outer.plan(**state, fragment=1)
    sent = sum(c.total_bytes for c in plan.collectives if "slice" in c.axes and c.op == "all-gather")
    assert 16 * 32 / 4 + 16 / 2 <= sent <= 16 * 32 / 4 + 16 / 2 + 8


def test_the_inner_step_sends_nothing_over_slices():
    run = local_sgd(mesh=mp.mesh("slice=2, data=4"))
    state = run.init(programs.create)(jax.random.key(0))
    state, _ = run(0, state, programs.batch(0, 16))
    inner = run.inner.plan(state["inner"], programs.batch(0, 16).reshape(2, 8, 16))
    assert inner.collectives
    assert all("slice" not in c.axes for c in inner.collectives)
    outer = run.outer.plan(inner=state["inner"], anchor=state["anchor"], outer=state["outer"])
    weights = sum(x.nbytes for x in jax.tree.leaves(state["anchor"]))
    sent = sum(c.total_bytes for c in outer.collectives if "slice" in c.axes)
    assert 0 < sent <= weights  # once in every `every` steps; an all-reduce of what a device has of them


def test_bad_input():
    make = functools.partial(local_sgd, mesh=mp.mesh("slice=2, data=4"), layout="batch: data")
    assert make(mesh="slice=2, data=4").replicas == 2
    no_devices = jax.sharding.AbstractMesh((2, 4), ("slice", "data"))
    for options, error, says in [
        ({"over": "pod"}, mp.errors.MeshError, "no axis `pod`"),
        ({"mesh": no_devices}, mp.errors.MeshError, "an abstract mesh has none"),
        ({"layout": "batch: slice+data"}, mp.errors.AxisConflictError, r"`batch: slice\+data` asks for it as well"),
        ({"every": 0}, mp.errors.UnsupportedError, "every=0"),
        ({"fragments": 3}, mp.errors.UnsupportedError, "fragments=3 with every=2"),
        ({"blend": 0.0}, mp.errors.UnsupportedError, "blend=0"),
    ]:
        with pytest.raises(error, match=says):
            make(**options)
    many = make(fragments=5, every=5)
    with pytest.raises(mp.errors.UnsupportedError, match="3 arrays of parameters"):
        many.init(programs.create)(jax.random.key(0))
    run = make()
    with pytest.raises(mp.errors.UnsupportedError, match="no leaf of the state is a parameter"):
        run.init(lambda key: {"w": jax.numpy.ones(3)})(jax.random.key(0))
    with pytest.raises(mp.errors.DivisibilityError, match="7 rows of `x`"):
        run(0, run.init(programs.create)(jax.random.key(0)), programs.batch(0, 7))

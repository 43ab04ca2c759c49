"""Host memory: inputs, results, and residuals that are offloaded for a backward pass."""

import json

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same_results import assert_close

import meshpar as mp

MESH = "data=4, model=2"
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
W = 0.3 * np.random.default_rng(1).standard_normal((3, 16, 16)).astype(np.float32)
ROWS = {"layout": "batch: data", "dims": {"x": "batch embed"}}
SHARD = X.nbytes // 4
LOWERINGS = pytest.mark.parametrize("lowering", ["jit", "shard_map"])


def stepped(fn, lowering, layout="batch: data", dims=None):
    return mp.jit(fn, mesh=MESH, layout=layout, dims=dims or {"x": "batch embed"}, lowering=lowering)


def on_host(x):
    return jax.device_put(x, NamedSharding(mp.mesh(MESH), P("data"), memory_kind="pinned_host"))


def for_tpu(step, *args):
    """The StableHLO that TPUs would be given: CPU leaves the annotations of memory out."""
    return step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()


@LOWERINGS
def test_a_tree_goes_to_the_host_and_comes_back(lowering):
    """``device_put`` of a tree is one equation; each array keeps its own split, also where two want one axis."""

    def there(tree):
        return jax.device_put(tree, HOST)

    def fn(x, y, w):
        x, y, w = jax.device_put(there((x * 2, y + 1, w)), DEVICE)
        mixed = jax.device_put((x, w), (HOST, DEVICE))
        return jnp.sum(x @ w, 1) + y, there({"x": x, "w": w}), mixed

    def gradients(x, y, w):
        tree = jax.device_put(there((x, y, w)), DEVICE)

        def loss(tree):
            x, y, w = jax.device_put(tree, DEVICE)  # JAX cannot transpose a copy to the host
            return jnp.sum((jnp.sum(x @ w, 1) + y) ** 2)

        return there(jax.grad(loss)(tree))

    y, w = X[:, 0], X.T.copy()
    dims = {"x": "batch embed", "y": "batch", "w": "embed mlp"}
    for layout in ("batch: data; embed: model", "batch: data; mlp: data"):
        step = stepped(fn, lowering, layout, dims)
        out = step(X, y, w)
        assert_close(out, jax.jit(fn)(X, y, w), 1e-5, 1e-5)
        assert [a.sharding.memory_kind for a in jax.tree.leaves(out)] == ["device", *3 * ["pinned_host"], "device"]
        plan = step.plan(X, y, w)
        assert not any("device_put" in c.cause for c in plan.collectives)
        assert sum(t.to == "host" for t in plan.transfers) == 6
        assert_close(stepped(gradients, lowering, layout, dims)(X, y, w), jax.jit(gradients)(X, y, w), 1e-4, 1e-4)


@LOWERINGS
def test_a_state_on_the_host_is_updated_there_and_goes_in_again(lowering):
    def fn(state, x):
        new = jax.device_put(state, DEVICE) + x
        return jax.device_put(new, HOST), jnp.sum(new)

    step = mp.jit(
        fn, mesh=MESH, layout="batch: data", lowering=lowering, donate_argnames="state", dims={"*": "batch embed"}
    )
    state, _ = step(on_host(X), X)
    state, _ = step(state, X)
    assert state.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(state, 3 * X, rtol=1e-6)


@LOWERINGS
def test_the_memory_of_an_argument_is_part_of_the_program(lowering):
    step = stepped(lambda x: x * 2, lowering)
    assert [step(x).sharding.memory_kind for x in (X, on_host(X), X)] == ["device", "pinned_host", "device"]


@LOWERINGS
def test_activations_offloaded_by_a_policy(lowering):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(policy):
        def of(w, x):
            def layer(x, w):
                return jnp.tanh(jnp.sin(checkpoint_name(x @ w, "h"))), None

            y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy) if policy else layer, x, w)
            return jnp.sum(y**2)

        return of

    step = stepped(jax.value_and_grad(loss(policy)), lowering, dims={"w": "layers _ _", "x": "batch embed"})
    assert_close(step(W, X), jax.value_and_grad(loss(None))(W, X), 1e-4, 1e-5)
    plan, text = step.plan(W, X), for_tpu(step, W, X)
    assert text.count('_xla_buffer_placement = "pinned_host"') == 1
    assert sorted((t.to, t.bytes, t.count) for t in plan.transfers) == [("device", SHARD, 3), ("host", SHARD, 3)]
    assert plan.memory.host == 3 * SHARD


def test_host_memory_is_not_in_the_devices_peak():
    def fn(x):
        return jax.device_put(jnp.exp(jax.device_put(x, DEVICE)), HOST)

    there, here = (mp.plan(f, x, mesh=MESH, **ROWS) for f, x in ((fn, on_host(X)), (jnp.exp, X)))
    assert here.memory.host == 0
    assert not here.transfers
    assert there.memory.host == 2 * SHARD
    assert (there.memory.peak, here.memory.peak) == (SHARD, 2 * SHARD)  # written over what came from the host
    (held,) = there.inputs
    assert held.on_host
    assert held.bytes == 0
    facts = json.loads(there.to_json())
    assert [t["to"] for t in facts["transfers"]] == ["device", "host"]
    assert facts["memory"]["host"] == 2 * SHARD
    assert "(on the host)" in str(there)
    assert facts["inputs"][0]["on_host"]
    assert json.loads(there.diff(here).to_json())["metrics"]["in the host's memory"]["a"] == 2 * SHARD


def test_a_described_argument_on_the_host():
    sharding = NamedSharding(mp.mesh(MESH), P("data"), memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    assert mp.plan(lambda x: x * 2, x, mesh=MESH, **ROWS).inputs[0].on_host


def reads_row(x, i):
    return jax.lax.dynamic_slice(x, (i, 0), (1, x.shape[1]))


def writes_row(x, i):
    return jax.lax.dynamic_update_slice(x, jax.device_put(jnp.full((1, 16), -1.0), HOST), (i, 0))


def reads_fixed_row(x, i):
    return x[5:6]


@pytest.mark.parametrize("fn", [reads_row, writes_row, reads_fixed_row])
@pytest.mark.parametrize("layout", ["batch: data", "embed: data"])
def test_rows_of_an_array_on_the_host(fn, layout):
    """Along a sharded dim they have no local form, since masks and collectives are in device memory."""

    def step(x, i):
        return jax.device_put(fn(jax.device_put(x, HOST), i), DEVICE) * 2

    x = jnp.arange(128.0).reshape(8, 16)
    options = {"mesh": "data=8", "layout": layout, "dims": {"x": "batch embed"}}
    lowering = "jit" if layout == "batch: data" else "shard_map"
    np.testing.assert_array_equal(mp.jit(step, lowering=lowering, **options)(x, 3), step(x, 3))
    if lowering == "jit":
        assert_refused(step, x, 3, **options)


def assert_refused(step, *args, **options):
    """A step that selects along a sharded dim of an array in host memory: by one lowering it is, the other has a reason."""
    why = r"along dim 0 of an array \[.*in host memory, which is sharded over `data`; its local form"
    with pytest.warns(mp.errors.LoweringWarning, match=why):
        assert mp.jit(step, **options).plan(*args).lowering == "jit"
    with pytest.raises(mp.errors.UnsupportedError, match=why):
        mp.jit(step, lowering="shard_map", **options)(*args)


MOVES = {
    "half": lambda x: x[4:],
    "strided": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "two of an array": lambda x: jnp.concatenate([x, x]),
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "sum of rows that do not divide": lambda x: x[1:].sum(0),
}
LOCAL_MOVES = {
    "parts": lambda x: jnp.split(x, 2)[1],
    "two arrays": lambda x: jnp.concatenate([x, jax.device_put(jnp.ones((8, 16)), HOST)]),
    "rows of one device": lambda x: x[2:5],
    "appended rows": lambda x: jnp.concatenate([x, x[:3]]),
}


def moved(fn):
    return lambda x: jax.device_put(fn(jax.device_put(x, HOST)), DEVICE) * 2


@pytest.mark.parametrize("fn", MOVES.values(), ids=MOVES)
def test_rows_of_an_array_on_the_host_that_move_between_devices(fn):
    options = {"mesh": MESH, **ROWS}
    np.testing.assert_allclose(mp.jit(moved(fn), lowering="jit", **options)(X), moved(fn)(X), rtol=1e-6)
    assert_refused(moved(fn), X, **options)


@pytest.mark.parametrize(("fn", "lowering"), covering.each(LOCAL_MOVES.values(), ["jit", "shard_map"]))
def test_rows_of_an_array_on_the_host_that_are_gathered(fn, lowering):
    np.testing.assert_array_equal(mp.jit(moved(fn), lowering=lowering, mesh=MESH, **ROWS)(X), moved(fn)(X))

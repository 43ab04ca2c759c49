"""What is saved comes back exactly, or is refused when it is saved."""

import math
import tempfile

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.entry.cli import main
from meshpar._src.pods.checkpoint import facts_of, verify
from meshpar._src.pods.digest import _digest_of_one, as_text, digest_on_host
from meshpar.errors import CheckpointError


def bits(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(x)), bits(jax.random.key_data(x))
    return np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()


def equal(saved, found):
    """Value, type, dtype and memory, bit for bit."""
    assert jax.tree.structure(saved) == jax.tree.structure(found)
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(found), strict=True):
        assert type(a) is type(b), (a, b)
        if type(a) in (bool, int, float, complex, str):
            assert repr(a) == repr(b)
            continue
        assert bits(a) == bits(b), (a, b)
        if isinstance(a, jax.Array):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            assert a.sharding.memory_kind == b.sharding.memory_kind


def saved_and_restored(state, folder, **options):
    with mp.Checkpoints(folder) as run:
        run.save(0, state, **options)
        run.wait()
        assert verify(str(folder), 0) == []
        found, _ = run.restore(state)
    equal(state, found)


ARRAYS = "bool int4 uint8 int32 bfloat16 float16 float32 complex64 float8_e4m3fn float4_e2m1fn".split()
WIDE = "int64 uint64 float64 complex128 >i4".split()
SHAPES = st.sampled_from([(), (3,), (0,), (2, 0, 3), (8, 4), (1, 5, 2)])
NAMES = st.sampled_from(["a", "b", "a.b", "a/b", "0", "", "%", "a%2Eb", "a b", "ü[0]", ".zarray", "b/a", "%2F"])


def numbers(dtype, shape, seed):
    words = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    if np.dtype(dtype) == bool or np.dtype(dtype).itemsize == 1:
        return (words[..., 0] % 7).astype(dtype)
    return np.frombuffer(words.tobytes(), dtype).reshape(shape)  # any bits: NaN, infinite, denormal


@st.composite
def leaves(draw):
    kind = draw(st.sampled_from(["python", "numpy", "scalar", "jax", "sharded", "host", "key"]))
    seed = draw(st.integers(0, 9))
    if kind == "python":
        odd = st.sampled_from([0.1, math.nan, -0.0, 3_000_000_000, -(1 << 70), True, 1 - 2j, "text ü", ""])
        return draw(odd | st.integers() | st.floats())
    if kind == "key":
        shape = draw(st.sampled_from([(), (4,), (0,)]))
        return jax.random.split(jax.random.key(seed, impl=draw(st.sampled_from(["threefry2x32", "rbg"]))), shape)
    if kind in ("numpy", "scalar"):
        x = numbers(getattr(ml_dtypes, d := draw(st.sampled_from(ARRAYS + WIDE)), d), draw(SHAPES), seed)
        return (
            x if kind == "numpy" else x.reshape(-1)[0] if x.size and np.dtype(d).byteorder != ">" else np.float64(0.1)
        )
    d = draw(st.sampled_from(ARRAYS))
    x = jnp.asarray(numbers(getattr(ml_dtypes, d, d), draw(SHAPES), seed))
    if kind == "jax" or x.shape != (8, 4):
        return x
    memory = "pinned_host" if kind == "host" else None
    spec = draw(st.sampled_from([P(), P("data"), P(None, "model"), P(("model", "data")), P("model", "data")]))
    return jax.device_put(x, NamedSharding(mp.mesh("data=4, model=2"), spec, memory_kind=memory))


TREES = st.recursive(
    leaves(), lambda inner: st.dictionaries(NAMES, inner, max_size=4) | st.lists(inner, max_size=3), max_leaves=9
)


@given(TREES)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_tree(tree):
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved_and_restored({"state": tree}, folder)
        except CheckpointError as error:
            assert "two leaves of the state have the path" in str(error)  # noqa: PT017


@pytest.mark.parametrize("state", [
    {"i": np.array([2**40 + 7]), "f": np.array(1e300), "s": np.int64(2**62), "c": np.array([1e300 + 1j])},
    {"lr": 0.1, "n": 3_000_000_000, "more": 10**40, "flag": True, "nan": math.nan, "text": "a"},
    {"a.b": jnp.ones(3), "a": {"b": jnp.zeros(3)}},
    {"a": jnp.ones(3), "a/b": jnp.zeros(3), "%": jnp.ones(2), "": jnp.ones(1)},
    {"empty": jnp.zeros((0, 4)), "numpy": np.zeros((3, 0), np.int64), "keys": jax.random.split(jax.random.key(0), 0)},
    {},
], ids=["64 bits", "numbers", "dots", "slashes", "empty", "nothing"])  # fmt: skip
def test_leaves(tmp_path, state, capsys):
    saved_and_restored(state, tmp_path)
    for command in ("ls", "verify", "show"):
        assert main(["checkpoint", command, str(tmp_path)]) == 0
    assert ("more" not in state) or str(state["more"]) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lr=[0.1]", "a b", "50%20", "ü€", "[a-z]*?"])
def test_folders(tmp_path, name):
    saved_and_restored({"w": jnp.arange(4.0)}, tmp_path / name / "run")


def layers(key):
    return {"w": jax.random.normal(key, (4, 16, 16)), "b": jnp.zeros((4, 16))}


ADAM = optax.adam(1e-3)


@pytest.mark.parametrize(
    ("name", "tx", "layout"),
    [
        ("offload", mp.train.offload(ADAM), "embed: data; mlp: model"),
        ("low_bits", mp.train.low_bits(ADAM, min_size=16), "embed: data; mlp: model"),
        ("pipeline", ADAM, "layers: data; mlp: model"),
    ],
)
def test_states_of_optimizers_and_pipelines(tmp_path, mesh, name, tx, layout):
    def create(key):
        params = layers(key)
        return {"params": params, "opt": tx.init(params)}

    init = mp.init(create, mesh=mesh, layout=mp.Layout(layout, optional=True), dims={"*/w": "layers embed mlp"})
    with mp.Checkpoints(tmp_path / name) as run:
        state, _ = run.restore_or(init, jax.random.key(0))
        run.save(0, state)
        run.wait()
        found, at = run.restore_or(init, jax.random.key(1))
    assert at == 1
    equal(state, found)
    assert ("pinned_host" in {x.sharding.memory_kind for x in jax.tree.leaves(state)}) == (name == "offload")
    assert any(x.dtype == jnp.int8 for x in jax.tree.leaves(state)) == (name == "low_bits")
    assert any("data" in x.sharding.spec[:1] for x in jax.tree.leaves(state) if x.ndim == 3) == (name == "pipeline")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"m": {"x": object()}}, "`m/x` cannot be saved: checkpoints do not hold object"),
        ({"x": np.array(["a"])}, r"`x` cannot be saved: checkpoints do not hold <U1\[1\]"),
        ({"x": np.array(["2020"], "M8[D]")}, "datetime64"),
        ({"x": np.ma.masked_array([1, 2], [0, 1])}, r"`x` cannot be saved"),
        ({"x": jnp.ones(3, jnp.uint2)}, r"`x` cannot be saved: checkpoints do not hold uint2\[3\]"),
        ({"x": 10**5000}, "`x` is an integer of more than 4,300 digits"),
    ],
)
def test_what_cannot_be_held_is_refused(tmp_path, state, says):
    with mp.Checkpoints(tmp_path) as run:
        with pytest.raises(CheckpointError, match=says):
            run.save(0, state)
        donated = jnp.ones(3)
        donated.delete()
        with pytest.raises(CheckpointError, match="`x` cannot be saved: the array was deleted"):
            run.save(0, {"x": donated})
        run.save(0, {"x": jnp.ones(3)})
    assert run.steps() == [0]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"lr": {9: 0.1, 10: 0.2}}, r"extra\['lr'\] has the key 9, which JSON would change to a text"),
        ({"a": [1, (2, 3)]}, r"extra\['a'\]\[1\] is tuple"),
        ({"a": np.float32(1)}, r"extra\['a'\] is float32"),
        ({"a": {1, 2}}, r"extra\['a'\] is set"),
    ],
)
def test_extra_that_json_would_change_is_refused(tmp_path, extra, says):
    with mp.Checkpoints(tmp_path) as run:
        with pytest.raises(CheckpointError, match=says):
            run.save(0, {"x": jnp.ones(3)}, extra=extra)
        exact = {"lr": {"9": 0.1, "b": [1, None, True, "ü", math.inf, 10**30]}, "": {}}
        run.save(0, {"x": jnp.ones(3)}, extra=exact)
        run.wait()
        assert facts_of(str(tmp_path), 0)["extra"] == exact
        run.restore({"x": jnp.ones(3)})


@given(
    st.sampled_from(ARRAYS + WIDE[:4]),
    st.sampled_from([(), (5,), (200, 700), (70_000, 3), (2, 3, 40_000)]),
    st.integers(0, 9),
)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_digests_of_the_host_are_those_of_the_device(dtype, shape, seed):
    with jax.enable_x64(dtype in WIDE):
        x = numbers(getattr(ml_dtypes, dtype, dtype), shape, seed)
        starts = [seed * (d + 1) for d in range(len(shape))]
        want = as_text(np.asarray(_digest_of_one(jnp.asarray(x), [np.uint32(s) for s in starts])))
        assert as_text(digest_on_host(x, starts)) == want

"""``mp.move`` between layouts, meshes and steps: the same values, names, dtypes; the planned traffic and memory."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import meshpar as mp
from meshpar._src.moves import plan
from meshpar._src.units import format_bytes

DIMS = {"*/up": "layers embed mlp", "*/q": "layers embed heads head_dim", "norm": "embed"}
FSDP, TENSOR = ("data=8", "embed: data"), ("model=8", "heads, mlp: model")


@pytest.fixture(params=[plan.MIN_ROUND_BYTES, 0], ids=["one program", "chunks"])
def rounds(request, monkeypatch):
    """One program for all arrays, or one for few and large arrays in chunks."""
    monkeypatch.setattr(plan, "MIN_ROUND_BYTES", request.param)


def half(first):
    return jax.devices()[:4] if first else jax.devices()[4:]


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"up": (4, 16, 32), "q": (4, 16, 8, 2)}
    tree = {"layers": {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}}
    return {**tree, "norm": jnp.arange(16, dtype=jnp.float32)}


def placed(params, side, dims=None):
    return jax.device_put(params, mp.shardings(params, side[1], side[0], dims=dims or DIMS))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("target", [TENSOR, ("replica=2, model=4", "heads, mlp: model")])
def test_the_same_devices(params, target, donate, rounds):
    move = mp.move(params, source=FSDP, target=target, dims=DIMS, donate=donate)
    source = placed(params, FSDP)
    for _ in range(2):
        moved = move(source)
        equal(moved, params)
        assert moved["layers"]["up"].sharding.mesh.shape["model"] == (4 if "=4" in str(target[0]) else 8)
        assert source["layers"]["up"].is_deleted() == source["norm"].is_deleted() == donate
        source = placed(params, FSDP)


def test_other_devices_a_subset_and_more(params, rounds):
    for source, target in (
        ((mp.mesh("data=4", devices=half(True)), "embed: data"), (mp.mesh("model=4", devices=half(False)), TENSOR[1])),
        (FSDP, (mp.mesh("model=4", devices=half(False)), TENSOR[1])),
        ((mp.mesh("data=2", devices=half(False)[:2]), "embed: data"), TENSOR),
    ):
        move = mp.move(params, source=source, target=target, dims=DIMS)
        moved = move(placed(params, source))
        equal(moved, params)
        assert moved["layers"]["up"].sharding.mesh == mp.mesh("model=8") if target is TENSOR else target[0]


def test_arrays_say_where_they_are_and_host_arrays_are_copied(params):
    for given in (placed(params, FSDP), params, jax.device_get(params)):
        move = mp.move(given, target=TENSOR, dims=DIMS)
        equal(move(given), params)
    size = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) / 8 + params["norm"].nbytes
    assert "source    host memory\n" in str(move)
    text = format_bytes(size)
    assert f"receives  {text} a device: what it needs and does not have, {text} of it from" in str(move)
    assert move.links == {"host": size}


def test_steps_say_where_arrays_are(params):
    def train(state, x):
        return jax.tree.map(lambda w: w + x.sum(), state), x

    def sample(weights, x):
        return x @ weights["layers"]["up"][0]

    state, x = {"params": params, "count": jnp.zeros(())}, jnp.ones((8, 16))
    at_state = {f"state/params/{k}": d for k, d in {**DIMS, "layers/up": DIMS["*/up"], "layers/q": DIMS["*/q"]}.items()}
    step = mp.jit(train, mesh=FSDP[0], layout=FSDP[1], dims={k: d for k, d in at_state.items() if "*" not in k})
    decode = mp.jit(sample, mesh=TENSOR[0], layout=TENSOR[1], dims={f"weights/{k}": d for k, d in DIMS.items()})
    with pytest.raises(mp.errors.UnsupportedError, match="train was not planned yet"):
        mp.move(params, source=step, target=decode)
    state, _ = step(state, x)
    decode.plan(params, x)
    move = mp.move(state["params"], source=step, target=decode)
    weights = move(state["params"])
    equal(weights, state["params"])
    assert weights["layers"]["up"].sharding.spec == PartitionSpec(None, None, "model")
    assert not decode.plan(weights, x).arrivals
    with pytest.raises(mp.errors.UnsupportedError, match="sample has no argument or result with the arrays count"):
        mp.move({"count": state["count"]}, source=step, target=decode)


def test_casts_send_the_narrower_dtype(params, rounds):
    exact = mp.move(params, source=FSDP, target=TENSOR, dims=DIMS)
    narrow = mp.move(params, source=FSDP, target=TENSOR, dims=DIMS, dtype={"*/q": "bfloat16", "*/up": "bfloat16"})
    moved = narrow(placed(params, FSDP))
    equal(moved["layers"], jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"]))
    assert moved["norm"].dtype == jnp.float32
    norm = 16 * 4 * 7 / 8
    assert narrow.bytes_sent - norm == (exact.bytes_sent - norm) / 2
    wide = mp.move(moved, target=FSDP, dims=DIMS, dtype="float32")
    equal(wide(moved)["layers"], jax.tree.map(lambda x: x.astype(jnp.float32), moved["layers"]))
    assert wide.bytes_sent == narrow.bytes_sent - norm


def test_weights_are_quantized_where_they_are(params):
    move = mp.move(params, source=FSDP, target=TENSOR, dims=DIMS, dtype="int8", contract={"*/up": "embed"})
    moved = move(placed(params, FSDP))
    expected = mp.layers.quantize(params, "int8", contract={"*/up": "embed"}, dims=DIMS)
    equal(moved, expected)
    up = next(a for a in move.arrays if a.path == "layers/up.codes")
    assert sum(up.links.values()) == 4 * 16 * 32 / 8 * 7 / 8  # a byte for each element that a device does not have


def test_renamed_split_and_fused(params):
    split = {"layers/q": ("heads", {"layers/a/kernel": 2, "layers/b/kernel": 6}), "*/up": "*/mlp/up"}
    move = mp.move(params, source=FSDP, target=("data=2, model=2", "mlp, heads: model"), dims=DIMS, rename=split)
    moved = move(placed(params, FSDP))
    q = np.asarray(params["layers"]["q"])
    equal(moved["layers"]["a"]["kernel"], q[:, :, :2])
    equal(moved["layers"]["b"]["kernel"], q[:, :, 2:])
    equal(moved["layers"]["mlp"]["up"], params["layers"]["up"])
    assert moved["layers"]["b"]["kernel"].sharding.spec == PartitionSpec(None, None, "model")
    fuse = {("*/a/kernel", "*/b/kernel"): (2, "*/q"), "*/mlp/up": "*/up"}
    back = mp.move(moved, target=(*FSDP, DIMS), rename=fuse)
    equal(back(moved), params)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rename": {"*/nothing": "x"}}, "matches no array"),
        ({"rename": {"layers/*": "same"}}, "become `same`"),
        ({"rename": {"*/q": ("heads", {"a": 2, "b": 2})}}, "have 4 elements, and the array 8"),
        ({"rename": {"*/q": ("head", {"a": 2, "b": 6})}}, "has no dim 'head'"),
        ({"rename": {("*/q", "*/k"): ("heads", "qk")}}, "there is no `layers/k`"),
        ({"rename": {("*/q", "*/up"): "*/qk"}}, r"names no dim to join 2 arrays(.|\n)*\(DIM, '\*/qk'\)"),
        ({"dtype": {"*/wq": "bfloat16"}}, "matches no array"),
        ({"dtype": "int8"}, "needs contract="),
        ({"dtype": "bf16"}, "dtype='bf16' is no dtype(.|\n)*bfloat16"),
        ({"params": {}}, "has no arrays to move"),
        ({"params": {"a": 1.0}}, "has no arrays to move"),
        ({"params": {"w": jax.ShapeDtypeStruct((8,), "float32")}, "source": None}, "nothing says where it is"),
        # it would replicate the array
        ({"target": ("model=8", "mpl: model")}, "rule `mpl: model` names dim `mpl`(.|\n)*`mlp`"),
    ],
)
def test_bad_arguments(params, options, error):
    with pytest.raises(mp.errors.MeshparError, match=error):
        mp.move(**{"params": params, "source": FSDP, "target": TENSOR, "dims": DIMS, **options})


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)


def test_modules():
    model, sampler = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    names = {"up/kernel": "embed mlp", "up/bias": "mlp"}
    nnx.update(model, jax.device_put(nnx.state(model), mp.shardings(model, FSDP[1], FSDP[0], dims=names)))
    move = mp.move(model, target=TENSOR, dims=names)
    copy = move(model)
    assert copy is not model
    kernel = model.up.kernel.get_value()
    assert kernel.sharding.spec == PartitionSpec("data")
    assert move(model, into=sampler) is sampler
    assert sampler.up.kernel.get_value().sharding.spec == PartitionSpec(None, "model")
    equal(sampler.up.kernel.get_value(), kernel)
    shards = {s.data.unsafe_buffer_pointer() for s in model.up.bias.get_value().addressable_shards}
    assert not shards & {s.data.unsafe_buffer_pointer() for s in sampler.up.bias.get_value().addressable_shards}
    assert mp.move(model, target=TENSOR, dims=names, donate=True)(model) is model
    equal(model.up.kernel.get_value(), sampler.up.kernel.get_value())
    with pytest.raises(mp.errors.UnsupportedError, match="into= has no `up/bias`"):
        mp.move(copy, target=FSDP, dims=names)(copy, into={"up": {"kernel": jnp.ones(1)}})


def test_errors_of_a_call(params):
    move = mp.move(params, source=FSDP, target=TENSOR, dims=DIMS)
    source = placed(params, FSDP)
    for tree, error in (
        ({"norm": source["norm"]}, "the tree has no `layers/"),
        (jax.tree.map(lambda x: x.astype(jnp.bfloat16), source), "planned for float32"),
        (placed(params, TENSOR), "was planned from"),
        (jax.device_get(params), "is in host memory, and the move was planned from"),
    ):
        with pytest.raises(mp.errors.UnsupportedError, match=error):
            move(tree)
    jax.tree.map(lambda x: x.delete(), source)
    with pytest.raises(mp.errors.UnsupportedError, match="donated or deleted"):
        move(source)


LLAMA = {
    "layers": {"up": (32, 4096, 14336), "gate": (32, 4096, 14336), "down": (32, 14336, 4096),
               "q": (32, 4096, 32, 128), "k": (32, 4096, 8, 128), "v": (32, 4096, 8, 128), "o": (32, 32, 128, 4096)},
    "embed": (128256, 4096), "head": (4096, 128256),
}  # fmt: skip
LLAMA_DIMS = {
    "*/up": "layers embed mlp", "*/gate": "layers embed mlp", "*/down": "layers mlp embed", "*/o": "layers heads head_dim embed",
    "*/q": "layers embed heads head_dim", "*/[kv]": "layers embed heads head_dim", "embed": "vocab embed", "head": "embed vocab",
}  # fmt: skip
LLAMA_TENSOR = "heads, mlp, vocab: model"


def llama(scale=1, dtype=jnp.bfloat16):
    """Llama 3 8B, with all sizes but the number of layers and of heads over ``scale``."""

    def small(shape):
        sizes = [n // scale if n >= 128 else n for n in shape]
        return jax.ShapeDtypeStruct(tuple(sizes), dtype)

    return jax.tree.map(small, LLAMA, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize("target", ["model=8", "replica=2, model=4"])
@pytest.mark.parametrize("donate", [True, False])
def test_the_memory_of_the_programs_is_as_planned(target, donate, monkeypatch):
    monkeypatch.setattr(plan, "MIN_ROUND_BYTES", 0)
    move = mp.move(llama(32, jnp.float32), source=FSDP, target=(target, LLAMA_TENSOR), dims=LLAMA_DIMS, donate=donate)
    live, after, peak = move.memory.source, 0.0, 0.0
    for k, of in enumerate(move.rounds):
        program = move.program(k)
        joined = [(d, *program._joined(o.sharding.shard_shape(o.shape))) for o, d in program.sources.values()]
        inputs = [jax.ShapeDtypeStruct(shape, d, sharding=sharding) for d, shape, sharding in joined]
        use = program.run.lower(*inputs).compile().memory_analysis()
        added = use.output_size_in_bytes - use.alias_size_in_bytes + use.temp_size_in_bytes
        peak = max(peak, live + added)
        live += sum(a.after for a in of) - sum(a.before for a in of) * donate
        after += sum(a.after for a in of)
    assert after == move.memory.target
    assert 0.95 * move.memory.peak <= peak <= 1.01 * move.memory.peak
    assert any(a.in_place for a in move.arrays) == (donate and target == "model=8")
    larger = max(move.memory.source, move.memory.target)
    assert move.memory.peak <= 1.2 * larger + (0 if donate else min(move.memory.source, move.memory.target))


FETCH = """
import sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import meshpar as mp
shapes = {"a": {"up": jax.ShapeDtypeStruct((16, 32), np.float32)}, "norm": jax.ShapeDtypeStruct((16,), np.float32)}
dims = {"*/up": "embed mlp", "norm": "embed"}
move = mp.move(shapes, source=("data=8", "embed: data"), target=("replica=2, model=4", "mlp: model"), dims=dims)
tree = move.fetch(sys.argv[1], 5)
assert tree["a"]["up"].sharding.spec == jax.sharding.PartitionSpec(None, "model")
print(float((np.asarray(tree["a"]["up"]).ravel() * np.arange(512)).sum()), np.asarray(tree["norm"]).tolist() == list(range(16)))
"""


@pytest.mark.slow
def test_another_job_fetches_the_arrays():
    tree = {"a": {"up": jnp.arange(512, dtype=jnp.float32).reshape(16, 32)}, "norm": jnp.arange(16, dtype=jnp.float32)}
    names = {"*/up": "embed mlp", "norm": "embed"}
    move = mp.move(tree, source=FSDP, target=("replica=2, model=4", "mlp: model"), dims=names)
    address = move.offer(placed(tree, FSDP, names), 5)
    run = subprocess.run([sys.executable, "-c", FETCH, address], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == [str(float((np.arange(512.0) ** 2).sum())), "True"], run.stderr


def test_without_a_transfer_server_there_is_an_error(params, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    with pytest.raises(mp.errors.UnsupportedError, match="this JAX has no"):
        mp.move(params, source=FSDP, target=TENSOR, dims=DIMS).offer(placed(params, FSDP), host="127.0.0.9")


def test_meshes_without_devices_are_planned(params):
    source, target = jax.sharding.AbstractMesh((8,), ("data",)), jax.sharding.AbstractMesh((2, 4), ("replica", "model"))
    move = mp.move(params, source=(source, FSDP[1]), target=(target, TENSOR[1]), dims=DIMS)
    real = mp.move(params, source=FSDP, target=("replica=2, model=4", TENSOR[1]), dims=DIMS)
    assert move.bytes_sent == real.bytes_sent
    with pytest.raises(mp.errors.UnsupportedError, match="was planned from"):
        move(placed(params, FSDP))


def test_the_report(params, tmp_path):
    move = mp.move(params, source=FSDP, target=(mp.mesh("model=4", devices=half(False)), TENSOR[1]), dims=DIMS)
    text = str(move)
    parts = "8 devices (data 8)", "4 devices (model 4)", "collective-permute", "layers embed:data mlp", "not donated"
    assert all(part in text for part in parts)
    move.save(tmp_path / "move.html")
    assert "<h2>Collectives" in (tmp_path / "move.html").read_text()
    move.save(tmp_path / "move.json")
    assert json.loads((tmp_path / "move.json").read_text())["bytes_sent"] == move.bytes_sent

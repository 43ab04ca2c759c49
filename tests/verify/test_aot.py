"""mp.compile with real compilers: XLA's for CPUs everywhere, those for TPUs and GPUs where they are installed."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.errors import CompilerError, MeshError, OutOfMemoryError, UnsupportedError

tpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler, which is in libtpu: pip install 'jax[tpu]'",
)
cuda = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="needs JAX's CUDA plugin: pip install jax-cuda12-plugin jax-cuda12-pjrt",
)

LAYERS, EMBED, MLP, BATCH = 3, 256, 512, 64
LAYOUT = "batch: data; mlp: model; embed: data"
DIMS = {"state/up": "layers embed mlp", "state/down": "layers mlp embed", "x": "batch embed"}


def step(state, x):
    def loss(w):
        def layer(x, w):
            return jnp.tanh(x @ w["up"]) @ w["down"], None

        y, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return (y.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - g.astype(p.dtype), state, grads), value


def state(embed=EMBED, mlp=MLP, layers=LAYERS, dtype="bfloat16"):
    return {
        "up": jax.ShapeDtypeStruct((layers, embed, mlp), dtype),
        "down": jax.ShapeDtypeStruct((layers, mlp, embed), dtype),
    }


X = jax.ShapeDtypeStruct((BATCH, EMBED), "bfloat16")
HOW = {"layout": LAYOUT, "dims": DIMS, "donate_argnames": "state"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHPAR_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MESHPAR_COMPILES", "64")  # these are small, and must not wait for others on the machine
        yield


def test_for_cpus(mesh):
    """From a function to memory, collectives and text; the same program is compiled once."""
    compiled = mp.compile(step, state(), X, mesh=mesh, lowering="shard_map", **HOW)
    weights = 2 * LAYERS * EMBED * MLP * 2 // 8  # bf16, all of it split
    assert compiled.topology == "cpu:8"
    assert compiled.memory.arguments == weights + BATCH * EMBED * 2 // 4
    assert compiled.memory.aliased == weights  # donated
    assert compiled.memory.peak >= weights
    assert compiled.bytes_sent == sum(c.total_bytes for c in compiled.final_collectives)
    # CPUs widen bf16 to f32 in the end; right after partitioning it is what the plan lists
    assert sum(c.total_bytes for c in compiled.collectives) == pytest.approx(compiled.plan.bytes_sent)
    assert {a for c in compiled.collectives for a in c.axes(dict(mesh.shape))} == {"data", "model"}
    assert compiled.cycles is None
    assert compiled.as_text().startswith("HloModule jit_step")

    again = mp.jit(step, mesh=mesh, lowering="shard_map", **HOW).compile(state(), X)
    assert (compiled.cached, again.cached) == (False, True)
    assert again.memory == compiled.memory
    text = str(again)
    assert "compiled  step for cpu:8, fast effort, from the cache" in text
    assert "right after partitioning: " in text
    assert "tests/verify/test_aot.py" in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_compiled_is_chosen_by_a_calibration(mesh):
    measured = mp.types.Calibration("cpu", "0.1", 0.1, 0.2, 0.3)
    compiled = mp.compile(step, state(), X, mesh=mesh, lowering="shard_map", calibration=measured, **HOW)
    assert compiled.plan.chip.calibration == measured.name
    assert f"calibrated on {measured.name}" in str(compiled)
    with pytest.raises(UnsupportedError, match=r"calibration: the result of mp\.jit has its own"):
        mp.compile(mp.jit(step, mesh=mesh, **HOW), state(), X, calibration=measured)
    other = mp.types.Calibration("TPU v5 lite", "0.1", 0.1, 0.2, 0.3)
    with pytest.raises(MeshError, match="the calibration is of TPU v5 lite"):
        mp.compile(step, state(), X, mesh=mesh, calibration=other, **HOW)


def test_a_program_that_meshpar_did_not_make(mesh):
    split = NamedSharding(mesh, P(("data", "model")))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=split)
    fn = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    compiled = mp.compile(fn, x, mesh=mesh, effort="full")
    (sent,) = compiled.final_collectives
    assert (sent.op, sent.bytes, sent.count) == ("all-reduce", 2 * 128 * 4 * 7 / 8, 1)
    assert sent.axes(dict(mesh.shape)) == ("data", "model")
    assert compiled.plan is None
    assert "all-reduce  data+model" in str(compiled)
    assert mp.compile(fn.lower(x), effort="full").cached


@pytest.mark.parametrize("own", [{"topology": "v5e:2x2"}, {"lowering": "jit"}, {"dims": {"x": "batch"}}])
def test_a_lowered_program_has_its_own_layout_and_devices(own):
    with pytest.raises(UnsupportedError, match=f"{next(iter(own))}: a lowered program has its own layout and devices"):
        mp.compile(jax.jit(lambda x: x + 1), jnp.ones(4), **own)


def test_an_option_that_the_compiler_refuses(mesh):
    with pytest.raises(CompilerError) as error:
        mp.compile(step, state(), X, mesh=mesh, compiler_options={"xla_no_such_option": True}, **HOW)
    assert "the compiler for cpu:8 refuses this program: INVALID_ARGUMENT: No such compile option" in str(error.value)


def test_missing_arguments_devices_and_packages(mesh, monkeypatch):
    abstract = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sizes = {"mesh": "data=8, model=2"}
    for error, message, options in [
        (UnsupportedError, "there is no effort 'slow'", {"mesh": mesh, "effort": "slow", **HOW}),
        (MeshError, "no mesh .* and none is set; topology 'v5e:2x2' has 4 devices", {"topology": "v5e:2x2", **HOW}),
        (UnsupportedError, r"mp\.compile needs a layout", {"mesh": mesh}),
        (MeshError, "an abstract mesh has no devices to compile for", {"mesh": abstract, **HOW}),
        (MeshError, "(?s)'v9:4x4' is not known.*v5e, v6e: 1x1, 2x2, 2x4, 4x4", {**sizes, "topology": "v9:4x4", **HOW}),
        (
            MeshError,
            r"\(data=4, model=2\) has 8 devices, but v5e:4x4 has 16",
            {"mesh": mesh, "topology": "v5e:4x4", **HOW},
        ),
    ]:
        with pytest.raises(error, match=message):
            mp.compile(step, state(), X, **options)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    plugin = rf"pip install jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__}"
    for topology, package in {"v5p:4x4x12": r'fix     pip install "jax\[tpu\]"', "h100:2": plugin}.items():
        with pytest.raises(MeshError, match=package):
            mp.compile(step, state(), X, mesh="data=-1, model=2", topology=topology, **HOW)


def test_a_program_that_calls_back():
    def talks(x):
        jax.debug.print("{x}", x=x)
        return x

    with pytest.raises(UnsupportedError, match="callbacks into Python"):
        mp.compile(jax.jit(talks), jnp.ones(4))


@tpu
@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
def test_for_a_tpu_slice(lowering):
    compiled = mp.compile(step, state(), X, mesh="data=4, model=4", topology="v5e:4x4", lowering=lowering, **HOW)
    assert (compiled.topology, compiled.capacity) == ("v5e:4x4", 15.75 * 2**30)
    weights = 2 * LAYERS * EMBED * MLP * 2 // 16
    assert compiled.memory.aliased == weights
    assert 0 < compiled.memory.peak < 2**30
    assert compiled.cycles is not None
    assert compiled.cycles > 0
    found = {c.op for c in compiled.final_collectives}
    assert {"all-gather", "all-reduce"} < found
    if lowering == "shard_map":
        partitioned = [c for c in compiled.collectives if c.op == "reduce-scatter"]
        assert sum(c.count for c in partitioned) == 2 * LAYERS
        assert sum(c.total_bytes for c in compiled.collectives) == pytest.approx(compiled.plan.bytes_sent, rel=1e-3)


def offloaded(x):
    """Comes from the host's memory, and leaves a result and what it computes with there."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    x = jax.device_put(x, device)
    saved = jax.device_put(jax.lax.optimization_barrier(jax.device_put(jnp.cos(x), host)), device)
    return x * saved, jax.device_put(jnp.sin(x), host)


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["jit", "shard_map"])
@pytest.mark.parametrize("fn", [offloaded, lambda x: (x + 1, jax.device_put(jnp.sin(x), jax.memory.Space.Host))])
def test_the_hosts_memory_is_not_counted_as_a_devices(lowering, fn):
    mesh = mp.mesh("data=4", topology="v5e:2x2")
    kind = "pinned_host" if fn is offloaded else "device"
    shard = 2**20 * 4
    x = jax.ShapeDtypeStruct((4 * 2**20,), "float32", sharding=NamedSharding(mesh, P("data"), memory_kind=kind))
    compiled = mp.compile(fn, x, mesh=mesh, layout="rows: data", dims={"x": "rows"}, lowering=lowering)
    assert compiled.memory.host == pytest.approx(compiled.plan.memory.host, rel=0.01)
    assert compiled.memory.peak == pytest.approx(
        compiled.plan.memory.peak, abs=1.1 * shard
    )  # of 2 to 3 shards, and 2 or 3 on the host
    assert "in the host's memory" in str(compiled)


@tpu
def test_several_slices():
    """Within a slice over ICI, between slices over DCN: together what the plan lists, at most."""
    options = {**HOW, "layout": "batch: slice+data; mlp: model; embed: data", "lowering": "shard_map"}
    compiled = mp.compile(step, state(), X, mesh="slice=2, data=2, model=2", topology="2x v6e:2x2", **options)
    far = [c for c in compiled.final_collectives if c.dcn]
    sizes = {"slice": 2, "data": 2, "model": 2}
    assert {(c.op, c.axes(sizes), c.group) for c in far} == {("all-reduce", ("slice",), 2)}
    weights = LAYERS * 2 * EMBED * MLP * 2 // 4  # bf16, split over data and model: their gradients are reduced over DCN
    assert weights <= sum(c.total_bytes for c in far) <= weights + 1024
    near = {(c.op, c.axes(sizes)) for c in compiled.final_collectives if not c.dcn}
    assert ("all-gather", ("data",)) in near
    assert ("all-reduce", ("model",)) in near
    planned = sum(c.total_bytes for c in compiled.plan.collectives if "slice" in c.axes)
    assert sum(c.total_bytes for c in far) == pytest.approx(planned, rel=0.01)


@tpu
def test_too_large_for_a_tpu():
    """Two float32 weights of 8 GiB each on a chip of 15.75, and rules that hold less."""
    large = state(embed=32768, mlp=65536, layers=1, dtype="float32")
    x = jax.ShapeDtypeStruct((64, 32768), jnp.float32)
    how = {"mesh": "data=2, model=2", "topology": "v5e:2x2", "dims": DIMS, "donate_argnames": "state"}
    with pytest.raises(OutOfMemoryError) as error:
        mp.compile(step, large, x, layout="batch: data", **how)
    text = str(error.value)
    assert "out of memory on v5e:2x2: " in text
    assert "but a device has 15.75 GiB" in text
    assert "8.00 GiB  state/up" in text
    assert error.value.capacity == 15.75 * 2**30
    rules = [fix.split("`")[1] for fix in error.value.fixes if fix.startswith("add ")]
    assert rules
    with pytest.raises(OutOfMemoryError):  # remembered, too
        mp.compile(step, large, x, layout="batch: data", **how)


@cuda
@pytest.mark.parametrize("topology", ["h200:8", "2x b200:4"])
def test_for_gpus(topology):
    compiled = mp.compile(step, state(), X, mesh="data=4, model=2", topology=topology, lowering="shard_map", **HOW)
    assert compiled.topology == topology
    weights = 2 * LAYERS * EMBED * MLP * 2 // 8
    assert compiled.memory.aliased == weights
    assert compiled.memory.temporaries < compiled.memory.peak < 2**24
    assert {c.op for c in compiled.final_collectives} >= {"all-gather", "all-reduce"}
    assert sum(c.total_bytes for c in compiled.collectives) == pytest.approx(compiled.plan.bytes_sent, rel=1e-3)


@cuda
def test_too_large_for_a_gpu():
    large = state(embed=65536, mlp=524288, layers=1)
    x = jax.ShapeDtypeStruct((8, 65536), "bfloat16")
    with pytest.raises(OutOfMemoryError) as error:
        mp.compile(step, large, x, mesh="data=8", topology="h200:8", layout="batch: data", dims=DIMS)
    assert error.value.capacity == 151397597184
    assert error.value.needed > error.value.capacity
    assert "64.00 GiB  state/up" in str(error.value)

"""Exported steps: saved, loaded in another process without the step's code, on other devices; bad files, meshes and arguments."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.errors import MeshError, UnsupportedError

pytest.importorskip("flatbuffers")

DIMS = {"params/up": "embed mlp", "params/down": "mlp embed", "x": "batch embed"}
RNG = np.random.default_rng(0)
PARAMS = {"up": RNG.standard_normal((16, 32)).astype("f4") / 4, "down": RNG.standard_normal((32, 16)).astype("f4") / 6}
X = RNG.standard_normal((8, 16)).astype("f4")


def train_step(params, x):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": loss}


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6), a, b)


@pytest.fixture(scope="module")
def exported():
    mesh = mp.mesh("data=4, model=2")
    return mp.jit(train_step, mesh=mesh, layout="batch: data", dims=DIMS).export(PARAMS, X)


@pytest.mark.parametrize(
    ("layout", "lowering"), [("batch: data", "jit"), ("batch: data; mlp: model; embed: data", "shard_map")]
)
def test_round_trip(mesh, layout, lowering):
    step = mp.jit(train_step, mesh=mesh, layout=layout, dims=DIMS, lowering=lowering)
    exported, plan = step.export(PARAMS, X), step.plan(PARAMS, X)
    loaded = mp.types.Exported.load(exported.serialize(), mesh)
    params, metrics = loaded(PARAMS, X)
    same((params, metrics), train_step(PARAMS, X))
    same(exported(PARAMS, X), (params, metrics))
    assert (loaded.layout, loaded.lowering, loaded.platforms) == (layout, lowering, ("cpu",))
    assert (loaded.inputs, loaded.outputs) == (exported.inputs, exported.outputs)
    assert [x.path for x in loaded.inputs] == [h.path for h in plan.inputs]
    for made, x in zip(jax.tree.leaves(params), loaded.outputs[:2], strict=True):
        assert made.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, x.partition_spec), made.ndim)
    for x, h in zip(loaded.inputs, plan.inputs, strict=True):
        assert loaded.shardings()[x.path].is_equivalent_to(jax.sharding.NamedSharding(mesh, h.spec), len(x.shape))


def test_another_process_without_the_code(mesh, tmp_path):
    layout = "batch: data; mlp: model; embed: data"
    mp.jit(train_step, mesh=mesh, layout=layout, dims=DIMS).export(PARAMS, X).save(tmp_path / "step.zip")
    np.savez(tmp_path / "arrays.npz", x=X, **PARAMS)
    program = """
        import sys, jax, numpy as np, meshpar as mp
        mp.virtual_devices(8)
        devices = np.array(jax.devices())[::-1].reshape(4, 2)  # other devices in every place
        step = mp.types.Exported.load("step.zip", jax.sharding.Mesh(devices, ("data", "model")))
        arrays = dict(np.load("arrays.npz"))
        x = arrays.pop("x")
        params, metrics = step(params=arrays, x=x)
        np.savez("results.npz", loss=metrics["loss"], **params)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=tmp_path, timeout=120)
    results = dict(np.load(tmp_path / "results.npz"))
    params, metrics = train_step(PARAMS, X)
    same(results, {**params, **metrics})


def test_nnx_modules(mesh):
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    model = Mlp(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    dims = {"*/up/kernel": "embed mlp", "*/down/kernel": "mlp embed", "x": "batch embed"}
    jitted = mp.jit(step, mesh=mesh, layout="batch: data; mlp: model", dims=dims)
    loaded = mp.types.Exported.load(jitted.export(model, optimizer, X).serialize(), mesh)
    out = loaded(model, optimizer, X)
    loss = step(model, optimizer, X)  # updates the model
    same(out["result"], loss)
    for name in ("up", "down"):
        same(out["model"][name]["kernel"], getattr(model, name).kernel[...])
        same(out["model"][name]["bias"], getattr(model, name).bias[...])


def test_donated_and_static_arguments(mesh):
    def scaled(state, x, power):
        return state * 2 + jnp.sum(x) ** power, x

    options = {"static_argnames": "power", "donate_argnames": "state"}
    dims = {"state": "batch embed", "x": "batch embed"}
    step = mp.jit(scaled, mesh=mesh, layout="batch: data", dims=dims, **options)
    exported = step.export(jnp.asarray(X), jnp.asarray(X), 2)
    assert exported.arguments == ("state", "x")
    assert exported.donated == ("state",)
    loaded = mp.types.Exported.load(exported.serialize(), mesh)
    state = jax.device_put(X, loaded.shardings()["state"])
    new, x = loaded(state, X)
    same((new, x), scaled(X, X, 2))
    assert state.is_deleted()


def test_for_devices_that_are_not_attached():
    mesh = mp.mesh("data=4, model=2")
    exported = mp.jit(train_step, mesh=mesh, layout="batch: data", dims=DIMS).export(PARAMS, X, platforms=["tpu"])
    assert exported.platforms == ("tpu",)
    assert exported.mesh is None
    with pytest.raises(MeshError, match="has no devices to run on"):
        exported(PARAMS, X)
    with pytest.raises(MeshError, match="exported for tpu, and the devices of this mesh are cpu"):
        exported.on(mesh)


def test_other_meshes_and_arguments(exported):
    for other in ("data=2, model=4", "model=2, data=4", "data=8"):
        with pytest.raises(MeshError, match="exported for a mesh data=4, model=2"):
            exported.on(mp.mesh(other))
    for args, says in (
        (({"up": PARAMS["up"], "extra": X}, X), "params/down missing; params/extra"),
        ((PARAMS, X.T), "exported for float32\\[8, 16\\], and this is float32\\[16, 8\\]"),
        ((PARAMS, X.astype("i4")), "and this is int32"),
        ((PARAMS, X, X), "takes 2 positional arguments, and 3 were given"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            exported(*args)


def test_files_that_are_no_exported_steps(tmp_path):
    files = {"other": {"readme": ""}, "newer": {"step.json": json.dumps({"format": 99}), "step.bin": ""}}
    for name, entries in files.items():
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            for entry, data in entries.items():
                archive.writestr(entry, data)
    for what, says in (
        (b"nothing", "these bytes are no exported step"),
        (tmp_path / "other.zip", r"other\.zip is no exported step"),
        (tmp_path / "newer.zip", "newer version"),
        (tmp_path / "none.zip", r"none\.zip cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            mp.types.Exported.load(what)


def entries(content: bytes) -> tuple[dict, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return json.loads(archive.read("step.json")), archive.read("step.bin")


def archive_of(facts, program: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("step.json", facts if isinstance(facts, bytes) else json.dumps(facts))
        archive.writestr("step.bin", program)
    return out.getvalue()


def test_damaged_bytes(exported):
    """Flipped, cut and inserted bytes of the archive, and of its entries with right checksums."""
    rng, content = np.random.default_rng(0), exported.serialize()
    facts, program = entries(content)

    def damaged(data: bytes) -> bytes:
        at, how = int(rng.integers(len(data))), rng.integers(3)
        if how == 0:
            return data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]
        return data[:at] if how == 1 else data[:at] + rng.bytes(int(rng.integers(1, 9))) + data[at:]

    refused = 0
    for k in range(150):
        head = json.dumps(facts).encode()
        cut = program[: rng.integers(len(program))]
        bad = damaged(content), archive_of(damaged(head), program), archive_of(facts, cut)
        try:
            mp.types.Exported.load(bad[k % 3])
        except UnsupportedError:
            refused += 1
    assert refused > 75  # the others are of bytes without a meaning, such as in names


def test_facts_of_other_types(exported):
    facts, program = entries(exported.serialize())
    for key in facts:
        without = {k: v for k, v in facts.items() if k != key}
        for changed in (without, {**facts, key: None}, {**facts, key: [[1]]}):
            with contextlib.suppress(UnsupportedError):
                mp.types.Exported.load(archive_of(changed, program))
        with pytest.raises(UnsupportedError, match="no exported step"):
            mp.types.Exported.load(archive_of(without, program))
    for wrong in ([], 3, "text", {**facts, "inputs": facts["inputs"][1:]}, {**facts, "more": 1}):
        with pytest.raises(UnsupportedError, match="no exported step"):
            mp.types.Exported.load(archive_of(wrong, program))


def test_custom_calls_without_a_compatibility_guarantee(mesh):
    def callback(x):
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    how = {"mesh": mesh, "layout": "", "dims": {"x": "batch embed"}}
    with pytest.raises(UnsupportedError, match="cannot be exported"):
        mp.jit(callback, **how).export(X)

    def foreign(x):
        return jax.ffi.ffi_call("some_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with pytest.raises(UnsupportedError, match=r"cannot be exported.*some_kernel"):
        mp.jit(foreign, **how).export(X)
    allowed = [jax.export.DisabledSafetyCheck.custom_call("some_kernel")]
    exported = mp.jit(foreign, **how).export(X, disabled_checks=allowed)
    assert "some_kernel" in exported.program.mlir_module()


def test_arrays_in_host_memory(mesh):
    host = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    x = jax.device_put(X, host)
    with pytest.raises(UnsupportedError, match="x: it is in host memory"):
        mp.jit(lambda x: x, mesh=mesh, layout="batch: data", dims={"x": "batch embed"}).export(x)

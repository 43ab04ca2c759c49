"""Rings in the compiled program: they send the bytes that the plan lists, and results equal the unsharded run."""

import importlib.util
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import small_transformer
from interpreters import race_detection
from same_results import assert_close

import meshpar as mp

LAYER = {
    "layout": "batch: data; mlp: model; seq: model",
    "lowering": "shard_map",
    "dims": {"x": "batch seq embed", "gate": "embed mlp", "up": "embed mlp", "down": "mlp embed"},
}


def layer(x, gate, up, down):
    """Two matmuls share a gather, a third is scattered; the gradients save the gathered operand and add two matmuls."""
    return jnp.sum(((jnp.tanh(x @ gate) * (x @ up)) @ down) ** 2)


STEP = jax.value_and_grad(layer, argnums=(0, 1, 2, 3))


def of_layer(batch, seq, embed, mlp, make):
    return [make(s) for s in ((batch, seq, embed), (embed, mlp), (embed, mlp), (mlp, embed))]


def test_the_compiled_layer_sends_what_the_plan_lists():
    args = of_layer(8, 16, 32, 64, lambda s: jax.ShapeDtypeStruct(s, jnp.float32))
    layout = f"{LAYER['layout']}; embed: data"
    options = {"overlap": "ring", "cache": False, "compiler_options": quick.OPTIONS, **LAYER, "layout": layout}
    compiled = mp.compile(STEP, *args, mesh="data=4, model=2", progress=lambda _: None, **options)
    planned, found = Counter(), Counter()
    for counter, collectives in ((planned, compiled.plan.collectives), (found, compiled.collectives)):
        for c in collectives:
            counter[c.op, round(c.bytes, 3)] += c.count
    assert planned == found
    assert sum(n for (op, _), n in found.items() if op == "collective-permute") > 5


@pytest.mark.slow
def test_scanned_and_recomputed_layers_give_the_unsharded_state():
    model = small_transformer
    step = model.step_of(rename=False)
    options = {"mesh": ["data=2, model=4"], "dims": model.DIMS, "lowerings": ["shard_map"], "overlap": "ring"}
    assert mp.check(step, *model.create(), layout=[model.LAYOUTS["+ sequence parallel"]], **options).ok


@pytest.mark.parametrize("mesh", [{"data": 1, "model": 8}, {"data": 2, "model": 3}], ids=str)
def test_batched_matmuls_transposed_results_and_bfloat16(mesh):
    """Reduce-scatters of transposed matmuls in bfloat16; a gathered operand with a batch dim."""

    def f(x, w, u, v):
        y = jnp.einsum("gse,gef->gsf", x, w)
        z = jnp.einsum("gsf,gfe->ges", y, u) + jnp.einsum("gsf,gfe->ges", jnp.tanh(y), v)
        return y, z.swapaxes(1, 2)

    rng = np.random.default_rng(1)
    args = [rng.normal(size=s).astype(np.float32) for s in ((2, 24, 8), (2, 8, 48), (2, 48, 8), (2, 48, 8))]
    dims = {"x": "group seq embed", "w": "group embed mlp", "u": "group mlp embed", "v": "group mlp embed"}
    devices = jax.devices()[: math.prod(mesh.values())]
    ring = mp.jit(
        f,
        mesh=mp.mesh(mesh, devices=devices),
        layout="mlp: model; seq: model",
        dims=dims,
        lowering="shard_map",
        overlap="ring",
    )
    assert {o.kind for o in ring.plan(*args).overlaps} == {"gather", "scatter"}
    assert_close(ring(*args), f(*args), rtol=1e-5, atol=1e-4)
    half = [jnp.asarray(a, jnp.bfloat16) for a in args]
    sent = [line for line in ring.lower(*half).as_text().splitlines() if "collective_permute" in line]
    assert sent
    assert all("bf16>" in line and "f32" not in line for line in sent)


@pytest.mark.slow
def test_the_fused_kernels_give_the_unsharded_gradients():
    """Two rings of four devices, in the TPU interpreter with race detection, on operands that the kernels take."""
    rng = np.random.default_rng(2)
    args = of_layer(4, 32, 128, 512, lambda s: rng.normal(size=s).astype(np.float32) / 8)
    wanted = STEP(*args)
    with race_detection():
        fused = mp.jit(STEP, mesh=mp.mesh("data=2, model=4"), overlap="pallas", **LAYER)
        pairs = fused.plan(*args).overlaps
        found = jax.block_until_ready(fused(*args))
    assert [o.kind for o in pairs if o.choice == "pallas"] == ["gather", "scatter", "gather", "scatter"]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler, which is in libtpu: pip install 'jax[tpu]'",
)
def test_the_fused_kernels_compile_in_a_step():
    """On two lines of a v5e; the kernels are in the final program as often as the plan has them."""
    args = of_layer(8, 1024, 512, 2048, lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16))
    options = {"overlap": "pallas", "topology": "v5e:4x4", "cache": False, **LAYER}
    with pytest.warns(mp.errors.TorusWarning, match="`model` is no ring of the torus"):
        compiled = mp.compile(STEP, *args, mesh="data=4, model=4", progress=lambda _: None, **options)
    kinds = [o.kind for o in compiled.plan.overlaps if o.choice == "pallas"]
    assert sorted(kinds) == ["gather", "gather", "scatter", "scatter"]
    calls = [line for line in compiled.as_text().splitlines() if "tpu_custom_call" in line]
    assert sum("meshpar_all_gather_matmul" in line for line in calls) == 2
    assert sum("meshpar_matmul_reduce_scatter" in line for line in calls) == 2


def test_off_and_xla_are_one_program():
    def f(x, up, down):
        return jax.nn.relu(x @ up) @ down

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16, 8), (8, 32), (32, 8))]
    dims = {"x": "batch seq embed", "up": "embed mlp", "down": "mlp embed"}
    options = {"layout": LAYER["layout"], "dims": dims, "lowering": "shard_map"}
    texts = {
        mode: mp.jit(f, mesh="data=4, model=2", overlap=mode, **options).lower(*args).as_text()
        for mode in ("off", "xla", "auto", None, "ring")
    }
    assert texts["off"] == texts["xla"] == texts["auto"] == texts[None] != texts["ring"]

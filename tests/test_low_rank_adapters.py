"""Low-rank adapters: values against matmuls by hand, every kind of model, what a plan sends, codes of 8 bits, PEFT's files."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_results import assert_same_under

import llama
import meshpar as mp
from meshpar.errors import CheckpointError, PatternError, RankError, UnsupportedError

E, M, H, D, L, B, R = 16, 32, 4, 8, 2, 8, 2
DIMS = {
    "*/q_proj": "layers embed heads head_dim",
    "*/o_proj": "layers heads head_dim embed",
    "*/up": "layers embed mlp",
    "*/down": "layers embed mlp",
    "x": "batch embed",
}
LAYOUTS = [
    ("data=8", "batch: data; embed: data"),
    ("data=2, model=4", "batch: data; heads, mlp: model"),
    ("data=4, model=2", "batch: data; heads, mlp: model; embed: data"),
]


def weights():
    rng = np.random.default_rng(0)
    shapes = {"q_proj": (L, E, H, D), "o_proj": (L, H, D, E), "up": (L, E, M), "down": (L, E, M)}
    return {"layers": {k: rng.normal(size=s) / 4 for k, s in shapes.items()}}, rng.normal(size=(B, E))


def loss_of(params, x):
    """A scan over layers with recomputation; `down` is read transposed, `q_proj` and `o_proj` have three dims."""

    @jax.checkpoint
    def layer(x, w):
        q = jnp.einsum("be,ehd->bhd", x, w["q_proj"])
        x = x + jnp.einsum("bhd,hde->be", jnp.tanh(q), w["o_proj"])
        return x + jnp.tanh(x @ w["up"]) @ w["down"].T, None

    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)


def by_hand(adapters, params, x):
    """The same with ``x @ W + 2 (x @ A) @ B`` written in the model."""
    for i in range(L):
        w = {k: v[i] for k, v in params["layers"].items()}
        a, b = ({k: getattr(adapters["layers/" + k], part)[i] for k in w} for part in ("lora_A", "lora_B"))
        q = jnp.einsum("be,ehd->bhd", x, w["q_proj"]) + 2 * jnp.einsum("be,er,rhd->bhd", x, a["q_proj"], b["q_proj"])
        t = jnp.tanh(q)
        o = jnp.einsum("bhd,hde->be", t, w["o_proj"])
        x = x + o + 2 * jnp.einsum("bhd,hdr,re->be", t, a["o_proj"], b["o_proj"])
        up = jnp.tanh(x @ w["up"] + 2 * (x @ a["up"]) @ b["up"])
        x = x + up @ w["down"].T + 2 * (up @ a["down"]) @ b["down"]
    return jnp.mean(x**2)


def drawn(adapters, seed=1):
    """Adapters with other values than those of ``init``, whose B is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype), adapters)


ADAPTED = mp.train.lora(loss_of, "layers/*", rank=R, alpha=4)


def test_losses_gradients_and_merged_weights_are_those_by_hand_under_layouts(x64):
    params, x = weights()
    adapters = ADAPTED.init(jax.random.key(0), params, x)
    assert ADAPTED(adapters, params, x) == loss_of(params, x)  # a new adapter changes nothing
    adapters = drawn(adapters)
    want = jax.value_and_grad(by_hand)(adapters, params, x)

    def step(adapters, params, x):
        return jax.value_and_grad(ADAPTED)(adapters, params, x)

    assert_same_under(LAYOUTS[1:], step, adapters, params, x, expected=want, tolerance=1e-13, dims=DIMS)

    def merged(adapters, params, x):
        return loss_of(ADAPTED.merge(adapters, params), x)

    assert_same_under(LAYOUTS[1:2], merged, adapters, params, x, expected=want[0], tolerance=1e-13, dims=DIMS)


def test_a_plan_has_the_adapters_sharded_like_their_weights_and_no_gradient_of_these():
    params, x = weights()
    adapters = ADAPTED.init(jax.random.key(0), params, x)
    tx = optax.adam(1e-3)

    def step(state, params, x):
        loss, gradients = jax.value_and_grad(ADAPTED)(state["adapters"], params, x)
        updates, opt = tx.update(gradients, state["opt"])
        return {"adapters": optax.apply_updates(state["adapters"], updates), "opt": opt}, loss

    state = {"adapters": adapters, "opt": tx.init(adapters)}
    plan = mp.plan(step, state, params, x, mesh=LAYOUTS[2][0], layout=LAYOUTS[2][1], dims=DIMS)
    found = {v.path: (" ".join(v.dims), tuple(v.spec)) for v in plan.inputs if "/layers/q_proj" in v.path}
    for part in ("state/adapters", "state/opt/0/mu", "state/opt/0/nu"):
        assert found[f"{part}/layers/q_proj/lora_A"] == ("layers embed rank", (None, "data"))
        assert found[f"{part}/layers/q_proj/lora_B"] == ("layers rank heads head_dim", (None, None, "model"))
    opt = sum(math.prod(v.shape) for v in plan.inputs if v.kind == "opt" and v.shape)
    assert opt == 2 * sum(x.size for x in jax.tree.leaves(adapters))
    assert not {"embed mlp", "embed heads head_dim"} & {c.dims for c in plan.collectives if "reduce" in c.op}


def reductions(target, mesh, layout):
    step, args, dims = target
    plan = mp.plan(step, *args, mesh=mesh, topology="v5p:4x4x8", layout=layout, dims=dims)
    sent = {"gradients": 0.0, "gathers": 0.0}
    for c in plan.collectives:
        reduces, weight = c.op in ("all-reduce", "reduce-scatter"), not {"batch", "seq"} & set(c.dims.split())
        if weight:
            sent["gradients" if reduces else "gathers"] += c.bytes * (c.count or 1)
    return sent


def test_llama_3_8b_reduces_at_most_a_hundredth_of_the_gradient_bytes():
    mesh, layout = "data=128", llama.FSDP
    full, adapters = (reductions(f(), mesh, layout) for f in (llama.llama3_8b, llama.llama3_8b_lora))
    assert 0 < adapters["gradients"] <= full["gradients"] / 100
    assert adapters["gathers"] <= 1.01 * full["gathers"]
    small = reductions(llama.llama3_8b_lora(base="int8"), mesh, layout)
    assert small["gradients"] == adapters["gradients"]
    assert small["gathers"] <= 0.58 * adapters["gathers"]  # embedding and head stay in bfloat16


# -- models


def test_equinox_modules():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(E, E, M, 1, key=jax.random.key(0))
    apply = mp.train.lora(lambda model, x: jax.vmap(model)(x), "layers/*/weight", rank=R)
    x = jnp.asarray(weights()[1], jnp.float32)
    adapters = drawn(apply.init(jax.random.key(0), mlp, x))
    np.testing.assert_allclose(apply(adapters, mlp, x), jax.vmap(apply.merge(adapters, mlp))(x), rtol=1e-4, atol=1e-6)


def unrolled(params, x):
    for i in range(L):
        x = jnp.tanh(x @ params["w"][i])
    return x


def in_a_loop(params, x):
    return jax.lax.fori_loop(0, L, lambda i, x: jnp.tanh(x @ params["w"][i]), x)


def in_a_branch(params, x):
    return jax.lax.cond(x.sum() > 0, lambda w: x @ w[0], lambda w: -(x @ w[1]), params["w"])


def tied(params, x):
    """One weight contracted along one dim, then along the other."""
    return jnp.tanh(x @ params["w"][0]) @ params["w"][0].T


def of_experts(params, x):
    """A batch dim of the matmul, in bfloat16."""
    return jnp.einsum("bne,nem->bnm", jnp.stack([x, -x], 1), params["w"].astype(jnp.bfloat16).astype(x.dtype))


@pytest.mark.parametrize("fn", [unrolled, in_a_loop, in_a_branch, tied, of_experts])
def test_uses_of_weights(fn):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(L, E, E)) / 4, "float32")}
    x = jnp.asarray(rng.normal(size=(B, E)), "float32")
    apply = mp.train.lora(fn, "w", rank=R)
    adapters = drawn(apply.init(jax.random.key(0), params, x))
    want = fn(apply.merge(adapters, params), x)
    np.testing.assert_allclose(apply(adapters, params, x), want, atol=0.02 if fn is of_experts else 1e-4)


def test_rows_of_a_batch_have_adapters_of_their_own(x64):
    params, x = weights()
    many = [drawn(ADAPTED.init(jax.random.key(0), params, x), seed) for seed in range(3)]
    ids = np.arange(B) % 3

    def losses(many, ids, params, x):
        rows = jax.tree.map(lambda a: a[ids], many)
        return jax.vmap(lambda a, x: ADAPTED(a, params, x[None]), in_axes=(0, 0))(rows, x)

    want = jnp.stack([by_hand(many[i], params, x[k : k + 1]) for k, i in enumerate(ids)])
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *many)
    dims = {**DIMS, "ids": "batch"}
    assert_same_under(LAYOUTS[2:], losses, stacked, ids, params, x, expected=want, tolerance=1e-13, dims=dims)


# -- a base in 8 bits


def test_a_base_in_8_bits_is_gathered_in_8_bits():
    params, x = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights())
    contract = {"*q_proj": "embed", "*o_proj": "heads head_dim", "*up": "embed", "*down": "mlp"}
    small = mp.layers.quantize(params, "int8", dims=DIMS, contract=contract)
    wide = mp.layers.dequantize(small)
    adapters = drawn(ADAPTED.init(jax.random.key(0), small, x))
    assert set(adapters) == set(drawn(ADAPTED.init(jax.random.key(0), wide, x)))
    assert {a.dtype for a in jax.tree.leaves(adapters)} == {np.dtype("float32")}
    want = jax.value_and_grad(by_hand)(adapters, wide, x)

    def step(adapters, params, x):
        return jax.value_and_grad(ADAPTED)(adapters, params, x)

    assert_same_under(LAYOUTS[:1], step, adapters, small, x, expected=want, tolerance=1e-5, dims=DIMS)
    mesh, layout = LAYOUTS[0]
    plan = mp.plan(step, adapters, small, x, mesh=mesh, layout=layout, dims=DIMS)
    gathers = [c for c in plan.collectives if c.op == "all-gather" and "rank" not in c.dims.split()]
    codes = sum(c.bytes * c.count for c in gathers if c.dtype == "int8")
    scales = sum(c.bytes * c.count for c in gathers if c.dtype == "float32")
    assert codes > 0
    assert scales < codes  # nothing but scales is gathered in float32
    np.testing.assert_allclose(loss_of(ADAPTED.merge(adapters, small), x), want[0], rtol=1e-5)


# -- files


MODULES = {
    "layers/q_proj": "model.layers.{layers}.self_attn.q_proj",
    "layers/o_proj": "model.layers.{layers}.self_attn.o_proj",
    "layers/up": "model.layers.{layers}.mlp.up_proj",
    "layers/down": "model.layers.{layers}.mlp.down_proj",
}


def test_a_folder_has_the_names_and_matrices_of_peft_and_is_read_under_a_layout(tmp_path):
    """Names and shapes: https://huggingface.co/docs/peft/developer_guides/checkpoint; lora_A and lora_B are torch's nn.Linear."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    params, x = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights())
    new = ADAPTED.init(jax.random.key(0), params, x)
    adapters = drawn(new)
    assert mp.data.to_peft(tmp_path, adapters, MODULES) == 2 * L * 4
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", R, 4)
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj", "up_proj"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    merged = ADAPTED.merge(adapters, params)["layers"]
    for path, module in MODULES.items():
        key = path.partition("/")[2]
        for i in range(L):
            stem = f"base_model.model.{module.format(layers=i)}"
            a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
            assert a.shape[0] == b.shape[1] == R
            old, new_weight = (np.asarray(tree[key][i]) for tree in (params["layers"], merged))
            if key != "down":  # which is [out, in], as torch's weights are
                inputs = H * D if key == "o_proj" else E
                old, new_weight = (w.reshape(inputs, -1).T for w in (old, new_weight))
            np.testing.assert_allclose(old + config["lora_alpha"] / config["r"] * b @ a, new_weight, atol=1e-5)
    dims = {"*/{q_proj,up}/lora_A": "_ embed _"}
    shardings = mp.shardings(new, mesh=mp.mesh("data=8"), layout="embed: data", dims=dims)
    read = mp.data.from_peft(tmp_path, jax.device_put(new, shardings), MODULES)
    assert read["layers/up"].lora_A.sharding.spec[1] == "data"
    jax.tree.map(np.testing.assert_array_equal, read, adapters)
    with pytest.raises(RankError, match="has 1 stacked dims, but the name 'up' has the indices"):
        mp.data.to_peft(tmp_path, adapters, MODULES | {"layers/up": "up"})
    with pytest.raises(CheckpointError, match="modules= has no name for layers/"):
        mp.data.to_peft(tmp_path, adapters, {})
    other = mp.train.lora(loss_of, "*/up", rank=1).init(jax.random.key(0), params, x)
    with pytest.raises(UnsupportedError, match="several ranks and scales"):
        mp.data.to_peft(tmp_path, {**adapters, **other}, MODULES)


# -- errors


def embedded(params, tokens):
    return jnp.tanh(params["table"][tokens]) @ params["table"].T


def test_errors_name_the_use_and_the_line():
    params, tokens = {"table": jnp.ones((32, E)), "norm": jnp.ones(E)}, jnp.zeros(B, jnp.int32)
    use = r"(?s)table is an operand of gather.*test_low_rank_adapters\.py:\d+ \(embedded\)"
    with pytest.raises(UnsupportedError, match=use):
        mp.train.lora(embedded, "table", rank=R).init(jax.random.key(0), params, tokens)
    with pytest.raises(UnsupportedError, match="norm is a result of the function"):
        mp.train.lora(lambda p: p["norm"], "norm", rank=R).init(jax.random.key(0), params)
    with pytest.raises(PatternError, match=r"'nrom' matches no weight(.|\n)*norm"):
        mp.train.lora(embedded, "nrom", rank=R).init(jax.random.key(0), params, tokens)
    with pytest.raises(UnsupportedError, match="rank=0"):
        mp.train.lora(embedded, "norm", rank=0)
    adapted = mp.train.lora(lambda p, x: x @ p["w"], "w", rank=R)
    adapters = adapted.init(jax.random.key(0), {"w": jnp.ones((E, M))}, jnp.ones((B, E)))
    with pytest.raises(PatternError, match="an adapter of w, and the weights have no such path"):
        adapted(adapters, {"v": jnp.ones((E, M))}, jnp.ones((B, E)))
    with pytest.raises(PatternError, match="an adapter of w, and the weights have no such path"):
        adapted.merge(adapters, {"v": jnp.ones((E, M))})
    with pytest.raises(UnsupportedError, match="w has codes"):
        adapted.merge(adapters, {"w": jnp.ones((E, M), jnp.int8)})
    with pytest.raises(UnsupportedError, match="this call has no argument 0"):
        adapted(adapters)

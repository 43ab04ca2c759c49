"""Names that are inferred from what a program does with its dims, for models in which nobody named any."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshpar as mp

F32, I32 = jnp.float32, jnp.int32


def shapes(tree):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, F32), tree, is_leaf=lambda x: isinstance(x, tuple))


def batch_of(rows=4, length=10):
    return {"tokens": jax.ShapeDtypeStruct((rows, length), I32)}


def trained(loss, params, optimizer=None):
    """(train step, state as shapes) of a loss."""
    optimizer = optimizer or optax.adamw(1e-3)

    def step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    return step, jax.eval_shape(lambda p: {"params": p, "opt_state": optimizer.init(p)}, params)


def norm(x, scale):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a - b, a + b], -1)


def attend(q, k, v):
    """[batch, seq, heads, head_dim] queries, with keys and values of fewer heads."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


VOCAB, EMBED, HEADS, KV, HEAD_DIM, MLP, LAYERS = 48, 24, 6, 2, 8, 40, 3


def decoder(fused=False, scanned=False, layers=LAYERS, attend=attend):
    """(loss, weights) of a decoder with grouped queries and rotary embeddings; ``fused``: heads and head_dim are one dim."""

    def heads(x, w, n):
        return (x @ w).reshape(*x.shape[:-1], n, HEAD_DIM) if fused else jnp.einsum("bse,ehd->bshd", x, w)

    def layer(x, w):
        y = norm(x, w["ln1"])
        q, k, v = rotate(heads(y, w["q"], HEADS)), rotate(heads(y, w["k"], KV)), heads(y, w["v"], KV)
        y = attend(q, k, v)
        x += y.reshape(*y.shape[:2], -1) @ w["o"] if fused else jnp.einsum("bshd,hde->bse", y, w["o"])
        y = norm(x, w["ln2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = layer(x, w)
        return cross_entropy((norm(x, params["ln"]) @ params["head"])[:, :-1], batch["tokens"][:, 1:])

    def of_heads(n):
        return (EMBED, n * HEAD_DIM) if fused else (EMBED, n, HEAD_DIM)

    weights = {
        "ln1": (EMBED,), "ln2": (EMBED,), "q": of_heads(HEADS), "k": of_heads(KV), "v": of_heads(KV),
        "o": (HEADS * HEAD_DIM, EMBED) if fused else (HEADS, HEAD_DIM, EMBED),
        "gate": (EMBED, MLP), "up": (EMBED, MLP), "down": (MLP, EMBED),
    }  # fmt: skip
    stack = {k: (layers, *s) for k, s in weights.items()} if scanned else [dict(weights) for _ in range(layers)]
    return loss, shapes({"table": (VOCAB, EMBED), "head": (EMBED, VOCAB), "ln": (EMBED,), "layers": stack})


OF_DECODER = {
    "*/table": "vocab embed", "*/head": "embed vocab", "*/ln": "embed", "*/layers/*/ln1": "embed", "*/gate": "embed mlp",
    "*/up": "embed mlp", "*/down": "mlp embed", "*/q": "embed heads head_dim", "*/k": "embed kv_heads head_dim",
    "*/v": "embed kv_heads head_dim", "*/o": "heads head_dim embed", "batch/tokens": "batch seq",
}  # fmt: skip


def dims_of(step, *args, **options):
    """Path → text of the names of all arguments but optimizer state."""
    program = mp.plan(step, *args, mesh="data=1", layout="", **options).program.traced
    return {v.path: " ".join(d or "_" for d in program.dims(v)) for v in program.inputs if v.kind != "opt" and v.shape}


def assert_named(found, expected):
    """Each array has the dims of the pattern that it matches first, and each pattern matches."""
    from meshpar._src.dims import path_matches

    used = set()
    for path, dims in found.items():
        for pattern, names in expected.items():
            if path_matches(pattern, path):
                assert dims == names, path
                used.add(pattern)
                break
    assert used == set(expected)


@pytest.mark.parametrize("attend", [attend, functools.partial(jax.nn.dot_product_attention, is_causal=True)])
def test_a_decoder(attend):
    loss, params = decoder(attend=attend)
    assert_named(dims_of(*trained(loss, params), batch_of()), OF_DECODER)


def test_a_scanned_decoder_has_layers():
    loss, params = decoder(scanned=True)
    outside = ("*/table", "*/head", "*/ln", "batch/tokens")
    expected = {p: d if p in outside else f"layers {d}" for p, d in OF_DECODER.items()}
    expected["*/layers/ln1"] = expected.pop("*/layers/*/ln1")
    assert_named(dims_of(*trained(loss, params), batch_of()), expected)


@pytest.mark.parametrize("attend", [attend, functools.partial(jax.nn.dot_product_attention, is_causal=True)])
def test_fused_heads_are_named_after_their_first_part(attend):
    loss, params = decoder(fused=True, attend=attend)
    fused = {"*/q": "embed heads", "*/k": "embed kv_heads", "*/v": "embed kv_heads", "*/o": "heads embed"}
    assert_named(dims_of(*trained(loss, params), batch_of()), OF_DECODER | fused)


def test_names_do_not_depend_on_sizes_layers_or_optimizer():
    def names(layers=2, optimizer=None, **batch):
        loss, params = decoder(layers=layers)
        return mp.infer_dims(*trained(loss, params, optimizer), batch_of(**batch))

    expected = names()
    assert names(layers=4) == names(rows=16) == names(length=20) == names() == expected
    assert names(optimizer=optax.sgd(0.1, momentum=0.9)) == names(optimizer=optax.adafactor(1e-3)) == expected


def test_queries_keys_and_values_in_one_kernel_have_no_block_of_heads():
    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        qkv = (x @ params["qkv"]).reshape(*x.shape[:2], 3, HEADS, HEAD_DIM)
        y = attend(*(qkv[:, :, i] for i in range(3)))
        x += y.reshape(*x.shape[:2], -1) @ params["out"]
        return cross_entropy(x @ params["table"].T, batch["tokens"])

    params = shapes({"table": (VOCAB, EMBED), "qkv": (EMBED, 3 * HEADS * HEAD_DIM), "out": (HEADS * HEAD_DIM, EMBED)})
    found = dims_of(*trained(loss, params), batch_of())
    assert found["state/params/out"] == "heads embed"
    assert found["state/params/table"] == "vocab embed"
    assert mp.infer_dims(*trained(loss, params), batch_of())["*/qkv"] == "embed _"


@pytest.mark.parametrize("name", [None, "expert", "choice"])
def test_experts_by_ragged_matmuls_and_by_stacks(name):
    """A name that the program gives to a mask of the dispatch does not turn the inference off."""

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        _, best = jax.lax.top_k(x @ params["router"], 1)
        places = jax.nn.one_hot(best[..., 0], 4)[..., None] * jax.nn.one_hot(jnp.arange(x.shape[1]) % 5, 5)[:, None]
        places = mp.named(places, f"_ _ {name} _") if name else places
        sent = jnp.einsum("bse,bsnc->nbce", x, places)
        sent = mp.rename(sent, choice="expert") if name == "choice" else sent
        y = jnp.einsum("nbcm,nme->nbce", jax.nn.gelu(jnp.einsum("nbce,nem->nbcm", sent, params["up"])), params["down"])
        y = mp.rename(y, expert="choice") if name == "choice" else y
        x += jnp.einsum("nbce,bsnc->bse", y, places)
        flat, sizes = x.reshape(-1, x.shape[-1]), jnp.full(4, x.size // x.shape[-1] // 4, I32)
        y = jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(flat, params["up2"], sizes)), params["down2"], sizes)
        return cross_entropy((x + y.reshape(x.shape)) @ params["table"].T, batch["tokens"])

    up, down = (4, EMBED, MLP), (4, MLP, EMBED)
    sizes = {"table": (VOCAB, EMBED), "router": (EMBED, 4), "up": up, "down": down, "up2": up, "down2": down}
    step = trained(loss, shapes(sizes))
    found = dims_of(*step, batch_of())
    assert found["state/params/up"] == found["state/params/up2"] == "expert embed mlp"
    assert found["state/params/down"] == found["state/params/down2"] == "expert mlp embed"
    assert (found["state/params/table"], found["batch/tokens"]) == ("vocab embed", "batch seq")
    with pytest.raises(mp.errors.UnknownDimError, match="did you mean `expert`") as e:
        mp.plan(*step, batch_of(), mesh="data=4", layout="experts: data")
    assert "probably meant" not in str(e.value)


def test_a_convolutional_net_with_squeeze_and_excitation():
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params, batch):
        x = conv(batch["images"], params["stem"])
        y = jax.nn.relu(conv(x, params["conv"]))
        gate = jax.nn.sigmoid(jax.nn.relu(y.mean((1, 2)) @ params["squeeze"]) @ params["excite"])
        x += conv(y * gate[:, None, None], params["conv2"])
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch["labels"])

    params = {
        "stem": (3, 3, 3, 8), "conv": (3, 3, 8, 16), "conv2": (3, 3, 16, 8), "squeeze": (16, 4), "excite": (4, 16), "head": (8, 10),
    }  # fmt: skip
    batch = {"images": jax.ShapeDtypeStruct((4, 12, 12, 3), F32), "labels": jax.ShapeDtypeStruct((4,), I32)}
    found = dims_of(*trained(loss, shapes(params)), batch)
    assert found["state/params/head"] == "channels classes"
    assert found["batch/images"].startswith("batch height width")
    assert {found[f"state/params/{name}"].split()[-1] for name in ("stem", "conv", "conv2")} == {"channels"}
    assert "mlp" not in " ".join(found.values())


def test_lora_has_a_rank():
    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        x += jax.nn.gelu(x @ params["up"] + x @ params["a"] @ params["b"]) @ params["down"]
        return cross_entropy(x @ params["table"].T, batch["tokens"])

    sizes = {"table": (VOCAB, EMBED), "up": (EMBED, MLP), "a": (EMBED, 4), "b": (4, MLP), "down": (MLP, EMBED)}
    found = dims_of(*trained(loss, shapes(sizes)), batch_of())
    assert (found["state/params/a"], found["state/params/b"]) == ("embed rank", "rank mlp")


# -- the interface


@pytest.mark.parametrize("seed", range(4))
def test_a_pattern_matches_no_state_of_another_parameter(seed):
    """Random names of weights, with those of optax's states, and some that differ by numbers only."""
    from meshpar._src.dims import path_matches
    from meshpar._src.program.names_as_path_patterns import patterns_of

    rng = np.random.default_rng(seed)
    optimizer = [optax.adamw(1e-3), optax.adafactor(1e-3), optax.sgd(0.1, momentum=0.9), optax.rmsprop(0.1)][seed % 4]
    names = "n1 n2 mu nu m m1 v v1 v2 c1 c2 count t1 trace up down step1 v_row scale router".split()
    block, names = rng.choice(["m1", "n3", "layers", "block_0"]), list(rng.permutation(names))
    pairs = [names[4 * k : 4 * k + 3] for k in range(4)]

    def loss(params, x):
        for up, down, scale in pairs:
            w = params[block]
            x += jax.nn.relu(x @ w[up] * params[scale]) @ w[down]
        return (x**2).mean()

    weights = {n: s for up, down, _ in pairs for n, s in ((up, (EMBED, MLP)), (down, (MLP, EMBED)))}
    step, state = trained(loss, shapes({block: weights} | {scale: (MLP,) for *_, scale in pairs}), optimizer)
    x = shapes((4, EMBED))
    program = mp.plan(step, state, x, mesh="data=1", layout="").program.traced
    patterns = patterns_of(program)
    own = {}
    for value in program.inputs:
        found = next((dims for pattern, dims in patterns.items() if path_matches(pattern, value.path)), None)
        if value.kind != "opt":
            assert [{"batch": 4, "embed": EMBED, "mlp": MLP}[name] for name in found.split()] == list(value.shape)
            own[value.path.removeprefix("state/params/")] = value, found
    for value in (v for v in program.inputs if v.kind == "opt"):
        found = next((dims for pattern, dims in patterns.items() if path_matches(pattern, value.path)), None)
        ends = [path for path in own if value.path.endswith(f"/{path}")]
        parameter, dims = own[max(ends, key=len)] if ends and value.shape else (None, None)
        assert found in (dims, None), value.path
        if parameter is not None and value.shape == parameter.shape:
            assert program.dims(value) == program.dims(parameter), value.path


def test_a_chain_of_matmuls_has_names_in_turn():
    """FSDP shards every weight of a classifier without residuals, and `mlp` every second pair, as Megatron does."""

    def loss(params, x):
        for w in params["layers"]:
            x = jax.nn.relu(x @ w["kernel"] + w["bias"])
        return cross_entropy(x @ params["head"], jnp.zeros(len(x), int))

    layers = [{"kernel": (a, b), "bias": (b,)} for a, b in [(28, 64), (64, 64), (64, 64)]]
    found = dims_of(*trained(loss, shapes({"layers": layers, "head": (64, 10)})), shapes((8, 28)))
    kernels = [found[f"state/params/layers/{k}/kernel"] for k in range(3)]
    assert kernels == ["embed mlp", "mlp embed", "embed mlp"]
    assert (found["state/params/head"], found["batch"]) == ("mlp classes", "batch embed")


def test_an_initializer_takes_the_mapping_of_its_step():
    """The pattern of the batch matches no array of it; a pattern like one of its paths is a mistake."""
    step, state = trained(*decoder())
    dims = mp.infer_dims(step, state, batch_of())

    def create():
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)

    made = mp.init(create, mesh="data=4", layout="embed: data", dims=dims)()
    assert made["params"]["layers"][0]["up"].sharding.spec == jax.P("data")
    with pytest.warns(
        mp.errors.ReplicatedWarning, match=r"dims=mp\.infer_dims\(step, jax\.eval_shape\(create, …\), batch\)"
    ):
        mp.init(create, mesh="data=4", layout="embed: data")()
    with pytest.raises(mp.errors.PatternError, match=r"did you mean '\*/down'"):
        mp.init(create, mesh="data=4", layout="embed: data", dims={**dims, "*/dwn": "mlp embed"})()


def test_weights_that_a_step_updates_without_optimizer_state():
    """Arrays of equal first dims under other names; a running mean of a forward pass is no weight."""

    def step(net, x):
        return [
            w - 0.1 * g
            for w, g in zip(net, jax.grad(lambda net: (jnp.tanh(x @ net[0]) @ net[1]).var())(net), strict=True)
        ]

    net, x = shapes([(EMBED, EMBED), (EMBED, EMBED)]), shapes((4, EMBED))
    assert mp.infer_dims(step, net, x)["x"].startswith("batch")
    assert not any("batch" in dims for path, dims in mp.infer_dims(step, net, x).items() if "net" in path)
    found = mp.infer_dims(lambda mean, x: 0.9 * mean + x, shapes((4, EMBED)), x)
    assert found["mean"].startswith("batch")


def test_an_unknown_dim_has_the_inferred_names_in_its_error():
    step, state = trained(*decoder())
    with pytest.raises(mp.errors.UnknownDimError, match=r"names are inferred from uses: embed \(24\)") as e:
        mp.plan(step, state, batch_of(), mesh="data=4", layout="expert: data")
    assert "`mlp` is probably meant" in str(e.value)
    assert "turned inference off" not in str(e.value)


def test_a_size_that_does_not_divide_says_that_its_name_is_inferred():
    step, state = trained(*decoder())
    with pytest.raises(mp.errors.DivisibilityError, match=r"dims +mlp embed \(inferred; dims= gives other names\)"):
        mp.plan(step, state, batch_of(), mesh="data=3", layout="mlp: data")


def test_names_of_the_user_win():
    step, state = trained(*decoder())
    found = dims_of(step, state, batch_of(), dims={"*/up": "model_dim hidden", "batch/tokens": "_ length", "*": "auto"})
    assert found["state/params/layers/0/up"] == "model_dim hidden"
    assert found["state/params/head"].endswith("vocab")
    assert found["batch/tokens"].endswith("length")
    assert mp.infer_dims(step, state, batch_of(), dims={"*/up": "model_dim hidden"})["*/up"] == "model_dim hidden"


def test_nothing_is_inferred_if_something_is_named():
    step, state = trained(*decoder())
    found = dims_of(step, state, batch_of(), dims={"*/up": "embed mlp"})
    assert found["state/params/table"] == "_ embed"
    with pytest.raises(mp.errors.UnknownDimError, match="turned inference off"):
        mp.plan(step, state, batch_of(), mesh="data=4", layout="vocab: data", dims={"*/up": "embed mlp"})


def test_data_is_named_only_if_no_constraint_names_its_batch():
    class Mlp(flax.linen.Module):
        constrained: bool

        @flax.linen.compact
        def __call__(self, x):
            init = flax.linen.with_logical_partitioning(flax.linen.initializers.lecun_normal(), ("embed", "mlp"))
            if self.constrained:
                x = flax.linen.with_logical_constraint(x, ("rows", "embed"))
            return flax.linen.Dense(MLP, kernel_init=init)(x)

    for constrained, names in ((False, "batch embed"), (True, "rows embed")):
        model, x = Mlp(constrained), jax.ShapeDtypeStruct((4, EMBED), F32)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        assert dims_of(model.apply, params, x) == {
            "variables/params/Dense_0/bias": "mlp", "variables/params/Dense_0/kernel": "embed mlp", "args/0": names
        }  # fmt: skip


@pytest.mark.parametrize(("layout", "lowering"), [("fsdp", "jit"), ("fsdp_megatron", "shard_map")])
def test_known_schemes_run_without_a_name(layout, lowering):
    step, state = trained(*decoder(layers=1))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 8, x.dtype), state)
    batch = {"tokens": jnp.asarray(rng.integers(0, VOCAB, (4, 10)), I32)}
    report = mp.check(step, state, batch, layout=layout, mesh="data=2, model=2", lowering=lowering)
    assert report.ok
    plan = mp.plan(step, state, batch, mesh="data=2, model=2", layout=layout)
    split = {held.path: dict(held.split) for held in plan.inputs}
    assert split["state/params/layers/0/up"]["embed"] == ("data",)
    assert ("model",) in split["state/params/layers/0/up"].values() or layout == "fsdp"

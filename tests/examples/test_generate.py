"""Text generation of the examples: the tokens of the models without a cache, under every layout and both lowerings."""

import dataclasses
import functools
from unittest import mock

import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from flax import nnx
from generate import Options, Sampling, Steps

import deepseek
import llama
import meshpar as mp
import mixtral

NEW, LENGTH, GREEDY = 8, 16, Sampling()
PROMPTS = [[5, 3, 8, 13, 2], [7], [11, 40, 1], [9, 9, 9, 9], [30, 2], [17, 4, 4], [1], [25, 33, 12, 6, 10, 3]]
MODELS = {
    "llama": (llama, llama.Llama),
    "mixtral": (mixtral, mixtral.Mixtral),
    "deepseek": (deepseek, deepseek.DeepSeek),
}
UNSHARDED = {"prefill": "", "insert": "", "decode": ""}


@functools.cache
def weights(model: str, config: llama.Config | None = None):
    module, cls = MODELS[model]
    return jax.jit(lambda key: llama.state_of(cls, config or module.TINY, key)["params"])(jax.random.key(0))


def logits_without_a_cache(model: str, params, tokens: np.ndarray, config: llama.Config | None = None):
    """Logits [batch, seq, vocab] of the model's own modules."""
    module = MODELS[model][0]
    c, p = config or module.TINY, generate.weights_of(params)
    x = p["embedding"]["embedding"][tokens]
    if model == "deepseek":
        x, _ = llama.scanned(deepseek.DenseLayer, c, c.dense).apply({"params": p["dense_layers"]}, x, None)
        x, _ = llama.scanned(deepseek.ExpertLayer, c, c.layers - c.dense).apply({"params": p["layers"]}, x, None)
    elif model == "mixtral":
        x, _ = llama.scanned(mixtral.Layer, c).apply({"params": p["layers"]}, x, None)
    else:
        (x,), _ = llama.scanned(llama.Layer, c).apply({"params": p["layers"]}, (x,), None)
    return llama.norm(c, "norm").apply({"params": p["norm"]}, x) @ p["head"]["kernel"]


@functools.cache
def expected(model: str, config: llama.Config | None = None) -> list[list[int]]:
    """The most likely tokens, from a forward pass over all tokens for each new one."""
    tokens = np.zeros((len(PROMPTS), LENGTH), np.int32)
    at = np.array([len(p) for p in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    run = jax.jit(lambda params, tokens: logits_without_a_cache(model, params, tokens, config))
    rows = np.arange(len(PROMPTS))
    for n in range(NEW):
        tokens[rows, at + n] = np.asarray(run(weights(model, config), tokens))[rows, at + n - 1].argmax(-1)
    return [tokens[row, n : n + NEW].tolist() for row, n in enumerate(at)]


def served(model: str, layouts: dict[str, str], *, mesh="data=2, model=4", config=None, params=None, batch=4, length=LENGTH,
           options=None, lowering="auto", sampling=GREEDY, pad=8, **how):  # fmt: skip
    """The tokens of the prompts from a server under layouts."""
    options = Options.of(config or MODELS[model][0].TINY, **(options or {}))
    of = {"lowering": lowering, "stop": how.get("stop", ()), "how": sampling, "paged": "page" in how}
    steps = Steps.of(options, mp.mesh(mesh), **of, **layouts)
    params = weights(model, config) if params is None else params
    return generate.serve(steps, params, PROMPTS, batch=batch, length=length, new=NEW, pad=pad, **how)


FLASH = {
    "prefill": "seq: model; heads, mlp, vocab: data",
    "insert": "batch: data; cache: model; seq: model",
    "decode": "batch: data; cache: model; heads, mlp, vocab: model",
}
LONG = {"prefill": "seq: model", "insert": "cache: data+model; seq: model", "decode": "cache: data+model"}


PAGED = {"page": 4, "pages": 9}  # for less than three of the longest sequences
ROOMY = dataclasses.replace(mixtral.TINY, capacity=float(mixtral.TINY.experts))
CASES = {
    "continuous batching": ("llama", UNSHARDED, {"pad": 4}),
    "pages": ("llama", UNSHARDED, PAGED),
    "a length that does not divide": (
        "llama",
        {"prefill": "", "insert": "cache?: model", "decode": "cache?: model; mlp: model"},
        {"length": 13 + 6},
    ),
}
SLOW_CASES = {
    "pages under a layout": ("llama", LONG, {"lowering": "jit", "page": 8, "pages": 7}),
    "latent attention in pages": ("deepseek", FLASH, {"lowering": "shard_map", "page": 4, "pages": 7}),
    "mixtral, which drops no token": (
        "mixtral",
        {"prefill": "", "decode": "batch: data; cache, expert: model", "insert": "batch: data; cache: model"},
        {"config": ROOMY},
    ),
}


@pytest.mark.parametrize(
    ("model", "layouts", "how"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW_CASES.items()),
    ],
)
def test_a_server_generates_the_tokens_of_the_model(model, layouts, how):
    assert served(model, layouts, **how) == expected(model, how.get("config"))


def test_a_rule_for_heads_shards_kernels_with_one_dim_for_heads_and_size():
    step, args, dims = generate.decode_target(llama.Llama, llama.TINY, 4, LENGTH, weights="int8")
    plan = mp.plan(step, *args, mesh="data=4, model=2", layout="heads, kv_heads: model", dims=dims)
    specs = {h.path: tuple(h.spec) for h in plan.inputs}
    for name in ("query", "key", "value"):
        assert specs[f"params/layers/attention/{name}/kernel.codes"] == (None, None, "model")
        assert specs[f"params/layers/attention/{name}/kernel.scales"] == (None, None, "model")


def test_a_prompt_that_needs_more_pages_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="needs 4 pages"):
        served("llama", UNSHARDED, page=4, pages=2)


@functools.cache
def in_eight_bits() -> list[list[int]]:
    """Tokens of one device with keys and values rounded to int8 per head and position, by NumPy's formula, in no cache of codes."""

    def round_trip(options, new):
        def one(x):
            scale = jnp.abs(x).max(-1, keepdims=True) / 127
            return jnp.round(x / jnp.where(scale == 0, 1, scale)) * scale

        return jax.tree.map(one, new)

    with mock.patch.object(generate, "cached", round_trip):
        return served("llama", UNSHARDED, mesh="data=1")


def test_keys_and_values_in_eight_bits():
    assert served("llama", LONG, options={"cache": "int8"}) == in_eight_bits()


def states(options: Options):
    """(what two prompts of 8 tokens give, the empty state of four rows), of shapes."""
    tokens, lengths = jnp.zeros((2, 8), jnp.int32), jnp.full(2, 8)
    prompt = jax.eval_shape(generate.prefill_step(options), weights("llama"), tokens, lengths, jax.random.key(0))
    return prompt, jax.eval_shape(lambda: generate.empty_state(prompt["cache"], 4, LENGTH))


def test_a_cache_in_eight_bits_takes_a_byte_and_a_scale_per_head():
    def bytes_of(cache: str | None) -> float:
        options = Options.of(llama.TINY, cache=cache)
        how = {"mesh": "data=2, model=2", "layout": "batch: data; cache: model"}
        how["dims"] = generate.dims_of(options)["decode"]
        plan = mp.plan(generate.decode_step(options), weights("llama"), states(options)[1], **how)
        assert {c.op for c in plan.collectives} <= {"all-reduce"}
        return sum(h.bytes for h in plan.inputs if "cache" in h.path)

    head_dim = 8
    assert bytes_of("int8") / bytes_of(None) == (head_dim + 4) / (head_dim * 4)


def test_a_stop_token_ends_a_sequence():
    stop = expected("llama")[0][3]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in expected("llama")]
    assert served("llama", UNSHARDED, stop=[stop]) == cut


def test_sampling_draws_from_the_most_likely_tokens():
    chances = np.array([0.02, 0.5, 0.08, 0.3, 0.1])
    logits = jnp.log(jnp.tile(chances, (4000, 1))).astype(jnp.float32)
    key = jax.random.key(0)

    def frequencies(**how) -> np.ndarray:
        return np.bincount(generate.sample(logits, key, Sampling(**how)), minlength=5) / len(logits)

    np.testing.assert_array_equal(frequencies(), [0, 1, 0, 0, 0])
    np.testing.assert_allclose(frequencies(temperature=1.0), chances, atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=2), [0, 5 / 8, 0, 3 / 8, 0], atol=0.03)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_p=0.6), [0, 5 / 8, 0, 3 / 8, 0], atol=0.03)
    hot = chances**0.5 / (chances**0.5).sum()
    np.testing.assert_allclose(frequencies(temperature=2.0), hot, atol=0.03)


@pytest.mark.slow
def test_layouts_draw_the_same_tokens():
    how = Sampling(temperature=1.0, top_k=12, top_p=0.9)
    drawn = served("llama", UNSHARDED, sampling=how, seed=3)
    assert drawn != expected("llama")
    assert served("llama", FLASH, sampling=how, seed=3) == drawn


def test_prompts_are_resharded_from_heads_to_the_length_of_the_cache():
    (prompt, state), lengths = states(Options.of(llama.TINY)), jnp.full(2, 8)
    how = {"mesh": "model=2", "layout": "cache: model; kv_heads: model", "dims": generate.DIMS["insert"]}
    plan = mp.plan(generate.insert_prompts, state, prompt, lengths, lengths, **how)
    assert [c.op for c in plan.collectives] == ["all-to-all"] * 2
    one = 2 * 2 * LENGTH * 2 * 8 * 4  # layers, prompts, slots, heads, head_dim, float32
    assert plan.bytes_sent == 2 * (one / 2) / 2  # a device sends half of its half of the keys, and of the values


@pytest.mark.slow
def test_the_trained_model_continues_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_lm.main("--steps 4 --layers 2 --embed 32 --seq 32 --eval-batches 1 --checkpoint run".split())
    argv = "--checkpoint run --layers 2 --embed 32 --new 12 --temperature 0 --prompt".split()
    (text,) = generate.main([*argv, "import nu"])
    assert "weights of step 4" in capsys.readouterr().out

    def create(key):
        config = train_lm.Config(layers=2, embed=32, mlp=96)
        model = train_lm.Transformer(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, train_lm.adamw(1e-3, 1), wrt=nnx.Param)

    (model, _), _ = mp.Checkpoints("run").restore_or(mp.init(create, mesh="data=8", layout=""), jax.random.key(0))
    tokens, run = list(b"import nu"), nnx.jit(lambda model, tokens: model(tokens))
    for _ in range(12):
        padded = np.pad(tokens, (0, 21 - len(tokens)))  # later tokens do not change the logits of a position
        tokens.append(int(run(model, padded[None])[0, len(tokens) - 1].argmax()))
        if tokens[-1] == 0:
            break
    assert text == bytes(tokens[9:]).decode(errors="replace")


@pytest.mark.slow
def test_search_finds_tensor_parallelism_for_decoding():
    """Of two layers with 8-bit weights, beside the plan of the layout `heads`."""
    step, args, dims = generate.llama3_70b_decode(batch=32, weights="int8", layers=2)
    how = {"topology": "v6e:2x4", "dims": dims, "donate_argnames": ["state"]}
    found = mp.search(step, *args, max_axes=2, max_plans=60, **how)
    assert found.fits
    best = found.plan()
    heads = mp.plan(step, *args, mesh="data=1, model=8", layout=generate.LAYOUTS["heads"], **how)
    assert best.seconds <= 1.01 * heads.seconds  # a search does not separate layouts within 1 %
    weights = sum(h.bytes for h in best.inputs if "kernel" in h.path)
    assert weights < 1.01 * sum(h.bytes for h in heads.inputs if "kernel" in h.path)  # sharded over all devices
    assert best.bytes_sent < weights / 4  # activations, and no weights


def test_a_step_of_decoding_applies_every_expert_in_place():
    """Rows of one token are routed as a sequence of as many is, which takes the grouped matmuls."""
    config = mixtral.TINY
    options = Options.of(config)
    w = jax.tree.map(lambda a: a[0], generate.weights_of(weights("mixtral"))["layers"]["experts"])
    rows = -(-len(w["up"]) // options.chosen)
    x = jax.random.normal(jax.random.key(1), (1, rows, config.embed))
    run = functools.partial(generate.experts, options, w)
    with mock.patch.object(generate, "moe", side_effect=AssertionError):
        got = run(x.swapaxes(0, 1))
    np.testing.assert_allclose(got, run(x).swapaxes(0, 1), rtol=1e-4, atol=1e-5)
    how = {"mesh": "data=2, model=2", "dims": {"x": "batch seq embed", "w/{gate,up}": "expert embed mlp"}}
    layouts = ["batch: data; expert: model", "mlp: model; batch: data"]
    assert mp.check(lambda w, x: generate.experts(options, w, x), w, x.swapaxes(0, 1), layout=layouts, **how).ok

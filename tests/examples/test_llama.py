"""The Llama of the examples: its numbers against NumPy in float64, its plan, and equal runs under every layout."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import llama
import meshpar as mp


def reference_loss(params, inputs: np.ndarray, targets: np.ndarray, config: llama.Config) -> float:
    """The mean loss in float64: a loop over layers, sequences and heads."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.tree.map(np.asarray, params))
    total = 0.0
    for tokens, answers in zip(inputs, targets, strict=True):
        x = p["embedding"]["embedding"][tokens]
        for k in range(config.layers):
            layer = jax.tree.map(lambda w, k=k: w[k], p["layers"])
            a, m = layer["attention"], layer["mlp"]
            y = normed(x, layer["attention_norm"]["scale"])
            heads = []
            for h in range(config.heads):
                g = h // (config.heads // config.kv_heads)
                q, key = turned(y @ a["query"]["kernel"][:, h], config), turned(y @ a["key"]["kernel"][:, g], config)
                scores = np.where(np.tri(len(y), dtype=bool), q @ key.T / math.sqrt(config.head_dim), -np.inf)
                heads.append(softmax(scores) @ (y @ a["value"]["kernel"][:, g]))
            x = x + sum(o @ w for o, w in zip(heads, a["out"]["kernel"], strict=True))
            y = normed(x, layer["mlp_norm"]["scale"])
            gate = y @ m["gate"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up"]["kernel"])) @ m["down"]["kernel"]
        chances = softmax(normed(x, p["norm"]["scale"]) @ p["head"]["kernel"])
        total -= np.log(chances[np.arange(len(answers)), answers]).sum()
    return total / targets.size


def normed(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turned(x, config):
    """Pairs (i, i + half) as complex numbers, times a unit that turns with the position."""
    half = x.shape[-1] // 2
    angle = np.outer(np.arange(len(x)), config.rope_base ** (-np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


@pytest.fixture(scope="module")
def real():
    """(state, batch) of the tiny model."""
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, llama.TINY.vocab, (8, 16), dtype=np.int32) for k in ("inputs", "targets")}
    return jax.jit(llama.create_state, static_argnums=0)(llama.TINY, jax.random.key(0)), batch


@pytest.fixture(scope="module")
def losses(real):
    """Those of three steps on one batch."""
    state, batch = real
    step, out = jax.jit(llama.train_step(llama.TINY)), []
    for _ in range(3):
        state, loss = step(state, batch)
        out.append(float(loss))
    return out


def test_the_loss_is_that_of_numpy_in_float64(real, losses):
    state, batch = real
    params = jax.tree.map(lambda box: box.unbox(), state["params"], is_leaf=lambda x: hasattr(x, "unbox"))
    assert losses[0] == pytest.approx(reference_loss(params, batch["inputs"], batch["targets"], llama.TINY), rel=2e-6)
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    ("options", "lowering"),
    [
        ({"loss": "vocab"}, None),
        ({"remat": "keep_collectives", "loss": "tokens", "rotary": "matmul"}, "shard_map"),
        ({"remat": "save_dot_with_context_except_mlp"}, "jit"),
        ({"remat": "minimal_with_collectives", "interleave": 2}, "shard_map"),
    ],
)
def test_options_change_no_number(real, losses, options, lowering):
    """Logits that are computed once, rotary embeddings by matmuls; checkpoint policies and microbatches under a layout."""
    state, batch = real
    step, found = llama.train_step(dataclasses.replace(llama.TINY, **options)), []
    how = {"mesh": "data=4, model=2", "layout": llama.FSDP_TENSOR_SEQUENCE, "dims": llama.DIMS, "lowering": lowering}
    step = mp.jit(step, **how) if lowering else jax.jit(step)
    for _ in range(2):
        state, loss = step(state, batch)
        found.append(float(loss))
    assert found == pytest.approx(losses[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 6, "interleave": 4}, "batch of 6 cannot be divided into interleave=4 microbatches"),
        ({"remat": "minimla"}, r"no remat 'minimla'\n.*did you mean .*minimal_with_context"),
        ({"attention": "flsah"}, "no attention 'flsah'"),
        ({"attention": "splash"}, "a multiple of 128, not 16"),
        ({"rotary": "thirds"}, "no rotary 'thirds'; there are halves, matmul"),
    ],
)
def test_impossible_options_are_errors(options, says):
    def trace():
        step, args, _ = llama.tiny(**options)
        jax.eval_shape(step, *args)

    with pytest.raises(ValueError, match=says):
        trace()


# -- the plan


def planned(layout=llama.FSDP_TENSOR_SEQUENCE, topology=None, donate=None, **options) -> mp.Plan:
    """The plan of Llama 3 8B on 128 devices."""
    step, args, dims = llama.llama3_8b(**options)
    sizes = (128,) if layout is llama.FSDP else (16, 8)
    mesh = AbstractMesh(sizes, ("data", "model")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))
    return mp.plan(step, *args, dims=dims, layout=layout, mesh=mesh, topology=topology, donate_argnums=donate)


@pytest.fixture(scope="module")
def plan():
    return planned(llama.FSDP)


def test_nearly_every_dim_has_a_name(plan):
    named, total, _ = plan.program.coverage()
    assert named >= 0.99 * total
    assert not plan.joins


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(plan):
    big = [c for c in plan.collectives if c.total_bytes > 1e7]
    counts = collections.Counter((c.op, c.dims) for c in big for _ in range(c.count or 0))
    layers = 32
    for dims, weights in {
        "embed mlp": 2,
        "mlp embed": 1,
        "embed heads head_dim": 1,
        "heads head_dim embed": 1,
        "embed kv_heads head_dim": 2,
    }.items():
        assert counts["all-gather", dims] == 2 * weights * layers, dims  # on the way there, and again on the way back
        assert counts["reduce-scatter", dims] == weights * layers, dims
    chunks = llama.LLAMA3_8B.loss_chunks  # the head's chunks are gathered on the way there and on the way back
    assert (counts["all-gather", "embed vocab"], counts["reduce-scatter", "embed vocab"]) == (2 * chunks, chunks)
    assert counts["all-gather", "vocab embed"] == counts["reduce-scatter", "vocab embed"] == 1
    assert {c.op for c in big} == {"all-gather", "reduce-scatter"}  # no gradient is all-reduced


def test_weights_and_gradients_travel_in_bfloat16(plan):
    assert {c.dtype for c in plan.collectives if c.total_bytes > 1e7} == {"bfloat16"}
    in_layers = 6_979_321_856  # weights of the 32 layers' matrices
    in_vocab = 128256 * 4096
    sent = (3 * in_layers + 3 * in_vocab + 2 * in_vocab) * 2 * 127 / 128  # of the layers, the head, the embedding
    assert plan.bytes_sent == pytest.approx(sent, rel=1e-3)


@pytest.mark.parametrize(("remat", "gathers", "sums"), [("full", 6, 5), ("keep_collectives", 4, 4)])
def test_collectives_of_a_layer_by_checkpoint_policy(remat, gathers, sums):
    of_layers = (c for c in planned(remat=remat).collectives if c.axes == ("model",) and c.count == 32)
    found = collections.Counter(c.op for c in of_layers if c.shape == (256, 2048, 4096))
    # two blocks, each way; of the way there, run again: both inputs, and the sum after attention
    assert found == {"all-gather": gathers, "reduce-scatter": sums}


def test_splash_attention_is_attention():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 256, 4, 128), (2, 256, 2, 128), (2, 256, 2, 128), (2, 256, 4, 128))
    q, k, v, ct = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    with jax.default_matmul_precision("float32"):
        y, back = jax.vjp(lambda *x: llama.splash(*x, interpret=True), q, k, v)
        expected, expected_back = jax.vjp(lambda *x: llama.attention(*x, "xla"), q, k, v)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        for got, want in zip(back(ct), expected_back(ct), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)


# -- rotary embeddings


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 3e-6), (jnp.bfloat16, 8e-3)])
def test_pairs_turn_as_in_numpy_in_float64_and_their_gradients_turn_back(dtype, tolerance):
    x, dy = (jax.random.normal(jax.random.key(i), (2, 6, 3, 8), dtype) for i in range(2))
    (halves, matmul) = found = [jax.vjp(lambda x, by=by: llama.rotate(x, 1e4, by), x) for by in ("halves", "matmul")]
    angle = np.arange(6)[:, None, None] * 1e4 ** (-np.arange(4) / 4)
    for y, pull in found:
        for given, have, sign in ((x, y, 1), (dy, pull(dy)[0], -1)):
            real, imaginary = np.split(np.asarray(given, np.float64), 2, -1)
            z = (real + 1j * imaginary) * np.exp(sign * 1j * angle)
            assert have.dtype == dtype
            np.testing.assert_allclose(have, np.concatenate([z.real, z.imag], -1), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(matmul[0], halves[0])
    np.testing.assert_array_equal(matmul[1](dy)[0], halves[1](dy)[0])

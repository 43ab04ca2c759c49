"""Train steps of the families of models that people run: the numbers of the unsharded run, under both lowerings."""

import functools

import jax
import jax.numpy as jnp
import lowered
import numpy as np
import optax
import pytest
from jax import lax

RNG = np.random.default_rng(0)


def normal(*shape, scale=None):
    scale = shape[-2] ** -0.5 if scale is None and len(shape) > 1 else scale or 1.0
    return (RNG.normal(size=shape) * scale).astype(np.float32)


same = functools.partial(
    lowered.same, meshes=["data=2, model=4", "data=2, model=2, idle=2"], lowerings=("shard_map", "jit")
)


def conv(x, w, stride=1, groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * (x.ndim - 2),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC") if x.ndim == 4 else ("NWC", "WIO", "NWC"),
    )


def layer_norm(x, g):
    return jax.nn.standardize(x, -1) * g


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


IMAGES = {"images": normal(8, 8, 8, 4, scale=1.0), "labels": RNG.integers(0, 8, 8).astype(np.int32)}
PIXELS = {"batch/images": "batch height width channels", "batch/labels": "batch"}


# -- images


def resnet_step(params, stats, batch):
    def norm(x, name, new):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        new[name] = jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, stats[name], {"mean": mean, "var": var})
        p = params_now[name]
        return (x - mean) * lax.rsqrt(var + 1e-2) * p["scale"] + p["bias"]

    params_now = params

    def loss_of(p):
        nonlocal params_now
        params_now, new = p, {}
        x = jax.nn.relu(norm(conv(batch["images"], p["stem"]), "norm0", new))
        x = lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        y = jax.nn.relu(norm(conv(x, p["conv1"]), "norm1", new))
        x = jax.nn.relu(x + conv(y, p["conv2"]))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return cross_entropy(x.mean((1, 2)) @ p["head"], batch["labels"]), new

    (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new, loss


@pytest.mark.parametrize("layout", ["batch: data; height: model"])
def test_resnet(layout):
    affine = {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    params = {
        "stem": normal(3, 3, 4, 8, scale=0.3),
        "conv1": normal(3, 3, 8, 8, scale=0.2),
        "conv2": normal(3, 3, 8, 8, scale=0.2),
        "head": normal(8, 8),
        "norm0": affine,
        "norm1": dict(affine),
    }
    moments = {"mean": np.zeros(8, np.float32), "var": np.ones(8, np.float32)}
    dims = {
        **PIXELS,
        "params/stem": "_ _ channels features",
        "params/conv1": "_ _ features _",
        "params/conv2": "_ _ _ features",
        "params/head": "features _",
        "params/norm0/*": "features",
        "params/norm1/*": "_",
    }
    if "height" in layout:
        dims = {k: v for k, v in dims.items() if k in PIXELS}
    same(resnet_step, params, {"norm0": moments, "norm1": dict(moments)}, IMAGES, layout=layout, dims=dims)


def vit_step(params, batch):
    def loss_of(p):
        x = batch["images"]
        x = x.reshape(8, 2, 4, 2, 4, 4).transpose(0, 1, 3, 2, 4, 5).reshape(8, 4, 64) @ p["patch"]
        x = jnp.concatenate([jnp.broadcast_to(p["token"], (8, 1, 16)), x], 1) + p["positions"]
        y = layer_norm(x, p["norm"])
        q, k, v = jnp.einsum("bse,cehd->cbshd", y, p["qkv"])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
        x = x + jnp.einsum("bhqk,bkhd,hde->bqe", jax.nn.softmax(scores), v, p["out"])
        x = x + jax.nn.gelu(layer_norm(x, p["norm"]) @ p["up"]) @ p["down"]
        return cross_entropy(x[:, 0] @ p["head"], batch["labels"])

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("layout", ["batch: data; heads, mlp: model; embed: data"])
def test_vit(layout):
    params = {
        "patch": normal(64, 16),
        "token": normal(16),
        "positions": normal(5, 16, scale=0.1),
        "norm": np.ones(16, np.float32),
        "qkv": normal(3, 16, 4, 4, scale=0.25),
        "out": normal(4, 4, 16, scale=0.25),
        "up": normal(16, 32),
        "down": normal(32, 16),
        "head": normal(16, 8),
    }
    dims = {
        **PIXELS,
        "params/patch": "_ embed",
        "params/token": "embed",
        "params/positions": "_ embed",
        "params/norm": "embed",
        "params/qkv": "_ embed heads _",
        "params/out": "heads _ embed",
        "params/up": "embed mlp",
        "params/down": "mlp embed",
        "params/head": "embed _",
    }
    same(vit_step, params, IMAGES, layout=layout, dims=dims)


# -- sequences

TOKENS = RNG.integers(0, 16, (8, 8)).astype(np.int32)


def lstm_step(params, tokens):
    def loss_of(p):
        x = p["embedding"][tokens]

        def cell(state, x):
            h, c = state
            i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((8, 16))
        _, hs = lax.scan(cell, (start, start), x.swapaxes(0, 1)[:-1])
        return cross_entropy(hs @ p["head"], tokens.T[1:])

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch: data; gates: model; embed: data"])
def test_lstm(layout):
    params = {
        "embedding": normal(16, 8, scale=1.0),
        "w": normal(8, 64),
        "u": normal(16, 64),
        "b": normal(64, scale=0.1),
        "head": normal(16, 16),
    }
    dims = {
        "params/embedding": "vocab embed",
        "params/w": "embed gates",
        "params/u": "_ gates",
        "params/b": "gates",
        "params/head": "_ vocab",
        "tokens": "batch _",
    }
    same(lstm_step, params, TOKENS, layout=layout, dims=dims)


def state_space_step(params, tokens):
    """A selective state space: depthwise convolution, input-dependent decay, associative scan, gate; positions by cumsum."""

    def loss_of(p):
        positions = jnp.cumsum((tokens != 0).astype(jnp.int32), 1)
        x = p["embedding"][tokens] + jnp.sin(positions[..., None] * p["rate"])
        u, z = jnp.split(x @ p["in"], 2, -1)
        u = jax.nn.silu(conv(u, p["conv"], groups=16))
        dt = jax.nn.softplus(u * p["dt"])
        b, c = u @ p["b"], u @ p["c"]
        decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
        drive = (dt * u)[..., None] * b[:, :, None]
        _, h = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, drive), axis=1)
        y = jnp.einsum("bsdn,bsn->bsd", h, c) + u
        y = y + jnp.cumsum(u, 1) / jnp.arange(1, 9)[:, None]
        return cross_entropy((y * jax.nn.silu(z)) @ p["out"] @ p["embedding"].T, tokens)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch: data; inner: model; embed: data", "seq: data; vocab: model"])
def test_state_space(layout):
    params = {
        "embedding": normal(16, 8, scale=1.0),
        "rate": normal(8),
        "in": normal(8, 32),
        "conv": normal(3, 1, 16, scale=0.5),
        "dt": normal(16),
        "a": normal(16, 4, scale=0.3),
        "b": normal(16, 4),
        "c": normal(16, 4),
        "out": normal(16, 8),
    }
    dims = {
        "params/embedding": "vocab embed",
        "params/rate": "embed",
        "params/in": "embed _",
        "params/conv": "_ _ inner",
        "params/dt": "inner",
        "params/a": "inner _",
        "params/b": "inner _",
        "params/c": "inner _",
        "params/out": "inner embed",
        "tokens": "batch seq",
    }
    same(state_space_step, params, TOKENS, layout=layout, dims=dims)


def mixture_step(params, tokens):
    """Top-2 routing with a capacity, dispatch and combination by one-hot matmuls, a balance loss."""

    def loss_of(p):
        x = p["embedding"][tokens].reshape(-1, 16)
        probabilities = jax.nn.softmax(x @ p["router"])
        weights, chosen = lax.top_k(probabilities, 2)
        mask = jax.nn.one_hot(chosen, 8)
        place = jnp.cumsum(mask.reshape(-1, 8), 0).reshape(mask.shape) * mask - 1
        slots = jax.nn.one_hot(place.astype(jnp.int32), 24) * mask[..., None]  # tokens beyond the capacity are dropped
        combine = jnp.einsum("tk,tkec->tec", weights / weights.sum(-1, keepdims=True), slots)
        inside = jnp.einsum("tec,td->ecd", slots.sum(1), x)
        outside = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", inside, p["up"])), p["down"])
        y = x + jnp.einsum("tec,ecd->td", combine, outside)
        balance = 8 * (mask.sum(1).mean(0) * probabilities.mean(0)).sum()
        return cross_entropy(y @ p["embedding"].T, tokens.reshape(-1)) + 0.01 * balance

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize("layout", ["batch: data; experts: data; mlp: model"])
def test_one_hot_mixture_of_experts(layout):
    params = {
        "embedding": normal(16, 16, scale=1.0),
        "router": normal(16, 8, scale=2.0),
        "up": normal(8, 16, 32),
        "down": normal(8, 32, 16),
    }
    dims = {
        "params/router": "_ experts",
        "params/up": "experts _ mlp",
        "params/down": "experts mlp _",
        "tokens": "batch _",
    }
    same(mixture_step, params, TOKENS, layout=layout, dims=dims)


def sample(params, prompt, key):
    """Decoding with a key-value cache: written by dynamic updates, read under a mask, top-k sampling."""
    batch, heads, width, length = 8, 4, 4, 12

    def step(state, key):
        caches, tokens, at = state
        x = params["embedding"][lax.dynamic_slice_in_dim(tokens, at, 1, 1)[:, 0]] + lax.dynamic_index_in_dim(
            params["positions"], at, 0, False
        )
        q, k, v = jnp.einsum("be,cehd->cbhd", x, params["qkv"])
        caches = [lax.dynamic_update_slice(c, n[:, None], (0, at, 0, 0)) for c, n in zip(caches, (k, v), strict=True)]
        scores = jnp.einsum("bhd,bshd->bhs", q, caches[0]) / 2
        scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
        x = x + jnp.einsum("bhs,bshd,hde->be", jax.nn.softmax(scores), caches[1], params["out"])
        best, which = lax.top_k(x @ params["embedding"].T, 4)
        choice = jax.random.categorical(key, best)
        token = jnp.take_along_axis(which, choice[:, None], -1)
        kept = lax.dynamic_slice_in_dim(tokens, at + 1, 1, 1)
        tokens = lax.dynamic_update_slice(tokens, jnp.where(at + 1 < prompt.shape[1], kept, token), (0, at + 1))
        return (caches, tokens, at + 1), best[:, 0]

    caches = [jnp.zeros((batch, length, heads, width))] * 2
    tokens = jnp.pad(prompt, ((0, 0), (0, length - prompt.shape[1])))
    (caches, tokens, _), best = lax.scan(step, (caches, tokens, 0), jax.random.split(key, length - 1))
    return tokens, best, caches


@pytest.mark.parametrize("layout", ["batch: data; vocab: model; embed: data"])
def test_sampling_with_a_cache(layout):
    params = {
        "embedding": normal(32, 16, scale=1.0),
        "positions": normal(12, 16, scale=0.5),
        "qkv": normal(3, 16, 4, 4, scale=0.25),
        "out": normal(4, 4, 16, scale=0.25),
    }
    dims = {
        "params/embedding": "vocab embed",
        "params/positions": "_ embed",
        "params/qkv": "_ embed heads _",
        "params/out": "heads _ embed",
        "prompt": "batch _",
    }
    same(sample, params, TOKENS[:, :3], jax.random.key(7), layout=layout, dims=dims)


def transformer_loss(p, tokens, key):
    """Grouped queries, dropout, rematerialised layers in a scan."""

    def layer(x, layer_of):
        w, key = layer_of
        y = layer_norm(x, w["norm"])
        q, k, v = jnp.einsum("bse,ekgd->bskgd", y, w["q"]), y @ w["k"], y @ w["v"]
        k, v = (a.reshape(*a.shape[:2], 2, 4) for a in (k, v))
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k) / 2
        scores = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), scores, -1e9)
        x = x + jnp.einsum("bkgqs,bskd,kgde->bqe", jax.nn.softmax(scores), v, w["o"])
        h = jax.nn.silu(layer_norm(x, w["norm"]) @ w["up"])
        keep = jax.random.bernoulli(key, 0.8, h.shape)
        return x + jnp.where(keep, h / 0.8, 0) @ w["down"], None

    x, _ = lax.scan(jax.checkpoint(layer), p["embedding"][tokens], (p["layers"], jax.random.split(key, 2)))
    return cross_entropy(x[:, :-1] @ p["embedding"].T, tokens[:, 1:])


def transformer_params():
    layers = {
        "norm": np.ones((2, 16), np.float32),
        "q": normal(2, 16, 2, 2, 4, scale=0.25),
        "k": normal(2, 16, 8),
        "v": normal(2, 16, 8),
        "o": normal(2, 2, 2, 4, 16, scale=0.25),
        "up": normal(2, 16, 32),
        "down": normal(2, 32, 16),
    }
    return {"embedding": normal(16, 16, scale=1.0), "layers": layers}


TRANSFORMER = {
    "*/layers/norm": "_ embed",
    "*/layers/q": "_ embed kv_heads groups _",
    "*/layers/k": "_ embed kv",
    "*/layers/v": "_ embed kv",
    "*/layers/o": "_ kv_heads groups _ embed",
    "*/layers/up": "_ embed mlp",
    "*/layers/down": "_ mlp embed",
    "*/embedding": "vocab embed",
    "tokens": "batch seq",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["batch: data; kv_heads?, mlp, vocab: model; embed: data"])
def test_transformer(layout):
    same(
        jax.value_and_grad(transformer_loss),
        transformer_params(),
        TOKENS,
        jax.random.key(3),
        layout=layout,
        dims={k.replace("*/", "p/"): v for k, v in TRANSFORMER.items()},
    )


# -- optimizers

OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "sm3": lambda: optax.sm3(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "rmsprop": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(1e-2, momentum=0.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    optimizer = OPTIMIZERS[name]()
    params = {
        "up": normal(2, 16, 32),
        "down": normal(2, 32, 16),
        "norm": np.ones((2, 16), np.float32),
        "head": normal(16, 8),
    }
    dims = {
        "state/params/up": "_ embed mlp",
        "state/params/down": "_ mlp embed",
        "state/params/norm": "_ embed",
        "state/params/head": "embed vocab",
        "x": "batch _",
        "y": "batch",
    }

    def loss_of(p, x, y):
        for k in range(2):
            x = x + jax.nn.gelu(layer_norm(x, p["norm"][k]) @ p["up"][k]) @ p["down"][k]
        return cross_entropy(x @ p["head"], y)

    def step(state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}, loss, grads

    state = {"params": params, "opt_state": optimizer.init(params)}
    layout = (
        "batch: data; mlp, vocab: model; embed: data" if name != "lamb" else "batch: data; mlp: model; opt.embed: data"
    )
    same(step, state, normal(8, 16, scale=1.0), RNG.integers(0, 8, 8).astype(np.int32), layout=layout, dims=dims)

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

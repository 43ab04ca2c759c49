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


same = functools.partial(lowered.same, meshes=["data=2, model=2, idle=2"], lowerings=("shard_map", "jit"))


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


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


def test_resnet():
    affine = {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    params = {"stem": normal(3, 3, 4, 8, scale=0.3), "head": normal(8, 8), "norm0": affine, "norm1": dict(affine)}
    params |= {name: normal(3, 3, 8, 8, scale=0.2) for name in ("conv1", "conv2")}
    moments = {"mean": np.zeros(8, np.float32), "var": np.ones(8, np.float32)}
    stats = {"norm0": moments, "norm1": dict(moments)}
    same(resnet_step, params, stats, IMAGES, layout="batch: data; height: model", dims=PIXELS)


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


def test_one_hot_mixture_of_experts():
    params = {"embedding": normal(16, 16, scale=1.0), "router": normal(16, 8, scale=2.0)}
    params |= {"up": normal(8, 16, 32), "down": normal(8, 32, 16)}
    dims = {"router": "_ experts", "up": "experts _ mlp", "down": "experts mlp _"}
    dims = {f"params/{name}": text for name, text in dims.items()} | {"tokens": "batch _"}
    same(mixture_step, params, TOKENS, layout="batch: data; experts: data; mlp: model", dims=dims)


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
    params = {"up": normal(2, 16, 32), "down": normal(2, 32, 16), "norm": np.ones((2, 16), np.float32)}
    dims = {"up": "_ embed mlp", "down": "_ mlp embed", "norm": "_ embed"}
    dims = {f"state/params/{name}": text for name, text in dims.items()} | {"x": "batch _"}

    def loss_of(p, x):
        y = jax.nn.gelu(layer_norm(x, p["norm"][1]) @ p["up"][1]) @ p["down"][0]
        return ((x + y) ** 2).mean()

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, moments = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": moments}, loss, grads

    state = {"params": params, "opt_state": optimizer.init(params)}
    embed = "opt.embed" if name == "lamb" else "embed"
    same(step, state, normal(8, 16, scale=1.0), layout=f"batch: data; mlp: model; {embed}: data", dims=dims)

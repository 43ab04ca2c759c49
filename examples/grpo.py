"""Group-relative policy optimization: a trainer under FSDP, a sampler under tensor parallelism, and `mp.move` between them.

    python examples/grpo.py                                   # 8 virtual CPU devices, a minute
    python examples/grpo.py --split                           # trainer and sampler on four devices each
    python examples/grpo.py --trainer "data=4, model=2" --trainer-layout "batch, embed: data; mlp: model"

A small transformer learns to answer digits with each of them plus one. The sampler generates ``group`` answers to each prompt, a
function scores them, and the advantage of an answer is its reward relative to its group (GRPO, arXiv:2402.03300; without the
penalty on the distance from a reference model). ``mp.move`` copies the weights from the trainer to the sampler: planned before
the first step, with its bytes and its peak memory.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar as mp

BASE, SIDE = 8, 4
"""Number of digits, and the length of a prompt and of an answer."""

WEIGHTS = {
    "*/token": "vocab embed", "*/position": "_ embed", "*/{q,k,v}": "layers embed heads head_dim",
    "*/out": "layers heads head_dim embed", "*/up": "layers embed mlp", "*/down": "layers mlp embed", "*/head": "embed vocab",
}  # fmt: skip
FSDP = "batch, embed: data"
TENSOR = "heads, mlp, vocab: model"

Params = dict[str, jax.Array]


def create(key: jax.Array, embed: int = 64, layers: int = 2) -> dict[str, Any]:
    """Weights and optimizer state; 8 heads of 8."""
    shapes = {"token": (BASE, embed), "position": (2 * SIDE, embed), "head": (embed, BASE),
              "q": (layers, embed, 8, 8), "k": (layers, embed, 8, 8), "v": (layers, embed, 8, 8), "out": (layers, 8, 8, embed),
              "up": (layers, embed, 4 * embed), "down": (layers, 4 * embed, embed)}  # fmt: skip
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {name: jax.random.normal(keys[name], shape) * 0.1 for name, shape in shapes.items()}
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


OPTIMIZER = optax.adam(3e-3)


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def log_probabilities(params: Params, tokens: jax.Array) -> jax.Array:
    """[batch, seq, vocab]: of the token after each position."""
    x = params["token"][tokens] + params["position"][: tokens.shape[1]]
    mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        y = norm(x)
        q, k, v = (jnp.einsum("bse,ehd->bshd", y, w[name]) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, mp.rename(k, seq="kv_seq")) / 8**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd,hde->bqe", weights, mp.rename(v, seq="kv_seq"), w["out"])
        return x + jax.nn.relu(norm(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("q", "k", "v", "out", "up", "down")})
    return jax.nn.log_softmax(norm(x) @ params["head"])


def sample(params: Params, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Prompts [batch, SIDE] → (tokens [batch, 2 * SIDE] with answers, log-probabilities [batch, SIDE] of the answers)."""

    def step(carry: tuple[jax.Array, jax.Array], at: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        tokens, key = carry
        key, draw = jax.random.split(key)
        logits = jax.lax.dynamic_index_in_dim(log_probabilities(params, tokens), at - 1, 1, keepdims=False)
        new = jax.random.categorical(draw, logits)
        chosen = jnp.take_along_axis(logits, new[:, None], 1)[:, 0]
        return (jax.lax.dynamic_update_index_in_dim(tokens, new.astype(tokens.dtype), at, 1), key), chosen

    tokens = jnp.concatenate([prompts, jnp.zeros_like(prompts)], 1)
    (tokens, _), chosen = jax.lax.scan(step, (tokens, key), jnp.arange(SIDE, 2 * SIDE))
    return tokens, chosen.T


def train_step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
    """A step of the clipped policy gradient: (new state, loss)."""

    def loss(params: Params) -> jax.Array:
        tokens = batch["tokens"]
        found = jnp.take_along_axis(log_probabilities(params, tokens[:, :-1]), tokens[:, 1:, None], 2)[:, SIDE - 1 :, 0]
        ratio = jnp.exp(found - batch["old"])
        gain = batch["advantage"][:, None]
        return -jnp.mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


def rewards_of(tokens: np.ndarray) -> np.ndarray:
    """[batch]: the fraction of digits of each answer that are right."""
    return (tokens[:, SIDE:] == (tokens[:, :SIDE] + 1) % BASE).mean(1)


def advantages(rewards: np.ndarray, group: int) -> np.ndarray:
    """[batch]: rewards relative to the mean and the standard deviation of their group."""
    of = rewards.reshape(-1, group)
    return ((of - of.mean(1, keepdims=True)) / (of.std(1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)


@dataclass(frozen=True)
class Place:
    """Where a program runs: a mesh, or its text, and a layout."""

    mesh: Any
    layout: str


def run(
    trainer: Place, sampler: Place, steps: int = 60, prompts: int = 16, group: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Train; the result has the loss and the mean reward of every step, and the move."""
    key, rng = jax.random.key(seed), np.random.default_rng(seed)
    state = mp.init(create, mesh=trainer.mesh, layout=trainer.layout, dims=WEIGHTS)(key)
    names = {"batch/tokens": "batch seq", "batch/old": "batch seq", "batch/advantage": "batch"}
    train = mp.jit(
        train_step, mesh=trainer.mesh, layout=trainer.layout, dims={**WEIGHTS, **names}, donate_argnames="state"
    )
    generate = mp.jit(sample, mesh=sampler.mesh, layout=sampler.layout, dims={**WEIGHTS, "prompts": "batch seq"})
    shape = jax.ShapeDtypeStruct((prompts * group, SIDE), jnp.int32)
    generate.plan(state["params"], shape, key)
    move = mp.move(state["params"], target=generate)
    losses, rewards = [], []
    for k in range(steps):
        weights = move(state["params"])  # a copy: the next step donates the trainer's
        asked = np.repeat(rng.integers(0, BASE, (prompts, SIDE), dtype=np.int32), group, 0)
        tokens, old = jax.device_get(generate(weights, jnp.asarray(asked), jax.random.fold_in(key, k)))
        found = rewards_of(tokens)
        batch: Any = {"tokens": tokens, "old": old, "advantage": advantages(found, group)}
        state, _ = train(state, batch)
        state, loss = train(state, batch)  # the loss of the first step is 0: its weights are the sampler's
        losses.append(float(loss))
        rewards.append(float(found.mean()))
    return {"losses": losses, "rewards": rewards, "move": move}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trainer", default="data=8", help="mesh of the trainer")
    parser.add_argument("--trainer-layout", default=FSDP)
    parser.add_argument("--sampler", default="model=8", help="mesh of the sampler")
    parser.add_argument("--sampler-layout", default=TENSOR)
    parser.add_argument("--split", action="store_true", help="four devices each, in place of the meshes")
    args = parser.parse_args(arguments)
    mp.virtual_devices(8)
    trainer, sampler = args.trainer, args.sampler
    if args.split:
        devices = jax.devices()
        trainer, sampler = mp.mesh("data=4", devices=devices[:4]), mp.mesh("model=4", devices=devices[4:])
    result = run(Place(trainer, args.trainer_layout), Place(sampler, args.sampler_layout), args.steps)
    print(result["move"])
    for k in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {k}: reward {result['rewards'][k]:.2f}, loss {result['losses'][k]:+.3f}")
    return result


if __name__ == "__main__":
    main()

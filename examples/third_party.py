"""Shard models that nobody here may edit: a GPT-2 (transformers) and a ResNet (jax-resnet), from path patterns alone.

    pip install -e ".[third-party]"
    python examples/third_party.py
    python examples/third_party.py --mesh "data=2, model=4" --layout "batch: data; heads, mlp: model"

Neither package knows of meshpar, and neither model names its dims. The patterns below do, by the paths of the weights.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import meshpar as mp


@dataclass(frozen=True)
class Case:
    name: str
    create: Callable[[jax.Array], Any]  # key -> state
    step: Callable[[Any, Any], tuple[Any, jax.Array]]  # state, batch -> state, loss
    batch: dict[str, np.ndarray]
    weights: dict[str, str]  # path patterns of the weights -> dims
    data: dict[str, str]  # of the batch
    layout: str


def gpt2(layers: int = 2, embed: int = 64) -> Case:
    """Hugging Face's GPT-2 in Flax. It keeps its kernels [out, in], and queries, keys and values in one (`qkv`)."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModule

    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=embed, n_layer=layers, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0,
    )  # fmt: skip
    model = FlaxGPT2LMHeadModule(config)
    optimizer = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), dtype=np.int32)
    positions = np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)

    def create(key: jax.Array) -> Any:
        params = model.init(key, tokens, jnp.ones_like(tokens), positions, return_dict=False)["params"]
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        mask = jnp.ones_like(tokens)
        logits = model.apply({"params": params}, tokens, mask, batch["positions"], return_dict=False)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    weights = {
        "*params/transformer/wte/embedding": "vocab embed",
        "*params/transformer/wpe/embedding": "position embed",
        "*params/*/attn/c_attn/kernel": "qkv embed",
        "*params/*/attn/c_attn/bias": "qkv",
        "*params/*/attn/c_proj/kernel": "embed heads",
        "*params/*/mlp/c_fc/kernel": "mlp embed",
        "*params/*/mlp/c_fc/bias": "mlp",
        "*params/*/mlp/c_proj/kernel": "embed mlp",
        "*params/*": "embed",  # the other weights: biases and norms of the residual stream
    }
    data = {"batch/*": "batch seq"}
    batch = {"tokens": tokens, "positions": positions}
    return Case(
        "GPT-2",
        create,
        step,
        batch,
        weights,
        data,
        "batch: data; heads, mlp, vocab: model; embed: data",
    )


def resnet(width: int = 16) -> Case:
    """A residual conv net with batch norm, which has the statistics of the global batch under every layout."""
    from jax_resnet import ResNet, ResNetBlock

    model = ResNet(block_cls=ResNetBlock, stage_sizes=[1, 1], hidden_sizes=(width, 2 * width), n_classes=16)
    optimizer = optax.sgd(0.1, momentum=0.9)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(8, 16, 16, 3)).astype(np.float32),
        "label": np.arange(8, dtype=np.int32),
    }

    def create(key: jax.Array) -> Any:
        variables = model.init(key, batch["image"])
        opt_state = optimizer.init(variables["params"])
        return {
            "params": variables["params"],
            "stats": variables["batch_stats"],
            "opt_state": opt_state,
        }

    def loss_of(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, new["batch_stats"]

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, stats), gradients = gradient(state["params"], state["stats"], batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "stats": stats, "opt_state": opt_state}, loss

    weights = {
        "*params/*/ConvBlock_*/Conv_0/kernel": "_ _ _ features",
        "*params/*/ConvBlock_*/BatchNorm_0/*": "features",
        "*stats/*/ConvBlock_*/BatchNorm_0/*": "features",
        "*params/*/kernel": "features classes",
        "*params/*/bias": "classes",
    }
    data = {"batch/image": "batch height width _", "batch/label": "batch"}
    return Case("ResNet", create, step, batch, weights, data, "batch: data; features, classes: model")


CASES = {"gpt2": gpt2, "resnet": resnet}


def run(case: Case, mesh: jax.sharding.Mesh, layout: str, steps: int, console: Console) -> list[float]:
    """Train for some steps; the losses."""
    console.print(f"\n[bold]{case.name}[/]")
    state = mp.init(case.create, mesh=mesh, layout=layout, dims=case.weights)(jax.random.key(0))
    weights = {f"state/{pattern}": dims for pattern, dims in case.weights.items()}
    step = mp.jit(case.step, mesh=mesh, layout=layout, dims=weights | case.data, donate_argnames="state")
    console.print(step.plan(state, case.batch))
    losses = []
    for _ in range(steps):
        state, loss = step(state, case.batch)
        losses.append(float(loss))
    console.print(f"losses  {', '.join(f'{x:.4f}' for x in losses)}")
    return losses


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*CASES, []], help=f"default: {', '.join(CASES)}")
    parser.add_argument("--mesh", default="data=4, model=2")
    parser.add_argument("--layout", help="rules; by default the ones of each model")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(argv)
    mp.virtual_devices(8)
    mesh = mp.mesh(args.mesh)
    console = Console(highlight=False)
    cases = {name: CASES[name]() for name in args.models or CASES}
    return {name: run(c, mesh, args.layout or c.layout, args.steps, console) for name, c in cases.items()}


if __name__ == "__main__":
    try:
        main()
    except mp.errors.MeshparError as error:
        sys.exit(f"\n{error}")

"""Train a byte-level language model with mixtures of experts on the source of the Python standard library.

    python examples/train_moe.py                  # two minutes on 8 virtual CPU devices
    python examples/train_moe.py --layout tensor
    python examples/train_moe.py --router switch --capacity 1.25     # a router that drops tokens, and counts them

Small layers with DeepSeek-V3's design: sigmoid router, expert groups, a bias that balances the load without a loss, a shared
expert. The layout assigns the experts to devices: another layout has other collectives, and the same losses, loads and drops.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from train_lm import adamw, axes_of, default_mesh, positive

import meshpar as mp
from lm.data import held_out_batches, read_stdlib, training_batches
from lm.moe import MoEConfig, MoETransformer
from meshpar.layers import MoEAux

LAYOUTS = {
    "expert": "batch: data; expert: data; heads, kv_heads?, vocab: model; embed: data",
    "tensor": "batch: data; expert: data; heads, kv_heads?, mlp, vocab: model; embed: data",
    "model": "batch: data; expert, heads, kv_heads?, vocab: model; embed: data",
    "fsdp": "batch: data; embed: data",
}
DIMS = {"inputs": "batch seq", "targets": "batch seq"}
LOSSES = {"balance": 1e-3, "z": 1e-4, "importance": 1e-2, "load": 1e-2}  # weights of the router's losses
SHADES = " ▁▂▃▄▅▆▇█"
CHOICES = {"switch": 1, "gshard": 2}  # experts per token of these routers

Tokens = jax.Array | np.ndarray


@dataclass(frozen=True)
class Result:
    losses: list[float]  # nats per byte, one a step, without the router's losses
    dropped: list[int]  # choices that no expert served, one a step, all layers
    load: np.ndarray  # int [layers, experts], of the last step
    held_out_bits_per_byte: float


def loss_of(model: MoETransformer, inputs: Tokens, targets: Tokens) -> tuple[jax.Array, tuple[jax.Array, MoEAux]]:
    logits, aux = model(jnp.asarray(inputs))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    added = sum(LOSSES[name] * value.mean() for name, value in aux.losses.items())
    return loss + added, (loss, aux)


def train_step(
    model: MoETransformer, optimizer: nnx.Optimizer, inputs: Tokens, targets: Tokens
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (_, (loss, aux)), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model, inputs, targets)
    optimizer.update(model, gradients)
    if model.layers.moe.kind == "deepseek_v3":
        model.layers.moe.rebalance(aux.load, 1e-2)
    return loss, aux.load, aux.dropped.sum(dtype=jnp.int32)


def picture(load: np.ndarray) -> str:
    """A text bar for each expert, full at twice the mean load; layers separated by │."""
    rows = []
    for counts in load:
        height = np.clip(counts / max(counts.mean(), 1) * 4, 0, 8)
        rows.append("".join(SHADES[math.ceil(h)] for h in height))
    return " │ ".join(rows)


def main(argv: Sequence[str] | None = None) -> Result:
    args = parse(argv)
    mp.virtual_devices(8)
    rules = str(LAYOUTS.get(args.layout, args.layout))
    mesh = mp.mesh(args.mesh or default_mesh(rules))
    layout = mp.Layout(rules)
    config = MoEConfig(layers=args.layers, experts=args.experts, router=args.router, capacity=args.capacity,
                       k=CHOICES.get(args.router) or args.k)  # fmt: skip
    text = read_stdlib()
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"devices  {mesh.devices.size} × {mesh.devices.flat[0].device_kind}, {axes_of(mesh)}\nlayout   {rules}\n"
    )

    def create(key: jax.Array) -> tuple[MoETransformer, nnx.Optimizer]:
        model = MoETransformer(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, adamw(args.lr, args.steps), wrt=nnx.Param)

    model, optimizer = mp.init(create, mesh=mesh, layout=layout)(jax.random.key(args.seed))
    how = {"mesh": mesh, "layout": layout, "dims": DIMS, "lowering": args.lowering}
    step = mp.jit(train_step, donate_argnames=("model", "optimizer"), **how)
    evaluate = mp.jit(lambda model, inputs, targets: loss_of(model, inputs, targets)[1][0], **how)
    batches = training_batches(text.train, args.batch, args.seq, args.seed)
    held_out = held_out_batches(text.held_out, args.batch, args.seq, args.eval_batches)
    print(step.plan(model, optimizer, *held_out[0]))

    losses: list[float] = []
    dropped: list[int] = []
    rates: list[float] = []
    load = np.zeros((args.layers, args.experts), int)
    console.print(f"\nload of the {args.experts} experts in each layer; half a bar is the mean")
    for number in range(1, args.steps + 1):
        began = time.perf_counter()
        loss, counts, drops = step(model, optimizer, *next(batches))
        losses.append(float(loss))
        dropped.append(int(drops))
        load = np.asarray(counts)
        rates.append(args.batch * args.seq / (time.perf_counter() - began))
        if number == 1 or number % max(1, args.steps // 20) == 0:
            speed = statistics.median(rates[1:] or rates)
            console.print(
                f"{number:5}/{args.steps}  loss {losses[-1]:.3f}  {picture(load)}  dropped {dropped[-1]:4}  {speed:,.0f} tokens/s"
            )
    nats = statistics.fmean(float(evaluate(model, *batch)) for batch in held_out)
    bits = nats / math.log(2)
    console.print(
        f"\n[bold]{bits:.3f} bits per byte[/] on the held-out text; {sum(dropped):,} choices dropped in {args.steps} steps"
    )
    return Result(losses, dropped, load, bits)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", help='axes and sizes, such as "data=4, model=2" (default: all devices)')
    add(
        "--layout",
        default="expert",
        help=f"rules ('batch: data; expert: data') or one of {', '.join(LAYOUTS)} (%(default)s)",
    )
    add("--lowering", choices=("auto", "jit", "shard_map"), default="auto")
    add(
        "--router",
        choices=("deepseek_v3", "top_k", "switch", "gshard", "noisy_top_k", "expert_choice"),
        default="deepseek_v3",
    )
    add("--capacity", type=float, help="rows of an expert, in balanced loads; the rest is dropped (default: no drops)")
    add("--experts", type=positive, default=16)
    add("--k", type=positive, default=2, help="experts a token goes to (%(default)s)")
    add("--layers", type=positive, default=2)
    add("--steps", type=positive, default=400)
    add("--batch", type=positive, default=16, help="sequences a step (%(default)s)")
    add("--seq", type=positive, default=64, help="bytes a sequence (%(default)s)")
    add("--lr", type=float, default=6e-3, help="highest learning rate (%(default)s)")
    add("--seed", type=int, default=0)
    add("--eval-batches", type=positive, default=8)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except mp.errors.MeshparError as error:
        sys.exit(f"\n{error}")

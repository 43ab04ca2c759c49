"""Context parallelism: a sequence sharded over devices, with three strategies for attention.

    python examples/long_context.py               # two minutes or less on 8 virtual CPU devices

First a byte-level language model, with its sequences sharded 8 ways, trains on the source of the Python standard library with
ring attention, Ulysses and gathered K/V: logits and losses equal the model's on one device. Then the plan of Llama 3 8B on
a TPU pod that is not attached: the memory and the communication of each strategy for 32K to 1M tokens, not measured.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from train_lm import adamw, positive

import llama
import meshpar as mp
from lm.data import read_stdlib, training_batches
from lm.model import Config, Transformer
from meshpar_kernels.attention import AttentionCosts, attention_costs

STRATEGIES = ("ring", "ulysses", "gathered")
LAYOUT = "seq: context; embed: context"
DIMS = {"inputs": "batch seq", "targets": "batch seq"}

POD, POD_MESH, CONTEXT = "v5p:8x8x8", "data=16, context=32", 32
POD_LAYOUT = "batch: data; seq: context; embed: data+context"
LENGTHS = tuple(1024 * n for n in (32, 64, 128, 256, 512, 1024))


@dataclass(frozen=True)
class Row:
    """The plan of one step of Llama 3 8B, 16 sequences, for one length and strategy."""

    tokens: int
    strategy: str
    peak: float  # bytes a device needs
    attention_memory: float  # of these, what attention holds beyond operands and results
    sent: float  # bytes a device sends in a step
    attention_sent: float  # of these, by attention
    seconds: float  # estimate


@dataclass(frozen=True)
class Result:
    losses: dict[str, list[float]]  # nats per byte, one a step, by strategy; "one device" for the model on one
    difference: float  # the largest between any two logits of the first step
    rows: list[Row]


Step = tuple[jax.Array, jax.Array]


def train_step(model: Transformer, optimizer: nnx.Optimizer, inputs: jax.Array, targets: jax.Array) -> Step:
    """(loss, logits) before the update."""

    def loss_of(model: Transformer) -> Step:
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), logits

    (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss, logits


def main(argv: Sequence[str] | None = None) -> Result:
    args = parse(argv)
    mp.virtual_devices(8)
    console = Console(highlight=False, soft_wrap=True)
    losses, logits = train(args, console)
    difference = max(float(np.abs(x - logits["one device"]).max()) for x in logits.values())
    for name in STRATEGIES:
        np.testing.assert_allclose(logits[name], logits["one device"], atol=2e-4, err_msg=name)
        np.testing.assert_allclose(losses[name], losses["one device"], rtol=2e-3, err_msg=name)
    console.print(f"equal: logits differ by at most {difference:.1e}\n")
    rows = [plan_row(tokens, name) for tokens in args.lengths for name in STRATEGIES]
    show(console, rows)
    return Result(losses, difference, rows)


def train(args: argparse.Namespace, console: Console) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Losses of every step and logits of the first, by strategy."""
    text = read_stdlib()
    losses: dict[str, list[float]] = {}
    logits: dict[str, np.ndarray] = {}
    console.print(f"layout   {LAYOUT}\ntext     {args.seq} bytes a sequence, {args.seq // 8} on each of 8 devices")
    for name in ("one device", *STRATEGIES):
        strategy, devices = (None, 1) if name == "one device" else (name, 8)
        attend = functools.partial(mp.layers.attention, causal=True, strategy=strategy, chunks=(64, 64))
        config = Config(layers=args.layers, embed=64, mlp=192, dropout=0.0, attend=attend)

        def create(key: jax.Array, config: Config = config) -> tuple[Transformer, nnx.Optimizer]:
            model = Transformer(config, nnx.Rngs(key))
            return model, nnx.Optimizer(model, adamw(1e-2, args.steps), wrt=nnx.Param)

        mesh = mp.mesh(f"context={devices}", devices=jax.devices()[:devices])
        model, optimizer = mp.init(create, mesh=mesh, layout=LAYOUT)(jax.random.key(args.seed))
        step = mp.jit(train_step, mesh=mesh, layout=LAYOUT, dims=DIMS, lowering="shard_map",
                      donate_argnames=("model", "optimizer"))  # fmt: skip
        losses[name] = []
        for inputs, targets in take(training_batches(text.train, args.batch, args.seq, args.seed), args.steps):
            loss, out = step(model, optimizer, inputs, targets)
            losses[name].append(float(loss))
            logits.setdefault(name, np.asarray(out))
        console.print(f"{name:<11} loss {losses[name][0]:.4f} → {losses[name][-1]:.4f} in {args.steps} steps")
    return losses, logits


def take(batches: Iterator[Any], count: int) -> list[Any]:
    """The first `count` of them."""
    return [next(batches) for _ in range(count)]


def plan_row(tokens: int, strategy: str) -> Row:
    """Plan a step; no devices, no compiler."""
    step, args, dims = llama.llama3_8b(batch=16, seq=tokens, attention=strategy)
    pod: Any = {"mesh": POD_MESH, "topology": POD, "layout": POD_LAYOUT, "dims": dims}
    plan = mp.plan(step, *args, **pod)
    assert plan.seconds is not None
    return Row(
        tokens, strategy, plan.memory.peak, costs(tokens).of[strategy].memory, plan.bytes_sent,
        sum(c.total_bytes for c in plan.collectives if c.tensor.startswith("attention")), plan.seconds,
    )  # fmt: skip


def costs(tokens: int) -> AttentionCosts:
    """What one layer's attention costs one device: one of 16 sequences, 1/32 of its tokens."""
    c = llama.LLAMA3_8B
    q, k, v = (
        jax.ShapeDtypeStruct((1, tokens // CONTEXT, heads, c.head_dim), jnp.bfloat16)
        for heads in (c.heads, c.kv_heads, c.kv_heads)
    )
    return attention_costs(q, k, v, CONTEXT, causal=True)


def show(console: Console, rows: Sequence[Row]) -> None:
    console.print(f"Llama 3 8B, 16 sequences a step, planned for {POD} ({POD_MESH}; {POD_LAYOUT})\n")
    table = Table(box=None, pad_edge=False, header_style="")
    for title in (
        "tokens",
        "strategy",
        "peak memory",
        "in attention",
        "sent a step",
        "by attention",
        "step (estimate)",
    ):
        table.add_column(title, justify="left" if title == "strategy" else "right")
    for row in rows:
        first = row.strategy == STRATEGIES[0]
        table.add_row(
            f"{row.tokens // 1024}K" if first else "", row.strategy, gib(row.peak), gib(row.attention_memory),
            f"{row.sent / 1e9:.1f} GB", f"{row.attention_sent / 1e9:.1f} GB", f"{row.seconds:.3g} s",
        )  # fmt: skip
    console.print(table)
    console.print(
        "\nThe estimate overlaps the hops of a ring, and no other collectives of attention. ulysses and the ring balance causal\n"
        "work.\n\nchoice of strategy=None"
    )
    for tokens in dict.fromkeys(row.tokens for row in rows):
        found = costs(tokens)
        console.print(f"{tokens // 1024:>5}K  {found.reason}")


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=positive, default=10)
    add("--batch", type=positive, default=4, help="sequences a step (%(default)s)")
    add("--seq", type=positive, default=512, help="bytes a sequence, a multiple of 8 (%(default)s)")
    add("--layers", type=positive, default=2)
    add("--seed", type=int, default=0)
    add("--lengths", type=positive, nargs="*", default=LENGTHS, metavar="TOKENS", help="that Llama is planned for")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main()
    except mp.errors.MeshparError as error:
        sys.exit(f"\n{error}")

"""Train a byte-level Transformer on the source of the Python standard library, under a layout.

    python examples/train_lm.py                  # a few minutes on 8 virtual CPU devices
    python examples/train_lm.py --layout megatron --mesh "data=2, model=4"
    python examples/train_lm.py --layout "batch: data; mlp, vocab: model"
    meshpar launch -n 2 examples/train_lm.py --checkpoint runs/a     # two processes; a second start resumes

The model (lm/model.py) names the dims of its weights and is independent of devices. The layout says over
which mesh axis each name is sharded. Another layout gives another plan and the same losses.
"""

import argparse
import difflib
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import meshpar as mp
from lm.data import Windows, held_out_batches, read_stdlib
from lm.model import Config, Transformer
from lm.picture import draw_losses

MEGATRON = "batch: data; heads, kv_heads?, mlp, vocab: model"
LAYOUTS = {
    "dp": "batch: data",
    "fsdp": "batch: data; embed: data",
    "megatron": MEGATRON,
    "fsdp+megatron": f"{MEGATRON}; embed: data",
    "fsdp+megatron+sp": f"{MEGATRON}; embed: data; seq: model",
}
DIMS = {"inputs": "batch seq", "targets": "batch seq"}  # lm/model.py names the dims of the weights

Tokens = jax.Array | np.ndarray


@dataclass(frozen=True)
class Result:
    losses: list[float]  # nats per byte, one a step of this run
    tokens_per_s: float  # median over steps, without the first, which compiles
    held_out_bits_per_byte: float
    stopped: bool = False  # stopped by SIGTERM, after saving


def loss_of(model: Transformer, inputs: Tokens, targets: Tokens, key: jax.Array | None = None) -> jax.Array:
    logits = model(jnp.asarray(inputs), key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_step(
    model: Transformer,
    optimizer: nnx.Optimizer,
    inputs: Tokens,
    targets: Tokens,
    key: jax.Array,
) -> jax.Array:
    key = jax.random.fold_in(key, optimizer.step[...])  # a new dropout mask at every step
    loss, gradients = nnx.value_and_grad(loss_of)(model, inputs, targets, key)
    optimizer.update(model, gradients)
    return loss


def adamw(peak_rate: float, steps: int) -> optax.GradientTransformation:
    warmup = min(20, steps // 5)
    rate = optax.warmup_cosine_decay_schedule(peak_rate / 10, peak_rate, warmup, steps, end_value=peak_rate / 20)
    update = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), update)


def main(argv: Sequence[str] | None = None) -> Result:
    args = parse(argv)
    mp.distributed()  # joins the other processes, if there are any
    mp.virtual_devices(8)  # affects CPUs only: GPUs and TPUs are used as they are
    first = jax.process_index() == 0  # writes the common output
    preset = args.layout in LAYOUTS
    rules = LAYOUTS[args.layout] if preset else args.layout
    mesh = mp.mesh(args.mesh or default_mesh(rules))
    layout = mp.Layout(rules)
    text = read_stdlib()
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"devices  {mesh.devices.size} × {mesh.devices.flat[0].device_kind}, {axes_of(mesh)}\n"
        f"layout   {rules}\n"
        f"text     {text.files} files of the Python {platform.python_version()} library: "
        f"{len(text.train) / 1e6:.1f} MB to train on, {len(text.held_out) / 1e6:.1f} MB held out\n"
    )

    config = Config(layers=args.layers, embed=args.embed, mlp=3 * args.embed)

    def create(key: jax.Array) -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, adamw(args.lr, args.steps), wrt=nnx.Param)

    init_key, dropout_key = jax.random.split(jax.random.key(args.seed))
    data = mp.data.batches(
        Windows(text.train, args.seq), batch=args.batch, seed=args.seed, mesh=mesh, layout=layout, dims="batch seq"
    )
    init = mp.init(create, mesh=mesh, layout=layout)
    keeps = {"every": args.every, "data": data, "memory": args.memory}
    run = mp.Checkpoints(args.checkpoint, **keeps) if args.checkpoint else None
    if run is None:
        (model, optimizer), at = init(init_key), 0  # created sharded
    else:
        (model, optimizer), at = run.restore_or(init, init_key)
        console.print(f"step     {at} of {args.steps}, from {args.checkpoint}\n" if at else "")
    how = {"mesh": mesh, "layout": layout, "dims": DIMS, "lowering": args.lowering}
    step = mp.jit(train_step, donate_argnames=("model", "optimizer"), **how)
    evaluate = mp.jit(loss_of, **how)
    held_out = held_out_batches(text.held_out, args.batch, args.seq, args.eval_batches)

    print(step.plan(model, optimizer, *held_out[0], dropout_key))

    losses: list[float] = []
    rates: list[float] = []
    stopped = False
    with open((args.metrics if first else "") or os.devnull, "a" if at else "w") as metrics:
        with progress_bar(console, args.steps) as progress:
            began = time.perf_counter()
            for n, (inputs, targets) in itertools.takewhile(lambda item: item[0] < args.steps, data.from_(at)):
                losses.append(float(step(model, optimizer, inputs, targets, dropout_key)))
                rates.append(args.batch * args.seq / (time.perf_counter() - began))
                show(progress, n + 1, losses, rates)
                line = {"step": n + 1, "loss": losses[-1], "tokens_per_s": rates[-1]}
                print(json.dumps(line), file=metrics, flush=True)
                began = time.perf_counter()
                if run is not None:
                    stopped = run.save(n, (model, optimizer), force=n + 1 == args.steps)
                if stopped:
                    break
        if run is not None:
            run.close()
        if stopped:
            console.print(f"stopped by a signal after step {at + len(losses)}: saved in {args.checkpoint}")
            return Result(losses, typical(rates), math.nan, stopped=True)
        with console.status("reading the held-out text"):
            nats = statistics.fmean(float(evaluate(model, *batch)) for batch in held_out)
        bits = nats / math.log(2)
        print(json.dumps({"step": args.steps, "held_out_bits_per_byte": bits}), file=metrics)

    console.print(f"\n[bold]{bits:.3f} bits per byte[/] on the held-out text")
    if args.picture and losses and first:
        draw_losses(
            losses,
            bits,
            bytes_per_step=args.batch * args.seq,
            title=f"A byte-level Transformer, {args.layout if preset else 'custom layout'}",
            subtitle=f"{rules}   on {mesh.size} {mesh.devices.flat[0].platform} devices, {axes_of(mesh)}",
            path=args.picture,
        )
        console.print(f"loss curve in {args.picture}")
    return Result(losses, typical(rates), bits)


def default_mesh(rules: str) -> str:
    """All devices; in pairs along `model` if the rules name it: data=4, model=2 where there are 8."""
    if "model" not in rules:
        return "data=-1"
    return f"data=-1, model={2 if jax.device_count() % 2 == 0 else 1}"


def axes_of(mesh: jax.sharding.Mesh) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def progress_bar(console: Console, steps: int) -> Progress:
    progress = Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )
    progress.add_task("compiling", total=steps, start=False, now="")
    return progress


def show(progress: Progress, number: int, losses: list[float], rates: list[float]) -> None:
    """Update the progress bar; print some lines if the output is not a terminal."""
    task = progress.tasks[0]
    total = int(task.total or 0)
    if len(losses) == 1:
        progress.start_task(task.id)  # starts here, so that compilation does not count as step time
    now = f"loss {losses[-1]:.3f}  {typical(rates):,.0f} tokens/s"
    progress.update(task.id, completed=number, description="training", now=now)
    if not progress.console.is_terminal and number % max(1, total // 20) == 0:
        progress.print(f"step {number}/{total}  {now}")


def typical(rates: list[float]) -> float:
    """The median without the first step, which compiles."""
    return statistics.median(rates[1:] or rates or [0.0])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", help='axes and sizes, such as "data=4, model=2" (default: all devices)')
    add(
        "--layout",
        type=preset_or_rules,
        default="fsdp+megatron",
        help=f"rules ('batch: data; mlp: model') or one of {', '.join(LAYOUTS)} (%(default)s)",
    )
    add("--lowering", choices=("auto", "jit", "shard_map"), default="auto")
    add("--steps", type=positive, default=500)
    add("--batch", type=positive, default=16, help="sequences a step (%(default)s)")
    add("--seq", type=positive, default=64, help="bytes a sequence (%(default)s)")
    add("--layers", type=positive, default=4)
    add("--embed", type=positive, default=128)
    add("--lr", type=float, default=6e-3, help="highest learning rate (%(default)s)")
    add("--seed", type=int, default=0)
    add("--eval-batches", type=positive, default=32)
    add("--checkpoint", metavar="DIR", help="save to and resume from this folder (needs meshpar[checkpoint])")
    add("--every", type=positive, default=100, help="steps between checkpoints (%(default)s)")
    add(
        "--memory",
        metavar="AXIS",
        help="copies in memory after each step; hosts of one index of this mesh axis fail together",
    )
    add("--metrics", type=writable, metavar="FILE", help="a JSON line for every step, and one for the held-out text")
    add("--picture", type=writable, metavar="FILE", default="train_lm.png", help="(%(default)s)")
    return parser.parse_args(argv)


def preset_or_rules(text: str) -> str:
    if text in LAYOUTS or ":" in text:
        return text
    near = difflib.get_close_matches(text, LAYOUTS, n=1)
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a preset ({', '.join(LAYOUTS)}) nor rules like 'batch: data'"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def writable(text: str) -> str:
    if text and not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    return text


if __name__ == "__main__":
    try:
        result = main()
    except mp.errors.MeshparError as error:
        if jax.process_count() > 1:
            raise  # the other processes end with this cause
        sys.exit(f"\n{error}")
    sys.exit(75 if result.stopped else 0)  # 75: restart to resume

"""DiLoCo: two slices train a language model separately, and exchange their changes every 50 steps.

    python examples/diloco.py                     # a few minutes on 8 virtual CPU devices as two slices of four
    python examples/diloco.py --every 20 --steps 400
    python examples/diloco.py --synchronous 150 --outer-rate 0.9 --outer-momentum 0.5    # its first 150 steps as one replica

It has the model and the data of train_lm.py. It is trained three times on the same batches: with an all-reduce of the
gradients between slices in every step, with DiLoCo (arXiv:2311.08105), and with Streaming DiLoCo (arXiv:2501.18512: in
fragments, in 8 bits, blended in). The picture has the training losses, and the bytes that a device sends between slices.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import track
from train_lm import adamw, positive, writable

import meshpar as mp
from lm.data import held_out_batches, read_stdlib, training_batches
from lm.model import Config, Transformer
from lm.picture import draw_curves

MESH = "slice=2, data=4"


@dataclass(frozen=True)
class Run:
    """Losses of one way to train.

    Attributes:
      losses: nats per byte, one a step: the mean over slices.
      sent: bytes that a device sends between slices, in all steps.
      held_out: nats per byte of the final weights.
    """

    losses: list[float]
    sent: float
    held_out: float


class Model:
    """A Transformer of Flax NNX as functions of a tree of its weights, whose dims are named by its metadata."""

    def __init__(self, config: Config):
        self.config = config
        with nnx.use_eager_sharding(False):  # names are dims, not mesh axes
            model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
        self.graph, weights, self.rest = nnx.split(model, nnx.Param, ...)
        self.structure = jax.tree.structure(weights)
        self.dims = {
            "*params/" + "/".join(map(str, path)): " ".join(variable.get_metadata()["out_sharding"])
            for path, variable in nnx.to_flat_state(weights)
        }

    def init(self, key: jax.Array) -> Any:
        """The weights as nested dicts."""
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key)), nnx.Param))

    def loss(self, params: Any, inputs: Any, targets: Any) -> jax.Array:
        """Mean cross-entropy in nats per byte; inputs and targets [batch, seq]."""
        weights = jax.tree.unflatten(self.structure, jax.tree.leaves(params))
        logits = nnx.merge(self.graph, weights, self.rest)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class Task:
    """The model, its batches and its optimizer, for :func:`synchronous` and :func:`local`."""

    def __init__(self, args: argparse.Namespace):
        text = read_stdlib()
        self.key = jax.random.key(args.seed)
        self.outer = optax.sgd(args.outer_rate, momentum=args.outer_momentum, nesterov=True)
        stream = training_batches(text.train, args.batch, args.seq, seed=args.seed)
        self.batches = [next(stream) for _ in range(args.steps)]
        self.held_out = held_out_batches(text.held_out, args.batch, args.seq, 16)
        self.model = Model(Config(layers=args.layers, embed=args.embed, mlp=3 * args.embed, dropout=0.0))
        self.dims = {**self.model.dims, "inputs": "batch seq", "targets": "batch seq"}
        self.tx = adamw(6e-3, args.steps)

    def create(self, key: jax.Array) -> Any:
        params = self.model.init(key)
        return {"params": params, "opt": self.tx.init(params)}

    def step(self, state: Any, inputs: Any, targets: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(self.model.loss)(state["params"], inputs, targets)
        updates, opt = self.tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def result(self, losses: list[Any], sent: float, params: Any) -> Run:
        evaluate, params = jax.jit(self.model.loss), jax.tree.map(np.asarray, params)
        held_out = statistics.fmean(float(evaluate(params, *b)) for b in self.held_out)
        return Run([float(np.mean(x)) for x in losses], sent, held_out)


def synchronous(task: Task, steps: int | None = None) -> tuple[Any, list[float], float]:
    """Train with an all-reduce of the gradients between slices in every step.

    Args:
      steps: the number of batches; None: all.

    Returns:
      (state, losses, bytes that a device sent between slices).
    """
    layout = mp.Layout("batch: slice+data; embed: data")
    dims = {p.replace("*params", "params"): d for p, d in task.model.dims.items()}
    state = mp.init(task.create, mesh=mp.mesh(MESH), layout=mp.Layout(layout, optional=True), dims=dims)(task.key)
    step = mp.jit(task.step, mesh=mp.mesh(MESH), layout=layout, dims=task.dims, donate_argnames="state")
    sent, losses = sent_between_slices(step.plan(state, *task.batches[0])), []
    for batch in track(task.batches[:steps], "every step", disable=not sys.stdout.isatty()):
        state, loss = step(state, *batch)
        losses.append(float(loss))
    return state, losses, sent * len(losses)


def local(task: Task, every: int, first: int, **options: Any) -> Run:
    """Train with :func:`meshpar.train.local_sgd`: each slice separately, an exchange of each fragment every ``every`` steps.

    Args:
      first: number of synchronous steps before.
    """
    run = mp.train.local_sgd(
        task.step, over="slice", every=every, outer=task.outer, mesh=mp.mesh(MESH), layout="batch: data; embed: data",
        dims=task.dims, **options,
    )  # fmt: skip
    losses, before = list[Any](), 0.0
    if first:
        trained, every_step, before = synchronous(task, first)
        losses += every_step
        trained = jax.tree.map(np.asarray, trained)
        state = run.init(lambda: trained)()
    else:
        state = run.init(task.create)(task.key)
    batches = track(task.batches[first:], f"every {every} steps", disable=not sys.stdout.isatty())
    for n, batch in enumerate(batches):
        state, loss = run(n, state, *batch)
        losses.append(np.asarray(loss))
    sent = sum(sent_between_slices(run.outer.plan(**state, fragment=k)) for k in range(options.get("fragments", 1)))
    sent = before + sent * (len(losses) - first) / every
    return task.result(losses, sent, state["anchor"]["params"])


def sent_between_slices(plan: mp.Plan) -> float:
    """Bytes that a device sends over the axis `slice` in one step of a plan."""
    return sum(c.total_bytes for c in plan.collectives if "slice" in c.axes)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=positive, default=300)
    add("--every", type=positive, default=50, help="steps between two exchanges (%(default)s)")
    add("--batch", type=positive, default=16, help="sequences a step, over all slices (%(default)s)")
    add("--seq", type=positive, default=64, help="bytes a sequence (%(default)s)")
    add("--layers", type=positive, default=2)
    add("--embed", type=positive, default=128)
    add(
        "--synchronous",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps before the slices train separately (%(default)s)",
    )
    add("--outer-rate", type=float, default=0.7, help="of Nesterov momentum, for the exchanged changes (%(default)s)")
    add("--outer-momentum", type=float, default=0.9, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    add("--picture", type=writable, metavar="FILE", default="diloco.png", help="(%(default)s)")
    args = parser.parse_args(argv)
    mp.virtual_devices(8)
    task = Task(args)
    state, losses, all_reduced = synchronous(task)
    runs = {
        "every step": task.result(losses, all_reduced, state["params"]),
        f"DiLoCo, every {args.every} steps": local(task, args.every, args.synchronous),
        "Streaming, int8": local(
            task, args.every, args.synchronous, exchange=mp.replicas.coded("int8"), fragments=4, blend=0.5
        ),
    }
    console = Console(highlight=False)
    labels = {}
    for name, run in runs.items():
        bits, sent = run.held_out / math.log(2), run.sent / 1e6
        last = statistics.fmean(run.losses[-20:])
        console.print(
            f"{name:<22} {bits:.3f} bits per held-out byte, {last:.4f} nats per byte in the last 20 steps, "
            f"a device sends {sent:.2f} MB between slices"
        )
        labels[f"{name}: {sent:.2f} MB"] = run.losses
    if args.picture:
        draw_curves(labels, bytes_per_step=args.batch * args.seq, path=args.picture)
        console.print(f"loss curves in {args.picture}")
    return runs


if __name__ == "__main__":
    main()

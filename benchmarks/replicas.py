"""Losses and inter-slice bytes of the ways in which replicas exchange updates, and of optimizer state in 8 bits.

    python benchmarks/replicas.py                       # all cases, 300 steps: about half an hour on 2 CPU cores
    python benchmarks/replicas.py float32 int8 --steps 50
    python benchmarks/replicas.py --llama               # planned bytes of Llama 3 8B; no training

The byte-level Transformer of examples/train_lm.py (smaller by default) is trained on 8 virtual CPU devices as two slices of
four, on the same batches in every case. A line of JSON per case has the mean training loss of the last 20 steps, the held-out
loss, both in nats per byte, and the bytes that a device sends over the axis `slice` per exchange.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import meshpar as mp
from lm.data import held_out_batches, read_stdlib, training_batches
from lm.model import Config, Transformer

SLICES = 2
LAYOUT = "batch: data; embed: data"
EXCHANGES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "float32": lambda: mp.replicas.mean(replicas=SLICES),
    "int8": lambda: mp.replicas.coded("int8", replicas=SLICES),
    "float8": lambda: mp.replicas.coded("float8_e4m3fn", replicas=SLICES),
    "sign": lambda: mp.replicas.coded("sign", replicas=SLICES),
    "topk": lambda: mp.replicas.coded("topk:0.01", replicas=SLICES),
    "powersgd": lambda: mp.replicas.powersgd(4, stacked="layers/*", replicas=SLICES),
}
LOCAL = {"diloco": None, "diloco-int8": "int8"}
LOW_BITS = {"low-bits-int8": "int8", "low-bits-float8": "float8_e4m3fn"}


class Training:
    """The model, its data and its optimizer, as plain trees and functions."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        config = Config(layers=args.layers, embed=args.embed, mlp=3 * args.embed, dropout=0.0)
        self.config = config
        with nnx.use_eager_sharding(False):  # names are not mesh axes
            model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
        self.graph, state, self.rest = nnx.split(model, nnx.Param, ...)
        self.structure = jax.tree.structure(state)
        self.dims = {
            "params/" + "/".join(map(str, path)): " ".join(variable.get_metadata()["out_sharding"])
            for path, variable in nnx.to_flat_state(state)
        }
        text = read_stdlib()
        stream = training_batches(text.train, args.batch, args.seq, seed=0)
        self.batches = [next(stream) for _ in range(args.steps)]
        self.held_out = held_out_batches(text.held_out, args.batch, args.seq, 16)

    def params(self, key: jax.Array) -> Any:
        """The weights as nested dicts."""
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(key)), nnx.Param))

    def loss(self, params: Any, inputs: Any, targets: Any) -> jax.Array:
        model = nnx.merge(self.graph, jax.tree.unflatten(self.structure, jax.tree.leaves(params)), self.rest)
        logits = model(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def adamw(self) -> optax.GradientTransformation:
        """The optimizer of examples/train_lm.py."""
        peak, steps = self.args.lr, self.args.steps
        rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, min(20, steps // 5), steps, end_value=peak / 20)
        adamw = optax.adamw(rate, b1=0.9, b2=self.args.b2, weight_decay=0.1)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def held_out_loss(self, params: Any) -> float:
        loss = jax.jit(self.loss)
        return statistics.fmean(float(loss(jax.tree.map(np.asarray, params), *b)) for b in self.held_out)


def synchronous(training: Training, tx: optax.GradientTransformation) -> dict[str, Any]:
    """Train with an exchange of gradients in every step: shared parameters, gradients per replica."""
    mesh = mp.mesh(f"slice={SLICES}, data=4")
    layout = f"replica: slice; {LAYOUT}"

    def create(key: jax.Array) -> Any:
        params = training.params(key)
        return {"params": params, "opt": tx.init(params)}

    def step(state: Any, inputs: Any, targets: Any) -> tuple[Any, jax.Array]:
        one = jax.value_and_grad(training.loss)
        losses, gradients = jax.vmap(one, in_axes=(None, 0, 0))(state["params"], inputs, targets)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses.mean()

    optional = mp.Layout(layout, optional=True)
    state = mp.init(create, mesh=mesh, layout=optional, dims=training.dims)(jax.random.key(0))
    rows = "replica batch seq"
    dims = {f"state/{p}": d for p, d in training.dims.items()} | {"inputs": rows, "targets": rows}
    run = mp.jit(step, mesh=mesh, layout=optional, dims=dims, donate_argnames="state")
    plan, losses = None, []
    for batch in training.batches:
        halves = [x.reshape(SLICES, -1, x.shape[-1]) for x in batch]
        plan = plan or run.plan(state, *halves)
        state, loss = run(state, *halves)
        losses.append(float(loss))
    assert plan is not None
    return report(training, losses, state["params"], sent_over_slices(plan), training.args.steps)


def local(training: Training, code: str | None) -> dict[str, Any]:
    """Train with DiLoCo: each replica for itself, an exchange every ``--every`` steps."""
    tx, every = training.adamw(), training.args.every

    def create(key: jax.Array) -> Any:
        params = training.params(key)
        return {"params": params, "opt": tx.init(params)}

    def step(state: Any, inputs: Any, targets: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(training.loss)(state["params"], inputs, targets)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    run = mp.local_sgd(
        step, over="slice", every=every, outer=optax.sgd(training.args.outer_lr, momentum=0.9, nesterov=True),
        exchange=mp.replicas.coded(code) if code else None, mesh=mp.mesh(f"slice={SLICES}, data=4"), layout=LAYOUT,
        dims={**{f"*{p}": d for p, d in training.dims.items()}, "inputs": "batch seq", "targets": "batch seq"},
    )  # fmt: skip
    state, losses = run.init(create)(jax.random.key(0)), []
    for n, batch in enumerate(training.batches):
        state, loss = run(n, state, *batch)
        losses.append(float(np.mean(loss)))
    plan = run.outer.plan(**state)
    return report(training, losses, state["anchor"]["params"], sent_over_slices(plan), training.args.steps // every)


def sent_over_slices(plan: mp.Plan) -> float:
    return sum(c.total_bytes for c in plan.collectives if "slice" in c.axes)


def report(training: Training, losses: list[float], params: Any, sent: float, exchanges: int) -> dict[str, Any]:
    return {
        "loss": round(statistics.fmean(losses[-20:]), 4),
        "held_out": round(training.held_out_loss(params), 4),
        "slice_bytes_per_exchange": sent,
        "exchanges": exchanges,
    }


def run_case(training: Training, case: str) -> dict[str, Any]:
    """Train one case."""
    if case in LOCAL:
        return local(training, LOCAL[case])
    adamw = training.adamw()
    if case in LOW_BITS:
        return synchronous(
            training, optax.chain(EXCHANGES["float32"](), mp.low_bits(adamw, LOW_BITS[case], min_size=0))
        )
    return synchronous(training, optax.chain(EXCHANGES[case](), adamw))


def main() -> None:
    cases = [*EXCHANGES, *LOCAL, *LOW_BITS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)} (all)")
    parser.add_argument("--llama", action="store_true", help="plan Llama 3 8B instead")
    for name, default in (("steps", 300), ("batch", 16), ("seq", 64), ("layers", 2), ("embed", 64), ("every", 50)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    for name, default in (("lr", 6e-3), ("b2", 0.95), ("outer-lr", 0.7)):
        parser.add_argument(f"--{name}", type=float, default=default, help="(%(default)s)")
    args = parser.parse_args()
    mp.virtual_devices(8)
    training = Training(args)
    for case in args.cases or cases:
        began = time.perf_counter()
        result = run_case(training, case)
        print(json.dumps({"case": case, **result, "seconds": round(time.perf_counter() - began)}), flush=True)


if __name__ == "__main__":
    main()

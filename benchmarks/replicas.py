"""Losses and inter-slice bytes of the ways in which replicas exchange updates, and of optimizer state in 8 bits.

    python benchmarks/replicas.py                       # all cases, 300 steps: about half an hour on 2 CPU cores
    python benchmarks/replicas.py float32 int8 --steps 50
    python benchmarks/replicas.py --llama               # planned bytes of Llama 3 8B; no training
    python benchmarks/replicas.py --llama --compile     # of the TPU compiler's program

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import llama
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

    def rate(self) -> optax.Schedule:
        peak, steps = self.args.lr, self.args.steps
        return optax.warmup_cosine_decay_schedule(peak / 10, peak, min(20, steps // 5), steps, end_value=peak / 20)

    def adamw(self) -> optax.GradientTransformation:
        """The optimizer of examples/train_lm.py."""
        adamw = optax.adamw(self.rate(), b1=0.9, b2=self.args.b2, weight_decay=0.1)
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def held_out_loss(self, params: Any) -> float:
        loss = jax.jit(self.loss)
        return statistics.fmean(float(loss(jax.tree.map(np.asarray, params), *b)) for b in self.held_out)


class OneBitAdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any
    exchange: Any


def one_bit_adam(training: Training, warmup: int) -> tuple[optax.GradientTransformation, Callable[[Any, Any], Any]]:
    """The second phase of 1-bit Adam (Tang et al., 2021): the variance is that of the warm-up, and replicas exchange the signs of
    their momenta.

    Returns:
      The transformation, and a function from the state of ``optax.chain(mean, training.adamw())`` after the warm-up and the
      parameters to its first state.
    """
    exchange, rate = mp.replicas.coded("sign", replicas=SLICES), training.rate()

    def start(state: Any, params: Any) -> OneBitAdamState:
        adam = next(x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x))
        return OneBitAdamState(adam.count, adam.mu, adam.nu, exchange.init(params))

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        momenta = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, gradients)  # one per replica
        mu, exchanged = exchange.update(momenta, state.exchange)
        rate_now, count = rate(state.count), state.count + 1

        def one(m: Any, v: Any, p: Any) -> Any:
            m, v = m / (1 - 0.9**count), v / (1 - training.args.b2**warmup)
            return -rate_now * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

        updates = jax.tree.map(one, mu, state.nu, params)
        return updates, OneBitAdamState(count, mu, state.nu, exchanged)

    return optax.GradientTransformation(lambda params: start(None, params), update), start


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def synchronous(
    training: Training, tx: optax.GradientTransformation, then: tuple[int, optax.GradientTransformation, Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Train with an exchange of gradients in every step: shared parameters, gradients per replica.

    Args:
      tx: the exchange and the optimizer.
      then: (step n, another transformation from step n on, a function from state and parameters to its first state).
    """
    mesh = mp.mesh(f"slice={SLICES}, data=4")
    layout = f"replica: slice; {LAYOUT}"

    def create(key: jax.Array) -> Any:
        params = training.params(key)
        return {"params": params, "opt": tx.init(params)}

    def step_of(tx: optax.GradientTransformation) -> Any:
        def step(state: Any, inputs: Any, targets: Any) -> tuple[Any, jax.Array]:
            one = jax.value_and_grad(training.loss)
            losses, gradients = jax.vmap(one, in_axes=(None, 0, 0))(state["params"], inputs, targets)
            updates, opt = tx.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses.mean()

        return mp.jit(step, mesh=mesh, layout=optional, dims=dims, donate_argnames="state")

    optional = mp.Layout(layout, optional=True)
    state = mp.init(create, mesh=mesh, layout=optional, dims=training.dims)(jax.random.key(0))
    rows = "replica batch seq"
    dims = {f"state/{p}": d for p, d in training.dims.items()} | {"inputs": rows, "targets": rows}
    run, plan, losses = step_of(tx), None, []
    for n, batch in enumerate(training.batches):
        halves = [x.reshape(SLICES, -1, x.shape[-1]) for x in batch]
        if then is not None and n == then[0]:
            state["opt"] = then[2](state["opt"], state["params"])
            run, plan = step_of(then[1]), None
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


def llama_step(exchange: optax.GradientTransformation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A train step of Llama 3 8B on two v5p slices of 128 chips with an exchange of gradients; FSDP in a slice.

    Returns:
      The positional and keyword arguments of ``mp.plan`` and ``mp.compile``.
    """
    model = llama.Llama(llama.LLAMA3_8B)
    tx = optax.chain(exchange, llama.optimizer())

    def create(key: jax.Array) -> Any:
        state = llama.create_state(model.config, key)
        return {"params": state["params"], "opt": tx.init(state["params"])}

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(params: Any, batch: Any) -> Any:
            return model.apply({"params": params}, batch["inputs"], batch["targets"])

        losses, gradients = jax.vmap(jax.value_and_grad(loss_of), in_axes=(None, 0))(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses.mean()

    state = jax.eval_shape(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((SLICES, 128, 2048), jnp.int32)
    return (step, state, {"inputs": tokens, "targets": tokens}), {
        "mesh": "slice=2, data=128", "topology": "2x v5p:4x4x8", "layout": f"replica: slice; {LAYOUT}",
        "dims": {"batch/*": "replica batch seq"}, "donate_argnums": 0,
    }  # fmt: skip


def report_llama(cases: Sequence[str], compiled: bool) -> None:
    """Print a line of JSON per exchange: bytes between slices of a device and step, and peak memory; planned or compiled."""
    exchanges = {**EXCHANGES, "bfloat16": lambda: mp.replicas.mean(dtype="bfloat16", replicas=SLICES)}
    for case in cases or exchanges:
        args, options = llama_step(exchanges[case]())
        row: dict[str, Any] = {"case": case}
        if compiled:
            result = mp.compile(*args, **options, lowering="shard_map")
            sent = sum(c.total_bytes for c in result.final_collectives if c.dcn)
            row |= {"slice_mb": round(sent / 1e6, 2), "peak_gb": round(result.memory.peak / 1e9, 3)}
        else:
            plan = mp.plan(*args, **options)
            row |= {"slice_mb": round(sent_over_slices(plan) / 1e6, 2), "peak_gb": round(plan.memory.peak / 1e9, 3)}
        print(json.dumps(row), flush=True)


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
    if case == "one-bit-adam":
        warmup = training.args.steps // 4
        then = (warmup, *one_bit_adam(training, warmup))
        return synchronous(training, optax.chain(EXCHANGES["float32"](), adamw), then)
    if case in LOW_BITS:
        return synchronous(training, optax.chain(EXCHANGES["float32"](), mp.low_bits(adamw, LOW_BITS[case])))
    return synchronous(training, optax.chain(EXCHANGES[case](), adamw))


def main() -> None:
    cases = [*EXCHANGES, "one-bit-adam", *LOCAL, *LOW_BITS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)} (all)")
    parser.add_argument("--llama", action="store_true", help="plan Llama 3 8B instead")
    parser.add_argument("--compile", action="store_true", help="with --llama: compile for TPUs (needs libtpu)")
    for name, default in (("steps", 300), ("batch", 16), ("seq", 64), ("layers", 2), ("embed", 128), ("every", 50)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    for name, default in (("lr", 6e-3), ("b2", 0.95), ("outer-lr", 0.7)):
        parser.add_argument(f"--{name}", type=float, default=default, help="(%(default)s)")
    args = parser.parse_args()
    if args.llama:
        return report_llama(args.cases, args.compile)
    mp.virtual_devices(8)
    training = Training(args)
    for case in args.cases or cases:
        began = time.perf_counter()
        result = run_case(training, case)
        print(json.dumps({"case": case, **result, "seconds": round(time.perf_counter() - began)}), flush=True)
    return None


if __name__ == "__main__":
    main()

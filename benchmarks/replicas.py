"""Losses and inter-slice bytes of the ways in which replicas exchange updates, and of optimizer state in 8 bits.

    python benchmarks/replicas.py                            # all cases, 300 steps: ten minutes on 2 CPU cores
    python benchmarks/replicas.py float32 int8 --steps 50
    python benchmarks/replicas.py --llama                    # Llama 3 8B on two slices: the plan; no training
    python benchmarks/replicas.py --llama --compile          # the TPU compiler's program

The language model of examples/diloco.py is trained on 8 virtual CPU devices as two slices of four, on the same batches in every
case. `loss` is the mean of the last 20 steps, `held out` the loss of the final weights, both in nats per byte. `bytes`: sent by a
device over the axis `slice` in an exchange.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from tables import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import diloco
from diloco import sent_between_slices
from train_lm import adamw

import llama
import meshpar as mp

SLICES = 2
EXCHANGES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "float32": lambda: mp.replicas.mean(replicas=SLICES),
    "bfloat16": lambda: mp.replicas.mean(dtype="bfloat16", replicas=SLICES),
    "int8": lambda: mp.replicas.coded("int8", replicas=SLICES),
    "float8": lambda: mp.replicas.coded("float8_e4m3fn", replicas=SLICES),
    "sign": lambda: mp.replicas.coded("sign", replicas=SLICES),
    "top 1 %": lambda: mp.replicas.coded("topk:0.01", replicas=SLICES),
    "PowerSGD, rank 4": lambda: mp.replicas.powersgd(4, stacked="layers/*", replicas=SLICES),
}
LOCAL: dict[str, dict[str, Any]] = {
    "DiLoCo": {},
    "DiLoCo, int8": {"exchange": mp.replicas.coded("int8")},
    "Streaming DiLoCo, int8": {"exchange": mp.replicas.coded("int8"), "fragments": 4, "blend": 0.5},
}
LOW_BITS = {"Adam's state in int8": "int8", "Adam's state in float8": "float8_e4m3fn"}
ONE_BIT = "1-bit Adam"
PEAK_RATE = 6e-3


class OneBitAdamState(NamedTuple):
    """State of :func:`one_bit_adam`: ``nu`` comes from the warm-up and does not change."""

    count: Any
    mu: Any
    nu: Any
    exchange: Any


def one_bit_adam(steps: int, warmup: int) -> tuple[optax.GradientTransformation, Callable[[Any, Any], Any]]:
    """The second phase of 1-bit Adam (Tang et al., 2021) with the rates of :func:`train_lm.adamw`: the variance comes from the
    warm-up, and replicas exchange the signs of their momenta.

    Returns:
      The transformation, and a function from the state after the warm-up and the parameters to its first state.
    """
    exchange = mp.replicas.coded("sign", replicas=SLICES)
    rate: Callable[[Any], Any] = optax.warmup_cosine_decay_schedule(
        PEAK_RATE / 10, PEAK_RATE, min(20, steps // 5), steps, end_value=PEAK_RATE / 20
    )

    def start(state: Any, params: Any) -> OneBitAdamState:
        adam = next(x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x))
        return OneBitAdamState(adam.count, adam.mu, adam.nu, exchange.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        momenta = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, updates)  # one per replica
        mu, exchanged = exchange.update(momenta, state.exchange)
        count = state.count + 1

        def one(m: Any, v: Any, p: Any) -> Any:
            m, v = m / (1 - 0.9**count), v / (1 - 0.95**warmup)
            return -rate(state.count) * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

        updates = jax.tree.map(one, mu, state.nu, params)
        return updates, OneBitAdamState(count, mu, state.nu, exchanged)

    return optax.GradientTransformation(lambda params: params, update), start


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def synchronous(
    task: diloco.Task, tx: optax.GradientTransformation, then: tuple[int, optax.GradientTransformation, Any] | None = None
) -> diloco.Run:  # fmt: skip
    """Train with an exchange of gradients in every step: shared parameters, gradients per replica.

    Args:
      tx: the exchange and the optimizer.
      then: (step n, another transformation from step n on, a function from state and parameters to its first state).
    """
    mesh = mp.mesh(diloco.MESH)
    layout = mp.Layout("replica: slice; batch: data; embed: data", optional=True)
    weights = {p.replace("*params", "params"): d for p, d in task.model.dims.items()}
    rows = {"inputs": "replica batch seq", "targets": "replica batch seq"}

    def create(key: jax.Array) -> Any:
        params = task.model.init(key)
        return {"params": params, "opt": tx.init(params)}

    def step_of(tx: optax.GradientTransformation) -> Any:
        def step(state: Any, inputs: Any, targets: Any) -> tuple[Any, jax.Array]:
            one = jax.value_and_grad(task.model.loss)
            losses, gradients = jax.vmap(one, in_axes=(None, 0, 0))(state["params"], inputs, targets)
            updates, opt = tx.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, losses.mean()

        dims = {f"state/{p}": d for p, d in weights.items()} | rows
        return mp.jit(step, mesh=mesh, layout=layout, dims=dims, donate_argnames="state")

    state = mp.init(create, mesh=mesh, layout=layout, dims=weights)(jax.random.key(0))
    step, plan, losses = step_of(tx), None, []
    for n, batch in enumerate(task.batches):
        halves = [x.reshape(SLICES, -1, x.shape[-1]) for x in batch]
        if then is not None and n == then[0]:
            state["opt"] = then[2](state["opt"], state["params"])
            step, plan = step_of(then[1]), None
        plan = plan or step.plan(state, *halves)
        state, loss = step(state, *halves)
        losses.append(float(loss))
    assert plan is not None
    return task.result(losses, sent_between_slices(plan) * len(losses), state["params"])


def run_case(task: diloco.Task, case: str, every: int) -> tuple[diloco.Run, int]:
    """(the losses and bytes of one case, its number of exchanges); bytes as if all exchanges were like the last."""
    steps = len(task.batches)
    if case in LOCAL:
        return diloco.local(task, every, **LOCAL[case]), steps // every
    optimizer, exchange = adamw(PEAK_RATE, steps), EXCHANGES.get(case, EXCHANGES["float32"])()
    if case in LOW_BITS:
        optimizer = mp.train.low_bits(optimizer, LOW_BITS[case])
    then = (steps // 4, *one_bit_adam(steps, steps // 4)) if case == ONE_BIT else None
    return synchronous(task, optax.chain(exchange, optimizer), then), steps


def report_training(args: argparse.Namespace) -> None:
    """Train every case, and print its losses relative to the first one."""
    task = diloco.Task(args)
    table = Table("exchange", "loss", "relative", "held out", "relative", "bytes", "exchanges")
    first: tuple[float, float] | None = None
    for case in args.cases or CASES:
        run, exchanges = run_case(task, case, args.every)
        losses = statistics.fmean(run.losses[-20:]), run.held_out
        first = first or losses
        cells = [text for a, b in zip(losses, first, strict=True) for text in (f"{a:.4f}", f"{a / b - 1:+.2%}")]
        table.add_row(case, *cells, f"{run.sent / exchanges:,.0f}", str(exchanges))


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
        "mesh": "slice=2, data=128", "topology": "2x v5p:4x4x8", "lowering": "shard_map", "donate_argnums": 0,
        "layout": "replica: slice; batch: data; embed: data", "dims": {"batch/*": "replica batch seq"},
    }  # fmt: skip


def report_llama(cases: Sequence[str], compiled: bool) -> None:
    """Bytes that a device sends between slices in a step, and peak memory: of plans, or of compiled programs."""
    table = Table("exchange", "MB between slices", "peak", title="compiled" if compiled else "planned")
    for case in cases or EXCHANGES:
        args, options = llama_step(EXCHANGES[case]())
        if compiled:
            result = mp.compile(*args, **options)
            sent, peak = sum(c.total_bytes for c in result.final_collectives if c.dcn), result.memory.peak
        else:
            plan = mp.plan(*args, **options)
            sent, peak = sent_between_slices(plan), plan.memory.peak
        table.add_row(case, f"{sent / 1e6:.1f}", f"{peak / 1e9:.2f} GB")


CASES = [*EXCHANGES, ONE_BIT, *LOCAL, *LOW_BITS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}".replace("%", "%%"))
    parser.add_argument("--llama", action="store_true", help="Llama 3 8B instead of training")
    parser.add_argument("--compile", action="store_true", help="with --llama: compile for TPUs (needs libtpu)")
    for name, default in (("steps", 300), ("batch", 16), ("seq", 64), ("layers", 2), ("embed", 128), ("every", 50)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    args = parser.parse_args()
    mp.virtual_devices(8)
    if args.llama:
        report_llama(args.cases, args.compile)
    else:
        report_training(args)


if __name__ == "__main__":
    main()

"""Overhead of mp.jit compared with hand-written PartitionSpecs: step time, dispatch time, and time to trace and lower.

    python benchmarks/overhead.py [--rounds 30] [--layers 96] [--only plans]

The step is the language model of examples/train_lm.py (FSDP + Megatron, 8 virtual CPU devices); both programs run alternately on
the same batches, and the medians are compared. Trace + lower is timed on a transformer of 96 layers that are not scanned.
Dispatch is timed on steps with almost no computation, called repeatedly with the same arguments.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.passes import make_plan
from meshpar._src.plan.request import PlanRequest
from meshpar._src.program import infer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tables import Table
from train_lm import LAYOUTS, adamw, loss_of, train_step

from llama import LAYOUTS as LLAMA_LAYOUTS
from llama import llama3_8b, llama3_70b
from lm.model import Config, Transformer
from resnet import resnet50

RULES = LAYOUTS["fsdp+megatron"]
CHANGES = [f"{dim}?: {axes}" for dim in ("mlp", "heads", "vocab") for axes in ("data", "model+data", "data+model")]
"""Rules that replace one rule of a language model's layout, as a step of a search does."""


# -- the step of the example, with hand-written PartitionSpecs

SPECS = {  # one PartitionSpec for each weight
    "embedding": P("model", "data"),
    "head": P("data", "model"),
    "query": P(None, "data", "model"),
    "key": P(None, "data", "model"),
    "value": P(None, "data", "model"),
    "out": P(None, "model", None, "data"),
    "gate": P(None, "data", "model"),
    "up": P(None, "data", "model"),
    "down": P(None, "model", "data"),
    "attention_norm": P(None, "data"),
    "mlp_norm": P(None, "data"),
    "norm": P("data"),
}


def spec_by_hand(path, leaf) -> P:
    """The hand-written PartitionSpec of a leaf of the state."""
    names = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    for name in reversed(names):
        if name in SPECS and leaf.ndim >= len(SPECS[name]):
            return SPECS[name]
    return P()


def step_times(rounds: int) -> tuple[float, float, float]:
    """(median seconds of a step of mp.jit, of jax.jit, largest difference of their losses)."""
    mesh = mp.mesh("data=4, model=2")
    config = Config()
    with nnx.use_eager_sharding(False):  # the weights' metadata are names, not axes of this mesh
        model = Transformer(config, nnx.Rngs(0))
        graph, state = nnx.split((model, nnx.Optimizer(model, adamw(1e-3, 100), wrt=nnx.Param)))

    def step(state, inputs, targets, key):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, inputs, targets, key)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    tokens = np.random.default_rng(0).integers(0, 256, (16, 128), dtype=np.int32)
    key = jax.random.key(0)
    ours = mp.jit(
        step, mesh=mesh, layout=RULES, dims={"inputs": "batch seq", "targets": "batch seq"}, donate_argnames="state"
    )
    shardings = jax.tree_util.tree_map_with_path(lambda p, x: NamedSharding(mesh, spec_by_hand(p, x)), state)
    batch, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    by_hand = jax.jit(
        step,
        in_shardings=(shardings, batch, batch, everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
    states = [jax.device_put(jax.tree.map(jnp.copy, state), shardings) for _ in range(2)]
    times: list[list[float]] = [[], []]
    largest_difference = 0.0
    for number in range(rounds + 2):
        losses = []
        for k, run in enumerate((ours, by_hand)):
            began = time.perf_counter()
            states[k], loss = run(states[k], tokens, tokens, key)
            losses.append(float(jax.block_until_ready(loss)))
            jax.block_until_ready(states[k])
            if number >= 2:
                times[k].append(time.perf_counter() - began)
        largest_difference = max(largest_difference, abs(losses[0] - losses[1]))
    return statistics.median(times[0]), statistics.median(times[1]), largest_difference


# -- dispatch


def dispatch_times(rounds: int) -> list[tuple[str, float, float]]:
    """(case, median seconds of a call of mp.jit, of jax.jit) of tiny steps, whose time is dispatch.

    With jax.jit, a batch with another sharding is resharded by ``jax.device_put``.
    """
    mesh = mp.mesh("data=4, model=2")
    batch, weight = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))
    layout, dims = "batch: data; mlp: model", {"state/*": "embed mlp", "x": "batch embed"}

    def step(state, x):
        return jax.tree.map(lambda w: w + 1, state), x * 2

    def pair(leaves: int):
        state = {f"w{i}": jax.device_put(jnp.ones((8, 8)), weight) for i in range(leaves)}
        of_state = dict.fromkeys(state, weight)
        hand = jax.jit(step, in_shardings=(of_state, batch), out_shardings=(of_state, batch))
        return mp.jit(step, mesh=mesh, layout=layout, dims=dims), hand, state

    def medians(ours, hand) -> tuple[float, float]:
        times: list[list[float]] = [[], []]
        for number in range(50 * rounds):
            for k, run in enumerate((ours, hand)):
                began = time.perf_counter()
                jax.block_until_ready(run(number))
                if number >= rounds:
                    times[k].append(time.perf_counter() - began)
        return statistics.median(times[0]), statistics.median(times[1])

    xs = [jax.device_put(jnp.ones((n, 8)), batch) for n in (8, 16)]
    host = np.ones((8, 8), np.float32)
    resharded = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("model")))
    rows = []
    for leaves in (2, 100):
        ours, hand, state = pair(leaves)
        cases = {
            "": lambda run, n, state: run(state, xs[0]),
            ", alternating shapes": lambda run, n, state: run(state, xs[n % 2]),
            ", batch on the host": lambda run, n, state: run(state, host),
            ", batch with another sharding": lambda run, n, state: run(state, resharded),
        }
        placed = lambda state, x, hand=hand: hand(state, x if x is not resharded else jax.device_put(x, batch))  # noqa: E731
        for case, call in cases.items():
            runs = [functools.partial(call, run, state=state) for run in (ours, placed)]
            rows.append((f"dispatch, {leaves} weights{case}", *medians(*runs)))
    return rows


# -- a deep model without a loop


def deep_model(layers: int):
    """(train step, state, batch, dims) of a plain-JAX transformer whose layers are not scanned."""
    embed, heads, head_dim, mlp, vocab = 64, 4, 16, 128, 256
    optimizer = optax.adam(1e-3)

    def layer(p, x):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, p[n]) for n in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / head_dim**0.5)
        x = x + jnp.einsum("bhst,bthd,hde->bse", scores, v, p["o"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def loss(params, tokens):
        x = params["embedding"][tokens]
        for p in params["layers"]:
            x = layer(p, x)
        logits = x @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    def step(state, tokens):
        value, gradients = jax.value_and_grad(loss)(state["params"], tokens)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    def create():
        weight = lambda *shape: jnp.ones(shape) / 8  # noqa: E731
        one = {
            "norm": weight(embed), "q": weight(embed, heads, head_dim), "k": weight(embed, heads, head_dim),
            "v": weight(embed, heads, head_dim), "o": weight(heads, head_dim, embed), "up": weight(embed, mlp),
            "down": weight(mlp, embed),
        }  # fmt: skip
        params = {"embedding": weight(vocab, embed), "head": weight(embed, vocab), "layers": [one] * layers}
        return {"params": params, "opt_state": optimizer.init(params)}

    dims = {
        "state/params/*/norm": "embed", "state/params/*/o": "heads head_dim embed",
        "state/params/*/up": "embed mlp", "state/params/*/down": "mlp embed", "state/params/embedding": "vocab embed",
        "state/params/head": "embed vocab", "state/params/layers/*": "embed heads head_dim", "tokens": "batch seq",
    }  # fmt: skip
    return step, jax.eval_shape(create), jax.ShapeDtypeStruct((8, 32), jnp.int32), dims


def lower_times(layers: int, rounds: int) -> tuple[float, float, float]:
    """Median CPU seconds to trace and lower by mp.jit and by jax.jit, and to plan the same program a second time.

    Each begins after a full garbage collection, so that neither visits the objects that the other one made.
    """
    step, state, tokens, dims = deep_model(layers)
    mesh = mp.mesh("data=4, model=2")
    layout = "batch: data; heads, mlp, vocab: model; embed: data"
    ours: list[float] = []
    hand: list[float] = []
    alone: list[float] = []
    plan = mp.plan(step, state, tokens, mesh=mesh, layout=layout, dims=dims)
    specs = iter([h.spec for h in plan.inputs][:-1])
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, next(specs)), state)
    batch = NamedSharding(mesh, P("data"))
    for _ in range(rounds):
        for k in range(2):
            fresh = lambda state, tokens: step(state, tokens)  # noqa: E731  (a new function: nothing is cached)
            gc.collect()
            began = time.process_time()
            if k == 0:
                jitted = mp.jit(fresh, mesh=mesh, layout=layout, dims=dims)
                jitted.lower(state, tokens)
                ours.append(time.process_time() - began)
                began = time.process_time()
                jitted.plan(state, tokens)
                alone.append(time.process_time() - began)
            else:
                everywhere = NamedSharding(mesh, P())
                jax.jit(fresh, in_shardings=(shardings, batch), out_shardings=(shardings, everywhere)).lower(
                    state, tokens
                )
                hand.append(time.process_time() - began)
    return statistics.median(ours), statistics.median(hand), statistics.median(alone)


def planning_times() -> list[tuple[str, float, str]]:
    """(case, CPU seconds, limit) of plans with memory and time of traced models: the minimum of several rounds."""
    rows = []
    step, state, tokens, dims = deep_model(96)
    layout = "batch: data; heads, mlp, vocab: model; embed: data"
    presets = [LLAMA_LAYOUTS[k] for k in ("fsdp", "zero1", "fsdp_tensor", "sequence_parallel")]
    cases = [("plan, 96 layers unrolled", (step, (state, tokens), dims), [layout], 2, "≤ 1 s")]
    llama8, llama70 = llama3_8b(), llama3_70b()
    cases.append(("plan, llama3_70b", llama70, presets[-1:], 5, "≤ 100 ms"))
    cases.append(("replan, llama3_8b, mean of four layouts", llama8, presets, 5, "≤ 15 ms"))
    changed = [f"{rule}; {text}" for text in presets for rule in CHANGES]
    cases.append(("replan, llama3_8b, new layouts, mean of 36", llama8, changed, 1, ""))
    cases.append(
        (
            "replan, resnet50, mean of two layouts",
            resnet50(),
            ["batch: data", "batch: data; features?: model"],
            3,
            "≤ 150 ms",
        )
    )
    for what, (step, arguments, names), layouts, rounds, aim in cases:
        mesh, topology = ("data=8, model=2", "v5e:4x4") if "unrolled" in what else ("data=16, model=16", "v5e:16x16")
        first = mp.plan(
            step,
            *arguments,
            mesh=mesh,
            topology=topology,
            layout=layouts[0],
            dims=names,
            overlap="auto",
        )
        total = 0.0
        for text in layouts:
            times = []
            for _ in range(rounds):
                began = time.process_time()
                other = first.replan(layout=text)
                assert other.seconds is not None
                assert other.memory.peak > 0
                times.append(time.process_time() - began)
            total += min(times) / len(layouts)
        rows.append((what, total, aim))
    return rows


def inference_time() -> tuple[float, float, int]:
    """Median seconds of inference and of the plan for the step of the example, and its number of ops."""
    mesh = mp.mesh("data=4, model=2")
    with nnx.use_eager_sharding(False):
        model = Transformer(Config(), nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, adamw(1e-3, 100), wrt=nnx.Param)
    tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    step = mp.jit(train_step, mesh=mesh, layout=RULES, dims={"inputs": "batch seq", "targets": "batch seq"})
    program = step.plan(model, optimizer, tokens, tokens, jax.random.key(0)).program
    ins, outs = program.inputs, program.outputs
    names = [v.annotation for v in ins], [v.path or "" for v in ins]
    times: list[list[float]] = [[], []]
    for _ in range(9):
        began = time.perf_counter()
        infer(program.closed, *names, [None] * len(outs), [v.path or "" for v in outs])
        times[0].append(time.perf_counter() - began)
        began = time.perf_counter()
        make_plan(program, PlanRequest(step.layout, mesh))
        times[1].append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1]), sum(1 for _ in program.root.walk())


def add_lower_times(table: Table, layers: int) -> None:
    """Add the rows of :func:`lower_times` to a table."""
    ours, hand, alone = lower_times(layers, 5)
    table.add_row(
        f"trace + lower, {layers} layers unrolled, CPU time",
        f"{ours:.2f} s",
        f"{hand:.2f} s",
        f"{ours / hand:.2f}",
        "≤ 1.3",
    )
    table.add_row(f"second plan, {layers} layers unrolled", f"{alone:.2f} s", "", "", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=96)
    parts = ["dispatch", "inference", "lower", "plans", "step"]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts, help="these rows only")
    args = parser.parse_args()
    mp.virtual_devices(8)
    table = Table("case", "mp.jit", "jax.jit by hand", "ratio", "limit", title=f"jax {jax.__version__}")
    if "dispatch" in args.only:
        for what, ours, hand in dispatch_times(args.rounds):
            table.add_row(what, f"{1e6 * ours:.0f} µs", f"{1e6 * hand:.0f} µs", f"{ours / hand:.2f}", "≤ 1.2")
    if "inference" in args.only:
        infer_s, plan_s, ops = inference_time()
        table.add_row(f"inference, {ops} ops of train_lm's step", f"{1e3 * infer_s:.0f} ms", "", "", "≤ 100 ms")
        table.add_row("plan of these ops", f"{1e3 * plan_s:.0f} ms", "", "", "")
    if "lower" in args.only:
        add_lower_times(table, args.layers)
    if "plans" in args.only:
        for what, seconds, aim in planning_times():
            table.add_row(what, f"{1e3 * seconds:.0f} ms", "", "", aim)
    if "step" in args.only:
        ours, hand, largest_difference = step_times(args.rounds)
        table.add_row(
            "step of train_lm", f"{1e3 * ours:.2f} ms", f"{1e3 * hand:.2f} ms", f"{ours / hand:.3f}", "≤ 1.02"
        )
        table.add_row("largest difference of losses", f"{largest_difference:.1e}", "", "", "")


if __name__ == "__main__":
    main()

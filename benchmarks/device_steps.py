"""Whole steps on one attached device: results, time and memory under meshpar, against plain `jax.jit` and against the plan.

Tasks of `benchmarks/device.py`. Each (step, variant) runs in a process of its own, from the same initial values, so that the
results of variants can be compared and the peak of the device's memory belongs to one program. With one device nothing is sent:
checked are the effects of the lowerings on a program, the kernels inside whole programs, and the planner's time and memory.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import generate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import llama
import meshpar as mp
import mixtral
import resnet
from meshpar.layers import MoEExecution, moe
from meshpar_kernels.published_model_shapes import MODELS

MESH, LAYOUT = "data=1, model=1", "batch?: data; mlp?, heads?, vocab?, expert?: model"
PLAIN, TRACED = "jax.jit", "trace"
LOWERINGS = ("shard_map", "jit")
STEPS_KEPT, STEPS_TIMED = 4, 10
"""Steps whose results are compared, and steps that are timed."""


@dataclass(frozen=True)
class Program:
    """A step as a user writes it.

    Attributes:
      step: (state, batch) → (new state, results).
      create: makes the state.
      batch: makes the other argument.
      dims: of both.
      of_results: the scalars that are compared and waited for: scalars of (state, results).
      others: variant → another step on the same arguments, run by plain `jax.jit`.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    create: Callable[[], Any]
    batch: Callable[[], Any]
    dims: dict[str, str]
    of_results: Callable[[Any, Any], Any] = lambda state, results: results
    others: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = field(default_factory=dict)


def names() -> list[tuple[str, str]]:
    """(step, variant) of every task, the more telling ones first."""
    variants = (PLAIN, *LOWERINGS)
    rows = [(name, variant) for name in ("llama", "moe") for variant in variants]
    rows += [("moe", variant) for variant in ("all kernels", "xla loop", "ragged_dot")]
    rows += [("decode", PLAIN), ("decode", "shard_map"), ("decode, a loop over layers", "shard_map")]
    rows += [("decode, int8", "shard_map"), ("llama", TRACED)]
    rows += [("llama, moments on the host", "shard_map"), ("llama, 8-bit moments", "shard_map")]
    rows += [(name, variant) for name in ("mixtral", "resnet") for variant in (PLAIN, "shard_map")]
    return rows


def program(name: str, tiny: bool = False) -> Program:
    """The step of this name; `tiny`: at sizes for a CPU."""
    return PROGRAMS[name](tiny)


def _train(model: Any, config: Any, batch: int, seq: int, optimizer: Any = None) -> Program:
    """The train step of `examples/llama.py` with this model; `optimizer`: another than its own."""
    network = model(config)

    def create() -> Any:
        state = llama.state_of(model, config, jax.random.key(0))
        return state if optimizer is None else {"params": state["params"], "opt": optimizer.init(state["params"])}

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            loss: Any = network.apply({"params": params}, batch["inputs"], batch["targets"])
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def tokens() -> dict[str, jax.Array]:
        drawn = jax.random.randint(jax.random.key(1), (batch, seq + 1), 0, config.vocab)
        return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}

    return Program(llama.step_of(network) if optimizer is None else step, create, tokens, llama.DIMS)


def _llama(tiny: bool, optimizer: Any = None) -> Program:
    if tiny:
        return _train(llama.Llama, llama.TINY, 4, 16, optimizer)
    config = replace(llama.LLAMA3_8B, layers=4, attention="ring")
    return _train(llama.Llama, config, 4, 2048, optimizer)


def _adam() -> optax.GradientTransformation:
    return optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def _mixtral(tiny: bool) -> Program:
    if tiny:
        return _train(mixtral.Mixtral, mixtral.TINY, 4, 16)
    return _train(mixtral.Mixtral, replace(mixtral.MIXTRAL_8X7B, layers=1, attention="ring"), 4, 2048)


def _resnet(tiny: bool) -> Program:
    sizes = {"batch": 8, "size": 32, "width": 8, "classes": 10} if tiny else {"batch": 256}
    step, (state, batch), dims = resnet.resnet50(**sizes)
    classes = sizes.get("classes", 1000)

    def create() -> Any:
        return jax.tree.map(functools.partial(_filled, scale=0.02), state)

    def data() -> Any:
        images, labels = batch["images"], batch["labels"]
        return {
            "images": jax.random.normal(jax.random.key(1), images.shape, images.dtype),
            "labels": jax.random.randint(jax.random.key(2), labels.shape, 0, classes),
        }

    return Program(step, create, data, dims)


def _filled(like: Any, scale: float) -> jax.Array:
    """Normal numbers for matrices, ones for vectors, zeros for integers."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.zeros(like.shape, like.dtype)
    if len(like.shape) < 2:
        return jnp.ones(like.shape, like.dtype)
    return scale * jax.random.normal(jax.random.key(np.prod(like.shape) % 9973), like.shape, like.dtype)


def _moe(tiny: bool) -> Program:
    """One mixture-of-experts layer of DeepSeek-V2-Lite: forward, backward, and a step of SGD, so that steps differ."""
    m = MODELS["deepseek-v2-lite"]
    embed, mlp, experts, k, tokens = (32, 16, 8, 2, 64) if tiny else (m.embed, m.mlp, m.experts, m.k, 8192)
    dtype = jnp.float32 if tiny else jnp.bfloat16

    def create() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = {"router": (embed, experts), "gate": (experts, embed, mlp), "up": (experts, embed, mlp),
                  "down": (experts, mlp, embed)}  # fmt: skip
        drawn = {n: jax.random.normal(key, s) for key, (n, s) in zip(keys, shapes.items(), strict=True)}
        return {n: (x / np.sqrt(x.shape[-2])).astype(dtype) for n, x in drawn.items()}

    def sgd(layer: Callable[[Any, jax.Array], jax.Array]) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
        def step(p: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            def loss(p: Any, x: jax.Array) -> jax.Array:
                return jnp.mean(jnp.square((layer(p, x) - x).astype(jnp.float32)))

            value, (gradients, dx) = jax.value_and_grad(loss, (0, 1))(p, x)
            p = jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), p, gradients)
            return p, value + 0.0 * jnp.sum(dx.astype(jnp.float32))

        return step

    def ours(p: Any, x: jax.Array, implementation: str | None = None) -> jax.Array:
        experts = {n: p[n] for n in ("gate", "up", "down")}
        execution = MoEExecution(implementation=implementation)
        return moe(x, p["router"], experts, router="top_k", k=k, execution=execution)[0]

    def by_ragged_dot(p: Any, x: jax.Array) -> jax.Array:
        """Tokens sorted by expert, `ragged_dot`, as written by hand."""
        rows = x.reshape(-1, embed)
        logits = jnp.dot(rows.astype(jnp.float32), p["router"].astype(jnp.float32), precision="highest")
        best, expert = lax.top_k(logits, k)
        weight = jax.nn.softmax(best, -1)
        order = jnp.argsort(expert.reshape(-1), stable=True)
        sizes = jnp.bincount(expert.reshape(-1), length=experts).astype(jnp.int32)
        sorted_rows = rows[order // k]
        h = jax.nn.silu(lax.ragged_dot(sorted_rows, p["gate"], sizes)) * lax.ragged_dot(sorted_rows, p["up"], sizes)
        y = lax.ragged_dot(h, p["down"], sizes)
        y = jnp.zeros_like(y).at[order].set(y).reshape(-1, k, embed)
        return jnp.einsum("tkh,tk->th", y.astype(jnp.float32), weight).astype(x.dtype).reshape(x.shape)

    def data() -> jax.Array:
        return jax.random.normal(jax.random.key(9), (4, tokens // 4, embed), dtype)

    others = {"ragged_dot": sgd(by_ragged_dot), "xla loop": sgd(functools.partial(ours, implementation="xla"))}
    if not tiny:
        others["all kernels"] = sgd(functools.partial(ours, implementation="pallas"))
    dims = {
        "p/router": "embed router",
        "p/{gate,up}": "expert embed mlp",
        "p/down": "expert mlp embed",
        "x": "batch seq embed",
    }
    return Program(sgd(ours), create, data, dims, others=others)


def _decode(tiny: bool, weights: str = "bfloat16", unroll: bool = True) -> Program:
    """A token of each of 32 sequences of Llama 3 8B, half of whose 2048 slots of cache are filled."""
    config = llama.TINY if tiny else replace(llama.LLAMA3_8B, layers=16)
    batch, length = (4, 16) if tiny else (32, 2048)
    decode, (params, state), dims = generate.decode_target(
        llama.Llama, config, batch, length, weights=weights, unroll=unroll
    )

    def create() -> Any:
        values = jax.tree.map(functools.partial(_filled, scale=0.02), state)
        values |= {"position": jnp.full((batch,), length // 2, jnp.int32), "key": jax.random.key(3)}
        return values | {"end": jnp.full((batch,), length, jnp.int32), "active": jnp.ones((batch,), bool)}

    def model() -> Any:
        def one(like: Any) -> jax.Array:
            if like.dtype == jnp.int8:
                return jax.random.randint(jax.random.key(like.shape[-1]), like.shape, -127, 128, jnp.int8)
            return _filled(like, 0.02)

        return jax.tree.map(one, params)

    def step(state: Any, params: Any) -> tuple[Any, Any]:
        state, token = decode(params, state)
        return state, token

    return Program(step, create, model, dims, of_results=lambda state, token: jnp.asarray(token).sum())


PROGRAMS: dict[str, Callable[[bool], Program]] = {
    "llama": _llama,
    "llama, moments on the host": lambda tiny: _llama(tiny, mp.train.offload(_adam())),
    "llama, 8-bit moments": lambda tiny: _llama(tiny, mp.train.low_bits(_adam(), "int8")),
    "mixtral": _mixtral,
    "moe": _moe,
    "decode": _decode,
    "decode, int8": lambda tiny: _decode(tiny, "int8", unroll=False),  # unrolled, XLA dequantizes all layers at once
    "decode, a loop over layers": lambda tiny: _decode(tiny, unroll=False),
    "resnet": _resnet,
}
"""Name of a step → the program; with one layer or a few, at the widths of the model."""


def run(name: str, variant: str, tiny: bool = False) -> dict[str, Any]:
    """Run one variant of a step on the attached device.

    Returns:
      `values`: of the first steps, to compare variants by; `seconds`: of a step, the median of three runs of ten; `peak`: the
      largest number of bytes in use, where the device reports it; of meshpar's variants, `planned_seconds`, `planned_peak` and
      `lowering`; of `"trace"`, `report`: planned and measured times.
    """
    p = program(name, tiny)
    if variant in (PLAIN, *p.others):
        step: Any = jax.jit(p.others.get(variant, p.step), donate_argnums=0)
        state, planned = jax.jit(p.create)(), {}
    else:
        lowering = variant if variant in LOWERINGS else "auto"
        step = mp.jit(p.step, mesh=MESH, layout=LAYOUT, dims=p.dims, lowering=lowering, donate_argnums=0)
        state = mp.init(p.create, mesh=MESH, layout=LAYOUT)() if p.dims is llama.DIMS else jax.jit(p.create)()
        plan = step.plan(state, jax.eval_shape(p.batch))
        planned = {"planned_peak": plan.memory.peak, "planned_host": plan.memory.host, "lowering": plan.lowering}
        planned |= {"planned_seconds": plan.time.seconds} if plan.time else {}
    batch = jax.jit(p.batch)()
    values = []
    for _ in range(STEPS_KEPT):
        state, results = step(state, batch)
        values.append(float(p.of_results(state, results)))
    if variant == TRACED:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(3):
                    state, results = step(state, batch)
                jax.block_until_ready(results)
            return {"values": values, "report": str(plan.compare(folder))}
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(STEPS_TIMED):
            state, results = step(state, batch)
        jax.block_until_ready((state, results))
        seconds.append((time.perf_counter() - begin) / STEPS_TIMED)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"values": values, "seconds": statistics.median(seconds), "peak": peak, **planned}

"""Small programs whose proofs and results are compared: of mutants of meshpar (`mutants.py --prove`) and
of faults (`prove.py --faults`).

    python benchmarks/proof_programs.py     # a line of JSON: program → proven, and equal to the function on 8 virtual devices
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import meshpar as mp
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.verify.numbers import QUICK

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama

MESH = "data=2, model=4"
VOCAB, EMBED, MLP, BATCH, SEQ = 48, 16, 64, 8, 16
S = jax.ShapeDtypeStruct


def gradient_step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """An update of parameters by the gradient of a loss."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mlp(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ params["up"] + params["bias"])
    return jnp.mean((h @ params["down"] - x) ** 2)


def lookups(params: Any, tokens: jax.Array) -> jax.Array:
    logits = jnp.tanh(params["table"][tokens]) @ params["head"]
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()


def convolutions(params: Any, x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x = jax.nn.relu(conv(x, params["first"], 1))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return jnp.mean(conv(x, params["second"], 2) ** 2)


def decode(weights: Any, cache: jax.Array, x: jax.Array, position: jax.Array) -> Any:
    """One token: attention over the rows of a cache, and the best token of a sharded vocab."""
    scores = jnp.where(jnp.arange(cache.shape[1]) <= position[:, None], jnp.einsum("be,bse->bs", x, cache), -jnp.inf)
    y = jnp.einsum("bs,bse->be", jax.nn.softmax(scores), cache)
    return y @ weights["key"], jnp.argmax(y @ weights["head"], -1)


def programs() -> Iterator[tuple[str, Callable[[], mp.Plan]]]:
    """(name, plan) of each program."""

    def plan(step: Callable[..., Any], args: Sequence[Any], dims: Any, layout: str, **options: Any) -> mp.Plan:
        return mp.plan(step, *args, mesh=mp.mesh(MESH), layout=layout, dims=dims, lowering="shard_map", **options)

    def arrays(**shapes: tuple[int, ...]) -> dict[str, Any]:
        return {k: S(shape, jnp.float32) for k, shape in shapes.items()}

    params = arrays(up=(EMBED, MLP), down=(MLP, EMBED), bias=(MLP,))
    dims = {"*/up": "embed mlp", "*/down": "mlp embed", "*/bias": "mlp", "batch/0": "batch embed"}
    of = (
        gradient_step(mlp),
        (params, S((BATCH, EMBED), jnp.float32)),
        dims,
    )
    for layout in ("batch: data", "batch: data; mlp: model", "batch: data; embed: data; mlp: model"):
        yield f"matmuls, {layout}", lambda layout=layout: plan(*of, layout)
    long = params, S((2, SEQ, EMBED), jnp.float32)
    named = dims | {"batch/0": "batch seq embed"}
    for layout in ("batch: data; seq: model; mlp: model", "batch: data; embed: data; mlp: model"):
        yield f"ring, {layout}", lambda layout=layout: plan(of[0], long, named, layout, overlap="ring")
    weights = arrays(table=(VOCAB, EMBED), head=(EMBED, VOCAB))
    tokens = {"*/table": "vocab embed", "*/head": "embed vocab", "batch/0": "batch seq"}
    ids = S((BATCH, SEQ), jnp.int32)
    looked_up = gradient_step(lookups), (weights, ids), tokens
    for layout in ("batch: data; vocab: model", "batch, embed: data; vocab: model"):
        yield f"lookups, {layout}", lambda layout=layout: plan(*looked_up, layout)
    kernels = arrays(first=(3, 3, 4, 8), second=(3, 3, 8, 8))
    images = {"params/*": "_ _ _ _", "batch/0": "batch height width _"}
    image = S((BATCH, 32, 8, 4), jnp.float32)
    convolved = gradient_step(convolutions), (kernels, image), images
    for layout in ("batch: data; height: model", "batch: model; height: data"):
        yield f"halos, {layout}", lambda layout=layout: plan(*convolved, layout)
    served = arrays(key=(EMBED, EMBED), head=(EMBED, VOCAB))
    slots = {
        "weights/key": "_ _", "weights/head": "_ vocab", "cache": "batch slot _", "x": "batch _", "position": "batch",
    }  # fmt: skip
    state = served, S((BATCH, SEQ, EMBED), jnp.float32), S((BATCH, EMBED), jnp.float32), S((BATCH,), jnp.int32)
    for layout in ("batch: data; slot, vocab: model", "slot, vocab: data+model"):
        yield f"decode, {layout}", lambda layout=layout: plan(decode, state, slots, layout)
    target = llama.tiny(attention="xla", heads=8, kv_heads=4)
    for layout in ("fsdp_tensor", "sequence_parallel"):
        yield f"transformer {layout}", lambda layout=layout: plan(*target, llama.LAYOUTS[layout])


def lowered(plan: mp.Plan) -> ClosedJaxpr:
    """The per-device program, of flat arguments."""
    like = [S(v.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in plan.program.inputs]
    return jax.make_jaxpr(lower_to_shard_map(plan, plan.mesh)[0])(*like)


def arguments(program: ClosedJaxpr) -> list[Any]:
    """Random arguments; integers are below :data:`VOCAB`."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(
            rng.integers(0, VOCAB, a.shape) if jnp.issubdtype(a.dtype, jnp.integer) else rng.normal(size=a.shape) / 4,
            a.dtype,
        )
        for a in program.in_avals
    ]


def run(program: ClosedJaxpr, args: Sequence[Any]) -> list[jax.Array]:
    """The results of a program on 8 virtual devices."""
    return jax.jit(jaxpr_as_fun(program), compiler_options=QUICK[-1])(*args)


def equal(found: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> bool:
    """Whether results are the same, up to rounding."""
    return all(np.allclose(x, y, rtol=2e-3, atol=2e-5, equal_nan=True) for x, y in zip(found, wanted, strict=True))


def main() -> None:
    warnings.simplefilter("ignore")
    mp.virtual_devices(8)
    plans = {name: make() for name, make in programs()}
    proofs = {name: plan.prove() for name, plan in plans.items()}
    outcome: dict[str, Any] = {
        n: {"status": p.status, "cause": str(next(iter(p.failed), ""))[:200]} for n, p in proofs.items()
    }
    for name, plan in plans.items():
        written = plan.program.traced.written
        args = arguments(written)
        try:
            outcome[name]["equal"] = equal(run(lowered(plan), args), run(written, args))
        except Exception as e:  # a wrong program may fail as well
            print(name, repr(e)[:200], file=sys.stderr)
            outcome[name]["equal"] = False
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()

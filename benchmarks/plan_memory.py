"""Planned peak memory compared with the TPU compiler's at its default effort. Needs libtpu, but no TPU.

    python benchmarks/plan_memory.py [--cases "fsdp;fsdp+tensor"] [--lowering shard_map]
    python benchmarks/plan_memory.py --moments               # AdamW's moments in host memory, on v5e and v5p

The step is a scanned Llama (grouped queries, SwiGLU, materialized scores, float32 weights cast to bfloat16 in the layer) with AdamW
and donated state. A compilation takes half a minute to two minutes of CPU.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tables import Table

import meshpar as mp

MEGATRON = "batch: data; heads, kv_heads?, mlp, vocab: model"


@dataclass(frozen=True)
class Config:
    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    batch: int
    seq: int
    remat: bool = True


SMALL = {"embed": 2048, "layers": 8, "heads": 16, "kv_heads": 4, "mlp": 5632, "vocab": 32000}
LARGE = {"embed": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336}
CASES: dict[str, tuple[Config, str, str, str]] = {  # sizes, topology, mesh, layout
    "data": (Config(**SMALL, batch=32, seq=2048), "v5e:4x4", "data=16", "batch: data"),
    "zero1": (Config(**SMALL, batch=128, seq=512), "v5e:4x4", "data=16", "batch: data; opt.embed: data"),
    "fsdp": (Config(**SMALL, batch=64, seq=2048), "v5e:4x4", "data=16", "batch: data; embed: data"),
    "fsdp, 256": (Config(**LARGE, layers=32, vocab=128256, batch=256, seq=2048), "v5e:16x16", "data=256",
                  "batch: data; embed: data"),
    "fsdp+tensor": (Config(**SMALL, batch=32, seq=2048), "v5e:4x4", "data=4, model=4", f"{MEGATRON}; embed: data"),
    "+sequence": (Config(**LARGE, layers=16, vocab=32000, batch=32, seq=2048), "v5e:4x4", "data=4, model=4",
                  f"{MEGATRON}; embed: data; seq: model"),
    "+sequence, v5p": (Config(8192, 20, 64, 8, 28672, 128256, batch=64, seq=2048), "v5p:4x4x8", "data=16, model=8",
                       f"{MEGATRON}; embed: data; seq: model"),
    "no remat": (Config(1024, 4, 8, 8, 2816, 32000, batch=32, seq=1024, remat=False), "v5e:4x4", "data=4, model=4",
                 f"{MEGATRON}; embed: data"),
}  # fmt: skip
DIMS = {
    "*/query": "layers embed heads head_dim", "*/key": "layers embed kv_heads head_dim",
    "*/value": "layers embed kv_heads head_dim", "*/out": "layers heads head_dim embed", "*/up": "layers embed mlp",
    "*/gate": "layers embed mlp", "*/down": "layers mlp embed", "*/attention_norm": "layers embed",
    "*/mlp_norm": "layers embed", "*/norm": "embed", "*/embedding": "vocab embed", "*/head": "embed vocab",
    "tokens": "batch seq",
}  # fmt: skip
HEAD_DIM = 128


def shapes(c: Config) -> dict[str, jax.ShapeDtypeStruct]:
    layers, embed = c.layers, c.embed
    found = {
        "query": (layers, embed, c.heads, HEAD_DIM), "key": (layers, embed, c.kv_heads, HEAD_DIM),
        "value": (layers, embed, c.kv_heads, HEAD_DIM), "out": (layers, c.heads, HEAD_DIM, embed),
        "up": (layers, embed, c.mlp), "gate": (layers, embed, c.mlp), "down": (layers, c.mlp, embed),
        "attention_norm": (layers, embed), "mlp_norm": (layers, embed), "norm": (embed,),
        "embedding": (c.vocab, embed), "head": (embed, c.vocab),
    }  # fmt: skip
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in found.items()}


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """x: [batch, seq, heads, head_dim]"""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    left, right = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    w = {name: v.astype(jnp.bfloat16) if v.ndim > 1 else v for name, v in p.items()}
    y = normed(x, p["attention_norm"])
    q, k, v = (jnp.einsum("bse,ehd->bshd", y, w[name]) for name in ("query", "key", "value"))
    y = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x = x + jnp.einsum("bshd,hde->bse", y, w["out"])
    y = normed(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None


def loss_of(params: dict[str, jax.Array], tokens: jax.Array, remat: bool) -> jax.Array:
    x = params["embedding"].astype(jnp.bfloat16)[tokens]
    stacked = {name: v for name, v in params.items() if name not in ("embedding", "head", "norm")}
    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    x, _ = jax.lax.scan(body, x, stacked)
    logits = (normed(x, params["norm"]) @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


def at_once(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation with its moments in host memory, which are copied before and after the update."""

    def put(state: Any, space: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(updates, put(state, jax.memory.Space.Device), params)
        return updates, put(new, jax.memory.Space.Host)

    return optax.GradientTransformation(tx.init, update)


MOMENTS: dict[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]] = {
    "jax.device_put": at_once,
    "mp.train.offload": mp.train.offload,
    "mp.train.offload, layers=8": lambda tx: mp.train.offload(tx, layers=SMALL["layers"]),
}


def step_of(
    c: Config, wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation] | None = None
) -> tuple[Any, dict[str, Any], jax.ShapeDtypeStruct]:
    """(train step, its state, its tokens); ``wrap``: of :data:`MOMENTS`, None: moments on the device."""
    alone, params = optax.adamw(3e-4, weight_decay=0.1), shapes(c)
    optimizer = alone if wrap is None else wrap(alone)

    def step(state: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens, c.remat)
        updates, opt = optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt}, loss

    moments = jax.eval_shape(alone.init, params)
    if wrap is not None:
        mesh = jax.sharding.AbstractMesh((1,), ("data",))
        host = jax.NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
        moments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host) if x.ndim else x, moments
        )
    return step, {"params": params, "opt_state": moments}, jax.ShapeDtypeStruct((c.batch, c.seq), jnp.int32)


def report_moments(lowering: str) -> None:
    """Device and host memory with the moments in host memory, of plans and of compiled programs."""
    heads = "planned device, GB", "device, GB", "error", "planned host, GB", "host, GB"
    table = Table("moments", "slice", *heads)
    for name, wrap in MOMENTS.items():
        for topology in ("v5e:2x2", "v5p:2x2x1"):
            step, state, tokens = step_of(Config(**SMALL, batch=4, seq=1024), wrap)
            how: dict[str, Any] = {"mesh": "data=4", "topology": topology, "layout": "batch: data; embed: data"}
            how |= {"dims": DIMS, "donate_argnums": 0, "lowering": lowering}
            planned = mp.plan(step, state, tokens, **how).memory
            real = mp.compile(step, state, tokens, effort="full", **how).memory
            cells = (
                f"{planned.peak / 1e9:.2f}",
                f"{real.peak / 1e9:.2f}",
                f"{100 * (planned.peak / real.peak - 1):+.1f} %",
            )
            table.add_row(name, topology, *cells, f"{planned.host / 1e9:.2f}", f"{real.host / 1e9:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=";".join(CASES), help="names, separated by semicolons")
    parser.add_argument("--lowering", default="shard_map", choices=["shard_map", "jit"])
    parser.add_argument("--moments", action="store_true", help="AdamW's moments in host memory instead")
    args = parser.parse_args()
    if args.moments:
        report_moments(args.lowering)
        return
    table = Table("layout", "slice", "mesh", "planned peak, GB", "peak, GB", "error")
    errors = []
    for name in args.cases.split(";"):
        c, topology, mesh, layout = CASES[name.strip()]
        step, state, tokens = step_of(c)
        how: dict[str, Any] = {"mesh": mesh, "topology": topology, "layout": layout, "dims": DIMS, "donate_argnums": 0}
        planned = mp.plan(step, state, tokens, lowering=args.lowering, **how).memory.peak
        real = mp.compile(step, state, tokens, lowering=args.lowering, effort="full", **how).memory.peak
        errors.append(planned / real - 1)
        table.add_row(name, topology, mesh, f"{planned / 1e9:.2f}", f"{real / 1e9:.2f}", f"{100 * errors[-1]:+.1f} %")
    sizes = [abs(e) for e in errors]
    print(f"\nmedian {100 * statistics.median(sizes):.1f} %, largest {100 * max(sizes):.1f} %")


if __name__ == "__main__":
    main()

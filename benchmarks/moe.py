"""A mixture-of-experts layer, forward and backward, compared with implementations without meshpar.

    python benchmarks/moe.py                     # step time on 8 virtual CPU devices
    python benchmarks/moe.py --aot               # memory, FLOPs and bytes sent from the TPU compiler (needs libtpu, no TPU)
    python benchmarks/moe.py --aot --models mixtral-8x7b --slices v5e:16x16

Baselines, bfloat16 on TPU and float32 on CPU, with the same weights and tokens:
- sort + `ragged_dot`, gathered experts: local tokens are sorted by expert, weights are all-gathered (FSDP).
- `ragged_all_to_all` + `ragged_dot`: MaxText's expert parallelism without kernels, with its worst-case buffer. The CPU has no such
  collective, so it is compiled for TPUs only.
- one-hot einsum: GShard's dispatch in Flax, groups of at most 1024 tokens, capacity 1.25; it drops tokens.
"""

import argparse
import functools
import math
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tables import Table

import meshpar as mp
from meshpar._src.verify.hlo_flops import flops
from meshpar.layers import MoEExecution, moe
from meshpar_kernels.published_model_shapes import MODELS

DIMS = {
    "p/router": "embed router", "p/gate": "expert embed mlp", "p/up": "expert embed mlp", "p/down": "expert mlp embed",
    "x": "batch seq embed",
}  # fmt: skip


GROUP = 1024  # tokens that share a capacity in GShard's layer; its masks grow with the square


def objective(y, aux=0.0):
    return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux


# -- ours


def ours(p, x, *, k, strategy=None):
    """(loss, gradients) of the layer."""

    def loss(p, x):
        experts = {n: p[n] for n in ("gate", "up", "down")}
        return objective(moe(x, p["router"], experts, router="top_k", k=k, execution=MoEExecution(strategy))[0])

    return jax.value_and_grad(loss, (0, 1))(p, x)


# -- baselines


def choose(p, x, k):
    """Mixtral's router: (weights, experts), each [T, k]."""
    logits = jnp.dot(x.astype(jnp.float32), p["router"].astype(jnp.float32), precision="highest")
    best, expert = lax.top_k(logits, k)
    return jax.nn.softmax(best, -1), expert


def ffn(rows, sizes, gate, up, down):
    h = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    return lax.ragged_dot(h, down, sizes)


def sort_rows(x, expert, k, experts):
    order = jnp.argsort(expert.reshape(-1), stable=True)
    return x[order // k], order, jnp.bincount(expert.reshape(-1), length=experts)


def gathered(p, x, *, k, token_axes, expert_axes):
    """Local under shard_map: weights are gathered, tokens sorted, `ragged_dot`."""
    weights = {n: lax.all_gather(p[n], expert_axes, axis=0, tiled=True) for n in ("gate", "up", "down")}
    shape, x = x.shape, x.reshape(-1, x.shape[-1])
    weight, expert = choose(p, x, k)
    rows, order, sizes = sort_rows(x, expert, k, weights["gate"].shape[0])
    y = ffn(rows, sizes, **weights)
    y = jnp.zeros_like(y).at[order].set(y).reshape(-1, k, y.shape[-1])
    return jnp.einsum("tkh,tk->th", y.astype(jnp.float32), weight).astype(x.dtype).reshape(shape)


def exchanged(p, x, *, k, token_axes, expert_axes):
    """Local under shard_map: MaxText's expert parallelism, `ragged_all_to_all` into a worst-case buffer."""
    axis = expert_axes
    gate, up, down = (
        lax.all_gather(p[n], "data", axis=d, tiled=True) for n, d in (("gate", 1), ("up", 1), ("down", 2))
    )
    devices, each = lax.axis_size(axis), gate.shape[0]
    shape, x = x.shape, x.reshape(-1, x.shape[-1])
    weight, expert = choose(p, x, k)
    rows, order, sizes = sort_rows(x, expert, k, devices * each)
    me = lax.axis_index(axis)
    every = lax.all_gather(sizes.astype(jnp.int32), axis)  # [from, expert]
    pairs = every.reshape(devices, devices, each).sum(-1)  # [from, to]
    sent, received = pairs[me], pairs[:, me]
    starts = jnp.cumsum(sent) - sent
    targets = (jnp.cumsum(pairs, 0) - pairs)[me]
    buffer = jnp.zeros((devices * x.shape[0] * min(each, k), x.shape[-1]), x.dtype)  # no load needs more
    buffer = lax.ragged_all_to_all(rows, buffer, starts, sent, targets, received, axis_name=axis)
    own = lax.dynamic_slice_in_dim(every, me * each, each, 1)
    ids = jnp.repeat(jnp.tile(jnp.arange(each), devices), own.reshape(-1), total_repeat_length=buffer.shape[0])
    ids = jnp.where(jnp.arange(buffer.shape[0]) < received.sum(), ids, each)
    inner = jnp.argsort(ids, stable=True)
    y = ffn(buffer[inner], own.sum(0), gate, up, down)
    y = jnp.zeros_like(y).at[inner].set(y)
    back_starts = jnp.cumsum(received) - received
    back_targets = (jnp.cumsum(pairs, 1) - pairs)[:, me]
    y = lax.ragged_all_to_all(y, jnp.zeros_like(rows), back_starts, received, back_targets, sent, axis_name=axis)
    y = jnp.zeros_like(y).at[order].set(y).reshape(-1, k, y.shape[-1])
    return jnp.einsum("tkh,tk->th", y.astype(jnp.float32), weight).astype(x.dtype).reshape(shape)


def by_hand(local, mesh, specs, x_spec, *, k, token_axes, expert_axes):
    """(loss, gradients) of a layer under shard_map, jitted with its shardings."""
    layer = jax.shard_map(
        functools.partial(local, k=k, token_axes=token_axes, expert_axes=expert_axes),
        mesh=mesh, in_specs=(specs, x_spec), out_specs=x_spec, check_vma=False,
    )  # fmt: skip
    return jitted(lambda p, x: objective(layer(p, x)), mesh, specs, x_spec)


def jitted(loss, mesh, specs, x_spec):
    shardings = {n: NamedSharding(mesh, s) for n, s in specs.items()}
    x_sharding = NamedSharding(mesh, x_spec)
    return jax.jit(
        jax.value_and_grad(loss, (0, 1)),
        in_shardings=(shardings, x_sharding),
        out_shardings=(NamedSharding(mesh, P()), (shardings, x_sharding)),
    )


class OneHot(nn.Module):
    """GShard's layer: a one-hot mask [groups, tokens, experts, capacity] takes tokens to experts and back."""

    experts: int
    k: int
    factor: float = 1.25

    @nn.compact
    def __call__(self, p, x, constrain):
        shape, tokens = x.shape, min(x.shape[1], GROUP)
        x = x.reshape(-1, tokens, shape[-1])
        groups = x.shape[0]
        capacity = math.ceil(tokens * self.k * self.factor / self.experts)
        weight, expert = jax.vmap(lambda x: choose(p, x, self.k))(x)
        taken = jnp.zeros((groups, tokens, self.experts, capacity), x.dtype)
        before = jnp.zeros((groups, 1, self.experts), jnp.int32)
        for j in range(self.k):  # all first choices, then all second ones
            chosen = jax.nn.one_hot(expert[..., j], self.experts, dtype=jnp.int32)
            place = ((jnp.cumsum(chosen, 1) - chosen + before) * chosen).sum(-1)
            before = before + chosen.sum(1, keepdims=True)
            seat = jax.nn.one_hot(place, capacity, dtype=x.dtype)  # beyond the capacity: zeros
            scaled = chosen.astype(x.dtype) * weight[..., j : j + 1].astype(x.dtype)
            taken += scaled[..., None] * seat[..., None, :]
        sent = constrain(jnp.einsum("gsec,gsm->egcm", (taken > 0).astype(x.dtype), x))
        h = jax.nn.silu(jnp.einsum("egcm,emf->egcf", sent, p["gate"])) * jnp.einsum("egcm,emf->egcf", sent, p["up"])
        y = constrain(jnp.einsum("egcf,efm->egcm", h, p["down"]))
        return jnp.einsum("gsec,egcm->gsm", taken, y).reshape(shape)


def one_hot(mesh, specs, x_spec, *, experts, k, expert_axes, token_axes):
    module = OneHot(experts, k)
    rest = tuple(a for a in token_axes if a not in expert_axes)
    spec = NamedSharding(mesh, P(expert_axes, rest or None))

    def loss(p, x):
        return objective(module.apply({}, p, x, lambda y: lax.with_sharding_constraint(y, spec)))

    return jitted(loss, mesh, specs, x_spec)


# -- step time on 8 virtual devices


def on_cpu(rounds: int) -> Table:
    batch, seq, embed, mlp, experts, k = 16, 256, 256, 512, 16, 2
    mp.virtual_devices(8)
    mesh = mp.mesh("data=8")
    r = np.random.default_rng(0)

    def normal(*shape):
        return (r.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    p = {"router": normal(embed, experts), "gate": normal(experts, embed, mlp), "up": normal(experts, embed, mlp),
         "down": normal(experts, mlp, embed)}  # fmt: skip
    x = r.normal(size=(batch, seq, embed)).astype(np.float32)
    layout = "batch: data; expert: data"
    runs = {
        f"`mp.layers.moe`, {strategy or 'cheapest strategy'}": mp.jit(
            functools.partial(ours, k=k, strategy=strategy), mesh=mesh, layout=layout, dims=DIMS, lowering="shard_map"
        )
        for strategy in (None, "a2a", "ring", "dense")
    }
    specs = {"router": P(), **dict.fromkeys(("gate", "up", "down"), P("data"))}
    how = {"k": k, "token_axes": ("data",), "expert_axes": ("data",)}
    runs["sort + `ragged_dot`, gathered experts"] = by_hand(gathered, mesh, specs, P("data"), **how)
    runs["one-hot einsum (GShard), capacity 1.25"] = one_hot(mesh, specs, P("data"), experts=experts, **how)
    shardings = {n: NamedSharding(mesh, s) for n, s in specs.items()}
    p, x = jax.device_put(p, shardings), jax.device_put(x, NamedSharding(mesh, P("data")))
    losses, times = {}, {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            value, _ = jax.block_until_ready(run(p, x))
            if number >= 2:
                times[name].append(time.perf_counter() - began)
            losses[name] = float(value)
    best = min(statistics.median(t) for name, t in times.items() if not name.startswith("`mp.layers.moe`"))
    title = f"{batch}×{seq} tokens, embed {embed}, {experts} experts of {mlp}, k={k}, forward and backward, 8 virtual CPU devices"
    table = Table("implementation", "ms", "to the best baseline", "loss", title=title)
    for name, t in times.items():
        ms = statistics.median(t)
        table.add_row(name, f"{1e3 * ms:.0f}", f"{ms / best:.2f}", f"{losses[name]:.7f}")


# -- the TPU compiler


SLICES = {  # experts over 8 (Mixtral) or 64 (DeepSeek-V3) devices, the rest data with FSDP
    ("mixtral-8x7b", "v5e:16x16"): "data=32, expert=8",
    ("deepseek-v3", "v5e:16x16"): "data=4, expert=64",
    ("mixtral-8x7b", "v5p:8x8x8"): "data=64, expert=8",
    ("deepseek-v3", "v5p:8x8x8"): "data=8, expert=64",
}


def aot(table: Table, model: str, where: str, tokens: int) -> None:
    """Compile the implementations for one model on one slice, `tokens` on each device, and add their rows."""
    shape = MODELS[model]
    mesh = mp.mesh(SLICES[model, where], topology=where)
    devices = mesh.devices.size
    s = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    e, h, m, k = shape.experts, shape.embed, shape.mlp, shape.k
    p = {
        "router": jax.ShapeDtypeStruct((h, e), jnp.float32),
        "gate": s((e, h, m)),
        "up": s((e, h, m)),
        "down": s((e, m, h)),
    }
    x = s((devices, tokens, h))
    layout = "batch: data+expert; expert: expert; embed: data"
    specs = {"router": P(), "gate": P("expert", "data"), "up": P("expert", "data"), "down": P("expert", None, "data")}
    axes = {"k": k, "token_axes": ("data", "expert"), "expert_axes": ("expert",)}
    x_spec = P(("data", "expert"))

    def with_meshpar():
        step = mp.jit(functools.partial(ours, k=k), mesh=mesh, layout=layout, dims=DIMS, lowering="shard_map")
        return mp.compile(step, p, x)

    programs = {
        "`mp.layers.moe`": with_meshpar,
        "`ragged_all_to_all` + `ragged_dot`": lambda: mp.compile(
            by_hand(exchanged, mesh, specs, x_spec, **axes), p, x, mesh=mesh
        ),
        "one-hot einsum": lambda: mp.compile(one_hot(mesh, specs, x_spec, experts=e, **axes), p, x, mesh=mesh),
    }  # fmt: skip
    for name, build in programs.items():
        try:
            c = build()
        except Exception as error:  # a failed compilation is a result
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            table.add_row(model, where, name, "", "", "", reason[:160])
        else:
            sent: dict[str, float] = {}
            for one in c.final_collectives:
                op = f"{one.op} in a further round" if one.count is None else one.op  # a loop that depends on the load
                sent[op] = sent.get(op, 0) + one.total_bytes
            always = sum(one.total_bytes for one in c.final_collectives if one.count is not None)
            parts = ", ".join(f"{op} {b / 1e9:.2f}" for op, b in sorted(sent.items(), key=lambda i: -i[1]) if b > 1e7)
            tera = flops(c.as_text(), unknown=0) / 1e12
            table.add_row(
                model, where, name, f"{c.memory.peak / 2**30:.2f}", f"{tera:.2f}", f"{always / 1e9:.2f}", parts
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--aot", action="store_true", help="compile for TPUs instead of running on the CPU")
    parser.add_argument("--models", nargs="+", default=["mixtral-8x7b", "deepseek-v3"])
    parser.add_argument("--slices", nargs="+", default=["v5e:16x16", "v5p:8x8x8"])
    parser.add_argument("--tokens", type=int, default=4096, help="on each device, with --aot (%(default)s)")
    args = parser.parse_args()
    if not args.aot:
        on_cpu(args.rounds)
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    heads = ("model", "slice", "implementation", "peak, GiB", "TFLOP", "sent, GB", "sent by kind, GB, or error")
    table = Table(*heads, title=f"forward and backward, {args.tokens} tokens a device, bfloat16; numbers of one device")
    for where in args.slices:
        for model in args.models:
            aot(table, model, where, args.tokens)


if __name__ == "__main__":
    try:
        main()
    except mp.errors.MeshparError as error:
        sys.exit(f"\n{error}")

"""Bytes sent and peak memory of the same model and layout under both lowerings, and with hand-written PartitionSpecs.

    pip install -e . "jax[tpu]" matplotlib
    python benchmarks/partition.py [--effort fast] [--only v5p:4x4x8] [--case fsdp]   # TPU compiler, ahead of time
    python benchmarks/partition.py --step                                            # step time on 8 virtual CPU devices
    python benchmarks/partition.py --growth                                          # time to plan and lower, by devices and layers

The first compiles Llama-3-8B and Mixtral-8x7B train steps (scanned, rematerialised layers, splash attention, AdamW, float32
state, bfloat16 compute) with the TPU compiler, and reads the bytes sent per step and device from the final program, with trip
counts. It uses no compiler options of the plan: their asynchronous collectives send the same bytes and need more memory. "By hand"
is ``jax.jit`` with PartitionSpecs for state and batch and a shard_map around the attention kernel.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.lower import LOWERINGS

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tables import Table

import llama
import mixtral


class Case(NamedTuple):
    """A train step, its layout on a slice, and limits of its bytes and peak relative to the ``"jit"`` lowering."""

    name: str
    model: str
    topology: str
    mesh: str
    layout: str | mp.Layout
    sequences: int
    max_bytes_ratio: float
    max_peak_ratio: float | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  (of the target)


ONE_CHUNK = {"loss_chunks": 1}
"""All logits in one array; by default the loss is computed in chunks of the vocabulary."""

BY_COST = mp.Layout(llama.FSDP, resolve="cost")
"""The lookup in the embedding is partitioned, instead of gathering the embedding."""

CASES = [
    Case("fsdp", "llama3_8b", "v5p:4x4x8", "data=128", llama.FSDP, 256, 0.77, 0.9),
    Case("fsdp", "llama3_8b", "v5e:16x16", "data=256", llama.FSDP, 512, 0.77, 0.9),
    Case("fsdp", "llama3_8b", "v6e:16x16", "data=256", llama.FSDP, 512, 0.77, 0.9),
    Case("fsdp, by cost", "llama3_8b", "v5p:4x4x8", "data=128", BY_COST, 256, 0.77, 0.9),
    Case("fsdp, by cost", "llama3_8b", "v5e:16x16", "data=256", BY_COST, 512, 0.77, 0.9),
    Case("fsdp, by cost", "llama3_8b", "v6e:16x16", "data=256", BY_COST, 512, 0.77, 0.9),
    Case("fsdp, logits in one array", "llama3_8b", "v5p:4x4x8", "data=128", llama.FSDP, 256, 0.77, 0.9, ONE_CHUNK),
    Case("fsdp, logits in one array", "llama3_8b", "v5e:16x16", "data=256", llama.FSDP, 512, 0.77, 0.9, ONE_CHUNK),
    Case("fsdp, logits in one array", "llama3_8b", "v6e:16x16", "data=256", llama.FSDP, 512, 0.77, 0.9, ONE_CHUNK),
    Case("fsdp+tensor", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR, 512, 0.9),
    Case("fsdp+tensor", "llama3_8b", "v5p:8x8x8", "data=64, model=8", llama.FSDP_TENSOR, 512, 0.9),
    Case("fsdp+tensor+sequence", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 0.9),
    Case("fsdp+tensor+sequence", "llama3_8b", "v5p:8x8x8", "data=64, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 0.9),
    Case("zero1", "llama3_8b", "v5p:4x4x8", "data=128", llama.ZERO1, 256, 1.0),
    Case("data", "llama3_8b", "v5p:4x4x8", "data=128", llama.DATA, 256, 1.0),
    Case("fsdp", "mixtral_8x7b", "v5p:4x4x8", "data=128", mixtral.FSDP, 128, 1.0),
    Case("fsdp+expert", "mixtral_8x7b", "v5p:4x4x8", "data=16, model=8", mixtral.FSDP_EXPERT, 128, 1.0),
]


# -- hand-written PartitionSpecs, by the end of a weight's path

_FSDP = {
    "embedding": P(None, "data"), "head/kernel": P("data"), "query/kernel": P(None, "data"), "key/kernel": P(None, "data"),
    "value/kernel": P(None, "data"), "out/kernel": P(None, None, None, "data"), "gate/kernel": P(None, "data"),
    "up/kernel": P(None, "data"), "down/kernel": P(None, None, "data"), "scale": P(None, "data"),
}  # fmt: skip
_TENSOR = {
    "embedding": P("model", "data"), "head/kernel": P("data", "model"), "query/kernel": P(None, "data", "model"),
    "key/kernel": P(None, "data", "model"), "value/kernel": P(None, "data", "model"), "out/kernel": P(None, "model", None, "data"),
    "gate/kernel": P(None, "data", "model"), "up/kernel": P(None, "data", "model"), "down/kernel": P(None, "model", "data"),
    "scale": P(None, "data"),
}  # fmt: skip


def spec_by_hand(case: str, path: Any, leaf: Any) -> P:
    """The hand-written PartitionSpec of a leaf of the state."""
    names = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
    sharded = case != "data" and (case != "zero1" or "/mu/" in f"/{names}/" or "/nu/" in f"/{names}/")
    if not sharded:
        return P()
    for end, spec in (_TENSOR if "tensor" in case else _FSDP).items():
        if f"/{names}/".replace("/value/value", "/value").find(f"/{end}") >= 0 and leaf.ndim >= len(spec):
            return spec if leaf.ndim > 1 else P("data")
    return P()


def compiled(how: str, case: Case, effort: Any) -> Any:
    """The compiled program of a case under a lowering, or "by hand"."""
    target = getattr(mixtral if case.model.startswith("mixtral") else llama, case.model)
    step, args, dims = target(case.sequences, **case.options)
    mesh = mp.mesh(case.mesh, topology=case.topology)
    if how != "by hand":
        return mp.compile(
            step,
            *args,
            mesh=mesh,
            layout=case.layout,
            dims=dims,
            lowering=how,
            effort=effort,
            donate_argnums=0,
            options="off",
        )  # type: ignore[arg-type]
    state, batch_ = args
    where = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, spec_by_hand(case.name, path, x)),
        state,
        is_leaf=lambda x: hasattr(x, "shape"),
    )
    tokens = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), batch_)
    heads = P("data", None, "model" if "tensor" in case.name else None)
    shards = jax.shard_map(llama.splash.__wrapped__, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)

    def in_shards(*args: Any) -> Any:  # XLA cannot partition a Pallas kernel
        with mock.patch.object(llama, "splash", shards):
            return step(*args)

    plain = jax.jit(
        in_shards, in_shardings=(where, tokens), out_shardings=(where, NamedSharding(mesh, P())), donate_argnums=0
    )
    return mp.compile(plain, state, batch_, effort=effort, mesh=mesh)


def compile_all(effort: str, only: str | None, which: str | None, hand: bool) -> None:
    """Compile the cases under both lowerings and print the table."""
    heads = (
        "layout",
        "slice",
        "mesh",
        "lowering",
        "sent",
        "to jit's",
        "limit",
        "peak",
        "to jit's",
        "limit",
        "sent by kind, GB",
    )
    table = Table(
        *heads, title=f"{effort} effort, jax {jax.__version__}; bytes of a step and device in the final program"
    )
    for case in CASES:
        name, model, topology, mesh = case.name, case.model, case.topology, case.mesh
        if (only and only != topology) or (which and which != name):
            continue
        base: Any = None
        for how in ("jit", "shard_map", *(("by hand",) if hand else ())):
            try:
                c = compiled(how, case, effort)
            except Exception as e:  # a failed compilation is a row
                table.add_row(f"{model} {name}", topology, mesh, how, str(e).splitlines()[0][:60])
                continue
            base = c if how == "jit" else base
            kinds: Counter[str] = Counter()
            for x in c.final_collectives:
                kinds[x.op] += x.total_bytes
            row = [f"{model} {name}", topology, mesh, how, f"{c.bytes_sent / 1e9:.1f} GB"]
            row += [
                f"{c.bytes_sent / base.bytes_sent:.3f}" if base else "",
                f"{case.max_bytes_ratio}" if how == "shard_map" else "",
            ]
            row += [f"{c.memory.peak / 2**30:.2f} GiB", f"{c.memory.peak / base.memory.peak:.3f}" if base else ""]
            row += [f"{case.max_peak_ratio or ''}" if how == "shard_map" else ""]
            row += [", ".join(f"{k} {v / 1e9:.1f}" for k, v in kinds.most_common() if v > 5e7)]
            table.add_row(*row)


# -- step time on virtual devices


def step_times(rounds: int) -> None:
    """Run the small models under both lowerings and print the table."""
    mp.virtual_devices(8)
    config = {"embed": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 1024, "vocab": 1024}
    heads = ("layout", "mesh", "jit", "shard_map", "ratio", "limit", "CPU, jit", "CPU, shard_map", "ratio")
    table = Table(
        *heads, title=f"8 virtual CPU devices, medians of {rounds} alternating steps; CPU time is of all cores"
    )
    for name, mesh_text in (
        ("data_parallel", "data=8"), ("zero1", "data=8"), ("fsdp", "data=8"), ("tensor_parallel", "data=2, model=4"),
        ("fsdp_tensor", "data=4, model=2"), ("sequence_parallel", "data=4, model=2"),
    ):  # fmt: skip
        step, (_, shapes), dims = llama.tiny(16, 128, **config)
        key = jax.random.key(0)
        tokens = jax.random.randint(key, shapes["inputs"].shape, 0, 1024, jnp.int32)
        batch = {"inputs": tokens, "targets": tokens}
        made, fns = {}, {}
        for lowering in ("jit", "shard_map"):
            options = {"mesh": mp.mesh(mesh_text), "layout": llama.LAYOUTS[name]}
            create = mp.init(lambda k: llama.create_state(dataclasses.replace(llama.TINY, **config), k), **options)  # type: ignore[arg-type]
            made[lowering] = create(key)
            fns[lowering] = mp.jit(step, dims=dims, lowering=lowering, donate_argnums=0, **options)  # type: ignore[arg-type]
        took: dict[str, list[tuple[float, float]]] = {k: [] for k in fns}
        for n in range(rounds + 2):
            for k in sorted(fns, reverse=bool(n % 2)):
                begin = time.perf_counter(), time.process_time()
                made[k], loss = fns[k](made[k], batch)
                jax.block_until_ready((made[k], loss))
                took[k].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        row = [name, mesh_text]
        for clock, limit in ((0, ["≤ 1.0"]), (1, [])):  # wall time, CPU time
            base, ours = (statistics.median(t[clock] for t in took[k][2:]) for k in ("jit", "shard_map"))
            row += [f"{base * 1e3:.0f} ms", f"{ours * 1e3:.0f} ms", f"{ours / base:.3f}", *limit]
        table.add_row(*row)


# -- growth


def growth() -> None:
    """Time tracing, planning and lowering by devices and by layers, and print both tables."""
    once(llama.llama3_8b(8192), 8, llama.FSDP_TENSOR)  # imports and first-use costs of JAX
    heads = ("ops", "trace and infer", "plan", "lower (shard_map)")
    by_devices = Table("devices", *heads, title="Llama-3-8B, FSDP + tensor, 32 scanned layers")
    for devices in (8, 64, 512, 4096):
        by_devices.add_row(str(devices), *once(llama.llama3_8b(8192), devices, llama.FSDP_TENSOR))
    by_layers = Table(
        "layers", *heads, title="\na stack of MLPs, not scanned, with its gradient, FSDP + tensor, 64 devices"
    )
    for layers in (4, 8, 16, 32, 64):
        by_layers.add_row(str(layers), *once(unrolled_step(layers), 64, "batch: data; mlp: model; embed: data"))


def once(target: Any, devices: int, layout: str) -> list[str]:
    """Number of ops of a step, and seconds to trace, plan and lower it over an abstract mesh."""
    step, args, dims = target
    mesh = AbstractMesh((devices // 8, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fn = mp.jit(step, mesh=mesh, layout=layout, dims=dims)
    times = [time.perf_counter()]
    first = fn.plan(*args)
    times.append(time.perf_counter())
    plan = first.replan(layout=layout)
    times.append(time.perf_counter())
    LOWERINGS["shard_map"](plan, mesh)
    times.append(time.perf_counter())
    both, planned, lowered = (after - before for before, after in itertools.pairwise(times))
    ops = sum(1 for _ in plan.program.root.walk())
    return [str(ops), *(f"{x:.2f} s" for x in (both - planned, planned, lowered))]


def unrolled_step(layers: int) -> Any:
    """A stack of layers that are not scanned, with its gradient."""
    shapes = [{"up": (1024, 4096), "down": (4096, 1024)} for _ in range(layers)]
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        return jnp.square(x).mean()

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    dims = {"params/*/up": "embed mlp", "params/*/down": "mlp embed", "x": "batch embed"}
    return step, (params, jax.ShapeDtypeStruct((1024, 1024), np.float32)), dims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", default="full", choices=("full", "fast"))
    parser.add_argument("--only", help="a topology")
    parser.add_argument("--case", help="a layout")
    parser.add_argument("--no-hand", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if args.step:
        step_times(args.rounds)
    elif args.growth:
        growth()
    else:
        compile_all(args.effort, args.only, args.case, not args.no_hand)


if __name__ == "__main__":
    main()

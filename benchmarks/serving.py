"""Bytes that a device sends for one step of decoding, compared with `jax.jit` under hand-written PartitionSpecs.

    python benchmarks/serving.py                        # compiled for 8 virtual CPU devices
    pip install -e . "jax[tpu]"
    python benchmarks/serving.py --topology v5e:2x4     # by the TPU compiler, ahead of time
    python benchmarks/serving.py --times --topology v6e:2x4

The step is the one of `examples/generate.py`: a token of each sequence, with a cache of keys and values. "By hand" is the
same function under ``jax.jit`` with PartitionSpecs for weights, cache and rows, which XLA partitions. Bytes are read from the
final programs, with trip counts. Nothing is run.

``--times``: seconds of steps of Llama 3 70B (weights in int8) and Mixtral 8x7B (in bfloat16) with an int8 cache, by the plan and by
the schedule of the TPU compiler (its estimates of kernels, and exposed communication) at full effort, and the seconds in which a
device reads its weights and cache.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar._src.hardware.topology import topology_devices
from meshpar._src.verify.hlo import HloCollective, collectives

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import generate
from tables import Table

import llama

TENSOR = "heads, kv_heads?, mlp, vocab: model"


class Case(NamedTuple):
    """A layout, and the PartitionSpecs that a user would write for it.

    Attributes:
      tensor: whether weights are sharded by heads, mlp and vocabulary over `model`.
      cache: of keys and values [layers, batch, kv_heads, cache, head_dim].
      rows: of arrays [batch].
    """

    name: str
    layout: str
    tensor: bool
    cache: P
    rows: P


CASES = (
    Case("batch", "batch: data", False, P(None, "data"), P("data")),
    Case("Megatron", f"batch: data; {TENSOR}", True, P(None, "data", "model"), P("data")),
    Case("flash decoding", "batch: data; cache: model", False, P(None, "data", None, "model"), P("data")),
    Case("flash decoding, all devices", "cache: data+model", False, P(None, None, None, ("data", "model")), P()),
    Case(
        "flash decoding, Megatron",
        f"batch: data; cache: model; {TENSOR}",
        True,
        P(None, "data", None, "model"),
        P("data"),
    ),
)
MODELS = {"8 kv_heads": 8, "1 kv_head": 1}
_TENSOR = {
    "query": P(None, None, "model"), "key": P(None, None, "model"), "value": P(None, None, "model"), "out": P(None, "model"),
    "gate": P(None, None, "model"), "up": P(None, None, "model"), "down": P(None, "model"), "embedding": P("model"),
    "head": P(None, "model"),
}  # fmt: skip


def weight_spec(case: Case, config: llama.Config, path: Any, weight: Any, model: int) -> P:
    """The hand-written PartitionSpec of a weight; heads of keys that do not divide over ``model`` devices are replicated."""
    words = [getattr(k, "key", "") for k in path]
    spec = next((spec for name, spec in _TENSOR.items() if name in words), P()) if case.tensor else P()
    if {"key", "value"} & set(
        words
    ) and config.kv_heads % model:  # one dim for heads and their size may divide nevertheless
        return P()
    sharded = [weight.shape[d] for d, axis in enumerate(spec) if axis]
    return spec if all(n % model == 0 for n in sharded) else P()


def programs(
    case: Case, config: llama.Config, batch: int, length: int, topology: str | None
) -> dict[str, list[HloCollective]]:
    """The collectives of the compiled step, by meshpar and by hand."""
    step, (params, state), dims = generate.decode_target(llama.Llama, config, batch, length)
    if topology is None:  # CPUs add in float32
        params, state = jax.tree.map(_float32, (params, state))
    mesh = mp.mesh("data=2, model=4", topology=topology)
    plain = generate.weights_of(params)
    cache = jax.tree.map(lambda x: _divisible(case.cache, x, mesh), state["cache"])
    names = {"cache": cache, "key": NamedSharding(mesh, P())}
    shardings = {k: names.get(k, NamedSharding(mesh, case.rows)) for k in state}
    weights = jax.tree_util.tree_map_with_path(
        lambda path, w: NamedSharding(mesh, weight_spec(case, config, path, w, mesh.shape["model"])), plain
    )
    hand = jax.jit(
        step,
        in_shardings=(weights, shardings),
        out_shardings=(shardings, NamedSharding(mesh, case.rows)),
        donate_argnums=1,
    )
    how: Any = {"mesh": mesh, "layout": case.layout, "dims": dims, "donate_argnames": "state"}
    if topology is None:
        ours = mp.jit(step, **how).lower(params, state).compile().as_text()
        return {"meshpar": collectives(ours), "by hand": collectives(hand.lower(plain, state).compile().as_text())}
    compiled = {
        "meshpar": mp.compile(step, params, state, **how, effort="fast"),
        "by hand": mp.compile(hand, plain, state, mesh=mesh, effort="fast"),
    }
    return {name: c.final_collectives for name, c in compiled.items()}


def _float32(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jnp.float32) if x.dtype == jnp.bfloat16 else x


def _divisible(spec: P, x: Any, mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding of a cache without axes of dims that do not divide."""
    parts = [axes if axes is None or x.shape[d] % _size(axes, mesh) == 0 else None for d, axes in enumerate(spec)]
    return NamedSharding(mesh, P(*parts))


def _size(axes: Any, mesh: jax.sharding.Mesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes
    size = 1
    for axis in names:
        size *= mesh.shape[axis]
    return size


def times(topology: str, layers: int) -> None:
    """Print planned and scheduled seconds of steps of Llama 3 70B and Mixtral 8x7B over all devices."""
    devices = len(topology_devices(topology))
    table = Table(
        "step", "planned", "schedule", "planned / schedule", "HBM limit", "schedule / limit", "peak planned", "compiled",
        title=f"{layers} layers, int8 cache, weights of Llama in int8, 8,192 tokens, model={devices} of {topology}",
    )  # fmt: skip
    llama_decode, mixtral_decode = generate.llama3_70b_decode, generate.mixtral_8x7b_decode
    for name, target, layout, batch in (
        ("Llama, decode, batch 1", llama_decode, "heads", 1),
        ("Llama, decode, batch 32", llama_decode, "heads", 32),
        ("Llama, decode, batch 1, cache by length", llama_decode, "cache+tensor", 1),
        ("Llama, decode, batch 32, cache by length", llama_decode, "cache+tensor", 32),
        ("Mixtral, decode, batch 32", mixtral_decode, "heads", 32),
        ("Mixtral, decode, batch 32, experts, cache by length", mixtral_decode, "expert", 32),
        ("Llama, prefill, 1 prompt", generate.llama3_70b_prefill, "heads", 1),
    ):
        weights = "bfloat16" if target is mixtral_decode else "int8"
        step, args, dims = target(batch=batch, weights=weights, cache="int8", layers=layers)
        decodes = target is not generate.llama3_70b_prefill
        how: Any = {
            "mesh": f"data=1, model={devices}", "topology": topology, "layout": generate.LAYOUTS[layout], "dims": dims,
            "donate_argnames": "state" if decodes else (),
        }  # fmt: skip
        plan = mp.plan(step, *args, **how)
        compiled = mp.compile(step, *args, **how, effort="full")
        exposed = compiled.exposed
        assert plan.seconds is not None
        assert exposed is not None
        scheduled = exposed.compute + exposed.seconds
        decoding = plan.with_tokens("batch").decoding if decodes else None
        limit = None if decoding is None else decoding.limit
        table.add_row(
            name, f"{plan.seconds * 1e3:.3f} ms", f"{scheduled * 1e3:.3f} ms", f"{plan.seconds / scheduled:.2f}",
            f"{limit * 1e3:.3f} ms" if limit else "", f"{scheduled / limit:.2f}" if limit else "",
            f"{plan.memory.peak / 2**30:.2f} GiB", f"{compiled.memory.peak / 2**30:.2f} GiB",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", help="compile for a TPU slice instead of virtual CPUs, with Llama 3 8B's widths")
    parser.add_argument("--rows", help="numbers of the rows to measure, from 0: 7,8,9 (default: all)")
    parser.add_argument("--times", action="store_true", help="seconds on the slice, by plan and compiler")
    parser.add_argument("--layers", type=int, default=4, help="of --times (%(default)s)")
    args = parser.parse_args()
    if args.times:
        times(args.topology or "v6e:2x4", args.layers)
        return
    chosen = [(name, heads, case) for name, heads in MODELS.items() for case in CASES]
    if args.rows:
        chosen = [chosen[int(n)] for n in args.rows.split(",")]
    if args.topology is None:
        mp.virtual_devices(8)
        base = dataclasses.replace(llama.TINY, embed=256, heads=16, kv_heads=8, head_dim=16, mlp=512, vocab=1024)
        batch, length = 8, 256
    else:
        base, batch, length = dataclasses.replace(llama.LLAMA3_8B, layers=2), 16, 8192
    table = Table("layout", "keys", "meshpar", "by hand", "ratio", "meshpar sends", "by hand sends",
                  title=f"data=2, model=4 of {args.topology or '8 CPU devices'}; bytes of a step and device")  # fmt: skip
    for name, kv_heads, case in chosen:
        sent = programs(case, dataclasses.replace(base, kv_heads=kv_heads), batch, length, args.topology)
        total = {k: sum(c.total_bytes for c in cs) for k, cs in sent.items()}
        ratio = total["meshpar"] / total["by hand"] if total["by hand"] else float(total["meshpar"] > 0) + 1
        table.add_row(
            case.name, name, f"{total['meshpar'] / 1e3:.1f} kB", f"{total['by hand'] / 1e3:.1f} kB", f"{ratio:.3f}",
            *(_kinds(cs) for cs in sent.values()),
        )  # fmt: skip


def _kinds(sent: list[HloCollective]) -> str:
    """Kilobytes by kind of collective."""
    kinds = {op: sum(c.total_bytes for c in sent if c.op == op) / 1e3 for op in sorted({c.op for c in sent})}
    return ", ".join(f"{op} {n:.1f}" for op, n in kinds.items() if n)


if __name__ == "__main__":
    main()

"""`mp.move` of Llama 3 8B from a trainer to a sampler next to `jax.device_put`: planned for TPUs, measured on virtual CPU devices.

    python benchmarks/move.py             # both tables
    python benchmarks/move.py --runs 9    # the median of more runs

The first table is the plan of the real sizes on v5e:2x4 (donated, bfloat16): bytes that a device sends and receives, programs and
collectives, seconds, and the peak memory over the larger side. The second one moves the same arrays with smaller sizes, 125 MB,
not donated. "XLA" is the program to which XLA compiles the identity under both shardings, as `jax.device_put` does in several
processes. In one process `jax.device_put` gathers an array in host memory and copies its new shards to the devices, without
collectives. JAX caches the array on the host, so that each run has arrays of its own. CPU seconds say nothing about TPUs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tables import Table

import meshpar as mp
from meshpar._src.verify.hlo import collectives

SHAPES = {
    "layers": {"up": (32, 4096, 14336), "gate": (32, 4096, 14336), "down": (32, 14336, 4096), "q": (32, 4096, 32, 128),
               "k": (32, 4096, 8, 128), "v": (32, 4096, 8, 128), "o": (32, 32, 128, 4096)},
    "embed": (128256, 4096), "head": (4096, 128256), "norm": (4096,),
}  # fmt: skip
DIMS = {
    "*/{up,gate}": "layers embed mlp", "*/down": "layers mlp embed", "*/o": "layers heads head_dim embed",
    "*/{q,k,v}": "layers embed heads head_dim", "embed": "vocab embed", "head": "embed vocab", "norm": "embed",
}  # fmt: skip
FSDP, TENSOR = "embed: data", "heads, mlp, vocab: model"


def llama(scale: int = 1, dtype: Any = jnp.bfloat16) -> Any:
    """The weights, with all sizes but the number of layers and of heads over ``scale``."""

    def small(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(n // scale if n >= 128 else n for n in shape), dtype)

    return jax.tree.map(small, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def planned() -> None:
    """Print the table of plans."""
    table = Table("from FSDP 8 to", "sends", "receives", "programs", "collectives", "ms", "peak / larger side",
                  title="Llama 3 8B on v5e:2x4, planned")  # fmt: skip
    for target in ("model=8", "replica=2, model=4"):
        for dtype in (None, "float8_e4m3fn"):
            move = mp.move(llama(), source=("data=8", FSDP), target=(target, TENSOR), dims=DIMS, dtype=dtype,
                           topology="v5e:2x4", donate=True)  # fmt: skip
            memory, calls = move.memory, sum(c.runs for c in move.collectives)
            assert move.seconds is not None
            table.add_row(
                target + f", {dtype}" * bool(dtype), f"{move.bytes_sent / 1e9:.3f} GB", f"{move.bytes_received / 1e9:.3f} GB",
                str(len(move.rounds)), str(calls), f"{1e3 * move.seconds:.1f}",
                f"{memory.peak / max(memory.source, memory.target):.2f}",
            )  # fmt: skip
    print()


def seconds_of(run: Callable[[Any], Any], params: Any, runs: int) -> str:
    """The median milliseconds of some runs after a first one, each with arrays that no other run had."""
    jax.block_until_ready(run(params))
    fresh, took = jax.jit(partial(jax.tree.map, jnp.copy)), []
    for _ in range(runs):
        own = jax.block_until_ready(fresh(params))
        began = time.perf_counter()
        jax.block_until_ready(run(own))
        took.append(time.perf_counter() - began)
    return f"{1e3 * statistics.median(took):.1f}"


def measured(runs: int) -> None:
    """Print the table of measurements."""
    table = Table(
        "from FSDP 8 to",
        "way",
        "sends",
        "ms",
        "peak / larger side",
        title="a form of it on 8 virtual CPU devices, measured",
    )
    shapes = llama(16, jnp.float32)
    rng = np.random.default_rng(0)
    host = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    source = ("data=8", FSDP)
    params = jax.device_put(host, mp.shardings(host, FSDP, source[0], dims=DIMS))
    half = mp.mesh("model=4", devices=jax.devices()[:4])
    for name, where in (
        ("model=8", "model=8"),
        ("replica=2, model=4", "replica=2, model=4"),
        ("model=4 on half", half),
    ):
        shardings = mp.shardings(host, TENSOR, where, dims=DIMS)
        move = mp.move(params, source=source, target=(where, TENSOR), dims=DIMS)
        larger = max(move.memory.source, move.memory.target)
        moved, put = move(params), jax.device_put(params, shardings)
        assert all(map(np.array_equal, jax.tree.leaves(moved), jax.tree.leaves(put)))
        table.add_row(
            name,
            "mp.move",
            f"{move.bytes_sent / 1e6:.2f} MB",
            seconds_of(move, params, runs),
            f"{move.memory.peak / larger:.2f}",
        )
        if where is not half:
            compiled = jax.jit(lambda x: x, out_shardings=shardings).lower(params).compile()
            sends = f"{sum(c.total_bytes for c in collectives(str(compiled.as_text()))) / 1e6:.2f} MB"
            use: Any = compiled.memory_analysis()
            needs = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes
            table.add_row("", "XLA", sends, seconds_of(compiled, params, runs), f"{needs / larger:.2f}")
        table.add_row(
            "", "jax.device_put", "–", seconds_of(lambda x, to=shardings: jax.device_put(x, to), params, runs), "–"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of which the median is printed")
    args = parser.parse_args()
    mp.virtual_devices(8)
    planned()
    measured(args.runs)


if __name__ == "__main__":
    main()

"""Resident memory of a long-running process that uses mp.jit: many steps, layouts, shapes and functions.

    python benchmarks/soak.py [--only steps|layouts|shapes|functions] [--lowering shard_map] [--scale 1.0]

Each row runs in a process of its own, on 8 virtual CPU devices, and reads the resident memory twice: first when caches are filled
and the allocator has its arenas, then at the end. Before each reading the garbage collector runs and free memory is returned to the
system. The limit is a growth of 1 %.

- steps: 10,000 training steps with donated state; first reading after 2,000.
- layouts: one program is planned under 200 different layouts, with seconds and memory; first reading after 100.
- shapes: 50 batch sizes, 4 rounds; first reading after the first round, which compiles them.
- functions: 400 functions that close over 1 MiB are jitted, called and deleted; first reading after 200. The garbage collector is
  disabled for the last 20, whose arrays must be freed.

Live arrays: bytes of ``jax.live_arrays()``.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tables import Table

import meshpar as mp

LAYOUT = "batch: data; embed: data; mlp: model"
DIMS = {"*/up": "layers embed mlp", "*/down": "layers mlp embed", "x": "batch embed"}
ROWS = ("steps", "layouts", "shapes", "functions")
AIM = 0.01
OPTIMIZER = optax.adamw(1e-3)


def resident() -> int:
    """Bytes of the process in memory, after garbage is collected and free memory is given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live() -> int:
    """Bytes of all arrays that JAX has on devices, copies on several devices counted each."""
    return sum(s.data.nbytes for x in jax.live_arrays() for s in x.addressable_shards)


# -- the step


def state_of(embed: int, layers: int) -> dict:
    weights = {"up": jnp.ones((layers, embed, 4 * embed)) / embed, "down": jnp.ones((layers, 4 * embed, embed)) / embed}
    return {"params": weights, "opt": OPTIMIZER.init(weights)}


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: dict) -> tuple[jax.Array, None]:
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    return jnp.mean((jax.lax.scan(layer, x, params)[0] - 1) ** 2)


def train_step(state: dict, x: jax.Array) -> tuple[dict, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def jitted(lowering: str, **options: object) -> Callable:
    return mp.jit(train_step, mesh="data=4, model=2", layout=LAYOUT, dims=DIMS, lowering=lowering, **options)


# -- the rows: each yields at its first mark, and ends


def steps(lowering: str, scale: float) -> Iterator[int]:
    step, state = jitted(lowering, donate_argnums=0), state_of(32, 2)
    count = int(10_000 * scale)
    for i in range(count):
        state, loss = step(state, np.full((8, 32), i % 7, np.float32))
        if i == count // 5:
            yield count
    assert np.isfinite(loss)


def layouts(lowering: str, scale: float) -> Iterator[int]:
    plan = jitted(lowering).plan(state_of(64, 4), jnp.ones((64, 64)))
    axes = ("data", "model", "data+model", "model+data")
    rules = [[f"{dim}?: {a}" for a in axes] for dim in ("batch", "embed", "mlp")]
    rules.append([f"params.{dim}?: {a}" for dim in ("layers", "embed", "mlp") for a in axes])
    texts = ["; ".join(chosen) for chosen in itertools.product(*rules)][::3][:200]
    count = int(len(texts) * scale)
    for i, text in enumerate(texts[:count]):
        other = plan.replan(layout=text)
        assert other.memory.peak > 0
        if i == count // 2:
            yield count


def shapes(lowering: str, scale: float) -> Iterator[int]:
    step, state = jitted(lowering), state_of(32, 2)
    count = int(50 * scale)
    for number in range(4):
        for n in range(count):
            loss = step(state, np.ones((8 * (n + 1), 32), np.float32))[1]
        if number == 0:
            yield count
    assert np.isfinite(loss)


def functions(lowering: str, scale: float) -> Iterator[int]:
    count = int(400 * scale)
    for i in range(count):
        if i == count - 20:  # freed by reference counts alone
            gc.disable()
        big = jnp.full((512, 512), float(i))
        step = mp.jit(
            lambda x, big=big: x @ big, mesh="data=4, model=2", layout="batch: data", dims={"x": "batch embed"}, lowering=lowering
        )  # fmt: skip
        step(np.ones((8, 512), np.float32))
        del step, big
        if i == count // 2:
            yield count
    assert live() < 2**20, "functions that were deleted keep their arrays"


def measured(row: str, lowering: str, scale: float) -> dict:
    """The readings of a row, in this process."""
    mp.virtual_devices(8)
    run = {"steps": steps, "layouts": layouts, "shapes": shapes, "functions": functions}[row](lowering, scale)
    count = next(run)
    first, before = resident(), live()
    for _ in run:
        pass
    return {"row": row, "count": count, "first": first, "end": resident(), "live": [before, live()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--lowering", default="auto")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="part of the number of steps, layouts, shapes and functions"
    )
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measured(args.row, args.lowering, args.scale)))
        return
    heads = ("case", "count", "first reading", "end", "growth", "limit", "live arrays")
    table = Table(*heads, title=f"lowering={args.lowering}, jax {jax.__version__}")
    for row in (args.only,) if args.only else ROWS:
        command = [sys.executable, __file__, "--row", row, "--lowering", args.lowering, "--scale", str(args.scale)]
        r = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        growth = r["end"] / r["first"] - 1
        table.add_row(
            row, f"{r['count']:,}", f"{r['first'] / 2**20:.1f} MiB", f"{r['end'] / 2**20:.1f} MiB", f"{100 * growth:+.2f} %",
            f"≤ {100 * AIM:.0f} %", " → ".join(f"{b / 2**20:.2f}" for b in r["live"]) + " MiB",
        )  # fmt: skip


if __name__ == "__main__":
    main()

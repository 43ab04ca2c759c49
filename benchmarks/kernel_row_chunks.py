"""What a product of few rows costs on TPU, from the compiler's schedules, and what uneven groups therefore cost.

    python benchmarks/kernel_row_chunks.py                # all chips
    python benchmarks/kernel_row_chunks.py --chips v6e

Needs libtpu but no TPU. For each number of rows that the grouped matmul multiplies at once in a tile which groups share
(`tpu_tiles.ROW_CHUNKS`), and for a whole block, the instruction bundles of one masked product: [rows, 2048]·[2048, 512] forward,
[rows, 512]ᵀ·[rows, 1024] for the transpose. A bundle takes a cycle or more; nothing was timed.

Then for each shape a multinomial load of the groups: rows multiplied over M, and bundles over those of M/512 whole
blocks, for the pieces and for what was done before them (aligned chunks of 128 rows); `even` is for equal groups.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from kernels_aot import CHIPS, ENVIRONMENT

TILE = 512


def compile_products(chip: str, kind: str, sizes: list[int]) -> None:
    """Compile a kernel `piece_KIND_ROWS` for each size, in this process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu

    from meshpar_kernels.grouped_matmul import tpu_tiles
    from meshpar_kernels.grouped_matmul.tpu_blocks import dot, row_mask

    def kernel(size, where, left, right, out):
        first = pl.multiple_of(where[0] * tpu_tiles.pack(2), tpu_tiles.pack(2)) if size < TILE else 0
        here = pl.ds(first, size)
        mine = row_mask(first, size, where[1], where[2]) if size < TILE else None
        if kind == "forward":
            value = dot(left[here], right[...], (1, 0)).astype(out.dtype)
            out[here] = value if mine is None else jnp.where(mine, value, out[here])
        else:
            pair = [x[here] if mine is None else jnp.where(mine, x[here], 0) for x in (left, right)]
            out[...] += dot(*pair, (0, 0))

    rows, inner, width = tpu_tiles.BLOCK
    shapes = {"forward": [(TILE, inner), (inner, width), (TILE, width)]}
    high, wide = tpu_tiles.TRANSPOSE_BLOCK
    shapes["transpose"] = [(TILE, high), (TILE, wide), (high, wide)]
    left, right, out = shapes[kind]
    assert rows == TILE
    result = jax.ShapeDtypeStruct(out, jnp.bfloat16 if kind == "forward" else jnp.float32)
    device = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices[0]
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    spaces = [pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM, pltpu.VMEM)]
    for size in sizes:
        call = pl.pallas_call(
            functools.partial(kernel, size),
            out_shape=result,
            in_specs=spaces,
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            name=f"piece_{kind}_{size}",
        )
        arguments = [struct((3,), jnp.int32), struct(left, jnp.bfloat16), struct(right, jnp.bfloat16)]
        jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def bundles(chip: str, kind: str, sizes: list[int]) -> dict[int, int]:
    """Scheduled bundles of each product, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        command = [sys.executable, __file__, "--one", chip, kind, json.dumps(sizes)]
        subprocess.run(command, env=os.environ | ENVIRONMENT | dump, check=True, capture_output=True, timeout=900)
        found = {}
        for size in sizes:
            (path,) = (
                p for p in Path(folder).glob(f"*piece_{kind}_{size}.*final_bundles.txt") if "schedule" not in p.name
            )
            found[size] = sum(line.lstrip().startswith("0x") for line in path.read_text().splitlines())
    return found


def walk(sizes: list[int], pieces: tuple[int, ...], cost: dict[int, int], aligned: bool) -> float:
    """Cost of the products for groups of these sizes; `aligned`: whole chunks of 128 rows, as before the pieces."""
    total, start = 0.0, 0
    for size in sizes:
        end = start + size
        for first in range(start // TILE * TILE, end, TILE):
            low, high = max(start, first) - first, min(end, first + TILE) - first
            length = high - low // 16 * 16
            if high - low == TILE:
                total += cost[TILE]
            elif aligned and high > low:
                total += (-(-high // 128) - low // 128) * cost[128]
            elif high > low:
                total += length // pieces[-1] * cost[pieces[-1]]
                total += min((cost[p] for p in pieces if p >= length % pieces[-1] > 0), default=0)
        start = end
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "KIND", "SIZES"))
    arguments = parser.parse_args()
    if arguments.one:
        compile_products(arguments.one[0], arguments.one[1], json.loads(arguments.one[2]))
        return
    from meshpar_kernels.grouped_matmul import schedule
    from meshpar_kernels.grouped_matmul.tpu_tiles import ROW_CHUNKS
    from meshpar_kernels.shapes import MATMULS

    cost = {}
    sizes = [*ROW_CHUNKS, TILE]
    print("bundles of one product     " + "".join(f"{size:>7}" for size in sizes), "rows")
    for chip in arguments.chips.split(","):
        for kind in ("forward", "transpose"):
            cost[chip, kind] = bundles(chip, kind, sizes)
            print(f"{chip:<8}{kind:<19}" + "".join(f"{cost[chip, kind][size]:>7}" for size in sizes), flush=True)
    print("\nloads: over M rows in whole blocks")
    for name, s in MATMULS.items():
        load = np.random.default_rng(0).multinomial(s.m, np.full(s.groups, 1 / s.groups)).tolist()
        even = [s.m // s.groups] * s.groups
        rows = schedule.executed_rows(load, s.m, TILE, ROW_CHUNKS, 16) / s.m
        before = walk(load, ROW_CHUNKS, dict.fromkeys((*ROW_CHUNKS, TILE), 128) | {TILE: TILE}, aligned=True) / s.m
        print(f"{name:<19}rows {rows:.3f} (before {before:.3f})")
        for (chip, kind), of in cost.items():
            ideal = s.m / TILE * of[TILE]
            now, then, equal = (
                walk(groups, ROW_CHUNKS, of, aligned) / ideal
                for groups, aligned in ((load, False), (load, True), (even, False))
            )
            print(f"  {chip:<8}{kind:<10} bundles {now:.2f} (before {then:.2f}), even {equal:.2f}")


if __name__ == "__main__":
    main()

"""Cost of matmuls of few rows on TPUs, from the compiler's schedules, and the resulting cost of uneven groups.

    python benchmarks/kernel_row_chunks.py                # all chips
    python benchmarks/kernel_row_chunks.py --chips v6e

Needs libtpu but no TPU. First table: for each number of rows that the grouped matmul multiplies at once in a tile of several groups
(`tpu_tiles.ROW_CHUNKS`), and for a full block of 512 rows, the instruction bundles of one masked matmul: [rows, 2048]·[2048, 512]
forward, [rows, 512]ᵀ·[rows, 1024] for the transpose. A bundle takes one cycle or more; nothing is timed.

Second table: for each shape, rows multiplied over M and bundles over the bundles of M/512 full blocks, for a multinomial load of
the groups and for equal groups.
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
from tables import Table

TILE = 512


def compile_matmuls(chip: str, kind: str, sizes: list[int]) -> None:
    """Compile a kernel `chunk_KIND_ROWS` for each size, in this process."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu

    from meshpar_kernels._numerics import dot
    from meshpar_kernels.grouped_matmul import tpu_tile_sizes as tpu_tiles
    from meshpar_kernels.grouped_matmul.tpu_tile_matmul import row_mask

    def kernel(size, where, left, right, out):
        first = pl.multiple_of(where[0] * tpu_tiles.pack(2), tpu_tiles.pack(2)) if size < TILE else 0
        rows = pl.ds(first, size)
        mask = row_mask(first, size, where[1], where[2]) if size < TILE else None
        if kind == "forward":
            value = dot(left[rows], right[...], (1, 0)).astype(out.dtype)
            out[rows] = value if mask is None else jnp.where(mask, value, out[rows])
        else:
            pair = [x[rows] if mask is None else jnp.where(mask, x[rows], 0) for x in (left, right)]
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
            name=f"chunk_{kind}_{size}",
        )
        arguments = [struct((3,), jnp.int32), struct(left, jnp.bfloat16), struct(right, jnp.bfloat16)]
        jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def bundles(chip: str, kind: str, sizes: list[int]) -> dict[int, int]:
    """Number of rows → scheduled bundles of its matmul, compiled in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        dump = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        command = [sys.executable, __file__, "--one", chip, kind, json.dumps(sizes)]
        subprocess.run(command, env=os.environ | ENVIRONMENT | dump, check=True, capture_output=True, timeout=900)
        counts = {}
        for size in sizes:
            (path,) = (
                p for p in Path(folder).glob(f"*chunk_{kind}_{size}.*final_bundles.txt") if "schedule" not in p.name
            )
            counts[size] = sum(line.lstrip().startswith("0x") for line in path.read_text().splitlines())
    return counts


def group_cost(sizes: list[int], chunks: tuple[int, ...], cost: dict[int, int]) -> float:
    """Total cost of the matmuls for groups of these sizes, by the cost of a matmul of each number of rows."""
    total, start = 0.0, 0
    for size in sizes:
        end = start + size
        for first in range(start // TILE * TILE, end, TILE):
            low, high = max(start, first) - first, min(end, first + TILE) - first
            length = high - low // 16 * 16
            if high - low == TILE:
                total += cost[TILE]
            elif high > low:
                total += length // chunks[-1] * cost[chunks[-1]]
                total += min((cost[p] for p in chunks if p >= length % chunks[-1] > 0), default=0)
        start = end
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "KIND", "SIZES"))
    arguments = parser.parse_args()
    if arguments.one:
        compile_matmuls(arguments.one[0], arguments.one[1], json.loads(arguments.one[2]))
        return
    from meshpar_kernels.grouped_matmul import schedule
    from meshpar_kernels.grouped_matmul.tpu_tile_sizes import ROW_CHUNKS
    from meshpar_kernels.published_model_shapes import MATMULS

    cost = {}
    sizes = [*ROW_CHUNKS, TILE]
    table = Table("chip, matmul", *(f"{size} rows" for size in ROW_CHUNKS), f"{TILE}, unmasked")
    for chip in arguments.chips.split(","):
        for kind in ("forward", "transpose"):
            cost[chip, kind] = bundles(chip, kind, sizes)
            table.add_row(f"{chip} {kind}", *(str(cost[chip, kind][size]) for size in sizes))
    table = Table("shape", "rows over M", "chip, matmul", "bundles", "equal groups", title="")
    for name, s in MATMULS.items():
        load = np.random.default_rng(0).multinomial(s.m, np.full(s.groups, 1 / s.groups)).tolist()
        even = [s.m // s.groups] * s.groups
        rows = schedule.executed_rows(load, s.m, TILE, ROW_CHUNKS, 16) / s.m
        for (chip, kind), of in cost.items():
            ideal = s.m / TILE * of[TILE]
            uneven, equal = (group_cost(groups, ROW_CHUNKS, of) / ideal for groups in (load, even))
            table.add_row(name, f"{rows:.3f}", f"{chip} {kind}", f"{uneven:.2f}", f"{equal:.2f}")


if __name__ == "__main__":
    main()

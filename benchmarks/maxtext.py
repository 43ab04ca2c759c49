"""Our Llama and Mixtral beside MaxText's: peak memory and wire bytes of the final TPU program, compiled ahead of time.

    pip install -e . "jax[tpu]"
    python benchmarks/maxtext.py [--row 1] [--effort full]

MaxText's figures are of its own ``train_compile`` (e591f30, 2026-08-22; jax 0.10.2, libtpu 0.0.42.1): float32 weights and
moments, bfloat16 compute, AdamW, full remat, splash attention, donated state; the same sizes, slices, meshes and batches here.
Bytes are per step and device, decimal; where it has several variants of a row, the one that sends least is taken.

Rows called "kept" have a second policy: a layer recomputes computation but not communication, so that what was gathered or summed
for its blocks is held (``remat="keep_collectives"``); MaxText's figures beside them are those at full remat. Row 10 is read right
after partitioning, on both sides: in the final text the gathers of two slices stand as all-reduces of padded arrays.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama
import mixtral


@dataclass(frozen=True)
class Row:
    """A row of MaxText's, and the layout that does the same here.

    Attributes:
      peak, sent: MaxText's, in GB; None where it does not compile.
      aim: for our bytes, as a share of its.
      remat: what a layer keeps, of ``llama.REMAT``.
      partitioned: whether bytes are read right after partitioning, and not in the final program.
    """

    name: str
    model: str
    topology: str
    mesh: str
    layout: str | mp.Layout
    batch: int
    seq: int
    peak: float | None
    sent: float | None
    aim: float | None
    remat: str = "full"
    partitioned: bool = False


# Every op takes the split that moves least: the embedding is looked up where it lies, and not gathered.
FSDP = mp.Layout(llama.FSDP, resolve="cost")
EXPERTS = mp.Layout(mixtral.FSDP_ALL_EXPERT, resolve="cost")
SLICES = mp.Layout("batch: slice+data; embed: data", resolve="cost")
KEPT = "keep_collectives"
ROWS = (
    Row("1", "llama3_8b", "v5p:4x4x8", "data=128", FSDP, 256, 2048, 4.375, 58.595, 0.8),
    Row("2", "llama3_8b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 256, 2048, 4.473, 89.276, 1.0),
    Row("3", "llama3_8b", "v5e:16x16", "data=256", FSDP, 512, 2048, 4.684, 59.902, 0.8),
    Row("4, 4a", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 2048, 4.203, 90.311, 1.0),
    Row("5", "llama3_70b", "v5p:4x4x8", "data=128", FSDP, 128, 4096, 19.648, 549.725, 0.8),
    Row("6", "llama3_70b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 128, 4096, 20.592, 465.219, 1.0),
    Row("7", "mixtral_8x7b", "v5p:4x4x8", "data=16, model=8", EXPERTS, 128, 2048, 9.625, 58.536, None),
    Row("8, 8a", "mixtral_8x7b", "v5e:16x16", "data=32, model=8", EXPERTS, 256, 2048, None, None, None),
    Row("9", "llama3_8b", "v6e:16x16", "data=256", FSDP, 512, 2048, 3.771, 58.828, 0.8),
    Row("10", "llama3_8b", "2x v5p:4x4x8", "slice=2, data=128", SLICES, 512, 2048, 6.094, 71.969, 0.8, "full", True),
    Row("2, kept", "llama3_8b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 256, 2048, None, 89.276, 0.8, KEPT),
    Row("4a, kept", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 2048, None, 90.311, 0.8, KEPT),
    Row("6, kept", "llama3_70b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 128, 4096, None, 465.219, 0.8, KEPT),
)  # fmt: skip


def compiled(row: Row, effort: Any) -> mp.Compiled:
    module = mixtral if row.model.startswith("mixtral") else llama
    step, args, dims = getattr(module, row.model)(row.batch, row.seq, remat=row.remat)
    mesh = mp.mesh(row.mesh, topology=row.topology)
    return mp.compile(
        step, *args, mesh=mesh, layout=row.layout, dims=dims, lowering="shard_map", effort=effort, donate_argnums=0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help='only this row, "2" or "2, kept"; may be given again')
    parser.add_argument("--effort", default="full", choices=("full", "fast"))
    args = parser.parse_args()
    table = Table(title=f"beside MaxText; {args.effort} effort, jax {jax.__version__}; GB are decimal")
    for head in (
        "row",
        "model",
        "topology",
        "mesh",
        "peak",
        "MaxText",
        "ratio",
        "sent",
        "MaxText",
        "ratio",
        "aim",
        "compile",
    ):
        table.add_column(head, justify="left" if head in ("row", "model", "topology", "mesh") else "right")
    console = Console(width=160)
    for row in ROWS:
        names = {row.name} if row.remat != "full" else {row.name, *row.name.split(", ")}
        if args.row and not set(args.row) & names:
            continue
        about = [row.name, row.model, row.topology, row.mesh]
        try:
            c = compiled(row, args.effort)
        except mp.MeshparError as e:  # the table goes on
            cells = [*about, str(e).splitlines()[0][:40]]
        else:
            peak, sent = c.memory.peak / 1e9, c.bytes_sent / 1e9
            if row.partitioned:
                sent = sum(x.total_bytes for x in c.collectives) / 1e9
            cells = [
                *about,
                f"{peak:.2f} GB",
                f"{row.peak or ('' if row.sent else 'fails')}",
                f"{peak / row.peak:.2f}" if row.peak else "",
            ]
            cells += [f"{sent:.1f} GB", f"{row.sent or 'fails'}", f"{sent / row.sent:.2f}" if row.sent else ""]
            cells += [f"≤ {row.aim}" if row.aim else "", f"{c.compile_seconds:.0f} s"]
        table.add_row(*cells)
        console.print(" | ".join(cells))
    console.print(table)


if __name__ == "__main__":
    main()

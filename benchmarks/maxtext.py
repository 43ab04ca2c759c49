"""Our Llama and Mixtral beside MaxText's: peak memory and wire bytes of the final TPU program, compiled ahead of time.

    pip install -e . "jax[tpu]"
    python benchmarks/maxtext.py [--row 1] [--effort full] [--overlap xla]
    python benchmarks/maxtext.py --schedule [--rows 1-3]       # whole steps, by the compiler's final schedule

MaxText's figures are of its own ``train_compile`` (e591f30, 2026-08-22; jax 0.10.2, libtpu 0.0.42.1): float32 weights and
moments, bfloat16 compute, AdamW, full remat, splash attention, donated state; the same sizes, slices, meshes and batches here.
Bytes are per step and device, decimal; where it has several variants of a row, the one that sends least is taken.

Rows called "kept" have a second policy: where it fits, a layer recomputes computation but not communication, so that what was
gathered or summed for its blocks is held (``remat="keep_collectives"``), else it keeps what its products gave and the sum after its
attention; MaxText's figures beside them are those at full remat. Row 10 is read right after partitioning, on both sides: in the
final text the gathers of two slices stand as all-reduces of padded arrays.

The plan may send gradients as whole sums, for twice the bytes, where that is shorter (rows 1, 5 and 9): the aims for bytes are for
``--overlap xla``, which sends least.

``--schedule`` has seconds of a step of rows 1 to 9: what computes, by libtpu's own cycles, and communication beside which
nothing does (:mod:`meshpar.verify.exposed`), read off MaxText's final programs by the same reader. MaxText's are :data:`SCHEDULES`,
ours are compiled now, with the options that a plan comes with and the form of rotary embeddings whose plan is shorter: at full
remat, and "best that fits", with the policy of ``llama.REMAT``, of the batch whole and in two or four parts side by side, whose
plan is shortest among those that take at most :data:`MARGIN` of the memory. Splash attention has no cycles in either. Nothing
was run.
Ours at full remat stands beside its best at full remat; "best that fits", beside the best of all its policies that fit.
"of its" is our peak beside the lowest of its programs at the policy of that best one.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar.hardware.topology import parse_topology
from meshpar.passes.collective_matmul import MODES

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
      loss: of ``llama.Head``: in chunks of the vocabulary, or of the tokens where a layout splits the vocabulary.
      partitioned: whether bytes are read right after partitioning, and not in the final program.
      interleave: parts of the batch that go through a layer side by side.
      rotary: of ``llama.rotate``.
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
    loss: str = "vocab"
    partitioned: bool = False
    interleave: int = 1
    rotary: str = "halves"


# Every op takes the split that moves least: the embedding is looked up where it lies, and not gathered.
FSDP = mp.Layout(llama.FSDP, resolve="cost")
EXPERTS = mp.Layout(mixtral.FSDP_ALL_EXPERT, resolve="cost")
SLICES = mp.Layout("batch: slice+data; embed: data", resolve="cost")
SPLIT = ("full", "tokens")  # the vocabulary is split, so that a device has more tokens than words
KEPT = ("keep_collectives", "tokens")
FITS = ("minimal_with_context", "tokens")  # where what was gathered for blocks does not
MARGIN = 0.9
"""The part of a chip's memory that the plan of "best that fits" may take."""
ROWS = (
    Row("1", "llama3_8b", "v5p:4x4x8", "data=128", FSDP, 256, 2048, 4.375, 58.595, 0.8),
    Row("2", "llama3_8b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 256, 2048, 4.473, 89.276, 1.0, *SPLIT),
    Row("3", "llama3_8b", "v5e:16x16", "data=256", FSDP, 512, 2048, 4.684, 59.902, 0.8),
    Row("4, 4a", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 2048, 4.203, 90.311, 1.0, *SPLIT),
    Row("5", "llama3_70b", "v5p:4x4x8", "data=128", FSDP, 128, 4096, 19.648, 549.725, 0.8),
    Row("6", "llama3_70b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 128, 4096, 20.592, 465.219, 1.0, *SPLIT),
    Row("7", "mixtral_8x7b", "v5p:4x4x8", "data=16, model=8", EXPERTS, 128, 2048, 9.625, 58.536, None),
    Row("8, 8a", "mixtral_8x7b", "v5e:16x16", "data=32, model=8", EXPERTS, 256, 2048, None, None, None),
    Row("9", "llama3_8b", "v6e:16x16", "data=256", FSDP, 512, 2048, 3.771, 58.828, 0.8),
    Row("10", "llama3_8b", "2x v5p:4x4x8", "slice=2, data=128", SLICES, 512, 2048, 6.094, 71.969, 0.8, "full", "vocab", True),
    Row("2, kept", "llama3_8b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 256, 2048, None, 89.276, 0.8, *KEPT),
    Row("4a, kept", "llama3_8b", "v5e:16x16", "data=32, model=8", llama.FSDP_TENSOR_SEQUENCE, 512, 2048, None, 90.311, 0.8, *FITS),
    Row("6, kept", "llama3_70b", "v5p:4x4x8", "data=16, model=8", llama.FSDP_TENSOR_SEQUENCE, 128, 4096, None, 465.219, 0.8, *FITS),
)  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """A compiled program of MaxText's, as the reader of final programs has it.

    Attributes:
      options: of its compiler.
      compute, exposed: seconds of a step; None: nobody read it.
      sent, peak: GB; None: not known.
      remat: what a layer keeps, its ``remat_policy``.
    """

    options: str
    compute: float | None
    exposed: float | None
    sent: float | None
    peak: float | None
    remat: str = "full"

    @property
    def whole(self) -> float | None:
        return None if self.compute is None or self.exposed is None else self.compute + self.exposed

    def fits(self, capacity: float) -> bool:
        """Whether it compiles, and into so many bytes."""
        return self.peak is not None and self.peak * 1e9 <= capacity


ASYNC = "tuned: asynchronous gathers"
"""xla_tpu_enable_async_collective_fusion, …_fuse_all_gather, …_multiple_steps, xla_tpu_overlap_compute_collective_tc,
xla_enable_async_all_gather."""
OFFLOAD = "tuned: and sums on the SparseCores"
"""With these xla_tpu_enable_sparse_core_collective_offload_reduce_scatter, …_offload_all_reduce,
xla_tpu_enable_sparse_core_reduce_scatter_v2, xla_tpu_use_tc_device_shape_on_sc."""
WINDOWS = "tuned: no windowed einsums"
"""xla_jf_spmd_threshold_for_windowed_einsum_mib beyond every array."""
ALL = f"{OFFLOAD}, no windowed einsums"
SCHEDULES: dict[str, tuple[Schedule, ...]] = {
    "1": (
        Schedule("default", 0.648, 0.136, 58.6, 4.37), Schedule(ASYNC, 0.640, 0.074, 58.6, 5.13),
        Schedule(OFFLOAD, 0.608, 0.012, 58.6, 5.13), Schedule("default", None, None, 58.6, 15.33, "minimal"),
        Schedule(OFFLOAD, 0.568, 0.027, 58.6, 15.33, "minimal"),
    ),
    "2": (
        Schedule("default", 0.908, 0.575, 114.2, 5.03), Schedule(WINDOWS, 0.700, 0.604, 89.3, 4.47),
        Schedule(ALL, 0.729, 0.444, 89.0, 5.30), Schedule(WINDOWS, 0.641, 0.550, 81.8, 14.97, "minimal"),
        Schedule(ALL, 0.629, 0.411, 81.5, 15.20, "minimal"),
    ),
    "3": (
        Schedule("default; tuned is the same", 1.703, 0.234, 59.9, 4.68),
        Schedule("default", 1.408, 0.241, 59.9, 14.90, "minimal"),
    ),
    "4": (
        Schedule("default", None, None, 115.0, 4.31), Schedule(WINDOWS, 1.780, 2.199, 90.3, 4.20),
        Schedule(WINDOWS, 1.435, 1.907, 82.8, 14.58, "minimal"),
    ),
    "5": (
        Schedule("default", None, None, 549.7, 19.65), Schedule(OFFLOAD, 6.467, 0.047, 549.7, 20.36),
        Schedule(OFFLOAD, 5.436, 0.213, 549.7, 69.76, "minimal"),
    ),
    "6": (
        Schedule(ALL, 6.285, 2.276, 464.4, 20.40), Schedule(ALL, 5.183, 1.858, 426.8, 70.02, "minimal"),
    ),
    "9": (
        Schedule("default", 0.501, 0.206, 58.8, 3.77), Schedule(OFFLOAD, 0.481, 0.069, 58.8, 4.66),
        Schedule(OFFLOAD, 0.473, 0.047, 58.8, 14.87, "minimal"),
    ),
}  # fmt: skip
"""MaxText e591f30 (``train_compile``), jax 0.10.2, libtpu 0.0.42.1, read on 2026-11-22 and 2026-11-23 (``RESULTS.md`` says how, and
what is not the same as here); of the other programs memory and bytes alone are known (:data:`ROWS`)."""


def peers(row: Row) -> tuple[Schedule, ...]:
    """What a row of ours is set beside: at full remat MaxText's at full remat, otherwise those of every policy."""
    number = row.name.split(",")[0].rstrip("a")
    known = SCHEDULES.get(number) or (Schedule("the variant that sends least", None, None, row.sent, row.peak),)
    return tuple(s for s in known if row.remat != "full" or s.remat == "full")


def best_of(theirs: Sequence[Schedule], capacity: float) -> Schedule | None:
    """The shortest step of those that fit the chip; None where no schedule was read."""
    return min((s for s in theirs if s.whole and s.fits(capacity)), key=lambda s: s.whole or 0.0, default=None)


def schedules(rows: list[Row], effort: Any, overlap: Any, console: Console) -> None:
    """A line for every program of a row: MaxText's, then ours."""
    heads = (
        "row",
        "program",
        "whole s",
        "compute s",
        "exposed s",
        "of its best",
        "sent GB",
        "peak GB",
        "of its",
        "fits",
    )
    table = Table(*heads, title=f"whole steps by the final schedule; {effort} effort, jax {jax.__version__}")

    def show(*cells: str) -> None:
        table.add_row(*cells)
        console.print(" | ".join(cells))

    def figure(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    for row in rows:
        capacity = parse_topology(row.topology).chip.per_device().hbm
        row = turning(row, overlap)
        fitting = best_that_fits(row, MARGIN * capacity, overlap)
        best = f"{fitting.remat}, in {fitting.interleave} parts" if fitting.interleave > 1 else fitting.remat
        rotary = "" if row.rotary == "halves" else f"; rotary by a {row.rotary}"
        ours = {f"meshpar{rotary}": row, f"meshpar, best that fits: {best}{rotary}": fitting}
        theirs = peers(fitting)
        for s in theirs:
            program = f"MaxText, {s.options}" + ("" if s.remat == "full" else f"; {s.remat}")
            fits = "does not compile" if s.peak is None else "yes" if s.fits(capacity) else "no"
            show(row.name, program, figure(s.whole), figure(s.compute), figure(s.exposed), "",
                 figure(s.sent, 1), figure(s.peak, 2), "", fits)  # fmt: skip
        for name, mine in ours.items():
            try:
                c = compiled(mine, effort, overlap)
            except mp.MeshparError as e:  # the table goes on
                show(row.name, name, str(e).splitlines()[0][:60], "", "", "", "", "", "", "no")
                continue
            found = c.exposed
            assert found is not None
            best = best_of(peers(mine), capacity)
            remat = best.remat if best else "full"
            peak = min((s.peak for s in theirs if s.remat == remat and s.peak is not None), default=None)
            show(
                row.name, name, figure(found.schedule), figure(found.compute), figure(found.seconds),
                "" if best is None or not best.whole else f"{found.schedule / best.whole:.2f}", figure(c.bytes_sent / 1e9, 1),
                figure(c.memory.peak / 1e9, 2), "" if peak is None else f"{c.memory.peak / 1e9 / peak:.2f}", "yes",
            )  # fmt: skip
    console.print(table)


def numbered(text: str | None) -> list[Row]:
    """The rows of ``--rows``: ``"1-3"``, ``"1,4"``; None: 1 to 9."""
    wanted: set[int] = set()
    for part in (text or "1-9").split(","):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    return [r for r in ROWS if r.remat == "full" and int(r.name.split(",")[0]) in wanted]


def arguments(row: Row, overlap: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(step, its arguments, what plan and compiler are told) of a row."""
    module = mixtral if row.model.startswith("mixtral") else llama
    how = {"remat": row.remat, "loss": row.loss, "interleave": row.interleave, "rotary": row.rotary}
    step, args, dims = getattr(module, row.model)(row.batch, row.seq, **how)
    mesh = mp.mesh(row.mesh, topology=row.topology)
    how = {"lowering": "shard_map", "overlap": overlap, "donate_argnums": 0}
    return step, args, {"mesh": mesh, "layout": row.layout, "dims": dims, **how}


def best_that_fits(row: Row, memory: float, overlap: Any) -> Row:
    """The row with the policy and the parts side by side whose plan is shortest of those that take at most ``memory`` bytes; as
    it is if none does."""
    found = []
    for remat, interleave in itertools.product(llama.REMAT, (1,) if row.model.startswith("mixtral") else (1, 2, 4)):
        each = replace(row, remat=remat, interleave=interleave)
        step, args, how = arguments(each, overlap)
        plan = mp.plan(step, *args, **how)
        if plan.memory.peak <= memory:
            found.append((plan.seconds or math.inf, interleave, remat, each))
    return min(found, key=lambda each: each[:3])[3] if found else row


def turning(row: Row, overlap: Any) -> Row:
    """The row with the form of rotary embeddings whose plan is shorter."""

    def seconds(each: Row) -> float:
        step, args, how = arguments(each, overlap)
        return mp.plan(step, *args, **how).seconds or math.inf

    return min((replace(row, rotary=rotary) for rotary in ("halves", "matmul")), key=seconds)


def compiled(row: Row, effort: Any, overlap: Any) -> mp.types.Compiled:
    step, args, how = arguments(row, overlap)
    return mp.compile(step, *args, **how, effort=effort)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help='only this row, "2" or "2, kept"; may be given again')
    parser.add_argument("--effort", default="full", choices=("full", "fast"))
    parser.add_argument("--overlap", choices=MODES, help="how collectives are made beside products (auto)")
    parser.add_argument("--schedule", action="store_true", help="seconds of whole steps, by the final schedule")
    parser.add_argument("--rows", help='with --schedule: "1-3", "1,4" (1-9)')
    args = parser.parse_args()
    if args.schedule:
        schedules(numbered(args.rows), args.effort, args.overlap, Console(width=180, highlight=False))
        return
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
            c = compiled(row, args.effort, args.overlap)
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

"""Llama and Mixtral of examples/ compared with MaxText's: peak memory, bytes sent and step time of compiled TPU programs.

    pip install -e . "jax[tpu]"
    python benchmarks/maxtext.py [--row 1] [--effort full] [--overlap xla]
    python benchmarks/maxtext.py --schedule [--rows 1-3]       # step times by the compiler's final schedule

MaxText's numbers are from its own ``train_compile`` (e591f30, 2026-08-22; jax 0.10.2, libtpu 0.0.42.1): float32 weights and
moments, bfloat16 compute, AdamW, full remat, splash attention, donated state. Sizes, slices, meshes and batches are equal. Bytes
are decimal, per step and device; of several variants of a row the table has the one that sends the fewest bytes.

Rows named "saved" have a second policy: where it fits, layers save the results of collectives instead of recomputing them
(``remat="keep_collectives"``), otherwise the results of matmuls and of the reduction after attention; MaxText's numbers in them are
those at full remat. Row 10 is read right after partitioning on both sides: in the final program the all-gathers over two slices are
all-reduces of padded arrays.

A plan may replace reduce-scatters of gradients by all-reduces, for twice the bytes, where that takes less time (rows 1, 5 and 9):
the limits of bytes are for ``--overlap xla``, which sends the fewest.

``--schedule`` prints step times: computation by libtpu's cycles, plus communication that no kernel overlaps
(:mod:`verify.exposed`). MaxText's final programs of rows 1 to 6 and 9 were read by the same function (:data:`SCHEDULES`).
Of the others only memory and bytes are known, and its row 8 does not compile. Ours are compiled with the compiler options of the
plan and the form of rotary embeddings whose plan is faster. "meshpar" is at full remat. "Best
that fits" has the policy of ``llama.REMAT``, and one, two or four interleaved microbatches, whose plan is fastest among those
that need at most :data:`MEMORY_FRACTION` of the memory. Splash attention has no cycles in either. Nothing is run. "To MaxText's
best": at full remat, the ratio to its best program at full remat; otherwise to the best of all its policies that fit. "To
MaxText's": the ratio of our peak to the lowest peak of its programs with the policy of that best program.
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

import meshpar as mp
from meshpar._src.hardware.topology import parse_topology
from meshpar._src.passes.collective_matmul import MODES

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tables import Table

import llama
import mixtral


@dataclass(frozen=True)
class Row:
    """A model on a slice: MaxText's numbers, and the layout that shards it like MaxText.

    Attributes:
      peak, sent: MaxText's, in GB; None if it does not compile.
      limit: of our bytes, relative to MaxText's.
      remat: checkpoint policy, of ``llama.REMAT``.
      loss: of ``llama.Head``: in chunks of the vocabulary, or of the tokens where the layout shards the vocabulary.
      partitioned: whether bytes are read right after partitioning instead of from the final program.
      interleave: number of interleaved microbatches.
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
    limit: float | None
    remat: str = "full"
    loss: str = "vocab"
    partitioned: bool = False
    interleave: int = 1
    rotary: str = "halves"


# "cost": the lookup in the embedding is partitioned, instead of gathering the embedding.
FSDP = mp.Layout(llama.FSDP, resolve="cost")
EXPERTS = mp.Layout(mixtral.FSDP_ALL_EXPERT, resolve="cost")
SEQUENCE = llama.FSDP_TENSOR_SEQUENCE
SLICES = mp.Layout("batch: slice+data; embed: data", resolve="cost")
SPLIT = ("full", "tokens")  # the vocabulary is sharded
SAVED = ("keep_collectives", "tokens")
MATMULS = ("minimal_with_context", "tokens")  # where the results of collectives do not fit
MEMORY_FRACTION = 0.9
"""Fraction of a chip's memory that the plan of "best that fits" may need."""
ROWS = (
    Row("1", "llama3_8b", "v5p:4x4x8", "data=128", FSDP, 256, 2048, 4.375, 58.595, 0.8),
    Row("2", "llama3_8b", "v5p:4x4x8", "data=16, model=8", SEQUENCE, 256, 2048, 4.473, 89.276, 1.0, *SPLIT),
    Row("3", "llama3_8b", "v5e:16x16", "data=256", FSDP, 512, 2048, 4.684, 59.902, 0.8),
    Row("4, 4a", "llama3_8b", "v5e:16x16", "data=32, model=8", SEQUENCE, 512, 2048, 4.203, 90.311, 1.0, *SPLIT),
    Row("5", "llama3_70b", "v5p:4x4x8", "data=128", FSDP, 128, 4096, 19.648, 549.725, 0.8),
    Row("6", "llama3_70b", "v5p:4x4x8", "data=16, model=8", SEQUENCE, 128, 4096, 20.592, 465.219, 1.0, *SPLIT),
    Row("7", "mixtral_8x7b", "v5p:4x4x8", "data=16, model=8", EXPERTS, 128, 2048, 9.625, 58.536, None),
    Row("8, 8a", "mixtral_8x7b", "v5e:16x16", "data=32, model=8", EXPERTS, 256, 2048, None, None, None),
    Row("9", "llama3_8b", "v6e:16x16", "data=256", FSDP, 512, 2048, 3.771, 58.828, 0.8),
    Row("10", "llama3_8b", "2x v5p:4x4x8", "slice=2, data=128", SLICES, 512, 2048, 6.094, 71.969, 0.8, partitioned=True),
    Row("2, saved", "llama3_8b", "v5p:4x4x8", "data=16, model=8", SEQUENCE, 256, 2048, None, 89.276, 0.8, *SAVED),
    Row("4a, saved", "llama3_8b", "v5e:16x16", "data=32, model=8", SEQUENCE, 512, 2048, None, 90.311, 0.8, *MATMULS),
    Row("6, saved", "llama3_70b", "v5p:4x4x8", "data=16, model=8", SEQUENCE, 128, 4096, None, 465.219, 0.8, *MATMULS),
)  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """Step time, bytes and memory of a compiled program of MaxText's.

    Attributes:
      options: the variant of its compiler options.
      compute, exposed: seconds of a step; None if the schedule was not read.
      sent, peak: GB; None if unknown.
      remat: its ``remat_policy``.
    """

    options: str
    compute: float | None
    exposed: float | None
    sent: float | None
    peak: float | None
    remat: str = "full"

    @property
    def step(self) -> float | None:
        """Seconds of a step."""
        return None if self.compute is None or self.exposed is None else self.compute + self.exposed

    def fits(self, capacity: float) -> bool:
        """Whether it compiles and its peak is at most ``capacity`` bytes."""
        return self.peak is not None and self.peak * 1e9 <= capacity


ASYNC = "tuned: asynchronous all-gathers"
"""xla_tpu_enable_async_collective_fusion, …_fuse_all_gather, …_multiple_steps, xla_tpu_overlap_compute_collective_tc,
xla_enable_async_all_gather."""
OFFLOAD = "tuned: SparseCore reductions"
"""The options of :data:`ASYNC`, and xla_tpu_enable_sparse_core_collective_offload_reduce_scatter, …_offload_all_reduce,
xla_tpu_enable_sparse_core_reduce_scatter_v2, xla_tpu_use_tc_device_shape_on_sc."""
WINDOWS = "tuned: no windowed einsums"
"""xla_jf_spmd_threshold_for_windowed_einsum_mib above the size of every array."""
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
        Schedule("default; tuned is the same program", 1.703, 0.234, 59.9, 4.68),
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
"""MaxText e591f30 (``train_compile``), jax 0.10.2, libtpu 0.0.42.1, read on 2026-11-22 and 2026-11-23. Arguments:
``model_name=``, ``compile_topology=v5p-256``, ``v5e-256`` or ``v6e-256``, ``per_device_batch_size=2 max_target_length=2048``
(70B: 1, 4096), on rows 2, 4a and 6 ``ici_fsdp_parallelism=16 ici_tensor_parallelism=8`` (4a: 32, 8 and
``allow_split_physical_axes=true``), ``remat_policy=`` as given, ``compile_xla_flags=`` with the flags above. Differences from our
step: its loss computes all logits at once in float32 with one-hot targets, ours is chunked; its batch has segments and positions,
which mask the attention; its learning
rate is a schedule; it returns norms of weights and gradients. Of other programs only memory and bytes are known (:data:`ROWS`)."""


def baselines(row: Row) -> tuple[Schedule, ...]:
    """MaxText's programs to compare a row with: at full remat its programs at full remat, otherwise all."""
    number = row.name.split(",")[0].rstrip("a")
    known = SCHEDULES.get(number) or (
        Schedule("the variant that sends the fewest bytes", None, None, row.sent, row.peak),
    )
    return tuple(s for s in known if row.remat != "full" or s.remat == "full")


def best_of(theirs: Sequence[Schedule], capacity: float) -> Schedule | None:
    """The program with the shortest step among those that fit ``capacity`` bytes; None if no schedule was read."""
    return min((s for s in theirs if s.step and s.fits(capacity)), key=lambda s: s.step or 0.0, default=None)


def schedules(rows: list[Row], effort: Any, overlap: Any) -> None:
    """Print a table with the programs of each row: MaxText's, then ours."""
    heads = (
        "row",
        "program",
        "step, s",
        "compute, s",
        "exposed, s",
        "to MaxText's best",
        "sent, GB",
        "peak, GB",
        "to MaxText's",
    )
    table = Table(*heads, title=f"{effort} effort, jax {jax.__version__}")

    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    for row in rows:
        capacity = parse_topology(row.topology).chip.per_device().hbm
        row = with_faster_rotary(row, overlap)
        fitting = best_that_fits(row, MEMORY_FRACTION * capacity, overlap)
        best = (
            f"{fitting.remat}, {fitting.interleave} microbatches interleaved"
            if fitting.interleave > 1
            else fitting.remat
        )
        rotary = "" if row.rotary == "halves" else f"; RoPE as a {row.rotary}"
        ours = {f"meshpar{rotary}": row, f"meshpar, best that fits: {best}{rotary}": fitting}
        theirs = baselines(fitting)
        for s in theirs:
            program = f"MaxText, {s.options}" + ("" if s.remat == "full" else f"; {s.remat}")
            fits = "; does not compile" if s.peak is None else "" if s.fits(capacity) else "; does not fit"
            table.add_row(row.name, program + fits, number(s.step), number(s.compute), number(s.exposed), "",
                 number(s.sent, 1), number(s.peak, 2))  # fmt: skip
        for name, own in ours.items():
            try:
                c = compiled(own, effort, overlap)
            except mp.errors.MeshparError as e:  # a failed compilation is a row
                table.add_row(row.name, f"{name}: {str(e).splitlines()[0][:60]}")
                continue
            final = c.exposed
            assert final is not None
            best = best_of(baselines(own), capacity)
            remat = best.remat if best else "full"
            peak = min((s.peak for s in theirs if s.remat == remat and s.peak is not None), default=None)
            table.add_row(
                row.name, name, number(final.schedule), number(final.compute), number(final.seconds),
                "" if best is None or not best.step else f"{final.schedule / best.step:.2f}", number(c.bytes_sent / 1e9, 1),
                number(c.memory.peak / 1e9, 2), "" if peak is None else f"{c.memory.peak / 1e9 / peak:.2f}",
            )  # fmt: skip


def numbered(text: str | None) -> list[Row]:
    """The rows of the numbers in ``"1-3"`` or ``"1,4"``; None means 1 to 10."""
    wanted: set[int] = set()
    for part in (text or "1-10").split(","):
        first, _, last = part.partition("-")
        wanted |= set(range(int(first), int(last or first) + 1))
    return [r for r in ROWS if r.remat == "full" and int(r.name.split(",")[0]) in wanted]


def arguments(row: Row, overlap: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(step, its arguments, keyword arguments of mp.plan and mp.compile) of a row."""
    module = mixtral if row.model.startswith("mixtral") else llama
    how = {"remat": row.remat, "loss": row.loss, "interleave": row.interleave, "rotary": row.rotary}
    step, args, dims = getattr(module, row.model)(row.batch, row.seq, **how)
    mesh = mp.mesh(row.mesh, topology=row.topology)
    how = {"lowering": "shard_map", "overlap": overlap, "donate_argnums": 0}
    return step, args, {"mesh": mesh, "layout": row.layout, "dims": dims, **how}


def best_that_fits(row: Row, memory: float, overlap: Any) -> Row:
    """The row with the policy and number of interleaved microbatches whose plan is fastest among those that need at most ``memory``
    bytes; the row unchanged if none does."""
    fitting = []
    for remat, interleave in itertools.product(llama.REMAT, (1,) if row.model.startswith("mixtral") else (1, 2, 4)):
        each = replace(row, remat=remat, interleave=interleave)
        step, args, how = arguments(each, overlap)
        plan = mp.plan(step, *args, **how)
        if plan.memory.peak <= memory:
            fitting.append((plan.seconds or math.inf, interleave, remat, each))
    return min(fitting, key=lambda each: each[:3])[3] if fitting else row


def with_faster_rotary(row: Row, overlap: Any) -> Row:
    """The row with the form of rotary embeddings whose plan is faster."""

    def seconds(each: Row) -> float:
        step, args, how = arguments(each, overlap)
        return mp.plan(step, *args, **how).seconds or math.inf

    return min((replace(row, rotary=rotary) for rotary in ("halves", "matmul")), key=seconds)


def compiled(row: Row, effort: Any, overlap: Any) -> mp.types.Compiled:
    step, args, how = arguments(row, overlap)
    return mp.compile(step, *args, **how, effort=effort)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help='only this row, "2" or "2, saved"; may be repeated')
    parser.add_argument("--effort", default="full", choices=("full", "fast"))
    parser.add_argument("--overlap", choices=MODES, help="how collectives overlap with matmuls (auto)")
    parser.add_argument("--schedule", action="store_true", help="step times by the final schedule")
    parser.add_argument("--rows", help='with --schedule: "1-3", "1,4" (1-10)')
    args = parser.parse_args()
    if args.schedule:
        schedules(numbered(args.rows), args.effort, args.overlap)
        return
    heads = (
        "row",
        "model",
        "slice",
        "mesh",
        "peak, GB",
        "MaxText's",
        "ratio",
        "sent, GB",
        "MaxText's",
        "ratio",
        "limit",
    )
    table = Table(*heads, title=f"{args.effort} effort, jax {jax.__version__}")
    for row in ROWS:
        names = {row.name} if row.remat != "full" else {row.name, *row.name.split(", ")}
        if args.row and not set(args.row) & names:
            continue
        about = [row.name, row.model, row.topology, row.mesh]
        try:
            c = compiled(row, args.effort, args.overlap)
        except mp.errors.MeshparError as e:  # a failed compilation is a row
            cells = [*about, str(e).splitlines()[0][:40]]
        else:
            peak, sent = c.memory.peak / 1e9, c.bytes_sent / 1e9
            if row.partitioned:
                sent = sum(x.total_bytes for x in c.collectives) / 1e9
            cells = [
                *about,
                f"{peak:.2f}",
                f"{row.peak or ('' if row.sent else 'does not compile')}",
                f"{peak / row.peak:.2f}" if row.peak else "",
            ]
            cells += [f"{sent:.1f}", f"{row.sent or 'does not compile'}", f"{sent / row.sent:.2f}" if row.sent else ""]
            cells += [f"≤ {row.limit}" if row.limit else ""]
        table.add_row(*cells)


if __name__ == "__main__":
    main()

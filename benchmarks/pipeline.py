"""Pipelines of Llama of examples/, compiled for TPU pods, compared with MaxText's pipelines, with idle stages and with no stages.

    pip install -e . "jax[tpu]"
    python benchmarks/pipeline.py [--only 8b] [--effort full] [--results rows.jsonl]
    python benchmarks/pipeline.py --size            # number of equations, for several numbers of microbatches

Every program trains on the same tokens with full remat: float32 weights and AdamW moments, bfloat16 compute, donated state.
MaxText's programs are from its ``train_compile`` (e591f30; jax 0.10.2, libtpu 0.0.42.1), read by the same functions. `step`
is computation by libtpu's cycles plus exposed communication (:mod:`verify.exposed`). Splash attention has no cycles in
either. Nothing is run. Of MaxText's programs on a pod the table has the fastest pipeline, and the fastest without stages.

Columns. `to MaxText`: our step time over its fastest pipeline's. `planned`: step time, bytes and peak memory of the plan.
`bodies`: layers that a device computes forward in a step. `plan, s`: seconds of ``mp.plan``. Bytes are decimal, of a device.
`cycles` of a pipeline compare with "idle": the same step in which no rule names `stage`, so that each stage computes all
layers.

With ``--results``, rows that a file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import meshpar as mp
from meshpar._src.verify import hlo

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from tables import Table

import llama

TENSOR = "batch: data; heads, kv_heads?, mlp: model"
STAGES = f"{TENSOR}; vocab: stage+model; layers: stage; seq: model"


@dataclass(frozen=True)
class Program:
    """A step of ours on a pod.

    Attributes:
      name: of the row.
      pod: of :data:`PODS`.
      mesh, layout: as text.
      changes: of the sizes and options in ``llama.Config``.
      options: of ``mp.plan`` and ``mp.compile``.
    """

    name: str
    pod: str
    mesh: str
    layout: str
    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def made(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(step, its arguments, keyword arguments of mp.plan and mp.compile)."""
        pod = PODS[self.pod]
        step, args, dims = getattr(llama, pod.model)(
            pod.batch, pod.seq, **{"loss": "vocab", "loss_chunks": 1, **self.changes}
        )
        how = {"layout": self.layout, "dims": dims, "donate_argnums": 0, "lowering": "shard_map", **self.options}
        return step, args, {"mesh": mp.mesh(self.mesh, topology=pod.topology), **how}


@dataclass(frozen=True)
class Pod:
    """A pod, a model and a batch.

    Attributes:
      theirs: MaxText's programs, as (name, seconds of a step, GB sent, peak GB, layer bodies); the first one is a pipeline. There
        are none for the model with few layers, which compares schedules.
    """

    topology: str
    model: str
    batch: int
    seq: int
    theirs: tuple[tuple[str, float, float, float, int], ...]


PODS = {
    "8b": Pod(
        "v5p:4x4x4", "llama3_8b", 64, 2048,
        (("MaxText, stages, ag_once, tuned", 0.546, 38.5, 6.07, 152), ("MaxText, no stages, fsdp64, tuned", 0.354, 58.1, 4.91, 32)),
    ),
    "8b, 8 layers": Pod("v5p:4x4x4", "llama3_8b", 64, 2048, ()),
    "70b": Pod(
        "v5p:8x8x8", "llama3_70b", 512, 4096,
        (("MaxText, stages, ag_once, tuned", 9.979, 749.1, 15.03, 710),
         ("MaxText, no stages, fsdp64 × tensor8, tuned", 8.562, 468.1, 13.03, 80)),
    ),
    "405b": Pod(
        "2x v5p:8x8x8", "llama31_405b", 1024, 4096,
        (("MaxText, stages over DCN", 62.9, 6084.0, 67.3, 1071), ("MaxText, no stages, data over DCN", 43.4, 2055.0, 39.1, 126)),
    ),
}  # fmt: skip
M16, M64 = {"microbatches": 16}, {"microbatches": 64}
EIGHT_LAYERS = {**M16, "layers": 8}
CHUNKS = {"loss": "tokens", "loss_chunks": 8}
EIGHT, SEVENTY, FOUR = "stage=4, data=4, model=4", "stage=8, data=8, model=8", "stage=2, data=64, model=8"
FULL = f"{TENSOR}; vocab: model; seq: model"
TWO, FOUR_ROUNDS = (STAGES.replace("layers: stage", f"layers: stage*{rounds}") for rounds in (2, 4))
ONCE, OVERLAP, ZERO = {"gather": "step"}, {"schedule": "1f1b-overlap"}, {"schedule": "zb"}
PROGRAMS = (
    Program("stages, ZeRO-1", "8b", EIGHT, f"{STAGES}; opt.embed: data", M16),
    Program("stages, FSDP, gathered once", "8b", EIGHT, f"{STAGES}; embed: data", M16, ONCE),
    Program("stages, FSDP, gathered once, 1f1b-overlap", "8b", EIGHT, f"{STAGES}; embed: data", M16, {**ONCE, **OVERLAP}),
    Program("two rounds, FSDP, gathered once, 1f1b-overlap", "8b", EIGHT, f"{TWO}; embed: data", M16, {**ONCE, **OVERLAP}),
    Program("four rounds, FSDP, gathered once, 1f1b-overlap", "8b", EIGHT, f"{FOUR_ROUNDS}; embed: data", M16, {**ONCE, **OVERLAP}),
    Program("idle, ZeRO-1", "8b", EIGHT, f"{FULL}; opt.embed: data", M16),
    Program("no stages, FSDP and tensor", "8b", "data=16, model=4", llama.FSDP_TENSOR_SEQUENCE, CHUNKS),
    Program("stages, FSDP, gathered once", "8b, 8 layers", EIGHT, f"{STAGES}; embed: data", EIGHT_LAYERS, ONCE),
    Program("two rounds, FSDP, gathered once", "8b, 8 layers", EIGHT, f"{TWO}; embed: data", EIGHT_LAYERS, ONCE),
    Program("two rounds, FSDP, gathered once, 1f1b-overlap", "8b, 8 layers", EIGHT, f"{TWO}; embed: data", EIGHT_LAYERS,
            {**ONCE, **OVERLAP}),
    Program("stages, FSDP, gathered once, zb", "8b, 8 layers", EIGHT, f"{STAGES}; embed: data", EIGHT_LAYERS, {**ONCE, **ZERO}),
    Program("stages, ZeRO-1", "70b", SEVENTY, f"{STAGES}; opt.embed: data", M64),
    Program("stages, FSDP, gathered once, no rings", "70b", SEVENTY, f"{STAGES}; embed: data", M64, {**ONCE, "overlap": "xla"}),
    Program("stages, FSDP, gathered once, no rings, 1f1b-overlap", "70b", SEVENTY, f"{STAGES}; embed: data", M64,
            {**ONCE, **OVERLAP, "overlap": "xla"}),
    Program("no stages, FSDP and tensor", "70b", "data=64, model=8", llama.FSDP_TENSOR_SEQUENCE, CHUNKS),
    Program("stages over DCN, FSDP", "405b", FOUR, f"{FULL}; layers: stage; embed: data", M16),
    Program("no stages, data over DCN, FSDP and tensor", "405b", "slice=2, data=64, model=8",
            f"{FULL.replace('batch: data', 'batch: slice+data')}; embed: data", CHUNKS),
)  # fmt: skip


def measured(program: Program, effort: Any) -> dict[str, Any]:
    """One row: numbers of the plan and of the compiled program, or an error."""
    step, args, how = program.made()
    row: dict[str, Any] = {"name": program.name, "pod": program.pod, "effort": effort}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.JoinWarning)
        mp.plan(step, *args, **how)
        begin = time.perf_counter()
        plan = mp.plan(step, *args, **how)
        row |= {
            "plan_seconds": time.perf_counter() - begin,
            "planned_step": plan.seconds,
            "planned_sent": plan.bytes_sent,
        }
        row |= {"planned_peak": plan.memory.peak}
        try:
            c = mp.compile(step, *args, **how, effort=effort)
        except mp.errors.MeshparError as e:  # a failed compilation is a row
            return {**row, "error": str(e).splitlines()[0]}
    final = c.exposed
    assert final is not None
    row |= {"step": final.schedule, "compute": final.compute, "exposed": final.seconds, "cycles": c.cycles}
    row["bodies"] = bodies(c.as_text())
    return {**row, "sent": c.bytes_sent, "peak": c.memory.peak, "compile_seconds": c.compile_seconds}


def bodies(text: str) -> int:
    """Layers that a device computes forward, without those that the backward pass recomputes: calls of attention kernels in a final
    program, times the trip counts of their loops."""

    def calls(kernel: str) -> int:
        runs = hlo.walk(hlo.parse(text), lambda _: 0.0)
        return sum(r.count or 1 for r in runs if r.instruction.opcode == "custom-call" and kernel in r.instruction.name)

    return calls("splash_mha_fwd") - calls("splash_mha_dkv")


HEADS = ("pod", "program", "step, s", "planned", "compute, s", "exposed, s", "to MaxText", "sent, GB", "planned", "peak, GB",
         "planned", "bodies", "cycles", "plan, s")  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row of ours."""
    pod = PODS[row["pod"]]
    head = [row["pod"], f"meshpar, {row['name']}"]
    if "error" in row:
        return [*head, row["error"][:80], f"{row['planned_step']:.3f}", *[""] * 4, f"{row['planned_sent'] / 1e9:.1f}", "",
                f"{row['planned_peak'] / 1e9:.2f}"]  # fmt: skip
    return [
        *head, f"{row['step']:.3f}", f"{row['planned_step']:.3f}", f"{row['compute']:.3f}", f"{row['exposed']:.3f}",
        f"{row['step'] / pod.theirs[0][1]:.2f}" if pod.theirs else "",
        f"{row['sent'] / 1e9:.1f}", f"{row['planned_sent'] / 1e9:.1f}",
        f"{row['peak'] / 1e9:.2f}", f"{row['planned_peak'] / 1e9:.2f}", str(row["bodies"]), f"{row['cycles']:.3g}",
        f"{row['plan_seconds']:.2f}",
    ]  # fmt: skip


def sizes() -> None:
    """Print the number of equations and the time of a plan, for several numbers of microbatches."""
    table = Table("microbatches", "equations", "trace and plan, s")
    for m in (8, 16, 64):
        step, args, how = Program("", "70b", "stage=8, data=8, model=8", STAGES, {"microbatches": m}).made()
        begin = time.perf_counter()
        plan = mp.plan(step, *args, **how)
        table.add_row(str(m), str(sum(1 for _ in plan.program.root.walk())), f"{time.perf_counter() - begin:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", help="programs whose pod and name contain this text; may be repeated"
    )
    parser.add_argument("--effort", default="full", choices=("fast", "full"), help="of the compiler (%(default)s)")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to read rows from and append rows to")
    parser.add_argument("--size", action="store_true", help="compile nothing; print the number of equations")
    args = parser.parse_args()
    if args.size:
        sizes()
        return
    known = (
        [json.loads(x) for x in args.results.read_text().splitlines()] if args.results and args.results.exists() else []
    )
    table = Table(*HEADS, title=f"{args.effort} effort, jax {jax.__version__}")
    for name, pod in PODS.items():
        chosen = [p for p in PROGRAMS if p.pod == name]
        chosen = [p for p in chosen if not args.only or any(text in f"{p.pod} {p.name}" for text in args.only)]
        for their, seconds, sent, peak, count in pod.theirs if chosen else ():
            ratio = f"{seconds / pod.theirs[0][1]:.2f}"
            table.add_row(
                name, their, f"{seconds:.3f}", "", "", "", ratio, f"{sent:.1f}", "", f"{peak:.2f}", "", str(count)
            )
        for program in chosen:
            key = (program.pod, program.name, args.effort)
            row = next((r for r in known if (r["pod"], r["name"], r["effort"]) == key), None)
            if row is None:
                row = measured(program, args.effort)
                if args.results:
                    with args.results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            table.add_row(*cells(row))


if __name__ == "__main__":
    main()

"""What plans say next to what the TPU compiler makes of them: collectives, peak memory, time. No TPU is needed, libtpu is.

    pip install -e . "jax[tpu]"
    python benchmarks/agreement.py [--only v5e] [--json agreement.json]     # collectives and time: fast effort, shard_map
    python benchmarks/agreement.py --effort full                            # memory: as the compiler does it by default
    python benchmarks/agreement.py --lowering jit                           # where XLA's partitioner sends something else
    python benchmarks/agreement.py --golden                                 # plans only, written for tests/plan/test_golden.py

Models are those of examples/, at their real sizes. A row is printed when it is there; what has been compiled is kept on disk, so
that a run that was stopped goes on where it was. ``--json`` adds the rows to a file, and sums up all that the file has.

- Collectives are compared right after partitioning: kinds, axes, counts and bytes. Of collectives that send the same XLA keeps one,
  and of those whose result is not needed none; the plan has each, and the table how many went ("merged"). The exchange of tokens
  in a mixture of experts has further rounds for loads beyond its buffers, in a loop of unknown length; the plan says so in words.
- Memory: the plan's peak next to the compiler's.
- Time: the plan's kernels, without communication, next to the compiler's own estimate of their cycles, loops counted; its estimates
  are of no use in absolute terms (a product takes five times as many cycles at fast effort), so ranks are compared.
"""

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar.hardware.topology import parse_topology
from plan_vs_compiler import Difference, by_kind, differences, figures, kernel_seconds, rank_correlation

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import deepseek
import llama
import mixtral
import resnet

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "plan" / "golden"
MODULES = {"llama": llama, "mixtral": mixtral, "deepseek": deepseek, "resnet": resnet}


@dataclass(frozen=True)
class Triple:
    """A model under a layout on a slice.

    Attributes:
      model: a target of examples/: ``llama3_8b``.
      layout: a name in the LAYOUTS of its module.
      changes: arguments of the target: ``{"batch": 256, "seq": 2048}``.
      resolve: of the layout.
      full: whether it is one of those whose memory is compared by default; jit: whether it is lowered to ``jit`` by default.
    """

    model: str
    layout: str
    topology: str
    mesh: str
    changes: dict[str, Any] = field(default_factory=dict)
    resolve: Any = "order"
    full: bool = False
    jit: bool = False

    @property
    def name(self) -> str:
        cost = " by cost" if self.resolve == "cost" else ""
        return f"{self.model} {self.layout}{cost} {self.topology}"

    @property
    def chip(self) -> str:
        return parse_topology(self.topology)[1]

    def made(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(the step, its arguments, how they are planned and compiled)."""
        module = next(m for prefix, m in MODULES.items() if self.model.startswith(prefix))
        step, args, dims = getattr(module, self.model)(**self.changes)
        layout = mp.Layout(module.LAYOUTS[self.layout], resolve=self.resolve)
        how = {"mesh": self.mesh, "topology": self.topology, "layout": layout, "dims": dims, "donate_argnums": 0}
        return step, args, how

    def plan(self) -> mp.Plan:
        step, args, how = self.made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.JoinWarning)
            return mp.plan(step, *args, **how)


def on(topology: str, devices: int, *rows: tuple[Any, ...]) -> list[Triple]:
    """Triples on one slice; -8 in place of a mesh stands for ``data=…, model=8``."""
    out = []
    for model, layout, split, changes, *marks in rows:
        mesh = f"data={devices}" if split == 1 else f"data={devices // split}, model={split}"
        resolve = "cost" if "cost" in marks else "order"
        out.append(Triple(model, layout, topology, mesh, changes, resolve, "full" in marks, "jit" in marks))
    return out


SEQUENCE = "fsdp+tensor+sequence"


def sized(batch: int, seq: int = 2048) -> dict[str, int]:
    return {"batch": batch, "seq": seq}


TRIPLES = [
    *on("v5e:4x4", 16,
        ("resnet50", "data", 1, {"batch": 1024}, "full", "jit"), ("resnet50", "fsdp", 1, {"batch": 1024}, "jit"),
        ("resnet50", "features", 4, {"batch": 1024}), ("resnet50", "data+height", 4, {"batch": 1024})),
    *on("v5e:16x16", 256,
        ("llama3_8b", "fsdp", 1, sized(512), "cost", "full", "jit"), ("llama3_8b", "fsdp+tensor", 8, sized(512), "full", "jit"),
        ("llama3_8b", SEQUENCE, 8, sized(512), "full", "jit"), ("llama3_70b", SEQUENCE, 8, sized(256)),
        ("mixtral_8x7b", "fsdp", 1, sized(256)), ("mixtral_8x7b", "fsdp+expert", 8, sized(256), "full"),
        ("deepseek_16b", "fsdp", 1, sized(256)), ("deepseek_16b", "fsdp+expert", 8, sized(256), "full")),
    *on("v5p:2x2x4", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "data+height", 4, {"batch": 1024})),
    *on("v5p:4x4x8", 128,
        ("llama3_8b", "fsdp", 1, sized(256), "cost", "full", "jit"), ("llama3_8b", "fsdp+tensor", 8, sized(256)),
        ("llama3_8b", SEQUENCE, 8, sized(256), "full", "jit"), ("llama3_8b", "zero1", 1, sized(256), "full"),
        ("llama3_70b", "fsdp", 1, sized(128, 4096), "cost", "full"), ("llama3_70b", SEQUENCE, 8, sized(128, 4096), "full"),
        ("mixtral_8x7b", "fsdp", 1, sized(128)), ("mixtral_8x7b", "fsdp+expert", 8, sized(128), "full"),
        ("deepseek_16b", "fsdp+expert", 8, sized(128))),
    *on("v5p:8x8x8", 512, ("deepseek_671b", "fsdp+expert", 32, sized(512, 4096))),
    *on("v6e:4x4", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "features", 4, {"batch": 1024})),
    *on("v6e:16x16", 256,
        ("llama3_8b", "fsdp", 1, sized(512), "cost", "full"), ("llama3_8b", "fsdp+tensor", 8, sized(512)),
        ("llama3_8b", SEQUENCE, 8, sized(512), "full"), ("llama3_70b", SEQUENCE, 8, sized(256)),
        ("mixtral_8x7b", "fsdp", 1, sized(256)), ("mixtral_8x7b", "fsdp+expert", 8, sized(256)),
        ("deepseek_16b", "fsdp", 1, sized(256)), ("deepseek_16b", "fsdp+expert", 8, sized(256))),
    *on("tpu7x:2x2x2", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "fsdp", 1, {"batch": 1024})),
    *on("tpu7x:4x4x4", 128,
        ("llama3_8b", "fsdp", 1, sized(256), "full"), ("llama3_8b", "fsdp+tensor", 8, sized(256)),
        ("llama3_8b", SEQUENCE, 8, sized(256), "full"), ("llama3_70b", "fsdp", 1, sized(128, 4096)),
        ("llama3_70b", SEQUENCE, 8, sized(128, 4096)), ("mixtral_8x7b", "fsdp", 1, sized(128)),
        ("mixtral_8x7b", "fsdp+expert", 8, sized(128)), ("deepseek_16b", "fsdp", 1, sized(128)),
        ("deepseek_16b", "fsdp+expert", 8, sized(128))),
]  # fmt: skip


# -- golden plans


def summary(plan: mp.Plan) -> dict[str, Any]:
    """What a golden plan keeps: collectives by kind, axes, bytes and count (with how many are alike), memory, seconds."""
    alike = Counter((c.op, "+".join(c.axes), c.bytes, c.count, c.algorithm) for c in plan.collectives)
    assert plan.time is not None
    return {
        "collectives": sorted([*key, n] for key, n in alike.items()),
        "held": plan.held(),
        "memory": {"peak": plan.memory.peak, **plan.memory.by_kind},
        "seconds": {"step": plan.seconds, "kernels": kernel_seconds(plan), "communication": plan.time.communication},
    }


def write_golden(chosen: list[Triple], console: Console) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for t in chosen:
        kept = summary(t.plan())
        sent = ",\n".join(f"    {json.dumps(c)}" for c in kept.pop("collectives"))
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items()]
        path = golden_path(t)
        path.write_text("{\n" + ",\n".join(lines) + ',\n  "collectives": [\n' + sent + "\n  ]\n}\n")
        console.print(f"{path.relative_to(ROOT)}")


def golden_path(t: Triple) -> Path:
    return GOLDEN / f"{t.name.replace(' ', '_').replace(':', '-').replace('+', '-')}.json"


# -- plan beside compiler


@dataclass
class Row:
    """One comparison, as ``--json`` keeps it; bytes and seconds, of one device and one step."""

    name: str
    chip: str
    lowering: str
    effort: str
    planned: int = 0
    compiled: int = 0
    planned_bytes: float = 0.0
    compiled_bytes: float = 0.0
    merged: int = 0
    further: int = 0
    differences: list[str] = field(default_factory=list)
    differ_by_kind: dict[str, Any] = field(default_factory=dict)
    planned_peak: float = 0.0
    compiled_peak: float = 0.0
    planned_seconds: float = 0.0
    cycles: float = 0.0
    compile_seconds: float = 0.0
    error: str = ""

    @property
    def memory_error(self) -> float:
        return self.planned_peak / self.compiled_peak - 1


def compared(t: Triple, lowering: Any, effort: Any) -> Row:
    row = Row(t.name, t.chip, lowering, effort)
    step, args, how = t.made()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.JoinWarning)
            c = mp.compile(step, *args, lowering=lowering, effort=effort, **how)
    except mp.MeshparError as e:  # the table goes on
        row.error = str(e).splitlines()[0]
        return row
    assert c.plan is not None
    every = differences(c.plan, c.collectives)
    found = [d for d in every if not (d.merged or d.further)]
    kept = figures(c)
    row.planned = sum(x.count or 1 for x in c.plan.collectives)
    row.compiled = sum(x.count or 1 for x in c.collectives)
    row.planned_bytes, row.compiled_bytes = c.plan.bytes_sent, sum(x.total_bytes for x in c.collectives)
    row.merged = sum(d.planned - d.compiled for d in every if d.merged)
    row.further = sum(d.compiled for d in every if d.further)
    row.differences, row.differ_by_kind = list(map(str, found)), kinds(found)
    row.planned_peak, row.compiled_peak = kept.planned_peak, kept.compiled_peak
    row.planned_seconds, row.cycles = kept.planned_seconds or math.nan, kept.cycles or math.nan
    row.compile_seconds = c.compile_seconds
    return row


def kinds(found: list[Difference]) -> dict[str, Any]:
    return {k: list(v) for k, v in by_kind(found).items()}


HEADS = (
    "triple",
    "sent: plan",
    "compiler",
    "differ",
    "peak: plan",
    "compiler",
    "error",
    "kernels",
    "cycles",
    "compile",
)


def same(row: Row) -> str:
    words = [f"{len(row.differences)} differ" if row.differences else "equal"]
    words += [f"{row.merged} merged"] * (row.merged > 0) + [f"{row.further} in further rounds"] * (row.further > 0)
    return ", ".join(words)


def cells(row: Row) -> list[str]:
    if row.error:
        return [row.name, row.error[:60]]
    return [
        row.name, f"{row.planned} of {row.planned_bytes / 1e9:.2f} GB", f"{row.compiled} of {row.compiled_bytes / 1e9:.2f} GB",
        same(row), f"{row.planned_peak / 1e9:.2f} GB",
        f"{row.compiled_peak / 1e9:.2f} GB", f"{100 * row.memory_error:+.1f} %", f"{1e3 * row.planned_seconds:.0f} ms",
        f"{row.cycles / 1e6:.0f} M", f"{row.compile_seconds:.0f} s",
    ]  # fmt: skip


def sum_up(rows: list[Row], console: Console) -> None:
    for lowering, effort in dict.fromkeys((r.lowering, r.effort) for r in rows):
        part = [r for r in rows if (r.lowering, r.effort) == (lowering, effort) and not r.error]
        failed = sum(r.error != "" for r in rows if (r.lowering, r.effort) == (lowering, effort))
        if not part:
            continue
        console.print(f"\n[bold]{lowering}, {effort} effort[/]: {len(part)} compiled, {failed} refused")
        console.print(
            f"collectives: {sum(not r.differences for r in part)} of {len(part)} equal "
            f"(in {sum(r.merged > 0 for r in part)} of them XLA merges some)"
        )
        errors = [abs(r.memory_error) for r in part]
        said = "" if effort == "full" else " (to be judged at full effort)"
        console.print(
            f"memory{said}: median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} % "
            f"({max(part, key=lambda r: abs(r.memory_error)).name}); {sum(e <= 0.1 for e in errors)} within 10 %"
        )
        for chip in dict.fromkeys(r.chip for r in part):
            mine = [r for r in part if r.chip == chip]
            rank = rank_correlation([r.planned_seconds for r in mine], [r.cycles for r in mine])
            console.print(f"time on {chip}: Spearman {rank:.3f} of {len(mine)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="triples whose name has this in it; may be given again")
    parser.add_argument("--effort", default="fast", choices=("fast", "full"), help="full: the triples marked so")
    parser.add_argument(
        "--lowering", default="shard_map", choices=("shard_map", "jit"), help="jit: the triples marked so"
    )
    parser.add_argument("--all", action="store_true", help="whatever their marks")
    parser.add_argument("--json", type=Path, help="a file that the rows are added to")
    parser.add_argument(
        "--golden", action="store_true", help="compile nothing; write the plans that the tests compare with"
    )
    args = parser.parse_args()
    console = Console(width=180, highlight=False)
    chosen = [t for t in TRIPLES if not args.only or any(text in t.name for text in args.only)]
    if args.golden:
        write_golden(chosen, console)
        return
    if not args.all:
        chosen = [t for t in chosen if (t.full or args.effort == "fast") and (t.jit or args.lowering != "jit")]
    rows = {}
    if args.json and args.json.exists():
        rows = {(r["name"], r["lowering"], r["effort"]): Row(**r) for r in json.loads(args.json.read_text())}
    table = Table(*HEADS, title=f"{args.lowering}, {args.effort} effort; jax {jax.__version__}", box=None)
    for t in chosen:
        began = time.perf_counter()
        row = compared(t, args.lowering, args.effort)
        rows[row.name, row.lowering, row.effort] = row
        table.add_row(*cells(row))
        console.print(" | ".join(cells(row)), f"({time.perf_counter() - began:.0f} s)")
        for text in row.differences[:20]:
            console.print(f"    {text}")
        if args.json:
            args.json.write_text(json.dumps([vars(r) for r in rows.values()], indent=1))
    console.print(table)
    sum_up(list(rows.values()), console)


if __name__ == "__main__":
    main()

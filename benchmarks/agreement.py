"""Plans compared with the TPU compiler's programs: collectives, peak memory, step time. Needs libtpu, but no TPU.

    pip install -e . "jax[tpu]"
    python benchmarks/agreement.py [--only v5e]                             # whole steps, memory, collectives
    python benchmarks/agreement.py --standard --results steps.jsonl         # the standard set: about 45 CPU minutes
    python benchmarks/agreement.py --presets --results steps.jsonl --part 1/4       # the first quarter of all layouts of all models
    python benchmarks/agreement.py --results steps.jsonl --summary          # rows compiled so far by this version
    python benchmarks/agreement.py --effort fast                            # collectives only: about eight times faster
    python benchmarks/agreement.py --lowering jit                           # collectives of XLA's partitioner
    python benchmarks/agreement.py --golden                                 # write the plans of tests/plan/test_golden.py again
    python benchmarks/agreement.py --golden --only "zero1 v5p"              # and new ones

The models of examples/ at their real sizes. Rows are printed as they are compiled; compiled programs are cached on disk. With
``--results`` rows are appended to a file of JSON lines with a digest of meshpar's code: rows of this version are read from the
file instead of compiled, and the summary is of this version only.

- Whole steps: the plan's seconds and the compiler's final schedule at its default effort (:mod:`verify.exposed`: cycles of
  kernels, plus communication that no kernel overlaps; loops of unknown length, the further rounds of a token exchange, are left
  out of both). For pairs of layouts of one model, batch and slice whose schedules differ by over 3 %: whether plans and schedules
  order them alike.
- Collectives right after partitioning: kinds, axes, counts and bytes. XLA merges equal collectives and removes unused ones; the
  table counts them as "merged". The token exchange of a mixture of experts has further rounds for loads beyond its buffers, in a
  loop of unknown length.
- Memory: peaks of the plan and of the compiler.
"""

import argparse
import hashlib
import itertools
import json
import math
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from tables import Table

import meshpar as mp
from meshpar._src.hardware.topology import Places, chip_of, parse_topology
from meshpar._src.layout import scheme_name
from meshpar._src.verify.exposed import exposed
from plan_vs_compiler import Difference, by_kind, comparison, differences, kernel_seconds

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
      standard: whether it is of the standard set, which is compiled for every version; jit: whether it is lowered to ``jit`` by
        default.
    """

    model: str
    layout: str
    topology: str
    mesh: str
    changes: dict[str, Any] = field(default_factory=dict)
    resolve: Any = "order"
    standard: bool = False
    jit: bool = False

    @property
    def name(self) -> str:
        cost = " by cost" if self.resolve == "cost" else ""
        return f"{self.model} {self.layout}{cost} {self.topology}"

    @property
    def chip(self) -> str:
        return parse_topology(self.topology)[1]

    @property
    def module(self) -> Any:
        """The module of the model."""
        return next(m for prefix, m in MODULES.items() if self.model.startswith(prefix))

    @property
    def where(self) -> dict[str, Any]:
        """The mesh, slice and layout."""
        layouts = self.module.LAYOUTS
        text = layouts.get(self.layout) or layouts[scheme_name(self.layout)]
        layout = mp.Layout(text, resolve=self.resolve)
        return {"mesh": self.mesh, "topology": self.topology, "layout": layout}

    def made(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(the step, its arguments, how they are planned and compiled)."""
        step, args, dims = getattr(self.module, self.model)(**self.changes)
        return step, args, {**self.where, "dims": dims, "donate_argnums": 0}

    def plan(self) -> mp.Plan:
        step, args, how = self.made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.errors.JoinWarning)
            return mp.plan(step, *args, **how, lowering="shard_map")


def on(topology: str, devices: int, *rows: tuple[Any, ...]) -> list[Triple]:
    """Triples on one slice, from (model, layout, size of the model axis, changes, *marks)."""
    out = []
    for model, layout, split, changes, *marks in rows:
        mesh = f"data={devices}" if split == 1 else f"data={devices // split}, model={split}"
        resolve = "cost" if "cost" in marks else "order"
        out.append(Triple(model, layout, topology, mesh, changes, resolve, "standard" in marks, "jit" in marks))
    return out


SEQUENCE = "fsdp+tensor+sequence"


def sized(batch: int, seq: int = 2048) -> dict[str, int]:
    return {"batch": batch, "seq": seq}


TRIPLES = [
    *on("v5e:4x4", 16,
        ("resnet50", "data", 1, {"batch": 1024}, "jit", "standard"), ("resnet50", "fsdp", 1, {"batch": 1024}, "jit"),
        ("resnet50", "features", 4, {"batch": 1024}), ("resnet50", "data+height", 4, {"batch": 1024})),
    *on("v5e:16x16", 256,
        ("llama3_8b", "fsdp", 1, sized(512), "cost", "jit", "standard"),
        ("llama3_8b", "fsdp+tensor", 8, sized(512), "jit", "standard"),
        ("llama3_8b", SEQUENCE, 8, sized(512), "jit", "standard"), ("llama3_70b", SEQUENCE, 8, sized(256)),
        ("mixtral_8x7b", "fsdp", 1, sized(256), "standard"), ("mixtral_8x7b", "fsdp+expert", 8, sized(256), "standard"),
        ("deepseek_16b", "fsdp", 1, sized(256), "standard"), ("deepseek_16b", "fsdp+expert", 8, sized(256))),
    *on("v5p:2x2x4", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "data+height", 4, {"batch": 1024})),
    *on("v5p:4x4x8", 128,
        ("llama3_8b", "fsdp", 1, sized(256), "cost", "jit", "standard"), ("llama3_8b", "fsdp+tensor", 8, sized(256), "standard"),
        ("llama3_8b", SEQUENCE, 8, sized(256), "jit", "standard"), ("llama3_8b", "zero1", 1, sized(256), "standard"),
        ("llama3_70b", "fsdp", 1, sized(128, 4096), "cost"), ("llama3_70b", SEQUENCE, 8, sized(128, 4096)),
        ("mixtral_8x7b", "fsdp", 1, sized(128), "standard"), ("mixtral_8x7b", "fsdp+expert", 8, sized(128), "standard"),
        ("deepseek_16b", "fsdp+expert", 8, sized(128), "standard")),
    *on("v5p:8x8x8", 512, ("deepseek_671b", "fsdp+expert", 32, sized(512, 4096), "standard")),
    *on("v6e:4x4", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "features", 4, {"batch": 1024})),
    *on("v6e:16x16", 256,
        ("llama3_8b", "fsdp", 1, sized(512), "cost", "standard"), ("llama3_8b", "fsdp+tensor", 8, sized(512), "standard"),
        ("llama3_8b", SEQUENCE, 8, sized(512), "standard"), ("llama3_70b", SEQUENCE, 8, sized(256)),
        ("mixtral_8x7b", "fsdp", 1, sized(256)), ("mixtral_8x7b", "fsdp+expert", 8, sized(256), "standard"),
        ("deepseek_16b", "fsdp", 1, sized(256)), ("deepseek_16b", "fsdp+expert", 8, sized(256))),
    *on("tpu7x:2x2x2", 16, ("resnet50", "data", 1, {"batch": 1024}), ("resnet50", "fsdp", 1, {"batch": 1024})),
    *on("tpu7x:4x4x4", 128,
        ("llama3_8b", "fsdp", 1, sized(256), "standard"), ("llama3_8b", "fsdp+tensor", 8, sized(256), "standard"),
        ("llama3_8b", SEQUENCE, 8, sized(256), "standard"), ("llama3_70b", "fsdp", 1, sized(128, 4096)),
        ("llama3_70b", SEQUENCE, 8, sized(128, 4096)), ("mixtral_8x7b", "fsdp", 1, sized(128)),
        ("mixtral_8x7b", "fsdp+expert", 8, sized(128), "standard"), ("deepseek_16b", "fsdp", 1, sized(128)),
        ("deepseek_16b", "fsdp+expert", 8, sized(128))),
]  # fmt: skip


def presets() -> list[Triple]:
    """Every layout of every model on every slice that it is compared on, on the meshes of :data:`TRIPLES`."""
    out = list(TRIPLES)
    for t in TRIPLES:
        split = next(
            (u.mesh for u in TRIPLES if (u.model, u.topology) == (t.model, t.topology) and "model" in u.mesh), None
        )
        for name, rules in t.module.LAYOUTS.items():
            mesh = split if "model" in rules else f"data={parse_topology(t.topology).devices}"
            if "slice" in rules:
                continue  # for several slices
            known = any((u.model, u.layout, u.topology) == (t.model, name, t.topology) for u in out)
            if mesh is not None and not known:
                out.append(Triple(t.model, name, t.topology, mesh, t.changes))
    return out


# -- golden plans


def summary(plan: mp.Plan) -> dict[str, Any]:
    """The content of a golden plan: collectives by kind, axes, bytes and count (with the number of equal ones), memory, seconds."""
    alike = Counter((c.op, "+".join(c.axes), c.bytes, c.count, c.algorithm) for c in plan.collectives)
    assert plan.time is not None
    return {
        "collectives": sorted([*key, n] for key, n in alike.items()),
        "held": plan.argument_bytes(),
        "memory": {"peak": plan.memory.peak, **plan.memory.by_kind},
        "seconds": {"step": plan.seconds, "kernels": kernel_seconds(plan), "communication": plan.time.communication},
    }


def write_golden(chosen: list[Triple], console: Console) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for t in chosen:
        content = summary(t.plan())
        sent = ",\n".join(f"    {json.dumps(c)}" for c in content.pop("collectives"))
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content.items()]
        path = golden_path(t)
        path.write_text("{\n" + ",\n".join(lines) + ',\n  "collectives": [\n' + sent + "\n  ]\n}\n")
        console.print(f"{path.relative_to(ROOT)}")


def golden_path(t: Triple) -> Path:
    return GOLDEN / f"{t.name.replace(' ', '_').replace(':', '-').replace('+', '-')}.json"


# -- plan and compiler


@dataclass
class Row:
    """One comparison, a line of ``--results``; bytes and seconds are of one device and one step."""

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
    planned_kernels: float = 0.0
    planned_pallas: float = 0.0
    compiled_kernels: float = math.nan
    planned_step: float = 0.0
    compiled_step: float = math.nan
    compiled_exposed: dict[str, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    version: str = ""
    error: str = ""

    @property
    def memory_error(self) -> float:
        return self.planned_peak / self.compiled_peak - 1

    @property
    def step_error(self) -> float:
        return self.planned_step / self.compiled_step - 1


def version() -> str:
    """A digest of meshpar's code, and the compiler's version."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "meshpar").rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:12]}, jax {jax.__version__}"


def compared(t: Triple, lowering: Any, effort: Any) -> Row:
    row = Row(t.name, t.chip, lowering, effort, version=version())
    step, args, how = t.made()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mp.errors.JoinWarning)
            c = mp.compile(step, *args, lowering=lowering, effort=effort, **how)
    except mp.errors.MeshparError as e:  # a failed compilation is a row
        row.error = str(e).splitlines()[0]
        return row
    assert c.plan is not None
    every = differences(c.plan, c.collectives)
    unexplained = [d for d in every if not (d.merged or d.further)]
    both = comparison(c)
    row.planned = sum(x.count or 1 for x in c.plan.collectives)
    row.compiled = sum(x.count or 1 for x in c.collectives)
    row.planned_bytes, row.compiled_bytes = c.plan.bytes_sent, sum(x.total_bytes for x in c.collectives)
    row.merged = sum(d.planned - d.compiled for d in every if d.merged)
    row.further = sum(d.compiled for d in every if d.further)
    row.differences, row.differ_by_kind = list(map(str, unexplained)), kinds(unexplained)
    row.planned_peak, row.compiled_peak = both.planned_peak, both.compiled_peak
    row.planned_kernels, row.planned_step = both.planned_seconds or math.nan, c.plan.seconds or math.nan
    assert c.plan.time is not None
    row.planned_pallas = sum(op.seconds * op.count for op in c.plan.time.ops if op.name == "kernel")
    row.compile_seconds = c.compile_seconds
    chip = chip_of(t.topology)
    if effort == "full" and chip is not None and chip.compiler.clock_hz:
        final = exposed(c.as_text(), chip, Places.of(c.mesh.devices.reshape(-1)), unknown=0)
        row.compiled_kernels, row.compiled_step, row.compiled_exposed = final.compute, final.schedule, final.by_kind
    return row


def kinds(differences: list[Difference]) -> dict[str, Any]:
    return {k: list(v) for k, v in by_kind(differences).items()}


HEADS = ("triple", "planned step", "schedule", "error", "planned kernels", "of them Pallas", "kernels", "planned exposed",
         "exposed", "planned peak", "peak", "error", "collectives")  # fmt: skip


def same(row: Row) -> str:
    words = [f"{len(row.differences)} differ" if row.differences else "equal"]
    words += [f"{row.merged} merged"] * (row.merged > 0) + [f"{row.further} in further rounds"] * (row.further > 0)
    return ", ".join(words)


def cells(row: Row) -> list[str]:
    if row.error:
        return [row.name, row.error[:60]]

    def ms(seconds: float) -> str:
        return "" if math.isnan(seconds) else f"{1e3 * seconds:.0f}"

    def percent(part: float) -> str:
        return "" if math.isnan(part) else f"{100 * part:+.1f} %"

    return [
        row.name, ms(row.planned_step), ms(row.compiled_step), percent(row.step_error), ms(row.planned_kernels),
        ms(row.planned_pallas), ms(row.compiled_kernels),
        ms(row.planned_step - row.planned_kernels), ms(row.compiled_step - row.compiled_kernels),
        f"{row.planned_peak / 1e9:.2f}", f"{row.compiled_peak / 1e9:.2f}", percent(row.memory_error), same(row),
    ]  # fmt: skip


MIN_DIFFERENCE = 0.03
"""Relative difference of two schedules below which their order is not compared."""


def in_order(rows: list[Row], chosen: list[Triple]) -> tuple[int, int, list[str]]:
    """(pairs in the same order, all pairs, descriptions of the others) of layouts of one model, batch and slice."""
    group = {t.name: (t.model, t.topology, tuple(t.changes.items())) for t in chosen}
    right, wrong = 0, []
    for a, b in itertools.combinations([r for r in rows if r.name in group and not math.isnan(r.compiled_step)], 2):
        if group[a.name] != group[b.name] or abs(a.compiled_step / b.compiled_step - 1) <= MIN_DIFFERENCE:
            continue
        if (a.compiled_step < b.compiled_step) == (a.planned_step < b.planned_step):
            right += 1
        else:
            wrong.append(f"{a.name} / {b.name}: planned {a.planned_step / b.planned_step:.2f}, "
                         f"scheduled {a.compiled_step / b.compiled_step:.2f}")  # fmt: skip
    return right, right + len(wrong), wrong


def errors_of(quantity: str, rows: list[Row], error: Callable[[Row], float]) -> str:
    """Median and largest of a relative error, as a sentence."""
    errors = [(abs(error(r)), r.name) for r in rows if not math.isnan(error(r))]
    if not errors:
        return f"{quantity}: nothing to compare"
    largest, name = max(errors)
    median = statistics.median(e for e, _ in errors)
    return (f"{quantity}: median {100 * median:.1f} %, largest {100 * largest:.1f} % ({name}); "
            f"{sum(e <= 0.1 for e, _ in errors)} of {len(errors)} within 10 %")  # fmt: skip


def sum_up(rows: list[Row], chosen: list[Triple], console: Console) -> None:
    for lowering, effort in dict.fromkeys((r.lowering, r.effort) for r in rows):
        tried = [r for r in rows if (r.lowering, r.effort) == (lowering, effort)]
        part = [r for r in tried if not r.error]
        if not part:
            continue
        console.print(f"\n[bold]{lowering}, {effort} effort[/]: {len(part)} compiled, {len(tried) - len(part)} failed")
        console.print(
            f"collectives: {sum(not r.differences for r in part)} of {len(part)} equal "
            f"(in {sum(r.merged > 0 for r in part)} of them XLA merges some)"
        )
        caveat = "" if effort == "full" else " (not the full effort)"
        console.print(errors_of(f"memory{caveat}", part, lambda r: r.memory_error))
        if effort != "full":
            continue
        console.print(errors_of("whole step", part, lambda r: r.step_error))
        console.print(errors_of("kernels", part, lambda r: r.planned_kernels / r.compiled_kernels - 1))
        console.print(errors_of("whole step without Pallas kernels", part,
                                lambda r: (r.planned_step - r.planned_pallas) / r.compiled_step - 1))  # fmt: skip
        console.print(errors_of("kernels without Pallas kernels", part,
                                lambda r: (r.planned_kernels - r.planned_pallas) / r.compiled_kernels - 1))  # fmt: skip
        right, pairs, wrong = in_order(part, chosen)
        console.print(f"pairs of layouts that differ by over {100 * MIN_DIFFERENCE:.0f} %: {right} of {pairs} in order")
        for text in wrong:
            console.print(f"    {text}")


def read_rows(path: Path | None, now: str) -> dict[tuple[str, str, str], Row]:
    """The rows of a file that this version made, by name, lowering and effort."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {(r.name, r.lowering, r.effort): r for r in rows if r.version == now}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="triples whose name contains this text; may be repeated")
    parser.add_argument("--effort", default="full", choices=("fast", "full"), help="of the compiler (%(default)s)")
    parser.add_argument(
        "--lowering", default="shard_map", choices=("shard_map", "jit"), help="jit: the triples marked so"
    )
    parser.add_argument("--all", action="store_true", help="all triples, whatever their marks")
    parser.add_argument("--presets", action="store_true", help="every layout of every model as well")
    parser.add_argument("--standard", action="store_true", help="only the standard set")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th triple from the K-th on (%(default)s)")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to read rows from and append rows to")
    parser.add_argument("--summary", action="store_true", help="compile nothing; summarize the file of --results")
    parser.add_argument("--golden", action="store_true", help="compile nothing; write the golden plans of the tests")
    args = parser.parse_args()
    console = Console(width=220, highlight=False)
    every = presets() if args.presets else TRIPLES
    chosen = [t for t in every if not args.only or any(text in t.name for text in args.only)]
    if args.standard:
        chosen = [t for t in chosen if t.standard]
    if args.golden:
        write_golden([t for t in chosen if args.only or golden_path(t).exists()], console)
        return
    if args.lowering == "jit" and not args.all:
        chosen = [t for t in chosen if t.jit]
    k, n = map(int, args.part.split("/"))
    chosen = chosen[k - 1 :: n]
    rows = read_rows(args.results, version())
    for t in [] if args.summary else chosen:
        if (t.name, args.lowering, args.effort) in rows:
            continue
        row = compared(t, args.lowering, args.effort)
        rows[row.name, row.lowering, row.effort] = row
        print(f"{row.name}: {row.error or same(row)}", file=sys.stderr, flush=True)
        for text in row.differences[:20]:
            print(f"    {text}", file=sys.stderr)
        if args.results:
            with args.results.open("a") as f:
                f.write(json.dumps(vars(row)) + "\n")
    shown = [r for r in rows.values() if r.lowering == args.lowering and r.effort == args.effort]
    table = Table(*HEADS, title=f"{args.lowering}, {args.effort} effort, jax {jax.__version__}; ms and GB")
    for row in shown:
        table.add_row(*cells(row))
    sum_up(shown, presets(), console)


if __name__ == "__main__":
    main()

"""One command for the benchmarks of this folder: runs them, stores their tables, and prints RESULTS.md.

    python benchmarks/suite.py --quick                 # short forms of some benchmarks: ten minutes on 2 CPU cores
    python benchmarks/suite.py                         # all benchmarks: a day on 2 CPU cores
    python benchmarks/suite.py --only overhead soak    # some of them
    python benchmarks/suite.py --page                  # run nothing; print RESULTS.md from the stored tables
    python benchmarks/suite.py --list [--quick]        # names, levels and commands

Benchmarks have four levels, as in Deep500 (Ben-Nun et al., IPDPS 2019, arXiv:1901.10183): ``collective``, ``op``, ``step`` (of
training and decoding), and ``growth`` (planning and planned steps up to 4,096 chips). Each runs in a process of its own under a
time limit: one that fails, crashes or hangs costs only itself, and its earlier table is kept.

After each benchmark, a line of JSON is appended to a record, ``build/suite/COMMIT.jsonl``. The same command at the same commit
resumes: it runs only what has no line yet. With uncommitted changes it starts from the beginning.

- A full run stores the tables of each benchmark as ``results/NAME.md``: the command, its conditions with the commit, the tables.
  Further notes on earlier tables are dropped. ``FILE`` in a command is a log of no further interest.
- A quick run stores its record as ``results/quick.jsonl`` when all its benchmarks have an outcome: its tables are of one version.

RESULTS.md, which is printed and written at the end, has the stored tables of both, by level. A benchmark that trains to a target
writes logs in MLPerf's format next to the record, in the folder ``COMMIT-logs`` (``LOGS`` in a command).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tasks
from tables import line

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
RECORDS = ROOT / "build" / "suite"
MAX_PAGE_LINES = 566
PACKAGES = ("jax", "flax", "libtpu")
TARGET = "workers:tables_printed"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
QUICK_MINUTES = 5.0
"""Time limit of a benchmark's short form."""
LEVELS = {
    "collective": "Collectives over several torus dimensions, and their overlap with matmuls.",
    "op": "Single operations: dispatch of a call, kernels, layers, and JAX's primitives compared with the unsharded run.",
    "step": "Steps of training and decoding: plans compared with compiled programs, with other partitioners and libraries.",
    "growth": "Time to plan, planned steps and processes, from 8 to 4,096 chips. Scaling of planned steps on slices of v5p: weak, "
    "with 2 sequences of 4,096 tokens a chip, and strong, with 4,096 sequences in all. Efficiency: tokens per second and chip, "
    "relative to the smallest slice that the step fits. DeepSeek-V3 takes longer on 2,048 chips and more, since no 64 chips of "
    "these slices are an 8x8 torus: all-to-alls over a ring of 16, or 8 chips in a line, take twice as long as over a ring of 8.",
}


@dataclass(frozen=True)
class Benchmark:
    """A command whose tables are stored.

    Attributes:
      name: of the stored tables, ``results/NAME.md``.
      level: a key of :data:`LEVELS`.
      command: prints the tables.
      minutes: time limit.
      quick: its short form, if it has one.
      title, measured: heading on the page, and the contents of the tables; without a title the page only links to the tables.
      rows: pattern of the rows that the page shows; the file has all of them.
      needs: modules and programs that the command needs besides the package.
    """

    name: str
    level: str
    command: str
    minutes: float
    quick: str = ""
    title: str = ""
    measured: str = ""
    rows: str = ""
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark(
        "collectives", "collective", "python benchmarks/collectives.py", 240,
        "python benchmarks/collectives.py --slices v5e:16x16 --mib 16 --forms native,staged", needs=("libtpu",),
    ),
    Benchmark("overlap", "collective", "python benchmarks/overlap.py", 240, needs=("libtpu",)),
    Benchmark(
        "harnesses", "op", "python benchmarks/harnesses.py --log FILE", 120,
        "python benchmarks/harnesses.py --sample 40 --seed 1", "JAX's primitive harnesses",
        "JAX's test programs of primitives, with two dims of each argument sharded, compared with the unsharded run.",
    ),
    Benchmark(
        "primitives", "op", "python benchmarks/primitives.py --log FILE", 240, "python benchmarks/primitives.py --quick",
    ),
    Benchmark("dispatch", "op", "python benchmarks/overhead.py --only dispatch", 30,
              "python benchmarks/overhead.py --only dispatch --rounds 10"),
    Benchmark("kernels_aot", "op", "python benchmarks/kernels_aot.py", 240, needs=("libtpu",)),
    Benchmark(
        "kernels_aot-attention", "op", "python benchmarks/kernels_aot.py --only llama3-8b-128k", 60, needs=("libtpu",),
    ),
    Benchmark(
        "kernels_aot-bundles", "op", "python benchmarks/kernels_aot.py --bundles --only llama3", 120, needs=("libtpu",),
    ),
    Benchmark(
        "kernels_aot-dispatch", "op", 'python benchmarks/kernels_aot.py --only "dispatch, combine"', 60,
        needs=("libtpu",),
    ),
    Benchmark("kernel_row_chunks", "op", "python benchmarks/kernel_row_chunks.py", 60, needs=("libtpu",)),
    Benchmark("gpu_compile", "op", "python benchmarks/gpu_compile.py", 120, needs=("jax_cuda12_plugin",)),
    Benchmark(
        "device", "op", "python benchmarks/device.py --out LOGS", 60, "", "Kernels and steps on one H200",
        "Values of all kernels against NumPy in float64, times of calls by CUPTI, whole steps. `x`: how much longer "
        "than our kernel. `% peak`: of the FLOP/s of the largest dense bfloat16 matmul, 826 TFLOP/s on the H200.",
        r"^(?!.*(cupti|events|timed by)|(\|---){12}\|$)", ("nvidia-smi",),
    ),
    Benchmark("moe", "op", "python benchmarks/moe.py", 30),
    Benchmark("moe-aot", "op", "python benchmarks/moe.py --aot", 120, needs=("libtpu",)),
    Benchmark(
        "overhead", "step", "python benchmarks/overhead.py --rounds 30", 60, "", "Overhead of mp.jit",
        "Time of a call, of tracing and of planning, compared with `jax.jit` under hand-written PartitionSpecs (medians; plans: "
        "CPU time).",
    ),
    Benchmark("prove", "step", "python benchmarks/prove.py", 30),
    Benchmark(
        "agreement", "step", "python benchmarks/agreement.py --standard --results FILE", 240, "",
        "Planned and compiled steps",
        'Train steps under `lowering="shard_map"`: step time, kernels, exposed communication and peak memory of the plan, '
        "compared with the final schedule and buffer assignment of the TPU compiler. Schedules have no cycles of Pallas kernels.",
        needs=("libtpu",),
    ),
    Benchmark(
        "cost-model", "step", "python benchmarks/ablation.py", 60, "python benchmarks/ablation.py --only 'vector units'",
    ),
    Benchmark(
        "partition", "step", "python benchmarks/partition.py", 240, "", "Both lowerings",
        "Bytes that a device sends in a step and peak memory of the final TPU program, by XLA's partitioner (`jit`) and by the "
        "plan's collectives (`shard_map`), under the same layout.",
        needs=("libtpu",),
    ),
    Benchmark("partition-step", "step", "python benchmarks/partition.py --step --rounds 8", 30),
    Benchmark(
        "plain", "step", "python benchmarks/plain.py", 240, "", "Models without meshpar's options",
        "Step time by the final schedule of models that use no kernel, option or name of meshpar.",
        r"8B|12 layers|ViT, fsdp, v5e", needs=("libtpu",),
    ),
    Benchmark(
        "maxtext", "step", "python benchmarks/maxtext.py --overlap xla", 240, "", "MaxText: memory and bytes",
        "The same models, sizes, slices and meshes as MaxText (e591f30): peak memory and bytes sent in a step.",
        needs=("libtpu",),
    ),
    Benchmark(
        "maxtext-schedule", "step", "python benchmarks/maxtext.py --schedule", 480, "", "MaxText: step time",
        "Step time by the final schedule at full remat, and with the fastest policy that fits. Ratios are to MaxText's best "
        "program that fits and to its peak memory. Splash attention has no cycles in either schedule.",
        "meshpar", ("libtpu",),
    ),
    Benchmark(
        "pipeline", "step", "python benchmarks/pipeline.py --results FILE", 240, "python benchmarks/pipeline.py --size",
        "Pipelines",
        "Llama with `layers: stage`, compared with MaxText's pipelines, with idle stages and no stages: step time by the final "
        "schedule, bytes and memory.",
        needs=("libtpu",),
    ),
    Benchmark("optimizers", "step", "python benchmarks/optimizers.py", 5),
    Benchmark("move", "step", "python benchmarks/move.py", 5),
    Benchmark(
        "low_precision", "step", "python benchmarks/low_precision.py --compile v5p:4x4x4 '4x h100:8'", 60, needs=("libtpu",)
    ),
    Benchmark(
        "batch_sizes", "step", "python benchmarks/batch_sizes.py --logs LOGS --plot docs/static/batch-sizes.png", 60,
        "python benchmarks/batch_sizes.py --quick --logs LOGS", "Steps to a target loss",
        "An MLP trained to a held-out loss of 0.3 nats under several batch sizes, each with the best of eight learning rates: "
        "steps by a sweep under `trial: data`, and by the same training under `batch: data`.",
    ),
    Benchmark(
        "search", "step", "python benchmarks/search.py", 60,
        "python benchmarks/search.py --only llama3_8b --topology v5e:16x16",
    ),
    Benchmark(
        "search-compiled", "step", "python benchmarks/search.py --compile", 240, "", "Search",
        "The layout that `mp.search` returns, compared with the best preset, both compiled.", needs=("libtpu",),
    ),
    Benchmark("search-exhaustive", "step", "python benchmarks/search.py --exhaustive", 60),
    Benchmark(
        "serving", "step", "python benchmarks/serving.py", 30, "", "Decoding",
        "Bytes that a device sends for a token of each sequence, by the step of `examples/generate.py` and by the same function "
        "under `jax.jit` with hand-written PartitionSpecs; ratio 0: nothing is sent.",
        rows="8 kv_heads",
    ),
    Benchmark("serving-v5e", "step", "python benchmarks/serving.py --topology v5e:2x4", 60, needs=("libtpu",)),
    Benchmark(
        "serving-70b", "step", "python benchmarks/serving.py --times", 30, "", "Time of serving Llama 3 70B and Mixtral 8x7B",
        "Seconds by the plan and by the schedule of the TPU compiler; HBM limit: of reading weights and cache.", needs=("libtpu",),
    ),
    Benchmark("naming", "step", "python benchmarks/naming.py", 60, needs=("transformers",)),
    Benchmark("published", "step", "python benchmarks/published.py", 30),
    Benchmark("profile_names", "step", "python benchmarks/profile_names.py", 60, needs=("libtpu",)),
    Benchmark(
        "replicas", "step", "python benchmarks/replicas.py", 60,
        "python benchmarks/replicas.py --llama",
    ),
    Benchmark("plan_memory", "step", "python benchmarks/plan_memory.py", 120, needs=("libtpu",)),
    Benchmark("long_context", "step", "python examples/long_context.py", 30),
    Benchmark("lab", "step", "python benchmarks/lab.py", 30, needs=("playwright",)),
    Benchmark("soak", "step", "python benchmarks/soak.py", 120),
    Benchmark(
        "fuzz", "step", "python benchmarks/fuzz.py --cases 2000 --seed 1130 --lowering shard_map jit", 240,
        "python benchmarks/fuzz.py --cases 20 --seed 90 --tries 0", "Random programs",
        "Random programs under random layouts, compared with the unsharded run.",
    ),
    Benchmark(
        "mutants", "step", "python benchmarks/mutants.py --sample 150 --seed 2", 1440, "", "Mutants",
        "Small edits of the code, and how many of them the tests find.",
        rows=r"_src/(rules|plan|program|lower|passes) |\ball\b",
    ),
    Benchmark(
        "growth", "growth", "python benchmarks/growth.py", 30, "python benchmarks/growth.py --chips 8 64 512 4096",
    ),
    Benchmark("partition-growth", "growth", "python benchmarks/partition.py --growth", 30),
    Benchmark(
        "pods", "growth", "python benchmarks/pods.py", 120, "", "Several processes",
        "Costs of saves, agreement and the watchdog, and recovery from killed processes.",
    ),
)  # fmt: skip


# -- stored tables


@dataclass(frozen=True)
class Stored:
    """The content of a file in results.

    Attributes:
      command: the command that printed the tables.
      conditions: date, commit, versions and machine of the measurement.
      body: Markdown tables and notes.
    """

    command: str
    conditions: str
    body: str

    @staticmethod
    def read(name: str) -> Stored:
        """The stored tables of a name.

        Raises:
          ValueError: the file does not begin with a command and conditions.
        """
        head, _, rest = (RESULTS / f"{name}.md").read_text().partition("\n\n")
        conditions, _, body = rest.partition("\n\n")
        command = re.fullmatch(r"# `(.+)`", head)
        if not command or not re.search(r"\d{4}-\d\d-\d\d", conditions) or not body.startswith("|"):
            raise ValueError(f"{name}.md needs a command, a date and a table")
        return Stored(command[1], conditions, body.strip())

    def write(self, name: str) -> None:
        (RESULTS / f"{name}.md").write_text(f"# `{self.command}`\n\n{self.conditions}\n\n{self.body}\n")

    def shown(self, rows: str) -> list[str]:
        """The lines that the page shows: of tables, the rows with a match of ``rows``."""
        lines = self.body.splitlines()
        return [x for n, x in enumerate(lines) if n < 2 or not x.startswith("|") or re.search(rows, x)]


def commit() -> str:
    """The short hash of the current commit, with ``-dirty`` if files other than results have uncommitted changes."""
    words = ["git", "-C", str(ROOT)]
    text = subprocess.run([*words, "rev-parse", "--short=9", "HEAD"], check=True, capture_output=True, text=True).stdout
    results = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    changes = subprocess.run(
        [*words, "status", "--porcelain", "--untracked-files=no", "--", ".", *results],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return text.strip() + ("-dirty" if changes else "")


def conditions(version: str) -> str:
    """Today's date, the commit, versions of installed packages, and the number of CPU cores."""
    versions = [f"{p} {importlib.metadata.version(p)}" for p in PACKAGES if importlib.util.find_spec(p)]
    python = f"Python {'.'.join(platform.python_version_tuple()[:2])}"
    return (
        f"{', '.join([str(datetime.date.today()), f'commit {version}', *versions, python])}; {os.cpu_count()} CPU cores"
    )


# -- the page


def page() -> str:
    """The text of RESULTS.md."""
    quick = RESULTS / "quick.jsonl"
    header, outcomes = read_record(quick) if quick.exists() else ({}, {})
    lines = [
        "# Results",
        "",
        "Printed by `python benchmarks/suite.py`. Each table is the output of the command above it. Nothing was run on a TPU, and "
        "on a GPU only the tables that say so: where another row names one, the program was planned or compiled ahead of time. "
        "Tables without a commit are of earlier versions of the code than tables with one; notes below a table say which of its "
        "rows are of another version.",
    ]
    short = [b for b in BENCHMARKS if b.name in outcomes]
    if short:
        minutes, cpu = (sum(map(f, outcomes.values())) / 60 for f in (lambda o: o.seconds, cpu_seconds))
        about = f"{header['conditions']}; {minutes:.0f} minutes, {cpu:.0f} CPU minutes"
        lines += ["", "## Quick run", "", f"`python benchmarks/suite.py --quick` ({about})", ""]
        lines += [line(["benchmark", "level", "outcome", "seconds", "CPU seconds"]), "|---|---|---|---|---|"]
    for b in short:
        o = outcomes[b.name]
        result = o.status if o.status == "ok" else f"{o.status}: {o.message[:100]}"
        lines.append(line([b.name, b.level, result, f"{o.seconds:.0f}", f"{cpu_seconds(o):.0f}"]))
    for level, about in LEVELS.items():
        lines += ["", f"## Level: {level}", "", about]
        for b in short:
            if b.level == level and outcomes[b.name].status == "ok":
                lines += ["", f"**{b.name}, quick.** `{b.quick}`"]
                for table in outcomes[b.name].result["tables"]:
                    lines += ["", *table]
        shown = [b for b in BENCHMARKS if b.level == level and (RESULTS / f"{b.name}.md").exists()]
        for b in (b for b in shown if b.title):
            stored = Stored.read(b.name)
            rows = stored.shown(b.rows)
            lines += ["", f"### {b.title}", "", b.measured, "", f"`{stored.command}` ({stored.conditions})", "", *rows]
            if len(rows) < len(stored.body.splitlines()):
                lines += ["", f"[All rows](results/{b.name}.md)"]
        linked = [b for b in shown if not b.title]
        if linked:
            lines += ["", line(["further tables", "command", "measured"]), "|---|---|---|"]
        for b in linked:
            stored = Stored.read(b.name)
            lines.append(line([f"[{b.name}](results/{b.name}.md)", f"`{stored.command}`", stored.conditions]))
    return "\n".join(lines) + "\n"


def cpu_seconds(outcome: tasks.Outcome) -> float:
    """CPU seconds of a benchmark's processes; 0 without a result."""
    return outcome.result["cpu_seconds"] if outcome.status == "ok" else 0.0


def write_page() -> str:
    """Write RESULTS.md.

    Raises:
      SystemExit: it would have too many lines.
    """
    text = page()
    if (length := len(text.splitlines())) > MAX_PAGE_LINES:
        raise SystemExit(f"RESULTS.md would have {length} lines, the limit is {MAX_PAGE_LINES}")
    PAGE.write_text(text)
    return text


# -- running


def read_record(file: Path) -> tuple[dict[str, Any], tasks.Outcomes]:
    """(Header, outcomes) of a record."""
    return json.loads(file.read_text().partition("\n")[0]), tasks.read(file)


class Runner(tasks.Runner):
    """Runs benchmarks; without a table a command counts as wrong."""

    def judged(self, task: tasks.Task, result: Any) -> str:
        return "" if result["tables"] else "it printed no table"


def missing(b: Benchmark) -> str:
    """The first module or program that a benchmark needs and that is not installed; otherwise empty."""
    return next((n for n in b.needs if importlib.util.find_spec(n) is None and shutil.which(n) is None), "")


def words_of(command: str, folder: Path) -> list[str]:
    """A command with the interpreter, ``FILE`` and ``LOGS`` replaced."""
    words = {"python": sys.executable, "FILE": str(folder / "log.jsonl"), "LOGS": str(folder)}
    return [words.get(word, word) for word in shlex.split(command)]


def run(chosen: Sequence[Benchmark], quick: bool, record: Path, version: str) -> tasks.Outcomes:
    """Run the benchmarks that have no outcome in the record, and store the tables of a full run.

    Args:
      chosen: benchmarks to run.
      quick: run their short forms.
      record: is begun if it does not exist.
      version: the commit that is stored with the tables.
    """
    stated = conditions(version)
    if not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        tasks.append(record, {"commit": version, "conditions": stated, "quick": quick})
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    runner = Runner(record, math.inf, tasks.read(record), TARGET, environment)
    logs = record.with_name(f"{record.stem}-logs")
    for b in chosen:
        with tempfile.TemporaryDirectory() as folder:
            command = b.quick if quick else b.command
            words = words_of(command, logs if "LOGS" in command else Path(folder))
            limit = 60 * (QUICK_MINUTES if quick else b.minutes)
            if b.name not in runner.outcomes and (name := missing(b)):
                runner.write(tasks.Outcome(b.name, "refused", message=f"{name} is not installed"))
            runner.run([tasks.Task(b.name, {"command": words}, b.name, limit)])
        done = runner.outcomes[b.name]
        if done.status == "ok" and not quick:
            tables = "\n\n".join("\n".join(rows) for rows in done.result["tables"])
            Stored(b.command, stated, tables).write(b.name)
    return runner.outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status is 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [b.name for b in BENCHMARKS]
    parser.add_argument("--quick", action="store_true", help="short forms of some benchmarks")
    parser.add_argument(
        "--only", nargs="+", default=names, choices=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--record", type=Path, help="file of JSON lines to resume (build/suite/COMMIT.jsonl)")
    parser.add_argument("--page", action="store_true", help="run nothing; print RESULTS.md")
    parser.add_argument("--list", action="store_true", help="names, levels and commands")
    args = parser.parse_args(arguments)
    chosen = [b for b in BENCHMARKS if b.name in args.only and (b.quick or not args.quick)]
    if args.list:
        for b in chosen:
            print(f"{b.name:22} {b.level:11} {b.quick if args.quick else b.command}")
        return 0
    if args.page:
        print(write_page(), end="")
        return 0
    version = commit()
    record = args.record or RECORDS / f"{version}{'-quick' if args.quick else ''}.jsonl"
    if args.record is None and version.endswith("-dirty"):
        record.unlink(missing_ok=True)
    elif (
        record.exists()
        and (header := read_record(record)[0])
        and (header["commit"], header["quick"]) != (version, args.quick)
    ):
        parser.error(
            f"{record} is of commit {header['commit']}{', a quick run' if header['quick'] else ''}; give another --record"
        )
    outcomes = run(chosen, args.quick, record, version)
    if args.quick and all(b.name in outcomes for b in BENCHMARKS if b.quick):
        (RESULTS / "quick.jsonl").write_text(record.read_text())
    print(write_page(), end="")
    return int(any(outcomes[b.name].status not in ("ok", "refused") for b in chosen))


if __name__ == "__main__":
    raise SystemExit(main())

"""Writes RESULTS.md from stored tables, and runs the commands that print them.

    python benchmarks/report.py                        # write RESULTS.md from the tables in benchmarks/results
    python benchmarks/report.py --run overhead soak    # run these commands first and store the tables that they print
    python benchmarks/report.py --list                 # names and commands of the stored tables

A stored table is a file ``results/NAME.md``: the command, the date, versions and conditions of the measurement, then the Markdown
tables that the command printed and notes. ``FILE`` in a command is a log of no further interest. ``--run`` replaces the tables and
states today's date and the installed versions; notes of the earlier measurement are dropped. RESULTS.md has the tables of
:data:`SECTIONS` and links to the others.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tables import line, tables_of

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "RESULTS.md"
MAX_PAGE_LINES = 300
PACKAGES = ("jax", "flax", "libtpu")


@dataclass(frozen=True)
class Stored:
    """The content of a file in results.

    Attributes:
      command: the command that printed the tables.
      conditions: date, versions and machine of the measurement.
      body: Markdown tables and notes.
    """

    command: str
    conditions: str
    body: str

    @staticmethod
    def read(name: str) -> Stored:
        """The stored table of a name.

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


@dataclass(frozen=True)
class Section:
    """A section of RESULTS.md.

    Attributes:
      title: its heading.
      measured: the quantities, the baseline and the columns of the tables.
      names: the stored tables.
      rows: pattern of the rows that the page shows; the file has all of them.
    """

    title: str
    measured: str
    names: tuple[str, ...]
    rows: str = ""

    def lines(self, name: str) -> list[str]:
        """The lines of a stored table that the page shows."""
        lines = Stored.read(name).body.splitlines()
        shown = [x for n, x in enumerate(lines) if n < 2 or not x.startswith("|") or re.search(self.rows, x)]
        return shown if len(shown) == len(lines) else [*shown, "", f"[All rows](results/{name}.md)"]


SECTIONS = (
    Section(
        "Overhead of mp.jit",
        "Time of a call, of tracing and of planning, compared with `jax.jit` under hand-written PartitionSpecs (medians; plans: "
        "CPU time).",
        ("overhead",),
    ),
    Section(
        "Planned and compiled steps",
        'Whole train steps under `lowering="shard_map"`: step time, kernels, exposed communication and peak memory of the plan, '
        "compared with the final schedule and buffer assignment of the TPU compiler. Schedules have no cycles of Pallas kernels.",
        ("agreement",),
    ),
    Section(
        "Both lowerings",
        "Bytes that a device sends in a step and peak memory of the final TPU program, by XLA's partitioner (`jit`) and by the "
        "plan's collectives (`shard_map`), under the same layout.",
        ("partition",),
    ),
    Section(
        "Models without meshpar's options",
        "Step time by the final schedule of models that use no kernel, option or name of meshpar.",
        ("plain",),
    ),
    Section(
        "MaxText: memory and bytes",
        "The same models, sizes, slices and meshes as MaxText (e591f30): peak memory and bytes sent in a step.",
        ("maxtext",),
    ),
    Section(
        "MaxText: step time",
        "Step time by the final schedule at full remat, and with the fastest policy that fits. Ratios are to MaxText's best "
        "program that fits and to its peak memory. Splash attention has no cycles in either schedule.",
        ("maxtext-schedule",),
        "meshpar",
    ),
    Section(
        "Pipelines",
        "Llama with `layers: stage`, compared with MaxText's pipelines, with idle stages and no stages: step time by the final "
        "schedule, bytes and memory.",
        ("pipeline",),
    ),
    Section(
        "Search",
        "The layout that `mp.search` returns, compared with the best preset, both compiled.",
        ("search-compiled",),
    ),
    Section(
        "Decoding",
        "Bytes that a device sends for a token of each sequence, by the step of `examples/generate.py` and by the same function "
        "under `jax.jit` with hand-written PartitionSpecs; ratio 0: nothing is sent.",
        ("serving",),
    ),
    Section(
        "Several processes",
        "Costs of saves, agreement and the watchdog, and recovery from killed processes.",
        ("pods",),
    ),
    Section(
        "Correctness",
        "Random programs, and JAX's primitive harnesses with two dims of each argument sharded, compared with the unsharded run. "
        "Then small edits of the code, and how many of them the tests find.",
        ("fuzz", "harnesses", "mutants"),
    ),
)


def names() -> list[str]:
    """Names of the stored tables."""
    return sorted(path.stem for path in RESULTS.glob("*.md"))


def run(name: str) -> None:
    """Run the command of a stored table and store the tables that it prints.

    Raises:
      SystemExit: the command fails or prints no table.
    """
    command = Stored.read(name).command
    print(f"{name}: {command}", flush=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        words = {"python": sys.executable, "FILE": str(Path(folder, "log.jsonl"))}
        arguments = [words.get(word, word) for word in shlex.split(command)]
        done = subprocess.run(arguments, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    tables = tables_of(done.stdout)
    if done.returncode or not tables:
        raise SystemExit(f"{command}: exit status {done.returncode}, {len(tables)} tables\n{done.stdout[-2000:]}")
    Stored(command, conditions_now(), "\n\n".join("\n".join(rows) for rows in tables)).write(name)


def conditions_now() -> str:
    """Today's date, versions of installed packages, and the number of CPU cores."""
    versions = [f"{p} {importlib.metadata.version(p)}" for p in PACKAGES if importlib.util.find_spec(p)]
    parts = [str(datetime.date.today()), *versions, f"Python {'.'.join(platform.python_version_tuple()[:2])}"]
    return f"{', '.join(parts)}; {os.cpu_count()} CPU cores"


def page() -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Results",
        "",
        "Each table is the output of the command above it; the line names date, versions and machine, and notes below a table say "
        "which rows are of an earlier version of the code. Nothing was run on a TPU or a GPU: where a row names one, the program "
        "was compiled ahead of time. "
        "`python benchmarks/report.py` writes this page from `benchmarks/results`; with `--run NAME` it measures again.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", section.measured]
        for name in section.names:
            stored = Stored.read(name)
            lines += ["", f"`{stored.command}` ({stored.conditions})", "", *section.lines(name)]
    others = [name for name in names() if not any(name in section.names for section in SECTIONS)]
    lines += ["", "## Further tables", "", line(["table", "command", "measured"]), "|---|---|---|"]
    for name in others:
        stored = Stored.read(name)
        lines.append(line([f"[{name}](results/{name}.md)", f"`{stored.command}`", stored.conditions]))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="measure these tables again")
    parser.add_argument("--list", action="store_true", help="names and commands")
    args = parser.parse_args()
    if args.list:
        for name in names():
            print(f"{name:24} {Stored.read(name).command}")
        return
    for name in args.run:
        run(name)
    text = page()
    if (length := len(text.splitlines())) > MAX_PAGE_LINES:
        raise SystemExit(f"RESULTS.md would have {length} lines, the limit is {MAX_PAGE_LINES}")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

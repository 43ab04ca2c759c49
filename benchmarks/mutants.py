"""Mutation test: small edits of the code, one at a time, and whether the tests find them.

    python benchmarks/mutants.py --sample 150 --seed 0                      # mutants of all packages of PACKAGES
    python benchmarks/mutants.py meshpar/rules meshpar/program/infer.py --sample 20
    python benchmarks/mutants.py --sample 150 --readme                      # then the README's tests on those not found

A mutant is one edit of the syntax tree: a comparison swapped, a constant off by one, a condition negated or dropped, ``and`` for
``or``, a flag or a sign inverted, one reduction or extremum replaced by its opposite. The seed fixes a sample of all edits,
spread evenly over the paths. Each is applied to a copy of the repository, whose tests without the mark ``slow`` run up to the
first failure: the mirrored test file (``tests/rules/test_halo.py`` for ``meshpar/rules/halo.py``) if there is one, then the
mirrored folder, and with ``--readme`` all tests. A run that exceeds ``--limit`` seconds counts as found.

A mutant is "broken", and not counted, if the tests that fail also fail without it. Mutants that change no behaviour are listed
with the reason in ``equivalent_mutants.json``, and not counted. Prints every outcome, then a table of mutants found for each
path.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import Table

ROOT = Path(__file__).parent.parent
COPIED = (
    "meshpar",
    "meshpar_kernels",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
)
PACKAGES = (
    "rules", "plan", "program", "lower", "passes", "pods",
    "api.py", "jitted.py", "tracing.py", "compiled.py", "plan_api.py", "options.py", "target.py", "cli.py",
)  # fmt: skip
"""Packages and modules of ``meshpar`` that are mutated by default."""
TESTS_OF = {
    "api.py": ["test_api.py", "measurement/test_calibrate.py"],
    "tracing.py": ["test_jitted.py", "test_api.py"],
    "compiled.py": ["test_jitted.py", "test_api.py"],
    "plan_api.py": ["test_api.py", "hardware/test_calibration.py", "report/test_facts.py"],
    "target.py": ["test_cli.py"],
}
"""Tests of top-level modules in other files than the one of the same name."""
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.json"
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}
OPPOSITES = {
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "any": "all", "all": "any", "and_": "or_",
    "pmax": "pmin", "pmin": "pmax", "floor": "ceil", "ones": "zeros", "zeros": "ones",
}  # fmt: skip
KINDS = {"sum": "max", "max": "min", "min": "max", "pass_through": "need_replication", "permutation": "pass_through"}
"""Name of a kind of factor or reduction → another kind."""


@dataclass(frozen=True)
class Edit:
    """Replacement of the bytes ``start`` to ``end`` of a file."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    def applied(self) -> str:
        """The text of the file with the edit."""
        text = self.path.read_text().encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    @property
    def change(self) -> str:
        """``"old -> new"``, on one line."""
        old = self.path.read_text().encode()[self.start : self.end].decode()
        return f"{' '.join(old.split())} -> {' '.join(self.new.split())}"

    @property
    def key(self) -> tuple[str, str, str]:
        """(file, source line, change), by which ``equivalent_mutants.json`` names a mutant."""
        return self.name, self.path.read_text().splitlines()[self.line - 1].strip(), self.change

    @property
    def name(self) -> str:
        """The path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    def __str__(self) -> str:
        return f"{self.name}:{self.line}: {self.change[:160]}"


def edits(path: Path) -> Iterator[Edit]:
    """Every edit of a file, except in docstrings, annotations, and errors that are raised."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def source(node: ast.expr) -> str:
        return f"({ast.unparse(node)})"

    def of(node: ast.expr, new: str) -> Edit:
        return Edit(path, node.lineno, *at(node), new)

    def walk(node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield of(node, f"({source(node.left)} {COMPARISONS[type(node.ops[0])]} {source(node.comparators[0])})")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield of(node, f"({source(node.left)} {OPERATORS[type(node.op)]} {source(node.right)})")
        elif isinstance(node, ast.BoolOp):
            word = "or" if isinstance(node.op, ast.And) else "and"
            yield of(node, f"({f' {word} '.join(source(v) for v in node.values)})")
            for k in range(len(node.values)):
                rest = [source(v) for i, v in enumerate(node.values) if i != k]
                yield of(node, f"({(' and ' if word == 'or' else ' or ').join(rest)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield of(node, source(node.operand))
        elif isinstance(node, ast.IfExp):
            yield of(node, f"({source(node.orelse)} if {source(node.test)} else {source(node.body)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield of(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield of(node, f"({node.value} + 1)")
        elif isinstance(node, ast.Constant) and node.value in KINDS:
            yield of(node, repr(KINDS[node.value]))
        elif isinstance(node, ast.Name) and node.id in OPPOSITES and isinstance(node.ctx, ast.Load):
            yield of(node, OPPOSITES[node.id])
        elif isinstance(node, ast.Attribute) and node.attr in OPPOSITES and isinstance(node.ctx, ast.Load):
            yield of(node, f"{source(node.value)}.{OPPOSITES[node.attr]}")
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from walk(child)

    for edit in walk(ast.parse(text)):
        try:
            ast.parse(edit.applied())
        except SyntaxError:  # in a pattern of a match statement
            continue
        yield edit


def mirrored(path: Path) -> list[list[str]]:
    """The tests of a module in the order in which they run: the file of the same name, then its packages' files outwards."""
    inner = path.relative_to(ROOT / "meshpar")
    if str(inner) in TESTS_OF:
        return [[f"tests/{name}" for name in TESTS_OF[str(inner)]]]
    stages = []
    for module in (inner, *inner.parents[:-1]):
        for tests in (Path("tests") / module.parent / f"test_{module.stem}.py", Path("tests") / module):
            if (ROOT / tests).exists():
                stages.append([str(tests)])
    return stages


def outcome(copy: Path, edit: Edit | None, tests: list[str], options: list[str], limit: float) -> str:
    """``"found"`` if a test fails, ``"timed out"``, or ``"not found"``; of the unmodified code if the edit is None."""
    place = copy / edit.path.relative_to(ROOT) if edit else None
    if edit and place:
        place.write_text(edit.applied())
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command, cwd=copy, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = run.wait(limit)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # processes that a test started included
            run.wait()
            if edit and place:
                shutil.copy(edit.path, place)
        if status not in (0, 1, 2, 5):  # 5: no tests; 3, 4: pytest itself
            output.seek(0)
            raise SystemExit(output.read()[-4000:])
    return "found" if status in (1, 2) else "not found"


def sampled(paths: Sequence[Path], sample: int, seed: int) -> dict[Path, list[Edit]]:
    """Path → its mutants; ``sample`` in all, as evenly as the numbers of edits allow, in random order."""
    every = {
        path: [e for f in (sorted(path.rglob("*.py")) if path.is_dir() else [path]) for e in edits(f)] for path in paths
    }
    for number, path in enumerate(paths):
        random.Random(f"{seed} {number}").shuffle(every[path])
    chosen: dict[Path, list[Edit]] = {path: [] for path in paths}
    while sum(map(len, chosen.values())) < sample and any(every.values()):
        for path in paths:
            if every[path] and sum(map(len, chosen.values())) < sample:
                chosen[path].append(every[path].pop())
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=lambda p: Path(p).resolve(), help="packages and modules of `meshpar` (PACKAGES)"
    )
    parser.add_argument("--sample", type=int, default=150, help="number of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first mutants of each path, to resume")
    parser.add_argument("--tests", nargs="*", help="these tests instead of the mirrored ones")
    parser.add_argument(
        "--readme", action="store_true", help="run all tests without the mark `slow` on mutants not found"
    )
    parser.add_argument("-k", default="", help="pytest's -k")
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of one mutant (%(default)s)")
    args = parser.parse_args()
    options = ["-k", args.k] if args.k else []
    equivalent = {(e["file"], e["line"], e["change"]) for e in json.loads(EQUIVALENT.read_text())}
    chosen = sampled(args.paths or [ROOT / "meshpar" / name for name in PACKAGES], args.sample, args.seed)
    outcomes: dict[Path, list[str]] = {path: [] for path in chosen}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (ROOT / name).exists():
                shutil.copy(ROOT / name, copy / name)
        for round_ in range(args.skip, max(map(len, chosen.values()), default=0)):
            for path, mutants in chosen.items():
                if round_ >= len(mutants):
                    continue
                edit = mutants[round_]
                if edit.key in equivalent:
                    outcomes[path].append("equivalent")
                else:
                    stages = [args.tests] if args.tests else mirrored(edit.path)
                    stages += [["tests"]] if args.readme else []
                    began = time.monotonic()
                    for tests in stages:
                        if (result := outcome(copy, edit, tests, options, args.limit)) != "not found":
                            break
                    if result != "not found" and outcome_of_unmodified(copy, tests, options, args.limit) != "not found":
                        result = "broken"
                    outcomes[path].append(result)
                    print(f"{result:9} {time.monotonic() - began:4.0f} s  {edit}", flush=True)
    kinds = (("found", "timed out"), ("equivalent",), ("broken",), ("not found",))
    table = Table("path", "mutants", "found", "equivalent", "broken", "not found")
    total = [0] * (1 + len(kinds))
    for path, results in outcomes.items():
        counts = [len(results), *(sum(r in kind for r in results) for kind in kinds)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        table.add_row(str(path.relative_to(ROOT)), *map(str, counts))
    table.add_row("all", *map(str, total))
    tried = total[0] - total[2] - total[3]
    print(f"\n{total[1]} of {tried} mutants found ({total[1] / max(tried, 1):.0%}), seed {args.seed}")


_UNMODIFIED: dict[tuple[str, ...], str] = {}


def outcome_of_unmodified(copy: Path, tests: list[str], options: list[str], limit: float) -> str:
    """The outcome of tests on the unmodified code, run once."""
    key = (*tests, *options)
    if key not in _UNMODIFIED:
        _UNMODIFIED[key] = outcome(copy, None, tests, options, 4 * limit)
    return _UNMODIFIED[key]


if __name__ == "__main__":
    main()

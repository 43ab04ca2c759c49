"""Small errors put into the code one at a time: which of them the tests of the same package find.

    python benchmarks/mutants.py meshpar/rules meshpar/program/infer.py [--sample 20] [--seed 0] [--tests tests/rules] [-k EXPR]

Each mutant is one edit of the syntax tree: a comparison swapped, a constant off by one, a condition negated or dropped, ``and``
for ``or``, a flag or a sign inverted, one reduction or extremum for its opposite. A sample of all edits, fixed by the seed, is
applied to a copy of the repository, one at a time, and the mirrored tests run there (``tests/rules`` for ``meshpar/rules``,
``tests/program/test_infer.py`` for ``meshpar/program/infer.py``), without those marked ``slow``, up to the first that fails.
A mutant under which no test fails within the time limit has survived: a hole in the tests, or an edit without effect.
Prints every outcome, and found/tried per path.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("meshpar", "meshpar_kernels", "tests", "benchmarks", "docs", "examples", "pyproject.toml")
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
"""String constants that name a kind of factor or reduction, and another kind."""


@dataclass(frozen=True)
class Edit:
    """Text of a file from one position to another, replaced."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    def applied(self) -> str:
        text = self.path.read_text().encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def __str__(self) -> str:
        old = self.path.read_text().encode()[self.start : self.end].decode()
        return f"{self.path.relative_to(ROOT)}:{self.line}: {' '.join(old.split())[:70]} -> {' '.join(self.new.split())[:70]}"


def edits(path: Path) -> Iterator[Edit]:
    """Every edit of a file, none of its docstrings, annotations, and errors."""
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
        except SyntaxError:  # e.g. a part of a pattern
            continue
        yield edit


def mirrored(path: Path) -> str:
    """The tests of a package or file: those of the innermost package or module around it that has tests of its own."""
    inner = path.relative_to(ROOT / "meshpar")
    for module in (inner, *inner.parents):
        for tests in (Path("tests") / module.parent / f"test_{module.stem}.py", Path("tests") / module):
            if (ROOT / tests).exists():
                return str(tests)
    return "tests"


def outcome(copy: Path, edit: Edit | None, tests: list[str], options: list[str], limit: float) -> str:
    """``found`` if a test fails, ``hung`` if they take too long, ``survived`` if all of them pass; of the code as it is if None."""
    place = copy / edit.path.relative_to(ROOT) if edit else None
    if edit and place:
        place.write_text(edit.applied())
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        if edit and place:
            shutil.copy(edit.path, place)
    if done.returncode not in (0, 1, 2):  # 5: no tests; 3, 4: pytest itself
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return "survived" if done.returncode == 0 else "found"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=lambda p: Path(p).resolve(), help="packages and files of `meshpar`")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", help="instead of the mirrored ones")
    parser.add_argument("-k", default="", help="pytest's -k")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one mutant")
    args = parser.parse_args()
    options = ["-k", args.k] if args.k else []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        for path in args.paths:
            tests = args.tests or [mirrored(path)]
            start = time.time()
            if (bare := outcome(copy, None, tests, options, args.limit)) != "survived":
                raise SystemExit(f"{' '.join(tests)} without any mutant: {bare}")
            print(f"{path.relative_to(ROOT)}: {' '.join(tests)} takes {time.time() - start:.0f} s", flush=True)
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            every = [edit for file in files for edit in edits(file)]
            chosen = random.Random(args.seed).sample(every, min(args.sample, len(every)))
            results = []
            for edit in chosen:
                results.append(outcome(copy, edit, tests, options, args.limit))
                print(f"  {results[-1]:9} {edit}", flush=True)
            rows.append((path.relative_to(ROOT), sum(r != "survived" for r in results), len(results), len(every)))
    print("\npath, found, tried, of so many edits")
    for path, found, tried, every in rows:
        print(f"{path}  {found}/{tried}  ({found / max(tried, 1):.0%})  {every}")


if __name__ == "__main__":
    main()

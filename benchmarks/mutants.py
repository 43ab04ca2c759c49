"""Mutation test: small edits of the code, one at a time, and whether the tests find them.

    python benchmarks/mutants.py --sample 150 --seed 0 --log mutants.jsonl  # mutants of all packages of PACKAGES
    python benchmarks/mutants.py meshpar/_src/rules meshpar/_src/program/infer.py --sample 20
    python benchmarks/mutants.py --record tests/rules tests/program
    python benchmarks/mutants.py --prove --sample 40 --log proofs.jsonl     # proofs in place of tests, of mutants of PROVEN

A mutant is one edit of the syntax tree: a comparison swapped, a constant off by one, a condition negated or dropped, ``and`` for
``or``, a flag or a sign inverted, one reduction or extremum replaced by its opposite. The seed fixes a sample of all edits,
spread evenly over the paths.

The lines that each test executes are recorded once for each version of the package, with ``--record`` only for some tests.
Each mutant is applied to a copy of the repository, in which the tests that execute the edited lines run up to the first failure:
first in the mirrored file (``tests/rules/test_halo.py`` for ``meshpar/_src/rules/halo.py``) and folder, then all others; tests that
start processes, whose lines are not recorded, run if they are mirrored; one case of each test runs before the second ones.
``--limit`` bounds the recorded seconds of the mirrored tests, and separately the seconds of the others. Tests with the mark
``slow`` do not run. A run that exceeds twice its tests' recorded seconds and a minute of CPU time counts as found. A mutant whose
lines no test executes
is not found.

A mutant is "broken", and not counted, if the tests that fail also fail without it. Mutants that change no behaviour are listed
with the reason in ``equivalent_mutants.json``, and not counted. Prints every outcome, then a table of mutants found for each
path.

``--prove`` asks whether ``mp.prove`` finds the mutants that change a result of the programs of ``proof_programs.py``, of those in
functions and in lines that planning and lowering these execute. A mutant is applied to the functions of a process that is forked
from one with meshpar, which plans and lowers the programs that execute its line: "error" if that fails, "same programs" if the
per-device programs are those without the mutant. Others are "refused", "not verified" or proven. Results that are proven are
computed on virtual devices, and must be those of the function: "proven, same results". "proven, other results" is a defect.
With ``--log`` outcomes are appended to a file, and mutants in it do not run again.
"""

import argparse
import ast
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tables import Table

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "meshpar" / "_src"
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
    "plan_api.py", "entry",
)  # fmt: skip
"""Packages and modules of ``meshpar._src`` that are mutated by default."""
MAX_PROGRAMS = 4
"""Programs that are planned with a mutant of ``--prove``; a transformer only if no smaller one executes its line."""
PROVEN = ("lower", "rules", "plan")
"""Packages of ``meshpar._src`` that are mutated for ``--prove``."""
TESTS_OF = {
    "entry/__init__.py": ["test_api.py"],
    "entry/arguments.py": ["test_jitted.py", "test_tracing.py"],
    "entry/tune_kernels.py": ["kernels/test_tuning_table.py"],
    "entry/local_sgd.py": ["pods/test_local_sgd.py"],
    "entry/move.py": ["moves/test_move.py"],
    "entry/options.py": ["test_keywords_and_flags.py"],
    "entry/api.py": ["test_api.py", "measurement/test_calibrate.py", "program/test_names_from_uses.py"],
    "entry/tracing.py": ["test_tracing.py", "test_jitted.py", "test_api.py"],
    "entry/compiled.py": ["test_jitted.py", "test_api.py"],
    "plan_api.py": ["test_api.py", "hardware/test_calibration.py", "report/test_facts.py"],
    "entry/cli_target.py": ["test_cli.py"],
}
"""Tests of modules in other files than the one of the same name."""
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.json"
PRELOADED = ("jax", "flax.nnx", "optax", "numpy", "pytest", "coverage")
"""Modules that are imported once, in the process from which those that run tests are forked."""
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
    """Replacement of the bytes ``start`` to ``end`` of a file.

    Attributes:
      lines: the lines of the expression.
      statement: the lines of its statement, without the statements in its body; empty outside of functions, where a line is
        executed when the module is imported.
    """

    path: Path
    line: int
    start: int
    end: int
    new: str
    lines: range
    statement: range

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

    def header(node: ast.stmt) -> range:
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        return range(node.lineno, max(last, node.lineno) + 1)

    def walk(node: ast.AST, statement: range, inside: bool) -> Iterator[Edit]:
        def of(node: ast.expr, new: str) -> Edit:
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            return Edit(path, node.lineno, *at(node), new, lines, statement)

        if isinstance(node, ast.stmt) and inside:
            statement = header(node)
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
            if name in ("annotation", "returns", "type_params", "decorator_list", "pattern"):
                continue
            function = name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from walk(child, statement, inside or function)

    yield from walk(ast.parse(text), range(0), False)


def mirrored(path: Path) -> list[list[str]]:
    """The tests of a module in the order in which they run: the file of the same name, then its packages' files outwards."""
    inner = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT / "meshpar")
    if str(inner) in TESTS_OF:
        return [[f"tests/{name}" for name in TESTS_OF[str(inner)]]]
    stages = []
    if inner.parts[0] == "entry":  # whose modules have their tests in no folder
        inner = inner.relative_to("entry")
    for module in (inner, *inner.parents[:-1]):
        for tests in (Path("tests") / module.parent / f"test_{module.stem}.py", Path("tests") / module):
            if (ROOT / tests).exists():
                stages.append([str(tests)])
    return stages


class Recorder:
    """A pytest plugin that records the lines of a package that each test executes, its seconds, and whether it starts processes.

    Args:
      folder: two files are written to it, of :mod:`coverage` (a context is a test) and JSON, named by the number of the process.
      package: the folder of the modules whose lines are recorded.
    """

    def __init__(self, folder: Path, package: Path):
        import coverage

        self.place = folder / str(os.getpid())
        self.coverage = coverage.Coverage(data_file=f"{self.place}.coverage", source=[str(package)], config_file=False)
        self.coverage.start()
        self.test = ""
        self.tests: dict[str, dict[str, Any]] = {}
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, _: Any) -> None:
        if event == "subprocess.Popen" and self.test:
            self.tests[self.test]["processes"] = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.test = item.nodeid
        self.tests[self.test] = {"seconds": 0.0, "processes": False, "passed": True}
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.test = ""
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid]["seconds"] += report.duration
        self.tests[report.nodeid]["passed"] &= report.passed

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        Path(f"{self.place}.json").write_text(json.dumps(self.tests))


class Selection:
    """A pytest plugin that runs some tests, in their order, and writes the first that fails to a file."""

    def __init__(self, tests: Sequence[str], failed: Path):
        self.order = {test: k for k, test in enumerate(tests)}
        self.failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.write_text(report.nodeid)


def run_pytest(folder: Path, tests: Sequence[str], plugin: Any, arguments: tuple[Any, ...], seconds: int, output: Path):
    """Run tests in this process, which is a fork of the one with :data:`PRELOADED`, and end it with pytest's status.

    Args:
      folder: the root of a copy of the repository.
      tests: files and folders.
      plugin: a class of pytest plugins, with its ``arguments``.
      seconds: of CPU time, after which the process is killed.
      output: the file for the printed text.
    """
    os.setsid()  # processes that tests start are killed with it
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.argv[:] = ["pytest"]
    options = ["-x"] if plugin is Selection else []
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-m", "not slow", *options, *tests], plugins=[plugin(*arguments)]
    )
    sys.stdout.flush()
    os._exit(int(status))


@functools.cache
def forks() -> Any:
    """The context of :mod:`multiprocessing` that forks processes from one with :data:`PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def status_of(
    folder: Path, tests: Sequence[str], plugin: Any, arguments: tuple[Any, ...], seconds: float, output: Path
) -> int:
    """The exit status of pytest in a process of its own; negative if it was killed."""
    process = forks().Process(target=run_pytest, args=(folder, tests, plugin, arguments, int(seconds), output))
    process.start()
    process.join(10 * seconds)  # of wall time: a deadlock takes no CPU time
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if process.exitcode in (3, 4):  # pytest itself
        raise SystemExit(output.read_text()[-4000:])
    return process.exitcode


def first_failure(copy: Path, tests: Sequence[str], seconds: float) -> str | None:
    """The first of some tests that fails in a copy; "limit" after ``seconds`` of CPU time, None if all pass."""
    failed = copy / "failed.txt"
    failed.unlink(missing_ok=True)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    status = status_of(copy, files, Selection, (tests, failed), seconds, copy / "output.txt")
    if status in (0, 5):  # 5: no tests
        return None
    return failed.read_text() if failed.exists() else "limit" if status < 0 else "import"


class Recorded:
    """What ``--record`` wrote: the tests, and those that execute a line."""

    def __init__(self, folder: Path):
        import coverage

        self.tests: dict[str, dict[str, Any]] = {}
        self._data = []
        for place in sorted(folder.glob("*.json")):
            self.tests |= {name: test for name, test in json.loads(place.read_text()).items() if test["passed"]}
            data = coverage.CoverageData(str(place.with_suffix(".coverage")))
            data.read()
            self._data.append(data)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _tests_of_lines(self, path: Path) -> dict[int, set[str]]:
        tests = collections.defaultdict(set)
        for data in self._data:
            for line, names in data.contexts_by_lineno(str(path)).items():
                tests[line] |= {name for name in names if name in self.tests}
        return tests

    def executing(self, edit: Edit) -> set[str]:
        """The tests that execute the lines of an edit; outside of functions, any line of its file."""
        by_line = self._tests_of_lines(edit.path)
        for lines in (edit.lines, edit.statement) if edit.statement else (by_line,):
            if tests := set().union(*(by_line.get(line, ()) for line in lines)):
                return tests
        return set()

    def selected(self, edit: Edit, limit: float) -> tuple[list[str], float]:
        """The tests that run on a mutant, in order, and their seconds."""
        stages = mirrored(edit.path)

        def stage(test: str) -> int:
            file = test.partition("::")[0]
            return next((k for k, s in enumerate(stages) if any(Path(file).is_relative_to(t) for t in s)), len(stages))

        processes = {name for name, test in self.tests.items() if test["processes"] and stage(name) < len(stages)}
        cases = collections.Counter()
        ordered = []
        for test in sorted(self.executing(edit) | processes, key=lambda name: self.tests[name]["seconds"]):
            function = test.partition("[")[0]
            ordered.append((stage(test), cases[function], self.tests[test]["seconds"], test))
            cases[function] += 1
        spent = [0.0, 0.0]  # seconds of mirrored tests, and of others
        tests = []
        for number, _, seconds, test in sorted(ordered):
            other = number == len(stages)
            if spent[other] + seconds <= limit:
                spent[other] += seconds
                tests.append(test)
        return tests, sum(spent)


def record(folder: Path, tests: Sequence[str]) -> None:
    """Record the lines of the package that tests execute."""
    folder.mkdir(exist_ok=True)
    output = folder / f"{os.getpid()}.txt"
    status = status_of(ROOT, tests, Recorder, (folder, ROOT / "meshpar"), 36_000, output)
    print(f"lines recorded in {folder}; exit status of pytest: {status}")


def version_of(package: Path) -> str:
    """A digest of the modules of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def copied(folder: Path) -> None:
    """Copy the repository to a folder."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)


def result_of(copy: Path, edit: Edit, recorded: Recorded, limit: float) -> dict[str, Any]:
    """The line of the log of a mutant: the first test that fails, or None; the number of tests that were selected."""
    tests, seconds = recorded.selected(edit, limit)
    place = copy / edit.path.relative_to(ROOT)
    place.write_text(edit.applied())
    try:
        failed = first_failure(copy, tests, 60 + 2 * seconds) if tests else None
    finally:
        shutil.copy(edit.path, place)
    return {"mutant": str(edit), "key": edit.key, "failed": failed, "tests": len(tests)}


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


def outcomes(mutants: Sequence[Edit], args: argparse.Namespace) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Key of a mutant → its line of the log, for the mutants in the log and the ones that run until ``--minutes`` have passed."""
    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    results = {tuple(line["key"]): line for line in map(json.loads, lines)}
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copied(copy)
        recorded = Recorded(args.recorded)
        for edit in mutants[args.part[0] :: args.part[1]]:
            if edit.key in results or time.monotonic() > end:
                continue
            began = time.monotonic()
            result = results[edit.key] = result_of(copy, edit, recorded, args.limit)
            print(
                f"{outcome(result):9} {time.monotonic() - began:4.0f} s  {edit}  {result['failed'] or ''}", flush=True
            )
            if args.log:
                with args.log.open("a") as log:
                    log.write(json.dumps(result) + "\n")
        suspects = {result["failed"] for result in results.values() if result["failed"] in recorded.tests}
        while suspects and (failed := first_failure(copy, sorted(suspects), 3600)):
            suspects.remove(failed)
            for result in results.values():
                result["broken"] = result.get("broken") or result["failed"] == failed
    return results


def outcome(result: dict[str, Any]) -> str:
    """``"found"``, ``"not found"``, or ``"broken"``."""
    return "broken" if result.get("broken") else "found" if result["failed"] else "not found"


def in_fork(seconds: float, fn: Callable[..., None], *args: Any) -> bool:
    """Whether a function that writes its output ends in a process of its own, within ``seconds`` of CPU time."""
    process = forks().Process(target=limited, args=(int(seconds), fn, *args))
    process.start()
    process.join(10 * seconds)
    process.kill()
    process.join()
    return process.exitcode == 0


def limited(seconds: int, fn: Callable[..., None], *args: Any) -> None:
    """A call that ends the process after ``seconds`` of CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    fn(*args)


def prove(args: argparse.Namespace) -> None:
    """The outcomes of ``--prove``."""
    global PRELOADED
    PRELOADED = (*PRELOADED, "proof_programs")  # whose functions have their code replaced in each fork
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"  # of the process that forks
    import proof_programs

    lines = args.log.read_text().splitlines() if args.log and args.log.exists() else []
    results = {tuple(line["key"]): line for line in map(json.loads, lines)}
    args.recorded.mkdir(exist_ok=True)
    bases: dict[str, dict[str, Any]] = {}
    for name, _ in proof_programs.programs():
        file = args.recorded / f"{name}.json"
        if not file.exists() and not in_fork(600, proof_programs.record, name, file):
            raise SystemExit(f"{name}: the program fails without a mutant")
        bases[name] = json.loads(file.read_text())
        if not bases[name]["equal"] or "proven" not in bases[name]["results"]:
            raise SystemExit(f"{name}: no result is proven, or one is wrong, without a mutant")
    every = sampled(args.paths or [SOURCE / name for name in PROVEN], 1 << 30, args.seed).values()
    mutants = [e for e in itertools.chain.from_iterable(itertools.zip_longest(*every)) if e and e.statement]
    covering = {
        e.key: [n for n, b in bases.items() if {*b["lines"].get(str(e.path), ())} & {*e.lines}] for e in mutants
    }
    mutants = [e for e in mutants if covering[e.key]]
    print(f"{len(mutants)} mutants of lines that the programs execute", flush=True)
    end = time.monotonic() + 60 * args.minutes
    for edit in mutants[: args.sample][args.part[0] :: args.part[1]]:
        if edit.key in results or time.monotonic() > end:
            continue
        began, output = time.monotonic(), args.recorded / f"{os.getpid()}.out"
        output.unlink(missing_ok=True)
        every = covering[edit.key]
        small = [n for n in every if not n.startswith("transformer")] or every
        names = [n for n in every if n in random.Random(str(edit)).sample(small, min(MAX_PROGRAMS, len(small)))]
        in_fork(120, proof_programs.try_mutant, edit.path, edit.applied(), names, args.recorded, output)
        found = json.loads(output.read_text()) if output.exists() else {}
        name = proof_outcome(found)
        results[edit.key] = {"mutant": str(edit), "key": edit.key, "outcome": name, "programs": found}
        causes = {n: f for n, f in found.items() if f[0] not in ("same programs", "error")}
        print(f"{name}  {time.monotonic() - began:.1f} s  {edit}  {causes or ''}", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(results[edit.key]) + "\n")
    table = Table("path", "mutants", *PROOF_OUTCOMES)
    for path in args.paths or [SOURCE / name for name in PROVEN]:
        counts = collections.Counter(
            r["outcome"] for r in results.values() if (ROOT / r["key"][0]).is_relative_to(path)
        )
        table.add_row(str(path.relative_to(ROOT)), str(counts.total()), *(str(counts[n]) for n in PROOF_OUTCOMES))


PROOF_OUTCOMES = (
    "error", "same programs", "refused", "not verified", "proven, same results", "proven, other results",
)  # fmt: skip
"""What may become of a mutant of ``--prove``."""


def proof_outcome(found: dict[str, tuple[str, str]]) -> str:
    """One of :data:`PROOF_OUTCOMES`, from the outcomes of the programs."""
    outcomes = {outcome for outcome, _ in found.values()}
    order = "proven, other results", "refused", "not verified", "proven, same results", "same programs"
    return next((outcome for outcome in order if outcome in outcomes), "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="*", type=lambda p: Path(p).resolve(), help="packages and modules of `meshpar` (PACKAGES)"
    )
    parser.add_argument("--sample", type=int, default=150, help="number of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prove", action="store_true", help="proofs of small programs in place of tests")
    parser.add_argument("--record", nargs="*", metavar="TESTS", help="only record the lines that tests (all) execute")
    parser.add_argument(
        "--recorded", type=Path, help="folder of the recorded lines (one for each version of the package)"
    )
    parser.add_argument("--limit", type=float, default=60, help="recorded seconds of the tests (%(default)s)")
    parser.add_argument("--log", type=Path, help="file of the outcomes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no more mutants after so long")
    parser.add_argument("--part", type=lambda p: [int(n) for n in p.split("/")], default=[0, 1], metavar="K/N",
                        help="the K-th of every N mutants, to run several processes")  # fmt: skip
    args = parser.parse_args()
    kind = "proofs" if args.prove else "lines"
    args.recorded = args.recorded or Path(tempfile.gettempdir()) / f"meshpar-{kind}-{version_of(ROOT / 'meshpar')}"
    if args.prove:
        return prove(args)
    if args.record is not None or not list(args.recorded.glob("*.json")):
        record(args.recorded, args.record or ["tests"])
    if args.record is not None:
        return
    chosen = sampled(args.paths or [SOURCE / name for name in PACKAGES], args.sample, args.seed)
    equivalent = {(e["file"], e["line"], e["change"]) for e in json.loads(EQUIVALENT.read_text())}
    results = outcomes([e for mutants in chosen.values() for e in mutants if e.key not in equivalent], args)
    kinds = ("found", "equivalent", "broken", "not found")
    table = Table("path", "mutants", *kinds)
    total: collections.Counter[str] = collections.Counter()
    for path, mutants in chosen.items():
        names = ["equivalent" if e.key in equivalent else outcome(results[e.key]) for e in mutants
                 if e.key in equivalent or e.key in results]  # fmt: skip
        counts = collections.Counter(names)
        total += counts
        table.add_row(str(path.relative_to(ROOT)), str(len(names)), *(str(counts[kind]) for kind in kinds))
    table.add_row("all", str(total.total()), *(str(total[kind]) for kind in kinds))
    tried = total["found"] + total["not found"]
    print(f"\n{total['found']} of {tried} mutants found ({total['found'] / max(tried, 1):.0%}), seed {args.seed}")


if __name__ == "__main__":
    main()

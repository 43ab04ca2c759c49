"""Random programs × random layouts × random meshes, values and gradients against the unsharded run.

    python benchmarks/fuzz.py --cases 5000 [--seed 0] [--lowering auto jit] [--log fuzz.jsonl] [--workers 1] [--outside 4]
                              [--control 4 --calls 64] [--only gathered scattered] [--coverage] [--plan v5e:4x4]
                              [--stages]

    python benchmarks/fuzz.py --seed date --minutes 60 --cases 100000 --log fuzz.jsonl     # each night: a new seed each day

A case is a program on a mesh under a layout, run under every lowering asked for: once, or several times under other settings
of JAX or under an outer ``vmap``. Gradients are taken in the program that is lowered; in one case
of four (``--outside``), of the function that the lowering returns. Results are compared in value, shape, dtype, weak type, in
where NaN and infinities are, and in the sign of zeros where elements are only moved. Prints how many ran, how many differed, how
many could not run (counted separately: cases that JAX cannot run unsharded), the primitives that they covered, and for every case
that differs the smallest one found that still does.

``--only`` draws from some statements (of ``tests/fuzz``), by name or by module. ``--seed date`` is the day's, in UTC, as
yyyymmdd, so that a seed that found something can be given again. ``--coverage`` measures which branches of ``rules`` and
``program/divisible_rewrite`` the cases take, and prints those that none did. ``--plan`` plans each case, also, for TPU slices: the
plan, its seconds and its memory, without a run. ``--control`` adds loops and conditionals, and ``--calls`` makes so many calls
before it waits for the last: collectives inside and outside of bodies, many calls in flight.
``--stages`` draws loops over stacked layers inside of loops over microbatches, under layouts with stages; other options for
programs do not apply to them. A process that is silent for ``--patience`` seconds is ended, and its case noted as hung. With
``--log`` the outcome of each case is appended to a file, and cases that are in it are not run again.
"""

import argparse
import datetime
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tables import Table

TESTS = Path(__file__).parent.parent / "tests" / "fuzz"
PACKAGE = Path(__file__).parent.parent / "meshpar"
COVERED = ("rules/*.py", "program/divisible_rewrite/*.py")
"""What ``--coverage`` measures, in the package."""
CHUNK = 100
"""Cases a process: a compiler that crashes takes no more than one case with it, and memory stays small."""


def outcome(case, lowering, reference, calls=1):
    """("", "") where all agrees, else (what kind of failure, its text)."""
    import run

    try:
        if lowering.startswith("plan "):
            run.planned(case, lowering.removeprefix("plan "))
            return "", ""
        found = run.differences(case, lowering, reference, calls)
    except Exception as e:
        return type(e).__name__, str(e).splitlines()[0][:300]
    return ("differs", str(found[0])) if found else ("", "")


def measured(folder: str) -> Any:
    """What measures the branches that are taken."""
    import coverage  # an extra, `dev`

    include = [str(PACKAGE / pattern) for pattern in COVERED]
    return coverage.Coverage(data_file=str(Path(folder) / "taken"), branch=True, include=include, config_file=False)


def statements_of(only: list[str]) -> list[str]:
    """The statements of some names and modules."""
    sys.path.insert(0, str(TESTS))
    import bodies  # noqa: F401  (its statements)
    from statements import STATEMENTS

    found = [name for name, (fn, _) in STATEMENTS.items() if name in only or fn.__module__ in only]
    known = {*STATEMENTS, *(fn.__module__ for fn, _ in STATEMENTS.values())}
    if missing := set(only) - known:
        raise SystemExit(f"--only {' '.join(sorted(missing))}: no such statement; there are {', '.join(sorted(known))}")
    return found


def worker(args, indices):
    """Run cases, print a line of JSON for each."""
    taken = None
    if args.coverage_into:  # before the package is imported
        taken = measured(args.coverage_into)
        taken.set_option("run:parallel", True)
        taken.start()
    seed, tries, every, control, calls = args.seed, args.tries, args.outside, args.control, args.calls
    lowerings = [*args.lowering, *(f"plan {target}" for target in args.plan)]
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    sys.path.insert(0, str(TESTS))
    import pipelines
    import programs
    import run
    import shrink

    warnings.simplefilter("ignore")
    among = statements_of(args.only) if args.only else ()
    for n, index in enumerate(indices):
        print(json.dumps({"begun": index}), flush=True)
        rng = random.Random(f"{seed}/{index}")
        if args.stages:
            case = pipelines.make_staged_case(rng)
        else:
            case = programs.make_case(rng, args.statements, every=every, control=control, among=among)
        line = {"case": index, "mesh": case.mesh, "outside": case.outside, "failed": {}}
        try:
            reference = run.unsharded(case)
        except Exception as e:
            line["failed"]["unsharded"] = {
                "kind": type(e).__name__,
                "text": str(e).splitlines()[0][:300],
                "smallest": str(case),
            }
            print(json.dumps(line | {"primitives": []}), flush=True)
            continue
        print(json.dumps({"has a reference": index}), flush=True)
        line["primitives"] = list(reference.primitives)
        for lowering in lowerings:
            kind, text = outcome(case, lowering, reference, calls)
            if kind:

                def fails(other, lowering=lowering, kind=kind):
                    try:
                        return outcome(other, lowering, run.unsharded(other), calls)[0] == kind
                    except Exception:
                        return False

                small = shrink.shrink(case, fails, tries) if tries else case
                line["failed"][lowering] = {"kind": kind, "text": text, "smallest": str(small)}
        print(json.dumps(line), flush=True)
        if n % 25 == 24:
            jax.clear_caches()
    if taken is not None:
        taken.stop()
        taken.save()


def run_chunk(args, indices, note):
    """Run cases in processes of their own; a case in which one dies is noted as crashed."""
    todo = list(indices)
    while todo:
        command = [sys.executable, __file__, "--seed", str(args.seed), "--tries", str(args.tries),
                   "--outside", str(args.outside), "--control", str(args.control), "--calls", str(args.calls),
                   "--statements", str(args.statements), "--coverage-into", args.coverage_into, "--only", *args.only,
                   *["--stages"] * args.stages,
                   "--plan", *args.plan, "--lowering", *args.lowering, "--worker", *map(str, todo)]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert process.stdout is not None
        begun, stage = None, "process"
        hung = threading.Event()

        def end(process=process, hung=hung):
            hung.set()
            process.kill()

        timer = threading.Timer(args.patience, end)
        timer.start()
        for text in process.stdout:
            timer.cancel()
            timer = threading.Timer(args.patience, end)
            timer.start()
            line = json.loads(text)
            if "begun" in line:
                begun, stage = line["begun"], "unsharded"
            elif "has a reference" in line:
                stage = "process"
            else:
                note(line)
                todo.remove(line["case"])
        timer.cancel()
        if process.wait() and todo:
            index = begun if begun in todo else todo[0]
            assert process.stderr is not None
            last = process.stderr.read().strip().splitlines()[-3:]
            note(
                {
                    "case": index,
                    "failed": {
                        stage: {
                            "kind": "hung" if hung.is_set() else "crashed",
                            "text": " ".join(last)[-600:],
                            "smallest": "",
                        }
                    },
                    "primitives": [],
                }
            )
            todo.remove(index)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=seed_of, default=0, help="a number, or `date`: today's, another one each day")
    parser.add_argument("--lowering", nargs="+", default=["auto", "jit"])
    parser.add_argument("--log", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no more cases after so long")
    parser.add_argument("--tries", type=int, default=80, help="runs spent on making a failing case small; 0: none")
    parser.add_argument("--outside", type=int, default=4, metavar="N",
                        help="of one program in N the lowered function is differentiated; 1: of all, 0: of none")  # fmt: skip
    parser.add_argument(
        "--control", type=int, default=0, metavar="N", help="add N loops and conditionals to each program"
    )
    parser.add_argument("--calls", type=int, default=1, metavar="N", help="make N calls before the last is waited for")
    parser.add_argument("--patience", type=float, default=600, help="seconds until a silent process is ended")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="statements, or modules of them, to draw from"
    )
    parser.add_argument("--statements", type=int, default=7, metavar="N", help="statements of a program")
    parser.add_argument("--coverage", action="store_true", help="measure and print the branches taken")
    parser.add_argument("--plan", nargs="*", default=[], metavar="TOPOLOGY", help="plan each case for these slices too")
    parser.add_argument("--stages", action="store_true", help="draw pipelines: layouts with stages")
    parser.add_argument("--coverage-into", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args, args.worker)
        return
    if args.only:
        statements_of(args.only)  # a name that is wrong stops here
    key = {"seed": args.seed, "every": args.outside, "control": args.control, "calls": args.calls, "only": args.only,
           "statements": args.statements, "stages": args.stages}  # fmt: skip
    want = {*args.lowering, *(f"plan {target}" for target in args.plan)}
    lines = [json.loads(text) for text in args.log.read_text().splitlines()] if args.log and args.log.exists() else []
    lines = [line for line in lines if set(line["lowerings"]) >= want and all(line.get(k) == v for k, v in key.items())]
    have = {line["case"] for line in lines}
    todo = [i for i in range(args.first, args.first + args.cases) if i not in have]
    start = time.time()

    def note(line):
        line.update(key, lowerings=sorted(want))
        lines.append(line)
        if args.log:
            with args.log.open("a") as f:
                f.write(json.dumps(line) + "\n")
        if len(lines) % 50 == 0:
            failed = sum(bool(x["failed"]) for x in lines)
            print(f"{len(lines)} cases, {failed} failed, {time.time() - start:.0f} s", file=sys.stderr, flush=True)

    def chunk(indices):
        if time.time() - start < 60 * args.minutes:
            run_chunk(args, indices, note)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.workers) as pool:
        args.coverage_into = folder if args.coverage else ""
        list(pool.map(chunk, [todo[k : k + CHUNK] for k in range(0, len(todo), CHUNK)]))
        report(lines, sorted(want), time.time() - start)
        if args.coverage:
            report_branches(folder)


def seed_of(text: str) -> int:
    """A seed as it is given: a number, or the day."""
    return int(f"{datetime.datetime.now(datetime.UTC):%Y%m%d}") if text == "date" else int(text)


def report_branches(folder):
    """Print, per file, the share of branches that some case took, and where those lie that none did."""
    taken = measured(folder)
    taken.combine()
    text = io.StringIO()
    total = taken.report(file=text, show_missing=True, ignore_errors=True)
    print(f"\nlines and branches that some case took ({total:.1f} % of all), and those that none did:")
    print(text.getvalue().replace(f"{PACKAGE}{os.sep}", ""))


def report(lines, lowerings, seconds):
    """Print the number of cases, the primitives that they cover, and the failures."""
    crashed = [x for x in lines if "process" in x["failed"]]
    alone = sum("unsharded" in x["failed"] for x in lines)
    ways = Counter(x.get("outside") for x in lines)
    print(
        f"{len(lines)} cases, {seconds:.0f} s; {alone} that JAX could not run unsharded, with nothing to compare with\n"
    )
    covered = Counter(p for x in lines for p in x["primitives"])
    table = Table("cases", "lowering", "differed", "could not run", "differentiated from outside", "primitives")
    for lowering in lowerings:
        kinds = Counter(x["failed"][lowering]["kind"] for x in lines if lowering in x["failed"])
        differ = kinds.pop("differs", 0)
        counts = (differ, sum(kinds.values()) + len(crashed), ways["vjp"] + ways["jvp"], len(covered))
        table.add_row(str(len(lines)), lowering, *map(str, counts))
    print()
    print(f"{len(covered)} primitives (in how many cases):")
    print("  " + ", ".join(f"{p} {n}" for p, n in covered.most_common()))
    for x in lines:
        for lowering, f in x["failed"].items():
            print(f"\ncase {x['case']} under {lowering}: {f['kind']}: {f['text']}\n{f['smallest']}")


if __name__ == "__main__":
    main()

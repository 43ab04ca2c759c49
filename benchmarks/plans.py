"""Plans of about 100 real programs, stored in a file, and what differs between two such files.

    python benchmarks/plans.py --out old.json                    # before a change: about two minutes
    python benchmarks/plans.py --out new.json --only llama       # after it; only programs whose name contains "llama"
    python benchmarks/plans.py --compare old.json new.json       # exit status 1 if a plan differs

The programs are those of `agreement.py`, `plain.py` and `maxtext.py`: models at their real sizes, on four TPU generations. Compared
are step time, peak memory, bytes sent, lowering, the number of steps of each kind, and bytes by collective of each plan. The golden
plans of the tests are a sample of them.
"""

import argparse
import functools
import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import agreement
import maxtext
import plain
from tables import Table

import meshpar as mp

Summary = dict[str, Any]
"""Of a plan: figure → number or text; ``"steps"`` and ``"collectives"``: kind → number. Of a program without a plan: its error."""
MIN_DIFFERENCE = 1e-9
"""Smaller relative differences are of the order of additions."""


def programs() -> Iterator[tuple[str, Callable[[], mp.Plan]]]:
    """(name, a function that plans it) of every program."""
    for t in agreement.TRIPLES:
        yield f"agreement: {t.name}", t.plan
    for case in plain.CASES:
        yield f"plain: {case.name}", functools.partial(plan_of_case, case)
    for row in maxtext.ROWS:
        yield f"maxtext: {row.name}", functools.partial(plan_of_row, row)


def plan_of_case(case: plain.Case) -> mp.Plan:
    step, args, dims = case.make()
    where: dict[str, Any] = {"topology": case.topology, "mesh": case.mesh, "layout": case.layout}
    return mp.plan(step, *args, dims=dims, donate_argnums=0, **where)


def plan_of_row(row: maxtext.Row) -> mp.Plan:
    step, args, how = maxtext.arguments(row, "auto")
    return mp.plan(step, *args, **how)


def summary(make: Callable[[], mp.Plan]) -> Summary:
    """The figures of a plan; ``{"error": …}`` if there is no plan."""
    try:
        plan = make()
    except mp.errors.MeshparError as e:
        return {"error": str(e).splitlines()[0]}
    sent: dict[str, float] = {}
    for c in plan.collectives:
        kind = f"{c.op} over {'+'.join(c.axes)}, {c.algorithm}"
        sent[kind] = sent.get(kind, 0.0) + c.total_bytes
    return {
        "seconds": plan.seconds,
        "peak": plan.memory.peak,
        "bytes": plan.bytes_sent,
        "lowering": plan.lowering,
        "steps": Counter(type(step).__name__ for step in plan.body.all_steps),
        "collectives": sent,
    }


class Difference(NamedTuple):
    """A figure that differs between two versions; None: one of them does not have it."""

    program: str
    figure: str
    old: Any
    new: Any

    def cells(self) -> tuple[str, ...]:
        """Of a row of a table, with the relative change of a number."""
        both = isinstance(self.old, int | float) and isinstance(self.new, int | float) and self.old
        texts = ("" if x is None else f"{x:.9g}" if isinstance(x, float) else str(x) for x in (self.old, self.new))
        return self.program, self.figure, *texts, f"{self.new / self.old - 1:+.3%}" if both else ""


def differences(old: dict[str, Summary], new: dict[str, Summary]) -> list[Difference]:
    """What differs between the plans of two versions, by program: (program → summary) of each.

    A program of one version only is one difference.
    """
    found = []
    for program in {**old, **new}:
        if program not in old or program not in new:
            found.append(Difference(program, "program", *("planned" if program in v else None for v in (old, new))))
            continue
        before, after = flat(old[program]), flat(new[program])
        found += [
            Difference(program, figure, before.get(figure), after.get(figure))
            for figure in {**before, **after}
            if not same(before.get(figure), after.get(figure))
        ]
    return found


def flat(summary: Summary) -> dict[str, Any]:
    """A summary without nesting: ``{"steps": {"Run": 3}}`` becomes ``{"steps: Run": 3}``."""
    flat = {}
    for key, value in summary.items():
        flat |= {f"{key}: {k}": n for k, n in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def same(old: Any, new: Any) -> bool:
    numbers = all(isinstance(x, int | float) for x in (old, new))
    return math.isclose(old, new, rel_tol=MIN_DIFFERENCE) if numbers else old == new


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if the files differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="plan, and write the file")
    what.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="print what differs between two files"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only programs whose name contains it")
    args = parser.parse_args(arguments)
    if args.compare:
        old, new = (
            {name: s for name, s in json.loads(path.read_text()).items() if args.only in name} for path in args.compare
        )
        found = differences(old, new)
        changed = {d.program for d in found}
        table = Table(
            "program", "figure", "old", "new", "change", title=f"{len(changed)} of {len({*old, *new})} plans differ"
        )
        for d in found:
            table.add_row(*d.cells())
        return bool(found)
    out = {}
    for name, plan in programs():
        if args.only in name:
            print(name, file=sys.stderr, flush=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                out[name] = summary(plan)
    args.out.write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

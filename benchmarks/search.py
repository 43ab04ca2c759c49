"""What mp.search finds beside the known schemes: seconds of a step by the plan, how many plans that took, and how long.

    python benchmarks/search.py [--most 400] [--only llama3_8b] [--topology v5e:16x16]

Every scheme is on its best mesh. Nothing is compiled.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar.plan.collectives import duration, human
from meshpar.target import load_target

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = [
    ("llama.py:llama3_8b", "v5e:16x16", {"batch": 512}),
    ("llama.py:llama3_8b", "v5e:16x16", {"batch": 32}),
    ("llama.py:llama3_8b", "v5p:8x8x8", {"batch": 64}),
    ("llama.py:llama3_70b", "v5p:8x8x8", {"batch": 64}),
    ("mixtral.py:mixtral_8x7b", "v5e:16x16", {"batch": 256}),
]
"""(target, slice, arguments of the target)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--only", default="", help="targets whose name has this")
    parser.add_argument("--topology", help="only this slice")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    table = Table(title=f"mp.search, at most {args.most} plans")
    for column in ("", "found", "mesh: layout", "peak", "best scheme", "ratio", "plans", "CPU s"):
        table.add_column(
            column, justify="left" if column in ("", "mesh: layout", "best scheme") else "right", overflow="fold"
        )
    for text, topology, options in CASES:
        if args.only not in text or args.topology not in (None, topology):
            continue
        target = load_target(str(EXAMPLES / text), options)
        began = time.process_time()
        found = mp.search(
            target.step, *target.args, topology=topology, dims=target.dims, donate_argnames="state", most=args.most
        )
        took = time.process_time() - began
        schemes = [r for r in found.rows if r.name and r.fits]
        best = min(schemes, key=lambda r: r.seconds, default=None)
        name = text.partition(":")[2] + "".join(f", {k} {v}" for k, v in options.items()) + f"\n{topology}"
        table.add_row(
            name, duration(found.best.seconds) if found.fits else "nothing fits", f"{found.best.mesh}\n{found.best.layout}",
            human(found.best.peak), "none fits" if best is None else f"{best.name}, {best.mesh}\n{duration(best.seconds)}",
            "" if best is None else f"{found.best.seconds / best.seconds:.2f}", str(found.planned), f"{took:.0f}",
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

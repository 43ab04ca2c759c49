"""What mp.search finds beside the known schemes: seconds of a step by the plan, how many plans that took, and how long.

    python benchmarks/search.py [--most 400] [--only llama3_8b] [--topology v5e:16x16] [--batch 32]
                                [--compile | --exhaustive | --random 1000]

Every scheme is on its best mesh; MaxText's default is FSDP over all devices. ``--compile`` prints instead what the compiler
(libtpu, at full effort) says of what was found and of the best scheme: the whole step by its final schedule, in which Pallas
kernels have no cycles, and the peak. ``--exhaustive`` compares searches of a few dims with the plans of all their layouts,
``--random`` what was found with so many random layouts of the whole space, and with as many random steps from it. Else nothing
is compiled.
"""

import argparse
import itertools
import math
import random
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import meshpar as mp
from meshpar.hardware.topology import parse_topology
from meshpar.layout import Rule
from meshpar.mesh import planned_mesh
from meshpar.plan.claims import Claims
from meshpar.search import Search
from meshpar.search.space import Point, Space, meshes
from meshpar.target import load_target
from meshpar.units import format_memory, format_seconds

EXAMPLES = Path(__file__).parent.parent / "examples"
SLICES = ("v5e:16x16", "v5p:8x8x8", "tpu7x:4x4x4")
CASES = {
    "llama.py:llama3_8b": ((512, 32), (1024, 64), (256, 16)),
    "llama.py:llama3_70b": ((256, 32), (512, 64), (128, 16)),
    "mixtral.py:mixtral_8x7b": ((256, 32), (512, 64), (256, 16)),
    "deepseek.py:deepseek_671b": ((256, 32), (512, 64), (128, 16)),
    "resnet.py:resnet50": ((8192, 256), (16384, 512), (2048, 64)),
}
"""Target → a large batch and a small one for each of the slices."""
FEW = (
    ("llama.py:llama3_8b", "v5e:16x16", 32, "data=32, model=8", ("batch", "embed", "mlp")),
    ("llama.py:llama3_8b", "v5p:8x8x8", 64, "data=64, model=8", ("batch", "seq", "mlp")),
    ("mixtral.py:mixtral_8x7b", "v5e:16x16", 32, "data=32, model=8", ("batch", "embed", "expert")),
    ("deepseek.py:deepseek_671b", "v5p:8x8x8", 512, "data=64, model=8", ("batch", "embed", "expert")),
    ("resnet.py:resnet50", "tpu7x:4x4x4", 64, "data=16, model=8", ("batch", "height", "classes")),
)
"""Target, slice, batch, mesh and dims of the exhaustive comparisons."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--only", default="", help="targets whose name has this")
    parser.add_argument("--topology", help="only this slice")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument("--compile", action="store_true", help="what the compiler says of the two best")
    parser.add_argument("--exhaustive", action="store_true", help="searches beside all layouts of a few dims")
    parser.add_argument("--random", type=int, default=0, help="what is found beside so many random layouts")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    if args.exhaustive:
        for case in FEW:
            if args.only in case[0]:
                exhaustive(*case)
        return
    for text, batches in CASES.items():
        if args.only not in text:
            continue
        wanted = [
            (topology, batch)
            for topology, pair in zip(SLICES, batches, strict=True)
            for batch in pair
            if args.topology in (None, topology) and args.batch in (None, batch)
        ]
        if args.compile or args.random:
            for topology, batch in wanted:
                if args.compile:
                    confirmed(text, topology, batch, args.most)
                else:
                    beside_random(text, topology, batch, args.most, args.random)
            continue
        columns = ("", "found", "mesh: layout", "peak", "best scheme", "ratio", "of MaxText's", "plans", "CPU s")
        table = Table(title=f"{text.partition(':')[2]}, at most {args.most} plans")
        for column in columns:
            table.add_column(
                column, justify="left" if column in ("", "mesh: layout", "best scheme") else "right", overflow="fold"
            )
        for topology, batch in wanted:
            table.add_row(*searched(text, topology, batch, args.most))
        Console(width=170).print(table)


def found_by(text: str, topology: str, batch: int, most: int) -> tuple[Any, Search, float, Any]:
    """(target, what is found, CPU seconds that took, the best of the schemes that fit, or None)."""
    target = load_target(str(EXAMPLES / text), {"batch": batch})
    began = time.process_time()
    found = mp.search(
        target.step, *target.args, topology=topology, dims=target.dims, donate_argnames="state", max_plans=most
    )
    took = time.process_time() - began
    schemes = [r for r in found.rows if r.name and r.fits]
    return target, found, took, min(schemes, key=lambda r: r.seconds, default=None)


def searched(text: str, topology: str, batch: int, most: int) -> list[str]:
    """A row of the table."""
    _, found, took, best = found_by(text, topology, batch, most)
    maxtext = next((r for r in found.rows if r.name == "fsdp" and r.fits), None)

    def ratio(row: Any) -> str:
        return "–" if row is None else f"{found.best.seconds / row.seconds:.3f}"

    return [
        f"{topology}, batch {batch}", format_seconds(found.best.seconds) if found.fits else "nothing fits",
        f"{found.best.mesh}\n{found.best.layout}", format_memory(found.best.peak),
        "none fits" if best is None else f"{best.name}, {best.mesh}\n{format_seconds(best.seconds)}",
        ratio(best), ratio(maxtext), str(found.planned), f"{took:.1f}",
    ]  # fmt: skip


def confirmed(text: str, topology: str, batch: int, most: int) -> None:
    """Print what the compiler says of what is found, and of the best scheme."""
    target, found, _, best = found_by(text, topology, batch, most)
    console = Console(width=200, highlight=False)
    for what, row in (("found", found.best), (best.name if best else "", best)):
        if row is None or (what != "found" and row == found.best):
            continue
        c = mp.compile(
            target.step, *target.args, mesh=mp.mesh(row.mesh, topology=topology), layout=row.layout, dims=target.dims,
            donate_argnames="state", lowering="shard_map", effort="full",
        )  # fmt: skip
        assert c.exposed is not None
        console.print(
            f"{text.partition(':')[2]}, {batch}, {topology} | {what} | {row.mesh} | {row.layout} | planned "
            f"{format_seconds(row.seconds)} | schedule {format_seconds(c.exposed.schedule)} | "
            f"exposed {format_seconds(c.exposed.seconds)} | "
            f"peak {format_memory(row.peak)} | compiled {format_memory(c.memory.peak)}"
        )


def exhaustive(text: str, topology: str, batch: int, mesh: str, few: Sequence[str]) -> None:
    """Plan all axes for a few dims, in every order of their rules, and search the same."""
    target = load_target(str(EXAMPLES / text), {"batch": batch})
    how: dict[str, Any] = {"mesh": mesh, "topology": topology, "dims": target.dims, "donate_argnames": "state"}
    base = mp.plan(target.step, *target.args, layout="", lowering="shard_map", overlap="auto", **how)
    began, least, texts = time.process_time(), dict[Any, float](), 0
    a, b = base.sizes
    choices = ["", a, b, f"{a}+{b}", f"{b}+{a}"]
    for dims in itertools.permutations(few):
        for axes in itertools.product(choices, repeat=len(few)):
            texts += 1
            layout = "; ".join(f"{d}?: {a}" for d, a in zip(dims, axes, strict=True) if a)
            same = Claims(base.program, mp.Layout(layout), dict(base.sizes)).answers()
            if same not in least:
                least[same] = seconds_that_fit(base, layout)
    took = time.process_time() - began
    print(f"{text.partition(':')[2]}, batch {batch}, {topology} as {mesh}, {', '.join(few)}:")
    if min(least.values()) == math.inf:
        print(f"  none of {texts} layouts fits")
        return
    print(
        f"  all {texts} layouts, {len(least)} different: {format_seconds(min(least.values()))} at best, {took:.0f} CPU s"
    )
    began = time.process_time()
    others = [d for d in base.program.all_names() if d not in few and "'" not in d]
    found = mp.search(target.step, *target.args, forbid=others, **how)
    took = time.process_time() - began
    print(
        f"  searched: {format_seconds(found.best.seconds)}, {found.planned} plans, {took:.0f} CPU s; "
        f"{found.best.seconds / min(least.values()):.3f} of the best; {found.best.layout}"
    )


def seconds_that_fit(base: mp.Plan, layout: str, mesh: Any = None, topology: str | None = None) -> float:
    """The seconds of a plan; without end where it does not fit, or there is none."""
    assert base.chip is not None
    try:
        plan = base.replan(layout=layout, mesh=mesh, topology=topology)
    except mp.MeshparError:
        return math.inf
    fits = plan.memory.peak <= 0.85 * base.chip.per_device().hbm
    return plan.seconds or math.inf if fits else math.inf


def beside_random(text: str, topology: str, batch: int, most: int, number: int) -> None:
    """Plan random layouts of the whole space on random meshes, and what random steps lead to from what is found."""
    target, found, *_ = found_by(text, topology, batch, most)
    rng = random.Random(0)
    base = mp.plan(
        target.step, *target.args, mesh=found.best.mesh, topology=topology, layout="", dims=target.dims,
        donate_argnames="state", lowering="shard_map", overlap="auto",
    )  # fmt: skip
    space, where = Space.of(base.program, mp.Layout(""), ()), parse_topology(topology)
    shapes, dims = meshes(where.devices, where.slices), [d for d, scope in space.dims if scope is None]
    at = tuple(base.sizes.items())

    def rule(dim: str, sizes: Any) -> Rule:
        names = [a for a, _ in sizes]
        return Rule(dim, tuple(rng.sample(names, rng.randint(1, len(names)))), True)

    def anywhere() -> Point:
        sizes = rng.choice(shapes)
        return space.point(sizes, [rule(d, sizes) for d in rng.sample(dims, rng.randint(1, len(dims)))])

    def beside() -> Point:
        rules = list(mp.Layout(found.best.layout).rules)
        for dim in rng.sample(dims, rng.randint(1, 3)):
            rules = [r for r in rules if r.dim != dim]
            if rng.random() < 0.8:
                rules.insert(rng.randint(0, len(rules)), rule(dim, at))
        return space.point(at, rules)

    print(
        f"{text.partition(':')[2]}, batch {batch}, {topology}: found {format_seconds(found.best.seconds)}, {found.planned} plans"
    )
    for what, draw in (("anywhere", anywhere), ("up to three rules from it", beside)):
        drawn = {(p.mesh, p.layout) for p in (draw() for _ in range(number))}
        seconds = sorted(
            (seconds_that_fit(base, layout, planned_mesh(mesh, topology), topology), mesh, layout)
            for mesh, layout in sorted(drawn)
        )
        least, mesh, layout = seconds[0]
        fit = sum(s[0] < math.inf for s in seconds)
        best = f"{found.best.seconds / least:.3f} of the best, {mesh}: {layout}" if fit else ""
        print(f"  {what}: {len(seconds)} layouts, {fit} fit; found takes {best}")


if __name__ == "__main__":
    main()

"""The result of mp.search compared with the presets: planned step time, number of plans, and CPU time of the search.

    python benchmarks/search.py [--max-plans 400] [--only llama3_8b] [--topology v5e:16x16] [--batch 32]
                                [--compile | --exhaustive | --random 1000]

Every preset is on its best mesh; MaxText's default is FSDP over all devices. ``--compile`` compiles the result and the best preset
(libtpu, full effort) and prints the step time of the final schedule, in which Pallas kernels have no cycles, and the peak memory.
``--exhaustive`` compares searches over three dims with the plans of all their layouts. ``--random N`` compares the result with N
random layouts of the search space, and with N random changes of the result. The last two compile nothing.
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
from tables import Table

import meshpar as mp
from meshpar._src.entry.cli_target import load_target
from meshpar._src.hardware.topology import parse_topology
from meshpar._src.layout import Rule
from meshpar._src.mesh import planned_mesh
from meshpar._src.plan.assignment import AxisAssignment
from meshpar._src.search import Search
from meshpar._src.search.space import Point, Space, meshes
from meshpar._src.units import format_memory, format_seconds

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
EXHAUSTIVE = (
    ("llama.py:llama3_8b", "v5e:16x16", 32, "data=32, model=8", ("batch", "embed", "mlp")),
    ("llama.py:llama3_8b", "v5p:8x8x8", 64, "data=64, model=8", ("batch", "seq", "mlp")),
    ("mixtral.py:mixtral_8x7b", "v5e:16x16", 32, "data=32, model=8", ("batch", "embed", "expert")),
    ("deepseek.py:deepseek_671b", "v5p:8x8x8", 512, "data=64, model=8", ("batch", "embed", "expert")),
    ("resnet.py:resnet50", "tpu7x:4x4x4", 64, "data=16, model=8", ("batch", "height", "classes")),
)
"""Target, slice, batch, mesh and dims of the exhaustive comparisons."""
HEADS = (
    "model, batch, slice",
    "step",
    "mesh",
    "layout",
    "peak",
    "best preset",
    "ratio",
    "to MaxText's",
    "plans",
    "CPU s",
)
COMPILED_HEADS = ("model, batch, slice", "layout", "planned step", "schedule", "exposed", "planned peak", "compiled peak",
                  "ratio of schedules")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-plans", type=int, default=400)
    parser.add_argument("--only", default="", help="targets whose name contains this text")
    parser.add_argument("--topology", help="only this slice")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument("--compile", action="store_true", help="compile the result and the best preset")
    parser.add_argument("--exhaustive", action="store_true", help="compare with all layouts of three dims")
    parser.add_argument("--random", type=int, default=0, help="compare with so many random layouts")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    if args.exhaustive:
        for case in EXHAUSTIVE:
            if args.only in case[0]:
                exhaustive(*case)
        return
    heads = COMPILED_HEADS if args.compile else () if args.random else HEADS
    table = Table(*heads, title=f"at most {args.max_plans} plans") if heads else None
    for text, batches in CASES.items():
        if args.only not in text:
            continue
        wanted = [
            (topology, batch)
            for topology, pair in zip(SLICES, batches, strict=True)
            for batch in pair
            if args.topology in (None, topology) and args.batch in (None, batch)
        ]
        for topology, batch in wanted:
            if table is None:
                compare_with_random(text, topology, batch, args.max_plans, args.random)
            elif args.compile:
                add_compiled(table, text, topology, batch, args.max_plans)
            else:
                table.add_row(*searched(text, topology, batch, args.max_plans))


def search(text: str, topology: str, batch: int, max_plans: int) -> tuple[Any, Search, float, Any]:
    """(target, its search, CPU seconds of the search, row of the fastest preset that fits or None)."""
    target = load_target(str(EXAMPLES / text), {"batch": batch})
    began = time.process_time()
    result = mp.search(
        target.step, *target.args, topology=topology, dims=target.dims, donate_argnames="state", max_plans=max_plans
    )
    took = time.process_time() - began
    presets = [r for r in result.rows if r.name and r.fits]
    return target, result, took, min(presets, key=lambda r: r.seconds, default=None)


def case_name(text: str, topology: str, batch: int) -> str:
    """Model, batch and slice: the first cell of a row."""
    return f"{text.partition(':')[2]}, {batch}, {topology}"


def searched(text: str, topology: str, batch: int, max_plans: int) -> list[str]:
    """The cells of a row under :data:`HEADS`."""
    _, result, took, preset = search(text, topology, batch, max_plans)
    maxtext = next((r for r in result.rows if r.name == "fsdp" and r.fits), None)

    def ratio(row: Any) -> str:
        return "–" if row is None else f"{result.best.seconds / row.seconds:.3f}"

    return [
        case_name(text, topology, batch), format_seconds(result.best.seconds) if result.fits else "nothing fits",
        str(result.best.mesh), f"`{'; '.join(str(result.best.layout).splitlines())}`", format_memory(result.best.peak),
        "none fits" if preset is None else f"{preset.name}, {preset.mesh} {format_seconds(preset.seconds)}",
        ratio(preset), ratio(maxtext), str(result.planned), f"{took:.1f}",
    ]  # fmt: skip


def add_compiled(table: Table, text: str, topology: str, batch: int, max_plans: int) -> None:
    """Compile the search's result and the best preset, and add their rows under :data:`COMPILED_HEADS`."""
    target, result, _, preset = search(text, topology, batch, max_plans)
    schedules: list[float] = []
    for name, row in (("search result", result.best), (preset.name if preset else "", preset)):
        if row is None or (schedules and row == result.best):
            continue
        c = mp.compile(
            target.step, *target.args, mesh=mp.mesh(row.mesh, topology=topology), layout=row.layout, dims=target.dims,
            donate_argnames="state", lowering="shard_map", effort="full",
        )  # fmt: skip
        assert c.exposed is not None
        schedules.append(c.exposed.schedule)
        table.add_row(
            case_name(text, topology, batch), name, format_seconds(row.seconds), format_seconds(c.exposed.schedule),
            format_seconds(c.exposed.seconds), format_memory(row.peak), format_memory(c.memory.peak),
            f"{schedules[0] / schedules[1]:.2f}" if len(schedules) == 2 else "",
        )  # fmt: skip


def exhaustive(text: str, topology: str, batch: int, mesh: str, few: Sequence[str]) -> None:
    """Plan every layout of three dims, search over the same dims, and print both step times."""
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
            same = AxisAssignment(base.program, mp.Layout(layout), dict(base.sizes)).axes
            if same not in least:
                least[same] = seconds_that_fit(base, layout)
    took = time.process_time() - began
    print(f"{text.partition(':')[2]}, batch {batch}, {topology} as {mesh}, {', '.join(few)}:")
    if min(least.values()) == math.inf:
        print(f"  none of {texts} layouts fits")
        return
    print(f"  all {texts} layouts, {len(least)} distinct: best {format_seconds(min(least.values()))}, {took:.0f} CPU s")
    began = time.process_time()
    others = [d for d in base.program.all_names() if d not in few and "'" not in d]
    result = mp.search(target.step, *target.args, forbid=others, **how)
    took = time.process_time() - began
    print(
        f"  search: {format_seconds(result.best.seconds)}, {result.planned} plans, {took:.0f} CPU s; "
        f"ratio to the best {result.best.seconds / min(least.values()):.3f}; {result.best.layout}"
    )


def seconds_that_fit(base: mp.Plan, layout: str, mesh: Any = None, topology: str | None = None) -> float:
    """The planned step time, or infinity if the plan does not fit the memory or the layout has no plan."""
    assert base.chip is not None
    try:
        plan = base.replan(layout=layout, mesh=mesh, topology=topology)
    except mp.errors.MeshparError:
        return math.inf
    fits = plan.memory.peak <= 0.85 * base.chip.per_device().hbm
    return plan.seconds or math.inf if fits else math.inf


def compare_with_random(text: str, topology: str, batch: int, max_plans: int, number: int) -> None:
    """Plan random layouts on random meshes, and random changes of the search's result; print how its step time compares."""
    target, result, *_ = search(text, topology, batch, max_plans)
    rng = random.Random(0)
    base = mp.plan(
        target.step, *target.args, mesh=result.best.mesh, topology=topology, layout="", dims=target.dims,
        donate_argnames="state", lowering="shard_map", overlap="auto",
    )  # fmt: skip
    where = parse_topology(topology)
    shapes = meshes(where.devices, where.slices)
    space = Space.of(base.program, shapes, mp.Layout(""), ())
    dims = [d for d, _ in space.shared]
    at = tuple(base.sizes.items())

    def rule(dim: str, sizes: Any) -> Rule:
        names = [a for a, _ in sizes]
        return Rule(dim, tuple(rng.sample(names, rng.randint(1, len(names)))), True)

    def anywhere() -> Point:
        sizes = rng.choice(shapes)
        return space.point(sizes, [rule(d, sizes) for d in rng.sample(dims, rng.randint(1, len(dims)))])

    def nearby() -> Point:
        rules = list(mp.Layout(result.best.layout).rules)
        for dim in rng.sample(dims, rng.randint(1, 3)):
            rules = [r for r in rules if r.dim != dim]
            if rng.random() < 0.8:
                rules.insert(rng.randint(0, len(rules)), rule(dim, at))
        return space.point(at, rules)

    print(
        f"{case_name(text, topology, batch)}: search result {format_seconds(result.best.seconds)}, {result.planned} plans"
    )
    for where_drawn, draw in (("any layout", anywhere), ("up to three rules changed", nearby)):
        drawn = {(p.mesh, p.layout) for p in (draw() for _ in range(number))}
        seconds = sorted(
            (seconds_that_fit(base, layout, planned_mesh(mesh, topology), topology), mesh, layout)
            for mesh, layout in sorted(drawn)
        )
        least, mesh, layout = seconds[0]
        fit = sum(s[0] < math.inf for s in seconds)
        best = (
            f"; ratio of the search result to the best: {result.best.seconds / least:.3f}, {mesh}: {layout}"
            if fit
            else ""
        )
        print(f"  {where_drawn}: {len(seconds)} layouts, {fit} fit{best}")


if __name__ == "__main__":
    main()

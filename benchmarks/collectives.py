"""All-gathers and reduce-scatters over several torus dimensions, in four forms, as the TPU compiler makes them: one table.

    python benchmarks/collectives.py                                        # every slice, size and form
    python benchmarks/collectives.py --slices v5e:16x16 --mib 256           # a part of it
    python benchmarks/collectives.py --json FILE                            # keep the facts, and go on where it ended

Needs libtpu (`pip install 'jax[tpu]'`) but no TPU: nothing runs. Columns, of one device:

- `sent`: bytes sent, in MiB, over the least that is possible, V·(A-1)/A. The compiler's text, or (`pallas`) the table.
- `peak`: memory of the whole program over V, operand and result included.
- `in flight`: the most `ppermute`s between their start and done at one place of the schedule, and the torus links
  (dimension and direction) that these are on; `pallas`: links in use by the table.
- `model`: milliseconds by `meshpar_kernels.collectives.choose`, with memory traffic.
- `schedule`: milliseconds by the compiled program: XLA's own collectives by the bytes and axes that the text has;
  `ppermute`s by a walk over the schedule, in which a link carries one thing at a time, and what stands between a start and
  its done takes the compiler's cycles. XLA does not see into `pallas`: there it is the model again.

Both are models, not times. At the end: how often the form that `choose` takes is the best by the schedules.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

SLICES = {"v5e:16x16": (45.0, 810.0, 1.5e9), "v5p:4x4x8": (90.0, 2765.0, 1.75e9), "v6e:16x16": (90.0, 1640.0, 1.75e9)}
"""GB/s of an ICI link one way and of memory, and the clock with which the chip's matrix units give its peak."""
HOP = 1e-6
FORMS = ("native", "staged", "ring", "pallas")
KINDS = ("reduce_scatter", "all_gather")


def compiled(kind: str, form: str, mib: int, topology: str) -> dict:
    """Facts of one program: bfloat16, V = `mib` MiB."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import meshpar as mp
    from meshpar.verify.aot import compile_lowered
    from meshpar_kernels import collectives

    sizes = [int(n) for n in topology.split(":")[1].split("x")]
    axes = tuple("xyz"[: len(sizes)])
    mesh = mp.mesh(", ".join(f"{a}={n}" for a, n in zip(axes, sizes, strict=True)), topology=topology)
    rows = mib * 2**20 // 2 // 1024
    function = getattr(collectives, kind)
    specs = PartitionSpec(axes), PartitionSpec()
    before, after = specs if kind == "all_gather" else specs[::-1]
    mapped = jax.shard_map(
        lambda x: function(x, axes, implementation=form), mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, before))
    began = time.monotonic()
    done = compile_lowered(jax.jit(mapped), x, effort="full", timeout=900, name=f"{kind} {form} {mib} MiB")
    text = done.as_text()
    link, _, clock = SLICES[topology]
    seconds, at_once, links = walk(text, sizes, link * 1e9, clock)
    axis_bytes = [(list(c.axes(dict(zip(axes, sizes, strict=True)))), c.total_bytes) for c in done.final_collectives]
    return {
        "sent": done.bytes_sent,
        "peak": done.memory.peak,
        "temp": done.memory.temporaries,
        "at_once": at_once,
        "links": links,
        "walked": seconds,
        "axis_bytes": axis_bytes,
        "compile": round(time.monotonic() - began),
    }


def walk(text: str, sizes: list[int], link: float, clock: float) -> tuple[float, int, int]:
    """Seconds by the schedule of the entry computation, most permutes in flight, and links that these are on.

    A permute begins when it is started and its link is free; its done waits. What the compiler gives cycles for takes them.
    """
    entry = text[text.index("\nENTRY") :]
    now, free, ends, on = 0.0, {}, {}, {}
    flying: set[str] = set()
    most, links = 0, 0
    for line in entry.splitlines():
        line = line.strip()
        start = re.match(r"(?:ROOT )?(%\S+) = \((\w+)\[([\d,]*)\].* collective-permute-start\(", line)
        done = re.search(r" collective-permute-done\((%[^\s)]+)\)", line)
        if start:
            name, dtype, shape = start.groups()
            size = 2 if dtype == "bf16" else 4
            for n in shape.split(","):
                size *= int(n)
            pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line)
            assert pair is not None, line[:200]
            on[name] = direction(int(pair[1]), int(pair[2]), sizes)
            ends[name] = max(now, free.get(on[name], 0.0)) + size / link + HOP
            free[on[name]] = ends[name]
            flying.add(name)
            if (len(flying), len({on[f] for f in flying})) > (most, links):
                most, links = len(flying), len({on[f] for f in flying})
        elif done:
            now = max(now, ends[done[1]])
            flying.discard(done[1])
        elif (cycles := re.search(r'"estimated_cycles":"(\d+)"', line)) and " bitcast(" not in line:
            now += int(cycles[1]) / clock
    return now, most, links


def direction(source: int, target: int, sizes: list[int]) -> tuple[int, int]:
    """The dimension along which two ranks differ, and which way round."""
    for dim in reversed(range(len(sizes))):
        n = sizes[dim]
        (source, a), (target, b) = divmod(source, n), divmod(target, n)
        if a != b:
            return dim, 1 if (b - a) % n <= n // 2 else -1
    raise ValueError("a rank sends to itself")


def schedule_seconds(facts: dict, kind: str, form: str, mib: int, topology: str) -> float:
    """Seconds by the compiled program, as the head of this file says."""
    link, memory, _ = SLICES[topology]
    sizes = [int(n) for n in topology.split(":")[1].split("x")]
    if form == "ring":
        return facts["walked"]
    if form == "pallas":
        from meshpar_kernels.collectives import choose

        axes = [(n, True, link, HOP) for n in sizes]
        return choose(kind, mib * 2**20, axes, hbm=memory, candidates=["pallas"]).seconds["pallas"]
    total = 0.0
    for axes, sent in facts["axis_bytes"]:
        dims = ["xyz".index(a) for a in axes]
        total += sent / (2 * len(dims) * link * 1e9) + sum(sizes[d] // 2 for d in dims) * HOP
    return total


def row(facts: dict, kind: str, form: str, mib: int, topology: str, model: float) -> str:
    sizes = [int(n) for n in topology.split(":")[1].split("x")]
    group = 1
    for n in sizes:
        group *= n
    volume = mib * 2**20
    least = volume * (group - 1) / group
    sent = least if form == "pallas" else facts["sent"]
    flight = f"{facts['at_once']} on {facts['links']}" if form == "ring" else ""
    flight = f"{2 * len(sizes)} links" if form == "pallas" else flight
    seconds = schedule_seconds(facts, kind, form, mib, topology)
    return (
        f"| {topology} | {kind} | {mib} | {form} | {sent / least:.2f} | {facts['peak'] / volume:.2f} | {flight} "
        f"| {model * 1e3:.2f} | {seconds * 1e3:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", default=",".join(SLICES))
    parser.add_argument("--mib", default="16,128,1024")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--json", type=Path, help="facts, a line each; those that are there are not compiled again")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from meshpar_kernels.collectives import choose

    known: dict[str, dict] = {}
    if arguments.json and arguments.json.exists():
        known = dict(json.loads(line) for line in arguments.json.read_text().splitlines())
    print("| slice | kind | MiB | form | sent | peak | in flight | model | schedule |")
    print("|---|---|---|---|---|---|---|---|---|")
    right = plainly = cases = 0
    forms = arguments.forms.split(",")
    for mib in (int(m) for m in arguments.mib.split(",")):
        for topology in arguments.slices.split(","):
            link, memory, _ = SLICES[topology]
            axes = [(int(n), True, link, HOP) for n in topology.split(":")[1].split("x")]
            for kind in KINDS:
                choice = choose(kind, mib * 2**20, axes, hbm=memory, candidates=forms)
                found = {}
                for form in forms:
                    key = f"{topology} {kind} {mib} {form}"
                    if key not in known:
                        try:
                            known[key] = compiled(kind, form, mib, topology)
                        except Exception as error:
                            known[key] = {"error": str(error).splitlines()[0][:100]}
                        if arguments.json:
                            with arguments.json.open("a") as file:
                                file.write(json.dumps([key, known[key]]) + "\n")
                    if "error" in known[key]:
                        print(f"| {topology} | {kind} | {mib} | {form} | {known[key]['error']} |", flush=True)
                        continue
                    found[form] = schedule_seconds(known[key], kind, form, mib, topology)
                    print(row(known[key], kind, form, mib, topology, choice.seconds[form]), flush=True)
                if found:
                    cases += 1
                    best = min(found, key=found.__getitem__)
                    # as `choose` does: what is within a twentieth of the best is as good
                    rest = {n: seconds for n, seconds in found.items() if n != "pallas"}
                    plain = choose(kind, mib * 2**20, axes, hbm=memory, candidates=[n for n in forms if n != "pallas"])
                    plainly += rest.get(plain.algorithm, float("inf")) <= 1.05 * min(rest.values(), default=0.0)
                    right += found.get(choice.algorithm, float("inf")) <= 1.05 * found[best]
                    print(
                        f"  {kind} {topology} {mib} MiB: chosen {choice.algorithm}, best by schedule {best}", flush=True
                    )
    print(f"`choose` takes the best form in {right} of {cases} cases")
    print(f"among the forms without the kernel, in {plainly} of {cases}")


if __name__ == "__main__":
    main()

"""Exposed communication of Llama layers in the TPU compiler's schedule, for XLA's collectives, rings and fused kernels.

    python benchmarks/overlap.py                          # all rows; compiled programs are cached, so that it can be resumed
    python benchmarks/overlap.py --only 8b-v5e            # one configuration

Megatron with sequence parallelism, Llama 3 at its real widths, a train step of two scanned and recomputed layers with a small
vocabulary; where 8 heads of keys and values do not divide over 16 devices, each head is stored twice. Every program is compiled at
full effort (at `fast` the TPU compiler does not schedule for latency), and its final schedule is read by `verify.exposed`.
Nothing is run. The schedule has no cycles of Pallas kernels, so for `pallas` only the plan's estimate can be compared.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from tables import Table

import llama
import meshpar as mp

LAYOUT = "batch: data; heads, kv_heads?, mlp, vocab: model; seq: model"
SMALL = {"layers": 2, "vocab": 16384, "loss_chunks": 1}
CASES = {
    "8b-v5e": ("llama3_8b", "v5e:16x16", "data=16, model=16", {"batch": 64, "seq": 2048, "kv_heads": 16}),
    "8b-v5p": ("llama3_8b", "v5p:8x8x8", "data=64, model=8", {"batch": 256, "seq": 2048}),
    "70b-v5e": ("llama3_70b", "v5e:16x16", "data=16, model=16", {"batch": 32, "seq": 4096, "kv_heads": 16}),
    "70b-v5p": ("llama3_70b", "v5p:8x8x8", "data=64, model=8", {"batch": 128, "seq": 4096}),
}
FORMS = {
    "jit": {"lowering": "jit"},
    "xla": {"lowering": "shard_map", "overlap": "xla"},
    "ring": {"lowering": "shard_map", "overlap": "ring"},
    "auto": {"lowering": "shard_map", "overlap": "auto"},
    "pallas": {"lowering": "shard_map", "overlap": "pallas"},
}


def measure(name: str, form: str) -> dict:
    target, topology, mesh, sizes = CASES[name]
    step, args, dims = getattr(llama, target)(**sizes, **SMALL)
    began = time.monotonic()
    compiled = mp.compile(
        step, *args, mesh=mesh, topology=topology, layout=LAYOUT, dims=dims, effort="full", donate_argnums=0,
        **FORMS[form],
    )  # fmt: skip
    exposed = compiled.exposed
    plan = compiled.plan
    assert exposed is not None
    return {
        "case": name, "form": form, "cycles": compiled.cycles, "peak": compiled.memory.peak,
        "exposed": exposed.seconds, "in_layers": exposed.in_loops,
        "sent": exposed.sent, "compute": exposed.compute, "matmuls": exposed.matmul_cycles,
        "by_kind": exposed.by_kind, "bytes": compiled.bytes_sent,
        "pairs": [o.to_dict() for o in plan.overlaps] if plan is not None else [],
        "planned": None if plan is None else sum((o.count or 0) * o.exposed[o.choice] for o in plan.overlaps if o.exposed),
        "step": None if plan is None else plan.seconds,
        "took": time.monotonic() - began,
    }  # fmt: skip


def show(rows: list[dict]) -> None:
    """Print the table, and how often the plan's choice (`auto`) has the shortest schedule."""
    table = Table("case", "form", "exposed in layers", "to jit's", "exposed", "compute", "step", "planned step", "matmul cycles",
                  "planned exposed of pairs", "peak")  # fmt: skip
    right = compared = 0
    shortest: list[str] = []
    for case in dict.fromkeys(r["case"] for r in rows):
        forms = {r["form"]: r for r in rows if r["case"] == case}
        jit = forms.get("jit")
        for form, r in forms.items():
            part = f"{r['in_layers'] / jit['in_layers']:.2f}" if jit and jit["in_layers"] else ""
            seen = [f"{1e3 * r['in_layers']:.2f} ms", part, *(f"{1e3 * x:.2f} ms" for x in (
                r["exposed"], r["compute"], r["exposed"] + r["compute"]))]  # fmt: skip
            cycles = f"{r['matmuls']:.4g}"
            if form == "pallas":
                seen, cycles = [""] * len(seen), ""
            planned = "" if form == "jit" or r["planned"] is None else f"{1e3 * r['planned']:.2f} ms"
            step = "" if form == "jit" or r["step"] is None else f"{1e3 * r['step']:.2f} ms"
            table.add_row(case, form, *seen, step, cycles, planned, f"{r['peak'] / 2**30:.2f} GiB")
        steps = {form: r["exposed"] + r["compute"] for form, r in forms.items() if form != "pallas"}
        if {"xla", "ring", "auto"} <= set(steps):
            best = min(steps, key=lambda form: steps[form])
            compared += 1
            right += steps["auto"] <= 1.005 * steps[best]
            shortest.append(f"{case}: {best}, auto {100 * (steps['auto'] / steps[best] - 1):+.1f} %")
    if compared:
        print(f"\nauto has the shortest schedule of xla, ring and auto in {right} of {compared} cases, within 0.5 %")
        print("the shortest: " + "; ".join(shortest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help=f"of {', '.join(CASES)}")
    parser.add_argument("--form", action="append", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--json", type=Path, help="write the measurements to this file after each program")
    args = parser.parse_args()
    rows = []
    for name in args.only or CASES:
        for form in args.form or FORMS:
            rows.append(measure(name, form))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()

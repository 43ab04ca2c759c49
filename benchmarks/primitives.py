"""Bytes on the wire and results of small programs under `mp.jit`, compared with XLA's partitioner.

    python benchmarks/primitives.py [--quick] [--only attention ...] [--log FILE] [--workers 1] [--lowering auto]
    python benchmarks/primitives.py --log FILE --report     # the table of a log, without running anything

A case is a program of `primitive_programs.py`, one of five layouts on a mesh ``data=4, model=2``, and the function itself or its
gradient. `mp.jit` and `jax.jit` compile it for 8 virtual CPU devices with the plan's shardings of arguments and results. Bytes
are what each device sends, counted in the final programs by `verify.hlo`, with trip counts. Results of both are compared
with the unsharded run. A case is above the bound if it sends more than 1.1 times XLA's bytes plus 64.

Cases run in subprocesses, a few programs each. The outcomes are appended to the log, and cases that are in it are not run again.
"""

import argparse
import json
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers import Worker, append_to_log, read_log

HERE = Path(__file__).parent
MESH = "data=4, model=2"
RATIO, SLACK = 1.1, 64
"""The bound: bytes of XLA's program times the first, plus the second."""

TOLERANCE = 1e-4
"""Largest difference from the unsharded run, relative to the largest element of a result, that float32 rounding explains."""

QUICK = ("attention_causal", "conv_strided", "cumsum", "embedding", "roll", "top_k")
CHUNK = 8
"""Programs per process."""

_ORDER = 'the order of the layout\'s rules decides; with resolve="cost" {}'
_TWICE = "two arguments have `{0}`, so a result has it twice and is resharded; equal to XLA's or less with one renamed (mp.rename)"
REASONS: dict[tuple[str, str, str], str] = {
    ("moe_one_hot", "*", "value"): _ORDER.format("10.7 kB"),
    ("moe_one_hot", "*", "gradient"): _ORDER.format("21.1 kB"),
    (
        "embedding",
        "fsdp+tensor",
        "value",
    ): "the rows are added up over `model`, which splits the vocabulary; XLA gathers the table over it, which is small here",
    (
        "moe_by_sort",
        "*",
        "*",
    ): "rows stay split, and weight gradients are all-reduced; XLA gathers the 32 rows, fewer bytes here",
    **{(f"attention{x}", "*", "*"): _TWICE.format("s") for x in ("", "_causal", "_grouped", "_window", "_library")},
    ("einsum_bilinear", "*", "*"): _TWICE.format("b"),
    ("dynamic_time_warping", "*", "*"): _TWICE.format("s"),
    (
        "ctc",
        "sequence",
        "*",
    ): "two rows of a loop's stacked results are read from split shards, by all-reduces of 1.2 kB",
    ("product", "*", "*"): "JAX has no all-reduce of products: partial products are gathered",
    (
        "conv_grouped",
        "tensor",
        "gradient",
    ): "`c: data` splits the groups, so the result is made without `o: model` and resharded",
    ("avg_pool_overlapping", "*", "gradient"): "the gradient pads 16 rows to 18, which four devices cannot share",
}
"""Why a case (program, layout, what) may send more than the bound allows; ``*`` as a program's layout or what: any."""


def cases(only=()):
    """(program, layout, "value" or "gradient") of every case."""
    from primitive_programs import LAYOUTS, PROGRAMS

    found = []
    for name, p in PROGRAMS.items():
        if only and name not in only:
            continue
        kinds = ["value", "gradient"] if p.gradient() is not None else ["value"]
        found += [(name, layout, what) for layout in LAYOUTS for what in kinds]
    return found


def largest_difference(found, reference):
    """The largest difference between two trees, relative to the largest element of the leaf; inf where shapes or dtypes differ."""
    import jax
    import numpy as np

    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(np.isnan(a), np.isnan(b)):
            return float("inf")
        if not a.size:
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            gap = np.where((a == b) | np.isnan(b), 0, np.abs(a - b))
        scale = np.abs(b[np.isfinite(b)]).max(initial=0)
        worst = max(worst, float(gap.max() / max(scale, 1e-6)))
    return worst


def run_case(name, layout, what, reference=None, lowering=None):
    """The outcome of one case.

    Returns:
      A dict: ``bytes`` of `mp.jit`'s program, ``xla`` of `jax.jit`'s, ``planned``; ``differs`` and ``xla_differs``, the largest
      relative differences from the unsharded run; ``ops`` of `mp.jit`'s program; or ``error``.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from primitive_programs import LAYOUTS, PROGRAMS

    import meshpar as mp
    from meshpar._src.verify.hlo import collectives

    p = PROGRAMS[name]
    fn = p.fn if what == "value" else p.gradient()
    rng = np.random.default_rng(0)
    args = [i.array(rng) for i in p.inputs.values()]
    line = {"program": name, "layout": layout, "what": what}
    if reference is None:
        reference = jax.jit(fn)(*args)
    text = LAYOUTS[layout]
    options = {} if lowering is None else {"lowering": lowering}
    mesh = mp.mesh(MESH)
    try:
        rules = mp.Layout(text, optional=True)
        step = mp.jit(fn, mesh=mesh, layout=rules, dims={k: i.names for k, i in p.inputs.items()}, **options)
        plan = step.plan(*args)
        compiled = step.lower(*args).compile()
        ins = step.shardings(*args)
        placed = jax.device_put(args, list(ins))
        found = compiled(*placed)
        sent = collectives(compiled.as_text())
        line["bytes"] = float(sum(c.total_bytes for c in sent))
        line["planned"] = float(sum(c.total_bytes for c in plan.collectives))
        line["ops"] = [f"{c.op} {c.shape} ×{c.count}" for c in sent]
        line["differs"] = largest_difference(found, reference)
    except Exception as e:  # an error is an outcome
        line["error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:300] if str(e) else ''}"
        return line
    outs = jax.tree.unflatten(jax.tree.structure(reference), [NamedSharding(mesh, h.spec) for h in plan.outputs])
    try:
        theirs = jax.jit(fn, in_shardings=tuple(ins), out_shardings=outs).lower(*args).compile()
        sent = collectives(theirs.as_text())
        line["xla"] = float(sum(c.total_bytes for c in sent))
        line["xla_ops"] = [f"{c.op} {c.shape} ×{c.count}" for c in sent]
        line["xla_differs"] = largest_difference(theirs(*placed), reference)
    except Exception as e:  # a failure of XLA is recorded separately
        line["xla_error"] = f"{type(e).__name__}: {str(e).splitlines()[0][:300] if str(e) else ''}"
    return line


def worker(names, skipped, lowering):
    """Run the cases of some programs, and print a line of JSON for each."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    from primitive_programs import PROGRAMS

    warnings.simplefilter("ignore")
    references = {}
    for name, layout, what in cases(names):
        if (name, layout, what) in skipped:
            continue
        if (name, what) not in references:
            p, rng = PROGRAMS[name], np.random.default_rng(0)
            args = [i.array(rng) for i in p.inputs.values()]
            references[name, what] = jax.jit(p.fn if what == "value" else p.gradient())(*args)
        line = run_case(name, layout, what, references[name, what], lowering)
        print(json.dumps(line), flush=True)


def above(line):
    """Whether a case sends more than the bound allows."""
    return "xla" in line and line["bytes"] > RATIO * line["xla"] + SLACK


def reason(line):
    """Why a case sends more than the bound; empty if unknown."""
    for layout in (line["layout"], "*"):
        for what in (line["what"], "*"):
            found = REASONS.get((line["program"], layout, what))
            if found:
                return found
    return ""


def ratio(line):
    """Bytes of `mp.jit`'s program per byte of XLA's."""
    return (line["bytes"] + SLACK) / (line["xla"] + SLACK)


def report(lines, every=False):
    """The table, sorted by the largest ratio of bytes, and its summary, as Markdown."""
    ran = [x for x in lines if "error" not in x]
    compared = [x for x in ran if "xla" in x]
    rows = {}
    for x in sorted((x for x in compared if every or above(x)), key=ratio, reverse=True):
        case = x["layout"] + (" (gradient)" if x["what"] == "gradient" else "")
        rows.setdefault((x["program"], reason(x)), []).append(f"{case} {x['bytes']:,.0f} / {x['xla']:,.0f}")
    out = ["| program | cases: bytes of mp.jit / of XLA | reason |", "|---|---|---|"]
    out += [f"| {program} | {'; '.join(some)} | {why} |" for (program, why), some in rows.items()]
    wrong = [x for x in ran if not x["differs"] <= TOLERANCE]
    theirs = [x for x in ran if not x.get("xla_differs", 0) <= TOLERANCE]
    fewer = sum(x["bytes"] * RATIO + SLACK < x["xla"] for x in compared)
    unexplained = sum(above(x) and not reason(x) for x in compared)
    ours, xla = (sum(x[k] for x in compared) for k in ("bytes", "xla"))
    out += [
        "",
        f"{len(lines)} cases of {len({x['program'] for x in lines})} programs: {len(wrong)} wrong, {len(lines) - len(ran)} errors.",
        f"{sum(map(above, compared))} cases are above the bound, {unexplained} of them without a reason; {fewer} send less "
        f"than XLA by the same bound. All together send {ours / max(xla, 1):.3f} of XLA's bytes.",
        f"XLA's program is wrong in {len(theirs)} cases and fails in {sum('xla_error' in x for x in ran)}.",
    ]
    out += [f"wrong: {x['program']}, {x['layout']}, {x['what']}: {x['differs']:.3g}" for x in wrong]
    out += [f"error: {x['program']}, {x['layout']}, {x['what']}: {x['error']}" for x in lines if "error" in x]
    return "\n".join(out)


def run_all(names, done, log, workers, lowering):
    """Run the cases that are not done, in worker processes of a few programs each; append their lines to the log."""
    todo = [n for n in names if any((n, at, what) not in done for _, at, what in cases([n]))]
    chunks = [todo[k : k + CHUNK] for k in range(0, len(todo), CHUNK)]
    lines = []

    def run(chunk):
        process, finished = Worker(__file__, [chunk, sorted(done), lowering]), []
        for line in process.lines():
            finished.append(line)
            append_to_log(log, [line])
        if process.status:  # the process died in the next case
            ran = {(x["program"], x["layout"], x["what"]) for x in finished} | done
            name, layout, what = next(c for c in cases(chunk) if c not in ran)
            finished.append({"program": name, "layout": layout, "what": what, "error": f"exit status {process.status}"})
        lines.extend(finished)
        print(f"{len(lines)} cases", file=sys.stderr)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, chunks))
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="*", default=[], help="names of programs")
    parser.add_argument("--log", help="outcomes as JSON lines; cases in it are not run again")
    parser.add_argument("--report", action="store_true", help="print the table of the log")
    parser.add_argument("--all", action="store_true", help="all rows, not only those above the bound")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lowering", help="of mp.jit; its default if not given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if args.worker:
        names, done, lowering = json.loads(args.worker)
        worker(names, {tuple(x) for x in done}, lowering)
        return
    from primitive_programs import PROGRAMS

    unknown = set(args.only) - set(PROGRAMS)
    if unknown:
        parser.error(f"no such programs: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    names = args.only or (list(QUICK) if args.quick else list(PROGRAMS))
    lines = [x for x in read_log(args.log) if x["program"] in names]
    if not args.report:
        begin = time.monotonic()
        done = {(x["program"], x["layout"], x["what"]) for x in lines}
        lines += run_all(names, done, args.log, args.workers, args.lowering)
        print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    print(report(lines, args.all))


if __name__ == "__main__":
    main()

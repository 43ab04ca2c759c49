"""JAX's own primitive harnesses through `mp.jit`, with two dims of every argument split, compared with the unsharded run.

    python benchmarks/harnesses.py [--sample 60 --seed 0] [--only conv reduce_window] [--log FILE] [--workers 1] [--lowering auto]
    python benchmarks/harnesses.py --log FILE --report     # the counts of a log, without running anything

A harness (`jax._src.internal_test_util.test_harnesses`) is a use of one primitive with its arguments; this JAX has about 5,600. Of
every array argument the first two dims of even size are split over axes ``a`` and ``b`` of a mesh ``a=2, b=2, idle=2`` of virtual
CPU devices. Outcomes:

    right      shapes, dtypes and values equal the results of `jax.jit` on one device, up to rounding
    wrong      they are not
    refused    `mp.jit` raises a MeshparError that names a fix
    foreign    any other error, and a process that dies
    unrunnable `jax.jit` on one device raises an error, or JAX marks the harness as not implemented on CPU

Harnesses run in subprocesses. Outcomes are appended to the log, and harnesses that are in it are not run again.
"""

import argparse
import json
import os
import random
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers import Worker, append_to_log, read_log

HERE = Path(__file__).parent
MESH = "a=2, b=2, idle=2"
OUTCOMES = ("right", "wrong", "refused", "foreign", "unrunnable")
CHUNK = 100
"""Harnesses per process."""

SECONDS = 120
"""A harness that takes longer is ended, with its process."""

ROUNDING = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "bfloat16": 4e-2, "float16": 5e-3}
"""By dtype, the largest difference relative to the largest element of a result; other narrow floats: two units of their own."""


def all_harnesses():
    from jax._src.internal_test_util import test_harnesses

    return test_harnesses.all_harnesses


def split_dims(args):
    """(dims of each argument by name, layout): the first two even dims of every array, the first over `a`, the second over `b`."""
    import numpy as np

    dims, rules = {}, []
    for k, x in enumerate(args):
        shape = np.shape(x)
        even = [d for d, n in enumerate(shape) if n and n % 2 == 0][:2]
        names = {d: f"x{k}_{d}" for d in even}
        dims[f"x{k}"] = " ".join(names.get(d, "_") for d in range(len(shape)))
        rules += [f"{name}: {axis}" for name, axis in zip(names.values(), "ab", strict=False)]
    return dims, "; ".join(rules)


def difference(found, reference):
    """What differs between two flat results; "" for nothing."""
    import jax
    import numpy as np

    if len(found) != len(reference):
        return f"{len(found)} results for {len(reference)}"
    for k, (a, b) in enumerate(zip(found, reference, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {k} is {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        if not a.size or a.tobytes() == b.tobytes():
            continue
        if not jax.numpy.issubdtype(a.dtype, np.inexact):
            return f"result {k}: {np.count_nonzero(a != b)} of {a.size} elements differ"
        allowed = ROUNDING.get(str(a.dtype)) or 2 * float(jax.numpy.finfo(a.dtype).eps)
        a, b = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
        with np.errstate(invalid="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            gap = np.where(same, 0, np.abs(a - b))
        scale = np.abs(b[np.isfinite(b)]).max(initial=0)
        if not gap.max() <= allowed * scale:
            return f"result {k} differs by {gap.max():.3g} where the largest element is {scale:.3g}"
    return ""


def run_harness(harness, lowering=None):
    """(outcome, text) of one harness."""
    import inspect

    import jax
    import numpy as np

    import meshpar as mp

    if not harness.filter("cpu"):
        return "unrunnable", "not implemented on CPU"
    args = harness.dyn_args_maker(np.random.RandomState(0))

    def fn(*xs):
        return harness.dyn_fun(*xs)

    names = [inspect.Parameter(f"x{k}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in range(len(args))]
    fn.__signature__ = inspect.Signature(names)
    try:
        reference = jax.tree.leaves(jax.block_until_ready(jax.jit(fn)(*args)))
    except Exception as e:
        return "unrunnable", text_of(e)
    dims, layout = split_dims(args)
    try:
        step = mp.jit(fn, mesh=mp.mesh(MESH), layout=layout, dims=dims, **({"lowering": lowering} if lowering else {}))
        found = jax.tree.leaves(jax.block_until_ready(step(*args)))
        different = difference(found, reference)
    except mp.errors.MeshparError as e:
        return ("refused" if e.fixes else "foreign"), text_of(e)
    except Exception as e:
        return "foreign", text_of(e)
    return ("wrong", different) if different else ("right", "")


def text_of(e):
    return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300] if str(e).strip() else ''}"


def worker(indices, lowering):
    """Run harnesses by index, and print a line of JSON for each."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    every = all_harnesses()
    for index in indices:
        print(json.dumps({"begun": index, "harness": every[index].fullname}), flush=True)
        outcome, text = run_harness(every[index], lowering)
        line = {"index": index, "harness": every[index].fullname, "outcome": outcome, "text": text}
        print(json.dumps(line), flush=True)
        if index % 25 == 0:
            jax.clear_caches()


def run_chunk(indices, log=None, lowering=None):
    """The lines of some harnesses, run in a worker process, and in further ones if it dies."""
    todo, lines = list(indices), []
    while todo:
        process = Worker(HERE / "harnesses.py", [todo, lowering], SECONDS + 5 * len(todo))
        begun, finished = None, []
        for line in process.lines():
            if "begun" in line:
                begun = line
            elif "index" in line:
                finished.append(line)
                begun = None
        if begun is not None:
            died = f"exit status {process.status}"
            finished.append({"index": begun["begun"], "harness": begun["harness"], "outcome": "foreign", "text": died})
        elif not finished:
            raise RuntimeError(f"no harness ran: {' '.join(process.command)[:200]} exits with {process.status}")
        append_to_log(log, finished)
        lines += finished
        ran = {x["index"] for x in finished}
        todo = [k for k in todo if k not in ran]
    return lines


def report(lines):
    """Counts of outcomes as a Markdown table, and every harness that is wrong or fails."""
    counts = Counter(x["outcome"] for x in lines)
    out = ["| harnesses | " + " | ".join(OUTCOMES) + " |", "|---" * (1 + len(OUTCOMES)) + "|"]
    out.append(f"| {len(lines)} | " + " | ".join(str(counts[k]) for k in OUTCOMES) + " |")
    for outcome in ("wrong", "foreign", "refused"):
        some = sorted((x["text"], x["harness"]) for x in lines if x["outcome"] == outcome)
        out += [f"{outcome}: {name}: {text}" for text, name in some]
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="number of harnesses, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", nargs="*", default=[], help="harnesses whose name contains one of these")
    parser.add_argument("--log", help="outcomes as JSON lines; harnesses in it are not run again")
    parser.add_argument("--report", action="store_true", help="print the counts of the log")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--lowering", help="of mp.jit; its default if not given")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if args.worker:
        worker(*json.loads(args.worker))
        return
    lines = read_log(args.log)
    if not args.report:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        names = [h.fullname for h in all_harnesses()]
        some = [k for k, n in enumerate(names) if not args.only or any(x in n for x in args.only)]
        if args.sample is not None:
            some = sorted(random.Random(args.seed).sample(some, min(args.sample, len(some))))
        done = {x["index"] for x in lines}
        todo = [k for k in some if k not in done]
        chunks = [todo[k : k + CHUNK] for k in range(0, len(todo), CHUNK)]
        with ThreadPoolExecutor(args.workers) as pool:
            for finished in pool.map(lambda chunk: run_chunk(chunk, args.log, args.lowering), chunks):
                lines += finished
                print(f"{len(lines)} harnesses", file=sys.stderr)
    print(report(lines))


if __name__ == "__main__":
    main()

"""Correctness, speed and best tiles of the Pallas kernels on the attached device.

    python benchmarks/device.py --out DIR                        # everything; needs a GPU or a TPU
    python benchmarks/device.py --out DIR2 --resume DIR/results.jsonl   # resume an earlier command
    python benchmarks/device.py --out DIR --only g64             # only tasks whose name contains a text
    python benchmarks/device.py --list gpu                       # the tasks in their order, without a device

Every check, timing and tuned configuration is a task of its own, run in a worker process under a time limit
(`meshpar_kernels.isolation`). A wrong result, an exception, a crash or a hang is recorded and costs that task alone; our kernel is
not timed after a wrong value of it, the baselines are. One JSON line is appended to `results.jsonl` after each task and flushed to
disk, so that a command that is killed loses nothing; `--resume` takes such a file and runs only what has no outcome yet.

Order: the device's copy bandwidth and matmul rate; values of all kernels and forms against NumPy in float64, several processes at
a time; whole steps (`device_steps.py`); times of the matmuls and of the baselines, random loads first; routing, attention and 8-bit
matmuls; opt-in forms; NVLink kernels where there are two GPUs or more; tiles of the matmuls. No task starts after `--budget`
seconds.

At the end, also when the budget is spent:

- `results.md`: the tables. `ms`: of one call, by CUPTI on GPUs (`meshpar_kernels.timing`). `TFLOP/s`: of the operations that the
  result needs. `% peak`: of the device's largest dense bfloat16 matmul. `GB/s`, `% copy`: of the bytes that must be moved once,
  and of a copy. `x ours`: how much longer than our kernel. `error`: against XLA's loop, over the largest value.
- `tuned.json`: the configurations that beat the analytic choice, in the format of `meshpar_kernels/tuned.json`.
- A section of `results.md` lists the forms and kernels that a baseline or the default form beats.

`benchmarks/gpu_compile.py` and `benchmarks/kernels_aot.py` compile the kernels without a device.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import device_cases
import nvlink_cases
import tasks
from tasks import PATHS, Outcome, Outcomes, Task, read

from meshpar_kernels import tuning_table
from meshpar_kernels.config import Config
from meshpar_kernels.grouped_matmul.tuner import MARGIN
from meshpar_kernels.isolation import WorkerError
from meshpar_kernels.tuning_table import MatmulKey

OURS = "meshpar"
TARGET = "device_tasks:run"
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}

START_LIMIT = 120.0
"""Seconds for a task whose worker has to start first: imports, the device, the operands."""
TUNED_SHAPES = ("g64", "deepseek-v3-up", "deepseek-v3-down", "mixtral-8x7b-up", "mixtral-8x7b-down")
CONFIGS_PER_MATMUL = 10
WRONG = 2e-2
"""Error of a bfloat16 result over its largest value from which on a timing counts as wrong."""

VALUES_OF = {
    "forward": ("grouped_matmul",),
    "swiglu": ("grouped_matmul",),
    "d lhs": ("grouped_matmul", "d lhs"),
    "d rhs": ("grouped_matmul_transpose",),
    "route": ("route",),
    "permute": ("permute and combine",),
    "combine": ("permute and combine",),
    "scaled": ("scaled_grouped_matmul",),
    "attention": ("attention cudnn",),
    "d attention": ("attention cudnn",),
}
"""Kernel that is timed → the kernels of the value cases (what stands before the colon of their names) that it depends on."""


# -- the tasks


def values(names: Iterable[str]) -> Iterator[Task]:
    """One task for each value case."""
    for name in names:
        yield Task(f"value/{name}", {"kind": "value", "name": name}, "values")


def _timing(kernel: str, shape: str, load: str, name: str) -> Task:
    library = "torch" if name in ("torch", "deep_gemm") else "jax"
    ours = name.startswith(OURS)
    return Task(
        f"time/{kernel}/{shape}/{load}/{name}",
        {"kind": "time", "kernel": kernel, "shape": shape, "load": load, "name": name},
        library,
        checked_by=VALUES_OF[kernel] if ours else (),
    )


def timings(platform: str) -> Iterator[Task]:
    """Every case by every implementation: random loads, opt-in forms, then even loads; tasks of one library follow each other."""
    matmuls = [(k, s) for k, s in device_cases.names() if k in device_cases.MATMUL_KERNELS]
    others = [case for case in device_cases.names() if case not in matmuls]
    for load, cases in (("random", [*matmuls, *others]), ("even", matmuls)):
        tasks = [
            _timing(kernel, shape, load, name)
            for kernel, shape in cases
            for name in (OURS, *device_cases.implementations(kernel, platform))
        ]
        if platform == "gpu" and load == "random":
            tasks += [
                _timing(kernel, shape, load, f"{OURS}, {form}")
                for kernel, shape in matmuls
                for form in filter(None, device_cases.forms(kernel, "sm_90a"))
            ]
        yield from sorted(tasks, key=lambda task: task.group)


def steps() -> Iterator[Task]:
    """Whole steps (`device_steps.py`), each in a process of its own, whose peak of memory belongs to the step."""
    from device_steps import names

    for name, variant in names():
        yield Task(
            f"step/{name}/{variant}", {"kind": "step", "name": name, "variant": variant}, f"{name}/{variant}", 90.0
        )


def nvlink_timings(devices: int) -> Iterator[Task]:
    """The kernels over NVLink, where there are several GPUs."""
    for kernel, shape in nvlink_cases.names() if devices > 1 else ():
        for name in (OURS, *nvlink_cases.make(shape, devices).others):
            request = {"kind": "time_nvlink", "shape": shape, "name": name}
            checked = (kernel,) if name == OURS else ()
            yield Task(f"nvlink/{kernel}/{shape}/{name}", request, "nvlink", 90.0, checked)


def tuned_matmuls() -> dict[str, tuple[str, MatmulKey]]:
    """`"kernel/shape"` → (kernel, key of the tuned configuration), most used first."""
    kernels = ("forward", "d lhs", "d rhs")
    return {f"{k}/{s}": (k, device_cases.matmul_of(k, s)) for s in TUNED_SHAPES for k in kernels}


def config_lists() -> Iterator[Task]:
    """Tasks that ask for the configurations of each tuned matmul."""
    for name, (kernel, matmul) in tuned_matmuls().items():
        request = {"kind": "configs", "matmul": dataclasses.asdict(matmul), "dtype": "bfloat16"}
        yield Task(f"configs/{name}", request, "configs", checked_by=VALUES_OF[kernel])


def tunings(outcomes: Outcomes) -> Iterator[Task]:
    """One task for each configuration: the analytic one, and others at even distances in the tuner's list."""
    for name, (kernel, matmul) in tuned_matmuls().items():
        listed = outcomes.get(f"configs/{name}")
        if listed is None or listed.status != "ok":
            continue
        for config in spread(listed.result, CONFIGS_PER_MATMUL):
            request = {"kind": "tune", "matmul": dataclasses.asdict(matmul), "dtype": "bfloat16", "config": config}
            label = json.dumps([v for v in config.values() if v is not None])
            yield Task(f"tune/{name}/{label}", request, "tune", checked_by=VALUES_OF[kernel])


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """The first item and at most `count - 1` others, at even distances."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# -- running them


@dataclasses.dataclass
class Runner(tasks.Runner):
    """Runs tasks on the device; no kernel runs after a wrong value of it."""

    def excluded(self, task: Task) -> bool:
        return self.wrong(task.checked_by) is not None

    def wrong(self, kernels: Sequence[str]) -> Outcome | None:
        """A wrong, failed, crashed or hung value of one of these kernels."""
        for outcome in list(self.outcomes.values()):
            kernel = outcome.id.removeprefix("value/").partition(":")[0]
            if outcome.id.startswith("value/") and kernel in kernels and outcome.status not in ("ok", "refused"):
                return outcome
        return None

    def judged(self, task: Task, result: Any) -> str:
        found = result.get("error") if isinstance(result, dict) else None
        allowed = result.get("limit", WRONG) if isinstance(result, dict) else WRONG
        return "" if found is None or found <= allowed else f"error {found:.2g}, allowed {allowed:.2g}"

    def shown(self, outcome: Outcome) -> str:
        return outcome.message or (f"{1e3 * outcome.result['seconds']:.3f} ms" if _seconds(outcome) else "")

    def compile(self, tasks: Iterable[Task], processes: int) -> None:
        """Fill the persistent compilation cache with the programs of timings, in several processes at a time."""
        wanted: dict[tuple[str, str], list[str]] = {}
        for task in tasks:
            r = task.request
            if task.group == "jax" and task.id not in self.outcomes and self.wanted(task):
                names = wanted.setdefault((r["kernel"], r["shape"]), [])
                if r["name"] not in names:
                    names.append(r["name"])

        def one(case: tuple[tuple[str, str], list[str]]) -> None:
            (kernel, shape), names = case
            with self.worker() as worker:
                for name in names:
                    left = self.deadline - time.monotonic()
                    if left <= 0:
                        return
                    request = {"kind": "compile", "kernel": kernel, "shape": shape, "name": name}
                    try:
                        worker.call(request, min(START_LIMIT, left))
                    except WorkerError:
                        continue  # the timing task records the reason

        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            list(pool.map(one, wanted.items()))


def _seconds(outcome: Outcome | None) -> float | None:
    found = outcome.result.get("seconds") if outcome is not None and isinstance(outcome.result, dict) else None
    return found if isinstance(found, float) else None


# -- the report


def tuned_table(machine: Mapping[str, Any], outcomes: Outcomes) -> tuning_table.Table:
    """The entries of configurations that beat the analytic choice."""
    classes: dict[str, dict[str, tuning_table.Entry]] = {}
    for name, (_, matmul) in tuned_matmuls().items():
        listed = outcomes.get(f"configs/{name}")
        if listed is None or listed.status != "ok":
            continue
        found: dict[Config, float] = {}
        for config in spread(listed.result, CONFIGS_PER_MATMUL):
            label = json.dumps([v for v in config.values() if v is not None])
            outcome = outcomes.get(f"tune/{name}/{label}")
            seconds = outcome.result["seconds"] if outcome is not None and outcome.status == "ok" else []
            if seconds:
                found[Config(**config)] = seconds[0]
        first = Config(**listed.result[0])
        if first not in found:
            continue  # nothing to compare with
        best = min(found, key=lambda config: found[config])
        if found[best] < MARGIN * found[first]:
            entry = tuning_table.Entry(best, found[best], found[first], machine["jax"])
            classes[matmul.shape_class] = {"bfloat16": entry}
    return {machine["device"]: classes} if classes else {}


def report(machine: Mapping[str, Any], outcomes: Outcomes) -> str:
    """The tables, in Markdown."""
    done = [o for o in outcomes.values() if o.id.startswith("value/")]
    right = sum(o.status == "ok" for o in done)
    lines = [
        f"# Kernels on {machine['device']} ({machine['devices']} device(s)), jax {machine['jax']}",
        "",
        f"Copy {machine.get('copy', 0):.0f} GB/s, dense bfloat16 matmul {machine.get('peak', 0):.0f} TFLOP/s.",
        "",
        "## Values against NumPy in float64",
        "",
        f"{right} of {len(done)} right. The others:",
        "",
        "| case | status | why |",
        "|---|---|---|",
        *(f"| {o.id.removeprefix('value/')} | {o.status} | {_cell(o.message)} |" for o in done if o.status != "ok"),
        "",
        "## Our kernels and others",
        "",
        *_compared(machine, outcomes),
        "",
        "## Times",
        "",
        "| kernel | shape | load | by | ms | TFLOP/s | % peak | GB/s | % copy | x ours | error | timed by |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lost: list[str] = []
    for (kernel, shape, load), rows in _cases(outcomes).items():
        ours = _seconds(rows.get(OURS)) if OURS in rows and rows[OURS].status == "ok" else None
        for name, outcome in sorted(rows.items(), key=lambda item: _seconds(item[1]) or math.inf):
            lines.append(_row(kernel, shape, load, name, outcome, machine, ours))
        lost += _lost(f"{kernel} {shape} {load}", rows, ours)
    lines += _step_rows(outcomes)
    lines += ["", "## Slower than a baseline, or than the default form", ""]
    lines += [f"- {text}" for text in lost] or ["None."]
    tuned = tuned_table(machine, outcomes)
    lines += [
        "",
        "## Configurations that beat the analytic choice",
        "",
        "| matmul | configuration | ms | analytic, ms |",
        "|---|---|---|---|",
    ]
    for classes in tuned.values():
        for shape, dtypes in classes.items():
            for entry in dtypes.values():
                chosen = ", ".join(f"{k}={v}" for k, v in entry.config.given().items())
                lines.append(f"| {shape} | {chosen} | {1e3 * entry.seconds:.3f} | {1e3 * entry.analytic_seconds:.3f} |")
    return "\n".join(lines) + "\n"


def _cases(outcomes: Outcomes) -> dict[tuple[str, str, str], dict[str, Outcome]]:
    found: dict[tuple[str, str, str], dict[str, Outcome]] = {}
    for outcome in outcomes.values():
        kind, _, rest = outcome.id.partition("/")
        if kind == "time":
            kernel, shape, load, name = rest.split("/", 3)
        elif kind == "nvlink":
            (kernel, shape, name), load = rest.split("/", 2), ""
        else:
            continue
        found.setdefault((kernel, shape, load), {})[name] = outcome
    return found


def _row(
    kernel: str, shape: str, load: str, name: str, outcome: Outcome, machine: Mapping[str, Any], ours: float | None
) -> str:
    head = f"| {kernel} | {shape} | {load} | {name} |"
    seconds = _seconds(outcome)
    if seconds is None or outcome.status != "ok":
        return f"{head} {outcome.status}: {_cell(outcome.message)} | | | | | | | |"
    r = outcome.result
    rate = (
        f"{r['flops'] / seconds / 1e12:.0f} | {100 * r['flops'] / seconds / 1e12 / machine['peak']:.0f}"
        if r["flops"]
        else " | "
    )
    moved = r["bytes"] / seconds / 1e9
    ratio = f"{seconds / ours:.2f}" if ours else ""
    error = "" if r.get("error") is None else f"{r['error']:.1e}"
    return (
        f"{head} {1e3 * seconds:.3f} | {rate} | {moved:.0f} | {100 * moved / machine['copy']:.0f} | {ratio} | {error} | "
        f"{r['method']} |"
    )


OTHERS = {
    "torch": ("torch",),
    "JAX's kernel": ("jax's mgpu", "jax's megablox", "triton", "jax.nn, cudnn"),
    "tokamax": ("tokamax",),
    "XLA's op": ("ragged_dot", "take"),
    "XLA's loop": ("xla loop", "reference"),
}
"""Column → the baselines it is of; a case has one of them."""


def _compared(machine: Mapping[str, Any], outcomes: Outcomes) -> Iterator[str]:
    """A row for each case that our kernel was timed on: its time, and how much longer each of the others takes."""
    columns = ["kernel", "shape", "load", "ours, ms", "% peak", *(f"{name}, x" for name in OTHERS)]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for (kernel, shape, load), rows in _cases(outcomes).items():
        ours = rows.get(OURS)
        seconds = _seconds(ours)
        if ours is None or seconds is None or ours.status != "ok":
            continue
        flops = ours.result["flops"]
        cells = [kernel, shape, load, f"{1e3 * seconds:.3f}"]
        cells.append(f"{100 * flops / seconds / 1e12 / machine['peak']:.0f}" if flops else "")
        for names in OTHERS.values():
            found = [x for name in names if name in rows and (x := _seconds(rows[name])) is not None]
            cells.append(f"{found[0] / seconds:.2f}" if found else "")
        yield f"| {' | '.join(cells)} |"


def _step_rows(outcomes: Outcomes) -> list[str]:
    """The table of whole steps; the difference of results is against plain `jax.jit`, over its largest value."""
    lines = [
        "",
        "## Whole steps on one device",
        "",
        "| step | variant | ms | x jax.jit | planned, ms | peak, GB | planned, GB | largest difference of 4 results |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes.values():
        if not outcome.id.startswith("step/"):
            continue
        _, name, variant = outcome.id.split("/")
        if outcome.status != "ok":
            lines.append(f"| {name} | {variant} | {outcome.status}: {_cell(outcome.message)} | | | | | |")
            continue
        r = outcome.result
        plain = outcomes.get(f"step/{name.partition(',')[0]}/jax.jit")
        base = plain.result if plain is not None and plain.status == "ok" else None
        seconds = r.get("seconds")
        cells = [
            f"{1e3 * seconds:.2f}" if seconds else "",
            f"{seconds / base['seconds']:.3f}" if seconds and base else "",
            f"{1e3 * r['planned_seconds']:.2f}" if r.get("planned_seconds") else "",
            f"{r['peak'] / 1e9:.2f}" if r.get("peak") else "",
            f"{r['planned_peak'] / 1e9:.2f}" if r.get("planned_peak") else "",
            f"{_difference(r['values'], base['values']):.1e}" if base and base is not r else "",
        ]
        lines.append(f"| {name} | {variant} | {' | '.join(cells)} |")
    for outcome in outcomes.values():
        if outcome.id.startswith("step/") and outcome.status == "ok" and "report" in outcome.result:
            lines += ["", "```", outcome.result["report"], "```"]
    return lines


def _difference(got: Sequence[float], want: Sequence[float]) -> float:
    largest = max(abs(w) for w in want) or 1.0
    return max(abs(g - w) for g, w in zip(got, want, strict=True)) / largest


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def _lost(case: str, rows: Mapping[str, Outcome], ours: float | None) -> Iterator[str]:
    """The kernels slower than a baseline (the dense bound does not count), and the opt-in forms slower than the default form."""
    if ours is None:
        return
    for name, outcome in rows.items():
        seconds = _seconds(outcome)
        if seconds is None or outcome.status != "ok" or name in (OURS, "dense matmul"):
            continue
        if name.startswith(OURS):
            if seconds >= MARGIN * ours:
                yield f"{case}: the form `{name.removeprefix(f'{OURS}, ')}` takes {seconds / ours:.2f} x the default form"
        elif seconds < MARGIN * ours:
            yield f"{case}: ours takes {ours / seconds:.2f} x {name}"


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 0; 1 if a value is wrong; 2 without a device, or if the record exists already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for results.jsonl, results.md and tuned.json")
    parser.add_argument("--resume", type=Path, help="the results.jsonl of an earlier command")
    parser.add_argument("--budget", type=float, default=570, help="seconds in all (%(default)s)")
    parser.add_argument("--only", action="append", default=[], help="part of the tasks' names; may be repeated")
    parser.add_argument("--compile-processes", type=int, default=min(8, (os.cpu_count() or 2) // 2),
                        help="programs compiled at a time before they are timed; 0: none (%(default)s)")  # fmt: skip
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "meshpar-device-cache",
                        help="folder of the persistent compilation cache (%(default)s)")  # fmt: skip
    parser.add_argument("--list", metavar="PLATFORM", choices=("gpu", "tpu"), help="print the tasks, and run nothing")
    parser.add_argument("--target", default=TARGET, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        for task in (*timings(options.list), *config_lists()):
            print(task.id)
        return 0
    if options.out is None:
        parser.error("--out is needed")
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """Run the tasks and write the report."""
    deadline = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "results.jsonl"
    outcomes = read(options.resume) if options.resume else {}
    if record.exists() and not (options.resume and record.samefile(options.resume)):
        print(f"{record} exists; resume it (--resume {record}), or give another --out")
        return 2
    environment = ENVIRONMENT | {
        "JAX_COMPILATION_CACHE_DIR": str(options.cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    runner = Runner(
        record, deadline, dict(outcomes), options.target, environment, PATHS, options.only, start_limit=START_LIMIT
    )
    record.write_text("".join(json.dumps(dataclasses.asdict(o)) + "\n" for o in outcomes.values()))

    runner.run([Task("machine", {"kind": "machine"}, "machine", START_LIMIT)], always=True)
    found = runner.outcomes.get("machine")
    machine = found.result if found is not None and found.status == "ok" else {}
    platform = machine.get("platform", "")
    if platform not in ("gpu", "tpu"):
        why = (
            found.message
            if found is not None and found.message
            else f"JAX's default platform is {platform or 'unknown'}"
        )
        print(f"There is no GPU and no TPU that JAX can use here: {why}")
        return 2
    runner.run([Task("value names", {"kind": "value_names"}, "values", START_LIMIT)], always=True)
    names = runner.outcomes["value names"].result if "value names" in runner.outcomes else []
    runner.run(values(names or []), processes=max(1, min(8, (os.cpu_count() or 2) // 2)))
    runner.run(steps())
    timed = list(timings(platform))
    if options.compile_processes:
        runner.compile(timed, options.compile_processes)
    runner.run(timed)
    if platform == "gpu":
        runner.run(nvlink_timings(min(8, machine["devices"])))
    runner.run(config_lists())
    runner.run(tunings(runner.outcomes))
    text = report(machine, runner.outcomes)
    (options.out / "results.md").write_text(text)
    tuning_table.write(options.out / "tuned.json", tuned_table(machine, runner.outcomes))
    planned = [*values(names or []), *steps(), *timed, *config_lists(), *tunings(runner.outcomes)]
    missing = sum(task.id not in runner.outcomes and runner.wanted(task) for task in planned)
    wrong = [o.id for o in runner.outcomes.values() if o.id.startswith("value/") and o.status not in ("ok", "refused")]
    print(text)
    print(f"{len(runner.outcomes)} outcomes, {missing} tasks without one, {len(wrong)} wrong values")
    print(f"see {options.out / 'results.md'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

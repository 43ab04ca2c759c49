"""Costs of several processes, and recovery: saves, agreement, the watchdog, plans and compilation for 4,096 chips, kills.

    python benchmarks/pods.py [--kills 6] [--only save,agree,watch,plan,compile,kill,memory,elastic]

``compile`` needs libtpu (`pip install "jax[tpu]"`), but no TPU; without it the row says so. CPU seconds are of
all threads of a process. Everything runs on virtual CPU devices, groups of processes over Gloo.
"""

import argparse
import functools
import importlib.util
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tables import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
HERE = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
TRAIN = ["--layers", "2", "--embed", "64", "--eval-batches", "2", "--picture", ""]
"""train_lm, small, so that most of a run is not its compile."""

LARGE = "batch: data; embed: data; heads, kv_heads, mlp, vocab: model"
Row = tuple[str, str, str]


def saves() -> Iterator[Row]:
    """The time that the training waits for a save, next to 500 steps of the default language model."""
    import jax
    from flax import nnx
    from train_lm import DIMS, LAYOUTS, adamw, train_step

    import meshpar as mp
    from lm.model import Config, Transformer

    mp.virtual_devices(8)
    mesh, rules, config = mp.mesh("data=4, model=2"), LAYOUTS["fsdp+megatron"], Config()

    def create(key: jax.Array) -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, adamw(1e-3, 100), wrt=nnx.Param)

    model, optimizer = mp.init(create, mesh=mesh, layout=rules)(jax.random.key(0))
    step = mp.jit(train_step, mesh=mesh, layout=rules, dims=DIMS, donate_argnames=("model", "optimizer"))
    tokens = jax.numpy.zeros((16, 64), "int32")
    blocked, times = [], []
    with tempfile.TemporaryDirectory() as folder, mp.Checkpoints(folder, every=1, keep=2) as run:
        for n in range(40):
            began = time.perf_counter()
            jax.block_until_ready(step(model, optimizer, tokens, tokens, jax.random.key(1)))
            stepped = time.perf_counter()
            if n % 10 == 9:
                run.save(n, (model, optimizer))
                blocked.append(time.perf_counter() - stepped)
            elif n:
                times.append(stepped - began)
    one, wait = statistics.median(times), statistics.median(blocked[1:])
    share = wait / (500 * one)
    yield "a save blocks, of 500 steps of train_lm", f"{1e3 * wait:.0f} ms: {100 * share:.2f} %", "≤ 1 %"


def agreement() -> Iterator[Row]:
    """The facts of Llama-3-70B's step, but for values, which nothing here can hold, exchanged by four processes."""
    script = f"""
import time
import meshpar as mp
mp.distributed()
from llama import llama3_70b
from meshpar._src.pods.agree import agree
step, arguments, dims = llama3_70b()
plan = mp.plan(step, *arguments, mesh="data=64, model=8", topology="v5p:8x8x8", layout={LARGE!r}, dims=dims)
for round in range(3):
    began = time.perf_counter()
    agree("step", {{"program": str(plan.program.closed.jaxpr).splitlines(), "layout": [str(plan.layout)],
                    "devices": [", ".join(map(str, range(512)))]}}, {{}})
    print("took", time.perf_counter() - began, flush=True)
"""
    times = [float(t) for t in re.findall(r"took (\S+)", _launched(script, 4))]
    yield "agreement on Llama-3-70B's step, 4 processes", f"{max(times):.2f} s", "< 0.5 s"


def watch() -> Iterator[Row]:
    """CPU time of processes that sleep under the watchdog."""
    script = """
import sys, time
import meshpar as mp
mp.distributed()
from meshpar._src.pods.watch import CALLS
for n in range(5000):
    CALLS.note("step", {"x": n})
time.sleep(3)
began = time.process_time()
time.sleep(20)
print("took", (time.process_time() - began) / 20, flush=True)
"""
    first, other = (float(re.findall(r"took (\S+)", t)[0]) for t in _logs_of(script, 2))
    yield "watchdog, share of a core: process 0, another", f"{100 * first:.2f} %, {100 * other:.2f} %", ""


def plan() -> Iterator[Row]:
    script = f"""
import time
import meshpar as mp
from llama import llama3_70b
step, arguments, dims = llama3_70b()
began = time.process_time()
plan = mp.plan(step, *arguments, mesh="data=512, model=8", topology="v5p:16x16x16", layout={LARGE!r}, dims=dims)
plan.memory.peak, plan.seconds
print("took", time.process_time() - began)
"""
    text = subprocess.run([sys.executable, "-c", script], env=HERE, capture_output=True, text=True, check=True).stdout
    yield "Llama-3-70B traced and planned for 4,096 chips", f"{float(text.split()[-1]):.2f} CPU s", "≤ 1 CPU s"


def compile_large() -> Iterator[Row]:
    what = "the same compiled (`--effort fast`), whole command"
    if importlib.util.find_spec("libtpu") is None:
        yield what, "libtpu is not installed", "≤ 40 CPU s, ≤ 2 GB"
        return
    command = [
        "-m",
        "meshpar",
        "compile",
        "examples/llama.py:llama3_70b",
        "--topology",
        "v5p:16x16x16",
        "--effort",
        "fast",
    ]
    command += ["--mesh", "data=512, model=8", "--layout", LARGE]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as cache:  # nothing is taken from an earlier one
        env = {**HERE, "MESHPAR_CACHE": cache, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield what, f"{cpu:.0f} CPU s, {after.ru_maxrss / 1e6:.2f} GB", "≤ 40 CPU s, ≤ 2 GB"


RESTORED = {
    "disk": ["--slices", "1"], "memory": ["--slices", "4"],
    "memory, --elastic": ["--slices", "2", "--elastic", "slice", "--back", "8"],
}  # fmt: skip
"""How the state is restored → options of ``meshpar launch``."""


def kills(count: int, first: int, how: str) -> Iterator[Row]:
    """Four processes of train_lm, one killed at a random moment, several times: losses compared with an undisturbed run.

    Args:
      first: number of the first of these runs; a run with a number has the same victim and the same fraction of the time.
      how: key of ``RESTORED``. Of copies in memory, nothing is on disk, and the killed process loses its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone, length, _, _ = _trained(Path(folder, "alone"), None, how)
        worst, survived, restarts, lost = 0.0, 0, 0, []
        for k in range(first, first + count):
            rng = random.Random(k)
            losses, _, text, times = _trained(
                Path(folder, str(k)), (rng.randrange(4), rng.uniform(0.05, 0.95) * length), how
            )
            restarts += text.count("starting again")
            lost += times
            if losses is not None and losses.keys() == alone.keys():
                survived += 1
                worst = max(worst, *(abs(losses[n] - alone[n]) for n in alone))
            else:
                print(text[-2000:], file=sys.stderr)
    what = f"train_lm, 4 processes, kill -9 of one, restored from {how}"
    yield f"{what}: runs of {count} that finish", f"{survived}, {restarts} restarts", "all"
    yield "largest difference of a step's loss", f"{worst:.1e}", "≤ 1e-5"
    if lost:
        yield "seconds from a kill to the next new step, without its compile", _range(lost), ""


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (largest {max(values):.1f})"


def _trained(
    folder: Path, kill: tuple[int, float] | None, how: str
) -> tuple[dict[int, float] | None, float, str, list[float]]:
    """(loss by step, seconds, output of the launcher, the seconds lost) of one run.

    Args:
      kill: (process, seconds until it is killed).
      how: key of ``RESTORED``.
    """
    folder.mkdir()
    metrics, memory = folder / "losses", how != "disk"
    launch = [sys.executable, "-m", "meshpar", "launch", "-n", "4", "--devices", "8", "--restarts", "3", *RESTORED[how]]
    script = ["examples/train_lm.py", *TRAIN, "--checkpoint", str(folder / "run"), "--metrics", str(metrics)]
    script += ["--every", "1000" if memory else "10", *(["--memory", "data"] if how == "memory" else [])]
    if "elastic" in how:
        layout = "batch: slice+data; heads, kv_heads?, mlp, vocab: model; embed: data"
        script += ["--memory", "slice", "--mesh", "slice=2, data=2, model=2", "--layout", layout]
    began, lost = time.monotonic(), []
    with (folder / "output").open("w+") as output:
        steps = "100" if "elastic" in how else "60"
        child = subprocess.Popen([*launch, *script, "--steps", steps], cwd=ROOT, env=HERE, stdout=output, stderr=output)
        if kill is not None:
            process, seconds = kill
            time.sleep(seconds)
            for pid in _children(child.pid):
                if f"MESHPAR_PROCESS={process}\0" in Path(f"/proc/{pid}/environ").read_text():
                    os.kill(pid, signal.SIGKILL)
            killed, before = time.monotonic(), _steps(metrics)
            while child.poll() is None and max(_steps(metrics), default=0) <= max(before, default=0):
                time.sleep(0.02)
            new = [line for line in _lines(metrics)[len(before) :] if "tokens_per_s" in line]
            if before and new:  # the first new line is of the step that compiles
                lost.append(time.monotonic() - killed - 16 * 64 / new[0]["tokens_per_s"])
        code = child.wait(timeout=600)
        output.seek(0)
        text = output.read()
    losses = {line["step"]: line["loss"] for line in _lines(metrics) if "loss" in line} if code == 0 else None
    return losses, time.monotonic() - began, text, lost


def _lines(metrics: Path) -> list[dict[str, float]]:
    return (
        [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        if metrics.exists()
        else []
    )


def _steps(metrics: Path) -> list[int]:
    return [int(line["step"]) for line in _lines(metrics)]


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _launched(script: str, processes: int) -> str:
    return "".join(_logs_of(script, processes))


def _logs_of(script: str, processes: int) -> list[str]:
    """The output of each process of a script."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.py").write_text(script)
        command = [
            sys.executable,
            "-m",
            "meshpar",
            "launch",
            "-n",
            str(processes),
            "--logs",
            folder,
            str(Path(folder, "script.py")),
        ]
        subprocess.run(command, env=HERE, check=True, capture_output=True)
        return [Path(folder, "attempt-0", f"process-{p}.log").read_text() for p in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="number of the first run with a kill")
    parser.add_argument("--only", default="save,agree,watch,plan,compile,kill,memory,elastic")
    args = parser.parse_args()
    rows: dict[str, Callable[[], Iterator[Row]]] = {
        "save": saves, "agree": agreement, "watch": watch, "plan": plan, "compile": compile_large,
        **{name: functools.partial(kills, args.kills, args.first, how)
           for name, how in zip(("kill", "memory", "elastic"), RESTORED, strict=True)},
    }  # fmt: skip
    table = Table("case", "measured", "limit")
    for name in args.only.split(","):
        for row in rows[name]():
            table.add_row(*row)


if __name__ == "__main__":
    main()

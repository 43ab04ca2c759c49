"""Costs of several processes, and recovery: saves, agreement, the watchdog, plans and compilation for 4,096 chips, kills.

    python benchmarks/pods.py [--kills 6] [--only save,agree,watch,plan,compile,kill,memory,elastic]

``compile`` needs libtpu (`pip install "jax[tpu]"`), but no TPU; without it the row says so. CPU seconds are of
all threads of a process. Everything runs on virtual CPU devices, groups of processes over Gloo.
"""

import argparse
import contextlib
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
from meshpar._src.pods.process_agreement import agree
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


def kills(count: int, memory: bool = False) -> Iterator[Row]:
    """Four processes of train_lm, one killed at a random moment, several times: losses compared with an undisturbed run.

    Args:
      memory: restored from copies in the memory of the other processes; nothing is on disk. The killed one loses its own.
    """
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        alone, length, _ = _trained(Path(folder, "alone"), None, memory)
        worst, survived, restarts = 0.0, 0, 0
        for k in range(count):
            at = rng.uniform(0.05, 0.95) * length
            losses, _, text = _trained(Path(folder, str(k)), (rng.randrange(4), at), memory)
            restarts += text.count("starting again")
            if losses is not None and losses.keys() == alone.keys():
                survived += 1
                worst = max(worst, *(abs(losses[n] - alone[n]) for n in alone))
            else:
                print(text[-2000:], file=sys.stderr)
    what = "train_lm, 4 processes, kill -9 of one" + ", restored from memory" * memory
    yield f"{what}: runs of {count} that finish", f"{survived}, {restarts} restarts", "all"
    yield "largest difference of a step's loss", f"{worst:.1e}", "≤ 1e-5"


def _trained(folder: Path, kill: tuple[int, float] | None, memory: bool) -> tuple[dict[int, float], float, str]:
    """(loss by step, seconds, output of the launcher) of one run; ``kill``: (process, seconds until it is killed)."""
    folder.mkdir()
    launch = [sys.executable, "-m", "meshpar", "launch", "-n", "4", "--devices", "8", "--restarts", "3"]
    if memory:
        launch += ["--slices", "4"]
    script = [
        "examples/train_lm.py",
        *TRAIN,
        "--steps",
        "60",
        "--every",
        *(["1000", "--memory", "data"] if memory else ["10"]),
    ]
    files = ["--checkpoint", str(folder / "run"), "--metrics", str(folder / "losses")]
    began = time.monotonic()
    child = subprocess.Popen(
        [*launch, *script, *files], cwd=ROOT, env=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if kill is not None:
        process, seconds = kill
        time.sleep(seconds)
        for pid in _children(child.pid):
            if f"MESHPAR_PROCESS={process}\0" in Path(f"/proc/{pid}/environ").read_text():
                os.kill(pid, signal.SIGKILL)
    text, _ = child.communicate(timeout=600)
    lines = [json.loads(line) for line in (folder / "losses").read_text().splitlines()] if child.returncode == 0 else []
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, time.monotonic() - began, text


ELASTIC = """
import json, os, sys, time
import meshpar as mp
mp.distributed()
import jax, jax.numpy as jnp, numpy as np, optax
import meshpar._src.pods.checkpoint as disk
read = disk.read_leaves
disk.read_leaves = lambda *args: print("state from disk", flush=True) or read(*args)
folder, steps, wait = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
mesh, layout = mp.mesh("slice=2, data=2"), mp.Layout("batch: slice+data; embed: slice+data")
weights, adam = {"*/up": "embed mlp", "*/down": "mlp embed"}, optax.adam(1e-3)
if jax.process_count() == 2:
    open(f"{folder}/{os.environ['MESHPAR_ATTEMPT']}-{jax.process_index()}", "w").write(str(os.getpid()))

def create(key):
    params = {"up": jax.random.normal(key, (64, 256)) / 8, "down": jax.random.normal(key, (256, 64)) / 16}
    return {"params": params, "opt": adam.init(params)}

def train_step(state, x):
    loss_of = lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)
    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = adam.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

init = mp.init(create, mesh=mesh, layout=layout, dims=weights)
step = mp.jit(train_step, mesh=mesh, layout=layout, dims={**weights, "x": "batch embed"}, donate_argnames="state")
source = np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32)
data = mp.data.batches(source, batch=32, seed=1, mesh=mesh, layout=layout)
with mp.Checkpoints(f"{folder}/run", every=10**6, memory="slice", data=data) as run, open(f"{folder}/losses", "a") as file:
    state, at = run.restore_or(init, jax.random.key(0))
    for n, x in data.from_(at):
        began = time.time()
        state, loss = step(state, x)
        line = {"step": n, "loss": float(loss), "at": time.time(), "compile": time.time() - began if n == at else 0}
        if jax.process_index() == 0:
            print(json.dumps(line), file=file, flush=True)
        if run.save(n, state):
            sys.exit(75)
        if n + 1 == steps:
            break
        time.sleep(wait)
"""


def _attempt_of(file: Path) -> int:
    return int(file.name.partition("-")[0])


def elastic(count: int) -> Iterator[Row]:
    """A run on two slices that joins a lost one again; one of both is killed at random moments, also while the run starts."""
    rng, killed = random.Random(0), list[float]()
    steps = 60 * count
    with tempfile.TemporaryDirectory() as root:
        Path(root, "script.py").write_text(ELASTIC)
        launch = [sys.executable, "-m", "meshpar", "launch", "-n", "2", "--devices", "4", "--slices", "2"]
        more = ["--elastic", "slice", "--restarts", str(count), "--back", "1"]
        lines, reads = {}, 0
        for name, options, wait in (("lost", more, 0.1), ("calm", [], 0.0)):
            folder = Path(root, name)
            folder.mkdir()
            command = [*launch, *options, str(Path(root, "script.py")), str(folder), str(steps), str(wait)]
            with (folder / "output").open("w") as output:
                child, seen = subprocess.Popen(command, env=HERE, stdout=output, stderr=output), set[Path]()
                while child.poll() is None:
                    time.sleep(0.02)
                    started = sorted(folder.glob(f"{max(map(_attempt_of, folder.glob('*-*')), default=0)}-*"))
                    if options and len(started) == 2 and started[0] not in seen and len(killed) < count:
                        seen.add(started[0])
                        time.sleep(rng.uniform(0.0, 10.0))
                        with contextlib.suppress(ProcessLookupError):  # the run has ended
                            os.kill(int(rng.choice(started).read_text()), signal.SIGKILL)
                            killed.append(time.time())
            text = (folder / "output").read_text()
            reads += text.count("state from disk")
            if child.returncode:
                print(text[-2000:], file=sys.stderr)
            lines[name] = [
                json.loads(line) for line in (folder / "losses").read_text().splitlines() if line[-1:] == "}"
            ]
    alone = {line["step"]: line["loss"] for line in lines["calm"]}
    same = {line["step"] for line in lines["lost"]} == alone.keys()
    worst = max(abs(line["loss"] - alone[line["step"]]) for line in lines["lost"])
    lost, repeated = [], len(lines["lost"]) - len(alone)
    for t in killed:
        before = max((line["step"] for line in lines["lost"] if line["at"] < t), default=-1)
        new = next((line["at"] for line in lines["lost"] if line["step"] > before), t)
        compiled = sum(line["compile"] for line in lines["lost"] if t < line["at"] <= new)
        lost.append(new - t - compiled)
    yield (
        f"--elastic, 2 slices, kill -9 of one, {len(killed)} times: steps of {steps} that ran",
        f"{'all' if same else len(alone)}",
        "all",
    )
    yield "largest difference of a step's loss", f"{worst:.1e}", "≤ 1e-5"
    yield "steps that ran twice; restores from disk, both slices lost before a copy", f"{repeated}; {reads}", ""
    yield (
        "seconds from a kill to a new step, without compile: median, most",
        f"{statistics.median(lost):.1f}, {max(lost):.1f}",
        "",
    )


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
    parser.add_argument("--only", default="save,agree,watch,plan,compile,kill,memory,elastic")
    args = parser.parse_args()
    rows: dict[str, Callable[[], Iterator[Row]]] = {
        "save": saves, "agree": agreement, "watch": watch, "plan": plan, "compile": compile_large,
        "kill": lambda: kills(args.kills), "memory": lambda: kills(args.kills, memory=True),
        "elastic": lambda: elastic(args.kills),
    }  # fmt: skip
    table = Table("case", "measured", "limit")
    for name in args.only.split(","):
        for row in rows[name]():
            table.add_row(*row)


if __name__ == "__main__":
    main()

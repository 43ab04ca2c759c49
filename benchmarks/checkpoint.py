"""Times of the first save and restore of mp.Checkpoints, next to orbax alone in the same process; kills and damage of checkpoints.

    python benchmarks/checkpoint.py                  # 600 and 3,000 leaves, and 537 MB, on 8 virtual devices
    python benchmarks/checkpoint.py --kills 50       # SIGKILL of a writer at random moments
    python benchmarks/checkpoint.py --damage         # every file of a checkpoint: a bit changed, cut, emptied, missing

``save``: seconds until the call returns; ``complete``: until the checkpoint is on disk. Every row is the first call of its kind.
The last column: the limit for complete + restore is twice orbax plus 2 s. After a kill, the newest checkpoint has to be complete
and its values are of its step; after damage, the restored values have to belong to a step that was saved.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tables import Table

import meshpar as mp
from meshpar._src.pods.checkpoint import orbax, steps_of, verify


def leaves_of(count: int) -> dict[str, jax.Array]:
    """Arrays of an unrolled model with Adam: half of them sharded matrices, half replicated vectors, of 12 shapes."""
    mesh = mp.mesh("data=4, model=2")
    out = {}
    for k in range(count):
        width = 64 * (1 + k % 6)
        shape, spec = ((64, width), P("data", "model")) if k % 2 else ((width,), P())
        out[f"layer{k}"] = jax.device_put(np.full(shape, k, np.float32), NamedSharding(mesh, spec))
    return out


def one_large() -> dict[str, jax.Array]:
    mesh = mp.mesh("data=8")
    return {"w": jax.device_put(np.ones((16384, 8192), np.float32), NamedSharding(mesh, P("data")))}


def times_of_orbax(state: Any, folder: Path) -> list[float]:
    """(save, complete, restore) in seconds."""
    ocp = orbax()
    manager = ocp.CheckpointManager(folder, item_names=("state",))
    began = time.perf_counter()
    manager.save(0, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    returned = time.perf_counter()
    manager.wait_until_finished()
    complete = time.perf_counter()
    how = ocp.checkpoint_utils.construct_restore_args(state)
    found = manager.restore(0, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(state, restore_args=how)))
    jax.block_until_ready(found["state"])
    end = time.perf_counter()
    manager.close()
    return [returned - began, complete - began, end - complete]


def times_of_meshpar(state: Any, folder: Path) -> list[float]:
    """(save, complete, restore) in seconds."""
    with mp.Checkpoints(folder) as run:
        began = time.perf_counter()
        run.save(0, state)
        returned = time.perf_counter()
        run.wait()
        complete = time.perf_counter()
        found, _ = run.restore(state)
        jax.block_until_ready(found)
        end = time.perf_counter()
    return [returned - began, complete - began, end - complete]


def times(folder: Path) -> None:
    table = Table("state", "with", "save, s", "complete, s", "restore, s", "of the limit")
    times_of_orbax({"x": jnp.ones(3)}, folder / "first")  # imports
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("600 leaves", lambda: leaves_of(600)), ("3,000 leaves", lambda: leaves_of(3000)), ("537 MB", one_large),
    ]  # fmt: skip
    for name, make in cases:
        state = jax.block_until_ready(make())
        alone = times_of_orbax(state, folder / f"{name} orbax")
        ours = times_of_meshpar(state, folder / f"{name} meshpar")
        ratio = max(mine / (2 * other + 2) for mine, other in zip(ours[1:], alone[1:], strict=True))
        table.add_row(name, "orbax", *(f"{t:.2f}" for t in alone), "")
        table.add_row(name, "meshpar", *(f"{t:.2f}" for t in ours), f"{ratio:.2f}")
        shutil.rmtree(folder / f"{name} orbax")
        shutil.rmtree(folder / f"{name} meshpar")


# -- kills and damage


def state_of(n: int) -> dict[str, Any]:
    mesh = mp.mesh("data=8")
    value = np.full((64, 512), n, np.float32)
    return {"w": jax.device_put(value, NamedSharding(mesh, P("data"))), "n": n, "wide": np.full(7, n * 2**40)}


def write(folder: str, said: Any) -> None:
    """Restore, and save until killed."""
    mp.virtual_devices(8)
    like = state_of(0)
    run = mp.Checkpoints(folder, keep=2)
    _, at = run.restore(like) if run.steps() else (like, 0)
    while True:
        said.send(at)
        run.save(at, state_of(at))
        at += 1


def is_state_of(state: Any, n: int) -> bool:
    want = state_of(n)
    return all(np.array_equal(state[k], want[k]) and type(state[k]) is type(want[k]) for k in want)


def check(folder: str, newest: int, said: Any) -> None:
    """Send the steps on disk, and whether the two newest are complete, and the newest is newer than before with its values.

    An older one may be half deleted: ``keep=2``.
    """
    mp.virtual_devices(8)
    steps = steps_of(folder)
    state, at = mp.Checkpoints(folder).restore(state_of(0))
    ok = at == steps[-1] + 1 and is_state_of(state, steps[-1]) and steps[-1] > newest
    said.send((steps, ok and not any(verify(folder, n) for n in steps[-2:])))


def kills(folder: Path, count: int) -> None:
    """All processes are forks of this one, which has imported everything, and has not made JAX's devices."""
    forks = multiprocessing.get_context("fork")
    draw, newest, wrong = random.Random(0), -1, 0
    for k in range(count):
        mine, its = forks.Pipe()
        writer = forks.Process(target=write, args=(str(folder), its))
        writer.start()
        while mine.recv() <= newest + 2:
            pass
        time.sleep(draw.uniform(0.0, 0.3))
        writer.kill()
        writer.join()
        mine, its = forks.Pipe()
        checker = forks.Process(target=check, args=(str(folder), newest, its))
        checker.start()
        steps, ok = mine.recv()
        checker.join()
        wrong += not ok
        newest = steps[-1]
        print(f"kill {k}: checkpoints {steps}, {'ok' if ok else 'WRONG'}", flush=True)
    print(f"{count} kills, {wrong} wrong")
    sys.exit(bool(wrong))


def spoil(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "bit":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    else:
        path.write_bytes(data[: draw.randrange(len(data)) if how == "cut" else 0])


def damage(folder: Path) -> None:
    with mp.Checkpoints(folder / "run") as run:
        for n in range(2):
            run.save(n, state_of(n))
    draw, ends = random.Random(0), dict.fromkeys(("right", "older", "error", "WRONG"), 0)
    files = [p.relative_to(folder / "run") for p in sorted((folder / "run" / "1").rglob("*")) if p.is_file()]
    for file in [f for f in files if (folder / "run" / f).stat().st_size]:
        for how in ["bit"] * 10 + ["cut"] * 3 + ["empty", "missing"]:
            shutil.copytree(folder / "run", folder / "copy")
            spoil(folder / "copy" / file, how, draw)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    state, at = mp.Checkpoints(folder / "copy").restore(state_of(0))
                    end = "WRONG" if not is_state_of(state, at - 1) else "right" if at == 2 else "older"
                except mp.errors.CheckpointError as error:
                    end = f"error: {error.headline}"
            ends[end.partition(":")[0]] += 1
            if end not in ("right", "older"):
                print(f"{file} {how}: {end}", flush=True)
            shutil.rmtree(folder / "copy")
    print(f"{sum(ends.values())} cases of {len(files)} files: {ends}")
    sys.exit(bool(ends["WRONG"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="kill a writer so often")
    parser.add_argument("--damage", action="store_true", help="damage every file of a checkpoint")
    args = parser.parse_args()
    os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "3")
    with tempfile.TemporaryDirectory() as folder:
        if args.kills:
            kills(Path(folder), args.kills)
        mp.virtual_devices(8)
        (damage if args.damage else times)(Path(folder))


if __name__ == "__main__":
    main()

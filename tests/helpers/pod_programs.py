"""Programs of the processes of these tests: small train steps, and ways to fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import meshpar as mp
from meshpar._src.pods.audit import Audit

SCHEMES = {
    "dp": ("data=4", "batch: data"),
    "fsdp": ("data=4", "batch: data; embed: data"),
    "fsdp+tensor": ("data=2, model=2", "batch: data; mlp: model; embed: data"),
}
PARAMS = {"*up": "embed mlp", "*down": "mlp embed", "*bias": "mlp"}
TX = optax.adam(1e-2)


def create(key):
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (16, 32)) / 4,
        "down": jax.random.normal(down, (32, 16)) / 6,
        "bias": jnp.zeros(32),
    }
    return {"params": params, "opt": TX.init(params)}


def loss_of(params, x):
    return jnp.mean((jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"] - x) ** 2)


def train_step(state, x):
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
    updates, opt = TX.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def batch(n: int, rows: int = 8) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(rows, 16)).astype(np.float32)


def functions(scheme: str, lowering: str = "jit"):
    """(init, step, mesh, layout)"""
    sizes, rules = SCHEMES[scheme]
    mesh, layout = mp.mesh(sizes), mp.Layout(rules)
    init = mp.init(create, mesh=mesh, layout=layout, dims=PARAMS)
    how = {"mesh": mesh, "layout": layout, "dims": {**PARAMS, "x": "batch embed"}, "lowering": lowering}
    step = mp.jit(train_step, **how, donate_argnames="state")
    return init, step, mesh, layout


def gathered(tree: Any) -> Any:
    """The arrays of a tree, as lists of numbers."""
    from meshpar._src.global_arrays import fetch

    return [fetch(x).tolist() for x in jax.tree.leaves(tree)]


def train(scheme: str, lowering: str, steps: int = 3) -> Any:
    """The gathered state and the losses."""
    init, step, _, _ = functions(scheme, lowering)
    state = init(jax.random.key(0))
    losses = []
    for n in range(steps):
        state, loss = step(state, batch(n))
        losses.append(float(loss))
    return losses, gathered(state)


def results_of_all() -> Any:
    """(losses and state of two schemes; results for arguments of every kind; the error of a mesh of two devices, if any)."""
    trained = {s: train(s, low) for s, low in (("fsdp", "shard_map"), ("fsdp+tensor", "jit"))}
    return trained, arguments(), leave_one_out()


def flipped(x: jax.Array, device: int, bit: int) -> jax.Array:
    """The array with one bit flipped in the copy of one device, its number in the mesh; ``bit`` counts over the shard."""
    data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    shards = {s.device: np.array(s.data) for s in data.addressable_shards}
    at = x.sharding.mesh.devices.flat[device]
    if at in shards:
        raw = shards[at].reshape(-1).view(np.uint8)
        raw[bit // 8 % raw.size] ^= 1 << (bit % 8)
    parts = [
        jax.device_put(raw.view(data.dtype).reshape(shards[at].shape) if d is at else part, d)
        for d, part in shards.items()
    ]
    made = jax.make_array_from_single_device_arrays(data.shape, data.sharding, parts)
    return made if data is x else jax.random.wrap_key_data(made, impl=jax.random.key_impl(x))


def audited() -> Any:
    """(whether the audit of a clean state shows nothing, the fault of an array that one device changed, seconds of processes)."""
    init, step, _, _ = functions("dp", "shard_map")
    state = init(jax.random.key(0))
    audit = Audit(step.plan(state, batch(0)))
    audit.start(3, {"state": state})
    clean = audit.finish() == []
    params = {**state["params"], "up": flipped(state["params"]["up"], 3, 77)}
    audit.start(4, {"state": {**state, "params": params}}, (1.5, 0.25 * (1 + jax.process_index())))
    (fault,) = audit.finish()
    return clean, str(fault), sorted(audit.seconds.items())


def differ(what: str, odd: int) -> None:
    """A step of gradient descent, in which one process does something else."""
    me = jax.process_index() == odd
    sizes, rules = SCHEMES["fsdp+tensor"]
    if me and what == "layout":
        rules = "batch: data; mlp: model"
    mesh = mp.mesh(sizes)
    weights = lambda key: {"params": create(key)["params"]}  # noqa: E731
    key = jax.random.key(int(me and what == "seed"))
    if what == "replicas":  # weights of no mp.init, born on each process from its own seed
        born = weights(jax.random.key(int(me)))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, everywhere, lambda i: x[i]), born)
    else:
        state = mp.init(weights, mesh=mesh, layout=rules, dims=PARAMS)(key)

    def step(state, x):
        grads = jax.grad(loss_of)(state["params"], x)
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}

    step = mp.jit(step, mesh=mesh, layout=rules, dims={**PARAMS, "x": "batch embed"}, lowering="jit")
    step(state, batch(0))


def go_wrong(what: str, odd: int) -> None:
    """At the fourth step one process goes wrong."""

    @mp.jit(mesh=mp.mesh("data=-1"), layout="batch: data", dims={"x": "batch _"}, lowering="jit")
    def train_step(state, x):
        return state + x.sum(), x.sum()

    state = 0.0
    for n in range(200):
        x = batch(n)
        if n == 3:
            print("at step 3", flush=True)
            if jax.process_index() == odd:
                if what == "raise":
                    raise RuntimeError("no such luck")
                if what == "exit":
                    sys.exit(0)
                if what.startswith("SIG"):
                    os.kill(os.getpid(), signal.Signals[what])
                if what == "sleep":
                    time.sleep(60)
                if what == "skip":
                    continue
        state, loss = train_step(state, x)
        float(loss)
        if what == "skip" and n >= 3:
            time.sleep(0.2)


def wait_here() -> None:
    print("here", flush=True)
    time.sleep(60)


def check_and_compile() -> Any:
    init, step, *_ = functions("fsdp+tensor")
    state = init(jax.random.key(0))
    report = step.check(state, batch(0))
    compiled = step.compile(state, batch(0), cache=False)
    return [report.ok, len(report.rows), report.rows[0].leaves, compiled.topology, compiled.bytes_sent]


def leave_one_out() -> str:
    try:
        mp.mesh("data=2")
    except mp.errors.MeshError as error:
        return str(error)
    return ""


def arguments() -> Any:
    """Numpy, local and global arrays, keys and Python numbers, over the mesh of all processes."""
    mesh = mp.mesh("data=4")

    def f(x, key, scale):
        return x * scale + jax.random.normal(key, x.shape)

    run = mp.jit(f, mesh=mesh, layout="batch: data", dims={"x": "batch _"})
    x = np.arange(8 * 3).reshape(8, 3)  # int64, which JAX narrows
    key = jax.random.key(1)
    local = jax.device_put(x, jax.local_devices()[-1])
    first = run(x, key, 2.0)
    others = [run(local, jax.device_put(key, jax.local_devices()[0]), 2.0), run(jnp.asarray(x), key, 2.0)]
    return [gathered(y)[0] for y in (first, *others, run(first, key, 1.0))]


# -- checkpoints and data


def save_for_ever(folder: str) -> None:
    """Save states that are full of their step's number, one after the other, until killed."""
    mesh = mp.mesh("data=-1")
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    run = mp.Checkpoints(folder, keep=3)
    for n in range(10_000):
        value = np.full((64, 64), n, np.float32)
        state = {"w": jax.make_array_from_callback(value.shape, sharding, lambda i, v=value: v[i]), "n": jnp.int32(n)}
        run.save(n, state)
        print(f"saving {n};", flush=True)


def save_and_restore(folder: str, scheme: str, steps: int) -> Any:
    """Go on from what there is, if anything, for some steps; the first batch, the losses, the digests on disk."""
    from meshpar._src.pods.checkpoint import facts_of

    init, step, _, _ = functions(scheme)
    with mp.Checkpoints(folder, keep=3) as run:
        state, at = run.restore_or(init, jax.random.key(0))
        losses = []
        for n in range(at, at + steps):
            state, loss = step(state, batch(n))
            losses.append(float(loss))
            run.save(n, state)
        run.wait()
        facts = facts_of(folder, run.steps()[-1])
    return at, losses, {p: leaf["digest"] for p, leaf in facts["leaves"].items()}, gathered(state)


def read_rows(folder: str, last: int, kill_at: int = -1, odd: int = 0) -> Any:
    """Go over data in batches with checkpoints, noting which rows this process's devices had."""
    mesh = mp.mesh("data=-1")
    rows = [{"x": np.full(3, i, np.float32), "row": i} for i in range(60)]
    data = mp.data.batches(rows, batch=12, mesh=mesh, layout="batch: data", seed=7)
    step = mp.jit(lambda w, x: (w + x.sum(), x.mean()), mesh=mesh, layout="batch: data", dims={"x": "batch _"})
    with mp.Checkpoints(folder, keep=2, every=2) as run:
        init = mp.init(lambda: jnp.zeros(()), mesh=mesh, layout=mp.Layout("batch: data", optional=True))
        w, at = run.restore_or(init, data=data)
        had = {}
        for n, b in data.from_(at):
            if n == kill_at and jax.process_index() == odd:
                run.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            w, _ = step(w, b["x"])
            had[n] = sorted({int(r) for s in b["row"].addressable_shards for r in np.asarray(s.data)})
            with open(f"{folder}-{at}-{jax.process_index()}.txt", "a") as f:
                print(n, *had[n], file=f, flush=True)
            if run.save(n, w, data=data) or n == last:
                break
    return at, data.position, data.rows_read, float(w)


def read_other_data(odd: int) -> None:
    """Train on data of equal length that differ in one process, in rows that are not in the first batch of process 0."""
    mesh = mp.mesh("data=-1")
    source = np.arange(64, dtype=np.float32) + (jax.process_index() == odd)
    data = mp.data.batches(source, batch=8, mesh=mesh, layout="batch: data")
    step = mp.jit(lambda w, x: w + x.sum(), mesh=mesh, layout="batch: data", dims={"x": "batch"})
    w = 0.0
    for _, x in data.from_(0):
        w = step(w, x)
        return


def until_told_to_stop(folder: str) -> None:
    init, step, _, _ = functions("fsdp")
    with mp.Checkpoints(folder, every=1000) as run:
        state, at = run.restore_or(init, jax.random.key(0))
        for n in range(at, 100_000):
            state, loss = step(state, batch(n % 7))
            float(loss)
            if n == 5:
                print("under way", flush=True)
            if run.save(n, state):
                print("saved", n, run.steps(), flush=True)
                sys.exit(75)

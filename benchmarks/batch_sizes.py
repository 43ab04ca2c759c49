"""Steps to a target loss under several batch sizes, each with the best of several learning rates.

    pip install -e ".[examples]"
    python benchmarks/batch_sizes.py [--quick] [--logs DIR]
    python benchmarks/batch_sizes.py --plot docs/static/batch-sizes.png

An MLP classifies the digits of scikit-learn (8 by 8 pixels), by SGD with momentum. For each batch size, all learning rates and
seeds are trained by one program, `jax.vmap` over ``trial``, under the layout ``trial: data`` on 8 virtual CPU devices.

- ``steps``: the median over seeds of the first step after which the loss on held-out digits is at most the target, at the learning
  rate with the fewest (Shallue et al., *Measuring the Effects of Data Parallelism on Neural Network Training*, 2018).
- ``steps, batch: data``: of the training with this rate and the first seed, repeated under that layout, which writes a log in
  MLPerf's format (in parentheses: of the same training in the sweep).
- ``noise scale``: of the gradients of all training digits at its end.

The curve ``steps = S (1 + B / batch)`` is fitted to the table; B is the critical batch size of McCandlish et al., *An Empirical
Model of Large-Batch Training* (2018). ``mp.train.noise_scale`` estimates it from gradients alone, where the loss is near the
target.
"""

import argparse
import functools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tables import Table

import meshpar as mp

TARGET = 0.3
"""Nats per digit on the held-out digits."""
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
RATES = tuple(2.0**n for n in range(-7, 1))
SEEDS = 4
SAMPLES = 40_000
"""Digits after which a training ends without the target."""
MAX_STEPS, MIN_STEPS = 2500, 250
"""Bounds of the number of steps that SAMPLES are."""
MOMENTUM = 0.9
HELD_OUT = 360
DIMS = {"*up": "embed mlp", "*down": "mlp classes"}

State = dict[str, Any]


def digits() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(Training digits, held-out digits): images [digit, 64] in 0 to 1, labels [digit]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    data = {"images": jnp.asarray(images[order] / 16, jnp.float32), "labels": jnp.asarray(labels[order], jnp.int32)}
    return {k: x[HELD_OUT:] for k, x in data.items()}, {k: x[:HELD_OUT] for k, x in data.items()}


def create(key: jax.Array) -> State:
    """Weights and momentum."""
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (64, 64)) / 8, "down": jax.random.normal(down, (64, 10)) / 8}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy in nats."""
    logits = jax.nn.relu(batch["images"] @ params["up"]) @ params["down"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], 1).mean()


def drawn(data: dict[str, jax.Array], key: jax.Array, size: int) -> dict[str, jax.Array]:
    """A batch of random digits."""
    chosen = jax.random.randint(key, (size,), 0, len(data["labels"]))
    return {name: x[chosen] for name, x in data.items()}


def update(state: State, rate: jax.Array, batch: dict[str, jax.Array]) -> State:
    """One step of SGD with momentum."""
    gradients = jax.grad(loss_of)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], gradients)
    return {"params": jax.tree.map(lambda w, m: w - rate * m, state["params"], momentum), "momentum": momentum}


def losses_of(
    rate: jax.Array, key: jax.Array, data: dict[str, jax.Array], held_out: dict[str, jax.Array], size: int, steps: int
) -> jax.Array:
    """The held-out loss after each step of a training: [step]."""

    def step(state: State, key: jax.Array) -> tuple[State, jax.Array]:
        state = update(state, rate, drawn(data, key, size))
        return state, loss_of(state["params"], held_out)

    create_key, data_key = jax.random.split(key)
    return jax.lax.scan(step, create(create_key), jax.random.split(data_key, steps))[1]


def steps_to_target(losses: np.ndarray, target: float) -> np.ndarray:
    """Number of steps until the loss is at most the target, over the last dim; infinite where it never is."""
    reached = losses <= target
    return np.where(reached.any(-1), reached.argmax(-1) + 1.0, np.inf)


@dataclass(frozen=True)
class Sweep:
    """The result of a batch size: fewest steps, the learning rate that takes them, and the first seed's number."""

    size: int
    steps: float
    rate: float
    first: float


def sweep(size: int, rates: tuple[float, ...], seeds: int) -> Sweep:
    """Train with every learning rate and seed, one program over 8 devices."""
    data, held_out = digits()
    steps = min(MAX_STEPS, max(MIN_STEPS, SAMPLES // size))
    keys = jax.random.split(jax.random.key(1), seeds)

    def trials(rates: jax.Array, keys: jax.Array, data: Any, held_out: Any) -> jax.Array:
        return jax.vmap(lambda rate, key: losses_of(rate, key, data, held_out, size, steps))(rates, keys)

    fn = mp.jit(trials, mesh="data=8", layout="trial: data", dims={"rates": "trial", "keys": "trial"})
    losses = fn(jnp.repeat(jnp.asarray(rates), seeds), jnp.tile(keys, len(rates)), data, held_out)
    needed = steps_to_target(np.asarray(losses).reshape(len(rates), seeds, steps), TARGET)
    medians = np.median(needed, axis=1)
    best = int(medians.argmin())
    return Sweep(size, float(medians[best]), rates[best], float(needed[best, 0]))


def logged_training(best: Sweep, log: mp.log.MlLog) -> tuple[int, State]:
    """(Steps to the target, state) of the training of a sweep's best rate and first seed, under ``batch: data``."""
    data, held_out = digits()
    log.event("cache_clear", True)
    log.event("init_start", kind="INTERVAL_START")
    facts = {
        "submission_benchmark": "digits", "submission_division": "open", "submission_org": "meshpar",
        "submission_platform": f"8 virtual devices of {jax.default_backend()}", "global_batch_size": best.size,
        "train_samples": len(data["labels"]), "eval_samples": HELD_OUT, "opt_name": "sgd", "opt_base_learning_rate": best.rate,
    }  # fmt: skip
    for key, value in facts.items():
        log.event(key, value)

    def step(state: State, batch: Any, held_out: Any) -> tuple[State, jax.Array]:
        state = update(state, jnp.float32(best.rate), batch)
        return state, loss_of(state["params"], held_out)

    dims = {**DIMS, "*images": "batch embed", "*labels": "batch"}
    fn = mp.jit(step, mesh="data=8", layout="batch: data", dims=dims)
    create_key, data_key = jax.random.split(jax.random.split(jax.random.key(1), 1)[0])
    state, keys = create(create_key), jax.random.split(data_key, int(best.first) + 10)
    fn.lower(state, drawn(data, keys[0], best.size), held_out).compile()
    log.event("init_stop", kind="INTERVAL_END")
    log.event("run_start", kind="INTERVAL_START")
    for n, key in enumerate(keys, 1):
        epoch = {"epoch_num": n * best.size / len(data["labels"]), "samples_count": n * best.size}
        log.event("epoch_start", kind="INTERVAL_START", **epoch)
        state, loss = fn(state, drawn(data, key, best.size), held_out)
        log.event("epoch_stop", kind="INTERVAL_END", **epoch)
        log.event("eval_start", kind="INTERVAL_START", **epoch)
        value = float(loss)
        log.event("eval_accuracy", value, **epoch)
        log.event("eval_stop", kind="INTERVAL_END", **epoch)
        if value <= TARGET:
            log.event("run_stop", kind="INTERVAL_END", status="success")
            return n, state
    log.event("run_stop", kind="INTERVAL_END", status="aborted")
    return len(keys), state


def gradient_noise(state: State) -> float:
    """The simple noise scale of a state's gradients, from batches of 32 of all training digits."""
    data, _ = digits()
    batches = jax.tree.map(lambda x: x[: len(x) // 32 * 32].reshape(-1, 32, *x.shape[1:]), data)
    small = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(state["params"], batches)
    large = jax.tree.map(lambda g: g.mean(0), small)
    return float(mp.train.noise_scale(small, large, batch=(32, 32 * len(batches["labels"]))).batch)


def fitted(sweeps: list[Sweep]) -> tuple[float, float]:
    """(S, B) of the curve ``steps = S (1 + B / size)``: least squares of the relative errors."""
    sizes, steps = (np.array(x) for x in zip(*((s.size, s.steps) for s in sweeps), strict=True))
    columns = np.stack([1 / steps, 1 / (sizes * steps)], 1)
    least, slope = np.linalg.lstsq(columns, np.ones(len(steps)), rcond=None)[0]
    return float(least), float(slope / least)


def draw(sweeps: list[Sweep], curve: tuple[float, float], noise: float, file: Path) -> None:
    """A picture of steps over batch sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    ink, dim, grid, blue, orange = "#1a1c22", "#5d6570", "#d9dce1", "#1f6fd0", "#b85400"  # as on the pages of plans
    sizes = np.geomspace(sweeps[0].size, sweeps[-1].size, 100)
    least, critical = curve
    figure, axes = pyplot.subplots(figsize=(7.2, 4), layout="constrained")
    axes.grid(color=grid, linewidth=0.8)
    axes.loglog(sizes, sweeps[0].steps * sweeps[0].size / sizes, ":", color=dim)
    axes.loglog(sizes, least * (1 + critical / sizes), color=blue)
    axes.loglog([s.size for s in sweeps], [s.steps for s in sweeps], "o", color=blue)
    axes.axvline(noise, color=orange, linestyle="--")
    first, middle, last = sweeps[0], sweeps[len(sweeps) // 2], sweeps[-1]
    label = functools.partial(axes.annotate, textcoords="offset points", va="center")
    proportional = first.steps * first.size / middle.size
    label("steps ∝ 1 / batch size", (middle.size, proportional), (-8, 0), ha="right", color=dim)
    text = f"measured, and\n{least:.0f} (1 + {critical:.0f} / batch size)"
    label(text, (last.size, last.steps), (0, 44), ha="right", color=blue)
    label(f"mp.train.noise_scale: {noise:.0f}", (noise, first.steps), (6, 0), ha="left", color=orange)
    axes.set_title(
        "An MLP on the digits of scikit-learn, SGD with momentum", loc="left", color=ink, fontweight="bold", fontsize=11
    )
    axes.set_xlabel("batch size, digits per step", color=dim)
    axes.set_ylabel(f"steps to a held-out loss of {TARGET} nats", color=dim)
    axes.set_xticks([s.size for s in sweeps], [str(s.size) for s in sweeps])
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.tick_params(which="both", color=grid, labelcolor=dim, length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(file, dpi=160, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three batch sizes, four learning rates, two seeds")
    parser.add_argument("--logs", type=Path, help="folder of the logs in MLPerf's format")
    parser.add_argument("--plot", type=Path, help="write a picture")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    mp.virtual_devices(8)
    sizes, rates, seeds = ((16, 64, 256), RATES[1::2], 2) if args.quick else (SIZES, RATES, SEEDS)
    table = Table("batch size", "steps", "digits", "learning rate", "steps, batch: data", "noise scale", "sweep, s")
    sweeps, noises = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for size in sizes:
            began = time.perf_counter()
            best = sweep(size, rates, seeds)
            took = time.perf_counter() - began
            log = folder / f"digits-{size}.txt"
            log.unlink(missing_ok=True)
            steps, state = logged_training(best, mp.log.MlLog(log))
            sweeps.append(best)
            noises.append(gradient_noise(state))
            table.add_row(str(size), f"{best.steps:g}", f"{best.steps * size:,.0f}", f"{best.rate:g}",
                          f"{steps} ({best.first:g})", f"{noises[-1]:.0f}", f"{took:.0f}")  # fmt: skip
    least, critical = curve = fitted(sweeps)
    noise = statistics.median(noises)
    print(f"\nsteps = {least:.1f} (1 + {critical:.0f} / batch size); median noise scale {noise:.0f}")
    if args.plot:
        draw(sweeps, curve, noise, args.plot)


if __name__ == "__main__":
    main()

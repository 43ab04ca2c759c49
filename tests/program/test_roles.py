"""Which arrays of a step are parameters: ZeRO-1 shards optimizer state, and nothing else, whatever the weights are called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar as mp
from meshpar.errors import ReplicatedWarning

R = np.random.default_rng(0)
P = {"up": R.normal(size=(16, 32)).astype(np.float32) / 4, "down": R.normal(size=(32, 16)).astype(np.float32) / 6}
X = R.normal(size=(32, 16)).astype(np.float32)
DIMS = {"*/up*": "embed mlp", "*/down*": "mlp embed", "x": "batch embed"}
ZERO1 = "batch: data; opt.embed: data"
ADAM = optax.adamw(1e-2)
ZEROS = jax.tree.map(np.zeros_like, P)


def loss(p, x):
    return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2)


def train(p, s, x, tx=ADAM, loss=loss):
    value, g = jax.value_and_grad(loss)(p, x)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, value


def spelled(name, tx=ADAM, **options):
    """A step whose weights are the argument ``name``."""
    made = {}
    exec(f"def step({name}, s, x): return train({name}, s, x, tx, **options)", {**globals(), **locals()}, made)
    return made["step"], (P, tx.init(P), X)


def equinox():
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        up: jax.Array
        down: jax.Array

    def step(model, s, x):
        return train(model, s, x, loss=lambda m, x: loss(vars(m), x))

    model = Model(**jax.tree.map(jnp.asarray, P))
    return step, (model, ADAM.init(model), X)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def model_and_optimizer():
    def step(optimizer, x):
        value, g = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(optimizer.model)
        optimizer.update(g)
        return value

    return step, (nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), ADAM), X)


def two_optimizers():
    def step(generator, critic, s, t, x):
        generator, s, a = train(generator, s, x)
        critic, t, b = train(critic, t, x, optax.sgd(0.1, momentum=0.9))
        return {"models": [critic, generator]}, [t, s], a + b

    return step, (P, P, ADAM.init(P), optax.sgd(0.1, momentum=0.9).init(P), X)


def frozen():
    """One matrix has no update, and a mask of the other is an argument."""
    tx = optax.multi_transform({"train": ADAM, "keep": optax.set_to_zero()}, {"up": "train", "down": "keep"})

    def step(weights, mask, s, x):
        return train(weights, s, x, tx, lambda p, x: loss({**p, "up": p["up"] * mask["up"]}, x))

    return step, (P, {"up": (P["up"] > 0) * 1.0}, tx.init(P), X)


def several_steps():
    """A loop of steps: a weight in its carry is gathered after each update, not at each use."""

    def step(m, s, x):
        return jax.lax.scan(lambda c, _: (train(*c, x)[:2], None), (m, s), length=3)[0]

    return step, (P, ADAM.init(P), X)


def clipped():
    return spelled("w", optax.chain(optax.clip_by_global_norm(0.1), optax.MultiSteps(optax.adam(1e-2), 4)))


NAMES = ("params", "weights")
CASES = {
    **{name: functools.partial(spelled, name) for name in NAMES},
    "muon": lambda: spelled("weights", optax.contrib.muon(1e-2)),
    **{f.__name__: f for f in (equinox, model_and_optimizer, two_optimizers, frozen, several_steps, clipped)},
}


def split(held):
    return "data" in [a for _, axes in held.split for a in axes]


@pytest.mark.parametrize("case", CASES)
def test_zero_1_shards_optimizer_state_alone(case):
    step, args = CASES[case]()
    plan = mp.plan(step, *args, mesh="data=8", layout=ZERO1, dims=DIMS)
    matrices = [h for h in (*plan.inputs, *plan.outputs) if "up" in h.path.split("/") and len(h.shape) == 2]
    moments = [h for h in matrices if {"mu", "nu", "trace", "acc_grads"} & {*h.path.split("/")}]
    assert len(moments) >= 2
    assert all(h.kind == "opt" and split(h) for h in moments)
    others = [h for h in matrices if h not in moments]
    assert len(others) >= 2
    assert not any(split(h) or h.kind == "opt" for h in others)
    updated = [h for h in others if "mask" not in h.path.split("/")]
    assert {h.kind for h in updated} == {"params"}


@pytest.mark.parametrize(
    ("case", "updates", "lowering"), [("several_steps", 3, "shard_map"), ("two_optimizers", 2, "jit")]
)
def test_its_numbers_and_traffic_are_those_of_named_parameters(case, updates, lowering):
    step, args = CASES[case]()
    how = {"mesh": "data=8", "layout": ZERO1, "dims": DIMS}
    got = mp.jit(step, lowering=lowering, **how)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    size = sum(x.nbytes for x in P.values())
    sent = updates * 2 * size * 7 / 8  # a reduce-scatter and an all-gather
    assert mp.plan(step, *args, **how).bytes_sent == pytest.approx(sent, rel=0.01)


def momentum(weights, velocity, x):
    value, g = jax.value_and_grad(loss)(weights, x)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, g)
    return jax.tree.map(lambda w, v: w - 0.1 * v, weights, velocity), velocity, value


def averaged(weights, average, opt_state, x):
    weights, opt_state, value = train(weights, opt_state, x)
    return weights, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, weights), opt_state, value


def rounded(half, full, opt_state, x):
    value, g = jax.value_and_grad(loss)(half, x)
    u, opt_state = ADAM.update(jax.tree.map(lambda g: g.astype(jnp.float32), g), opt_state, full)
    full = optax.apply_updates(full, u)
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), full), full, opt_state, value


HALF = jax.tree.map(lambda x: x.astype(jnp.bfloat16), P)


def adam(params, m, v, x):
    value, g = jax.value_and_grad(loss)(params, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, v, g)
    return jax.tree.map(lambda p, m, v: p - 0.1 * m / (v**0.5 + 1e-8), params, m, v), m, v, value


@pytest.mark.parametrize(
    ("step", "args", "state"),
    [
        (adam, (P, ZEROS, ZEROS, X), 4),
        (momentum, (P, ZEROS, X), 2),
        (averaged, (P, P, ADAM.init(P), X), 2),
    ],
)
def test_state_written_by_hand_is_optimizer_state(step, args, state):
    """Moments, momentum and averages: plain arguments with the structure of the parameters."""
    plan = mp.plan(step, *args, mesh="data=8", layout=ZERO1, dims=DIMS)
    for held in (plan.inputs, plan.outputs):
        assert [h.kind for h in held[: 2 + state]] == ["params"] * 2 + ["opt"] * state
        assert [split(h) for h in held[: 2 + state]] == [False] * 2 + [True] * state
    assert plan.memory.by_kind["optimizer state"] >= state * P["up"].nbytes / 8


def descent(name):
    """Momentum on arguments that are arrays, the first of which is called ``name``."""

    def run(x, v, batch):
        v = 0.9 * v + jax.grad(lambda x: jnp.mean((batch @ x) ** 2))(x)
        return x - 0.1 * v, v

    made = {}
    exec(f"def step({name}, v, batch): return run({name}, v, batch)", {"run": run}, made)
    return made["step"]


@pytest.mark.parametrize(("name", "kind"), [("params", "opt"), ("position", None)])
def test_an_array_on_its_own_is_optimizer_state_of_declared_parameters_only(name, kind):
    """Positions and velocities of a simulation have the same program as weights and momentum."""
    plan = mp.plan(
        descent(name), P["up"], ZEROS["up"], X, mesh="data=8", layout={"batch": "data"}, dims={"batch": "batch _"}
    )
    assert [h.kind for h in plan.inputs] == ["params" if kind else None, kind, None]


def copies(weights, full, opt_state, x):
    return rounded(weights, full["params"], opt_state, x)


@pytest.mark.parametrize(
    ("step", "args", "path"),
    [(rounded, (HALF, P, ADAM.init(P), X), "full"), (copies, (HALF, {"params": P}, ADAM.init(P), X), "full/params")],
)
def test_copies_of_parameters_are_parameters_with_a_warning_that_has_the_rule_for_them(step, args, path):
    with pytest.warns(ReplicatedWarning, match=f'{path}/down and 1 more.*stored as one.*"{path}/down".embed: data'):
        plan = mp.plan(step, *args, mesh="data=8", layout=ZERO1, dims=DIMS)
    assert not any(split(h) for h in plan.inputs[:4])
    plan = mp.plan(step, *args, mesh="data=8", layout=f'{ZERO1}; "{path}/*".embed: data', dims=DIMS)
    assert [split(h) for h in plan.inputs[:4]] == [False, False, True, True]  # not the weights that it updates
    assert [split(h) for h in plan.outputs[:4]] == [False, False, True, True]


def test_what_is_no_state_is_not_warned_of():
    """Running statistics, which no parameter is updated with, and a step that updates nothing."""

    def step(params, stats, opt_state, x):
        new = 0.9 * stats + 0.1 * x.mean(0)
        return *train(params, opt_state, x - stats), new

    stats = np.zeros(16, np.float32)
    plan = mp.plan(step, P, stats, ADAM.init(P), X, mesh="data=8", layout=ZERO1, dims={**DIMS, "stats": "embed"})
    assert [h.kind for h in plan.inputs if h.path == "stats"] == [None]
    mp.plan(lambda weights, x: loss(weights, x), P, X, mesh="data=8", layout=ZERO1, dims=DIMS)

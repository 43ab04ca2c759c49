"""Pipelines compute the same numbers as the step that they are made from: on one device, and sharded under both lowerings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.errors import UnsupportedError

LAYERS, EMBED, MLP, VOCAB, MICRO = 8, 16, 32, 64, 4
DIMS = {
    "*embed": "vocab embed", "*up": "layers embed mlp", "*down": "layers mlp embed", "*head": "embed vocab",
    "*shared": "embed _", "batch/*": "batch seq", "*cross": "decoder_layers embed _",
}  # fmt: skip
MESH, LAYOUT = "stage=4, data=2", "batch: data; layers: stage"


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arguments():
    r = np.random.default_rng(0)
    params = {
        "embed": r.normal(size=(VOCAB, EMBED)),
        "up": r.normal(size=(LAYERS, EMBED, MLP)) / 4,
        "down": r.normal(size=(LAYERS, MLP, EMBED)) / 6,
        "head": r.normal(size=(EMBED, VOCAB)) / 4,
        "shared": r.normal(size=(EMBED, EMBED)) / 4,
        "cross": r.normal(size=(LAYERS // 2, EMBED, EMBED)) / 4,
    }
    return params, {name: r.integers(0, VOCAB, (16, 8)) for name in ("x", "y")}


def normalized(h):
    return h / (1e-6 + jnp.sqrt(jnp.mean(h * h, -1, keepdims=True)))


def cross_entropy(logits, y):
    chosen = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def layer(h, w):
    up, down = w
    return h + jnp.tanh(normalized(h) @ up) @ down, None


def loss(p, batch):
    h, _ = jax.lax.scan(layer, p["embed"][batch["x"]], (p["up"], p["down"]))
    return cross_entropy(h @ p["head"], batch["y"])


def full_loss(p, batch):
    """Tied embeddings, an auxiliary loss, recomputed layers, a weight and a mask that all layers read."""
    mask = (batch["x"] > 3)[..., None]

    def layer(carry, w):
        h, aux = carry
        z = jnp.tanh(normalized(h) @ w[0])
        h = h + z @ w[1] + jnp.where(mask, h @ p["shared"], 0)
        return (h, aux + jnp.mean(z**2)), None

    first = p["embed"][batch["x"]], jnp.zeros(())
    (h, aux), _ = jax.lax.scan(jax.checkpoint(layer), first, (p["up"], p["down"]))
    return cross_entropy(h @ p["embed"].T, batch["y"]) + 0.1 * aux


def rematerialized_loss(p, batch):
    """``jax.checkpoint`` around the loop over layers, as well as around each layer."""
    layers = jax.checkpoint(lambda h, w: jax.lax.scan(jax.checkpoint(layer), h, w)[0])
    return cross_entropy(layers(p["embed"][batch["x"]], (p["up"], p["down"])) @ p["head"], batch["y"])


def gated_loss(p, batch):
    """Layers of gated units that save the results of matmuls: the weight loop recomputes a chain of elementwise ops."""

    def layer(h, w):
        up, down = w
        gate, value = normalized(h) @ up, h @ (up * 0.5)
        return h + (gate * jax.nn.sigmoid(gate) * value) @ down, None

    policy = jax.checkpoint_policies.dots_saveable
    h, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), p["embed"][batch["x"]], (p["up"], p["down"]))
    return cross_entropy(h @ p["head"], batch["y"])


def reversed_loss(p, batch):
    """Layers that run from the last to the first."""
    h, _ = jax.lax.scan(layer, p["embed"][batch["x"]], (p["up"], p["down"]), reverse=True)
    return cross_entropy(h @ p["head"], batch["y"])


def twice_loss(p, batch):
    """One stack of layers, run twice."""
    h = p["embed"][batch["x"]]
    for _ in range(2):
        h, _ = jax.lax.scan(layer, h, (p["up"], p["down"]))
    return cross_entropy(h @ p["head"], batch["y"])


def encoder_decoder_loss(p, batch):
    """All layers of a decoder of four layers read the result of an encoder of eight; tied embeddings; a loss of each layer."""
    encoded, _ = jax.lax.scan(layer, p["embed"][batch["x"]], (p["up"], p["down"]))

    def decoder_layer(h, w):
        scores = jax.nn.softmax(jnp.einsum("bse,bte->bst", normalized(h) @ w, encoded), -1)
        h = h + scores @ encoded
        return h, jnp.mean(h**2)

    h, aux = jax.lax.scan(decoder_layer, p["embed"][batch["y"]], p["cross"])
    return cross_entropy(h @ p["embed"].T, batch["y"]) + 0.1 * jnp.mean(jnp.sqrt(aux))


def updated(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def accumulating(loss, microbatches=MICRO):
    def step(params, batch):
        value, gradients = mp.train.accumulate_gradients(jax.value_and_grad(loss), microbatches)(params, batch)
        return updated(params, gradients), value

    return step


def microbatches(batch):
    return jax.tree.map(lambda x: x.reshape(MICRO, -1, *x.shape[1:]), batch)


def own_loop(params, batch):
    """A user's own loop over microbatches with dropout: it carries a key and the largest loss, and stacks the losses."""

    def loss(p, batch, key):
        def layer(h, w):
            up, down, key = w
            z = jnp.tanh(normalized(h) @ up)
            return h + jnp.where(jax.random.bernoulli(key, 0.8, z.shape), z / 0.8, 0) @ down, None

        h, _ = jax.lax.scan(layer, p["embed"][batch["x"]], (p["up"], p["down"], jax.random.split(key, LAYERS)))
        return cross_entropy(h @ p["head"], batch["y"])

    def one(carry, batch):
        total, key, largest = carry
        key, own = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(params, batch, own)
        return (jax.tree.map(jnp.add, total, gradients), key, jnp.maximum(largest, value)), value

    first = jax.tree.map(jnp.zeros_like, params), jax.random.key(1), -jnp.ones(())
    (total, key, largest), losses = jax.lax.scan(one, first, microbatches(batch))
    return updated(params, total), losses, largest, jax.random.key_data(key)


def evaluated(params, batch):
    return jax.lax.map(lambda batch: loss(params, batch), microbatches(batch))


def unaccumulated(params, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return updated(params, gradients), value


STEPS = {
    "accumulated": accumulating(loss), "full": accumulating(full_loss), "own loop": own_loop,
    "evaluated": evaluated, "unaccumulated": unaccumulated, "eight": accumulating(loss, 8),
    "rematerialized": accumulating(rematerialized_loss), "twice": accumulating(twice_loss),
    "encoder-decoder": accumulating(encoder_decoder_loss), "gated": accumulating(gated_loss),
    "reversed": accumulating(reversed_loss),
}  # fmt: skip


def largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)))


def plan_of(step, **options):
    return mp.plan(step, *arguments(), **{"mesh": MESH, "layout": LAYOUT, "dims": DIMS, **options})


CUBE = "stage=2, data=2, model=2"
CASES = {
    "accumulated": ("gpipe", "stage=4, idle=2", "vocab: stage; layers: stage*2"),
    "full": ("1f1b-overlap", CUBE, "batch, embed: data; mlp: model; vocab: stage+model; layers: stage"),
    "own loop": ("1f1b", CUBE, "batch: data; mlp, vocab: model; layers: stage*4"),
    "evaluated": ("1f1b", MESH, LAYOUT),
    "unaccumulated": ("1f1b", CUBE, "batch: data; mlp: model; layers: stage"),
    "rematerialized": ("1f1b", CUBE, "batch, embed: data; mlp: model; layers: stage*2"),
    "twice": ("1f1b-overlap", CUBE, "batch: data; mlp: model; layers: stage"),
    "encoder-decoder": ("zb", MESH, "batch: data; vocab: stage; layers, decoder_layers: stage"),
    "gated": ("zb", MESH, LAYOUT),
}
"""Of a step one schedule and layout; ``benchmarks/fuzz.py`` draws from all. Reversed layers: ``test_masked_layers.py``."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lowering"), [(name, ("shard_map", "jit")[i % 2]) for i, name in enumerate(CASES)])
def test_on_devices(name, lowering):
    args, step, (schedule, mesh, layout) = arguments(), STEPS[name], CASES[name]
    sharded = mp.jit(step, mesh=mesh, layout=layout, dims=DIMS, schedule=schedule, lowering=lowering)
    rounds = int(layout.partition("layers: stage*")[2] or 1)
    assert {p.rounds for p in sharded.plan(*args).program.pipelines} == {rounds}
    assert largest_difference(sharded(*args), jax.jit(step)(*args)) <= 1e-12


@pytest.mark.parametrize(
    ("schedule", "ticks", "in_flight"), [("1f1b", 10, 4), ("1f1b-overlap", 11, 4), ("gpipe", 13, 4)]
)
def test_the_plan(schedule, ticks, in_flight):
    """Weights stay, activations move, and gradients are reduced once."""
    plan = plan_of(STEPS["accumulated"], schedule=schedule)
    pipeline = plan.pipeline
    assert pipeline is not None
    assert (pipeline.stages, pipeline.microbatches, pipeline.ticks) == (4, MICRO, ticks)
    assert (pipeline.bubble, pipeline.in_flight) == (pytest.approx(3 / 7), in_flight)
    assert not [c for c in plan.collectives if c.op == "all-gather"]
    activations = MICRO * 8 * EMBED * 8 / 2  # bytes of a microbatch on a device
    slots = 2 * (MICRO + 3)
    moves = [c for c in plan.collectives if c.op == "collective-permute"]
    assert sum(c.count for c in moves) == slots
    assert pipeline.bytes_between_stages == slots * activations
    gradients = [c for c in plan.collectives if c.op == "all-reduce" and c.axes == ("data",)]
    assert [c.count for c in gradients] == [1] * len(gradients)
    assert plan.replan(layout="batch: data").pipeline is None
    assert plan.replan(layout="batch: data").replan(layout=LAYOUT).pipeline == pipeline


def test_a_forward_and_a_backward_layer_in_one_loop():
    """In the ticks with slots of both, one loop over layers has the matmuls of a forward and of a backward layer."""
    plain, joint = (plan_of(STEPS["eight"], schedule=schedule) for schedule in ("1f1b", "1f1b-overlap"))

    def counts(plan):
        """How often the loops over the two layers of a stage run, by the number of their matmuls."""
        found = {}
        for op, count in plan.program.root.walk_counted():
            if op.primitive.family == "scan" and op.eqn.params["length"] == LAYERS // 4:
                matmuls = sum(inner.primitive.family == "dot" for inner in op.frames[0].walk())
                found[matmuls] = found.get(matmuls, 0) + count
        return found

    forward, backward, fill = 2, 4, 4  # matmuls of a layer, and the ticks before the first backward slot
    assert counts(plain) == {forward: 8 + 3, backward: 8 + 3}
    assert counts(joint) == {forward: fill, forward + backward: 8 + 3 - fill, backward: fill}


def test_weight_gradients_in_slots_of_their_own():
    """The matmuls of a layer are in a forward, a backward and a weight loop; only the first two have idle slots."""
    plain, split = (plan_of(STEPS["accumulated"], schedule=schedule) for schedule in ("1f1b", "zb"))
    assert split.pipeline is not None
    assert split.pipeline.schedule.order == "FBW"
    matmuls = lambda plan: sum(count for op, count in plan.program.root.walk_counted() if op.primitive.family == "dot")  # noqa: E731
    idle, layers = 3, LAYERS // 4  # of a loop, and in a slot
    assert matmuls(plain) - matmuls(split) == idle * layers * 2  # two matmuls of a layer for gradients of weights
    gradients = [c for c in split.collectives if c.op == "all-reduce" and c.axes == ("data",)]
    assert [c.count for c in gradients] == [1] * len(gradients)


def test_zero_bubble_without_gradients_of_stacked_weights():
    """All layers share their weight, whose gradient each layer adds to the carry; the stacked weight is a constant."""

    def loss(p, batch):
        layer = lambda h, w: (h + jnp.tanh(h @ p["shared"]) * jax.lax.stop_gradient(w).mean(), None)  # noqa: E731
        return cross_entropy(jax.lax.scan(layer, p["embed"][batch["x"]], p["up"])[0] @ p["head"], batch["y"])

    assert plan_of(accumulating(loss)).pipeline is not None
    with pytest.raises(UnsupportedError, match="no gradients of stacked weights") as error:
        plan_of(accumulating(loss), schedule="zb")
    assert error.value.fixes == ('schedule="1f1b"',)


def test_rounds_in_the_plan():
    """Layers are put in the order of rounds once a step, and gradients back; a ring has the rows that the schedule needs."""
    plan = plan_of(accumulating(loss, 16), layout="layers: stage*2")
    pipeline = plan.pipeline
    assert (pipeline.rounds, pipeline.ticks, pipeline.bubble, pipeline.in_flight) == (2, 42, pytest.approx(3 / 35), 5.5)
    moved = [
        c
        for c in plan.collectives
        if c.op == "collective-permute" and c.axes == ("stage",) and c.bytes == 8 * EMBED * MLP
    ]
    assert [c.count for c in moved] == [1] * 8  # two permutes of two weights, and two of their gradients
    rows = {
        v.aval.shape[0]
        for op, _ in plan.program.root.walk_counted()
        for v in op.eqn.outvars
        if v.aval.shape[1:] == (1, 4, 1, 8, MLP)
    }
    assert rows == {11}


def test_notes():
    """Of a bubble without microbatches, and of rounds of a rule that makes no pipeline."""
    alone, rounds = plan_of(unaccumulated), plan_of(accumulating(loss), layout="layers: stage*2")
    assert any("3/4" in note and "accumulate_gradients" in note for note in alone.notes)
    assert any("2 rounds" in note for note in plan_of(accumulating(loss), layout="batch: data*2").notes)
    assert not any("3/4" in note or "rounds" in note for note in rounds.notes)


def test_a_layout_without_stages_is_planned_as_traced():
    plan = plan_of(accumulating(loss), layout="batch: data")
    assert not plan.program.pipelines
    assert not plan.replan(layout="params.layers: stage; batch: data").program.pipelines
    gathered = plan.replan(layout="batch: data; layers: data")  # `batch` has `data` inside of the layers
    assert not gathered.program.pipelines
    assert {c.op for c in gathered.collectives if c.axes == ("data",)} >= {"all-gather"}


@pytest.mark.parametrize(
    ("loss", "order", "ticks"),
    [
        (rematerialized_loss, "FRB", 13),
        (twice_loss, "FFBB", 16),
        (encoder_decoder_loss, "FFBB", 16),
    ],
)
def test_several_loops(loss, order, ticks):
    pipeline = plan_of(accumulating(loss), layout="batch: data; layers, decoder_layers: stage").pipeline
    if pipeline.schedule.order == "RB":  # since JAX 0.12 the loss is computed from the recomputed layers
        assert loss is rematerialized_loss
        order, ticks = "RB", 10
    assert (pipeline.schedule.order, pipeline.ticks, pipeline.bubble) == (order, ticks, pytest.approx(3 / 7))


def test_layers_from_the_last_to_the_first():
    """A forward loop may have the direction of a backward loop: the schedule is as for the other direction."""
    for schedule, order, ticks in (("gpipe", "FB", 13), ("zb", "FBW", 10)):
        other, pipeline = (plan_of(accumulating(f), schedule=schedule).pipeline for f in (loss, reversed_loss))
        assert (pipeline.schedule.order, pipeline.ticks) == (order, ticks)
        assert (pipeline.bubble, pipeline.in_flight) == (other.bubble, other.in_flight)
    outside = plan_of(
        jax.grad(lambda p, batch: jnp.mean(jax.lax.map(lambda b: reversed_loss(p, b), microbatches(batch))))
    )
    assert [p.schedule.order for p in outside.pipelines] == ["F", "B"]
    slots = [outside.pipelines[1].schedule.slot(0, stage, 0) for stage in range(4)]
    assert slots == [(0, 0), None, None, None]  # its backward pass begins with the first layers


def test_stacks_with_different_stages():
    with pytest.raises(UnsupportedError, match=r"`layers: stage`, `decoder_layers: data`"):
        plan_of(accumulating(encoder_decoder_loss), layout="layers: stage; decoder_layers: data")


def test_a_loop_over_split_time_is_no_pipeline():
    def step(params, x):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ params["w"] + x), None), jnp.zeros((4, 6)), x)[0]

    plan = mp.plan(
        step, {"w": np.eye(6)}, np.zeros((8, 4, 6)), mesh=MESH, layout="time: stage", dims={"x": "time batch embed"}
    )
    assert plan.pipeline is None


def test_the_program_does_not_grow_with_the_microbatches():
    def equations(microbatches):
        batch = {name: np.zeros((2 * microbatches, 8), np.int32) for name in ("x", "y")}
        step = accumulating(loss, microbatches)
        plan = mp.plan(step, arguments()[0], batch, mesh=MESH, layout=LAYOUT, dims=DIMS)
        assert plan.pipeline.microbatches == microbatches
        return sum(1 for _ in plan.program.root.walk())

    assert equations(8) == equations(64)


def host_norms(w):
    """A loop in which no layer needs another one, over a stack in host memory, with results in host memory."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    norm = lambda _, a: (None, jax.device_put(jnp.sqrt((jax.device_put(a, device) ** 2).sum(-1)), host))  # noqa: E731
    return jax.device_put(jax.lax.scan(norm, None, jax.device_put(w * 1, host))[1], device)


def host_carries(w):
    """Carries between layers; the stack and the stacked results are in host memory."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    body = lambda c, a: (jnp.sin(c) + jax.device_put(a, device), jax.device_put(c, host))  # noqa: E731
    return jax.device_put(jax.lax.scan(body, jnp.zeros_like(w[0]), jax.device_put(w * 1, host))[1], device)


@pytest.mark.parametrize(
    ("step", "mesh", "lowering"),
    [(host_norms, "stage=4", "shard_map"), (host_carries, "stage=2", "jit")],
)
def test_loops_over_stacks_in_host_memory(step, mesh, lowering):
    """The numbers of layers and of stages differ, and so do the lengths of the loops over layers and ticks."""
    w = arguments()[0]["up"]
    sharded = mp.jit(
        step, mesh=f"{mesh}, data=2", layout="layers: stage", dims={"w": "layers embed mlp"}, lowering=lowering
    )
    assert largest_difference(sharded(w), step(w)) <= 1e-12

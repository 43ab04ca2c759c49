"""Gradient accumulation: the same means, reduced once."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_results import assert_close

import meshpar as mp
from meshpar.errors import DivisibilityError, LayoutSyntaxError, UnsupportedError

LAYERS, MICRO = 3, 4
DIMS = {"p/*/a": "layers embed mlp", "p/*/b": "layers mlp embed", "p/head": "embed vocab", "x": "batch embed"}


def loss(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w["a"]) @ w["b"], None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
    return jnp.square(h @ p["head"]).mean()


def step(p, x):
    value, grads = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICRO)(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


def whole_step(p, x):
    value, grads = jax.value_and_grad(loss)(p, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value


@pytest.fixture(scope="module")
def case():
    r = np.random.default_rng(0)
    a, b, head = r.normal(size=(LAYERS, 16, 32)), r.normal(size=(LAYERS, 32, 16)), r.normal(size=(16, 8))
    p = {"layers": {"a": a * 0.2, "b": b * 0.2}, "head": head}
    return jax.tree.map(np.float32, p), r.normal(size=(64, 16)).astype(np.float32)


def test_it_is_the_mean_over_the_batch(case):
    with jax.enable_x64(True):
        p, x = jax.tree.map(np.float64, case)
        assert_close(step(p, x), whole_step(p, x), rtol=1e-12)


def test_integers_are_summed_and_narrow_floats_are_added_up_in_float32():
    def count(_, x):
        return (x > 0).sum(), x.mean(), {"max": x.max()}

    x = jnp.arange(1, 65, dtype=jnp.bfloat16)
    n, mean, rest = mp.train.accumulate_gradients(count, 8)(None, x)
    assert int(n) == 64
    assert n.dtype == jnp.int32
    assert (mean.dtype, rest["max"].dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(float(mean), 32.5, rtol=1e-2)


def test_results_that_are_no_float_arrays(mesh):
    """Python numbers, integers and derivatives by integers have the results of the complete batch."""

    def loss(p, x):
        return ((x @ p["w"]) ** 2).mean(), {"tokens": x.size, "ratio": 0.5, "rows": jnp.int32(len(x)), "none": None}

    gradient = jax.value_and_grad(loss, has_aux=True, allow_int=True)
    p = {"w": jnp.arange(12.0).reshape(4, 3), "n": jnp.arange(3)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
    step = mp.train.accumulate_gradients(gradient, 2, argnums=-1)
    run = mp.jit(step, mesh=mesh, layout="batch: data", dims={"x": "batch _"}, lowering="shard_map")
    (value, aux), grads = run(p, x)
    (want, _), wanted = gradient(p, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], wanted["w"], rtol=1e-5)
    assert grads["n"].dtype == jax.dtypes.float0
    assert grads["n"].shape == (3,)
    assert (aux["tokens"], aux["ratio"], aux["rows"], aux["none"]) == (32, 0.5, 8, None)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: jnp.all(x < 31), r"result\['ok'\] is a boolean.*\n.*astype\(jnp.int32\)"),
        (lambda x: bool(len(x)), r"result\['ok'\] is a boolean"),
        (lambda x: jax.random.key(0), r"result\['ok'\] is a PRNG key.*\n.*outside"),
    ],
)
def test_results_without_a_mean_or_a_sum_are_refused(result, message):
    with pytest.raises(UnsupportedError, match=message):
        mp.train.accumulate_gradients(lambda p, x: {"ok": result(x)}, 2)(0.0, jnp.arange(32.0).reshape(8, 4))


@pytest.mark.parametrize(
    ("layout", "lowering"),
    [
        ("batch: data; embed: data", "shard_map"),
        ("batch: data; mlp, vocab: model", "shard_map"),
        ("batch: data", "jit"),
    ],
)
def test_no_layout_changes_a_number(case, mesh, layout, lowering):
    """One all-reduce for each weight, whatever the number of microbatches: the carries stay partial sums. Sharded gradients of
    stacked layers are scattered layer by layer."""
    run = mp.jit(step, mesh=mesh, layout=layout, dims=DIMS, lowering=lowering)
    assert_close(run(*case), jax.jit(step)(*case), rtol=1e-5, atol=1e-6)
    op = "reduce-scatter" if "embed" in layout else "all-reduce"
    sent = [c for c in run.plan(*case).collectives if c.op == op and c.axes == ("data",) and len(c.shape) > 1]
    stacked = (2, LAYERS * MICRO) if "embed" in layout else (3, 1)
    assert sorted((len(c.shape), c.count) for c in sent) == [(2, 1), stacked, stacked]


def unrolled_loss(p, x):
    """Layers in a Python list, as in most NNX models."""
    for w in p:
        x = x + jnp.tanh(x @ w["a"]) @ w["b"]
    return jnp.square(x).mean()


def unrolled_step(p, x):
    value, grads = mp.train.accumulate_gradients(jax.value_and_grad(unrolled_loss), MICRO)(p, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


UNROLLED = {
    "dims": {"p/*/a": "embed mlp", "p/*/b": "mlp embed", "x": "batch embed"},
    "layout": "batch: data; embed: data",
}


@pytest.mark.parametrize(
    ("gather", "lowering"), covering.each([None, "step", "microbatch", "auto"], ["shard_map", "jit"])
)
def test_sharded_gradients_of_unrolled_layers(gather, lowering):
    """They are reduced once a step, or in each microbatch on request; small ones once."""
    draw = np.random.default_rng(0).normal
    p = [
        {"a": draw(size=(512, 512)) / 25, "b": draw(size=(512, 512)) / 25},
        {"a": draw(size=(512, 8)), "b": draw(size=(8, 512))},
    ]
    p = jax.tree.map(jnp.float32, p)
    x = jnp.float32(draw(size=(32, 512)))
    step = mp.jit(unrolled_step, mesh=mp.mesh("data=8"), lowering=lowering, gather=gather, **UNROLLED)
    plan = step.plan(p, x)
    count = MICRO if gather == "microbatch" else 1
    op = "reduce-scatter" if lowering == "shard_map" else "all-reduce"  # XLA makes no reduce-scatters for CPUs
    for kind in (op, "all-gather"):
        counts = {c.shape: c.count for c in plan.collectives if c.op == kind and len(c.shape) > 1}
        assert counts[512, 512] == count, kind
        if kind == op:
            assert counts[512, 8] == counts[8, 512] == 1
    got, want = step(p, x), jax.jit(unrolled_step)(p, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(("layers", "gather"), [(2, "step"), (16, "microbatch")])
def test_unsharded_gradients_that_do_not_fit_are_reduced_in_each_microbatch(layers, gather):
    weights = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in {"a": (4096, 16384), "b": (16384, 4096)}.items()}
    x = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    options = {"mesh": "data=16", "topology": "v5e:4x4", "donate_argnames": "p", **UNROLLED}
    how = None, "step", "microbatch"
    plan, once, each = (mp.plan(unrolled_step, [weights] * layers, x, gather=g, **options) for g in how)
    assert each.memory.peak < once.memory.peak
    assert each.bytes_sent > once.bytes_sent
    chosen = once if gather == "step" else each
    assert (plan.bytes_sent, plan.memory.peak) == (chosen.bytes_sent, chosen.memory.peak)
    assert (once.memory.peak > 0.95 * 16e9) == (gather == "microbatch")
    (note,) = (n for n in plan.notes if "gather=" in n)
    assert ("needs less memory, and sends more" if gather == "step" else "exceeds the memory") in note


def narrow_loss(p, x):
    """Weights are converted to bfloat16 in each layer, as by Flax modules with ``dtype=bfloat16``."""

    def layer(h, w):
        return jnp.tanh(h @ w["a"].astype(h.dtype)) @ w["b"].astype(h.dtype), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), p["layers"])
    return jnp.square((h @ p["head"].astype(h.dtype)).astype(jnp.float32)).mean()


@mp.train.Precision(compute="bfloat16")
def policy_loss(p, x):
    return loss(p, x.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.parametrize(("of", "lowering"), [(narrow_loss, "shard_map"), (policy_loss, "jit")])
def test_gradients_of_a_bfloat16_model_are_reduced_once(case, of, lowering):
    """In float32, whatever the number of microbatches; reduce-scattered layer by layer, they are sent in bfloat16."""

    def means(p, x):
        return mp.train.accumulate_gradients(jax.value_and_grad(of), MICRO)(p, x)

    options = {"mesh": mp.mesh("data=4, model=2"), "dims": DIMS, "lowering": lowering}
    f = mp.jit(means, layout="batch: data", **options)
    sent = [(c.op, c.dtype, c.count) for c in f.plan(*case).collectives if len(c.shape) > 1]
    assert sent == [("all-reduce", "float32", 1)] * 3
    got, want = (jax.tree.leaves(fn(*case)) for fn in (f, jax.jit(means)))
    assert_close(got, want, rtol=2e-2, atol=2e-3)
    plan = mp.plan(means, *case, layout="batch: data; embed: data", **options)
    op = "reduce-scatter" if lowering == "shard_map" else "all-reduce"  # XLA makes no reduce-scatters for CPUs
    scattered = [(c.dtype, c.count) for c in plan.collectives if c.op == op and len(c.shape) > 1]
    assert sorted(scattered) == [("bfloat16", LAYERS * MICRO)] * 2 + [("float32", 1)]


def microbatches_for(mesh, rows, batch=64):
    return mp.train.microbatches_for(batch, rows=rows, mesh=mp.mesh(mesh), layout="batch: data")


def test_microbatches_keep_the_batch_on_fewer_devices():
    cases = {
        ("data=8", 8): 1,
        ("data=4, model=2", 8): 2,
        ("data=2, model=4", 8): 4,
        ("data=2, model=4", 5): 8,
        ("data=1", 8): 8,
    }
    assert {case: microbatches_for(*case) for case in cases} == cases


def regression(p, x, y):
    return jnp.square(x @ p - y).mean()


def test_keys_and_scalars_are_no_batches():
    """Nor is a raw key, whose two words would be two microbatches."""
    seen, key = [], jax.random.PRNGKey(0)

    def fn(p, x, key, scale):
        seen.append((x.shape, key.shape, np.shape(scale)))
        return x.mean() * scale + 0 * jax.random.normal(key)

    x = np.arange(8, dtype=np.float32)
    result = mp.train.accumulate_gradients(fn, 2)(0.0, x, key, 3.0)
    np.testing.assert_allclose(result, 3 * x.mean(), rtol=1e-6)
    with pytest.warns(UserWarning, match="key_argnums=2 gives"):
        mp.train.accumulate_gradients(lambda p, x, key: x.mean(), 2)(0.0, x, jax.random.key(0))
    assert set(seen) == {((4,), key.shape, ())}


@pytest.mark.parametrize(
    ("key", "lowering"), [(jax.random.key(3), "shard_map"), (jax.random.PRNGKey(3), "jit")], ids=["typed", "raw"]
)
def test_every_microbatch_has_a_key_of_its_own(key, lowering):
    def dropped(p, x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * p, 0.0).sum(0)

    x = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    keys = [jax.random.fold_in(key, i) for i in range(MICRO)]
    expected = np.mean([dropped(2.0, x[i::MICRO], k) for i, k in enumerate(keys)], 0)
    step = mp.train.accumulate_gradients(dropped, MICRO, argnums=-2, key_argnums=-1)
    run = mp.jit(step, mesh="data=4, model=2", layout="batch: data", dims={"x": "batch embed"}, lowering=lowering)
    np.testing.assert_allclose(run(2.0, x, key), expected, rtol=1e-5, atol=1e-6)
    once = mp.train.accumulate_gradients(dropped, 1, key_argnums=(2,))(2.0, x, key)
    np.testing.assert_allclose(once, dropped(2.0, x, keys[0]), rtol=1e-6)


def in_closure(w):
    return (jnp.ones((8, 4)) @ w).sum()


def draw(p, x, key):
    return (x * jax.random.normal(key, ())).mean()


def accumulated(fn, *args, microbatches=4, **options):
    return lambda: mp.train.accumulate_gradients(fn, microbatches, **options)(*args)


KEY_LAST = 0.0, jnp.arange(8.0), jax.random.key(1)


BAD = {
    "microbatches=0": (LayoutSyntaxError, accumulated(loss, microbatches=0)),
    "argument 2 is both a batch and a key": (LayoutSyntaxError, accumulated(regression, argnums=(1, 2), key_argnums=2)),
    "argument 1 is both": (LayoutSyntaxError, accumulated(draw, *KEY_LAST, argnums=1, key_argnums=-2)),
    "no argument -1": (UnsupportedError, accumulated(draw, *KEY_LAST, argnums=-4)),
    r"\[6, 2\] does not divide into 4": (DivisibilityError, accumulated(draw, 1.0, jnp.ones((6, 2)))),
    r"argument 1: 16, argument 2: 4\)[^$]*argnums=1": (
        DivisibilityError,
        accumulated(regression, jnp.ones((8, 3)), jnp.ones((16, 8)), jnp.ones((4, 3))),
    ),
    r"key_argnames is an array of float32\[16, 3\], and no PRNG key": (
        UnsupportedError,
        accumulated(regression, jnp.ones(3), jnp.ones(8), jnp.ones((16, 3)), key_argnums=2),
    ),
    r"(?s)no argument of in_closure is a batch.*as an argument after the first": (
        UnsupportedError,
        accumulated(in_closure, jnp.ones(4)),
    ),
    "60": (DivisibilityError, lambda: microbatches_for("data=8", 4, 60)),
    "rows=0": (LayoutSyntaxError, lambda: microbatches_for("data=8", 0)),
}


@pytest.mark.parametrize("says", BAD)
def test_bad_input(says):
    error, call = BAD[says]
    with pytest.raises(error, match=says):
        call()


class Net(nnx.Module):
    """A model with batch statistics and dropout."""

    def __init__(self, rngs, rate=0.5):
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.dropout, self.down = nnx.Dropout(rate, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jax.nn.relu(self.norm(self.up(x)))))


def net_loss(model, x):
    return jnp.square(model(x)).mean()


def in_a_loop(model, x):
    """The reference: the mean over microbatches, one after the other, and the model after them."""
    parts = [nnx.value_and_grad(net_loss)(model, x[i::MICRO]) for i in range(MICRO)]
    return jax.tree.map(lambda *leaves: sum(leaves) / MICRO, *parts)


def test_modules_of_nnx(case):
    """Each microbatch has a dropout mask of its own; batch statistics and counts of keys are updated in place.

    The module is the first argument of a sharded step, or is passed by keyword.
    """
    x, want_model, plain, sharded = case[1], *(Net(nnx.Rngs(0)) for _ in range(3))
    want = in_a_loop(want_model, x)
    gradient = nnx.value_and_grad(net_loss)
    by_name = mp.train.accumulate_gradients(lambda scale, x, *, model: gradient(model, x), MICRO)
    got = nnx.jit(by_name)(1.0, x, model=plain)
    dims = {"model/up/kernel": "embed mlp", "model/down/kernel": "mlp vocab", "x": "batch embed"}
    layout = "batch: data; mlp: model"
    accumulated = mp.train.accumulate_gradients(gradient, MICRO)
    options = {"layout": layout, "dims": dims, "lowering": "shard_map"}
    step = mp.jit(lambda model, x: accumulated(model, x), mesh="data=4, model=2", **options)
    for model, (value, grads) in ((plain, got), (sharded, step(sharded, x))):
        np.testing.assert_allclose(value, want[0], rtol=1e-5)
        assert_close(grads, want[1], rtol=1e-4, atol=1e-6)
        assert int(model.dropout.rngs.count[...]) == MICRO
        np.testing.assert_allclose(model.norm.mean[...], want_model.norm.mean[...], rtol=1e-4, atol=1e-6)


def test_a_key_within_an_argument_is_named(case):
    p, x = case
    state = {"params": p, "key": jax.random.key(0)}
    with pytest.warns(UserWarning, match=r"argument 0 has a PRNG key at \['key'\]; all microbatches share it"):
        mp.train.accumulate_gradients(lambda s, x: loss(s["params"], x), MICRO)(state, x)
    pair = Net(nnx.Rngs(0)), jax.random.key(0)
    with pytest.warns(UserWarning, match=r"argument 0 has a PRNG key at \[1\]; all microbatches share it"):
        mp.train.accumulate_gradients(lambda pair, x: net_loss(pair[0], x), MICRO)(pair, x)
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"argument 0 has a PRNG key at .*rngs.*key"):
        mp.train.accumulate_gradients(lambda s, x: net_loss(nnx.merge(graph, s, copy=True), x), MICRO)(state, x)


def test_batches_and_keys_by_keyword():
    """Keyword arguments are batches as positional ones are; ``argnames`` and ``key_argnames`` choose among them."""
    r = np.random.default_rng(2)
    p, x, y = r.normal(size=(8, 3)), r.normal(size=(16, 8)), r.normal(size=(16, 3))
    want = jax.value_and_grad(regression)(p, x, y)
    seen = []

    def drawn(p, *, x, y, scale, key):
        seen.append((x.shape, y.shape, np.shape(scale)))
        return regression(p, x, y) + 0 * jax.random.normal(key) + 0 * jnp.sum(scale)

    key = jax.random.key(0)
    draws = mp.train.accumulate_gradients(lambda p, x, *, key: jax.random.normal(key), 4, key_argnames="key")
    own = draws(0.0, x, key=key)
    want_own = np.mean([jax.random.normal(jax.random.fold_in(key, i)) for i in range(4)])
    np.testing.assert_allclose(own, want_own, rtol=1e-6)
    batch = {"x": x, "y": y, "scale": 2.0}
    for options, call in [({}, batch), ({"argnames": ("x", "y")}, batch | {"scale": jnp.ones(3)})]:
        fn = mp.train.accumulate_gradients(jax.value_and_grad(drawn), 4, key_argnames="key", **options)
        got = fn(p, key=key, **call)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    assert set(seen) == {((4, 8), (4, 3), ()), ((4, 8), (4, 3), (3,))}
    with pytest.warns(UserWarning, match=r'key_argnames="key" gives'):
        mp.train.accumulate_gradients(drawn, 2)(p, key=key, **batch)
    with pytest.raises(UnsupportedError, match="the call has no argument z"):
        mp.train.accumulate_gradients(drawn, 2, argnames="z")(p, key=key, **batch)


def by(layer):
    """The function of a stack that returns its layers, the result of ``layer(stack, i)`` for each i."""
    return lambda w: [layer(w, i) for i in range(LAYERS)]


STACK_READS = {
    "index": by(lambda w, i: w[i]),
    "take": by(lambda w, i: jnp.take(w, i, axis=0)),
    "unstack": jnp.unstack,
    "dynamic": by(lambda w, i: jax.lax.dynamic_index_in_dim(w, i, keepdims=False)),
    "part of unstack": by(lambda w, i: jnp.unstack(w)[i]),
}


@pytest.mark.parametrize(
    ("reads", "embed", "lowering"), [([*STACK_READS], "", "shard_map"), (["dynamic"], "embed: data", "jit")]
)
def test_gradients_of_an_unrolled_stack_are_reduced_once(reads, embed, lowering):
    """Each layer's gradient is padded to the stack, written into zeros, or concatenated with the others, and added to the sum over
    microbatches. One program with a model for each way to read a layer."""

    def loss(p, x):
        total = 0.0
        for read in reads:
            layers, y = STACK_READS[read], x
            for a, b in zip(layers(p[read]["a"]), layers(p[read]["b"]), strict=True):
                y = y + jnp.tanh(y @ a) @ b
            total += jnp.square(y).mean()
        return total

    r = np.random.default_rng(5)
    stack = {"a": r.normal(size=(LAYERS, 8, 16)).astype("f") / 4, "b": r.normal(size=(LAYERS, 16, 8)).astype("f") / 4}
    p, x = dict.fromkeys(reads, stack), r.normal(size=(32, 8)).astype("f")
    dims = {"p/*/a": "layers embed mlp", "p/*/b": "layers mlp embed", "x": "batch embed"}
    step, layout = mp.train.accumulate_gradients(jax.value_and_grad(loss), MICRO), f"batch: data; mlp: model; {embed}"
    run = mp.jit(step, mesh="data=2, model=2", layout=layout, dims=dims, lowering=lowering)
    assert_close(run(p, x), jax.value_and_grad(loss)(p, x), rtol=1e-4, atol=1e-5)
    weights = [c for c in run.plan(p, x).collectives if "mlp" in c.dims and c.op != "all-gather"]
    once = [(("data",), 1, "layers embed mlp"), (("data",), 1, "layers mlp embed")] * len(reads)
    assert sorted((c.axes, c.count, c.dims) for c in weights) == sorted(once)

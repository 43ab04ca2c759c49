"""Exchanges between replicas equal NumPy simulations of the published algorithms, and send what they say."""

import blocks
import covering
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replica_simulations as simulations

import meshpar as mp

SHAPES = {"up": (16, 32), "down": (32, 16), "layers": (3, 16, 32), "scale": (16,), "odd": (5,)}
DIMS = {"up": "embed mlp", "down": "mlp embed", "layers": "layers embed mlp", "scale": "embed", "odd": "_"}
LAYOUTS = ["replica: slice; embed: data", "replica: slice; mlp: data"]
RUNS = [("shard_map", LAYOUTS[0]), ("jit", LAYOUTS[1])]
BOTH = pytest.mark.parametrize(("lowering", "layout"), RUNS)


def gradients(n, replicas=2, dtype=np.float32):
    rng = np.random.default_rng(n)
    return {k: rng.normal(size=(replicas, *s)).astype(dtype) for k, s in SHAPES.items()}


def zeros(dtype=np.float32):
    return {k: np.zeros(s, dtype) for k, s in SHAPES.items()}


OF_GRADIENTS = {f"gradients/{k}": f"replica {d}" for k, d in DIMS.items()}
OF_REPLICAS = {f"*{k}": f"replica {d}" for k, d in DIMS.items()}


def compiled(tx, lowering, layout, mesh="slice=2, data=4"):
    def update(gradients, state, params):
        return tx.update(gradients, state, params)

    dims = OF_GRADIENTS | {f"params/{k}": d for k, d in DIMS.items()}
    return mp.jit(update, mesh=mp.mesh(mesh), layout=layout, dims=dims, lowering=lowering)


def close(a, b, tolerance=1e-6):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


CODED = [(np.float64, c, *run) for c, run in covering.each(simulations.CODES, RUNS)]
CODED += [(np.float32, "int8", *RUNS[0])]


@pytest.mark.parametrize(("dtype", "code", "lowering", "layout"), CODED)
def test_means_of_codes_equal_the_simulation_over_three_steps(dtype, code, lowering, layout):
    """One step in float32, whose rounding another step would code."""
    with jax.enable_x64(dtype == np.float64):
        tx = mp.replicas.coded(code, replicas=2)
        run, state = compiled(tx, lowering, layout), tx.init(zeros(dtype))
        errors = {k: [np.zeros(s)] * 2 for k, s in SHAPES.items()}
        for n in range(3 if dtype == np.float64 else 1):
            g = gradients(n, dtype=dtype)
            means, state = run(g, state, zeros(dtype))
            for k in SHAPES:
                want, errors[k] = simulations.coded_mean(g[k], errors[k], code, [1, 1])
                close(means[k], want)
                close(state.error[k], errors[k])


@BOTH
def test_a_mean_leaves_out_replicas_of_weight_zero_and_of_nan(lowering, layout):
    tx = mp.replicas.mean(replicas=4)

    def update(gradients, weight):
        return tx.update(gradients, optax.EmptyState(), weight=weight)[0]

    run = mp.jit(update, mesh=mp.mesh("slice=4, data=2"), layout=layout, dims=OF_GRADIENTS, lowering=lowering)
    g = gradients(0, 4)
    g["scale"][2, 3] = np.nan
    weight = np.array([1, 0, 5, 3], np.float32)
    got = run(g, weight)
    for k in SHAPES:
        close(got[k], (g[k][0] + 3.0 * g[k][3]) / 4)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(run(g, np.zeros(4, np.float32))))


POWERSGD = [(np.float64, 1e-6, *run) for run in RUNS] + [(np.float32, 2e-5, *RUNS[0])]
"""Float32 rounds what Gram-Schmidt subtracts; the simulation is a QR decomposition in float64."""


@pytest.mark.parametrize(("dtype", "tolerance", "lowering", "layout"), POWERSGD)
def test_powersgd_equals_the_simulation_over_three_steps(dtype, tolerance, lowering, layout):
    with jax.enable_x64(dtype == np.float64):
        tx = mp.replicas.powersgd(2, stacked="layers", replicas=2)
        run, state = compiled(tx, lowering, layout), tx.init(zeros(dtype))
        rights = {k: np.array(state.right[k], np.float64) for k in SHAPES}
        errors = {k: np.zeros((2, *s)) for k, s in SHAPES.items()}
        for n in range(3):
            g = gradients(n, dtype=dtype)
            means, state = run(g, state, zeros(dtype))
            for k in ("up", "down"):
                want, errors[k], rights[k] = simulations.powersgd(g[k], errors[k], rights[k])
                close(means[k], want, tolerance)
                close(state.error[k], errors[k], tolerance)
            for i in range(3):
                one = g["layers"][:, i], errors["layers"][:, i], rights["layers"][i]
                want, errors["layers"][:, i], rights["layers"][i] = simulations.powersgd(*one)
                close(means["layers"][i], want, tolerance)
            close(state.error["layers"], errors["layers"], tolerance)
            close(means["scale"], g["scale"].mean(0))


@BOTH
def test_adasum_equals_the_simulation(lowering, layout):
    tx = mp.replicas.adasum(stacked="layers", replicas=4)
    g = gradients(0, 4)
    means, _ = compiled(tx, lowering, layout, "slice=4, data=2")(g, tx.init(zeros()), zeros())
    for k in SHAPES:
        rows = np.float64(g[k])
        if k == "layers":
            close(means[k], np.stack([simulations.adasum(rows[:, n]) for n in range(3)]))
        else:
            close(means[k], simulations.adasum(rows))


@pytest.mark.parametrize(
    ("shift", "lowering", "layout"), [(s, *run) for s, run in covering.each([1, "exponential"], RUNS)]
)
@pytest.mark.usefixtures("x64")
def test_gossip_is_decentralized_sgd(shift, lowering, layout):
    tx = optax.chain(optax.sgd(0.1), mp.replicas.gossip(shift))

    def step(params, gradients, state):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = mp.jit(step, mesh=mp.mesh("slice=4, data=2"), layout=layout, dims=OF_REPLICAS, lowering=lowering)
    params = gradients(9, 4, np.float64)
    want, state = {k: np.float64(x) for k, x in params.items()}, tx.init(params)
    for n, s in enumerate([1, 2, 1] if shift == "exponential" else [1, 1, 1]):
        g = gradients(n, 4, np.float64)
        params, state = run(params, g, state)
        for k, x in want.items():
            neighbours = np.stack([x[(r - s) % 4] for r in range(4)])
            want[k] = (x + neighbours) / 2 - 0.1 * g[k]
            close(params[k], want[k])


def test_a_replica_that_is_left_out_retains_its_error():
    tx = mp.replicas.coded("int8", replicas=2)
    run = jax.jit(tx.update)
    _, state = run(gradients(0), tx.init(zeros()))
    g = gradients(1)
    g["up"][1, 0, 0] = np.inf
    means, after = run(g, state)
    for k in SHAPES:
        want, errors = simulations.coded_mean(g[k], np.asarray(state.error[k]), "int8", [1, 0])
        close(means[k], want)
        close(after.error[k], np.stack(errors))


def test_without_feedback_the_state_is_empty():
    tx = mp.replicas.coded("sign", feedback=False, replicas=2)
    state = tx.init(zeros())
    assert jax.tree.leaves(state) == []
    g, run = gradients(0), jax.jit(tx.update)
    first, state = run(g, state)
    second, _ = run(g, state)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_results_have_the_dims_of_the_parameters():
    g = gradients(0)
    tx = mp.replicas.coded("int8")
    run = jax.jit(tx.update)
    stacked, _ = run(g, tx.init(g), g)
    shared, _ = run(g, tx.init(g), zeros())
    for k in SHAPES:
        assert stacked[k].shape == g[k].shape
        np.testing.assert_array_equal(stacked[k], np.broadcast_to(shared[k], g[k].shape))
    bf16 = {k: jnp.asarray(x, jnp.bfloat16) for k, x in g.items()}
    assert {x.dtype for x in jax.tree.leaves(run(bf16, tx.init(bf16), bf16)[0])} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1), ("float8_e4m3fn", 1), ("sign", 1 / 8),
     ("threshold:0.5", 1 / 4), ("topk:0.01", 41 * 6 / 4096)],
)  # fmt: skip
def test_only_codes_are_sent_between_slices(name, bytes_per_element):
    if name in ("float32", "bfloat16"):
        tx = mp.replicas.mean(replicas=2, dtype=name)
    else:
        tx = mp.replicas.coded(name, replicas=2)
    w = jax.ShapeDtypeStruct((1 << 18, 4096), jnp.float32)  # as large as stacks of layers
    g = jax.ShapeDtypeStruct((2, *w.shape), jnp.float32)

    def update(g, state):
        return tx.update(g, state)

    plan = mp.plan(
        update, g, jax.eval_shape(tx.init, w), mesh=mp.mesh("slice=2, data=4"), layout=LAYOUTS[0],
        dims={"g": "replica embed mlp"}, lowering="shard_map",
    )  # fmt: skip
    sent = sum(c.total_bytes for c in plan.collectives if "slice" in c.axes)
    share = w.size / 4 * bytes_per_element
    assert share <= sent <= 1.02 * share


@pytest.mark.parametrize("form", ["sum", "mean", "einsum", "vmap"])
def test_a_projection_of_a_sum_over_replicas_is_reduced_after_it(form):
    """896 bytes: all-reduce of 32 x 4 floats over 8 devices; 7,168 for 32 x 32."""
    functions = {
        "sum": lambda g, q: g.sum(0) @ q,
        "mean": lambda g, q: g.mean(0) @ q,
        "einsum": lambda g, q: jnp.einsum("rij,jk->ik", g, q),
        "vmap": lambda g, q: jax.vmap(lambda h: h @ q)(g).mean(0),
    }
    g, q = jax.ShapeDtypeStruct((8, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 4), jnp.float32)
    dims = {"g": "replica rows columns", "q": "columns rank"}
    plan = mp.plan(functions[form], g, q, mesh=mp.mesh("slice=8"), layout="replica: slice", dims=dims)
    assert [(c.op, c.total_bytes) for c in plan.collectives] == [("all-reduce", 896)]


def test_one_bit_adam_from_two_transformations():
    """Tang et al. 2021: after a warm-up with Adam, the variance is frozen, and replicas exchange signs of their momenta."""
    rng = np.random.default_rng(0)
    w = jnp.zeros((8, 8))
    exchange = mp.replicas.coded("sign", replicas=2)
    m, v, errors, update = jnp.zeros_like(w), jnp.full_like(w, 0.04), exchange.init(w), jax.jit(exchange.update)
    m_, w_, errors_ = np.zeros((8, 8)), np.zeros((8, 8)), [np.zeros((8, 8))] * 2
    for _ in range(4):
        g = rng.normal(size=(2, 8, 8)).astype(np.float32)
        m, errors = update(0.9 * m + 0.1 * g, errors)
        w = w - 0.01 * m / (jnp.sqrt(v) + 1e-8)
        m_, errors_ = simulations.coded_mean([0.9 * m_ + 0.1 * x for x in g], errors_, "sign", [1, 1])
        w_ = w_ - 0.01 * m_ / (0.2 + 1e-8)
        close(w, w_)


@pytest.fixture(scope="module")
def recipe_of_gaia():
    names = {"jax": jax, "jnp": jnp, "optax": optax}
    page = (blocks.ROOT / "docs" / "replicas.md").read_text()
    (block,) = (b for b in blocks.blocks_of(page) if "def gaia(" in b.code)
    exec(compile(block.code, "replicas.md", "exec"), names)
    return names["gaia"]


@BOTH
@pytest.mark.usefixtures("x64")
def test_the_recipe_of_gaia_equals_the_simulation(recipe_of_gaia, lowering, layout):
    tx = recipe_of_gaia(optax.sgd(0.1), 0.2)
    params = gradients(9, dtype=np.float64)
    want, waiting = {k: list(x) for k, x in params.items()}, {k: [np.zeros(s)] * 2 for k, s in SHAPES.items()}

    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = mp.jit(step, mesh=mp.mesh("slice=2, data=4"), layout=layout, dims=OF_REPLICAS, lowering=lowering)
    state = tx.init(params)
    for n in range(3):
        g = gradients(n, dtype=np.float64)
        params, state = run(g, state, params)
        for k in SHAPES:
            want[k], waiting[k] = simulations.gaia(want[k], list(-0.1 * g[k]), waiting[k], 0.2 / np.sqrt(n + 1))
            close(params[k], want[k])
            close(state["waiting"][k], waiting[k])
        share = np.mean([np.not_equal(x, 0).mean() for x in waiting["up"]])
        assert 0.1 < share < 0.9, "some updates are exchanged, and some are not"


ROWS = {"w": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mp.replicas.coded("int4"), mp.errors.UnsupportedError, "no code 'int4'"),
        (lambda: mp.replicas.coded("topk:2"), mp.errors.UnsupportedError, "no code 'topk:2'"),
        (lambda: mp.replicas.coded("threshold:x"), mp.errors.UnsupportedError, "threshold:x"),
        (lambda: mp.replicas.powersgd(0), mp.errors.UnsupportedError, "rank=0"),
        (lambda: mp.replicas.gossip("ring"), mp.errors.UnsupportedError, "shift='ring'"),
        (lambda: update(mp.replicas.coded("int8"), {"ids": np.ones((2, 3), np.int32)}), mp.errors.UnsupportedError, "`ids`.*int32"),
        (lambda: update(mp.replicas.mean(), {"s": np.float32(1)}), mp.errors.RankError, "`s` is a scalar.*`replica`"),
        (lambda: update(mp.replicas.mean(replicas=3), ROWS), mp.errors.DivisibilityError, "2 elements, not 3"),
        (lambda: update(mp.replicas.mean([0, 0]), ROWS), mp.errors.UnsupportedError, "leaves all 2 replicas out"),
        (lambda: update(mp.replicas.coded("sign", weight=[0.0, 0.0]), ROWS), mp.errors.UnsupportedError, "all 2"),
        (lambda: update(mp.replicas.mean([1, -1]), ROWS), mp.errors.UnsupportedError, "negative"),
        (lambda: update(mp.replicas.mean([1, 1, 1]), ROWS), mp.errors.RankError, r"\[3\], not \[2\]"),
        (lambda: update(mp.replicas.adasum(), {"w": np.ones((3, 3), np.float32)}), mp.errors.UnsupportedError, "3 replicas"),
        (lambda: update(mp.replicas.gossip(2), ROWS), mp.errors.UnsupportedError, "its own neighbour"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def update(tx, g):
    return tx.update(g, tx.init(g), g)


def test_gossip_needs_parameters_of_each_replica():
    tx, g = mp.replicas.gossip(), np.ones((2, 3), np.float32)
    with pytest.raises(mp.errors.UnsupportedError, match="`update` was not given"):
        tx.update(g, tx.init(g))
    with pytest.raises(mp.errors.RankError, match="no dim `replica`"):
        tx.update(g, tx.init(g), g[0])


@pytest.mark.parametrize("tx", [mp.replicas.mean(), mp.replicas.coded("int8"), mp.replicas.gossip()])
def test_a_missing_replica_dim_stops_the_plan(tx):
    g = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    with pytest.raises(mp.errors.UnknownDimError, match="replica"):
        mp.plan(
            lambda g, s: tx.update(g, s, g), g, jax.eval_shape(tx.init, g), mesh=mp.mesh("data=8"),
            layout="embed: data", dims={"g": "layers embed"},
        )  # fmt: skip

"""Mixed precision: dtypes of computation and of communication."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_results import assert_close
from scaled_simulation import BLOCK, trained

import meshpar as mp
from meshpar.errors import DivisibilityError, LayoutSyntaxError, PatternError, UnsupportedError

DIMS = {"p/w": "embed mlp", "p/v": "mlp embed", "p/scale": "embed", "x": "batch embed"}


def loss_of(p, x):
    assert p["scale"].dtype == jnp.float32
    h = jnp.tanh(x.astype(p["w"].dtype) @ p["w"]) @ p["v"]
    return jnp.square(h.astype(jnp.float32) * p["scale"]).mean()


def step_with(policy):
    def step(p, x):
        value, grads = jax.value_and_grad(policy(loss_of))(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    return step


@pytest.fixture(scope="module")
def case():
    r = np.random.default_rng(0)
    p = {"w": r.normal(size=(16, 32)) / 4, "v": r.normal(size=(32, 16)) / 6, "scale": np.ones(16)}
    return jax.tree.map(np.float32, p), r.normal(size=(64, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("reduce", "travels", "lowering"), [(None, "bfloat16", "jit"), ("float32", "float32", "shard_map")]
)
def test_weights_are_gathered_narrow_and_gradients_summed_as_asked(case, reduce, travels, lowering):
    step = step_with(mp.train.Precision(compute="bfloat16", reduce=reduce, keep=("scale",)))
    options = {"mesh": mp.mesh("data=4"), "layout": "batch: data; embed: data", "dims": DIMS, "lowering": lowering}
    f = mp.jit(step, **options)
    plan = f.plan(*case)
    big = [c for c in plan.collectives if len(c.shape) == 2 and 1 not in c.shape]  # without the scale
    assert {c.dtype for c in big if c.op == "all-gather"} == {"bfloat16"}
    op = "reduce-scatter" if lowering == "shard_map" else "all-reduce"  # XLA makes no reduce-scatters for CPUs
    assert {c.dtype for c in big if c.op == op} == {travels}
    (p, value), (p_ref, value_ref) = f(*case), jax.jit(step)(*case)
    assert {x.dtype for x in jax.tree.leaves(p)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(value, value_ref, rtol=1e-2)
    assert_close(p, p_ref, atol=2e-3)


STACKED = {"p/w": "layers embed mlp", "p/v": "layers mlp embed", "x": "batch embed"}


DTYPES = [
    ("bfloat16", None, "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "float16", "float16"),
    ("float32", None, "float32"),
]


@pytest.mark.parametrize(
    ("dtypes", "layout", "jitted"),
    [
        *covering.each(DTYPES, ["batch: data", "batch: data; embed: data"], [True, False]),
        (DTYPES[1], "batch: data; embed: data", True),
    ],
)
def test_gradients_of_stacked_weights_are_reduced_as_asked(case, dtypes, layout, jitted):
    """In the loop over layers, also where the loss is a function under ``jax.jit``."""
    compute, reduce, sent = dtypes
    p = {k: np.stack([case[0][k]] * 3) for k in ("w", "v")}

    def loss(p, x):
        def layer(h, weights):
            return h + jnp.tanh(h @ weights["w"]) @ weights["v"], None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(compute), p)
        return jnp.square(h.astype(jnp.float32)).mean()

    fn = jax.value_and_grad(mp.train.Precision(compute=compute, reduce=reduce)(jax.jit(loss) if jitted else loss))
    f = mp.jit(fn, mesh=mp.mesh("data=4"), layout=layout, dims=STACKED, lowering="shard_map")
    reduced = {(c.dtype, c.count) for c in f.plan(p, case[1]).collectives if c.op != "all-gather" and len(c.shape) > 1}
    assert reduced == {(sent, 3)}
    for a, b in zip(jax.tree.leaves(f(p, case[1])), jax.tree.leaves(jax.jit(fn)(p, case[1])), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


def test_a_wide_sum_rounds_less(case):
    """64 rows over 8 devices: partial gradients added in float32 are nearer to the float64 gradient than those in bfloat16."""
    exact = jax.grad(loss_of)(*case)
    errors = []
    for reduce in ("bfloat16", "float32"):
        step = step_with(mp.train.Precision(reduce=reduce, keep=("scale",)))
        options = {"layout": "batch: data", "dims": DIMS, "lowering": "shard_map"}
        p, _ = mp.jit(step, mesh=mp.mesh("data=8"), **options)(*case)
        errors.append(sum(float(np.abs((case[0][k] - p[k]) / 0.1 - exact[k]).sum()) for k in ("w", "v")))
    assert errors[1] < 0.95 * errors[0]


def test_what_is_no_dtype():
    with pytest.raises(LayoutSyntaxError, match="compute='int8' is not a floating dtype"):
        mp.train.Precision(compute="int8")
    for policy in ({"compute": "float8_e4m3fn"}, {"reduce": jnp.float8_e5m2}):
        with pytest.raises(LayoutSyntaxError, match="has 8 bits or fewer"):
            mp.train.Precision(**policy)


def test_weights_by_keyword_and_from_the_end():
    def dtypes(x, p):
        return [v.dtype for v in jax.tree.leaves((x, p))]

    p, x = {"w": jnp.ones((4, 4))}, jnp.ones(4)
    policy = mp.train.Precision(compute="bfloat16")
    for argnum in (1, -1):
        cast = policy(dtypes, argnum=argnum)
        for call in (cast(x, p), cast(x, p=p), cast(p=p, x=x)):
            assert call == [jnp.float32, jnp.bfloat16]
    with pytest.raises(UnsupportedError, match=r"no argument 2.*\n.*argnum="):
        policy(lambda *args: args, argnum=2)(x, p)


# -- matmuls with scales

SCALED = {"params/w": "embed mlp", "params/v": "mlp embed", "x": "batch embed"}
LAYOUTS = {
    "batch: data; embed: data": 2,
    "embed: data": 1,
    "batch: data; mlp: model; embed: data": 2,
    "batch: model; embed: model; mlp: data": 2,
}
"""Layout → shards of the batch: ``shard_map`` rounds partial gradients to bfloat16 on each device."""


def scaled_case():
    r = np.random.default_rng(1)
    params = {"w": r.normal(size=(128, 256)) / 12, "v": r.normal(size=(256, 128)) / 16}
    return jax.tree.map(np.float32, params), r.normal(size=(128, 128)).astype(np.float32)


def relu_loss(params, x):
    return jnp.square(jax.nn.relu(x @ params["w"]) @ params["v"]).mean()


def sgd(name):
    gradient = jax.grad(mp.train.Precision(name, reduce="float32")(relu_loss))

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 4.0 * g, params, gradient(params, x))

    return step


def difference(params, first, wanted):
    """The largest of the relative differences of two updates."""
    norm = np.linalg.norm
    return max(norm(params[k] - wanted[k]) / norm(wanted[k] - first[k]) for k in wanted)


@pytest.mark.parametrize("name", BLOCK)
def test_three_steps_equal_the_simulation(name):
    params, x = scaled_case()
    new, step = params, jax.jit(sgd(name))
    for _ in range(3):
        new = step(new, x)
    assert difference(new, params, trained(name, params, x, 3, 4.0)) < 1e-3
    assert difference(trained("mxfp8" if name == "float8" else "float8", params, x, 3, 4.0), params, new) > 0.02


@pytest.mark.parametrize(("layout", "name", "lowering"), covering.each(LAYOUTS, list(BLOCK), ["shard_map", "jit"]))
def test_layouts_equal_the_simulation(layout, name, lowering):
    params, x = scaled_case()
    run = mp.jit(sgd(name), mesh=mp.mesh("data=2, model=2"), layout=layout, dims=SCALED, lowering=lowering)
    new = params
    for _ in range(3):
        new = run(new, x)
    # XLA's partitioner reduces gradients before they are rounded to bfloat16
    wanted = trained(name, params, x, 3, 4.0, LAYOUTS[layout] if lowering == "shard_map" else 1)
    assert difference(jax.tree.map(np.asarray, new), params, wanted) < 1e-3


def planned(policy, mesh="data=4", **how):
    params, x = scaled_case()
    how = {
        "layout": "batch: data; embed: data",
        "dims": {"*/w": "embed mlp", "*/v": "mlp embed", "x": "batch embed"},
        **how,
    }
    return mp.plan(jax.grad(policy(relu_loss)), params, x, mesh=mesh, **how)


@pytest.mark.parametrize("name", BLOCK)
def test_codes_and_scales_are_gathered(name):
    both, narrow = planned(mp.train.Precision()), planned(mp.train.Precision(name, reduce="float32"))
    sent = [sum(c.bytes for c in plan.collectives if c.op == "all-gather") for plan in (both, narrow)]
    assert sent[1] <= 0.505 * sent[0]
    assert {str(c.dtype) for c in narrow.collectives if c.op == "reduce-scatter"} == {"float32"}


@pytest.mark.parametrize("keep", ["v", "*/{v,u}", ("embed",), "layer/*"])
def test_weights_that_are_kept_are_gathered_in_bfloat16(keep):
    def loss(params, x):
        return relu_loss({"w": params["w"], "v": params["layer"]["v"]}, x)

    params, x = scaled_case()
    params = {"w": params["w"], "layer": {"v": params["v"]}}
    policy = mp.train.Precision("mxfp8", keep=keep, dims={"*/v": "mlp embed"})
    how = {"layout": "batch: data; embed: data", "dims": {"*/w": "embed mlp", "*/v": "mlp embed", "x": "batch embed"}}
    plan = mp.plan(jax.grad(policy(loss)), params, x, mesh="data=4", **how)
    assert [str(c.dtype) for c in plan.collectives if c.op == "all-gather"] == ["float8_e4m3fn", "uint8", "bfloat16"]


def test_rates_and_notes_by_chip():
    plans = {
        topology: planned(mp.train.Precision(name), "data=4", topology=topology)
        for name, topology in [("float8", "h100:4"), ("float8", "v5p:2x2x1"), ("mxfp8", "b200:4")]
    }
    h100, v5p, b200 = plans.values()
    dots = [[op.matmul_seconds for op in plan.time.ops if op.flops] for plan in plans.values()]
    assert "5 matmuls of the program multiply float8 operands, natively on h100" in h100.notes
    assert any("converted to bfloat16 by the compiler of v5p" in note for note in v5p.notes)
    assert any("blocks of 32 are emulated on b200" in note for note in b200.notes)
    for plan, seconds, rate in zip(plans.values(), dots, (1.98e15, 4.59e14, 2.25e15), strict=True):
        total = sum(op.flops for op in plan.time.ops)
        assert sum(seconds) == pytest.approx(total / (rate * plan.chip.compiler.matmul_efficiency))


def test_shards_and_sizes_are_multiples_of_a_block():
    with pytest.raises(
        DivisibilityError, match=r"blocks of 32 elements of `embed`.*data=8 shards its 128 elements into 16"
    ):
        planned(mp.train.Precision("mxfp8"), "data=8")
    planned(mp.train.Precision("nvfp4"), "data=8")
    params, x = scaled_case()
    odd = {"w": params["w"][:, :40], "v": params["v"][:40]}
    with pytest.raises(
        DivisibilityError,
        match=r'\[128, 40\] of a matmul of `w` has 128 contracted and 40 other(?s:.)*test_precision.py(?s:.)*keep="w"',
    ):
        jax.eval_shape(mp.train.Precision("mxfp8")(relu_loss), odd, x)
    jax.eval_shape(mp.train.Precision("float8")(relu_loss), odd, x)


def test_entries_that_keep_nothing_and_functions_without_matmuls():
    params, x = scaled_case()
    for keep in ("*/norm", ("w", "vocabulary")):
        with pytest.raises(PatternError, match="matches no path and no dim"):
            mp.train.Precision("float8", keep=keep)(relu_loss)(params, x)
    for policy in (mp.train.Precision("float8", keep="w, v"), mp.train.Precision("nvfp4", keep="{w,v}")):
        with pytest.raises(UnsupportedError, match="no matmul of a weight"):
            policy(relu_loss)(params, x)
    with pytest.raises(LayoutSyntaxError, match=r"compute='mxfp4' is not a floating dtype(?s:.)*'mxfp8'"):
        mp.train.Precision("mxfp4")

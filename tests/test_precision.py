"""Mixed precision: dtypes of computation and of communication."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_results import assert_close

import meshpar as mp
from meshpar.errors import LayoutSyntaxError, UnsupportedError

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
    ("float32", "bfloat16", "bfloat16"),
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

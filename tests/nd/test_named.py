"""Named arrays as pytrees: JAX's transformations, optax, Flax; operators; the names in plans; errors."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import meshpar as mp
from meshpar import nd

KEY = jax.random.key(0)


def test_the_names_reach_the_partitioner_without_dims():
    x, w = nd.normal(KEY, batch=16, embed=64), nd.normal(KEY, embed=64, mlp=32)
    plan = mp.plan(nd.dense, x, w, mesh="data=4, model=2", layout="batch: data; mlp: model")
    assert [tuple(v.spec) for v in plan.inputs] == [("data", ()), ("model",)] or plan.inputs[0].spec == jax.P("data")
    assert plan.outputs[0].spec == jax.P("data", "model")
    assert plan.collectives == ()
    y = mp.jit(nd.dense, mesh="data=4, model=2", layout="batch: data; mlp: model")(x, w)
    assert y.dims == ("batch", "mlp")
    assert y.array.sharding.spec == jax.P("data", "model")


def test_parameters_are_created_sharded_and_adam_state_has_their_names():
    tx = optax.adam(1e-2)

    def create(key):
        params = {"w": nd.normal(key, embed=64, mlp=32)}
        return {"params": params, "opt": tx.init(params)}

    def step(state, x):
        loss, g = jax.value_and_grad(lambda p: nd.mean(nd.dense(x, p["w"]) ** 2).array)(state["params"])
        updates, opt = tx.update(g, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    options = {"mesh": "data=4, model=2", "layout": "batch: data; mlp: model; opt.embed: data"}
    state = mp.init(create, **options)(KEY)
    assert state["params"]["w"].array.sharding.spec == jax.P(None, "model")
    assert state["opt"][0].mu["w"].array.sharding.spec == jax.P("data", "model")
    x = nd.normal(KEY, batch=16, embed=64)
    new, loss = mp.jit(step, **options)(state, x)
    expected, expected_loss = jax.jit(step)(create(KEY), x)
    np.testing.assert_allclose(new["params"]["w"].array, expected["params"]["w"].array, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)


def test_vmap_removes_the_leading_name_and_the_result_can_be_named():
    x = nd.normal(KEY, trial=3, batch=4, hidden=8)
    seen = []

    def f(row):
        seen.append(row.dims)
        return nd.sum(row, "hidden")

    out = jax.vmap(f)(x)
    assert seen == [("batch", "hidden")]
    assert out.dims == (None, "batch")
    assert nd.named(out, "trial batch").sizes == {"trial": 3, "batch": 4}
    np.testing.assert_allclose(out.array, x.array.sum(-1), rtol=1e-6)


def test_scan_over_stacked_layers_under_a_layout():
    sizes = {"layers": 2, "embed": 8, "mlp": 8}
    layers = {"up": nd.normal(KEY, 0.1, **sizes), "down": nd.normal(KEY, 0.1, layers=2, mlp=8, embed=8)}
    x = nd.normal(KEY, batch=8, embed=8)

    def loss(layers, x):
        def layer(x, w):
            return x + nd.dense(nd.relu(nd.dense(x, w["up"])), w["down"]), nd.mean(x, "embed")

        x, means = jax.lax.scan(layer, x, layers)
        return (nd.mean(x * x) + nd.mean(nd.named(means, "layers batch"))).array

    def plain(up, down, x):
        means = []
        for u, d in zip(up, down, strict=True):
            means.append(x.mean(-1))
            x = x + jax.nn.relu(x @ u) @ d
        return (x * x).mean() + jnp.stack(means).mean()

    got = mp.jit(jax.grad(loss), mesh="data=2, model=4", layout="batch: data; mlp: model")(layers, x)
    expected = jax.jit(jax.grad(plain, (0, 1)))(layers["up"].array, layers["down"].array, x.array)
    assert got["up"].dims == ("layers", "embed", "mlp")
    assert got["up"].array.sharding.spec == jax.P(None, None, "model")
    for a, b in zip((got["up"], got["down"]), expected, strict=True):
        np.testing.assert_allclose(a.array, b, rtol=1e-5, atol=1e-7)


def test_operators_broadcast_by_name():
    a, b = np.arange(6.0).reshape(2, 3) + 1, np.arange(12.0).reshape(4, 3) + 1
    x, y = nd.named(a, "p q"), nd.named(b, "r q")
    operators = [getattr(operator, name) for name in "add sub mul truediv floordiv mod lt le gt ge eq ne".split()]
    found = jax.jit(lambda x, y: [(fn(x, y), fn(2.0, x), fn(x, np.float32(2.0))) for fn in operators])(x, y)
    for fn, (z, left, right) in zip(operators, found, strict=True):
        assert z.dims == ("p", "q", "r")
        np.testing.assert_allclose(z.array, np.moveaxis(fn(a[:, None], b[None]), 1, 2), rtol=1e-6)
        np.testing.assert_allclose(left.array, fn(2.0, a), rtol=1e-6)
        np.testing.assert_allclose(right.array, fn(a, 2.0), rtol=1e-6)
    assert (nd.named(b, "r q") + nd.named(a[0], "q")).dims == ("r", "q")
    assert (nd.named(a[0], "q") + nd.named(b, "r q")).dims == ("r", "q")  # the order of the operand that has all dims
    np.testing.assert_array_equal((-x).array, -a)
    np.testing.assert_array_equal(abs(-x).array, a)
    np.testing.assert_array_equal((x**2).array, a**2)
    flags = x > 2
    np.testing.assert_array_equal((~flags | ((flags & flags) ^ flags)).array, a <= 2)


def test_a_linen_module_takes_named_parameters():
    x = jnp.ones((4, 8))
    kernel = nd.normal(KEY, embed=8, mlp=16)
    got = nn.Dense(16, use_bias=False).apply({"params": {"kernel": kernel}}, x)
    np.testing.assert_allclose(got, x @ kernel.array, rtol=1e-6)


def test_rename_separates_rules():
    def scores(x):
        return nd.einsum(x, nd.rename(x, length="memory"), out="length memory")

    x = nd.normal(KEY, length=16, model=8)
    plan = mp.plan(scores, x, mesh="data=4", layout="length: data")
    assert plan.outputs[0].spec == jax.P("data")
    np.testing.assert_allclose(scores(x).array, x.array @ x.array.T, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "texts"),
    [
        (lambda x, w: x + w, mp.errors.RankError,
         ["`embed` is 8 in (batch=4 embed=8) and 6 in (embed=6 mlp=3)", 'embed="other_embed"']),
        (lambda x, w: nd.einsum(x, w, out="batch mlp"), mp.errors.RankError, ["(batch=4 embed=8)", "(embed=6 mlp=3)"]),
        (lambda x, w: nd.einsum(x, nd.rename(w, embed="e"), out="batch ml"), mp.errors.UnknownDimError,
         ["no array has the dim `ml`: (batch=4 embed=8), (e=6 mlp=3)", "did you mean `mlp`"]),
        (lambda x, w: nd.sum(x, "embd"), mp.errors.UnknownDimError,
         ["(batch=4 embed=8) has no dim `embd`", "did you mean `embed`"]),
        (lambda x, w: x + np.ones(8), mp.errors.RankError, ["[8] has 0 names for 1 dims", "nd.named"]),
        (lambda x, w: jax.vmap(lambda a: a)(nd.named(x, "_ embed")) + 1, mp.errors.RankError, ["has 2 names for 2 dims"]),
        (lambda x, w: nd.rename(x, embed="batch"), mp.errors.LayoutSyntaxError, ["`batch` stands twice"]),
        (lambda x, w: nd.named(x, "batch"), mp.errors.RankError, ["2 dimensions", "names 1"]),
        (lambda x, w: nd.transpose(x, "batch mlp"), mp.errors.RankError, ["(batch=4 embed=8) to 'batch mlp'"]),
        (lambda x, w: nd.reshape(x, "a b", a=5), mp.errors.RankError, ["(batch=4 embed=8) does not fit (a=5 b=?)"]),
        (lambda x, w: nd.reshape(x, "a b", a=4, c=8), mp.errors.RankError, ["does not fit (a=4 b=?)"]),
        (lambda x, w: nd.conv(x, w, batch="mlp"), mp.errors.RankError, ["(batch=4 embed=8)", "(embed=6 mlp=3)"]),
        (lambda x, w: nd.attention(x, w, w, key="embed", memory="length"), mp.errors.UnknownDimError, ["no dim `length`"]),
    ],
)  # fmt: skip
def test_errors_name_the_arrays_and_the_dim(call, error, texts):
    with pytest.raises(error) as raised:
        call(nd.full(1.0, batch=4, embed=8), nd.full(1.0, embed=6, mlp=3))
    for text in texts:
        assert text in str(raised.value)

"""Weights in 8 bits: rounding, use in place of arrays, names and shardings, matmuls without a dequantized copy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import meshpar as mp

E, M, H, D, B = 64, 128, 4, 16, 8
CONTRACT = {"*query": "embed", "*out": "heads head_dim", "*up": "embed", "*down": "mlp"}
DIMS = {
    "*query": "layers embed heads head_dim",
    "*out": "layers heads head_dim embed",
    "*up": "layers embed mlp",
    "*down": "layers mlp embed",
    "x": "batch embed",
}
AXES = {"query": (1,), "out": (1, 2), "up": (1,), "down": (1,)}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"query": (2, E, H, D), "out": (2, H, D, E), "up": (2, E, M), "down": (2, M, E)}
    return {k: (rng.normal(size=s) * np.exp(rng.normal(size=s)) / 8).astype(np.float32) for k, s in shapes.items()}


def in_numpy(x: np.ndarray, dtype: str, axes: tuple[int, ...], block: int | None = None) -> np.ndarray:
    """The dequantized weight, in float64."""
    x = x.astype(np.float64)
    parts = x
    if block is not None:
        shape = list(x.shape)
        shape[axes[-1] : axes[-1] + 1] = [shape[axes[-1]] // block, block]
        parts, axes = x.reshape(shape), (axes[-1] + 1,)
    scale = np.abs(parts).max(axes, keepdims=True) / (127 if dtype == "int8" else 448)
    codes = np.rint(parts / scale) if dtype == "int8" else (parts / scale).astype(ml_dtypes.float8_e4m3fn).astype(float)
    return (codes * scale).reshape(x.shape)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("block", [None, 16])
def test_codes_and_scales_are_those_of_numpy_within_the_stated_error(dtype, block):
    params = weights()
    small = mp.layers.quantize(params, dtype, contract=CONTRACT, dims=DIMS, block=block)
    for name, x in params.items():
        got, want = np.asarray(small[name].dequantize()), in_numpy(x, dtype, AXES[name], block)
        assert np.mean(np.abs(got - want) > 1e-6) < 1e-3  # ties may round to either side
        scales = np.asarray(small[name].scales)
        if block is None:
            largest = np.abs(x).max(AXES[name], keepdims=True)
            assert scales.shape == largest.shape
            bound = largest / 254 if dtype == "int8" else np.maximum(np.abs(x) / 16, largest / 458752)
            assert (np.abs(got - x) <= bound * 1.0001).all()
        assert small[name].codes.shape == x.shape
        assert small[name].codes.dtype == dtype
        assert small[name].nbytes == x.size + 4 * scales.size


def model(params, x):
    """Two layers on the weights of a tree, with arrays or quantized ones."""

    def layer(x, w):
        q = jnp.einsum("be,ehd->bhd", x, w["query"])
        x += jnp.einsum("bhd,hde->be", jnp.tanh(q), w["out"])
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, params)[0]


@pytest.mark.parametrize(
    ("layout", "lowering"), [("batch: data; heads, mlp: model", "shard_map"), ("batch: data; embed: data", "jit")]
)
def test_matmuls_read_them_under_layouts(layout, lowering):
    params, x = weights(), np.random.default_rng(1).normal(size=(B, E)).astype(np.float32)
    small = mp.layers.quantize(params, contract=CONTRACT, dims=DIMS)
    y = x.astype(np.float64)
    w = {k: in_numpy(v, "int8", AXES[k]) for k, v in params.items()}
    for n in range(2):
        q = np.tanh(np.einsum("be,ehd->bhd", y, w["query"][n]))
        y += np.einsum("bhd,hde->be", q, w["out"][n])
        y = y + np.maximum(y @ w["up"][n], 0) @ w["down"][n]
    step = mp.jit(model, mesh=mp.mesh("data=2, model=4"), layout=layout, dims=DIMS, lowering=lowering)
    np.testing.assert_allclose(step(small, x), y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_rules_for_a_weight_shard_its_codes_and_scales():
    small = mp.layers.quantize(weights(), contract=CONTRACT, dims=DIMS, block=16)
    plan = mp.plan(model, small, np.zeros((B, E), np.float32), mesh="data=2, model=4", dims=DIMS,
                   layout='batch: data; "*up".mlp, heads: model')  # fmt: skip
    specs = {x.path: tuple(x.spec) for x in plan.inputs}
    assert specs["params/up.codes"] == specs["params/up.scales"] == (None, None, "model")
    assert specs["params/out.codes"][1] == "model"
    assert "model" in specs["params/out.scales"]
    assert "model" not in specs["params/down.codes"]


def test_stacked_weights_in_a_loop_are_not_dequantized_in_memory():
    small = mp.layers.quantize(weights(), contract=CONTRACT, dims=DIMS)
    plan = mp.plan(model, small, np.zeros((B, E), np.float32), mesh="model=8", topology="v5e:2x4", layout="", dims=DIMS)
    assert plan.memory.peak < 1.2 * plan.argument_bytes()


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.relu(nn.Dense(M, kernel_init=nn.with_partitioning(init, ("embed", "mlp")), name="up")(x))
        return nn.Dense(E, kernel_init=nn.with_partitioning(init, ("mlp", "embed")), name="down")(x)


def test_a_linen_module_takes_them_as_parameters():
    x = jax.random.normal(jax.random.key(1), (B, E))
    params = Mlp().init(jax.random.key(0), x)
    contract = {"*/up/kernel": "embed", "*/down/kernel": "mlp"}
    small = mp.layers.quantize(params, contract=contract)
    run = lambda params, x: Mlp().apply(params, x)  # noqa: E731
    step = mp.jit(run, mesh=mp.mesh("data=2, model=4"), layout="batch: data; mlp: model", dims={"x": "batch embed"})
    np.testing.assert_allclose(step(small, x), Mlp().apply(mp.layers.dequantize(small), x), atol=1e-5)
    np.testing.assert_allclose(step(small, x), Mlp().apply(params, x), atol=0.05)
    plan = step.plan(small, x)
    specs = {h.path.rpartition("params/")[2]: tuple(h.spec) for h in plan.inputs}
    assert specs["up/kernel.codes"] == specs["up/kernel.scales"] == (None, "model")
    assert specs["down/kernel.codes"] == ("model",)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        lecun = nnx.initializers.lecun_normal()
        self.embed = nnx.Embed(32, E, rngs=rngs)
        self.up = nnx.Linear(E, M, kernel_init=nnx.with_partitioning(lecun, ("embed", "mlp")), rngs=rngs)

    def __call__(self, tokens):
        return self.up(self.embed(tokens))


def test_an_nnx_module_takes_them_as_parameters():
    with nnx.use_eager_sharding(False):
        model, tokens = Nnx(nnx.Rngs(0)), jnp.arange(B)
    small = mp.layers.quantize(model, contract={"up/kernel": "embed", "embed/embedding": 1})
    step = mp.jit(lambda m, t: m(t), mesh=mp.mesh("data=2, model=4"), layout="mlp: model", dims={})
    assert isinstance(small.up.kernel.get_value(), mp.types.Quantized)
    assert not isinstance(model.up.kernel.get_value(), mp.types.Quantized)
    np.testing.assert_allclose(step(small, tokens), small(tokens), atol=1e-5)
    np.testing.assert_allclose(step(small, tokens), model(tokens), atol=0.05)


def test_rows_of_an_embedding_are_read_without_the_others():
    table = mp.layers.quantize({"t": weights()["up"][0]}, contract={"t": 1})["t"]
    np.testing.assert_array_equal(table[jnp.array([3, 5])], np.asarray(table)[[3, 5]])
    np.testing.assert_array_equal(table[1:3, 4], np.asarray(table)[1:3, 4])
    jaxpr = jax.make_jaxpr(lambda t: t[jnp.array([3, 5])])(table)
    assert max(v.aval.size for e in jaxpr.eqns for v in e.outvars) < table.size


@pytest.mark.parametrize(
    ("kw", "words"),
    [
        ({"dtype": "int4", "contract": {"w": 0}}, "'int4'"),
        ({"contract": {"w": 0}, "block": 5}, "no blocks of 5"),
        ({"contract": {"w": 0}, "block": 0}, "block=0"),
        ({"contract": {"v": 0}}, "matches no array"),
        ({"contract": {"w": "embed"}}, "no names of dims"),
        ({"contract": {"w": 2}}, "names 2"),
        ({"contract": {"n": 0}}, "int32"),
    ],
)
def test_bad_input(kw, words):
    with pytest.raises(mp.errors.MeshparError, match=words):
        mp.layers.quantize({"w": jnp.ones((8, 4)), "n": jnp.ones(4, jnp.int32)}, **kw)


@pytest.mark.parametrize("pattern", ["w", "*", "w.codes"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_codes_are_not_quantized_again(dtype, pattern):
    once = mp.layers.quantize({"w": jnp.ones((8, 4))}, dtype, contract={"w": 0})
    with pytest.raises(mp.errors.UnsupportedError, match=rf"w\.codes is {dtype}, and .* of 16 bits or more"):
        mp.layers.quantize(once, dtype, contract={pattern: 0})

"""Which matmuls of a function are replaced by scaled ones."""

import jax
import jax.numpy as jnp
import pytest

import meshpar as mp
from meshpar._src.compat.jax import equations

W, X = jnp.ones((64, 32)), jnp.ones((4, 64))
POLICY = mp.train.Precision("float8")


def matmuls(fn, *args, policy=POLICY):
    """(matmuls of float8 operands, others) of a function of weights and other arrays."""
    dots = [e for e in equations(jax.make_jaxpr(policy(fn))(*args)) if e.primitive.name == "dot_general"]
    codes = sum(e.invars[0].aval.dtype == jnp.float8_e4m3fn for e in dots)
    return codes, len(dots) - codes


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, jnp.stack([w, w]))[0]


def chosen(w, x):
    return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ (2 * w), x)


def repeated(w, x):
    return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w @ w.T, x)


def with_low_rank(p, x):
    return x @ (p["w"] + p["a"] @ p["b"])


def attention(w, x):
    q = x @ w
    return (q @ q.T) @ x


@jax.custom_vjp
def custom(w, x):
    return x @ w


custom.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))


@pytest.mark.parametrize(
    ("fn", "weights", "want"),
    [
        (lambda w, x: x @ w, W, (1, 0)),
        (lambda w, x: jnp.einsum("ek,be->kb", w, x), W, (1, 0)),
        (jax.jit(lambda w, x: x @ w.astype(jnp.float32)), W, (1, 0)),
        (jax.checkpoint(scanned), W, (2, 0)),
        (chosen, W, (2, 0)),
        (repeated, W, (2, 0)),
        (with_low_rank, {"w": W, "a": W[:, :2], "b": W[:2]}, (1, 1)),
        (lambda w, x: x @ w + X @ w, W, (2, 0)),  # an array that the function closes over is no weight
        (lambda p, x: p["table"][jnp.arange(4)] @ p["w"] + x @ p["w"], {"w": W, "table": W.T}, (1, 1)),
        (attention, W, (1, 2)),
        (lambda w, x: custom(w, x) + x @ w, W, (1, 1)),
        (lambda w, x: (x @ w, x @ w[:, 0], w.astype(jnp.int32).T @ jnp.ones((64, 2), jnp.int32)), W, (1, 2)),
    ],
)  # fmt: skip
def test_matmuls_of_weights(fn, weights, want):
    assert matmuls(fn, weights, X) == want


def test_matmuls_of_one_operand_encode_it_once():
    def three(p, x):
        return x @ p["q"], x @ p["k"], x @ p["v"]

    jaxpr = jax.make_jaxpr(POLICY(three))(dict.fromkeys("qkv", W), X)
    assert sum(e.primitive.name == "reduce_max" for e in equations(jaxpr)) == 4


def test_other_arguments_and_results_stay():
    def loss(w, x, training, name, scale=1.0):
        assert training is True
        assert name == "a"
        assert scale == 2.0
        return (x @ w).sum() * scale, {"n": jnp.int32(3), "none": None}

    run = jax.jit(jax.value_and_grad(POLICY(loss), has_aux=True), static_argnums=(2, 3), static_argnames="scale")
    (value, aux), g = run(W, X, True, "a", scale=2.0)
    assert value.dtype == g.dtype == jnp.float32
    assert aux["none"] is None
    assert int(aux["n"]) == 3
    over_weights = jax.jit(jax.vmap(POLICY(lambda w, x: (x @ w).sum()), (0, None)))
    assert over_weights(jnp.stack([W, 2 * W]), X).shape == (2,)


def test_a_gradient_of_large_and_of_non_finite_values():
    def sums(w, x):
        return (x @ w.astype(x.dtype)).sum()

    for dtype in (jnp.float16, jnp.bfloat16):  # the products of codes exceed float16
        value = jax.jit(POLICY(sums))(W.astype(dtype), jnp.ones((4, 64), dtype))
        assert value.dtype == dtype
        assert float(value) == 4 * 64 * 32
    for name in ("float8", "mxfp8", "nvfp4"):
        gradient = jax.jit(jax.grad(mp.train.Precision(name)(sums)))
        g = gradient(jnp.ones((64, 32)), jnp.zeros((32, 64)).at[0, 0].set(jnp.nan))
        assert bool(jnp.isnan(g[0]).all())
        assert float(jnp.abs(gradient(jnp.ones((64, 32)), jnp.zeros((32, 64)))).max()) == 0

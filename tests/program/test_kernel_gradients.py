"""What a kernel keeps for its backward pass: told by tracing, split as operands are, equal numbers under every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar._src.program import kernel_gradients
from meshpar._src.program.kernels import Kernel, parse_rule

RULE = (
    "batch seq! (kv_heads group) d!, batch seq! kv_heads d!, batch seq! kv_heads d! -> batch seq! (kv_heads group) d!"
)
BATCH, SEQ, KV, GROUP, D = 4, 8, 2, 2, 4


@jax.custom_vjp
def heads(q, k, v, mask):
    return _forward(q, k, v, mask)[0]


def _forward(q, k, v, mask):
    s = jnp.einsum("gsd,td->gst", q, k) + mask
    p = jax.nn.softmax(s, -1)
    return jnp.einsum("gst,td->gsd", p, v), (q, k, v, mask, jax.nn.logsumexp(s, -1))


def _backward(saved, ct):
    q, k, v, mask, lse = saved
    p = jnp.exp(jnp.einsum("gsd,td->gst", q, k) + mask - lse[..., None])
    dp = jnp.einsum("gsd,td->gst", ct, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return (
        jnp.einsum("gst,td->gsd", ds, k),
        jnp.einsum("gst,gsd->td", ds, q),
        jnp.einsum("gst,gsd->td", p, ct),
        jnp.zeros_like(mask),
    )


heads.defvjp(_forward, _backward)


def attend(q, k, v):
    b, s, h, d = q.shape
    kv = k.shape[2]
    mask = jnp.asarray(np.where(np.tri(s, dtype=bool), 0.5, -1e9).astype(np.float32))
    q = q.reshape(b, s, kv, h // kv, d).transpose(0, 2, 3, 1, 4)
    each = jax.vmap(jax.vmap(heads, (0, 0, 0, None)), (0, 0, 0, None))
    out = each(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, s, h, d)


attention = mp.kernel_rule(RULE)(attend)


def plain(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k)
    s = jnp.where(np.tri(s.shape[-1], dtype=bool), s, -1e9)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(s, -1), v)


def operands(dtype=np.float32):
    r = np.random.default_rng(0)
    return [r.normal(size=(BATCH, SEQ, h, D)).astype(dtype) for h in (KV * GROUP, KV, KV)]


def step(attention, w, q, k, v, policy=jax.checkpoint_policies.nothing_saveable):
    @functools.partial(jax.checkpoint, policy=policy)
    def loss(w):
        return jnp.square(attention(q * w, k, jnp.tanh(v * w))).mean()

    return jax.value_and_grad(loss)(w)


DIMS = {"q": "batch seq heads d", "k": "batch seq kv_heads d", "v": "batch seq kv_heads d"}


def kernel(fn, rule):
    return Kernel(fn, parse_rule(rule), None, None, "mine")


def forward_backward(kernel, xs):
    return kernel_gradients.forward_backward(kernel, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))


def test_residuals_of_attention_have_its_factors():
    kept = forward_backward(kernel(attend, RULE), operands())
    dims = kept.backward.notation.ins
    assert (("batch",), ("kv_heads",), ("group",), ()) in dims  # the log-sum-exp
    assert len(kept.forward.notation.outs) == 2  # not the mask, nor the operands in another order: they are made again
    shapes = jax.eval_shape(kept.forward.fn, *operands())
    for made, dim in zip(shapes, kept.forward.notation.outs, strict=True):
        assert len(made.shape) == len(dim)


@pytest.mark.parametrize(
    ("layout", "lowering", "policy"),
    [
        ("batch: data", "jit", jax.checkpoint_policies.nothing_saveable),
        ("batch: data; heads, kv_heads: model", "shard_map", jax.checkpoint_policies.nothing_saveable),
        ("batch: data; heads, kv_heads: model", "shard_map", mp.train.checkpoint_policies.kernels_saveable),
        ("kv_heads, heads: data", "jit", mp.train.checkpoint_policies.kernels_saveable),
    ],
)
def test_no_layout_and_no_policy_changes_a_gradient(layout, lowering, policy):
    w, xs = np.float32(0.7), operands()
    run = functools.partial(step, attention, policy=policy)
    got = mp.jit(run, mesh=mp.mesh("data=2, model=2, idle=2"), layout=layout, dims=DIMS, lowering=lowering)(w, *xs)
    want = jax.jit(functools.partial(step, plain))(w, *xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def softmaxes(program):
    """How often the program takes the exponentials of scores, calls in kernels counted."""

    def count(jaxpr):
        n = 0
        for e in jaxpr.eqns:
            if e.primitive.name == "kernel":
                e_jaxpr = jax.make_jaxpr(e.params["kernel"].fn)(*[v.aval for v in e.invars])
                n += count(e_jaxpr.jaxpr)
            n += e.primitive.name == "dot_general" and e.outvars[0].aval.shape[-2:] == (SEQ, SEQ)
            n += sum(
                count(getattr(p, "jaxpr", p)) for p in e.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")
            )
        return n

    return count(program.jaxpr)


def test_the_forward_pass_runs_no_third_time():
    """Scores of the forward pass, of its recomputation, and two of the backward pass: where the kernel ran once more, five."""
    traced = jax.make_jaxpr(functools.partial(step, attention))(np.float32(1), *operands())
    assert softmaxes(traced) == 4


def test_a_linear_kernel_saves_its_operands_alone():
    kept = forward_backward(
        kernel(lambda x, w: x @ w, "m k, k n -> m n"), [np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)]
    )
    assert set(kept.saved) == {("operand", 0), ("operand", 1)}
    assert len(kept.forward.notation.outs) == 1


@pytest.mark.parametrize(
    ("fn", "saved"),
    [
        (lambda x: jnp.sin(jnp.fft.fft(x).real), "residual"),
        (lambda x: x * jnp.sin(jnp.argmax(x, 1).astype(x.dtype))[:, None], "residual"),
        (lambda x: jnp.sin(jnp.cos(x)), "operand"),
    ],
    ids=["transform", "search", "elementwise"],
)
def test_expensive_residuals_are_saved_and_cheap_ones_recomputed(fn, saved):
    kept = forward_backward(kernel(fn, "rows cols! -> rows cols!"), [np.ones((4, 6), np.float32)])
    assert [which for which, _ in kept.saved] == [saved]


def of_all(x):
    """Keeps a number of all rows."""
    return jnp.tanh(x / jnp.max(jnp.abs(x)))


def of_merged(x):
    """Keeps an array of one dim, of which no operand says whether rows or columns are the major ones."""
    flat = x.reshape(-1)
    return (flat * jnp.cumsum(flat)).reshape(x.shape)


@pytest.mark.parametrize("fn", [of_all, of_merged])
def test_kernels_whose_residuals_have_unknown_dims_are_recomputed(fn):
    own = kernel(fn, "rows cols -> rows cols")
    assert forward_backward(own, [np.ones((4, 6), np.float32)]).forward is own

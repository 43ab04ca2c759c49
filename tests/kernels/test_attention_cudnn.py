"""Attention by cuDNN: what it is given and what is made of its results, by its definition in JAX; and when it is the default."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshpar_kernels import ContextParallel, _choose, _compat, ring_attention
from meshpar_kernels._arithmetic import row_dots
from meshpar_kernels.attention import reference
from meshpar_kernels.attention.flash import Keys, Queries, Softmax
from meshpar_kernels.attention.masks import Mask

BF16 = jnp.bfloat16


def parts(q, k, v, scale, causal, window):
    """cuDNN's semantic: both count from 0, the window is to the left."""
    softmax = Softmax(Mask(causal, window), scale)
    lengths = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q, k))
    q_pos, k_pos = lengths
    return softmax, Queries(q, q_pos, None), Keys(k, v, k_pos, None)


@pytest.fixture
def by_definition(monkeypatch):
    """The two calls in JAX; the list of what they were asked for."""
    asked = []

    def forward(q, k, v, *, scale, causal, window):
        asked.append((causal, window))
        out, lse = reference.forward(*parts(q, k, v, scale, causal, window))
        return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2)

    def backward(q, k, v, lse, out, grad, *, scale, causal, window):
        asked.append((causal, window))
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        grads = reference.backward(
            *parts(q, k, v, scale, causal, window), grad, jnp.swapaxes(lse, 1, 2), row_dots(grad, out)
        )
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    monkeypatch.setattr(_choose, "VENDORS", {})  # on any platform
    monkeypatch.setattr(_compat, "cudnn_forward", forward)
    monkeypatch.setattr(_compat, "cudnn_backward", backward)
    return asked


def draw(length=16, heads=4, kv_heads=2, width=8, dtype=BF16):
    rng = np.random.default_rng(0)
    shapes = [(2, length, h, width) for h in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def step(q, k, v, axis=None, **options):
    def loss(*args):
        out = ring_attention(*args, axis, **options)
        return (out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def close(got, want):
    """bfloat16 keeps eight bits; two roundings."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * max(abs(b).max(), 1e-6))


@pytest.mark.parametrize("mask", [{}, {"causal": True, "window": 5, "scale": 0.3}], ids=str)
def test_one_device(mask, by_definition):
    args = draw()
    got = jax.jit(functools.partial(step, implementation="cudnn", **mask))(*args)
    assert set(by_definition) == {(mask.get("causal", False), mask.get("window"))}
    close(got[0][1], jax.jit(functools.partial(step, implementation="reference", **mask))(*args)[0][1])
    close(got[1], jax.jit(functools.partial(step, implementation="reference", **mask))(*args)[1])


def sharded(strategy, order="contiguous", **options):
    """The loss and gradients of attention over 4 devices, and the result."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(ring_attention, axis_name="a", parallel=ContextParallel(strategy, order), **options)
    full = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "a"),) * 3, out_specs=P(None, "a"))

    def loss(*args):
        out = full(*args)
        return (out.astype(jnp.float32) ** 2).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


@pytest.mark.parametrize(("strategy", "causal"), [("ring", True), ("gathered", True), ("ulysses", False)])
def test_every_block_of_a_sharded_sequence(strategy, causal, by_definition):
    """Partial results are merged, and gradients are those through each block, by the log-sum-exp of all keys."""
    args = draw(32)
    got = jax.jit(sharded(strategy, causal=causal, implementation="cudnn"))(*args)
    want = jax.jit(functools.partial(step, implementation="reference", causal=causal))(*args)
    close(got[0][1], want[0][1])
    close(got[1], jax.jit(sharded(strategy, causal=causal, implementation="reference"))(*args)[1])
    assert set(by_definition) == {(m, None) for m in ((False, True) if causal and strategy != "ulysses" else (causal,))}


@pytest.mark.parametrize("strategy", ["ring", "gathered", "ulysses"])
def test_a_causal_sharded_sequence_takes_it_on_gpus(strategy):
    """Forward and backward, and no loop over chunks of scores is left. In zig-zag order only Ulysses' cannot."""
    args = [jax.ShapeDtypeStruct(x.shape, BF16) for x in draw(1024, width=64, heads=8, kv_heads=4)]

    def text(**options):
        jax.clear_caches()
        return (
            jax.jit(sharded(strategy, causal=True, **options))
            .trace(*args)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )

    program = text()
    backward = program.count("@__cudnn$fmhaSoftmaxBackward")
    assert backward >= 1
    assert program.count("@__cudnn$fmhaSoftmax") - backward >= 1
    assert "dot_general" not in program
    assert "dot_general" in text(order="zigzag")


# -- the default


def calls(platform, length=256, dtype=BF16, width=64, **options):
    """How often a step lowered for this platform calls cuDNN, forward and backward."""
    args = [jax.ShapeDtypeStruct(x.shape, dtype) for x in draw(length, width=width)]
    if "segment_ids" in options:
        options["segment_ids"] = jnp.zeros((2, length), jnp.int32)
    jax.clear_caches()
    text = jax.jit(functools.partial(step, **options)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    back = text.count("@__cudnn$fmhaSoftmaxBackward")
    return text.count("@__cudnn$fmhaSoftmax") - back, back


def test_on_gpus_it_is_the_default_where_it_can_run(monkeypatch):
    for options in ({}, {"causal": True, "window": 100}):
        assert calls("cuda", **options) == (1, 1), options
    assert calls("cpu", causal=True) == (0, 0)
    assert calls("tpu", causal=True) == (0, 0)
    for options in ({"softcap": 20.0}, {"segment_ids": True}, {"window": 9}, {"dtype": jnp.float32}, {"width": 12}):
        assert calls("cuda", **options) == (0, 0), options
    assert calls("cuda", causal=True, implementation="xla") == (0, 0)
    monkeypatch.setenv("MESHPAR_KERNELS", "reference")
    assert calls("cuda", causal=True) == (0, 0)


def test_refusals_carry_every_reason(monkeypatch):
    def refuses(words, axis=None, **options):
        args = draw(dtype=options.pop("dtype", BF16), width=options.pop("width", 8))
        with pytest.raises(NotImplementedError, match=words):
            ring_attention(*args, axis, implementation="cudnn", **options)

    refuses(r"float32(.|\n)*softcap(.|\n)*a window to both sides", dtype=jnp.float32, softcap=1.0, window=3)
    refuses("head_dim is 264 and 264; cuDNN takes one for both, a multiple of 8 up to 256", width=264)
    refuses("segment ids", segment_ids=jnp.zeros((2, 16), int))
    jax.clear_caches()
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (7, 0))
    refuses("the GPU is sm_70")

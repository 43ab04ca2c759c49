"""Attention by cuDNN and by JAX's splash attention: values and gradients, when each is the default, and what it refuses.

The two calls of cuDNN are replaced by their definition in JAX; splash attention runs in the TPU interpreter.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from kernel_cases import lowered, mesh_of, near

from meshpar_kernels import ContextParallel, _choose, _compat, ring_attention
from meshpar_kernels._numerics import row_dots
from meshpar_kernels.attention import reference
from meshpar_kernels.attention.flash import Keys, Queries, Softmax
from meshpar_kernels.attention.masks import Mask

BF16 = jnp.bfloat16


def draw(length=16, heads=4, kv_heads=2, width=8, dtype=BF16, batch=2):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(batch, length, h, width)), dtype) for h in (heads, kv_heads, kv_heads)]


def on_one(**options):
    return functools.partial(ring_attention, axis_name=None, **options)


def sharded(devices, strategy, order="contiguous", **options):
    local = functools.partial(ring_attention, axis_name="a", parallel=ContextParallel(strategy, order), **options)
    return jax.shard_map(local, mesh=mesh_of(devices), in_specs=(P(None, "a"),) * 3, out_specs=P(None, "a"))


def with_gradients(function):
    """(results, gradients of a weighted sum of them)."""

    def loss(*args):
        out = function(*args)
        return (out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    def run(*args):
        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
        return (out, *gradients)

    return run


def close(got, want, tolerance):
    """bfloat16 has eight bits; a few roundings."""
    for a, b in zip(got, want, strict=True):
        near(a, b, tolerance)


def parts(q, k, v, scale, causal, window):
    """cuDNN's semantic: both count from 0, the window is to the left."""
    q_pos, k_pos = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q, k))
    return Softmax(Mask(causal, window), scale), Queries(q, q_pos, None), Keys(k, v, k_pos, None)


@pytest.fixture
def by_definition(monkeypatch):
    """The two calls of cuDNN in JAX; the list of what they were asked for."""
    asked = []

    def forward(q, k, v, *, scale, causal, window):
        asked.append((causal, window))
        out, lse = reference.forward(*parts(q, k, v, scale, causal, window))
        return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2)

    def backward(q, k, v, lse, out, grad, *, scale, causal, window):
        asked.append((causal, window))
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        saved = grad, jnp.swapaxes(lse, 1, 2), row_dots(grad, out)
        grads = reference.backward(*parts(q, k, v, scale, causal, window), *saved)
        return tuple(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))

    monkeypatch.setattr(_choose, "VENDORS", {})  # on any platform
    monkeypatch.setattr(_compat, "cudnn_forward", forward)
    monkeypatch.setattr(_compat, "cudnn_backward", backward)
    return asked


@pytest.mark.parametrize("mask", [{}, {"causal": True, "window": 5, "scale": 0.3}], ids=str)
def test_cudnn_on_one_device(mask, by_definition):
    args = draw()
    got, want = (jax.jit(with_gradients(on_one(implementation=i, **mask)))(*args) for i in ("cudnn", "reference"))
    assert set(by_definition) == {(mask.get("causal", False), mask.get("window"))}
    close(got, want, 2e-2)


@pytest.mark.parametrize(("strategy", "causal"), [("ring", True), ("gathered", True), ("ulysses", False)])
def test_cudnn_for_every_block_of_a_sharded_sequence(strategy, causal, by_definition):
    """Partial results are merged, and gradients are those through each block, by the log-sum-exp of all keys."""
    args = draw(32)
    got = jax.jit(with_gradients(sharded(4, strategy, causal=causal, implementation="cudnn")))(*args)
    close(got, jax.jit(with_gradients(on_one(implementation="reference", causal=causal)))(*args), 3e-2)
    assert set(by_definition) == {(m, None) for m in ((False, True) if causal and strategy != "ulysses" else (causal,))}


def by_splash(function, *args):
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        return jax.block_until_ready(jax.jit(with_gradients(function))(*args))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": 70, "softcap": 5.0},
        {"causal": True, "segment_ids": jnp.asarray(np.repeat([[0, 1]], 128, axis=1))},
    ],
    ids=["window", "segments"],
)
def test_splash_on_one_device(options):
    args = draw(256, heads=2, kv_heads=1, width=64, batch=1)
    got = by_splash(on_one(implementation="splash", **options), *args)
    close(got, jax.jit(with_gradients(on_one(implementation="reference", **options)))(*args), 3e-2)


def test_splash_for_a_causal_sequence_over_two_devices():
    """Ulysses. With the other strategies devices run different numbers of kernels, at which the interpreter deadlocks; how
    the results of blocks are merged is tested with cuDNN, which has the same blocks."""
    args = draw(256, width=64, batch=1)
    got = by_splash(sharded(2, "ulysses", implementation="splash", causal=True), *args)
    close(got, jax.jit(with_gradients(on_one(implementation="reference", causal=True)))(*args), 3e-2)


# -- the default


def calls(platform, function, length=256, dtype=BF16, width=64):
    """How often a step lowered for this platform calls (cuDNN forward, cuDNN backward, a TPU kernel), and its program."""
    args = [jax.ShapeDtypeStruct((2, length, heads, width), dtype) for heads in (8, 4, 4)]
    jax.clear_caches()
    text = lowered(with_gradients(function), *args, platform=platform)
    back = text.count("@__cudnn$fmhaSoftmaxBackward")
    return (text.count("@__cudnn$fmhaSoftmax") - back, back, text.count("tpu_custom_call")), text


SEGMENTS = jnp.zeros((2, 256), jnp.int32)
CUDNN, SPLASH, NONE = (1, 1, 0), (0, 0, 3), (0, 0, 0)  # splash attention has two kernels of the backward pass
DEFAULTS = [
    ("cuda", {"causal": True, "window": 100}, {}, CUDNN),
    ("cuda", {"window": 9}, {}, NONE),
    ("cuda", {}, {"dtype": jnp.float32}, NONE),
    ("cuda", {"causal": True, "implementation": "xla"}, {}, NONE),
    ("tpu", {"causal": True, "window": 100, "segment_ids": SEGMENTS}, {}, SPLASH),
    ("tpu", {"causal": True}, {"length": 100}, NONE),
    ("cpu", {"causal": True}, {}, NONE),
]


def test_a_library_is_the_default_where_it_can_run(monkeypatch):
    for platform, options, shape, expected in DEFAULTS:
        assert calls(platform, on_one(**options), **shape)[0] == expected, (platform, options, shape)
    monkeypatch.setenv("MESHPAR_KERNELS", "reference")
    assert calls("cuda", on_one(causal=True))[0] == NONE


@pytest.mark.parametrize("strategy", ["ring", "gathered", "ulysses"])
def test_every_strategy_of_a_causal_sequence_takes_it(strategy):
    """Forward and backward, and no loop over chunks of scores is left; in zig-zag order a ring is not cuDNN's."""
    (forward, backward, _), program = calls("cuda", sharded(2, strategy, causal=True), length=1024)
    assert forward >= 1
    assert backward >= 1
    assert "dot_general" not in program
    if strategy == "ring":
        assert "dot_general" in calls("cuda", sharded(2, strategy, "zigzag", causal=True), length=1024)[1]
    (_, _, kernels), program = calls("tpu", sharded(2, strategy, causal=True), length=1024)
    assert kernels >= 3
    dots = re.findall(r"dot_general .*", program)  # left: sums over a head's width of gradient times result
    assert all("batching_dims = [0, 1, 2]" in dot for dot in dots), dots


def test_refusals_carry_every_reason(monkeypatch):
    def refuses(words, implementation="cudnn", length=16, width=8, dtype=BF16, **options):
        args = [jax.ShapeDtypeStruct(x.shape, dtype) for x in draw(length, width=width)]
        with pytest.raises(NotImplementedError, match=words):
            jax.eval_shape(on_one(implementation=implementation, **options), *args)

    refuses(r"float32(.|\n)*softcap(.|\n)*a window to both sides", dtype=jnp.float32, softcap=1.0, window=3)
    refuses("head_dim is 264 and 264; cuDNN takes one for both, a multiple of 8 up to 256", width=264)
    refuses("segment ids", segment_ids=jnp.zeros((2, 16), int))
    how = {"implementation": "splash", "dtype": jnp.float32, "length": 100, "width": 96}
    refuses(r"multiplies in bfloat16(.|\n)*96, no multiple of 64(.|\n)*of 128", **how)
    q, k = (jax.ShapeDtypeStruct((1, 65536, heads, 64), BF16) for heads in (2, 1))
    with pytest.raises(NotImplementedError, match="65536 queries or keys in one call are more than 32768"):
        jax.eval_shape(on_one(implementation="splash"), q, k, k)
    jax.clear_caches()
    monkeypatch.setattr(_compat, "gpu_architecture", lambda: (7, 0))
    refuses("the GPU is sm_70")

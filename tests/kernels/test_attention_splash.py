"""Attention by JAX's splash attention, in the TPU interpreter: against all scores in memory, on one device and sharded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from meshpar_kernels import ContextParallel, ring_attention

BF16 = jnp.bfloat16


def draw(length, heads=2, kv_heads=1, width=64, dtype=BF16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, length, h, width)), dtype) for h in (heads, kv_heads, kv_heads)]


def gradients(function, *args):
    def loss(*args):
        out = function(*args).astype(jnp.float32)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*args)
    return jax.block_until_ready((out, *grads))


def close(got, want):
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-2 * abs(b).max())


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": 70, "softcap": 5.0},
        {"causal": True, "segment_ids": jnp.asarray(np.repeat([[0, 1]], 128, axis=1))},
    ],
    ids=["window", "segments"],
)
def test_one_device(options):
    args = draw(256)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = gradients(functools.partial(ring_attention, axis_name=None, implementation="splash", **options), *args)
    close(
        got, gradients(functools.partial(ring_attention, axis_name=None, implementation="reference", **options), *args)
    )


def test_a_causal_sequence_over_two_devices():
    """Ulysses. With the other strategies devices run different numbers of kernels, at which the interpreter deadlocks; how
    the results of blocks are merged is tested with cuDNN, which has the same blocks."""
    args = draw(256, heads=4, kv_heads=2)
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    local = functools.partial(
        ring_attention, axis_name="a", parallel=ContextParallel("ulysses"), implementation="splash", causal=True
    )
    full = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "a"),) * 3, out_specs=P(None, "a"))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = gradients(full, *args)
    want = functools.partial(ring_attention, axis_name=None, implementation="reference", causal=True)
    close(got, gradients(want, *args))


def test_refusals_carry_every_reason():
    with pytest.raises(NotImplementedError, match=r"multiplies in bfloat16(.|\n)*96, no multiple of 64(.|\n)*of 128"):
        ring_attention(*draw(100, width=96, dtype=jnp.float32), None, implementation="splash")


# -- the default


def kernels(platform, length=256, dtype=BF16, width=64, **options):
    """How many TPU kernels a step lowered for this platform calls."""
    args = [jax.ShapeDtypeStruct(x.shape, dtype) for x in draw(128, width=width)]
    args = [jax.ShapeDtypeStruct((2, length, *a.shape[2:]), dtype) for a in args]
    if "segment_ids" in options:
        options["segment_ids"] = jnp.zeros((2, length), jnp.int32)
    jax.clear_caches()
    step = jax.grad(lambda *a: ring_attention(*a, None, **options).astype(jnp.float32).sum(), (0, 1, 2))
    return jax.jit(step).trace(*args).lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call")


def test_on_tpus_it_is_the_default_where_it_can_run(monkeypatch):
    """The forward kernel and two of the backward pass; else the loop of XLA."""
    for options in ({"causal": True, "window": 100}, {"causal": True, "segment_ids": True}):
        assert kernels("tpu", **options) == 3, options
    for options in ({"dtype": jnp.float32}, {"length": 100}, {"implementation": "xla"}):
        assert kernels("tpu", causal=True, **options) == 0, options
    for platform in ("cpu", "cuda"):
        assert kernels(platform, causal=True) == 0
    monkeypatch.setenv("MESHPAR_KERNELS", "reference")
    assert kernels("tpu", causal=True) == 0


def test_a_call_of_many_blocks_is_refused():
    q, k = (jax.ShapeDtypeStruct((1, 65536, heads, 64), BF16) for heads in (2, 1))
    with pytest.raises(NotImplementedError, match="65536 queries or keys in one call are more than 32768"):
        jax.eval_shape(functools.partial(ring_attention, axis_name=None, implementation="splash"), q, k, k)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_every_strategy_of_a_causal_sequence_takes_it_on_tpus(strategy):
    """Forward and backward, and no loop over chunks of scores is left."""
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    args = [jax.ShapeDtypeStruct((1, 1024, heads, 64), BF16) for heads in (8, 4, 4)]
    local = functools.partial(ring_attention, axis_name="a", parallel=ContextParallel(strategy), causal=True)
    full = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "a"),) * 3, out_specs=P(None, "a"))
    jax.clear_caches()
    step = jax.jit(jax.grad(lambda *a: full(*a).astype(jnp.float32).sum(), (0, 1, 2)))
    text = step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") >= 3
    dots = re.findall(
        r"dot_general .*", text
    )  # left: the sum over a head's width of gradient times result, for each row
    assert all("batching_dims = [0, 1, 2]" in dot for dot in dots), dots

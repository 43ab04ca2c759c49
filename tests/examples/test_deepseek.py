"""The DeepSeek-like model of the examples: its attention against NumPy in float64, equal runs under its layouts."""

import math

import jax
import numpy as np
import pytest
from lowered import same

import deepseek


@pytest.fixture(scope="module")
def real():
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, deepseek.TINY.vocab, (8, 16), dtype=np.int32) for k in ("inputs", "targets")}
    return jax.jit(deepseek.create_state, static_argnums=0)(deepseek.TINY, jax.random.key(0)), batch


def rotated(x, base):
    """Pairs of features (i, i + half) of `x` [batch, seq, heads, dim] turned by their position."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], -1
    )


def rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def test_latent_attention_is_attention_with_keys_and_values_of_one_latent_vector(real):
    c = deepseek.TINY
    boxed = real[0]["params"]["layers"]["attention"]
    first = jax.tree.map(lambda w: w.unbox()[0], boxed, is_leaf=lambda w: hasattr(w, "unbox"))
    x = np.random.default_rng(1).normal(size=(2, 6, c.embed)).astype(np.float32)
    got = jax.jit(deepseek.LatentAttention(c).apply)({"params": first}, x)

    p = jax.tree.map(lambda w: np.asarray(w, np.float64), first)
    q = np.einsum("bsr,rhd->bshd", rms(x @ p["query_down"]["kernel"], p["query_norm"]["scale"]), p["query"]["kernel"])
    latent = rms(x @ p["kv_down"]["kernel"], p["kv_norm"]["scale"])
    k, v = (np.einsum("bsr,rhd->bshd", latent, p[name]["kernel"]) for name in ("key", "value"))
    turned = rotated(np.einsum("bse,ehd->bshd", x, p["key_rotated"]["kernel"]), c.rope_base)
    k = np.concatenate([k, np.broadcast_to(turned, (*k.shape[:3], c.rotated))], -1)
    q = np.concatenate([q[..., : c.head_dim], rotated(q[..., c.head_dim :], c.rope_base)], -1)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(c.head_dim + c.rotated)
    scores = np.where(np.tri(6, dtype=bool), scores, -np.inf)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bhqk,bkhd->bqhd", chances / chances.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(got, np.einsum("bshd,hde->bse", y, p["out"]["kernel"]), atol=2e-5)


@pytest.mark.slow
def test_no_layout_changes_a_number(real):
    how = {"dims": deepseek.llama.DIMS, "meshes": ["data=4, model=2"], "lowerings": ("shard_map",), "tolerance": 1e-4}
    same(deepseek.train_step(deepseek.TINY), *real, layout=deepseek.FSDP_EXPERT, **how)

"""Which reductions share a kernel: those of one region that read the same array, never one of a loop with one outside."""

import jax
import jax.numpy as jnp
import pytest
from arrays import f32

import meshpar as mp
from meshpar._src.cost.kernel_time import kernel_times

SIDE, LENGTH = 1024, 4
BYTES = 4 * SIDE * SIDE // 8


def outside_and_in_a_loop(w, x):
    """Rows' maxima of a weight before a loop, in every iteration, and after it."""
    before = jnp.max(jnp.abs(w), 1)

    def layer(h, _):
        now = jnp.max(w + h[:, :1], 1)
        return jnp.tanh(h / (before + now)[:, None]), None

    h, _ = jax.lax.scan(layer, x, None, length=LENGTH)
    return h, jnp.max(jnp.abs(w) * before[:, None], 1)


def quantized(w, x):
    """A loop over layers whose weights are divided by their rows' maxima, all of it recomputed in the backward pass."""

    def layer(h, w):
        scale = jnp.max(jnp.abs(w), 1, keepdims=True)
        return jnp.tanh(h @ (jnp.round(w / scale) * scale)), None

    return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()


def reductions(fn, *args, layout):
    plan = mp.plan(fn, *args, mesh="data=8", topology="v5e:2x4", layout=layout, dims={"w": "... rows _", "x": "rows _"})
    return [(k.count, k.bytes) for node, k in kernel_times(plan).items() if node.name == "reduce_max"]


def test_a_loop_reads_again_what_was_reduced_before_it():
    found = reductions(outside_and_in_a_loop, f32(SIDE, SIDE), f32(SIDE, SIDE), layout="rows: data")
    assert [count for count, _ in found] == [1, LENGTH, 1]
    assert all(BYTES <= read < 1.1 * BYTES for _, read in found)


@pytest.mark.parametrize("layout", ["rows: data", "rows: none"])
def test_maxima_of_weights_under_remat(layout):
    found = reductions(jax.grad(quantized), f32(LENGTH, SIDE, SIDE), f32(SIDE, SIDE), layout=layout)
    assert found
    assert {count for count, _ in found} == {LENGTH}

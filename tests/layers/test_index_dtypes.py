"""Indices, labels and segment ids of 8 bits: numbers of elements are not calculated in their dtype."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same_results import assert_close

import meshpar as mp
from meshpar._src.layers.moe.routers import hash_router
from meshpar_kernels import RoutePlan, grouped_matmul, grouped_matmul_transpose

RNG = np.random.default_rng(0)
WORDS = 300  # more than 8 bits count
IDS = RNG.integers(0, 120, (2, 8)).astype(np.int32)
LOGITS, HIDDEN, KERNEL, TABLE = (
    jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((2, 8, WORDS), (2, 8, 16), (16, WORDS), (WORDS, 16))
)
Q = jnp.asarray(RNG.normal(size=(2, 8, 2, 16)), jnp.float32)
WEIGHTS, SIZES = KERNEL[:, :24].reshape(3, 16, 8), jnp.array([100, 120, 80])
QUANTIZED = mp.layers.quantize({"w": TABLE}, contract={"w": 1})["w"]


def loss(ids, **options):
    return jax.value_and_grad(lambda x, w: mp.layers.cross_entropy((x, w), ids, **options), (0, 1))(HIDDEN, KERNEL)


FUNCTIONS = {
    "cross_entropy": lambda i: jax.value_and_grad(lambda x: mp.layers.cross_entropy(x, i, z_loss=0.1))(LOGITS),
    "ignored": lambda i: mp.layers.cross_entropy(LOGITS, i, ignore=int(IDS[0, 0]), label_smoothing=0.1),
    "over vocab": lambda i: loss(i, chunks=3),
    "over tokens": lambda i: loss(i, over="tokens", chunks=2),
    "attention": lambda i: mp.layers.attention(Q, Q, Q, segment_ids=i),
    "nd.gather": lambda i: mp.nd.gather(mp.nd.named(TABLE, "vocab embed"), mp.nd.named(i, "b s"), "vocab").array,
    "nd.one_hot": lambda i: mp.nd.one_hot(mp.nd.named(i, "b s"), vocab=WORDS).array,
    "Quantized": lambda i: QUANTIZED[i],
    "hash router": lambda i: jax.tree.leaves(hash_router(i, experts=WORDS, k=2)),
    "RoutePlan": lambda i: [jax.tree.leaves(RoutePlan.of(i, n)) for n in (128, 256)],
    "grouped_matmul": lambda i: grouped_matmul(TABLE, WEIGHTS, SIZES.astype(i.dtype)),
    "grouped_matmul_transpose": lambda i: grouped_matmul_transpose(TABLE, TABLE, SIZES.astype(i.dtype)),
    "rows of a grouped_matmul": lambda i: grouped_matmul(
        TABLE, WEIGHTS[:2], jnp.array([9, 7]), lhs_indices=i.reshape(-1)
    ),
}


@pytest.mark.parametrize(("name", "dtype"), covering.each(FUNCTIONS, [jnp.int8, jnp.uint8]))
def test_every_function_of_indices(name, dtype):
    fn = jax.jit(FUNCTIONS[name])
    got, want = fn(jnp.asarray(IDS, dtype)), fn(jnp.asarray(IDS))
    assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_list_of_rows_of_a_quantized_array():
    np.testing.assert_array_equal(QUANTIZED[[1, 290, -1]], QUANTIZED.dequantize()[np.array([1, 290, -1])])


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
def test_indices_that_ops_return_in_eight_bits(lowering):
    """Devices of a split dim add the number of elements before their shard."""

    def step(x, ids):
        return {
            "argmax": lax.argmax(x, 0, jnp.int8),
            "argmin": lax.argmin(x, 0, jnp.uint8),
            "sum": jax.ops.segment_sum(x, ids, num_segments=WORDS),
            "iota": x[:, 0] * lax.iota(jnp.uint8, 120),
        }

    x, ids = TABLE[:120], jnp.asarray(RNG.integers(0, 250, 120), jnp.uint8)
    run = mp.jit(
        step, mesh=mp.mesh("data=8"), layout="rows: data", dims={"x": "rows _", "ids": "rows"}, lowering=lowering
    )
    assert_close(run(x, ids), step(x, ids), rtol=1e-5, atol=1e-5)

"""Along a chain of elementwise ops, a collective moves the array with the fewest bytes, and no number changes."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from lowered import assert_sends_the_plan

import meshpar as mp
from meshpar._src.verify.hlo import collectives

RNG = np.random.default_rng(0)
CODES, SCALES, X = (
    jnp.asarray(x) for x in (RNG.integers(-127, 127, (4, 64, 128), np.int8), normal(RNG, 4, 128), normal(RNG, 32, 64))
)
LAYOUT = {"mesh": "data=8", "layout": "batch: data; embed: data"}
FSDP = {**LAYOUT, "dims": {"w": "layers embed mlp", "s": "layers mlp", "x": "batch embed"}}
QUANTIZED = {**LAYOUT, "dims": {"q/up": "layers embed mlp", "x": "batch embed"}}
BLOCKS = mp.layers.quantize({"up": normal(RNG, 4, 64, 128)}, "int8", contract={"up": 1}, block=8)


def halves(y):
    return y[:, :64] + y[:, 64:]


def scanned(w, s, x):
    return lax.scan(lambda x, ws: (halves(jnp.tanh(x @ (ws[0].astype(jnp.float32) * ws[1]) / 500)), None), x, (w, s))[0]


def unrolled_gradient(w, s, x):
    """Both passes read one dequantized weight."""
    return jax.grad(lambda x: (jnp.tanh(x @ (w[0].astype(jnp.float32) * s[0]) / 500) ** 2).sum())(x)


def recomputed_gradient(q, x):
    """The backward pass of each layer gathers the codes again."""
    layer = jax.checkpoint(lambda x, q: (halves(jnp.tanh(x @ q["up"].dequantize() / 50)), None))
    return jax.grad(lambda x: (lax.scan(layer, x, q)[0] ** 2).sum())(x)


def reshaped(w, s, x):
    return jnp.einsum("be,hde->bhd", x, (w[0].astype(jnp.float32) * s[0]).T.reshape(16, 8, 64))


def same_segment(segments, q, k):
    return jnp.where(
        segments[:, :, None] == segments[:, None], jnp.einsum("bqd,bkd->bqk", q, mp.rename(k, seq="kv")), 0
    )


SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 3, (2, 64), np.int32)))
Q = jnp.asarray(normal(RNG, 2, 64, 16))
INT8, GATHER = 64 * 128 * 7 / 8, ("all-gather", "int8")
CASES = [
    (scanned, (CODES, SCALES, X), FSDP, {(*GATHER, INT8): 4}),
    (unrolled_gradient, (CODES, SCALES, X), FSDP, {(*GATHER, INT8): 1}),
    (recomputed_gradient, (BLOCKS, X), QUANTIZED, {(*GATHER, INT8): 8, ("all-gather", "float32", INT8 / 2): 8}),
    (reshaped, (CODES, SCALES, X), FSDP, {(*GATHER, INT8): 1}),
    (
        same_segment,
        (SEGMENTS, Q, Q),
        {"mesh": "data=8", "layout": "seq: data", "dims": {"segments": "batch seq", "[qk]": "batch seq _"}},
        {("all-gather", "int32", 2 * 64 * 4 * 7 / 8): 1, ("all-gather", "float32", 2 * 64 * 16 * 4 * 7 / 8): 1},
    ),
]


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
@pytest.mark.parametrize(("fn", "args", "how", "want"), CASES, ids=[case[0].__name__ for case in CASES])
def test_narrow_operands_are_gathered(fn, args, how, want, lowering):
    step = mp.jit(fn, lowering=lowering, **how)
    planned, compiled = Counter(), Counter()
    for c in step.plan(*args).collectives:
        planned[c.op, str(c.dtype), c.bytes] += c.count
    for c in collectives(step.lower(*args).compile().as_text()):
        compiled[c.op, c.bytes] += c.count
    assert planned == want
    assert sum(n * sent for (*_, sent), n in planned.items()) == sum(n * sent for (_, sent), n in compiled.items())
    np.testing.assert_array_equal(step(*args), jax.jit(fn)(*args))


def replicated(x):
    return lax.with_sharding_constraint(x, NamedSharding(mp.mesh("data=8"), PartitionSpec(None, None)))


F32 = 64 * 128 * 4 * 7 / 8


@pytest.mark.parametrize("lowering", ["shard_map", "jit"])
@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda w, x: x @ (w / 0.01).astype(jnp.float8_e4m3fn).astype(jnp.float32), ("float8_e4m3fn", F32 / 4)),
        (lambda w, x: x @ replicated(w).astype(jnp.bfloat16), ("bfloat16", F32 / 2)),
        # a cast to more bytes stays after the gather
        (lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).astype(jnp.float32), ("bfloat16", F32 / 2)),
        # another reader of the replicated array
        (lambda w, x: (lambda w: (x @ w, w.astype(jnp.bfloat16)))(replicated(w)), ("float32", F32)),
    ],
)
def test_casts(fn, want, lowering):
    args, how = (normal(RNG, 64, 128), X), {**LAYOUT, "dims": {"w": "embed mlp", "x": "batch embed"}}
    plan = assert_sends_the_plan(fn, *args, **how)
    assert [(c.op, str(c.dtype), c.bytes) for c in plan.collectives] == [("all-gather", *want)]
    jax.tree.map(np.testing.assert_array_equal, mp.jit(fn, lowering=lowering, **how)(*args), jax.jit(fn)(*args))


def test_a_result_is_cast_before_it_is_exchanged_unless_something_else_reads_it():
    def cast(x):
        return jnp.sort(x, 1).astype(jnp.bfloat16)

    def both(x):
        y = jnp.sort(x, 1)
        return y, y.astype(jnp.bfloat16)

    how, x = {"mesh": "data=8", "layout": "columns: data", "dims": {"x": "rows columns"}}, normal(RNG, 64, 64)
    for fn, dtypes in ((cast, ["float32", "bfloat16"]), (both, ["float32", "float32"])):
        plan = assert_sends_the_plan(fn, x, **how)
        assert [(c.op, str(c.dtype)) for c in plan.collectives] == [("all-to-all", t) for t in dtypes]
        for lowering in ("shard_map", "jit"):
            got = mp.jit(fn, lowering=lowering, **how)(x)
            jax.tree.map(np.testing.assert_array_equal, got, jax.jit(fn)(x))

"""The TPU kernels of attention in the TPU interpreter, with race detection, against NumPy in float64."""

import attention_oracle as oracle
import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreters import race_detection
from kernel_cases import near

from meshpar_kernels import ring_attention
from meshpar_kernels._numerics import row_dots
from meshpar_kernels.attention import flash, masks, tpu
from meshpar_kernels.attention.flash import Keys, Queries, Softmax
from meshpar_kernels.attention.masks import Mask

RNG = np.random.default_rng(0)
B, H, KV, D = 2, 2, 1, 128


def draw(q_len, k_len, dtype=np.float32, width=D):
    shapes = ((B, q_len, H, width), (B, k_len, KV, width), (B, k_len, KV, width), (B, q_len, H, width))
    return [jnp.asarray(RNG.normal(size=s), dtype) for s in shapes]


CASES = {
    "causal": {"causal": True, "width": 64},
    "everything": {"causal": True, "window": 90, "segments": True, "softcap": 3.0},
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case):
    """Two heads that share keys, two blocks of queries and two of keys; without races."""
    options = dict(CASES[case])
    segments = options.pop("segments", False)
    q, k, v, read = draw(256, 256, width=options.pop("width", D))
    ids = np.sort(RNG.integers(0, 4, (B, 256)), -1).astype(np.int32)
    ids[0, 100:140] = 7  # out of order: no key before them is theirs

    def attend(q, k, v):
        seg = jnp.asarray(ids) if segments else None
        return ring_attention(q, k, v, None, segment_ids=seg, implementation="pallas", **options)

    with race_detection():
        y, back = jax.vjp(attend, q, k, v)
        got = jax.block_until_ready((y, *back(read)))
    mask = {n: options[n] for n in ("causal", "window") if n in options}
    extra = {"q_seg": ids, "k_seg": ids} if segments else {}
    out, grads = oracle.attention(q, k, v, read, softcap=options.get("softcap"), **mask, **extra)
    for a, b in zip(got, (out, *grads), strict=True):
        near(a, b, 3e-5)


@pytest.mark.parametrize(
    ("mask", "segments"),
    covering.each([Mask(), Mask(causal=True), Mask(window=150), Mask(causal=True, window=200)], [True, False]),
    ids=str,
)
def test_the_table_says_which_blocks_are_computed_masked_and_fetched(mask, segments):
    """Against all pairs; a step whose block is hidden fetches what the step before or a later one needs."""
    order = np.asarray(masks.positions(jnp.arange(1024), 1024, 2), np.int32)
    ids = np.sort(RNG.integers(0, 3, (B, 1024)), -1).astype(np.int32) if segments else None
    seg = None if ids is None else jnp.asarray(ids)
    x = jnp.zeros((B, 1024, 1, 8))
    sight = np.asarray(
        tpu._sight(Softmax(mask, 1.0), Queries(x, order, seg), Keys(x, x, jnp.asarray(order), seg), 128, 256)
    )
    seen = np.broadcast_to(np.asarray(mask.visible(order, order, seg, seg)), (B, 1024, 1024)).reshape(B, 8, 128, 4, 256)
    some, every = seen.any((2, 4)), seen.all((2, 4))
    assert (sight[some] > 0).all()
    assert every[sight == tpu.ALL].all()
    if not segments:  # by the extremes of segment ids alone some blocks are taken for seen
        assert not sight[~some].any()
        assert (sight[every] == tpu.ALL).all()
    for axis in (1, 2):
        table = np.asarray(tpu._table(jnp.asarray(sight), axis)).reshape(sight.shape)
        np.testing.assert_array_equal(table & 3, sight)
        for row in np.moveaxis(table, axis, -1).reshape(-1, sight.shape[axis]):
            fetched, needed = row >> 2, (row & 3) > 0
            np.testing.assert_array_equal(fetched[needed], np.flatnonzero(needed))
            changes = 1 + (np.diff(fetched) != 0).sum()
            assert changes == max(needed.sum(), 1)


def test_parts_of_a_longer_softmax_and_rows_that_see_nothing():
    """As a ring calls it: keys from elsewhere, some positions before all of them, in bfloat16; the same as in chunks."""
    q, k, v, read = (x[:1] for x in draw(128, 256, jnp.bfloat16))
    s = Softmax(Mask(causal=True), 0.1)
    queries = Queries(q, jnp.arange(128, dtype=jnp.int32) + 192, None)
    keys = Keys(k, v, jnp.concatenate([jnp.arange(128) + 512, jnp.arange(128) + 256]).astype(jnp.int32), None)
    want = flash.forward(s, queries, keys)
    lse = jnp.logaddexp(want[1], 1.0)  # other keys were seen elsewhere
    dots = row_dots(read, want[0])
    with race_detection():
        got = jax.block_until_ready(tpu.forward(s, queries, keys))
        grads = jax.block_until_ready(tpu.backward(s, queries, keys, read, lse, dots))
    assert not np.asarray(got[0])[:, :64].any()
    assert (np.asarray(got[1])[:, :64] == -np.inf).all()
    np.testing.assert_allclose(got[0], want[0], atol=2e-2)
    np.testing.assert_allclose(got[1], want[1], atol=2e-3)
    for a, b in zip(grads, flash.backward(s, queries, keys, read, lse, dots), strict=True):
        near(a, b, 2e-2)
    assert not np.asarray(grads[1])[:, :128].any()  # nobody sees those


@pytest.mark.parametrize(
    ("lengths", "width", "dtype", "says"),
    [
        ((100, 128), 128, jnp.float32, "100 queries and 128 keys on a device are no multiples of 128"),
        ((128, 128), 96, jnp.float32, "head_dim is 96 and 96, no multiple of 64"),
        ((128, 128), 128, jnp.float16, "operands are float16"),
        ((512 * 512, 512 * 256), 128, jnp.bfloat16, "131072 blocks of scores are more than 65536"),
    ],
)
def test_what_the_kernels_refuse(lengths, width, dtype, says):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, width), dtype) for n in lengths)
    with pytest.raises(NotImplementedError, match=says):
        jax.eval_shape(lambda q, k: ring_attention(q, k, k, None, implementation="pallas"), q, k)

"""Equal casts of one array are one value."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from flax import linen as nn

import meshpar as mp
from meshpar._src.program.merge_equal_casts import with_merged_casts
from meshpar._src.verify.hlo import collectives

VOCAB, EMBED = 64, 16
WHERE = {"layout": "batch, embed: data", "dims": {"p/table": "vocab embed", "tokens": "batch seq"}}


def logits_of(how, table, tokens):
    if how == "linen":
        model, params = nn.Embed(VOCAB, EMBED, dtype=jnp.bfloat16), {"params": {"embedding": table}}
        return model.apply(params, model.apply(params, tokens), method=model.attend)
    return table.astype(jnp.bfloat16)[tokens] @ table.astype(jnp.bfloat16).T


def arguments():
    rng = np.random.default_rng(0)
    return {"table": weights(rng, VOCAB, EMBED)}, rng.integers(0, VOCAB, (8, 4)).astype(np.int32)


def tied_step(how):
    def loss(p, tokens):
        scores = jax.nn.log_softmax(logits_of(how, p["table"], tokens).astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()

    def step(p, tokens):
        value, gradients = jax.value_and_grad(loss)(p, tokens)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients)

    return step


def casts(closed, into=jnp.bfloat16):
    return sum(e.primitive.name == "convert_element_type" and e.params["new_dtype"] == into for e in closed.jaxpr.eqns)


@pytest.mark.parametrize("how", ["matmul", "linen"])
def test_a_tied_table_that_is_cast_twice_is_gathered_once(how):
    """Its gradient has two terms in bfloat16, added in float32: two reduce-scatters send what one in float32 would."""
    args = arguments()
    step = mp.jit(tied_step(how), mesh="data=8", lowering="shard_map", **WHERE)
    sent = collectives(step.lower(*args).compile().as_text())
    large = VOCAB * EMBED * 2 * 7 / 8
    assert Counter(c.op for c in step.plan(*args).collectives if c.bytes >= large) == {
        "all-gather": 1,
        "reduce-scatter": 2,
    }
    assert Counter(c.op for c in sent if c.bytes >= large)["all-gather"] == 1
    expected = jax.jit(tied_step(how))(*args)
    got = step(*args)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-2)
    np.testing.assert_allclose(got[1]["table"], expected[1]["table"], rtol=2e-2, atol=2e-3)


def test_each_body_merges_its_own_casts():
    def fn(x, ws):
        def layer(x, w):
            return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) + (
                x.astype(jnp.bfloat16) * w.astype(jnp.bfloat16)
            ), 0

        first = jax.jit(lambda x: x.astype(jnp.bfloat16) * x.astype(jnp.bfloat16))(x)
        return first, jax.lax.scan(lambda c, w: (layer(c, w)[0].astype(c.dtype), 0), x, ws)[0], x.astype(jnp.bfloat16)

    x = jnp.arange(16.0).reshape(4, 4) / 7
    before = jax.make_jaxpr(fn)(x, jnp.stack([x, x + 1]))
    after = with_merged_casts(before)

    def of_body(closed, name):
        eqn = next(e for e in closed.jaxpr.eqns if e.primitive.name.startswith(name))
        return casts(eqn.params["jaxpr"])

    assert [of_body(before, "jit"), of_body(before, "scan")] == [2, 4]
    assert [of_body(after, "jit"), of_body(after, "scan")] == [1, 2]
    run = jax.extend.core.jaxpr_as_fun
    for a, b in zip(run(before)(x, jnp.stack([x, x + 1])), run(after)(x, jnp.stack([x, x + 1])), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_dtypes_and_other_arrays_stay():
    closed = jax.make_jaxpr(lambda x, y: (x.astype(jnp.bfloat16), x.astype(jnp.float16), y.astype(jnp.bfloat16)))(
        jnp.ones(3), jnp.ones(3)
    )
    assert with_merged_casts(closed) is closed

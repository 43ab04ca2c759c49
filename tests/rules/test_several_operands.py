"""Ops with several operands or results, whose operands are sharded differently: results are correct, and factors separate."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry2x32_p
from same_results import assert_as_unsharded

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
W = RNG.integers(0, 2**31, (8, 8)).astype(np.uint32)
KEY = jax.random.key(0)
DIMS = {"x": "a _", "y": "_ b", "w": "_ c"}
LAYOUT = "a: data; b: data; c: model"


def positive(x, y):
    return x @ x.T + y @ y.T + 8 * jnp.eye(8)


def pair_scan(p, q):
    return p[0] + q[0], jnp.maximum(p[1], q[1])


CASES = {
    "sort": lambda x, y, w: lax.sort((x, y, w), dimension=1, num_keys=2),
    "sort the other dim": lambda x, y, w: lax.sort((x, y, w), dimension=0),
    "reduce": lambda x, y, w: lax.reduce((x, y), (np.float32(0), np.float32(-9)), pair_scan, (0,)),
    "reduce the other dim": lambda x, y, w: lax.reduce((x, y), (np.float32(0), np.float32(-9)), pair_scan, (1,)),
    "reduce_window": lambda x, y, w: lax.reduce_window(
        (x, y), (np.float32(0), np.float32(-9)), pair_scan, (2, 1), (2, 1), "VALID"
    ),
    "optimization_barrier": lambda x, y, w: lax.optimization_barrier((x.sum(0), y.max(1), w)),
    "device_put": lambda x, y, w: jax.device_put((x, y, w), jax.memory.Space.Device),
    "threefry2x32": lambda x, y, w: threefry2x32_p.bind(w, w.T, w + 1, w.T + 1),
    "select_n": lambda x, y, w: lax.select_n((w % 3).astype(np.int32), x, y, x + y),
    "clamp": lambda x, y, w: lax.clamp(jnp.minimum(x, y), x * 2, jnp.maximum(x, y)),
    "concatenate": lambda x, y, w: (jnp.concatenate([x, y, x]), jnp.concatenate([x, y], 1)),
    "stack": lambda x, y, w: jnp.stack([x, y], 1),
    "split": lambda x, y, w: (*jnp.split(x, 4), *jnp.split(y, 2, 1), *jnp.split(x + y, 2)),
    "top_k": lambda x, y, w: (*lax.top_k(x, 3), *lax.top_k(y, 3)),
    "dynamic_update_slice": lambda x, y, w: lax.dynamic_update_slice(x, y[:, 2:5], (0, 3)),
    "scatter": lambda x, y, w: x.at[(w[0] % 8).astype(np.int32)].add(y),
    "gather": lambda x, y, w: jnp.take_along_axis(x + y, (w % 8).astype(np.int32), 0),
    "dot_general": lambda x, y, w: (x @ y, y @ x, x.T @ y, x @ y.T),
    "triangular_solve": lambda x, y, w: lax.linalg.triangular_solve(positive(x, y), y, left_side=True, lower=True),
    "lu": lambda x, y, w: lax.linalg.lu(positive(x, y)),
    "qr": lambda x, y, w: lax.linalg.qr(positive(x, y)),
    "custom_linear_solve": lambda x, y, w: lax.custom_linear_solve(
        lambda v: positive(x, y) @ v, y, lambda _, b: jnp.linalg.solve(positive(x, y), b), symmetric=True
    ),
    "random_bits": lambda x, y, w: jax.random.uniform(KEY, (8, 8)) + x + y,
    "associative_scan": lambda x, y, w: lax.associative_scan(pair_scan, (x, y), axis=0),
    "cond": lambda x, y, w: lax.cond(x[0, 0] > 0, lambda p, q: (p, q), lambda p, q: (q, p), x, y),
    "scan": lambda x, y, w: lax.scan(lambda c, z: ((c[0] + z[0], c[1] * z[1]), (c[1], z[0])), (x[0], y[0]), (x, y)),
    "while": lambda x, y, w: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2] * 0.5, c[1] + 1), (0, x, y)),
    "psum": lambda x, y, w: jax.vmap(lambda x, y: lax.psum((x, y), "i"), (0, 1), None, axis_name="i")(x, y),
    "pmax": lambda x, y, w: jax.vmap(lambda x, y: lax.pmax((x, y), "i"), (1, 0), None, axis_name="i")(x, y),
}


@pytest.mark.filterwarnings("ignore::meshpar.errors.JoinWarning")
@pytest.mark.parametrize(
    ("name", "layout"), covering.each(CASES, [LAYOUT, "b, c: data; a: model", "a: data+model; b: model+data"])
)
def test_operands_that_are_sharded_differently(name, layout):
    """One program per case, since a join of names in another case would restrict the sharding. One mesh axis is idle."""
    options = {"mesh": "data=2, model=2, idle=2", "layout": layout, "dims": DIMS}
    assert_as_unsharded(CASES[name], X, Y, W, lowerings=["shard_map"], **options)

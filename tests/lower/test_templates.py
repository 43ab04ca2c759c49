"""Steps that add equal equations are traced once, and steps that only look alike are not."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from same_results import assert_close

import meshpar as mp
from meshpar._src.lower import reduction_dim_order as transposed_sums
from meshpar._src.lower import shard_map

LAYER = {"norm": (16,), "up": (16, 32), "down": (32, 16)}
DIMS = {"params/*/norm": "embed", "params/*/up": "embed mlp", "params/*/down": "mlp embed", "x": "batch embed"}
COUNTED = {
    shard_map: ["run_local", "follow"],
    transposed_sums: ["combined"],
}


def step(params, x):
    def loss(params):
        y = x
        for p in params:
            y = y + jnp.tanh(y * p["norm"] @ p["up"]) @ p["down"]
        return (y**2).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def work(layers, monkeypatch):
    """(calls of each function in ``COUNTED``, number of different rules, number of ops)."""
    calls = Counter()

    def counted(fn):
        @functools.wraps(fn)
        def count(*args, **kwargs):
            calls[fn.__name__] += 1
            return fn(*args, **kwargs)

        return count

    params = [{k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in LAYER.items()} for _ in range(layers)]
    jitted = mp.jit(counted(step), mesh="data=4, model=2", layout="batch: data; mlp: model; embed: data", dims=DIMS)
    with monkeypatch.context() as monkeypatch:
        for module, names in COUNTED.items():
            for name in names:
                monkeypatch.setattr(module, name, counted(getattr(module, name)))
        jitted.lower(params, jax.ShapeDtypeStruct((8, 16), jnp.float32))
        plan = jitted.plan(params, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    ops = list(plan.program.root.walk())
    return calls, len({op.rule for op in ops}), len(ops)


def test_equal_layers_add_no_work_but_that_of_their_steps(monkeypatch):
    few, few_rules, few_ops = work(8, monkeypatch)
    many, many_rules, many_ops = work(16, monkeypatch)
    assert many_ops > 1.8 * few_ops
    assert many == few
    assert many_rules == few_rules
    assert many["step"] == 1
    assert all(many[name] for name in ("run_local", "follow", "combined"))


def test_equal_ops_on_other_operands_have_their_own_results():
    def scatters(table, rows, updates):
        zeros = jnp.zeros_like(table)
        numbers = [lax.convert_element_type(k, jnp.float32) for k in (0, 1)]
        added = [x.at[rows].add(updates) for x in (zeros, table, zeros, table)]
        return (
            added,
            [jnp.broadcast_to(x, (8, 4)) * updates for x in numbers],
            [updates * updates, updates * (updates + 1)],
        )

    rng = np.random.default_rng(0)
    args = rng.normal(size=(5, 4)).astype("f"), np.arange(8, dtype="i") % 5, rng.normal(size=(8, 4)).astype("f")
    dims = {"rows": "batch", "updates": "batch embed"}
    found = mp.jit(scatters, mesh=mp.mesh("data=4, model=2"), layout="batch: data", dims=dims)(*args)
    assert_close(found, scatters(*map(jnp.asarray, args)), rtol=1e-5, atol=1e-6)

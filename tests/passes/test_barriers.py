"""What a compiler must not choose: what waits for what in the lowered program, and did not in the program as it was written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import weights
from dependencies import bodies, needs, waits
from jax import lax
from lowered import lowered, same

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.passes.barriers import separate_matmuls
from meshpar._src.plan.steps import Barrier

RNG = np.random.default_rng(0)
normal = functools.partial(weights, RNG)
DATA = "data=8"


def steps_of(plan, kind):
    return [step for step in plan.body.all_steps if isinstance(step, kind)]


# -- loops


def two_loops(w, v, x, y):
    """Two that have nothing to do with one another."""
    first = lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=2)
    second = lax.scan(lambda c, _: (jnp.sin(c @ v), c.mean()), y, None, length=3)
    return first, second


LOOPS = {"layout": "batch: data", "dims": {"x": "batch _", "y": "batch _"}, "mesh": DATA}


def test_a_loop_waits_for_the_one_before_it():
    args = normal(8, 8), normal(8, 8), normal(16, 8), normal(16, 8)
    written = jax.make_jaxpr(two_loops)(*args).jaxpr
    _, made = lowered(two_loops, *args, **LOOPS)
    assert waits(written, "scan", "scan") == [0, 0]
    assert waits(made, "scan", "scan") == [0, 1]
    same(two_loops, *args, layout=LOOPS["layout"], dims=LOOPS["dims"], meshes=[DATA])


# -- products


def gated(w, x):
    def loss(w):
        return jnp.square((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]).sum()

    return jax.grad(loss)(w)


def gated_args(tokens, mlp):
    return {"gate": normal(16, mlp), "up": normal(16, mlp), "down": normal(mlp, 16)}, normal(tokens, 16)


def unchanged(fn, args, how, change, chip):
    """What a pass makes of a plan for a chip, after it gave the numbers of the program as it was written."""
    mesh = mp.mesh("data=2")
    plan = dataclasses.replace(mp.plan(fn, *args, mesh=mesh, **how), chip=chip)
    plan = dataclasses.replace(plan, body=change(plan))
    found = jax.jit(lower_to_shard_map(plan, mesh)[0])(*jax.tree.leaves(args))
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max())
    return plan


def normed(w, x):
    """The gradient through a norm."""

    def loss(x):
        return jnp.square(x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) @ w).sum()

    return jax.grad(loss)(x)


@pytest.mark.parametrize("fn", [gated, normed])
def test_what_stands_apart_is_the_same(fn):
    chip = CHIPS["v5p"]
    limits = {"epilogue_max_matmuls": 0, "epilogue_operand_bytes": 0, "large_buffer_bytes": 0}
    everything = dataclasses.replace(chip.compiler, **limits)
    args = (normal(16, 64), normal(64, 16)) if fn is normed else gated_args(64, 32)
    how = {"layout": "batch: data", "dims": {"x": "batch _"}}
    assert steps_of(unchanged(fn, args, how, separate_matmuls, dataclasses.replace(chip, compiler=everything)), Barrier)


# -- slices that a loop rounds


def rounding(w, x):
    def layer(y, w):
        return jnp.tanh(y @ w.astype(jnp.bfloat16)).astype(y.dtype), None

    return lax.scan(layer, x, w)[0]


def rounded_from(jaxpr):
    """In a loop's body, through which kinds of equations each cast to bfloat16 of what it is given goes."""
    return [
        {e.primitive.name for e in needs(body, eqn)}
        for body in bodies(jaxpr)
        for eqn in body.eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] == jnp.bfloat16
        and eqn.invars[0].aval.shape == (8, 8)
    ]


def test_slices_that_a_loop_rounds_are_apart():
    """Behind a barrier through integers: casts and copies pass one of floats."""
    args = normal(3, 8, 8), normal(8, 8)
    assert rounded_from(jax.make_jaxpr(rounding)(*args).jaxpr) == [set()]
    _, made = lowered(rounding, *args, layout="batch: data", dims={"x": "batch _"}, mesh=DATA)
    assert rounded_from(made) == [{"bitcast_convert_type", "optimization_barrier"}]
    run = mp.jit(rounding, mesh=mp.mesh(DATA), layout="batch: data", dims={"x": "batch _"}, lowering="shard_map")
    np.testing.assert_allclose(run(*args), jax.jit(rounding)(*args), rtol=2e-2, atol=2e-3)  # sums in bfloat16

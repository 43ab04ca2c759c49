"""What a compiler must not choose: what waits for what in the lowered program, and did not in the program as it was written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import f32, weights
from dependencies import bodies, needs, waits
from jax import lax
from lowered import lowered, same

import meshpar as mp
from meshpar._src.hardware.chips import CHIPS
from meshpar._src.lower.shard_map import lower_to_shard_map
from meshpar._src.passes.barriers import separate_matmuls
from meshpar._src.plan.planner import planned
from meshpar._src.plan.request import PlanRequest
from meshpar._src.plan.steps import Barrier, Loop, Reduce, Run

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


def test_of_what_came_before_a_loop_waits_for_the_smallest():
    """What it waits for cannot be given up until it runs."""
    args = f32(8, 8), f32(8, 8), f32(16, 8), f32(16, 8)
    plan, _ = lowered(two_loops, *args, **LOOPS)
    first, second = steps_of(plan, Loop)
    (barrier,) = steps_of(plan, Barrier)
    assert set(barrier.results) == {*second.inits, *second.stacks}
    (waited,) = barrier.after
    assert waited in first.results
    assert waited.value.shape == (2,)  # the stacked sums, not the last carry


def sum_then_loop(w, x, y):
    g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)
    return w - 0.1 * g, lax.scan(lambda c, _: (jnp.tanh(c), None), y, None, length=2)[0]


SUM = {
    "layout": "batch: data; embed: data",
    "dims": {"w": "embed mlp", "x": "batch embed", "y": "batch _"},
    "mesh": DATA,
}


@pytest.mark.parametrize(("width", "waited"), [(4096, 1), (2048, 0)])
def test_a_loop_waits_for_what_was_large_before_it(width, waited):
    """A gradient of 64 MiB on a device, reduce-scattered; one of 16 MiB it does not wait for."""
    _, made = lowered(sum_then_loop, f32(width, width), f32(16, width), f32(16, 8), **SUM)
    assert waits(made, "scan", "reduce_scatter") == [waited]


@pytest.mark.parametrize(("width", "cut"), [(2048, True), (1024, False)])
def test_a_large_scattered_sum_is_cut_where_it_is_made(width, cut):
    """XLA may send it whole (an all-reduce), and would then keep the whole where only its part is saved: from 16 MiB on."""

    def fn(x, w):
        return jnp.tanh(x @ w)

    dims = {"x": "batch inner", "w": "inner embed"}
    plan, made = lowered(fn, f32(width, 16), f32(16, width), layout="inner: data; embed: data", dims=dims, mesh=DATA)
    (body,) = [b for b in bodies(made) if any(e.primitive.name == "reduce_scatter" for e in b.eqns)]
    (tanh,) = [e for e in body.eqns if e.primitive.name == "tanh"]
    before = [e.primitive.name for e in needs(body, tanh)]
    assert ("optimization_barrier" in before) == cut
    (reduce,) = steps_of(plan, Reduce)
    assert [b.sources for b in steps_of(plan, Barrier)] == [(reduce.result,)] * cut


def test_an_all_reduce_is_not_cut():
    """It has no slice that could be moved, however large it is."""

    def fn(x, w):
        return jnp.tanh(x @ w)

    dims = {"x": "batch inner", "w": "inner embed"}
    plan, _ = lowered(fn, f32(4096, 16), f32(16, 4096), layout="inner: data", dims=dims, mesh=DATA)
    assert len(steps_of(plan, Reduce)) == 1
    assert not steps_of(plan, Barrier)


# -- results in place of donated arguments


def zero_1(state, x):
    grads = jax.grad(lambda p: jnp.square(jnp.tanh(x @ p["in"]) @ p["out"]).mean())(state["params"])
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"]["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], mu)
    return {"params": params, "opt": {"mu": mu}}


def zero_1_args(width, array):
    params = {"in": array(width, width), "out": array(width, width)}
    return {"params": params, "opt": {"mu": {k: array(width, width) for k in params}}}, array(8, width)


ZERO_1 = {
    "layout": "batch: data; opt.embed: data",
    "dims": {"state/*/in": "embed mlp", "state/*/out": "mlp embed", "x": "batch embed"},
    "mesh": DATA,
}


@pytest.mark.parametrize(("width", "donate", "waited"), [(2048, 0, [0, 1]), (2048, (), [0, 0]), (1024, 0, [0, 0])])
def test_results_in_place_of_arguments_are_gathered_one_after_the_other(width, donate, waited):
    """Where they are of 16 MiB, and their arguments are donated."""
    _, made = lowered(zero_1, *zero_1_args(width, f32), **ZERO_1, donate_argnums=donate)
    assert waits(made, "all_gather", "all_gather") == waited


def test_what_is_gathered_in_place_is_what_was_gathered():
    """One of the two along its first dim, one along its last: both lie in other memory first."""
    args = zero_1_args(2048, normal)
    run = mp.jit(
        zero_1, mesh=mp.mesh(DATA), layout=ZERO_1["layout"], dims=ZERO_1["dims"], lowering="shard_map", donate_argnums=0
    )
    expected = jax.jit(zero_1)(*args)
    found = run(*jax.tree.map(jnp.array, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


# -- products


def gated(w, x):
    def loss(w):
        return jnp.square((jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]).sum()

    return jax.grad(loss)(w)


def gated_args(array, tokens, mlp):
    return {"gate": array(16, mlp), "up": array(16, mlp), "down": array(mlp, 16)}, array(tokens, 16)


GATED = {"layout": "batch: data", "dims": {"x": "batch _"}}


@pytest.mark.parametrize(("topology", "mlp", "apart"), [("v5e:2x4", 8192, 5), ("v5e:2x4", 4096, 0), (None, 8192, 0)])
def test_a_product_of_which_several_operands_are_made_is_apart(topology, mlp, apart):
    """Gate, up and the cotangent of the activation, 16 MiB on a device, from the cotangents of gate and up."""
    plan = mp.plan(gated, *gated_args(f32, 8 * 512, mlp), mesh=DATA, topology=topology, **GATED)
    found = [s for b in steps_of(plan, Barrier) for s in b.sources]
    assert [s.value.shape for s in found] == [(8 * 512, mlp)] * apart
    makers = {s: step for step in steps_of(plan, Run) for s in step.results}
    assert [makers[s].op.name for s in found].count("dot_general") == 3 * (apart > 0)
    products = [step for step in steps_of(plan, Run) if step.op.name == "dot_general"]
    across = {s for b in steps_of(plan, Barrier) for s in b.results}
    assert sum(s in across for step in products for s in step.reads) == 2 * (apart > 0)


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


@pytest.mark.parametrize(
    ("topology", "embed", "mlp", "apart"),
    [
        ("v5p:2x2x2", 2048, 8192, 1),
        ("v5p:2x2x2", 2048, 4096, 0),
        ("v5e:2x4", 2048, 8192, 0),
        ("v4:2x2x2", 2048, 8192, 0),
    ],
)
def test_a_product_that_reads_tiles_is_apart_from_the_sums_of_a_norm(topology, embed, mlp, apart):
    """A device has 2048 rows; 32 MiB of an operand stay in v5p's memory, 64 in v5e's."""
    args = f32(embed, mlp), f32(8 * 2048, embed)
    plan = mp.plan(normed, *args, mesh=DATA, topology=topology, layout="batch: data", dims={"x": "batch _"})
    found = [s for b in steps_of(plan, Barrier) for s in b.sources]
    assert [s.value.shape for s in found] == [(8 * 2048, embed)] * apart
    products = [s for step in steps_of(plan, Run) if step.op.name == "dot_general" for s in step.results]
    assert set(found) <= set(products)


def test_a_product_that_reads_tiles_stays_with_the_sums_of_it_alone():
    def largest(w, x):
        logits = x @ w
        top = logits.max(-1, keepdims=True)
        return top, jnp.exp(logits - top).sum(-1)

    args = f32(2048, 8192), f32(8 * 8192, 2048)
    plan = mp.plan(largest, *args, mesh=DATA, topology="v5p:2x2x2", layout="batch: data", dims={"x": "batch _"})
    assert not steps_of(plan, Barrier)


@pytest.mark.parametrize("fn", [gated, normed])
def test_what_stands_apart_is_the_same(fn):
    chip = CHIPS["v5p"]
    everything = dataclasses.replace(
        chip.compiler, epilogue_max_matmuls=0, epilogue_operand_bytes=0, large_buffer_bytes=0
    )
    args = (normal(16, 64), normal(64, 16)) if fn is normed else gated_args(normal, 64, 32)
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
        for body in bodies(jaxpr) for eqn in body.eqns
        if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16
        and eqn.invars[0].aval.shape == (8, 8)
    ]  # fmt: skip


def test_slices_that_a_loop_rounds_are_apart():
    """Behind a barrier through integers: casts and copies pass one of floats."""
    args = normal(3, 8, 8), normal(8, 8)
    assert rounded_from(jax.make_jaxpr(rounding)(*args).jaxpr) == [set()]
    _, made = lowered(rounding, *args, layout="batch: data", dims={"x": "batch _"}, mesh=DATA)
    assert rounded_from(made) == [{"bitcast_convert_type", "optimization_barrier"}]


def test_slices_that_a_loop_takes_as_they_are_are_not():
    def fn(w, x):
        return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0]

    _, made = lowered(fn, f32(3, 8, 8), f32(8, 8), layout="batch: data", dims={"x": "batch _"}, mesh=DATA)
    assert "optimization_barrier" not in str(made)


def test_slices_apart_are_the_slices():
    args = normal(3, 8, 8), normal(8, 8)
    run = mp.jit(rounding, mesh=mp.mesh(DATA), layout="batch: data", dims={"x": "batch _"}, lowering="shard_map")
    np.testing.assert_allclose(run(*args), jax.jit(rounding)(*args), rtol=2e-2, atol=2e-3)  # sums in bfloat16


def test_barriers_send_nothing():
    """What is sent is what the plan had before any pass."""
    mesh, layout = mp.mesh(DATA), mp.Layout(ZERO_1["layout"])
    plan, _ = lowered(zero_1, *zero_1_args(2048, f32), **ZERO_1, donate_argnums=0)
    before = planned(plan.program, PlanRequest(layout, mesh, donated=plan.donated))
    assert steps_of(plan, Barrier)
    assert not steps_of(before, Barrier)
    assert [c.to_dict() for c in plan.collectives] == [c.to_dict() for c in before.collectives]

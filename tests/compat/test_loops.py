"""Parts of loops, and the operands that bodies take: equal to what the user passed where the loop was written."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar._src.compat.loops import loop_parts, operands_of_bodies


def loops(a, b, c, xs):
    """A scan, which reads b, carries from a and slices xs; and a while loop, whose condition reads c, and whose body a and b."""
    last, ys = lax.scan(lambda s, x: (s * b + x, s + x), a, xs)
    return lax.while_loop(lambda s: s < c, lambda s: s * b + a, last), ys


def test_the_operands_of_loops_are_constants_carries_and_stacks():
    jaxpr = jax.make_jaxpr(loops)(1.0, 2.0, 3.0, jnp.ones(4)).jaxpr
    a, b, c, xs = jaxpr.invars
    scan, loop = (next(e for e in jaxpr.eqns if e.primitive.name == name) for name in ("scan", "while"))
    assert loop_parts(scan).split(scan.invars) == ([b], [a], [xs])
    carried, stacked = loop_parts(scan).split_results(scan.outvars)
    assert [v.aval.shape for v in (*carried, *stacked)] == [(), (4,)]
    assert operands_of_bodies(scan, scan.invars) == [[b, a, xs]]
    consts, carries, stacks = loop_parts(loop).split(loop.invars)
    assert (set(consts), carries, stacks) == ({a, b}, carried, [])
    assert operands_of_bodies(loop, loop.invars) == [[c, *carries], [*consts, *carries]]
    for body in (loop.params["cond_jaxpr"].jaxpr, loop.params["body_jaxpr"].jaxpr):
        assert loop_parts(loop).carried(body.invars) == list(body.invars[-1:])


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_the_body_of_a_call_takes_its_operands(call):
    jaxpr = jax.make_jaxpr(lambda x, y: call(lambda x, y: x * y)(x, y))(1.0, 2.0).jaxpr
    (eqn,) = jaxpr.eqns
    assert operands_of_bodies(eqn, eqn.invars) == [jaxpr.invars]


def test_the_branches_of_a_conditional_take_all_operands_but_the_index():
    jaxpr = jax.make_jaxpr(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x))(True, 1.0).jaxpr
    eqn = next(e for e in jaxpr.eqns if e.primitive.name == "cond")
    assert operands_of_bodies(eqn, eqn.invars) == [[jaxpr.invars[1]]] * 2

"""Equations that are traced once and added again: the jaxpr is the one that JAX traces without templates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from meshpar._src.compat.equation_templates import Templates
from meshpar._src.compat.jax import at_source, source_of

X = jnp.ones((4, 8))
TABLE = np.arange(32, dtype=np.float32).reshape(4, 8)
SOURCE = source_of(jax.make_jaxpr(jnp.sin)(X).eqns[0])


def step(x, y):
    """Equations with a literal, a constant and two results."""
    return [lax.sin(x) * 2 + y, lax.dot_general(x * TABLE, y, (((0,), (0,)), ((), ())))]


def traced(*pairs, templates=None):
    """(jaxpr of ``step`` on pairs of two arguments, by index; the number of times that it ran)."""
    runs = []

    def program(*xs):
        outs = []
        for pair in pairs:
            operands = [xs[k] for k in pair]

            def run(operands=operands):
                runs.append(1)
                with at_source(SOURCE):
                    return step(*operands)

            key = None if templates is None else templates.key("step", operands)
            outs += run() if templates is None else templates.run(key, operands, run, [SOURCE])
        return outs

    return jax.make_jaxpr(program)(X, X, X), len(runs)


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        (((0, 1), (1, 2), (2, 0)), 1),
        (((0, 0), (1, 1), (0, 1), (1, 2)), 2),  # an operand that is read twice is another program
    ],
)
def test_repeated_equations_are_those_that_jax_traces(pairs, runs):
    (expected, _), (found, ran) = traced(*pairs), traced(*pairs, templates=Templates())
    assert ran == runs
    assert str(found) == str(expected)
    assert {str(eqn.source_info.name_stack) for eqn in found.eqns} == {str(SOURCE.name_stack)}
    xs = [jnp.full((4, 8), k + 0.5) for k in range(3)]
    for a, b in zip(*(jaxpr_as_fun(closed)(*xs) for closed in (found, expected)), strict=True):
        assert (a == b).all()


def test_a_function_that_reads_another_array_runs_each_time():
    templates, runs = Templates(), []

    def program(x, y, hidden):
        def add(x, y):
            runs.append(1)
            return [x + hidden]

        return [
            templates.run(templates.key("step", pair), pair, functools.partial(add, *pair), [SOURCE])
            for pair in ([x, y], [y, x])
        ]

    jax.make_jaxpr(program)(X, X, X)
    assert len(runs) == 2

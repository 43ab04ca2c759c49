"""Decisions about single ops, against answers derived by hand from the layout's rules and the bytes that each choice sends."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from arrays import f32
from jax import lax

import meshpar as mp
from meshpar._src.plan.assignment import AxisAssignment
from meshpar._src.plan.decide import Facts, Operand, ShardType, decide
from meshpar._src.plan.deferred_sums import readers_of

SIZES = {"data": 4, "model": 2}


D, M = ("data",), ("model",)


class Case:
    """An op of a traced function under a layout; :meth:`decide` decides about it with operands as they are stored."""

    def __init__(self, fn, *shapes, dims, layout, op, sizes=SIZES):
        mesh = ", ".join(f"{a}={n}" for a, n in sizes.items())
        program = mp.plan(fn, *shapes, dims=dims, layout="", mesh=mp.mesh(mesh)).program
        assignment = AxisAssignment(program, mp.Layout(layout), sizes)
        self.facts = Facts(assignment, readers_of(program), {}, set())
        (self.op,) = (o for o in program.root.walk() if o.name == op)
        self.operands = [None if v is None else Operand(v, assignment.value_spec(v)) for v in self.op.ins]

    def changed(self, i, **attributes):
        """The operands, with other attributes of one of them."""
        return [replace(x, **attributes) if k == i else x for k, x in enumerate(self.operands)]

    def decide(self, operands=None, **facts):
        return decide(self.op, self.operands if operands is None else operands, replace(self.facts, **facts))


def addition():
    dims = {"x": "rows cols", "y": "rows cols"}
    return Case(lambda x, y: x + y, f32(16, 8), f32(16, 8), dims=dims, layout="rows: data", op="add")


def test_the_sum_of_two_partial_values_is_partial_and_that_of_one_is_not():
    case = addition()
    both = [replace(x, partial=M) for x in case.operands]
    assert case.decide(both).results == (ShardType((D, ()), M),)
    assert case.decide(both).reduce == ()
    for i in range(2):
        assert case.decide(case.changed(i, partial=M)).reduce == (i,)
    apart = [both[0], replace(both[1], partial=D, spec=((), ()))]
    assert case.decide(apart).reduce == (0, 1)


def test_no_operand_is_resharded_for_a_partial_one():
    def fn(mask, x):
        return lax.select(mask, x, jnp.zeros_like(x))

    mask = jax.ShapeDtypeStruct((16, 8), jnp.bool_)
    dims = {"mask": "rows cols", "x": "rows cols"}
    case = Case(fn, mask, f32(16, 8), dims=dims, layout="rows: data", op="select_n")
    partial = [replace(v, partial=M) if v is not None and v.value.path == "x" else v for v in case.operands]
    assert case.decide(partial).results == (ShardType((D, ()), M),)
    moved = [replace(v, spec=((), D)) if v is not None and v.value.path == "mask" else v for v in partial]
    assert case.decide(moved).results == (ShardType((D, ())),)
    assert case.decide(moved).reduce == (2,)


@pytest.mark.parametrize("resolve", ["order", "cost"])
def test_a_conflict_is_resolved_by_the_order_of_rules_or_by_bytes_sent(resolve):
    """y[512, 256] = x[512, 8] @ w[8, 256] with both dims of x on four devices: partial sums of y, or x and w resharded by rows."""
    layout = mp.Layout("in: data; batch: data", resolve=resolve)
    dims = {"x": "batch in", "w": "in out"}
    plan = mp.plan(lambda x, w: x @ w, f32(512, 8), f32(8, 256), mesh="data=4", layout=layout, dims=dims, overlap="off")
    sent = [(c.op, c.bytes) for c in plan.collectives]
    if resolve == "order":
        assert sent == [("reduce-scatter", 3 / 4 * 512 * 256 * 4)]
    else:
        assert sent == [("all-to-all", 3 / 4 * 512 * 8 * 4 / 4), ("all-gather", 3 / 4 * 8 * 256 * 4)]


def test_by_cost_a_conflict_over_one_axis_leaves_the_others_to_their_dims():
    """x[batch, heads] @ w[heads, embed], where `batch` and `embed` compete for data only. That gathering x over model would send
    less than summing up the result is no reason: all devices along model would do the same."""
    rules = [("batch", "data"), ("heads", "model"), ("embed", "data")]
    text = "; ".join(": ".join(rule) for rule in rules)
    args, dims = (f32(512, 8), f32(8, 256)), {"x": "batch heads", "w": "heads embed"}
    plans = [
        mp.plan(lambda x, w: x @ w, *args, mesh="data=4, model=2", layout=layout, dims=dims) for layout in (rules, text)
    ]
    sent, by_order = ([(c.op, c.axes, c.bytes) for c in plan.collectives] for plan in plans)
    assert sent == by_order
    assert ("all-reduce", ("model",), 2 * 512 / 4 * 256 * 4 / 2) in sent

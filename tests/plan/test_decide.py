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
from meshpar._src.plan.partial import readers_of
from meshpar.errors import UnknownAxisError

SIZES = {"data": 4, "model": 2}


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


D, M = ("data",), ("model",)


class Case:
    """An op of a traced function under a layout; :meth:`decide` decides about it with operands as they are stored."""

    def __init__(self, fn, *shapes, dims, layout, op, sizes=SIZES):
        mesh = ", ".join(f"{a}={n}" for a, n in sizes.items())
        program = mp.plan(fn, *shapes, dims=dims, layout="", mesh=mp.mesh(mesh)).program
        assignment = AxisAssignment(program, mp.Layout(layout), sizes)
        self.facts = Facts(assignment, readers_of(program), {})
        (self.op,) = (o for o in program.root.walk() if o.name == op)
        self.operands = [None if v is None else Operand(v, assignment.value_spec(v)) for v in self.op.ins]

    def changed(self, i, **attributes):
        """The operands, with other attributes of one of them."""
        return [replace(x, **attributes) if k == i else x for k, x in enumerate(self.operands)]

    def decide(self, operands=None, **facts):
        return decide(self.op, self.operands if operands is None else operands, replace(self.facts, **facts))


def matmul(layout):
    dims = {"x": "rows inner", "w": "inner outer"}
    return Case(lambda x, w: x @ w, f32(16, 8), f32(8, 32), dims=dims, layout=layout, op="dot_general")


def test_a_matmul_is_applied_to_a_partial_operand_if_its_result_is_smaller():
    def decided(outer):
        dims = {"x": "rows inner", "w": "inner outer"}
        case = Case(lambda x, w: x @ w, f32(16, 64), f32(64, outer), dims=dims, layout="rows: data", op="dot_general")
        return case.decide(case.changed(0, partial=M))

    small, large = decided(8), decided(128)  # the operand has 64 columns
    assert (small.reduce, small.inherits, small.results) == ((), (0,), (ShardType((D, ()), M),))
    assert (large.reduce, large.inherits, large.results) == ((0,), (None,), (ShardType((D, ())),))


def test_a_sort_along_a_split_dim_splits_another_dim_that_divides():
    # of V bytes, an all-gather sends 3/4 V; an all-to-all of the operand and one of the result 2 · V/4 · 3/4
    def case(rows):
        dims = {"x": "rows cols"}
        return Case(lambda x: lax.sort(x, dimension=1), f32(rows, 32), dims=dims, layout="cols: data", op="sort")

    found = case(16).decide()
    assert found.operands == ((D, ()),)
    assert found.results == (ShardType((D, ())),)
    assert found.stored == (((), D),)
    assert case(6).decide().operands == (((), ()),)


def test_a_reshape_keeps_the_split_of_the_major_dim_and_gathers_the_minor_one():
    layout, dims = "rows: data; cols: model", {"x": "rows cols"}
    case = Case(lambda x: x.reshape(48), f32(8, 6), dims=dims, layout=layout, op="reshape")
    assert case.operands[0].spec == (D, M)
    found = case.decide()
    assert found.operands == ((D, ()),)
    assert found.results == (ShardType((D,)),)


def read(layout, indices, dims):
    dims = {"table": "vocab embed", "i": dims}
    return Case(lambda table, i: table[i], f32(64, 32), indices, dims=dims, layout=layout, op="gather")


def test_an_indexed_read_leaves_the_table_split_and_its_result_is_partial():
    case = read("vocab: data; embed: model", i32(8, 1), "_ _")
    found = case.decide()
    assert found.operands[0] == (D, M)
    (result,) = found.results
    assert (result.partial, result.kind) == (D, "indexed")
    assert result.spec[-1] == M


def test_an_indexed_read_keeps_the_table_split_even_if_the_indices_have_the_axis_by_the_layout():
    # gathering the table sends 64 · 32 · 4 · 3/4 bytes, reducing the 8 · 32 elements that are read far fewer
    case = read("n: data; vocab: data", i32(8), "n")
    found = case.decide(case.changed(1, spec=((), ())))
    assert found.operands[0] == (D, ())
    assert found.results[0].partial == D


def test_a_shard_map_of_the_program_needs_its_axis_in_the_mesh():
    def fn(x):
        return jax.shard_map(
            lambda x: lax.psum(x, "data"), mesh=mp.mesh("data=4, model=2"), in_specs=jax.P("data"), out_specs=jax.P()
        )(x)

    case = Case(fn, f32(16), dims={}, layout="", op="shard_map")
    assert case.decide().axes is not None
    with pytest.raises(UnknownAxisError):
        case.decide(assignment=AxisAssignment(case.facts.program, mp.Layout(""), {"model": 2}))


def unary(fn, op):
    return Case(fn, f32(16, 8), dims={"x": "rows cols"}, layout="rows: data", op=op)


def addition():
    dims = {"x": "rows cols", "y": "rows cols"}
    return Case(lambda x, y: x + y, f32(16, 8), f32(16, 8), dims=dims, layout="rows: data", op="add")


@pytest.mark.parametrize(
    ("fn", "op", "passes"),
    [
        (lambda x: -x, "neg", True),
        (lambda x: x * 2.0, "mul", True),
        (lambda x: x * 0.0, "mul", False),  # 0 · inf of one device would be NaN
        (lambda x: x + 1.0, "add", False),  # every device would add 1
        (jnp.tanh, "tanh", False),
    ],
)
def test_only_linear_ops_are_applied_to_a_partial_operand(fn, op, passes):
    case = unary(fn, op)
    found = case.decide(case.changed(0, partial=M))
    assert found.operands[0] == (D, ())
    if passes:
        assert (found.reduce, found.inherits) == ((), (0,))
        assert found.results == (ShardType((D, ()), M),)
    else:
        assert (found.reduce, found.inherits) == ((0,), (None,))
        assert found.results == (ShardType((D, ())),)


def test_a_partial_operand_of_several_readers_is_reduced_before_the_first():
    case = unary(lambda x: -x, "neg")
    operands = case.changed(0, partial=M)
    value = operands[0].value
    assert case.decide(operands, readers={value: [case.op]}).reduce == ()
    assert case.decide(operands, readers={value: [case.op, None]}).reduce == (0,)
    assert case.decide(operands, readers={value: [case.op, None]}, deferred={value}).reduce == ()


def test_the_sum_of_two_partial_values_is_partial_and_that_of_one_is_not():
    case = addition()
    both = [replace(x, partial=M) for x in case.operands]
    assert case.decide(both).results == (ShardType((D, ()), M),)
    assert case.decide(both).reduce == ()
    for i in range(2):
        assert case.decide(case.changed(i, partial=M)).reduce == (i,)
    apart = [both[0], replace(both[1], partial=D, spec=((), ()))]
    assert case.decide(apart).reduce == (0, 1)


def test_an_elementwise_op_works_where_the_layout_puts_its_result():
    def fn(x, b):
        return x + b

    dims = {"x": "rows cols", "b": "_ cols"}
    case = Case(fn, f32(16, 8), f32(1, 8), dims=dims, layout="rows: data; cols: model", op="add")
    found = case.decide([replace(case.operands[0], spec=((), D)), replace(case.operands[1], spec=((), ()))])
    assert found.operands == ((D, M), ((), M))  # the dim of size 1 is unsharded
    assert found.results == (ShardType((D, M)),)
    assert found.stored == ((D, M),)


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


def test_a_barrier_leaves_its_operands_as_they_are():
    def fn(x, y):
        return lax.optimization_barrier((x, y))

    dims = {"x": "rows cols", "y": "rows"}
    case = Case(fn, f32(16, 8), f32(16), dims=dims, layout="rows: data", op="optimization_barrier")
    found = case.decide(case.changed(1, spec=((),), partial=M, kind="max"))
    assert found.results == (ShardType((D, ())), ShardType(((),), M, "max"))
    assert (found.inherits, found.stored) == ((None, 1), (None, None))


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

"""The walk that makes a plan: what is made where it is needed, moved before loops, added up in them, and reduced in branches."""

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import f32
from jax import lax
from lowered import assert_sends_the_plan, same
from planned_transformer import MESH

import meshpar as mp
from meshpar._src.plan import program_variants as variants
from meshpar._src.plan.steps import Branch, Loop, Reduce, Reshard, Run


def plan_of(fn, *args, layout, dims, mesh=MESH, **kwargs):
    return mp.plan(fn, *args, mesh=mesh, layout=layout, dims=dims, **{"overlap": "off", **kwargs})


def steps_of(body, kind):
    return [s for s in body.all_steps if isinstance(s, kind)]


def sent(plan):
    return [(c.op, c.axes, c.count) for c in plan.collectives]


# -- values made from no data


def test_what_follows_from_no_data_is_made_in_parts_and_not_sent():
    def fn(x):
        mask = jnp.tril(jnp.ones((8, 16), bool))
        return jnp.where(mask, x, 0) + jnp.arange(16.0)

    plan = plan_of(fn, f32(8, 16), layout="rows: data; columns: model", dims={"x": "rows columns"})
    assert not plan.collectives
    made = [s for s in steps_of(plan.body, Run) if s.results[0].is_constant and s.op.name == "iota"]
    assert made
    assert all(any(s.results[0].spec) for s in made)
    assert_sends_the_plan(fn, f32(8, 16), layout="rows: data; columns: model", dims={"x": "rows columns"})


# -- loops


def test_a_weight_that_a_loop_only_reads_is_gathered_before_it():
    def fn(x, w):
        return lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=5)[0]

    layout, dims = "batch: data; in: data", {"x": "batch _", "w": "in _"}
    plan = plan_of(fn, f32(8, 16), f32(16, 16), layout=layout, dims=dims)
    assert sent(plan) == [("all-gather", ("data",), 1)]
    (loop,) = steps_of(plan.body, Loop)
    (gather,) = [s for s in plan.body.steps if isinstance(s, Reshard)]
    assert gather.result in loop.hoisted
    assert not steps_of(loop.body, Reshard)
    same(fn, np.ones((8, 16), np.float32), np.eye(16, dtype=np.float32) / 2, layout=layout, dims=dims)


@pytest.mark.parametrize("known", [False, True])
def test_a_note_on_loops_of_unknown_length(known):
    """Of loops that send something or have a matmul, but not of others, such as those that draw random numbers."""

    def step(x, w):
        def body(i, y):
            return jnp.tanh(y @ w @ w.T)

        x = lax.while_loop(lambda s: s.sum() < 0, lambda s: s * 2, x)
        return lax.fori_loop(0, 3, body, x) if known else lax.while_loop(lambda s: s.sum() > 9, lambda s: body(0, s), x)

    how = {"mesh": "model=8", "topology": "v5e:2x4", "layout": "mlp: model", "dims": {"w": "embed mlp"}}
    plan = mp.plan(step, f32(16, 64), f32(64, 256), **how)
    notes = [n for n in plan.notes if "number of iterations" in n]
    assert len(plan.uncounted_loops) == len(notes) == (not known)
    assert ("sends at least" in str(plan)) == ("takes at least" in str(plan)) == (not known)
    assert all("test_planner.py" in n and "lower bounds" in n for n in notes)


def test_a_while_loop_whose_length_nobody_knows_counts_as_one():
    def fn(x, w):
        return lax.while_loop(lambda s: s[0] < s[1].sum(), lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0.0, x))[1]

    plan = plan_of(fn, f32(8, 16), f32(16, 16), layout="batch: data; in: model", dims={"x": "batch _", "w": "in _"})
    (loop,) = steps_of(plan.body, Loop)
    cond, body = loop.bodies
    assert {c.count for s in body.all_steps for c in s.sends} == {None}
    assert any(isinstance(s, Reduce) for s in cond.steps)  # every device must know whether to go on
    assert all(s.partial == () for s in cond.outputs)


def accumulate(x, w):
    """Gradients of microbatches, added up."""

    def microbatch(total, part):
        return total + jax.grad(lambda w: (jnp.tanh(part @ w) ** 2).sum())(w), None

    return lax.scan(microbatch, jnp.zeros_like(w), x)[0]


@pytest.mark.parametrize(("layout", "op"), [("batch: data", "all-reduce"), ("batch: data; in: data", "reduce-scatter")])
def test_a_carry_that_is_only_added_to_is_reduced_once_after_its_loop(layout, op):
    dims = {"x": "_ batch _", "w": "in _"}
    plan = plan_of(accumulate, f32(4, 8, 16), f32(16, 8), layout=layout, dims=dims)
    (loop,) = steps_of(plan.body, Loop)
    assert loop.results[0].partial == ("data",)
    assert loop.inits[0].partial == ()
    assert [(o, n) for o, _, n in sent(plan) if o != "all-gather"] == [(op, 1)]
    x, w = (np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((4, 8, 16), (16, 8)))
    same(accumulate, x, w, layout=layout, dims=dims)


def summed(first, x, scale=1):
    """The rows of ``x`` added up by a loop, from a first value on."""
    return lax.scan(lambda total, part: (total + scale * part.sum(0), None), first, x)[0]


def counted(first):
    return lax.scan(lambda total, k: (total + k, None), first, jnp.arange(3.0))[0]


def read_twice(x):
    first = summed(jnp.zeros(2), x)
    return summed(first, x) * first


ALL_REDUCE = ("all-reduce", ("data",), 1)
CARRIES = {
    # what a carry begins with counts once, not on every device that adds up
    "a first value": (lambda x: summed(jnp.arange(2.0) + 100, x), [ALL_REDUCE]),
    # the second loop adds to the partial result of the first
    "two loops": (lambda x: summed(summed(jnp.zeros(2), x[:2]), x[2:], 3), [ALL_REDUCE]),
    # a partial first value is reduced before a loop that adds nothing partial to it, and so is one that something else reads
    "replicated": (lambda x: counted(summed(jnp.zeros(2), x)), [ALL_REDUCE]),
    "read twice": (read_twice, [ALL_REDUCE, ("all-reduce", ("data",), 4)]),
}


@pytest.mark.parametrize("case", CARRIES)
def test_sums_of_loops_are_reduced_once(case):
    fn, collectives = CARRIES[case]
    x = np.arange(64.0, dtype=np.float32).reshape(4, 8, 2)
    layout, dims = "batch: data", {"x": "_ batch _"}
    assert sent(plan_of(fn, x, layout=layout, dims=dims)) == collectives
    same(fn, x, layout=layout, dims=dims)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: lax.scan(lambda total, part: (total + part.sum(0), jnp.sin(total)), jnp.zeros(2), x),
        lambda x, w: lax.scan(lambda total, part: (jnp.maximum(total, 0) + part.sum(0), None), jnp.zeros(2), x),
        lambda x, w: summed(w, x),  # begins with data
    ],
)
def test_any_other_carry_is_reduced_in_the_loop(fn):
    plan = plan_of(fn, f32(4, 8, 2), f32(2), layout="batch: data", dims={"x": "_ batch _"})
    assert sent(plan) == [("all-reduce", ("data",), 4)]


# -- branches


def branches(x, flag):
    return lax.cond(flag, lambda x: (x.sum(0), 1.0), lambda x: (x[0] * 2, 0.0), x)


def test_a_branch_reduces_what_it_leaves_and_both_agree():
    layout, dims = "batch: data; in: model", {"x": "batch in"}
    plan = plan_of(branches, f32(8, 16), jax.ShapeDtypeStruct((), bool), layout=layout, dims=dims)
    (branch,) = steps_of(plan.body, Branch)
    for body in branch.branches:
        assert [(s.spec, s.partial) for s in body.outputs] == [(s.spec, s.partial) for s in branch.results]
        assert not any(s.partial for s in body.outputs)
    assert "all-reduce" in {c.op for body in branch.branches for s in body.all_steps for c in s.sends}
    x = np.arange(128.0, dtype=np.float32).reshape(8, 16)
    for flag in (True, False):
        same(branches, x, np.array(flag), layout=layout, dims=dims, meshes=["data=4, model=2"])


# -- arrays without elements


EMPTY = {
    "tile": (lambda x: jnp.tile(x, (1, 0)), (8, 4)),
    "slice": (lambda x: x[:, :0], (8, 4)),
    "pad": (lambda x: lax.pad(x, 1.0, ((0, 0, 0), (-2, -2, 0))), (8, 4)),
    "elementwise": (lambda x: x + 1, (0, 4)),
    "loop": (lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0, :], x[:0]), (8, 4)),
    "contraction": (lambda x: x[:, :0] @ jnp.ones((0, 4)) + x, (8, 4)),
    "empty features": (lambda x: (x * 2, x.sum(0), x.T), (8, 0)),
}


@pytest.mark.filterwarnings("ignore::meshpar.errors.ReplicatedWarning")  # nothing else is split
@pytest.mark.parametrize(
    ("name", "lowering", "layout"),
    covering.each(EMPTY, ["shard_map", "jit"], ["rows: data", "columns: data", "rows: data; columns: model"]),
)
def test_arrays_without_elements_are_not_split(name, lowering, layout):
    fn, shape = EMPTY[name]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    step = mp.jit(fn, mesh="data=4, model=2", layout=layout, dims={"x": "rows columns"}, lowering=lowering)
    found, expected = jax.tree.leaves(step(x)), jax.tree.leaves(jax.jit(fn)(x))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)  # reading the shards of a wrong shape fails
        if not a.size:
            assert a.sharding.is_fully_replicated
    again = jax.tree.leaves(step(found[0])) if found[0].shape == x.shape else []
    assert all(np.asarray(a).shape == a.shape for a in again)


# -- what is not sent, or not twice


def same_as_unsharded(fn, *args, layout, dims, mesh="data=4, model=2"):
    step = mp.jit(fn, mesh=mesh, layout=layout, dims=dims, lowering="shard_map")
    for found, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(want), rtol=2e-5, atol=1e-5)
    return step.plan(*args)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def states(x, w):
    return jnp.sum(lax.scan(lambda h, x: ((h := jnp.tanh(h @ w + x)), h), jnp.zeros((4, 6)), x)[1] ** 2)


def called(x):
    return jax.jit(jnp.sort)(x), jax.jit(jnp.argsort)(x)


LINE = {"x": "columns"}
GATHERED = {
    "no other dim divides": (lambda x: jnp.sort(x, 1), [(3, 16)], {"x": "_ columns"}, ["x"]),
    "no other dim": (lambda x: jnp.sort(x), [(16,)], LINE, ["x"]),
    # the states of a loop over split time are not gathered for its backward pass
    "a loop": (jax.grad(states, (0, 1)), [(8, 4, 6), (6, 6)], {"x": "columns batch embed", "w": "embed _"}, ["x"]),
    # an elementwise result is computed again where its operands were gathered
    "computed again": (lambda x: (lax.cummax(jnp.sort(x)), jnp.sort(jnp.exp(x) * 2 + 1)), [(16,)], LINE, ["x"]),
    # what would be sent for any operand is sent itself
    "a result": (lambda x, y: jnp.sort(x * y), [(16,), (16,)], {**LINE, "y": "columns"}, ["mul"]),
    "called functions share": (called, [(16,)], LINE, ["x"]),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered(name):
    fn, shapes, dims, tensors = GATHERED[name]
    plan = same_as_unsharded(fn, *(normal(*shape) for shape in shapes), layout="columns: data", dims=dims)
    assert [c.tensor for c in plan.collectives if c.op == "all-gather" and c.shape == shapes[0]] == tensors


def test_a_program_without_names_gets_a_template():
    params = {"down": jnp.ones((8, 4)), "up": jnp.ones((4, 8)), "scale": jnp.ones(())}
    how = {"mesh": "data=2", "layout": "batch: data", "dims": {}}
    with pytest.raises(mp.errors.UnknownDimError) as error:
        mp.plan(lambda params, x: x @ params["up"] * params["scale"], params, jnp.ones((2, 4)), **how)
    text = str(error.value)
    assert "no tensor has names" in text
    assert all(f'"{path}": "_ _",' in text for path in ("params/down", "params/up", "x"))
    assert "scale" not in text.split("dims={")[1]


# -- programs that are planned rewritten (:mod:`program.divisible_rewrite`), or unmodified


def shifted(x):
    return x[1:] - x[:-1], jnp.roll(x, 1, 0)


def of_rewriting(monkeypatch, fn, shape, **where):
    """(the plan, that of the unmodified program)."""
    how = {"dims": {"x": "rows columns"}, "layout": "rows: data", **where}
    found = mp.plan(fn, f32(*shape), **how)
    with monkeypatch.context() as patched:
        patched.setattr(variants, "rewrite_indivisible_slices", lambda *of: None)
        return found, mp.plan(fn, f32(*shape), **how)


def test_of_a_rewritten_and_an_unmodified_program_the_plan_with_the_shorter_step_is_taken(monkeypatch):
    found, unmodified = of_rewriting(monkeypatch, shifted, (16, 32), mesh="data=4, model=4", topology="v5e:4x4")
    assert found.program.original is not None
    assert found.bytes_sent > unmodified.bytes_sent  # in short permutes instead of a gather, whose latency is longer
    assert found.seconds < unmodified.seconds

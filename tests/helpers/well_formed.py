"""What holds of the steps of every plan."""

import numpy as np

from meshpar.plan.steps import Branch, Call, Loop, Reduce, Reshard, Run, free_shards


def same_axes(a, b, sizes):
    """Whether two specs are one, axes of size 1 aside."""
    return [[x for x in e if sizes[x] > 1] for e in a] == [[x for x in e if sizes[x] > 1] for e in b]


def lies_as(a, b):
    return a.spec == b.spec and set(a.partial) == set(b.partial)


def assert_well_formed(plan):
    """SSA: every shard that is read was made before, once, where the reader can see it; specs lead from step to step."""
    _program(plan.program)
    made = set()
    made |= set(plan.body.inputs)
    _body(plan.body, set(), made, plan)
    assert all(shard is not None for shard in plan.body.outputs)
    sent = [c for step in plan.body.all_steps for c in step.sends]
    assert list(plan.collectives) == sent
    for value, placed in plan.placements.items():
        for shard in (placed.made, placed.stored):
            assert shard.value.shape == value.shape  # the shards of a body's operands are of the outer values
            assert len(shard.spec) == len(value.shape)
        assert not placed.stored.partial or placed.stored is placed.made


def _program(program):
    """Ops are in topological order: every operand and result was made by an op before, by the op itself, or is an input."""
    place = {op: k for k, op in enumerate(program.root.walk())}
    makers = {}
    for op, k in place.items():
        for v in op.ins:
            assert v is None or v.op is None or place[v.op] < k, (op.name, v)
        for v in op.outs:
            assert v.op is None or place[v.op] <= k, (op.name, v)
        for v in op.makes:
            assert makers.setdefault(v, v.op) is v.op is not None, (op.name, v)  # calls may return what another op made


def _body(body, outside, made, plan):
    """``outside``: shards of outer scopes that the steps may read; ``made``: all shards made so far."""
    assert len(set(body.inputs)) == len(body.inputs)
    seen = outside | set(body.inputs)
    _steps(body, seen, made, plan)
    assert all(shard is None or shard in seen for shard in body.outputs)


def _steps(body, seen, made, plan):
    """``seen``: the available shards, to which the results of the steps are added."""
    for step in body.steps:
        if isinstance(step, Call):
            _steps(step.body, seen, made, plan)
            assert not step.body.inputs
            continue
        missing = [s for s in step.reads if s not in seen]
        assert not missing, (step, missing)
        _CHECKS.get(type(step), lambda *_: None)(step, plan)
        inputs = {s for inner in step.bodies for s in inner.inputs}  # one for both bodies of a while
        assert not made & inputs
        made |= inputs
        for inner in step.bodies:
            allowed = (
                {*step.consts, *step.hoisted} if isinstance(step, Loop) else set(step.operands)
            )  # of outer shards it reads those that the step lists
            assert set(free_shards(inner)) <= allowed, (step, set(free_shards(inner)) - allowed)
            _body(inner, seen, made, plan)
        for shard in step.makes:
            assert shard not in made, (step, shard)
            made.add(shard)
            seen.add(shard)


def _reshard(step, plan):
    spec = step.source.spec
    for move in step.path:
        assert same_axes(spec, move.before, plan.sizes)
        spec = move.after
    assert same_axes(spec, step.result.spec, plan.sizes)
    assert step.source.value is step.result.value or step.result.value.shape == step.source.value.shape
    assert set(step.source.partial) == set(step.result.partial)
    if step.ring is None:
        sent = [m.op for m in step.path if m.op != "slice"] if 0 not in step.source.value.shape else []
        assert [c.op for c in step.collectives] == sent


def _reduce(step, plan):
    assert step.source.partial
    assert not step.result.partial
    over = {*step.over, *(a for s in step.scatters for a in s.axes)}
    assert over == set(step.source.partial)
    spec = step.scattered
    for move in step.path:
        assert same_axes(spec, move.before, plan.sizes)
        spec = move.after
    assert same_axes(spec, step.result.spec, plan.sizes)


def _run(step, plan):
    del plan
    op = step.op
    for shard, value in zip(step.operands, op.ins, strict=True):
        assert (shard is None) == (value is None)
        # the shards of a body's operands are of the outer values, what has no data by what it was before it was named
        assert shard is None or (shard.value.shape, shard.value.aval.dtype) == (value.shape, value.aval.dtype)
    assert [s.value for s in step.results] == op.outs
    if op.rule is None and len({s.shape for s in (*op.outs, *(v for v in op.ins if v is not None))}) == 1:
        specs = {s.spec for s in (*step.results, *step.reads)}  # an elementwise op
        assert len(specs) == 1, (op.name, specs)


def _loop(step, plan):
    del plan
    carries = len(step.inits)
    for body in step.inner:
        for init, inner in zip(step.inits, body.inputs, strict=False):
            assert init.spec == inner.spec
    body = step.body
    assert len(body.inputs) == carries + len(step.stacks)
    assert len(body.outputs) == len(step.results)
    for inner, out, last in zip(body.inputs, body.outputs[:carries], step.results[:carries], strict=False):
        assert out is not None
        assert lies_as(inner, out)
        assert lies_as(inner, last)
    for stack, inner in zip(step.stacks, body.inputs[carries:], strict=True):
        assert stack.spec[1:] == inner.spec
        assert not stack.spec[0]
    for out, last in zip(body.outputs[carries:], step.results[carries:], strict=True):
        assert out is None or ((), *out.spec) == last.spec


def _branch(step, plan):
    del plan
    for body in step.branches:
        for out, result in zip(body.outputs, step.results, strict=True):
            assert out is not None
            assert lies_as(out, result)
            assert np.shape(out.value.aval) == np.shape(result.value.aval)


_CHECKS = {Reshard: _reshard, Reduce: _reduce, Run: _run, Loop: _loop, Branch: _branch}

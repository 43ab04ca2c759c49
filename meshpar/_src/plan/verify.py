"""What holds of the steps of every plan; with ``MESHPAR_VERIFY=1`` it is checked after each pass.

SSA: every shard that is read was made before, once, where the reader can see it. Specs lead from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..layout import Spec
from ..program.ir import Op, Program, Value
from .plan import Plan
from .steps import Body, Branch, Call, Loop, Reduce, Reshard, Run, Shard, Step


def verify(plan: Plan) -> None:
    """Raise AssertionError, with the step, if the steps of a plan are no well-formed program."""
    _verify_program(plan.program)
    made = set(plan.body.inputs)
    _verify_body(plan.body, set(), made, plan.sizes)
    assert all(shard is not None for shard in plan.body.outputs)
    assert list(plan.collectives) == [c for step in plan.body.all_steps for c in step.sends]
    for value, placed in plan.placements.items():
        for shard in (placed.made, placed.stored):
            assert shard.value.shape == value.shape, value  # the shards of a body's operands are of the outer values
            assert len(shard.spec) == len(value.shape), value
        assert not placed.stored.partial or placed.stored is placed.made, value


def _verify_program(program: Program) -> None:
    """Ops are in topological order: every operand and result was made by an op before, by the op itself, or is an input."""
    place = {op: k for k, op in enumerate(program.root.walk())}
    makers: dict[Value, Op | None] = {}
    for op, k in place.items():
        assert all(v is None or v.op is None or place[v.op] < k for v in op.ins), op.name
        assert all(v.op is None or place[v.op] <= k for v in op.outs), op.name
        for v in op.makes:
            assert makers.setdefault(v, v.op) is v.op is not None, (op.name, v)  # calls may return what another op made


def _verify_body(body: Body, outside: set[Shard], made: set[Shard], sizes: Mapping[str, int]) -> None:
    """Check that each step of a body reads shards that exist where it runs, and that each shard is made once.

    Args:
      outside: shards of outer scopes that the steps may read.
      made: all shards made so far; the body's are added.
    """
    assert len(set(body.inputs)) == len(body.inputs)
    seen = outside | set(body.inputs)
    _verify_steps(body, seen, made, sizes)
    assert all(shard is None or shard in seen for shard in body.outputs)


def _verify_steps(body: Body, seen: set[Shard], made: set[Shard], sizes: Mapping[str, int]) -> None:
    """``seen``: the available shards, to which the results of the steps are added."""
    for step in body.steps:
        if isinstance(step, Call):
            _verify_steps(step.body, seen, made, sizes)
            assert not step.body.inputs
            continue
        assert seen.issuperset(step.reads), (step, seen.difference(step.reads))
        _CHECKS.get(type(step), lambda *_: None)(step, sizes)
        inputs = {s for inner in step.bodies for s in inner.inputs}  # one for both bodies of a while
        assert not made & inputs, step
        made |= inputs
        for inner in step.bodies:  # of outer shards they read those that the step lists
            assert isinstance(step, Loop | Branch)
            allowed = (*step.consts, *step.hoisted) if isinstance(step, Loop) else step.operands
            assert set(inner.free).issubset(allowed), (step, set(inner.free).difference(allowed))
            _verify_body(inner, seen, made, sizes)
        assert made.isdisjoint(step.makes), step
        made.update(step.makes)
        seen.update(step.makes)


def _same_axes(a: Spec, b: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether two specs are one, axes of size 1 aside."""
    return [[x for x in e if sizes[x] > 1] for e in a] == [[x for x in e if sizes[x] > 1] for e in b]


def _is_placed_as(a: Shard, b: Shard) -> bool:
    return a.spec == b.spec and set(a.partial) == set(b.partial)


def _check_path(step: Reshard | Reduce, spec: Spec, sizes: Mapping[str, int]) -> None:
    """The moves of a step lead from a spec to its result."""
    for move in step.path:
        assert _same_axes(spec, move.before, sizes), step
        spec = move.after
    assert _same_axes(spec, step.result.spec, sizes), step


def _check_reshard(step: Reshard, sizes: Mapping[str, int]) -> None:
    _check_path(step, step.source.spec, sizes)
    assert step.source.value is step.result.value or step.result.value.shape == step.source.value.shape, step
    assert set(step.source.partial) == set(step.result.partial), step
    if step.ring is None:
        sent = [m.op for m in step.path if m.op != "slice"] if 0 not in step.source.value.shape else []
        assert [c.op for c in step.collectives] == sent, step


def _check_reduce(step: Reduce, sizes: Mapping[str, int]) -> None:
    assert step.source.partial, step
    assert not step.result.partial, step
    assert {*step.over, *(a for s in step.scatters for a in s.axes)} == set(step.source.partial), step
    _check_path(step, step.scattered, sizes)


def _check_run(step: Run, _sizes: Mapping[str, int]) -> None:
    op = step.op
    for shard, value in zip(step.operands, op.ins, strict=True):
        # the shard of a body's operand is of the value outside of the body, so shapes and dtypes are compared, not values
        known = None if value is None else (value.shape, value.aval.dtype)
        assert (None if shard is None else (shard.value.shape, shard.value.aval.dtype)) == known, step
    assert [s.value for s in step.results] == op.outs, step
    if op.rule is None and len({s.shape for s in (*op.outs, *(v for v in op.ins if v is not None))}) == 1:
        assert len({s.spec for s in (*step.results, *step.reads)}) == 1, step  # an elementwise op


def _check_loop(step: Loop, _sizes: Mapping[str, int]) -> None:
    carries = len(step.inits)
    for body in step.inner:
        assert all(a.spec == b.spec for a, b in zip(step.inits, body.inputs, strict=False)), step
    body = step.body
    assert len(body.inputs) == carries + len(step.stacks), step
    assert len(body.outputs) == len(step.results), step
    for inner, out, last in zip(body.inputs, body.outputs[:carries], step.results[:carries], strict=False):
        assert all(s is not None and _is_placed_as(inner, s) for s in (out, last)), step
    for stack, inner in zip(step.stacks, body.inputs[carries:], strict=True):
        assert stack.spec == ((), *inner.spec), step
    for out, last in zip(body.outputs[carries:], step.results[carries:], strict=True):
        assert out is None or ((), *out.spec) == last.spec, step


def _check_branch(step: Branch, _sizes: Mapping[str, int]) -> None:
    for body in step.branches:
        for out, result in zip(body.outputs, step.results, strict=True):
            assert out is not None, step
            assert _is_placed_as(out, result), step
            assert out.value.shape == result.value.shape, step


_CHECKS: dict[type[Step], Callable[[Any, Mapping[str, int]], None]] = {
    Reshard: _check_reshard, Reduce: _check_reduce, Run: _check_run, Loop: _check_loop, Branch: _check_branch,
}  # fmt: skip

"""What holds of the steps of every plan; with ``MESHPAR_VERIFY=1`` it is checked after each pass.

SSA: every shard that is read was made before, once, where the reader can see it. Specs lead from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..layout import Spec
from ..program.ir import Op, Program, Value
from .plan import Plan
from .steps import Body, Branch, Loop, Reduce, Reshard, Run, Shard, Step


def verify(plan: Plan) -> None:
    """Raise AssertionError if the steps of a plan are no well-formed program; the error names the step and the fault."""
    _verify_program(plan.program)
    _verify_body(plan.body, set(), set(plan.body.inputs), plan.sizes)
    assert None not in plan.body.outputs, "a result of the program has no shard"
    assert plan.body.sends == tuple(c for step in plan.body.all_steps for c in step.sends), (
        "collectives are not in order"
    )
    for value, placed in plan.placements.items():
        for shard in (placed.made, placed.stored):
            # the shards of a body's operands are of the outer values
            assert shard.value.shape == value.shape, f"{value} is placed as {shard.value}"
            assert len(shard.spec) == len(value.shape), f"{value} is placed with the spec {shard.spec}"
        is_reduced = not placed.stored.partial or placed.stored is placed.made
        assert is_reduced, f"{value} is stored partial over {placed.stored.partial}"


def _verify_program(program: Program) -> None:
    """Ops are in topological order: every operand and result was made by an op before, by the op itself, or is an input."""
    place = {op: k for k, op in enumerate(program.root.walk())}
    makers: dict[Value, Op | None] = {}
    for op, k in place.items():
        made_before = all(v is None or v.op is None or place[v.op] < k for v in op.ins)
        assert made_before, f"{op.name} at {op.location} reads a value that a later op makes"
        own_or_before = all(v.op is None or place[v.op] <= k for v in op.outs)
        assert own_or_before, f"{op.name} at {op.location} returns a value that a later op makes"
        for v in op.makes:  # calls may return what another op made
            assert makers.setdefault(v, v.op) is v.op is not None, f"{op.name} at {op.location} makes {v} a second time"


def _verify_body(body: Body, outside: set[Shard], made: set[Shard], sizes: Mapping[str, int]) -> None:
    """Check that each step of a body reads shards that exist where it runs, and that each shard is made once.

    An error names the step, by its op and line.

    Args:
      outside: shards of outer scopes that the steps may read.
      made: all shards made so far; the body's are added.
    """
    assert len(set(body.inputs)) == len(body.inputs), f"two inputs of a body are one shard: {body.inputs}"
    seen = outside | set(body.inputs)
    for step in body.with_calls:
        try:
            _verify_step(step, seen, made, sizes)
        except AssertionError as fault:
            of = "a result" if step.op is None else f"{step.op.label} at {step.op.location}"
            raise AssertionError(f"{type(step).__name__} of {of}: {fault}") from None
    unknown = {s for s in body.outputs if s is not None} - seen
    assert not unknown, f"a body returns shards that no step in it makes: {unknown}"


def _verify_step(step: Step, seen: set[Shard], made: set[Shard], sizes: Mapping[str, int]) -> None:
    """``seen``: the available shards, to which the results of the step are added."""
    unknown = set(step.reads) - seen
    assert not unknown, f"reads shards that no step before makes: {unknown}"
    _CHECKS.get(type(step), lambda *_: None)(step, sizes)
    inputs = {s for inner in step.bodies for s in inner.inputs}  # one for both bodies of a while
    assert not made & inputs, f"inputs of its bodies are made a second time: {made & inputs}"
    made |= inputs
    for inner in step.bodies:  # of outer shards they read those that the step lists
        assert isinstance(step, Loop | Branch)
        allowed = (*step.consts, *step.hoisted) if isinstance(step, Loop) else step.operands
        unknown = set(inner.free).difference(allowed)
        assert not unknown, f"its bodies read shards that it does not list: {unknown}"
        _verify_body(inner, seen, made, sizes)
    assert made.isdisjoint(step.makes), f"makes shards a second time: {made.intersection(step.makes)}"
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
        assert _same_axes(spec, move.before, sizes), f"{move} follows the spec {spec}"
        spec = move.after
    assert _same_axes(spec, step.result.spec, sizes), f"ends in the spec {spec}, its result has {step.result.spec}"


def _check_reshard(step: Reshard, sizes: Mapping[str, int]) -> None:
    source, result = step.source, step.result
    _check_path(step, source.spec, sizes)
    assert source.value.shape == result.value.shape, f"changes the shape of {source.value} to {result.value}"
    assert set(source.partial) == set(result.partial), f"partial over {source.partial}, then {result.partial}"
    if step.ring is None:
        moves = [m.op for m in step.path if m.op != "slice"] if 0 not in source.value.shape else []
        sent = [c.op for c in step.collectives]
        assert sent == moves, f"its moves are {moves}, its collectives {sent}"


def _check_reduce(step: Reduce, sizes: Mapping[str, int]) -> None:
    partial = set(step.source.partial)
    assert partial, "its operand is not partial"
    assert not step.result.partial, f"its result is partial over {step.result.partial}"
    over = {*step.over, *(a for s in step.scatters for a in s.axes)}
    assert over == partial, f"reduces over {over}, its operand is partial over {partial}"
    _check_path(step, step.scattered, sizes)


def _check_run(step: Run, _sizes: Mapping[str, int]) -> None:
    op = step.op
    for shard, value in zip(step.operands, op.ins, strict=True):
        # the shard of a body's operand is of the value outside of the body, so shapes and dtypes are compared, not values
        known = None if value is None else (value.shape, value.aval.dtype)
        found = None if shard is None else (shard.value.shape, shard.value.aval.dtype)
        assert found == known, f"reads {found}, its op {known}"
    assert [s.value for s in step.results] == op.outs, "its results are not the results of its op"
    if op.rule is None and len({s.shape for s in (*op.outs, *(v for v in op.ins if v is not None))}) == 1:
        specs = {s.spec for s in (*step.results, *step.reads)}
        assert len(specs) == 1, f"is elementwise, and has several specs: {specs}"


def _check_loop(step: Loop, _sizes: Mapping[str, int]) -> None:
    carries, body = len(step.inits), step.body
    for each in step.inner:
        same = all(a.spec == b.spec for a, b in zip(step.inits, each.inputs, strict=False))
        assert same, "first values and carries have different specs"
    assert len(body.inputs) == carries + len(step.stacks), "its body has other inputs than carries and slices"
    assert len(body.outputs) == len(step.results), "its body has another number of results"
    for inner, out, last in zip(body.inputs, body.outputs[:carries], step.results[:carries], strict=False):
        same = out is not None and _is_placed_as(inner, out) and _is_placed_as(inner, last)
        assert same, f"carry {inner.value} is sharded otherwise at the end of the body"
    for stack, inner in zip(step.stacks, body.inputs[carries:], strict=True):
        assert stack.spec == ((), *inner.spec), f"slices with the spec {inner.spec} of a stack with {stack.spec}"
    for out, last in zip(body.outputs[carries:], step.results[carries:], strict=True):
        assert out is None or ((), *out.spec) == last.spec, f"stack {last.value} has another spec than its slices"


def _check_branch(step: Branch, _sizes: Mapping[str, int]) -> None:
    for body in step.branches:
        for out, result in zip(body.outputs, step.results, strict=True):
            same = out is not None and _is_placed_as(out, result) and out.value.shape == result.value.shape
            assert same, f"a branch returns {result.value} sharded otherwise"


_CHECKS: dict[type[Step], Callable[[Any, Mapping[str, int]], None]] = {
    Reshard: _check_reshard,
    Reduce: _check_reduce,
    Run: _check_run,
    Loop: _check_loop,
    Branch: _check_branch,
}

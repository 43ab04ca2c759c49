"""Finding the pairs of a plan: gathers whose values products take, and sums of products that are settled as reduce-scatters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cost.fusion import FUSED, VIEWS
from ..plan.collectives import settlement
from ..plan.resharding import part_of, relayout
from ..program.ir import Frame, Op, Value
from .pairs import GatherRing, ScatterRing

if TYPE_CHECKING:
    from ..plan.plan import Plan, Sent


def gather_of(plan: Plan, sent: Sent) -> GatherRing | None:
    """The products that one gathered value goes into, where some of them can run block by block."""
    value, frame = sent.value, sent.frame
    steps = relayout(sent.have, sent.need, value.shape, plan.sizes)
    if len(steps) != 1 or steps[0].op != "all-gather" or any(map(part_of, steps[0].axes)):
        return None
    (dim,) = steps[0].dims
    position = {id(op): k for k, op in enumerate(frame.ops)}
    free: list[tuple[Op, int]] = []
    contracted: list[tuple[Op, int]] = []
    for op in sent.users:
        sides = [s for s in (0, 1) if op.name == "dot_general" and op.ins[s] is value]
        if len(sides) == 1 and id(op) in position and id(op) in plan.ops and id(op) not in plan.rings.gathers:
            (lc, rc), _ = op.eqn.params["dimension_numbers"]
            (contracted if dim in (lc, rc)[sides[0]] else free).append((op, sides[0]))
    dots: list[tuple[Op, int]] = []
    before: dict[int, Op] = {}
    first = min((position.get(id(op), -1) for op in sent.users), default=-1)
    for op, side in sorted(free or contracted, key=lambda x: position[id(x[0])]):
        needed = _needed(op.ins[1 - side], frame, first, position)
        if needed is not None:
            dots.append((op, side))
            before.update((id(o), o) for o in needed)
    if not dots:
        return None
    taken = {id(op) for op, _ in dots}
    ordered = sorted(before.values(), key=lambda o: position[id(o)])
    keep = any(id(op) not in taken for op in sent.users)
    return GatherRing(value, sent.need, dim, steps[0].axes, dots, ordered, keep)


def _needed(value: Value | None, frame: Frame, first: int, position: dict[int, int]) -> list[Op] | None:
    """The ops from the first use on that make a value; None: not only light ones, so that it cannot be made before."""
    found: list[Op] = []
    todo = [value]
    while todo:
        v = todo.pop()
        if v is None or v.op is None:
            continue
        if id(v.op) not in position:
            around = _around(v.op, frame)  # a call whose body makes it
            if around is None and not _outside(v.op.frame, frame):
                return None
            if around is not None and position[id(around)] >= first:
                return None
            continue
        if position[id(v.op)] < first or any(o is v.op for o in found):
            continue
        if v.op.frames or v.op.name not in FUSED | VIEWS or v.op.eqn.effects:
            return None
        found.append(v.op)
        todo += v.op.ins
    return found


def _around(op: Op, frame: Frame) -> Op | None:
    """The op of a frame that an op stands inside of."""
    while op.frame is not frame:
        if op.frame.parent is None:
            return None
        op = op.frame.parent
    return op


def _outside(frame: Frame, inner: Frame) -> bool:
    """Whether a frame is around another."""
    now = inner.parent
    while now is not None:
        if now.frame is frame:
            return True
        now = now.frame.parent
    return False


def scatter_of(plan: Plan, sent: Sent, uses: dict[int, int]) -> ScatterRing | None:
    """The products whose sum is settled as a reduce-scatter, where all that is between is linear and used once."""
    value = sent.value
    if id(value) in plan.unsettled or value.op is None or sent.collectives[0].op != "reduce-scatter":
        return None
    made = plan.ops.get(id(value.op)) or plan.passed.get(id(value))
    if made is None or not made.partial or len(made.partial) > 1 or made.kind != "sum":  # products have one result
        return None
    scatter, _ = settlement(sent.have, plan.specs[id(value)], made.partial[0], "sum")
    if not scatter:
        return None
    dim = next(iter(scatter))
    leaves = _leaves(plan, value, dim, uses, home_of(sent.frame), value)
    return None if not leaves else ScatterRing(value, dim, scatter[dim], leaves)


def _leaves(
    plan: Plan, value: Value, dim: int, uses: dict[int, int], home: Frame, top: Value
) -> list[tuple[Op, int]] | None:
    op = value.op
    if op is None or home_of(op.frame) is not home or (value is not top and uses.get(id(value), 0) != 1):
        return None
    if op.name == "dot_general" and id(op) in plan.ops:
        return None if id(op) in plan.rings.gathers else [(op, dim)]
    if id(value) not in plan.passed:
        return None
    if op.name == "transpose":
        assert op.ins[0] is not None
        return _leaves(plan, op.ins[0], op.eqn.params["permutation"][dim], uses, home, top)
    if op.name in ("add", "add_any"):
        found: list[tuple[Op, int]] = []
        for v in op.ins:
            mine = None if v is None else _leaves(plan, v, dim, uses, home, top)
            if mine is None:
                return None
            found += mine
        return found
    return None


def home_of(frame: Frame) -> Frame:
    """The body that JAX traces a frame in: calls are walked in place."""
    while frame.parent is not None and frame.parent.name not in ("scan", "while", "cond"):
        parent = frame.parent
        if parent.name in ("checkpoint", "remat", "remat2") and not parent.eqn.params["differentiated"]:
            break
        frame = parent.frame
    return frame


def uses_of(plan: Plan) -> dict[int, int]:
    """How often each value is read; calls read nothing, what they hold does."""
    found: dict[int, int] = {}
    calls = ("scan", "while", "cond")
    frames = [plan.program.root]
    for op in plan.program.root.walk():
        frames += op.frames if op.name in calls else []
        for v in op.ins if op.name in calls or not op.frames else ():
            if v is not None:
                found[id(v)] = found.get(id(v), 0) + 1
    for frame in frames:
        for var in frame.jaxpr.outvars:
            v = None if hasattr(var, "val") else frame.env[var]
            if v is not None:
                found[id(v)] = found.get(id(v), 0) + 1
    return found

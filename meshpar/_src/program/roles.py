"""The parameters of a step: the arrays whose new value is the old one plus an update that reads optimizer state.

Optimizer state is declared, by its type or its name, or follows from the program (:func:`unread_state`). Parameters follow from the
program, whatever their name or container.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..compat.loop_operands import operands_of_bodies
from .ir import Op, Program, Value


@dataclass(frozen=True)
class Flow:
    """The elementwise data flow of a program.

    Attributes:
      links: values with the same elements, or elementwise in each other: operands and results of elementwise ops, transposes and
        reshapes; values outside and inside of a body. Symmetric.
      results: the same pairs, from operand to result and from outside of a body to its inside and back.
      inside: an operand of a loop or branch → the same value in its bodies.
      others: (operands, results) of all other ops.
    """

    links: dict[Value, list[Value]] = field(default_factory=dict)
    results: dict[Value, list[Value]] = field(default_factory=dict)
    inside: dict[Value, list[Value]] = field(default_factory=dict)
    others: list[tuple[list[Value], list[Value]]] = field(default_factory=list)

    def link(self, a: Value | None, b: Value | None) -> None:
        """Add the pair of an operand and a result, unless one of them is a literal or a scalar."""
        if a is not None and b is not None and a is not b and a.shape and b.shape:
            self.links.setdefault(a, []).append(b)
            self.links.setdefault(b, []).append(a)
            self.results.setdefault(a, []).append(b)

    def bind(self, outer: Value | None, inner: Value) -> None:
        """Add an operand of a loop or branch, and the argument of the body."""
        self.link(outer, inner)
        if outer is not None:
            self.inside.setdefault(outer, []).append(inner)

    def spread(self, seeds: Iterable[Value], owned: Collection[Value], through: bool = False) -> set[Value]:
        """``seeds`` and the values linked to them, except through values that are ``owned``; ``through``: as in :meth:`after`."""
        return self._reached(self.links, seeds, owned, through)

    def after(self, seeds: Iterable[Value], through: bool = False, without: Value | None = None) -> set[Value]:
        """``seeds`` and the values that are elementwise in them, other than through the value ``without``.

        Args:
          through: also the results of any op all of whose operands are among them (factored moments, Newton-Schulz).
        """
        return self._reached(self.results, seeds, (without,), through)

    def _reached(
        self, pairs: Mapping[Value, list[Value]], seeds: Iterable[Value], owned: Collection[Value | None], through: bool
    ) -> set[Value]:
        found = set(seeds)
        todo = list(found)

        def add(values: Iterable[Value]) -> None:
            new = {v for v in values if v not in found and v not in owned}
            found.update(new)
            todo.extend(new)

        while todo:
            while todo:
                add(pairs.get(todo.pop(), ()))
            for ins, outs in self.others if through else ():
                if found.issuperset(ins):
                    add(outs)
        return found

    def bound(self, values: Iterable[Value]) -> set[Value]:
        """The values, and the same values inside of the bodies that have them as operands."""
        return self._reached(self.inside, values, owned=(), through=False)


def elementwise_flow(program: Program) -> Flow:
    """The elementwise data flow of a program; call it through :meth:`Program.cached`."""
    flow = Flow()
    for op in program.root.walk():
        if op.frames:
            _link_bodies(op, flow)
        elif op.rule is None or op.rule.strong:
            for out in op.outs:
                for v in op.ins:
                    if v is not None and (op.rule is not None or v.shape == out.shape):
                        flow.link(v, out)
                    elif v is not None and v.shape:
                        flow.others.append(([v], []))  # of another shape, as a bias [1, embed]
        else:
            ins = [v for v in op.ins if v is not None and v.shape]
            if ins:
                flow.others.append((ins, [v for v in op.outs if v.shape]))
    return flow


def _link_bodies(op: Op, flow: Flow) -> None:
    """Add each pair of values that are the same inside and outside the bodies of an op."""
    for frame, outer in zip(op.frames, operands_of_bodies(op.eqn, op.ins), strict=True):
        for a, b in zip(outer, frame.ins(), strict=True):
            flow.bind(a, b)
        if op.primitive.loop and frame is not op.frames[-1]:
            continue  # the result of the condition is no result of the loop
        for a, b in zip(frame.outs(), op.outs, strict=True):
            flow.link(a, b)


def new_values(program: Program) -> dict[Value, Value]:
    """Input → the result that is its new value, for all inputs that the step updates, optimizer state excluded.

    The new value is computed from the old one by elementwise ops; of several such results it is the one with the fewest ops between
    (a moving average of the new value, or an update with weight decay, are further away).
    """
    flow = program.cached(elementwise_flow)
    results = {v for v in program.outputs if v.shape and v.kind != "opt"}
    inputs = [v for v in program.inputs if v.kind != "opt" and v not in results]
    return {v: new for v in inputs if (new := _nearest(flow, v, results)) is not None}


def _nearest(flow: Flow, value: Value, results: set[Value]) -> Value | None:
    """The result of the shape of ``value`` that the fewest elementwise ops separate from it; None without such a result."""
    seen, todo = {value}, [value]
    while todo:
        following = dict.fromkeys(v for before in todo for v in flow.results.get(before, ()) if v not in seen)
        for v in following:
            if v in results and v.shape == value.shape:
                return v
        seen.update(following)
        todo = list(following)
    return None


def name_parameters(program: Program) -> None:
    """Set the kind of undeclared optimizer state to ``opt``, the kind of parameters to ``params``; new values have the kind too.

    A parameter has a new value (:func:`new_values`) that is elementwise in optimizer state. An input without a new value may be a
    copy of a parameter in another dtype: the new value is then a result of its shape and dtype that is elementwise in the new value
    of the parameter.
    """
    for old, value in unread_state(program).items():
        old.kind = old.kind or "opt"
        value.kind = value.kind or old.kind
    state = [v for v in program.inputs if v.kind == "opt" and v.shape]
    if not state:
        return
    flow = program.cached(elementwise_flow)
    updated = flow.after(state, through=True)
    new = {v: n for v, n in new_values(program).items() if n in updated}
    after = flow.after(new.values()).difference(new.values())
    copies, returned = [v for v in program.outputs if v in after and v.kind is None], set(program.outputs)
    for value in program.inputs:
        if value.shape and value.kind != "opt" and value not in new and value not in returned:
            copy = next((v for v in copies if (v.shape, v.aval.dtype) == (value.shape, value.aval.dtype)), None)
            if copy is not None:
                copies.remove(copy)
                new[value] = copy
    for old, value in new.items():
        old.kind = old.kind or "params"
        value.kind = value.kind or "params"


def unread_state(program: Program) -> dict[Value, Value]:
    """Inputs that are updated with parameters, and neither read by the model nor declared as optimizer state → their new values.

    Only elementwise ops read them, for their own new value or for a parameter's: hand-written momentum, moving averages of
    weights, float32 copies. One without a kind has the shape of a parameter, and the last component of its path, unless the
    parameter is declared: positions and velocities of a simulation, ``x`` and ``v``, are no weights with their momentum.
    """
    flow = program.cached(elementwise_flow)
    if not flow.others:
        return {}  # no model reads anything: an update alone
    new = new_values(program)
    read = {v for ins, _ in flow.others for v in ins}
    unread = [v for v, result in new.items() if read.isdisjoint(flow.after([v], without=result))]
    updated = {v: result for v, result in new.items() if v not in unread}
    params = set(updated.values())
    of_params = flow.after(params)
    declared = {v.shape for v in updated if v.kind}
    named = {(v.shape, name) for v in updated if (name := _name_in_tree(v))}
    alike = {v for v in unread if v.shape in declared or (v.shape, _name_in_tree(v)) in named}
    return {v: new[v] for v in unread if v.kind or (v in alike and (new[v] in of_params or params & flow.after([v])))}


def _name_in_tree(value: Value) -> str:
    """The last component of the path of an array; empty: it is an argument on its own."""
    return (value.path or "").partition("/")[2].rpartition("/")[2]

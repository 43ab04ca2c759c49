"""Equations that JAX traces once, and that are added again for other operands of the same types."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax._src import core
from jax._src.effects import JaxprInputEffect
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer, TracingEqn
from jax._src.source_info_util import SourceInfo

Template = tuple[list[tuple[Any, ...]], list[Any]]
"""(equations, places of the results). An equation is (operands, the place of its source among those that are given, and the
arguments of JAX's ``emit_eqn``: types of the results, primitive, parameters, effects; context). The place of an array is its index
among the operands of the template and the results of its equations; a literal or a constant is its own place."""


class Templates:
    """The templates of the equations that are added to one jaxpr while JAX traces it.

    To find the rules and types of an equation takes JAX about five times as long as to add it.
    """

    def __init__(self) -> None:
        """No templates."""
        self._templates: dict[Hashable, Template | None] = {}
        # id of a type → its number, and the type, so that the id stays unique
        self._types: dict[int, tuple[int, Any]] = {}
        self._numbers: dict[Any, int] = {}

    def key(self, what: Hashable, operands: Sequence[Any]) -> Hashable | None:
        """The key of the template of equal equations on operands of these types; None: an operand is a number, or of another
        trace."""
        trace, types, key = core.trace_ctx.trace, self._types, [what]
        for x in operands:
            if type(x) is not DynamicJaxprTracer or x._trace is not trace or type(x.val) is not core.Var:
                return None
            known = types.get(id(x.aval))
            if known is None:
                known = types[id(x.aval)] = self._numbers.setdefault(x.aval, len(self._numbers)), x.aval
            key.append(known[0])
        if len(operands) > 1 and len(places := {x.val: i for i, x in enumerate(operands)}) < len(operands):
            key.append(tuple(places[x.val] for x in operands))
        return tuple(key)

    def run(
        self, key: Hashable, operands: Sequence[Any], fn: Callable[[], list[Any]], sources: Sequence[SourceInfo]
    ) -> list[Any]:
        """The results of ``fn()``, which adds equations; after a run for an equal key, the equations of its template are added.

        There is no template if the equations read other arrays than the operands, or have sources that are not given.
        """
        template, trace = self._templates.get(key), core.trace_ctx.trace
        if template is not None:
            arrays = list(operands)
            for places, source, types, primitive, params, effects, context in template[0]:
                ins = [arrays[p] if type(p) is int else p for p in places]
                arrays += trace.emit_eqn(ins, types, primitive, params, effects, sources[source], context)
            return [arrays[p] for p in template[1]]
        if key is None or key in self._templates or type(trace) is not DynamicJaxprTrace:
            return fn()
        first = len(trace.frame.tracing_eqns)
        results = fn()
        self._templates[key] = _template(trace, trace.frame.tracing_eqns[first:], operands, results, sources)
        return results


def _template(
    trace: Any, eqns: Sequence[Any], operands: Sequence[Any], results: Sequence[Any], sources: Sequence[SourceInfo]
) -> Template | None:
    """The template of equations on some operands; None: it would depend on more than these."""
    numbers = {x.val: i for i, x in enumerate(operands)}
    given = [(s.traceback, s.name_stack) for s in sources]
    count, made = len(operands), []

    def place(x: Any) -> Any:
        if type(x) is not DynamicJaxprTracer or x._trace is not trace:
            return None
        if type(x.val) is core.Literal:
            return x
        return numbers.get(x.val, x if x.val in trace.frame.constvar_to_val else None)

    for eqn in eqns:
        if type(eqn) is not TracingEqn or any(isinstance(e, JaxprInputEffect) for e in eqn.effects):
            return None
        places, source = list(map(place, eqn.in_tracers)), (eqn.source_info.traceback, eqn.source_info.name_stack)
        if any(p is None for p in places) or source not in given:
            return None
        types = [v.aval for v in eqn.outvars]
        numbers.update((v, count + k) for k, v in enumerate(eqn.outvars))
        count += len(types)
        made.append((places, given.index(source), types, eqn.primitive, eqn.params, eqn.effects, eqn.ctx))
    ends = list(map(place, results))
    return (made, ends) if all(type(end) is int for end in ends) else None

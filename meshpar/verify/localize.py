"""Both programs once more, with all values between: what explains a difference, or which op goes wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, primitives
from jax.sharding import Mesh

from ..compat.jax import body_of, closed_parts, new_var, source_line
from ..dims import format_dims
from ..errors import CheckError, JoinWarning
from ..global_arrays import place
from ..lower import LOWERINGS
from ..passes import make_plan
from ..plan.plan import Plan
from ..program import Program, infer
from ..rules import ELEMENTWISE, having
from .numbers import Difference, compare, compiled, host, mesh_text, on_device, spread_of, worst_of

SLACK = 8.0
"""How many times the differences that moved operands make are allowed."""
BATCH = 256
"""How many ops are looked at in one compilation."""

INLINED = having(lambda p: p.call)


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls inlined and dead ops dropped; loops and conditionals stay one op each."""
    eqns: list[Any] = []
    constvars: list[Any] = []
    consts: list[Any] = []

    def bind(jaxpr: Any, values: Sequence[Any]) -> dict[Any, Any]:
        env = {v: new_var(v.aval) for v in jaxpr.constvars}
        constvars.extend(env.values())
        consts.extend(values)
        return env

    def inline(jaxpr: Any, env: dict[Any, Any]) -> list[Any]:
        def read(v: Any) -> Any:
            return v if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            if eqn.primitive.name in INLINED:
                body, values = closed_parts(body_of(eqn))
                scope = bind(body, values)
                scope.update(zip(body.invars, ins[len(ins) - len(body.invars) :], strict=True))
                outs = inline(body, scope)
            else:
                outs = [new_var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=ins, outvars=outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    root = closed.jaxpr
    outs = inline(root, {**bind(root, closed.consts), **{v: v for v in root.invars}})
    needed = {v for v in outs if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    live.reverse()
    return ClosedJaxpr(root.replace(constvars=constvars, eqns=live, outvars=outs), consts)


def with_all_values(flat: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """The flat program that returns, after its results, everything that an op makes; and those variables."""
    made = [v for eqn in flat.jaxpr.eqns for v in eqn.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(outvars=[*flat.jaxpr.outvars, *made]), flat.consts), made


def _on_one_device(eqn: Any) -> Any:
    """A constraint to some mesh is a copy on one device."""
    return eqn.replace(primitive=primitives.copy_p, params={}) if eqn.primitive.name == "sharding_constraint" else eqn


def _renamed(program: Program, flat: ClosedJaxpr, made: Sequence[Any]) -> Program:
    """The names of a program for its flat form with all values as results."""
    ins, outs = program.inputs, program.outputs
    twin = infer(
        flat, [v.annotation for v in ins], [v.path or "" for v in ins],
        [*(v.annotation for v in outs), *(None for _ in made)],
        [*(v.path or "" for v in outs), *(f"value {k}" for k in range(len(made)))],
    )  # fmt: skip
    for new, old in [*zip(twin.inputs, ins, strict=True), *zip(twin.outputs, outs, strict=False)]:
        new.kind = new.kind or old.kind
    return twin


class Localizer:
    """Both programs once more, with all values between as results: what explains a leaf, or which op goes wrong."""

    def __init__(self, case: Any, plan: Plan, reference: Any, lowering: str, device: Any):
        self.plan, self.reference, self.tolerance, self.device = plan, reference, case.tolerance, device
        flat = flatten(plan.program.closed)
        everything, made = with_all_values(flat)
        self.eqns = [_on_one_device(e) for e in flat.jaxpr.eqns]
        self.results = flat.jaxpr.outvars
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.values: dict[Any, Any] = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        self.values.update(zip(flat.jaxpr.invars, reference.leaves, strict=True))
        count = len(self.results)

        self.program = _renamed(plan.program, everything, made)
        assert isinstance(plan.mesh, Mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JoinWarning)  # said once already
            again = make_plan(
                self.program, plan.layout, plan.mesh, lowering=plan.lowering, overlap=plan.overlap,
                options=plan.options.mode, calibrations=plan.calibrations,
            )  # fmt: skip
            run, ins, outs = LOWERINGS[again.lowering](again, plan.mesh)
        placed = [
            place(x, s) if isinstance(x, jax.Array | np.ndarray) else x
            for x, s in zip(reference.leaves, ins, strict=True)
        ]
        sharded = compiled(run, placed, in_shardings=tuple(ins), out_shardings=list(outs))(*placed)
        self.outs = sharded[:count]
        self.values.update(zip(made, sharded[count:], strict=True))

        ident = [(e.primitive.name, *(v.aval for v in e.outvars)) for e in self.eqns]
        if case.between is None or case.between[0] != ident:
            alone = ClosedJaxpr(everything.jaxpr.replace(eqns=self.eqns), flat.consts)
            case.between = ident, list(compiled(jaxpr_as_fun(alone), reference.leaves)(*reference.leaves))
        self.out_refs = case.between[1][:count]
        self.references = dict(zip(made, case.between[1][count:], strict=True))
        self._agree: dict[Any, bool] = {}
        self._wrong: dict[int, tuple[Any, Difference] | None] = {}

    # -- questions

    def explains(self, k: int, first: Difference) -> bool:
        """Whether a result that differed differs only by rounding that the program blows up."""
        return self.culprit(k) is None and first.largest <= SLACK * max(self.leaf(k).largest, self.spread(k))

    def leaf(self, k: int) -> Difference:
        """The difference of a result in the programs that return all values."""
        return worst_of(self.outs[k], host(self.out_refs[k]), self.tolerance)

    def spread(self, k: int) -> float:
        """How far the unsharded run moves a result when its arguments are moved by the tolerance."""
        ref = self.reference
        if ref.spread is None:
            ref.spread = spread_of(ref.run, ref.leaves, ref.results, None, self.tolerance)
        return ref.spread[k]

    def culprit(self, k: int) -> tuple[int, Any, Difference] | None:
        """(op, its result, how far off) for the first op that goes wrong on the way to a result."""
        way = self.ways_back(self.results[k])
        for start in range(0, len(way), BATCH):
            batch = way[start : start + BATCH]
            self.look([i for i in batch if i not in self._wrong])
            for i in batch:
                wrong = self._wrong[i]
                if wrong is not None:
                    return i, *wrong
        return None

    def ways_back(self, var: Any) -> list[int]:
        """The ops, in program order, between a result and the values on which both runs agree."""
        found: set[int] = set()
        todo = [var]
        while todo:
            v = todo.pop()
            if isinstance(v, Literal) or v not in self.maker or self.maker[v] in found or self.agrees(v):
                continue
            found.add(self.maker[v])
            todo += self.eqns[self.maker[v]].invars
        return sorted(found)

    def agrees(self, var: Any) -> bool:
        if var not in self._agree:
            self._agree[var] = worst_of(self.values[var], host(self.references[var]), self.tolerance).ok
        return self._agree[var]

    def look(self, ops: Sequence[int]) -> None:
        """Find the ops that do something else than one device does to the same operands."""
        eqns = [self.eqns[i] for i in ops]
        runs = [self.alone(eqn) for eqn in eqns]
        # every op has operands of its own here, so one compilation does for all
        xss = [xs for _, xs in runs]
        expected = compiled(lambda xss: [run(*xs) for (run, _), xs in zip(runs, xss, strict=True)], [xss])(xss)
        for i, eqn, (run, xs), outs in zip(ops, eqns, runs, expected, strict=True):
            ours, theirs = [self.values[v] for v in eqn.outvars], [host(x) for x in outs]
            off = [worst_of(a, b, self.tolerance) for a, b in zip(ours, theirs, strict=True)]
            spread = [0.0] * len(off)
            if not all(d.ok for d in off):
                ulps = 4.0 if eqn.primitive.name in ELEMENTWISE else None
                once = compiled(run, xs)
                spread = spread_of(lambda moved, once=once: once(*moved), xs, theirs, ulps, self.tolerance)
            results = zip(eqn.outvars, off, spread, strict=True)
            beyond = [(v, d) for v, d, s in results if not d.ok and d.largest > SLACK * s]
            self._wrong[i] = max(beyond, key=lambda x: x[1].relative, default=None)

    def alone(self, eqn: Any) -> tuple[Callable[..., list[Any]], list[Any]]:
        """An op as a function, and the sharded run's operands on one device."""
        ins = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        one = self.plan.program.closed.jaxpr.replace(
            constvars=[], invars=ins, eqns=[eqn], outvars=eqn.outvars, effects=eqn.effects
        )
        return jaxpr_as_fun(ClosedJaxpr(one, ())), [on_device(self.values[v], self.device) for v in ins]

    # -- the error

    def error(self, failed: list[int], found: list[Difference]) -> CheckError:
        """The first result that differs, by how much, and the first op that goes wrong."""
        plan, k = self.plan, failed[0]
        value = plan.program.outputs[k]
        path = plan.outputs[k].path
        what = f"`{path}`" if path else "the result"
        lines = [
            f"the layout `{plan.layout}` changes {what} on the mesh {mesh_text(plan.mesh)}",
            f"  {found[k]}",
        ]
        if len(failed) > 1:
            others = ", ".join(plan.outputs[j].path for j in failed[:6])
            lines.append(f"  {len(failed)} of {len(found)} results differ: {others}{', …' * (len(failed) > 6)}")
        culprits = [c for c in map(self.culprit, failed) if c is not None]
        source = None
        if culprits:
            i, var, off = min(culprits, key=lambda c: c[0])
            eqn = self.eqns[i]
            source = source_line(eqn)
            dims = format_dims(self.program.dims(self.program.root.env[var]))
            made = f"{var.aval.dtype}[{', '.join(map(str, var.aval.shape))}] ({dims})"
            lines.append(f"  the first op that goes wrong: {eqn.primitive.name} → {made} at {source}")
            lines.append(f"  of the same operands one device makes something else: {off}")
        elif not compare(host(self.out_refs[k]), self.reference.results[k], self.tolerance).ok:
            lines.append("  on one device the traced program differs from the function already: is it deterministic?")
        elif self.results[k] not in self.maker:
            lines.append("  it is an argument that is returned as it came")
        else:
            left = self.leaf(k)
            verb = "vanishes" if left.ok else "shrinks"
            lines.append(f"  with all values between returned as well, the difference {verb} (to {left.relative:.2g})")
            lines.append("  and every op does what it should: the compiler goes wrong where it fuses them")
        return CheckError(
            "\n".join(lines), path=path, shape=value.shape, dtype=value.aval.dtype,
            dims=format_dims(plan.program.dims(value)), source=source, rule=str(plan.layout),
            fixes=["the program is right on one device: this is a bug of the compiler or of meshpar, please report it",
                   "until then leave the dims of that op whole, e.g. `dim: none` before the other rules"],
        )  # fmt: skip

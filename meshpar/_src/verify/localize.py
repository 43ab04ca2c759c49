"""Explains a difference between the sharded and the unsharded run: rounding, or the first op that is wrong."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, primitives
from jax.sharding import Mesh

from ...errors import CheckError, JoinWarning
from ..compat.jax import Atom, sharding_constraint_p, source_line
from ..dims import format_dims
from ..global_arrays import place
from ..lower import LOWERINGS
from ..passes import make_plan
from ..plan.plan import Plan
from ..plan.request import PlanRequest
from ..program.infer import infer_like
from ..program.jaxprs import flatten, with_eqns
from ..program.kernels import kernel_p
from ..rules import primitive
from ..units import mesh_text
from .numbers import Difference, compare, compiled, host, on_device, spread_of, worst_of
from .wide import Exact, Verdict, exact, narrowest

SLACK = 8.0
"""A difference is rounding if it is at most this many times the one that perturbed operands cause."""
OPS_PER_COMPILATION = 256
"""Ops that are replayed in one compilation."""


def with_all_values(flat: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Var]]:
    """The flat program with the results of all ops as additional results, and the variables of these."""
    made = [v for eqn in flat.jaxpr.eqns for v in eqn.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(outvars=[*flat.jaxpr.outvars, *made]), flat.consts), made


def _on_one_device(eqn: JaxprEqn) -> JaxprEqn:
    """The op for one device: a sharding constraint becomes a copy."""
    return eqn.replace(primitive=primitives.copy_p, params={}) if eqn.primitive is sharding_constraint_p else eqn


@dataclass(eq=False, slots=True)
class Reference:
    """The run of a step without sharding, on one device, whose results are the reference of :func:`meshpar.check`.

    Attributes:
      device: of the run.
      leaves: its flat arguments.
      results: its flat results.
      run: the compiled function.
      spread: per result, the change when the arguments change by the tolerance; None: not computed yet.
      intermediates: (names and types of all ops, all values) of the last program that was run with all values as results.
    """

    device: Any
    leaves: list[Any]
    results: list[np.ndarray]
    run: Callable[[list[Any]], list[Any]]
    spread: list[float] | None = None
    intermediates: tuple[object, list[Any]] | None = None


class Localizer:
    """Finds out why results of a sharded and an unsharded run differ, by runs of both with all intermediate values as
    results.

    Args:
      plan: of the sharded program.
      reference: the unsharded run.
      tolerance: allowed difference of a result, relative to its largest absolute value.
    """

    def __init__(self, plan: Plan, reference: Reference, tolerance: float):
        """Run the sharded program with every intermediate value as a result, and the unsharded one unless ``reference`` has
        its values."""
        assert isinstance(plan.mesh, Mesh)
        self.plan, self.reference, self.tolerance = plan, reference, tolerance
        leaves = reference.leaves
        flat = flatten(plan.program.closed)
        everything, made = with_all_values(flat)
        self.closed = ClosedJaxpr(with_eqns(flat.jaxpr, list(map(_on_one_device, flat.jaxpr.eqns))), flat.consts)
        self.eqns, self.results = self.closed.jaxpr.eqns, flat.jaxpr.outvars
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        count = len(self.results)

        self.program = infer_like(plan.program, everything)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JoinWarning)  # the first plan has warned
            request = PlanRequest(
                plan.layout, plan.mesh, lowering=plan.lowering, overlap=plan.overlap, options=plan.options.mode,
                calibrations=plan.request.calibrations,
            )  # fmt: skip
            again = make_plan(self.program, request)
            run, ins, outs = LOWERINGS[again.lowering](again, plan.mesh)
        placed = [place(x, s) if isinstance(x, jax.Array | np.ndarray) else x for x, s in zip(leaves, ins, strict=True)]
        sharded = compiled(run, placed, in_shardings=tuple(ins), out_shardings=list(outs))(*placed)
        self.outs = sharded[:count]
        known = (*flat.jaxpr.constvars, *flat.jaxpr.invars, *made)
        self.values = dict(zip(known, (*flat.consts, *leaves, *sharded[count:]), strict=True))

        ident = [(e.primitive.name, *(v.aval for v in e.outvars)) for e in self.eqns]
        if reference.intermediates is None or reference.intermediates[0] != ident:
            alone, _ = with_all_values(self.closed)
            reference.intermediates = ident, list(compiled(jaxpr_as_fun(alone), leaves)(*leaves))
        self.out_refs = reference.intermediates[1][:count]
        self.references = dict(zip(made, reference.intermediates[1][count:], strict=True))
        self._agree: dict[Any, bool] = {}
        self._wrong: dict[int, tuple[Any, Difference, Verdict | None] | None] = {}

    def explains(self, k: int, first: Difference, out: Any) -> bool:
        """Whether a result differs only by rounding.

        Args:
          k: the index of the result.
          first: its difference.
          out: the result of the sharded run.
        """
        if self.culprit(k) is not None:
            return False
        if first.largest <= SLACK * max(self.leaf(k).largest, self.spread(k)):
            return True
        # the second verdict tests that the function is deterministic
        verdicts = [self.verdict(k, out), self.verdict(k, self.reference.results[k])]
        return all(v is not None and v.rounding for v in verdicts)

    @functools.cached_property
    def exact(self) -> Exact | None:
        """The unsharded program in a wider dtype."""
        return exact(self.closed, self.reference.leaves)

    def verdict(self, k: int, out: Any) -> Verdict | None:
        """A result and its value on one device against the program in a wider dtype; None if there is no wider dtype."""
        return None if self.exact is None else self.exact.judge(k, out, host(self.out_refs[k]))

    def leaf(self, k: int) -> Difference:
        """The difference of a result between the programs that return all values."""
        return worst_of(self.outs[k], host(self.out_refs[k]), self.tolerance)

    def spread(self, k: int) -> float:
        """The change of a result of the unsharded run when its arguments change by the tolerance."""
        ref = self.reference
        if ref.spread is None:
            ref.spread = spread_of(ref.run, ref.leaves, ref.results, None, self.tolerance)
        return ref.spread[k]

    def culprit(self, k: int) -> tuple[int, Any, Difference, Verdict | None] | None:
        """(index, result, difference, verdict of a wider dtype) of the first wrong op that a result depends on."""
        ops = self.suspects(self.results[k])
        for start in range(0, len(ops), OPS_PER_COMPILATION):
            batch = ops[start : start + OPS_PER_COMPILATION]
            self.replay([i for i in batch if i not in self._wrong])
            for i in batch:
                wrong = self._wrong[i]
                if wrong is not None:
                    return i, *wrong
        return None

    def suspects(self, var: Atom) -> list[int]:
        """The ops, in program order, between the values on which both runs agree and a result."""
        ops: set[int] = set()
        todo = [var]
        while todo:
            v = todo.pop()
            if isinstance(v, Literal) or v not in self.maker or self.maker[v] in ops or self.agrees(v):
                continue
            ops.add(self.maker[v])
            todo += self.eqns[self.maker[v]].invars
        return sorted(ops)

    def agrees(self, var: Var) -> bool:
        """Whether a value is equal in both runs, within the tolerance."""
        if var not in self._agree:
            self._agree[var] = worst_of(self.values[var], host(self.references[var]), self.tolerance).ok
        return self._agree[var]

    def replay(self, ops: Sequence[int]) -> None:
        """Apply ops on one device to the operands of the sharded run; record those whose results differ by more than rounding."""
        eqns = [self.eqns[i] for i in ops]
        runs = [self.alone(eqn) for eqn in eqns]
        # the ops do not depend on each other, so that one compilation contains all of them
        xss = [xs for _, xs in runs]
        expected = compiled(lambda xss: [run(*xs) for (run, _), xs in zip(runs, xss, strict=True)], [xss])(xss)
        for i, eqn, (run, xs), outs in zip(ops, eqns, runs, expected, strict=True):
            ours, theirs = [self.values[v] for v in eqn.outvars], [host(x) for x in outs]
            off = [worst_of(a, b, self.tolerance) for a, b in zip(ours, theirs, strict=True)]
            spread = [0.0] * len(off)
            if not all(d.ok for d in off):
                ulps = 4.0 if primitive(eqn.primitive.name).elementwise else None
                once = compiled(run, xs)
                spread = spread_of(lambda xs, once=once: once(*xs), xs, theirs, ulps, self.tolerance)
            beyond = [j for j, (d, s) in enumerate(zip(off, spread, strict=True)) if not d.ok and d.largest > SLACK * s]
            wide = exact(self.one(eqn), xs) if beyond else None  # None: there is no wider dtype
            verdicts = [None if wide is None else wide.judge(j, ours[j], theirs[j]) for j in beyond]
            judged = zip(beyond, verdicts, strict=True)
            wrong = [(eqn.outvars[j], off[j], v) for j, v in judged if v is None or not v.rounding]
            self._wrong[i] = max(wrong, key=lambda x: x[1].relative, default=None)

    def one(self, eqn: JaxprEqn) -> ClosedJaxpr:
        """A program that consists of one op; its inputs are the operands."""
        ins = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
        parts = {"constvars": [], "invars": ins, "eqns": [eqn], "outvars": eqn.outvars, "effects": eqn.effects}
        return ClosedJaxpr(self.plan.program.closed.jaxpr.replace(**parts), ())

    def alone(self, eqn: JaxprEqn) -> tuple[Callable[..., list[Any]], list[Any]]:
        """A function of one op, and its operands in the sharded run, copied to one device."""
        closed = self.one(eqn)
        return jaxpr_as_fun(closed), [on_device(self.values[v], self.reference.device) for v in closed.jaxpr.invars]

    def error(self, failed: list[int], differences: list[Difference], outs: Sequence[Any]) -> CheckError:
        """The error for results that differ by more than rounding: the first of them, its difference, and the first wrong op."""
        plan, k = self.plan, failed[0]
        value = plan.program.outputs[k]
        path = plan.outputs[k].path
        result = f"`{path}`" if path else "the result"
        lines = [
            f"the layout `{plan.layout}` changes {result} on the mesh {mesh_text(plan.sizes)}",
            f"  {differences[k]}",
        ]
        if len(failed) > 1:
            others = ", ".join(plan.outputs[j].path for j in failed[:6])
            lines.append(f"  {len(failed)} of {len(differences)} results differ: {others}{', …' * (len(failed) > 6)}")
        culprits = [c for c in map(self.culprit, failed) if c is not None]
        source, deterministic, kernel = None, True, False
        verdict = self.verdict(k, outs[k])
        if culprits:
            i, var, off, verdict = min(culprits, key=lambda c: c[0])
            eqn = self.eqns[i]
            source, kernel = source_line(eqn), eqn.primitive is kernel_p
            dims = format_dims(self.program.dims(self.program.root.env[var]))
            value_text = f"{var.aval.dtype}[{', '.join(map(str, var.aval.shape))}] ({dims})"
            lines.append(f"  the first wrong op: {eqn.primitive.name} → {value_text}{f' at {source}' * bool(source)}")
            lines.append(f"  one device computes a different result from the same operands: {off}")
        elif not compare(host(self.out_refs[k]), self.reference.results[k], self.tolerance).ok:
            lines.append("  already on one device the traced program and the function differ")
            deterministic = False
        elif self.results[k] not in self.maker:
            lines.append("  it is an argument that is returned unchanged")
        else:
            left = self.leaf(k)
            verb = "vanishes" if left.ok else "shrinks"
            returned = "with all intermediate values returned as well"
            lines.append(f"  {returned}, the difference {verb} (to {left.relative:.2g})")
            lines.append("  and every op is correct by itself: the compiler makes an error when it fuses them")
        if verdict is not None:
            lines.append(f"  {verdict}")
        return CheckError(
            "\n".join(lines), path=path, shape=value.shape, dtype=value.aval.dtype,
            dims=format_dims(plan.program.dims(value)), source=source, rule=str(plan.layout),
            fixes=_fixes(deterministic, verdict is not None or narrowest(self.closed) is None, kernel),
        )  # fmt: skip


def _fixes(deterministic: bool, certain: bool, kernel: bool) -> list[str]:
    """Suggestions for a difference; ``certain``: it is known to be more than rounding; ``kernel``: its rule is the user's."""
    if not deterministic:
        return ["make the function deterministic: on one device two runs of it differ"]
    until = "until then keep the dims of that op unsharded, e.g. `dim: none` before the other rules"
    if kernel:
        return [
            "check the `mp.kernel_rule` of this kernel: its dims, and whether a split dim changes the result",
            until,
        ]
    if certain:
        return ["more than rounding: this is a bug of the compiler or of meshpar, please report it", until]
    return [
        "there is no wider dtype to tell rounding from an error: compare with a larger tolerance=, or in another precision",
        "if it is more than rounding, it is a bug of the compiler or of meshpar: please report it; " + until,
    ]

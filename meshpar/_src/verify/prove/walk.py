"""Walks the function as it was written and the per-device program, equation by equation, and compares their results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ...compat.jax import axes_of_spec, scan_counts, source_line, without_dead_code
from . import loops
from .lemmas import LEMMAS, family_of
from .lemmas.elementwise import SAME
from .lemmas.kernel import on_blocks
from .loops import Loop
from .relation import Cause, Context, Contradiction, Rel, Unknown, Unverified, aval_of, require
from .report import Proof, Result
from .term import Terms

Known = Rel | Unknown
CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call custom_vmap_call".split()
)
"""Primitives that compute their body; others may have a body as well, such as a reduction, and are ops."""


KERNEL = "kernel of "
"""Prefix of the name of a call that is the local form of a kernel."""


def as_sum(r: Any) -> Any:
    """The relation, of kind ``one`` as the sum that it is."""
    return replace(r, kind="sum") if isinstance(r, Rel) and r.kind == "one" else r


class Walk:
    """Walks jaxprs and keeps the relation of each value.

    Attributes:
      ctx: terms, mesh and written loops.
      proven: family of lemmas → equations of the per-device program whose results have a relation.
      failed: why others have none.
      counting: whether equations are counted: not in the first walks of a loop body.
    """

    def __init__(self, ctx: Context):
        self.ctx = ctx
        self.proven: Counter[str] = Counter()
        self.failed: dict[Cause, int] = {}
        self.unreached = 0
        self.counting = True

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Known]) -> list[Known]:
        """The relations of the results of a jaxpr for those of its arguments."""
        env: dict[Any, Known] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = const if isinstance(const, (Rel, Unknown)) else self.constant(const)

        def read(var: Any) -> Known:
            if isinstance(var, Literal):
                return self.ctx.replicated(self.ctx.terms.literal(var.val, aval_of(var).dtype), ())
            return env[var]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def constant(self, value: Any) -> Rel:
        term = self.ctx.terms.array(value)
        return self.ctx.replicated(term, getattr(value, "shape", ()))

    def equation(self, eqn: JaxprEqn, rels: Sequence[Known]) -> list[Known]:
        """The relations of the results of an equation."""
        name = eqn.primitive.name
        special = {"scan": self.scan, "while": self.while_, "cond": self.cond, "shard_map": self.shard_map}.get(name)
        body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("call")))
        try:
            if special is not None:
                return special(eqn, list(map(as_sum, rels)))
            if name in SAME:
                self.count(eqn, "elementwise")
                return list(rels)
            if str(eqn.params.get("name", "")).startswith(KERNEL):
                unknown = next((r for r in rels if isinstance(r, Unknown)), None)
                if unknown is not None:
                    return [unknown] * len(eqn.outvars)
                own = str(eqn.params["name"]).removeprefix(KERNEL)
                out = on_blocks(self.ctx, own, eqn, [r for r in rels if isinstance(r, Rel)])
                self.ctx.assumed[own] += self.counting
                self.count(eqn, "kernel")
                return list(out)
            if body is not None and name in CALLS:
                closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, [])
                return self.run(closed.jaxpr, closed.consts, rels)
            unknown = next((r for r in rels if isinstance(r, Unknown)), None)
            if unknown is not None:
                self.unreached += self.counting and not self.ctx.written
                return [unknown] * len(eqn.outvars)
            require(name in LEMMAS, "no lemma")
            known = [r if name == "bitcast_convert_type" else as_sum(r) for r in rels if isinstance(r, Rel)]
            out = LEMMAS[name](self.ctx, eqn, known)
            for r, var in zip(out, eqn.outvars, strict=True):
                assert r.shape == tuple(aval_of(var).shape), (name, r, aval_of(var))
                if self.ctx.written:
                    self.ctx.terms.known.add(r.term.number)
            self.count(eqn, family_of(name))
            return list(out)
        except Unverified as e:
            terms = [r.term for r in rels if isinstance(r, Rel) and r.term.op != "literal"]
            if not all(map(self.ctx.terms.is_known, terms)):  # perhaps blocks of values that are not in this form
                e = Unverified(str(e))
            return [self.unknown(eqn, e)] * len(eqn.outvars)

    def count(self, eqn: JaxprEqn, family: str) -> None:
        if self.counting and not self.ctx.written:
            self.proven[family] += 1

    def unknown(self, eqn: JaxprEqn, error: Unverified) -> Unknown:
        """Record an equation that no lemma proves."""
        if self.ctx.written:  # what is written has this value, and what is planned cannot be compared with it
            cause = Cause(eqn.primitive.name, source_line(eqn), f"of the function as written: {error}")
        else:
            cause = self.cause(eqn, str(error), isinstance(error, Contradiction))
        if self.counting:
            self.failed[cause] = self.failed.get(cause, 0) + 1
        return Unknown(cause)

    def cause(self, eqn: JaxprEqn, reason: str, refused: bool = False) -> Cause:
        return Cause(eqn.primitive.name, source_line(eqn), reason, refused)

    # -- the mesh

    def shard_map(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        """Arguments as blocks by their specs; each result must be a block by its spec."""
        p, outer = eqn.params, self.ctx.sizes
        require(not outer, "a shard_map within another one")
        sizes = {str(a): int(n) for a, n in dict(p["mesh"].shape).items()}
        self.ctx.sizes = sizes

        def spec_of(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in axes_of_spec(spec, rank))

        try:
            args: list[Known] = []
            for r, spec, var in zip(rels, p["in_specs"], p["jaxpr"].invars, strict=True):
                if isinstance(r, Unknown):
                    args.append(r)
                    continue
                axes = spec_of(spec, len(r.shape))
                args.append(r.of(r.term, aval_of(var).shape, axes))
            results = self.run(p["jaxpr"], (), args)
            out: list[Known] = []
            for k, (r, spec, var) in enumerate(zip(results, p["out_specs"], eqn.outvars, strict=True)):
                if isinstance(r, Rel):
                    r = self.result(eqn, k, r, spec_of(spec, len(r.shape)), tuple(aval_of(var).shape))
                out.append(r)
            return out
        finally:
            self.ctx.sizes = outer

    def result(self, eqn: JaxprEqn, k: int, r: Rel, spec: Any, shape: tuple[int, ...]) -> Known:
        """The global value of a result that is sharded by its spec."""
        refused = ""
        if r.partial:
            refused = f"result {k} is partial over {', '.join(sorted(r.partial))}"
        for d, (have, want) in enumerate(zip(r.spec, spec, strict=True)):
            if r.term.shape[d] != 1 and have != want:
                refused = (
                    f"dim {d} of result {k} is sharded over {have or 'no axis'}, and its spec says {want or 'no axis'}"
                )
        if refused:
            known = self.ctx.terms.is_known(r.term)
            return self.unknown(eqn, Contradiction(refused) if known else Unverified(refused))
        if r.term.axes:
            return self.unknown(eqn, Unverified(f"result {k} may depend on the device"))
        return self.ctx.replicated(r.term, shape)

    # -- loops and branches

    def scan(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        p, terms = eqn.params, self.ctx.terms
        (n, m), closed = scan_counts(p), p["jaxpr"]
        consts, inits, stacks = rels[:n], rels[n : n + m], rels[n + m :]
        avals = [aval_of(v) for v in closed.jaxpr.invars[n : n + m]]
        length = int(p["length"])

        def body(loop: Loop) -> loops.Run:
            def element(r: Known) -> Known:
                if isinstance(r, Unknown):
                    return r
                require(not r.spec[0], "a loop over a dim that is sharded", refused=True)
                if r.term.shape[0] == 1:
                    return r.of(terms.reshape(r.term, r.term.shape[1:]), r.shape[1:], r.spec[1:])
                term = terms.make("elem", loop.number, (r.term,), r.term.shape[1:], r.term.dtype)
                return r.of(term, r.shape[1:], r.spec[1:])

            def run(carries: list[Known], counted: bool) -> tuple[list[Known], list[Known]]:
                results = self.walked(closed, [*consts, *carries, *map(element, stacks)], counted)
                return results[:m], results[m:]

            return run

        def stacked(loop: Loop, r: Known) -> Known:
            if isinstance(r, Unknown):
                return r
            term = terms.make("stack", loop.number, (r.term,), (length, *r.term.shape), r.term.dtype)
            if self.ctx.written:
                terms.known.add(term.number)
            return Rel(term, (length, *r.shape), ((), *r.spec), r.partial, r.kind)

        key = "scan", length, bool(p["reverse"])
        loop, places, guesses, ys = self.loop(eqn, key, inits, avals, body)
        return [*loops.finals(self.ctx, loop, places, guesses), *(stacked(loop, y) for y in ys)]

    def while_(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        p = eqn.params
        n, m = p["cond_nconsts"], p["body_nconsts"]
        avals = [aval_of(v) for v in p["body_jaxpr"].jaxpr.invars[m:]]

        def body(loop: Loop) -> loops.Run:
            def run(carries: list[Known], counted: bool) -> tuple[list[Known], list[Known]]:
                test = self.walked(p["cond_jaxpr"], [*rels[:n], *carries], counted)
                return self.walked(p["body_jaxpr"], [*rels[n : n + m], *carries], counted), test

            return run

        loop, places, guesses, (test,) = self.loop(eqn, ("while",), rels[n + m :], avals, body)
        if isinstance(test, Unknown):
            return [test] * len(eqn.outvars)
        require(not test.varying, "devices that take different numbers of iterations")
        same = test.term is loop.condition
        require(same, "a loop with another condition than as written")
        return loops.finals(self.ctx, loop, places, guesses)

    def walked(self, closed: ClosedJaxpr, args: Sequence[Known], counted: bool) -> list[Known]:
        """The results of a body; its equations count only if ``counted``."""
        outer = self.counting
        self.counting = outer and counted
        try:
            return self.run(closed.jaxpr, closed.consts, args)
        finally:
            self.counting = outer

    def loop(self, eqn: JaxprEqn, key: Any, inits: list[Known], avals: Sequence[Any], body: Any) -> Any:
        """(the written loop, its carries that are those of this one, their relations, the relations of the other results)."""
        if self.ctx.written:
            known = [r for r in inits if isinstance(r, Rel)]
            require(len(known) == len(inits), "a loop over values that are not understood")
            loop = loops.written_loop(self.ctx, key, known, avals, body)
            guesses = [self.ctx.replicated(c, a.shape) for c, a in zip(loop.carries, avals, strict=True)]
            return loop, range(len(avals)), guesses, body(loop)(guesses, False)[1]
        cause, best = self.cause(eqn, "a loop that the function as written does not have"), None
        for loop in self.ctx.loops.get(key, ()):
            places = loops.places_of(loop, inits, avals)
            if places is None:
                continue
            before = self.proven.copy(), dict(self.failed), self.unreached
            guesses, others = loops.invariants(self.ctx, loop, places, inits, avals, body(loop), cause)
            bad = sum(isinstance(g, Unknown) for g in [*guesses, *others])
            bad += sum(
                isinstance(y, Rel) and y.term.op != "literal" and not self.ctx.terms.is_known(y.term) for y in others
            )
            found = bad, (loop, places, guesses, others), (self.proven, self.failed, self.unreached)
            self.proven, self.failed, self.unreached = before
            if best is None or bad < best[0]:
                best = found
            if not bad:
                break
        require(best is not None, cause.reason)
        assert best is not None
        self.proven, self.failed, self.unreached = best[2]
        for g in best[1][2]:
            if isinstance(g, Unknown) and self.counting:
                self.failed.setdefault(g.cause, 1)
        return best[1]

    def cond(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        index, *operands = rels
        results = [self.run(b.jaxpr, b.consts, operands) for b in eqn.params["branches"]]
        if isinstance(index, Unknown):
            return [index] * len(eqn.outvars)
        out = loops.chosen(self.ctx, index, results, [aval_of(v) for v in eqn.outvars])
        if self.ctx.written:
            self.ctx.terms.known.update(r.term.number for r in out if isinstance(r, Rel))
        self.count(eqn, "loops")
        return out


def prove_program(written: ClosedJaxpr, program: ClosedJaxpr, paths: Sequence[str] = ()) -> Proof:
    """Prove that a lowered program computes a function.

    Args:
      written: the function, of global arrays.
      program: the same arguments and results, with a ``shard_map`` of the per-device program inside.
      paths: names of the results.

    Returns:
      A :class:`Proof`.

    Example:
      >>> prove_program(jax.make_jaxpr(f)(x), jax.make_jaxpr(sharded_f)(x)).proven
      True
    """
    begin = time.process_time()
    ctx = Context(Terms())
    walk = Walk(ctx)
    inputs: list[Known] = [
        ctx.replicated(ctx.terms.make("input", k, (), aval_of(v).shape, aval_of(v).dtype), aval_of(v).shape)
        for k, v in enumerate(written.jaxpr.invars)
    ]
    expected = walk.run(written.jaxpr, written.consts, inputs)
    ctx.terms.known.update(r.term.number for r in inputs if isinstance(r, Rel))
    ctx.written, program = False, without_dead_code(program)
    found = walk.run(program.jaxpr, program.consts, inputs)
    results = []
    for k, (have, want) in enumerate(zip(found, expected, strict=True)):
        path = paths[k] if paths else str(k)
        if isinstance(have, Unknown):
            results.append(Result(path, "refused" if have.cause.refused else "not verified", have.cause))
        elif isinstance(want, Unknown):
            results.append(Result(path, "not verified", want.cause))
        elif have.term is not want.term:
            cause = Cause(
                "result", path, f"is not the value of the function as written: {loops.differs(have.term, want.term)}"
            )
            results.append(Result(path, "not verified", cause))
        else:
            results.append(Result(path, "proven"))
    failed = {**walk.failed, **{r.cause: 0 for r in results if r.cause is not None and r.cause not in walk.failed}}
    return Proof(tuple(results), walk.proven, failed, walk.unreached, ctx.assumed, time.process_time() - begin)

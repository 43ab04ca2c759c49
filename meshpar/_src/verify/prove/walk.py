"""Walks the function as it was written and the per-device program, equation by equation, and compares their results."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ...compat.jax import aval_of, axes_of_spec, interpret, scan_counts, source_line, without_dead_code
from . import loops
from .certificate import Proof, Result
from .claims import Claims, differences
from .laws import act, axes_text, not_partial, partial_of
from .lemmas import LOCAL_FORM, family_of, lemma_of, of_full_arrays
from .lemmas.elementwise import IDENTITIES
from .loops import Loop
from .non_block_shards import OF_FRAGMENTS, of_one_device
from .relation import Cause, Context, Fragments, Known, Rel, Spec, Unverified, mapped, require
from .term import Terms

CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call custom_vmap_call".split()
)
"""Primitives that compute their body; others may have a body as well, such as a reduction, and are ops."""


def as_sum(r: Rel) -> Rel:
    """The relation, of kind ``one`` as the sum that it is."""
    return replace(r, kind="sum") if r.kind == "one" else r


class Walk:
    """Walks jaxprs and keeps the relation of each value.

    Attributes:
      ctx: terms, mesh and written loops.
      proven: family of lemmas → equations of the per-device program whose results have a relation.
      kernels: name → calls of local forms of kernels.
      failed: why others have none.
      unreached: equations that read their results.
      arguments, results: number of an argument, and of the term of a result → its specs in the ``shard_map``.
      counting: whether equations are counted: not in the first walks of a loop body.
    """

    def __init__(self, ctx: Context):
        self.ctx = ctx
        self.proven: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.failed: Counter[Cause] = Counter()
        self.unreached = 0
        self.counting = True
        self.arguments: defaultdict[int, set[Spec]] = defaultdict(set)
        self.results: defaultdict[int, set[Spec]] = defaultdict(set)
        self.bodies = {"scan": self.scan, "while": self.while_, "cond": self.cond, "shard_map": self.shard_map}
        self.bodies.update(dict.fromkeys(CALLS, self.call))

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Known]) -> list[Known]:
        """The relations of the results of a jaxpr, from the relations of its arguments."""
        known = [self.constant(c) for c in consts]
        return interpret(jaxpr, known, args, self.equation, lambda x: self.constant(x.val, aval_of(x).dtype))

    def constant(self, value: Any, dtype: Any = None) -> Rel:
        """The relation of a constant, which all devices have."""
        x = np.asarray(value)
        term = self.ctx.terms.array(x) if x.shape else self.ctx.terms.literal(x, dtype or x.dtype)
        return self.ctx.replicated(term, x.shape)

    def without_elements(self, aval: Any) -> Rel:
        """The relation of an array without elements."""
        return self.ctx.replicated(
            self.ctx.terms.make("literal", "0", (), (1,) * len(aval.shape), aval.dtype), aval.shape
        )

    def equation(self, eqn: JaxprEqn, rels: Sequence[Known]) -> list[Known]:
        """The relations of the results of an equation."""
        avals = [aval_of(v) for v in eqn.outvars]
        if avals and all(0 in a.shape for a in avals):  # arrays without elements are equal
            return [self.without_elements(a) for a in avals]
        name, fn = eqn.primitive.name, lemma_of(eqn, self.ctx.sizes)
        known, unknown = [r for r in rels if isinstance(r, Rel)], next((r for r in rels if isinstance(r, Cause)), None)
        try:
            if fn is None and name in self.bodies:
                return self.bodies[name](eqn, list(rels))
            if name in IDENTITIES:
                self.count(eqn, "elementwise")
                return list(rels)
            if unknown is not None:
                self.unreached += self.counting and not self.ctx.written
                return [unknown] * len(eqn.outvars)
            fn = fn or of_full_arrays
            moves = name == "bitcast_convert_type" or (len(rels) == 1 and family_of(fn) == "shape")  # also -0.0
            if name not in OF_FRAGMENTS and family_of(fn) != "elementwise":
                known = [of_one_device(self.ctx, r) for r in known]
                require(not any(r.fragmented for r in known), "no lemma for fragments")
            out = fn(self.ctx, eqn, known if moves else list(map(as_sum, known)))
            for r, aval in zip(out, avals, strict=True):
                self.check(r, aval)
        except Unverified as e:
            return [self.unknown(eqn, str(e), e.refused, rels)] * len(eqn.outvars)
        except Exception as e:  # of a lemma: nothing is known, and the report says so
            return [self.unknown(eqn, f"{e!r}"[:200], rels=rels, error=True)] * len(eqn.outvars)
        self.ctx.note(out)
        self.count(eqn, family_of(fn))
        return list(out)

    def check(self, r: Rel, aval: Any) -> None:
        """Require that a relation fits to the shape and dtype of a value."""
        fits = r.shape == tuple(aval.shape) and (r.incomplete or r.term.dtype == str(aval.dtype))
        for n, size, axes in zip(r.shape, r.term.shape, r.spec, strict=True):
            fits &= size == 1 or isinstance(axes, Fragments) or n * self.ctx.size(axes) == size
        assert fits, (r, aval)

    def count(self, eqn: JaxprEqn, family: str) -> None:
        if self.counting and not self.ctx.written:
            self.proven[family] += 1
            if family == "kernel":
                self.kernels[str(eqn.params["name"]).removeprefix(LOCAL_FORM)] += 1

    def unknown(
        self, eqn: JaxprEqn, reason: str, refused: bool = False, rels: Sequence[Known] = (), error: bool = False
    ) -> Cause:
        """Record an equation that no lemma proves. It is refused only if its operands are values of the function as it was written:
        others are perhaps blocks of values that are not in this form."""
        terms, written = [r.term for r in rels if isinstance(r, Rel) and r.term.op != "literal"], self.ctx.written
        refused = refused and not written and all(map(self.ctx.terms.is_known, terms))
        reason = f"of the function as written: {reason}" if written else reason
        cause = Cause(eqn.primitive.name, source_line(eqn), reason, refused, error)
        if self.counting:
            self.failed[cause] += 1
        return cause

    def call(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        """The results of the body of a call."""
        body: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr", eqn.params.get("call")))
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, [])
        return self.run(closed.jaxpr, closed.consts, rels)

    # -- the mesh

    def shard_map(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        """Arguments as blocks by their specs; each result must be a block by its spec."""
        p, jaxpr = eqn.params, eqn.params["jaxpr"]
        require(not self.ctx.sizes, "a shard_map within another one")
        sizes = {str(a): int(n) for a, n in dict(p["mesh"].shape).items()}

        def spec_of(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in axes_of_spec(spec, rank))

        self.ctx.sizes = sizes
        try:
            args = list(rels)
            for k, (r, spec, v) in enumerate(zip(rels, p["in_specs"], jaxpr.invars, strict=True)):
                if isinstance(r, Rel):
                    spec = spec_of(spec, len(r.shape))
                    args[k] = r.of(r.term, aval_of(v).shape, spec)
                    if r.term.op == "input":
                        self.arguments[r.term.params].add(spec)
            results = self.run(jaxpr, (), args)
            for k, (r, spec) in enumerate(zip(results, p["out_specs"], strict=True)):
                if isinstance(r, Rel):
                    self.results[r.term.number].add(spec_of(spec, len(r.shape)))
                    results[k] = self.result(eqn, k, r, spec_of(spec, len(r.shape)))
            return results
        finally:
            self.ctx.sizes = {}

    def result(self, eqn: JaxprEqn, k: int, r: Rel, spec: Any) -> Known:
        """The global value of a result that is sharded by its spec."""
        for d, (have, want) in enumerate(zip(r.spec, spec, strict=True)):
            alike = not have and r.term.shape[d] != 1 and not set(want) & r.varying
            if want and alike:  # blocks of an array that repeats them
                term = self.ctx.expanded(r, [d]).term
                r = replace(r, term=self.ctx.terms.take(term, d, np.tile(np.arange(r.shape[d]), self.ctx.size(want))))
                r = r.placed({d: want})
        refused = f"result {k} is partial over {axes_text(r.partial)}" if r.partial else ""
        for d, (have, want) in enumerate(zip(r.spec, spec, strict=True)):
            if r.term.shape[d] != 1 and have != want:
                refused = f"dim {d} of result {k} is sharded over {axes_text(have)}; its spec says {axes_text(want)}"
        shape = tuple(aval_of(eqn.outvars[k]).shape)
        if refused:  # rows that devices repeat may be blocks of an array that repeats them: the term has fewer then
            contradicts = not r.fragmented and bool(r.partial or (r.sharded and tuple(r.term.shape) == shape))
            return self.unknown(eqn, refused, contradicts, [r])
        if r.term.axes:
            return self.unknown(eqn, f"result {k} may depend on the device")
        return self.ctx.replicated(r.term, shape)

    # -- loops and branches

    def scan(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        p, rels = eqn.params, mapped(as_sum, rels)
        (n, m), closed, length = scan_counts(p), p["jaxpr"], int(p["length"])
        avals = [aval_of(v) for v in closed.jaxpr.invars[n : n + m]]

        def body(loop: Loop, carries: Sequence[Known], counted: bool) -> tuple[list[Known], list[Known]]:
            elements = mapped(lambda r: loops.element(self.ctx, loop, r), rels[n + m :])
            results = self.walked(closed, [*rels[:n], *carries, *elements], counted)
            return results[:m], results[m:]

        key = "scan", length, bool(p["reverse"])
        loop, guesses, ys = self.loop(eqn, key, rels[n : n + m], avals, body)
        stacks = mapped(lambda r: loops.stacked(self.ctx, loop, length, r), ys)
        self.ctx.note(stacks)
        return [*loops.finals(self.ctx, loop, guesses), *stacks]

    def while_(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        p, rels = eqn.params, mapped(as_sum, rels)
        n, m = p["cond_nconsts"], p["body_nconsts"]
        avals = [aval_of(v) for v in p["body_jaxpr"].jaxpr.invars[m:]]

        def body(loop: Loop, carries: Sequence[Known], counted: bool) -> tuple[list[Known], list[Known]]:
            test = self.walked(p["cond_jaxpr"], [*rels[:n], *carries], counted)
            return self.walked(p["body_jaxpr"], [*rels[n : n + m], *carries], counted), test

        loop, guesses, (test,) = self.loop(eqn, ("while",), rels[n + m :], avals, body)
        if isinstance(test, Cause):
            return [test] * len(eqn.outvars)
        require(not test.varying, "devices that take different numbers of iterations")
        require(test.term is loop.condition, "a loop with another condition than as written")
        return loops.finals(self.ctx, loop, guesses)

    def walked(self, closed: ClosedJaxpr, args: Sequence[Known], counted: bool) -> list[Known]:
        """The results of a body; its equations count only if ``counted``."""
        outer, self.counting = self.counting, self.counting and counted
        try:
            return self.run(closed.jaxpr, closed.consts, args)
        finally:
            self.counting = outer

    def loop(
        self, eqn: JaxprEqn, key: Any, inits: list[Known], avals: Sequence[Any], body: loops.Body
    ) -> tuple[Loop, list[Known], list[Known]]:
        """(the written loop with the carries of this one, their relations, the relations of the other results)."""
        if self.ctx.written:
            return self.known_loop(key, inits, avals, body) or loops.written_loop(self.ctx, key, inits, avals, body)
        cause = Cause(eqn.primitive.name, source_line(eqn), "a loop that the function as written does not have")
        found: list[tuple[tuple[int, int], Loop, list[Known]]] = []
        for written in self.ctx.loops.get(key, ()):
            loop = loops.matched(written, inits, avals)
            if loop is not None:
                guesses, others = loops.invariants(self.ctx, loop, inits, avals, body, cause)
                terms = [r.term for r in others if isinstance(r, Rel) and r.term.op != "literal"]
                bad = sum(isinstance(r, Cause) for r in [*guesses, *others])
                bad += sum(not self.ctx.terms.is_known(t) for t in terms)
                found.append(((bad, sum(t not in loop.others for t in terms)), loop, guesses))
                if not any(found[-1][0]):
                    break
        require(bool(found), cause.reason)
        _, loop, guesses = min(found, key=lambda f: f[0])
        causes = {g for g in guesses if isinstance(g, Cause)} if self.counting else set()
        self.failed.update(causes - set(self.failed))
        return loop, guesses, body(loop, guesses, True)[1]

    def known_loop(
        self, key: Any, inits: list[Known], avals: Sequence[Any], body: loops.Body
    ) -> tuple[Loop, list[Known], list[Known]] | None:
        """A loop of the function as written that is equal to an earlier one, as a recomputed one is; None: there is none."""
        for loop in [*self.ctx.loops.get(key, ())]:
            if [r.term for r in inits if isinstance(r, Rel)] == loop.inits and len(loop.nexts) == len(loop.carries):
                carries: list[Known] = [
                    self.ctx.replicated(c, a.shape) for c, a in zip(loop.carries, avals, strict=True)
                ]
                before = self.ctx.terms.known.copy(), {k: [*v] for k, v in self.ctx.loops.items()}
                nexts, others = body(loop, carries, False)
                found = [r.term for r in (*nexts, *others) if isinstance(r, Rel)]
                if found == [*loop.nexts, *loop.others]:
                    return loop, carries, others
                self.ctx.terms.known, self.ctx.loops = before
        return None

    def cond(self, eqn: JaxprEqn, rels: list[Known]) -> list[Known]:
        """The results of branches, of which all devices take the same one."""
        index, *operands = mapped(as_sum, rels)
        results = [self.run(b.jaxpr, b.consts, operands) for b in eqn.params["branches"]]
        out: list[Known] = []
        for var, *cases in zip(eqn.outvars, *results, strict=True):
            known = [r for r in (index, *cases) if isinstance(r, Rel)]
            if len(known) == 1 + len(cases):
                not_partial(known[:1], "a branch")
                require(not known[0].varying, "devices that take different branches")
                ins, avals = [(), *[range(len(aval_of(var).shape))] * len(cases)], [aval_of(var)]
                out += act(self.ctx, eqn, known, ins=ins, avals=avals, partial=partial_of(known[1:], "a branch"))
            else:
                out.append(next(r for r in (index, *cases) if isinstance(r, Cause)))
        self.ctx.note(out)
        self.count(eqn, "loops")
        return out


def prove_program(
    written: ClosedJaxpr, program: ClosedJaxpr, paths: Sequence[str] = (), claims: Claims | None = None
) -> Proof:
    """Prove that a lowered program computes a function.

    Args:
      written: the function, of global arrays.
      program: the same arguments and results, with a ``shard_map`` of the per-device program inside.
      paths: names of the results.
      claims: of the plan that the program was made from.

    Returns:
      A :class:`Proof`.

    Example:
      >>> prove_program(jax.make_jaxpr(f)(x), jax.make_jaxpr(sharded_f)(x)).proven
      True
    """
    begin = time.process_time()
    ctx = Context(Terms())
    walk = Walk(ctx)
    avals = [aval_of(v) for v in written.jaxpr.invars]
    terms = [ctx.terms.make("input", k, (), a.shape, a.dtype) for k, a in enumerate(avals)]
    inputs: list[Known] = [
        walk.without_elements(a) if 0 in a.shape else ctx.replicated(t, a.shape)
        for t, a in zip(terms, avals, strict=True)
    ]
    ctx.note(inputs)
    expected = walk.run(written.jaxpr, written.consts, inputs)
    ctx.written, program = False, without_dead_code(program)
    found = walk.run(program.jaxpr, program.consts, inputs)
    names = paths or list(map(str, range(len(found))))
    results = tuple(map(compared, names, found, expected))
    failed, count = {}, None
    if claims is not None:
        specs = [(f"argument {p}", want, walk.arguments[k]) for k, (p, want) in enumerate(claims.arguments)]
        for (p, want), r in zip(claims.results, found, strict=True):
            specs.append((f"result {p}", want, walk.results[r.term.number] if isinstance(r, Rel) else set()))
        failed = {Cause("plan", *wrong): 0 for wrong in differences(claims, program, specs)}
        count = sum(map(len, (claims.sends, claims.arguments, claims.results)))
    failed |= walk.failed | {r.cause: walk.failed[r.cause] for r in results if r.cause is not None}
    seconds = time.process_time() - begin
    return Proof(results, dict(walk.proven), failed, walk.unreached, dict(walk.kernels), seconds, count)


def compared(path: str, have: Known, want: Known) -> Result:
    """Whether a result is that of the function as written."""
    if isinstance(have, Rel) and isinstance(want, Rel):
        if (have.term, have.shape) == (want.term, want.shape):
            return Result(path, "proven")
        text = f"is not the value of the function as written: {loops.differs(have.term, want.term)}"
        return Result(path, "not verified", Cause("result", path, text))
    cause = have if isinstance(have, Cause) else want
    assert isinstance(cause, Cause)
    return Result(path, "refused" if cause.refused else "not verified", cause)

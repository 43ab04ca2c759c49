"""Loops and branches.

A loop of the per-device program is verified against one of the function as it was written, of the same kind and length. The
induction hypothesis relates each carry to a carry of the written loop, as a term of its own; the body must give the same
relation to the carry after one iteration. A carry that does not is unknown, and the body is walked again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .relation import Cause, Context, Contradiction, Rel, Unknown, Unverified, require
from .term import Term, is_zero

MAX_ROUNDS = 12
"""Walks of one body, until the relations of its carries are invariant."""


@dataclass(eq=False, slots=True)
class Loop:
    """A loop of the function as it was written.

    Attributes:
      number: identifies the loop in its terms.
      inits, carries, nexts: of each carry: before the loop, in an iteration, and after it.
      condition: of a while loop.
    """

    number: int
    inits: list[Term]
    carries: list[Term]
    nexts: list[Term]
    condition: Term | None = None


Run = Callable[[list[Rel | Unknown], bool], tuple[list[Rel | Unknown], list[Rel | Unknown]]]
"""Walks the body for relations of the carries; the second argument: whether its equations are counted. Returns the relations of the
carries after an iteration, and of the other results (of a while loop, the condition)."""


def written_loop(
    ctx: Context, key: Any, inits: Sequence[Rel], avals: Sequence[Any], run: Callable[[Loop], Run]
) -> Loop:
    """Register a loop of the function as it was written."""
    ctx.depth += 1
    number = ctx.depth
    carries = [ctx.terms.make("carry", (number, k), (), a.shape, a.dtype) for k, a in enumerate(avals)]
    loop = Loop(number, [r.term for r in inits], carries, [])
    walked = run(loop)
    while True:
        nexts, others = walked([ctx.replicated(c, a.shape) for c, a in zip(loop.carries, avals, strict=True)], True)
        for r in [*nexts, *others]:
            require(isinstance(r, Rel), "a loop whose body is not understood")
        loop.nexts = [r.term for r in nexts if isinstance(r, Rel)]
        fixed = [
            k
            for k, (c, n) in enumerate(zip(loop.carries, loop.nexts, strict=True))
            if c is n and c is not loop.inits[k]
        ]
        if not fixed:
            break
        for k in fixed:  # a carry that does not change is its initial value
            loop.carries[k] = loop.inits[k]
    if key[0] == "while":
        (condition,) = others
        assert isinstance(condition, Rel)
        loop.condition = condition.term
    ctx.loops.setdefault(key, []).append(loop)
    return loop


def finals(ctx: Context, loop: Loop, places: Sequence[int], guesses: Sequence[Rel | Unknown]) -> list[Rel | Unknown]:
    """The relations of the carries after a loop."""

    def final(k: int, r: Rel) -> Rel:
        if loop.carries[k] is loop.inits[k]:
            return r
        return replace(r, term=ctx.terms.make("final", (loop.number, k), (), r.term.shape, r.term.dtype))

    return [final(k, r) if isinstance(r, Rel) else r for k, r in zip(places, guesses, strict=True)]


def places_of(loop: Loop, inits: Sequence[Rel | Unknown], avals: Sequence[Any]) -> list[int] | None:
    """For each carry of a per-device loop the carry of the written loop, in order, with the same initial value."""
    out, k = [], 0
    for r, aval in zip(inits, avals, strict=True):
        while k < len(loop.inits):
            same = isinstance(r, Unknown) or r.term is loop.inits[k]
            if same and len(loop.carries[k].shape) == len(aval.shape) and loop.carries[k].dtype == str(aval.dtype):
                break
            k += 1
        if k == len(loop.inits):
            return None
        out.append(k)
        k += 1
    return out


def starts_as(init: Rel, guess: Rel) -> bool:
    """Whether an initial value has a relation: also a constant of any sharding, 0 as a partial sum, a maximum that all devices
    have."""
    spec = all(a == b or n == 1 for a, b, n in zip(init.spec, guess.spec, init.term.shape, strict=True))
    if init.partial == guess.partial:
        return spec and (not init.partial or init.kind == guess.kind)
    idempotent = guess.kind in ("max", "min") and not guess.partial & init.varying
    return spec and not init.partial and (idempotent or (guess.kind == "sum" and is_zero(init.term)))


def invariants(
    ctx: Context,
    loop: Loop,
    places: Sequence[int],
    inits: Sequence[Rel | Unknown],
    avals: Sequence[Any],
    run: Run,
    cause: Cause,
) -> tuple[list[Rel | Unknown], list[Rel | Unknown]]:
    """(the relations of the carries that one iteration preserves, the relations of the other results)."""
    terms = [loop.carries[k] for k in places]

    def hypothesis(like: Rel, term: Term, aval: Any) -> Rel:
        """The relation to the carry of the written loop, sharded and partial as another value is."""
        spec = tuple(a if n != 1 else () for a, n in zip(like.spec, term.shape, strict=True))
        sizes = tuple(n * ctx.size(a) for n, a in zip(aval.shape, spec, strict=True))
        fits = all(n in (1, m) for n, m in zip(term.shape, sizes, strict=True))
        require(fits, f"a carry of shape {list(aval.shape)} of one of shape {list(term.shape)}")
        return Rel(term, tuple(aval.shape), spec, like.partial, like.kind)

    guesses: list[Rel | Unknown] = []
    for r, term, aval in zip(inits, terms, avals, strict=True):
        constant = isinstance(r, Rel) and any(n == 1 != m for n, m in zip(r.term.shape, term.shape, strict=True))
        guesses.append(r if isinstance(r, Unknown) or constant else hypothesis(r, term, aval))
    for _ in range(MAX_ROUNDS):
        nexts, _ = run(guesses, False)
        changed = False
        for k, (init, guess, after, aval) in enumerate(zip(inits, guesses, nexts, avals, strict=True)):
            if isinstance(guess, Unknown):
                continue
            assert isinstance(init, Rel)
            new: Rel | Unknown = guess
            if isinstance(after, Unknown):
                new = after
            elif guess.term is not terms[k] or (guess.spec, guess.partial, guess.kind) != (
                after.spec,
                after.partial,
                after.kind,
            ):
                try:
                    new = hypothesis(after, terms[k], aval)
                    if not starts_as(init, new):
                        new = Unknown(
                            replace(cause, reason=f"carry {k} begins and ends an iteration differently", refused=True)
                        )
                except Unverified as e:
                    new = Unknown(replace(cause, reason=str(e)))
            elif after.term is not loop.nexts[places[k]]:
                where = differs(after.term, loop.nexts[places[k]])
                new = Unknown(
                    replace(cause, reason=f"carry {k} is another value after an iteration than as written: {where}")
                )
            if new != guess:
                guesses[k], changed = new, True
        if not changed:
            return guesses, run(guesses, True)[1]
    raise Unverified("a loop without an invariant")


def differs(found: Term, wanted: Term) -> str:
    """Where two terms differ: the operands that differ, as long as op and params agree."""
    while (found.op, found.params, len(found.args)) == (wanted.op, wanted.params, len(wanted.args)):
        ours = [a for a in found.args if a not in wanted.args] or list(found.args)
        theirs = [b for b in wanted.args if b not in found.args] or list(wanted.args)
        pairs = [(a, b) for a in ours for b in theirs if a is not b and a.op == b.op] or list(
            zip(ours, theirs, strict=False)
        )
        if not pairs:
            break
        found, wanted = pairs[0]

    def text(t: Term) -> str:
        args = ", ".join(f"{a.op}{list(a.shape)}" for a in t.args)
        params = f"[{str(t.params)[:60]}]" * (found.op == wanted.op and found.params != wanted.params)
        return f"{t.op}{params}({args}) {t.dtype}{list(t.shape)}"

    return f"it has {text(found)} in place of {text(wanted)}"


def chosen(
    ctx: Context, index: Rel, results: Sequence[Sequence[Rel | Unknown]], avals: Sequence[Any]
) -> list[Rel | Unknown]:
    """The results of branches, of which all devices take the same one.

    Raises:
      Unverified: devices may take different branches.
    """
    require(not index.partial, "a branch by a partial value", refused=True)
    require(not index.varying, "devices that take different branches")
    out: list[Rel | Unknown] = []
    for aval, *rels in zip(avals, *results, strict=True):
        unknown = next((r for r in rels if isinstance(r, Unknown)), None)
        if unknown is not None:
            out.append(unknown)
            continue
        known = [r for r in rels if isinstance(r, Rel)]
        shape = [1] * len(aval.shape)
        spec: list[tuple[str, ...]] = [()] * len(aval.shape)
        for d in range(len(shape)):
            found = {(r.term.shape[d], r.spec[d]) for r in known if r.term.shape[d] != 1}
            if len(found) > 1:
                raise Contradiction(f"branches with results sharded differently along dim {d}")
            if found:
                ((shape[d], spec[d]),) = found
        some = next((r for r in known if r.partial), known[0])
        for r in known:
            same = (r.partial, r.kind) == (some.partial, some.kind) or (is_zero(r.term) and some.kind == "sum")
            require(same, "branches of which some give partial results", refused=True)
        term = ctx.terms.make("cond", None, (index.term, *(r.term for r in known)), shape, aval.dtype)
        out.append(Rel(term, tuple(aval.shape), tuple(spec), some.partial, some.kind))
    return out

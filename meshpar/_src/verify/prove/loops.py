"""Loops.

A loop of the per-device program is verified against one of the function as it was written, of the same kind and length. The
induction hypothesis relates each carry to a carry of the written loop, as a term of its own; the body must give the same
relation to the carry after one iteration. A carry that does not is unknown, and the body is walked again without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .relation import Cause, Context, Known, Rel, Unverified, mapped, require
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
      others: of a scan, the values that it stacks.
    """

    number: int
    inits: list[Term]
    carries: list[Term]
    nexts: list[Term]
    condition: Term | None = None
    others: tuple[Term, ...] = ()


Body = Callable[[Loop, Sequence[Known], bool], tuple[list[Known], list[Known]]]
"""Walks the body for relations of the carries; the last argument: whether its equations are counted. Returns the relations of the
carries after an iteration, and of the other results (of a while loop, the condition)."""


def written_loop(
    ctx: Context, key: Any, inits: Sequence[Known], avals: Sequence[Any], body: Body
) -> tuple[Loop, list[Known], list[Known]]:
    """Register a loop of the function as it was written.

    Returns:
      The loop, the relations of its carries, and the relations of the other results.
    """
    number = sum(map(len, ctx.loops.values()), 1)
    carries = [ctx.terms.make("carry", (number, k), (), a.shape, a.dtype) for k, a in enumerate(avals)]
    loop = Loop(number, [r.term for r in inits if isinstance(r, Rel)], carries, [])
    require(len(loop.inits) == len(carries), "a loop over values that are not understood")
    ctx.loops.setdefault(key, []).append(loop)
    while True:
        known: list[Known] = [ctx.replicated(c, a.shape) for c, a in zip(carries, avals, strict=True)]
        nexts, others = body(loop, known, True)
        require(all(isinstance(r, Rel) for r in [*nexts, *others]), "a loop whose body is not understood")
        loop.nexts = [r.term for r in nexts if isinstance(r, Rel)]
        fixed = [k for k, (c, n) in enumerate(zip(carries, loop.nexts, strict=True)) if c is n is not loop.inits[k]]
        if not fixed:
            break
        for k in fixed:  # a carry that does not change is its initial value
            carries[k] = loop.inits[k]
    loop.others = tuple(r.term for r in others if isinstance(r, Rel))
    if key[0] == "while":
        (loop.condition,) = loop.others
    return loop, known, others


def element(ctx: Context, loop: Loop, r: Rel) -> Rel:
    """The element of a stack in an iteration."""
    require(not r.spec[0], "a loop over a dim that is sharded", refused=True)
    if r.term.shape[0] == 1:
        return r.of(ctx.terms.reshape(r.term, r.term.shape[1:]), r.shape[1:], r.spec[1:])
    term = ctx.terms.make("elem", loop.number, (r.term,), r.term.shape[1:], r.term.dtype)
    return r.of(term, r.shape[1:], r.spec[1:])


def stacked(ctx: Context, loop: Loop, length: int, r: Rel) -> Rel:
    """The results of all iterations."""
    if r.term.op == "elem" and r.term.params == loop.number and r.term.args[0].shape[0] == length:
        return r.of(r.term.args[0], (length, *r.shape), ((), *r.spec))
    term = ctx.terms.make("stack", loop.number, (r.term,), (length, *r.term.shape), r.term.dtype)
    return Rel(term, (length, *r.shape), ((), *r.spec), r.partial, r.kind)


def finals(ctx: Context, loop: Loop, guesses: Sequence[Known]) -> list[Known]:
    """The relations of the carries after a loop."""
    out: list[Known] = []
    for init, carry, r in zip(loop.inits, loop.carries, guesses, strict=True):
        if isinstance(r, Rel) and carry is not init:
            r = replace(r, term=ctx.terms.make("final", carry.params, (), r.term.shape, r.term.dtype))
        out.append(r)
    return out


def matched(loop: Loop, inits: Sequence[Known], avals: Sequence[Any]) -> Loop | None:
    """The written loop, with one of its carries for each carry of a per-device loop, in order: one with the same initial value."""
    if len(loop.nexts) < len(loop.carries):  # the body of the written loop is not understood
        return None
    every, found = zip(loop.inits, loop.carries, loop.nexts, strict=True), []
    for r, aval in zip(inits, avals, strict=True):
        for init, carry, after in every:
            same = isinstance(r, Cause) or r.term is init
            if same and len(carry.shape) == len(aval.shape) and carry.dtype == str(aval.dtype):
                found.append((init, carry, after))
                break
        else:
            return None
    firsts, carries, nexts = (list(terms) for terms in zip(*found, strict=True)) if found else ([], [], [])
    return replace(loop, inits=firsts, carries=carries, nexts=nexts)


def starts_as(init: Rel, guess: Rel) -> bool:
    """Whether an initial value has a relation: also a constant of any sharding, 0 as a partial sum, a maximum that all devices
    have."""
    spec = all(a == b or n == 1 for a, b, n in zip(init.spec, guess.spec, init.term.shape, strict=True))
    if init.partial == guess.partial:
        return spec and (not init.partial or init.kind == guess.kind)
    idempotent = guess.kind in ("max", "min") and not guess.partial & init.varying
    return spec and not init.partial and (idempotent or (guess.kind == "sum" and is_zero(init.term)))


def placed_by_size(ctx: Context, r: Rel, carry: Term) -> Rel | None:
    """An initial value, sharded by the sizes of the carry where it is constant; None if these allow several shardings."""
    specs = {}
    for d, (n, size, total) in enumerate(zip(r.shape, r.term.shape, carry.shape, strict=True)):
        if size == 1 != total:
            axes = [a for a, count in ctx.sizes.items() if count > 1]
            some = itertools.chain.from_iterable(itertools.combinations(axes, k) for k in range(len(axes) + 1))
            found = [a for a in some if n * ctx.size(a) == total]  # in the order of the mesh
            if len(found) != 1:
                return None
            (specs[d],) = found
    return r.placed(specs)


def invariants(
    ctx: Context, loop: Loop, inits: Sequence[Known], avals: Sequence[Any], body: Body, cause: Cause
) -> tuple[list[Known], list[Known]]:
    """(the relations of the carries that one iteration preserves, the relations of the other results)."""

    def hypothesis(like: Rel, k: int) -> Rel:
        """The relation to the carry of the written loop, sharded and partial as another value is."""
        term, shape = loop.carries[k], tuple(avals[k].shape)
        spec = tuple(a if n != 1 else () for a, n in zip(like.spec, term.shape, strict=True))
        sizes = tuple(n * ctx.size(a) for n, a in zip(shape, spec, strict=True))
        require(not like.fragmented, "a carry in fragments")
        fits = all(n in (1, m) for n, m in zip(term.shape, sizes, strict=True))
        require(fits, f"a carry of shape {list(shape)} of one of shape {list(term.shape)}")
        return Rel(term, shape, spec, like.partial, like.kind)

    def preserved(k: int, init: Rel, guess: Rel, after: Rel) -> Rel:
        """The guess, or another one if an iteration does not preserve it.

        Raises:
          Unverified: there is none.
        """
        wanted, same = loop.nexts[k], guess.term is loop.carries[k]
        if not same or (guess.spec, guess.partial, guess.kind) != (after.spec, after.partial, after.kind):
            guess = hypothesis(after, k)
            require(starts_as(init, guess), f"carry {k} begins and ends an iteration differently", refused=True)
        elif after.term is not wanted:
            text = f"carry {k} is another value after an iteration than as written: {differs(after.term, wanted)}"
            raise Unverified(text)
        return guess

    inits = mapped(
        lambda r: Rel(r.term, r.shape, r.spec, r.partial, r.kind), inits
    )  # each device has other parts afterwards
    guesses = list(inits)
    for k, r in enumerate(inits):
        if isinstance(r, Rel):
            sharded = placed_by_size(ctx, r, loop.carries[k])
            guesses[k] = r if sharded is None else hypothesis(sharded, k)
    for _ in range(MAX_ROUNDS):
        nexts, others = body(loop, guesses, False)
        before = list(guesses)
        for k, (init, guess, after) in enumerate(zip(inits, before, nexts, strict=True)):
            if isinstance(init, Rel) and isinstance(guess, Rel):
                try:
                    guesses[k] = after if isinstance(after, Cause) else preserved(k, init, guess, after)
                except Unverified as e:
                    guesses[k] = replace(cause, reason=str(e), refused=e.refused)
        if guesses == before:
            return guesses, others
    raise Unverified("a loop without an invariant")


def differs(found: Term, wanted: Term) -> str:
    """Where two terms differ: the operands that differ, as long as op and params agree."""
    while (found.op, found.params, len(found.args)) == (wanted.op, wanted.params, len(wanted.args)):
        ours = [a for a in found.args if a not in wanted.args]
        theirs = [b for b in wanted.args if b not in found.args]
        if not ours or not theirs:
            break
        found, wanted = next(((a, b) for a in ours for b in theirs if a.op == b.op), (ours[0], theirs[0]))

    def text(t: Term) -> str:
        args = ", ".join(f"{a.op}{list(a.shape)}" for a in t.args)
        params = f"[{str(t.params)[:60]}]" * (found.op == wanted.op and found.params != wanted.params)
        return f"{t.op}{params}({args}) {t.dtype}{list(t.shape)}"

    return f"it has {text(found)} in place of {text(wanted)}"

"""Making a failing case small: statements become inputs or go, and results, gradients, rules and lines of bodies go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from programs import Case
from writer import Input, Program

import meshpar as mp

_NAME = re.compile(r"\bv\d+\b")


def names_in(text: str) -> set[str]:
    return set(_NAME.findall(text))


def pruned(p: Program) -> Program:
    """Without what no result needs."""
    needed, lines = set(p.outs), []
    for statement in reversed(p.lines):
        if needed & names_in(statement[-1].split(" = ")[0]):
            lines.insert(0, statement)
            needed |= names_in("\n".join(statement))
    inputs = [i for i in p.inputs if i.name in needed]
    grads = [g for g in p.grads if g in needed]
    return replace(p, inputs=inputs, lines=lines, grads=grads)


def without_one(items: Sequence[Any]) -> Iterator[Any]:
    """The items without one of them, if there are several."""
    for k in range(len(items) if len(items) > 1 else 0):
        yield items[:k] + items[k + 1 :]


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the larger cuts first."""
    p = case.program
    if case.outside:
        yield replace(case, outside="")
    if p.grads:
        yield replace(case, program=replace(p, grads=[]), outside="")
    yield from (replace(case, calls=calls) for calls in without_one(case.calls))
    if case.overlap != "off":
        yield replace(case, overlap="off")
    for k, call in enumerate(case.calls):
        for simpler in (replace(call, context=""), replace(call, axis="", size=0)):
            if simpler != call:
                yield replace(case, calls=(*case.calls[:k], simpler, *case.calls[k + 1 :]))
    for out in p.outs if len(p.outs) > 1 else []:
        yield replace(case, program=pruned(replace(p, outs=[out])))
    yield from (replace(case, program=pruned(replace(p, outs=outs))) for outs in without_one(p.outs))
    yield from (replace(case, program=replace(p, grads=grads)) for grads in without_one(p.grads))
    for k, statement in enumerate(p.lines):  # what a statement makes becomes an input
        made = _NAME.findall(statement[-1].split(" = ")[0])
        if any(p.vars[n][1] in "bo" for n in made):
            continue
        inputs = [*p.inputs, *(Input(n, p.vars[n][0], p.vars[n][1], (None,) * len(p.vars[n][0])) for n in made)]
        outs = [o for o in p.outs if o not in made]
        if outs:
            lines = p.lines[:k] + p.lines[k + 1 :]
            yield replace(case, program=pruned(replace(p, inputs=inputs, lines=lines, outs=outs)))
    for k, statement in enumerate(p.lines):  # one of its operands stands for what it makes
        name, _, expr = statement[-1].partition(" = ")
        for other in sorted(names_in(expr) & set(p.vars)) if name in p.vars and name not in p.outs else ():
            if p.vars[other] == p.vars[name]:
                lines = [[re.sub(rf"\b{name}\b", other, line) for line in s] for s in p.lines[:k] + p.lines[k + 1 :]]
                yield replace(case, program=pruned(replace(p, lines=lines)))
    for k, statement in enumerate(p.lines):
        for j in range(len(statement) - 1):
            lines = [*p.lines[:k], statement[:j] + statement[j + 1 :], *p.lines[k + 1 :]]
            yield replace(case, program=pruned(replace(p, lines=lines)))
    for k, i in enumerate(p.inputs):
        for d, name in enumerate(i.dims):
            if name:
                dims = (*i.dims[:d], None, *i.dims[d + 1 :])
                inputs = [*p.inputs[:k], replace(i, dims=dims), *p.inputs[k + 1 :]]
                yield replace(case, program=replace(p, inputs=inputs))
    yield from (replace(case, layout=_layout(case, rules)) for rules in without_one(case.layout.rules))
    if case.layout.resolve == "cost":
        yield replace(case, layout=mp.Layout(str(case.layout)))


def _layout(case: Case, rules: Sequence[mp.types.Rule]) -> mp.Layout:
    return mp.Layout("; ".join(map(str, rules)), resolve=case.layout.resolve)


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 200) -> Case:
    """The smallest case found that still fails; a case that cannot run does not count as failing."""
    progress = True
    while progress and tries > 0:
        progress = False
        for other in smaller(case):
            have = {d for i in other.program.inputs for d in i.dims}
            other = replace(other, layout=_layout(other, [r for r in other.layout.rules if r.dim in have]))
            tries -= 1
            if tries <= 0:
                break
            if other.layout.rules and fails(other):
                case, progress = other, True
                break
    return case

"""Rewriting of jaxprs with their bodies: equations whose primitive is a loop, branch or call in the registry have bodies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..compat.jax import (
    Atom,
    abstract_array,
    aval_of,
    body_consts,
    body_operands,
    make_generated_jaxpr,
    on_host,
    replace_body,
)
from ..rules import bodies, primitive

# -- bodies


def rewrite(closed: ClosedJaxpr, change: Callable[[Jaxpr], Jaxpr], *, maps: bool = False) -> ClosedJaxpr:
    """A closed jaxpr with ``change`` applied to it and to all bodies in it; the closed jaxpr itself if nothing changes.

    Args:
      change: (jaxpr, whose bodies are changed already) → jaxpr with the same types; the same object if nothing changes. It is
        called once for a jaxpr that several equations share.
      maps: whether the bodies of the user's own ``shard_map`` are changed too.
    """
    done: dict[int, Jaxpr] = {}

    def nested(eqn: JaxprEqn) -> list[Jaxpr]:
        return [eqn.params["jaxpr"]] if maps and primitive(eqn.primitive.name).family == "shard_map" else bodies(eqn)

    def changed(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in done:
            eqns = []
            for eqn in jaxpr.eqns:
                if old := nested(eqn):
                    new = list(map(changed, old))
                    eqn = eqn if _same(new, old) else replace_body(eqn, new)
                eqns.append(eqn)
            done[id(jaxpr)] = change(with_eqns(jaxpr, eqns))
        return done[id(jaxpr)]

    jaxpr = changed(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def with_bodies(eqn: JaxprEqn, new: Sequence[Jaxpr]) -> JaxprEqn:
    """An equation with other bodies; the equation itself if they are the same objects."""
    return eqn if _same(new, bodies(eqn)) else replace_body(eqn, new)


def with_eqns(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr with other equations; the jaxpr itself if they are the same objects."""
    return jaxpr if _same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=list(eqns))


def _same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(map(operator.is_, new, old))


# -- variables


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among some atoms, in order: all but the literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def renamed(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """The atoms, with other atoms in place of the variables in ``names``."""
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]


def readers(eqns: Sequence[JaxprEqn], outvars: Iterable[Atom]) -> dict[Var, list[int]]:
    """Variable → the index of each equation that reads it, once per operand; ``len(eqns)`` for each result that it is."""
    found: dict[Var, list[int]] = {}
    for i, atoms in enumerate((*(eqn.invars for eqn in eqns), outvars)):
        for v in variables(atoms):
            found.setdefault(v, []).append(i)
    return found


def live(
    eqns: Sequence[JaxprEqn], wanted: Iterable[Atom], keep: Callable[[JaxprEqn], bool] = lambda eqn: bool(eqn.effects)
) -> tuple[list[JaxprEqn], list[Var]]:
    """(the equations that are needed for some atoms, in order; these variables, and those that the equations read).

    Args:
      keep: whether an equation stays even if no result of it is needed; by default, one with side effects.
    """
    read, needed = dict.fromkeys(variables(wanted)), []
    for eqn in reversed(eqns):
        if keep(eqn) or any(v in read for v in eqn.outvars):
            needed.append(eqn)
            read.update(dict.fromkeys(variables(eqn.invars)))
    return needed[::-1], list(read)


# -- inlining


def inline(
    eqns: list[JaxprEqn],
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    operands: Sequence[Atom],
    calls: bool = False,
    **changes: Any,
) -> list[Atom]:
    """Append the equations of a jaxpr on some operands to ``eqns``, with new variables, and return the atoms of its results.

    Args:
      consts: the values of its constants, which become literals.
      calls: whether calls in it are replaced by the equations of their bodies.
      changes: fields that all equations get.
    """
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    names.update((v, Literal(c, v.aval)) for v, c in zip(jaxpr.constvars, consts, strict=True))
    for eqn in jaxpr.eqns:
        invars = renamed(eqn.invars, names)
        if calls and primitive(eqn.primitive.name).call:
            (body,), (values,) = bodies(eqn), body_consts(eqn)
            outs = inline(eqns, body, values, body_operands(eqn, invars), calls, **changes)
        else:
            outs = [Var(v.aval) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=invars, outvars=outs, **changes))
        names.update(zip(eqn.outvars, outs, strict=True))
    return renamed(jaxpr.outvars, names)


def abstract(atom: Atom) -> Any:
    """The abstract array of an atom, as an argument of a function that is traced."""
    aval = aval_of(atom)
    return abstract_array(aval.shape, aval.dtype, aval.weak_type, on_host(aval))


def equations_of(fn: Callable[..., Any], atoms: Sequence[Atom], source: Any) -> tuple[list[JaxprEqn], list[Atom]]:
    """(the equations of ``fn(*atoms)``, a function that meshpar wrote, with this source; the atoms of its results)."""
    traced, eqns = make_generated_jaxpr(fn, *map(abstract, atoms)), list[JaxprEqn]()
    return eqns, inline(eqns, traced.jaxpr, traced.consts, atoms, source_info=source)


def flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with calls (``jit``, ``jax.checkpoint``, custom derivatives) inlined and dead ops removed; loops and conditionals
    remain single ops."""
    eqns: list[JaxprEqn] = []
    root = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
    outvars = inline(eqns, root, (), root.invars, calls=True)
    return ClosedJaxpr(closed.jaxpr.replace(eqns=live(eqns, outvars)[0], outvars=outvars), closed.consts)

"""Rewriting of jaxprs with their bodies: equations whose primitive is a loop, branch or call in the registry have bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from ..compat.jax import replace_body
from ..rules import bodies


def rewrite(closed: ClosedJaxpr, change: Callable[[Any], Any]) -> ClosedJaxpr:
    """A closed jaxpr with ``change`` applied to it and to all bodies in it; the closed jaxpr itself if nothing changes.

    Args:
      change: (jaxpr, whose bodies are changed already) → jaxpr with the same types; the same object if nothing changes. It is
        called once for a jaxpr that several equations share.
    """
    done: dict[int, Any] = {}

    def changed(jaxpr: Any) -> Any:
        if id(jaxpr) not in done:
            eqns = [with_bodies(eqn, list(map(changed, bodies(eqn)))) for eqn in jaxpr.eqns]
            done[id(jaxpr)] = change(with_eqns(jaxpr, eqns))
        return done[id(jaxpr)]

    jaxpr = changed(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def with_bodies(eqn: Any, new: Sequence[Any]) -> Any:
    """An equation with other bodies; the equation itself if they are the same objects."""
    return eqn if _same(new, bodies(eqn)) else replace_body(eqn, new)


def with_eqns(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """A jaxpr with other equations; the jaxpr itself if they are the same objects."""
    return jaxpr if _same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=list(eqns))


def _same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    return len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True))

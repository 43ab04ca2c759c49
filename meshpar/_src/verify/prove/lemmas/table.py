"""The table of lemmas."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel

Lemma = Callable[[Context, JaxprEqn, Sequence[Rel]], list[Rel]]
LEMMAS: dict[str, Lemma] = {}
LOCAL_FORM = "kernel of "
"""Prefix of the name of a call that is the local form of a kernel; the key of its lemma."""


def lemma(*primitives: str) -> Callable[[Lemma], Lemma]:
    """Register a function as the lemma of primitives."""

    def register(fn: Lemma) -> Lemma:
        LEMMAS.update(dict.fromkeys(primitives, fn))
        return fn

    return register


def lemma_of(eqn: JaxprEqn, mesh: Container[Any]) -> Lemma | None:
    """The lemma of an equation; None if there is none, as for collectives over named axes that are not of the mesh."""
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    named = [a for a in (names if isinstance(names, tuple) else (names,)) if isinstance(a, str)]
    if named and not any(a in mesh for a in named):
        return None
    local = str(eqn.params.get("name", "")).startswith(LOCAL_FORM)
    return LEMMAS.get(LOCAL_FORM if local else eqn.primitive.name)


def family_of(fn: Lemma) -> str:
    """The family of a lemma: its module."""
    return fn.__module__.rsplit(".", 1)[1]

"""The table of lemmas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

from ..relation import Context, Rel

Lemma = Callable[[Context, JaxprEqn, Sequence[Rel]], list[Rel]]
LEMMAS: dict[str, Lemma] = {}


def lemma(*primitives: str) -> Callable[[Lemma], Lemma]:
    """Register a function as the lemma of primitives."""

    def register(fn: Lemma) -> Lemma:
        LEMMAS.update(dict.fromkeys(primitives, fn))
        return fn

    return register


def family_of(primitive: str) -> str:
    """The family of an op: the module of its lemma."""
    return LEMMAS[primitive].__module__.rsplit(".", 1)[1]

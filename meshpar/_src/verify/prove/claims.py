"""What a plan claims about its per-device program: its collectives, and the shardings of its arguments and results.

The claims are data. They are compared with the program: the bytes that its collectives send over each group of mesh axes, by kind,
and the specs of its ``shard_map``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ...compat.jax import aval_of, jaxprs_in, on_platform
from .lemmas import LOCAL_FORM
from .relation import Spec

KINDS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "all_gather": "all-gather",
    "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip
"""Primitive → kind of collective."""
DECOMPOSED = ""
"""The kind of collectives that a plan divides into others: rings, and one for each dimension of a torus."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a plan.

    Attributes:
      sends: (kind of collective or :data:`DECOMPOSED`, mesh axes) → bytes that each device sends in a step; a loop whose number of
        iterations is not known counts once.
      arguments, results: their paths and the axes of their dims.
      sizes: of the mesh axes.
      axes: axis of the mesh of the program → axis of the plan's mesh, of which it is a factor.
      platform: on which the program runs: ``tpu``, ``cuda`` or ``cpu``.
    """

    sends: Mapping[tuple[str, frozenset[str]], float]
    arguments: Sequence[tuple[str, Spec]]
    results: Sequence[tuple[str, Spec]]
    sizes: Mapping[str, int]
    axes: Mapping[str, str]
    platform: str


def equations(jaxpr: Jaxpr, times: int = 1, kernel: bool = False) -> Iterator[tuple[JaxprEqn, int]]:
    """(equation, how often it runs) of a jaxpr and its bodies. A plan does not count further rounds of a kernel, a ``while``."""
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, kernel or str(eqn.params.get("name", "")).startswith(LOCAL_FORM)
        yield eqn, times
        for body in jaxprs_in(eqn):
            trips = int(eqn.params["length"]) if name == "scan" else int(not (inner and name == "while"))
            yield from equations(body, times * trips, inner)


def differences(
    claims: Claims, program: ClosedJaxpr, specs: Iterable[tuple[str, Spec, Collection[Spec]]]
) -> list[tuple[str, str]]:
    """(what, how it differs) of the claims that do not hold.

    Args:
      specs: (an argument or result, its spec by the plan, its specs in the program: none if the program has no such array).
    """
    every = equations(on_platform(program, claims.platform).jaxpr)
    mapped = next((eqn for eqn, _ in every if eqn.primitive.name == "shard_map"), None)
    if mapped is None:
        return [("shard_map", "a program without a shard_map")]
    sizes = {str(a): int(n) for a, n in dict(mapped.params["mesh"].shape).items()}
    out, sent, claimed = [], defaultdict[Any, float](float), defaultdict[Any, float](float, claims.sends)
    for eqn, times in equations(mapped.params["jaxpr"]):
        kind, p = KINDS.get(eqn.primitive.name), eqn.params
        names: Any = p.get("axes", p.get("axis_name"))
        axes = [a for a in (names if isinstance(names, tuple) else (names,)) if sizes.get(a, 1) > 1]
        if kind and axes:
            bytes_sent = times * _bytes(eqn, kind, math.prod(sizes[a] for a in axes))
            sent[kind, frozenset(claims.axes[a] for a in axes)] += bytes_sent
    for axes in sorted((axes for kind, axes in claimed if kind == DECOMPOSED), key=len):
        for sends in (sent, claimed):  # with the collectives over some of these axes, as a collective over each of them
            parts = [key for key in sends if key[1] <= axes]
            sends[DECOMPOSED, axes] = sum(map(sends.pop, parts))
    for kind, axes in {**sent, **claimed}:
        have, want = sent[kind, axes], claimed[kind, axes]
        if not math.isclose(have, want, rel_tol=1e-9):
            what = f"{kind or 'collectives'} over {', '.join(sorted(axes))}"
            out.append((what, f"sends {have:,.0f} bytes; the plan says {want:,.0f}"))
    for what, wanted, found in specs:
        have = {tuple(tuple(dict.fromkeys(claims.axes[a] for a in axes)) for axes in spec) for spec in found}
        want = tuple(tuple(a for a in axes if claims.sizes[a] > 1) for axes in wanted)
        if have and want not in have:
            out.append((what, f"is sharded over {have.pop()}; the plan says {want}"))
    return out


def _bytes(eqn: JaxprEqn, kind: str, group: int) -> float:
    """The bytes that each device of a group sends."""
    moved = [aval_of(v) for v in (eqn.outvars if kind == "all-gather" else eqn.invars)]
    volume = sum(a.size * a.dtype.itemsize for a in moved)
    return volume * (1 if kind == "collective-permute" else (group - 1) / group * (2 if kind == "all-reduce" else 1))

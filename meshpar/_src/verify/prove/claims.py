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
    maps = [
        eqn for eqn, _ in equations(on_platform(program, claims.platform).jaxpr) if eqn.primitive.name == "shard_map"
    ]
    if not maps:
        return [("shard_map", "a program without a shard_map")]
    sizes = {str(a): int(n) for a, n in dict(maps[0].params["mesh"].shape).items()}
    out = []
    sent: dict[frozenset[str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for eqn, times in equations(maps[0].params["jaxpr"]):
        kind, p = KINDS.get(eqn.primitive.name), eqn.params
        names: Any = p.get("axes", p.get("axis_name"))
        axes = [a for a in (names if isinstance(names, tuple) else (names,)) if sizes.get(a, 1) > 1]
        if kind and axes:
            sent[frozenset(claims.axes[a] for a in axes)][kind] += times * _bytes(
                eqn, kind, math.prod(sizes[a] for a in axes)
            )
    claimed: dict[frozenset[str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (kind, axes), size in claims.sends.items():
        claimed[axes][kind] += size
    for axes in sorted((a for a in claimed if DECOMPOSED in claimed[a]), key=len):
        for every in (sent, claimed):  # with the collectives over some of these axes, as a collective over each of them
            total = sum(sum(every.pop(part).values()) for part in list(every) if part <= axes)
            every[axes] = defaultdict(float, {DECOMPOSED: total})
    for axes in {**sent, **claimed}:
        have, want = sent[axes], claimed[axes]
        for kind in {**have, **want}:
            if not math.isclose(have[kind], want[kind], rel_tol=1e-9):
                what = f"{kind or 'collectives'} over {', '.join(sorted(axes))}"
                out.append((what, f"sends {have[kind]:,.0f} bytes; the plan says {want[kind]:,.0f}"))
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

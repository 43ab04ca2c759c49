"""Faults put into a per-device program: jaxprs that differ from the given one in one equation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

SLICE = ("start_indices", "limit_indices")
REDUCTIONS = ("psum", "pmax", "pmin")


def faults(closed: ClosedJaxpr) -> Iterator[tuple[str, ClosedJaxpr]]:
    """(name of the fault, the program with it), for the equations inside the ``shard_map`` of a lowered program."""
    for name, jaxpr in _faults(closed.jaxpr, (), False):
        yield name, ClosedJaxpr(jaxpr, closed.consts)


def _faults(jaxpr: Jaxpr, axes: tuple[str, ...], inside: bool) -> Iterator[tuple[str, Jaxpr]]:
    for k, eqn in enumerate(jaxpr.eqns):
        if inside:
            for name, other in _of(eqn, axes):
                replaced = [e for new in [jaxpr.eqns[:k], other, jaxpr.eqns[k + 1 :]] for e in new]
                yield f"{name} of {eqn}"[:150].replace("\n", " "), jaxpr.replace(eqns=replaced)
        mesh = tuple(eqn.params["mesh"].axis_names) if eqn.primitive.name == "shard_map" else axes
        if str(eqn.params.get("name", "")).startswith("kernel of") or eqn.primitive.name == "pallas_call":
            continue
        for key, value in eqn.params.items():
            parts = value if isinstance(value, tuple) else (value,)
            for n, part in enumerate(parts):
                body = part.jaxpr if isinstance(part, ClosedJaxpr) else part
                if not isinstance(body, Jaxpr) or key == "update_jaxpr":
                    continue
                for name, new in _faults(body, mesh, inside or eqn.primitive.name == "shard_map"):
                    made: Any = ClosedJaxpr(new, part.consts) if isinstance(part, ClosedJaxpr) else new
                    changed = (*parts[:n], made, *parts[n + 1 :]) if isinstance(value, tuple) else made
                    outer = eqn.replace(params={**eqn.params, key: changed})
                    yield name, jaxpr.replace(eqns=[*jaxpr.eqns[:k], outer, *jaxpr.eqns[k + 1 :]])


def _of(eqn: JaxprEqn, axes: tuple[str, ...]) -> Iterator[tuple[str, list[JaxprEqn]]]:
    """Faults of one equation."""
    name, p = eqn.primitive.name, eqn.params

    def copies(source: Any) -> list[JaxprEqn]:
        like = jax.make_jaxpr(jax.lax.copy_p.bind)(jax.ShapeDtypeStruct(source.aval.shape, source.aval.dtype)).eqns[0]
        return [eqn.replace(primitive=like.primitive, params=like.params, invars=[source], outvars=eqn.outvars)]

    if name in REDUCTIONS:
        yield "dropped collective", copies(eqn.invars[0])
        own = p["axes"]
        for other in axes:
            if other not in own:
                yield f"axis {other}", [eqn.replace(params={**p, "axes": (other,)})]
        if len(own) > 1:
            yield "one axis of several", [eqn.replace(params={**p, "axes": own[:1]})]
    if name in ("all_gather", "reduce_scatter") and len(p["axis_name"]) > 1:
        yield "axes in another order", [eqn.replace(params={**p, "axis_name": p["axis_name"][::-1]})]
    if name == "ppermute":
        yield "direction", [eqn.replace(params={**p, "perm": tuple((t, s) for s, t in p["perm"])})]
        yield "dropped pair", [eqn.replace(params={**p, "perm": p["perm"][1:]})]
    if name == "select_n" and eqn.outvars[0].aval.shape == eqn.invars[1].aval.shape:
        for k in (1, 2):
            if not isinstance(eqn.invars[k], Literal):
                yield f"mask replaced by case {k - 1}", copies(eqn.invars[k])
    if name == "slice" and any(p["start_indices"]):
        back = {key: tuple(n - (m > 0) for n, m in zip(p[key], p["start_indices"], strict=True)) for key in SLICE}
        yield "slice off by one", [eqn.replace(params={**p, **back})]
    if name == "pad" and any(low != high for low, high, _ in p["padding_config"]):
        swapped = tuple((high, low, gap) for low, high, gap in p["padding_config"])
        yield "padding swapped", [eqn.replace(params={**p, "padding_config": swapped})]
    if name in ("add", "sub", "mul", "lt", "ge", "eq", "clamp"):
        for k, var in enumerate(eqn.invars):
            if isinstance(var, Literal) and np.issubdtype(var.aval.dtype, np.integer):
                for by in (1, -1):
                    invars = list(eqn.invars)
                    invars[k] = Literal((np.asarray(var.val, np.int64) + by).astype(var.aval.dtype), var.aval)
                    yield f"off by {by}", [eqn.replace(invars=invars)]

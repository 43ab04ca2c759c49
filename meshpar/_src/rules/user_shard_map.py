"""``shard_map`` in a user's program: its specs split the operands and results, and its body runs on the shards.

Collectives in the body have entries too: the names of dims pass through them, and they run over the axes of the factored mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..compat.jax import at_line_of, aval_of, axes_of_spec, bind, equations, interpret, literal_array
from .control_flow import run_bodies
from .local_forms import LocalOp, on_shards, plain_params
from .mesh_in_shard_map import Send, Sizes, axis_index, fine_names
from .opaque_flops import shard_map_flops
from .registry import Refusal, SplitOp, bodies, primitive, register
from .rule import OpRule, same_dims


def mapped(eqn: JaxprEqn, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> OpRule:
    """The rule of a ``shard_map``: every dim of an operand or result is a factor, split by the specs; ``sends``
    lists the collectives of the body."""
    r, given = OpRule(), []

    def factors(shape: Sequence[int], spec: Any) -> tuple[tuple[int, ...], ...]:
        given.extend(axes_of_spec(spec, len(shape)))
        return r.factors(shape, "permutation")

    r.ins = [factors(s, spec) for s, spec in zip(ins, eqn.params["in_specs"], strict=True)]
    r.outs = [factors(s, spec) for s, spec in zip(outs, eqn.params["out_specs"], strict=True)]
    r.given = given
    r.sends = lambda shapes, axes, sizes: list(_collectives(eqn.params["jaxpr"], 1))
    return r


# -- collectives, by primitive

_SENDS: dict[str, str] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    **dict.fromkeys(("ppermute", "pbroadcast"), "collective-permute"),
    "reduce_scatter": "reduce-scatter",
}

_AXES = ("axes", "axis_name")


def _axes_of(eqn: JaxprEqn) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(the mesh axes over which a collective runs, the dims of its operands that it reduces: axes of a ``vmap`` in the body)."""
    given = next(eqn.params[k] for k in _AXES if k in eqn.params)
    axes = given if isinstance(given, tuple) else (given,)
    return tuple(a for a in axes if isinstance(a, str)), tuple(a for a in axes if not isinstance(a, str))


def _collectives(jaxpr: Jaxpr, times: int | None) -> Iterator[Send]:
    """All collectives of a jaxpr and its bodies, including all branches.

    Args:
      times: how often the jaxpr runs; None if that is unknown, as for a ``while`` body.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _SENDS:
            axes, reduced = _axes_of(eqn)
            for var in eqn.invars[: 1 if name == "ragged_all_to_all" else None]:
                shape = tuple(n for i, n in enumerate(aval_of(var).shape) if i not in reduced)
                yield Send(_SENDS[name], (), shape, aval_of(var).dtype, f"{name} in its body", times, axes)
        trip_count = None if name == "while" else eqn.params["length"] if name == "scan" else 1
        body_times = None if times is None or trip_count is None else times * trip_count
        for body in bodies(eqn):
            yield from _collectives(body, body_times)


# -- the body on one device


def _local(op: LocalOp, *xs: Any) -> list[Any]:
    """The body on this device's shards, with collectives over the axes of the factored mesh."""
    return _run(op.eqn.params["jaxpr"], (), xs, op.sizes)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], xs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The results of a user's jaxpr, retraced: its types state the axes over which values vary, and the lowering's do not.

    Args:
      xs: the operands, as shards.
      sizes: axis sizes; a :class:`~rules.mesh_in_shard_map.Grid` for a factored mesh.
    """

    def apply(eqn: JaxprEqn, xs: list[Any]) -> list[Any]:
        with at_line_of(eqn):
            return _step(eqn, xs, sizes)

    results = interpret(jaxpr, consts, xs, apply, literal_array)
    dtypes = [aval_of(v).dtype for v in jaxpr.outvars]
    return [
        x if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else lax.convert_element_type(x, dtype)
        for dtype, x in zip(dtypes, results, strict=True)
    ]


def _step(eqn: JaxprEqn, xs: list[Any], sizes: Sizes) -> list[Any]:
    """The results of one equation of a user's jaxpr."""
    name, p = eqn.primitive.name, eqn.params
    if name in _CASTS or primitive(name).family == "identity":
        return xs
    if name in _FORMS:
        return _FORMS[name](eqn, xs, fine_names(_axes_of(eqn)[0], sizes))
    if primitive(name).control_flow or primitive(name).call:
        return run_bodies(eqn, xs, lambda jaxpr, consts, xs: _run(jaxpr, consts, xs, sizes))
    return bind(eqn, xs, plain_params(p))


def _nests(op: SplitOp) -> Refusal | None:
    """Refuses a body with a nested ``shard_map``, or with a collective that :data:`_FORMS` lacks."""
    for eqn in equations(op.eqn.params["jaxpr"]):
        name, p = eqn.primitive.name, eqn.params
        if name in _FORMS or name in _CASTS:
            continue
        if name == "shard_map" or any(isinstance(p.get(k), str) for k in _AXES):
            return Refusal(
                f"has {name} in its body, which cannot run inside the shard_map that the lowering makes", eqn=eqn
            )
    return None


_CASTS = ("pvary", "reshard")
"""Primitives that only change the type of their operand."""


def _over(eqn: JaxprEqn, xs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """A collective over other mesh axes; dims that it reduces stay."""
    key = next(k for k in _AXES if k in eqn.params)
    return bind(eqn, xs, {**eqn.params, key: (*_axes_of(eqn)[1], *axes)})


def _gathered(eqn: JaxprEqn, xs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    p = eqn.params
    return [lax.all_gather(x, axes, axis=p["all_gather_dimension"], tiled=p["tiled"]) for x in xs]


_FORMS: dict[str, Callable[[Any, list[Any], tuple[str, ...]], list[Any]]] = {
    **dict.fromkeys(_SENDS, _over),
    "psum_invariant": lambda eqn, xs, axes: [lax.psum(x, axes) for x in xs],
    "all_gather_invariant": _gathered,
    "axis_index": lambda eqn, xs, axes: [axis_index(axes)],
}
"""By primitive: (equation, operands, axes of the factored mesh) → results."""


# psum, pmax and pmin have entries in `reduce`, since vmap makes them too
_MANUAL = [name for name in _SENDS if name not in ("psum", "pmax", "pmin", "ragged_all_to_all")]
register(
    *_MANUAL, rule=same_dims, local=on_shards
)  # over an axis of a vmap around the step: shards are exchanged as arrays are
register("ragged_all_to_all", rule=same_dims)
register("shard_map", rule=mapped, local=_local, refuses=_nests, nested_flops=shard_map_flops, family="shard_map")

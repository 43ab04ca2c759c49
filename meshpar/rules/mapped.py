"""A ``shard_map`` of the user's own: its specs say how its operands and results are split, and its body runs on the shards.

The collectives of such bodies have entries here too: how names pass through them, and how they run over the factored mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from ..compat.jax import at_line_of, bind, body_consts, body_of, closed_parts, literal_array, scan_counts
from .flops import shard_map_flops
from .local import LocalOp, plain_params
from .registry import Refusal, SplitOp, primitive, register
from .rule import OpRule, same_dims
from .spmd import Send, Sizes, axis_index, fine_names


def mapped(eqn: Any, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> OpRule:
    """Every dim of an operand or result is a factor, split as the specs say; the body sends what it sends."""
    r, given = OpRule([], []), []

    def factors(shape: Sequence[int], spec: Any) -> tuple[tuple[int, ...], ...]:
        entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        given.extend([*entries, *((),) * (len(shape) - len(entries))])
        return r.factors(shape, "permutation")

    r.ins = [factors(s, spec) for s, spec in zip(ins, eqn.params["in_specs"], strict=True)]
    r.outs = [factors(s, spec) for s, spec in zip(outs, eqn.params["out_specs"], strict=True)]
    r.given = given
    r.sends_over = lambda shapes, axes, sizes: list(_sent_by(eqn.params["jaxpr"], 1))
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


def _all_axes(eqn: Any) -> tuple[Any, ...]:
    found = next(eqn.params[k] for k in _AXES if k in eqn.params)
    return found if isinstance(found, tuple) else (found,)


def _axes_of(eqn: Any) -> tuple[str, ...]:
    """The named axes that a collective runs over."""
    return tuple(a for a in _all_axes(eqn) if isinstance(a, str))


def _dims_of(eqn: Any) -> tuple[int, ...]:
    """The dims that it reduces: axes of a ``vmap`` in the body."""
    return tuple(a for a in _all_axes(eqn) if not isinstance(a, str))


def _sent_by(jaxpr: Any, times: int | None) -> Iterator[tuple[Send, tuple[str, ...]]]:
    """(collective, its axes) of all that a body sends, as often as it runs; both branches of a condition."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _SENDS:
            for var in eqn.invars[: 1 if name == "ragged_all_to_all" else None]:
                shape = tuple(n for i, n in enumerate(var.aval.shape) if i not in _dims_of(eqn))
                send = Send(_SENDS[name], (), shape, var.aval.dtype, f"{name} in its body", times)
                yield send, _axes_of(eqn)
        runs = (
            None
            if times is None or name == "while"
            else times * eqn.params.get("length", 1)
            if name == "scan"
            else times
        )
        for body in _bodies(eqn):
            yield from _sent_by(body, runs)


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs of control flow and calls."""
    name, p = eqn.primitive.name, eqn.params
    if name == "cond":
        return [closed_parts(b)[0] for b in p["branches"]]
    if name == "while":
        return [closed_parts(p[k])[0] for k in ("cond_jaxpr", "body_jaxpr")]
    return [closed_parts(body_of(eqn))[0]] if name == "scan" or _is_call(name) else []


def _is_call(name: str) -> bool:
    entry = primitive(name)
    return entry.call or entry.own_derivative


# -- the body on one device


def _local(at: LocalOp, *xs: Any) -> list[Any]:
    """The body on this device's shards, over the axes of the factored mesh."""
    return _run(at.eqn.params["jaxpr"], (), xs, at.sizes)


def _run(jaxpr: Any, consts: Sequence[Any], xs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The results of a body of the user's, traced anew: its types say over which axes values vary, ours do not."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *xs), strict=True))

    def read(var: Any) -> Any:
        return literal_array(var) if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        with at_line_of(eqn):
            env.update(zip(eqn.outvars, _step(eqn, list(map(read, eqn.invars)), sizes), strict=True))
    return [
        x if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) else lax.convert_element_type(x, v.aval.dtype)
        for v, x in zip(jaxpr.outvars, map(read, jaxpr.outvars), strict=True)
    ]


def _step(eqn: Any, xs: list[Any], sizes: Sizes) -> list[Any]:
    name, p = eqn.primitive.name, eqn.params
    if name in _CASTS or primitive(name).identity:
        return xs
    if name in _FORMS:
        return _FORMS[name](eqn, xs, fine_names(_axes_of(eqn), sizes))
    if name == "scan":
        consts, carries = scan_counts(p)
        jaxpr, inner = closed_parts(p["jaxpr"])

        def one(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            found = _run(jaxpr, inner, [*xs[:consts], *carry, *slices], sizes)
            return found[:carries], found[carries:]

        rest = xs[consts + carries :]
        options = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
        carry, ys = lax.scan(one, xs[consts : consts + carries], rest, **options)
        return [*carry, *ys]
    if name == "while":
        (cond, body), (first, second) = _bodies(eqn), body_consts(eqn)
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        return lax.while_loop(
            lambda carry: _run(cond, first, [*xs[:n], *carry], sizes)[0],
            lambda carry: _run(body, second, [*xs[n:m], *carry], sizes),
            xs[m:],
        )
    if name == "cond":
        branches = [
            lambda *args, body=body, consts=consts: _run(body, consts, args, sizes)
            for body, consts in zip(_bodies(eqn), body_consts(eqn), strict=True)
        ]
        return lax.switch(lax.convert_element_type(xs[0], "int32"), branches, *xs[1:])
    if _is_call(name):
        (body,), (consts,) = _bodies(eqn), body_consts(eqn)
        return _run(body, consts, xs[len(xs) - len(body.invars) :], sizes)
    return bind(eqn, xs, plain_params(p))


def _nests(op: SplitOp) -> Refusal | None:
    """A body that has a ``shard_map`` of its own, or a collective that no form here runs over the factored mesh."""
    for eqn in _walk(op.eqn.params["jaxpr"]):
        name, p = eqn.primitive.name, eqn.params
        if name in _FORMS or name in _CASTS:
            continue
        if name == "shard_map" or any(isinstance(p.get(k), str) for k in _AXES):
            return Refusal(
                f"has {name} in its body, which cannot run inside the shard_map that the lowering makes", eqn=eqn
            )
    return None


def _walk(jaxpr: Any) -> Iterator[Any]:
    """The equations of a body, those of nested control flow and calls after the one that holds them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in _bodies(eqn):
            yield from _walk(body)


_CASTS = ("pvary", "reshard")
"""What only changes a type."""


def _over(eqn: Any, xs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """The primitive over other named axes; those of a vmap stay."""
    key = next(k for k in _AXES if k in eqn.params)
    return bind(eqn, xs, {**eqn.params, key: (*_dims_of(eqn), *axes)})


def _summed(eqn: Any, xs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    return [lax.psum(x, axes) for x in xs]


def _gathered(eqn: Any, xs: list[Any], axes: tuple[str, ...]) -> list[Any]:
    p = eqn.params
    return [lax.all_gather(x, axes, axis=p["all_gather_dimension"], tiled=p["tiled"]) for x in xs]


_FORMS: dict[str, Callable[[Any, list[Any], tuple[str, ...]], list[Any]]] = {
    **dict.fromkeys(_SENDS, _over),
    "psum_invariant": _summed,
    "all_gather_invariant": _gathered,
    "axis_index": lambda eqn, xs, axes: [axis_index(axes)],
}


for _name in (n for n in _SENDS if n not in ("psum", "pmax", "pmin")):  # these have entries: vmap makes them too
    register(_name, rule=same_dims)
register("shard_map", rule=mapped, local=_local, refuses=_nests, nested_flops=shard_map_flops, shard_map=True)

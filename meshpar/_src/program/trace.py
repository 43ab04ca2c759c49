"""Traces a function to a closed jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from ...errors import MeshError
from ..compat.jax import axes_of_spec, equations, in_auto_mesh, make_jaxpr, shardings_of, source_line, without_refs
from ..layout import AnyMesh
from ..rules.control_flow import run_bodies
from ..units import mesh_text
from .jaxprs import equations_of, rewrite, with_eqns
from .merge_equal_casts import with_merged_casts
from .primitives import place_p
from .reorder_additions import with_matmuls_added_first
from .sunk_reductions import with_sunk_reductions


def trace(fn: Callable[..., Any], leaves: Sequence[Any], mesh: AnyMesh) -> tuple[Any, Any, Any]:
    """Trace a function of flat arguments.

    Args:
      fn: takes ``*leaves``, returns any tree.
      leaves: arrays, numbers or ``ShapeDtypeStruct``.
      mesh: of the step; the shardings that ops have as parameters are over its axes.

    Returns:
      (closed jaxpr, in which all loops have scalar conditions, and shardings are constraints; the closed jaxpr as JAX traced it;
      tree of the results as ``ShapeDtypeStruct``).

    Raises:
      MeshError: an op with a sharding over an axis that the mesh does not have.
    """
    closed, shapes = make_jaxpr(fn, *leaves, return_shape=True)
    written = closed = without_refs(closed)
    eqns = list(equations(closed))
    if any(map(_is_batched, eqns)):
        closed = _each_equation(closed, _with_scalar_condition, maps=False)
    if any(shardings_of(e) or in_auto_mesh(e) is not e for e in eqns):
        closed = _each_equation(closed, partial(_constrained, mesh))
    closed = with_matmuls_added_first(with_merged_casts(with_sunk_reductions(closed)))
    return closed, written, shapes


def _is_batched(eqn: JaxprEqn) -> bool:
    """Whether an equation is a ``while`` under ``vmap``, with one condition for each element of the batch."""
    return "cond_jaxpr" in eqn.params and bool(eqn.params["cond_jaxpr"].out_avals[0].shape)


def _each_equation(closed: ClosedJaxpr, change: Callable[[JaxprEqn], list[JaxprEqn]], maps: bool = True) -> ClosedJaxpr:
    """A closed jaxpr with each equation, in bodies first, replaced by the equations that ``change`` returns; ``maps``: also in
    the bodies of the user's ``shard_map``."""
    return rewrite(
        closed, lambda jaxpr: with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in change(eqn)]), maps=maps
    )


def _constrained(mesh: AnyMesh, eqn: JaxprEqn) -> list[Any]:
    """An equation without shardings as parameters (:func:`shardings_of`), and constraints of its operands and results in their
    place."""
    eqn = in_auto_mesh(eqn)
    given = shardings_of(eqn)
    if given is None:
        return [eqn]
    eqns = []

    def constrained(var: Any, sharding: Any, result: bool) -> Any:
        """The variable that the equation reads or writes in place of ``var``; adds the constraint to ``eqns``."""
        if sharding is None or isinstance(var, Literal):
            return var
        spec = axes_of_spec(sharding.spec, var.aval.ndim)
        unknown = next((a for axes in spec for a in axes if a not in mesh.axis_names), None)
        if unknown is not None:
            raise MeshError(
                f"{eqn.primitive.name} has the sharding {sharding.spec}, but the mesh of the step ({mesh_text(mesh.shape)}) has no "
                f"axis `{unknown}`",
                axis=unknown,
                source=source_line(eqn),
                fixes=["name axes of the mesh of the step", "or leave the sharding out: the layout decides"],
            )
        other = Var(var.aval)
        ends = {"invars": [other], "outvars": [var]} if result else {"invars": [var], "outvars": [other]}
        eqns.append(eqn.replace(primitive=place_p, params={"spec": spec}, effects=frozenset(), **ends))
        return other

    invars = [constrained(v, s, False) for v, s in zip(eqn.invars, given.operands, strict=True)]
    operands = len(eqns)
    outvars = [constrained(v, s, True) for v, s in zip(eqn.outvars, given.results, strict=True)]
    return [*eqns[:operands], eqn.replace(params=given.params, invars=invars, outvars=outvars), *eqns[operands:]]


def _with_scalar_condition(eqn: Any) -> list[Any]:
    """The equation; a batched ``while`` as one whose condition is a scalar: it runs until all elements are done. Done elements are
    not changed, as in the compiled program."""
    if not _is_batched(eqn):
        return [eqn]

    def run(*xs: Any) -> list[Any]:
        return run_bodies(eqn, xs, lambda body, consts, xs: jaxpr_as_fun(ClosedJaxpr(body, consts))(*xs))

    made, _ = equations_of(run, eqn.invars, eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=eqn.outvars)]

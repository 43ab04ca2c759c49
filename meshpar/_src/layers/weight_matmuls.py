"""Replaces the matmuls of weights in a traced function by scaled matmuls.

A value is *made of weights* if it is computed from weights and numbers alone, by any ops: a cast, the slice of a loop's stack, a
transpose, a sum with a low-rank matrix. A matmul with one operand that is made of weights belongs to these weights.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ...errors import DivisibilityError
from ..compat.jax import Atom, aval_of, make_generated_jaxpr, source_line
from ..compat.loops import loop_parts, operands_of_bodies
from ..program.jaxprs import inline, with_bodies, with_eqns
from ..rules import bodies, primitive
from .scaled_matmul import Matmul, Scaled, ScaledFormat, scaled_matmul

Origin = frozenset[int] | None
"""The weights that a value is made of, by their positions: none for a number. None: it is made of other arrays as well."""


def with_scaled_matmuls(
    closed: ClosedJaxpr, scaled_format: ScaledFormat, paths: Sequence[str | None], kept: Collection[int]
) -> tuple[ClosedJaxpr, int]:
    """(a closed jaxpr of which the matmuls of weights are scaled, in its loops, branches and calls as well; their number).

    Convolutions, grouped matmuls, matmuls of vectors, and matmuls in custom derivatives, kernels and the user's ``shard_map`` stay.

    Args:
      paths: of each argument, if it is a weight.
      kept: the positions of weights whose matmuls stay.

    Raises:
      DivisibilityError: the sizes of a matmul are no multiple of the blocks.
    """
    rewriter = _Rewriter(scaled_format, paths, kept)
    origins = [None if path is None else frozenset([k]) for k, path in enumerate(paths)]
    jaxpr, _ = rewriter.rewritten(closed.jaxpr, origins)
    return ClosedJaxpr(jaxpr, closed.consts), rewriter.count


def _union(origins: Sequence[Origin]) -> Origin:
    """The origin of a value that is computed from values of these origins."""
    known = [o for o in origins if o is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


class _Rewriter:
    """Rewrites a jaxpr and its bodies; ``count``: the matmuls that it has replaced."""

    def __init__(self, scaled_format: ScaledFormat, paths: Sequence[str | None], kept: Collection[int]):
        self.format, self.paths, self.kept, self.count = scaled_format, paths, frozenset(kept), 0

    def rewritten(self, jaxpr: Jaxpr, origins: Sequence[Origin]) -> tuple[Jaxpr, list[Origin]]:
        """(the jaxpr with scaled matmuls, the origins of its results), given the origins of its arguments."""
        known: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))
        encoded: dict[Any, list[Atom]] = {}  # (array, blocks) → its atoms: several matmuls read one operand
        eqns: list[JaxprEqn] = []

        def origin(atom: Atom) -> Origin:
            # a constant of the jaxpr may be an array of the user's data
            return frozenset() if isinstance(atom, Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            own = [origin(v) for v in eqn.invars]
            family, results = primitive(eqn.primitive.name).family, [_union(own)] * len(eqn.outvars)
            matmul = self.matmul(eqn, own) if family == "dot" else None
            if matmul is not None:
                self.count += 1
                self.emit(eqns, eqn, matmul, encoded)
            elif bodies(eqn) and family != "custom_derivative":
                eqn, results = self.with_bodies(eqn, own)
                eqns.append(eqn)
            else:
                eqns.append(eqn)
            known.update(zip(eqn.outvars, results, strict=True))
        return with_eqns(jaxpr, eqns), [origin(v) for v in jaxpr.outvars]

    def with_bodies(self, eqn: JaxprEqn, own: Sequence[Origin]) -> tuple[JaxprEqn, list[Origin]]:
        """(an equation with rewritten bodies, the origins of its results); carries of loops are not made of weights."""
        carries = loop_parts(eqn).carries if primitive(eqn.primitive.name).loop else ()
        own = [None if i in carries else o for i, o in enumerate(own)]
        done = [self.rewritten(*pair) for pair in zip(bodies(eqn), operands_of_bodies(eqn, own), strict=True)]
        last = done if primitive(eqn.primitive.name).family == "cond" else done[-1:]
        results = [_union(each) for each in zip(*(origins for _, origins in last), strict=True)]
        for i in range(len(carries)):
            results[i] = None
        return with_bodies(eqn, [body for body, _ in done]), results

    def matmul(self, eqn: JaxprEqn, own: Sequence[Origin]) -> Matmul | None:
        """The scaled matmul in place of an equation; None: it stays.

        Raises:
          DivisibilityError: as above.
        """
        made = [i for i, o in enumerate(own[:2]) if o]
        if len(made) != 1 or self.kept & (own[made[0]] or frozenset()):
            return None
        avals, out = [aval_of(v) for v in eqn.invars], aval_of(eqn.outvars[0])
        if not all(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1 for a in (*avals, out)):
            return None
        path = ", ".join(str(self.paths[k]) for k in sorted(own[made[0]] or ()))
        dims = tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"])
        matmul = Matmul(
            self.format,
            dims,
            (avals[0].shape, avals[1].shape),
            (avals[0].dtype, avals[1].dtype),
            out.dtype,
            made[0],
            path,
        )
        if not (dims[0][0] and matmul.free(0) and matmul.free(1)):
            return None
        for side in (0, 1):
            if matmul.blocks(side) is None:
                raise self.indivisible(eqn, matmul, side)
        return matmul

    def indivisible(self, eqn: JaxprEqn, matmul: Matmul, side: int) -> DivisibilityError:
        """The error of an operand whose contracted or free dims have no blocks."""
        shape, (contracted, _) = matmul.shapes[side], matmul.dims
        sizes = [" × ".join(str(shape[d]) for d in dims) for dims in (contracted[side], matmul.free(side))]
        of = "the weight" if side == matmul.weight else "the other operand"
        return DivisibilityError(
            f"mp.train.Precision({self.format.name!r}): {of} of a matmul, {list(shape)}, has {sizes[0]} contracted and {sizes[1]} "
            f"other elements; scales need blocks of {self.format.block} of both, of which backward matmuls contract the others",
            path=matmul.path,
            shape=matmul.shapes[matmul.weight],
            source=source_line(eqn),
            fixes=[
                f"sizes that are multiples of {self.format.block}",
                f'or leave this weight out: keep="{matmul.path}"',
                'or "float8", which has one scale for each array',
            ],
        )

    def emit(self, eqns: list[JaxprEqn], eqn: JaxprEqn, matmul: Matmul, encoded: dict[Any, list[Atom]]) -> None:
        """Append the equations of a scaled matmul, which have the results of ``eqn``."""
        operands: list[Atom] = []
        for side, x in enumerate(eqn.invars):
            blocks = matmul.blocks(side) or {}
            key = id(x), tuple(sorted(blocks.items()))
            if key not in encoded:
                encoded[key] = self.traced(eqns, eqn, functools.partial(_encoded, matmul, side), [x])
            operands += encoded[key]
        self.traced(eqns, eqn, functools.partial(_multiplied, matmul), [*eqn.invars, *operands])
        eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)

    def traced(self, eqns: list[JaxprEqn], eqn: JaxprEqn, fn: Any, atoms: Sequence[Atom]) -> list[Atom]:
        """Append the equations of a function of some atoms, at the user's line of ``eqn``; returns its results."""
        closed = make_generated_jaxpr(fn, *(aval_of(v) for v in atoms))
        return inline(eqns, closed.jaxpr, closed.consts, atoms, source_info=eqn.source_info)


def _encoded(matmul: Matmul, side: int, x: Any) -> Scaled:
    return matmul.encoded(lax.stop_gradient(x), side)


def _multiplied(matmul: Matmul, a: Any, b: Any, *encoded: Any) -> Any:
    """The scaled matmul, given the arrays of both encoded operands."""
    like = Scaled(0, 0 if matmul.format.block else None, None if matmul.format.name == "mxfp8" else 0)  # type: ignore[arg-type]
    half = len(encoded) // 2
    return scaled_matmul(
        matmul, a, b, *(jax.tree.unflatten(jax.tree.structure(like), q) for q in (encoded[:half], encoded[half:]))
    )

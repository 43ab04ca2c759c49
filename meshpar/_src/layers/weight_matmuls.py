"""Replaces the matmuls of weights in a traced function by scaled matmuls.

A value is *made of weights* if it is computed from weights and numbers alone, by any ops: a cast, the slice of a loop's stack, a
transpose, a sum with a low-rank matrix. A matmul with one operand that is made of weights belongs to these weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
    closed: ClosedJaxpr, scaled_format: ScaledFormat, paths: Mapping[int, str]
) -> tuple[ClosedJaxpr, int]:
    """(a closed jaxpr of which the matmuls of weights are scaled, in its loops, branches and calls as well; their number).

    Convolutions, grouped matmuls, matmuls of vectors, and matmuls in custom derivatives, kernels and the user's ``shard_map`` stay.

    Args:
      paths: position of an argument that is a weight → its path. Matmuls of other arguments stay.

    Raises:
      DivisibilityError: the sizes of a matmul are no multiple of the blocks.
    """
    rewriter = _Rewriter(scaled_format, paths)
    origins = [frozenset([k]) if k in paths else None for k in range(len(closed.jaxpr.invars))]
    jaxpr, _ = rewriter.rewritten(closed.jaxpr, origins)
    return ClosedJaxpr(jaxpr, closed.consts), rewriter.count


def _union(origins: Sequence[Origin]) -> Origin:
    """The origin of a value that is computed from values of these origins."""
    known = [o for o in origins if o is not None]
    return frozenset().union(*known) if len(known) == len(origins) else None


class _Rewriter:
    """Rewrites a jaxpr and its bodies; ``count``: the matmuls that it has replaced."""

    def __init__(self, scaled_format: ScaledFormat, paths: Mapping[int, str]):
        self.format, self.paths, self.count = scaled_format, paths, 0

    def rewritten(self, jaxpr: Jaxpr, origins: Sequence[Origin]) -> tuple[Jaxpr, list[Origin]]:
        """(the jaxpr with scaled matmuls, the origins of its results), given the origins of its arguments."""
        known: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))
        encoded: dict[Any, Scaled] = {}  # of atoms; several matmuls read one operand
        eqns: list[JaxprEqn] = []

        def origin(atom: Atom) -> Origin:
            if isinstance(atom, Literal):
                return frozenset()
            # an array that is closed over may be data
            return known.get(atom, None if aval_of(atom).shape else frozenset())

        for eqn in jaxpr.eqns:
            own = [origin(v) for v in eqn.invars]
            family, results = primitive(eqn.primitive.name).family, [_union(own)] * len(eqn.outvars)
            matmul = self.matmul(eqn, own) if family == "dot" else None
            if matmul is not None:
                self.emit(eqns, eqn, matmul, encoded)
            else:
                if bodies(eqn) and family != "custom_derivative":
                    eqn, results = self.with_bodies(eqn, own)
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
        return with_bodies(eqn, [body for body, _ in done]), [None] * len(carries) + results[len(carries) :]

    def matmul(self, eqn: JaxprEqn, own: Sequence[Origin]) -> Matmul | None:
        """The scaled matmul in place of an equation; None: it stays.

        Raises:
          DivisibilityError: as above.
        """
        made = [(i, o) for i, o in enumerate(own[:2]) if o]
        if len(made) != 1:
            return None
        (weight, weights), avals, out = made[0], tuple(aval_of(v) for v in eqn.invars), aval_of(eqn.outvars[0])
        if not all(jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1 for a in (*avals, out)):
            return None
        dims = tuple(tuple(map(tuple, pair)) for pair in eqn.params["dimension_numbers"])
        matmul = Matmul(self.format, dims, avals, out.dtype, weight, ", ".join(self.paths[k] for k in sorted(weights)))
        if not (dims[0][0] and matmul.free(0) and matmul.free(1)):
            return None
        for side in (0, 1):
            if matmul.blocks(side) is None:
                shape, block, path = avals[side].shape, self.format.block, matmul.path
                sizes = [" × ".join(str(shape[d]) for d in along) for along in (dims[0][side], matmul.free(side))]
                raise DivisibilityError(
                    f"mp.train.Precision({self.format.name!r}): an operand {list(shape)} of a matmul of `{path}` has {sizes[0]} "
                    f"contracted and {sizes[1]} other elements; scales are for blocks of {block}, also of the others (backward)",
                    path=path,
                    shape=avals[weight].shape,
                    source=source_line(eqn),
                    fixes=[
                        f"multiples of {block}",
                        f'or leave the weight out: keep="{path}"',
                        "or float8: a scale for an array",
                    ],
                )
        self.count += 1
        return matmul

    def emit(self, eqns: list[JaxprEqn], eqn: JaxprEqn, matmul: Matmul, encoded: dict[Any, Scaled]) -> None:
        """Append the equations of a scaled matmul, which have the results of ``eqn``; ``encoded``: (array, blocks) → operand."""
        operands: list[Any] = []
        for side, x in enumerate(eqn.invars):
            blocks = {d: n for d, n in (matmul.blocks(side) or {}).items() if n > 1}
            key = id(x), tuple(sorted(blocks.items()))
            if key not in encoded:
                encode = functools.partial(_encoded, matmul, blocks)
                tree = jax.tree.structure(jax.eval_shape(encode, aval_of(x)))
                encoded[key] = tree.unflatten(_traced(eqns, eqn, encode, x))
            operands.append(encoded[key])
        _traced(eqns, eqn, functools.partial(scaled_matmul, matmul), *eqn.invars, *operands)
        eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)


def _encoded(matmul: Matmul, blocks: Mapping[int, int], x: Any) -> Scaled:
    return matmul.format.encode(lax.stop_gradient(x), blocks, matmul.path)


def _traced(eqns: list[JaxprEqn], eqn: JaxprEqn, fn: Any, *args: Any) -> list[Atom]:
    """Append the equations of a function of trees of atoms, at the user's line of ``eqn``; returns its results."""
    closed = make_generated_jaxpr(fn, *jax.tree.map(aval_of, args))
    return inline(eqns, closed.jaxpr, closed.consts, jax.tree.leaves(args), source_info=eqn.source_info)

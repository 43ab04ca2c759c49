"""Replaces the matmuls of weights in a traced function by scaled matmuls.

A value is *made of weights* if it is computed from weights and numbers alone, by any ops: a cast, the slice of a loop's stack, a
transpose, a sum with a low-rank matrix. A matmul with one operand that is made of weights belongs to these weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ...errors import DivisibilityError, UnsupportedError
from ..compat.jax import Atom, aval_of, default_promotion, equations, make_generated_jaxpr, source_line
from ..compat.loop_operands import loop_parts, operands_of_bodies
from ..program.jaxprs import inline, with_bodies, with_eqns
from ..program.kernels import kernel_p
from ..rules import bodies, primitive
from .moe import experts
from .scaled_matmul import FORMATS_OF_EXPERTS, Matmul, Scaled, ScaledFormat, rounded, scaled_matmul

Origin = frozenset[int] | None
"""The weights that a value is made of, by their positions: none for a number. None: it is made of other arrays as well."""


def with_scaled_matmuls(
    closed: ClosedJaxpr, scaled_format: ScaledFormat, paths: Mapping[int, str]
) -> tuple[ClosedJaxpr, int]:
    """(a closed jaxpr of which the matmuls of weights are scaled, in its loops, branches and calls as well; their number).

    Convolutions, matmuls of vectors, and matmuls in custom derivatives, kernels and the user's ``shard_map`` stay, except for those
    of experts (:func:`meshpar.layers.moe`) in a format of :data:`.scaled_matmul.FORMATS_OF_EXPERTS`.

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
            call = self.experts(eqn, own) if family == "custom_derivative" else None
            if matmul is not None:
                self.emit(eqns, eqn, matmul, encoded)
            elif call is not None:
                _traced(eqns, eqn, call, *eqn.invars)
                eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)
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
                raise _no_blocks(self.format, matmul.path, avals[side].shape, (dims[0][side], matmul.free(side)), eqn)
        self.count += 1
        return matmul

    def experts(self, eqn: JaxprEqn, own: Sequence[Origin]) -> Callable[..., Any] | None:
        """The function in place of a call of :func:`meshpar.layers.moe`'s experts; None: it is another equation, or stays.

        Raises:
          DivisibilityError: as above.
          UnsupportedError: one of the matrices is kept or is not made of weights, and another is.
        """
        form = FORMATS_OF_EXPERTS.get(self.format.name)
        calls = [e for e in equations(bodies(eqn)[0]) if e.primitive is kernel_p]
        kernel = calls[0].params["kernel"] if len(calls) == 1 else None
        if form is None or kernel is None or kernel.name != experts.NAME or not kernel.options:
            return None
        paths = [", ".join(self.paths[k] for k in sorted(o or ())) for o in own[3:]]
        if not all(paths):
            if any(paths):
                raise UnsupportedError(
                    f"mp.train.Precision({form.name!r}): some matrices of the same experts are quantized, and others are not: "
                    + ", ".join(filter(None, paths)),
                    path=next(filter(None, paths)),
                    source=source_line(eqn),
                    fixes=["keep all matrices of the experts, or none", "weights among the argument that is converted"],
                )
            return None
        for path, shape in zip(paths, (aval_of(v).shape for v in eqn.invars[3:]), strict=True):
            if any(n % form.block for n in shape[-2:]):
                raise _no_blocks(form, path, shape, ([-2], [-1]), eqn)
        self.count += len(paths)
        options = {**kernel.options, "scaled": form.name}
        del options["fused"]

        def scaled(x: jax.Array, expert: jax.Array, weight: jax.Array, *matrices: jax.Array) -> jax.Array:
            each: list[Any] = [
                rounded(form, ((m.ndim - 2, form.block), (m.ndim - 1, form.block)), path, m)
                for path, m in zip(paths, matrices, strict=True)
            ]
            return experts.run_experts(x, expert, weight, each, **options)

        return default_promotion()(scaled)

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


def _no_blocks(
    form: ScaledFormat, path: str, shape: Sequence[int], along: Sequence[Sequence[int]], eqn: JaxprEqn
) -> DivisibilityError:
    """The error for an operand whose sizes ``along`` contracted and other dims are no multiples of a block."""
    sizes = [" × ".join(str(shape[d]) for d in dims) for dims in along]
    return DivisibilityError(
        f"mp.train.Precision({form.name!r}): an operand {list(shape)} of a matmul of `{path}` has {sizes[0]} contracted and "
        f"{sizes[1]} other elements; scales are for blocks of {form.block}, also of the others (backward)",
        path=path,
        shape=shape,
        source=source_line(eqn),
        fixes=[
            f"multiples of {form.block}",
            f'or leave the weight out: keep="{path}"',
            "or a format of smaller blocks: of experts, mxfp8; of others, float8 has a scale for an array",
        ],
    )


def _encoded(matmul: Matmul, blocks: Mapping[int, int], x: Any) -> Scaled:
    return matmul.format.encode(lax.stop_gradient(x), blocks, matmul.path)


def _traced(eqns: list[JaxprEqn], eqn: JaxprEqn, fn: Any, *args: Any) -> list[Atom]:
    """Append the equations of a function of trees of atoms, at the user's line of ``eqn``; returns its results."""
    closed = make_generated_jaxpr(fn, *jax.tree.map(aval_of, args))
    return inline(eqns, closed.jaxpr, closed.consts, jax.tree.leaves(args), source_info=eqn.source_info)

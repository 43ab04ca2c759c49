"""Rewrites of inner products of raveled arrays, which ``jnp.vdot`` and solvers make (L-BFGS, conjugate gradients).

If a shard of an array is not a block of the raveled array, the inner product contracts all dims of the array. Any other op reads
the raveled array.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from .rewriter import Site
from .views import RaveledView


def reshape(site: Site) -> bool:
    """Rewrite a reshape to one dim to a view, if shards of the array are not blocks of the result; and a reshape of such a view to
    one of the array."""
    if len(site.op.ins) > 1 or site.transposes:
        return False
    view, shape = site.view(0), site.out_shape
    if isinstance(view, RaveledView):
        return site.define(0, _reshaped(site, view.source, shape))
    if view is not None or len(shape) != 1 or 0 in site.shape(0) or not _is_scattered(site):
        return False
    return site.define(0, RaveledView(site.read(0)))


def _reshaped(site: Site, atom: Any, shape: tuple[int, ...]) -> Any:
    return atom if atom.aval.shape == shape else site.emit(lambda x: lax.reshape(x, shape), atom)


def _is_scattered(site: Site) -> bool:
    """Whether a shard of operand 0 is not a block of the raveled array: some columns of ``[rows, columns] → [rows·columns]``."""
    value, shape = site.op.ins[0], site.shape(0)
    minor = next((d for d in range(len(shape) - 1, 0, -1) if site.shards(value, d) > 1), 0)
    return any(site.shards(value, d) != shape[d] for d in range(minor))


def dot_general(site: Site) -> bool:
    """Rewrite an inner product with a view, and, for its gradient, the product of a view and a scalar; False for other ops."""
    views = [view for k in range(len(site.op.ins)) if isinstance(view := site.view(k), RaveledView)]
    if not views or site.op.primitive.family != "dot":
        return False
    ranks, shape = sorted(len(site.shape(k)) for k in (0, 1)), views[0].source.aval.shape
    if ranks != [len(site.params["dimension_numbers"][0][0]), 1]:
        return False
    dims = tuple(range(len(shape))) if ranks == [1, 1] else ()
    atoms = []
    for k in (0, 1):
        view = site.view(k)
        atom = view.source if isinstance(view, RaveledView) else site.read(k)
        atoms.append(_reshaped(site, atom, shape) if site.shape(k) else atom)
    atom = site.emit_op(atoms, dimension_numbers=((dims, dims), ((), ())))
    return site.define(0, atom if dims else RaveledView(atom))

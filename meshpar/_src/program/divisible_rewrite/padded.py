"""Rewrites of ops on views whose dims do not divide: the operands are padded, and the result is a view without the padding.

Each returns False if no operand has to be padded, or if the op cannot be applied to the padded operands.

Program: the next-token loss of a sharded sequence, whose logits ``x[:, :-1] @ w`` are reduced over the vocabulary; ``transpose``:
attention over ``tokens[:, :-1]``.

Padding has any values, and is overwritten by the identity of the reduction where an op combines it with other elements.
"""

from __future__ import annotations

from jax import lax

from ...rules.reduce import REDUCTION_KINDS, identity
from .rewriter import Site
from .views import CollapsedView, PaddedDim


def elementwise(site: Site) -> bool:
    """Rewrite an elementwise op; operands of another shape (scalars, dims of size 1) stretch to the padded shape."""
    if len(site.op.eqn.outvars) != 1 or site.has_extended_dtype():
        return False
    shape = site.out_shape
    dims: dict[int, PaddedDim] = {}
    for k in range(len(site.op.ins)):
        for d, dim in site.padded_dims(k).items() if site.shape(k) == shape else ():
            if dims.setdefault(d, dim).padded_size != dim.padded_size:
                return False
    if not dims:
        return False
    atoms = [site.read_padded(k, dims) for k in range(len(site.op.ins))]
    padded_shape = tuple(dims[d].padded_size if d in dims else n for d, n in enumerate(shape))
    return site.define_padded(site.emit_reshaped(atoms, padded_shape), dims)


def transpose(site: Site) -> bool:
    """Rewrite a transpose of an array with padded dims to a transpose of the padded array; False if no dim is padded."""
    dims, order = site.padded_dims(0), site.params["permutation"]
    if not dims:
        return False
    atom = site.emit_op([site.read_padded(0, dims)])
    return site.define_padded(atom, {order.index(d): dim for d, dim in dims.items()})


def broadcast_in_dim(site: Site) -> bool:
    """Rewrite a broadcast; False if it stretches a padded dim."""
    dims, to, shape = site.padded_dims(0), site.params["broadcast_dimensions"], list(site.params["shape"])
    if not dims or len(site.op.ins) > 1 or any(dim.size != shape[to[d]] for d, dim in dims.items()):
        return False
    out_dims = {int(to[d]): dim for d, dim in dims.items()}
    for d, dim in out_dims.items():
        shape[d] = dim.padded_size
    return site.define_padded(site.emit_op([site.read_padded(0, dims)], shape=tuple(shape)), out_dims)


def reshape(site: Site) -> bool:
    """Rewrite a reshape that only adds or removes dims of size 1; False for others."""
    dims = site.padded_dims(0)
    if not dims or len(site.op.ins) > 1 or site.transposes:
        return False
    before, after = site.shape(0), list(site.out_shape)
    old, new = ([d for d, n in enumerate(shape) if n != 1] for shape in (before, after))
    if [before[d] for d in old] != [after[d] for d in new] or any(dim.size == 1 for dim in dims.values()):
        return False
    out_dims = {new[old.index(d)]: dim for d, dim in dims.items()}
    for d, dim in out_dims.items():
        after[d] = dim.padded_size
    return site.define_padded(site.emit(lambda x: lax.reshape(x, after), site.read_padded(0, dims)), out_dims)


def reduce(site: Site) -> bool:
    """Rewrite a reduction; the padding of reduced dims is set to the identity of the reduction."""
    dims, axes = site.padded_dims(0), site.params["axes"]
    if not dims or site.has_extended_dtype():
        return False
    x = site.read_padded(0, dims)
    fill = identity(REDUCTION_KINDS[site.op.name], x.aval.dtype)
    x = site.emit_masked(x, {d: dim for d, dim in dims.items() if d in axes}, fill)
    remaining = [d for d in range(len(site.shape(0))) if d not in axes]
    return site.define_padded(site.emit_op([x]), {remaining.index(d): dim for d, dim in dims.items() if d not in axes})


def dot_general(site: Site) -> bool:
    """Rewrite a matmul; the padding of contracted dims is set to zero. False for collapsed views."""
    contract, batch = site.params["dimension_numbers"]
    dims: list[dict[int, PaddedDim]] = [site.padded_dims(0), site.padded_dims(1)]
    if not any(dims) or any(isinstance(site.view(k), CollapsedView) for k in (0, 1)):
        return False
    for pairs in (contract, batch):
        for i, j in zip(*pairs, strict=True):
            dim = dims[0].get(i) or dims[1].get(j)
            if dim is not None and dims[0].setdefault(i, dim).padded_size != dims[1].setdefault(j, dim).padded_size:
                return False
    atoms = [
        site.emit_masked(site.read_padded(k, dims[k]), {d: dim for d, dim in dims[k].items() if d in contract[k]}, 0)
        for k in (0, 1)
    ]
    free = [(k, d) for k in (0, 1) for d in range(len(site.shape(k))) if d not in contract[k] and d not in batch[k]]
    origins = [(0, d) for d in batch[0]] + free  # of every dim of the result, its operand and dim
    out_dims = {i: dims[k][d] for i, (k, d) in enumerate(origins) if d in dims[k]}
    return site.define_padded(site.emit_op(atoms), out_dims)

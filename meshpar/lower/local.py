"""The local form of every primitive: what one device does to its shards, once its operands lie as the plan asks.

Beside the factor rules (:mod:`meshpar.rules`): a rule says which loops may be split, a local form does one
device's part of them. Most primitives do to shards what they do to arrays; the others are below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..compat.jax import bind, source_line
from ..errors import UnsupportedError
from ..program.ir import Op, Value
from ..rules import RULES
from ..rules.rule import Factors
from . import along, halo
from .exchange import Grid, axis_index, fine_names

Axes = list[tuple[str, ...]]
Sizes = Mapping[str, int]

# These do to shards what they do to arrays: no parameter of theirs is a size of a dim that may be split.
SAME = frozenset(
    """
    dot_general ragged_dot_general reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce reduce_window sort
    approx_top_k cholesky eigh eig lu qr svd triangular_solve householder_product geqrf schur hessenberg tridiagonal
    tridiagonal_solve lu_pivots_to_permutation transpose squeeze expand_dims dynamic_update_slice stack unstack
    random_split random_wrap random_unwrap bitcast_convert_type scatter scatter-mul scatter_mul scatter-min scatter_min
    scatter-max scatter_max rng_bit_generator pure_callback
    """.split()
)


def run_elementwise(op: Op, xs: Sequence[Any]) -> list[Any]:
    """An elementwise op on shards that lie alike."""
    if op.name in ("reshard", "pvary"):
        return [xs[0]]
    return bind(op.eqn, xs, plain_params(op.eqn.params))


def run_local(op: Op, axes: Axes, xs: Sequence[Any], sizes: Sizes) -> list[Any]:
    """One device's part of an op.

    Args:
      op: an op that has a factor rule.
      axes: of every factor of the rule.
      xs: the operands, as shards.

    Raises:
      UnsupportedError: the primitive has no local form, and some factor of it is split.
    """
    form = _FORMS.get(op.name)
    if form is not None:
        return form(Local(op, axes, sizes), *xs)
    if op.name not in SAME and any(axes) and any(sizes[a] > 1 for got in axes for a in got):
        raise UnsupportedError(
            f"{op.name} has a factor rule but no local form, and {_plus(axes)} split it",
            shape=op.outs[0].shape if op.outs else None,
            source=source_line(op.eqn),
            fixes=['use lowering="jit"', "or keep its dims whole, e.g. `dim: none` before the other rules"],
        )
    return bind(op.eqn, xs, plain_params(op.eqn.params))


def _plus(axes: Axes) -> str:
    return "+".join(f"`{a}`" for got in axes for a in got)


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without shardings: inside there are only local arrays."""
    return {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}


class Local:
    """An op and how its factors are split."""

    def __init__(self, op: Op, axes: Axes, sizes: Sizes):
        assert op.rule is not None
        self.op, self.eqn, self.rule, self.axes, self.sizes = op, op.eqn, op.rule, axes, sizes
        self.params = plain_params(op.eqn.params)

    def parts(self, factors: Factors) -> int:
        return math.prod(self.sizes[a] for f in factors for a in self.axes[f])

    def shape(self, shape: Sequence[int], dims: Sequence[Factors]) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(n // self.parts(f) for n, f in zip(shape, dims, strict=True)) if dims else tuple(shape)

    @property
    def out(self) -> tuple[int, ...]:
        return self.shape(self.op.outs[0].shape, self.rule.outs[0])

    def of(self, factors: Factors) -> tuple[str, ...]:
        """The axes (of the factored mesh) that split a dim made of these factors, larger than 1."""
        return fine_names([a for f in factors for a in self.axes[f] if self.sizes[a] > 1], self.sizes)

    def offset(self, factors: Factors, size: int) -> Any:
        """Where this device's shard of a dim begins; ``size`` is the shard's."""
        axes = self.of(factors)
        return axis_index(axes) * size if axes else 0

    def run(self, *xs: Any, **changed: Any) -> list[Any]:
        return bind(self.eqn, xs, {**self.params, **changed})


SMALL = 1 / 8
"""Results of a kernel that are so small beside the first one are made together with it."""


def _kernel(at: Local, *xs):
    kernel = at.params["kernel"]
    names = kernel.sizes([v.aval.shape for v in at.eqn.invars], [v.aval.shape for v in at.eqn.outvars])
    first, *others = kernel.on_shards(*xs, axes={f: at.of((i,)) for i, f in enumerate(names)})
    small = [k for k, x in enumerate(others) if _bytes(x) < SMALL * _bytes(first)]
    if small:  # perhaps columns of larger, padded arrays: cut out when these are made, not where they are read
        first, few = lax.optimization_barrier((first, [others[k] for k in small]))
        for k, x in zip(small, few, strict=True):
            others[k] = x
    return [first, *others]


def _bytes(x: Any) -> int:
    return math.prod(np.shape(x)) * x.dtype.itemsize


def _fft(at: Local, x):
    """XLA's CPU compiler gives the operand of a transform, or of its derivative, an order of dims that it then refuses: where a
    batch dim is 1, and where what follows is scattered. One dim has one order."""
    cpu = isinstance(at.sizes, Grid) and at.sizes.cpu

    def flat(x):
        return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape) if cpu else x

    batch = x.shape[: x.ndim - len(at.params["fft_lengths"])]
    x = flat(x)
    (y,) = at.run(x.reshape(*([math.prod(batch)] * (math.prod(batch) != 1)), *x.shape[len(batch) :]))
    return [flat(y.reshape(*batch, *y.shape[y.ndim - x.ndim + len(batch) :]))]


def _broadcast(at: Local, *xs):
    return at.run(*xs, shape=at.out)


def _reshape(at: Local, *xs):
    return at.run(*xs, new_sizes=at.out)


def _dynamic_slice(at: Local, x, *starts):
    """Starts are clamped here: of a slice of a slice XLA clamps the first start with the size of the second."""
    sizes = at.out
    ends = [min(n - m, np.iinfo(i.dtype).max) for n, m, i in zip(x.shape, sizes, starts, strict=True)]
    starts = [lax.clamp(np.zeros((), i.dtype), i, np.asarray(e, i.dtype)) for i, e in zip(starts, ends, strict=True)]
    return at.run(x, *starts, slice_sizes=sizes)


def _tile(at: Local, x):
    reps = tuple(n // max(m, 1) for n, m in zip(at.out, x.shape, strict=True))
    return at.run(x, reps=reps)


def _iota(at: Local, *xs):
    d, shape = at.params["dimension"], at.out
    (x,) = at.run(*xs, shape=shape)
    factors = at.rule.outs[0][d]
    return [x + lax.convert_element_type(at.offset(factors, shape[d]), x.dtype)] if at.of(factors) else [x]


def _empty(at: Local, *xs):
    return at.run(*xs, shape=at.out)


def _same(at: Local, *xs):
    return list(xs)


def _once(at: Local, *xs):
    """A callback with an effect: one device calls it. What it returned would have to be sent, which no plan lists."""
    if at.op.outs:
        raise UnsupportedError(
            f"{at.op.name} with results has no local form: every device would call it",
            source=source_line(at.eqn),
            fixes=['use lowering="jit"', "or jax.pure_callback, which may be called by every device"],
        )
    first = axis_index(fine_names(list(at.sizes), at.sizes)) == 0
    lax.cond(first, lambda: at.run(*xs), lambda: [])
    return []


def _random_bits(at: Local, key):
    """The bits of this device's part of the array, which are those that the whole array has there.

    With partitionable threefry a bit depends on the key and its global index alone. Other generators are run
    for the whole array, of which every device keeps its part.
    """
    dims, whole, shape = at.rule.outs[0], at.op.outs[0].shape, at.out
    if shape == whole:
        return at.run(key)
    plain = str(jax.random.key_impl(key)) == "threefry2x32" and getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    if not plain or key.shape or math.prod(whole) >= 2**32:
        (x,) = at.run(key)
        return [lax.dynamic_slice(x, [at.offset(f, n) for f, n in zip(dims, shape, strict=True)], shape)]
    from jax.extend.random import threefry2x32_p

    index = jnp.zeros(shape, np.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        mine = lax.broadcasted_iota(np.uint32, shape, d)
        mine = mine + lax.convert_element_type(at.offset(dims[d], shape[d]), np.uint32)
        index = index + mine * np.uint32(stride)
        stride *= whole[d]
    words = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros(shape, np.uint32), index)
    width = at.params["bit_width"]
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        high, low = (lax.convert_element_type(b, dtype) for b in (high, low))
        return [lax.shift_left(high, np.full((), 32, dtype)) | low]
    return [lax.convert_element_type(high ^ low, dtype)]


# -- lookups: a dim that is looked up may be split; every device looks up what it holds


def _looked_up(at: Local, into: Sequence[int]) -> list[tuple[int, int]]:
    """(component of the index vector, dim of the operand) where that dim is split and taken one by one."""
    window = at.params.get("slice_sizes")
    taken = at.params["dimension_numbers"]
    single = taken.collapsed_slice_dims if window is not None else taken.inserted_window_dims
    return [(c, d) for c, d in enumerate(into) if d in single and at.of(at.rule.ins[0][d])]


def _local_index(
    at: Local, indices: Any, split: list[tuple[int, int]], local: Sequence[int], clip: bool
) -> tuple[Any, Any, Any]:
    """(the index vectors within this device's shard, which of them lie in it, which lie in the whole array)."""
    whole = at.op.ins[0].shape if at.op.ins[0] is not None else at.eqn.invars[0].aval.shape
    indices = indices if jnp.issubdtype(indices.dtype, jnp.signedinteger) else indices.astype(np.int64 if (
        indices.dtype.itemsize == 8) else np.int32)  # fmt: skip
    mine = inside = np.True_
    columns = [indices[..., c] for c in range(indices.shape[-1])]
    for c, d in split:
        i = columns[c]
        if clip:
            i = jnp.clip(i, 0, whole[d] - 1)
        known = (i >= 0) & (i < whole[d])
        i = i - lax.convert_element_type(at.offset(at.rule.ins[0][d], local[d]), i.dtype)
        here = (i >= 0) & (i < local[d])
        mine, inside = mine & here, inside & known
        columns[c] = i
    return jnp.stack(columns, -1), mine, inside


def _gather(at: Local, operand, indices):
    """A masked lookup: what another device holds is 0 here, and the sum over the devices is settled as planned."""
    p = at.params
    dn, mode = p["dimension_numbers"], p["mode"]
    window = tuple(
        operand.shape[d] if at.of(f) and d not in dn.collapsed_slice_dims and d not in dn.operand_batching_dims else n
        for d, (n, f) in enumerate(zip(p["slice_sizes"], at.rule.ins[0], strict=True))
    )
    split = _looked_up(at, dn.start_index_map)
    if not split:
        return at.run(operand, indices, slice_sizes=window)
    # a promise that is broken is clipped, as the compiler does on one device
    clip = mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    local, mine, inside = _local_index(at, indices, split, operand.shape, clip)
    column = jnp.arange(local.shape[-1])
    for c, d in split:
        local = jnp.where(column == c, jnp.clip(local, 0, operand.shape[d] - 1), local)
    (out,) = at.run(operand, local.astype(indices.dtype), slice_sizes=window, indices_are_sorted=False)
    at_index = [d for d in range(out.ndim) if d not in dn.offset_dims]

    def spread(mask: Any) -> Any:
        return lax.broadcast_in_dim(mask, out.shape, at_index)

    out = jnp.where(spread(mine), out, jnp.zeros((), out.dtype))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # nobody holds it: one device fills it
        first = axis_index(tuple(a for _, d in split for a in at.of(at.rule.ins[0][d]))) == 0
        out = jnp.where(spread(~inside & first), _fill(p["fill_value"], out.dtype), out)
    return [out]


def _fill(value: Any, dtype: Any) -> Any:
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif jnp.issubdtype(dtype, jnp.signedinteger):
            value = jnp.iinfo(dtype).min
        else:
            value = True if dtype == np.bool_ else jnp.iinfo(dtype).max
    return jnp.asarray(value, dtype)


def _scatter_sum(at: Local, operand, indices, updates):
    """Every device writes the updates it has into what it holds; of a partial result one device brings the operand."""
    dn, mode = at.params["dimension_numbers"], at.params["mode"]
    partial = tuple(a for f, k in enumerate(at.rule.kinds) if k == "sum" for a in at.of((f,)))
    if partial and not _zeros(at.op.ins[0]):
        operand = jnp.where(axis_index(partial) == 0, operand, jnp.zeros((), operand.dtype))
    split = _looked_up(at, dn.scatter_dims_to_operand_dims)
    if not split:
        return at.run(operand, indices, updates)
    local, mine, _ = _local_index(at, indices, split, operand.shape, mode == lax.GatherScatterMode.CLIP)
    away = [operand.shape[d] for _, d in split]
    column = jnp.arange(local.shape[-1])
    for (c, _), far in zip(split, away, strict=True):  # dropped
        local = jnp.where((column == c) & ~mine[..., None], far, local)
    return at.run(operand, local, updates, mode=lax.GatherScatterMode.FILL_OR_DROP)


def _zeros(value: Value | None) -> bool:
    op = None if value is None else value.op
    if op is None or op.name != "broadcast_in_dim" or op.ins[0] is not None:
        return False
    return not np.any(op.eqn.invars[0].val)


_FORMS: dict[str, Callable[..., list[Any]]] = {
    **halo.FORMS,
    **along.FORMS,
    "kernel": _kernel,
    "fft": _fft,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "dynamic_slice": _dynamic_slice,
    "tile": _tile,
    "iota": _iota,
    "empty": _empty,
    "device_put": _same,
    "random_bits": _random_bits,
    **dict.fromkeys(("io_callback", "debug_callback", "debug_print"), _once),
    "gather": _gather,
    **dict.fromkeys(("scatter-add", "scatter_add", "scatter-sub", "scatter_sub"), _scatter_sum),
}
assert set(RULES) >= set(_FORMS) - {"scatter_add", "scatter_sub"}

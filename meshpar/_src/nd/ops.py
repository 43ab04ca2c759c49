"""Functions of named arrays that address dims by name: einsum, ``reduce`` and ``along`` for any function of an axis, shifts, top-k,
reshapes, indexing, and new arrays. :mod:`nd.functions` has functions of JAX that these apply: ``sum``, ``argmin``, ``softmax``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import LayoutSyntaxError, RankError, UnknownDimError
from ..dims import Dims, DimsLike, did_you_mean, parse_dims
from .named import Named, as_named, check_sizes, described, elementwise, named, position, rename, transposed

# -- einsum, reductions, functions along a dim


def einsum(*xs: Any, out: DimsLike | None = None, reduced: DimsLike | None = None, **options: Any) -> Named:
    """The product of arrays, summed over the dims that are not in ``out``: ``nd.einsum(x, w, out="batch mlp")``.

    Args:
      out: the dims of the result, in order.
      reduced: in place of ``out``: the dims to sum over. By default those that several arrays have.
      options: of ``jnp.einsum``, such as ``precision`` and ``preferred_element_type``.

    Raises:
      UnknownDimError: no array has a dim of ``out`` or ``reduced``.
      RankError: the sizes of a dim differ; the error describes both arrays.

    Example:
      >>> x, w = mp.nd.full(1.0, batch=4, embed=8), mp.nd.full(1.0, embed=8, mlp=16)
      >>> mp.nd.einsum(x, w, out="batch mlp").sizes
      {'batch': 4, 'mlp': 16}
    """
    operands = [as_named(x) for x in xs]
    check_sizes(operands)
    every = list(dict.fromkeys(d for x in operands for d in x.dims))
    given = [*dim_names(out or ()), *dim_names(reduced or ())]
    for d in given:
        if d not in every:
            text = f"mp.nd.einsum: no array has the dim `{d}`: {', '.join(f'({described(x)})' for x in operands)}"
            raise UnknownDimError(text, dim=d, fixes=did_you_mean(d, filter(None, every), "dims"))
    if out is None:
        shared = [d for d in every if sum(d in x.dims for x in operands) > 1]
        given = [d for d in every if d not in (shared if reduced is None else given)]
    terms = [t for x in operands for t in (x.array, [every.index(d) for d in x.dims])]
    return Named(jnp.einsum(*terms, [every.index(d) for d in given], **options), tuple(given))


def reduce(fn: Callable[..., Any], x: Any, over: DimsLike | None = None, *, out: DimsLike | None = None) -> Named:
    """Reduce dims with a function such as ``jnp.sum`` or ``jax.nn.logsumexp``, which is called with ``axis=``.

    Args:
      over: the dims to reduce. Default: all.
      out: in place of ``over``: the dims that remain, in order.

    Raises:
      UnknownDimError: ``x`` does not have a dim of ``over`` or ``out``.

    Example:
      >>> x = mp.nd.full(1.0, batch=4, embed=8)
      >>> mp.nd.reduce(jnp.sum, x, "embed").sizes, mp.nd.sum(x, out="embed").sizes
      ({'batch': 4}, {'embed': 8})
    """
    x = as_named(x)
    remaining = dim_names(out or ())
    gone = [d for d in x.dims if d not in remaining] if over is None else dim_names(over)
    axes = [position(x, d, "reduce") for d in (*gone, *remaining)][: len(gone)]
    left = Named(fn(x.array, axis=axes[0] if len(axes) == 1 else tuple(axes)), _without(x.dims, *gone))
    return transpose(left, remaining) if remaining else left


def along(fn: Callable[..., Any], x: Any, over: str) -> Named:
    """Apply a function along one dim that returns an array of the same shape, such as ``jnp.cumsum``; it is called with ``axis=``.

    Raises:
      UnknownDimError: ``x`` does not have the dim.

    Example:
      >>> print(mp.nd.along(jnp.cumsum, mp.nd.arange(seq=4), "seq").array)
      [0 1 3 6]
    """
    x = as_named(x)
    return Named(fn(x.array, axis=position(x, over, "along")), x.dims)


def shift(x: Any, over: str, offset: int, *, wrap: bool = False) -> Named:
    """Move elements along a dim by ``offset``; zeros enter at the end that becomes free, or with ``wrap`` the elements that leave.

    Example:
      >>> print(mp.nd.shift(mp.nd.arange(seq=4), "seq", 1).array)
      [0 0 1 2]
    """
    x = as_named(x)
    i = position(x, over, "shift")
    if wrap:
        return Named(jnp.roll(x.array, offset, i), x.dims)
    widths = [(offset, -offset, 0) if k == i else (0, 0, 0) for k in range(len(x.dims))]
    return Named(lax.pad(x.array, jnp.zeros((), x.dtype), widths), x.dims)


def top_k(x: Any, over: str, **size: int) -> tuple[Named, Named]:
    """The largest elements of a dim, in descending order, and their int32 indices: ``nd.top_k(gates, "experts", choice=2)``.

    Args:
      size: the dim of the results in place of ``over``, and its size.

    Example:
      >>> values, experts = mp.nd.top_k(mp.nd.arange(batch=2) + mp.nd.arange(experts=8), "experts", choice=2)
      >>> experts.sizes
      {'batch': 2, 'choice': 2}
    """
    x = as_named(x)
    i = position(x, over, "top_k")
    ((name, k),) = size.items()
    dims = (*x.dims[:i], name, *x.dims[i + 1 :])
    values, indices = (jnp.moveaxis(a, -1, i) for a in lax.top_k(jnp.moveaxis(x.array, i, -1), k))
    return named(values, dims), named(indices, dims)


# -- the shape


def transpose(x: Any, dims: DimsLike) -> Named:
    """The array with its dims in another order.

    Raises:
      RankError: these are not the dims of ``x``.

    Example:
      >>> mp.nd.transpose(mp.nd.arange(batch=2, seq=3), "seq batch").sizes
      {'seq': 3, 'batch': 2}
    """
    x, to = as_named(x), dim_names(dims)
    if set(to) != set(x.dims):
        text = f"mp.nd.transpose: ({described(x)}) to {' '.join(to)!r}, which are not the same dims"
        raise RankError(text, fixes=["mp.nd.rename renames dims, mp.nd.split and mp.nd.merge change them"])
    return Named(transposed(x, to), to)


def reshape(x: Any, dims: DimsLike, **sizes: int) -> Named:
    """Reshape in row-major order to other dims: ``nd.reshape(x, "group token embed", group=8)``.

    Where the layout shards the new dims otherwise, the plan has the resharding.

    Args:
      sizes: of the dims that ``x`` does not have, or has with another size; one that is missing follows from the others.

    Raises:
      RankError: the sizes do not multiply to the number of elements.

    Example:
      >>> x = mp.nd.arange(batch=4, seq=6)
      >>> mp.nd.reshape(x, "group token", group=8).sizes
      {'group': 8, 'token': 3}
    """
    x, to = as_named(x), dim_names(dims)
    known = {**{d: n for d, n in x.sizes.items() if d in to}, **sizes}
    shape = [known.get(d, -1) for d in to]
    rest = math.prod(n for n in shape if n != -1)
    fits = x.array.size % rest == 0 if -1 in shape else x.array.size == rest
    if shape.count(-1) > 1 or set(sizes) - set(to) or not fits:
        wanted = " ".join(f"{d}={'?' if n == -1 else n}" for d, n in zip(to, shape, strict=True))
        text = f"mp.nd.reshape: ({described(x)}) does not fit ({wanted})"
        raise RankError(text, fixes=["sizes of the new dims as keyword arguments; one may be left out"])
    shape = [n if n != -1 else x.array.size // rest for n in shape]
    # a merged or split dim takes the new name before the reshape, so that the old and the new name are two dims
    old, new = ({math.prod(s[i:]): d for i, d in enumerate(dims)} for s, dims in ((x.array.shape, x.dims), (shape, to)))
    renamed = {str(d): str(new[n]) for n, d in old.items() if n in new and d not in to and new[n] not in x.dims}
    return named(rename(x, **renamed).array.reshape(shape), to)


def split(x: Any, dim: str, **sizes: int) -> Named:
    """One dim as several, major to minor: ``nd.split(x, "embed", heads=8, head_dim=16)``; one size may be -1.

    Example:
      >>> mp.nd.split(mp.nd.arange(embed=128), "embed", heads=8, head_dim=-1).sizes
      {'heads': 8, 'head_dim': 16}
    """
    x = as_named(x)
    i = position(x, dim, "split")
    return reshape(x, (*x.dims[:i], *sizes, *x.dims[i + 1 :]), **{d: n for d, n in sizes.items() if n != -1})


def merge(x: Any, dims: DimsLike, into: str) -> Named:
    """Several dims as one, major to minor, in the position of the foremost: ``nd.merge(x, "heads head_dim", "embed")``.

    Example:
      >>> mp.nd.merge(mp.nd.arange(heads=8, head_dim=16), "heads head_dim", "embed").sizes
      {'embed': 128}
    """
    x, merged = as_named(x), dim_names(dims)
    i = min(position(x, d, "merge") for d in merged)
    before, after = (tuple(d for d in half if d not in merged) for half in (x.dims[:i], x.dims[i:]))
    size = math.prod(x.sizes[d] for d in merged)
    return reshape(transpose(x, (*before, *merged, *after)), (*before, into, *after), **{into: size})


# -- elements


def index(x: Any, **at: int | slice) -> Named:
    """Elements at static positions: an integer removes the dim, a slice shortens it: ``nd.index(x, seq=slice(1, None), head=0)``.

    Raises:
      LayoutSyntaxError: a position is something else: a boolean, or an array.

    Example:
      >>> mp.nd.index(mp.nd.arange(batch=4, seq=8), batch=0, seq=slice(2, 6)).sizes
      {'seq': 4}
    """
    x = as_named(x)
    where: list[Any] = [slice(None)] * len(x.dims)
    for d, i in at.items():
        if isinstance(i, bool) or not isinstance(i, int | np.integer | slice):
            text = f"mp.nd.index: {d}={i!r} is no integer or slice"
            fixes = [f"mp.nd.gather(x, indices, {d!r}) takes indices that are arrays; mp.nd.where selects by booleans"]
            raise LayoutSyntaxError(text, fixes=fixes)
        where[position(x, d, "index")] = i
    dims = tuple(d for d, i in zip(x.dims, where, strict=True) if isinstance(i, slice))
    return Named(x.array[tuple(where)], dims)


def pad(x: Any, value: float = 0, **widths: tuple[int, int]) -> Named:
    """Add elements ``value`` before and after dims: ``nd.pad(x, seq=(1, 0))``; a negative width removes elements.

    Example:
      >>> print(mp.nd.pad(mp.nd.arange(seq=3), seq=(1, 1)).array)
      [0 0 1 2 0]
    """
    x = as_named(x)
    config = [(0, 0, 0)] * len(x.dims)
    for d, (low, high) in widths.items():
        config[position(x, d, "pad")] = (low, high, 0)
    return Named(lax.pad(x.array, jnp.asarray(value, x.dtype), config), x.dims)


def concat(xs: Sequence[Any], over: str) -> Named:
    """Arrays joined along a dim, in which their sizes may differ.

    Raises:
      RankError, UnknownDimError: their other dims differ.

    Example:
      >>> mp.nd.concat([mp.nd.arange(seq=3), mp.nd.arange(seq=2)], "seq").sizes
      {'seq': 5}
    """
    operands = [as_named(x) for x in xs]
    i = position(operands[0], over, "concat")
    check_sizes([Named(x.array.take(0, position(x, over, "concat")), _without(x.dims, over)) for x in operands])
    arrays = [transpose(x, operands[0].dims).array for x in operands]
    return Named(jnp.concatenate(arrays, i), operands[0].dims)


def gather(x: Any, indices: Any, over: str) -> Named:
    """The elements of a dim at indices known at run time: ``nd.gather(table, tokens, "vocab")``.

    Args:
      indices: integers; dims that ``x`` also has are matched.

    Returns:
      An array with the dims of ``indices``, then the dims of ``x`` without ``over``.

    Example:
      >>> table, tokens = mp.nd.full(1.0, vocab=32, embed=8), mp.nd.arange(batch=2, seq=4)
      >>> mp.nd.gather(table, tokens, "vocab").sizes
      {'batch': 2, 'seq': 4, 'embed': 8}
    """
    x, indices = as_named(x), as_named(indices)
    check_sizes([x, indices])
    shared = [d for d in indices.dims if d in x.dims]
    position(x, over, "gather")
    x_dims, i_dims = list(x.dims), list(indices.dims)
    axes = []
    for d in shared:
        axes.append((x_dims.index(d), i_dims.index(d)))
        x_dims.remove(d)
        i_dims.remove(d)
    at = x_dims.index(over)
    fn = functools.partial(jnp.take, axis=at)
    for pair in reversed(axes):
        fn = jax.vmap(fn, pair)
    result = (*shared, *x_dims[:at], *i_dims, *x_dims[at + 1 :])
    return transpose(Named(fn(x.array, indices.array), result), (*indices.dims, *_without(x.dims, over, *shared)))


def one_hot(indices: Any, dtype: Any = jnp.float32, **size: int) -> Named:
    """1 at each index and 0 elsewhere, along a new last dim: ``nd.one_hot(labels, classes=10)``.

    Example:
      >>> mp.nd.one_hot(mp.nd.arange(batch=2), classes=3).array.tolist()
      [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    return elementwise(jnp.equal, indices, arange(**size)).astype(dtype)


# -- new arrays


def arange(**sizes: int) -> Named:
    """The int32 numbers of the elements in row-major order: ``nd.arange(seq=16)``.

    A causal mask is ``nd.arange(memory=n) <= nd.arange(seq=n)``.

    Example:
      >>> mp.nd.arange(batch=2, seq=2).array.tolist()
      [[0, 1], [2, 3]]
    """
    return named(jnp.arange(math.prod(sizes.values()), dtype=jnp.int32).reshape(tuple(sizes.values())), tuple(sizes))


def full(value: Any, dtype: Any = None, **sizes: int) -> Named:
    """An array of one value: ``nd.full(0.0, hidden=16)``.

    Example:
      >>> mp.nd.full(0.0, hidden=16).sizes
      {'hidden': 16}
    """
    return named(jnp.full(tuple(sizes.values()), value, dtype), tuple(sizes))


def normal(key: jax.Array, scale: float = 1.0, dtype: Any = jnp.float32, **sizes: int) -> Named:
    """Normally distributed numbers with mean 0 and standard deviation ``scale``: ``nd.normal(key, 0.02, embed=64, mlp=256)``.

    Example:
      >>> mp.nd.normal(jax.random.key(0), 0.02, embed=64, mlp=256).sizes
      {'embed': 64, 'mlp': 256}
    """
    return named(scale * jax.random.normal(key, tuple(sizes.values()), dtype), tuple(sizes))


def dim_names(dims: DimsLike) -> tuple[str, ...]:
    """The names of ``"batch seq"`` or ``("batch", "seq")``; each dim needs one.

    Raises:
      LayoutSyntaxError: ``_`` or ``...``.
    """
    out = parse_dims(dims)
    if not all(isinstance(d, str) for d in out):
        raise LayoutSyntaxError(f"dims {dims!r}: every dim needs a name", fixes=['"batch seq"'])
    return out  # type: ignore[return-value]


def _without(dims: Dims, *gone: str | None) -> Dims:
    """The dims that are not in ``gone``."""
    return tuple(d for d in dims if d not in gone)

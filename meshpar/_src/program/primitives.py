"""Identity primitives that carry dim names and specs through tracing: ``mp.named``, ``mp.rename``, explicit specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...errors import LayoutSyntaxError
from ..dims import DimsLike, fit_dims, parse_dims


def _identity(x, **_):
    return x


def _primitive(name: str, fn: Callable[..., Any] = _identity, type_of: Callable[..., Any] = _identity) -> Primitive:
    """A primitive that is evaluated, and lowered, as a function of arrays; ``type_of``: the type of its result."""
    primitive = Primitive(name)
    primitive.def_impl(fn)
    primitive.def_abstract_eval(type_of)
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    return primitive


name_dims_p, rename_dims_p, place_p = map(_primitive, ("name_dims", "rename_dims", "place"))

reduce_in_p = _primitive(
    "reduce_in",
    lambda x, *, dtype: lax.convert_element_type(x, dtype),
    lambda x, *, dtype: x.update(dtype=dtype, weak_type=False),
)
ad.deflinear2(reduce_in_p, lambda ct, x, *, dtype: [lax.convert_element_type(ct, x.aval.dtype)])
batching.defvectorized(reduce_in_p)

times_power_p = _primitive(
    "times_power_of_two", lambda x, scale: x * lax.convert_element_type(scale, x.dtype), lambda x, scale: x
)
"""``x, scalar → x * scalar``, where the scalar is a finite power of two, so that the product is exact: it may be taken before a
sum over devices."""
batching.defbroadcasting(times_power_p)

in_blocks_p = _primitive("in_blocks")
"""An identity: along each dim the elements have a common scale in blocks of so many (``blocks``), which no sharding may cut.

``path`` is the weight whose matmul reads the array."""


def reduce_in(x: Any, dtype: Any) -> Any:
    """Convert to a floating-point dtype in which partial sums are reduced.

    A partial sum is converted first and reduced afterwards, in ``dtype``; ``astype`` to a narrower dtype reduces it first.
    """
    return reduce_in_p.bind(x, dtype=jnp.dtype(dtype))


def _add_row(total: Any, row: Any, index: Any, where: Any, *, late: bool) -> Any:
    row = lax.select(lax.broadcast_in_dim(where, row.shape, (0,)), row, jnp.zeros_like(row))
    return _added(total, row, index)


def _added(total: Any, row: Any, index: Any) -> Any:
    if jnp.ndim(index) and index.shape[0] == 1:
        index = index[0]
    if jnp.ndim(index):
        return jax.vmap(_added, (1, 0, 0), 1)(total, row, index)
    old = lax.dynamic_index_in_dim(total, index, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, old + row, index, 0)


add_row_p = _primitive("add_row", _add_row, lambda total, row, index, where, *, late: total.update(weak_type=False))
"""``[n, k, …], [k, …], int32 index, bool [k] → [n, k, …]``: the second array is added to a row of the first where the last is true.

With an int32 [k] index, each of k parts is added to a row of its own.

A loop that carries the first array adds to it in place. ``late``: a partial row is added before it is reduced, also where the
layout shards the row further than it is then sharded.
"""


def named(x: Any, dims: DimsLike) -> Any:
    """Name the dims of a value inside a function, where inference needs help; an identity otherwise.

    Args:
      x: an array.
      dims: ``"batch seq embed"``, a name for each dimension; ``_`` leaves one to inference.

    Returns:
      The same value. Its cotangent has the same names.

    Raises:
      RankError: the number of names is not the rank.

    Example:
      >>> def add_positions(x):
      ...     return x + mp.named(jnp.arange(64.0), "embed")
      >>> plan = mp.plan(add_positions, x, mesh=mesh, layout="embed: data")
      >>> tuple(plan.outputs[0].spec)
      (None, 'data')
    """

    x = jnp.asarray(x)
    fitted = fit_dims(parse_dims(dims, what="mp.named dims"), x.shape, path="the value", origin="mp.named")
    return name_dims_p.bind(x, names=fitted)


def rename(x: Any, **names: str) -> Any:
    """Rename dims of a value: ``k = mp.rename(k, seq="kv_seq")``.

    The new dim is not joined with the old one, so a rule for ``seq`` does not apply to it. Its cotangent has the old name.

    Args:
      x: an array.
      **names: old name → new name.

    Returns:
      The same value.

    Raises:
      LayoutSyntaxError: no names, or one that is not an identifier.
      UnknownDimError: (when the program is planned) no dim of the value has the old name.

    Example:
      >>> def scores(x):
      ...     return x @ mp.rename(x, batch="other").T
      >>> plan = mp.plan(scores, x, mesh=mesh, layout="batch: data; other: model", dims={"x": "batch embed"})
      >>> tuple(plan.outputs[0].spec)
      ('data', 'model')
    """

    if not names:
        raise LayoutSyntaxError(
            'mp.rename needs at least one name: mp.rename(k, seq="kv_seq")',
            fixes=["old name = new name, once for each dim that is to be renamed"],
        )
    for new in names.values():
        parse_dims((new,), what="mp.rename")
    return rename_dims_p.bind(jnp.asarray(x), pairs=tuple(sorted(names.items())), back=False)


# Derivatives: all three are linear, and a cotangent has the names of its value. It does not have its explicit spec: on the
# cotangent of a weight, that would turn the gradient's reduce-scatter into an all-reduce.
ad.deflinear2(name_dims_p, lambda ct, x, **names: [name_dims_p.bind(ct, **names)])
ad.deflinear2(place_p, lambda ct, x, *, spec: [ct])
ad.deflinear2(
    rename_dims_p,
    lambda ct, x, *, pairs, back: [
        rename_dims_p.bind(ct, pairs=tuple(sorted((new, old) for old, new in pairs)), back=not back)
    ],
)


def _batch_by_dim(primitive: Primitive, key: str, unnamed: Any) -> None:
    """Batch a primitive whose parameter ``key`` has an entry for each dim; ``unnamed``: the entry of the batch dim."""

    def batched(args, axes, **params):
        (x,), (d,), own = args, axes, params[key]
        return primitive.bind(x, **{**params, key: (*own[:d], unnamed, *own[d:])}), d

    batching.primitive_batchers[primitive] = batched


_batch_by_dim(name_dims_p, "names", None)
_batch_by_dim(place_p, "spec", ())
_batch_by_dim(in_blocks_p, "blocks", 1)
batching.primitive_batchers[rename_dims_p] = lambda args, axes, **names: (rename_dims_p.bind(*args, **names), *axes)

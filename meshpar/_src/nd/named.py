"""Arrays whose dims have names: the pytree, elementwise functions with broadcasting by name, and the errors of both."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.meta import AxisMetadata
from jax.core import Tracer

from ...errors import RankError, UnknownDimError
from ..dims import Dims, DimsLike, did_you_mean, fit_dims, parse_dims
from ..program.primitives import name_dims_p, rename_dims_p


def _operators(fn: Callable[..., Any]) -> tuple[Callable[..., Named], Callable[..., Named]]:
    """The methods of :class:`Named` for a Python operator, and for the reflected one."""
    return (lambda self, *other: elementwise(fn, self, *other), lambda self, other: elementwise(fn, other, self))


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["names"])
class Named(AxisMetadata[Any]):
    """An array with a name for every dim; made by :func:`meshpar.nd.named`.

    It is a pytree node with one leaf, the array; the names are static. ``jax.grad``, ``vmap``, ``scan``, ``jit`` and optax
    transformations take it as it is, and :func:`meshpar.jit` reads the names, so that ``dims=`` is not needed.

    ``vmap`` and ``scan`` map over the leading dim: within the mapped function its name is removed. Their stacked results have a
    leading dim without a name, which :func:`meshpar.nd.named` gives one.

    Operators broadcast by name: the result has the dims of the left operand, then the other dims of the right one.

    Attributes:
      array: the plain array.
      names: the names of its last dims.
    """

    __slots__ = ("array", "names")
    __hash__ = None  # type: ignore[assignment]  # `==` compares elements
    __array_ufunc__ = None  # operators of NumPy arrays leave it to the ones below

    def __init__(self, array: Any, names: Dims):
        """Combine an array and names without a check; see :func:`meshpar.nd.named`."""
        self.array, self.names = array, names

    @property
    def dims(self) -> Dims:
        """The name of every dim; None for a leading dim that ``vmap`` or ``scan`` has added."""
        rank = jnp.ndim(self.array)
        return (None,) * (rank - len(self.names)) + self.names[max(0, len(self.names) - rank) :]

    @property
    def sizes(self) -> dict[str | None, int]:
        """The size of every dim by name."""
        return dict(zip(self.dims, self.array.shape, strict=True))

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    def astype(self, dtype: Any) -> Named:
        """The array converted to a dtype."""
        return Named(self.array.astype(dtype), self.dims)

    def __repr__(self) -> str:
        return f"Named({described(self)}, {self.array!r})"

    # -- a box with names as Flax has them

    def unbox(self) -> Any:
        """The plain array; Flax calls it when a module reads a variable."""
        return self.array

    def replace_boxed(self, val: Any) -> Named:
        return Named(val, self.names)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Named:
        name = params.get("partition_name")
        return Named(self.array, (*self.names[:index], name, *self.names[index:]))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Named:
        return Named(self.array, (*self.names[:index], *self.names[index + 1 :]))

    # -- operators

    __add__, __radd__ = _operators(operator.add)
    __sub__, __rsub__ = _operators(operator.sub)
    __mul__, __rmul__ = _operators(operator.mul)
    __truediv__, __rtruediv__ = _operators(operator.truediv)
    __floordiv__, __rfloordiv__ = _operators(operator.floordiv)
    __mod__, __rmod__ = _operators(operator.mod)
    __pow__, __rpow__ = _operators(operator.pow)
    __and__, __rand__ = _operators(operator.and_)
    __or__, __ror__ = _operators(operator.or_)
    __xor__, __rxor__ = _operators(operator.xor)
    __lt__ = _operators(operator.lt)[0]
    __le__ = _operators(operator.le)[0]
    __gt__ = _operators(operator.gt)[0]
    __ge__ = _operators(operator.ge)[0]
    __eq__ = _operators(operator.eq)[0]  # type: ignore[assignment]
    __ne__ = _operators(operator.ne)[0]  # type: ignore[assignment]
    __neg__ = _operators(operator.neg)[0]
    __abs__ = _operators(operator.abs)[0]
    __invert__ = _operators(operator.invert)[0]


def named(x: Any, dims: DimsLike) -> Named:
    """An array with a name for every dim; of a :class:`Named`, its array with these names in place of its own.

    In a function that meshpar traces, the names reach the partitioner as with :func:`meshpar.named`.

    Args:
      x: an array, a number, a ``jax.ShapeDtypeStruct`` or a Named.
      dims: ``"batch hidden"``.

    Raises:
      RankError: the number of names is not the rank.

    Example:
      >>> x = mp.nd.named(jnp.ones((16, 64)), "batch hidden")
      >>> x.sizes
      {'batch': 16, 'hidden': 64}
    """
    array = x.array if isinstance(x, Named) else x
    array = array if isinstance(array, jax.ShapeDtypeStruct) else jnp.asarray(array)
    names = fit_dims(parse_dims(dims, what="dims"), array.shape, path="the array", origin="mp.nd.named")
    if isinstance(array, Tracer):
        array = name_dims_p.bind(array, names=names)
    return Named(array, names)


def rename(x: Named, **names: str) -> Named:
    """The same values with other names: ``nd.rename(k, length="memory")``. A layout's rule for the old name does not apply to it.

    Args:
      names: old name → new name.

    Raises:
      UnknownDimError: ``x`` has no dim with an old name.
      LayoutSyntaxError: two dims would have one name.

    Example:
      >>> mp.nd.rename(mp.nd.arange(length=4), length="memory").dims
      ('memory',)
    """
    for old in names:
        position(x, old, "rename")
    dims = tuple(names.get(str(d), d) for d in x.dims)
    parse_dims(dims, what="the dims after nd.rename")
    array = x.array
    if isinstance(array, Tracer) and names:
        array = rename_dims_p.bind(array, pairs=tuple(sorted(names.items())), back=False)
    return Named(array, dims)


def elementwise(fn: Callable[..., Any], *xs: Any) -> Named:
    """Apply a function of arrays that works elementwise, with the operands broadcast by name.

    Args:
      fn: such as ``jnp.tanh`` or ``jnp.where``.
      xs: :class:`Named`, numbers, or arrays without dims.

    Returns:
      A Named with the dims of the first operand, then the other dims in order of appearance; if an operand has all of these
      dims, in its order.

    Raises:
      RankError: an array without names, or operands whose sizes of a dim differ.

    Example:
      >>> x, b = mp.nd.normal(jax.random.key(0), batch=4, hidden=8), mp.nd.arange(hidden=8)
      >>> mp.nd.elementwise(jnp.maximum, b, x).dims
      ('batch', 'hidden')
    """
    operands = [as_named(x) for x in xs]
    check_sizes(operands)
    every = tuple(dict.fromkeys(d for x in operands for d in x.dims))
    dims = next((x.dims for x in operands if len(x.dims) == len(every)), every)
    return Named(fn(*(aligned(x, dims) for x in operands)), dims)


def aligned(x: Named, dims: Dims) -> jax.Array:
    """The array of ``x`` with its dims in the order of ``dims``, and size 1 for those that it lacks."""
    array = transposed(x, [d for d in dims if d in x.dims])
    missing = [i for i, d in enumerate(dims) if d not in x.dims]
    return jnp.expand_dims(array, missing) if missing and x.dims else array


def transposed(x: Named, dims: Iterable[str | None]) -> jax.Array:
    """The array of ``x`` with its dims in this order."""
    order = [x.dims.index(d) for d in dims]
    return x.array if order == sorted(order) else jnp.transpose(x.array, order)


def as_named(x: Any) -> Named:
    """The operand as a :class:`Named` in which every dim has a name; a number has no dims.

    Raises:
      RankError: an array without names, or a leading dim without a name.
    """
    x = x if isinstance(x, Named) else Named(x if isinstance(x, int | float | complex) else jnp.asarray(x), ())
    if None in x.dims:
        raise RankError(
            f"mp.nd: an array {list(x.array.shape)} has {len(x.names)} names for {len(x.dims)} dims",
            shape=x.array.shape,
            fixes=['mp.nd.named(x, "batch hidden"); a leading dim that scan or vmap has added needs a name as well'],
        )
    return x


def check_sizes(xs: Sequence[Named]) -> None:
    """Check that a dim has the same size in all arrays.

    Raises:
      RankError: two arrays differ; it describes both.
    """
    seen: dict[str | None, Named] = {}
    for x in xs:
        for d in x.dims:
            other = seen.setdefault(d, x)
            if other.sizes[d] != x.sizes[d]:
                raise RankError(
                    f"mp.nd: dim `{d}` is {other.sizes[d]} in ({described(other)}) and {x.sizes[d]} in ({described(x)})",
                    dim=str(d),
                    fixes=[f'mp.nd.rename(x, {d}="other_{d}"), if these are different dims'],
                )


def position(x: Named, dim: str, what: str) -> int:
    """The index of a dim.

    Args:
      what: the function, for the error.

    Raises:
      UnknownDimError: ``x`` does not have it.
    """
    if dim not in x.dims:
        text, fixes = described(x), did_you_mean(dim, filter(None, x.dims), "dims")
        raise UnknownDimError(f"nd.{what}: ({text}) has no dim `{dim}`", dim=dim, dims=text, fixes=fixes)
    return x.dims.index(dim)


def described(x: Named) -> str:
    """The dims of an array with their sizes: ``batch=16 hidden=64``."""
    return " ".join(f"{d or '_'}={n}" for d, n in zip(x.dims, jnp.shape(x.array), strict=True)) or "no dims"

"""Mixed precision: the dtypes in which weights are stored and used, and in which their gradients are reduced over devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...errors import LayoutSyntaxError, UnsupportedError
from ..program.primitives import reduce_in


@dataclass(frozen=True)
class Precision:
    """A policy of dtypes: ``loss = mp.train.Precision(compute="bfloat16")(loss_of)``, then ``jax.value_and_grad(loss)``.

    The function gets its weights in ``compute``: they are converted in their stored sharding and all-gathered in ``compute``. Their
    gradients are computed in ``compute``, reduced over devices in ``reduce``, in loops over layers as well, and converted to the
    dtype of the weights. Scalars and integers are not converted.

    Attributes:
      compute: dtype of the function's weights; bfloat16 halves the bytes of FSDP's all-gathers.
      reduce: dtype in which gradients are reduced over devices; None: ``compute``. ``"float32"`` sends twice the bytes of
        bfloat16, and rounds once. ``"float16"`` with ``compute="float32"`` halves the bytes of a float32 model.
      keep: last names of tree paths of weights that are not converted (``("scale", "bias")``).

    Example:
      >>> mixed = mp.train.Precision(compute="bfloat16", reduce="float32")(loss_of)
      >>> jax.grad(mixed)(params, x)["up"].dtype
      dtype('float32')
    """

    compute: DTypeLike = jnp.bfloat16
    reduce: DTypeLike | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise LayoutSyntaxError if ``compute`` or ``reduce`` is not a floating-point dtype of 16 bits or more: JAX promotes no
        8-bit one, and a gradient without a scale underflows in it."""
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
                raise LayoutSyntaxError(
                    f"mp.train.Precision: {name}={dtype!r} is not a floating dtype", fixes=["bfloat16, float32"]
                )
            if dtype is not None and jnp.dtype(dtype).itemsize < 2:
                raise LayoutSyntaxError(
                    f"mp.train.Precision: {name}={dtype!r} has 8 bits or fewer, which need a scale for each array",
                    fixes=[
                        '"bfloat16"',
                        "matmuls in 8 bits: an op with scales in the function, such as Flax's fp8_ops",
                    ],
                )

    def cast(self, weights: Any) -> Any:
        """The weights (a tree of arrays) in the compute dtype."""

        def one(path: Any, x: Any) -> Any:
            """A leaf in the ``compute`` dtype; scalars, leaves that are not floating-point, and leaves named in
            ``keep`` are unchanged."""
            last = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating) or last in self.keep or not jnp.ndim(x):
                return x
            reduce = jnp.dtype(self.compute if self.reduce is None else self.reduce)
            return _cast(jnp.dtype(self.compute), reduce, jnp.asarray(x))

        return jax.tree_util.tree_map_with_path(one, weights)

    def __call__(self, fn: Callable[..., Any], argnum: int = 0) -> Callable[..., Any]:
        """The function ``fn`` with its argument ``argnum``, a tree of weights, converted to ``compute``; also by keyword.

        Raises:
          UnsupportedError: (when called) the call does not have this argument.
        """
        try:
            name = list(inspect.signature(fn).parameters)[argnum]
        except (TypeError, ValueError, IndexError):  # no signature, or ``*args``
            name = ""

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            if -len(args) <= argnum < len(args) and name not in kwargs:
                k = argnum % len(args)
                return fn(*args[:k], self.cast(args[k]), *args[k + 1 :], **kwargs)
            if name not in kwargs:
                raise UnsupportedError(
                    f"mp.train.Precision: this call has no argument {argnum}, whose weights are converted",
                    fixes=["policy(fn, argnum=…) has the position of the weights, counted from 0"],
                )
            return fn(*args, **kwargs | {name: self.cast(kwargs[name])})

        return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(compute: Any, reduce: Any, x: jax.Array) -> jax.Array:
    return x.astype(compute)


def _cast_forward(compute: Any, reduce: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.astype(compute), jnp.zeros((), x.dtype)


def _cast_backward(compute: Any, reduce: Any, like: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    return (reduce_in(ct, reduce).astype(like.dtype),)


_cast.defvjp(_cast_forward, _cast_backward)

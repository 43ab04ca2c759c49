"""Mixed precision: the dtypes in which weights are stored and used, and in which their gradients are reduced over devices."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.typing import DTypeLike

from ..errors import LayoutSyntaxError, PatternError, UnsupportedError
from .compat.jax import make_jaxpr
from .dims import DimsLike, PathDims, did_you_mean, path_matches
from .flax import dims_of, flatten_named
from .layers.rewrite_weight_matmuls import with_scaled_matmuls
from .layers.scaled_matmul import FORMATS, ScaledFormat
from .program.primitives import reduce_in


@dataclass(frozen=True)
class Precision:
    """A policy of dtypes: ``loss = mp.train.Precision(compute="bfloat16")(loss_of)``, then ``jax.value_and_grad(loss)``.

    The function gets its weights in ``compute``: they are converted in their stored sharding and all-gathered in ``compute``. Their
    gradients are computed in ``compute``, reduced over devices in ``reduce``, in loops over layers as well, and converted to the
    dtype of the weights. Scalars and integers are not converted.

    With a format, ``Precision("float8")``, the function gets its weights in bfloat16, and each matmul of a weight, and both of its
    backward pass, multiply codes in 8 or 4 bits with scales. The function is
    traced and its matmuls are replaced, so no model is edited. Weights are all-gathered as codes and scales.

    ``"float8"``
        float8_e4m3fn, and float8_e5m2 for gradients. Each array has a scale, a power of two, of its present largest
        magnitude; there is no delayed scale.
    ``"mxfp8"``
        float8_e4m3fn with a power of two for each 32 contracted elements, and for each 32 × 32 elements of a weight.
    ``"nvfp4"``
        float4_e2m1fn with a float8_e4m3fn scale for each 16 contracted elements (16 × 16 of a weight) and a power of two for the
        array. Gradients are rounded stochastically. Codes are sent in 8 bits.

    The grouped matmuls of :func:`meshpar.layers.moe`'s experts are quantized in ``"mxfp8"`` as above, and in ``"float8"`` with a
    power of two for each 128 elements of a row, and for each 128 × 128 elements of a weight, all float8_e4m3fn (DeepSeek-V3
    Technical Report, 2024, section 3.3). Their codes are multiplied in bfloat16 on all chips, which is exact.

    Convolutions, attention scores, experts in ``"nvfp4"`` or under ``jax.vmap``, and matmuls in custom derivatives, other
    kernels and ``shard_map`` are not quantized.

    Attributes:
      compute: dtype of the function's weights; bfloat16 halves the bytes of FSDP's all-gathers. Or a format of its matmuls.
      reduce: dtype in which gradients are reduced over devices; None: the weights'. ``"float32"`` sends twice the bytes of
        bfloat16, and rounds once. ``"float16"`` with ``compute="float32"`` halves the bytes of a float32 model.
      keep: weights that are not converted; with a format, weights whose matmuls are not quantized. ``"*/norm, vocab, scale"``, or a
        tuple: path patterns of arrays or of modules, last names of paths, names of dims.
      dims: path pattern → names of dims, for ``keep`` and arrays without Flax metadata.

    Raises:
      LayoutSyntaxError: ``compute`` is neither a format nor a floating-point dtype of 16 bits or more.
      PatternError: (when called) an entry of ``keep`` matches no weight.
      DivisibilityError: (when called) a dim of a matmul has no blocks of 128, 32 or 16; (when planned) a shard has none.
      UnsupportedError: (when called) a format, and no matmul of a weight, or some matrices of the same experts are kept.

    Example:
      >>> mixed = mp.train.Precision(compute="bfloat16", reduce="float32")(loss_of)
      >>> jax.grad(mixed)(params, x)["up"].dtype
      dtype('float32')
      >>> eight = mp.train.Precision("float8", reduce="float32", keep="down")(loss_of)
      >>> jax.grad(eight)(params, x)["up"].dtype
      dtype('float32')
    """

    compute: DTypeLike = jnp.bfloat16
    reduce: DTypeLike | None = None
    keep: str | tuple[str, ...] = ()
    dims: Mapping[str, DimsLike] | None = None

    def __post_init__(self) -> None:
        """Raise LayoutSyntaxError if ``compute`` or ``reduce`` is not a floating-point dtype of 16 bits or more: JAX promotes no
        8-bit one, and a gradient without a scale underflows in it."""
        for name in ("compute", "reduce"):
            dtype, formats = getattr(self, name), [repr(f) for f in FORMATS if name == "compute"]
            if dtype is None or repr(dtype) in formats:
                continue
            try:
                floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
            except TypeError:
                floating = False
            narrow = floating and jnp.dtype(dtype).itemsize < 2
            if not floating or narrow:
                why = "has 8 bits or fewer, which need a scale for each array" if narrow else "is not a floating dtype"
                fixes = ["bfloat16, float32", *(f"matmuls with scales: {f}" for f in [" or ".join(formats)] if f)]
                raise LayoutSyntaxError(f"mp.train.Precision: {name}={dtype!r} {why}", fixes=fixes)

    @property
    def _format(self) -> ScaledFormat | None:
        return FORMATS.get(self.compute) if isinstance(self.compute, str) else None

    def cast(self, weights: Any) -> Any:
        """The weights (a tree of arrays) in the compute dtype; of a format, bfloat16.

        Raises:
          PatternError: as the class says.
        """
        compute = jnp.dtype(jnp.bfloat16 if self._format else self.compute)
        reduce = jnp.dtype(compute if self.reduce is None else self.reduce)
        kept = () if self._format else self._kept(weights)
        leaves, structure = jax.tree.flatten(weights)
        for k, x in enumerate(leaves):
            if jnp.ndim(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating) and k not in kept:
                leaves[k] = _cast(compute, reduce, jnp.asarray(x))
        return structure.unflatten(leaves)

    def _kept(self, weights: Any) -> set[int]:
        """The positions of the leaves that ``keep`` matches.

        Raises:
          PatternError: an entry matches none.
        """
        entries = re.split(r",(?![^{]*\})", self.keep) if isinstance(self.keep, str) else self.keep
        found: set[int] = set()
        leaves, patterns = flatten_named(weights), PathDims(self.dims)
        names = [{*(dims_of(leaf, patterns) or ()), leaf.path.rpartition("/")[2]} for leaf in leaves]
        modules = [list(itertools.accumulate(leaf.path.split("/"), "{}/{}".format)) for leaf in leaves]
        for entry in filter(None, map(str.strip, entries)):
            pairs = enumerate(zip(names, modules, strict=True))
            own = {k for k, (of, within) in pairs if entry in of or any(path_matches(entry, m) for m in within)}
            if not own:
                known = [*(leaf.path for leaf in leaves), *(n for each in names for n in each if n)]
                raise PatternError(
                    f"mp.train.Precision: keep={entry!r} matches no path and no dim of the weights",
                    pattern=entry,
                    fixes=did_you_mean(entry, known, "paths and dims"),
                )
            found |= own
        return found

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
            if name not in kwargs and not -len(args) <= argnum < len(args):
                raise UnsupportedError(
                    f"mp.train.Precision: this call has no argument {argnum}, whose weights are converted",
                    fixes=["policy(fn, argnum=…) has the position of the weights, counted from 0"],
                )

            def call(weights: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
                if name in kwargs:
                    return fn(*args, **kwargs | {name: weights})
                args[argnum] = weights
                return fn(*args, **kwargs)

            weights = kwargs[name] if name in kwargs else args[argnum]
            if self._format is None:
                return call(self.cast(weights), list(args), kwargs)
            return self._scaled(self._format, call, weights, list(args), kwargs)

        return run

    def _scaled(self, form: ScaledFormat, call: Callable[..., Any], weights: Any, *others: Any) -> Any:
        """``call(converted weights, *others)`` with scaled matmuls.

        Raises:
          UnsupportedError: no matmul is scaled.
        """
        leaves, structure = jax.tree.flatten((self.cast(weights), *others))
        paths, kept = [leaf.path for leaf in flatten_named(weights)], self._kept(weights)
        traced = [k for k, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
        arrays = [leaves[k] for k in traced]

        def flat(*arrays: Any) -> Any:
            given = dict(zip(traced, arrays, strict=True))
            return call(*structure.unflatten([given.get(k, x) for k, x in enumerate(leaves)]))

        closed, shapes = make_jaxpr(flat, *arrays, return_shape=True)
        weights_at = {i: paths[k] for i, k in enumerate(traced) if k < len(paths) and k not in kept}
        closed, count = with_scaled_matmuls(closed, form, weights_at)
        if not count:
            raise UnsupportedError(
                f"mp.train.Precision({self.compute!r}): the function has no matmul of a weight that could be quantized",
                fixes=["fewer entries in keep=", "argnum=…, the position of the weights", "a dtype: bfloat16"],
            )
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)(*arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cast(compute: Any, reduce: Any, x: jax.Array) -> jax.Array:
    return x.astype(compute)


def _cast_forward(compute: Any, reduce: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x.astype(compute), jnp.zeros((), x.dtype)


def _cast_backward(compute: Any, reduce: Any, like: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    return (reduce_in(ct, reduce).astype(like.dtype),)


_cast.defvjp(_cast_forward, _cast_backward)

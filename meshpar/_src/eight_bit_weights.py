"""Weights in 8 bits with scales, which matmuls read without a copy of the weights in a wider dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import DivisibilityError, PatternError, UnsupportedError
from .compat import lazy_nnx as nnx
from .dims import DimsLike, PartKey, PathDims, did_you_mean, format_dims, path_matches
from .flax import Leaf, dims_of, flatten_named
from .layers.block_codes import DTYPES, per_element, rounded

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The code of the largest magnitude of each block."""


@jax.tree_util.register_pytree_with_keys_class
class Quantized:
    """An array in 8 bits: ``codes * scales``, where elements of a block have a common scale.

    JAX's functions take it in place of an array: ``jnp.einsum("be,em->bm", x, w)`` and ``x @ w`` dequantize it, which compilers
    fuse into the matmul. It is a tree of two arrays, so ``jax.lax.scan`` over stacked weights slices both. Patterns for the
    path of the weight match both, and its dims are the dims of both.

    Attributes:
      codes: int8 or float8_e4m3fn, with the shape of the array.
      scales: float32 with the same number of dims; a dim has size 1 where all its elements have a common scale, the number of
        blocks, or the size of the array's dim.
      dtype: of the dequantized array.
    """

    def __init__(self, codes: Any, scales: Any, dtype: Any):
        """An array from its parts; see the class."""
        self.codes, self.scales, self.dtype = codes, scales, jnp.dtype(dtype)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], Any]:
        """(the two arrays with their keys, the dtype)."""
        return ((PartKey("codes"), self.codes), (PartKey("scales"), self.scales)), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: Any, parts: tuple[Any, Any]) -> Quantized:
        """The array of two leaves."""
        out = object.__new__(cls)
        (out.codes, out.scales), out.dtype = parts, dtype
        return out

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.size * self.codes.dtype.itemsize + self.scales.size * self.scales.dtype.itemsize

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """The array in ``dtype`` (None: its own). It is multiplied by scales in float32, and rounded once."""
        scales = per_element(self.scales, self.shape)
        return (self.codes.astype(jnp.float32) * scales).astype(dtype or self.dtype)

    @property
    def T(self) -> jax.Array:
        """The transposed dequantized array."""
        return self.dequantize().T

    __jax_array__ = dequantize
    astype = dequantize

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.dequantize(), dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> jax.Array:
        """Elements. Integers for dim 0, also a list, read codes and scales of these rows alone, as for the embeddings of tokens."""
        index = np.asarray(index) if isinstance(index, list) else index
        rows = not isinstance(index, tuple | slice | type(None) | type(...)) and len(self.scales) == len(self)
        if rows and jnp.issubdtype(jnp.result_type(index), jnp.integer):
            if getattr(index, "dtype", np.dtype(int)).itemsize < 4:  # cannot count the rows
                index = jnp.asarray(index, jnp.int32)
            return Quantized(self.codes[index], self.scales[index], self.dtype).dequantize()
        return self.dequantize()[index]

    __array_priority__ = 100  # so that an operator with a NumPy array at its left is the one of this class

    def __repr__(self) -> str:
        of = f"{self.dtype.name}{list(self.shape)}" if hasattr(self.codes, "shape") else f"{self.codes}"
        scales = list(self.scales.shape) if hasattr(self.scales, "shape") else self.scales
        return f"Quantized({of} as {getattr(self.codes, 'dtype', '')}, scales {scales})"


def _binary(name: str) -> Any:
    """An operator of the dequantized array."""

    def operator(self: Quantized, *other: Any) -> Any:
        return getattr(self.dequantize(), name)(*other)

    return operator


for _name in ("add", "radd", "mul", "rmul", "sub", "rsub", "matmul", "rmatmul", "truediv", "rtruediv", "neg"):
    setattr(Quantized, f"__{_name}__", _binary(f"__{_name}__"))


def quantize(
    params: Any,
    dtype: str = "int8",
    *,
    contract: Mapping[str, str | int | tuple[int, ...]],
    dims: Mapping[str, DimsLike] | None = None,
    block: int | None = None,
) -> Any:
    """A tree of weights with some of its arrays in 8 bits (:class:`meshpar.types.Quantized`), for inference.

    A scale is the largest magnitude among the elements that a matmul adds up for one result (its contracted dims), divided by
    the largest code: one scale per output channel, or one per ``block`` of contracted elements (Jacob et al., *Quantization and
    Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference*, 2018). Codes are rounded to the nearest, so an
    element w of a block with the largest magnitude m has an error of at most m / 254 in int8, and in float8_e4m3fn
    (Micikevicius et al., *FP8 Formats for Deep Learning*, 2022) of at most the larger of ``abs(w) / 16`` and
    ``m / 458752``, besides the rounding to the weight's dtype. A block with an infinity or NaN becomes NaN.

    The weights are used like arrays. Flax modules take them as parameters. A ``dims=`` pattern or a rule for the path of a weight
    holds for its codes and scales (paths ``…/kernel.codes``, ``…/kernel.scales``).

    Args:
      params: a tree of arrays, Flax's boxed parameters, an ``nnx.State``, or an nnx module. Use ``jax.eval_shape`` for shapes. Call
        it in a step (:func:`meshpar.jit`) for weights that are sharded.
      dtype: ``"int8"`` or ``"float8_e4m3fn"``.
      contract: path pattern → contracted dims of the weight, by name (``"heads head_dim"``) or position (``0``, ``-2``); the first
        pattern that matches holds. Other arrays are not changed.
      dims: path pattern → names of dims, for arrays without Flax metadata.
      block: number of consecutive elements of the last contracted dim with a common scale; other contracted dims then have a
        scale for each index. None: one for all.

    Returns:
      A tree of the same structure, with ``Quantized`` in place of arrays; a new module.

    Raises:
      UnsupportedError: no 8-bit code has this dtype, or a pattern matches an array of another kind than floating-point.
      PatternError: a pattern matches nothing, or a dim that the array does not have.
      DivisibilityError: ``block`` does not divide the dim.

    Example:
      >>> params = {"up": {"kernel": jnp.ones((64, 256))}, "down": {"kernel": jnp.ones((256, 64))}}
      >>> small = mp.layers.quantize(params, "int8", contract={"*/kernel": 0})
      >>> small["up"]["kernel"]
      Quantized(float32[64, 256] as int8, scales [1, 256])
      >>> (jnp.ones((8, 64)) @ small["up"]["kernel"]).shape
      (8, 256)
    """
    if dtype not in DTYPES:
        raise UnsupportedError(f"no 8-bit code has the dtype {dtype!r}", fixes=[" or ".join(DTYPES)])
    if block is not None and block < 1:
        raise UnsupportedError(f"block={block}, which must be at least 1", fixes=["block=128"])
    if isinstance(params, nnx.Module):
        graph, state = nnx.split(params)
        return nnx.merge(graph, quantize(state, dtype, contract=contract, dims=dims, block=block))
    leaves, patterns = flatten_named(params), PathDims(dims)
    found = [next((p for p in contract if path_matches(p, leaf.path)), None) for leaf in leaves]
    for pattern in contract:
        if pattern not in found:
            raise PatternError(
                f"contract={{{pattern!r}: …}}: the pattern matches no array, or an earlier pattern matches them all",
                fixes=did_you_mean(pattern, [leaf.path for leaf in leaves][:12], "paths"),
            )
    out = [
        leaf.value if p is None else _quantized(leaf, dtype, _contracted(leaf, contract[p], patterns), block)
        for leaf, p in zip(leaves, found, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), out)


def _contracted(leaf: Leaf, spec: str | int | tuple[int, ...], patterns: PathDims) -> tuple[int, ...]:
    """The positions of the contracted dims of a weight, ascending.

    Raises:
      PatternError: it does not have one of them.
    """
    shape = np.shape(leaf.value)
    names = dims_of(leaf, patterns)
    wanted = spec.split() if isinstance(spec, str) else [spec] if isinstance(spec, int) else list(spec)
    axes = []
    for dim in wanted:
        if isinstance(dim, str) and names is not None and dim in names:
            axes.append(names.index(dim))
        elif not isinstance(dim, str) and -len(shape) <= dim < len(shape):
            axes.append(dim % len(shape))
        else:
            has = "no names of dims" if names is None else f"the dims `{format_dims(names)}`"
            raise PatternError(
                f"{leaf.path} {list(shape)} has {has}, and contract= names {dim!r}",
                path=leaf.path,
                shape=shape,
                fixes=['name its dims: dims={"*/kernel": "embed mlp"}', "or give positions: contract={…: 0}"],
            )
    return tuple(sorted(set(axes)))


def _quantized(leaf: Leaf, dtype: str, axes: tuple[int, ...], block: int | None) -> Quantized:
    """The 8-bit form of a weight.

    Raises:
      UnsupportedError: it is not floating-point; DivisibilityError: ``block`` does not divide the last of ``axes``.
    """
    x = leaf.value
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating) or jnp.result_type(x).itemsize < 2:
        raise UnsupportedError(
            f"{leaf.path} is {jnp.result_type(x)}, and weights in 8 bits are made from floating-point arrays of 16 bits or more",
            path=leaf.path,
            fixes=["a pattern in contract= that does not match it"],
        )
    wide = jnp.asarray(x, jnp.float32)
    split = list(wide.shape)
    if block is None:
        largest = jnp.abs(wide).max(axes, keepdims=True)
    else:
        last = axes[-1]
        if split[last] % block:
            raise DivisibilityError(
                f"{leaf.path} {split}: dim {last} of {split[last]} elements has no blocks of {block}",
                path=leaf.path,
                shape=split,
                fixes=[f"a block that divides {split[last]}, or block=None"],
            )
        split[last : last + 1] = [split[last] // block, block]
        largest = jnp.abs(wide).reshape(split).max(last + 1)
    scales = jnp.where(largest == 0, 1.0, largest / LARGEST[dtype])
    scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
    return Quantized(rounded(wide / per_element(scales, wide.shape), dtype), scales, jnp.result_type(x))


def dequantize(tree: Any) -> Any:
    """A tree with the dequantized arrays in place of every :class:`meshpar.types.Quantized`.

    Call it where weights are used, inside a loop over layers: there compilers fuse it into the matmuls. Before the loop, it would
    write all weights to memory.

    Args:
      tree: any tree.

    Returns:
      The tree with arrays only.

    Example:
      >>> params = mp.layers.quantize({"kernel": jnp.eye(4)}, contract={"kernel": 0})
      >>> mp.layers.dequantize(params)["kernel"].dtype
      dtype('float32')
    """

    def is_quantized(x: Any) -> bool:
        return isinstance(x, Quantized)

    return jax.tree.map(lambda x: x.dequantize() if is_quantized(x) else x, tree, is_leaf=is_quantized)

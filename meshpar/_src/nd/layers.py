"""Layers of named arrays, as functions of their parameters: dense, convolution, pooling, layer norm, attention, dropout, loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...errors import RankError
from ..dims import DimsLike
from . import functions as f
from .named import Named, as_named, check_sizes, described, named, position, transposed
from .ops import arange, dim_names, einsum, transpose


def dense(x: Any, w: Any, bias: Any = None, *, matched: DimsLike = ()) -> Named:
    """The product of ``x`` and a weight, summed over the dims that both have, plus a bias.

    Args:
      matched: dims of both that are not summed over, such as the experts of a mixture.

    Example:
      >>> x, w = mp.nd.full(1.0, batch=4, embed=8), mp.nd.full(1.0, embed=8, heads=2, head_dim=16)
      >>> mp.nd.dense(x, w).sizes
      {'batch': 4, 'heads': 2, 'head_dim': 16}
    """
    x, w = as_named(x), as_named(w)
    y = einsum(x, w, reduced=[d for d in x.dims if d in w.dims and d not in dim_names(matched)])
    return y if bias is None else y + bias


def conv(
    x: Any, kernel: Any, *, stride: int = 1, padding: str = "SAME", upsample: bool = False, **window: str
) -> Named:
    """A convolution over the dims in ``window``: ``nd.conv(images, w, height="kh", width="kw")``.

    The dim that ``x`` and the kernel share has the input channels, the kernel's other dim the output channels; all other dims of
    ``x`` are batch dims. Where the layout shards a spatial dim, devices exchange halos.

    Args:
      stride: of all spatial dims.
      padding: ``"SAME"`` or ``"VALID"``.
      upsample: a transposed convolution, which is the gradient of a convolution with respect to its input; it multiplies the
        spatial sizes by ``stride``.
      window: spatial dim of ``x`` → dim of the kernel.

    Raises:
      RankError: not exactly one dim for each of the channels; it describes both arrays.

    Example:
      >>> images, w = mp.nd.full(1.0, batch=2, height=8, channels=3), mp.nd.full(1.0, kh=3, channels=3, features=4)
      >>> mp.nd.conv(images, w, height="kh").sizes
      {'batch': 2, 'height': 8, 'features': 4}
    """
    x, kernel = as_named(x), as_named(kernel)
    for d, tap in window.items():
        position(x, d, "conv")
        position(kernel, tap, "conv")
    n, spatial, taps = len(window), tuple(window), tuple(window.values())
    channels = [d for d in x.dims if d in kernel.dims and d not in spatial]
    features = [d for d in kernel.dims if d not in (*taps, *channels)]
    if len(channels) != 1 or len(features) != 1:
        raise RankError(
            f"mp.nd.conv: ({described(x)}) and the kernel ({described(kernel)}) share {channels}, and only the kernel has "
            f"{features}",
            fixes=["one dim of input channels, which both have, and one of output channels, which only the kernel has"],
        )
    check_sizes([x, kernel])
    batch = [d for d in x.dims if d not in (*spatial, *channels)]
    images = transposed(x, (*batch, *spatial, *channels))
    array_dims = (0, n + 1, *range(1, n + 1))
    numbers = lax.ConvDimensionNumbers(array_dims, (n + 1, n, *range(n)), array_dims)
    weights = transposed(kernel, (*taps, *channels, *features))
    weights = jnp.flip(weights, range(n)) if upsample else weights
    convolve = lax.conv_transpose if upsample else lax.conv_general_dilated
    flat = images.reshape(-1, *images.shape[len(batch) :])
    y = convolve(flat, weights, (stride,) * n, padding, dimension_numbers=numbers)
    y = named(y.reshape(*images.shape[: len(batch)], *y.shape[1:]), (*batch, *spatial, *features))
    return transpose(y, [features[0] if d in channels else d for d in x.dims])


def pool(fn: Callable[..., Any], x: Any, **window: int) -> Named:
    """Reduce windows that do not overlap: ``nd.pool(jnp.max, images, height=2, width=2)``.

    Args:
      fn: such as ``jnp.max`` or ``jnp.mean``.
      window: dim → size of its windows, which divides the size of the dim.

    Example:
      >>> mp.nd.pool(jnp.max, mp.nd.arange(height=4, width=6), height=2, width=2).sizes
      {'height': 2, 'width': 3}
    """
    x = as_named(x)
    for d, n in window.items():
        i = position(x, d, "pool")
        shape = x.array.shape
        x = named(fn(x.array.reshape(*shape[:i], shape[i] // n, n, *shape[i + 1 :]), axis=i + 1), x.dims)
    return x


def layer_norm(x: Any, over: DimsLike, scale: Any = 1.0, bias: Any = 0.0, *, eps: float = 1e-6) -> Named:
    """Subtract the mean over dims and divide by the standard deviation, then multiply by ``scale`` and add ``bias``.

    With ``over="batch height width"`` it is a batch norm with the statistics of the batch.

    Example:
      >>> x = mp.nd.normal(jax.random.key(0), batch=4, embed=8)
      >>> print(jnp.abs(mp.nd.mean(mp.nd.layer_norm(x, "embed"), "embed").array).max() < 1e-6)
      True
    """
    centered = as_named(x) - f.mean(x, over)
    return centered * f.rsqrt(f.mean(centered * centered, over) + eps) * scale + bias


def attention(
    q: Any, k: Any, v: Any, *, key: str, memory: str, mask: Any = None, scale: float | None = None,
    dropout: Callable[[Named], Named] | None = None,
) -> Named:  # fmt: skip
    """Attention: scaled scores of queries and keys, a softmax over ``memory``, times values.

    Dims that the queries and the keys share, such as batch and heads, are matched. In self-attention the memory is
    ``nd.rename(k, length="memory")``. It computes all scores; :func:`meshpar.layers.attention` uses kernels.

    Args:
      key: the dim of queries and keys that is summed over.
      memory: the dim of keys and values that is summed over.
      mask: booleans, False for the pairs to exclude: ``nd.arange(memory=n) <= nd.arange(length=n)``.
      scale: of the scores. Default: 1/√(size of ``key``).
      dropout: a function that is applied to the weights.

    Raises:
      UnknownDimError: an operand lacks ``key`` or ``memory``.

    Example:
      >>> x = mp.nd.normal(jax.random.key(0), batch=2, length=8, heads=4, head_dim=16)
      >>> memory = mp.nd.rename(x, length="memory")
      >>> mp.nd.attention(x, memory, memory, key="head_dim", memory="memory").dims
      ('batch', 'length', 'heads', 'head_dim')
    """
    q, k, v = as_named(q), as_named(k), as_named(v)
    position(k, memory, "attention")
    scores = einsum(q, k, reduced=key) * (q.sizes[key] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = f.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = f.softmax(scores, memory)
    weights = weights if dropout is None else dropout(weights)
    return einsum(weights, v, reduced=memory)


def dropout(x: Any, key: jax.Array, rate: float, dims: DimsLike | None = None) -> Named:
    """Set elements to 0 with probability ``rate`` and multiply the others by 1/(1 − rate).

    Args:
      key: a random key; the elements do not depend on the layout.
      dims: of the random mask, which is broadcast over the other dims of ``x``. Default: all.

    Example:
      >>> x = mp.nd.full(1.0, batch=4, embed=8)
      >>> mp.nd.dropout(x, jax.random.key(0), 0.1, "embed").dims  # one mask for all rows of the batch
      ('batch', 'embed')
    """
    x = as_named(x)
    of_mask = dim_names(x.dims if dims is None else dims)
    shape = tuple(x.array.shape[position(x, d, "dropout")] for d in of_mask)
    kept = named(jax.random.bernoulli(key, 1 - rate, shape), of_mask)
    return f.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))


def cross_entropy(logits: Any, targets: Any, over: str) -> Named:
    """−Σ target · log softmax(logits) over a dim, without a reduction over the other dims.

    Args:
      targets: probabilities with the dim ``over``, or integers without it.

    Example:
      >>> logits, labels = mp.nd.full(0.0, batch=2, classes=10), mp.nd.arange(batch=2)
      >>> mp.nd.cross_entropy(logits, labels, "classes").sizes
      {'batch': 2}
    """
    logits, targets = as_named(logits), as_named(targets)
    if over in targets.dims:
        return -einsum(targets, f.log_softmax(logits, over), reduced=over)
    chosen = arange(**{over: logits.array.shape[position(logits, over, "cross_entropy")]}) == targets
    return f.logsumexp(logits, over) - f.sum(f.where(chosen, logits, jnp.zeros((), logits.dtype)), over)

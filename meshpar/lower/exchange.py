"""The collectives of a plan on local arrays: bringing a shard from one spec to another, settling a partial value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..layout import Spec
from ..plan.collectives import reduces, relayout, settlement

Sizes = Mapping[str, int]


def axis_index(axes: Sequence[str]) -> Any:
    """This device's place along some axes, the first one major."""
    return lax.axis_index(axes[0] if len(axes) == 1 else tuple(axes))


def bring(x: Any, have: Spec, need: Spec, sizes: Sizes) -> Any:
    """Move a shard to another spec, by the steps that :func:`meshpar.plan.collectives.relayout` lists."""
    if 0 in x.shape:
        return jnp.zeros(_shape(x.shape, have, need, sizes), x.dtype)
    now = have
    for kind, axes, after in relayout(have, need):
        axes = tuple(a for a in axes if sizes[a] > 1)
        dim = next(i for i, (a, b) in enumerate(zip(now, after, strict=True)) if len(b) < len(a))
        if axes and kind == "all-gather":
            x = _on_words(x, lambda w, d=dim, a=axes: lax.all_gather(w, a, axis=d, tiled=True))
        elif axes:
            to = next(i for i, (a, b) in enumerate(zip(now, after, strict=True)) if len(b) > len(a))
            x = _on_words(x, lambda w, d=dim, t=to, a=axes[0]: lax.all_to_all(w, a, t, d, tiled=True))
        now = after
    return cut(x, now, need, sizes)


def _shape(shape: Sequence[int], have: Spec, need: Spec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a shard in another spec."""
    before, after = ([math.prod(sizes[a] for a in entry) for entry in spec] for spec in (have, need))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def cut(x: Any, have: Spec, need: Spec, sizes: Sizes) -> Any:
    """Keep this device's part along the axes that come."""
    for i, (a, b) in enumerate(zip(have, need, strict=True)):
        new = tuple(axis for axis in b[len(a) :] if sizes[axis] > 1)
        if new:
            n = x.shape[i] // math.prod(sizes[axis] for axis in new)
            x = lax.dynamic_slice_in_dim(x, axis_index(new) * n, n, i)
    return x


def _on_words(x: Any, move: Callable[[Any], Any]) -> Any:
    """Random keys are sent as the words they are made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(move(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def settle(x: Any, have: Spec, rest: Spec, axes: Sequence[str], kind: str, sizes: Sizes) -> tuple[Any, Spec]:
    """Make a partial value whole, as :func:`meshpar.plan.collectives.settlement` says: (the shard, its spec)."""
    scatter, reduce = settlement(have, rest, axes, kind)
    dtype = x.dtype
    if 0 in x.shape:
        spec = tuple((*s, *scatter.get(i, ())) for i, s in enumerate(have))
        return jnp.zeros(_shape(x.shape, have, spec, sizes), dtype), spec
    if dtype == np.bool_:  # a sum of booleans is a lookup, in which one device has the value
        x = x.astype(np.uint8)
    spec = have
    for i, got in scatter.items():
        spec = tuple((*s, *got) if k == i else s for k, s in enumerate(spec))
        got = tuple(a for a in got if sizes[a] > 1)
        if got:
            x = lax.psum_scatter(x, got, scatter_dimension=i, tiled=True)
    reduce = tuple(a for a in reduce if sizes[a] > 1)
    if reduce and reduces(kind, dtype):
        x = {"sum": lax.psum, "max": lax.pmax, "or": lax.pmax, "min": lax.pmin, "and": lax.pmin}[kind](x, reduce)
    elif reduce:
        every = lax.all_gather(x, reduce, axis=0)
        together = {"prod": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or}[kind]
        x = functools.reduce(together, [every[k] for k in range(every.shape[0])])
    return x.astype(dtype), spec

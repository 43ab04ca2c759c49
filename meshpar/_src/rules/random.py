"""Random keys and bits. The bits of an array do not depend on how it is split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from ..compat.jax import aval_of, key_impl
from .local_forms import LocalOp, on_shards
from .registry import register
from .rule import OpRule, independent_of_data, leading, replicated


def keys(eqn, ins, outs) -> OpRule:
    """The rule of an op on random keys: dims of arrays of seeds and keys pass through; a dim of the words of a key, or
    of the keys it is split into, does not."""
    words = eqn.primitive.name == "random_wrap"
    return leading(ins, outs, min(len(outs[0]), len(ins[0]) - words))


register("random_seed", "random_split", rule=keys, local=on_shards, family="random")
register("random_wrap", "random_unwrap", rule=keys, local=on_shards, view=True)


def drawn_by_index(eqn: JaxprEqn) -> bool:
    """Whether an equation makes random bits of which each element is a function of one key and of its index in the array: with
    partitionable threefry, for fewer than 2**32 elements."""
    if eqn.primitive.name != "random_bits":
        return False
    key = aval_of(eqn.invars[0])
    threefry = key_impl(key.dtype) == "threefry2x32" and getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    return threefry and not key.shape and math.prod(aval_of(eqn.outvars[0]).shape) < 2**32


def _local_random_bits(op: LocalOp, key: Any) -> list[Any]:
    """This device's shard of the bits of the unsharded array.

    With partitionable threefry, bits depend on the key and their index in the array alone. Other generators make the unsharded
    array, which is then sliced.
    """
    dims, full_shape, shape = op.rule.outs[0], op.eqn.outvars[0].aval.shape, op.out_shape
    if shape == full_shape:
        return op.run(key)
    if not drawn_by_index(op.eqn):
        (x,) = op.run(key)
        return [lax.dynamic_slice(x, [op.offset(f, n) for f, n in zip(dims, shape, strict=True)], shape)]
    index = jnp.zeros(shape, np.uint32)
    stride = 1
    for d in reversed(range(len(shape))):
        along_d = lax.broadcasted_iota(np.uint32, shape, d)
        along_d = along_d + lax.convert_element_type(op.offset(dims[d], shape[d]), np.uint32)
        index = index + along_d * np.uint32(stride)
        stride *= full_shape[d]
    words = jax.random.key_data(key)
    high, low = threefry2x32_p.bind(words[0], words[1], jnp.zeros(shape, np.uint32), index)
    width = op.params["bit_width"]
    dtype = np.dtype(f"uint{width}")
    if width == 64:
        high, low = (lax.convert_element_type(b, dtype) for b in (high, low))
        return [lax.shift_left(high, np.full((), 32, dtype)) | low]
    return [lax.convert_element_type(high ^ low, dtype)]


register("random_bits", rule=independent_of_data, local=_local_random_bits, family="random")


def random_gamma(eqn, ins, outs) -> OpRule:
    """The rule of ``random_gamma``: dims of an array of keys pass through. The other dims need replication, since a draw depends on
    the index of the element in the array."""
    return leading(ins, outs, len(ins[0]))


register("random_gamma", rule=random_gamma, local=on_shards)
register("rng_bit_generator", rule=replicated, local=on_shards, family="random")  # its bits depend on the shape

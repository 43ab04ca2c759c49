"""Random bits and keys: a bit does not depend on how its array is split."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from .local import LocalOp, on_shards
from .registry import register
from .rule import OpRule


def keys(eqn, ins, outs) -> OpRule:
    """Dims of arrays of seeds and keys pass through; the keys that a key is split into, and its words, need replication."""
    r = OpRule([], [])
    lead = r.factors(ins[0][: len(outs[0])])
    lead = lead[: len(ins[0]) - (eqn.primitive.name == "random_wrap")]
    r.ins = [lead + r.factors(ins[0][len(lead) :], "need_replication")]
    r.outs = [lead + r.factors(outs[0][len(lead) :], "need_replication")]
    return r


register("random_seed", "random_split", rule=keys, local=on_shards, random=True)
register("random_wrap", "random_unwrap", rule=keys, local=on_shards, view=True)


def random_bits(eqn, ins, outs) -> OpRule:
    """Every device makes its part of the bits, from the global index."""
    r = OpRule([], [])
    r.ins, r.outs = [r.factors(s, "need_replication") for s in ins], [r.factors(s) for s in outs]
    return r


def _local_random_bits(at: LocalOp, key: Any) -> list[Any]:
    """The bits of this device's part of the array: those that the unsharded array has there.

    With partitionable threefry a bit depends on the key and its global index alone. Other generators are run
    for the unsharded array, of which every device keeps its part.
    """
    dims, whole, shape = at.rule.outs[0], at.eqn.outvars[0].aval.shape, at.out
    if shape == whole:
        return at.run(key)
    plain = str(jax.random.key_impl(key)) == "threefry2x32" and getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    if not plain or key.shape or math.prod(whole) >= 2**32:
        (x,) = at.run(key)
        return [lax.dynamic_slice(x, [at.offset(f, n) for f, n in zip(dims, shape, strict=True)], shape)]
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


register("random_bits", rule=random_bits, local=_local_random_bits, random=True)


def random_gamma(eqn, ins, outs) -> OpRule:
    """Draws of every element from its own parameter; an array of keys is one for each of the leading dims."""
    r = OpRule([], [])
    dims = r.factors(outs[0])
    r.ins, r.outs = [dims[: len(ins[0])], dims], [dims]
    return r


def _local_random_gamma(at: LocalOp, key: Any, a: Any) -> list[Any]:
    """A draw follows from the key and the place in the whole array: those of the other devices are made as well, and dropped."""
    whole = (*a.shape[: key.ndim], *at.eqn.outvars[0].aval.shape[key.ndim :])
    if a.shape == whole:
        return at.run(key, a)
    dims = at.rule.outs[0]
    start = [
        at.offset(f, n) if d >= key.ndim else np.int32(0) for d, (f, n) in enumerate(zip(dims, a.shape, strict=True))
    ]
    (x,) = at.run(key, lax.dynamic_update_slice(jnp.ones(whole, a.dtype), a, start))
    return [lax.dynamic_slice(x, start, a.shape)]


register("random_gamma", rule=random_gamma, local=_local_random_gamma)


def rng_bit_generator(eqn, ins, outs) -> OpRule:
    """All dims need replication: the bits of an element depend on the shape that the backend is asked for."""
    r = OpRule([], [])
    key = r.factors(ins[0], "need_replication")
    r.ins, r.outs = [key], [key, r.factors(outs[1], "need_replication")]
    return r


register("rng_bit_generator", rule=rng_bit_generator, local=on_shards, random=True)

"""Digests of arrays that do not depend on how they are split over devices.

The digest of an array is two sums, modulo 2^32, over its elements: ``mix(bits ^ mix(index + seed))``, one for each of two
seeds. ``bits`` is the element as unsigned 32-bit words, ``index`` a 32-bit hash of its place in the whole array, and ``mix``
the finaliser of MurmurHash3, a bijection: so one changed bit always changes both sums, and swapped elements almost always do.
Sums of shards add up to the sum of the whole, whatever the layout, and a device needs no memory but for the two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .arrays import is_key

SEEDS = (0x9E3779B9, 0x7F4A7C15)
_STEP = 0x61C88647


def _mix(h: jax.Array) -> jax.Array:
    h = h ^ (h >> 16)
    h = h * jnp.uint32(0x85EBCA6B)
    h = h ^ (h >> 13)
    h = h * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, with one more dim of 2 (or of 2 or 4) where an element has more than 32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).bits
    if bits < 8 and jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32).view(jnp.uint32)
    if bits < 8:
        return x.astype(jnp.float32).view(jnp.uint32)  # exact: the narrow floats are among the float32
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}[bits]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def sums(x: jax.Array, offsets: Sequence[Any] = ()) -> jax.Array:
    """The two sums, uint32 [2], of a piece of an array that begins at these offsets in the whole."""
    if is_key(x):
        x = jax.random.key_data(x)
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for d in range(words.ndim):
        start = jnp.uint32(offsets[d]) if d < len(offsets) else jnp.uint32(0)
        odd = jnp.uint32((_STEP * (2 * d + 1)) & 0xFFFFFFFF)
        place += (jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) + start) * odd
    return jnp.stack([jnp.sum(_mix(words ^ _mix(place + jnp.uint32(seed))), dtype=jnp.uint32) for seed in SEEDS])


def as_text(pair: Any) -> str:
    """Two sums → 16 hexadecimal digits."""
    high, low = (int(n) for n in np.asarray(pair))
    return f"{high:08x}{low:08x}"


def _all_sums(xs: list[jax.Array]) -> jax.Array:
    return jnp.stack([sums(x) for x in xs])


_all_sums_here = jax.jit(_all_sums)


@jax.jit
def _piece_sums(xs: list[jax.Array], offsets: list[list[jax.Array]]) -> jax.Array:
    return jnp.stack([sums(x, o) for x, o in zip(xs, offsets, strict=True)])


class Digests:
    """Digests of whole arrays, which are being computed on their devices; all processes must make them alike.

    Args:
      arrays: arrays over one mesh, or each over devices of its own; they may be deleted or donated afterwards.
    """

    def __init__(self, arrays: Sequence[jax.Array]):
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(arrays):
            groups.setdefault((frozenset(x.sharding.device_set), getattr(x.sharding, "mesh", None)), []).append(i)
        self._parts: list[tuple[list[int], jax.Array]] = []
        self._count = len(arrays)
        for (_, mesh), members in groups.items():
            xs = [arrays[i] for i in members]
            if mesh is not None and xs[0].sharding.num_devices > 1:
                run = jax.jit(_all_sums, out_shardings=NamedSharding(mesh, PartitionSpec()))
            else:
                run = _all_sums_here
            self._parts.append((members, run(xs)))

    def texts(self) -> list[str]:
        """One digest for each array, once they are computed; ``""`` where the copies on this process's devices differ."""
        out = [""] * self._count
        for members, made in self._parts:
            copies = [np.asarray(s.data) for s in made.addressable_shards]
            for k, i in enumerate(members):
                found = {as_text(c[k]) for c in copies}
                out[i] = found.pop() if len(found) == 1 else ""
        return out


def digests_of_pieces(pieces: Sequence[tuple[jax.Array, Sequence[int]]]) -> list[str]:
    """Digests of pieces, each an array on one device of this process and where it begins in its whole; no process waits."""
    groups: dict[Any, list[int]] = {}
    for i, (x, _) in enumerate(pieces):
        groups.setdefault(frozenset(x.devices()), []).append(i)
    out = [""] * len(pieces)
    made = []
    for members in groups.values():
        offsets = [[np.uint32(o & 0xFFFFFFFF) for o in pieces[i][1]] for i in members]
        made.append((members, _piece_sums([pieces[i][0] for i in members], offsets)))
    for members, pairs in made:
        for i, pair in zip(members, np.asarray(pairs), strict=True):
            out[i] = as_text(pair)
    return out

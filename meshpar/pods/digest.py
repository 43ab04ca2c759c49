"""Digests of arrays that do not depend on how they are sharded.

The digest of an array is a pair of sums modulo 2^32 over its elements, ``mix(bits ^ mix(index + seed))``, for two
seeds. ``bits`` is the element as unsigned 32-bit words, ``index`` a 32-bit hash of its index in the global array, and ``mix``
the finaliser of MurmurHash3 (Appleby 2011), a bijection: one changed bit always changes both sums, and swapped elements almost
always do. The sum of an array is the sum over its shards, so a device needs memory for two numbers only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..compat.jax import axes_of_spec
from ..global_arrays import is_key

SEEDS = (0x9E3779B9, 0x7F4A7C15)
_STEP = 0x61C88647
SMALL = 1 << 20


def _mix(h: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3 for each uint32 element; the shape is unchanged."""
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


def digest_of(x: jax.Array, offsets: Sequence[Any] = ()) -> jax.Array:
    """The digest, uint32 [2], of a shard that begins at these offsets in the global array."""
    if is_key(x):
        x = jax.random.key_data(x)
    words = _words(x)
    index = jnp.zeros(words.shape, jnp.uint32)
    for d in range(words.ndim):
        start = jnp.uint32(offsets[d]) if d < len(offsets) else jnp.uint32(0)
        odd = jnp.uint32((_STEP * (2 * d + 1)) & 0xFFFFFFFF)
        index += (jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) + start) * odd
    return jnp.stack([jnp.sum(_mix(words ^ _mix(index + jnp.uint32(seed))), dtype=jnp.uint32) for seed in SEEDS])


def as_text(pair: Any) -> str:
    """A digest, uint32 [2], as 16 hexadecimal digits."""
    high, low = (int(n) for n in np.asarray(pair))
    return f"{high:08x}{low:08x}"


@jax.jit
def _local_digests(xs: list[jax.Array]) -> jax.Array:
    return jnp.stack([digest_of(x) for x in xs])


@functools.lru_cache(maxsize=64)
def _digests_over(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[[list[jax.Array]], jax.Array]:
    """A function from n arrays with these specs to their digests, uint32 [n, 2]; it all-reduces the digests of shards."""

    def local(xs: list[jax.Array]) -> jax.Array:
        """Per device: from the shards of n arrays, the digests of the global arrays, uint32 [n, 2], equal on all
        devices.

        The digest of a shard counts indices from the shard's start in the global array. The digests of arrays that are
        sharded over the same axes are added in one all-reduce (uint32 addition wraps around).
        """
        pairs: dict[tuple[str, ...], list[tuple[int, jax.Array]]] = {}  # by the axes of their all-reduce
        for k, (x, spec) in enumerate(zip(xs, specs, strict=True)):
            axes = axes_of_spec(spec, x.ndim)
            starts = [
                jax.lax.axis_index(a).astype(jnp.uint32) * n if a else 0 for a, n in zip(axes, x.shape, strict=True)
            ]
            used = tuple(sorted(a for entry in axes for a in entry))
            pairs.setdefault(used, []).append((k, digest_of(x, starts)))
        out: dict[int, jax.Array] = {}
        for used, members in pairs.items():
            total = jnp.stack([pair for _, pair in members])
            total = jax.lax.psum(total, used) if used else total
            out.update((k, total[i]) for i, (k, _) in enumerate(members))
        return jnp.stack([out[k] for k in range(len(xs))])

    run = jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(run, in_shardings=([NamedSharding(mesh, spec) for spec in specs],))


_digest_of_one = jax.jit(digest_of)


class Digests:
    """Digests of global arrays, computed asynchronously on their devices; all processes must create the same ones.

    Args:
      arrays: arrays over one mesh, or each over devices of its own; they may be deleted or donated afterwards.
    """

    def __init__(self, arrays: Sequence[jax.Array]):
        """Start the computation: one call for the arrays over each mesh, and one for the arrays on each other set of
        devices."""
        self._parts: list[tuple[list[int], jax.Array]] = []
        self._count = len(arrays)
        groups: dict[Any, list[int]] = {}
        specs: list[PartitionSpec] = []
        for i, x in enumerate(arrays):
            s = x.sharding
            if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh) and s.num_devices > 1:
                entries = list(s.spec)
                while entries and entries[-1] is None:  # an equal spec with another key of the compilation cache
                    entries.pop()
                specs.append(PartitionSpec(*entries))
                groups.setdefault(s.mesh, []).append(i)
            else:
                specs.append(PartitionSpec())
                groups.setdefault(frozenset(s.device_set), []).append(i)
        for where, members in groups.items():
            xs = [jax.random.key_data(arrays[i]) if is_key(arrays[i]) else arrays[i] for i in members]
            run = _digests_over(where, tuple(specs[i] for i in members)) if isinstance(where, Mesh) else _local_digests
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


def digests_of_parts(arrays: Sequence[jax.Array]) -> list[str]:
    """Digests of arrays that are each on one device of this process, by themselves; no process waits for another.

    Small ones are hashed on the host, which has nothing to compile for them.
    """
    made = [x if x.nbytes <= SMALL else _digest_of_one(x) for x in arrays]
    out = []
    for x, done in zip(arrays, made, strict=True):
        if x.nbytes > SMALL:
            out.append(as_text(done))
        else:
            value = np.ascontiguousarray(np.asarray(jax.random.key_data(x) if is_key(x) else x))
            out.append(hashlib.sha256(value.tobytes()).hexdigest()[:16])
    return out

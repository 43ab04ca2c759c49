"""Digests of arrays that do not depend on how they are sharded.

The digest of an array is a pair of checksums, each the sum modulo 2^32 over its elements of ``mix(bits ^ mix(index + seed))``, for
two seeds. ``bits`` is the element as unsigned 32-bit words, ``index`` a 32-bit hash of its index in the global array, and ``mix``
the finaliser of MurmurHash3 (Appleby 2011), a bijection: one changed bit always changes both, and swapped elements almost
always do. The checksum of an array is the sum over its shards, so a device needs memory for two numbers only.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..compat.coordination import process_count, process_index
from ..compat.jax import axes_of_spec
from ..global_arrays import data_of, is_global, on_mesh

SEEDS = (0x9E3779B9, 0x7F4A7C15)
_STEP = 0x61C88647
SMALL = 1 << 20


def _mix(h: Any) -> Any:
    """The finalizer of MurmurHash3 for each element of a uint32 array of JAX or NumPy; an array of NumPy is overwritten."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    return h


def _words(x: Any) -> Any:
    """The bits of an array of JAX or NumPy as uint32, with one more dim of 2 (or of 2 or 4) where an element has more than 32."""
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = x[..., None].view(np.finfo(x.dtype).dtype)
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    bits = jnp.finfo(x.dtype).bits if floats else jnp.iinfo(x.dtype).bits
    if bits < 8:  # exact: the narrow floats are among the float32
        return x.astype(np.float32 if floats else np.int32).view(np.uint32)
    if bits == 64:
        return x[..., None].view(np.uint32)
    return x.view(f"u{bits // 8}").astype(np.uint32, copy=False)


def starts_of(index: tuple[slice, ...]) -> tuple[int, ...]:
    """Where a shard with this index begins in the global array."""
    return tuple(s.start or 0 for s in index)


def digest_of(x: jax.Array, offsets: Sequence[Any] = ()) -> jax.Array:
    """The digest, uint32 [2], of a shard that begins at these offsets in the global array."""
    words = _words(data_of(x))
    index = jnp.zeros(words.shape, jnp.uint32)
    for d in range(words.ndim):
        start = jnp.uint32(offsets[d]) if d < len(offsets) else jnp.uint32(0)
        odd = jnp.uint32((_STEP * (2 * d + 1)) & 0xFFFFFFFF)
        index += (jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) + start) * odd
    return jnp.stack([jnp.sum(_mix(words ^ _mix(index + jnp.uint32(seed))), dtype=jnp.uint32) for seed in SEEDS])


def as_text(pair: Any) -> str:
    """A digest, two numbers modulo 2^32, as 16 hexadecimal digits."""
    high, low = (int(n) & 0xFFFFFFFF for n in pair)
    return f"{high:08x}{low:08x}"


# -- on the host


_BLOCK = 1 << 16
"""Elements that are hashed at a time: with their temporaries they fit into the cache of a core."""


@functools.lru_cache(maxsize=64)
def _indices(shape: tuple[int, ...], first: int) -> np.ndarray:
    """The hash of the index of each element of a block, uint32; ``first`` is the dim of the array that is dim 0 here."""
    total = np.zeros(shape, np.uint32)
    for d, n in enumerate(shape):
        odd = (_STEP * (2 * (first + d) + 1)) & 0xFFFFFFFF
        along = np.arange(n, dtype=np.uint64) * np.uint64(odd)
        total += along.astype(np.uint32).reshape(-1, *[1] * (len(shape) - d - 1))
    return total


def digest_on_host(x: np.ndarray, starts: Sequence[int] = ()) -> tuple[int, int]:
    """:func:`digest_of` for a NumPy array, computed chunk by chunk; equal for equal values and offsets."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    return _blocks(x, 0, sum(int(n) * _STEP * (2 * d + 1) for d, n in enumerate(starts)))


def _blocks(x: np.ndarray, first: int, base: int) -> tuple[int, int]:
    """The digest of a part of an array, computed in chunks of at most ``_BLOCK`` elements.

    Args:
      first: the dim of the array that is dim 0 of ``x``.
      base: the hash of the index of the first element.
    """
    if x.size > _BLOCK:
        odd = _STEP * (2 * first + 1)
        rows = _BLOCK * len(x) // x.size
        if not rows:  # one row is more than a block
            parts = [_blocks(row, first + 1, base + k * odd) for k, row in enumerate(x)]
        else:
            parts = [_blocks(x[k : k + rows], first, base + k * odd) for k in range(0, len(x), rows)]
        high, low = zip(*parts, strict=True)
        return sum(high), sum(low)
    words = _words(x)
    index = _indices(words.shape, first).reshape(-1)  # NumPy warns of overflows in arrays without dims
    words = words.reshape(-1)
    hashed = (_mix(words ^ _mix(index + np.uint32((base + seed) & 0xFFFFFFFF))) for seed in SEEDS)
    high, low = (int(h.sum(dtype=np.uint32)) for h in hashed)
    return high, low


# -- of arrays in any place


_digest_of_one = jax.jit(digest_of)


@functools.lru_cache(maxsize=256)
def _digests_over(mesh: Mesh, spec: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """A function from an array with this spec to the digest of each device's shard, uint32 [devices, 2].

    Indices count from the start of the global array. Without communication: one program for each shape and dtype.
    """

    def local(x: jax.Array) -> jax.Array:
        axes = axes_of_spec(spec, x.ndim)
        starts = [jax.lax.axis_index(a).astype(jnp.uint32) * n if a else 0 for a, n in zip(axes, x.shape, strict=True)]
        return digest_of(x, starts)[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(mesh.axis_names), check_vma=False)
    return jax.jit(run, in_shardings=NamedSharding(mesh, spec))


def on_device(x: Any, copied: bool) -> dict[Any, jax.Array] | None:
    """Device → digest of its shard of ``x``, computed asynchronously on this process's devices; None: use the host.

    The host hashes shards of up to ``SMALL`` bytes, for which nothing is compiled, arrays in host memory, and with
    ``copied`` all shards that a checkpoint copies to the host anyway: those without other copies in this process.
    """
    if not isinstance(x, jax.Array):
        return None
    s: Any = x.sharding
    if math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize <= SMALL or s.memory_kind not in (None, _device_memory()):
        return None
    shards = x.addressable_shards
    if copied and len({str(shard.index) for shard in shards}) == len(shards):
        return None
    if s.num_devices == 1:
        return {shards[0].device: _digest_of_one(x)}
    if not on_mesh(x):
        return None
    entries = list(s.spec)
    while entries and entries[-1] is None:  # an equal spec with another key of the compilation cache
        entries.pop()
    made = _digests_over(s.mesh, PartitionSpec(*entries))(x)
    return {shard.device: shard.data for shard in made.addressable_shards}


@functools.cache
def _device_memory() -> str | None:
    return jax.local_devices()[0].default_memory().kind


class Digests:
    """Digests of the leaves of a state in all processes: started at once, and computed by :meth:`totals`, in any thread.

    Args:
      leaves: path → array over the devices of some processes, or a value that every process has. Arrays may be deleted or
        donated afterwards.
      copied: copies in host memory are made anyway, since the arrays are saved.
    """

    def __init__(self, leaves: Mapping[str, Any], *, copied: bool):
        """Start the computations of devices, and copy the other shards to the host."""
        self._replicas: dict[str, int] = {}
        self._shards: dict[str, list[tuple[int, tuple[int, ...], Any]]] = {}  # (replica, starts, array or digest)
        made = {path: on_device(x, copied) for path, x in leaves.items()}
        for path, x in leaves.items():
            if isinstance(x, jax.Array) and made[path] is None:
                for shard in x.addressable_shards:
                    shard.data.copy_to_host_async()
        for path, x in leaves.items():
            if not isinstance(x, jax.Array):
                self._replicas[path] = process_count()
                self._shards[path] = [(process_index(), (), x)]
                continue
            copies = x.sharding.num_devices * math.prod(x.sharding.shard_shape(x.shape)) // max(1, x.size)
            offset = 0 if is_global(x) else copies * process_index()  # each process has an array of its own
            self._replicas[path] = copies if is_global(x) else copies * process_count()
            on = made[path]
            self._shards[path] = [
                (offset + s.replica_id, starts_of(s.index), np.asarray(s.data) if on is None else on[s.device])
                for s in x.addressable_shards
            ]

    def totals(self) -> dict[str, list[int]]:
        """Path → (s, s', w, w') of this process's shards: s, the sum of their digests in replica 0; w, of all digests times
        the number of their replica. The four add up over processes."""
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            return dict(zip(self._shards, pool.map(self._sum, self._shards.values()), strict=True))

    def _sum(self, shards: Sequence[tuple[int, tuple[int, ...], Any]]) -> list[int]:
        total = [0, 0, 0, 0]
        known: dict[tuple[int, ...], tuple[np.ndarray, Sequence[int]]] = {}
        for replica, starts, x in shards:
            if isinstance(x, jax.Array):
                pair: Sequence[int] = [int(n) for n in np.asarray(x).reshape(2)]
            elif starts in known and known[starts][0].tobytes() == x.tobytes():
                pair = known[starts][1]
            else:
                pair = digest_on_host(x, starts)
                known[starts] = x, pair
            for k in range(2):
                total[k] += pair[k] & 0xFFFFFFFF if replica == 0 else 0
                total[2 + k] += replica * (pair[k] & 0xFFFFFFFF)
        return total

    def texts(self, totals: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, str]:
        """Path → digest, from the :meth:`totals` of all processes; ``""`` where copies of the array differ."""
        out = {}
        for path, copies in self._replicas.items():
            first, second, *weighted = (sum(s[path][k] for s in totals) for k in range(4))
            weight = copies * (copies - 1) // 2  # 0 + 1 + … : each copy has the digests of replica 0
            out[path] = as_text((first, second)) if weighted == [weight * first, weight * second] else ""
        return out


def digests_of_parts(arrays: Sequence[jax.Array]) -> list[str]:
    """Digests of arrays that are each on one device of this process, by themselves; no process waits for another.

    Small ones are hashed on the host, which has nothing to compile for them.
    """
    on_devices = [_digest_of_one(x) if x.nbytes > SMALL else None for x in arrays]  # started before one is read
    pairs = zip(arrays, on_devices, strict=True)
    return [as_text(digest_on_host(np.asarray(data_of(x))) if pair is None else pair) for x, pair in pairs]

"""The programs of the rounds of a move: one ``shard_map`` each, over the devices of source and target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..plan.shard_shapes import itemsize_of
from .factored import Parts, devices_of
from .plan import MovedArray, program_mesh
from .route import Round, exchange, follow


def _bits(x: jax.Array, cpu: bool) -> jax.Array:
    """On CPUs, floats of 8 or 16 bits as integers: XLA's compiler for them sends, slices and writes such floats as float32."""
    narrow = cpu and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if narrow else x


def _of_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of :func:`_bits`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def local_move(array: MovedArray, axes: tuple[str, ...]) -> Callable[..., jax.Array]:
    """A function from the shards of a device to its shard of the target, inside a ``shard_map`` over ``axes``."""
    route, shape = array.route, array.sharding.shard_shape(array.shape)
    old, dtype = jnp.dtype(array.old_dtype), jnp.dtype(array.dtype)
    assert route is not None

    def cast(x: jax.Array, before: bool) -> jax.Array:
        """The bits of an array in the other dtype, on the side on which it is narrower."""
        if old == dtype or before != (itemsize_of(dtype) < itemsize_of(old)):
            return x
        return _bits(_of_bits(x, old).astype(dtype), route.on_cpus)

    def made(
        xs: Sequence[jax.Array], parts: Parts | None, rounds: tuple[Round, ...], local: tuple[int, ...]
    ) -> jax.Array:
        """The bits of a shard of the target, or of a chunk of it, which has the shape ``local`` if it is made in rounds."""
        xs = [cast(x, True) for x in xs]
        if parts is None:
            target = devices_of(array.sharding.mesh)
            return cast(exchange(xs, replace(route, rounds=rounds), local, axes, target), False)
        assert route.mesh is not None
        x = xs[0].reshape(parts.local(parts.have))
        return cast(follow(x, parts, route.mesh, route.joints, route.on_cpus), False)

    def chunked(x: jax.Array) -> jax.Array:
        """The chunks one after the other; of a donated array each in place of the one that it was."""
        (at, count), parts, rounds = array.chunks, route.parts, route.rounds
        rows = (shape[0] if parts is None else parts.sizes[at]) // count
        # [dims before the part, chunks, other dims]: XLA leaves such arrays in their layout, and copies none
        sides, local = [(1, count, -1), (1, count, -1)], (rows, *x.shape[1:])
        if parts is None:
            rounds = tuple(replace(r, shape=(rows, *r.shape[1:])) for r in rounds)
        else:
            sides = [(math.prod(of[:at]), count, -1) for of in (parts.local(parts.have), parts.local(parts.need))]
            parts = replace(parts, sizes=tuple(rows if k == at else n for k, n in enumerate(parts.sizes)))
        x = x.reshape(sides[0])

        def body(k: jax.Array, out: jax.Array) -> jax.Array:
            y = lax.dynamic_index_in_dim(out if array.in_place else x, k, 1, keepdims=False)
            y = made([y.reshape(local) if parts is None else y], parts, rounds, (rows, *shape[1:]))
            return lax.dynamic_update_index_in_dim(out, y.reshape(out.shape[0], -1), k, 1)

        empty = _bits(jnp.zeros(shape, dtype), route.on_cpus).reshape(sides[1])
        return lax.fori_loop(0, count, body, x if array.in_place else empty)

    def move(*xs: jax.Array) -> jax.Array:
        bits = [_bits(x, route.on_cpus) for x in xs]
        y = chunked(bits[0]) if array.chunks[1] > 1 else made(bits, route.parts, route.rounds, shape)
        return _of_bits(y, dtype).reshape(shape)

    return move


class Program:
    """The program of a round.

    It takes and returns the shards of each device as parts of arrays along their first dim, which neither copies them nor needs a
    sharding that both sides know. Devices without a shard of the source have zeros, and those outside of the target a result that
    is dropped.
    """

    def __init__(self, arrays: Sequence[MovedArray], donated: frozenset[str]):
        """The program that makes some arrays of the target, and frees the ``donated`` paths of the source."""
        route = arrays[0].route
        assert route is not None
        self.arrays, self.devices = arrays, route.devices
        self.mesh = next((program_mesh(a.route) for a in arrays if a.route and a.route.joints), program_mesh(route))
        self.sources = {p: (o, a.old_dtype) for a in arrays for p, o in zip(a.sources, a.operands, strict=True)}
        axes, paths = self.mesh.axis_names, list(self.sources)
        moves = [local_move(a, axes) for a in arrays]

        def local(*xs: jax.Array) -> tuple[jax.Array, ...]:
            of = dict(zip(paths, xs, strict=True))
            return tuple(move(*(of[p] for p in a.sources)) for move, a in zip(moves, arrays, strict=True))

        specs = tuple(self._spec(len(o.shape)) for o, _ in self.sources.values())
        outs = tuple(self._spec(len(a.shape)) for a in arrays)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=outs, check_vma=False)
        self.donated = [k for k, p in enumerate(paths) if p in donated]
        self.run = jax.jit(run, donate_argnums=self.donated)

    def _spec(self, rank: int) -> PartitionSpec:
        return PartitionSpec(self.mesh.axis_names) if rank else PartitionSpec()

    def _joined(self, local: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        """(shape, sharding) of the array that has the shards of all devices."""
        shape = (local[0] * len(self.devices), *local[1:]) if local else ()
        return shape, NamedSharding(self.mesh, self._spec(len(local)))

    def __call__(self, found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of the target by their paths, from the arrays of the source; donated ones are deleted."""
        own = [d for d in self.devices if d.process_index == jax.process_index()]
        inputs = []
        for path, (operand, dtype) in self.sources.items():
            local = operand.sharding.shard_shape(operand.shape)
            shards = {s.device: s.data for s in found[path].addressable_shards}
            parts = [shards[d] if d in shards else jnp.zeros(local, dtype, device=d) for d in own]
            shape, sharding = self._joined(local)
            inputs.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        out = {}
        for array, y in zip(self.arrays, self.run(*inputs), strict=True):
            shards = {s.device: s.data for s in y.addressable_shards}
            parts = [shards[d] for d in devices_of(array.sharding.mesh) if d in shards]
            out[array.path] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        for k, path in enumerate(self.sources):
            if k in self.donated and not found[path].is_deleted():
                found[path].delete()
        return out

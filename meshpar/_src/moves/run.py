"""The programs of the rounds of a move: one ``shard_map`` each, over the devices of source and target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..plan.spec import itemsize_of
from .plan import MovedArray, program_mesh
from .route import exchange, follow


def local_move(array: MovedArray, axes: tuple[str, ...]) -> Callable[..., jax.Array]:
    """A function from the shards of a device to its shard of the target, inside a ``shard_map`` over ``axes``."""
    route, shape = array.route, array.sharding.shard_shape(array.shape)
    assert route is not None
    narrower = array.wire < itemsize_of(array.old_dtype)

    def whole(*xs: jax.Array) -> jax.Array:
        xs = tuple(x.astype(array.dtype) if narrower else x for x in xs)
        y = exchange(xs, route, shape, axes) if route.rounds else follow(xs[0], route, shape)
        return y.astype(array.dtype)

    def chunked(x: jax.Array) -> jax.Array:
        """The chunks one after the other; of a donated array each in place of the one that it was."""
        assert route.parts is not None
        count, rows = array.chunks, x.shape[0] // array.chunks
        part = replace(route, parts=replace(route.parts, cut=((rows,), *route.parts.cut[1:])))
        one = local_move(replace(array, route=part, chunks=1, shape=(rows, *array.shape[1:])), axes)
        if not array.in_place:
            return lax.map(one, x.reshape(count, rows, *x.shape[1:])).reshape(shape)

        def body(k: jax.Array, buffer: jax.Array) -> jax.Array:
            y = one(lax.dynamic_index_in_dim(buffer, k, keepdims=False).reshape(rows, *x.shape[1:]))
            return lax.dynamic_update_index_in_dim(buffer, y.reshape(-1), k, 0)

        return lax.fori_loop(0, count, body, x.reshape(count, -1)).reshape(shape)

    return chunked if array.chunks > 1 else whole


class Program:
    """The program of a round.

    It takes and returns the shards of each device as blocks of arrays along their first dim, which neither copies them nor needs a
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

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """Its arguments, to compile it."""
        out = []
        for operand, dtype in self.sources.values():
            shape, sharding = self._joined(operand.sharding.shard_shape(operand.shape))
            out.append(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding))
        return out

    def __call__(self, found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays of the target by their paths, from those of the source; donated ones are deleted."""
        own = [d for d in self.devices if d.process_index == jax.process_index()]
        inputs = []
        for path, (operand, dtype) in self.sources.items():
            local = operand.sharding.shard_shape(operand.shape)
            shards = {s.device: s.data for s in found[path].addressable_shards}
            parts = [shards[d] if d in shards else _zeros(local, dtype, d) for d in own]
            shape, sharding = self._joined(local)
            inputs.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        out = {}
        for array, y in zip(self.arrays, self.run(*inputs), strict=True):
            shards = {s.device: s.data for s in y.addressable_shards}
            parts = [shards[d] for d in array.sharding.mesh.devices.flat if d in shards]
            out[array.path] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
        for k, path in enumerate(self.sources):
            if k in self.donated and not found[path].is_deleted():
                found[path].delete()
        return out


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.Array:
    """Zeros on a device that has no shard of the source."""
    return jnp.zeros(shape, dtype, device=device)

"""Audits of replicated arrays during a run: digests of their copies are compared, and the device whose copy differs is named.

A layout says which arrays are replicated over which mesh axes, so their copies are equal bit by bit as long as all devices compute
and store correctly. A flipped bit in the memory of a device, or a device that computes other numbers, makes a copy differ.

Where weights have no copies, a layer is computed several times instead: each device multiplies a part of its weights by itself, and
so do the next devices. It finds a device that computes other numbers, but not a bit that flipped in its memory before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import DigestError, UnsupportedError
from ..compat.jax import axes_of_spec
from ..dims import did_you_mean, format_dims
from ..global_arrays import fetch, of_parts, on_mesh
from ..plan.plan import Plan
from .digest import _device_memory, digest_of
from .state_by_name import by_name

Axes = tuple[str, ...]
_Part = tuple[list[str], tuple[Axes, ...], tuple[jax.Array, ...]]
"""Paths of arrays, the axes over which they have copies, the results of :func:`audit_function`."""
REPEATS = 3
"""Devices that compute the same layer: with three the one that differs is known."""
SIDE = 512
"""The largest number of rows and of columns of the part of the weights that is multiplied."""
MAX_ARRAYS = 64
"""Arrays of one compiled function: compilation takes more than linear time. Functions of equal shapes are compiled once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Copies of an array that differ.

    Attributes:
      path, dims: of the array in the tree of arguments, and its dims as text.
      devices: the ``jax.Device`` objects whose copy differs from the majority; without a majority, all that have copies of the
        shard.
      certain: a majority of the copies is equal, so that the devices are the ones that differ.
      copies: number of copies of each shard.
      after: the step after which the last audit found no difference; None: there was none in this process.
      by: the step after which the difference was found.
      repeated: the copies are results of a layer that several devices computed.
    """

    path: str
    dims: str
    devices: tuple[Any, ...]
    certain: bool
    copies: int
    after: int | None
    by: int
    repeated: bool = False

    def __str__(self) -> str:
        """``state/params/up (embed mlp): device 5 of process 0 differs from 3 copies; after step 100, by step 200``."""
        names = ", ".join(f"device {d.id} of process {d.process_index}" for d in self.devices)
        what = "differs from the majority" if self.certain else "differ from each other, without a majority"
        copies = f"{self.copies} {'results of a matmul of it' if self.repeated else 'copies'}"
        since = "" if self.after is None else f"after step {self.after}, "
        return f"{self.path} ({self.dims}): {names} {what} of {copies}; {since}by step {self.by}"


def _on_devices(x: Any) -> bool:
    """Whether a value is an array in the memory of several devices of a mesh."""
    return on_mesh(x) and x.sharding.mesh.size > 1 and x.sharding.memory_kind in (None, _device_memory())


def replicated_axes(x: Any) -> Axes:
    """The mesh axes over which an array in device memory has copies; empty for other values."""
    if not _on_devices(x):
        return ()
    split = {axis for axes in axes_of_spec(x.sharding.spec, x.ndim) for axis in axes}
    return tuple(axis for axis, n in x.sharding.mesh.shape.items() if n > 1 and axis not in split)


@functools.lru_cache(maxsize=16)
def audit_function(mesh: Any, specs: tuple[PartitionSpec, ...], axes: tuple[Axes, ...]) -> Callable[..., Any]:
    """A function of numbers of the processes, float32 [devices, 2], and of arrays, whose copies over ``axes`` are compared.

    It returns the digests of the shards, uint32 [devices, arrays, 2]; replicated whether the copies of each array differ, uint32
    [arrays]; and replicated the numbers. A device reads its shards once, and sends 16 bytes for each array.

    Args:
      mesh: of all arrays; an abstract mesh serves for a plan of the function.
      specs: of the arrays.
      axes: of each array, those that its spec does not use.
    """

    every = mesh.axis_names

    def local(numbers: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        digests = jnp.stack([digest_of(x) for x in arrays])
        differ = jnp.zeros(len(arrays), jnp.uint32)
        for over in dict.fromkeys(axes):
            rows = np.array([k for k, of in enumerate(axes) if of == over])
            own = digests[rows]
            largest, complement = jax.lax.pmax(jnp.stack([own, ~own]), over)
            differ = differ.at[rows].set(jnp.any(largest != ~complement, axis=1).astype(jnp.uint32))
        return digests[None], jax.lax.pmax(differ, every), jax.lax.all_gather(numbers, every, tiled=True)

    split, one = PartitionSpec(every), PartitionSpec()
    outs = split, one, one
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, *specs), out_specs=outs, check_vma=False))


def layer(w: jax.Array) -> jax.Array:
    """The matmul that is repeated, of a part of the weights, [rows, columns], by itself."""
    return w @ w.T


@functools.lru_cache(maxsize=16)
def repeat_function(mesh: Any, spec: PartitionSpec) -> Callable[..., Any]:
    """A function of the numbers of :func:`audit_function` and of an array, of which ``layer`` is computed on several devices.

    It returns the digests of the results, uint32 [devices, copies, 2]: of the part of each device, as the device itself, the next
    one, and so on computed them; and the numbers. Both are replicated.
    """
    every, n = mesh.axis_names, mesh.size

    def local(numbers: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = x.reshape(-1, x.shape[-1])[:SIDE, :SIDE]

        def moved(y: jax.Array, by: int) -> jax.Array:
            return jax.lax.ppermute(y, every, [(k, (k + by) % n) for k in range(n)]) if by else y

        results = [moved(digest_of(layer(moved(part, by))), -by) for by in range(min(REPEATS, n))]
        return jax.lax.all_gather(jnp.stack(results), every), jax.lax.all_gather(numbers, every, tiled=True)

    ins, one = (PartitionSpec(every), spec), PartitionSpec()
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=(one, one), check_vma=False))


class Audit:
    """The audits of a run: :meth:`start` computes digests asynchronously, :meth:`finish` returns the faults."""

    def __init__(self, plan: Plan):
        """Audit the arguments of the step of a plan."""
        self._dims = {x.path: format_dims(x.dims) for x in plan.inputs}
        self._pending: tuple[int, Mesh, list[_Part], tuple[str, tuple[jax.Array, jax.Array]] | None] | None = None
        self._clean: int | None = None
        self.share = 0.0
        """The fraction of the bytes of the last audited state, on a device, that have a copy on another device."""
        self.seconds: dict[int, tuple[float, float]] = {}
        """Process → its ``seconds`` of the last audit."""

    def start(self, step: int, state: Mapping[str, Any], seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        """Start an audit; the arrays may be donated afterwards.

        Args:
          step: the number of the step that returned the state.
          state: argument of the step → its new value. All processes audit the same arrays after the same steps.
          seconds: of a step of this process, and the part of it in which this process did not wait for its devices.

        Raises:
          UnsupportedError: no argument of the step has such a name, or none of the arrays is replicated or a sharded matrix.
        """
        leaves, _ = by_name(dict(state))
        for path in leaves.keys() - self._dims.keys():
            text = f"audit: the step has no argument {path!r}"
            raise UnsupportedError(text, fixes=did_you_mean(path, self._dims, "arguments"))
        on = {path: x for path, x in leaves.items() if isinstance(x, jax.Array)}
        copied: dict[str, Any] = {path: x for path, x in on.items() if replicated_axes(x)}
        alone: dict[str, Any] = {
            path: x
            for path, x in on.items()
            if _on_devices(x) and path not in copied and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        }
        meshes = {x.sharding.mesh for x in (*copied.values(), *alone.values())}
        if len(meshes) != 1:
            what = "is on the same mesh" if meshes else "is replicated, or a matrix of floats"
            fix = "a layout in which a mesh axis shards the batch only, such as HSDP; without audit="
            raise UnsupportedError(f"audit: no array of {', '.join(state)} {what}", fixes=[fix])
        (mesh,) = meshes
        sizes = {path: x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for path, x in on.items()}
        self.share = sum(sizes[path] for path in copied) / sum(sizes.values())
        own = np.array([seconds], np.float32)
        numbers = of_parts((mesh.size, 2), NamedSharding(mesh, PartitionSpec(mesh.axis_names)), lambda _: own)
        alike = sorted(copied, key=lambda path: f"{copied[path].dtype}{copied[path].shape}{copied[path].sharding.spec}")
        parts: list[_Part] = []
        for at in range(0, len(alike), MAX_ARRAYS):
            part = {path: copied[path] for path in alike[at : at + MAX_ARRAYS]}
            axes = tuple(replicated_axes(x) for x in part.values())
            run = audit_function(mesh, tuple(x.sharding.spec for x in part.values()), axes)
            parts.append((list(part), axes, run(numbers, *part.values())))
        path = max(alone, key=lambda path: sizes[path], default=None)
        repeated = None
        if path is not None:
            repeated = path, repeat_function(mesh, alone[path].sharding.spec)(numbers, alone[path])
        self._pending = step, mesh, parts, repeated

    def finish(self) -> list[Fault]:
        """Wait for the audit that was started; returns the arrays whose copies differ, and an empty list without an audit."""
        if self._pending is None:
            return []
        (step, mesh, results, repeated), self._pending, faults = self._pending, None, []
        numbers = results[0][2][2] if repeated is None else repeated[1][1]
        rows = zip(mesh.devices.flat, np.asarray(numbers).tolist(), strict=True)
        self.seconds = {device.process_index: (step_seconds, busy) for device, (step_seconds, busy) in rows}
        for paths, axes, (digests, differ, _) in results:
            bad = np.flatnonzero(np.asarray(differ))
            if bad.size:
                every = fetch(digests).reshape(*mesh.devices.shape, len(paths), 2)
                for k in bad:
                    last = [mesh.axis_names.index(axis) for axis in axes[k]]
                    copies = math.prod(mesh.devices.shape[i] for i in last)
                    ends = range(-len(last), 0)  # each row has the devices with the same shard
                    rows = np.moveaxis(every[..., k, :], last, [i - 1 for i in ends]).reshape(-1, copies, 2)
                    of = _differing(rows, np.moveaxis(mesh.devices, last, ends).reshape(-1, copies))
                    faults.append(Fault(paths[k], self._dims[paths[k]], *of, copies, self._clean, step))
        if repeated is not None:
            path, digests = repeated[0], np.asarray(repeated[1][0])
            by = (np.arange(mesh.size)[:, None] + np.arange(digests.shape[1])) % mesh.size
            of = _differing(digests, mesh.devices.reshape(-1)[by])
            faults += [Fault(path, self._dims[path], *of, digests.shape[1], self._clean, step, True)] if of[0] else []
        self._clean = self._clean if faults else step
        return faults


def _differing(digests: np.ndarray, devices: np.ndarray) -> tuple[tuple[Any, ...], bool]:
    """(devices whose copy differs from the majority, or all of a row without a majority; whether each row has a majority).

    Args:
      digests: uint32 [shards, copies, 2]; devices: [shards, copies].
    """
    found, certain = dict[Any, None](), True
    for values, row in zip(digests.astype(np.uint64) @ np.array([1 << 32, 1], np.uint64), devices, strict=True):
        distinct, counts = np.unique(values, return_counts=True)
        if len(distinct) > 1:
            majority = 2 * counts.max() > len(row)
            certain = certain and bool(majority)
            odd = [d for d, x in zip(row, values, strict=True) if not (majority and x == distinct[counts.argmax()])]
            found |= dict.fromkeys(odd)
    return tuple(found), certain


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise a DigestError that names the devices and arrays of these faults, if there are any."""
    if faults:
        first, more = faults[0], f"; and {len(faults) - 1} more arrays" * (len(faults) > 1)
        safe = "of an earlier step" if first.after is None else f"of step {first.after} or before"
        check = "mp.check finds a step that computes replicas differently"
        fixes = [f"restart from a checkpoint {safe}, without these devices", check]
        what = "results of a repeated matmul" if first.repeated else "copies of an array on the devices"
        raise DigestError(f"{what} differ: {first}{more}", path=first.path, dims=first.dims, fixes=fixes)

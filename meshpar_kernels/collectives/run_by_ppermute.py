"""Execution of tables by `jax.lax.ppermute`: pure JAX, on any platform.

All sends of a step read the buffer before the received slots are written, so XLA can start them together. Slots that
form one box of the buffer are sliced, not gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels.collectives.schedule_table import Table, Transfer


def axes_and_sizes(axis_name: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The mesh axes of the surrounding `shard_map`, as a tuple, and their sizes."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return axes, tuple(lax.axis_size(a) for a in axes)


def rank_of(axes: Sequence[str]) -> jax.Array:
    """int32 []: this device's rank in the group, row-major in `axes`."""
    rank = jnp.int32(0)
    for axis in axes:
        rank = rank * lax.axis_size(axis) + lax.axis_index(axis)
    return rank


def in_mesh_order(axes: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """(the axes in the order of the mesh, each rank's index in that order). JAX numbers the ends of a `ppermute` in
    mesh order, whatever the order of the names."""
    names = tuple(a for a in jax.sharding.get_abstract_mesh().axis_names if a in axes)
    sizes = [lax.axis_size(a) for a in names]
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes).transpose([names.index(a) for a in axes])
    return names, numbers.ravel().tolist()


class Window:
    """The slots of every rank as a box of the buffer: in each dim one index, or all of them.

    Attributes:
      starts: int32 [A, dims], the first index of each rank's box.
      sizes: its extent in each dim.
    """

    def __init__(self, starts: np.ndarray, sizes: tuple[int, ...]):
        self.starts, self.sizes = starts, sizes


def window(slots: np.ndarray, shape: tuple[int, ...]) -> Window | None:
    """The boxes that contain exactly `slots` int [A, w] of a buffer of this shape, in order; None if they are no boxes."""
    coords = np.stack(np.unravel_index(slots, shape), axis=-1)
    starts = coords[:, 0]
    extents = coords.max(1) - coords.min(1) + 1
    sizes = tuple(extents[0].tolist())
    if (extents != extents[0]).any() or int(np.prod(sizes)) != slots.shape[1]:
        return None
    box = np.stack(np.unravel_index(np.arange(slots.shape[1]), sizes), axis=-1)
    if not np.array_equal(coords, starts[:, None] + box[None]):
        return None
    return Window(starts.astype(np.int32), sizes)


@functools.lru_cache(maxsize=4096)
def _windows(transfer: Transfer, shape: tuple[int, ...]) -> tuple[Window | None, Window | None]:
    into = transfer.received()
    return window(transfer.slots, shape), window(np.maximum(into, 0), shape) if (into >= 0).all() else None


def _read(buffer: jax.Array, slots: np.ndarray, box: Window | None, rank: jax.Array, dims: int) -> jax.Array:
    """The slots of this rank: [*box, ...], or [w, ...] if they are no box."""
    rest = buffer.shape[dims:]
    if box is None:
        flat = buffer.reshape(-1, *rest)
        return jnp.take(flat, jnp.asarray(slots, jnp.int32)[rank], axis=0)
    starts = jnp.asarray(box.starts)[rank]
    return lax.dynamic_slice(buffer, (*starts, *[0] * len(rest)), (*box.sizes, *rest))


def _write(
    buffer: jax.Array, new: jax.Array, slots: np.ndarray, box: Window | None, rank: jax.Array, dims: int
) -> jax.Array:
    """The buffer with the slots of this rank replaced by `new`, as a box if they are one; slot -1 means that nothing
    was received."""
    rest = buffer.shape[dims:]
    if box is not None:
        starts = jnp.asarray(box.starts)[rank]
        return lax.dynamic_update_slice(buffer, new.reshape(*box.sizes, *rest), (*starts, *[0] * len(rest)))
    flat = buffer.reshape(-1, *rest)
    own_slots = jnp.asarray(slots, jnp.int32)[rank]  # -1: nothing received
    flat = flat.at[jnp.where(own_slots < 0, len(flat), own_slots)].set(new.reshape(-1, *rest), mode="drop")
    return flat.reshape(buffer.shape)


@functools.lru_cache(maxsize=64)
def _passed_on(table: Table) -> dict[tuple[int, int], tuple[int, int]]:
    """{(step, number) of a transfer: (step, number) of an earlier one} for transfers that forward exactly the received
    slots, unmodified.

    Such a transfer need not be read from the buffer. If its content is a partial sum, it need not have been written
    either.
    """
    came: dict[bytes, tuple[int, int] | None] = {}  # None: the sum of several transfers
    found = {}
    for step, transfers in enumerate(table.steps):
        for number, t in enumerate(transfers):
            at = came.get(t.slots.tobytes())
            if at is not None:
                found[step, number] = at
        arriving = [t.received() for t in transfers]
        for number, slots in enumerate(arriving):
            # also if some ranks of a line receive nothing: the others' slots have changed
            came = {k: v for k, v in came.items() if not _overlap(slots, _slots_of(k, slots))}
            if (slots >= 0).all():
                alone = all(k == number or not _overlap(slots, other) for k, other in enumerate(arriving))
                came[slots.tobytes()] = (step, number) if alone else None
    return found


def _slots_of(key: bytes, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(key, like.dtype).reshape(len(like), -1)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether some rank has a slot in both."""
    return bool((a[:, :, None] == b[:, None, :]).any())


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b; sums of narrow floats are computed in float32 and rounded once."""
    if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4:
        return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)
    return a + b


def run(table: Table, buffer: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Execute a table.

    Args:
      table: the schedule; its ranks are the devices of `axes`, row-major.
      buffer: [slots, ...] of this device at the start. In an all-gather only the device's own slots are read.
      axes: mesh axes of the surrounding `shard_map`.

    Returns:
      [slots, ...] at the end: all blocks (all-gather), the reduced blocks in the device's own slots (reduce-scatter) or
        in all slots
      (all-reduce).
    """
    shape = (*table.sizes, table.chunks)
    dims = len(shape)
    rest = buffer.shape[1:]
    rank = rank_of(axes)
    names, number = in_mesh_order(axes)
    (buffer,) = _compat.varying_over(axes, buffer.reshape(*shape, *rest))
    passed_on = _passed_on(table)
    saved: dict[tuple[int, int], jax.Array] = {}
    used = set(passed_on.values())
    forwarded = {origin for (step, k), origin in passed_on.items() if table.steps[step][k].add}
    for step, transfers in enumerate(table.steps):
        arrived = []
        for k, t in enumerate(transfers):
            source, into = _windows(t, shape)
            before = passed_on.get((step, k))
            sent = saved.pop(before) if before in saved else _read(buffer, t.slots, source, rank, dims)
            arrived.append((t, into, lax.ppermute(sent, names, [(number[a], number[b]) for a, b in t.pairs])))
        for k, (t, into, new) in enumerate(arrived):
            slots = t.received()
            if t.add:
                own_slots = _read(buffer, np.maximum(slots, 0), into, rank, dims)
                new = _sum(own_slots, new.reshape(own_slots.shape))
            if (step, k) in used:
                saved[step, k] = new
            if not t.add or (step, k) not in forwarded:  # a forwarded partial sum is not read on this device
                buffer = _write(buffer, new, slots, into, rank, dims)
    return buffer.reshape(table.slots, *rest)

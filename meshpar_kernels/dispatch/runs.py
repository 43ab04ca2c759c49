"""Runs of contiguous rows that devices send each other: offsets and sizes of the sent and received runs, as integer arrays.

The caller gives the offsets. Runs are clipped to the buffers, and one small all-to-all tells each device the sizes that it will
receive; the gradient sends the same runs in reverse.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Axes = str | tuple[str, ...]


class Runs(NamedTuple):
    """The runs that one device sends to each device, and receives from each; all int32 [devices].

    Attributes:
      start, size, target: rows `start[i]` … `start[i] + size[i] - 1` go to device i, to its rows from `target[i]` on.
      recv_start, recv_size, source: device i sends this device `recv_size[i]` rows, its own from `source[i]` on; they are
        written from row `recv_start[i]` on.
    """

    start: jax.Array
    size: jax.Array
    target: jax.Array
    recv_start: jax.Array
    recv_size: jax.Array
    source: jax.Array

    def back(self) -> Runs:
        """The reverse exchange: received runs are sent, and sent runs are received."""
        return Runs(self.recv_start, self.recv_size, self.source, self.start, self.size, self.target)


def clip(
    start: jax.Array, size: jax.Array, target: jax.Array, *, rows: int, sends: int, receives: int
) -> tuple[jax.Array, jax.Array]:
    """(rows of each run that fit, int32 [devices]; number of rows of all runs that do not fit, int32 []).

    Args:
      start, size, target: as requested.
      rows: longest run that is allowed.
      sends, receives: rows of the operand and of the output. A run ends where one of them ends; one that would begin before
        the first row of either is left out.
    """
    limit = jnp.minimum(sends - start, receives - target)
    limit = jnp.where((start < 0) | (target < 0), 0, jnp.clip(limit, 0, rows))
    sent = jnp.clip(size, 0, limit).astype(jnp.int32)
    return sent, (jnp.maximum(size, 0) - sent).sum(dtype=jnp.int32)


def sent_twice(start: jax.Array, size: jax.Array) -> jax.Array:
    """bool []: whether two of these runs have a row in common."""
    end, some = start + size, size > 0
    common = (start[:, None] < end[None, :]) & (start[None, :] < end[:, None]) & some[:, None] & some[None, :]
    return (common & ~jnp.eye(len(start), dtype=bool)).any()


def agree(start: jax.Array, size: jax.Array, target: jax.Array, axis_name: Axes) -> tuple[Runs, Runs, jax.Array]:
    """Exchange offsets and sizes, so that each device knows which runs it receives.

    Args:
      start, size, target: int32 [devices], of this device's runs, which fit.
      axis_name: mesh axes of the group.

    Returns:
      (runs, reverse runs, bool [] whether this device sends a row twice). The gradient of a row that was sent twice is a sum,
      which no copy computes: the reverse runs of such a device are empty.
    """
    twice = sent_twice(start, size)
    returned = jnp.where(twice, 0, size)
    sent_info = jnp.stack([target, size, start, returned], 1).astype(jnp.int32)
    recv_start, recv_size, source, returns = lax.all_to_all(sent_info, axis_name, 0, 0, tiled=True).T
    runs = Runs(sent_info[:, 2], sent_info[:, 1], sent_info[:, 0], recv_start, recv_size, source)
    return runs, runs._replace(size=returned, recv_size=returns).back(), twice


def covered(recv_start: jax.Array, recv_size: jax.Array, rows: int) -> jax.Array:
    """bool [rows]: the rows of the output that are received from some device."""
    edges = jnp.zeros(rows + 1, jnp.int32).at[recv_start].add(jnp.where(recv_size > 0, 1, 0), mode="drop")
    edges = edges.at[recv_start + recv_size].add(jnp.where(recv_size > 0, -1, 0), mode="drop")
    return jnp.cumsum(edges)[:rows] > 0

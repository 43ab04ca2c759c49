"""The blocks that a bidirectional ring sends in each ring step, for gathering and, in reverse, for scattering.

With A devices, full blocks travel ``(A-1)//2`` hops in each direction. If A is even, the block of the opposite device is still
missing: it travels one more hop, half of it in each direction. Two devices send one block, once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hop", "full_hops", "gather_hops", "scatter_hops", "split_rows"]


@dataclass(frozen=True, slots=True)
class Hop:
    """Sends alike.

    Attributes:
      rows: of the block, along the dim that is gathered or scattered.
      count: how many such sends each device makes.
    """

    rows: int
    count: int


def full_hops(devices: int) -> int:
    """Number of hops that a full block travels in each direction."""
    return (devices - 1) // 2


def split_rows(devices: int, rows: int) -> tuple[int, int] | None:
    """(rows of the opposite block that go up, rows that go down); None: there is no opposite block, or it is not cut."""
    if devices % 2 or devices == 2 or rows < 2:
        return None
    return rows - rows // 2, rows // 2


def gather_hops(devices: int, rows: int) -> list[Hop]:
    """What each device sends to gather blocks of ``rows`` rows from every device.

    ``Σ rows·count = (devices - 1)·rows``: the bytes of an all-gather.
    """
    hops = [Hop(rows, 2 * full_hops(devices))] if devices > 2 else []
    if devices % 2 == 0:
        half = split_rows(devices, rows)
        if half is None:
            hops.append(Hop(rows, 1))
        elif half[0] == half[1]:
            hops.append(Hop(half[0], 2))
        else:
            hops += [Hop(n, 1) for n in half]
    return [Hop(rows, sum(h.count for h in hops if h.rows == rows)) for rows in dict.fromkeys(h.rows for h in hops)]


def scatter_hops(devices: int, rows: int) -> list[Hop]:
    """What each device sends to sum blocks of ``rows`` rows from every device into one on each: as :func:`gather_hops`."""
    return gather_hops(devices, rows)

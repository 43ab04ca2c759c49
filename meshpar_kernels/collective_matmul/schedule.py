"""The blocks that a bidirectional ring sends in each ring step, for gathering and, in reverse, for scattering.

With A devices, full blocks are sent ``(A-1)//2`` hops in each direction. If A is even, the block of the opposite device
is still missing: it is sent one more hop, half of it in each direction. Two devices send one block, once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """Sends of equal size.

    Attributes:
      rows: rows of the sent block, along the dim that is gathered or scattered.
      count: number of such sends of each device.
    """

    rows: int
    count: int


def full_hops(devices: int) -> int:
    """Number of hops that a full block is sent in each direction."""
    return (devices - 1) // 2


def split_rows(devices: int, rows: int) -> tuple[int, int] | None:
    """(rows of the opposite device's block that are sent up, rows sent down); None: there is no such block, or it is
    not split."""
    if devices % 2 or devices == 2 or rows < 2:
        return None
    return rows - rows // 2, rows // 2


def gather_hops(devices: int, rows: int) -> list[Hop]:
    """The sends of each device in an all-gather of blocks of ``rows`` rows.

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

"""The barrier semaphores of the kernels that talk to other devices.

Two kernels that may run at the same time must not share one, and the compiler does not notice when they do, or when a kernel
has none: so each takes its number here.
"""

from __future__ import annotations

__all__ = ["COLLECTIVE_IDS"]

_KERNELS = (
    "all_reduce_small",
    "ring_all_gather",
    "ring_reduce_scatter",
    "all_gather_matmul",
    "matmul_reduce_scatter",
)

COLLECTIVE_IDS: dict[str, int] = {name: number for number, name in enumerate(_KERNELS, start=8)}
"""Kernel → `collective_id`. They begin at 8, so that a program's own kernels can have the lower ones."""

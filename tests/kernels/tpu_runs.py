"""Every TPU kernel that talks to other devices on `tpu_machine`, with numbers that float32 adds exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_runs import F16, F32, draw, same
from kernel_machine import PLAIN, Machine, Schedule
from tpu_machine import Tpus

from meshpar_kernels.collective_matmul import tpu_gather, tpu_scatter
from meshpar_kernels.collective_matmul.tpu import Tile
from meshpar_kernels.collectives import ring_tpu
from meshpar_kernels.collectives import tpu as small
from meshpar_kernels.collectives.table import table_of
from meshpar_kernels.dispatch import tpu as exchange
from meshpar_kernels.dispatch.runs import Runs
from meshpar_kernels.exchange import tpu as dense

AXES = "abc"


def ring(
    kind: str, schedule: Schedule = PLAIN, dropped: str | None = None, *, sizes: tuple[int, ...] = (4,)
) -> Machine:
    """`all_gather` or `reduce_scatter` that follows its table."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    table = table_of(kind, sizes, (True,) * len(sizes))
    tpus = Tpus(sizes, axes, schedule, dropped)
    colours = table.slots // devices
    before, ring_tpu.TILE_BYTES = ring_tpu.TILE_BYTES, 8 * 128 * 4  # three blocks to add
    try:
        if kind == "all_gather":
            x = draw(0, devices, colours, 24, 128, dtype=F32)
            found = tpus.run(lambda r: ring_tpu.all_gather(table, x[r], axes))
            for rank, (out, *_) in enumerate(found):
                same(out.reshape(x.shape), x, f"all_gather on device {rank}")
        else:
            x = draw(0, devices, devices, colours, 24, 128, dtype=F32)
            found = tpus.run(lambda r: ring_tpu.reduce_scatter(table, x[r].reshape(-1, 24, 128), axes))
            for rank, (out, *_) in enumerate(found):
                same(out.reshape(x.shape[1:])[rank], x.sum(0)[rank], f"reduce_scatter on device {rank}")
    finally:
        ring_tpu.TILE_BYTES = before
    return tpus.machine


def all_reduce(schedule: Schedule = PLAIN, dropped: str | None = None, *, sizes: tuple[int, ...] = (3,)) -> Machine:
    """`all_reduce_small`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    x = draw(0, devices, 10, 128, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    found = tpus.run(lambda r: small.all_reduce_small(x[r], axes, sizes))
    for rank, (out, *_) in enumerate(found):
        same(out.reshape(-1)[: x[0].size].reshape(x[0].shape), x.sum(0), f"all_reduce_small on device {rank}")
    return tpus.machine


def ragged(
    schedule: Schedule = PLAIN, dropped: str | None = None, *, devices: int = 3, seed: int = 0, given: bool = True
) -> Machine:
    """The exchange of runs of random length, some of them empty, into an array that holds other rows."""
    sizes = np.random.default_rng(seed).integers(0, 12, (devices, devices))  # by sender and receiver
    sizes[0, 1] = 0
    x = draw(1, devices, int(sizes.sum(1).max()) + 1, 1, 128, dtype=F32)
    start, target = np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes
    rows_each = int(sizes.sum(0).max()) + 2
    other = draw(2, devices, rows_each, 1, 128, dtype=F32)
    tpus = Tpus((devices,), "a", schedule, dropped)
    before, exchange.BLOCK_BYTES = exchange.BLOCK_BYTES, 4 * 128 * 4  # blocks of four rows

    def send(r: int) -> Any:
        runs: Any = Runs(start[r], sizes[r], target[r], target[:, r], sizes[:, r], start[:, r])  # pyright: ignore[reportArgumentType]
        return exchange.send(x[r], other[r] if given else None, rows_each, runs, ("a",), (devices,))  # pyright: ignore[reportArgumentType]

    try:
        found = tpus.run(send)
    finally:
        exchange.BLOCK_BYTES = before
    for rank, (out, *_) in enumerate(found):
        came = np.concatenate([x[s, start[s, rank] : start[s, rank] + sizes[s, rank]] for s in range(devices)])
        want = other[rank].copy()
        want[: len(came)] = came
        same(out if given else out[: len(came)], want if given else came, f"ragged_all_to_all on device {rank}")
    return tpus.machine


def all_to_all(schedule: Schedule = PLAIN, dropped: str | None = None, *, sizes: tuple[int, ...] = (3,)) -> Machine:
    """The dense `all_to_all`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    x = draw(0, devices, devices, 4, 128, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    found = tpus.run(lambda r: dense.all_to_all(x[r], axes, sizes))
    for rank, (out, *_) in enumerate(found):
        same(out, x[:, rank], f"all_to_all on device {rank}")
    return tpus.machine


def permute(
    schedule: Schedule = PLAIN, dropped: str | None = None, *, pairs: Any = ((0, 1), (1, 0), (2, 2))
) -> Machine:  # fmt: skip
    """`collective_permute` of three devices."""
    x = draw(0, 3, 4, 128, dtype=F32)
    tpus = Tpus((3,), "a", schedule, dropped)
    found = tpus.run(lambda r: dense.collective_permute(x[r], ("a",), (3,), pairs))
    source = {t: s for s, t in pairs}
    for rank, (out, *_) in enumerate(found):
        want = x[source[rank]] if rank in source else np.zeros_like(x[0])
        same(out, want, f"collective_permute on device {rank}")
    return tpus.machine


def gather(
    schedule: Schedule = PLAIN, dropped: str | None = None, *, sizes: tuple[int, ...] = (6,), keep: bool = False
) -> Machine:
    """`all_gather_matmul`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    rows, k, n, tile = 32, 128, 256, Tile(16, 128)
    x, w = draw(0, devices, rows, k, dtype=F32), draw(1, devices, k, n, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    options = {"tile": tile, "out_dtype": F32, "transposed": False, "precision": None, "keep": keep}
    found = tpus.run(lambda r: tpu_gather.all_gather_matmul(x[r], w[r], axes, **options))
    whole = x.reshape(-1, k)
    for rank, (out, _, *kept) in enumerate(found):
        same(out, whole @ w[rank], f"all_gather_matmul on device {rank}")
        for rows_here in kept:
            same(rows_here, whole, f"the rows of all_gather_matmul on device {rank}")
    return tpus.machine


def scatter(
    schedule: Schedule = PLAIN, dropped: str | None = None, *, sizes: tuple[int, ...] = (6,), wire: Any = F32
) -> Machine:
    """`matmul_reduce_scatter`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    rows, k, n, tile = 32, 128, 256, Tile(16, 128)
    x, w = draw(0, devices, devices * rows, k, dtype=F32), draw(1, devices, k, n, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    options = {"tile": tile, "out_dtype": F32, "comm_dtype": wire, "transposed": False, "precision": None}
    found = tpus.run(lambda r: tpu_scatter.matmul_reduce_scatter(x[r], w[r], axes, **options))
    total = sum(x[r] @ w[r] for r in range(devices))
    for rank, (out, *_) in enumerate(found):
        same(out, total[rank * rows : (rank + 1) * rows], f"matmul_reduce_scatter on device {rank}")
    return tpus.machine


def kernels() -> dict[str, Callable[..., Machine]]:
    """Name → a run that goes through every line of the kernel, as (schedule, dropped)."""
    return {
        "all_gather": functools.partial(ring, "all_gather", sizes=(8,)),
        "reduce_scatter": functools.partial(ring, "reduce_scatter", sizes=(8,)),
        "all_reduce_small": all_reduce,
        "ragged_all_to_all": ragged,
        "all_to_all": all_to_all,
        "collective_permute": permute,
        "all_gather_matmul": gather,
        "matmul_reduce_scatter": scatter,
    }


__all__ = ["F16", "F32", "all_reduce", "all_to_all", "gather", "kernels", "permute", "ragged", "ring", "scatter"]

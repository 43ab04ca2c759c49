"""Every TPU kernel that talks to other devices on `tpu_machine`, with numbers that float32 adds exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
from gpu_runs import F32, RandomExchange, draw, same, same_on_each
from kernel_machine import PLAIN, Machine
from tpu_machine import Tpus

from meshpar_kernels.collective_matmul import tpu_gather, tpu_scatter
from meshpar_kernels.collective_matmul.tpu_common import Tile
from meshpar_kernels.collectives import ring_tpu
from meshpar_kernels.collectives import tpu_one_shot_all_reduce as small
from meshpar_kernels.collectives.schedule_table import table_of
from meshpar_kernels.dispatch import tpu as exchange
from meshpar_kernels.exchange import tpu as dense

AXES = "abc"


def ring(kind, schedule=PLAIN, dropped=None, *, sizes=(4,)) -> Machine:
    """`all_gather` or `reduce_scatter` that follows its table."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    table = table_of(kind, sizes, (True,) * len(sizes))
    tpus = Tpus(sizes, axes, schedule, dropped)
    colours = table.slots // devices
    with mock.patch.object(ring_tpu, "TILE_BYTES", 8 * 128 * 4):  # three blocks to add
        if kind == "all_gather":
            x = draw(0, devices, colours, 24, 128, dtype=F32)
            found = tpus.run(lambda r: ring_tpu.all_gather(table, x[r], axes))
            same_on_each(found, np.broadcast_to(x, (devices, *x.shape)), kind)
        else:
            x = draw(0, devices, devices, colours, 24, 128, dtype=F32)
            found = tpus.run(lambda r: ring_tpu.reduce_scatter(table, x[r].reshape(-1, 24, 128), axes))
            own = [(np.reshape(out, x.shape[1:])[rank],) for rank, (out, *_) in enumerate(found)]
            same_on_each(own, x.sum(0), kind)
    return tpus.machine


def all_reduce(schedule=PLAIN, dropped=None, *, sizes=(3,)) -> Machine:
    """`all_reduce_small`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    x = draw(0, devices, 10, 128, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    found = tpus.run(lambda r: small.all_reduce_small(x[r], axes, sizes))
    sums = [(out.reshape(-1)[: x[0].size],) for out, *_ in found]
    same_on_each(sums, np.broadcast_to(x.sum(0), x.shape), "all_reduce_small")
    return tpus.machine


def ragged(schedule=PLAIN, dropped=None, *, devices=3) -> Machine:
    """The exchange of runs of random length, into an array that holds other rows."""
    sent = RandomExchange(devices, 0, 12)
    other = draw(2, devices, sent.rows, 1, 128, dtype=F32)
    tpus = Tpus((devices,), "a", schedule, dropped)

    def send(r: int) -> Any:
        return exchange.send(sent.x[r], other[r], sent.rows, sent.runs[r], ("a",), (devices,))  # pyright: ignore[reportArgumentType]

    with mock.patch.object(exchange, "BLOCK_BYTES", 4 * 128 * 4):  # blocks of four rows
        found = tpus.run(send)
    for (out, *_), rows, rest in zip(found, sent.received, other, strict=True):
        same(out[: len(rows)], rows, "ragged_all_to_all")
        same(out[len(rows) :], rest[len(rows) :], "rows that nobody sends")
    return tpus.machine


def all_to_all(schedule=PLAIN, dropped=None, *, sizes=(3,)) -> Machine:
    """The dense `all_to_all`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    x = draw(0, devices, devices, 4, 128, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    same_on_each(tpus.run(lambda r: dense.all_to_all(x[r], axes, sizes)), x.swapaxes(0, 1), "all_to_all")
    return tpus.machine


def permute(schedule=PLAIN, dropped=None, *, pairs=((0, 1), (1, 0), (2, 2))) -> Machine:
    """`collective_permute` of three devices."""
    x = draw(0, 3, 4, 128, dtype=F32)
    tpus = Tpus((3,), "a", schedule, dropped)
    want = np.zeros_like(x)
    for source, target in pairs:
        want[target] = x[source]
    same_on_each(tpus.run(lambda r: dense.collective_permute(x[r], ("a",), (3,), pairs)), want, "collective_permute")
    return tpus.machine


def gather(schedule=PLAIN, dropped=None, *, sizes=(6,), keep=False) -> Machine:
    """`all_gather_matmul`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    rows, k, n, tile = 32, 128, 256, Tile(16, 128)
    x, w = draw(0, devices, rows, k, dtype=F32), draw(1, devices, k, n, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    options = {"tile": tile, "out_dtype": F32, "transposed": False, "precision": None, "keep": keep}
    found = tpus.run(lambda r: tpu_gather.all_gather_matmul(x[r], w[r], axes, **options))
    whole = x.reshape(-1, k)
    same_on_each(found, whole @ w, "all_gather_matmul")
    for _, _, *kept in found:
        for rows_here in kept:
            same(rows_here, whole, "the rows of all_gather_matmul")
    return tpus.machine


def scatter(schedule=PLAIN, dropped=None, *, sizes=(6,), wire=F32) -> Machine:
    """`matmul_reduce_scatter`."""
    axes, devices = tuple(AXES[: len(sizes)]), math.prod(sizes)
    rows, k, n, tile = 32, 128, 256, Tile(16, 128)
    x, w = draw(0, devices, devices * rows, k, dtype=F32), draw(1, devices, k, n, dtype=F32)
    tpus = Tpus(sizes, axes, schedule, dropped)
    options = {"tile": tile, "out_dtype": F32, "comm_dtype": wire, "transposed": False, "precision": None}
    found = tpus.run(lambda r: tpu_scatter.matmul_reduce_scatter(x[r], w[r], axes, **options))
    same_on_each(found, (x @ w).sum(0).reshape(devices, rows, n), "matmul_reduce_scatter")
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

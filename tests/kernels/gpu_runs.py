"""Every Mosaic GPU kernel on `gpu_machine`, with numbers that float32 adds exactly: a result is right, or it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
from gpu_machine import Gpus
from kernel_machine import PLAIN, Fault, Machine

from meshpar_kernels.collective_matmul import gpu as fused
from meshpar_kernels.collective_matmul import gpu_blackwell, gpu_hopper, gpu_kernels
from meshpar_kernels.collectives import gpu_nvls_gather_and_scatter as nvls
from meshpar_kernels.collectives import gpu_one_shot_all_reduce as small
from meshpar_kernels.dispatch import gpu as exchange
from meshpar_kernels.dispatch.runs import Runs
from meshpar_kernels.grouped_matmul import blackwell, hopper, hopper_scaled
from meshpar_kernels.grouped_matmul.gpu_common import Tile
from meshpar_kernels.grouped_matmul.problem import MatmulProblem, TransposeProblem

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
GROUPED = {"hopper": hopper, "blackwell": blackwell}
TILE = Tile(128, 64, 64, 3)
FUSED = {"hopper": gpu_hopper, "blackwell": gpu_blackwell}


def draw(seed: int, *shape: int, dtype: Any = F16) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def same(found: Any, wanted: Any, what: str) -> None:
    """A fault of kind "value" if any element differs; NaN is a difference."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    wrong = ~np.isclose(found, wanted, rtol=2**-9, atol=0)  # of float16, where a function of a sum is rounded
    if wrong.any():
        raise Fault("value", f"{what}: {wrong.sum()} of {wrong.size} elements, the first at {np.argwhere(wrong)[0]}")


def same_on_each(found: list[Any], wanted: Any, what: str) -> None:
    """`same` of the first result of every device, and what is wanted there."""
    for rank, ((out, *_), want) in enumerate(zip(found, wanted, strict=True)):
        same(np.reshape(out, np.shape(want)), want, f"{what} on device {rank}")


class RandomExchange:
    """Runs of random length from every device to every device, some of them empty.

    Attributes:
      sizes: int [sender, receiver].
      x: [sender, rows, 1, 128].
      rows: of the array that a device receives.
      runs: of each device.
      received: rows that arrive at each device.
    """

    def __init__(self, devices: int, seed: int, most: int):
        self.sizes = sizes = np.random.default_rng(seed).integers(0, most, (devices, devices))
        sizes[0, 1] = 0
        self.x = draw(1, devices, int(sizes.sum(1).max()) + 1, 1, 128, dtype=F32)
        self.rows = int(sizes.sum(0).max()) + 2
        start, target = np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes
        ranks = range(devices)
        self.runs: Any = [Runs(start[r], sizes[r], target[r], target[:, r], sizes[:, r], start[:, r]) for r in ranks]
        parts = [[self.x[s, start[s, r] : start[s, r] + sizes[s, r]] for s in ranks] for r in ranks]
        self.received = [np.concatenate(part) for part in parts]


def matmul(
    module, sizes, schedule=PLAIN, dropped=None, *, rows=256, k=128, n=128, num_sms=2, tile=TILE, activation=None, gated=False,
    transpose_rhs=False, scaled=False, group_offset=None, out=F16,
) -> Machine:  # fmt: skip
    """`grouped_matmul`, with NaN in the rows of no group."""
    groups = len(sizes) - (group_offset or 0)
    lhs = draw(0, rows, k)
    lhs[min(max(sum(np.maximum(sizes, 0)), 0), rows) :] = np.nan
    shape = (groups, n, k) if transpose_rhs else (groups, k, n)
    rhs = (draw(1, *shape), draw(3, *shape))[: 1 + gated]
    scale = 2.0 ** draw(2, rows, dtype=F32) if scaled else None
    gpus = Gpus(1, schedule, dropped)
    offset = None if group_offset is None else jnp.int32(group_offset)
    options = {"transpose_rhs": transpose_rhs, "activation": activation}
    problem = MatmulProblem(lhs, rhs, jnp.asarray(sizes), offset, scale, out_dtype=out, **options)
    ((found,),) = gpus.run(lambda _: module.grouped_matmul(problem, tile=tile, num_sms=num_sms))
    want = oracle.grouped_matmul(lhs, rhs, sizes, **options, row_scale=scale, group_offset=group_offset or 0)
    same(found, want.astype(out), "grouped_matmul")
    return gpus.machine


def scaled(sizes, schedule=PLAIN, dropped=None, *, rows=256, k=384, n=256, num_sms=2, dtype="int8") -> Machine:
    """`scaled_grouped_matmul` with two stages, scales that are powers of two, and NaN as the scale of rows of no group."""
    groups, used = len(sizes), min(sum(np.maximum(sizes, 0)), rows)
    lhs, rhs = draw(0, rows, k, dtype=F32), draw(1, groups, n, k, dtype=F32)
    lhs_scale = 2.0 ** draw(2, rows, k // 128, dtype=F32)
    rhs_scale = 2.0 ** draw(3, groups, n // 128, k // 128, dtype=F32)
    wide = rhs * np.repeat(np.repeat(rhs_scale, 128, 1), 128, 2)
    want = oracle.grouped_matmul(lhs * np.repeat(lhs_scale, 128, 1), wide, sizes, transpose_rhs=True)
    lhs_scale[used:] = np.nan
    gpus = Gpus(1, schedule, dropped)
    codes = jnp.dtype(dtype)
    operands = lhs.astype(codes), lhs_scale, rhs.astype(codes), rhs_scale, jnp.asarray(sizes), None
    with mock.patch.object(hopper_scaled, "TILE", hopper_scaled.TILE._replace(stages=2)):
        ((found,),) = gpus.run(lambda _: hopper_scaled.grouped_matmul(*operands, out_dtype=F32, num_sms=num_sms))
    same(found[:rows], want, "scaled_grouped_matmul")
    return gpus.machine


def transpose(module, sizes, schedule=PLAIN, dropped=None, *, rows=256, k=128, n=128, num_sms=2, tile=TILE) -> Machine:
    """`grouped_matmul_transpose`, with NaN in the rows of no group."""
    lhs, rhs = draw(0, rows, k), draw(1, rows, n)
    used = min(sum(np.maximum(sizes, 0)), rows)
    lhs[used:], rhs[used:] = np.nan, np.nan
    gpus = Gpus(1, schedule, dropped)
    problem = TransposeProblem(lhs, rhs, jnp.asarray(sizes), groups=len(sizes), out_dtype=F16)
    ((out,),) = gpus.run(lambda _: module.grouped_matmul_transpose(problem, tile=tile, num_sms=num_sms))
    same(out, oracle.grouped_matmul_transpose(lhs, rhs, sizes), "grouped_matmul_transpose")
    return gpus.machine


def gather(
    module, schedule=PLAIN, dropped=None, *, devices=3, rows=72, k=128, n=64, num_sms=2, transposed=False, multiprocessors=None,
    tile=None,
) -> Machine:  # fmt: skip
    """`all_gather_matmul` on all devices."""
    x, w = draw(0, devices, rows, k), draw(1, devices, *((n, k) if transposed else (k, n)))
    order = fused.gather_order(rows, k, n, devices, 2)
    order = order if tile is None else order._replace(tile=tile)
    gpus = Gpus(devices, schedule, dropped, multiprocessors)
    options = {"transposed": transposed, "out_dtype": F16, "num_sms": num_sms}
    found = gpus.run(lambda r: gpu_kernels.all_gather_matmul(module, x[r], w[r], order, "a", **options))
    wide = w.astype(float).swapaxes(1, 2) if transposed else w.astype(float)
    same_on_each(found, x.reshape(-1, k).astype(float) @ wide, "all_gather_matmul")
    return gpus.machine


def scatter(
    module, schedule=PLAIN, dropped=None, *, devices=3, rows=72, k=128, n=128, num_sms=2, wire=F16, transposed=False, tile=None
) -> Machine:  # fmt: skip
    """`matmul_reduce_scatter` on all devices, with `rows` rows for each."""
    x, w = draw(0, devices, devices, rows, k), draw(1, devices, *((n, k) if transposed else (k, n)))
    dtypes = {"comm_dtype": wire, "out_dtype": F32}
    order = fused.scatter_order(rows, k, n, devices, 2, **dtypes)
    order = order if tile is None else order._replace(tile=tile)
    gpus = Gpus(devices, schedule, dropped)
    options = {"transposed": transposed, "num_sms": num_sms, **dtypes}
    found = gpus.run(lambda r: gpu_kernels.matmul_reduce_scatter(module, x[r], w[r], order, "a", **options))
    wide = w.astype(float).swapaxes(1, 2) if transposed else w.astype(float)
    same_on_each(found, sum(x[r].astype(float) @ wide[r] for r in range(devices)), "matmul_reduce_scatter")
    return gpus.machine


def all_reduce(schedule=PLAIN, dropped=None, *, devices=3, blocks=2) -> Machine:
    """`all_reduce_small` on all devices: three pieces for two blocks. Sums are in order, bit for bit."""
    x = np.random.default_rng(0).normal(size=(devices, 3 * 2048 - 100)).astype(F32)
    gpus = Gpus(devices, schedule, dropped)
    with mock.patch.object(small, "BLOCKS", blocks):
        found = gpus.run(lambda r: small.all_reduce_small(x[r], ("a",), (devices,)))
    want = functools.reduce(np.add, x)
    for rank, (out, *_) in enumerate(found):
        if not np.array_equal(out[: x.shape[1]], want):
            raise Fault("value", f"all_reduce_small on device {rank}")
    return gpus.machine


def switch(kind, schedule=PLAIN, dropped=None, *, devices=3, blocks=2) -> Machine:
    """`all_gather` or `reduce_scatter` by the NVLink switch: three chunks for two blocks."""
    elements = 3 * nvls.THREADS * nvls.VECTORS * 4
    gpus = Gpus(devices, schedule, dropped)
    if kind == "all_gather":
        x = draw(0, devices, elements, dtype=np.dtype(np.int32))
        body, shape, want = nvls._gather_kernel, x.shape, np.broadcast_to(x, (devices, *x.shape))
    else:
        x = draw(0, devices, devices, elements, dtype=F32)
        body, shape, want = nvls._scatter_kernel, (elements,), x.sum(0)
    with mock.patch.object(nvls, "BLOCKS", blocks):
        found = gpus.run(lambda r: nvls._call(body, "nvls", x[r], shape, ("a",), (devices,)))
    same_on_each(found, want, kind)
    return gpus.machine


def ragged(schedule=PLAIN, dropped=None, *, devices=3, blocks=2, seed=0) -> Machine:
    """The exchange of runs of random length, into an array that nobody has written."""
    given = RandomExchange(devices, seed, 15)
    gpus = Gpus(devices, schedule, dropped)
    send = lambda r: exchange.send(given.x[r], given.rows, 1, given.runs[r], ("a",), (devices,), blocks)  # noqa: E731
    for rank, (out, *_) in enumerate(gpus.run(send, once=False)):
        want = np.full((given.rows, 1, 128), np.nan)
        want[: len(given.received[rank])] = given.received[rank]
        if not np.array_equal(out.reshape(want.shape), want, equal_nan=True):
            raise Fault("value", f"ragged_all_to_all on device {rank}")
    return gpus.machine


def kernels() -> dict[str, Callable[..., Machine]]:
    """Name → a run that goes through every line of the kernel, as (schedule, dropped)."""
    found: dict[str, Callable[..., Machine]] = {}
    tile = Tile(128, 192, 64, 2)  # results leave in three chunks, through two slots; as few stages as there may be
    for name, module in GROUPED.items():
        options = {"k": 192, "n": 256, "tile": tile}
        found[f"grouped_matmul, {name}"] = functools.partial(matmul, module, [128, 9, 0, 100], **options)
        found[f"grouped_matmul_transpose, {name}"] = functools.partial(
            transpose, module, [70, 0, 60, 77], n=256, tile=tile
        )
    options = {"n": 384, "tile": tile._replace(cluster=2)}
    found["grouped_matmul, hopper in clusters"] = functools.partial(matmul, hopper, [128, 9, 0, 100], **options)
    options = {"n": 256, "tile": Tile(128, 256, 64, 2, cluster=2)}
    found["grouped_matmul, blackwell in clusters"] = functools.partial(matmul, blackwell, [128, 9, 0, 100], **options)
    found["grouped_matmul_transpose, blackwell in clusters"] = functools.partial(
        transpose, blackwell, [70, 0, 60, 77], k=256, **options
    )
    for cluster, name in ((1, "ping-pong"), (2, "ping-pong in clusters")):
        options = {"k": 256, "tile": Tile(128, 128, 64, 4, cluster, pingpong=True)}
        run = functools.partial(transpose, hopper, [70, 0, 60, 77], **options)
        found[f"grouped_matmul_transpose, hopper {name}"] = run
    found["scaled_grouped_matmul"] = functools.partial(scaled, [128, 9, 0, 100])
    for name, module in FUSED.items():
        options = {"k": 192, "n": 384, "tile": tile}
        if name == "blackwell":  # whose warps are threads of their own
            options |= {"devices": 2, "num_sms": 1}
        found[f"all_gather_matmul, {name}"] = functools.partial(gather, module, **options)
        found[f"matmul_reduce_scatter, {name}"] = functools.partial(scatter, module, **options)
    found |= {kind: functools.partial(switch, kind) for kind in ("all_gather", "reduce_scatter")}
    return found | {"all_reduce_small": all_reduce, "ragged_all_to_all": ragged}

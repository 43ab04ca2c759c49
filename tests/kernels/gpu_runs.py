"""Every Mosaic GPU kernel on `gpu_machine`, with numbers that float32 adds exactly: a result is right, or it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
from gpu_machine import Gpus
from kernel_machine import PLAIN, Fault, Machine, Schedule

from meshpar_kernels.collective_matmul import gpu as fused
from meshpar_kernels.collective_matmul import gpu_blackwell, gpu_fused, gpu_hopper
from meshpar_kernels.collectives import gpu as small
from meshpar_kernels.collectives import nvls
from meshpar_kernels.dispatch import gpu as exchange
from meshpar_kernels.dispatch.runs import Runs
from meshpar_kernels.grouped_matmul import blackwell, hopper, hopper_scaled
from meshpar_kernels.grouped_matmul.gpu_parts import Tile
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


def matmul(
    module: Any, sizes: list[int], schedule: Schedule = PLAIN, dropped: str | None = None, *,
    rows: int = 256, k: int = 128, n: int = 128, num_sms: int = 2, tile: Tile = TILE, activation: Any = None, gated: bool = False,
    transpose_rhs: bool = False, scaled: bool = False, group_offset: int | None = None, out: Any = F16,
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


def scaled(
    sizes: list[int], schedule: Schedule = PLAIN, dropped: str | None = None, *,
    rows: int = 256, k: int = 384, n: int = 256, num_sms: int = 2, dtype: Any = "int8",
) -> Machine:  # fmt: skip
    """`scaled_grouped_matmul` with two stages, scales that are powers of two, and NaN as the scale of rows of no group."""
    groups, used = len(sizes), min(sum(np.maximum(sizes, 0)), rows)
    lhs, rhs = draw(0, rows, k, dtype=F32), draw(1, groups, n, k, dtype=F32)
    lhs_scale = 2.0 ** draw(2, rows, k // 128, dtype=F32)
    rhs_scale = 2.0 ** draw(3, groups, n // 128, k // 128, dtype=F32)
    wide = rhs * np.repeat(np.repeat(rhs_scale, 128, 1), 128, 2)
    want = oracle.grouped_matmul(lhs * np.repeat(lhs_scale, 128, 1), wide, sizes, transpose_rhs=True)
    lhs_scale[used:] = np.nan
    gpus = Gpus(1, schedule, dropped)
    before, hopper_scaled.TILE = hopper_scaled.TILE, hopper_scaled.TILE._replace(stages=2)
    codes = jnp.dtype(dtype)
    try:
        ((found,),) = gpus.run(
            lambda _: hopper_scaled.grouped_matmul(
                lhs.astype(codes), lhs_scale, rhs.astype(codes), rhs_scale, jnp.asarray(sizes), None, out_dtype=F32,
                num_sms=num_sms,
            )
        )  # fmt: skip
    finally:
        hopper_scaled.TILE = before
    same(found[:rows], want, "scaled_grouped_matmul")
    return gpus.machine


def transpose(
    module: Any, sizes: list[int], schedule: Schedule = PLAIN, dropped: str | None = None, *,
    rows: int = 256, k: int = 128, n: int = 128, num_sms: int = 2, tile: Tile = TILE,
) -> Machine:  # fmt: skip
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
    module: Any, schedule: Schedule = PLAIN, dropped: str | None = None, *,
    devices: int = 3, rows: int = 72, k: int = 128, n: int = 64, num_sms: int = 2, transposed: bool = False,
    multiprocessors: Any = None, tile: Tile | None = None,
) -> Machine:  # fmt: skip
    """`all_gather_matmul` on all devices."""
    x, w = draw(0, devices, rows, k), draw(1, devices, *((n, k) if transposed else (k, n)))
    order = fused.gather_order(rows, k, n, devices, 2)
    order = order if tile is None else order._replace(tile=tile)
    gpus = Gpus(devices, schedule, dropped, multiprocessors)
    options = {"transposed": transposed, "out_dtype": F16, "num_sms": num_sms}
    found = gpus.run(lambda r: gpu_fused.all_gather_matmul(module, x[r], w[r], order, "a", **options))
    for rank, (out, *_) in enumerate(found):
        weights = w[rank].astype(float)
        want = x.reshape(-1, k).astype(float) @ (weights.T if transposed else weights)
        same(out.reshape(devices * rows, n), want, f"all_gather_matmul on device {rank}")
    return gpus.machine


def scatter(
    module: Any, schedule: Schedule = PLAIN, dropped: str | None = None, *,
    devices: int = 3, rows: int = 72, k: int = 128, n: int = 128, num_sms: int = 2, wire: Any = F16,
    transposed: bool = False, tile: Tile | None = None,
) -> Machine:  # fmt: skip
    """`matmul_reduce_scatter` on all devices, with `rows` rows for each."""
    x, w = draw(0, devices, devices, rows, k), draw(1, devices, *((n, k) if transposed else (k, n)))
    dtypes = {"comm_dtype": wire, "out_dtype": F32}
    order = fused.scatter_order(rows, k, n, devices, 2, **dtypes)
    order = order if tile is None else order._replace(tile=tile)
    gpus = Gpus(devices, schedule, dropped)
    options = {"transposed": transposed, "num_sms": num_sms, **dtypes}
    found = gpus.run(lambda r: gpu_fused.matmul_reduce_scatter(module, x[r], w[r], order, "a", **options))
    wide = w.astype(float).swapaxes(1, 2) if transposed else w.astype(float)
    total = sum(x[r].astype(float) @ wide[r] for r in range(devices))
    for rank, (out, *_) in enumerate(found):
        same(out, total[rank], f"matmul_reduce_scatter on device {rank}")
    return gpus.machine


def all_reduce(schedule: Schedule = PLAIN, dropped: str | None = None, *, devices: int = 3, blocks: int = 2) -> Machine:
    """`all_reduce_small` on all devices: three pieces for two blocks. Sums are in order, bit for bit."""
    x = np.random.default_rng(0).normal(size=(devices, 3 * 2048 - 100)).astype(F32)
    gpus = Gpus(devices, schedule, dropped)
    before, small.BLOCKS = small.BLOCKS, blocks
    try:
        found = gpus.run(lambda r: small.all_reduce_small(x[r], ("a",), (devices,)))
    finally:
        small.BLOCKS = before
    want = functools.reduce(np.add, x)
    for rank, (out, *_) in enumerate(found):
        if not np.array_equal(out[: x.shape[1]], want):
            raise Fault("value", f"all_reduce_small on device {rank}")
    return gpus.machine


def switch(
    kind: str, schedule: Schedule = PLAIN, dropped: str | None = None, *, devices: int = 3, blocks: int = 2
) -> Machine:  # fmt: skip
    """`all_gather` or `reduce_scatter` by the NVLink switch: three chunks for two blocks."""
    elements = 3 * nvls.THREADS * nvls.VECTORS * 4
    gpus = Gpus(devices, schedule, dropped)
    before, nvls.BLOCKS = nvls.BLOCKS, blocks
    try:
        if kind == "all_gather":
            x = draw(0, devices, elements, dtype=np.dtype(np.int32))
            how = nvls._gather_kernel, "nvls", (devices, elements)
            found = gpus.run(lambda r: nvls._call(how[0], how[1], x[r], how[2], ("a",), (devices,)))
        else:
            x = draw(0, devices, devices, elements, dtype=F32)
            found = gpus.run(lambda r: nvls._call(nvls._scatter_kernel, "nvls", x[r], (elements,), ("a",), (devices,)))
    finally:
        nvls.BLOCKS = before
    for rank, (out, *_) in enumerate(found):
        same(out, x if kind == "all_gather" else x[:, rank].sum(0), f"{kind} on device {rank}")
    return gpus.machine


def ragged(
    schedule: Schedule = PLAIN, dropped: str | None = None, *, devices: int = 3, blocks: int = 2, seed: int = 0,
    most: int = 15,
) -> Machine:  # fmt: skip
    """The exchange of runs of random length, some of them empty."""
    sizes = np.random.default_rng(seed).integers(0, most, (devices, devices))  # by sender and receiver
    sizes[0, 1] = 0
    x = draw(1, devices, int(sizes.sum(1).max()) + 1, 1, 128, dtype=F32)
    start = np.cumsum(sizes, 1) - sizes
    target = np.cumsum(sizes, 0) - sizes
    rows_each = int(sizes.sum(0).max()) + 2
    gpus = Gpus(devices, schedule, dropped)

    def send(r: int) -> Any:
        runs = Runs(start[r], sizes[r], target[r], target[:, r], sizes[:, r], start[:, r])  # pyright: ignore[reportArgumentType]
        return exchange.send(x[r], rows_each, 1, runs, ("a",), (devices,), blocks)  # pyright: ignore[reportArgumentType]

    for rank, (out, *_) in enumerate(gpus.run(send, once=False)):
        recv_buffer = [x[s, start[s, rank] : start[s, rank] + sizes[s, rank], 0] for s in range(devices)]
        want = np.full((rows_each, 128), np.nan)
        want[: sizes[:, rank].sum()] = np.concatenate(recv_buffer)
        if not np.array_equal(out.reshape(rows_each, 128), want, equal_nan=True):
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

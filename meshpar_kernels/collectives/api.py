"""Collectives over one or several torus axes: checks, choice of algorithm, gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import devices_on, dispatch, refuse_sharded
from meshpar_kernels.collectives import gpu, native, nvls, ppermute, ring_tpu, tpu
from meshpar_kernels.collectives.table import table_of

__all__ = ["ALGORITHMS", "Algorithm", "all_gather", "all_reduce", "all_reduce_small", "reduce_scatter"]

Algorithm = Literal["native", "staged", "coloured", "hierarchical", "ring", "pallas"]

ALGORITHMS: tuple[str, ...] = Algorithm.__args__
TABLES = ("ring", "pallas")


def all_gather(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    implementation: Algorithm | None = None,
    rings: Sequence[bool] | None = None,
    outer: Sequence[str] = (),
) -> jax.Array:
    """All-gather of blocks along a dim, over one or several mesh axes. Call it inside `jax.shard_map`.

    Implementations, with the same result:

    - "native": XLA's collective over all axes at once.
    - "staged": XLA's collective over one axis after another (BlueConnect, Cho et al. 2019).
    - "coloured": each block in as many shares as there are axes, each "staged" in a rotated order.
    - "hierarchical": as "staged", but the axes of `outer` (between slices) carry as few bytes as possible.
    - "ring": bidirectional rings of `ppermute` along each axis. With n axes the block is cut into n chunks ("colours"),
      which use the axes in rotated orders, so that the links of all axes are busy (Mikami et al. 2018, for two dims). An
      axis that does not wrap around is run as a line.
    - "pallas": on TPUs, the same rings in one kernel, by remote DMA, which XLA overlaps with nothing else. On GPUs
      (sm_90a, sm_100a), multicast stores by the NVLink switch (NVLS): each GPU sends its block once, to the switch. The
      axes are all of the mesh, of at most 8 GPUs. Limit: (A - 1)/A of the result over the rate at which a GPU receives.
      No device has timed it.

    `choose` estimates which one is the fastest.

    Args:
      x: [..., m, ...], this device's block, any dtype.
      axis_name: the mesh axis, or several, major first.
      axis: the dim that grows.
      implementation: as above; None: "native".
      rings: whether each mesh axis wraps around on the torus; None: all do.
      outer: the mesh axes between slices, for "hierarchical".

    Returns:
      [..., A·m, ...], blocks in the order of the devices. Differentiable: the transpose is a `reduce_scatter` by the
      same implementation.

    Raises:
      ValueError: unknown implementation, axes or options that do not fit, or x sharded outside of `shard_map`.
      NotImplementedError: "pallas" cannot run these arguments; with every reason.
    """
    op = "all_gather"
    axes, sizes, rings = _check(op, x, axis_name, axis, implementation, rings, outer)
    moved: Any = jnp.moveaxis(x, axis, 0)
    if axes:
        moved = _gather(implementation or "native", axes, sizes, rings, tuple(outer), moved)
    return jnp.moveaxis(moved, 0, axis)


def reduce_scatter(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    implementation: Algorithm | None = None,
    rings: Sequence[bool] | None = None,
    outer: Sequence[str] = (),
) -> jax.Array:
    """Reduce-scatter: the sum over all devices, of which each device gets one block. Call it inside `jax.shard_map`.

    For TPUs, XLA compiles "native" over several torus dims to an all-reduce of the full-size array, with twice the
    bytes and all of it in memory; the other implementations do not have this cost.

    Args:
      x: [..., A·m, ...]. Sums of bfloat16 and float16 are computed in float32 and rounded once at every hop, except in
        XLA's own collectives. With "pallas" on GPUs the NVLink switch adds them up in float32, in an unspecified order,
        and rounds once; each GPU receives its block only. Limit: 1/A of x over that rate, or all of x over the rate at
        which a GPU sends.
      axis_name, axis, implementation, rings, outer: as in `all_gather`.

    Returns:
      [..., m, ...]. Differentiable: the transpose is an `all_gather` by the same implementation.

    Raises:
      ValueError: as `all_gather`; or the dim is no multiple of the number of devices.
    """
    op = "reduce_scatter"
    axes, sizes, rings = _check(op, x, axis_name, axis, implementation, rings, outer)
    if x.shape[axis] % math.prod(sizes):
        raise ValueError(
            f"{op}: dimension {axis} of x{list(x.shape)} is no multiple of the {math.prod(sizes)} devices of "
            f"{', '.join(axes)}; pad it"
        )
    moved: Any = jnp.moveaxis(x, axis, 0)
    if axes:
        moved = _scatter(implementation or "native", axes, sizes, rings, tuple(outer), moved)
    return jnp.moveaxis(moved, 0, axis)


def all_reduce(
    x: jax.Array,
    axis_name: str | Sequence[str],
    *,
    implementation: Algorithm | None = None,
    rings: Sequence[bool] | None = None,
    outer: Sequence[str] = (),
) -> jax.Array:
    """All-reduce: the sum over all devices, by a reduce-scatter and an all-gather. Call it inside `jax.shard_map`.

    Args:
      x: any shape, the same on all devices; padded with zeros to a multiple of the block if necessary.
      axis_name, implementation, rings, outer: as in `all_gather`. With "hierarchical" only blocks scattered over the
        inner axes are sent over the outer axes.

    Returns:
      The sum, in x's shape and dtype; bit-identical on all devices, except with XLA's own algorithms. Differentiable:
        the transpose is an
      `all_reduce` too.

    Raises:
      ValueError: as `all_gather`.
    """
    axes, sizes, rings = _check("all_reduce", x, axis_name, None, implementation, rings, outer)
    if not axes:
        return x
    (x,) = _compat.varying_over(axes, x)
    reduced: Any = _reduce(implementation or "native", axes, sizes, rings, tuple(outer), x)
    return reduced


def all_reduce_small(x: jax.Array, axis_name: str | Sequence[str], *, implementation: str | None = None) -> jax.Array:
    """All-reduce of a small array in one step: every device sends its array to all others. Call it inside
    `jax.shard_map`.

    Each device adds up the arrays in the order of the ranks, in float32 (integers in their own dtype), and rounds once.
    The result is bit-identical on all devices and with every implementation. Each device sends A - 1 times the array,
    which is fastest if latency dominates: the algorithm "small" of `choose`.

    Args:
      x: any shape, the same on all devices; the kernels take float32, bfloat16 or int32 of at most 4 MiB, and on TPUs
        if the arrays of all devices fit VMEM.
      axis_name: the mesh axis, or several, major first.
      implementation: "pallas": the kernel of the platform. "pallas_tpu": remote copies from VMEM to VMEM. "pallas_gpu":
        at most 8 GPUs (sm_90a, sm_100a), which write to each other over NVLink. "gather": XLA's all-gather and a local
        sum. None: "gather", unless `MESHPAR_KERNELS=pallas`.

    Returns:
      The sum, in x's shape and dtype. Differentiable: the transpose is an `all_reduce_small` too.

    Raises:
      ValueError: axes that do not fit, an unknown implementation, or x sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot take x; with every reason.
    """
    axes, sizes, _ = _check("all_reduce_small", x, axis_name, None, None, None, ())
    if not axes or not x.size:
        return x
    (x,) = _compat.varying_over(axes, x)
    small: Any = _small(implementation, axes, sizes, x)
    return small


def _small_now(implementation, axes, sizes, x):
    """`all_reduce_small` of x by the chosen implementation."""
    functions = {
        "pallas_tpu": tpu.small_unsupported(x.shape, x.dtype, math.prod(sizes), axes)
        or (lambda v: tpu.all_reduce_small(v, axes, sizes)),
        "pallas_gpu": gpu.small_unsupported(x.shape, x.dtype, math.prod(sizes), axes)
        or (lambda v: gpu.all_reduce_small(v, axes, sizes)),
        "gather": functools.partial(native.gather_sum, axes=axes),
    }
    return _compat.invariant_over(axes, dispatch("all_reduce_small", implementation, functions, "gather", x))


def _check(
    op: str, x: Any, axis_name: str | Sequence[str], axis: int | None, implementation: str | None,
    rings: Sequence[bool] | None, outer: Sequence[str],
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[bool, ...]]:  # fmt: skip
    """(axes, sizes, whether they wrap around) of the axes with more than one device. Raises ValueError for invalid
    arguments."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if implementation not in (None, *ALGORITHMS):
        raise ValueError(f"{op}: no implementation {implementation!r}; there are {', '.join(map(repr, ALGORITHMS))}")
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis_name must be one mesh axis or several different ones, got {axis_name!r}")
    if rings is not None and len(rings) != len(axes):
        raise ValueError(f"{op}: rings says of {len(rings)} axes whether they wrap around; there are {len(axes)}")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: x{list(x.shape)} has no dimension {axis}")
    inside = [a for a in outer if a not in axes]
    if inside or (implementation == "hierarchical") != bool(outer):
        raise ValueError(
            f"{op}: implementation='hierarchical' needs outer=, the slow axes among {list(axes)}, and no other "
            f"takes it; got outer={list(outer)}, implementation={implementation!r}"
        )
    refuse_sharded(op, x=x)
    sizes = [devices_on(op, "x", a) for a in axes]
    wraps = [True] * len(axes) if rings is None else [bool(r) for r in rings]
    saved = [k for k, n in enumerate(sizes) if n > 1]
    return tuple(axes[k] for k in saved), tuple(sizes[k] for k in saved), tuple(wraps[k] for k in saved)


def _whole(algorithm: str, axes, outer) -> bool:
    """Whether all axes are outer, or none is, so that a hierarchical collective has no order to choose."""
    return algorithm == "hierarchical" and len({a in outer for a in axes}) == 1


def _by_xla(kind: str, algorithm: str, x, axes, outer) -> jax.Array:
    """The collective by XLA's operations, by the algorithm of this name."""
    if algorithm == "native" or (kind == "all_reduce" and _whole(algorithm, axes, outer)):
        return native.native(kind, x, axes)
    if algorithm == "staged" or _whole(algorithm, axes, outer):
        return native.staged(kind, x, axes)
    if algorithm == "coloured":
        return native.coloured(kind, x, axes)
    return native.hierarchical(kind, x, axes, outer)


def _gather_now(algorithm, axes, sizes, rings, outer, x, op="all_gather"):
    """The all-gather of x [n, …] → [A·n, …], by a table (ring, kernel) or by XLA's operations; errors name `op`."""
    if algorithm not in TABLES:
        return _by_xla("all_gather", algorithm, x, axes, outer)
    if algorithm == "pallas":
        return _by_kernel("all_gather", axes, sizes, rings, x, op)
    return _gather_by_table(algorithm, axes, sizes, rings, x)


def _gather_by_table(algorithm, axes, sizes, rings, x):
    """The all-gather by "ring", or by the TPU kernel ("pallas")."""
    table = table_of("all_gather", sizes, rings)
    own = _cut(x[None], table.chunks, algorithm)[0]
    if algorithm == "pallas":
        every = ring_tpu.all_gather(table, own, axes)
    else:
        # every slot is written before it is read
        (buffer,) = _compat.varying_over(axes, lax.empty((table.ranks, *own.shape), x.dtype))
        buffer, own = _compat.same_varying(buffer, own)
        start = (ppermute.rank_of(axes), *[0] * own.ndim)
        buffer = lax.dynamic_update_slice(buffer, own[None], start)
        every = ppermute.run(table, buffer.reshape(table.slots, *own.shape[1:]), axes)
    return _joined(every, table.chunks, x.shape).reshape(-1, *x.shape[1:])


def _scatter_now(algorithm, axes, sizes, rings, outer, x, op="reduce_scatter"):
    """The reduce-scatter of x [A·n, …] → [n, …], by a table (ring, kernel) or by XLA's operations; errors name `op`."""
    if algorithm not in TABLES:
        return _by_xla("reduce_scatter", algorithm, x, axes, outer)
    if algorithm == "pallas":
        return _by_kernel("reduce_scatter", axes, sizes, rings, x, op)
    return _scatter_by_table(algorithm, axes, sizes, rings, x)


def _scatter_by_table(algorithm, axes, sizes, rings, x):
    """The reduce-scatter by "ring", or by the TPU kernel ("pallas")."""
    table = table_of("reduce_scatter", sizes, rings)
    block = (x.shape[0] // table.ranks, *x.shape[1:])
    blocks = _cut(x.reshape(table.ranks, *block), table.chunks, algorithm)
    slots = blocks.reshape(table.slots, *blocks.shape[2:])
    run = ring_tpu.reduce_scatter if algorithm == "pallas" else ppermute.run
    summed = run(table, slots, axes).reshape(blocks.shape)
    own = lax.dynamic_index_in_dim(summed, ppermute.rank_of(axes), keepdims=False)
    return _joined(own, table.chunks, block)[0]


def _reduce_now(algorithm, axes, sizes, rings, outer, x):
    """The all-reduce of x; the kernel runs it as a reduce-scatter and an all-gather."""
    if algorithm not in TABLES:
        return _compat.invariant_over(axes, _by_xla("all_reduce", algorithm, x, axes, outer))
    if algorithm == "pallas":
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % math.prod(sizes)))
        part = _scatter_now(algorithm, axes, sizes, rings, outer, flat, "all_reduce")
        summed = _gather_now(algorithm, axes, sizes, rings, outer, part, "all_reduce")
    else:
        table = table_of("all_reduce", sizes, rings)
        flat = x.reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % table.slots))
        summed = ppermute.run(table, flat.reshape(table.slots, -1), axes).reshape(-1)
    return _compat.invariant_over(axes, summed[: x.size].reshape(x.shape))


def _by_kernel(kind: str, axes, sizes, rings, x: jax.Array, op: str) -> jax.Array:
    """The all-gather or reduce-scatter of x by the Pallas kernel of the platform. Raises, naming `op`, where it cannot run."""
    gathers = kind == "all_gather"
    table = table_of(kind, sizes, rings)
    blocks = x[None] if gathers else x.reshape(table.ranks, x.shape[0] // table.ranks, *x.shape[1:])
    part = jax.eval_shape(lambda b: _cut(b, table.chunks, "pallas"), blocks).shape[2:]
    by_table = _gather_by_table if gathers else _scatter_by_table
    by_switch = nvls.all_gather if gathers else nvls.reduce_scatter
    functions = {
        "pallas_tpu": ring_tpu.unsupported(table, part, x.dtype, axes)
        or functools.partial(by_table, "pallas", axes, sizes, rings),
        "pallas_gpu": nvls.unsupported(kind, x.dtype, axes, table.ranks) or (lambda x: by_switch(x, axes, sizes)),
    }
    return dispatch(op, "pallas", functions, "pallas_tpu", x)


def _cut(blocks: jax.Array, chunks: int, algorithm: str) -> jax.Array:
    """[n, *block] → [n, chunks, ...]: each block cut into `chunks` parts; for the kernel, each part is [rows, columns].

    Rows are padded to equal parts where that costs little; else a block is flattened to one row, which copies it.
    """
    n = len(blocks)
    kernel = algorithm == "pallas"
    pack = 32 // blocks.dtype.itemsize
    if kernel and blocks.ndim > 2 and blocks.shape[-1] % 128 == 0:
        blocks = blocks.reshape(n, -1, blocks.shape[-1])
    unit = chunks * (pack if kernel else 1)
    fits = blocks.ndim == 3 and blocks.shape[-1] % 128 == 0 if kernel else blocks.ndim > 1
    if fits and (blocks.shape[1] % unit == 0 or blocks.shape[1] >= 8 * unit):
        rows = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % unit), *[(0, 0)] * (blocks.ndim - 2)))
        return rows.reshape(n, chunks, -1, *rows.shape[2:])
    flat = blocks.reshape(n, -1)
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % (unit * 128 if kernel else chunks))))
    return flat.reshape(n, chunks, -1, 128) if kernel else flat.reshape(n, chunks, -1)


def _joined(parts: jax.Array, chunks: int, block: tuple[int, ...]) -> jax.Array:
    """[n·chunks, ...] → [n, *block]: the inverse of `_cut`."""
    n = len(parts) // chunks
    if parts.ndim > 2 and parts.shape[-1] == block[-1]:  # rows, perhaps of several dimensions
        rows = parts.reshape(n, -1, *parts.shape[2:])
        wanted = math.prod(block) // math.prod(rows.shape[2:])
        return rows[:, :wanted].reshape(n, *block)
    return parts.reshape(n, -1)[:, : math.prod(block)].reshape(n, *block)


# --- gradients: each op is linear; its transpose is an op of this module --------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _gather(algorithm, axes, sizes, rings, outer, x):
    return _gather_now(algorithm, axes, sizes, rings, outer, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _scatter(algorithm, axes, sizes, rings, outer, x):
    return _scatter_now(algorithm, axes, sizes, rings, outer, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _reduce(algorithm, axes, sizes, rings, outer, x):
    return _reduce_now(algorithm, axes, sizes, rings, outer, x)


_gather.defvjp(lambda *a: (_gather(*a), None), lambda *a: (_scatter(*a[:5], a[6]),))
_scatter.defvjp(lambda *a: (_scatter(*a), None), lambda *a: (_gather(*a[:5], a[6]),))


def _reduce_bwd(algorithm, axes, sizes, rings, outer, _, grad):
    """Gradient of the addend. With varying types the cotangent of the (invariant) sum is the cotangent of every addend;
    with `check_vma=False` each device has its own part of it, and the parts are summed."""
    if _compat.has_varying_types(axes[0]):
        return _compat.varying_over(axes, grad)
    return (_reduce(algorithm, axes, sizes, rings, outer, grad),)


_reduce.defvjp(lambda *a: (_reduce(*a), None), _reduce_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _small(implementation, axes, sizes, x):
    return _small_now(implementation, axes, sizes, x)


def _small_bwd(implementation, axes, sizes, _, grad):
    """As `_reduce_bwd`."""
    if _compat.has_varying_types(axes[0]):
        return _compat.varying_over(axes, grad)
    return (_small(implementation, axes, sizes, grad),)


_small.defvjp(lambda *a: (_small(*a), None), _small_bwd)

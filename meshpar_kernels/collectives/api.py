"""Collectives over one or several torus axes: checks, choice of algorithm, gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import devices_on, dispatch, refuse_sharded
from meshpar_kernels.collectives import gpu_nvls_gather_and_scatter as nvls
from meshpar_kernels.collectives import gpu_one_shot_all_reduce as gpu
from meshpar_kernels.collectives import native, ring_tpu
from meshpar_kernels.collectives import run_by_ppermute as ppermute
from meshpar_kernels.collectives import tpu_one_shot_all_reduce as tpu
from meshpar_kernels.collectives.schedule_table import table_of

Algorithm = Literal["native", "staged", "hierarchical", "ring", "pallas"]

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
    how = _check("all_gather", x, axis_name, axis, implementation, rings, outer)
    moved: Any = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(_collective(how, moved) if how.axes else moved, 0, axis)


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
    how = _check(op, x, axis_name, axis, implementation, rings, outer)
    if x.shape[axis] % how.devices:
        raise ValueError(
            f"{op}: dimension {axis} of x{list(x.shape)} is no multiple of the {how.devices} devices of "
            f"{', '.join(how.axes)}; pad it"
        )
    moved: Any = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(_collective(how, moved) if how.axes else moved, 0, axis)


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
    how = _check("all_reduce", x, axis_name, None, implementation, rings, outer)
    if not how.axes:
        return x
    (x,) = _compat.varying_over(how.axes, x)
    reduced: Any = _collective(how, x)
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
    axes, sizes = group("all_reduce_small", x, axis_name)
    if not axes or not x.size:
        return x
    (x,) = _compat.varying_over(axes, x)
    small: Any = _small(implementation, axes, sizes, x)
    return small


class _How(NamedTuple):
    """Static arguments of a collective.

    Attributes:
      kind: "all_gather", "reduce_scatter" or "all_reduce".
      algorithm: its implementation.
      axes, sizes, rings: the mesh axes of more than one device, their sizes, and whether they wrap around.
      outer: the axes between slices.
      op: name of the public function, for errors.
    """

    kind: str
    algorithm: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rings: tuple[bool, ...]
    outer: tuple[str, ...]
    op: str

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)


def group(op: str, x: Any, axis_name: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(axes, sizes) of the mesh axes with more than one device. Raises ValueError for invalid axes."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"{op}: axis_name must be one mesh axis or several different ones, got {axis_name!r}")
    refuse_sharded(op, x=x)
    sizes = {a: devices_on(op, "x", a) for a in axes}
    found = {a: n for a, n in sizes.items() if n > 1}
    return tuple(found), tuple(found.values())


def _check(
    op: str, x: Any, axis_name: str | Sequence[str], axis: int | None, implementation: str | None,
    rings: Sequence[bool] | None, outer: Sequence[str],
) -> _How:  # fmt: skip
    """The static arguments. Raises ValueError for invalid arguments."""
    every = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if implementation not in (None, *ALGORITHMS):
        raise ValueError(f"{op}: no implementation {implementation!r}; there are {', '.join(map(repr, ALGORITHMS))}")
    if rings is not None and len(rings) != len(every):
        raise ValueError(f"{op}: rings says of {len(rings)} axes whether they wrap around; there are {len(every)}")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: x{list(x.shape)} has no dimension {axis}")
    if not set(outer) <= set(every) or (implementation == "hierarchical") != bool(outer):
        raise ValueError(
            f"{op}: implementation='hierarchical' needs outer=, the slow axes among {list(every)}, and no other "
            f"takes it; got outer={list(outer)}, implementation={implementation!r}"
        )
    axes, sizes = group(op, x, axis_name)
    wraps = dict(zip(every, rings or [True] * len(every), strict=True))
    return _How(op, implementation or "native", axes, sizes, tuple(bool(wraps[a]) for a in axes), tuple(outer), op)


def _by_xla(how: _How, x: jax.Array) -> jax.Array:
    """The collective by XLA's operations."""
    # all axes are outer, or none is: there is no order to choose
    alike = how.algorithm == "hierarchical" and len({a in how.outer for a in how.axes}) == 1
    if how.algorithm == "native" or (how.kind == "all_reduce" and alike):
        return native.native(how.kind, x, how.axes)
    if how.algorithm == "staged" or alike:
        return native.staged(how.kind, x, how.axes)
    return native.hierarchical(how.kind, x, how.axes, how.outer)


def _gather_by_table(how: _How, x: jax.Array) -> jax.Array:
    """The all-gather of x [n, …] → [A·n, …] by "ring", or by the TPU kernel ("pallas")."""
    table = table_of("all_gather", how.sizes, how.rings)
    own = _cut(x[None], table.chunks, how.algorithm)[0]
    if how.algorithm == "pallas":
        every = ring_tpu.all_gather(table, own, how.axes)
    else:
        # every slot is written before it is read
        (buffer,) = _compat.varying_over(how.axes, lax.empty((table.ranks, *own.shape), x.dtype))
        buffer, own = _compat.same_varying(buffer, own)
        start = (ppermute.rank_of(how.axes), *[0] * own.ndim)
        buffer = lax.dynamic_update_slice(buffer, own[None], start)
        every = ppermute.run(table, buffer.reshape(table.slots, *own.shape[1:]), how.axes)
    return _joined(every, table.chunks, x.shape).reshape(-1, *x.shape[1:])


def _scatter_by_table(how: _How, x: jax.Array) -> jax.Array:
    """The reduce-scatter of x [A·n, …] → [n, …] by "ring", or by the TPU kernel ("pallas")."""
    table = table_of("reduce_scatter", how.sizes, how.rings)
    block = (x.shape[0] // table.ranks, *x.shape[1:])
    blocks = _cut(x.reshape(table.ranks, *block), table.chunks, how.algorithm)
    slots = blocks.reshape(table.slots, *blocks.shape[2:])
    run = ring_tpu.reduce_scatter if how.algorithm == "pallas" else ppermute.run
    summed = run(table, slots, how.axes).reshape(blocks.shape)
    own = lax.dynamic_index_in_dim(summed, ppermute.rank_of(how.axes), keepdims=False)
    return _joined(own, table.chunks, block)[0]


def _reduced(how: _How, x: jax.Array) -> jax.Array:
    """The all-reduce of x; the kernel runs it as a reduce-scatter and an all-gather."""
    if how.algorithm not in TABLES:
        return _by_xla(how, x)
    table = table_of("all_reduce", how.sizes, how.rings)
    flat = x.reshape(-1)
    if how.algorithm == "pallas":
        flat = jnp.pad(flat, (0, -flat.size % how.devices))
        part = _by_kernel(how._replace(kind="reduce_scatter"), flat)
        summed = _by_kernel(how._replace(kind="all_gather"), part)
    else:
        flat = jnp.pad(flat, (0, -flat.size % table.slots))
        summed = ppermute.run(table, flat.reshape(table.slots, -1), how.axes).reshape(-1)
    return summed[: x.size].reshape(x.shape)


def _by_kernel(how: _How, x: jax.Array) -> jax.Array:
    """The all-gather or reduce-scatter of x by the Pallas kernel of the platform. Raises, naming `op`, where it cannot run."""
    gathers = how.kind == "all_gather"
    table = table_of(how.kind, how.sizes, how.rings)
    blocks = x[None] if gathers else x.reshape(table.ranks, x.shape[0] // table.ranks, *x.shape[1:])
    part = jax.eval_shape(lambda b: _cut(b, table.chunks, "pallas"), blocks).shape[2:]
    by_table = _gather_by_table if gathers else _scatter_by_table
    by_switch = nvls.all_gather if gathers else nvls.reduce_scatter
    functions = {
        "pallas_tpu": ring_tpu.unsupported(table, part, x.dtype, how.axes) or functools.partial(by_table, how),
        "pallas_gpu": nvls.unsupported(how.kind, x.dtype, how.axes, table.ranks)
        or (lambda x: by_switch(x, how.axes, how.sizes)),
    }
    return dispatch(how.op, "pallas", functions, "pallas_tpu", x)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _collective(how: _How, x: jax.Array) -> jax.Array:
    """The collective of x along its first dim, by a table ("ring"), a kernel ("pallas") or XLA's operations."""
    if how.kind == "all_reduce":
        return _compat.invariant_over(how.axes, _reduced(how, x))
    if how.algorithm == "pallas":
        return _by_kernel(how, x)
    by_table = _gather_by_table if how.kind == "all_gather" else _scatter_by_table
    return by_table(how, x) if how.algorithm == "ring" else _by_xla(how, x)


def _collective_bwd(how: _How, _: None, grad: jax.Array) -> Any:
    if how.kind == "all_reduce":
        return _of_addend(how.axes, lambda g: _collective(how, g), grad)
    kind = "all_gather" if how.kind == "reduce_scatter" else "reduce_scatter"
    return (_collective(how._replace(kind=kind, op=kind), grad),)


def _of_addend(axes: tuple[str, ...], reduce: Callable[[jax.Array], Any], grad: jax.Array) -> tuple[Any, ...]:
    """Gradient of the addend of a sum. With varying types the cotangent of the (invariant) sum is the cotangent of every
    addend; with `check_vma=False` each device has its own part of it, and the parts are summed."""
    if _compat.has_varying_types(axes[0]):
        return _compat.varying_over(axes, grad)
    return (reduce(grad),)


_collective.defvjp(lambda how, x: (_collective(how, x), None), _collective_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _small(implementation, axes, sizes, x):
    """`all_reduce_small` of x by the chosen implementation."""
    functions = {
        "pallas_tpu": tpu.small_unsupported(x.shape, x.dtype, math.prod(sizes), axes)
        or (lambda v: tpu.all_reduce_small(v, axes, sizes)),
        "pallas_gpu": gpu.small_unsupported(x.shape, x.dtype, math.prod(sizes), axes)
        or (lambda v: gpu.all_reduce_small(v, axes, sizes)),
        "gather": functools.partial(native.gather_sum, axes=axes),
    }
    return _compat.invariant_over(axes, dispatch("all_reduce_small", implementation, functions, "gather", x))


_small.defvjp(lambda *a: (_small(*a), None), lambda *a: _of_addend(a[1], lambda g: _small(*a[:3], g), a[4]))

"""`all_gather_matmul` and `matmul_reduce_scatter`: on the arrays of one device, inside `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported, by_default, devices_on, dispatch, refuse_sharded
from meshpar_kernels.collective_matmul import gpu, reference, ring, tpu_gather, tpu_scatter, xla
from meshpar_kernels.collective_matmul import tpu_common as tpu
from meshpar_kernels.collective_matmul.dot_dims import Axes, Dot
from meshpar_kernels.config import Config, keywords_in_config, only_num_sms

Implementations = Mapping[str, Callable[..., Any] | Unsupported]
FALLBACK = "ring"


@dataclass(frozen=True)
class _How:
    """Static arguments that do not change the result; hashable, as `jax.custom_vjp` requires."""

    axis: Axes
    implementation: str | None
    precision: Any
    dtype: Any
    wire: Any
    tile: int
    num_sms: int | None = None


@keywords_in_config("num_sms")
def all_gather_matmul(
    x: jax.Array,
    w: jax.Array,
    axis_name: Axes,
    *,
    implementation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    tile: int = ring.TILE,
    config: Config | None = None,
) -> jax.Array:
    """Gather the rows of x from all devices and multiply them by w: `lax.all_gather(x, axis_name, tiled=True) @ w`.

    Implementations: "xla" gathers, then multiplies. "ring" sends blocks of rows around a ring in both directions by
    `lax.ppermute`, and multiplies each block while the next one is in flight (Wang et al., ASPLOS 2023); it runs on all
    platforms. "pallas" does the same in one kernel: by remote DMA on TPU; over NVLink on GPUs (sm_90a and sm_100a, at
    most 8, one mesh axis), where every device writes its rows to all others directly, into a buffer of all rows. The
    gradient of w uses "ring" in place of "pallas". None: "ring", unless `MESHPAR_KERNELS=pallas`.

    Status of "pallas": opt-in until it is timed on hardware.

    Args:
      x: [m, K], this device's rows; any float or integer dtype.
      w: [K, n], this device's own.
      axis_name: a mesh axis of A devices, or several as one, the first major.
      implementation: None, "xla", "ring", "pallas" or "reference".
      precision, preferred_element_type: as in `lax.dot_general`.
      tile: rows ("ring"): several blocks with fewer rows are multiplied together.
      config: `Config(num_sms=...)`: multiprocessors that the GPU kernel uses exclusively until it ends. All of them, on
        every device, must become free without waiting for this kernel. None: all but 32 of an H100, H200 or B200, which
        leaves multiprocessors for a concurrent collective of NCCL.

    Returns:
      [m·A, n]: the rows of device 0 first. Differentiable: the gradient of x is a `matmul_reduce_scatter` (accumulated
      in float32); the gradient of w gathers x again, block by block.

    Raises:
      ValueError: shapes that do not fit, an axis that is not bound, an unknown implementation, or operands that are
        sharded outside of `shard_map`.
      NotImplementedError: an implementation that cannot take these arguments.
    """
    op = "all_gather_matmul"
    _check(op, x, w, axis_name, tile)
    x, w = _compat.same_varying(x, w)
    num_sms = only_num_sms(op, config)
    how = _How(_plain(axis_name), implementation, precision, preferred_element_type, None, tile, num_sms)
    return _gather(x, w, how)


@keywords_in_config("num_sms")
def matmul_reduce_scatter(
    x: jax.Array,
    w: jax.Array,
    axis_name: Axes,
    *,
    implementation: str | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    comm_dtype: Any = None,
    tile: int = ring.TILE,
    config: Config | None = None,
) -> jax.Array:
    """Multiply, and reduce-scatter the rows of the result: `lax.psum_scatter(x @ w, axis_name, tiled=True)`.

    Partial results are accumulated in float32 and sent in `comm_dtype`. Implementations as in `all_gather_matmul`.

    Status of "pallas": opt-in until it is timed on hardware.

    Args:
      x: [M, k], M a multiple of the number A of devices of `axis_name`.
      w: [k, N].
      axis_name, implementation, precision, preferred_element_type, tile, config: as in `all_gather_matmul`.
      comm_dtype: dtype in which partial results are sent ("reference" sends float32 in any case). None: float32, twice the
        bytes of a bfloat16 matmul; bfloat16 rounds at every hop, as a reduce-scatter of bfloat16 does.

    Returns:
      [M/A, N]: the rows of this device. Differentiable: the gradient of x is an `all_gather_matmul`, and the
      gradient of w uses the same blocks as they arrive.

    Raises:
      ValueError, NotImplementedError: as `all_gather_matmul`; ValueError also if M does not divide over the devices.
    """
    op = "matmul_reduce_scatter"
    devices = _check(op, x, w, axis_name, tile)
    if x.shape[0] % devices:
        raise ValueError(f"{op}: the {x.shape[0]} rows of x{list(x.shape)} do not divide over {devices} devices")
    x, w = _compat.same_varying(x, w)
    wire = None if comm_dtype is None else jnp.dtype(comm_dtype)
    num_sms = only_num_sms(op, config)
    how = _How(_plain(axis_name), implementation, precision, preferred_element_type, wire, tile, num_sms)
    return _scatter(x, w, how)


def _plain(axis_name: Axes) -> Axes:
    return axis_name if isinstance(axis_name, str) else tuple(axis_name)


def _check(op: str, x: jax.Array, w: jax.Array, axis_name: Axes, tile: int) -> int:
    """The number of devices. Raises ValueError for shapes, axes or options that do not fit."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"{op}: x must be [rows, K] and w [K, columns], got {list(x.shape)} and {list(w.shape)}")
    if tile < 1:
        raise ValueError(f"{op}: tile={tile} must be at least 1")
    if not isinstance(axis_name, str) and not axis_name:
        raise ValueError(f"{op}: axis_name has no axis")
    refuse_sharded(op, x=x, w=w)
    return devices_on(op, "x, w", _plain(axis_name))


# -- the two fused matmuls and their gradients


def _dot(how: _How, contract: tuple[int, int], side: int = 0, dtype: Any = None) -> Dot:
    x, w = contract
    return Dot((((x,), (w,)), ((), ())), side, how.precision, how.dtype if dtype is None else dtype)


def _kernels(how: _How, x: jax.Array, w: jax.Array, dot: Dot, *, gathers: bool) -> Implementations:
    """{platform's kernel: function of (x, w), or the reasons why it cannot run}, of the matmul and its gather or scatter."""
    devices, (rows, k), out = lax.axis_size(how.axis), x.shape, dot.dtype(x, w)
    if devices == 1:
        return dict.fromkeys(("pallas_tpu", "pallas_gpu"), dot)
    transposed = dot.dimension_numbers[0] == ((1,), (1,))
    n, rows = w.shape[0 if transposed else 1], rows if gathers else rows // devices
    wire = jnp.dtype(jnp.float32) if how.wire is None else how.wire
    dtypes = {"out_dtype": out} if gathers else {"out_dtype": out, "comm_dtype": wire}
    tile = tpu.pick_tile(rows, k, n, devices, x.dtype.itemsize)
    not_tpu = tpu.unsupported(x, w, rows, k, n, devices, tile, out, how.axis)
    if wire not in (jnp.float32, jnp.bfloat16):
        not_tpu = Unsupported((*not_tpu, f"comm_dtype is {wire}; the kernel sends float32 or bfloat16"))
    order_of: Any = gpu.gather_order if gathers else functools.partial(gpu.scatter_order, **dtypes)
    order = order_of(rows, k, n, devices, x.dtype.itemsize)
    not_gpu = gpu.unsupported(x, w, how.axis, order, transposed=transposed, num_sms=how.num_sms, **dtypes)

    def by_tpu(x: jax.Array, w: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"tile": tile, "transposed": transposed, "precision": how.precision, **dtypes}
        if gathers:
            return tpu_gather.all_gather_matmul(x, w, how.axis, **options)[0]
        return tpu_scatter.matmul_reduce_scatter(x, w, how.axis, **options)

    def by_gpu(x: jax.Array, w: jax.Array) -> jax.Array:
        run = gpu.all_gather_matmul if gathers else gpu.matmul_reduce_scatter
        return run(x, w, how.axis, order, transposed=transposed, num_sms=how.num_sms, **dtypes)

    return {"pallas_tpu": not_tpu or by_tpu, "pallas_gpu": not_gpu or by_gpu}


def _gathered(op: str, how: _How, x: jax.Array, others: list[jax.Array], dots: list[Dot]) -> list[jax.Array]:
    """The matmuls of the gathered rows by the chosen implementation. The kernels make one, that does not contract rows."""
    if len(dots) > 1 or dots[0].dimension_numbers[0][0] != (1,):
        reasons = Unsupported(("the kernel makes one product of the gathered rows, and does not sum over them",))
        kernels: Implementations = dict.fromkeys(("pallas_tpu", "pallas_gpu"), reasons)
    else:
        kernels = _kernels(how, x, others[0], dots[0], gathers=True)
    functions: dict[str, Any] = dict(kernels)
    for name, f in kernels.items():
        if not isinstance(f, Unsupported):
            functions[name] = lambda x, others, f=f: [f(x, others[0])]
    functions["ring"] = lambda x, others: ring.gather_dots(x, others, dots, how.axis, 0, tile=how.tile)
    functions["xla"] = lambda x, others: xla.gather_dots(x, others, dots, how.axis, 0)
    functions["reference"] = lambda x, others: reference.gather_dots(x, others, dots, how.axis, 0)
    return dispatch(op, how.implementation, functions, FALLBACK, x, others)


def _scattered(op: str, how: _How, x: jax.Array, w: jax.Array, dot: Dot) -> jax.Array:
    """The matmul, its rows reduce-scattered, by the chosen implementation."""
    functions = {
        **_kernels(how, x, w, dot, gathers=False),
        "ring": lambda x, w: ring.dot_scatter(x, w, dot, how.axis, 0, comm_dtype=how.wire, tile=how.tile),
        "xla": lambda x, w: xla.dot_scatter(x, w, dot, how.axis, 0, comm_dtype=how.wire),
        "reference": lambda x, w: reference.dot_scatter(x, w, dot, how.axis, 0),
    }
    return dispatch(op, how.implementation, functions, FALLBACK, x, w)


def _without_kernel(how: _How) -> _How:
    """The options with a kernel replaced by the fallback: for matmuls that contract the gathered rows, for which there
    is no kernel."""
    return replace(how, implementation=FALLBACK) if _by_kernel(how) else how


def _by_kernel(how: _How) -> bool:
    """Whether the kernels are asked for, by name or by the environment variable of :mod:`meshpar_kernels._choose`."""
    if how.implementation is None:
        return bool(by_default("matmul_reduce_scatter"))
    return how.implementation.startswith("pallas")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather(x: jax.Array, w: jax.Array, how: _How) -> jax.Array:
    (out,) = _gathered("all_gather_matmul", how, x, [w], [_dot(how, (1, 0))])
    return out


def _gather_backward(how: _How, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    op, (x, w) = "all_gather_matmul", saved
    dx = _scattered(op, how, g, w, _dot(how, (1, 1), dtype=x.dtype))
    (dw,) = _gathered(op, _without_kernel(how), x, [g], [_dot(how, (0, 0), dtype=w.dtype)])
    return dx, dw


_gather.defvjp(lambda x, w, how: (_gather(x, w, how), (x, w)), _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scatter(x: jax.Array, w: jax.Array, how: _How) -> jax.Array:
    return _scattered("matmul_reduce_scatter", how, x, w, _dot(how, (1, 0)))


def _scatter_backward(how: _How, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of x and w: matmuls of the all-gathered gradient, in one ring if no kernel is used."""
    op, (x, w) = "matmul_reduce_scatter", saved
    dots = [_dot(how, (1, 1), dtype=x.dtype), _dot(how, (0, 0), side=1, dtype=w.dtype)]
    if not _by_kernel(how):
        dx, dw = _gathered(op, how, g, [w, x], dots)
        return dx, dw
    (dx,) = _gathered(op, how, g, [w], dots[:1])
    (dw,) = _gathered(op, _without_kernel(how), g, [x], dots[1:])
    return dx, dw


_scatter.defvjp(lambda x, w, how: (_scatter(x, w, how), (x, w)), _scatter_backward)

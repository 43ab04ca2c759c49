"""Row exchanges by the TPU and GPU kernels, with gradients.

The kernels copy *units* (one row, or a tile of 8 or 16 rows) of runs (:mod:`meshpar_kernels.dispatch.runs`) to their final place at
the receiver. The gradient is sent back along the reverse runs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported, dispatch
from meshpar_kernels._collective_ids import id_reasons
from meshpar_kernels.collectives.run_by_ppermute import axes_and_sizes
from meshpar_kernels.dispatch import gpu, tpu
from meshpar_kernels.dispatch.runs import Axes, Runs, agree, covered

KERNELS = ("pallas", "pallas_tpu", "pallas_gpu")
"""Names of implementations that are kernels."""


class _How(NamedTuple):
    """Static arguments of the exchange.

    Attributes:
      op: public name, for messages.
      implementation: one of `KERNELS`.
      axes, sizes: mesh axes of the group, and their sizes.
      rows: of a unit.
      sends, receives: units of the operand and of the result.
      keeps: units that no device sends are taken from a given array; else they are undefined.
    """

    op: str
    implementation: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rows: int
    sends: int
    receives: int
    keeps: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(
    how: _How, operand: jax.Array, output: jax.Array | None, runs: Runs, back: Runs, twice: jax.Array | None
) -> jax.Array:
    """Send runs of units [sends, a, b] → [receives, a, b]; `back` and `twice`, from `agree`, are for the backward pass."""
    del back, twice
    not_tpu = tpu.unsupported(operand.dtype, operand.shape[-1])
    not_tpu = Unsupported((*not_tpu, *id_reasons(how.axes), *_compat.ici_reasons(how.axes)))
    width, devices = math.prod(operand.shape[1:]) // how.rows, math.prod(how.sizes)

    def by_tpu(operand: jax.Array, output: jax.Array | None, runs: Runs) -> jax.Array:
        return tpu.send(operand, output, how.receives, runs, how.axes, how.sizes)

    functions = {
        "pallas_tpu": not_tpu or by_tpu,
        "pallas_gpu": gpu.unsupported(operand.dtype, width, devices, how.axes) or functools.partial(_by_gpu, how),
    }
    return dispatch(how.op, how.implementation, functions, "pallas_tpu", operand, output, runs)


def _by_gpu(how: _How, operand: jax.Array, output: jax.Array | None, runs: Runs) -> jax.Array:
    """The GPU kernel; units without a sender are taken from `output`, if it is given."""
    moved = gpu.send(operand, how.receives, how.rows, runs, how.axes, how.sizes)
    if output is None:
        return moved
    come = covered(runs.recv_start, runs.recv_size, how.receives)[:, None, None]
    return jnp.where(come, moved, output)


def _backward(how: _How, saved: tuple[Runs, Runs, jax.Array | None], grad: jax.Array):
    """Backward rule of `_move`: the gradient is sent back by the reverse runs.

    With `keeps` the gradient of `output` is the gradient of the units without a sender. If this device sends a unit
    twice (`twice`), the gradient of its operand is NaN.
    """
    runs, back, twice = saved
    unsent = None
    if how.keeps:
        unsent = jnp.zeros((how.sends, *grad.shape[1:]), grad.dtype)
        unsent = unsent if twice is None else jnp.where(twice, jnp.full_like(unsent, jnp.nan), unsent)
        unsent, grad = _compat.same_varying(unsent, grad)
    returned: Any = _move(how._replace(sends=how.receives, receives=how.sends), grad, unsent, back, runs, None)
    if how.keeps:
        come = covered(runs.recv_start, runs.recv_size, how.receives)[:, None, None]
        return returned, jnp.where(come, 0, grad), None, None, None
    return returned, None, None, None, None


_move.defvjp(lambda how, *args: (_move(how, *args), args[2:]), _backward)


def move_rows(
    op: str, implementation: str, operand: jax.Array, output: jax.Array, start: jax.Array, size: jax.Array,
    target: jax.Array, axis_name: Axes,
) -> jax.Array:  # fmt: skip
    """`ragged_all_to_all` by a kernel, for runs within bounds and more than one device.

    A unit is one row; on TPU, where a row is not contiguous in memory, XLA copies the operands to another layout. If a
    device sends a row twice, the gradient of its operand is NaN, since the reverse exchange writes a row only once and
    cannot add up its gradients.
    """
    axes, sizes = axes_and_sizes(axis_name)
    runs, back, twice = agree(start, size, target, axis_name)
    width = math.prod(operand.shape[1:])
    lanes = 128 if width % 128 == 0 else width
    views = [x.reshape(len(x), width // lanes, lanes) for x in (operand, output)]
    (*views, _) = _compat.same_varying(*views, runs.recv_size)
    how = _How(op, implementation, axes, sizes, 1, len(operand), len(output), keeps=True)
    moved: Any = _move(how, *views, runs, back, twice)
    return moved.reshape(output.shape)


def exchange_slots(
    op: str, implementation: str, x: jax.Array, sent: jax.Array, recv_size: jax.Array, axis_name: Axes
) -> jax.Array:
    """An all-to-all of slots of which only the first rows are valid; the content of the other rows is undefined.

    Args:
      op, implementation: as in `dispatch`.
      x: [devices·rows, H]: slot i is sent to device i. It is copied in tiles of 8 or 16 rows, if these divide `rows`.
      sent, recv_size: int32 [devices], valid rows sent to device i, and received from it.
      axis_name: mesh axes of more than one device.

    Returns:
      [devices·rows, H]: slot i is from device i.
    """
    axes, sizes = axes_and_sizes(axis_name)
    devices = math.prod(sizes)
    total, width = x.shape
    rows = total // devices
    unit = tpu.unit_of(rows, x.dtype.itemsize)
    lanes = 128 if unit == 1 and width % 128 == 0 else width
    units = x.reshape(total // unit, unit if unit > 1 else width // lanes, lanes)
    first = jnp.arange(devices, dtype=jnp.int32) * (rows // unit)
    own = jnp.broadcast_to(lax.axis_index(axis_name).astype(jnp.int32) * (rows // unit), (devices,))
    went, comes = ((-(-n // unit)).astype(jnp.int32) for n in (sent, recv_size))
    runs = Runs(first, went, own, first, comes, own)
    units, *numbers = _compat.same_varying(units, *_compat.varying_over(axes, *runs))
    runs = Runs(*numbers)
    how = _How(op, implementation, axes, sizes, unit, len(units), len(units), keeps=False)
    moved: Any = _move(how, units, None, runs, runs.back(), None)
    return moved.reshape(x.shape)

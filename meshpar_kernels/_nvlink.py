"""The GPUs of one NVLink domain: their ranks and coordinates inside a kernel, and which machines can run kernels that
write to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from meshpar_kernels import _compat

MOST_DEVICES = 8
"""Largest number of GPUs of an NVLink domain in one machine. Kernels have one copy instruction for each."""

ARCHITECTURES = (9, 10)
"""Major numbers of the compute capabilities that have kernels."""


class DeviceGroup(NamedTuple):
    """The devices of one mesh axis, or of several axes as one (the first major), from the view of one of them.

    Attributes:
      axes, sizes: the mesh axes, and their sizes.
      rank: of this device.
      coords: {mesh axis: coordinate} of this device on all mesh axes, since `lax.axis_index` is not available inside
        one warp.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    rank: Any
    coords: dict[str, Any]

    @classmethod
    def of(cls, axes: Sequence[str], sizes: Sequence[int]) -> DeviceGroup:
        """The devices of these mesh axes; called inside a kernel. One device needs no mesh."""
        if all(n == 1 for n in sizes):
            return cls(tuple(axes), tuple(sizes), jnp.int32(0), {})
        mesh = jax.sharding.get_abstract_mesh()
        names = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]
        coords = {name: lax.axis_index(name) for name in names}
        rank = coords[axes[0]]
        for name, size in zip(axes[1:], sizes[1:], strict=True):
            rank = rank * size + coords[name]
        return cls(tuple(axes), tuple(sizes), rank, coords)

    def device(self, rank: Any) -> dict[str, Any]:
        """{mesh axis: coordinate} of the device of this rank, the form in which kernels name devices."""
        coords_of_rank = dict(self.coords)
        for name, size in zip(reversed(self.axes[1:]), reversed(self.sizes[1:]), strict=True):
            coords_of_rank[name] = lax.rem(rank, jnp.int32(size))
            rank = lax.div(rank, jnp.int32(size))
        return {**coords_of_rank, self.axes[0]: rank}


def machine_reasons(devices: int, axes: Sequence[str] = (), blocks: int = 0) -> list[str]:
    """Reasons why this number of GPUs cannot run a kernel that writes to remote GPUs; empty if they can.

    Args:
      devices: GPUs of the group.
      axes: mesh axes that join them.
      blocks: thread blocks that wait for each other, each of which needs a multiprocessor for itself.
    """
    reasons = _compat.host_reasons(axes)
    if devices > MOST_DEVICES:
        reasons.append(f"{devices} devices: NVLink joins at most {MOST_DEVICES} in one machine")
    reasons += _compat.mosaic_reasons(ARCHITECTURES)
    kind = _compat.device_kind()
    if "PCIe" in kind or kind.endswith("NVL"):
        reasons.append(f"{kind} has no NVLink switch")
    if blocks > _compat.multiprocessors():
        reasons.append(
            f"{kind or 'the GPU'} has {_compat.multiprocessors()} multiprocessors, and {blocks} blocks wait for each other: those "
            "that do not run would be waited for without end (config=Config(num_sms=...) takes fewer)"
        )
    return reasons

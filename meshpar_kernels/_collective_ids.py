"""Collective ids: the barrier semaphores of the kernels that communicate with other devices.

Two kernels that may run at the same time must not share a barrier semaphore. The compiler does not detect it if they
do, or if a kernel has none. So each kernel takes its id from this module. The compiler allocates one semaphore for
every id that a program uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

_KERNELS = (
    "all_reduce_small",
    "ring_all_gather",
    "ring_reduce_scatter",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "ragged_all_to_all",
    "all_to_all",
    "collective_permute",
)

MESH_AXES = 6
"""Largest number of mesh axes for these kernels: the id of a kernel depends on the axes over which it communicates."""

COLLECTIVE_IDS: dict[str, int] = {name: (1 + number) * 2**MESH_AXES for number, name in enumerate(_KERNELS)}
"""Kernel → the first of its ids. Lower ids are reserved for a program's own kernels."""


def collective_id(name: str, axes: Sequence[str]) -> int:
    """The collective id of a kernel that one program may run over different sets of mesh axes.

    Each set of axes has its own id. With a shared id, devices that wait at the barrier of one group would count a
    signal of a device that has already started the exchange of another group.

    Args:
      name: of the kernel.
      axes: of the surrounding mesh, among its first `MESH_AXES` axes.

    Raises:
      NotImplementedError: an axis is beyond them.
    """
    if reasons := id_reasons(axes):
        raise NotImplementedError(f"{name}: {reasons[0]}")
    names = jax.sharding.get_abstract_mesh().axis_names
    return COLLECTIVE_IDS[name] + sum(1 << names.index(a) for a in axes)


def id_reasons(axes: Sequence[str]) -> list[str]:
    """The reason why a kernel over these mesh axes has no collective id; [] if it has one."""
    names = list(jax.sharding.get_abstract_mesh().axis_names)
    far = [a for a in axes if names.index(a) >= MESH_AXES]
    return [
        f"axis {a!r} is not among the first {MESH_AXES} of the mesh, {names}: put it before others" for a in far[:1]
    ]

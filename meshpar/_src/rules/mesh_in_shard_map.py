"""The mesh inside a ``shard_map``: names and sizes of axes, the indices of devices along them, and collectives over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar_kernels.collectives.run_by_ppermute import in_mesh_order

from ..hardware.topology import Stage, Torus, joined, major_stage
from ..layout import AnyMesh, Spec

Sizes = Mapping[str, int]
"""Axis → number of devices along it; a :class:`Grid` if the lowering uses a factored mesh."""

Factors = tuple[int, ...]
"""The factors that a dim consists of, major to minor."""

Axes = Sequence[tuple[str, ...]]
"""The mesh axes over which every factor of a rule is split."""

Shapes = Sequence[tuple[int, ...]]
"""The shapes of some arrays."""


@dataclass(frozen=True, slots=True)
class Send:
    """A collective that the local form of an op makes.

    Attributes:
      op: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``collective-permute``.
      factors: the factors over whose axes it runs.
      shape, dtype: of a device's operand.
      why: its purpose, in a few words, for the plan.
      times: how often the op makes it; None if that is unknown.
      axes: the mesh axes that it runs over; None: all axes of ``factors``.
      content: (index of an operand, key of its elements that are sent): of two ops with the same operand and content, the second
        one uses the elements that the first one has received. None: it is sent in any case.
      route, hidden: as of a :class:`program.kernels.KernelSend`.
    """

    op: str
    factors: Factors
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int | None = 1
    axes: tuple[str, ...] | None = None
    content: tuple[int, Hashable] | None = None
    route: str = "next"
    hidden: float = 0.0


class Grid(dict[str, int]):
    """Axis sizes of a mesh, and of the factored mesh that the lowering uses.

    An axis along several torus dimensions is one axis per dimension in the factored mesh: ``data`` (16) over a 4×4 torus is
    ``data.0`` (4) and ``data.1`` (4). An axis whose name the caller has bound (``jax.vmap(f, axis_name="data")``) has another
    name in the factored mesh, since JAX would batch a collective over ``data`` as one over the caller's axis.

    Attributes:
      torus: axis → its torus stages, if known.
      fine: axis → its axes of the factored mesh, major to minor.
      places: axis of the factored mesh → its torus stage, if known.
      between_slices: the axes of the factored mesh that use DCN.
      cpu: whether the program is compiled by XLA's CPU compiler.
    """

    def __init__(
        self, sizes: Sizes, torus: Torus, cpu: bool = False, bound: Collection[Any] = (), factored: bool = True
    ):
        """The factored mesh for ``sizes`` (axis → size); its axes have other names than ``bound``, the names that the
        caller has bound. It is the mesh itself if it is not ``factored``."""
        super().__init__(sizes)
        self.cpu = cpu
        self.torus = torus
        self.fine: dict[str, tuple[str, ...]] = {}
        self.places: dict[str, Stage] = {}
        self.between_slices: set[str] = set()
        for axis in sizes:
            stages = [s for s in torus.get(axis, ()) if s.size > 1 and factored]
            names = [axis] if len(stages) < 2 else [f"{axis}.{k}" for k in range(len(stages))]
            while any(n in bound for n in names):
                names = [f"{n}'" for n in names]
            self.fine[axis] = tuple(names)
            if self.fine[axis] != (axis,):
                self.update(zip(names, (s.size for s in stages) if len(stages) > 1 else [sizes[axis]], strict=True))
            self.places.update(zip(self.fine[axis], stages, strict=False))
            self.between_slices |= {n for n, s in zip(self.fine[axis], stages, strict=False) if s.dim == "slice"}

    def ring(self, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(the axes of the factored mesh along which a ring over some axes runs, the remaining ones)."""
        names = fine_names([a for a in axes if self[a] > 1], self)
        count = major_stage(self.torus, axes)[1] if all(a in self.torus for a in axes) else 1
        return names[:count], names[count:]

    def groups(self, axes: Sequence[str]) -> list[tuple[str, ...]]:
        """Axes of the factored mesh, grouped: adjacent axes along one dimension of the slice are one group."""
        places = [self.places.get(a, Stage(self[a])) for a in axes]
        names, out = iter([a for a in axes if self[a] > 1]), []
        for _, count in joined(places):
            out.append(tuple(itertools.islice(names, count)))
        return out

    def mesh(self, mesh: AnyMesh) -> AnyMesh:
        """The factored mesh, with the same devices in the same order; an abstract mesh for an abstract one."""
        names = tuple(n for a in mesh.axis_names for n in self.fine[a])
        shape, types = tuple(self[n] for n in names), (AxisType.Auto,) * len(names)
        if isinstance(mesh, AbstractMesh):
            return AbstractMesh(shape, names, axis_types=types)
        return Mesh(mesh.devices.reshape(shape), names, axis_types=types)

    def spec(self, spec: Spec) -> Spec:
        """A spec over the axes of the factored mesh."""
        return tuple(fine_names(entry, self) for entry in spec)


class GroupedAxes(tuple[str, ...]):
    """The axes of the program's mesh over which a factor is split.

    Attributes:
      groups: axis of the plan's mesh → the axes of the program's mesh that it is divided into, one for each torus dimension.
      torus: axis of the plan's mesh → its torus stages, if known.
    """

    groups: Mapping[str, tuple[str, ...]]
    torus: Torus

    def __new__(cls, groups: Mapping[str, tuple[str, ...]], torus: Torus) -> GroupedAxes:
        self = super().__new__(cls, (name for names in groups.values() for name in names))
        self.groups, self.torus = groups, torus
        return self


def fine_names(axes: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes of the factored mesh for some axes, major to minor; the axes themselves if ``sizes`` is not a :class:`Grid`."""
    return tuple(n for a in axes for n in sizes.fine.get(a, (a,))) if isinstance(sizes, Grid) else tuple(axes)


def axis_index(axes: Sequence[str]) -> Any:
    """The index of this device along some axes (of the factored mesh), the first one major: an int32 scalar."""
    return lax.axis_index(axes[0] if len(axes) == 1 else tuple(axes))


def permute(x: Any, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """A collective permute between devices that are numbered along ``axes`` as by :func:`axis_index`, the first one major.

    ``lax.ppermute`` numbers them in the order of the mesh, whatever the order of the names.

    Args:
      x: the array that a device sends.
      axes: axes of the factored mesh.
      pairs: (source, target) devices; a device that is not a target receives zeros.
    """
    ordered, number = in_mesh_order(axes)
    return lax.ppermute(x, ordered, [(number[s], number[t]) for s, t in pairs])


def table_entry(table: Sequence[int], index: Any) -> Any:
    """The entry of a device in a table with one entry per device: an int32 scalar. ``index`` is :func:`axis_index`."""
    if len(set(table)) == 1:
        return np.int32(table[0])
    return jnp.asarray(np.asarray(table, np.int32))[index]


def shape_in(shape: Sequence[int], have: Spec, need: Spec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a shard in spec ``need``, from its shape in spec ``have``."""
    before, after = ([math.prod(sizes[a] for a in entry) for entry in spec] for spec in (have, need))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def slice_to_spec(x: Any, have: Spec, need: Spec, sizes: Sizes) -> Any:
    """The shard in spec ``need``, from that in spec ``have``: a slice, as ``need`` adds axes to dims as their minor ones."""
    for i, (a, b) in enumerate(zip(have, need, strict=True)):
        new = tuple(axis for axis in b[len(a) :] if sizes[axis] > 1)
        if new:
            n = x.shape[i] // math.prod(sizes[axis] for axis in new)
            x = lax.dynamic_slice_in_dim(x, axis_index(fine_names(new, sizes)) * n, n, i)
    return x


def on_words(x: Any, move: Callable[[Any], Any]) -> Any:
    """``move(x)``; for random keys, which collectives do not accept, it is applied to their uint32 words."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(move(jax.random.key_data(x)), impl=jax.random.key_impl(x))

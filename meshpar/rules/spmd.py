"""One device's view of the mesh inside a ``shard_map``: names and sizes of axes, places along them, and what is sent over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..hardware.topology import Stage, Torus, joined, major_stage
from ..layout import AnyMesh, Spec

Sizes = Mapping[str, int]
"""Axis → number of devices along it; a :class:`Grid` where the lowering works on a factored mesh."""

Factors = tuple[int, ...]
"""The factors a dim is made of, major to minor."""


@dataclass(frozen=True, slots=True)
class Send:
    """A collective that the local form of an op makes itself.

    Attributes:
      op: ``all-gather``, ``reduce-scatter``, ``all-reduce``, ``all-to-all`` or ``collective-permute``.
      factors: the factors over whose axes it runs.
      shape, dtype: of the array that a device passes in.
      why: what it is for, in a few words.
      times: how often the op makes it; None: not known.
    """

    op: str
    factors: Factors
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int | None = 1


class Grid(dict[str, int]):
    """The sizes of the axes of a mesh, and of the axes of the factored mesh that stand for them.

    An axis that runs along several torus dimensions is an axis for each of them in the mesh that the lowering works on. An axis
    whose name the caller has bound already (``jax.vmap(f, axis_name="data")``) gets another name there: JAX would batch our
    collectives over ``data`` as collectives over the caller's axis.

    Attributes:
      torus: the stages of every axis, where they are known.
      fine: axis → the axes that stand for it, major to minor.
      places: the stages of these, where they are known.
      between_slices: those that go over DCN.
      cpu: whether it is for XLA's CPU compiler.
    """

    def __init__(self, sizes: Sizes, torus: Torus, cpu: bool = False, bound: Collection[Any] = ()):
        super().__init__(sizes)
        self.cpu = cpu
        self.torus = torus
        self.fine: dict[str, tuple[str, ...]] = {}
        self.places: dict[str, Stage] = {}
        self.between_slices: set[str] = set()
        for axis in sizes:
            stages = [s for s in torus.get(axis, ()) if s.size > 1]
            names = [axis] if len(stages) < 2 else [f"{axis}.{k}" for k in range(len(stages))]
            while any(n in bound for n in names):
                names = [f"{n}'" for n in names]
            self.fine[axis] = tuple(names)
            if self.fine[axis] != (axis,):
                self.update(zip(names, (s.size for s in stages) if len(stages) > 1 else [sizes[axis]], strict=True))
            self.places.update(zip(self.fine[axis], stages, strict=False))
            self.between_slices |= {n for n, s in zip(self.fine[axis], stages, strict=False) if s.dim == "slice"}

    def ring(self, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(the axes of the factored mesh that a ring over some axes runs over, the others)."""
        names = fine_names([a for a in axes if self[a] > 1], self)
        count = major_stage(self.torus, axes)[1] if all(a in self.torus for a in axes) else 1
        return names[:count], names[count:]

    def groups(self, axes: Sequence[str]) -> list[tuple[str, ...]]:
        """Axes of the factored mesh, those together that lie along one dimension of the slice, one behind the other."""
        places = [self.places.get(a, Stage(self[a])) for a in axes]
        names, out = iter([a for a in axes if self[a] > 1]), []
        for _, count in joined(places):
            out.append(tuple(itertools.islice(names, count)))
        return out

    def mesh(self, mesh: AnyMesh) -> AnyMesh:
        """The factored mesh: the same devices in the same order, or none if the mesh has none."""
        names = tuple(n for a in mesh.axis_names for n in self.fine[a])
        shape, types = tuple(self[n] for n in names), (AxisType.Auto,) * len(names)
        if isinstance(mesh, AbstractMesh):
            return AbstractMesh(shape, names, axis_types=types)
        return Mesh(mesh.devices.reshape(shape), names, axis_types=types)

    def spec(self, spec: Spec) -> Spec:
        """A spec over the axes of the factored mesh."""
        return tuple(fine_names(entry, self) for entry in spec)


def fine_names(axes: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes of the factored mesh that stand for these, major to minor."""
    return tuple(n for a in axes for n in sizes.fine.get(a, (a,))) if isinstance(sizes, Grid) else tuple(axes)


def axis_index(axes: Sequence[str]) -> Any:
    """This device's place along some axes (of the factored mesh), the first one major: an int32 scalar."""
    return lax.axis_index(axes[0] if len(axes) == 1 else tuple(axes))


def permute(x: Any, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """A collective permute between devices that are numbered along `axes`, the first one major, as :func:`axis_index` numbers them.

    ``lax.ppermute`` numbers them in the order of the mesh, whatever the order of the names.

    Args:
      x: the array that a device sends.
      axes: axes of the factored mesh.
      pairs: (source, target); a device that is no target gets zeros.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ordered = tuple(a for a in mesh.axis_names if a in axes)
    if ordered != tuple(axes):
        places = dict(zip(axes, np.indices([mesh.shape[a] for a in axes]).reshape(len(axes), -1), strict=True))
        number = np.ravel_multi_index([places[a] for a in ordered], [mesh.shape[a] for a in ordered])
        pairs = [(int(number[s]), int(number[t])) for s, t in pairs]
    return lax.ppermute(x, ordered, pairs)


def table_entry(table: Sequence[int], index: Any) -> Any:
    """This device's entry of a table with one entry a device; `index` is its place (:func:`axis_index`)."""
    if len(set(table)) == 1:
        return np.int32(table[0])
    return jnp.asarray(np.asarray(table, np.int32))[index]


def shape_in(shape: Sequence[int], have: Spec, need: Spec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a shard in spec `need`, from its shape in spec `have`."""
    before, after = ([math.prod(sizes[a] for a in entry) for entry in spec] for spec in (have, need))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def cut(x: Any, have: Spec, need: Spec, sizes: Sizes) -> Any:
    """This device's part of a shard in spec `have`, along the axes that `need` adds as the minor ones of a dim."""
    for i, (a, b) in enumerate(zip(have, need, strict=True)):
        new = tuple(axis for axis in b[len(a) :] if sizes[axis] > 1)
        if new:
            n = x.shape[i] // math.prod(sizes[axis] for axis in new)
            x = lax.dynamic_slice_in_dim(x, axis_index(fine_names(new, sizes)) * n, n, i)
    return x


def on_words(x: Any, move: Callable[[Any], Any]) -> Any:
    """`move` on an array; on the uint32 words of random keys, which collectives do not take."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(move(jax.random.key_data(x)), impl=jax.random.key_impl(x))

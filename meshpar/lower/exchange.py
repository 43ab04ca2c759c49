"""The collectives of a plan on local arrays: the mesh they name, settling a partial value, keeping a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshpar_kernels.collectives import coloured, in_order

from ..hardware.collective_time import Form
from ..hardware.topology import Torus
from ..layout import AnyMesh, Spec

Sizes = Mapping[str, int]


class Grid(dict[str, int]):
    """The sizes of the axes of a mesh, and of the axes of the factored mesh that stand for them.

    An axis that runs along several torus dimensions is an axis for each of them in the mesh that the lowering works on.

    Attributes:
      fine: axis → the axes that stand for it, major to minor.
      between_slices: those that go over DCN.
      cpu: whether it is for XLA's CPU compiler.
    """

    def __init__(self, sizes: Sizes, torus: Torus, cpu: bool = False):
        super().__init__(sizes)
        self.cpu = cpu
        self.fine: dict[str, tuple[str, ...]] = {}
        self.between_slices: set[str] = set()
        for axis in sizes:
            stages = [s for s in torus.get(axis, ()) if s.size > 1]
            self.fine[axis] = (axis,) if len(stages) < 2 else tuple(f"{axis}.{k}" for k in range(len(stages)))
            if len(stages) > 1:
                self.update(zip(self.fine[axis], (s.size for s in stages), strict=True))
            self.between_slices |= {n for n, s in zip(self.fine[axis], stages, strict=False) if s.dim == "slice"}

    def mesh(self, mesh: AnyMesh) -> AnyMesh:
        """The factored mesh: the same devices in the same order, or none if the mesh has none."""
        names = tuple(n for a in mesh.axis_names for n in self.fine[a])
        shape, types = tuple(self[n] for n in names), (AxisType.Auto,) * len(names)
        if isinstance(mesh, AbstractMesh):
            return AbstractMesh(shape, names, axis_types=types)
        return Mesh(mesh.devices.reshape(shape), names, axis_types=types)

    def spec(self, spec: Spec) -> Spec:
        return tuple(fine_names(entry, self) for entry in spec)


def fine_names(axes: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
    """The axes of the factored mesh that stand for these, major to minor."""
    return tuple(n for a in axes for n in sizes.fine.get(a, (a,))) if isinstance(sizes, Grid) else tuple(axes)


def axis_index(axes: Sequence[str]) -> Any:
    """This device's place along some axes (of the factored mesh), the first one major."""
    return lax.axis_index(axes[0] if len(axes) == 1 else tuple(axes))


def permute(x: Any, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    """Send between devices that are numbered along `axes`, the first one major, as :func:`axis_index` numbers them.

    ``lax.ppermute`` numbers them in the order of the mesh, whatever the order of the names.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ordered = tuple(a for a in mesh.axis_names if a in axes)
    if ordered != tuple(axes):
        places = dict(zip(axes, np.indices([mesh.shape[a] for a in axes]).reshape(len(axes), -1), strict=True))
        number = np.ravel_multi_index([places[a] for a in ordered], [mesh.shape[a] for a in ordered])
        pairs = [(int(number[s]), int(number[t])) for s, t in pairs]
    return lax.ppermute(x, ordered, pairs)


def shape_in(shape: Sequence[int], have: Spec, need: Spec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a shard in another spec."""
    before, after = ([math.prod(sizes[a] for a in entry) for entry in spec] for spec in (have, need))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def cut(x: Any, have: Spec, need: Spec, sizes: Sizes) -> Any:
    """Keep this device's part along the axes that come."""
    for i, (a, b) in enumerate(zip(have, need, strict=True)):
        new = tuple(axis for axis in b[len(a) :] if sizes[axis] > 1)
        if new:
            n = x.shape[i] // math.prod(sizes[axis] for axis in new)
            x = lax.dynamic_slice_in_dim(x, axis_index(fine_names(new, sizes)) * n, n, i)
    return x


def on_words(x: Any, move: Callable[[Any], Any]) -> Any:
    """Random keys are sent as the words they are made of."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(move(jax.random.key_data(x)), impl=jax.random.key_impl(x))


def _scatter(x: Any, axes: Sequence[str], dim: int, form: Form, sizes: Sizes) -> Any:
    """Sum over axes of the factored mesh, and keep this device's block of a dim.

    Dims of size 1 before it are left out meanwhile: with one the TPU compiler makes an all-reduce, which sends twice the bytes.
    """
    if not axes:
        return x
    ones = tuple(i for i in range(dim) if x.shape[i] == 1)
    if ones:
        return lax.expand_dims(_scatter(lax.squeeze(x, ones), axes, dim - len(ones), form, sizes), ones)
    if form == "coloured":
        return coloured("reduce_scatter", x, axes, dim)
    if form == "hierarchical":
        assert isinstance(sizes, Grid)
        between = sizes.between_slices
        order = sorted(range(len(axes)), key=lambda k: axes[k] in between)  # what crosses slices is the smallest
        return in_order("reduce_scatter", x, axes, dim, order)
    stages = [tuple(axes)] if form == "native" or not isinstance(sizes, Grid) else axes
    for stage in stages:
        parts = lax.axis_size(stage)
        shape, at = scattered_as(x.shape, dim, parts, x.dtype.itemsize)
        kept = tuple(n // parts if i == dim else n for i, n in enumerate(x.shape))
        x = lax.psum_scatter(lax.reshape(x, shape), stage, scatter_dimension=at, tiled=True)
        x = lax.reshape(x, kept)
    return x


def scattered_as(shape: tuple[int, ...], dim: int, parts: int, itemsize: int) -> tuple[tuple[int, ...], int]:
    """In which shape an array is reduce-scattered over a dim, and which dim that is then: as it is, where that will do.

    Two more cases in which the TPU compiler (libtpu 0.0.42) makes an all-reduce: a dim before the last that is padded to 8, and
    a last dim of which an odd number of 128 lanes of two bytes is kept. So the dims behind are made one, or the last is split.
    """
    n, after = shape[dim], shape[dim + 1 :]
    if len(after) > 1 and after[-2] % 8:
        return (*shape[: dim + 1], math.prod(after)), dim
    if dim and not after and itemsize == 2 and n % (parts * 128) == 0 and n // (parts * 128) % 2:
        return (math.prod(shape[:dim]), parts, n // parts), 1
    return shape, dim

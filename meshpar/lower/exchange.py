"""The collectives of a plan on local arrays: the mesh they name, settling a partial value, keeping a part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import UnsupportedError
from ..hardware.algorithms import ALGORITHMS, AlgorithmName
from ..hardware.topology import Torus
from ..layout import AnyMesh, Spec
from ..plan.collectives import reduces, settlement
from ..program.ir import Value
from .quirks import psum_scatter

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


def check_blocks(value: Value, spec: Spec, sizes: Sizes) -> None:
    """Raises UnsupportedError where a dim does not divide over the axes that split it."""
    for i, (n, axes) in enumerate(zip(value.shape, spec, strict=True)):
        parts = math.prod(sizes[a] for a in axes)
        if n % parts:
            raise UnsupportedError(
                f"dim {i} of size {n} does not divide over {'+'.join(axes)} ({parts} parts)",
                path=value.path,
                shape=value.shape,
                fixes=['use lowering="jit", which pads', f"or a size that is a multiple of {parts}"],
            )


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


def _scatter(x: Any, axes: Sequence[str], dim: int, algorithm: AlgorithmName, sizes: Sizes) -> Any:
    """Sum over axes of the factored mesh, and keep this device's block of a dim.

    Dims of size 1 before it are left out meanwhile (:data:`meshpar.lower.quirks.SCATTER_SHAPES`).
    """
    if not axes:
        return x
    ones = tuple(i for i in range(dim) if x.shape[i] == 1)
    if ones:
        return lax.expand_dims(_scatter(lax.squeeze(x, ones), axes, dim - len(ones), algorithm, sizes), ones)
    factored = isinstance(sizes, Grid)
    chosen = ALGORITHMS[algorithm if factored else "native"]
    return chosen.reduce_scatter(x, axes, dim, sizes.between_slices if factored else (), psum_scatter)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extremum(x: Any, axes: tuple[str, ...], largest: bool) -> Any:
    """The largest (smallest) of what devices have; its derivative, which JAX leaves out, is theirs who have it, in equal shares."""
    return (lax.pmax if largest else lax.pmin)(x, axes)


@_extremum.defjvp
def _(axes: tuple[str, ...], largest: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    out = _extremum(x, axes, largest)
    if t.dtype == jax.dtypes.float0:
        return out, t
    mine = (x == out).astype(x.dtype)
    return out, lax.psum(mine * t, axes) / lax.psum(mine, axes)


@dataclass(frozen=True)
class Extremum:
    """An extremum that is unsettled: of this device's shard of what it was taken, over which dims, and how it was turned since.

    What is settled has a derivative of its own: to all elements that equal it, in equal shares.
    """

    x: Any
    dims: tuple[int, ...]
    largest: bool
    views: tuple[Callable[[Any], Any], ...] = ()

    def turned(self, view: Callable[[Any], Any]) -> Extremum:
        return replace(self, views=(*self.views, view))

    def settled(self, found: Any, axes: tuple[str, ...]) -> Any:
        """What devices found together over axes."""
        return _shared(found, self.x, replace(self, x=None), axes)

    def seen(self, x: Any) -> Any:
        return functools.reduce(lambda x, view: view(x), self.views, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _shared(found: Any, x: Any, of: Extremum, axes: tuple[str, ...]) -> Any:
    del x, of, axes
    return found


@_shared.defjvp
def _(of: Extremum, axes: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    (found, x), (t, tx) = primals, tangents
    if t.dtype == jax.dtypes.float0:
        return _shared(found, x, of, axes), t
    mine = (x.max if of.largest else x.min)(of.dims)
    equal = (x == lax.expand_dims(mine, of.dims)).astype(x.dtype)
    held = (of.seen(mine) == found).astype(x.dtype)
    whole, count = (lax.psum(held * of.seen(y.sum(of.dims)), axes) for y in (equal * tx, equal))
    return _shared(found, x, of, axes), whole / count


def settle(
    x: Any, have: Spec, rest: Spec, axes: Sequence[str], kind: str, sizes: Sizes,
    algorithms: Mapping[int, AlgorithmName] | None = None, begun: bool = False,
) -> tuple[Any, Spec]:  # fmt: skip
    """Make a partial value whole, as :func:`meshpar.plan.collectives.settlement` says: (the shard, its spec).

    Args:
      algorithms: dim → how it is scattered, as the plan says; one torus dimension after the other where it says nothing.
      begun: a ring has scattered it over the first axis (of the factored mesh) already: the others follow one after the other.
    """
    scatter, reduce = settlement(have, rest, axes, kind)
    dtype = x.dtype
    if 0 in x.shape:
        spec = tuple((*s, *scatter.get(i, ())) for i, s in enumerate(have))
        return jnp.zeros(shape_in(x.shape, have, spec, sizes), dtype), spec
    if dtype == np.bool_:  # a sum of booleans is a lookup, in which one device has the value
        x = x.astype(np.uint8)
    spec = have
    for i, got in scatter.items():
        spec = tuple((*s, *got) if k == i else s for k, s in enumerate(spec))
        got = fine_names([a for a in got if sizes[a] > 1], sizes)
        algorithm = "staged" if begun else (algorithms or {}).get(i, "staged")
        x, begun = _scatter(x, got[begun:], i, algorithm, sizes), False
    reduce = fine_names([a for a in reduce if sizes[a] > 1], sizes)
    if reduce and reduces(kind, dtype):
        x = lax.psum(x, reduce) if kind == "sum" else _extremum(x, reduce, kind in ("max", "or"))
    elif reduce:
        every = lax.all_gather(x, reduce, axis=0)
        together = {"prod": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or}[kind]
        x = functools.reduce(together, [every[k] for k in range(every.shape[0])])
    return x.astype(dtype), spec

"""Relations of per-device values to global values.

On the device at some coordinates of the mesh, a value with the relation ``Rel(term, shape, spec, partial)`` is a block of the array
that ``term`` represents: along dim ``d`` the block of ``shape[d]`` elements whose number is the index of the device along the axes
``spec[d]``, the first of them major. If ``partial`` names axes, the block is the sum (or the maximum, …) of the values of all
devices along these axes. A term that depends on coordinates represents, on each device, the array for its coordinates.

Example: a device's rows ``x[2 * k : 2 * k + 2]`` of an ``x`` with 8 rows, on a mesh ``data=4``: ``Rel(x, (2, 16), (("data",),
  ()))``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ...compat.jax import aval_of
from .term import Term, Terms, number_of

Spec = tuple[tuple[str, ...], ...]
Fill = tuple[str, Any]
"""Op and params of a number, or of ``empty``."""


class Unverified(Exception):
    """No lemma gives a relation for the results of an equation.

    Attributes:
      refused: the relations of the operands do not fit together: no global value has these blocks.
    """

    def __init__(self, reason: str, refused: bool = False):
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Fragments:
    """The elements of one dim on all devices, in place of the axes of its blocks.

    Attributes:
      axes: along which devices have different elements, in the order of the mesh.
      table: int64[devices along axes, elements, 2]: the index of an element, -1 for one outside of the array; and the blocks of a
        contraction whose sum it is, as bits, :data:`fragments.ALL` of a complete one.
      devices: the number of devices.
      fill: the value of elements outside of the array: a number, or ``empty``.
      origin: of incomplete sums: (the number of blocks, the contractions).
    """

    axes: tuple[str, ...]
    table: bytes
    devices: int
    fill: Fill | None = None
    origin: tuple[int, Hashable] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.table, np.int64).reshape(self.devices, -1, 2)

    @property
    def complete(self) -> bool:
        """Whether all elements are complete, and in the array."""
        return self.fill is None and self.origin is None

    @property
    def zero_outside(self) -> bool:
        """Whether elements outside of the array are 0, and all are complete."""
        return self.origin is None and (self.fill is None or self.fill[1] in ("0.0", "0", "False"))


@dataclass(frozen=True, slots=True)
class Rel:
    """The relation of a per-device value to a global value; see the module.

    Attributes:
      term: the global value.
      shape: of the per-device value.
      spec: for each dim, the axes over which it is sharded, or fragments; () where ``term`` is constant along the dim.
      partial: the axes over which the value is to be reduced.
      kind: by which reduction: ``sum``, ``max``, ``min``; for booleans ``max`` is ``or``. ``one``: a sum in which one device of
        a group has the value, and the others -0.0. With ``*``: an elementwise function of such a value.
      origin: of a matmul over one dim that is sharded, which is partial over its axes: (these axes, the origin of its sums in
        :class:`fragments.Fragments`).
      source: of a partial value: values with one source and one term are equal on each device. Others may only be equal after
        the reduction.
    """

    term: Term
    shape: tuple[int, ...]
    spec: Spec
    partial: frozenset[str] = frozenset()
    kind: str = "sum"
    origin: tuple[tuple[str, ...], Any] | None = field(default=None, compare=False)
    source: int = field(default_factory=itertools.count().__next__, compare=False)

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.spec) == len(self.term.shape), (self.term, self.shape, self.spec)
        both = self.partial & (self.sharded | self.term.axes)
        require(not both, f"a value that is partial over {', '.join(sorted(both))}, and differs along it")
        require(all(len(set(axes)) == len(axes) for axes in self.spec), "a dim that is sharded twice over an axis")

    @property
    def sharded(self) -> frozenset[str]:
        """The axes over which a dim is sharded."""
        return frozenset(a for axes in self.spec for a in axes)

    @property
    def varying(self) -> frozenset[str]:
        """The axes along which devices may have different values."""
        return self.sharded | self.partial | self.term.axes

    @property
    def fragmented(self) -> list[int]:
        """The dims in fragments."""
        return [d for d, s in enumerate(self.spec) if isinstance(s, Fragments)]

    @property
    def incomplete(self) -> bool:
        """Whether a dim is in fragments of sums over some blocks of a contraction."""
        return any(isinstance(s, Fragments) and s.origin is not None for s in self.spec)

    @property
    def number(self) -> float | int | bool | None:
        """The number that all elements are on all devices; None if there is none."""
        return None if self.partial else number_of(self.term)

    def resized(self, d: int, n: int) -> tuple[int, ...]:
        """The shape, with ``n`` elements along a dim."""
        return (*self.shape[:d], n, *self.shape[d + 1 :])

    def placed(self, specs: Mapping[int, tuple[str, ...]]) -> Rel:
        """The relation with other axes of some dims."""
        return replace(self, spec=tuple(specs.get(d, s) for d, s in enumerate(self.spec)))

    def of(self, term: Term, shape: Sequence[int], spec: Iterable[tuple[str, ...]]) -> Rel:
        """The relation of a result that carries the partial axes along."""
        spec = tuple(axes if n != 1 else () for axes, n in zip(spec, term.shape, strict=True))
        return replace(self, term=term, shape=tuple(map(int, shape)), spec=spec)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an equation is not verified, in place of the relations of its results, of which nothing is known.

    Attributes:
      op: its primitive.
      line: its source line.
      reason: what has no lemma, or does not fit together.
      refused: the relations contradict each other.
      error: the reason is an exception in the lemma, which is a defect of the checker.
    """

    op: str
    line: str
    reason: str
    refused: bool = False
    error: bool = False

    def __str__(self) -> str:
        what = f"internal error in the lemma of {self.op}" if self.error else self.op
        return f"{what} ({self.line}): {self.reason}"


Known = Rel | Cause
"""The relation of a value, or the reason why it is not known."""


def mapped(fn: Callable[[Rel], Known], values: Iterable[Known]) -> list[Known]:
    """The function of each relation; an unknown one stays unknown."""
    return [r if isinstance(r, Cause) else fn(r) for r in values]


@dataclass(slots=True)
class Context:
    """What lemmas need besides the operands.

    Attributes:
      terms: the terms of the proof.
      sizes: axis → size, of the mesh axes that a program is in the ``shard_map`` of.
      loops: the loops of the function as it was written, by their kind and length.
      kernels: name → the kernels of the function as it was written: equation, and terms of its operands.
      images: number of a term → the kind with which it is reduced as the value that it is an image of (:mod:`lemmas.bits`).
      written: the equations belong to the function as it was written.
    """

    terms: Terms
    sizes: Mapping[str, int] = field(default_factory=dict)
    loops: dict[Any, list[Any]] = field(default_factory=dict)
    kernels: dict[str, list[tuple[JaxprEqn, list[Term]]]] = field(default_factory=dict)
    images: dict[int, str] = field(default_factory=dict)
    written: bool = True

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along axes."""
        return math.prod(self.sizes[a] for a in axes)

    def note(self, values: Iterable[Known]) -> None:
        """Values of the function as it was written are known to the terms."""
        if self.written:
            self.terms.known.update(r.term.number for r in values if isinstance(r, Rel))

    def replicated(self, term: Term, shape: Sequence[int]) -> Rel:
        """The relation of a value that every device has."""
        return Rel(term, tuple(shape), ((),) * len(term.shape))

    def expanded(self, rel: Rel, dims: Iterable[int]) -> Rel:
        """The relation with a term that has its real size along dims where it is constant, taken as replicated."""
        dims = set(dims)
        sizes = [n if d in dims else 1 for d, n in enumerate(rel.shape)]
        return replace(rel, term=self.filled(rel.term, sizes))

    def filled(self, term: Term, sizes: Sequence[int]) -> Term:
        """The term, with these sizes along dims where it is constant."""
        for d, n in enumerate(sizes):
            term = self.terms.expand(term, d, n)
        return term

    def coordinates(self, axes: Sequence[str]) -> dict[str, np.ndarray]:
        """axis → its coordinate on every device along ``axes``, the first axis major."""
        grids = np.indices([self.sizes[a] for a in axes]).reshape(len(axes), self.size(axes))
        return dict(zip(axes, grids, strict=True))

    def index(
        self, axes: Sequence[str], every: Sequence[str], moved: Mapping[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """int64[devices along ``every``]: the index along ``axes``, which are among them, of each device, the first one major;
        ``moved``: with other coordinates along some axes."""
        at, index = {**self.coordinates(every), **(moved or {})}, np.zeros(self.size(every), np.int64)
        for a in axes:
            index = index * self.sizes[a] + at[a]
        return index


def require(condition: bool, reason: str, refused: bool = False) -> None:
    """Raise if a lemma does not apply."""
    if not condition:
        raise Unverified(reason, refused)


def axes_of_dims(specs: Iterable[Iterable[str]]) -> frozenset[str]:
    """The axes over which dims are sharded that an op reduces together. If two of them are sharded over one axis, devices have
    blocks on a diagonal, whose sum is not that of the array."""
    axes = [a for spec in specs for a in spec]
    require(len(set(axes)) == len(axes), "a reduction along several dims that are sharded over one axis")
    return frozenset(axes)


def out_shape(eqn: JaxprEqn) -> tuple[int, ...]:
    return tuple(aval_of(eqn.outvars[0]).shape)


def out_dtype(eqn: JaxprEqn) -> str:
    return str(aval_of(eqn.outvars[0]).dtype)

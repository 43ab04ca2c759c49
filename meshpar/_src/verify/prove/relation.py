"""Relations of per-device values to global values.

On the device at some coordinates of the mesh, a value with the relation ``Rel(term, shape, spec, partial)`` is a block of the array
that ``term`` represents: along dim ``d`` the block of ``shape[d]`` elements whose number is the index of the device along the axes
``spec[d]``, the first of them major. If ``partial`` names axes, the block is the sum (or the maximum, …) of the values of all
devices along these axes. A term that depends on coordinates represents, on each device, the array for its coordinates.

Example: a device's rows ``x[2 * k : 2 * k + 2]`` of an ``x`` with 8 rows, on a mesh ``data=4``: ``Rel(x, (2, 16), (("data",),
  ()))``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from .term import Term, Terms

Spec = tuple[tuple[str, ...], ...]


class Unverified(Exception):
    """No lemma gives a relation for the results of an equation."""


class Contradiction(Unverified):
    """The relations of the operands do not fit together: no global value has these blocks."""


@dataclass(frozen=True, slots=True)
class Rel:
    """The relation of a per-device value to a global value; see the module.

    Attributes:
      term: the global value.
      shape: of the per-device value.
      spec: for each dim, the axes over which it is sharded; () where ``term`` is constant along the dim.
      partial: the axes over which the value is to be reduced.
      kind: by which reduction: ``sum``, ``max``, ``min``; for booleans ``max`` is ``or``. ``one``: a sum in which one device of
        a group has the value, and the others -0.0. With ``*``: an elementwise function of such a value.
    """

    term: Term
    shape: tuple[int, ...]
    spec: Spec
    partial: frozenset[str] = frozenset()
    kind: str = "sum"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.spec) == len(self.term.shape), (self.term, self.shape, self.spec)
        both = self.partial & (self.sharded | self.term.axes)
        require(not both, f"a value that is partial over {', '.join(sorted(both))}, and differs along it", refused=True)

    @property
    def sharded(self) -> frozenset[str]:
        """The axes over which a dim is sharded."""
        return frozenset(a for axes in self.spec for a in axes)

    @property
    def varying(self) -> frozenset[str]:
        """The axes along which devices may have different values."""
        return self.sharded | self.partial | self.term.axes

    def of(self, term: Term, shape: Sequence[int], spec: Iterable[tuple[str, ...]]) -> Rel:
        """The relation of a result that carries the partial axes along."""
        spec = tuple(axes if n != 1 else () for axes, n in zip(spec, term.shape, strict=True))
        return replace(self, term=term, shape=tuple(map(int, shape)), spec=spec)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A per-device value of which nothing is known, and the equation that is the cause."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an equation is not verified.

    Attributes:
      op: its primitive.
      line: its source line.
      reason: what has no lemma, or does not fit together.
      refused: the relations contradict each other.
    """

    op: str
    line: str
    reason: str
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.op} ({self.line}): {self.reason}"


@dataclass(slots=True)
class Context:
    """What lemmas need besides the operands.

    Attributes:
      terms: the terms of the proof.
      sizes: axis → size, of the mesh axes that a program is in the ``shard_map`` of.
      loops: the loops of the function as it was written, by their kind and length.
      kernels: (name, numbers of the operands) → a kernel of the function as it was written.
      assumed: name → number of calls of local forms of kernels.
      written: the equations are those of the function as it was written.
    """

    terms: Terms
    sizes: Mapping[str, int] = field(default_factory=dict)
    loops: dict[Any, list[Any]] = field(default_factory=dict)
    kernels: dict[Any, JaxprEqn] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    written: bool = True
    depth: int = 0

    def size(self, axes: Iterable[str]) -> int:
        """The number of devices along axes."""
        n = 1
        for a in axes:
            n *= self.sizes[a]
        return n

    def global_size(self, rel: Rel, d: int) -> int:
        return rel.shape[d] * self.size(rel.spec[d])

    def replicated(self, term: Term, shape: Sequence[int]) -> Rel:
        """The relation of a value that every device has."""
        return Rel(term, tuple(shape), ((),) * len(term.shape))

    def expanded(self, rel: Rel, dims: Iterable[int]) -> Rel:
        """The relation with a term that has its real size along dims where it is constant, taken as replicated."""
        term = rel.term
        for d in dims:
            term = self.terms.expand(term, d, rel.shape[d])
        return replace(rel, term=term)

    def coordinates(self, axes: Sequence[str]) -> dict[str, np.ndarray]:
        """axis → its coordinate on every device along ``axes``, the first axis major."""
        grids = np.indices([self.sizes[a] for a in axes]).reshape(len(axes), -1)
        return dict(zip(axes, grids, strict=True))

    def linear(self, axes: Sequence[str], at: Mapping[str, np.ndarray]) -> np.ndarray | int:
        """The index of the device along ``axes``, the first one major."""
        index: Any = 0
        for a in axes:
            index = index * self.sizes[a] + at[a]
        return index


def require(condition: bool, reason: str, refused: bool = False) -> None:
    """Raise if a lemma does not apply."""
    if not condition:
        raise (Contradiction if refused else Unverified)(reason)


def not_partial(rels: Iterable[Rel], op: str) -> None:
    """Refuse partial operands of an op that is not linear in them."""
    for rel in rels:
        require(not rel.partial, f"{op} of a value that is partial over {', '.join(sorted(rel.partial))}", refused=True)


def aval_of(var: Any) -> Any:
    """The shape and dtype of a variable."""
    return var.aval


def out_shape(eqn: JaxprEqn, k: int = 0) -> tuple[int, ...]:
    return tuple(aval_of(eqn.outvars[k]).shape)


def out_dtype(eqn: JaxprEqn, k: int = 0) -> Any:
    return aval_of(eqn.outvars[k]).dtype

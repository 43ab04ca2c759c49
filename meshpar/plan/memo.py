"""What planning the ops of a program came to, kept for its next plans on meshes of the same axes.

What the planner does for an op follows from the answers of the assignment to the questions about it, and from the shards that it
finds its operands in; of some ops, from the sizes of the mesh too. Shards are interned, so that an op which finds the same again
has its steps at hand. Causes name rules of the layout, and counts and seconds the chip: what is sent is therefore made for every
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ..hardware.algorithms import AlgorithmName
from ..hardware.chips import Chip
from ..hardware.collective_ops import CollectiveOp
from ..hardware.topology import Torus, torus_of_slices
from ..layout import Spec
from ..program.ir import Frame, Op, Program, Value
from .assignment import Names, Queries
from .plan import Placement, ShardedArray
from .steps import Run, Shard, Step

MOST = 300_000
"""Results of ops that are kept for meshes of the same axes; where there are more, all are dropped."""
MESHES = 64
"""Meshes for which results are kept."""


@dataclass(eq=False, slots=True)
class Planned:
    """What planning an op did.

    Attributes:
      reduced: the operands that it reduces; what follows is kept for the shards in which these then lie.
      copies: the operands that it needs in another spec, or that are made from no data: (value, spec, names of the op's factors,
        the copy).
      run: its step; None: it is made from no data.
      results: how these lie; free: they are made from no data.
      axes: of its factors; None: of an elementwise op.
      follows: (result, operand) whose unreduced sum it passes on.
      partial: the results that are unreduced sums over factors of its own; names: of its factors.
      rests: the values whose spec at rest was asked for.
      finish: the results to be brought to where they rest.
    """

    reduced: tuple[Value, ...] = ()
    copies: tuple[tuple[Value, Spec, Any, Shard], ...] = ()
    run: Run | None = None
    results: tuple[Placement, ...] = ()
    free: bool = False
    axes: list[tuple[str, ...]] | None = None
    follows: tuple[tuple[Value, Value], ...] = ()
    partial: tuple[Value, ...] = ()
    names: list[Names] | None = None
    rests: tuple[Value, ...] = ()
    finish: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Recipe:
    """How a part of a value that is made from no data is made.

    Attributes:
      needs: the parts of other values of which it is made; found: their shards.
      step: that makes it; None: it is the first of these.
      made: what that makes, by value and spec.
    """

    needs: tuple[tuple[Value, Spec], ...]
    found: list[Shard]
    step: Step | None
    made: dict[tuple[Value, Spec], Shard]


@dataclass(eq=False, slots=True)
class OfAxes:
    """What was planned on meshes with some axes, of whatever sizes.

    Attributes:
      shards: by value, spec, axes over which it is unreduced, kind, whether it is made from no data, and what tells copies apart.
      numbers: of answers of the assignment, by which the keys of ops have them.
      ops: by op, the numbers of its answers, and the shards that it found.
    """

    shards: dict[tuple[Any, ...], Shard] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    ops: dict[tuple[Op, Any, Any], Planned] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class OfMesh:
    """What was planned on a mesh of some sizes.

    Attributes:
      axes: what does not follow from the sizes.
      ops: what does, by the same keys.
      recipes: by body, value and spec.
      held: arguments and results, by value and spec.
      tori: the stages of its axes on slices, by their text; algorithms: of collectives on these, for a chip:
        by kind, axes and bytes sent.
    """

    axes: OfAxes
    ops: dict[tuple[Op, Any, Any], Planned] = field(default_factory=dict)
    recipes: dict[tuple[Frame, Value, Spec], Recipe] = field(default_factory=dict)
    held: dict[tuple[Value, Spec], ShardedArray] = field(default_factory=dict)
    tori: dict[str, Torus] = field(default_factory=dict)
    algorithms: dict[
        tuple[str, Chip | None],
        dict[tuple[CollectiveOp, tuple[str, ...], float], tuple[AlgorithmName, str, float | None]],
    ] = field(default_factory=dict)

    def torus(self, sizes: Mapping[str, int], topology: str) -> Torus:
        """The stages of every axis on the torus of some slices."""
        if topology not in self.tori:
            self.tori[topology] = torus_of_slices(sizes, topology)
        return self.tori[topology]


Key = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Of an op: takes its answers out of all answers, and the shards of its operands out of where values lie."""


class Memo:
    """What was planned of a program.

    Attributes:
      plans: how many plans there were. A program that is planned once keeps nothing of its ops.
      called: of a value: what collectives call it, and its dims.
    """

    def __init__(self, program: Program):
        self.plans = 0
        self.called: dict[Value, tuple[str, str]] = {}
        self._axes: dict[tuple[str, ...], OfAxes] = {}
        self._meshes: dict[tuple[tuple[str, int], ...], OfMesh] = {}
        self._keys: dict[Queries, dict[Op, Key]] = {}

    def on(self, sizes: Mapping[str, int]) -> OfMesh:
        """What was planned on a mesh; the one used longest ago is dropped where there are too many."""
        axes, key = self._axes.setdefault(tuple(sizes), OfAxes()), tuple(sizes.items())
        if max(len(axes.ops), len(axes.shards)) > MOST:
            axes = self._axes[tuple(sizes)] = OfAxes()
        found = self._meshes.pop(key, None)
        if found is None or found.axes is not axes:
            found = OfMesh(axes)
        self._meshes[key] = found
        while len(self._meshes) > MESHES:
            del self._meshes[next(iter(self._meshes))]
        return found

    def keys(self, asked: Queries) -> dict[Op, Key]:
        """By op, what the key of its results is made of."""
        found = self._keys.get(asked)
        if found is None:
            found = self._keys[asked] = {op: _key(op, places) for op, places in asked.of_op.items()}
        return found


def _key(op: Op, places: tuple[int, ...]) -> Key:
    ins = [v for v in op.ins if v is not None]
    return itemgetter(*places) if places else _nothing, itemgetter(*ins) if ins else _nothing


def _nothing(found: object) -> None:
    return None

"""Caches that the plans of one program share: shards and steps, and decisions about ops.

A decision follows from the axes that the layout assigns to an op and its results, from the shards of its operands, and from the
sizes of the mesh; these are its key. Ops with equal equations, as in equal layers, share decisions too. Shards and steps are
interned, so that ops that are planned as before have the same steps as before, and the cost model finds its cached results for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

from ..caches import LRUCache
from ..hardware.chips import Chip
from ..hardware.topology import Torus
from ..layout import Spec
from ..program.ir import Op, Program, Value
from ..rules.rule import Kind
from .assignment import AxisAssignment, Queries
from .collective_records import AlgorithmChoices
from .decide import OpDecision
from .plan import Placement, ShardedArray
from .steps import Run, Shard

T = TypeVar("T")

MAX_INTERNED = 600_000
"""Shards and steps of a program that are cached; when there are more, all are dropped."""
MESHES = 64
"""Meshes for which results are cached."""


class Interned:
    """A table in which equal shards and equal steps are one object, shared by the plans of a program.

    Attributes:
      table: by the attributes that make them.
      runs: the steps that run ops, and the placements of their results, by op, decision and operands; None: of a program that is
        planned once.
    """

    def __init__(self, planned_once: bool = False):
        self.table: dict[Hashable, Any] = {}
        self.runs: dict[tuple[Op, OpDecision, tuple[Shard | None, ...]], tuple[Run, tuple[Placement, ...]]] | None
        self.runs = None if planned_once else {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The object with a key; ``make`` makes it when it is asked for first."""
        found = self.table.get(key)
        return self.table.setdefault(key, make()) if found is None else found

    def shard(
        self, value: Value, spec: Spec, partial: tuple[str, ...] = (), kind: Kind = "sum", is_constant: bool = False,
        copy: object = None,
    ) -> Shard:  # fmt: skip
        """The shard with these attributes.

        Args:
          copy: distinguishes shards of one value in one spec: the body that a copy is made in; None: the shard that the value's
            own op makes.
        """
        key = (value, spec, partial, kind, is_constant, copy)
        return self.get(key, lambda: Shard(value, spec, partial, kind, is_constant))

    def run(
        self, op: Op, operands: tuple[Shard | None, ...], results: tuple[Shard, ...],
        axes: tuple[tuple[str, ...], ...] | None,
    ) -> Run:  # fmt: skip
        """The ``Run`` step of an op on these shards, with ``axes`` for each factor of its rule; the same object for
        equal arguments."""
        return self.get((op, operands, results, axes), lambda: Run(op, operands, results, axes))


DecisionKey = tuple[Any, ...]
"""(op, the numbers of the assignments that concern it, the shards of its operands); of a conversion also how a loop adds it up."""

Decisions = dict[DecisionKey, OpDecision]


@dataclass(eq=False, slots=True)
class MeshCache:
    """Cached parts of the plans on a mesh of some sizes.

    Attributes:
      decisions: about ops with a factor rule.
      held: the records of arguments and results, by value and spec.
      tori: the stages of its axes on slices, by the text of these.
      algorithms: of collectives, by slices and chip.
    """

    decisions: Decisions = field(default_factory=dict)
    held: dict[tuple[Value, Spec], ShardedArray] = field(default_factory=dict)
    tori: dict[str, Torus] = field(default_factory=dict)
    algorithms: dict[tuple[str, Chip | None], AlgorithmChoices] = field(default_factory=dict)


OpKey = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Of an op: takes its assignments out of all of a plan, and the shards of its operands out of all current shards."""


class PlanCache:
    """The caches of a program.

    Attributes:
      plans: how many plans were made. Of a program that is planned once nothing is cached.
      meshes: by the sizes of the axes.
      interned: shards and steps.
      numbers: of assignments, by which keys of decisions refer to them.
      decisions: about ops without a factor rule, which do not depend on the sizes of the mesh.
      op_keys: for the queries of a layout, op → the two functions that make the keys of its decisions (:data:`OpKey`).
    """

    def __init__(self, program: Program):
        """Empty caches for a program."""
        self.plans = 0
        self.meshes: LRUCache[tuple[tuple[str, int], ...], MeshCache] = LRUCache(MESHES)
        self.interned = Interned()
        self.numbers: dict[Any, int] = {}
        self.decisions: Decisions = {}
        self.op_keys: dict[Queries, dict[Op, OpKey]] = {}

    def on(self, sizes: dict[str, int]) -> MeshCache:
        """The cache of a mesh."""
        if len(self.interned.table) > MAX_INTERNED:
            # all at once: decisions refer to assignments by number, and steps to interned shards
            self.interned, self.numbers, self.decisions = Interned(), {}, {}
            self.meshes.clear()
        return self.meshes.setdefault(tuple(sizes.items()), MeshCache)


class KeyMaker:
    """Makes the keys of the decisions of one plan."""

    def __init__(self, cache: PlanCache, assignment: AxisAssignment):
        numbers, queries = cache.numbers, assignment.queries()
        if queries not in cache.op_keys:
            cache.op_keys[queries] = {op: _op_key(op, places) for op, places in queries.of_op.items()}
        self._op_keys = cache.op_keys[queries]
        self._assigned = [numbers.setdefault(answer, len(numbers)) for answer in assignment.assignments()]

    def key(self, op: Op, current: dict[Value, Shard]) -> DecisionKey:
        """The key of the decision about an op whose operands are these shards."""
        assigned, operands = self._op_keys[op]
        return op, assigned(self._assigned), operands(current)


def _op_key(op: Op, places: Sequence[int]) -> OpKey:
    ins = [v for v in op.ins if v is not None]
    return itemgetter(*places) if places else _nothing, itemgetter(*ins) if ins else _nothing


def _nothing(all_of_them: object) -> None:
    return None

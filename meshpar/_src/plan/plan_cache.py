"""Results that the plans of one program share: shards and steps, and decisions about ops.

Shards and steps are interned, so that ops that are planned as before have the same steps as before, and the cost model finds its
cached results for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ..layout import Spec
from ..program.ir import Op, Program, Value
from ..rules.rule import Kind
from .decide import OpDecision
from .steps import Run, Shard

T = TypeVar("T")

Sizes = tuple[tuple[str, int], ...]
"""(axis, size) of a mesh."""

MAX_INTERNED = 600_000
"""Shards and steps that are cached; when there are more, all are dropped."""


class PlanCache:
    """Cached parts of the plans of a program.

    Attributes:
      table: the interned shards and steps, by the attributes that make them.
      decisions: for sizes of the mesh axes, decisions about ops by all else that they depend on.
    """

    def __init__(self, program: Program):
        self.table: dict[Hashable, Any] = {}
        self.decisions: dict[Sizes, dict[Hashable, OpDecision]] = {}

    def trim(self) -> PlanCache:
        """The cache, without shards and steps, and the decisions about them, if there are too many."""
        if len(self.table) > MAX_INTERNED:
            self.table, self.decisions = {}, {}
        return self

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The interned object with a key; ``make`` makes it when it is asked for first."""
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
        self,
        op: Op,
        operands: tuple[Shard | None, ...],
        results: tuple[Shard, ...],
        axes: tuple[tuple[str, ...], ...] | None,
    ) -> Run:
        """The ``Run`` step of an op on these shards, with ``axes`` for each factor of its rule; the same object for
        equal arguments."""
        return self.get((op, operands, results, axes), lambda: Run(op, operands, results, axes))

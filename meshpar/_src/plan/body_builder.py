"""Bodies of plans under construction: the steps of each op, and the steps that are placed at their first reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..layout import Spec
from ..program.ir import Frame, Value
from .steps import Body, Shard, Step, topological_order, without_unread

StepGroup = list[Step | Callable[[], Step]]
"""The steps of one op; a step with bodies is made in the end, by a function."""


@dataclass(eq=False, slots=True)
class BodyBuilder:
    """A :class:`Body` under construction: the emitter appends steps, and ``body`` then makes the immutable body.

    Attributes:
      groups: for every op, in order, its steps and those that follow from it.
      deferred: steps that are placed before the first step that reads their results.
      copies: (value, spec) → its copy, or its shard if it is input-independent.
    """

    frame: Frame
    groups: list[StepGroup] = field(default_factory=list)
    deferred: list[Step] = field(default_factory=list)
    copies: dict[tuple[Value, Spec], Shard] = field(default_factory=dict)

    def new_group(self) -> StepGroup:
        """A new, empty group of steps after the others."""
        group: StepGroup = []
        self.groups.append(group)
        return group

    def body(self, inputs: Sequence[Shard], outputs: Sequence[Shard | None]) -> Body:
        """The body. The groups are emptied: their functions refer to the planner, and the planner to them."""
        steps = [s if isinstance(s, Step) else s() for group in self.groups for s in group]
        for group in self.groups:
            group.clear()
        placed = topological_order([*self.deferred, *steps], outputs, set(self.deferred).__contains__)
        needed = without_unread(placed, set(outputs)) if outputs else placed  # none of a call
        return Body(self.frame, tuple(inputs), needed, tuple(outputs), self.frame.trip_count)

"""What a gather that is left to the compiler can hide behind: products of its body that neither make what it sends nor wait for it.

The TPU compiler (libtpu 0.0.42) sends a gather asynchronously while other products run, but on some chips only
(``Chip.waits`` in :mod:`meshpar.hardware.chips`). In the schedule of a recomputed Llama layer on v5e the gather
of the cotangent of the attention's output runs beside the gradients of the MLP's weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cost.fusion import PRODUCTS
from ..program.ir import Op, Value
from .finding import home_of

if TYPE_CHECKING:
    from ..plan.plan import Plan, Sent


class Free:
    """Products that no pair has, body by body: each hides one gather.

    Args:
      taken: ids of the products of all pairs. They have hops of their own to hide, if they run on rings.
    """

    def __init__(self, plan: Plan, taken: set[int]):
        self.bodies: dict[int, list[Op]] = {}
        self.before: dict[int, set[int]] = {}
        for op in plan.program.root.walk():
            if op.name in PRODUCTS and id(op) in plan.ops and id(op) not in taken:
                self.bodies.setdefault(id(home_of(op.frame)), []).append(op)

    def beside(self, sent: Sent) -> list[Op]:
        """The products that can run while a value is gathered."""
        users = {id(op) for op in sent.users}
        makes = set() if sent.value.op is None else {id(sent.value.op)} | self._before(sent.value.op)
        return [
            op
            for op in self.bodies.get(id(home_of(sent.frame)), [])
            if id(op) not in makes | users and not users & self._before(op)
        ]

    def take(self, sent: Sent, ops: list[Op]) -> None:
        """Let products hide a gather: they hide no other."""
        gone = {id(op) for op in ops}
        key = id(home_of(sent.frame))
        self.bodies[key] = [op for op in self.bodies.get(key, []) if id(op) not in gone]

    def _before(self, op: Op) -> set[int]:
        """Ids of the ops of the same body that an op waits for."""
        if id(op) not in self.before:
            home, found = home_of(op.frame), set[int]()
            todo: list[Value | None] = list(op.ins)
            while todo:
                v = todo.pop()
                if v is None or v.op is None or id(v.op) in found or home_of(v.op.frame) is not home:
                    continue
                found.add(id(v.op))
                todo += v.op.ins
            self.before[id(op)] = found
        return self.before[id(op)]

"""Which operands and results of a loop are constants, carries and stacks, and which operands the bodies of an equation take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jax.extend.core import JaxprEqn

from .jax import body_operands, scan_counts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopParts:
    """The positions of the operands of a ``scan`` or ``while``, in the order of ``eqn.invars``.

    The arguments of the body are its constants, the carries and, of a scan, a slice of each stack, so that operands of a scan and
    arguments of its body have the same positions. The results are the carries, then the arrays that a scan stacks.

    Attributes:
      condition: the constants of a while loop's condition; empty for a scan.
      consts: the constants of the body.
      carries: the first values of the carries.
      stacks: the arrays that a scan slices; empty for a while loop.
    """

    condition: range
    consts: range
    carries: range
    stacks: range

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """The (constants of the body, carries, stacks) of one item per operand; of a scan, also of one per argument of the body."""
        consts, carries, stacks = (list(operands[r.start : r.stop]) for r in (self.consts, self.carries, self.stacks))
        return consts, carries, stacks

    def split_results(self, results: Sequence[T]) -> tuple[list[T], list[T]]:
        """The (carries, stacked results) of one item per result of the loop, or of the body."""
        return list(results[: len(self.carries)]), list(results[len(self.carries) :])

    def carried(self, arguments: Sequence[T]) -> list[T]:
        """The carries of one item per argument of the body, or of a while loop's condition."""
        stop = len(arguments) - len(self.stacks)
        return list(arguments[stop - len(self.carries) : stop])


def loop_parts(eqn: JaxprEqn) -> LoopParts:
    """The parts of a ``scan`` or ``while``."""
    if "cond_nconsts" in eqn.params:
        counts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        ends = counts[0], sum(counts), len(eqn.invars)
    else:
        consts, carries = scan_counts(eqn.params)
        ends = 0, consts, consts + carries
    return LoopParts(*map(range, (0, *ends), (*ends, len(eqn.invars))))


def operands_of_bodies(eqn: JaxprEqn, operands: Sequence[T]) -> list[Sequence[T]]:
    """For each body of a loop, branch or call, the operand that each of its arguments takes, in the order of ``Op.frames``.

    A ``while`` has a condition and a body. An argument of a scan's body may take a slice of the operand.
    """
    name = eqn.primitive.name
    if name == "scan":
        return [operands]
    if name == "while":
        parts = loop_parts(eqn)
        consts, carries, _ = parts.split(operands)
        return [[*operands[: len(parts.condition)], *carries], [*consts, *carries]]
    if name == "cond":
        return [operands[1:]] * len(eqn.params["branches"])
    return [body_operands(eqn, operands)]

"""Causes of collectives, in words: the rule that split a contracted dim, and why an operand is resharded."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Spec
from ..program.ir import Op, Program, Value
from ..rules.rule import REDUCTIONS
from .assignment import AxisAssignment, Names
from .spec import format_axes

FactorAxes = Sequence[tuple[str, ...]]
"""The axes that split each factor of an op; empty for an op without a factor rule."""


class Causes:
    """The wording of causes in the plan of a program under a layout."""

    def __init__(self, program: Program, assignment: AxisAssignment):
        self.program, self.assignment = program, assignment

    def dim(self, value: Value, i: int) -> str:
        """The name of a dim of a value, or ``dim 1``."""
        return self.program.dim_name(value, i) or f"dim {i}"

    def factor_names(self, op: Op) -> tuple[Names, ...]:
        """The names of the factors of an op; none for an op without a factor rule."""
        return () if op.rule is None else self.assignment.factor_names(op)

    def scattered(self, op: Op, factor_axes: FactorAxes, value: Value, i: int, axes: tuple[str, ...]) -> str:
        """Why a result is reduce-scattered over axes along dim i."""
        over = format_axes(axes)
        return f"{self.contracted(op, factor_axes, axes)}; the result is split over {over} on `{self.dim(value, i)}`"

    def all_reduced(self, op: Op, factor_axes: FactorAxes, axes: tuple[str, ...]) -> str:
        """Why a result is all-reduced over axes."""
        return f"{self.contracted(op, factor_axes, axes)}; no dim of the result is split over {format_axes(axes)}"

    def contracted(self, op: Op, factor_axes: FactorAxes, axes: Sequence[str]) -> str:
        """Why a result is partial over axes: the rules that split the factors that an op contracts."""
        reasons = []
        names = self.factor_names(op)
        for f, split_over in enumerate(factor_axes):
            shared = [a for a in split_over if a in axes]
            if shared and op.rule is not None and op.rule.kinds[f] in (*REDUCTIONS, "pass_through", "permutation"):
                rule = self.assignment.rule_text(names[f], shared[0])
                dim = names[f][0] if names[f] else "a factor"
                does = "indexes" if op.rule.kinds[f] == "indexed" else "contracts"
                reasons.append(f"`{rule or format_axes(shared)}` splits `{dim}`, which {op.name} {does}")
        return " and ".join(reasons) or f"partial sums over {format_axes(axes)}"

    def resharded(self, op: Op, factor_axes: FactorAxes, value: Value, have: Spec, need: Spec) -> str:
        """The cause of a reshard of an operand, as a clause: why ``op`` needs ``value`` in the spec ``need`` rather
        than ``have``."""
        names = self.factor_names(op)
        reasons = []
        for i, (before, after) in enumerate(zip(have, need, strict=True)):
            for a in before:
                if a in after:
                    continue
                dim = self.dim(value, i)
                dim_names = [x for ns, _ in self.program.sub_dims(value, i) for x in ns]
                rule = self.assignment.rule_text(dim_names, a) or f"{dim}: {a}"
                owners = (names[f][0] for f, split_over in enumerate(factor_axes) if a in split_over and names[f])
                owner = next(owners, None)
                if owner is not None:
                    reasons.append(f"`{rule}` lost `{a}` to `{owner}` in this {op.name}, so `{dim}` is gathered")
                elif any(a in entry for entry in need):
                    reasons.append(f"`{a}` moves from `{dim}` to another dim in this {op.name}")
                elif op.rule is not None and not op.rule.known:
                    reasons.append(f"{op.name} has no factor rule, so `{dim}` is gathered")
                else:
                    reasons.append(f"{op.name} needs all of `{dim}`, which `{rule}` splits")
        return "; ".join(reasons) or f"this {op.name} needs it so"

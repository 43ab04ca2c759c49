"""Causes of collectives, in words: the rule that split a contracted dim, and why an operand is resharded."""

from __future__ import annotations

from collections.abc import Sequence

from ..dims import format_dims
from ..layout import Spec
from ..program.ir import Op, Value
from ..rules.rule import ADDED, REDUCTIONS
from .assignment import AxisAssignment, Names
from .shard_shapes import format_axes

FactorAxes = Sequence[tuple[str, ...]]
"""The axes that split each factor of an op; empty for an op without a factor rule."""


NAMES = {
    "rename_dims": "mp.rename",
    "name_dims": "mp.named",
    "dot_general": "the matmul",
    "conv_general_dilated": "the convolution",
    "gather": "the lookup",
    "reduce_sum": "the sum",
}
"""Primitives → how causes call them, where that is not the name of the primitive: a function of meshpar, or plain words."""


ALONG = "permutation", "need_replication"
"""Kinds of the factors of a dim that an op cuts, joins, reorders or needs unsharded."""


def name_of(op: Op) -> str:
    """How causes and hints call an op: its kernel, the function that a user called, plain words, or its primitive."""
    return op.label if op.primitive.family == "kernel" else NAMES.get(op.name, op.name)


def _has_kind(op: Op, value: Value, i: int, kinds: Sequence[str]) -> bool:
    """Whether dim i of an operand or result of an op has a factor of these kinds; it may be ``value`` inside of a loop."""
    if op.rule is None:
        return False
    arrays = zip((*op.ins, *op.outs), (*op.rule.ins, *op.rule.outs), strict=True)
    dims = (own for v, own in arrays if v is not None and v.nodes == value.nodes)
    return any(op.rule.kinds[f] in kinds for own in dims if own for f in own[i])  # no dims: it is not split


class Causes:
    """The wording of causes in the plan of a program under a layout."""

    def __init__(self, assignment: AxisAssignment):
        self.program, self.assignment = assignment.program, assignment

    def _lost(self, have: Spec, need: Spec) -> list[tuple[int, str]]:
        """(dim, axis) for the axes that a spec has on a dim, and another one has not; without axes of one device."""
        dims = enumerate(zip(have, need, strict=True))
        return [(i, a) for i, (h, n) in dims for a in h if a not in n and self.assignment.sizes[a] > 1]

    def dim(self, value: Value, i: int) -> str:
        """The name of a dim of a value, or ``dim 1``."""
        return self.program.dim_name(value, i) or f"dim {i}"

    def _names(self, value: Value, i: int) -> list[str]:
        """All names of the parts of a dim of a value."""
        return [name for names, _ in self.program.sub_dims(value, i) for name in names]

    def factor_names(self, op: Op) -> tuple[Names, ...]:
        """The names of the factors of an op; none for an op without a factor rule."""
        return () if op.rule is None else self.assignment.factor_names(op)

    def scattered(self, op: Op, factor_axes: FactorAxes, value: Value, i: int, axes: tuple[str, ...]) -> str:
        """Why a result is reduce-scattered over axes along dim i."""
        return f"{self._partial(op, factor_axes, axes)}, and each device keeps its part of `{self.dim(value, i)}`"

    def all_reduced(self, op: Op, factor_axes: FactorAxes, axes: tuple[str, ...]) -> str:
        """Why a result is all-reduced over axes."""
        return f"{self._partial(op, factor_axes, axes)} on every device"

    def _partial(self, op: Op, factor_axes: FactorAxes, axes: Sequence[str]) -> str:
        """Why a result is partial over axes, by the rules that split the factors that an op contracts, and what follows."""
        reasons: dict[str, None] = {}
        kinds = set[str]()
        for f, (names, split_over) in enumerate(zip(self.factor_names(op), factor_axes, strict=False)):
            shared = [a for a in split_over if a in axes and self.assignment.sizes[a] > 1]
            kind = "" if op.rule is None else op.rule.kinds[f]
            if shared and kind in (*REDUCTIONS, "pass_through", "permutation"):
                rule = self.assignment.rule_text(names, shared[0])
                dim = f"`{names[0]}`" if names else "a dim"
                reasons[f"{f'`{rule}`' if rule else format_axes(shared)} splits {dim}"] = None
                kinds.add(kind)
        if kinds == {"indexed"}:
            has, then = "only the rows of its own part", "the rows are added up"
        elif kinds & REDUCTIONS - ADDED:
            has, then = "only the result of its own part", "the results are combined"
        else:
            has, then = "only a part of the sum", "the parts are added up"
        why = f"({', '.join(reasons)})" if reasons else f"over {format_axes(axes)}"
        return f"each device has {has} {why}, so {then}"

    def resharded(self, op: Op, factor_axes: FactorAxes, value: Value, have: Spec, need: Spec) -> str:
        """The cause of a reshard of an operand: why ``op`` needs ``value`` in the spec ``need`` rather than ``have``."""
        names, name = self.factor_names(op), name_of(op)
        reasons = []
        for i, a in self._lost(have, need):
            dim = self.dim(value, i)
            dim_names = self._names(value, i)
            rule = self.assignment.rule_text(dim_names, a)
            splits = f"`{rule}` splits" if rule else f"is split over `{a}`"
            having = [names[f] for f, split_over in enumerate(factor_axes) if a in split_over and names[f]]
            by_rule = (own[0] for own in having if self.assignment.rule_text(own, a))  # the planner may choose others
            owner = next(by_rule, None) or self._owner(op, dim_names, a)
            other = next((self.dim(value, j) for j, entry in enumerate(need) if a in entry), None)
            part = f"the parts of `{dim}` over `{a}`" if need[i] else f"all of `{dim}`"
            fetches = f"each device first fetches {part}, which {splits}"
            so = fetches if other is None else f"`{a}` moves to `{other}` from `{dim}`{f' (`{rule}`)' if rule else ''}"
            if owner == dim:
                reasons.append(f"another `{dim}` already takes `{a}`, so {so}")
            elif owner is not None:
                reasons.append(f"`{owner}` already takes `{a}`, so {so}")
            elif _has_kind(op, value, i, ALONG) and having:
                reasons.append(f"{name} cannot work on shards of `{dim}`, so {so}")
            elif other is not None:
                reasons.append(f"{name} needs `{a}` on `{other}`, so {so}")
            elif op.rule is not None and not op.rule.known:
                reasons.append(f"{name} has no factor rule, so {so}")
            elif _has_kind(op, value, i, ("indexed",)):
                reasons.append(
                    f"{name} reads rows of `{dim}` several times, so {so}: adding up the rows of each read sends more"
                )
            else:
                reasons.append(f"{name} needs all of `{dim}`, which {splits}, so each device fetches it first")
        return "; ".join(dict.fromkeys(reasons)) or f"{name} needs the axes of an operand in another order"

    def _owner(self, op: Op, dim_names: Sequence[str], axis: str) -> str | None:
        """The dim of an elementwise op's result that has the axis by a rule, in place of a dim with the names ``dim_names``."""
        if op.rule is not None or not op.outs:
            return None
        out = op.outs[0]
        for i in range(len(out.shape)):
            names = self._names(out, i)
            if not set(names) & set(dim_names) and self.assignment.rule_text(names, axis):
                return self.dim(out, i)
        return None

    def stored(self, op: Op | None, value: Value, have: Spec, need: Spec) -> str:
        """Why the result ``value`` of an op is resharded: how the layout stores it, ``need``, and how it is computed,
        ``have``. Without an op it is a result of the program."""
        makes = f"the result {value.path} is computed" if op is None else f"{name_of(op)} makes its result"
        on = {a: self.dim(value, i) for i, entry in enumerate(need) for a in entry}
        made: dict[str, None] = {}
        kept: dict[str, None] = {}
        for i, a in self._lost(have, need):
            dim = self.dim(value, i)
            to = next((j for j, entry in enumerate(need) if a in entry), None)
            if to is not None and op is not None and _has_kind(op, value, to, ALONG):
                rule = self.assignment.rule_text(self._names(value, to), a)
                back = f"so `{a}` moves back to it from `{dim}`{f' (`{rule}`)' if rule else ''}"
                return f"{name_of(op)} cannot work on shards of `{on[a]}`, {back}"
            made[f"`{a}` on `{dim}`"] = None
            full = f"`{dim}` not split over `{a}`" if need[i] else f"all of `{dim}`"
            kept[f"`{a}` on `{on[a]}`" if a in on else full] = None
        if not made:
            return f"{makes} with the axes of a dim in another order than the layout stores it"
        return f"{makes} with {' and '.join(made)}, but the layout stores it with {' and '.join(kept)}"

    def local_form(self, op: Op, factor_axes: FactorAxes, axes: tuple[str, ...], why: str) -> str:
        """Why the local form of an op communicates over axes; ``why``: the data that it sends, in a few words."""
        over = format_axes(axes)
        if op.rule is not None and op.rule.given is not None:
            return f"{op.label} itself sends over {over}: {why}"
        pairs = zip(self.factor_names(op), factor_axes, strict=False)
        dims = dict.fromkeys(names[0] for names, split_over in pairs if names and set(split_over) & set(axes))
        along = " and ".join(f"`{dim}`" for dim in dims) or "a dim"
        rule = self.assignment.rule_text(list(dims), axes[0]) if len(dims) == 1 else None
        splits = "split" if rule is None and len(axes) > 1 else "splits"
        return f"{f'`{rule}`' if rule else over} {splits} {along}, and {name_of(op)} works along it: {why}"

    def sent_dims(self, op: Op, shape: Sequence[int]) -> str:
        """The names of the dims of the array that the local form of an op sends: the dims of its first operand of
        the same rank, else the sizes ``4 × 16``."""
        value = next((v for v in op.ins if v is not None and len(v.shape) == len(shape)), None)
        return " × ".join(map(str, shape)) if value is None else format_dims(self.program.dims(value))

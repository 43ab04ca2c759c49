"""Axis assignment: which axes a value, or an op's factors, get; and the scopes that hold for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..caches import LRUCache
from ..layout import SCOPES, Layout, Rule, Spec, claim
from ..program.ir import Op, Program, Value
from ..rules import ELEMENTWISE, OpRule
from .spec import replicated_spec

Names = tuple[str, ...]
Items = tuple[tuple[Names, int], ...]
"""(names, size) of every dim of a value, or of every factor of an op."""
_Claimed = dict[tuple[Items, tuple[str, ...]], tuple[Spec, dict[int, int]]]
"""By items and scopes: the axes of every item, and the rules that were refused."""
MAX_CHOICES = 512


@dataclass(frozen=True)
class OpQuery:
    """All of an op that its assignment depends on: ops of equal questions are split alike under every layout.

    Attributes:
      items: (names, size) of every factor, as :func:`meshpar.layout.claim` takes them.
      groups: of :func:`permutation_groups`.
      leaders: of every factor the one that it is split like.
      nested: of :func:`_nested`; sizes: of every factor.
    """

    items: tuple[tuple[Names, int], ...]
    groups: tuple[frozenset[int], ...]
    leaders: tuple[int, ...]
    nested: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.items, self.groups, self.leaders, self.nested, self.sizes))

    def __hash__(self) -> int:
        return self._hash

    def linked(self, axes: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The axes of every factor, those of leaders for the factors that follow them."""
        return [axes[f] for f in self.leaders]


@dataclass(frozen=True, eq=False, slots=True)
class GroupAssignment:
    """What the questions of one group get.

    Attributes:
      axes: the axes of every dim, or factor, of each.
      indivisible: the places among these of questions of which a claim was refused, because a size does not divide.
    """

    axes: tuple[tuple[tuple[str, ...], ...], ...]
    indivisible: tuple[int, ...]


MAX_CACHED_ASSIGNMENTS = 4096
"""Sets of rules and mesh sizes for which the answers of a group are cached."""


@dataclass(frozen=True, eq=False, slots=True)
class RuleGroup:
    """Questions about the same names, in the same scopes: the same rules answer them.

    Attributes:
      queries: :data:`Items` of a value or an op, or the question of an op with a rule; a spec that the user gave a value.
      names: that they are about; scopes: that hold for them, None for given specs.
      cache: by the rules for these names, and the sizes of the mesh.
    """

    queries: tuple[Any, ...]
    names: frozenset[str]
    scopes: tuple[str, ...] | None
    cache: LRUCache[tuple[tuple[Rule, ...], tuple[tuple[str, int], ...]], GroupAssignment]


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """The distinct questions of a program to the assignment of layouts that name the same scopes.

    Attributes:
      groups: the questions, in order.
      index: (question, scopes that hold) → its place.
      of_op: for every op without bodies the places of its questions: of what it makes, then of itself.
    """

    groups: tuple[RuleGroup, ...]
    index: dict[tuple[Any, tuple[str, ...] | None], int]
    of_op: dict[Op, tuple[int, ...]]


_Answers = dict[tuple[OpQuery, tuple[str, ...]], list[tuple[str, ...]]]
"""By question and scopes: the axes of every factor."""


class _ProgramTables:
    """What is asked about the values and ops of a program, whatever the layout.

    Attributes:
      items: of values; of elementwise ops with annotated operands (None: it has none).
      names, questions: of ops with rules; distinct: these questions.
      scopes, asked: by the scopes that the rules of a layout name.
      given: dim (its root) → the axes over which results of the user's own ``shard_map``s have it.
    """

    def __init__(self, program: Program):
        self.items: dict[Value | Op, Items | None] = {}
        self.names: dict[Op, list[Names]] = {}
        self.questions: dict[Op, OpQuery] = {}
        self.distinct: dict[OpQuery, OpQuery] = {}
        self.scopes: dict[tuple[str, ...], dict[Value, tuple[str, ...]]] = {}
        self.asked: dict[tuple[str, ...], Queries] = {}
        self.shard_map_axes = _given(program)
        self._answered: tuple[Any, _Claimed, _Answers] = None, {}, {}

    def answered(self, rules: tuple[Rule, ...], sizes: tuple[tuple[str, int], ...]) -> tuple[_Claimed, _Answers]:
        """What was claimed under some rules on a mesh, if they are the last that were asked about; else nothing."""
        if self._answered[0] != (rules, sizes):
            self._answered = (rules, sizes), {}, {}
        return self._answered[1:]


class AxisAssignment:
    """Answers who gets which axis, for the values and ops of one program under one layout and mesh."""

    def __init__(self, program: Program, layout: Layout, sizes: Mapping[str, int]):
        self.program, self.layout, self.sizes = program, layout, sizes
        self.named_scopes = tuple(sorted({r.scope for r in layout.rules if r.scope is not None}))
        self.scoped = bool(self.named_scopes)
        self.tables = program.cached(_ProgramTables)
        if self.scoped and self.named_scopes not in self.tables.scopes:
            self.tables.scopes[self.named_scopes] = _scopes(program, layout)
        self.scopes = self.tables.scopes[self.named_scopes] if self.scoped else {}
        self.indivisible: dict[Value, tuple[Value, int, int]] = {}
        self.notes: list[str] = []
        self.shard_map_axes = self.tables.shard_map_axes
        self._by_nodes: dict[object, Spec] = {}
        self._item_axes, self._op_axes = self.tables.answered(layout.rules, tuple(sizes.items()))
        self._all: tuple[GroupAssignment, ...] | None = None

    def scopes_of(self, value: Value) -> tuple[str, ...]:
        return self.scopes.get(value, ())

    def items(self, items: tuple[tuple[Names, int], ...], scopes: tuple[str, ...]):
        """Memoised :func:`meshpar.layout.claim`."""
        key = (items, scopes)
        found = self._item_axes.get(key)
        if found is None:
            axes, refused = claim(self.layout, items, self.sizes, scopes)
            found = self._item_axes[key] = (tuple(axes), refused)
        return found

    def value_items(self, value: Value) -> tuple[tuple[Names, int], ...]:
        """(names, size) of every dim, as an op has them that loops over it: merged dims have the names of the leading part."""
        found = self.tables.items.get(value)
        if found is None:
            parts = [self.program.parts(value, i) for i in range(len(value.shape))]
            names = [p[0][0] if p else () for p in parts]
            found = self.tables.items[value] = tuple(zip(names, value.shape, strict=True))
        return found

    def value_spec(self, value: Value) -> Spec:
        """The spec in which a value is stored. Arrays without elements are not split: XLA returns them with the global shape."""
        if 0 in value.shape:
            return replicated_spec(len(value.shape))
        if value.explicit is not None:
            return value.explicit
        plain = value.annotation is None and not self.scoped
        if plain and (found := self._by_nodes.get((value.nodes, value.shape))) is not None:
            return found
        axes, refused = self.items(self.value_items(value), self.scopes_of(value))
        for i, rule in refused.items():
            self.indivisible.setdefault(value, (value, i, rule))
        if self.shard_map_axes:
            axes = self.nameless_as_given(value, axes)
        if plain:
            self._by_nodes[value.nodes, value.shape] = axes
        return axes

    def unused_optional_rules(self, value: Value) -> Iterator[tuple[Rule, int]]:
        """The rules marked ``?`` that do not divide a dim of an array, each with the dim; not those whose axes another dim has."""
        spec = self.value_spec(value)
        used = {a for entry in spec for a in entry}
        for i, (names, size) in enumerate(self.value_items(value)):
            for rule in (self.layout.rules[r] for r in self.layout.rules_of(names, self.scopes_of(value))):
                free = not spec[i] and used.isdisjoint(rule.axes)
                if rule.optional and free and size % math.prod(self.sizes[a] for a in rule.axes):
                    yield rule, i

    def nameless_as_given(self, value: Value, axes: Spec) -> Spec:
        """The spec with dims that have no name split as a ``shard_map`` of the user's own makes them (what it keeps for its
        backward pass, also where a loop stacks that up)."""
        find = self.program.unifier.find
        given = [
            () if names or node < 0 else self.shard_map_axes.get(find(node), ())
            for node, (names, _) in zip(value.nodes, self.value_items(value), strict=True)
        ]
        taken = {a for mine in given for a in mine}
        if not taken:
            return axes
        return tuple(mine or tuple(a for a in entry if a not in taken) for mine, entry in zip(given, axes, strict=True))

    def op_scopes(self, op: Op, outs: Sequence[Value]) -> tuple[str, ...]:
        """An elementwise op is in the scopes of any value that it touches; another op in those that all its arrays are in."""
        if not self.scoped:
            return ()
        ins = [v for v in op.ins if v is not None and v.shape]
        if op.rule is None:
            found = {s for v in (*ins, *outs) if v.shape == outs[0].shape for s in self.scopes_of(v)}
        else:
            found = set.intersection(*(set(self.scopes_of(v)) for v in ins)) if ins else set()
        return tuple(sorted(found))

    def elementwise_spec(self, op: Op, out: Value) -> Spec:
        """The spec in which an elementwise op works: its result's, unless annotated operands call its dims otherwise."""
        items = self.work_items(op, out)
        if items is None and not self.scoped:
            return self.value_spec(out)
        return self.items(items or self.value_items(out), self.op_scopes(op, [out]))[0]

    def work_items(self, op: Op, out: Value) -> Items | None:
        """(names, size) of the dims of an elementwise op with annotated operands; None: there are none."""
        if op not in self.tables.items:
            self.tables.items[op] = self._work_items(op, out)
        return self.tables.items[op]

    def _work_items(self, op: Op, out: Value) -> Items | None:
        annotated = [v for v in op.ins if v is not None and v.annotation is not None and v.shape == out.shape]
        if not annotated:
            return None
        items = []
        for i, (names, size) in enumerate(self.value_items(out)):
            given = tuple(dict.fromkeys(v.annotation[i] for v in annotated if v.annotation and v.annotation[i]))
            items.append((given, out.shape[i]) if given else (names, size))
        return tuple(items)

    def factor_names(self, op: Op) -> list[Names]:
        """The names of every factor of an op: those of annotated operands and results, else of the joined classes.

        A factor that is primed in one of the values stays so in the op: of two factors called ``seq`` the query's keeps the axis.
        """
        found = self.tables.names.get(op)
        if found is None:
            found = self.tables.names[op] = self._factor_names(op)
        return found

    def _factor_names(self, op: Op) -> list[Names]:
        rule = op.rule
        assert rule is not None
        given: list[dict[str, None]] = [{} for _ in rule.sizes]
        joined: list[dict[str, None]] = [{} for _ in rule.sizes]
        primed: dict[int, Names] = {}

        def join(factor: int, names: Names) -> None:
            joined[factor].update(dict.fromkeys(names))
            if names and names[0].endswith("'"):
                primed[factor] = names

        for value, dims in [*zip(op.ins, rule.ins, strict=True), *zip(op.outs, rule.outs, strict=True)]:
            if value is None or not dims:
                continue
            for i, factors in enumerate(dims):
                if not factors:
                    continue
                own = value.annotation[i] if value.annotation is not None else None
                if own is not None:
                    given[factors[0]][own] = None
                    continue
                parts = self.program.unifier.parts_of(value.nodes[i])
                if [size for _, size in parts] == [rule.sizes[f] for f in factors]:
                    for f, (names, _) in zip(factors, parts, strict=True):
                        join(f, names)
                elif parts:
                    join(factors[0], parts[0][0])
        return [tuple(a) or primed.get(f) or tuple(b) for f, (a, b) in enumerate(zip(given, joined, strict=True))]

    def factor_axes(
        self, op: Op, names: list[Names], scopes: tuple[str, ...], cost: Callable[[list[tuple[str, ...]]], float] | None
    ) -> list[tuple[str, ...]]:
        """The axes of every factor of an op.

        Args:
          cost: bytes moved by a choice; where given and the layout resolves by cost, the cheapest choice is taken.
        """
        assert op.rule is not None
        asked = self._query(op, names)
        if cost is None or self.layout.resolve != "cost":
            return list(self._query_axes(asked, scopes))
        axes = self._claimed(asked.groups, asked.items, scopes)
        axes = self._cheapest(op, asked.items, scopes, axes, lambda choice: cost(asked.linked(choice)))
        return contiguous_only(op.rule, asked.linked(axes), self.sizes)

    def _query_axes(self, asked: OpQuery, scopes: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = self._op_axes.get((asked, scopes))
        if found is None:
            axes = asked.linked(self._claimed(asked.groups, asked.items, scopes))
            found = self._op_axes[asked, scopes] = _blocks_only(asked.nested, asked.sizes, axes, self.sizes)
        return found

    def _query(self, op: Op, names: list[Names]) -> OpQuery:
        found = self.tables.questions.get(op)
        if found is None:
            found = self.tables.questions[op] = self._new_query(op, names)
        return found

    def _new_query(self, op: Op, names: list[Names]) -> OpQuery:
        rule = op.rule
        assert rule is not None
        follows = {b: a for a, b in rule.sharded_like}
        fit = list(rule.sizes)
        names = list(names)
        for follower, leader in follows.items():
            fit[leader] = math.gcd(fit[leader], rule.sizes[follower])
            names[leader] = names[leader] or names[follower]
        items = tuple(
            (() if kind == "need_replication" or f in follows else n, size)
            for f, (n, size, kind) in enumerate(zip(names, fit, rule.kinds, strict=True))
        )
        groups = tuple(map(frozenset, permutation_groups(rule)))
        leaders = tuple(follows.get(f, f) for f in range(len(items)))
        asked = OpQuery(items, groups, leaders, _nested(rule), tuple(rule.sizes))
        return self.tables.distinct.setdefault(asked, asked)

    def _claimed(
        self, groups: Sequence[frozenset[int]], items: tuple[tuple[Names, int], ...], scopes: tuple[str, ...]
    ) -> list[tuple[str, ...]]:
        """The axes of an op's factors.

        Own factors that never stand in one array (tokens, experts) may be split over the same axis: the op exchanges them.
        So each such group assignment axes beside the other factors by itself; the others keep what they get beside all groups.
        """
        if len(groups) < 2:
            return list(self.items(items, scopes)[0])
        every = {f for group in groups for f in group}
        found = []
        for group in groups:
            mine = tuple(((), size) if f in every - group else (n, size) for f, (n, size) in enumerate(items))
            found.append(self.items(mine, scopes)[0])
        axes = [got if all(other[f] == got for other in found) else () for f, got in enumerate(found[0])]
        for group, got in zip(groups, found, strict=True):
            for f in group:
                axes[f] = got[f]
        return axes

    def _cheapest(
        self, op: Op, items: Sequence[tuple[Names, int]], scopes: tuple[str, ...], first: list[tuple[str, ...]],
        cost: Callable[[list[tuple[str, ...]]], float],
    ) -> list[tuple[str, ...]]:  # fmt: skip
        """Try every choice of one factor (or none) for every axis that several want; keep the first assignment on a tie.

        Where there are more than :data:`MAX_CHOICES` choices, axes are tried one after the other instead, and a note says so.
        """
        wants: dict[str, list[int]] = {}
        for i, (names, size) in enumerate(items):
            if size == 1:
                continue
            for r in self.layout.rules_of(names, scopes):
                for a in self.layout.rules[r].axes:
                    if i not in wants.setdefault(a, []):
                        wants[a].append(i)
        contested = {a: who for a, who in wants.items() if self.sizes.get(a, 1) > 1}
        if all(len(who) == 1 for who in contested.values()):
            return first
        choices: Iterable[tuple[int | None, ...]]
        choices = itertools.product(*([*who, None] for who in contested.values()))
        every = math.prod(len(w) + 1 for w in contested.values())
        if every > MAX_CHOICES:
            start = tuple(next((i for i, ax in enumerate(first) if a in ax), None) for a in contested)
            choices = (
                (*start[:k], i, *start[k + 1 :]) for k, who in enumerate(contested.values()) for i in (*who, None)
            )
            note = f"{op.name} at {op.source}: of {every} ways to split it only those in which one axis goes elsewhere were tried"
            if note not in self.notes:
                self.notes.append(note)
        best, least = first, cost(first)
        for choice in choices:
            axes: list[tuple[str, ...]] = [()] * len(items)
            for a, i in zip(contested, choice, strict=True):
                if i is not None:
                    axes[i] += (a,)
            if all(n % math.prod(self.sizes[a] for a in ax) == 0 for (_, n), ax in zip(items, axes, strict=True) if ax):
                bytes_ = cost(axes)
                if bytes_ < least - 0.5:
                    best, least = axes, bytes_
        return best

    def assignments(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """What the questions of :meth:`asked` get. Layouts of the same scopes that give the same on a mesh have one plan."""
        return tuple(itertools.chain.from_iterable(found.axes for found in self.group_assignments()))

    def group_assignments(self) -> tuple[GroupAssignment, ...]:
        """What the questions of each group get, once for all layouts with the same rules for its names."""
        if self._all is None:
            rules, sizes = self.layout.rules, tuple(self.sizes.items())
            found = []
            for group in self.queries().groups:
                scopes = group.scopes or ()
                mine = tuple(r for r in rules if r.dim in group.names and (r.scope is None or r.scope in scopes))
                found.append(group.cache.setdefault((mine, sizes), lambda group=group: self._assign_group(group)))
            self._all = tuple(found)
        return self._all

    def _assign_group(self, group: RuleGroup) -> GroupAssignment:
        found, refused = [], []
        for k, question in enumerate(group.queries):
            if group.scopes is None:
                found.append(question)
            elif isinstance(question, OpQuery):
                found.append(tuple(self._query_axes(question, group.scopes)))
            else:
                axes, rules = self.items(question, group.scopes)
                found.append(axes)
                refused += [k] * bool(rules)
        return GroupAssignment(tuple(found), tuple(refused))

    def all_indivisible(self) -> list[tuple[Value, int, int]]:
        """(value, dim, rule) where a size does not divide, for one value of each set of joined dims, in program order."""
        if not any(group.indivisible for group in self.group_assignments()):
            return []
        in_order = AxisAssignment(self.program, self.layout, self.sizes)
        frames = [self.program.root]
        values = list(self.program.inputs)
        while frames:
            frame = frames.pop()
            for op in frame.ops:
                frames += op.frames
                values += op.outs
            values += frame.ins()
        for value in values:
            in_order.value_spec(value)
        return list(in_order.indivisible.values())

    def queries(self) -> Queries:
        """The questions of the program, where rules name the scopes that those of the layout do."""
        found = self.tables.asked.get(self.named_scopes)
        if found is None:
            found = self.tables.asked[self.named_scopes] = self._all_queries()
        return found

    def _all_queries(self) -> Queries:
        places: dict[tuple[Any, tuple[str, ...] | None], int] = {}

        def place(question: Any, scopes: tuple[str, ...] | None) -> int:
            return places.setdefault((question, scopes), len(places))

        def of(value: Value) -> int:
            if value.explicit is not None:
                return place(value.explicit, None)
            return place(self.value_items(value), self.scopes_of(value))

        for value in self.program.inputs:
            of(value)
        ops: dict[Op, tuple[int, ...]] = {}
        for op in self.program.root.walk():
            outs = tuple(map(of, op.outs))
            if op.frames:
                for frame in op.frames:
                    for value in frame.ins():
                        of(value)
                continue
            work: tuple[int, ...] = ()
            if op.rule is not None and op.rule.given is None:
                work = (place(self._query(op, self.factor_names(op)), self.op_scopes(op, op.outs)),)
            elif op.rule is None and len(op.outs) == 1:
                items = self.work_items(op, op.outs[0])
                if items is not None or self.scoped:
                    work = (place(items or self.value_items(op.outs[0]), self.op_scopes(op, op.outs)),)
            ops[op] = (*outs, *work)
        return _grouped_by_rules(places, ops)

    def rule_text(self, names: Sequence[str], axis: str, scopes: Sequence[str] = ()) -> str | None:
        """The text of the rule that gives these names this axis."""
        names = (*names, *(n.removesuffix("-inner") for n in names if n.endswith("-inner")))
        for r in self.layout.rules_of(names, scopes or self._all_scopes()):
            if axis in self.layout.rules[r].axes:
                return str(self.layout.rules[r])
        return None

    def _all_scopes(self) -> tuple[str, ...]:
        return tuple({r.scope for r in self.layout.rules if r.scope})


def _grouped_by_rules(
    questions: Iterable[tuple[Any, tuple[str, ...] | None]], ops: Mapping[Op, tuple[int, ...]]
) -> Queries:
    """Questions with the scopes that hold, and for ops their places among them, with those of each group together."""
    topics: dict[tuple[frozenset[str], tuple[str, ...] | None], list[tuple[int, Any]]] = {}
    for k, (question, scopes) in enumerate(questions):
        items = () if scopes is None else question.items if isinstance(question, OpQuery) else question
        topics.setdefault((frozenset(n for names, _ in items for n in names), scopes), []).append((k, question))
    new = {k: at for at, (k, _) in enumerate(itertools.chain.from_iterable(topics.values()))}
    return Queries(
        tuple(
            RuleGroup(tuple(q for _, q in mine), *about, LRUCache(MAX_CACHED_ASSIGNMENTS))
            for about, mine in topics.items()
        ),
        {(q, scopes): new[k] for (_, scopes), mine in topics.items() for k, q in mine},
        {op: tuple(new[k] for k in mine) for op, mine in ops.items()},
    )


def permutation_groups(rule: OpRule) -> list[set[int]]:
    """The own factors of a rule, those that stand in one array together, or are split alike."""
    groups: list[set[int]] = []
    arrays = [{f for dim in dims for f in dim} for dims in (*rule.ins, *rule.outs)]
    for together in (*arrays, *map(set, rule.sharded_like)):
        mine = {f for f in together if rule.kinds[f] == "permutation"}
        if mine:
            touched = [g for g in groups if g & mine]
            groups = [g for g in groups if not g & mine] + [mine.union(*touched)]
    return groups


def _nested(rule: OpRule) -> tuple[tuple[int, int], ...]:
    """(major, minor) of the factors that stand next to each other in one dim."""
    return tuple(pair for dims in (*rule.ins, *rule.outs) for factors in dims for pair in itertools.pairwise(factors))


def contiguous_only(rule: OpRule, axes: list[tuple[str, ...]], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Drop axes of factors that would not cut their dim in blocks: a minor factor, unless all before it are cut to 1.

    What is dropped in one array may be major to another factor in the next, so this goes on until nothing changes.
    """
    return _blocks_only(_nested(rule), rule.sizes, axes, sizes)


def _blocks_only(
    pairs: Sequence[tuple[int, int]], whole: Sequence[int], axes: list[tuple[str, ...]], sizes: Mapping[str, int]
) -> list[tuple[str, ...]]:
    """As :func:`contiguous_only`, of pairs of (major, minor) factors and the sizes of all."""
    axes = list(axes)

    def cuts_no_block(major: int, minor: int) -> bool:
        return bool(axes[minor]) and math.prod(sizes[a] for a in axes[major]) != whole[major]

    while dropped := [minor for major, minor in pairs if cuts_no_block(major, minor)]:
        for minor in dropped:
            axes[minor] = ()
    return axes


def spec_from_factors(dims: Sequence[Sequence[int]], axes: Sequence[tuple[str, ...]]) -> Spec:
    """The spec of an operand or result whose dims are made of these factors."""
    return tuple(tuple(a for f in factors for a in axes[f]) for factors in dims)


def _given(program: Program) -> dict[int, tuple[str, ...]]:
    """Dim (its root) → the axes over which results of the user's own ``shard_map``s have it."""
    found: dict[int, tuple[str, ...]] = {}
    for op in program.root.walk():
        if op.rule is None or op.rule.given is None:
            continue
        for value, dims in zip(op.outs, op.rule.outs, strict=True):
            for node, (factor,) in zip(value.nodes, dims, strict=True):
                if node >= 0 and op.rule.given[factor]:
                    found.setdefault(program.unifier.find(node), op.rule.given[factor])
    return found


def _scopes(program: Program, layout: Layout) -> dict[Value, tuple[str, ...]]:
    """The scopes of every value: those of the inputs and outputs, spread over elementwise ops to values without any.

    Optimizer state spreads through any op all of whose arrays are in its scope (factored moments, Newton-Schulz).
    """
    seeds: dict[Value, tuple[str, ...]] = {}
    for value in (*program.inputs, *program.outputs):
        if value.path is not None and value.shape:
            seeds[value] = tuple({*seeds.get(value, ()), *layout.scopes_of(value.path, value.kind)})
    links: dict[Value, list[Value]] = {}
    through: list[tuple[list[Value], list[Value]]] = []

    def link(a: Value | None, b: Value | None) -> None:
        if a is not None and b is not None and a is not b and a.shape and b.shape:
            links.setdefault(a, []).append(b)
            links.setdefault(b, []).append(a)

    for op in program.root.walk():
        if op.frames:
            _link_bodies(op, link)
        elif op.name in ELEMENTWISE or op.rule is None or op.rule.strong:
            for out in op.outs:
                for v in op.ins:
                    if v is not None and (op.rule is not None or v.shape == out.shape):
                        link(v, out)
        else:
            ins = [v for v in op.ins if v is not None and v.shape]
            if ins:
                through.append((ins, [v for v in op.outs if v.shape]))
    owned = {v for v in (*program.inputs, *program.outputs) if v.kind is not None or seeds.get(v)}
    found: dict[Value, set[str]] = {i: set(s) for i, s in seeds.items() if s}
    changed = True
    while changed:
        changed = False
        for scope in dict.fromkeys(r.scope for r in layout.rules if r.scope):
            todo = [i for i, s in found.items() if scope in s]
            while todo:
                for j in links.get(todo.pop(), ()):
                    if j not in owned and scope not in found.setdefault(j, set()):
                        found[j].add(scope)
                        todo.append(j)
        if "opt" in layout_scopes(layout):
            for ins, outs in through:
                if all("opt" in found.get(i, ()) for i in ins):
                    for j in outs:
                        if j not in owned and "opt" not in found.setdefault(j, set()):
                            found[j].add("opt")
                            changed = True
    return {i: tuple(sorted(s)) for i, s in found.items() if s}


def layout_scopes(layout: Layout) -> set[str]:
    return {r.scope for r in layout.rules if r.scope in SCOPES}


def _link_bodies(op: Op, link: Callable[[Value | None, Value | None], None]) -> None:
    """What a loop carries, stacks and reads is one value inside and outside."""
    p = op.eqn.params
    for frame in op.frames:
        inner = [frame.env[v] for v in frame.jaxpr.invars]
        results = [frame.env.get(v) if not hasattr(v, "val") else None for v in frame.jaxpr.outvars]
        outer: list[Value | None] = list(op.ins)
        if op.primitive.branch:
            outer = outer[1:]
        elif op.primitive.loop and not op.primitive.scan:
            nc, nb = p["cond_nconsts"], p["body_nconsts"]
            body = frame is op.frames[1]
            outer = (op.ins[nc : nc + nb] if body else op.ins[:nc]) + op.ins[nc + nb :]
            if not body:
                results = []
        for a, b in zip(outer[len(outer) - len(inner) :], inner, strict=False):
            link(a, b)
        for a, b in zip(op.outs, results, strict=False):
            link(a, b)

"""Axis assignment: which mesh axes shard the dims of every value and the factors of every op, under a layout.

A *query* contains all that an assignment depends on: for a value, the (names, size) of its dims; for an op, also how its factors
are related. Values and ops with equal queries are sharded alike, so a query is answered once. Queries about the same names are a
*rule group*: layouts with the same rules for these names share its results.

Given the layout ``batch: data; embed: model; mlp: model`` on ``data=4, model=2``:

- a value ``[batch 8, embed 16]`` gets the spec ``(("data",), ("model",))``;
- a value ``[embed 16, mlp 64]`` gets ``(("model",), ())``: the first dim of the first rule that claims ``model`` has it;
- a value ``[batch 6]`` gets ``((),)``: 4 does not divide 6, and ``indivisible[value]`` is ``{0: 0}``, dim 0 by rule 0;
- a matmul ``[batch, embed] @ [embed, mlp]`` has the factors batch, mlp, embed (contracted) and gets ``data`` for batch and
  ``model`` for embed, so its result is partial over ``model``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dims import Dims
from ..layout import Layout, Rule, Spec, claim, scopes_of
from ..lru_cache import LRUCache
from ..program.ir import Op, Program, Value
from ..program.names import SubDim
from ..program.roles import elementwise_flow, new_values, unread_state
from ..rules import OpRule
from .factor_specs import contiguous_of_pairs, contiguous_only, nested_factors, permutation_groups
from .shard_shapes import replicated_spec

Names = tuple[str, ...]
Items = tuple[tuple[Names, int], ...]
"""(names, size) of every dim of a value, or of every factor of an op."""
MAX_CHOICES = 512
"""Ways to assign the contested axes of an op up to which all are costed (``resolve="cost"``)."""


@dataclass(frozen=True)
class OpQuery:
    """All that the assignment of an op depends on: ops with equal queries are sharded alike under every layout.

    Attributes:
      items: (names, size) of every factor, as :func:`layout.claim` takes them.
      groups: the :func:`permutation_groups` of its rule.
      leaders: for every factor, the factor that it is sharded like, by default itself.
      nested: the :func:`nested_factors` pairs of its rule.
      sizes: of every factor.
    """

    items: tuple[tuple[Names, int], ...]
    groups: tuple[frozenset[int], ...]
    leaders: tuple[int, ...]
    nested: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    def linked(self, axes: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The axes of every factor, given the axes of all leaders."""
        return [axes[f] for f in self.leaders]


@dataclass(frozen=True, eq=False, slots=True)
class GroupAssignment:
    """The axes that a layout assigns to the queries of one :class:`RuleGroup`.

    Attributes:
      axes: for each query, the axes of every dim or factor.
      indivisible: for each query, dim → the first rule whose axes do not divide it.
    """

    axes: tuple[tuple[tuple[str, ...], ...], ...]
    indivisible: tuple[dict[int, Rule], ...]


MAX_CACHED_ASSIGNMENTS = 4096
"""(rules, mesh sizes) for which a rule group caches its assignment."""


@dataclass(frozen=True, eq=False, slots=True)
class RuleGroup:
    """Queries about the same names in the same scopes: their assignment depends on the rules for these names alone.

    Attributes:
      queries: :data:`Items` of a value or an elementwise op, the query of an op with a rule, or a spec that the user gave a value.
      names: of the dims and factors in them.
      scopes: of their values; None: the queries are given specs.
      cache: (rules for these names, sizes of the mesh) → assignment.
    """

    queries: tuple[Any, ...]
    names: frozenset[str]
    scopes: tuple[str, ...] | None
    cache: LRUCache[tuple[tuple[Rule, ...], tuple[tuple[str, int], ...]], GroupAssignment]


@dataclass(frozen=True, eq=False, slots=True)
class Queries:
    """The distinct queries of a program, for layouts whose rules name the same scopes.

    Attributes:
      groups: the queries, in order.
      of_value: for every value, the index of its query.
      of_op: for every op without bodies, the indices of the queries of its results, then the index of the op's own query.
    """

    groups: tuple[RuleGroup, ...]
    of_value: dict[Value, int]
    of_op: dict[Op, tuple[int, ...]]


class AxisAssignment:
    """Which axes shard the values and ops of one program under one layout on one mesh.

    Attributes:
      notes: sentences for the plan's notes.
      queries: the distinct queries of the program, for layouts that name the same scopes.
      groups: the assignment of each rule group.
      axes: for each of ``queries``, the axes of its dims or factors. Two layouts that name the same scopes and have equal axes on a
        mesh have the same plan.
      named_scopes: the scopes that the rules of the layout name; scoped: there are some.
    """

    def __init__(self, program: Program, layout: Layout, sizes: Mapping[str, int]):
        """The assignment for mesh axes of these sizes (axis → size)."""
        self.program, self.layout, self.sizes = program, layout, sizes
        self.named_scopes = tuple(sorted({r.scope for r in layout.rules if r.scope is not None}))
        self.scoped = bool(self.named_scopes)
        self.scopes = program.cached(_scopes, self.named_scopes) if self.scoped else {}
        self.notes: list[str] = []
        self.shard_map_axes = program.cached(_shard_map_axes)
        queries = program.cached(_queries)
        if self.named_scopes not in queries:
            queries[self.named_scopes] = self._all_queries()
        self.queries = queries[self.named_scopes]
        self.groups = tuple(map(self._of_group, self.queries.groups))
        self.axes = tuple([axes for group in self.groups for axes in group.axes])
        self._indivisible = [rules for group in self.groups for rules in group.indivisible]

    def scopes_of(self, value: Value) -> tuple[str, ...]:
        """The scopes that a value is in, among those that the layout names."""
        return self.scopes.get(value, ())

    def value_items(self, value: Value) -> tuple[tuple[Names, int], ...]:
        """(names, size) of every dim. A merged dim has the names of its major sub-dim: only that may be sharded."""
        sub_dims = [self.program.sub_dims(value, i) for i in range(len(value.shape))]
        return tuple(zip([dims[0][0] if dims else () for dims in sub_dims], value.shape, strict=True))

    def value_spec(self, value: Value) -> Spec:
        """The stored spec of a value. Arrays without elements are replicated: XLA returns them with the global shape."""
        spec = self.axes[self.queries.of_value[value]]
        return self.nameless_as_given(value, spec) if self.shard_map_axes and value.explicit is None else spec

    def indivisible(self, value: Value) -> dict[int, Rule]:
        """Dim of a value → the first rule whose axes do not divide it."""
        return self._indivisible[self.queries.of_value[value]]

    def unused_optional_rules(self, value: Value) -> Iterator[tuple[Rule, int]]:
        """Yields (rule, dim) for the rules of a value marked ``?`` that shard nothing because their axes do not divide
        the dim.

        ``rule`` is the :class:`Rule` of the layout, and ``dim`` the position of the dim in the value. Left out are
        rules of which an axis shards another dim of the value.
        """
        spec = self.value_spec(value)
        used = {a for entry in spec for a in entry}
        for i, (names, size) in enumerate(self.value_items(value)):
            for rule in (self.layout.rules[r] for r in self.layout.rules_of(names, self.scopes_of(value))):
                free = not spec[i] and used.isdisjoint(rule.axes)
                if rule.optional and free and size % math.prod(self.sizes[a] for a in rule.axes):
                    yield rule, i

    def nameless_as_given(self, value: Value, axes: Spec) -> Spec:
        """A spec in which unnamed dims are sharded as the user's own ``shard_map`` returns them.

        Residuals that the ``shard_map`` saves for its backward pass have such dims, also where a loop stacks them.
        """
        find = self.program.unifier.find
        given = [
            () if names or node < 0 else self.shard_map_axes.get(find(node), ())
            for node, (names, _) in zip(value.nodes, self.value_items(value), strict=True)
        ]
        used = {a for entry in given for a in entry}
        if not used:
            return axes
        return tuple(own or tuple(a for a in entry if a not in used) for own, entry in zip(given, axes, strict=True))

    def op_scopes(self, op: Op, outs: Sequence[Value]) -> tuple[str, ...]:
        """The scopes of an op: if elementwise, all scopes of its operands and results; else the scopes that all operands share."""
        if not self.scoped:
            return ()
        ins = [v for v in op.ins if v is not None and v.shape]
        if op.rule is None:
            scopes = {s for v in (*ins, *outs) if v.shape == outs[0].shape for s in self.scopes_of(v)}
        else:
            scopes = set.intersection(*(set(self.scopes_of(v)) for v in ins)) if ins else set()
        return tuple(sorted(scopes))

    def elementwise_spec(self, op: Op) -> Spec:
        """The spec in which an elementwise op computes: its result's, unless annotated operands name its dims differently."""
        queries = self.queries.of_op[op]
        return self.axes[queries[-1]] if len(queries) > len(op.outs) else self.value_spec(op.outs[0])

    def work_items(self, op: Op, out: Value) -> Items | None:
        """(names, size) of the dims of an elementwise op that has annotated operands; None: it has none."""
        annotations = [v.annotation for v in op.ins if v is not None and v.annotation and v.shape == out.shape]
        if not annotations:
            return None
        given = [tuple(dict.fromkeys(filter(None, names))) for names in zip(*annotations, strict=True)]
        return tuple((own or names, n) for own, (names, n) in zip(given, self.value_items(out), strict=True))

    def factor_names(self, op: Op) -> tuple[Names, ...]:
        """The names of every factor of an op, as annotated on operands and results, else as inferred.

        If a factor has a primed name (``seq'``) in one of the values, it has it in the op: of the two ``seq``
        dims of attention, the dim of the queries gets the axis.
        """
        sub_dims_of = self.program.unifier.sub_dims_of
        values = (*op.ins, *op.outs)
        arrays = tuple([v and (v.annotation, tuple(map(sub_dims_of, v.nodes))) for v in values])
        names = self.program.cached(_factor_names)
        key = op.factor_rule, arrays  # equal in equal layers
        if key not in names:
            names[key] = self._factor_names(*key)
        return names[key]

    def _factor_names(
        self, rule: OpRule, arrays: Sequence[tuple[Dims | None, tuple[tuple[SubDim, ...], ...]] | None]
    ) -> tuple[Names, ...]:
        """The names of the factors of a rule; ``arrays``: (annotation, sub-dims of every dim) of operands and results."""
        given: list[dict[str, None]] = [{} for _ in rule.sizes]
        joined: list[dict[str, None]] = [{} for _ in rule.sizes]
        primed: dict[int, Names] = {}

        def join(factor: int, names: Names) -> None:
            joined[factor].update(dict.fromkeys(names))
            if names and names[0].endswith("'"):
                primed[factor] = names

        for array, dims in zip(arrays, (*rule.ins, *rule.outs), strict=True):
            if array is None or not dims:
                continue
            annotation, split = array
            for i, factors in enumerate(dims):
                if not factors:
                    continue
                own = annotation[i] if annotation is not None else None
                if own is not None:
                    given[factors[0]][own] = None
                    continue
                sub_dims = split[i]
                if [size for _, size in sub_dims] == [rule.sizes[f] for f in factors]:
                    for f, (names, _) in zip(factors, sub_dims, strict=True):
                        join(f, names)
                elif sub_dims:
                    join(factors[0], sub_dims[0][0])
        return tuple(tuple(a) or primed.get(f) or tuple(b) for f, (a, b) in enumerate(zip(given, joined, strict=True)))

    def factor_axes(
        self, op: Op, cost: Callable[[list[tuple[str, ...]]], float] | None = None
    ) -> list[tuple[str, ...]]:
        """The axes of every factor of an op.

        Args:
          cost: axes of the factors → bytes sent, by which conflicts are resolved; None: by the order of the rules.
        """
        if cost is None:
            return list(self.axes[self.queries.of_op[op][-1]])
        query, scopes = self.op_query(op)
        axes = self._cheapest(
            op, query.items, scopes, self._claimed(query, scopes), lambda way: cost(query.linked(way))
        )
        return contiguous_only(op.factor_rule, query.linked(axes), self.sizes)

    def op_query(self, op: Op) -> tuple[OpQuery, tuple[str, ...]]:
        """(query, scopes) of an op with a rule. A factor that is sharded like another one has no names: its leader has them."""
        rule = op.factor_rule
        follows = {b: a for a, b in rule.sharded_like}
        fit, names = list(rule.sizes), list(self.factor_names(op))
        for follower, leader in follows.items():
            fit[leader] = math.gcd(fit[leader], rule.sizes[follower])
            names[leader] = names[leader] or names[follower]
        items = tuple(
            (() if kind == "need_replication" or f in follows else n, size)
            for f, (n, size, kind) in enumerate(zip(names, fit, rule.kinds, strict=True))
        )
        groups = tuple(map(frozenset, permutation_groups(rule)))
        leaders = tuple(follows.get(f, f) for f in range(len(items)))
        query = OpQuery(items, groups, leaders, nested_factors(rule), tuple(rule.sizes))
        return query, self.op_scopes(op, op.outs)

    def _claimed(self, query: OpQuery, scopes: tuple[str, ...]) -> list[tuple[str, ...]]:
        """The axes of an op's factors.

        Permutation factors that never occur in the same array (tokens, experts) may share a mesh axis: the op exchanges them with
        an all-to-all. So the factors are assigned once for each group of them, without the other groups. A factor outside of all
        groups gets the axes that it has in all of these assignments, else none.
        """
        groups, items = query.groups, query.items
        if len(groups) < 2:
            return claim(self.layout, items, self.sizes, scopes)[0]
        grouped = {f for group in groups for f in group}
        by_group = []
        for group in groups:
            own = tuple(((), size) if f in grouped - group else (n, size) for f, (n, size) in enumerate(items))
            by_group.append(claim(self.layout, own, self.sizes, scopes)[0])
        axes = [first if all(other[f] == first for other in by_group) else () for f, first in enumerate(by_group[0])]
        for group, group_axes in zip(groups, by_group, strict=True):
            for f in group:
                axes[f] = group_axes[f]
        return axes

    def _cheapest(
        self, op: Op, items: Sequence[tuple[Names, int]], scopes: tuple[str, ...], first: list[tuple[str, ...]],
        cost: Callable[[list[tuple[str, ...]]], float],
    ) -> list[tuple[str, ...]]:  # fmt: skip
        """The axes of the factors with the lowest cost, over all choices of one factor for every contested axis.

        An axis is contested if the rules of several factors name it. No choice leaves an axis unused that ``first``, by the order
        of the rules, uses: all devices along it would compute the same, which the count of bytes does not show. ``first`` is
        taken if several choices cost the same. If there are more than :data:`MAX_CHOICES`
        choices, only those that differ from ``first`` in one axis are costed, and a note says so.
        """
        wants: dict[str, list[int]] = {}
        for i, (names, size) in enumerate(items):
            if size == 1:
                continue
            for r in self.layout.rules_of(names, scopes):
                for a in self.layout.rules[r].axes:
                    if i not in wants.setdefault(a, []):
                        wants[a].append(i)
        wanted = {a: who for a, who in wants.items() if self.sizes.get(a, 1) > 1}
        if all(len(who) == 1 for who in wanted.values()):
            return first
        start = tuple(next((i for i, ax in enumerate(first) if a in ax), None) for a in wanted)
        ways = [[*who, *([] if i is not None else [None])] for who, i in zip(wanted.values(), start, strict=True)]
        choices: Iterable[tuple[int | None, ...]] = itertools.product(*ways)
        every = math.prod(map(len, ways))
        if every > MAX_CHOICES:
            choices = ((*start[:k], i, *start[k + 1 :]) for k, way in enumerate(ways) for i in way)
            compared = f"of {every} ways to split it, only those that differ in one axis were compared"
            note = f"{op.name} at {op.location_of_layers}: {compared}"
            if note not in self.notes:
                self.notes.append(note)
        best, least = first, cost(first)
        for choice in choices:
            axes: list[tuple[str, ...]] = [()] * len(items)
            for a, i in zip(wanted, choice, strict=True):
                if i is not None:
                    axes[i] += (a,)
            if all(n % math.prod(self.sizes[a] for a in ax) == 0 for (_, n), ax in zip(items, axes, strict=True) if ax):
                bytes_ = cost(axes)
                # half a byte: sums of floats in another order differ in their last digits
                if bytes_ < least - 0.5:
                    best, least = axes, bytes_
        return best

    def _of_group(self, group: RuleGroup) -> GroupAssignment:
        """The assignment of a rule group, shared by all layouts with the same rules for its names."""
        scopes = group.scopes or ()
        own = tuple(r for r in self.layout.rules if r.dim in group.names and (r.scope is None or r.scope in scopes))
        return group.cache.setdefault((own, tuple(self.sizes.items())), lambda: self._assign_group(group))

    def _assign_group(self, group: RuleGroup) -> GroupAssignment:
        """The assignment of a rule group under this layout."""
        out, indivisible = [], []
        for query in group.queries:
            axes, refused = query, {}
            if isinstance(query, OpQuery):
                linked = query.linked(self._claimed(query, group.scopes or ()))
                axes = contiguous_of_pairs(query.nested, query.sizes, linked, self.sizes)
            elif group.scopes is not None:
                axes, refused = claim(self.layout, query, self.sizes, group.scopes)
            out.append(tuple(axes))
            indivisible.append({i: self.layout.rules[r] for i, r in refused.items()})
        return GroupAssignment(tuple(out), tuple(indivisible))

    def all_indivisible(self) -> Iterator[tuple[Value, int, Rule]]:
        """Yields (value, dim, rule) where a size does not divide, for one value of each set of joined dims, in program order."""
        seen: set[object] = set()
        for value in self._all_values() if any(self._indivisible) else ():
            # annotations and scopes belong to one value; without them, values with equal dims have equal specs
            key = (value.nodes, value.shape) if value.annotation is None and not self.scoped else value
            if key not in seen:
                seen.add(key)
                yield from ((value, i, rule) for i, rule in self.indivisible(value).items())

    def all_indivisible_optional(self, rules: Collection[Rule]) -> Iterator[tuple[Value, int, Rule]]:
        """Yields the (value, dim) whose sizes these optional rules do not divide, in program order."""
        for value in self._all_values() if rules else ():
            yield from ((value, i, rule) for rule, i in self.unused_optional_rules(value) if rule in rules)

    def _all_values(self) -> Iterator[Value]:
        """Yields the values of the program: its inputs, then the results and inputs of each frame."""
        yield from self.program.inputs
        frames = [self.program.root]
        while frames:
            frame = frames.pop()
            for op in frame.ops:
                frames += op.frames
                yield from op.outs
            yield from frame.ins()

    def _all_queries(self) -> Queries:
        """The distinct queries of the program, for layouts that name the scopes of this one."""
        index: dict[tuple[Any, tuple[str, ...] | None], int] = {}

        def add(query: Any, scopes: tuple[str, ...] | None) -> int:
            return index.setdefault((query, scopes), len(index))

        def add_value(value: Value) -> int:
            given = replicated_spec(len(value.shape)) if 0 in value.shape else value.explicit
            query = (given, None) if given is not None else (self.value_items(value), self.scopes_of(value))
            return values.setdefault(value, add(*query))

        values: dict[Value, int] = {}
        for value in (*self.program.inputs, *self.program.constants, *self.program.outputs):
            add_value(value)
        ops: dict[Op, tuple[int, ...]] = {}
        for op in self.program.root.walk():
            outs = tuple(map(add_value, op.outs))
            if op.frames:
                for frame in op.frames:
                    for value in frame.ins():
                        add_value(value)
                continue
            work: tuple[int, ...] = ()
            if op.rule is not None and op.rule.given is None:
                work = (add(*self.op_query(op)),)
            elif op.rule is None and op.outs:
                items = self.work_items(op, op.outs[0])
                if items is not None or self.scoped:
                    work = (add(items or self.value_items(op.outs[0]), self.op_scopes(op, op.outs)),)
            ops[op] = (*outs, *work)
        return _grouped_by_rules(index, values, ops)

    def rule_text(self, names: Sequence[str], axis: str) -> str | None:
        """The text of the rule, of any scope, that gives an axis to a dim with one of these names; None: no rule does."""
        names = (*names, *(n.removesuffix("-inner") for n in names if n.endswith("-inner")))
        for r in self.layout.rules_of(names, self.named_scopes):
            if axis in self.layout.rules[r].axes:
                return str(self.layout.rules[r])
        return None


def _grouped_by_rules(
    queries: Iterable[tuple[Any, tuple[str, ...] | None]],
    values: Mapping[Value, int],
    ops: Mapping[Op, tuple[int, ...]],
) -> Queries:
    """The queries in the order of their rule groups.

    Args:
      queries: (query, scopes of its values), in any order; values, ops: for each value and op, indices in that order.
    """
    groups: dict[tuple[frozenset[str], tuple[str, ...] | None], list[tuple[int, Any]]] = {}
    for k, (query, scopes) in enumerate(queries):
        items = () if scopes is None else query.items if isinstance(query, OpQuery) else query
        groups.setdefault((frozenset(n for names, _ in items for n in names), scopes), []).append((k, query))
    new = {k: at for at, (k, _) in enumerate(itertools.chain.from_iterable(groups.values()))}
    return Queries(
        tuple(
            RuleGroup(tuple(q for _, q in own), *about, LRUCache(MAX_CACHED_ASSIGNMENTS))
            for about, own in groups.items()
        ),
        {value: new[k] for value, k in values.items()},
        {op: tuple(new[k] for k in own) for op, own in ops.items()},
    )


def _shard_map_axes(program: Program) -> dict[int, tuple[str, ...]]:
    """Dim (its root) → the axes over which the user's own ``shard_map``s return it."""
    axes_of: dict[int, tuple[str, ...]] = {}
    for op in program.root.walk():
        if op.rule is None or op.rule.given is None:
            continue
        for value, dims in zip(op.outs, op.rule.outs, strict=True):
            for node, (factor,) in zip(value.nodes, dims, strict=True):
                if node >= 0 and op.rule.given[factor]:
                    axes_of.setdefault(program.unifier.find(node), op.rule.given[factor])
    return axes_of


def _queries(program: Program) -> dict[tuple[str, ...], Queries]:
    """The queries of a program, by the scopes that layouts name; they are added."""
    return {}


def _factor_names(program: Program) -> dict[Any, tuple[Names, ...]]:
    """(rule, annotations and sub-dims of the operands and results) of ops → names of the factors; they are added."""
    return {}


def _scopes(program: Program, named: tuple[str, ...]) -> dict[Value, tuple[str, ...]]:
    """value → its scopes: the scopes of inputs and outputs, propagated through elementwise ops to values without a scope.

    The scope ``opt`` is also propagated through any op all of whose operands are in it (factored moments, Newton-Schulz). An input
    has the scopes of its path and kind only, and so has its new value; state that is updated with a parameter also has its scopes.
    """
    seeds: dict[Value, tuple[str, ...]] = {}
    for value in (*program.inputs, *program.outputs):
        if value.path is not None and value.shape:
            seeds[value] = tuple({*seeds.get(value, ()), *scopes_of(named, value.path, value.kind)})
    flow, new, state = program.cached(elementwise_flow), program.cached(new_values), program.cached(unread_state)
    for old, result in new.items():  # `"ema/*".embed` matches the argument `ema/up`, but not the result `1/up`
        seeds[result] = seeds[result] or seeds[old]
    owned = {v for v in (*program.inputs, *program.outputs) if v.kind is not None or seeds.get(v)}
    found: dict[Value, set[str]] = {}
    for scope in named:
        opt = scope == "opt"
        of_scope = [v for v, own in seeds.items() if scope in own]
        others = {v for v in program.inputs if scope not in seeds.get(v, ()) and (opt or v not in state)}
        stored = owned | flow.bound(others) | {new[v] for v in others & new.keys()}
        for value in flow.spread(of_scope, stored, through=opt):
            found.setdefault(value, set()).add(scope)
    return {i: tuple(sorted(s)) for i, s in found.items()}

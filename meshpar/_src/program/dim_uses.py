"""The uses of each dim of a program: the facts from which :mod:`program.names_from_uses` infers names.

Facts are about classes of equal dims (:mod:`program.names`), and only about the forward pass: the backward pass contracts the
dims that the forward pass makes.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from ..compat.loop_operands import loop_parts, operands_of_bodies
from .ir import Frame, Op, Program, Value
from .names import NONE
from .roles import new_values

DimClass = int
"""A class of equal dims: the root of the weak class of a node of the unifier."""
CONTAINERS = re.compile(r"(^|/)(params|model|weights?)(/|$)")
"""The paths of weights in a program that updates none."""
MAX_SOURCES = 8
"""Ops that :attr:`DimUses.sources` keeps of a value; a sum of more is a residual stream in any case."""


class Fact(StrEnum):
    """A use of a dim by an op. A weight is an argument that the step updates, or a function of such; other values are data."""

    BATCH = "dim 0 of an argument that is no weight, or dim 1 after time"
    LOOPED = "the dim of a stack of weights, over which a loop runs"
    ROWS = "rows of a weight, looked up by integers of the batch"
    OF_ROW = "another dim of a weight whose rows are looked up"
    LABEL = "a dim of activations, made by a matmul, that integers of the batch look up"
    SHARED = "a batch dim of a matmul of two activations, other than the batch, or of scores and values alike: heads"
    SCORED = "contracted in such a matmul, and made by a matmul of a weight: queries and keys"
    SUMMED = "contracted in such a matmul, and not made by one: positions of the keys"
    VALUES = "the other dim of the operand whose positions are summed"
    STACKED = "a batch dim of a matmul of a weight"
    GROUPS = "the groups of a ragged matmul"
    CHOSEN = "the dim of a top_k of activations"
    WINDOW = "a spatial dim of the kernel of a convolution"
    CONV_MADE, CONV_READ = "the results of a convolution", "contracted by a convolution"
    MADE, READ = "a dim of the result of a matmul, from its weight", "contracted in a matmul of a weight"
    READ_PLAIN = "so, of an activation that is itself the result of such a matmul, up to linear elementwise ops"
    RESIDUAL = (
        "a dim of a sum of two activations of different origin; results of two matmuls only if one depends on the other"
    )
    REDUCED = "a sum or maximum runs over it"


class DimUses:
    """The facts about all classes of dims of a program.

    Attributes:
      weights, data: its arguments; optimizer state is neither.
      facts: class → fact → the ops (of :attr:`Fact.BATCH`, the arguments) that show it.
      paths: class → the paths of the weights that have it, with ``*`` for numbers: equal layers count once.
      declared: class → (name in the rule of a kernel, op).
      twins: class → classes that would be the same if no value had dims of both.
      batch_dim: of data: 0, or 1 where a scan with a state of the batch runs over dim 0.
      read_by: a matmul of a weight → the classes that it contracts.
      lookups: (rows of a weight, op): integers of the batch look the rows up.
    """

    def __init__(self, program: Program) -> None:
        """Walk the program once."""
        self.unifier = program.unifier
        self.weights, self.data = weights_and_data(program)
        self.facts: defaultdict[DimClass, defaultdict[Fact, list[Op | Value]]] = defaultdict(lambda: defaultdict(list))
        self.paths: defaultdict[DimClass, set[str]] = defaultdict(set)
        self.declared: defaultdict[DimClass, list[tuple[str, Op]]] = defaultdict(list)
        self.twins: defaultdict[DimClass, set[DimClass]] = defaultdict(set)
        self.read_by: defaultdict[Op, set[DimClass]] = defaultdict(set)
        self.lookups: list[tuple[DimClass, Op]] = []
        self.batch_dim: dict[Value, int] = {}
        self._is_data = set(self.data)  # and the values that are computed from data
        # activation → the ops, other than elementwise ones, that its values come from
        self._sources: dict[Value, frozenset[Op]] = {}
        self._plain: set[Value] = set()  # results of matmuls, up to linear elementwise ops
        self._made_by: dict[Value, Op] = {}
        self._order: dict[Op, int] = {}  # position in the walk
        self._scores: set[DimClass] = set()  # the dims of attention scores
        for value in self.weights:
            for c in self.all_of(value.nodes):
                self.paths[c].add(re.sub(r"\d+", "*", value.path or ""))
        recurrent = self._recurrent(program)
        for value in self.data:
            leading = [self.full(n) for n in value.nodes[:2] if n != NONE]
            self.batch_dim[value] = int(len(leading) == 2 and tuple(leading) in recurrent)
            batch = self.parts(value.nodes[self.batch_dim[value]])
            self._add(Fact.BATCH, (c for c in batch if c not in self.paths), value)
        for a, b in self.unifier.prime_of.items():
            x, y = self.full(a), self.full(b)
            self.twins[x].add(y)
            self.twins[y].add(x)
        self._walk(program.root)

    def _recurrent(self, program: Program) -> set[tuple[DimClass, DimClass]]:
        """(dim that a scan slices, dim of its carry): of data whose first dim is time, and whose second one is the batch."""
        found = set()
        for op in program.root.walk():
            if op.primitive.family == "scan":
                _, carries, slices = loop_parts(op.eqn).split(op.ins)
                of_carry = {self.full(n) for v in carries if v is not None for n in v.nodes if n != NONE}
                sliced = {self.full(v.nodes[0]) for v in slices if v is not None and v.nodes and v.nodes[0] != NONE}
                found |= set(itertools.product(sliced, of_carry))
        return found

    def parts(self, node: int) -> list[DimClass]:
        """The classes of the parts of a dim that a reshape merges or splits, major to minor; of another dim its own."""
        return [] if node == NONE else [self.unifier.weak_root(a) for a in self.unifier.atoms(node)]

    def full(self, node: int) -> DimClass:
        """The class of a complete dim, not of size 1, which a reshape may split."""
        return self.unifier.weak_root(node)

    def all_of(self, nodes: Iterable[int]) -> set[DimClass]:
        """The classes of complete dims and of their parts."""
        return {c for n in nodes if n != NONE for c in (*self.parts(n), self.full(n))}

    def has(self, c: DimClass, *facts: Fact) -> bool:
        """Whether a class has one of these facts."""
        return any(fact in self.facts[c] for fact in facts) if c in self.facts else False

    def _add(self, fact: Fact, classes: Iterable[DimClass], where: Op | Value) -> None:
        for c in classes:
            self.facts[c][fact].append(where)

    def _of_weights(self, nodes: Iterable[int]) -> list[DimClass]:
        """The classes of the parts of dims that a weight has as well."""
        return [c for node in nodes for c in self.parts(node) if c in self.paths]

    # -- the walk

    def _walk(self, frame: Frame) -> None:
        """Record the uses in a frame and its bodies."""
        for op in frame.ops:
            self._order[op] = len(self._order)
            self._made_by.update(dict.fromkeys(op.outs, op))
            depends = not self._is_data.isdisjoint(op.ins)
            flags = self._body(op, depends) if op.frames else [depends] * len(op.outs)
            self._is_data.update(itertools.compress(op.outs, flags))
            if not op.frames and op.derivative_pass != "backward":
                self._record(op)

    def _body(self, op: Op, depends: bool) -> list[bool]:
        """Walk the bodies of an op; returns which results are data, as in the bodies. Weights that a loop returns are not.

        The carries of a loop are data if any operand is; its stacks of weights are layers.
        """
        loop = op.primitive.loop
        computed = [False] * len(op.outs)
        for body, operands in zip(op.frames, operands_of_bodies(op.eqn, op.ins), strict=True):
            arguments = list(zip(body.ins(), operands, strict=True))
            carries = set(loop_parts(op.eqn).carried(body.ins())) if loop else set()
            for inner, outer in arguments:
                if outer in self._sources:
                    self._sources[inner] = self._sources[outer]
            self._is_data.update(a for a, b in arguments if (depends and a in carries) or b in self._is_data)
            self._walk(body)
            results = body.outs()
            if len(results) == len(op.outs):  # not the condition of a loop
                computed = [a or r in self._is_data for a, r in zip(computed, results, strict=True)]
            for out in op.outs:
                own = next((r for r in results if r is not None and r.nodes is out.nodes), None)
                self._sources[out] = self._sources[own] if own in self._sources else frozenset((op,))
                if own in self._plain:
                    self._plain.add(out)
        if op.primitive.family == "scan":
            for value in loop_parts(op.eqn).split(op.ins)[2]:
                if value is not None and value not in self._is_data and value.nodes[0] != NONE:
                    self._add(Fact.LOOPED, self.paths.keys() & {self.full(value.nodes[0])}, op)
        return computed

    def _record(self, op: Op) -> None:
        """Record how an op of the forward pass uses the dims of its operands."""
        ins = [v for v in op.ins if v is not None]
        data = [v for v in ins if v in self._is_data]
        family = op.primitive.family
        if family in ("dot", "conv", "gather", "kernel") and len(ins) >= 2:
            {"dot": self._dot, "conv": self._conv, "gather": self._gather, "kernel": self._kernel}[family](
                op, ins, data
            )
        elif family == "add" and len(data) == 2 and ins[0].shape == ins[1].shape:
            a, b = (self._sources.get(v, frozenset()) for v in ins)
            parallel = self._plain.issuperset(ins) and not self._follows(*ins)  # x @ w + x @ a @ b
            if not parallel and a != b and not (a and b and (a <= b or b <= a)):
                self._add(Fact.RESIDUAL, self._of_weights(op.outs[0].nodes), op)
        elif family == "reduction" and ins:
            axes = [d for d in op.eqn.params.get("axes", ()) if d < len(ins[0].nodes)]
            self._add(Fact.REDUCED, (c for d in axes for c in self.parts(ins[0].nodes[d])), op)
        elif family == "top_k" and data and ins[0].nodes:
            self._add(Fact.CHOSEN, self._of_weights(ins[0].nodes[-1:])[-1:], op)
        elif family == "ragged_dot" and len(ins) == 3 and len(ins[1].nodes) == 3:
            groups, read, made = ins[1].nodes
            self._add(Fact.GROUPS, self.parts(groups), op)
            self._add(Fact.MADE, self.parts(made), op)
            self._add(Fact.READ_PLAIN if ins[0] in self._plain else Fact.READ, self.parts(read), op)
        moves = op.primitive.view or family in ("cast", "broadcast", "slice", "split", "barrier")
        if op.rule is None or op.rule.strong or moves:
            sources = frozenset().union(*(self._sources.get(v, frozenset()) for v in data))
            sources = sources if len(sources) <= MAX_SOURCES else frozenset(sorted(sources, key=id)[:MAX_SOURCES])
            if len(data) == 1 and data[0] in self._plain:  # a bias counts as linear
                k = op.ins.index(data[0])
                laws = (law.admits(op.eqn, "sum", [k]) for law in op.primitive.partial)
                self._plain.update(op.outs if moves or family == "add" or any(laws) else ())
        else:
            sources = frozenset((op,))
        self._sources.update(dict.fromkeys(op.outs, sources))

    def _follows(self, x: Value, y: Value) -> bool:
        """Whether one of two values is computed from the ops that the values of the other come from."""
        ops = [self._sources.get(v, frozenset()) for v in (x, y)]
        first, last = sorted(ops, key=lambda ops: max((self._order[op] for op in ops), default=0))
        start = min((self._order[op] for op in first), default=0)
        todo, seen = list(last), set(last)
        while todo:
            for v in todo.pop().ins:
                op = self._made_by.get(v) if v is not None else None
                if op in first:
                    return True
                if op is not None and op not in seen and self._order[op] > start:
                    seen.add(op)
                    todo.append(op)
        return False

    def _dot(self, op: Op, ins: Sequence[Value], data: Sequence[Value]) -> None:
        """A matmul of two activations is attention, one of an activation and a weight a layer."""
        shared: list[int] = []  # a node of each factor that both operands and the result have
        read: list[int] = []  # … that both operands have, and the result lacks
        of: tuple[list[int], list[int]] = [], []  # … that one operand has, and the result
        rule = op.factor_rule
        for f in range(len(rule.sizes)):
            nodes = [
                [n for n, factors in zip(v.nodes, dims, strict=True) if f in factors]
                for v, dims in zip(op.ins, rule.ins, strict=True)
                if v is not None
            ]
            if all(nodes):
                in_result = any(f in dim for dim in rule.outs[0])
                (shared if in_result else read).append(nodes[0][0])
            else:
                for k in (0, 1):
                    of[k].extend(nodes[k])
        if len(data) == 2:
            # of other shared dims: an elementwise product, or a gradient
            if read and any(self.has(c, Fact.BATCH) for n in shared for c in self.parts(n)):
                self._attention(op, [c for c in self._of_weights(shared) if not self.has(c, Fact.BATCH)], read, of)
        elif data:
            weight = 1 if data[0] is ins[0] else 0
            self._add(Fact.STACKED, (c for c in self._of_weights(shared) if not self.has(c, Fact.BATCH)), op)
            self.read_by[op] = self.all_of(read)
            plain = data[0] in self._plain
            for c in self.read_by[op]:
                self._add(Fact.READ, [c], op)
                if plain and self.has(c, Fact.MADE):
                    self._add(Fact.READ_PLAIN, [c], op)
            self._add(Fact.MADE, self.all_of(of[weight]), op)
            self._plain.update(op.outs)

    def _attention(self, op: Op, heads: list[DimClass], read: list[int], of: tuple[list[int], list[int]]) -> None:
        """Scores contract a dim that a matmul made; values contract positions, and have a dim that the scores lack."""
        self._add(Fact.SHARED, heads, op)
        if not heads:
            return
        contracted = self._of_weights(read)
        scored = [c for c in contracted if self.has(c, Fact.MADE)]
        self._add(Fact.SCORED, scored, op)
        self._add(Fact.SUMMED, (c for c in contracted if c not in scored), op)
        others = self._of_weights((*of[0], *of[1]))
        made = [c for c in others if self.has(c, Fact.MADE)]
        free = {c for n in (*of[0], *of[1]) for c in self.parts(n)}
        known = self._scores | free if scored else self._scores
        self._add(Fact.VALUES, (c for c in made if c not in known), op)
        if not scored and not self._scores.isdisjoint(c for n in read for c in self.parts(n)):
            self._add(Fact.SHARED, self._scores.intersection(made), op)  # of values: the queries of one head of keys
        else:  # scores, also where rotary embeddings hide what queries and keys contract
            self._scores |= free

    def _conv(self, op: Op, ins: Sequence[Value], data: Sequence[Value]) -> None:
        if list(data) == [ins[0]]:
            made, read, *window = (ins[1].nodes[d] for d in op.eqn.params["dimension_numbers"].rhs_spec)
            self._add(Fact.WINDOW, (c for n in window for c in self.parts(n)), op)
            self._add(Fact.CONV_MADE, self.parts(made), op)
            self._add(Fact.CONV_READ, self.parts(read), op)

    def _gather(self, op: Op, ins: Sequence[Value], data: Sequence[Value]) -> None:
        table, indices = ins[:2]
        into = op.eqn.params["dimension_numbers"].start_index_map
        if indices not in data or not into:
            return
        if table not in data and len(into) == 1:
            for d, node in enumerate(table.nodes):
                if node != NONE:
                    self._add(Fact.ROWS if d == into[0] else Fact.OF_ROW, [self.full(node)], op)
            self.lookups += [(self.full(n), op) for n in table.nodes[into[0] : into[0] + 1] if n != NONE]
        elif table in data:
            looked_up = self._of_weights([table.nodes[into[-1]]])
            self._add(Fact.LABEL, (c for c in looked_up if self.has(c, Fact.MADE, Fact.CONV_MADE)), op)

    def _kernel(self, op: Op, ins: Sequence[Value], data: Sequence[Value]) -> None:
        """The rule of a kernel names its dims; of merged dims, such as ``(kv_heads group)``, the parts are queries of one head."""
        for value, dims in zip(op.ins, op.eqn.params["kernel"].notation.ins, strict=False):
            for node, factors in zip(value.nodes, dims, strict=True) if value is not None else ():
                if node != NONE and factors and not any(self.has(c, Fact.BATCH) for c in self.parts(node)):
                    name = "heads" if factors[:1] == ("kv_heads",) and len(factors) > 1 else factors[0]
                    for c in self.all_of([node]) if name == "heads" else [self.full(node)]:
                        self.declared[c].append((name, op))


def weights_and_data(program: Program) -> tuple[list[Value], list[Value]]:
    """The arguments that are weights, and those that are data, of a program without names; scalars and optimizer state are neither.

    Where the step updates parameters, a tree with one is weights: with optimizer state, the parameters that read it; without,
    arrays with a new value after a backward pass. Elsewhere, an argument is weights if it is a tree whose arrays differ in their
    first dims, or by its path. Integers are data there.
    """
    inputs = [v for v in program.inputs if v.kind != "opt" and v.shape]
    trees: defaultdict[str, list[Value]] = defaultdict(list)
    for v in inputs:
        trees[(v.path or "").split("/")[0]].append(v)
    updated = {v for v in inputs if v.kind == "params"}
    if not updated and any(op.derivative_pass == "backward" for op in program.root.walk()):
        updated = {v for v in program.cached(new_values) if _is_float(v)}
    weights = {
        v
        for tree in trees.values()
        for v in tree
        if (not updated.isdisjoint(tree) if updated else _is_float(v) and _is_tree_of_weights(tree, v.path or ""))
    }
    return [v for v in inputs if v in weights], [v for v in inputs if v not in weights]


def _is_float(value: Value) -> bool:
    return value.aval.dtype.kind not in "iub"


def _is_tree_of_weights(tree: Sequence[Value], path: str) -> bool:
    return len({v.shape[0] for v in tree}) > 1 or bool(CONTAINERS.search(path))

"""Names for the dims of a program in which nobody named any, from what the program does with them.

The inference knows which dims are the same (:mod:`program.names`). This module gives each such class of dims a standard name. Every
use of a class votes for a name: rows looked up by integers of the batch are a ``vocab``, a dim that one matmul makes and the next one
contracts is an ``mlp``. The name with the most votes wins; words of the tree paths decide where no use does.

A wrong name costs time, never a result: a layout does not change results.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..compat.jax import pass_of
from ..compat.loops import loop_parts, operands_of_bodies
from ..dims import path_matches
from .ir import Frame, Op, Program, Value
from .names import NONE

DimClass = int
"""A class of equal dims: the root of the weak class of a node of the unifier."""


class Vote(NamedTuple):
    """Evidence that a class of dims has a name.

    Attributes:
      name: a standard name of a dim.
      weight: of the evidence; a use in the program weighs more than a word of a path.
      why: a sentence for the user.
    """

    name: str
    weight: float
    why: str


class DimName(NamedTuple):
    """The name of a dim, and the evidence for it; ``certain``: a use of the dim shows it, not only a word or a size."""

    name: str
    why: str
    certain: bool


WORDS: tuple[tuple[str, str, str], ...] = (
    # a pattern over the end of a path; the names of the first and of the last dim of a matrix ("" : none)
    (r"(lora|adapter)\w*", "", ""),
    (r"(q|k|v|query|key|value)(_?proj)?\d*|wq|wk|wv", "embed", "heads"),
    (r"(o|out)_?proj|wo|out", "heads", "embed"),
    (r"(gate|up)_?proj|fc_?1|w[i13](_\d)?|intermediate|c_fc|lin1|dense_h_to_4h|fc_in|mlp_in", "embed", "mlp"),
    (r"down_?proj|fc_?2|w[o2]|lin2|dense_4h_to_h|fc_out|mlp_out", "mlp", "embed"),
    (r"router|gate", "embed", "experts"),
    (r"(lm_)?head|logits|decoder", "embed", "vocab"),
)
KERNEL_NAMES = {"heads": "heads", "kv_heads": "kv_heads", "head_dim": "head_dim", "e0": "experts", "mlp": "mlp", "embed": "embed"}
POSITION = re.compile(r"pos|wpe", re.IGNORECASE)
PARAMETERS = re.compile(r"(^|/)(params|model|weights?)(/|$)")


def named_dims(program: Program) -> dict[str, tuple[DimName | None, ...]]:
    """A name for every dim of every argument but optimizer state, by its tree path; None: a dim of size 1, or one without a name.

    Args:
      program: traced without names.

    No name occurs twice in one value: of two dims with the same votes, the one with less evidence has no name.
    """
    return _Namer(program).names()


def patterns_of(names: Mapping[str, Sequence[DimName | None]]) -> dict[str, str]:
    """Tree-path patterns → dims, as ``dims=`` takes them: for each array the shortest pattern whose matches have the same dims."""
    texts = {path: " ".join(d.name if d else "_" for d in dims) for path, dims in names.items()}
    by_end: defaultdict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for end in _ends(path):
            by_end[end].add(text)
    found: dict[str, str] = {}
    covered: set[str] = set()
    for path, text in texts.items():
        if path in covered or not text.replace("_", "").strip():
            continue
        for end in _ends(path):
            matches = [p for p in texts if path_matches(end, p)] if by_end[end] == {text} else []
            if matches and all(texts[p] == text for p in matches):
                break
        else:
            end, matches = path, [path]
        found[end] = text
        covered.update(matches)
    return found


def _ends(path: str) -> list[str]:
    """``a/b_3/c`` → ``*/c``, ``*/b_*/c``, ``a/b_*/c``: the patterns of the last components, with ``*`` for numbers."""
    parts = re.sub(r"\d+", "*", path).split("/")
    return [*("/".join(("*", *parts[-k:])) for k in range(1, len(parts))), "/".join(parts)]


@dataclass
class _Uses:
    """What the program does with the dims of one class.

    Attributes:
      leaves: the paths of the weights that have it.
      made, contracted: matmuls of activations and weights that make it, or contract it.
      votes: for names.
    """

    leaves: set[str] = field(default_factory=set)
    made: list[Op] = field(default_factory=list)
    contracted: list[Op] = field(default_factory=list)
    residual: list[Op] = field(default_factory=list)
    linear: int = 0
    bent: int = 0
    normalized: int = 0
    votes: list[Vote] = field(default_factory=list)


class _Namer:
    """Collects the uses of each class, and names the classes."""

    def __init__(self, program: Program) -> None:
        self.program, self.unifier = program, program.unifier
        inputs = [v for v in program.inputs if v.kind != "opt" and v.shape]
        self.weights, self.data = _weights_and_data(program, inputs)
        self.uses: defaultdict[DimClass, _Uses] = defaultdict(_Uses)
        self.sources: dict[Value, frozenset[Op]] = {}  # of an activation: the ops that are not elementwise of which it is made
        self.is_data: dict[Value, bool] = {}
        self.plain: dict[Value, Op] = {}  # the result of a matmul, or a linear elementwise function of it → the matmul
        self.in_weights: set[DimClass] = {c for v in self.weights for n in v.nodes for c in self.classes(n)}
        self.reads: defaultdict[Op, set[DimClass]] = defaultdict(set)  # a matmul of a weight → the classes that it contracts
        self.batch: set[DimClass] = set()
        self.scores: set[DimClass] = set()  # classes of the dims of attention scores
        self.twins: defaultdict[DimClass, set[DimClass]] = defaultdict(set)  # one dim but for a value that has both
        for a, b in self.unifier.prime_of.items():
            x, y = self.unifier._weak_find(a), self.unifier._weak_find(b)
            self.twins[x].add(y)
            self.twins[y].add(x)
        self.chosen: list[tuple[DimClass, Op]] = []
        self.lookups: list[tuple[DimClass, Value, Op]] = []

    # -- classes

    def classes(self, node: int) -> list[DimClass]:
        """The classes of the atoms of a node, major to minor; of a dim that a reshape does not split one."""
        return [] if node == NONE else [self.unifier._weak_find(a) for a in self.unifier.atoms(node)]

    def whole(self, node: int) -> DimClass:
        """The class of the complete dim of a node, which a reshape may split."""
        return self.unifier._weak_find(self.unifier.find(node))

    def vote(self, c: DimClass, name: str, weight: float, why: str) -> None:
        self.uses[c].votes.append(Vote(name, weight, why))

    # -- uses

    def names(self) -> dict[str, tuple[DimName | None, ...]]:
        for value in self.weights:
            for node in value.nodes:
                for c in {*self.classes(node), *([] if node == NONE else [self.whole(node)])}:
                    self.uses[c].leaves.add(re.sub(r"\d+", "*", value.path or ""))
        for value in self.data:
            for c in [c for c in self.classes(value.nodes[0]) if c not in self.in_weights]:
                self.batch.add(c)
                self.vote(c, "batch", 8, f"dim 0 of {value.path}, which is no weight")
        data = {v: True for v in self.data}
        self._walk(self.program.root, {v: data.get(v, False) for v in self.program.inputs})
        self._name_data()
        self._vote_by_use()
        self.groups = self._groups()
        for v in self.weights:
            for a, b in zip(v.nodes, v.nodes[1:], strict=False):
                best = None if NONE in (a, b) else self._best_of_dim(a)
                if best and best[0].name in ("heads", "kv_heads"):
                    self.vote(self.whole(b), "head_dim", 3.5, f"it follows the heads in {v.path}")
        self._vote_by_size()
        return {v.path or "": self._named(v) for v in (*self.weights, *self.data)}

    def _groups(self) -> dict[DimClass, DimClass]:
        """Of grouped queries: the class of the heads of keys → the class of the queries of one of them.

        Queries and results have both, in one dim or two; keys have the first alone.
        """
        led: defaultdict[DimClass, list[tuple[str, frozenset[DimClass]]]] = defaultdict(list)
        for v in self.weights:
            dims = [c for node in v.nodes for c in self.classes(node)]
            for i, c in enumerate(dims):
                if (best := self._best(c)) and best[0].name in ("heads", "kv_heads"):
                    led[c].append((re.sub(r"\d+", "*", v.path or ""), frozenset(dims[i + 1 :])))
        found = {}
        for c, leaves in led.items():
            others = Counter(d for path, after in dict(leaves).items() for d in after)
            shorter = min((after for _, after in leaves), key=len)
            for d, n in others.items():
                if n >= 2 and d not in shorter and (best := self._best(d), best is None or best[0].name == "heads")[1]:
                    found[c] = d
        return found

    def _vote_by_size(self) -> None:
        """A dim without a name has the name of the only class of its size that has one, if no value has both."""
        known: dict[int, set[tuple[str, DimClass]]] = defaultdict(set)
        unknown: set[DimClass] = set()
        for v in self.weights:
            for node in v.nodes:
                if node != NONE:
                    best, c = self._best_of_dim(node), self.whole(node)
                    if best is None:
                        unknown.add(c)
                    elif best[0].name in ("embed", "vocab", "mlp"):
                        known[self.unifier.size[c]].add(best[0].name)
        for c in unknown:
            if len(names := known.get(self.unifier.size[c], ())) == 1:
                (name,) = names
                self.vote(c, name, 1, f"its size, {self.unifier.size[c]}, is that of `{name}`")

    def _name_data(self) -> None:
        """Vote for the dims of the inputs that are not weights: the batch first, then by rank and dtype.

        A dim that a weight contracts is a feature, not a position.
        """
        for value in self.data:
            rank, integer = len(value.shape), value.aval.dtype.kind in "iub"
            free = [i for i in range(1, rank) if value.nodes[i] != NONE and not self.uses[self.whole(value.nodes[i])].contracted]
            spatial = {1: ["seq"], 2: ["height", "width"], 3: ["depth", "height", "width"]}
            if integer and rank > 1 or rank > 2:
                for i, name in zip(free, spatial.get(len(free), ()), strict=False):
                    self.vote(self.whole(value.nodes[i]), name, 5, f"dim {i} of {value.path}, which is no weight")

    def _walk(self, frame: Frame, flags: Mapping[Value, bool], backward: bool = False) -> None:
        """Record the uses of all dims in a frame and its bodies; ``flags``: whether its arguments depend on data."""
        self.is_data.update(flags)
        for op in frame.ops:
            ins = [v for v in op.ins if v is not None]
            depends = any(self.is_data.get(v, False) for v in ins)
            if op.frames:
                for body, operands in zip(op.frames, operands_of_bodies(op.eqn, op.ins), strict=True):
                    inner = {a: (b is not None and self.is_data.get(b, False)) for a, b in zip(body.ins(), operands, strict=True)}
                    if op.primitive.loop:
                        inner = {v: f or (depends and v not in self._stacks(op, body)) for v, f in inner.items()}
                    for a, b in zip(body.ins(), operands, strict=True):
                        if b is not None and b in self.sources:
                            self.sources[a] = self.sources[b]
                    self._walk(body, inner, backward or pass_of(op.eqn) == "backward")
                    if op.primitive.family == "scan":
                        self._name_layers(op, body, operands)
                for out in op.outs:
                    self.is_data[out] = self.is_data.get(out, False) or depends
                    results = [f.env.get(v) for f in op.frames for v in f.jaxpr.outvars if not hasattr(v, "val")]
                    own = next((r for r in results if r is not None and r.nodes is out.nodes), None)
                    if own is not None and own in self.plain:
                        self.plain[out] = self.plain[own]
                    self.sources[out] = self.sources.get(own, frozenset((op,))) if own is not None else frozenset((op,))
                continue
            for out in op.outs:
                self.is_data[out] = depends
            if not backward and pass_of(op.eqn) != "backward":
                self._record(op, ins)

    def _stacks(self, op: Op, body: Frame) -> set[Value]:
        parts = loop_parts(op.eqn)
        args = body.ins()
        if op.primitive.family != "scan":
            return set(args[: len(args) - len(parts.carries)])
        consts, _, stacks = parts.split(args)
        return {*consts, *stacks}

    def _name_layers(self, op: Op, body: Frame, operands: Sequence[Value | None]) -> None:
        for value in loop_parts(op.eqn).split(list(operands))[2]:
            if value is not None and value.nodes[0] != NONE and not self.is_data.get(value, False):
                self.vote(self.whole(value.nodes[0]), "layers", 20, f"a loop runs over it at {op.location}")

    def _record(self, op: Op, ins: list[Value]) -> None:
        family = op.primitive.family
        if family == "dot":
            self._dot(op)
        elif family == "kernel":
            self._kernel(op)
        elif family == "conv":
            self._conv(op)
        elif family == "gather":
            self._gather(op)
        elif op.primitive.elementwise and op.name == "add" and len(ins) == 2:
            self._add(op, ins)
        elif op.name in ("ragged_dot", "ragged_dot_general") and len(ins) == 3:
            for c in self.classes(ins[1].nodes[0]):
                self.vote(c, "experts", 10, f"groups of a ragged matmul at {op.location}")
            self._ragged(op, ins)
        elif op.name == "top_k" and ins and ins[0].nodes and ins[0].nodes[-1] != NONE:
            for c in self.classes(ins[0].nodes[-1])[-1:]:
                if c in self.in_weights and self.is_data.get(ins[0], False):
                    self.chosen.append((c, op))
        elif op.name in ("reduce_sum", "reduce_max", "square") and ins and op.name != "square":
            for a in op.eqn.params.get("axes", ()):
                if a < len(ins[0].nodes):
                    for c in self.classes(ins[0].nodes[a]):
                        self.uses[c].normalized += 1
        linear = family in ("cast", "reshape", "transpose", "broadcast", "squeeze", "identity", "slice", "split", "barrier") or op.name in ("copy", "name")
        if op.rule is None or op.rule.strong or linear:
            made = frozenset().union(*(self.sources.get(v, frozenset()) for v in ins if self.is_data.get(v, False)))
            for out in op.outs:
                self.sources[out] = made if len(made) <= 8 else frozenset(sorted(made, key=id)[:8])
            before = [v for v in ins if self.is_data.get(v, False)]
            if len(before) == 1 and before[0] in self.plain and (linear or op.name in ("mul", "add", "div") and len(ins) <= 2):
                for out in op.outs:
                    self.plain[out] = self.plain[before[0]]
        else:
            for out in op.outs:
                self.sources[out] = frozenset((op,))

    def _add(self, op: Op, ins: list[Value]) -> None:
        """A residual: the sum of two activations that different matmuls made."""
        a, b = ins
        if a.shape != b.shape or not (self.is_data.get(a, False) and self.is_data.get(b, False)):
            return
        of_a, of_b = self.sources.get(a, frozenset()), self.sources.get(b, frozenset())
        if of_a and of_b and not of_a <= of_b and not of_b <= of_a or (of_a != of_b and (not of_a or not of_b)):
            for node in op.outs[0].nodes:
                for c in self.classes(node):
                    if c in self.in_weights:
                        self.uses[c].residual.append(op)

    def _factors(self, op: Op) -> Iterator[tuple[list[tuple[int, int]], int, bool]]:
        """For each factor of an op of two operands: its (operand, node) pairs, a node, and whether the result has it."""
        rule = op.rule
        assert rule is not None
        for f in range(len(rule.sizes)):
            pairs = [
                (k, node)
                for k, (value, dims) in enumerate(zip(op.ins, rule.ins, strict=True)) if value is not None
                for node, factors in zip(value.nodes, dims, strict=True) if f in factors and node != NONE
            ]
            if pairs:
                yield pairs, pairs[0][1], any(f in dim for dim in rule.outs[0])

    def _dot(self, op: Op) -> None:
        a, b = op.ins
        if a is None or b is None:
            return
        data = self.is_data.get(a, False), self.is_data.get(b, False)
        if data == (False, False):
            return
        factors = list(self._factors(op))
        batch = [n for pairs, n, out in factors if out and len({k for k, _ in pairs}) == 2]
        contracted = [n for pairs, n, out in factors if not out]
        if data == (True, True):
            outer = [c for n in batch for c in self.classes(n)]
            if not any(c in self.batch for c in outer):
                return  # the gradient of a weight, or without a batch
            for c in outer:
                if c not in self.batch and c in self.in_weights:
                    self.vote(c, "heads", 6, f"a matmul of two activations has it as a batch dim at {op.location}")
            if any(c in self.in_weights and c not in self.batch for c in outer):
                of_keys = any(self.uses[c].made for n in contracted for c in self.classes(n))
                if of_keys:
                    self.scores.update(c for _, n, out in factors if out for c in self.classes(n))
                for n in contracted:
                    for c in self.classes(n):
                        if c in self.in_weights and self.uses[c].made:
                            self.vote(c, "head_dim", 6, f"queries and keys contract it at {op.location}")
                        elif c in self.in_weights:
                            self.vote(c, "seq", 4, f"attention sums over it at {op.location}")
                for pairs, n, out in factors:
                    if out and len({k for k, _ in pairs}) == 1:
                        for c in self.classes(n):
                            if c in self.in_weights and c not in self.scores and self.uses[c].made:
                                self.vote(c, "head_dim", 5, f"a sum over keys makes it at {op.location}")
            return
        weight = 1 if data[0] else 0
        activation = op.ins[1 - weight]
        assert activation is not None
        for n in batch:
            for c in self.classes(n):
                if c not in self.batch and c in self.in_weights:
                    self.vote(c, "experts", 5, f"each has a matrix of its own at {op.location}")
        for n in contracted:
            for c in {*self.classes(n), self.whole(n)}:
                self.reads[op].add(c)
                self.uses[c].contracted.append(op)
                if self.uses[c].made:
                    if activation in self.plain:
                        self.uses[c].linear += 1
                    else:
                        self.uses[c].bent += 1
        for pairs, n, out in factors:
            if out and {k for k, _ in pairs} == {weight}:
                for c in {*self.classes(n), self.whole(n)}:
                    self.uses[c].made.append(op)
        self.plain[op.outs[0]] = op

    def _ragged(self, op: Op, ins: list[Value]) -> None:
        for i, n in enumerate(ins[1].nodes[1:]):
            for c in self.classes(n):
                (self.uses[c].made if i else self.uses[c].contracted).append(op)
                if not i:
                    self.uses[c].bent += ins[0] not in self.plain

    def _kernel(self, op: Op) -> None:
        """The rule of a kernel names its dims."""
        notation = op.eqn.params["kernel"].notation
        for value, dims in zip(op.ins, notation.ins, strict=False):
            for node, factors in zip(value.nodes, dims, strict=True) if value is not None else ():
                if node != NONE and factors:
                    name = "heads" if len(factors) > 1 and factors[0] == "kv_heads" else KERNEL_NAMES.get(factors[0])
                    if name and (c := self.whole(node)) not in self.batch:
                        self.vote(c, name, 6, f"the rule of {op.label} calls it `{factors[0]}`")
                        if len(self.classes(node)) == 2 and name == "heads":
                            for c in self.classes(node):
                                self.vote(c, "heads", 6, f"the rule of {op.label} calls it `{factors[0]}`")

    def _conv(self, op: Op) -> None:
        lhs, rhs = op.ins[:2]
        if lhs is None or rhs is None or self.is_data.get(rhs, False) or not self.is_data.get(lhs, False):
            return
        spec = op.eqn.params["dimension_numbers"].rhs_spec
        for d in spec[2:]:
            for c in self.classes(rhs.nodes[d]):
                self.vote(c, "kernel", 3, f"window of the convolution at {op.location}")
        for c in self.classes(rhs.nodes[spec[0]]):
            self.uses[c].made.append(op)
            self.vote(c, "channels", 4, f"made by the convolution at {op.location}")
        for c in self.classes(rhs.nodes[spec[1]]):
            self.uses[c].contracted.append(op)
            self.vote(c, "channels", 4, f"read by the convolution at {op.location}")

    def _gather(self, op: Op) -> None:
        table, indices = op.ins[:2]
        into = op.eqn.params["dimension_numbers"].start_index_map
        if table is None or indices is None or not self.is_data.get(indices, False):
            return
        if not self.is_data.get(table, False):
            if len(into) == 1 and table.nodes[into[0]] != NONE:
                self.lookups.append((self.whole(table.nodes[into[0]]), table, op))
                for i, n in enumerate(table.nodes):
                    if i != into[0]:
                        for c in self.classes(n):
                            self.vote(c, "embed", 6, f"rows looked up at {op.location} have it")
        elif table.nodes[into[-1]] != NONE and not any(c in self.batch for c in self.classes(table.nodes[into[-1]])):
            for c in self.classes(table.nodes[into[-1]]):
                if c in self.in_weights and self.uses[c].made:
                    name = "vocab" if self.lookups and len(table.shape) > 2 else "classes"
                    self.vote(c, name, 9, f"the labels look it up at {op.location}")

    # -- names

    def _vote_by_use(self) -> None:
        sizes = self.unifier.size
        if self.lookups:
            largest = max(sizes[c] for c, *_ in self.lookups)
            for c, table, op in self.lookups:
                if sizes[c] == largest:
                    self.vote(c, "vocab", 9, f"integers of the batch look up its rows at {op.location}")
        if not any(v.name == "experts" for use in self.uses.values() for v in use.votes):
            for c, op in self.chosen:  # else the experts have a class of their own, and the router's is not sharded with them
                self.vote(c, "experts", 4, f"the largest are chosen at {op.location}")
        ranked = sorted(self.uses, key=lambda c: -len(self.uses[c].leaves))
        streams = [c for c in ranked if self.uses[c].residual and self.uses[c].made]
        if streams:
            most = len(self.uses[streams[0]].leaves)
            for c in streams:
                use = self.uses[c]
                if 2 * len(use.leaves) >= most and not any(op.primitive.family == "conv" for op in use.contracted):
                    self.vote(c, "embed", 5, f"{len(use.leaves)} weights have it, and residuals carry it at {use.residual[0].location}")
        embed = max((sizes[c] for c in streams if self._best(c) and self._best(c)[0].name == "embed"), default=0)
        vocab = {sizes[c] for c, *_ in self.lookups if sizes[c] == largest} if self.lookups else set()
        for c in ranked:
            use = self.uses[c]
            if use.made and not use.contracted and sizes[c] in vocab:
                self.vote(c, "vocab", 4, f"made at {use.made[0].location}; as large as the vocabulary")
            elif use.made and not use.contracted and not self.lookups:
                self.vote(c, "classes", 2, f"made at {use.made[-1].location}, and no weight reads it")
            if use.made and use.contracted and not use.residual:
                small = use.normalized and embed and sizes[c] < embed
                name = "rank" if use.linear > use.bent or small else "mlp"
                if any(op.primitive.family == "conv" for m in use.made for r in self.reads[m] for op in self.uses[r].contracted):
                    name = "channels"  # squeeze and excitation
                self.vote(c, name, 3, f"made at {use.made[0].location}, contracted at {use.contracted[-1].location}")

    def _best(self, c: DimClass, twins: bool = True) -> tuple[Vote, float] | None:
        total: Counter[str] = Counter()
        best: dict[str, Vote] = {}
        for vote in self.uses[c].votes:
            if vote.name not in best or vote.weight > best[vote.name].weight:
                best[vote.name] = vote
                total[vote.name] = vote.weight  # type: ignore[assignment]
        for twin in self.twins.get(c, ()) if twins else ():
            if (found := self._best(twin, twins=False)) and found[1] > 4:
                total[found[0].name] += 4
                best.setdefault(found[0].name, found[0])
        if not best:
            return None
        name = max(total, key=lambda n: total[n])
        return best[name], total[name]

    def _best_of_dim(self, node: int) -> tuple[Vote, float] | None:
        """The name of a dim, whose parts a reshape may have named: heads and head_dim in one dim are ``heads``."""
        parts, own = self.classes(node), self._best(self.whole(node))
        first = self._best(parts[0])
        if first and first[0].name in ("heads", "kv_heads"):
            group = self.groups.get(parts[0])
            name = "heads" if group is None or group in parts else "kv_heads"
            return first[0]._replace(name=name), first[1]
        if len(parts) > 1:
            if any((best := self._best(c)) and best[0].name == "heads" for c in parts):
                return None
            if own is None and first and first[0].name in ("experts", "mlp", "embed", "vocab"):
                return first
        return own

    def _named(self, value: Value) -> tuple[DimName | None, ...]:
        found = [None if node == NONE else self._best_of_dim(node) for node in value.nodes]
        names = [f[0].name if f else None for f in found]
        out: list[DimName | None] = []
        for i, f in enumerate(found):
            if f is None or any(names[j] == f[0].name and (found[j][1], j) > (f[1], i) for j in range(len(found)) if j != i):
                out.append(None)
            else:
                out.append(DimName(f[0].name, f[0].why, f[1] >= 4))
        return tuple(out)


def _weights_and_data(program: Program, inputs: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """The inputs that are weights, and the others: by their kind; where nothing is updated, by their paths and dtypes."""
    if any(v.kind == "params" for v in inputs):
        known = {(v.path or "").split("/")[0] for v in inputs if v.kind == "params"}
        return [v for v in inputs if (v.path or "").split("/")[0] in known], [
            v for v in inputs if (v.path or "").split("/")[0] not in known
        ]
    groups: defaultdict[str, list[Value]] = defaultdict(list)
    for v in inputs:
        groups[(v.path or "").split("/")[0]].append(v)
    weights = [
        v for own in groups.values() for v in own
        if (len({x.shape[0] for x in own}) > 1 or PARAMETERS.search(v.path or "")) and v.aval.dtype.kind not in "iub"
    ]
    return weights, [v for v in inputs if v not in weights]

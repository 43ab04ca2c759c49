"""Names for the dims of a program in which nobody named any, from their uses.

The inference knows which dims are the same (:mod:`program.names`), and :mod:`program.dim_uses` how they are used.
Each fact is a vote for a name: rows that integers of the batch look up are a ``vocab``, a dim that one matmul makes and the
next one contracts is an ``mlp``. The vote with the largest weight decides.

:func:`program.names_as_path_patterns.patterns_of` writes the names as the shortest patterns of ``dims=``.

The known schemes have the same names (:mod:`meshpar.layouts`). A wrong name costs time, never a result: a layout does not change
results.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .dim_uses import DimClass, DimUses, Fact
from .ir import Op, Program, Value
from .names import NONE


class Vote(NamedTuple):
    """Evidence that a dim has a name.

    Attributes:
      name: of the dim.
      weight: of the evidence; a use in the program weighs more than a size.
      why: the evidence; ``{}`` is the place.
      where: the op or the argument that shows it.
    """

    name: str
    weight: float
    why: str
    where: Op | Value | None = None

    def __str__(self) -> str:
        where = self.where
        return self.why.format(where.location if isinstance(where, Op) else where and where.path)

    @property
    def certain(self) -> bool:
        """Whether a use of the dim shows its name, and not only its size or its neighbour."""
        return self.weight >= CERTAIN


CERTAIN, TWIN, GIVEN = 3, 4, 100
"""Weights of votes: the least that a use shows; of a twin's name, if the twin has more; of a name that somebody gave."""
VOTES: dict[Fact, tuple[str, float, str]] = {
    Fact.LOOPED: ("layers", 20, "a loop runs over it at {}"),
    Fact.GROUPS: ("expert", 10, "groups of a ragged matmul at {}"),
    Fact.BATCH: ("batch", 8, "first dim, or the one after time, of {}, which is no weight"),
    Fact.SHARED: ("heads", 6, "a batch dim of a matmul of two activations at {}"),
    Fact.SCORED: ("head_dim", 6, "queries and keys contract it at {}"),
    Fact.OF_ROW: ("embed", 6, "rows that are looked up have it at {}"),
    Fact.VALUES: ("head_dim", 5, "a sum over keys makes it at {}"),
    Fact.STACKED: ("expert", 5, "each has a matrix of its own at {}"),
    Fact.SUMMED: ("seq", 4, "attention sums over it at {}"),
    Fact.CONV_MADE: ("channels", 4, "a convolution makes it at {}"),
    Fact.CONV_READ: ("channels", 4, "a convolution contracts it at {}"),
    Fact.WINDOW: ("kernel", 3, "window of a convolution at {}"),
}
"""Facts that are votes on their own; the others count together, in the functions below."""
DECLARED = {**{name: name for name in ("heads", "kv_heads", "head_dim", "mlp", "embed")}, "e0": "expert"}
"""Names in the rules of kernels → names of dims."""
POSITIONS = {1: ("seq",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""Number of dims of data that no weight contracts, without the batch → their names."""
HEADS = ("heads", "kv_heads")


def inferred_dims(program: Program) -> dict[str, tuple[Vote | None, ...]]:
    """A name for each dim of each argument but optimizer state, by its tree path; None: of size 1, or without evidence.

    No name occurs twice in one value: of two dims with the same one, that with less evidence has none.

    Args:
      program: its own names win, where it has some.
    """
    uses = DimUses(program)
    return _names_of(program, uses, [*uses.weights, *uses.data])


def inferred_dims_of_data(program: Program) -> dict[str, tuple[Vote | None, ...]]:
    """:func:`inferred_dims` of the data of a program whose weights have names and whose batches have none, as in a Flax model with
    metadata and without constraints; empty if the batch of an argument has a name."""
    uses = DimUses(program)
    if any(program.dim_name(value, uses.batch_dim[value]) for value in uses.data):
        return {}
    return _names_of(program, uses, uses.data)


def _names_of(program: Program, uses: DimUses, values: Sequence[Value]) -> dict[str, tuple[Vote | None, ...]]:
    """A name for each dim of each of these arguments, by its tree path."""
    namer, found = _Namer(uses), {}
    paths = Counter(value.path for value in program.inputs)
    for value in values:
        if value.path and paths[value.path] == 1:  # a positional and a keyword argument may have one name
            own = [name if name and name.isidentifier() else None for name in program.dims(value)]
            given = [Vote(name, GIVEN, "given") if name else None for name in own]
            found[value.path] = namer.named(value, given)
    return found


def inferred_names(program: Program) -> dict[str, list[tuple[str, Vote]]]:
    """Name → (size, vote) of each dim of an argument that has it; heads with their features are ``25 × 64``. Empty if no names are
    inferred."""
    found: defaultdict[str, list[tuple[str, Vote]]] = defaultdict(list)
    unifier = program.unifier
    for v in sorted(program.inputs, key=lambda v: v.kind == "opt"):
        votes = program.inferred.get(v.path or "", ())
        separate = any(vote and vote.name == "head_dim" for vote in votes)
        for node, size, vote in zip(v.nodes, v.shape, votes, strict=False):
            if vote is not None:
                width = size if separate or vote.name not in HEADS else unifier.size[unifier.atoms(node)[-1]]
                found[vote.name].append((f"{size // width} × {width}" if width < size else f"{size}", vote))
    return found


class _Namer:
    """Turns the facts about the dims of a program into votes.

    Attributes:
      votes: class → name → its vote of the largest weight.
      groups: of grouped queries, the class of the heads of keys → the class of the queries of each of them.
    """

    def __init__(self, uses: DimUses) -> None:
        """Count all votes."""
        self.uses, self.size = uses, uses.unifier.size
        self.votes: defaultdict[DimClass, dict[str, Vote]] = defaultdict(dict)
        for c, facts in list(uses.facts.items()):
            for fact, ops in facts.items():
                if fact in VOTES:
                    self._vote(c, *VOTES[fact], ops[0])
        for c, names in uses.declared.items():
            for name, op in names:
                if name in DECLARED:
                    self._vote(c, DECLARED[name], 6, f"the rule of {op.label} calls it `{name}` at {{}}", op)
        self._vote_for_positions()
        self._vote_for_tables()
        self._vote_for_layers()
        self.groups = self._groups_of_queries()
        self._vote_by_neighbours()
        self._vote_by_size()

    def _vote(self, c: DimClass, name: str, weight: float, why: str, where: Op | Value | None = None) -> None:
        before = self.votes[c].get(name)
        if before is None or weight > before.weight:
            self.votes[c][name] = Vote(name, weight, why, where)

    # -- votes

    def _vote_for_positions(self) -> None:
        """Dims of data are positions, except for the batch and for those that a weight contracts."""
        for value in self.uses.data:
            read = Fact.READ, Fact.CONV_READ
            others = [i for i, n in enumerate(value.nodes) if i != self.uses.batch_dim[value] and n != NONE]
            free = [i for i in others if not self.uses.has(self.uses.full(value.nodes[i]), *read)]
            if len(value.shape) > (1 if value.aval.dtype.kind in "iub" else 2):
                for i, name in zip(free, POSITIONS.get(len(free), ()), strict=False):
                    self._vote(self.uses.full(value.nodes[i]), name, 5, f"dim {i} of {{}}, which is no weight", value)

    def _vote_for_tables(self) -> None:
        """The largest table whose rows are looked up has the vocabulary. So has a dim that labels look up, or one of its size
        that no weight contracts."""
        lookups = self.uses.lookups
        largest = max((self.size[rows] for rows, _ in lookups), default=0)
        for rows, op in lookups:
            if self.size[rows] == largest:
                self._vote(rows, "vocab", 9, "integers of the batch look up its rows at {}", op)
        name = "vocab" if lookups else "classes"
        for c, facts in list(self.uses.facts.items()):
            made = facts.get(Fact.MADE)
            if Fact.LABEL in facts:
                op = facts[Fact.LABEL][0]
                of_tokens = isinstance(op, Op) and op.ins[0] is not None and len(op.ins[0].shape) > 2
                self._vote(c, name if of_tokens else "classes", 9, "labels look it up at {}", op)
            elif made and Fact.READ not in facts and (not lookups or self.size[c] == largest):
                self._vote(c, name, 4 if lookups else 2, "no weight contracts it, made at {}", made[-1])

    def _vote_for_layers(self) -> None:
        """Of the dims between matmuls, those that residuals carry, and that many weights have, are ``embed``; the others are inside
        of a layer: an ``mlp``, a ``rank`` (of LoRA, or a compressed projection), or channels of a convolutional net."""
        uses = self.uses
        if not any("expert" in names for names in self.votes.values()):
            for c in [c for c in uses.facts if uses.has(c, Fact.CHOSEN)]:  # else the experts have a class of their own
                self._vote(c, "expert", 4, "the largest are chosen at {}", uses.facts[c][Fact.CHOSEN][0])
        streams = [c for c, facts in uses.facts.items() if Fact.RESIDUAL in facts and Fact.MADE in facts]
        most = max((len(uses.paths[c]) for c in streams), default=0)
        for c in streams:
            if 2 * len(uses.paths[c]) >= most and not uses.has(c, Fact.CONV_READ):
                why = f"{len(uses.paths[c])} weights have it, and residuals carry it at {{}}"
                self._vote(c, "embed", 5, why, uses.facts[c][Fact.RESIDUAL][0])
        for value in uses.data:
            for c in uses.parts(value.nodes[-1]) if len(value.shape) > 1 else ():
                if uses.has(c, Fact.MADE) and uses.has(c, Fact.READ):
                    self._vote(c, "embed", 3.5, "features of {}, which matmuls make and contract", value)
        if not any("embed" in names for names in self.votes.values()):
            self._vote_for_chain()
        embed = max((self.size[c] for c in streams if "embed" in self.votes[c]), default=0)
        for c, facts in list(uses.facts.items()):
            if Fact.MADE in facts and Fact.READ in facts and Fact.RESIDUAL not in facts:
                made, read = facts[Fact.MADE], facts[Fact.READ]
                narrow = Fact.REDUCED in facts and self.size[c] < embed  # normalized
                linear = 2 * len(facts.get(Fact.READ_PLAIN, ())) > len(read)
                of_convs = any(uses.has(r, Fact.CONV_READ) for op in made for r in uses.read_by.get(op, ()))  # type: ignore[call-overload]
                name = "channels" if of_convs else "rank" if narrow or linear else "mlp"
                self._vote(c, name, 3, "a matmul makes it and another one contracts it at {}", read[-1])

    def _vote_for_chain(self) -> None:
        """Of a chain of matmuls without a residual, the features of the data are ``embed``, and then every second dim."""
        uses, names = self.uses, dict[DimClass, str]()
        for value in uses.data:
            for c in uses.parts(value.nodes[-1]) if len(value.shape) > 1 else ():
                if uses.has(c, Fact.READ):
                    names[c] = "embed"
                    self._vote(c, "embed", 3.5, "features of {}, which a matmul contracts", value)
        made: defaultdict[Op | Value, list[DimClass]] = defaultdict(list)
        for c, facts in uses.facts.items():
            for op in facts.get(Fact.MADE, ()):
                made[op].append(c)
        for op, read in uses.read_by.items():  # in the order of the program
            before = next((names[c] for c in read if c in names), None)
            for c in made[op] if before else ():
                if uses.has(c, Fact.READ) and c not in names:
                    names[c] = "mlp" if before == "embed" else "embed"
                    if names[c] == "embed":
                        self._vote(c, "embed", 3.5, "every second dim of a chain of matmuls, made at {}", op)

    def _groups_of_queries(self) -> dict[DimClass, DimClass]:
        """Queries and results have the heads of the keys and a dim of groups, in one dim or two; keys have the first alone."""
        after: defaultdict[DimClass, dict[str, frozenset[DimClass]]] = defaultdict(dict)
        for v in self.uses.weights:
            classes = [c for node in v.nodes for c in self.uses.parts(node)]
            for i, c in enumerate(classes):
                if (best := self._best(c)) and best.name in HEADS:
                    after[c][re.sub(r"\d+", "*", v.path or "")] = frozenset(classes[i + 1 :])
        found = {}
        for c, weights in after.items():
            shortest = min(weights.values(), key=len)
            for d, number in Counter(d for others in weights.values() for d in others).items():
                if number >= 2 and d not in shortest and ((best := self._best(d)) is None or best.name == "heads"):
                    found[c] = d
        return found

    def _vote_by_neighbours(self) -> None:
        """The dim after the heads of a weight is ``head_dim``, where rotary embeddings hide the matmul that contracts it."""
        for v in self.uses.weights:
            for a, b in zip(v.nodes, v.nodes[1:], strict=False):
                if NONE not in (a, b) and (best := self._best_of_dim(a)) and best.name in HEADS:
                    self._vote(self.uses.full(b), "head_dim", 3.5, "it follows the heads in {}", v)

    def _vote_by_size(self) -> None:
        """A dim without any vote has the name of the dims of its size, if these have only one name."""
        known: defaultdict[int, set[str]] = defaultdict(set)
        unknown: set[DimClass] = set()
        for node in [n for v in self.uses.weights for n in v.nodes if n != NONE]:
            best, c = self._best_of_dim(node), self.uses.full(node)
            if best is None:
                unknown.add(c)
            elif best.name in ("embed", "vocab", "mlp"):
                known[self.size[c]].add(best.name)
        for c in unknown:
            if len(known[self.size[c]]) == 1:
                (name,) = known[self.size[c]]
                self._vote(c, name, 1, f"its size, {self.size[c]}, is the size of `{name}`")

    # -- decisions

    def _best(self, c: DimClass, twins: bool = True) -> Vote | None:
        """The vote that decides for a class. The names of its twins count as well: a tied head makes two classes of ``embed``."""
        votes = dict(self.votes[c]) if c in self.votes else {}
        for twin in self.uses.twins.get(c, ()) if twins else ():
            if (best := self._best(twin, twins=False)) and best.weight > TWIN:
                own = votes.get(best.name)
                votes[best.name] = best._replace(weight=TWIN + (own.weight if own else 0))
        return max(votes.values(), key=lambda vote: vote.weight, default=None)

    def _best_of_dim(self, node: int) -> Vote | None:
        """The vote that decides for a dim, which may have parts: heads and head_dim in one dim are ``heads``.

        A dim whose heads are not its first part, such as the queries, keys and values of all heads, has no name: a block of it
        is no set of heads.
        """
        atoms, own = self.uses.parts(node), self._best(self.uses.full(node))
        first, *others = map(self._best, atoms)
        if first and first.name in HEADS:
            group = self.groups.get(atoms[0])
            return first._replace(name="heads" if group is None or group in atoms else "kv_heads")
        if any(vote and vote.name == "heads" for vote in others):
            return None
        if others and own is None and all(self.uses.has(c, Fact.SUMMED) for c in atoms):
            return self.votes[atoms[0]]["seq"]  # patches of an image: height and width in one dim
        return first if others and own is None and first and first.name in ("expert", "mlp", "embed", "vocab") else own

    def named(self, value: Value, given: Sequence[Vote | None]) -> tuple[Vote | None, ...]:
        """The names of a value's dims, of which some are given. Of two dims with one name, that with more evidence has it, or the
        later one."""
        dims = zip(given, value.nodes, strict=True)
        found = [own or (None if node == NONE else self._best_of_dim(node)) for own, node in dims]
        ranked = sorted((i for i, vote in enumerate(found) if vote), key=lambda i: (found[i].weight, i))  # type: ignore[union-attr]
        owner = {found[i].name: i for i in ranked}  # type: ignore[union-attr]
        return tuple(given[i] or (vote if vote and owner[vote.name] == i else None) for i, vote in enumerate(found))

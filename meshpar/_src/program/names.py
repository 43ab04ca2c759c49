"""Dim names by unification: which dims of which values are the same factor, and their names.

Every dim of every value is a node of a union-find structure. Nodes are joined in two ways:

- *strongly*, if the same data is in both (elementwise ops, transposes, reshapes, loop carries): a gradient and its weight, a moment
  and its parameter are in one class;
- *weakly*, if an op has one factor for dims of different values (contractions, broadcasts, reductions, lookups).

All dims of a strong class have its names; a strong class without a name has the names of its weak class. So weights with a dim
``embed`` and activations with a dim ``activation_embed`` both keep their names, and so do their gradients.

A reshape splits a node into sub-dims (major to minor); joined nodes have the same sub-dims. A class never contains two dims of one
value: where a join would cause that (attention scores ``[seq, seq]``), the later dim is not joined but *primed*: it is named
``seq'``, which no rule can name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..iterables import grouped

Nodes = tuple[int, ...]
SubDim = tuple[tuple[str, ...], int]
"""(names, size) of one of the dims that a reshape merged into a dim, or of an unmerged dim."""

NONE = -1


class DimSlice(NamedTuple):
    """A slice of an array along one dim, or an operand of a concatenation along it.

    Slices of one dim may be different dims, such as q, k and v in a fused projection.

    Attributes:
      full, part: the nodes of the full dim and of the slice.
      is_slice: the op slices the full array; False: it concatenates it.
      elements: the indices of the slice in the full dim.
      where: the op.
    """

    full: int
    part: int
    is_slice: bool
    elements: range
    where: object


class Unifier:
    """Union-find over dims, with sub-dims, weak classes and primed dims.

    Names are added with :meth:`annotate`, joins with :meth:`unify` and :meth:`tie`; :meth:`freeze` ends both.
    """

    def __init__(self) -> None:
        """An empty unifier, without nodes; the docstring of this module defines strong and weak classes."""
        self.parent: list[int] = []
        self.size: list[int] = []
        self.split: dict[int, tuple[int, ...]] = {}
        self.names: dict[int, dict[str, str]] = {}  # strong root -> name -> origin
        self.inherited: dict[int, dict[str, str]] = {}
        self.occurs: list[set[int]] = []  # strong root -> ids of the values (node tuples) that have it
        self.soft: list[tuple[int, int, object]] = []  # joins that would put two dims of a value in one class
        self._tuples: dict[Nodes, int] = {}
        # weak classes over strong roots
        self.weak_parent: dict[int, int] = {}
        self.weak_members: dict[int, list[int]] = {}
        self.weak_occurs: dict[int, set[int]] = {}
        self.prime_of: dict[int, int] = {}
        self.looped: set[int] = set()  # nodes that a loop runs over
        self._cache: dict[int, tuple[SubDim, ...]] = {}

    # -- nodes

    def node(self, size: int) -> int:
        """A new node for a dim of this size."""
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.occurs.append(set())
        return len(self.parent) - 1

    def fresh(self, shape: Sequence[int]) -> Nodes:
        """New nodes for a value of this shape (-1 for dims of size 1)."""
        return self.register(tuple(NONE if n == 1 else self.node(n) for n in shape))

    def register(self, nodes: Nodes) -> Nodes:
        """Record that these nodes are the dims of one value, so that no two of them are joined; returns them."""
        if len(nodes) > 1 and nodes not in self._tuples:
            ident = self._tuples[nodes] = len(self._tuples)
            for n in nodes:
                if n != NONE:  # the dim itself and its sub-dims: either may be joined with others
                    for atom in self.atoms(n):
                        self.occurs[atom].add(ident)
                    self.occurs[self.find(n)].add(ident)
        return nodes

    def find(self, n: int) -> int:
        """The root of the strong class of a node."""
        parent = self.parent
        while parent[n] != n:
            parent[n] = n = parent[parent[n]]
        return n

    def atoms(self, n: int) -> list[int]:
        """The roots without sub-dims that a node consists of, major to minor."""
        n = self.find(n)
        sub_dims = self.split.get(n)
        if sub_dims is None:
            return [n]
        return [a for sub_dim in sub_dims for a in self.atoms(sub_dim)]

    def annotate(self, n: int, name: str, origin: str) -> None:
        """Give a node a name; ``origin`` is its source, for reports."""
        if n != NONE:
            self.names.setdefault(self.find(n), {}).setdefault(name, origin)

    # -- strong joins

    def unify(self, a: int, b: int, where: object = None) -> bool:
        """Join two nodes strongly; returns False if they have different sizes or would put two dims of one value in one
        class.

        ``where`` is the op that joins them, for reports.
        """
        if a == NONE or b == NONE:
            return True
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if self.size[a] != self.size[b]:
            return False
        if a not in self.split and b not in self.split:
            if not self.occurs[a].isdisjoint(self.occurs[b]):
                self.soft.append((a, b, where))
                return False
            self._merge(a, b)
            return True
        ok = self.unify_sequences([a], [b], where)
        a, b = self.find(a), self.find(b)
        if ok and a != b and (a in self.split) == (b in self.split):
            self._merge(a, b)
        return ok

    def _merge(self, a: int, b: int) -> None:
        """Join two roots, with their names and sub-dims."""
        # the smaller set is added to the larger one, which bounds the time
        if len(self.occurs[a]) < len(self.occurs[b]):
            a, b = b, a
        self.parent[b] = a
        self.occurs[a] |= self.occurs[b]
        self.occurs[b] = set()
        for table in (self.names, self.inherited):
            if b in table:
                names = table.setdefault(a, {})
                for name, origin in table.pop(b).items():
                    names.setdefault(name, origin)
        if b in self.split and a not in self.split:
            self.split[a] = self.split[b]

    def unify_sequences(self, a: list[int], b: list[int], where: object = None) -> bool:
        """Join two sequences of nodes whose sizes have equal products, after splitting nodes so that their sizes match."""
        return self._sequences(a, b, lambda x, y: self.unify(x, y, where))

    def _sequences(self, a: list[int], b: list[int], join) -> bool:
        """Split two sequences of nodes into atoms of equal sizes and call ``join`` on each pair; False if they don't match."""
        a = [x for n in a if n != NONE for x in self.atoms(n)][::-1]
        b = [x for n in b if n != NONE for x in self.atoms(n)][::-1]
        ok = True
        while a and b:
            x, y = a.pop(), b.pop()
            ax, ay = self.atoms(x), self.atoms(y)
            if len(ax) > 1 or len(ay) > 1:  # split meanwhile
                a.extend(reversed(ax))
                b.extend(reversed(ay))
                continue
            x, y = ax[0], ay[0]
            nx, ny = self.size[x], self.size[y]
            if nx == ny:
                ok &= join(x, y)
            elif not nx or not ny:  # an empty array has no sizes to match others with
                return False
            elif nx < ny and ny % nx == 0:
                a.append(x)
                b.extend(reversed(self._divide(y, nx)))
            elif ny < nx and nx % ny == 0:
                b.append(y)
                a.extend(reversed(self._divide(x, ny)))
            else:
                return False
        return ok and not a and not b

    def _divide(self, n: int, major: int, spread: bool = True) -> tuple[int, int]:
        """Split an atom, and all of its weak class, into two sub-dims of sizes (major, size / major); returns its sub-dims."""
        sub_dims = (self.node(major), self.node(self.size[n] // major))
        for sub_dim in sub_dims:
            self.occurs[sub_dim] |= self.occurs[n]
        # the two sub-dims must not become one class
        self.split[n] = sub_dims
        self.register(sub_dims)
        for name, origin in (self.names.get(n) or self.inherited.get(n) or {}).items():
            self.inherited.setdefault(sub_dims[0], {}).setdefault(name, origin)
            self.inherited.setdefault(sub_dims[1], {}).setdefault(f"{name}-inner", origin)
        if spread:
            self._weak_divide(n, sub_dims)
        return sub_dims

    # -- weak joins

    def weak_root(self, atom: int) -> int:
        """The root of the weak class of an atom, which is made if it has none: equal for two dims of one factor of an op."""
        atom = self.find(atom)
        parent = self.weak_parent
        if atom not in parent:
            parent[atom] = atom
            self.weak_members[atom] = [atom]
            self.weak_occurs[atom] = set(self.occurs[atom])
            return atom
        while parent[atom] != atom:
            parent[atom] = atom = parent[parent[atom]]
        return atom

    def _weak_divide(self, n: int, parts: tuple[int, int]) -> None:
        """Give the sub-dims of an atom to all atoms of its weak class."""
        if n not in self.weak_parent:
            return
        for m in {self.find(m) for m in self.weak_members[self.weak_root(n)]}:
            if m not in self.split and self.size[m] == self.size[n]:
                others = self._divide(m, self.size[parts[0]], spread=False)
                for own, other in zip(parts, others, strict=True):
                    self.unify_weak(own, other)

    def weak_class(self, atom: int) -> list[int]:
        """The members of the weak class of an atom."""
        return self.weak_members[self.weak_root(atom)]

    def names_in(self, members: Iterable[int], inherited: bool = False) -> dict[str, str]:
        """name → origin, of the strong classes of some nodes; ``inherited``: the names that they inherit."""
        table = self.inherited if inherited else self.names
        names: dict[str, str] = {}
        for m in members:
            for name, origin in table.get(self.find(m), {}).items():
                names.setdefault(name, origin)
        return names

    def unify_weak(self, a: int, b: int, where: object = None) -> bool:
        """Join the weak classes of two atoms; if they share a value, prime one of them instead and return False.

        ``where`` is the op that joins them, for reports.
        """
        ra, rb = self.weak_root(a), self.weak_root(b)
        if ra == rb:
            return True
        if not self.weak_occurs[ra].isdisjoint(self.weak_occurs[rb]):
            if self.prime_of.get(ra) is None and self.prime_of.get(rb) is None:
                na, nb = (self.names_in(self.weak_class(r)) for r in (ra, rb))
                if na and nb:
                    self.soft.append((ra, rb, where))
                elif na or not nb:
                    self.prime_of[rb] = ra
                else:
                    self.prime_of[ra] = rb
            return False
        if len(self.weak_members[ra]) < len(self.weak_members[rb]):
            ra, rb = rb, ra
        self.weak_parent[rb] = ra
        self.weak_members[ra] += self.weak_members.pop(rb)
        self.weak_occurs[ra] |= self.weak_occurs.pop(rb)
        if rb in self.prime_of:
            self.prime_of.setdefault(ra, self.prime_of.pop(rb))
        return True

    def tie(self, group: Sequence[int], where: object = None) -> None:
        """Join the nodes of one factor of an op weakly.

        A value that shares a factor with a primed dim, but not with the dim that it was primed for, gets the unprimed name: the
        gradient of the keys has ``seq``, not ``seq'``.
        """
        group = [n for n in group if n != NONE]
        if len(group) < 2:
            return
        first = group[0]
        for other in group[1:]:
            a, b = self.find(first), self.find(other)
            if a == b or self.size[a] != self.size[b]:
                continue
            self._sequences([a], [b], lambda x, y: self._tie_atoms(x, y, where))
            if a in self.split or b in self.split:  # a name of the merged dim as well
                self._tie_atoms(a, b, where)

    def _tie_atoms(self, x: int, y: int, where: object) -> bool:
        """Join two atoms weakly; if one is primed, with the dim that it was primed for."""
        rx, ry = self.weak_root(x), self.weak_root(y)
        if rx == ry:
            return True
        for a, b in ((rx, ry), (ry, rx)):
            base = self.prime_of.get(a)
            if base is not None and b not in self.prime_of:
                base = self.weak_root(base)
                if base == b:
                    return True
                if self.weak_occurs[base].isdisjoint(self.weak_occurs[b]):
                    return self.unify_weak(base, b, where)
        return self.unify_weak(rx, ry, where)

    def link_names(self, a: int, b: int, where: object = None) -> None:
        """Link two dims of different sizes, such as a dim and a slice of it: they may share names, but are not one dim.

        Args:
          a, b: nodes of the dims; :data:`NONE` for a dim without one, for which nothing is done.
          where: the op that relates them, for reports of joined names.
        """
        if a != NONE and b != NONE:
            aa, bb = self.atoms(a), self.atoms(b)
            if len(aa) == len(bb) == 1:
                self._tie_atoms(aa[0], bb[0], where)

    def name_slices(self, slices: list[DimSlice]) -> None:
        """Propagate names between dims and their slices, and remove the slices that are done from the list.

        The names of a full dim go to its unnamed slices. The names of slices go to the full dim if all slices have the same, or if
        the array is a concatenation (a class token and patches). They never go from one slice of a fused projection to another.
        """
        left = len(slices) + 1
        while len(slices) < left:
            left = len(slices)
            by_dim = grouped((self.weak_root(p.full), p) for p in slices if len(self.atoms(p.full)) == 1)
            done: set[DimSlice] = set()
            for full, own in by_dim.items():
                names = {p: self._leading_names(p.part) for p in own}
                named = [p for p in own if names[p] and (own[0].is_slice or len(self.atoms(p.part)) == 1)]
                different = len({frozenset(names[p]) for p in named})
                if self._leading_names(full):
                    flows = [p for p in own if not names[p]]
                elif named and not own[0].is_slice:
                    flows = named
                elif (
                    different == 1 and named == own and 2 * sum(map(len, {p.elements for p in own})) >= self.size[full]
                ):
                    flows = own
                else:
                    continue
                for p in flows:
                    if not names[p]:
                        self._share_name(p.full, p.part, p.where)
                    elif different == 1:
                        self._share_name(p.part, p.full, p.where)
                    else:
                        for name, origin in names[p].items():
                            self.annotate(full, name, origin)
                done.update(flows)
            slices[:] = [p for p in slices if p not in done]

    def _share_name(self, source: int, target: int, where: object) -> None:
        """Give the names of one dim to another, of another size; of merged dims the major sub-dim counts."""
        atoms, targets = self.atoms(source), self.atoms(target)
        if len(atoms) == len(targets) == 1:
            self._tie_atoms(atoms[0], targets[0], where)
        else:
            for name, origin in self._leading_names(source).items():
                self.inherited.setdefault(targets[0], {}).setdefault(name, origin)

    def _leading_names(self, n: int) -> dict[str, str]:
        """name → origin, of a dim or its major sub-dim; without any, its inherited names."""
        atom = self.atoms(n)[0]
        names = self.names_in(self.weak_class(n)) or self.names_in(self.weak_class(atom))
        return names or self.names_in(self.weak_class(atom), inherited=True)

    # -- results

    def names_now(self, n: int) -> set[str]:
        """The names of a node or its weak class, before :meth:`freeze`."""
        if n == NONE:
            return set()
        return {name for atom in (n, *self.atoms(n)) for name in self.names_in(self.weak_class(atom))}

    def freeze(self) -> None:
        """Fix all names; afterwards :meth:`sub_dims_of` may be called."""
        self._name_inner_sub_dims()
        self._cache = {NONE: ()}
        self._weak_names, self._weak_inherited = (
            {root: tuple(self.names_in(members, inherited)) for root, members in self.weak_members.items()}
            for inherited in (False, True)
        )

    def _name_inner_sub_dims(self) -> None:
        """If a loop runs over the major sub-dim of a dim (microbatches), give the name of the dim to its minor sub-dim.

        A loop runs all iterations on all devices, so sharding the major sub-dim would not divide the work.
        """
        looped = {self.find(n) for n in self.looped if n != NONE}
        for n, parts in self.split.items():
            major, minor = parts[0], parts[-1]
            names = self.names.get(n) or self.inherited.get(n)
            if names and self.find(major) in looped:
                self.inherited[major] = {f"{name}-outer": origin for name, origin in names.items()}
                self.inherited[minor] = dict(names)

    def sub_dims_of(self, n: int) -> tuple[SubDim, ...]:
        """(names, size) of the sub-dims of a node, major to minor; ``()`` for a dim of size 1."""
        cache = self._cache
        if n in cache:
            return cache[n]
        r = self.find(n)
        if r in cache:
            parts = cache[r]
        else:
            own = self.names.get(r)
            if own:
                parts = ((tuple(own), self.size[r]),)
            elif r in self.split and (names := self._weak_names.get(self.weak_root(r))):
                parts = ((names, self.size[r]),)
            elif r in self.split:
                parts = tuple(p for child in self.split[r] for p in self.sub_dims_of(child))
            else:
                w = self.weak_root(r)
                names = self._weak_names.get(w) or tuple(self.inherited.get(r, ()))
                names = names or self._primed(w) or self._weak_inherited.get(w, ())
                parts = ((names, self.size[r]),)
            cache[r] = parts
        cache[n] = parts
        return parts

    def _primed(self, w: int) -> tuple[str, ...]:
        """The primed name of a weak class; ``()``: it is not primed."""
        base = self.prime_of.get(w)
        if base is None:
            return ()
        base = self.weak_root(base)
        if base == w:
            return ()
        names = self._weak_names.get(base) or self._weak_inherited.get(base) or ()
        return tuple(f"{n}'" for n in names[:1])

    def all_names(self) -> set[str]:
        """All names, without inherited and primed ones."""
        return {name for names in self.names.values() for name in names}


def joined_names(unifier: Unifier) -> Iterable[tuple[str, str, str, str, object]]:
    """(name, name, origin, origin, op) for every two names of one class, or of two dims of one value that an op would join."""
    seen: set[frozenset[str]] = set()
    classes: list[tuple[dict[str, str], object]] = []
    classes += [(unifier.names_in(members), None) for members in unifier.weak_members.values()]
    in_weak = {unifier.find(m) for ms in unifier.weak_members.values() for m in ms}
    classes += [(names, None) for root, names in unifier.names.items() if root not in in_weak]
    for a, b, where in unifier.soft:
        atoms = (*unifier.atoms(a), *unifier.atoms(b))
        classes.append((unifier.names_in(m for atom in atoms for m in unifier.weak_class(atom)), where))
    for found, where in classes:
        names = list(found)
        for other in names[1:]:
            key = frozenset((names[0], other))
            if key not in seen:
                seen.add(key)
                yield names[0], other, found[names[0]], found[other], where

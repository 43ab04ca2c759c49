"""Names by unification: which dims of which values are the same factor, and what they are called.

Every dim of every value is a node. Nodes are joined in two ways:

- *strongly*, where the same data passes through (elementwise ops, transposes, reshapes, loop carries), so that a gradient
  and its weight, a moment and its parameter are one class;
- *weakly*, where a factor of an op ties different values together (contractions, broadcasts, reductions, lookups).

A name spreads through its strong class; a strong class without a name takes those of its weak class. So weights that
call a dim ``embed`` and activations that call it ``activation_embed`` each keep their own name, and their gradients too.

A reshape splits a node into parts (major to minor); joined nodes are split alike. No class may hold two dims of one
value: where a join would do that (scores, ``[seq, seq]``) the later dim stays apart and is *primed*: ``seq'``, a name
that no rule has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Nodes = tuple[int, ...]
Part = tuple[tuple[str, ...], int]
"""(names, size) of one part of a dim."""

NONE = -1


class Piece(NamedTuple):
    """A part of an array along one dim, beside others that may be other dims.

    Attributes:
      whole, part: the two nodes.
      cut: the part is cut from the whole; False: the whole is put together.
      lies: from its first to its last element.
      where: the op.
    """

    whole: int
    part: int
    cut: bool
    lies: range
    where: object


class Unifier:
    """Union-find over dims, with splits, weak classes and primes."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.split: dict[int, tuple[int, ...]] = {}
        self.names: dict[int, dict[str, str]] = {}  # strong root -> name -> origin
        self.inherited: dict[int, dict[str, str]] = {}
        self.occurs: list[set[int]] = []  # strong root -> ids of the node tuples that it stands in
        self.soft: list[tuple[int, int, object]] = []  # joins refused, for the report
        self._tuples: dict[Nodes, int] = {}
        # weak classes over strong roots
        self.weak_parent: dict[int, int] = {}
        self.weak_members: dict[int, list[int]] = {}
        self.weak_occurs: dict[int, set[int]] = {}
        self.prime_of: dict[int, int] = {}
        self.looped: set[int] = set()  # nodes that a loop runs over
        self._cache: dict[int, tuple[Part, ...]] | None = None

    # -- nodes

    def node(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.occurs.append(set())
        return len(self.parent) - 1

    def fresh(self, shape: Sequence[int]) -> Nodes:
        """New nodes for a value of this shape (-1 for dims of size 1)."""
        return self.register(tuple(NONE if n == 1 else self.node(n) for n in shape))

    def register(self, nodes: Nodes) -> Nodes:
        """Note that these nodes stand side by side in one value, so none of them may be joined with another."""
        if len(nodes) > 1 and nodes not in self._tuples:
            ident = self._tuples[nodes] = len(self._tuples)
            for n in nodes:
                if n != NONE:
                    for atom in self.atoms(n):
                        self.occurs[atom].add(ident)
                    self.occurs[self.find(n)].add(ident)
        return nodes

    def find(self, n: int) -> int:
        parent = self.parent
        while parent[n] != n:
            parent[n] = n = parent[parent[n]]
        return n

    def atoms(self, n: int) -> list[int]:
        """The unsplit roots that a node is made of, major to minor."""
        n = self.find(n)
        parts = self.split.get(n)
        if parts is None:
            return [n]
        return [a for p in parts for a in self.atoms(p)]

    def annotate(self, n: int, name: str, origin: str) -> None:
        """Call a node by a name; ``origin`` says who did, for reports."""
        if n != NONE:
            self.names.setdefault(self.find(n), {}).setdefault(name, origin)

    # -- strong joins

    def unify(self, a: int, b: int, where: object = None) -> bool:
        """Join two nodes strongly. False where that would put two dims of one value into one class."""
        if a == NONE or b == NONE:
            return True
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if self.size[a] != self.size[b]:
            return False
        sa, sb = self.split.get(a), self.split.get(b)
        if sa is None and sb is None:
            if not self.occurs[a].isdisjoint(self.occurs[b]):
                self.soft.append((a, b, where))
                return False
            self._merge(a, b)
            return True
        ok = self.unify_sequences([a] if sa is None else list(sa), [b] if sb is None else list(sb), where)
        a, b = self.find(a), self.find(b)
        if ok and a != b and (a in self.split) == (b in self.split):
            self._merge(a, b)
        return ok

    def _merge(self, a: int, b: int) -> None:
        if len(self.occurs[a]) < len(self.occurs[b]):
            a, b = b, a
        self.parent[b] = a
        self.occurs[a] |= self.occurs[b]
        self.occurs[b] = set()
        for table in (self.names, self.inherited):
            if b in table:
                mine = table.setdefault(a, {})
                for name, origin in table.pop(b).items():
                    mine.setdefault(name, origin)
        if b in self.split and a not in self.split:
            self.split[a] = self.split[b]

    def unify_sequences(self, a: list[int], b: list[int], where: object = None) -> bool:
        """Join two runs of nodes with equal products, splitting where the sizes ask for it."""
        return self._sequences(a, b, lambda x, y: self.unify(x, y, where))

    def _sequences(self, a: list[int], b: list[int], join) -> bool:
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
        """Split an atom into (major, rest), and all of its weak class with it."""
        parts = (self.node(major), self.node(self.size[n] // major))
        for p in parts:
            self.occurs[p] |= self.occurs[n]
        # the two parts of one dim may themselves not become one class
        self.split[n] = parts
        self.register(parts)
        for name, origin in (self.names.get(n) or self.inherited.get(n) or {}).items():
            self.inherited.setdefault(parts[0], {}).setdefault(name, origin)
            self.inherited.setdefault(parts[1], {}).setdefault(f"{name}-inner", origin)
        if spread:
            self._weak_divide(n, parts)
        return parts

    # -- weak joins

    def _weak_find(self, atom: int) -> int:
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
        if n not in self.weak_parent:
            return
        for m in {self.find(m) for m in self.weak_members[self._weak_find(n)]}:
            if m not in self.split and self.size[m] == self.size[n]:
                others = self._divide(m, self.size[parts[0]], spread=False)
                for mine, other in zip(parts, others, strict=True):
                    self.unify_weak(mine, other)

    def named(self, atom: int) -> bool:
        """Whether the weak class of an atom has a name of its own."""
        return any(self.names.get(self.find(m)) for m in self.weak_members[self._weak_find(atom)])

    def unify_weak(self, a: int, b: int, where: object = None) -> bool:
        """Join the weak classes of two atoms; where they share a value, prime the later one instead."""
        ra, rb = self._weak_find(a), self._weak_find(b)
        if ra == rb:
            return True
        if not self.weak_occurs[ra].isdisjoint(self.weak_occurs[rb]):
            if self.prime_of.get(ra) is None and self.prime_of.get(rb) is None:
                na, nb = self.named(ra), self.named(rb)
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
        """Join the nodes that one factor of an op ties together (weakly).

        A value that shares a factor with a primed dim, but has no such pair of dims itself, takes the unprimed name:
        the gradient of the keys is ``seq`` again.
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
            if a in self.split or b in self.split:  # a name for the whole dim passes as well
                self._tie_atoms(a, b, where)

    def _tie_atoms(self, x: int, y: int, where: object) -> bool:
        rx, ry = self._weak_find(x), self._weak_find(y)
        if rx == ry:
            return True
        for a, b in ((rx, ry), (ry, rx)):
            base = self.prime_of.get(a)
            if base is not None and b not in self.prime_of:
                base = self._weak_find(base)
                if base == b:
                    return True
                if self.weak_occurs[base].isdisjoint(self.weak_occurs[b]):
                    return self.unify_weak(base, b, where)
        return self.unify_weak(rx, ry, where)

    def link_names(self, a: int, b: int, where: object = None) -> None:
        """Let a name pass between dims of different sizes (a slice and the whole)."""
        if a != NONE and b != NONE:
            aa, bb = self.atoms(a), self.atoms(b)
            if len(aa) == len(bb) == 1:
                self._tie_atoms(aa[0], bb[0], where)

    def name_pieces(self, pieces: list[Piece]) -> None:
        """Pass names between wholes and their pieces, and drop the pieces that are done.

        A name goes down from a whole to the pieces without one. It goes up from pieces that all have the same, and from any to a
        whole that is first put together (a class token and patches); never from one piece of a fused projection by way of the
        whole to the next.
        """
        left = len(pieces) + 1
        while len(pieces) < left:
            left = len(pieces)
            wholes: dict[int, list[Piece]] = {}
            for p in pieces:
                if len(self.atoms(p.whole)) == 1:
                    wholes.setdefault(self._weak_find(p.whole), []).append(p)
            done: set[Piece] = set()
            for whole, found in wholes.items():
                names = {p: self._leading_names(p.part) for p in found}
                said = [p for p in found if names[p] and (found[0].cut or len(self.atoms(p.part)) == 1)]
                different = len({frozenset(names[p]) for p in said})
                if self._leading_names(whole):
                    flows = [p for p in found if not names[p]]
                elif said and not found[0].cut:
                    flows = said
                elif (
                    different == 1 and said == found and 2 * sum(map(len, {p.lies for p in found})) >= self.size[whole]
                ):
                    flows = found
                else:
                    continue
                for p in flows:
                    if not names[p]:
                        self._share_name(p.whole, p.part, p.where)
                    elif different == 1:
                        self._share_name(p.part, p.whole, p.where)
                    else:
                        for name, origin in names[p].items():
                            self.annotate(whole, name, origin)
                done.update(flows)
            pieces[:] = [p for p in pieces if p not in done]

    def _share_name(self, giver: int, taker: int, where: object) -> None:
        """Give the names of one dim to another, of another size; where either is made of parts, those of its major part."""
        mine, its = self.atoms(giver), self.atoms(taker)
        if len(mine) == len(its) == 1:
            self._tie_atoms(mine[0], its[0], where)
        else:
            for name, origin in self._leading_names(giver).items():
                self.inherited.setdefault(its[0], {}).setdefault(name, origin)

    def _leading_names(self, n: int) -> dict[str, str]:
        """The names of a dim, with their origins: of the whole of it or of its major part; else those that it inherits."""
        atom = self.atoms(n)[0]
        for table, node in ((self.names, self.find(n)), (self.names, atom), (self.inherited, atom)):
            found: dict[str, str] = {}
            for m in self.weak_members[self._weak_find(node)]:
                for name, origin in table.get(self.find(m), {}).items():
                    found.setdefault(name, origin)
            if found:
                return found
        return {}

    # -- results

    def names_now(self, n: int) -> set[str]:
        """The names a node has at this point, of its own or of its weak class."""
        if n == NONE:
            return set()
        out = set(self.names.get(self.find(n), ()))
        for atom in (self.find(n), *self.atoms(n)):
            for m in self.weak_members[self._weak_find(atom)]:
                out |= set(self.names.get(self.find(m), ()))
        return out

    def freeze(self) -> None:
        """Fix all names; :meth:`parts_of` may be asked from here on."""
        self._name_inner_parts()
        self._cache = {NONE: ()}
        self._weak_names: dict[int, tuple[str, ...]] = {}
        self._weak_inherited: dict[int, tuple[str, ...]] = {}
        for root, members in list(self.weak_members.items()):
            for table, out in ((self.names, self._weak_names), (self.inherited, self._weak_inherited)):
                found: dict[str, None] = {}
                for m in members:
                    found.update(dict.fromkeys(table.get(self.find(m), ())))
                out[root] = tuple(found)

    def _name_inner_parts(self) -> None:
        """Where a loop runs over the major part of a dim (microbatches), the dim's name goes to the rest of it.

        Devices that had the major part split among them would each do all of every iteration.
        """
        looped = {self.find(n) for n in self.looped if n != NONE}
        for n, parts in self.split.items():
            major, rest = parts[0], parts[-1]
            names = self.names.get(n) or self.inherited.get(n)
            if names and self.find(major) in looped:
                self.inherited[major] = {f"{name}-outer": origin for name, origin in names.items()}
                self.inherited[rest] = dict(names)

    def parts_of(self, n: int) -> tuple[Part, ...]:
        """The named parts of a node, major to minor; ``()`` for a dim of size 1."""
        cache = self._cache
        assert cache is not None
        if n in cache:
            return cache[n]
        r = self.find(n)
        if r in cache:
            parts = cache[r]
        else:
            own = self.names.get(r)
            if own:
                parts = ((tuple(own), self.size[r]),)
            elif r in self.split and (names := self._weak_names.get(self._weak_find(r))):
                parts = ((names, self.size[r]),)
            elif r in self.split:
                parts = tuple(p for child in self.split[r] for p in self.parts_of(child))
            else:
                w = self._weak_find(r)
                names = self._weak_names.get(w) or tuple(self.inherited.get(r, ()))
                names = names or self._primed(w) or self._weak_inherited.get(w, ())
                parts = ((names, self.size[r]),)
            cache[r] = parts
        cache[n] = parts
        return parts

    def _primed(self, w: int) -> tuple[str, ...]:
        base = self.prime_of.get(w)
        if base is None:
            return ()
        base = self._weak_find(base)
        if base == w:
            return ()
        names = self._weak_names.get(base) or self._weak_inherited.get(base) or ()
        return tuple(f"{n}'" for n in names[:1])

    def all_names(self) -> set[str]:
        return {name for names in self.names.values() for name in names}

    def joins(self) -> Iterable[tuple[str, str, str, str, object]]:
        """(name, name, origin, origin, where) for every two names of one class, and of refused joins."""
        seen: set[frozenset[str]] = set()
        classes: list[tuple[dict[str, str], object]] = []
        for members in self.weak_members.values():
            found: dict[str, str] = {}
            for m in members:
                for name, origin in self.names.get(self.find(m), {}).items():
                    found.setdefault(name, origin)
            classes.append((found, None))
        in_weak = {self.find(m) for ms in self.weak_members.values() for m in ms}
        classes += [(names, None) for root, names in self.names.items() if root not in in_weak]
        for a, b, where in self.soft:
            found = {}
            for atom in (*self.atoms(a), *self.atoms(b)):
                for m in self.weak_members.get(self._weak_find(atom), [atom]):
                    for name, origin in self.names.get(self.find(m), {}).items():
                        found.setdefault(name, origin)
            classes.append((found, where))
        for found, where in classes:
            names = list(found)
            for other in names[1:]:
                key = frozenset((names[0], other))
                if key not in seen:
                    seen.add(key)
                    yield names[0], other, found[names[0]], found[other], where

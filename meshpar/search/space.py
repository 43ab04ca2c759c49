"""What a search chooses from: meshes over a slice, and ordered rules over its axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import UnknownDimError, UnsupportedError
from ..layout import Layout, Rule
from ..layouts import PRESETS
from ..program.ir import Program

AXES = ("data", "model", "third")
"""What the axes of the meshes tried are called; any dim may take any of them."""

SCOPES = (None, "opt", "params")
"""What a rule is of: all, or the dims of weights as they lie between steps."""

Sizes = tuple[tuple[str, int], ...]
"""(axis, size), major first."""
Move = Hashable
"""What is changed of a candidate, whatever its other rules and the sizes of its mesh are."""


@dataclass(frozen=True)
class Point:
    """One candidate: a mesh, and rules in order. Every rule is optional: a dim that it does not divide stays whole."""

    sizes: Sizes
    rules: tuple[Rule, ...]

    @property
    def mesh(self) -> str:
        """The mesh as text."""
        return ", ".join(f"{a}={n}" for a, n in self.sizes)

    @property
    def in_one(self) -> bool:
        """Whether every rule asks for all axes, in one order or another."""
        return all(len(r.axes) == len(self.sizes) for r in self.rules)

    @property
    def layout(self) -> str:
        """The layout as text."""
        return str(as_layout(self.rules))


def as_layout(rules: Iterable[Rule]) -> Layout:
    """Rules as a layout that reads them in order."""
    return Layout("; ".join(map(str, rules)))


def meshes(devices: int, slices: int = 1, axes: int = 3) -> list[Sizes]:
    """The ordered factorisations of a slice into at most so many axes, fewest first, then the most even.

    Several slices are the first axis, ``slice``.
    """
    first: Sizes = (("slice", slices),) if slices > 1 else ()
    most = max(1, axes - len(first))
    found = [f for k in range(1, most + 1) for f in _factorisations(devices // slices, k)]
    found.sort(key=lambda f: (len(f), max(f) / min(f), [-n for n in f]))
    return [(*first, *zip(AXES, f, strict=False)) for f in found]


def _factorisations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (n,)
        return
    for k in range(2, n // 2 + 1):
        if n % k == 0:
            yield from ((k, *rest) for rest in _factorisations(n // k, parts - 1) if min(rest) > 1)


@dataclass(frozen=True)
class Space:
    """The dims that a search may split, and how.

    Attributes:
      dims: (dim, scope), the ones that most bytes of the arguments have first, scoped ones last; ``opt``: of the
        optimizer's state alone; ``params``: of the parameters alone.
      fixed: rules that every layout begins with.
    """

    dims: tuple[tuple[str, str | None], ...]
    fixed: tuple[Rule, ...]

    @classmethod
    def of(cls, program: Program, fixed: Layout, forbid: Sequence[str]) -> Space:
        """The space of a program.

        Raises:
          UnknownDimError: ``forbid`` names a dim that the program does not have.
          UnsupportedError: ``fixed`` splits a dim that ``forbid`` names.
        """
        known = program.all_names()
        for dim in forbid:
            if dim not in known:
                raise UnknownDimError(
                    f"forbid={dim!r}: the program has no such dim",
                    dim=dim,
                    fixes=[f"its dims are {', '.join(sorted(known))}"],
                )
        for rule in fixed.rules:
            if rule.dim in forbid:
                raise UnsupportedError(
                    f"fixed=`{fixed}` splits `{rule.dim}`, which forbid={rule.dim!r} leaves whole",
                    dim=rule.dim, rule=str(rule), fixes=["leave out one of the two"],
                )  # fmt: skip
        weight = dict.fromkeys(sorted(known), 0)
        scoped: set[tuple[str, str | None]] = set()
        for value in program.inputs:
            for dim in program.dims(value):
                if dim in weight:
                    weight[dim] += value.aval.size * value.aval.dtype.itemsize
                    scoped.add((dim, value.kind))
        held = {(r.dim, r.scope) for r in fixed.rules}
        shared = [d for d in weight if not d.endswith("'") and d not in forbid]
        dims = [(d, s) for d in shared for s in SCOPES if s is None or (d, s) in scoped]
        dims.sort(key=lambda d: (SCOPES.index(d[1]), -weight[d[0]], d[0]))
        return cls(tuple(d for d in dims if d not in held), fixed.rules)

    def point(self, sizes: Sizes, rules: Iterable[Rule]) -> Point:
        """The candidate with these rules behind the fixed ones: those for dims that are searched, and that ask for an axis."""
        known = [replace(r, optional=True) for r in rules if (r.dim, r.scope) in self.dims and r.axes]
        return Point(sizes, (*self.fixed, *known))

    def presets(self, sizes: Sizes) -> Iterator[tuple[str, Point]]:
        """(name, the known scheme on a mesh), of those for as many axes; without experts none for them."""
        names = [a for a, _ in sizes]
        known = {"batch", *(d for d, _ in self.dims), *(r.dim for r in self.fixed)}
        for name, preset in PRESETS.items():
            if preset.__code__.co_argcount != len(names):
                continue
            rules = preset(*names).rules
            if any(r.dim in known for r in rules if r.axes == rules[0].axes):
                yield name, self.point(sizes, rules)

    def swapped(self, point: Point) -> Iterator[tuple[Point, Point]]:
        """The candidates in which axes take each other's place, as pairs.

        The first has this one's rules, with the sizes exchanged, so that its dims are in as many parts as the second's, which has
        the axes of the rules exchanged: on the torus the two lie otherwise.
        """
        names, size = [a for a, _ in point.sizes], dict(point.sizes)
        free = point.rules[len(self.fixed) :]
        for order in itertools.permutations(names):
            if list(order) != names:
                place = dict(zip(names, order, strict=True))
                rules = (replace(r, axes=tuple(place[a] for a in r.axes)) for r in free)
                yield Point(tuple((a, size[place[a]]) for a in names), point.rules), self.point(point.sizes, rules)

    def neighbours(
        self, point: Point, dim: tuple[str, str | None], lost: Callable[[Move], bool] = lambda move: False
    ) -> Iterator[tuple[Move, Point]]:
        """The candidates in which one dim asks for other axes, or for none.

        Its rule stands before every run of rules for the same axes that shares one with it, and behind all. That of weights alone
        asks for all axes, in some order, and stands before all.

        Args:
          lost: the moves that are not worth while. Where each of several axes alone, behind all rules, is not, a dim does not ask
            for these together, unless it asks for some of them now. It is asked when the candidates before were tried.
        """
        free = point.rules[len(self.fixed) :]
        others = [r for r in free if (r.dim, r.scope) != dim]
        now = {a for r in free if (r.dim, r.scope) == dim for a in r.axes}
        yield (dim, ()), self.point(point.sizes, others)
        names = [a for a, _ in point.sizes]
        if dim[1] is not None:
            for axes in itertools.permutations(names):
                yield (dim, axes), self.point(point.sizes, [Rule(dim[0], axes, True, dim[1]), *others])
            return
        for axes in _choices(names):
            if len(axes) > 1 and now.isdisjoint(axes) and all(lost((dim, (a,), None)) for a in axes):
                continue
            mine = Rule(dim[0], axes, True, dim[1])
            starts = [
                i for i, r in enumerate(others) if set(r.axes) & set(axes) and (i == 0 or others[i - 1].axes != r.axes)
            ]
            for i in (*starts, len(others)):
                before = others[i].axes if i < len(others) else None
                yield (dim, axes, before), self.point(point.sizes, [*others[:i], mine, *others[i:]])

    def together(self, point: Point) -> Iterator[tuple[Move, Point]]:
        """The candidates in which all dims that ask for the same axes ask for others."""
        free = point.rules[len(self.fixed) :]
        for axes in dict.fromkeys(r.axes for r in free):
            mine = tuple((r.dim, r.scope) for r in free if r.axes == axes)
            if len(mine) < 2:
                continue
            for new in ((), *_choices([a for a, _ in point.sizes])):
                if new != axes:
                    rules = (replace(r, axes=new) if r.axes == axes else r for r in free)
                    yield (mine, axes, new), self.point(point.sizes, rules)

    def exchanged(self, point: Point) -> Iterator[tuple[Move, Point]]:
        """The candidates in which two dims ask for each other's axes, or one for the other's, which then asks for none; and those
        in which one asks for its axes in another order."""
        free = list(point.rules[len(self.fixed) :])
        mine = {(r.dim, r.scope): r for r in free}
        whole = [Rule(d, (), True, s) for d, s in self.dims if s is None and (d, s) not in mine]
        for one, other in itertools.combinations([*free, *whole], 2):
            if one.axes != other.axes and one.scope == other.scope:
                to = {one: replace(other, axes=one.axes), other: replace(one, axes=other.axes)}
                move = (one.dim, one.axes), (other.dim, other.axes)
                yield move, self.point(point.sizes, [to.get(r, r) for r in free])
        for rule in free:
            for axes in itertools.permutations(rule.axes):
                if axes != rule.axes:
                    turned = replace(rule, axes=axes)
                    yield (rule, axes), self.point(point.sizes, [turned if r is rule else r for r in free])

    def other_meshes(self, point: Point, allowed: Sequence[Sizes]) -> Iterator[Point]:
        """The same rules on the meshes in which one axis has a factor of another; and on those with one axis more, which splits
        what one of the others split, or nothing."""
        names = [a for a, _ in point.sizes]
        free = point.rules[len(self.fixed) :]
        mine = dict(point.sizes)
        for sizes in allowed:
            axes = [a for a, _ in sizes]
            changed = [a for a, n in sizes if a in mine and mine[a] != n]
            if axes == names and len(changed) == 2:
                yield self.point(sizes, free)
            elif axes[:-1] == names and len(changed) == 1:
                (cut,), new = changed, axes[-1]
                rules = (
                    replace(r, axes=tuple(x for a in r.axes for x in ((a, new) if a == cut else (a,)))) for r in free
                )
                yield self.point(sizes, rules)
                yield self.point(sizes, free)


def _choices(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Axes that one dim may take, in every order: one or two of them, or all."""
    for k in (1, 2):
        yield from itertools.permutations(axes, k)
    if len(axes) > 2:
        yield tuple(axes)

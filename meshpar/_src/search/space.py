"""The candidates of a search: meshes over a slice, and ordered rules over their axes.

A search calls the axes of its meshes ``data``, ``model`` and ``third``, whatever its rules give them; results have other names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import UnknownDimError, UnsupportedError
from ..layout import BETWEEN_SLICES, EXPERTS, Layout, Rule, characteristic_dims
from ..layouts import PRESETS
from ..program.ir import Program
from ..program.pipeline import layer_loops
from ..units import mesh_text

AXES = ("data", "model", "third")
"""Names of the axes of candidate meshes; a rule may give any of them to any dim."""

SCOPES = (None, "opt", "params")
"""Scopes of searched rules: all values, or only the stored sharding of parameters or of optimizer state."""

BATCH = frozenset({"batch"})
SEQUENCE = frozenset({"seq", "kv_seq", "sequence", "length", "context"})
"""Names of the dims after which an axis is called ``data``, ``expert`` or ``context``; axes of other dims are called ``model``."""
WITH_DATA = frozenset({"batch", "embed"})
"""Dims that an axis called ``data`` shards in the usual schemes."""

Dim = tuple[str, str | None]
"""A searched dim: its name and the scope of its rule."""
Sizes = tuple[tuple[str, int], ...]
"""(axis, size), major first."""
Move = Hashable
"""A change of a candidate, independent of its other rules and of the sizes of its mesh."""


@dataclass(frozen=True)
class Point:
    """One candidate: a mesh, and rules in order. Every rule is optional: a dim whose size does not divide stays replicated."""

    sizes: Sizes
    rules: tuple[Rule, ...]

    @property
    def mesh(self) -> str:
        """The mesh as text."""
        return mesh_text(dict(self.sizes))

    @property
    def uses_all_axes(self) -> bool:
        """Whether every rule has all axes, in any order."""
        return all(len(r.axes) == len(self.sizes) for r in self.rules)

    @property
    def layout(self) -> str:
        """The layout as text."""
        return str(as_layout(self.rules))


def as_layout(rules: Iterable[Rule]) -> Layout:
    """A layout of these rules, with ``resolve="order"``."""
    return Layout("; ".join(map(str, rules)))


def meshes(devices: int, slices: int = 1, axes: int = 3) -> list[Sizes]:
    """Meshes over a slice: ordered factorisations into at most ``axes`` factors, fewest axes first, then the most even.

    With several slices the first axis is ``slice``.
    """
    first: Sizes = ((BETWEEN_SLICES, slices),) if slices > 1 else ()
    most = max(1, axes - len(first))
    factors = [f for k in range(1, most + 1) for f in _factorisations(devices // slices, k)]
    factors.sort(key=lambda f: (len(f), max(f) / min(f), [-n for n in f]))
    return [(*first, *zip(AXES, f, strict=False)) for f in factors]


def _factorisations(n: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorisations of n into ``count`` factors, each larger than 1, as tuples."""
    if count == 1:
        yield (n,)
        return
    for k in range(2, n // 2 + 1):
        if n % k == 0:
            yield from ((k, *rest) for rest in _factorisations(n // k, count - 1) if min(rest) > 1)


def axis_names(sizes: Sizes, rules: Sequence[Rule], keep: Collection[str] = ()) -> dict[str, str]:
    """Old name → new name of every axis, by the dims that the rules give it.

    One of the axes of ``batch`` is ``data``: the one with the fewest dims of other kinds, then one that shards ``embed`` as well,
    then the largest. Axes of experts are
    ``expert``, axes of the sequence ``context``, axes of other dims ``model``, axes without a rule ``idle``. A further axis of
    ``batch`` alone is ``replica`` where ``data`` shards weights too, else ``data2``. A second axis of a kind has a number.

    Args:
      keep: axes whose names do not change.
    """
    carried = {a: {r.dim for r in rules if a in r.axes} for a, _ in sizes}
    free = [a for a, _ in sizes if a not in keep]
    size = dict(sizes)
    batch = [a for a in free if carried[a] & BATCH]
    others = {a: len(carried[a] - WITH_DATA) for a in batch}
    data = min(batch, key=lambda a: (others[a], carried[a] == BATCH, -size[a], free.index(a)), default=None)

    def kind(axis: str) -> str:
        """The name of an axis by the dims that it shards, without a number."""
        dims = carried[axis]
        if axis == data:
            return "data"
        if dims.intersection(EXPERTS):
            return "expert"
        if dims == BATCH and data is not None and carried[data] != BATCH:
            return "replica"
        if dims & BATCH and dims <= WITH_DATA:
            return "data"
        if dims and dims <= SEQUENCE | BATCH:
            return "context"
        return "model" if dims else "idle"

    names, taken = {a: a for a in keep if a in size}, set(keep)
    for axis in sorted(free, key=lambda a: a != data):
        text = kind(axis)
        number = next(k for k in itertools.count(1) if (text if k == 1 else f"{text}{k}") not in taken)
        names[axis] = text if number == 1 else f"{text}{number}"
        taken.add(names[axis])
    return names


def renamed(point: Point, keep: Collection[str] = ()) -> Point:
    """The same candidate with axes named by :func:`axis_names`."""
    names = axis_names(point.sizes, point.rules, keep)
    return Point(
        tuple((names[a], n) for a, n in point.sizes),
        tuple(replace(r, axes=tuple(names[a] for a in r.axes)) for r in point.rules),
    )


@dataclass(frozen=True)
class Space:
    """The meshes of a search, and the dims of a program that it may shard.

    Attributes:
      program: candidates are plans of it.
      meshes: the candidate meshes.
      dims: (dim, scope), those with most bytes of arguments first, scoped ones last. Scope ``opt``: optimizer state only;
        ``params``: parameters only.
      fixed: rules with which every layout starts.
    """

    program: Program
    meshes: tuple[Sizes, ...]
    dims: tuple[Dim, ...]
    fixed: tuple[Rule, ...]

    @classmethod
    def of(cls, program: Program, among: Iterable[Sizes], fixed: Layout, forbid: Sequence[str]) -> Space:
        """Meshes, with the dims of a program that ``fixed`` and ``forbid`` do not name.

        Dims of stacked layers have scoped rules only: numbers of stages are searched separately (:mod:`search.pipeline_stages`).

        Raises:
          UnknownDimError: ``forbid`` names a dim that the program does not have.
          UnsupportedError: ``fixed`` shards a dim that ``forbid`` names.
        """
        known = program.all_names()
        for dim in forbid:
            if dim not in known:
                fixes = [f"its dims are {', '.join(sorted(known))}"]
                raise UnknownDimError(f"forbid={dim!r}: the program has no such dim", dim=dim, fixes=fixes)
        for rule in fixed.rules:
            if rule.dim in forbid:
                raise UnsupportedError(
                    f"fixed=`{fixed}` shards `{rule.dim}`, and forbid={rule.dim!r} leaves it unsharded",
                    dim=rule.dim,
                    rule=str(rule),
                    fixes=["remove one of the two"],
                )
        weight = dict.fromkeys(sorted(known), 0)
        scoped: set[Dim] = set()
        for value in program.inputs:
            for dim in program.dims(value):
                if dim in weight:
                    weight[dim] += value.aval.size * value.aval.dtype.itemsize
                    scoped.add((dim, value.kind))
        given = {(r.dim, r.scope) for r in fixed.rules}
        shared = [d for d in weight if not d.endswith("'") and d not in forbid]
        stacked = {loop.dim for loop in layer_loops(program.traced)}  # a rule without scope would make a pipeline
        dims = [(d, s) for d in shared for s in SCOPES if (d not in stacked if s is None else (d, s) in scoped)]
        dims.sort(key=lambda d: (SCOPES.index(d[1]), -weight[d[0]], d[0]))
        return cls(program, tuple(among), tuple(d for d in dims if d not in given), fixed.rules)

    @property
    def shared(self) -> list[Dim]:
        """The dims without a scope."""
        return [dim for dim in self.dims if dim[1] is None]

    def free(self, point: Point) -> tuple[Rule, ...]:
        """The rules of a candidate after the fixed ones."""
        return point.rules[len(self.fixed) :]

    def point(self, sizes: Sizes, rules: Iterable[Rule]) -> Point:
        """The candidate with the fixed rules, then the rules in ``rules`` that are for searched dims and have an axis."""
        searched = [replace(r, optional=True) for r in rules if (r.dim, r.scope) in self.dims and r.axes]
        return Point(sizes, (*self.fixed, *searched))

    def presets(self, sizes: Sizes) -> Iterator[tuple[str, Point]]:
        """(name, candidate) of every known scheme with as many axes as the mesh, without those for other models (experts).

        Over several slices, HSDP replicates over ``slice``, and schemes with one axis fewer have ``slice`` and the next axis in
        place of their first one.
        """
        names = [a for a, _ in sizes]
        several = names[0] == BETWEEN_SLICES and len(names) > 1
        known = {"batch", *(d for d, _ in self.dims), *(r.dim for r in self.fixed)}
        for name, preset in PRESETS.items():
            axes, count = names, preset.__code__.co_argcount
            if several and name == "hsdp":
                axes = names[::-1]
            elif several and count == len(names) - 1:
                axes = ["+".join(names[:2]), *names[2:]]
            if count != len(axes):
                continue
            scheme = preset(*axes)
            if not known.isdisjoint(characteristic_dims(scheme)):
                yield name, self.point(sizes, scheme.rules)
        if len(names) == 1:  # tensor parallelism over all devices, as for decoding
            rules = PRESETS["tensor_parallel"]("none", *names).rules
            rules = [r for r in rules if r.axes == tuple(names)]
            if any(r.dim in known for r in rules):
                yield "tensor_parallel", self.point(sizes, rules)

    def swapped(self, point: Point) -> Iterator[tuple[Point, Point]]:
        """Yields pairs of candidates, made from ``point``, in which axes are permuted.

        The first has the same rules and permuted sizes, the second the same sizes and permuted axes in its rules. Their dims have
        equal numbers of shards; their axes are mapped to different torus dimensions.
        """
        names, size = [a for a, _ in point.sizes], dict(point.sizes)
        free = self.free(point)
        for order in itertools.permutations(names):
            if list(order) != names:
                to = dict(zip(names, order, strict=True))
                rules = (replace(r, axes=tuple(to[a] for a in r.axes)) for r in free)
                yield Point(tuple((a, size[to[a]]) for a in names), point.rules), self.point(point.sizes, rules)

    def neighbours(
        self, point: Point, dim: Dim, rejected: Callable[[Move], bool] = lambda move: False
    ) -> Iterator[tuple[Move, Point]]:
        """Yields (move, candidate) for the candidates in which the rule of ``dim`` has other axes, or no axes. A move
        is (dim, axes).

        The rule is inserted before every run of rules with equal axes that shares an axis with it, and after all rules. A scoped
        rule has all axes, in every order, and comes first.

        Args:
          rejected: moves that are not tried. Several axes are not tried together if each alone, after all rules, is rejected,
            unless the dim has one of them now. It is called after the previous candidates were tried.
        """
        free = self.free(point)
        others = [r for r in free if (r.dim, r.scope) != dim]
        now = {a for r in free if (r.dim, r.scope) == dim for a in r.axes}
        yield (dim, ()), self.point(point.sizes, others)
        names = [a for a, _ in point.sizes]
        if dim[1] is not None:
            for axes in itertools.permutations(names):
                yield (dim, axes), self.point(point.sizes, [Rule(dim[0], axes, True, dim[1]), *others])
            return
        for axes in _choices(names):
            if len(axes) > 1 and now.isdisjoint(axes) and all(rejected((dim, (a,), None)) for a in axes):
                continue
            rule = Rule(dim[0], axes, True, dim[1])
            shares = [bool(set(r.axes) & set(axes)) for r in others]
            starts = [i for i, r in enumerate(others) if shares[i] and (i == 0 or others[i - 1].axes != r.axes)]
            for i in (*starts, len(others)):
                before = others[i].axes if i < len(others) else None
                yield (dim, axes, before), self.point(point.sizes, [*others[:i], rule, *others[i:]])

    def together(self, point: Point) -> Iterator[tuple[Move, Point]]:
        """Yields (move, candidate) for the candidates in which all rules with equal axes have other axes."""
        free = self.free(point)
        for axes in dict.fromkeys(r.axes for r in free):
            dims = tuple((r.dim, r.scope) for r in free if r.axes == axes)
            if len(dims) < 2:
                continue
            for new in ((), *_choices([a for a, _ in point.sizes])):
                if new != axes:
                    rules = (replace(r, axes=new) if r.axes == axes else r for r in free)
                    yield (dims, axes, new), self.point(point.sizes, rules)

    def exchanged(self, point: Point) -> Iterator[tuple[Move, Point]]:
        """The candidates in which two rules exchange their axes (one of them may have none), or one permutes its own."""
        free = list(self.free(point))
        ruled = {(r.dim, r.scope) for r in free}
        unsharded = [Rule(d, (), True, s) for d, s in self.dims if s is None and (d, s) not in ruled]
        for one, other in itertools.combinations([*free, *unsharded], 2):
            if one.axes != other.axes and one.scope == other.scope:
                to = {one: replace(other, axes=one.axes), other: replace(one, axes=other.axes)}
                move = (one.dim, one.axes), (other.dim, other.axes)
                yield move, self.point(point.sizes, [to.get(r, r) for r in free])
        for rule in free:
            for axes in itertools.permutations(rule.axes):
                if axes != rule.axes:
                    permuted = replace(rule, axes=axes)
                    yield (rule, axes), self.point(point.sizes, [permuted if r is rule else r for r in free])

    def other_meshes(self, point: Point) -> Iterator[Point]:
        """The same rules on meshes in which a factor moves from one axis to another, and on meshes with one more axis.

        The new axis is added to the rules after the axis that it was factored from, or used by no rule.
        """
        names = [a for a, _ in point.sizes]
        free = self.free(point)
        size = dict(point.sizes)
        for sizes in self.meshes:
            axes = [a for a, _ in sizes]
            changed = [a for a, n in sizes if a in size and size[a] != n]
            if axes == names and len(changed) == 2:
                yield self.point(sizes, free)
            elif axes[:-1] == names and len(changed) == 1:
                cut, new = changed[0], axes[-1]
                added = {cut: (cut, new)}
                rules = (replace(r, axes=tuple(x for a in r.axes for x in added.get(a, (a,)))) for r in free)
                yield self.point(sizes, rules)
                yield self.point(sizes, free)


def _choices(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The axes that one rule may have: one or two in every order, or all."""
    for k in (1, 2):
        yield from itertools.permutations(axes, k)
    if len(axes) > 2:
        yield tuple(axes)

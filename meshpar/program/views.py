"""Programs in which what is cut, joined and merged along split dims is written so that it stays split.

``x[1:] - x[:-1]`` has 15 of 16 rows, which four devices cannot share; ``jnp.roll`` joins two such pieces; ``jnp.ravel(x)`` has no
blocks where the minor dim is split. As each op by itself needs such a value whole, so would the plan. Here such values are *views*
of arrays that do divide, for as long as the ops that read them can do with the array:

- picked: elements of the array along some dims, by a table. Tables of slices of joins of slices compose into one, which
  :mod:`meshpar.rules.rearrange` exchanges. Elementwise ops, products and reductions of 15 rows are made of 16, the last of which
  nobody reads: it is zero where it would count.
- merged: a reshape of the array that only merges dims. What is elementwise, or contracted, is so before the reshape too.

A lookup of which every row has its own, ``x[jnp.arange(n), i]``, is written as the batch of lookups that it is.

Whatever else reads a view gets the value as it was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from ..compat.jax import bind, body_consts, literal_array, make_generated_jaxpr, new_var, replace_body, scan_counts
from ..rules import ELEMENTWISE
from ..rules.local import plain_params
from ..rules.rearrange import ANY, ZERO, rearrange
from .infer import again
from .ir import Frame, Op, Program, Value

MOST_USES = 4  # of one element in a lookup by constants
MOST_SELECTED = 4  # arrays of which pieces are joined
LARGEST_TABLE = 1 << 20

_LOOKUPS = ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_CUTS = ("slice", "split", "rev", "concatenate", "pad", "reshape", *_LOOKUPS)
_INLINED = ("jit", "pjit", "closed_call", "call")
_INTEGERS = ELEMENTWISE | {
    "broadcast_in_dim", "reshape", "squeeze", "iota", "concatenate", "slice", "rev", "transpose", "name_dims",
}  # fmt: skip
_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": lambda dtype: _least(dtype, 1),
    "reduce_min": lambda dtype: _least(dtype, -1),
    "reduce_and": lambda dtype: np.bitwise_not(np.zeros((), dtype)),
    "reduce_or": lambda dtype: 0,
}
"""The value that changes nothing in a reduction."""


def _least(dtype: Any, sign: int) -> Any:
    if dtype == np.bool_:
        return sign < 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return -sign * np.inf
    info = jnp.iinfo(dtype)
    return info.min if sign > 0 else info.max


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which elements of a dim a view has, and over how many devices that dim is split."""

    table: np.ndarray
    parts: int


@dataclass(slots=True)
class _Picked:
    """A view of some elements of an array.

    Attributes:
      source: the array; cuts: by dim.
      written: makes the value as the program does; None: it is the first elements of ``source``.
      composed: of several ops of the program, so that the table says more than each of them does.
      made: the value, once something has read it.
    """

    source: Any
    cuts: dict[int, _Cut]
    written: Callable[[], Any] | None = None
    composed: bool = False
    made: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.cuts[d].table) if d in self.cuts else n for d, n in enumerate(self.source.aval.shape))

    @property
    def even(self) -> bool:
        return all(len(cut.table) % cut.parts == 0 for cut in self.cuts.values())


@dataclass(slots=True)
class _Merged:
    """A view of an array whose dims are merged: for every dim of the view, the sizes of those that it is merged from."""

    source: Any
    groups: tuple[tuple[int, ...], ...]
    made: Any = None

    def dims(self, d: int) -> range:
        """The dims of the array that dim d is merged from."""
        start = sum(map(len, self.groups[:d]))
        return range(start, start + len(self.groups[d]))


@dataclass(frozen=True, slots=True)
class _Longer:
    """A dim of a view of this size, its size in the array, and over how many devices that is split."""

    size: int
    whole: int
    parts: int


@dataclass(slots=True)
class _Scope:
    """What stands for the variables of a jaxpr, and which of them are views."""

    names: dict[Any, Any] = field(default_factory=dict)
    views: dict[Any, _Picked | _Merged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The dimension numbers of a gather or scatter, under the same names.

    Attributes:
      taken: dims of the array of which one element is taken; into: those that the components of an index vector are of.
      batching: dims of the array that are those of the indices in ``paired``.
    """

    taken: tuple[int, ...]
    into: tuple[int, ...]
    batching: tuple[int, ...]
    paired: tuple[int, ...]

    @staticmethod
    def of(op: Op) -> _Lookup:
        dn = op.eqn.params["dimension_numbers"]
        if op.name == "gather":
            return _Lookup(
                dn.collapsed_slice_dims, dn.start_index_map, dn.operand_batching_dims, dn.start_indices_batching_dims
            )
        return _Lookup(
            dn.inserted_window_dims, dn.scatter_dims_to_operand_dims, dn.operand_batching_dims,
            dn.scatter_indices_batching_dims,
        )  # fmt: skip

    def numbers(self, op: Op) -> Any:
        """Those of the op, changed to these."""
        dn = op.eqn.params["dimension_numbers"]
        if op.name == "gather":
            return dn._replace(
                collapsed_slice_dims=self.taken, start_index_map=self.into, operand_batching_dims=self.batching,
                start_indices_batching_dims=self.paired,
            )  # fmt: skip
        return dn._replace(
            inserted_window_dims=self.taken, scatter_dims_to_operand_dims=self.into,
            operand_batching_dims=self.batching, scatter_indices_batching_dims=self.paired,
        )  # fmt: skip


Parts = Callable[[Value, int], int]
"""(value, dim) → over how many devices it is split."""


def with_views(program: Program, parts: Parts, notes: list[str]) -> Program | None:
    """The program with views of split arrays; None where it has none.

    Args:
      parts: how it will be split.
      notes: takes what is padded.
    """
    if all(parts(v, d) == 1 for v, d in program.cached(_cut_dims)):
        return None
    kept = program.cached(_Kept).found
    known = next((k for k in kept if all(parts(v, d) == n for (v, d), n in k.parts.items())), None)
    if known is not None:
        kept.remove(known)
    else:
        known = _Views.of(program, parts)
    kept.append(known)
    del kept[:-_MOST]
    notes += known.notes
    return known.program


_MOST = 16
"""Programs with views that are kept of one program."""


class _Kept:
    """Programs with views, of one program; the one used last is the last."""

    def __init__(self, program: Program):
        self.found: list[_Views] = []


@dataclass(frozen=True, eq=False, slots=True)
class _Views:
    """A program with views; None: it has none.

    Attributes:
      parts: how the dims are split that it depends on.
      notes: what is padded.
    """

    program: Program | None
    parts: dict[tuple[Value, int], int]
    notes: list[str]

    @classmethod
    def of(cls, program: Program, parts: Parts) -> _Views:
        asked: dict[tuple[Value, int], int] = {}
        notes: list[str] = []

        def ask(value: Value, dim: int) -> int:
            return asked.setdefault((value, dim), parts(value, dim))

        return cls(_written(program, ask, notes), asked, notes)


def _written(program: Program, parts: Parts, notes: list[str]) -> Program | None:
    writer = _Writer(parts, notes)
    writer.constants.update(
        (program.root.env[v], c) for v, c in zip(program.root.jaxpr.constvars, program.closed.consts, strict=True)
    )
    jaxpr = writer.frame(program.root)
    if jaxpr is None:
        return None
    found = again(program, ClosedJaxpr(jaxpr, program.closed.consts))
    found.traced = program
    return found


def _cut_dims(program: Program) -> list[tuple[Value, int]]:
    """The dims, of which values, of which at least one must be split for a program to have views.

    Those that are cut, joined, padded, reversed, or looked up by what follows from no argument; and the minor ones of those that a
    reshape merges or parts.
    """
    from_arguments = set(program.inputs)
    found: dict[tuple[Value, int], None] = {}
    for op in program.root.walk():
        if any(v in from_arguments for v in op.ins):
            from_arguments.update(op.outs)
        if op.name not in _CUTS:
            continue
        arrays = [v for v in (op.ins[0], *op.outs) if v is not None]
        if op.name == "reshape":
            assert op.rule is not None
            every = [*op.rule.ins[0], *op.rule.outs[0]]
            minor = {f for factors in every for f in factors[1:]}
            for value, dims in ((op.ins[0], op.rule.ins[0]), (op.outs[0], op.rule.outs[0])):
                if value is not None:
                    found.update(
                        ((value, d), None)
                        for d, factors in enumerate(dims)
                        if len(factors) == 1 and factors[0] in minor
                    )
        elif op.name not in _LOOKUPS:
            arrays += [v for v in op.ins[1:] if v is not None and len(v.shape) == len(op.outs[0].shape)]
            found.update(((v, d), None) for v in arrays for d in range(len(v.shape)) if op.name == "rev" or any(
                w.shape[d] != v.shape[d] for w in arrays if len(w.shape) == len(v.shape)))  # fmt: skip
        elif op.ins[1] is None or op.ins[1] not in from_arguments or len(_columns(op.ins[1])) > 1:
            value = op.ins[0] if op.name == "gather" else op.outs[0]
            found.update(((value, d), None) for d in _Lookup.of(op).into if value is not None)
            if op.ins[1] is not None:
                found.update(((op.ins[1], d), None) for d in range(len(op.ins[1].shape) - 1))
    return list(found)


class _Writer:
    """Writes a program's jaxprs anew.

    Attributes:
      eqns: of the jaxpr that is written.
      mine: by the id of an equation that goes if nothing reads it, whether it is new.
      op: the op that is written.
      constants: values that are known; outer: what values that a loop or branch only reads are outside.
    """

    def __init__(self, parts: Parts, notes: list[str]):
        self.split_of, self.notes = parts, notes
        self.eqns: list[Any] = []
        self.mine: dict[int, bool] = {}
        self.op: Any = None
        self.constants: dict[Value, Any] = {}
        self.outer: dict[Value, Value] = {}

    def frame(self, frame: Frame) -> Any:
        """The jaxpr of a frame; None where nothing is a view in it."""
        before = self.eqns, self.mine
        self.eqns, self.mine = [], {}
        scope = _Scope()
        self.ops(frame, scope)
        outvars = [self.read(scope, v) for v in frame.jaxpr.outvars]
        eqns, mine = self.eqns, self.mine
        self.eqns, self.mine = before
        kept = _live(eqns, mine, outvars)
        return frame.jaxpr.replace(eqns=kept, outvars=outvars) if any(mine.get(id(e)) for e in kept) else None

    def ops(self, frame: Frame, scope: _Scope, consts: Sequence[Any] = ()) -> None:
        for var, const in zip(frame.jaxpr.constvars, consts, strict=False):
            self.constants[frame.env[var]] = const
        for op in frame.ops:
            self.op = op
            write = _WRITE.get(op.name, _Writer.elementwise if op.name in ELEMENTWISE else None)
            if op.frames:
                self.control(scope, op)
            elif write is None or not write(self, scope, op):
                self.as_written(scope, op)

    def control(self, scope: _Scope, op: Op) -> None:
        eqn = op.eqn
        if op.name in _INLINED:
            (frame,), (consts,) = op.frames, body_consts(eqn)
            invars = eqn.invars[len(eqn.invars) - len(frame.jaxpr.invars) :]
            if any(v in scope.views for v in invars if not isinstance(v, Literal)) or any(
                o.name in _CUTS for o in frame.walk()
            ):
                inner = _Scope()
                for var, const in zip(frame.jaxpr.constvars, consts, strict=True):
                    inner.names[var] = Literal(const, var.aval)
                for var, outer in zip(frame.jaxpr.invars, invars, strict=True):
                    self.stands_for(inner, var, scope, outer)
                self.ops(frame, inner, consts)
                for var, result in zip(eqn.outvars, frame.jaxpr.outvars, strict=True):
                    self.stands_for(scope, var, inner, result)
                return
        elif op.name in ("scan", "while", "cond", "checkpoint", "remat2"):
            if op.name in ("scan", "cond"):
                read = op.ins[1:] if op.name == "cond" else op.ins[: scan_counts(eqn.params)[0]]
                for frame in op.frames:
                    pairs = zip(frame.ins(), read, strict=False)
                    self.outer.update((inner, outer) for inner, outer in pairs if outer is not None)
            bodies = [self.frame(frame) for frame in op.frames]
            self.op = op
            if any(b is not None for b in bodies):
                every = [f.jaxpr if b is None else b for f, b in zip(op.frames, bodies, strict=True)]
                eqn = replace_body(eqn, every)
        self.as_written(scope, op, eqn)
        if eqn is not op.eqn:
            self.mine[id(self.eqns[-1])] = True

    def stands_for(self, scope: _Scope, var: Any, other: _Scope, source: Any) -> None:
        if not isinstance(source, Literal) and source in other.views:
            scope.views[var] = other.views[source]
        else:
            scope.names[var] = self.read(other, source)

    # -- equations

    def as_written(self, scope: _Scope, op: Op, eqn: Any = None) -> list[Any]:
        """The op on values as they are; its results."""
        eqn = op.eqn if eqn is None else eqn
        invars = [self.read(scope, v) for v in eqn.invars]
        outvars = [new_var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        scope.names.update(zip(eqn.outvars, outvars, strict=True))
        return outvars

    def emit(self, op: Op, fn: Callable[..., Any], *atoms: Any) -> Any:
        """The result of a function of atoms, as equations of the op's line."""
        arrays = [a for a in atoms if not isinstance(a, Literal)]

        def of(*xs: Any) -> Any:
            rest = iter(xs)
            return fn(*(literal_array(a) if isinstance(a, Literal) else next(rest) for a in atoms))

        traced = make_generated_jaxpr(
            of, *[jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype, weak_type=a.aval.weak_type) for a in arrays]
        )
        names: dict[Any, Any] = dict(zip(traced.jaxpr.invars, arrays, strict=True))
        names.update((v, Literal(c, v.aval)) for v, c in zip(traced.jaxpr.constvars, traced.consts, strict=True))
        for e in traced.jaxpr.eqns:
            outvars = [new_var(v.aval) for v in e.outvars]
            invars = [v if isinstance(v, Literal) else names[v] for v in e.invars]
            self.add(e.replace(invars=invars, outvars=outvars, source_info=op.eqn.source_info))
            names.update(zip(e.outvars, outvars, strict=True))
        (out,) = traced.jaxpr.outvars
        return out if isinstance(out, Literal) else names[out]

    def emit_op(self, op: Op, atoms: Sequence[Any], **changed: Any) -> Any:
        """The op itself on other operands; its one result."""
        return self.emit(op, lambda *xs: bind(op.eqn, xs, {**op.eqn.params, **changed})[0], *atoms)

    def add(self, eqn: Any) -> None:
        self.eqns.append(eqn)
        self.mine[id(eqn)] = True

    def read(self, scope: _Scope, var: Any) -> Any:
        """The value of a variable, whole."""
        if isinstance(var, Literal):
            return var
        view = scope.views.get(var)
        if view is None:
            return scope.names.get(var, var)
        if view.made is None:
            view.made = self.value(view, var)
        return view.made

    def value(self, view: _Picked | _Merged, var: Any) -> Any:
        op = self.op
        if isinstance(view, _Merged):
            return self.emit(op, lambda x: lax.reshape(x, var.aval.shape), view.source)
        if view.written is not None and not (view.composed and view.even):
            return view.written()
        if view.written is not None:
            return self.emit(op, lambda x: _rearranged(x, {d: cut.table for d, cut in view.cuts.items()}), view.source)
        return self.emit(op, lambda x: lax.slice(x, (0,) * x.ndim, view.shape), view.source)

    # -- views

    def parts(self, value: Value | None, d: int) -> int:
        """Over how many devices a dim of a value is split."""
        return 1 if value is None else self.split_of(value, d)

    def picked(self, scope: _Scope, var: Any) -> _Picked:
        """A variable as a view: of itself, if of nothing else."""
        view = scope.views.get(var)
        return view if isinstance(view, _Picked) else _Picked(self.read(scope, var), {})

    def pick(
        self, scope: _Scope, op: Op, k: int, var: Any, value: Value | None, tables: dict[int, np.ndarray],
        written: Callable[[], Any], elsewhere: Callable[[Any, set[int]], Any] | None = None, composed: bool = False,
    ) -> bool:  # fmt: skip
        """Result k of an op is a view of an operand, by tables for split dims; ``elsewhere`` does the same to some other dims."""
        view = self.picked(scope, var)
        wanted = {d: t for d, t in tables.items() if d in view.cuts or self.parts(value, d) > 1}
        if not wanted or (len(wanted) < len(tables) and elsewhere is None):
            return False
        source, cuts = view.source, dict(view.cuts)
        if len(wanted) < len(tables):
            assert elsewhere is not None
            rest = tables.keys() - wanted.keys()
            source = self.emit(op, lambda x: elsewhere(x, rest), source)
        for d, table in wanted.items():
            if d in cuts:
                old = np.append(cuts[d].table, [ANY, ZERO])  # -1 and -2 are ZERO and ANY
                cuts[d] = _Cut(old[table], cuts[d].parts)
                composed = True
            else:
                cuts[d] = _Cut(table, self.parts(value, d))
        if not all(len(c.table) for c in cuts.values()):
            return False
        scope.views[op.eqn.outvars[k]] = _Picked(source, cuts, written, composed or bool(view.cuts))
        return True

    def once(self, scope: _Scope, op: Op) -> Callable[[int], Callable[[], Any]]:
        """For result k of an op, what makes it as it was written; all results at once."""
        made: list[Any] = []

        def of(k: int) -> Callable[[], Any]:
            def write() -> Any:
                if not made:
                    made.extend(self.as_written(scope, op))
                    self.mine[id(self.eqns[-1])] = False
                return made[k]

            return write

        return of

    def slice(self, scope: _Scope, op: Op) -> bool:
        (var,), p = op.eqn.invars, op.eqn.params
        if isinstance(var, Literal):
            return False
        starts, ends, strides = p["start_indices"], p["limit_indices"], p["strides"] or (1,) * len(var.aval.shape)
        every = list(zip(starts, ends, strides, strict=True))
        tables = {
            d: np.arange(*cut) for d, (cut, n) in enumerate(zip(every, var.aval.shape, strict=True)) if cut != (0, n, 1)
        }

        def elsewhere(x: Any, dims: set[int]) -> Any:
            cuts = [every[d] if d in dims else (0, n, 1) for d, n in enumerate(x.shape)]
            return lax.slice(x, *zip(*cuts, strict=True))

        return self.pick(scope, op, 0, var, op.ins[0], tables, self.once(scope, op)(0), elsewhere)

    def split(self, scope: _Scope, op: Op) -> bool:
        (var,), p = op.eqn.invars, op.eqn.params
        if len(op.outs) == 1 and not isinstance(var, Literal):
            self.stands_for(scope, op.eqn.outvars[0], scope, var)
            return True
        d, written = p["axis"], self.once(scope, op)
        ends = np.cumsum(p["sizes"])
        if isinstance(var, Literal):
            return False
        for k, (n, end) in enumerate(zip(p["sizes"], ends, strict=True)):
            if not self.pick(scope, op, k, var, op.ins[0], {d: np.arange(end - n, end)}, written(k)):
                return False
        return True

    def rev(self, scope: _Scope, op: Op) -> bool:
        (var,), dims = op.eqn.invars, op.eqn.params["dimensions"]
        if isinstance(var, Literal):
            return False
        tables = {d: np.arange(var.aval.shape[d])[::-1] for d in dims}
        return self.pick(scope, op, 0, var, op.ins[0], tables, self.once(scope, op)(0))

    def pad(self, scope: _Scope, op: Op) -> bool:
        var, fill = op.eqn.invars
        if isinstance(var, Literal) or not isinstance(fill, Literal) or np.any(literal_array(fill)):
            return False
        tables = {}
        for d, (low, high, inner) in enumerate(op.eqn.params["padding_config"]):
            if (low, high, inner) != (0, 0, 0):
                n = var.aval.shape[d]
                table = np.full(n + max(n - 1, 0) * inner, ZERO)
                table[:: inner + 1] = np.arange(n)
                table = np.concatenate([np.full(max(low, 0), ZERO), table, np.full(max(high, 0), ZERO)])
                tables[d] = table[max(-low, 0) : len(table) - max(-high, 0)]
        return self.pick(scope, op, 0, var, op.ins[0], tables, self.once(scope, op)(0))

    def concatenate(self, scope: _Scope, op: Op) -> bool:
        """Pieces of one array, and zeros, are a view of that array."""
        d = op.eqn.params["dimension"]
        views: list[_Picked | int] = []
        for var, value in zip(op.eqn.invars, op.ins, strict=True):
            if self.is_zero(var, value):
                views.append(var.aval.shape[d])
            else:
                view = self.picked(scope, var)
                if d not in view.cuts and self.parts(value, d) > 1:
                    cut = _Cut(np.arange(var.aval.shape[d]), self.parts(value, d))
                    view = _Picked(view.source, {**view.cuts, d: cut})
                views.append(view)
        found = [v for v in views if isinstance(v, _Picked)]
        if len(found) == len(views) and any(v.source is not found[0].source for v in found):
            return self.selected(scope, op, d, found)
        if not found or any(d not in v.cuts or v.source is not found[0].source for v in found):
            return False
        others = [{k: c.table.tolist() for k, c in v.cuts.items() if k != d} for v in found]
        if any(o != others[0] for o in others):
            return False
        table = np.concatenate([v.cuts[d].table if isinstance(v, _Picked) else np.full(v, ZERO) for v in views])
        cuts = {**found[0].cuts, d: _Cut(table, found[0].cuts[d].parts)}
        scope.views[op.eqn.outvars[0]] = _Picked(found[0].source, cuts, self.once(scope, op)(0), True)
        return True

    def selected(self, scope: _Scope, op: Op, d: int, views: Sequence[_Picked]) -> bool:
        """Pieces of several arrays: each is brought to its place in a result of its own, from which elements are selected."""
        parts = max((v.cuts[d].parts for v in views if d in v.cuts), default=1)
        if parts == 1 or len(views) > MOST_SELECTED or any(v.cuts.keys() - {d} for v in views) or _extended(op.eqn):
            return False
        sizes = [v.shape[d] for v in views]
        n = sum(sizes)
        by = _Longer(n, -(-n // parts) * parts, parts)
        pieces, ends = [], np.cumsum(sizes)
        for view, size, end in zip(views, sizes, ends.tolist(), strict=True):
            table = np.full(by.whole, ANY)
            table[end - size : end] = view.cuts[d].table if d in view.cuts else np.arange(size)
            pieces.append(self.emit(op, lambda x, table=table: _rearranged(x, {d: table}), view.source))

        def select(*xs: Any) -> Any:
            out = xs[-1]
            for x, end in reversed(list(zip(xs[:-1], ends.tolist(), strict=False))):
                out = jnp.where(lax.broadcasted_iota(np.int32, x.shape, d) < end, x, out)
            return out

        self.shorter(scope, op.eqn.outvars[0], self.emit(op, select, *pieces), {d: by})
        return True

    @staticmethod
    def is_zero(var: Any, value: Value | None) -> bool:
        if isinstance(var, Literal):
            return not np.any(literal_array(var))
        made = None if value is None else value.op
        if made is None or made.name != "broadcast_in_dim" or made.ins[0] is not None:
            return False
        return not np.any(literal_array(made.eqn.invars[0]))

    def paired(self, scope: _Scope, op: Op) -> bool:
        """Lookups of which each has its own row, ``x[arange(n), i]``: the rows are a batch of lookups, split as they are."""
        lookup, (array, index) = _Lookup.of(op), op.ins[:2]
        if array is None or index is None:
            return False
        columns, pairs = _columns(index), dict(zip(lookup.batching, lookup.paired, strict=True))
        kept = list(range(len(columns)))
        for c, (d, column) in enumerate(zip(lookup.into, columns, strict=False)):
            i = None if column is None or d not in lookup.taken or len(kept) == 1 else self.position(column)
            if i is None or i == len(index.shape) - 1 or i in pairs.values() or index.shape[i] != array.shape[d]:
                continue  # the last dim of the indices is that of their components, which no batch dim may be
            written = None if op.name == "gather" else op.outs[0]
            if max(self.parts(array, d), self.parts(index, i), self.parts(written, d)) > 1:
                kept.remove(c)
                pairs[d] = i
        if len(kept) == len(columns):
            return False
        dims = tuple(sorted(pairs))
        changed = _Lookup(
            tuple(d for d in lookup.taken if d not in pairs),
            tuple(lookup.into[c] for c in kept),
            dims,
            tuple(pairs[d] for d in dims),
        )
        atoms = [self.read(scope, v) for v in op.eqn.invars]
        last = len(index.shape) - 1
        atoms[1] = self.emit(
            op, lambda x: lax.concatenate([lax.slice_in_dim(x, c, c + 1, axis=last) for c in kept], last), atoms[1]
        )
        scope.names[op.eqn.outvars[0]] = self.emit_op(
            op, atoms, dimension_numbers=changed.numbers(op), indices_are_sorted=False
        )
        return True

    def position(self, value: Value) -> int | None:
        """The dim along which indices count 0, 1, 2, …"""
        value = self.outer.get(value, value)
        op = value.op
        if not jnp.issubdtype(value.aval.dtype, jnp.integer) or not value.shape:
            return None
        if op is not None and op.name == "iota":
            i = op.eqn.params["dimension"]
            return i if jnp.iinfo(value.aval.dtype).max >= value.shape[i] else None
        if op is not None and op.name == "select_n" and op.ins[0] is not None and op.ins[1] is not None:
            sign, counted = op.ins[0].op, op.ins[1]  # negative ones count from the end, but there are none
            if sign is not None and sign.name == "lt" and sign.ins == [counted, None]:
                return self.position(counted) if literal_array(sign.eqn.invars[1]) == 0 else None
        if op is not None and op.ins and op.ins[0] is not None:
            if op.name in ("convert_element_type", "name_dims"):
                i = self.position(op.ins[0])
                return None if i is None or jnp.iinfo(value.aval.dtype).max < value.shape[i] else i
            if op.name == "broadcast_in_dim":
                i = self.position(op.ins[0])
                if i is None:
                    return None
                to = op.eqn.params["broadcast_dimensions"][i]
                return to if value.shape[to] == op.ins[0].shape[i] else None
        found = self.constant(value)
        if found is None:
            return None
        counts = (i for i, n in enumerate(value.shape) if n > 1 and np.array_equal(found, np.broadcast_to(
            np.arange(n).reshape([n if d == i else 1 for d in range(len(value.shape))]), value.shape)))  # fmt: skip
        return next(counts, None)

    def lookup(self, scope: _Scope, op: Op) -> bool:
        """A gather or scatter by any indices; views along batch dims and dims that it takes at full size stay views."""
        return self.paired(scope, op) or self.of_longer(scope, op)

    def of_longer(self, scope: _Scope, op: Op) -> bool:
        """A gather or scatter of views that do not divide, made longer along dims of which each entry is independent."""
        views = [None if isinstance(v, Literal) else scope.views.get(v) for v in op.eqn.invars]
        sides: list[dict[int, _Longer]] = [self.longer(v) for v in views]
        if not any(sides):
            return False
        last = len(_shape(op.eqn.invars[1])) - 1
        joined = _joined_dims(op)
        longer: dict[int, _Longer] = {}
        for k, side in enumerate(sides):
            for d, by in side.items():
                j = next((j for j, dims in enumerate(joined) if dims[k] == d), None)
                if j is None or (k == 1 and d == last) or longer.setdefault(j, by).whole != by.whole:
                    return False
        added = [j for j in longer if joined[j][0] is None]  # updates that the program does not have
        if added and op.name not in ("gather", "scatter-add", "scatter-sub"):
            return False
        atoms = []
        for k, var in enumerate(op.eqn.invars):
            mine = {d: longer[j] for j, dims in enumerate(joined) if j in longer and (d := dims[k]) is not None}
            x = self.lengthened(scope, op, var, mine) if mine else self.read(scope, var)
            if k == 2:
                x = self.masked(op, x, {joined[j][2]: longer[j] for j in added}, 0)
            atoms.append(x)
        params: dict[str, Any] = {"indices_are_sorted": False}
        if op.name == "gather":
            sizes = list(op.eqn.params["slice_sizes"])
            for j, by in longer.items():
                d, i, _ = joined[j]
                if d is not None and i is None:
                    sizes[d] = by.whole
            params["slice_sizes"] = tuple(sizes)
        elif added:
            params["unique_indices"] = False
        out = {joined[j][2 if op.name == "gather" else 0]: by for j, by in longer.items()}
        self.shorter(
            scope,
            op.eqn.outvars[0],
            self.emit_op(op, atoms, **params),
            {d: by for d, by in out.items() if d is not None},
        )
        return True

    def gather(self, scope: _Scope, op: Op) -> bool:
        return self.paired(scope, op) or self.by_constants(scope, op) or self.of_longer(scope, op)

    def by_constants(self, scope: _Scope, op: Op) -> bool:
        """A lookup along one dim by constants."""
        var, index = op.eqn.invars[:2]
        p, dn = op.eqn.params, op.eqn.params["dimension_numbers"]
        if isinstance(var, Literal) or len(dn.start_index_map) != 1 or dn.operand_batching_dims:
            return False
        (d,), shape = dn.start_index_map, var.aval.shape
        full = (*shape[:d], 1, *shape[d + 1 :])
        offsets = tuple(k for k in range(len(shape)) if k != d)
        if dn.collapsed_slice_dims != (d,) or tuple(p["slice_sizes"]) != full or dn.offset_dims != offsets:
            return False
        if d not in self.picked(scope, var).cuts and self.parts(op.ins[0], d) == 1:
            return False
        table = self.table(op.ins[1], index, shape[d], p["mode"])
        if table is None:
            return False
        return self.pick(scope, op, 0, var, op.ins[0], {d: table}, self.once(scope, op)(0), composed=True)

    def scatter_add(self, scope: _Scope, op: Op) -> bool:
        return self.paired(scope, op) or self.put_back(scope, op) or self.of_longer(scope, op)

    def put_back(self, scope: _Scope, op: Op) -> bool:
        """The gradient of a lookup by constants that are all different: rows put where they were taken from."""
        operand, index, var = op.eqn.invars
        dn = op.eqn.params["dimension_numbers"]
        if not self.is_zero(operand, op.ins[0]) or isinstance(var, Literal) or dn.operand_batching_dims:
            return False
        if len(dn.scatter_dims_to_operand_dims) != 1 or dn.inserted_window_dims != dn.scatter_dims_to_operand_dims:
            return False
        (d,), shape = dn.inserted_window_dims, operand.aval.shape
        count = len(shape) == len(var.aval.shape) and var.aval.shape[d]
        windows = tuple(k for k in range(len(shape)) if k != d)
        if not count or dn.update_window_dims != windows or var.aval.shape != (*shape[:d], count, *shape[d + 1 :]):
            return False
        parts = self.parts(op.outs[0], d)
        view = self.picked(scope, var)
        if parts == 1 and d not in view.cuts:
            return False
        table = self.table(op.ins[1], index, shape[d], op.eqn.params["mode"])
        if table is None or len(set(table.tolist())) < len(table):
            return False
        back = np.full(shape[d], ZERO)
        back[table] = np.arange(count)
        cuts, written = dict(view.cuts), self.once(scope, op)(0)
        old = cuts[d].table if d in cuts else np.arange(count)
        cuts[d] = _Cut(np.append(old, [ANY, ZERO])[back], max(parts, cuts[d].parts if d in cuts else 1))
        scope.views[op.eqn.outvars[0]] = _Picked(view.source, cuts, written, True)
        return True

    def table(self, value: Value | None, var: Any, size: int, mode: Any) -> np.ndarray | None:
        """The indices of a lookup, where they are constants within the array."""
        found = literal_array(var) if value is None else self.constant(value)
        if found is None or not 0 < found.size <= LARGEST_TABLE or found.ndim != 2:
            return None
        index = found[:, 0].astype(np.int64)
        if mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS):
            index = np.clip(index, 0, size - 1)
        if index.min() < 0 or index.max() >= size or np.bincount(index).max() > MOST_USES:
            return None
        return index

    def constant(self, value: Value) -> np.ndarray | None:
        """A value that is made from constants alone, as integer and boolean ones of lookups are."""
        if value in self.constants:
            found = self.constants[value]
            return found if found is None or isinstance(found, np.ndarray) else np.asarray(found)
        if (outer := self.outer.get(value, value)) is not value:
            return self.constant(outer)
        op, out = value.op, None
        if op is not None and op.name in _INTEGERS and not op.frames and value.aval.size <= LARGEST_TABLE:
            xs = [
                literal_array(var) if v is None else self.constant(v)
                for var, v in zip(op.eqn.invars, op.ins, strict=True)
            ]
            dtype = value.aval.dtype
            known = not any(x is None for x in xs)
            if known and (dtype == np.bool_ or jnp.issubdtype(dtype, np.integer)):
                with jax.ensure_compile_time_eval():
                    out = np.asarray(bind(op.eqn, xs, plain_params(op.eqn.params))[op.outs.index(value)])
        self.constants[value] = out
        return out

    # -- what reads views as they are

    def longer(self, view: Any) -> dict[int, _Longer]:
        """The dims along which a view does not divide, made longer so that they do."""
        if not isinstance(view, _Picked) or (view.written is not None and view.even):
            return {}
        found = {}
        for d, cut in view.cuts.items():
            n = len(cut.table)
            found[d] = _Longer(n, -(-n // cut.parts) * cut.parts, cut.parts)
        return found

    def lengthened(self, scope: _Scope, op: Op, var: Any, longer: dict[int, _Longer]) -> Any:
        """An operand with longer dims; what is added nobody reads."""
        shape = _shape(var)
        if not shape:
            return self.read(scope, var)
        view = _Picked(var, {}) if isinstance(var, Literal) else self.picked(scope, var)
        if not set(view.cuts) <= set(longer):
            view = _Picked(self.read(scope, var), {})
        tables = {}
        for d, by in longer.items():
            if shape[d] == 1 != by.size:
                continue
            table = view.cuts[d].table if d in view.cuts else np.arange(by.size)
            table = np.append(table, np.full(by.whole - by.size, ANY))
            known = table != ANY
            if view.source.aval.shape[d] != by.whole or (table[known] != np.flatnonzero(known)).any():
                tables[d] = table
        return self.emit(op, lambda x: _rearranged(x, tables), view.source) if tables else view.source

    def elementwise(self, scope: _Scope, op: Op) -> bool:
        eqn = op.eqn
        if len(eqn.outvars) != 1 or _extended(eqn):
            return False
        shape = eqn.outvars[0].aval.shape
        views = [scope.views.get(v) for v in eqn.invars if not isinstance(v, Literal) and v.aval.shape == shape]
        merged = next((v for v in views if isinstance(v, _Merged)), None)
        if merged is not None:
            if op.name == "name_dims":  # names of the merged dims
                return False
            atoms = [self.unmerged(scope, op, v, merged.groups) for v in eqn.invars]
            if any(a is None for a in atoms):
                return False
            scope.views[eqn.outvars[0]] = _Merged(self.reshaped(op, atoms, merged.source.aval.shape), merged.groups)
            return True
        if op.name in ("add", "add_any") and self.joined(scope, op):
            return True
        longer: dict[int, _Longer] = {}
        for view in views:
            for d, by in self.longer(view).items():
                if longer.setdefault(d, by).whole != by.whole:
                    return False
        if not longer:
            return False
        atoms = [self.lengthened(scope, op, v, longer) for v in eqn.invars]
        whole = tuple(longer[d].whole if d in longer else n for d, n in enumerate(shape))
        self.shorter(scope, eqn.outvars[0], self.reshaped(op, atoms, whole), longer)
        return True

    def joined(self, scope: _Scope, op: Op) -> bool:
        """The sum of two views of one array of which one is zero wherever the other is not, as gradients of joins are."""
        a, b = (None if isinstance(v, Literal) else scope.views.get(v) for v in op.eqn.invars)
        if not (isinstance(a, _Picked) and isinstance(b, _Picked)) or a.source is not b.source or a.shape != b.shape:
            return False
        differ = [d for d in a.cuts.keys() | b.cuts.keys() if not _same(a.cuts.get(d), b.cuts.get(d))]
        if len(differ) != 1 or any(differ[0] not in view.cuts for view in (a, b)):
            return False
        (d,) = differ
        left, right = a.cuts[d].table, b.cuts[d].table
        if ((left != ZERO) & (right != ZERO)).any():
            return False
        cuts = {**a.cuts, d: _Cut(np.where(left == ZERO, right, left), a.cuts[d].parts)}
        scope.views[op.eqn.outvars[0]] = _Picked(a.source, cuts, self.once(scope, op)(0), True)
        return True

    def reshaped(self, op: Op, atoms: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """An elementwise op on operands of another shape."""
        out = new_var(op.eqn.outvars[0].aval.update(shape=shape))
        self.add(op.eqn.replace(invars=list(atoms), outvars=[out]))
        return out

    def masked(self, op: Op, x: Any, longer: dict[int, _Longer], fill: Any) -> Any:
        """An array with a value in place of what was added along some dims."""

        def fn(x: Any) -> Any:
            for d, by in longer.items():
                if by.size != by.whole:
                    inside = lax.broadcasted_iota(np.int32, x.shape, d) < by.size
                    x = jnp.where(inside, x, jnp.asarray(fill, x.dtype))
            return x

        return self.emit(op, fn, x) if any(by.size != by.whole for by in longer.values()) else x

    def reduce(self, scope: _Scope, op: Op) -> bool:
        (var,), axes = op.eqn.invars, op.eqn.params["axes"]
        view = None if isinstance(var, Literal) else scope.views.get(var)
        out = op.eqn.outvars[0]
        kept = [d for d in range(len(_shape(var))) if d not in axes]
        if isinstance(view, _Merged):
            found = self.emit_op(op, [view.source], axes=tuple(k for a in axes for k in view.dims(a)))
            self.result(scope, out, found, tuple(view.groups[d] for d in kept))
            return True
        longer = self.longer(view)
        if not longer or _extended(op.eqn):
            return False
        x = self.lengthened(scope, op, var, longer)
        x = self.masked(op, x, {d: by for d, by in longer.items() if d in axes}, _IDENTITY[op.name](x.aval.dtype))
        rest = {kept.index(d): by for d, by in longer.items() if d not in axes}
        self.shorter(scope, out, self.emit_op(op, [x]), rest)
        return True

    def shorter(self, scope: _Scope, out: Any, found: Any, longer: dict[int, _Longer]) -> None:
        """What an op on longer operands makes: a view, or the result itself."""
        for by in longer.values():
            note = f"{self.op.source or self.op.name}: {by.size} along a dim that {by.parts} devices split are padded to {by.whole}"
            if by.size != by.whole and note not in self.notes:
                self.notes.append(note)
        if any(by.size != by.whole for by in longer.values()):
            scope.views[out] = _Picked(found, {d: _Cut(np.arange(by.size), by.parts) for d, by in longer.items()})
        else:
            scope.names[out] = found

    def result(self, scope: _Scope, out: Any, found: Any, groups: tuple[tuple[int, ...], ...]) -> None:
        """What an op on an array makes, which the program makes of merged dims."""
        if all(len(g) == 1 for g in groups):
            scope.names[out] = found
        else:
            scope.views[out] = _Merged(found, groups)

    def transpose(self, scope: _Scope, op: Op) -> bool:
        (var,), order = op.eqn.invars, op.eqn.params["permutation"]
        longer = self.longer(None if isinstance(var, Literal) else scope.views.get(var))
        if not longer:
            return False
        found = self.emit_op(op, [self.lengthened(scope, op, var, longer)])
        self.shorter(scope, op.eqn.outvars[0], found, {order.index(d): by for d, by in longer.items()})
        return True

    def broadcast(self, scope: _Scope, op: Op) -> bool:
        var, p = op.eqn.invars[0], op.eqn.params
        longer = self.longer(None if isinstance(var, Literal) else scope.views.get(var))
        dims, shape = p["broadcast_dimensions"], list(p["shape"])
        if not longer or len(op.eqn.invars) > 1 or any(by.size != shape[dims[d]] for d, by in longer.items()):
            return False
        longer_out = {int(dims[d]): by for d, by in longer.items()}
        for d, by in longer_out.items():
            shape[d] = by.whole
        found = self.emit_op(op, [self.lengthened(scope, op, var, longer)], shape=tuple(shape))
        self.shorter(scope, op.eqn.outvars[0], found, longer_out)
        return True

    # -- merged dims

    def reshape(self, scope: _Scope, op: Op) -> bool:
        var, out = op.eqn.invars[0], op.eqn.outvars[0]
        order = op.eqn.params["dimensions"] if op.name == "reshape" else None
        if isinstance(var, Literal) or order is not None or len(op.eqn.invars) > 1:
            return False
        view, shape = scope.views.get(var), out.aval.shape
        if isinstance(view, _Merged):
            source = view.source
            scope.names[out] = (
                source if source.aval.shape == shape else self.emit(op, lambda x: lax.reshape(x, shape), source)
            )
            return True
        if self.longer(view):
            return self.ones(scope, op, var, self.longer(view))
        if view is not None or op.name != "reshape":
            return False
        groups = _groups(var.aval.shape, shape)
        if groups is None or not self.lies_apart(op.ins[0], groups):
            return False
        scope.views[out] = _Merged(self.read(scope, var), groups)
        return True

    def ones(self, scope: _Scope, op: Op, var: Any, longer: dict[int, _Longer]) -> bool:
        """A reshape that only adds or drops dims of size 1."""
        before, after = var.aval.shape, list(op.eqn.outvars[0].aval.shape)
        old, new = ([d for d, n in enumerate(shape) if n != 1] for shape in (before, after))
        if [before[d] for d in old] != [after[d] for d in new] or any(by.size == 1 for by in longer.values()):
            return False
        moved = {new[old.index(d)]: by for d, by in longer.items()}
        for d, by in moved.items():
            after[d] = by.whole
        x = self.lengthened(scope, op, var, longer)
        self.shorter(scope, op.eqn.outvars[0], self.emit(op, lambda x: lax.reshape(x, after), x), moved)
        return True

    def lies_apart(self, value: Value | None, groups: Sequence[Sequence[int]]) -> bool:
        """Whether the devices' shards of merged dims are not blocks of the result."""
        start = 0
        for group in groups:
            parts = [self.parts(value, d) for d in range(start, start + len(group))]
            last = max((k for k, p in enumerate(parts) if p > 1), default=0)
            if any(p != n for p, n in zip(parts[:last], group[:last], strict=True)):
                return True
            start += len(group)
        return False

    def unmerged(self, scope: _Scope, op: Op, var: Any, groups: tuple[tuple[int, ...], ...]) -> Any:
        """An operand with dims as they are before they are merged."""
        view = None if isinstance(var, Literal) else scope.views.get(var)
        if isinstance(view, _Merged) and view.groups == groups:
            return view.source
        shape = _shape(var)
        if not shape:
            return self.read(scope, var)
        if len(shape) != len(groups):
            return None
        sizes = [n for m, group in zip(shape, groups, strict=True) for n in ((1,) * len(group) if m == 1 else group)]
        return self.emit(op, lambda x: lax.reshape(x, sizes), self.read(scope, var))

    def dot_general(self, scope: _Scope, op: Op) -> bool:
        (contract, batch), out = op.eqn.params["dimension_numbers"], op.eqn.outvars[0]
        both = op.eqn.invars
        views = [None if isinstance(v, Literal) else scope.views.get(v) for v in both]
        if any(isinstance(v, _Merged) for v in views):
            return self.dot_of_merged(scope, op)
        sides: list[dict[int, _Longer]] = [self.longer(v) for v in views]
        if not any(sides):
            return False
        for pairs in (contract, batch):
            for i, j in zip(*pairs, strict=True):
                by = sides[0].get(i) or sides[1].get(j)
                if by is not None and sides[0].setdefault(i, by).whole != sides[1].setdefault(j, by).whole:
                    return False
        atoms = []
        for var, longer, summed in zip(both, sides, contract, strict=True):
            x = self.lengthened(scope, op, var, longer)
            atoms.append(self.masked(op, x, {d: by for d, by in longer.items() if d in summed}, 0))
        free = [
            [d for d in range(len(v.aval.shape)) if d not in c and d not in b]
            for v, c, b in zip(both, contract, batch, strict=True)
        ]
        order = [(0, d) for d in batch[0]] + [(0, d) for d in free[0]] + [(1, d) for d in free[1]]
        found = self.emit_op(op, atoms)
        self.shorter(scope, out, found, {k: sides[s][d] for k, (s, d) in enumerate(order) if d in sides[s]})
        return True

    def dot_of_merged(self, scope: _Scope, op: Op) -> bool:
        both, (contract, batch) = op.eqn.invars, op.eqn.params["dimension_numbers"]
        groups: list[list[tuple[int, ...]]] = []
        for var in both:
            view = None if isinstance(var, Literal) else scope.views.get(var)
            groups.append(list(view.groups) if isinstance(view, _Merged) else [(n,) for n in _shape(var)])
        for pairs in (contract, batch):
            for i, j in zip(*pairs, strict=True):
                a, b = groups[0][i], groups[1][j]
                if a != b and min(len(a), len(b)) > 1:
                    return False
                groups[0][i] = groups[1][j] = max(a, b, key=len)
        atoms = [self.unmerged(scope, op, v, tuple(g)) for v, g in zip(both, groups, strict=True)]
        if any(a is None for a in atoms):
            return False

        def dims(side: int, some: Sequence[int]) -> tuple[int, ...]:
            view = _Merged(None, tuple(groups[side]))
            return tuple(k for d in some for k in view.dims(d))

        numbers = tuple(tuple(dims(s, pairs[s]) for s in (0, 1)) for pairs in (contract, batch))
        found = self.emit_op(op, atoms, dimension_numbers=numbers)
        free = [[g for d, g in enumerate(groups[s]) if d not in contract[s] and d not in batch[s]] for s in (0, 1)]
        kept = (*(groups[0][d] for d in batch[0]), *free[0], *free[1])
        self.result(scope, op.eqn.outvars[0], found, kept)
        return True


_WRITE: dict[str, Callable[[_Writer, _Scope, Op], bool]] = {
    "slice": _Writer.slice, "split": _Writer.split, "rev": _Writer.rev, "pad": _Writer.pad,
    "concatenate": _Writer.concatenate, **dict.fromkeys(_LOOKUPS, _Writer.lookup), "gather": _Writer.gather,
    "scatter-add": _Writer.scatter_add,
    "transpose": _Writer.transpose, "broadcast_in_dim": _Writer.broadcast, "reshape": _Writer.reshape,
    "squeeze": _Writer.reshape, "name_dims": _Writer.elementwise, "dot_general": _Writer.dot_general,
    **dict.fromkeys(_IDENTITY, _Writer.reduce),
}  # fmt: skip
"""By primitive: (writer, scope, op) → whether its results are views, or were made of views."""


def _joined_dims(op: Op) -> list[tuple[int | None, int | None, int]]:
    """The dims of a gather or scatter along which it does the same for every entry: batches, and dims taken at full size.

    Returns:
      (dim of the array, dim of the indices, dim of a gather's result or of a scatter's updates) of each; None: it has none.
    """
    lookup, dn = _Lookup.of(op), op.eqn.params["dimension_numbers"]
    array, index = (v.aval.shape for v in op.eqn.invars[:2])
    if op.name == "gather":
        windows, small = dn.offset_dims, op.eqn.outvars[0].aval.shape
    else:
        windows, small = dn.update_window_dims, op.eqn.invars[2].aval.shape
    outer = [d for d in range(len(small)) if d not in windows]
    paired = dict(zip(lookup.paired, lookup.batching, strict=True))
    found: list[tuple[int | None, int | None, int]] = [
        (paired.get(i), i, d) for i, d in zip(range(len(index)), outer, strict=False)
    ]
    kept = [d for d in range(len(array)) if d not in lookup.taken and d not in lookup.batching]
    found += [(d, None, w) for d, w in zip(kept, sorted(windows), strict=True) if array[d] == small[w]]
    return found


def _columns(index: Value) -> Sequence[Value | None]:
    """The components of index vectors."""
    op, last = index.op, len(index.shape) - 1
    if (
        op is not None
        and op.name == "concatenate"
        and op.eqn.params["dimension"] == last
        and len(op.ins) == index.shape[last]
    ):
        return op.ins
    return [None] * index.shape[last]


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _same(a: _Cut | None, b: _Cut | None) -> bool:
    return a is not None and b is not None and np.array_equal(a.table, b.table)


def _extended(eqn: Any) -> bool:
    return any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in (*eqn.invars, *eqn.outvars))


def _rearranged(x: Any, tables: dict[int, np.ndarray]) -> Any:
    for d, table in tables.items():
        x = rearrange(x, d, table)
    return x


def _groups(shape: Sequence[int], merged: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """For every dim of a shape, the sizes of the dims that it is merged from; None where it is not merged from whole dims."""
    rest, groups = list(shape), []
    for n in merged:
        group: list[int] = []
        while math.prod(group) < n and rest:
            group.append(rest.pop(0))
        if math.prod(group) != n or (not group and n != 1):
            return None
        groups.append(tuple(group))
    if any(n != 1 for n in rest) or not groups or 0 in shape:
        return None
    groups[-1] = (*groups[-1], *rest)
    return tuple(groups) if any(sum(n > 1 for n in g) > 1 for g in groups) else None


def _live(eqns: Sequence[Any], mine: dict[int, bool], outvars: Sequence[Any]) -> list[Any]:
    """The equations without those of mine that nothing reads."""
    read = {v for v in outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if id(eqn) in mine and not eqn.effects and not any(v in read for v in eqn.outvars):
            continue
        kept.append(eqn)
        read.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]

"""Rewrites jaxprs equation by equation: which atom or view represents each variable, and which equations make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from ...compat.jax import Atom, bind, body_consts, body_operands, on_host, replace_body
from ...compat.loop_operands import loop_parts
from ...rules.constant_index_gather import rearrange
from ...rules.exchange_along_dim import ANY
from ...rules.one_owner import is_positive_zero
from ...rules.shape import reshape_order
from ..ir import Frame, Op, Program, Value
from ..jaxprs import equations_of, live, variables
from ..scalars import constant_of
from .constant_integers import Constants
from .views import CollapsedView, DimIndices, IndexedView, PaddedDim, Scope, View, padded_dims

ShardCounts = Callable[[Value, int], int]
"""(value, dim) → the number of shards that the dim is split into."""


class JaxprRewriter:
    """Rewrites the jaxprs of one program.

    Attributes:
      program: the program.
      shards: the number of shards of every dim of the program's values.
      notes: takes one sentence for every op whose operands are padded.
      rewrites: by primitive, the functions to try in order; each returns whether it has defined the op's results.
      readers: such functions to try for any op.
      constants: evaluates indices that depend on constants alone.
      eqns: the equations of the jaxpr that is being written.
      removable: by id, the equations that are dropped if no equation reads their results: True for one that the rewrite has made,
        False for a copy of an equation of the program.
      copies: op → the results of the copy of its equation (:meth:`Site.copied`).
      op: the op that is being rewritten. New equations have its source line.
    """

    def __init__(
        self,
        program: Program,
        shards: ShardCounts,
        notes: list[str],
        rewrites: Mapping[str, Sequence[Rewrite]],
        readers: Sequence[Rewrite],
    ):
        """A rewriter without equations; the arguments are attributes of the class."""
        self.program, self.shards, self.notes = program, shards, notes
        self.rewrites, self.readers = rewrites, readers
        self.constants = Constants()
        self.eqns: list[JaxprEqn] = []
        self.removable: dict[int, bool] = {}
        self.copies: dict[Op, list[Var]] = {}
        self.op: Any = None

    def jaxpr(self, frame: Frame) -> Any:
        """The rewritten jaxpr of a frame; None if no op of it has been rewritten."""
        outer = self.eqns, self.removable
        self.eqns, self.removable = [], {}
        scope: Scope = {}
        self.append_ops(frame, scope)
        outvars = [self.read(scope, v) for v in frame.jaxpr.outvars]
        eqns, removable = self.eqns, self.removable
        self.eqns, self.removable = outer
        needed, _ = live(eqns, outvars, keep=lambda eqn: bool(eqn.effects) or id(eqn) not in removable)
        return frame.jaxpr.replace(eqns=needed, outvars=outvars) if any(removable.get(id(e)) for e in needed) else None

    def append_ops(self, frame: Frame, scope: Scope, consts: Sequence[Any] = ()) -> None:
        """Append the rewritten equations of a frame to ``eqns``; ``consts`` are the constants of its jaxpr, if known."""
        for var, const in zip(frame.jaxpr.constvars, consts, strict=False):
            self.constants.known[frame.env[var]] = const
        for op in frame.ops:
            self.op = op
            if op.frames:
                self.control_flow(scope, op)
            elif not any(
                rewrite(Site(self, scope, op)) for rewrite in (*self.rewrites.get(op.name, ()), *self.readers)
            ):
                scope.update(zip(op.eqn.outvars, self.copy_eqn(scope, op.eqn), strict=True))

    def control_flow(self, scope: Scope, op: Op) -> None:
        """Append an op with rewritten bodies; inline a call that reads views, or has slices in its body.

        A call with a custom derivative is not inlined if JAX would differentiate its body instead, nor ``jax.checkpoint`` if JAX
        would not recompute it. A recomputation stays a call if it has no views as operands.
        """
        eqn = op.eqn
        if op.primitive.family == "call" or (op.primitive.call and self.program.is_derived_as_traced):
            (frame,), invars = op.frames, body_operands(eqn, eqn.invars)
            if any(isinstance(scope.get(v), View) for v in variables(invars)) or (
                not op.recomputes and any(o.name in self.rewrites for o in frame.walk())
            ):
                self.inline(scope, op, invars)
                return
        if op.primitive.family in ("scan", "cond"):
            only_read = op.ins[1:] if op.primitive.family == "cond" else loop_parts(eqn).split(op.ins)[0]
            for frame in op.frames:
                pairs = zip(frame.ins(), only_read, strict=False)
                self.constants.outer.update((inner, outer) for inner, outer in pairs if outer is not None)
        bodies = [self.jaxpr(frame) for frame in op.frames]
        self.op = op
        if any(b is not None for b in bodies):
            eqn = replace_body(eqn, [f.jaxpr if b is None else b for f, b in zip(op.frames, bodies, strict=True)])
        scope.update(zip(eqn.outvars, self.copy_eqn(scope, eqn), strict=True))
        if eqn is not op.eqn:
            self.removable[id(self.eqns[-1])] = True

    def inline(self, scope: Scope, op: Op, invars: Sequence[Any]) -> None:
        """Append the rewritten equations of a call's body in place of the call."""
        (frame,), (consts,) = op.frames, body_consts(op.eqn)
        inner: Scope = {v: Literal(const, v.aval) for v, const in zip(frame.jaxpr.constvars, consts, strict=True)}
        for var, operand in zip(frame.jaxpr.invars, invars, strict=True):
            inner[var] = own = representation(scope, operand)
            if op.recomputes and isinstance(own, View):  # behind a barrier, as ControlFlow.call has it
                inner[var] = replace(own, source=self.emit(lax.optimization_barrier, own.source), atom=None)
            elif op.recomputes:
                inner[var] = self.emit(lax.optimization_barrier, own)
        self.append_ops(frame, inner, consts)
        for var, result in zip(op.eqn.outvars, frame.jaxpr.outvars, strict=True):
            scope[var] = representation(inner, result)

    # -- equations

    def copy_eqn(self, scope: Scope, eqn: JaxprEqn) -> list[Var]:
        """Append an equation of the program on the values of its operands, and return its results."""
        invars = [self.read(scope, v) for v in eqn.invars]
        outvars = [Var(v.aval) for v in eqn.outvars]
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return outvars

    def emit_all(self, fn: Callable[..., Any], *atoms: Any) -> list[Any]:
        """Append the equations of ``fn(*atoms)``, with the source line of ``op``, and return the atoms of its results."""
        made, outs = equations_of(fn, atoms, self.op.eqn.source_info)
        self.eqns += made
        self.removable.update((id(eqn), True) for eqn in made)
        return outs

    def emit(self, fn: Callable[..., Any], *atoms: Any) -> Any:
        """Append the equations of ``fn(*atoms)``, and return the atom of its one result."""
        return self.emit_all(fn, *atoms)[0]

    def read(self, scope: Scope, atom: Any) -> Any:
        """The value of an atom of the program, as an atom of the rewritten jaxpr; a view is computed the first time."""
        view = representation(scope, atom)
        if not isinstance(view, View):
            return view
        if view.atom is None:
            view.atom = self.compute(view, atom.aval.shape)
        return view.atom

    def compute(self, view: View, shape: tuple[int, ...]) -> Any:
        """Append the equations that compute a view of this shape, and return its atom."""
        if isinstance(view, CollapsedView):
            return self.emit(lambda x: lax.reshape(x, shape), view.source)
        if view.made_by is None:
            return self.emit(lambda x: lax.slice(x, (0,) * x.ndim, shape), view.source)
        if not (view.composed and view.divides):
            site, k = view.made_by
            return site.copied(k)
        tables = {d: dim.table for d, dim in view.indices.items()}
        return self.emit(lambda x: rearranged(x, tables), view.source)


@dataclass(frozen=True, slots=True)
class Site:
    """One op that is being rewritten, made by :class:`JaxprRewriter`. Operands and results are given by their
    positions.

    Attributes:
      rewriter, scope: of the jaxpr that the op is in.
      op: the op.
    """

    rewriter: JaxprRewriter
    scope: Scope
    op: Op

    @property
    def params(self) -> dict[str, Any]:
        return self.op.eqn.params

    def shape(self, k: int) -> tuple[int, ...]:
        """The shape of operand k in the program."""
        return self.op.eqn.invars[k].aval.shape

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the first result in the program."""
        return self.op.eqn.outvars[0].aval.shape

    def is_zero(self, k: int) -> bool:
        """Whether all elements of operand k are a constant zero; not for a negative zero."""
        constant = constant_of(self.rewriter.program, self.op, k)
        return constant is not None and is_positive_zero(constant)

    def has_extended_dtype(self) -> bool:
        """Whether an operand or result is an array of random keys, or of another extended dtype."""
        return any(
            jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
            for v in (*self.op.eqn.invars, *self.op.eqn.outvars)
        )

    @property
    def transposes(self) -> bool:
        """Whether the op is a reshape that transposes its operand first."""
        return self.op.primitive.regroups and list(reshape_order(self.op.eqn)) != list(range(len(self.shape(0))))

    def shards(self, value: Value | None, d: int) -> int:
        """The number of shards of a dim of a value of the program; 1 for a literal."""
        return 1 if value is None else self.rewriter.shards(value, d)

    # -- operands

    def view(self, k: int) -> View | None:
        """The view that represents operand k, if one does."""
        view = representation(self.scope, self.op.eqn.invars[k])
        return view if isinstance(view, View) else None

    def indexed(self, k: int) -> IndexedView:
        """Operand k as an indexed view: of itself, with all its elements, if it is no such view."""
        view = self.view(k)
        return view if isinstance(view, IndexedView) else IndexedView(self.read(k), {})

    def padded_dims(self, k: int) -> dict[int, PaddedDim]:
        """The dims of operand k that have to be padded before the op can read it in shards."""
        return padded_dims(self.view(k))

    def read(self, k: int) -> Any:
        """The atom of operand k."""
        return self.rewriter.read(self.scope, self.op.eqn.invars[k])

    def read_padded(self, k: int, dims: Mapping[int, PaddedDim]) -> Any:
        """The atom of operand k, padded along some dims with any values."""
        view = self.indexed(k)
        if not set(view.indices) <= set(dims):
            view = IndexedView(self.read(k), {})
        tables = {}
        for d, dim in dims.items():
            table = view.indices[d].table if d in view.indices else np.arange(dim.size)
            table = np.append(table, np.full(dim.padded_size - dim.size, ANY))
            used = table != ANY
            if view.source.aval.shape[d] != dim.padded_size or (table[used] != np.flatnonzero(used)).any():
                tables[d] = table
        return self.emit(lambda x: rearranged(x, tables), view.source) if tables else view.source

    # -- equations and results

    def emit(self, fn: Callable[..., Any], *atoms: Any) -> Any:
        """Append the equations of ``fn(*atoms)``, and return the atom of its one result."""
        return self.rewriter.emit(fn, *atoms)

    def emit_op(self, atoms: Sequence[Any], **changed: Any) -> Any:
        """Append the op on other operands, with some parameters changed, and return the atom of its one result."""
        return self.emit(lambda *xs: bind(self.op.eqn, xs, {**self.params, **changed})[0], *atoms)

    def emit_masked(self, atom: Atom, dims: Mapping[int, PaddedDim], fill: Any) -> Any:
        """Append equations that overwrite the padding of some dims with ``fill``, and return the atom of their result."""

        def masked(x: Any) -> Any:
            x = jax.device_put(x, jax.memory.Space.Device) if on_host(atom) else x  # masks are in device memory
            for d, dim in dims.items():
                if dim.is_padded:
                    x = jnp.where(lax.broadcasted_iota(np.int32, x.shape, d) < dim.size, x, jnp.asarray(fill, x.dtype))
            return jax.device_put(x, jax.memory.Space.Host) if on_host(atom) else x

        return self.emit(masked, atom) if any(dim.is_padded for dim in dims.values()) else atom

    def define(self, k: int, by: Any) -> bool:
        """Represent result k by a view or an atom. Returns True."""
        self.scope[self.op.eqn.outvars[k]] = by
        return True

    def define_padded(self, k: int, atom: Atom, dims: Mapping[int, PaddedDim]) -> bool:
        """Represent result k by an array that is padded along some dims. Returns True."""
        op, notes = self.op, self.rewriter.notes
        padded = [dim for dim in dims.values() if dim.is_padded]
        for dim in padded:
            sizes = f"size {dim.size} is padded to {dim.padded_size}"
            note = f"{op.source or op.name}: a dim of {sizes}, to be split over {dim.shards} devices"
            if note not in notes:
                notes.append(note)
        if not padded:
            return self.define(k, atom)
        indices = {d: DimIndices(np.arange(dim.size), dim.shards) for d, dim in dims.items()}
        return self.define(k, IndexedView(atom, indices))

    def copied(self, k: int) -> Var:
        """The atom of result k in a copy of the op's equation, which is appended at the first call."""
        rewriter = self.rewriter
        if self.op not in rewriter.copies:
            rewriter.copies[self.op] = rewriter.copy_eqn(self.scope, self.op.eqn)
            rewriter.removable[id(rewriter.eqns[-1])] = False
        return rewriter.copies[self.op][k]


Rewrite = Callable[[Site], bool]
"""Represents the results of an op by views or atoms, and returns True; or returns False, so that the next rewrite is tried."""


def representation(scope: Scope, atom: Atom) -> Any:
    """The view or atom of the rewritten jaxpr that represents an atom of the program."""
    return atom if isinstance(atom, Literal) else scope.get(atom, atom)


def rearranged(x: Any, tables: Mapping[int, np.ndarray]) -> Any:
    """An array with the elements of a table along each of some dims (:func:`~rules.constant_index_gather.rearrange`)."""
    for d, table in tables.items():
        x = rearrange(x, d, table)
    return x

"""Rewrites a program so that slices, concatenations and reshapes of split dims stay split.

``x[1:] - x[:-1]`` has 15 of 16 rows, which four devices cannot share evenly; ``jnp.roll`` concatenates two such slices; if the
minor dim of ``x`` is split, a shard of it is not a block of ``jnp.ravel(x)``. Planned op by op, these values would be all-gathered.
The rewritten program represents them by arrays that do divide, as long as the ops that read them can be applied to these arrays:

- An *indexed view* is a table of elements of the array along some dims. The tables of slices of concatenations of slices compose to
  one table, by which the primitive ``rearrange`` exchanges elements (:mod:`rules.constant_index_gather`). Elementwise ops, matmuls
  and reductions of 15 rows are computed on 16 (a *padded dim*); the last row is masked where it would change the result.
- A *collapsed view* is a reshape of the array that only merges dims. Contractions are applied before it.

A lookup of one element per row, ``x[jnp.arange(n), i]``, becomes a batched lookup. Any other op reads the value of a view, which a
copy of the program's own equation computes. :data:`REWRITES` and :data:`READERS` list the rewrites. Each names a program that sends
more bytes without it, and ``tests/program/test_rewrites_fire.py`` plans these programs without it: add a rewrite with its program.

.. code-block:: text

    rewriter                    walks a jaxpr; the interface of the rewrites
    views                       the representations: indexed, collapsed, padded
    slices, collapsed, lookups  the rewrites that make views, by family of ops
    pad_operands                ops on views whose dims do not divide
    constant_integers           evaluates indices and masks that depend on constants alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr

from ...rules.index import LOOKUPS
from ..infer import infer_like
from ..ir import Program, Value
from . import collapsed, lookups, slices
from . import pad_operands as padded
from .rewriter import JaxprRewriter, Rewrite, ShardCounts

MAX_CACHED = 16
"""Rewritten programs that are cached per program."""

REWRITES: Mapping[str, tuple[Rewrite, ...]] = {
    **dict.fromkeys(LOOKUPS, (lookups.own_rows,)),
    "gather": (lookups.own_rows, lookups.constant_gather),
    "scatter-add": (lookups.own_rows, lookups.constant_scatter_add),
    **dict.fromkeys(("reshape", "squeeze"), (collapsed.reshape,)),
    "slice": (slices.slice_,),
    "split": (slices.split,),
    "rev": (slices.rev,),
    "pad": (slices.pad,),
    "concatenate": (slices.concatenate,),
}
"""By primitive, the rewrites to try in order that may represent its results by views."""

READERS: tuple[Rewrite, ...] = (collapsed.dot_general, padded.by_factors)
"""The rewrites to try for any op, of which an operand may be a view. Other ops are copied, on the values of their operands."""


def rewrite_indivisible_slices(program: Program, shards: ShardCounts, notes: list[str]) -> Program | None:
    """The program with views of split arrays; None if it has none. Results are cached by the shard counts that they depend on.

    Args:
      program: as traced.
      shards: (value, dim) → the number of shards that the dim is split into.
      notes: takes one sentence for every op whose operands are padded.
    """
    cache = program.cached(_cache)
    result = next((r for r in cache if all(shards(v, d) == n for (v, d), n in r.shards.items())), None)
    if result is None:
        result = _rewrite(program, shards)
    else:
        cache.remove(result)
    cache.append(result)
    del cache[:-MAX_CACHED]
    notes += result.notes
    return result.program


@dataclass(frozen=True, eq=False, slots=True)
class _Rewritten:
    """A rewritten program (None: the program has no views), the shard counts that it depends on, and its notes."""

    program: Program | None
    shards: dict[tuple[Value, int], int]
    notes: list[str]


def _cache(program: Program) -> list[_Rewritten]:
    """The list of a program's rewrites, the one used last at the end; at first it has the one for unsplit dims: without views."""
    return [_rewrite(program, lambda value, dim: 1)]


def _rewrite(program: Program, shards: ShardCounts) -> _Rewritten:
    """Rewrite a program, and record which shard counts were read."""
    counts: dict[tuple[Value, int], int] = {}
    notes: list[str] = []

    def recorded(value: Value, dim: int) -> int:
        return counts.setdefault((value, dim), shards(value, dim))

    rewriter = JaxprRewriter(program, recorded, notes, REWRITES, READERS)
    consts = zip(program.root.jaxpr.constvars, program.closed.consts, strict=True)
    rewriter.constants.known.update((program.root.env[v], c) for v, c in consts)
    jaxpr = rewriter.jaxpr(program.root)
    if jaxpr is None:
        return _Rewritten(None, counts, notes)
    rewritten = infer_like(program, ClosedJaxpr(jaxpr, program.closed.consts))
    rewritten.original = program
    return _Rewritten(rewritten, counts, notes)

"""The effect of collectives on a relation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ....compat.jax import aval_of
from ..laws import axes_text
from ..non_block_shards import gather_fragments, in_mesh_order, permute_fragments
from ..relation import Context, Fragments, Rel, out_dtype, out_shape, require
from .reduce import reduced_along
from .table import lemma


def axes_of(eqn: JaxprEqn, ctx: Context) -> tuple[str, ...]:
    """The mesh axes of a collective with more than one device."""
    names: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    require(eqn.params.get("axis_index_groups") is None, "groups of devices along an axis")
    names = names if isinstance(names, tuple) else (names,)
    require(all(a in ctx.sizes for a in names), "a collective over an axis that is not of the mesh")
    return tuple(a for a in names if ctx.sizes[a] > 1)


@lemma("psum", "psum_invariant", "pmax", "pmin")
def all_reduce(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The sum of a partial sum, the maximum of a partial maximum; of a value that n devices have alike, n times the value, or the
    value itself. Over positions, which ``vmap`` makes of a named axis, it is a reduction along dims."""
    if all(isinstance(a, int) for a in eqn.params["axes"]):
        along = "reduce_" + eqn.primitive.name[1:4]
        avals = [aval_of(v) for v in eqn.outvars]
        return [reduced_along(ctx, x, eqn.params["axes"], along, a) for x, a in zip(rels, avals, strict=True)]
    axes, kind = axes_of(eqn, ctx), {"pmax": "max", "pmin": "min"}.get(eqn.primitive.name, "sum")
    return [reduced(ctx, x, frozenset(axes), kind) for x in rels]


def reduced(ctx: Context, x: Rel, axes: frozenset[str], kind: str) -> Rel:
    """The reduction over all axes; a multiple of a partial value is only one of a sum."""
    image = ("one" if kind == "sum" else kind) + "*"
    if ctx.images.get(x.term.number) == x.kind == image and x.partial <= axes:
        x = replace(x, kind=kind)
    fits = x.kind == kind or not (x.partial if kind == "sum" else x.partial & axes)
    require(fits, f"a {kind} of a partial {x.kind}", refused=True)
    differs = axes & (x.sharded | x.term.axes)
    require(not differs, f"a {kind} over {axes_text(differs)}, along which its operand differs")
    left, times = x.partial - axes, ctx.size(axes - x.partial) if kind == "sum" else 1
    return replace(x, term=ctx.terms.scale(x.term, Fraction(times)), partial=left, kind=x.kind if left else "sum")


@lemma("all_gather", "all_gather_invariant", "all_gather_reduced")
def all_gather(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The blocks of all devices along axes, one after the other: the dim is no longer sharded over them."""
    (x,), axes, d = rels, axes_of(eqn, ctx), int(eqn.params["all_gather_dimension"])
    if eqn.params["tiled"]:
        return [gathered(ctx, x, axes, d, out_shape(eqn))]
    sharded = [k for k, s in enumerate(x.spec) if s == axes]
    require(len(sharded) == 1, "an all-gather into a new dim of a value without one dim that is sharded over its axes")
    require(not x.term.axes & set(axes), "an all-gather of values that depend on the device")
    full, (k,), rank = gathered(ctx, x, axes, sharded[0], x.shape), sharded, len(x.shape)
    parts = (*x.term.shape[:k], ctx.size(axes), x.shape[k], *x.term.shape[k + 1 :])
    order = [n for n in range(rank + 1) if n != k]
    term = ctx.terms.transpose(ctx.terms.reshape(x.term, parts), [*order[:d], k, *order[d:]])
    return [x.of(term, out_shape(eqn), [*full.spec[:d], (), *full.spec[d:]])]


def gathered(ctx: Context, x: Rel, axes: tuple[str, ...], d: int, shape: tuple[int, ...]) -> Rel:
    require(not x.partial & set(axes), "an all-gather of a partial value", refused=True)
    if x.term.axes & set(axes):
        x = ctx.expanded(x, [d])
        require(not x.spec[d] and not set(axes) & x.sharded, "an all-gather of a block that depends on the device")
        sizes = (*x.term.shape[:d], shape[d], *x.term.shape[d + 1 :])
        return replace(x, term=ctx.terms.make("devices", (axes, d), (x.term,), sizes, x.term.dtype), shape=shape)
    if x.term.shape[d] == 1:
        require(not set(axes) & x.sharded, "an all-gather along a dim of a constant, of blocks")
        return replace(x, shape=shape)
    have = x.spec[d]
    others = {a for k, s in enumerate(x.spec) if k != d for a in s} & set(axes)
    require(
        not others,
        f"an all-gather over {axes_text(others)}, over which another dim is sharded",
        refused=not x.fragmented,
    )
    if isinstance(have, Fragments):
        return gather_fragments(ctx, x, axes, d)
    fits = have[len(have) - len(axes) :] == axes
    require(fits, f"an all-gather over {axes} of dim {d}, which is sharded over {have}", refused=True)
    spec = tuple(s[: len(s) - len(axes)] if k == d else s for k, s in enumerate(x.spec))
    return replace(x, spec=spec, shape=shape)


@lemma("reduce_scatter", "psum_scatter")
def reduce_scatter(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The sum of a partial value, of which each device has its block."""
    (x,), axes, d = rels, axes_of(eqn, ctx), int(eqn.params["scatter_dimension"])
    require(bool(eqn.params["tiled"]), "a reduce-scatter that drops its dim")
    return [blocks(reduced(ctx, x, frozenset(axes), "sum"), axes, d, out_shape(eqn))]


def blocks(x: Rel, axes: tuple[str, ...], d: int, shape: tuple[int, ...]) -> Rel:
    """Each device keeps its block of a dim."""
    require(not isinstance(x.spec[d], Fragments), "blocks of fragments")
    differs = set(axes) & x.varying
    require(not differs, f"blocks over {axes_text(differs)}, along which the value differs", refused=not x.fragmented)
    spec = tuple((*s, *axes) if k == d and x.term.shape[d] != 1 else s for k, s in enumerate(x.spec))
    return replace(x, spec=spec, shape=shape)


@lemma("all_to_all")
def all_to_all(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """An all-gather of one dim, of which each device keeps its block of another one."""
    (x,), axes, p = rels, axes_of(eqn, ctx), eqn.params
    require(bool(p["tiled"]), "an all-to-all that moves a dim")
    i, j = int(p["split_axis"]), int(p["concat_axis"])
    require(i != j, "an all-to-all along one dim")
    n = ctx.size(axes)
    shape = list(x.shape)
    shape[j] *= n
    full = gathered(ctx, x, axes, j, tuple(shape))
    require(full.term.op != "devices", "an all-to-all of values that depend on the device")
    shape[i] //= n
    return [blocks(full, axes, i, tuple(shape))]


@lemma("ppermute")
def ppermute(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """Each device gets the value of another one, or zeros: other blocks or fragments of the same value.

    JAX numbers the devices in the order of the mesh, whatever the order of the names.
    """
    (x,), axes = rels, in_mesh_order(ctx, axes_of(eqn, ctx))
    sources = np.full(ctx.size(axes), -1)
    for source, target in eqn.params["perm"]:
        sources[target] = source
    require(not x.partial & set(axes), "a permutation of a partial value")
    require(not x.term.axes & set(axes), "a permutation of values that depend on the device")
    alike = not x.sharded & set(axes) and bool((sources >= 0).all())
    return [x if alike else permute_fragments(ctx, x, axes, sources)]


@lemma("axis_index")
def axis_index(ctx: Context, eqn: JaxprEqn, rels: Sequence[Rel]) -> list[Rel]:
    """The coordinate of the device along an axis."""
    terms, dtype, index = ctx.terms, out_dtype(eqn), ctx.terms.literal(0, out_dtype(eqn))
    for a in axes_of(eqn, ctx):
        index = terms.add(terms.scale(index, Fraction(ctx.sizes[a])), terms.make("axis_index", a, (), (), dtype))
    return [ctx.replicated(index, ())]

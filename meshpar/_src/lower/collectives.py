"""Reshardings and reductions of local arrays, inside a ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels.collectives import scatter_in_order

from ..compat.jax import on_host
from ..compat.quirks import before_exchange, extremum, psum_scatter, separate_all_gather
from ..hardware.collective_algorithms import ALGORITHMS, Algorithm, AlgorithmName
from ..layout import Spec
from ..plan.collectives import is_all_reducible
from ..plan.resharding import Move
from ..plan.shard_shapes import shard_count
from ..plan.steps import Reduce, spec_after
from ..rules.mesh_in_shard_map import Grid, axis_index, fine_names, on_words, shape_in, slice_to_spec
from ..rules.one_owner import addable
from ..rules.rule import ADDED


def follow(x: Any, path: Sequence[Move], grid: Grid, separate: bool = False) -> Any:
    """The local array after a sequence of moves, which reshard it.

    Args:
      separate: results of all-gathers are copied to a separate buffer (:func:`compat.quirks.separate_all_gather`).
    """
    if path and 0 in x.shape:
        return jnp.zeros(shape_in(x.shape, path[0].before, path[-1].after, grid), x.dtype)
    for move in path:
        if move.op == "slice":
            x = slice_to_spec(x, move.before, move.after, grid)
        elif move.op == "all-gather":
            x = on_words(x, functools.partial(_all_gather, move=move, grid=grid, separate=separate))
        else:
            x = on_words(x, functools.partial(before_exchange, cpu=grid.cpu))
            x = on_words(x, functools.partial(_EXCHANGES[move.op], move=move, grid=grid))
    return x


def _all_gather(x: Any, move: Move, grid: Grid, separate: bool) -> Any:
    (dim,) = move.dims
    axes = fine_names(move.axes, grid)
    return separate_all_gather(x, axes, dim) if separate else lax.all_gather(x, axes, axis=dim, tiled=True)


def _all_to_all(x: Any, move: Move, grid: Grid) -> Any:
    pairs = list(enumerate(zip(move.before, move.after, strict=True)))
    (gains,), (loses,) = ([i for i, (a, b) in pairs if len(b) > len(a)], [i for i, (a, b) in pairs if len(a) > len(b)])
    return lax.all_to_all(x, fine_names(move.axes, grid), split_axis=gains, concat_axis=loses, tiled=True)


def _permute(x: Any, move: Move, grid: Grid) -> Any:
    """The local array after collective-permutes: of the shard, or of one part of it each."""
    axes = fine_names(move.axes, grid)
    if move.times == 1:
        return lax.ppermute(x, axes, permutation(move, grid))
    cut, joined = _parts(move, grid)
    words = x.ndim - len(cut)  # the dims of the words of random keys are in one part
    cut, joined = [*cut, *[1] * words], [*joined, *[1] * words]
    size = [n // k for n, k in zip(x.shape, cut, strict=True)]
    specs = ([*spec, *[()] * words] for spec in (move.before, move.after))
    have, need = ([axis_index(fine_names(e, grid)) if e else 0 for e in spec] for spec in specs)
    y = jnp.zeros([n * k for n, k in zip(size, joined, strict=True)], x.dtype)
    y = jax.device_put(y, jax.memory.Space.Host) if on_host(x) else y
    for turn in range(move.times):
        part = _part_at(turn, cut, joined, have)
        sent = lax.dynamic_slice(x, [i * n for i, n in zip(part, size, strict=True)], size)
        part = _part_at(turn, joined, cut, need)
        received = lax.ppermute(sent, axes, permutation(move, grid, turn))
        y = lax.dynamic_update_slice(y, received, [i * n for i, n in zip(part, size, strict=True)])
    return y


_EXCHANGES: dict[str, Callable[..., Any]] = {"all-to-all": _all_to_all, "collective-permute": _permute}


def _parts(move: Move, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """(the parts into which each dim of a shard is cut, the parts of which each dim of a shard afterwards consists)."""
    pairs = [(shard_count(a, sizes), shard_count(b, sizes)) for a, b in zip(move.before, move.after, strict=True)]
    return [max(b // a, 1) for a, b in pairs], [max(a // b, 1) for a, b in pairs]


def _part_at(turn: int, own: Sequence[int], other: Sequence[int], shard: Sequence[Any]) -> list[Any]:
    """The index along each dim of the part of a shard that is in a collective-permute.

    Part p of the shard with the remainders r, both numbered row-major, is in the permute number p + r modulo their number. So a
    device sends each of its parts once, and receives each part once, from different devices.

    Args:
      turn: the number of the permute.
      own: the parts of the shard along each dim.
      other: the parts of the shards on the other side: the index of the shard modulo them are the remainders.
      shard: its index along each dim, of this device or of every device.
    """
    number: Any = turn
    stride = 1
    for index, k in zip(reversed(shard), reversed(other), strict=True):
        number, stride = number - index % k * stride, stride * k
    part: list[Any] = []
    for k in reversed(own):
        part.insert(0, number % k)
        number = number // k
    return part


def permutation(move: Move, sizes: Mapping[str, int], turn: int = 0) -> list[tuple[int, int]]:
    """(source, target) for every device of a collective-permute; devices are numbered along its axes, the first one major.

    A device that already has its target shard is its own source. If several other devices have a shard, each sends it to one
    device.

    Args:
      turn: the number of the permute, of a move that is several.
    """
    shape = [sizes[a] for a in move.axes]
    coordinate = dict(zip(move.axes, np.indices(shape).reshape(len(shape), -1), strict=True))

    def shards(spec: Spec) -> list[Any]:
        """For each dim, the number of every device's shard along it, among those of equal index along the other axes."""
        numbers = []
        for entry in spec:
            number = np.zeros(int(np.prod(shape)), int)
            for axis in (a for a in entry if a in coordinate):
                number = number * sizes[axis] + coordinate[axis]
            numbers.append(number)
        return numbers

    before = shards(move.before)
    cut, joined = _parts(move, sizes)
    part = _part_at(turn, cut, joined, before)
    sent = [(b * k + p) // n for b, k, p, n in zip(before, cut, part, joined, strict=True)]
    targets = [list(zip(*(n.tolist() for n in numbers), strict=True)) for numbers in (sent, shards(move.after))]
    pairs: list[tuple[int, int]] = []
    free: dict[tuple[int, ...], list[int]] = {}
    for k, (source, target) in enumerate(zip(*targets, strict=True)):
        if source == target:
            pairs.append((k, k))
        else:
            free.setdefault(source, []).append(k)
    pairs += [(free[t].pop(0), k) for k, (s, t) in enumerate(zip(*targets, strict=True)) if s != t]
    return sorted(pairs)


def scattered(x: Any, axes: Sequence[str], dim: int, algorithm: AlgorithmName, grid: Grid) -> Any:
    """Reduce-scatter of a dim over axes of the factored mesh.

    Leading dims of size 1 are squeezed for the collective (:data:`compat.quirks.REDUCE_SCATTER_SHAPES`).
    """
    if not axes:
        return x
    ones = tuple(i for i in range(dim) if x.shape[i] == 1)
    if ones:
        return lax.expand_dims(scattered(lax.squeeze(x, ones), axes, dim - len(ones), algorithm, grid), ones)
    if not ALGORITHMS[algorithm].stage_by_stage:
        return reduce_scatter(x, axes, dim, ALGORITHMS[algorithm], grid.between_slices)
    for names in grid.groups(axes):
        x = psum_scatter(x, names[0] if len(names) == 1 else names, dim)
    return x


def reduce_scatter(x: Any, axes: Sequence[str], dim: int, algorithm: Algorithm, between: Collection[str]) -> Any:
    """The sum of ``x`` over mesh axes, of which this device has its block of a dim, in the phases of an algorithm.

    Args:
      x: the local array.
      axes: one for each stage, major to minor; blocks are numbered in this order, whatever the phases.
      dim: the dim of x that is scattered.
      between: the axes that connect slices.
    """
    if algorithm.slices_locally:
        n = x.shape[dim] // lax.axis_size(tuple(axes))
        return lax.dynamic_slice_in_dim(lax.psum(x, tuple(axes)), lax.axis_index(tuple(axes)) * n, n, dim)
    phases = algorithm.phases([a in between for a in axes])
    order = [k for phase in phases for k in phase]
    if order != sorted(order):
        return scatter_in_order(x, axes, dim, order)
    for phase in phases:
        names = tuple(axes[k] for k in phase)
        x = psum_scatter(x, names[0] if len(names) == 1 else names, dim)
    return x


def reduced(x: Any, step: Reduce, grid: Grid, begun: int = 0) -> Any:
    """The reduced value of a partial shard: the reduce-scatters of a step, then its all-reduce.

    Args:
      begun: the number of leading axes (of the factored mesh) over which a ring has already reduce-scattered it.
    """
    return combined(x, step.source.spec, step.scatters, step.over, step.source.kind, grid, begun)


def combined(
    x: Any, have: Spec, scatters: Sequence[Any], over: Sequence[str], kind: str, grid: Grid, begun: int = 0
) -> Any:
    """The reduced value of a partial shard.

    Args:
      have: the spec of the shard.
      scatters: (dim, axes, algorithm) of its reduce-scatters.
      over: axes of the all-reduce after them.
      kind: the reduction: "sum", "max", "indexed", …
      grid: the mesh.
      begun: the number of leading axes over which it is already reduce-scattered.
    """

    def by(kind: str, x: Any) -> Any:
        """The value, reduced by a reduction."""
        dtype, first = x.dtype, begun
        if 0 in x.shape:
            return jnp.zeros(shape_in(x.shape, have, spec_after(have, scatters), grid), dtype)
        restore: Callable[[Any], Any] = functools.partial(lax.convert_element_type, new_dtype=dtype)
        if kind == "indexed":
            x, restore = addable(x, grid.cpu)
        elif dtype == np.bool_:
            x = x.astype(np.uint8)
        for s in scatters:
            axes = fine_names([a for a in s.axes if grid[a] > 1], grid)
            x, first = scattered(x, axes[first:], s.dim, "staged" if first else s.algorithm, grid), 0
        axes = fine_names([a for a in over if grid[a] > 1], grid)
        if axes and is_all_reducible(kind, dtype) and kind in ADDED:
            x = lax.psum(x, axes)
        elif axes and is_all_reducible(kind, dtype):
            x = extremum(x, axes, "max" if kind in ("max", "or") else "min", grid.cpu)
        elif axes:
            every = lax.all_gather(x, axes, axis=0)
            x = functools.reduce(_TOGETHER[kind], [every[k] for k in range(every.shape[0])])
        return restore(x)

    if kind != "indexed" or not jnp.issubdtype(x.dtype, jnp.inexact):
        return by(kind, x)
    # the elements may be added as integers, which have no derivative; tangents are added as floats
    elements = jax.custom_jvp(lambda x: by("indexed", x))
    elements.defjvp(lambda primals, tangents: (elements(*primals), by("sum", *tangents)))
    return elements(x)


_TOGETHER = {"prod": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or, "max": lax.max, "min": lax.min}

"""Arrays with one part per stage, and the slot of a layer loop: all stages run their own layers at once, each on its own input.

A *stack* ``[L, …]`` of L layers is divided into K stages as ``[L / K, K, …]``. The dim of size K has the name of the stacked dim,
so the rule of the layout that splits the stack splits it as well. With v rounds, dim 0 has the layers of one round after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...compat.jax import closed_parts, key_impl, scan_counts
from ...rules.rearrange import rearrange
from ..primitives import add_row_p, name_dims_p


@dataclass(frozen=True, slots=True)
class Time:
    """Tick at which stage k does something in round r for microbatch 0: ``start + step·k + turn·r``.

    For another microbatch it is later by the ticks after which the microbatch enters the pipeline.

    Attributes:
      slot: it is the time of a slot: of all stages, also where ``step`` is 0.
    """

    start: int
    step: int = 0
    turn: int = 0
    slot: bool = False

    def since(self, other: Time, stages: int, r: int) -> int:
        """The most ticks from another time to this one in a round, over all stages."""
        first = self.start - other.start + (self.turn - other.turn) * r
        return max(first, first + (self.step - other.step) * (stages - 1))


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a pipeline.

    Attributes:
      count: their number, K.
      dim: the name of the stacked dim.
      rounds: groups of layers of a stage, v. Stage k has the layers of the groups k, K + k, …, (v − 1)·K + k.
    """

    count: int
    dim: str
    rounds: int = 1

    def named(self, x: Any, axis: int = 0) -> Any:
        """The array, with the name of the stacked dim for the dim of stages."""
        return name_dims_p.bind(x, names=tuple(self.dim if i == axis else None for i in range(jnp.ndim(x))))

    def index(self) -> Any:
        """[K]: 0, 1, …"""
        return self.named(lax.iota(np.int32, self.count))

    def zeros(self, aval: Any) -> Any:
        """[K, …] of zeros for a value of one stage."""
        return self.named(zeros((self.count, *aval.shape), aval.dtype))

    def divided(self, stack: Any, axis: int = 0) -> Any:
        """[L, …] as [L / K, K, …]: for every stage its layers, in the order of rounds. ``axis``: the position of the dim L.

        With several rounds, layers move to other stages, by collective permutes.
        """
        layers = stack.shape[axis]
        if self.rounds > 1:
            order = np.arange(layers).reshape(self.rounds, self.count, -1).swapaxes(0, 1)
            stack = rearrange(stack, axis, order.ravel())
        shape = (*stack.shape[:axis], self.count, layers // self.count, *stack.shape[axis + 1 :])
        return jnp.swapaxes(self.named(jnp.reshape(stack, shape), axis), axis, axis + 1)

    def joined(self, parts: Any) -> Any:
        """[L / K, K, …] as [L, …]: the inverse of :meth:`divided`."""
        x = jnp.swapaxes(parts, 0, 1)
        x = jnp.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
        if self.rounds > 1:
            order = np.arange(x.shape[0]).reshape(self.count, self.rounds, -1).swapaxes(0, 1)
            x = rearrange(x, 0, order.ravel())
        return x

    def of_round(self, parts: Any, r: Any) -> Any:
        """[L / (v·K), K, …]: of [L / K, K, …], the layers of round ``r`` (an int32 [K]) of each stage."""
        if self.rounds == 1:
            return parts
        layers = parts.shape[0] // self.rounds
        groups = jnp.reshape(parts, (self.rounds, layers, *parts.shape[1:]))
        return jnp.swapaxes(self.rows(groups, r, 1), 0, 1)

    def entering(self, value: Any, sent: Any, stage: int, when: Any = True) -> Any:
        """[K, …]: the results of the stage before, and for the first ``stage`` a new value.

        Args:
          value: of the microbatch that enters.
          sent: [K, …], the results of the slot before.
          stage: the first stage: 0, or K − 1 of a backward loop.
          when: whether a microbatch enters; else the first stage continues with the results of the last one.
        """
        moved = self.moved(sent, stage)
        return self.select((self.index() == stage) & when, jnp.broadcast_to(value, moved.shape), moved)

    def moved(self, sent: Any, stage: int) -> Any:
        """[K, …]: the results of the stage before; for the first ``stage``, the results of the last one."""
        return jnp.roll(sent, 1 if stage == 0 else -1, 0)

    def of_stage(self, x: Any, stage: int) -> Any:
        """[…], the part of one stage of [K, …]: a sum of which all other addends are 0, so that no array is gathered."""
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == np.bool_:
            return x[stage]
        return lax.reduce_sum(self.select(self.index() == stage, x, jnp.zeros(x.shape, x.dtype)), (0,))

    def select(self, which: Any, x: Any, y: Any, axis: int = 0) -> Any:
        """``x`` where a condition [K] is true for the stage, else ``y``; ``axis``: the dim of stages."""
        return lax.select(lax.broadcast_in_dim(which, x.shape, (axis,)), x, y)

    def merged(self, active: Any, new: Any, old: Any) -> Any:
        """Stacks [L / K, K, …] with new parts for one stage, where the old ones are zeros.

        Floating-point parts are added, so that they may stay partial until the last stage has been active.
        """
        if not jnp.issubdtype(new.dtype, jnp.inexact):
            return self.select(active, new, old, 1)
        return old + self.select(active, new, jnp.zeros(new.shape, new.dtype), 1)

    def rows(self, ring: Any, index: Any, axis: int) -> Any:
        """[K, …]: of a ring [R, …], the row at ``index`` (an int32 [K]) for each stage.

        Args:
          axis: the dim of stages of a row; −1: all stages read the same rows.
        """
        one = lambda rows, i: lax.dynamic_index_in_dim(rows, i, 0, keepdims=False)  # noqa: E731
        return self.named(jax.vmap(one, (None if axis < 0 else axis + 1, 0))(ring, index))

    def with_rows(self, ring: Any, x: Any, index: Any) -> Any:
        """A ring [R, l, K, …] with ``x`` [l, K, …] in the row at ``index`` (an int32 [K]) of each stage."""
        one = lambda rows, row, i: lax.dynamic_update_index_in_dim(rows, row, i, 0)  # noqa: E731
        return self.named(jax.vmap(one, (2, 1, 0), 2)(ring, x, index), 2)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """An array of zeros; of PRNG keys, the keys of zero words."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jnp.zeros(shape, dtype)
    key = jax.random.key_data(jax.random.key(0, impl=key_impl(dtype)))
    return jax.random.wrap_key_data(jnp.zeros((*shape, *key.shape), key.dtype), impl=key_impl(dtype))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of accumulators to which the layers of a slot add.

    Attributes:
      first: several rounds: of each stage, the row for its first layer (an int32 [K]); None: 0.
      valid: [K], whether a stage is not idle.
      late: the addends are reduced over devices after the loop over microbatches.
    """

    first: Any
    valid: Any
    late: bool


def run_slot(
    eqn: Any,
    length: int,
    consts: Sequence[Any],
    per_stage: Sequence[bool],
    carries: Sequence[Any],
    stacks: Sequence[Any],
    totals: Sequence[Any] = (),
    split: Callable[[list[Any]], tuple[list[Any], list[Any]]] | None = None,
    where: Rows | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Run the layers of all stages at once: a scan over the layers of a stage and round, of the loop's body with a dim of stages.

    Args:
      eqn: the scan over L layers.
      length: the layers of a stage and round, l = L / (v·K).
      consts: its constants; with ``per_stage``, [K, …].
      carries: [K, …].
      stacks: [l, K, …].
      totals: [L / K, K, …] arrays to which the layers add; each layer adds to its own part, in place.
      split: from the stacked results of one layer, each [K, …], to (the results to stack, the addend of each total). None: all
        results are stacked.
      where: the rows of the totals to which the layers add.

    Returns:
      (carries [K, …], stacks [l, K, …], totals).
    """
    params = eqn.params
    jaxpr, values = closed_parts(params["jaxpr"])
    count = scan_counts(params)[1]
    layer = jax.vmap(
        jaxpr_as_fun(ClosedJaxpr(jaxpr, values)),
        in_axes=(*(0 if own else None for own in per_stage), *(0,) * (count + len(stacks))),
    )

    def body(state: Any, inputs: Any) -> tuple[Any, list[Any]]:
        """One layer of all stages: (carries and totals, its index and slices of the stacks) → (new state, stacked results)."""
        (carry, new_totals), (index, xs) = state, inputs
        outs = layer(*consts, *carry, *xs)
        made, rows = (outs[count:], []) if split is None else split(outs[count:])
        if where is not None and new_totals:
            at = index if where.first is None else where.first + index
            rows = zip(new_totals, rows, strict=True)
            new_totals = [add_row_p.bind(total, row, at, where.valid, late=where.late) for total, row in rows]
        return (outs[:count], new_totals), made

    indices = jnp.arange(length, dtype=np.int32) if totals else None
    start, xs = (list(carries), list(totals)), (indices, list(stacks))
    (done, new_totals), made = lax.scan(body, start, xs, length=length, reverse=params["reverse"], unroll=1)
    return done, made, new_totals

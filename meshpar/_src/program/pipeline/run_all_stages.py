"""Arrays with one part per stage, and the slot of a layer loop: all stages run their own layers at once, each on its own input.

A *stack* ``[L, …]`` of L layers is divided into K stages as ``[L / K, K, …]``. The dim of size K has the name of the stacked dim,
so the rule of the layout that splits the stack splits it as well. With v rounds, dim 0 has the layers of one round after another.
If K does not divide L, layers are added at the end, as copies of the first ones. They are *masked*: they return the carries that
they take, and their other results are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from ...compat.jax import closed_parts, zeros
from ...compat.loop_operands import loop_parts
from ...rules.constant_index_gather import rearrange
from ..primitives import add_row_p, name_dims_p, rename_dims_p


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
      layers: the number of layers, L.
    """

    count: int
    dim: str
    rounds: int
    layers: int

    @property
    def length(self) -> int:
        """The layers of a stage and round, l = L / (v·K), rounded up."""
        return -(-self.layers // (self.count * self.rounds))

    @property
    def masked(self) -> int:
        """The layers that are added so that all stages have as many."""
        return self.length * self.count * self.rounds - self.layers

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
        if self.masked:
            stack = jnp.concatenate([stack, lax.slice_in_dim(stack, 0, self.masked, axis=axis)], axis)
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
        return x[: self.layers] if self.masked else x

    def real(self, r: Any, index: Any) -> Any:
        """[K]: for each stage, whether a layer of round ``r`` is one of the L layers."""
        return (r * self.count + self.index()) * self.length + index < self.layers

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


@dataclass(frozen=True, slots=True)
class RoundOfStack:
    """The layers of one round, of a stack with the layers of all rounds: each layer is read from the stack, without a copy of the
    round.

    Attributes:
      stack: [L / K, K, …].
      first: for each stage, the position of its first layer in the stack (an int32 [K]).
      renamed: (old name, new name) of dims of a layer.
    """

    stack: Any
    first: Any
    renamed: tuple[tuple[str, str], ...] = ()

    def layer(self, stages: Stages, index: Any) -> Any:
        """[K, …]: for each stage, a layer of its round."""
        x = stages.rows(self.stack, self.first + index, 0)
        return rename_dims_p.bind(x, pairs=self.renamed, back=False) if self.renamed else x


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot of a layer loop, on all stages.

    Attributes:
      eqn: the scan over L layers.
      stages: of the loop.
      consts: its constants; with ``per_stage``, [K, …].
      carries: [K, …].
      stacks: [l, K, …], or parts of the stacks of all rounds.
      totals: [L / K, K, …] arrays to which the layers add; each layer adds to its own part, in place.
      split: from the stacked results of one layer, each [K, …], to (the results to stack, the addend of each total). None: all
        results are stacked.
      valid: [K], whether a stage is not idle: the layers of an idle one add nothing.
      late: the addends are reduced over devices after the loop over microbatches.
      round: the round of each stage (an int32 [K] or 0).
    """

    eqn: JaxprEqn
    stages: Stages
    consts: Sequence[Any]
    per_stage: Sequence[bool]
    carries: Sequence[Any]
    stacks: Sequence[Any]
    totals: Sequence[Any] = ()
    split: Callable[[list[Any]], tuple[list[Any], list[Any]]] | None = None
    valid: Any = None
    late: bool = False
    round: Any = 0

    @property
    def reverse(self) -> bool:
        """Whether the layers run from the last to the first."""
        return self.eqn.params["reverse"]

    def layer(self, index: Any, carry: Any, totals: Any, xs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """One layer of all stages: (carries, stacked results, totals), given its index and slices of the stacks."""
        jaxpr, values = closed_parts(self.eqn.params["jaxpr"])
        run = jax.vmap(
            jaxpr_as_fun(ClosedJaxpr(jaxpr, values)),
            in_axes=(*(0 if own else None for own in self.per_stage), *(0,) * (len(carry) + len(xs))),
        )
        after, made = loop_parts(self.eqn).split_results(run(*self.consts, *carry, *xs))
        if self.stages.masked:
            real = self.stages.real(self.round, index)
            after = [self.stages.select(real, new, old) for new, old in zip(after, carry, strict=True)]
        made, rows = (made, []) if self.split is None else self.split(made)
        if totals:
            at = index if self.stages.rounds == 1 else self.round * self.stages.length + index
            rows = zip(totals, rows, strict=True)
            totals = [add_row_p.bind(total, row, at, self.valid, late=self.late) for total, row in rows]
        return after, made, totals


def run_slots(slots: Sequence[Slot]) -> list[tuple[list[Any], list[Any], list[Any]]]:
    """Run slots of the same number of layers in one scan, whose body has a layer of each: all stages at once.

    The layers of different slots are independent, so that the collectives of one may overlap with the matmuls of another. If their
    directions differ, the scan runs forward: a backward slot reads its stacks, and writes its results, at the last index first.

    Returns:
      For each slot, (carries [K, …], stacks [l, K, …], totals).
    """
    length, reverse = slots[0].stages.length, all(slot.reverse for slot in slots)
    turned = [slot.reverse != reverse for slot in slots]

    def slices(slot: Slot, at: Any, given: Sequence[Any] | None = None) -> list[Any]:
        """Slices of the stacks of a slot; ``given``: the slices of its arrays, if the scan makes them."""
        made = iter(
            [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in arrays(slot)] if given is None else given
        )
        return [x.layer(slot.stages, at) if isinstance(x, RoundOfStack) else next(made) for x in slot.stacks]

    def arrays(slot: Slot) -> list[Any]:
        return [stack for stack in slot.stacks if not isinstance(stack, RoundOfStack)]

    def buffers(slot: Slot) -> list[Any]:
        """Zeros for the stacked results of a slot."""
        one = lambda: slot.layer(np.int32(0), slot.carries, slot.totals, slices(slot, 0))[1]  # noqa: E731
        return [zeros((length, *x.shape), x.dtype) for x in jax.eval_shape(one)]

    def body(state: Any, inputs: Any) -> tuple[Any, list[Any]]:
        """One layer of each slot: (carries, totals and buffers, index and slices of the stacks) → (new state, stacked results)."""
        index, rows = inputs
        after, stacked = [], []
        for slot, back, (carry, totals, buffer), xs in zip(slots, turned, state, rows, strict=True):
            at = length - 1 - index if back else index
            carry, made, totals = slot.layer(at, carry, totals, slices(slot, at, None if back else xs))
            if back:
                pairs = zip(buffer, made, strict=True)
                buffer, made = [lax.dynamic_update_index_in_dim(old, x, at, 0) for old, x in pairs], []
            after.append((carry, totals, buffer))
            stacked.append(made)
        return after, stacked

    indexed = any(turned) or any(s.totals or s.stages.masked or len(arrays(s)) < len(s.stacks) for s in slots)
    start = [
        (list(s.carries), list(s.totals), buffers(s) if back else []) for s, back in zip(slots, turned, strict=True)
    ]
    xs = [[] if back else arrays(slot) for slot, back in zip(slots, turned, strict=True)]
    indices = jnp.arange(length, dtype=np.int32) if indexed else None
    done, stacked = lax.scan(body, start, (indices, xs), length=length, reverse=reverse, unroll=1)
    return [
        (carry, buffer if back else made, totals)
        for (carry, totals, buffer), made, back in zip(done, stacked, turned, strict=True)
    ]

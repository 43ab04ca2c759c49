"""Records of the collectives of a plan: bytes, algorithm, seconds, and the names of the values that they move."""

from __future__ import annotations

import functools
from typing import cast

import numpy as np

from ..dims import format_dims
from ..hardware.chips import Chip
from ..hardware.collective_algorithms import AlgorithmName, choose_algorithm
from ..hardware.collective_ops import CollectiveOp, collective_volume, wire_bytes
from ..hardware.collective_time import seconds_of
from ..hardware.topology import Torus, ring_order
from ..layout import Spec
from ..program.ir import Op, Program, Value
from .bytes_sent_by_op import SendOver, send_bytes
from .causes import Causes, FactorAxes
from .collectives import Collective, Text
from .resharding import Move, reshard
from .shard_shapes import itemsize, shard_count, value_bytes

AlgorithmChoices = dict[tuple[CollectiveOp, tuple[str, ...], float], tuple[AlgorithmName, str, float | None]]
"""(kind, axes, bytes sent) → (algorithm, why it is taken, seconds)."""


class TooLong(Exception):
    """The collectives of a plan take longer than the caller's limit."""


class CollectiveRecords:
    """Makes the records of the collectives of one plan.

    Attributes:
      torus: the stages of every axis on the torus of the slice.
      seconds_left: what further collectives may take before :class:`TooLong` is raised.
    """

    def __init__(
        self, program: Program, sizes: dict[str, int], torus: Torus, chip: Chip | None, algorithms: AlgorithmChoices,
        max_seconds: float,
    ):  # fmt: skip
        """Records for a plan on a mesh of these axis sizes.

        Args:
          chip: whose links determine times; None: collectives have no times.
          algorithms: choices that plans for this topology and chip share; new ones are added.
          max_seconds: limit of all collectives of the plan together.
        """
        self.program, self.sizes, self.torus, self.chip = program, sizes, torus, chip
        self.seconds_left = max_seconds
        self._algorithms = algorithms
        self._labels = program.cached(_labels)
        self._weights = program.cached(_weights)

    def moving(
        self, kind: CollectiveOp, axes: tuple[str, ...], value: Value, op: Op | None, bytes_sent: float,
        count: int | None, cause: Text,
    ) -> list[Collective]:  # fmt: skip
        """The record of a collective of ``kind`` over ``axes`` that moves a value, in a list; an empty list if nothing
        is sent.

        Args:
          op: the op that needs it.
          bytes_sent: bytes that each device sends.
          count: how often it runs in a step; None: unknown.
          cause: the text of the record that states its reason, or a function that makes it.

        Raises:
          TooLong: the collectives take longer than the limit.
        """
        if 0 in value.shape or not axes:
            return []
        algorithm, why, seconds = self._algorithm(kind, axes, bytes_sent)
        self.seconds_left -= (seconds or 0.0) * (count or 1)
        if self.seconds_left < 0:
            raise TooLong
        tensor, dims = self._label(value)
        return [
            Collective(
                kind, axes, tensor, dims, value.shape, str(value.aval.dtype), bytes_sent, count, cause, op, seconds,
                algorithm, why,
            )
        ]  # fmt: skip

    def reducing(
        self,
        kind: CollectiveOp,
        axes: tuple[str, ...],
        value: Value,
        op: Op,
        spec: Spec,
        count: int | None,
        cause: Text,
    ) -> list[Collective]:
        """The record of a collective of ``kind`` over ``axes`` that reduces a partial value with the spec ``spec``; in
        a list, as :meth:`moving`."""
        axes = tuple(a for a in axes if self.sizes[a] > 1)
        group, volume = shard_count(axes, self.sizes), value_bytes(value, spec, self.sizes)
        if kind == "all-gather":
            volume *= group
        bytes_sent = wire_bytes(kind, volume, group)
        return self.moving(kind, axes, value, op, bytes_sent, count, cause)

    def resharding(
        self, value: Value, have: Spec, need: Spec, op: Op | None, count: int | None, cause: Text
    ) -> tuple[tuple[Move, ...], list[Collective]]:
        """(the moves that change the spec of a value from ``have`` to ``need``, the records of their collectives)."""
        moves = reshard(have, need, value.shape, self.sizes)
        size = itemsize(value.aval)
        records: list[Collective] = []
        for m in moves:
            if m.op != "slice":
                sent = m.bytes(value.shape, size, self.sizes)
                sent, runs = (sent * m.times, None) if count is None else (sent, count * m.times)
                records += self.moving(m.op, m.axes, value, op, sent, runs, cause)
        return moves, records

    def local_form(
        self, op: Op, sends: tuple[SendOver, ...], factor_axes: FactorAxes, causes: Causes, count: int | None
    ) -> tuple[Collective, ...]:
        """The records of the collectives that the local form of an op makes.

        Args:
          factor_axes: the axes that split each factor of the op.
          causes: words the cause of each of them.
        """
        records = []
        for send, axes in sends:
            order = self._ring_order(axes) if send.route.startswith("any ") else ()
            why = f"{send.why}, a cycle of neighbours" if order != tuple(range(len(order))) else send.why
            cause = functools.partial(causes.local_form, op, factor_axes, axes, why)
            dims = causes.sent_dims(op, send.shape)
            kind, bytes_sent = cast(CollectiveOp, send.op), send_bytes(send, axes, self.sizes)
            seconds, hidden = self._seconds(kind, axes, bytes_sent, "native"), 0.0
            if seconds is not None and self.chip is not None:
                seconds *= self._links(send.route, axes)
                rate = self.chip.per_device().flops * self.chip.compiler.matmul_efficiency
                hidden = min(seconds, send.hidden / rate)
            records.append(
                Collective(
                    kind, axes, f"{op.label}: {send.why}", dims, send.shape, str(np.dtype(send.dtype)), bytes_sent,
                    None if count is None or send.times is None else count * send.times,
                    cause, op, seconds, content=send.content, hidden=hidden,
                )
            )  # fmt: skip
        return tuple(records)

    def _algorithm(self, kind: CollectiveOp, axes: tuple[str, ...], bytes_sent: float):
        """(algorithm, reason, seconds) for a collective of ``bytes_sent`` bytes per device over ``axes``; the seconds
        are None without a chip."""
        key = (kind, axes, bytes_sent)
        choice = self._algorithms.get(key)
        if choice is None:
            volume = collective_volume(kind, bytes_sent, shard_count(axes, self.sizes))
            algorithm, why = choose_algorithm(kind, volume, [s for a in axes for s in self.torus[a]], self.chip)
            choice = algorithm, why, self._seconds(kind, axes, bytes_sent, algorithm)
            self._algorithms[key] = choice
        return choice

    def _seconds(
        self, kind: CollectiveOp, axes: tuple[str, ...], bytes_sent: float, algorithm: AlgorithmName
    ) -> float | None:
        """Seconds of one run of a collective of ``kind`` over ``axes``, for ``bytes_sent`` bytes per device; None: the
        chip is not known."""
        if self.chip is None:
            return None
        volume = collective_volume(kind, bytes_sent, shard_count(axes, self.sizes))
        return seconds_of(kind, volume, [s for a in axes for s in self.torus[a]], self.chip, algorithm)

    def _links(self, route: str, axes: tuple[str, ...]) -> float:
        """The number of operands of a permute that pass the busiest link in one direction; a half for each of two that run
        in both directions at once. On a line the last device sends to the first one over the links of all."""
        stages = [s for a in axes for s in self.torus[a]]
        if route == "mirror":
            return max(p.size // (4 if p.wraps else 2) or 1 if p.on_torus else 1 for s in stages for p in s.parts)
        cycle = self._ring_order(axes) if route == "any both" else all(s.on_torus and not s.line for s in stages)
        return 0.5 if cycle and route.endswith("both") else 1.0

    def _ring_order(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The order of devices of a ring that takes any order; empty: the order of the mesh, which is no cycle."""
        return ring_order(tuple(s for a in axes for s in self.torus[a]))

    def _label(self, value: Value) -> tuple[str, str]:
        """(how reports name a value, its dims): its path, else the weight of the same dims, else the op that made it."""
        label = self._labels.get(value)
        if label is None:
            name = value.path
            if not name:
                name = value.op.name if value.op is not None else "value"
                nodes = value.nodes
                weight = self._weights.get(tuple(map(self.program.unifier.find, nodes))) if len(nodes) > 1 else None
                name = f"{name} ~ {weight}" if weight else name
            label = self._labels[value] = name, format_dims(self.program.dims(value))
        return label


def _labels(program: Program) -> dict[Value, tuple[str, str]]:
    """The cache of :meth:`CollectiveRecords._label`."""
    return {}


def _weights(program: Program) -> dict[tuple[int, ...], str | None]:
    """The paths of the weights, by the classes of their dims."""
    return {tuple(map(program.unifier.find, v.nodes)): v.path for v in reversed(program.inputs) if v.kind == "params"}

"""A step that generates tokens: its time against the limit of HBM, tokens per second, the largest batch that fits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UnknownDimError
from ..dims import did_you_mean
from ..plan.plan import Plan
from ..program.ir import Program, Value
from ..units import format_bytes, format_seconds
from .device_computation import computation_of
from .kernel_time import read_bytes
from .memory import memory_of
from .time import time_of


@dataclass(frozen=True, slots=True)
class Decoding:
    """The metrics of a step of decoding, one token of each sequence.

    Attributes:
      dim: the dim of the sequences.
      sequences: its size: tokens of a step.
      seconds: of a step, the time from one token of a sequence to the next; None: the chip is not known.
      bytes_read: of the arguments that a device reads: weights, cache, other state. A table of which rows are looked up counts with
        these rows.
      limit: seconds of reading these bytes at HBM's bandwidth, which no schedule beats; None: the chip is not known.
      chips: number of chips of the mesh.
      sequence_bytes: on a device, of the arrays that are live at the peak and have the dim, for one sequence of the batch.
      largest: the largest batch that fits into the memory of a device, a multiple of the number of shards of the dim. Arrays with
        the dim are scaled, others are not. 0: none fits; None: the chip is not known, or no array grows with the batch.
    """

    dim: str
    sequences: int
    seconds: float | None
    bytes_read: float
    limit: float | None
    chips: int
    sequence_bytes: float
    largest: int | None

    @property
    def ratio(self) -> float | None:
        """Seconds of a step in units of the limit."""
        return self.seconds / self.limit if self.seconds is not None and self.limit else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences together."""
        return self.sequences / self.seconds if self.seconds else None

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        return None if self.tokens_per_second is None else self.tokens_per_second / self.chips

    def to_dict(self) -> dict[str, Any]:
        """The attributes and the ratios as JSON data."""
        keys = ("ratio", "tokens_per_second", "tokens_per_second_per_chip")
        return {**asdict(self), **{key: getattr(self, key) for key in keys}}

    def __str__(self) -> str:
        grows = f"{format_bytes(self.sequence_bytes)} a sequence and device"
        if self.largest is not None:
            grows += f"; a batch of {self.largest} fits" if self.largest else "; no batch fits"
        if self.seconds is None or self.limit is None:
            return f"{self.sequences} tokens a step; {grows}"
        return (
            f"{self.sequences} token{'s' * (self.sequences != 1)} a step, {_count(self.tokens_per_second)} a second, "
            f"{_count(self.tokens_per_second_per_chip)} a chip; {self.ratio:.2f} times the {format_seconds(self.limit)} in which "
            f"a device reads its {format_bytes(self.bytes_read)} of weights and state; {grows}"
        )


def _count(number: float | None) -> str:
    """``12,300`` or ``4.5``."""
    return "–" if number is None else f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def decoding_of(plan: Plan) -> Decoding | None:
    """The metrics of a plan whose ``tokens`` is the dim of its sequences; None: it is no step of decoding.

    Raises:
      UnknownDimError: no argument has the dim.
    """
    dim = plan.request.tokens
    if dim is None:
        return None
    splits = [(h.shape[i], axes) for h in plan.inputs for i, (name, axes) in enumerate(h.split) if name == dim]
    if not splits:
        names = {name for h in plan.inputs for name, _ in h.split if name}
        fixes = did_you_mean(dim, names, "dims")
        raise UnknownDimError(f"no argument of the step has the dim `{dim}` of its sequences", dim=dim, fixes=fixes)
    sequences = max(size for size, _ in splits)
    shards = max(math.prod(plan.sizes[a] for a in axes) for _, axes in splits)
    arguments = (*computation_of(plan).constants, *computation_of(plan).inputs)
    read = sum(min(i.bytes, sum(read_bytes(kernel, i) for kernel in i.readers)) for i in arguments)
    memory, time, chip = memory_of(plan), time_of(plan), plan.chip
    growing = sum(n for buffer, n in memory.live if _has(plan.program, buffer.value, dim)) / sequences
    largest = None
    if chip is not None and growing and math.isfinite(chip.per_device().hbm):
        free = chip.per_device().hbm - (memory.peak - growing * sequences)
        largest = max(0, int(free / growing)) // shards * shards
    seconds = None if time is None else time.seconds
    limit = None if chip is None else read / chip.per_device().hbm_bandwidth
    chips = math.prod(plan.sizes.values()) // (1 if chip is None else chip.devices)
    return Decoding(dim, sequences, seconds, read, limit, chips, growing, largest)


def _has(program: Program, value: Value, dim: str) -> bool:
    """Whether a value has a dim, on its own or merged with others."""
    return any(dim in names[:1] for i in range(len(value.shape)) for names, _ in program.sub_dims(value, i))

"""The kinds of collectives, and the bytes that each device sends in one."""

from __future__ import annotations

from typing import Literal

CollectiveOp = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


def wire_bytes(op: str, volume: float, group: int) -> float:
    """Bytes that each device of a group sends.

    Args:
      op: a kind of collective; of others, also of those that XLA alone makes, each device sends all but its own share.
      volume: bytes of the gathered array (all-gather), else of the local operand.
      group: devices of the group.
    """
    if op == "collective-permute":
        return volume
    share = volume * (group - 1) / group
    return 2 * share if op == "all-reduce" else share


def collective_volume(op: str, sent: float, group: int) -> float:
    """The volume V of :func:`hardware.collective_time.seconds_of`, from the bytes that each device of a group sends."""
    if group == 1:
        return 0.0
    if op == "collective-permute":
        return sent
    operand = sent * group / (group - 1)
    if op == "all-reduce":
        return operand / 2
    return operand * group if op == "all-to-all" else operand

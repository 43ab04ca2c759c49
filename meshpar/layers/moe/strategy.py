"""How tokens and experts come together on a mesh: who exchanges with whom, in which way, with how large a buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import MeshparError

STRATEGIES = ("a2a", "ring", "dense")
EXCHANGES = ("padded", "pallas", "pallas_tpu", "pallas_gpu")

__all__ = ["EXCHANGES", "STRATEGIES", "Ways", "find_ways"]


@dataclass(frozen=True)
class Ways:
    """What one device does in the exchange.

    Attributes:
      strategy: "a2a": each choice's token goes to its expert's device, and the result comes back. "ring": tokens are gathered,
        results reduce-scattered. "dense": the experts' weights are gathered, and tokens stay. "local": tokens and experts share
        no axis, so nothing has to move before the results are summed over ``rest``.
      over: mesh axes that split tokens and experts both: the exchange runs over them, as one.
      rest: mesh axes that split experts alone: each device serves its own experts, and results are summed over these.
      rows: size of the buffer (a2a: for each other device).
      sends: rows that a2a sends to each other device: whole buffers, or by a kernel those in use, here of a balanced load.
      most: rows that it could have to hold at worst; more than ``rows`` means that further rounds may be needed.
      devices: the number of devices in ``over``.
    """

    strategy: str
    over: tuple[str, ...]
    rest: tuple[str, ...]
    rows: int
    most: int
    devices: int
    sends: int = 0

    @property
    def rounds(self) -> int:
        """Most rounds that any load can need."""
        return max(1, -(-self.most // self.rows))


def find_ways(
    token_axes: Sequence[str],
    expert_axes: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    *,
    tokens: int,
    k: int,
    embed: int,
    local_experts: int,
    weights: int,
    rate: float,
    most_per_expert: int | None,
    slack: float,
    strategy: str | None,
    distinct: bool = True,
    exchange: str | None = None,
) -> Ways:
    """Choose how to exchange.

    The costs, in elements that a device sends each way: sends·(A - 1)·H for "a2a", tokens·(A - 1)·H for "ring", and
    weights·(A - 1) / 2 for "dense" (they are gathered once, where the others go there and back).

    Args:
      token_axes: mesh axes that split the tokens.
      expert_axes: of each dim of the experts.
      tokens: T, on one device.
      k: choices a token has room for.
      local_experts: experts on one device.
      weights: elements of all their matrices on one device.
      rate: choices that a token makes on average: k, or the capacity factor of Expert Choice.
      most_per_expert: most rows of one expert on all devices together, if there is a capacity.
      slack: buffers have room for so many times the rows of a balanced load.
      strategy: None, or the one to take.
      distinct: whether the experts of a token are known to differ.
      exchange: how "a2a" sends rows: None and "padded" in whole buffers, else by a kernel.

    Raises:
      MeshparError: an unknown strategy or exchange, "dense" where the axes do not allow it, or a slack below 1.
    """
    if strategy is not None and strategy not in STRATEGIES:
        raise MeshparError(
            f"moe: strategy must be one of {', '.join(STRATEGIES)} or None, got {strategy!r}",
            fixes=["leave strategy out for the default"],
        )
    if exchange is not None and exchange not in EXCHANGES:
        raise MeshparError(
            f"moe: exchange must be one of {', '.join(EXCHANGES)} or None, got {exchange!r}",
            fixes=["leave exchange out for the default"],
        )
    if slack < 1:
        raise MeshparError(
            f"moe: slack={slack} must be at least 1, which is room for a balanced load",
            fixes=["slack=1.25 has room for a quarter more than a balanced load"],
        )
    every = [a for axes in expert_axes for a in axes]
    over = tuple(a for a in every if a in token_axes)
    rest = tuple(a for a in every if a not in token_axes)
    devices, parts = math.prod(sizes[a] for a in over), math.prod(sizes[a] for a in rest)
    # weights come together along the minor axes of a dim only
    gathers = all(not (set(axes[:i]) & set(over)) for axes in expert_axes for i, a in enumerate(axes) if a in rest)

    in_use = exchange not in (None, "padded")
    tile = 16 if in_use else 8  # a kernel copies whole tiles

    def buffer(from_tokens: int, to_experts: int, share: float) -> tuple[int, int]:
        most = from_tokens * (min(k, to_experts) if distinct else k)
        if most_per_expert is not None:
            most = min(most, to_experts * most_per_expert)
        if share == 1 and rate == k:  # everything stays here, whatever the load
            return max(most, 1), max(most, 1)
        rows = math.ceil(slack * from_tokens * rate * share)
        return max(min(-(-rows // tile) * tile, most), 1), max(most, 1)

    everything = buffer(tokens, local_experts * devices, 1 / parts)
    if not over:
        return Ways("local", over, rest, *everything, 1)
    a2a = buffer(tokens, local_experts, 1 / (devices * parts))
    sends = min(math.ceil(tokens * rate / (devices * parts)), a2a[0]) if in_use else a2a[0]
    if strategy is None:
        costs: dict[str, float] = {"a2a": sends * embed, "ring": tokens * embed}
        if gathers:
            costs["dense"] = weights / 2
        strategy = min(costs, key=lambda s: costs[s])
    if strategy == "dense":
        if not gathers:
            raise MeshparError(
                'moe: strategy="dense" cannot gather experts over an axis that others of theirs lie within',
                fixes=['another order of the axes of `expert`, or strategy="a2a"'],
            )
        return Ways("dense", over, rest, *everything, devices)
    if strategy == "ring":
        return Ways("ring", over, rest, *buffer(tokens * devices, local_experts, 1 / (devices * parts)), devices)
    return Ways("a2a", over, rest, *a2a, devices, sends)

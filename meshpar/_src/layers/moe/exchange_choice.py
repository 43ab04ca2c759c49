"""How tokens and experts meet on a mesh: over which axes they are exchanged, by which strategy, with how large a buffer.

To add a strategy or an exchange, add an entry to :data:`STRATEGIES` or a name to :data:`EXCHANGES`, its branch in the local
function, sends and work of :mod:`layers.moe.experts`, and in ``meshpar_kernels.dispatch.expert_dispatch``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshpar_kernels.dispatch.api import CODE_BLOCK
from meshpar_kernels.dispatch.differentiable import KERNELS

from .routers import refused

EXCHANGES = ("padded", "float8", *KERNELS)
"""Names of :attr:`Exchange.exchange`: all rows of the buffers are sent, or as codes of 8 bits, or, by a kernel, only the rows in
use."""
OVERLAPS = (1, 2, 4)
"""Values of :attr:`Exchange.overlap`."""


@dataclass(frozen=True)
class Exchange:
    """How one device takes part in an exchange: its shapes, the mesh axes that split tokens and experts, and the strategy.

    Attributes:
      token_axes: mesh axes that split the tokens.
      expert_axes: for each dim of the experts, the mesh axes that split it.
      sizes: mesh axis → number of devices.
      tokens: T, tokens per device.
      k: largest number of experts per token.
      embed: H, elements per token.
      local_experts: experts per device.
      weights: elements of all expert matrices per device.
      rate: average number of experts per token: k, or the capacity factor of Expert Choice.
      most_per_expert: the capacity of an expert over all devices, in rows; None: no capacity.
      slack: size of a buffer, relative to a balanced load; at least 1.
      distinct: the experts of a token are known to differ.
      exchange: one of :data:`EXCHANGES`; None: "padded".
      strategy: a key of :data:`STRATEGIES`; None: :func:`choose_exchange` chooses it.
      overlap: number of parts of a device's tokens, each exchanged on its own. :func:`choose_exchange` sets its largest factor
        that divides the tokens, and 1 if no token moves.
    """

    token_axes: Sequence[str]
    expert_axes: Sequence[Sequence[str]]
    sizes: Mapping[str, int]
    tokens: int
    k: int
    embed: int
    local_experts: int
    weights: int
    rate: float
    most_per_expert: int | None
    slack: float
    distinct: bool = True
    exchange: str | None = None
    strategy: str | None = None
    overlap: int = 1

    def __post_init__(self) -> None:
        """Check ``exchange``, ``slack`` and ``overlap``; a MeshparError names the one out of range."""
        if self.exchange is not None and self.exchange not in EXCHANGES:
            text = f"exchange must be one of {', '.join(EXCHANGES)} or None, got {self.exchange!r}"
            raise refused(text, "leave exchange out for the default")
        if self.overlap not in OVERLAPS:
            text = f"overlap must be one of {', '.join(map(str, OVERLAPS))}, got {self.overlap!r}"
            raise refused(text, 'overlap="auto"')
        if self.slack < 1:
            text = f"slack={self.slack} must be at least 1, which is room for a balanced load"
            raise refused(text, "slack=1.25 has room for a quarter more than a balanced load")

    @functools.cached_property
    def over(self) -> tuple[str, ...]:
        """Mesh axes that split both tokens and experts."""
        return tuple(a for axes in self.expert_axes for a in axes if a in self.token_axes)

    @functools.cached_property
    def rest(self) -> tuple[str, ...]:
        """Mesh axes that split experts only."""
        return tuple(a for axes in self.expert_axes for a in axes if a not in self.token_axes)

    @property
    def devices(self) -> int:
        """Number of devices along :attr:`over`."""
        return math.prod(self.sizes[a] for a in self.over)

    @property
    def parts(self) -> int:
        """Number of devices along :attr:`rest`."""
        return math.prod(self.sizes[a] for a in self.rest)

    @property
    def only_rows_in_use(self) -> bool:
        """Whether "a2a" sends only the rows in use, not full buffers."""
        return self.exchange in KERNELS

    @property
    def can_gather_experts(self) -> bool:
        """Whether all-gathering the experts over :attr:`over` gives a contiguous block of each dim: in no dim is an axis of
        ``over`` major to an axis of ``rest``."""
        over, rest = set(self.over), set(self.rest)
        return all(not over & set(axes[:i]) for axes in self.expert_axes for i, a in enumerate(axes) if a in rest)

    @property
    def part(self) -> int:
        """Tokens of a part."""
        return self.tokens // self.overlap

    def buffer(self, tokens: int, experts: int, share: float) -> tuple[int, int]:
        """(rows of a buffer, rows that any load can need) for some tokens of which each chooses among all experts, where the
        buffer receives the choices of ``experts`` experts, the fraction ``share`` of all."""
        limit = tokens * (min(self.k, experts) if self.distinct else self.k)
        if self.most_per_expert is not None:
            limit = min(limit, experts * self.most_per_expert)
        limit = max(limit, 1)
        if share == 1 and self.rate == self.k:  # every choice is on this device, whatever the load
            return limit, limit
        tile = 16 if self.only_rows_in_use else 8  # kernels copy full tiles
        rows = math.ceil(self.slack * tokens * self.rate * share)
        return max(min(-(-rows // tile) * tile, limit), 1), limit

    @functools.cached_property
    def way(self) -> Strategy:
        """The entry of the strategy."""
        return STRATEGIES[self.strategy or ""]

    @property
    def rows(self) -> int:
        """Rows of a buffer ("a2a": of the buffer for each other device)."""
        return self.way.buffer(self)[0]

    @property
    def rounds(self) -> int:
        """Number of rounds that the worst load needs."""
        rows, most = self.way.buffer(self)
        return max(1, -(-most // rows))

    @property
    def rows_sent(self) -> int:
        """Rows of a part that "a2a" sends to each other device: a full buffer, or, by a kernel, the rows of a balanced load."""
        rows, _ = STRATEGIES["a2a"].buffer(self)
        balanced = math.ceil(self.part * self.rate / (self.devices * self.parts))
        return min(balanced, rows) if self.only_rows_in_use else rows


class Strategy(NamedTuple):
    """One way for tokens to reach the experts of A devices along the shared axes.

    Attributes:
      buffer: (rows, rows of the worst load) of a buffer.
      cost: half of the elements that a device sends for an exchange and its return, divided by A - 1; dtypes and further rounds
        do not count.
      moves_tokens: tokens are sent to other devices.
    """

    buffer: Callable[[Exchange], tuple[int, int]]
    cost: Callable[[Exchange], float]
    moves_tokens: bool


def _all_experts(p: Exchange) -> tuple[int, int]:
    return p.buffer(p.tokens, p.local_experts * p.devices, 1 / p.parts)


STRATEGIES: dict[str, Strategy] = {
    "a2a": Strategy(
        lambda p: p.buffer(p.part, p.local_experts, 1 / (p.devices * p.parts)),
        lambda p: p.overlap * p.rows_sent * p.embed,
        True,
    ),
    "ring": Strategy(
        lambda p: p.buffer(p.part * p.devices, p.local_experts, 1 / (p.devices * p.parts)),
        lambda p: p.tokens * p.embed,
        True,
    ),
    "dense": Strategy(_all_experts, lambda p: p.weights / 2, False),  # sent once, where tokens are sent and returned
    "local": Strategy(_all_experts, lambda p: 0, False),
}
"""Strategies by name.

- ``"a2a"``: an all-to-all sends each token to the devices of its experts; another returns the results.
- ``"ring"``: tokens are all-gathered, results are reduce-scattered.
- ``"dense"``: the experts' weights are all-gathered, tokens stay.
- ``"local"``: tokens and experts share no axis, so that nothing is exchanged. Never chosen otherwise.
"""


def choose_exchange(problem: Exchange) -> Exchange:
    """The exchange with its named strategy; without a name, with the one of the lowest :attr:`Strategy.cost` (of equal ones, the
    first in :data:`STRATEGIES`).

    Raises:
      MeshparError: an unknown strategy, or "dense" where the order of the mesh axes does not allow it; blocks of codes that do not
        divide a token.
    """
    named, strategy = [name for name in STRATEGIES if name != "local"], problem.strategy
    if strategy is not None and strategy not in named:
        text = f"strategy must be one of {', '.join(named)} or None, got {strategy!r}"
        raise refused(text, "leave strategy out for the default")
    if not problem.over:
        strategy = "local"
    elif strategy == "dense" and not problem.can_gather_experts:
        text = 'strategy="dense" cannot all-gather experts over an axis that is major to another axis of theirs'
        raise refused(text, 'another order of the axes of `expert`, or strategy="a2a"')
    elif strategy is None:
        possible = [name for name in named if name != "dense" or problem.can_gather_experts]
        strategy = min(possible, key=lambda name: STRATEGIES[name].cost(problem))
    moves = STRATEGIES[strategy].moves_tokens
    if moves and problem.exchange == "float8" and problem.embed > CODE_BLOCK and problem.embed % CODE_BLOCK:
        raise refused(
            f'exchange="float8" has a scale for each {CODE_BLOCK} elements of a token, which do not divide its '
            f"{problem.embed} elements",
            f"a multiple of {CODE_BLOCK}, or leave exchange out",
        )
    return replace(problem, strategy=strategy, overlap=math.gcd(problem.overlap, problem.tokens) if moves else 1)

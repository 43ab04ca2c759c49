"""The options and the operands of `ring_attention`: two records with checks."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar_kernels.attention.flash import K_CHUNK, Q_CHUNK, Softmax
from meshpar_kernels.attention.masks import Mask

OP = "ring_attention"
DTYPES = ("float32", "bfloat16", "float16", "float64")
ORDERS = ("contiguous", "zigzag")
STRATEGIES = ("ring", "ulysses", "ring+ulysses", "gathered")


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """The distribution of the sequence over devices, and the arrays sent: `ring_attention(..., parallel=ContextParallel(...))`.

    No result depends on `strategy`, `balance`, `both_ways` and `scatter`.

    Attributes:
      strategy: "ring", "ulysses", "ring+ulysses" or "gathered", as `ring_attention` describes them; None: the strategy
        with the least time by `attention_costs`, if its heads divide and it needs at most 2 GiB in addition to operands
        and results; ring only from 256K tokens or 8K tokens a device on, if another fits and has as little work.
      order: "zigzag": the tokens (of q, k, v, segment ids and the result) are in the order of `zigzag`, in which each
        device has an early and a late block, so that causal work is balanced. Masks use the true positions of tokens.
        An int32 array [Sq/A]: the positions of the tokens, the same in all rows (Sq = Skv), for another order
        (`mp.data.balance`).
      balance: whether the ring balances causal work of contiguous tokens: devices i and A - 1 - i exchange the second half of
        their queries. None: where that takes less time by `attention_costs`.
      both_ways: whether the ring sends in both directions, which uses both directions of its links.
      scatter: how "gathered" reduces the gradients of keys and values, over one axis after another: "xla" by XLA's
        reduce-scatters, "ring" by rings of collective-permutes. None: "ring" over several axes, for which XLA on TPUs
        uses all-reduces with twice the bytes.

    Example:
      out = ring_attention(q, k, v, "seq", causal=True, parallel=ContextParallel(strategy="ulysses"))

    Raises:
      ValueError: an order that does not exist. `ring_attention` checks the other values.
    """

    strategy: str | None = None
    order: str | jax.Array = "contiguous"
    both_ways: bool = True
    scatter: str | None = None
    balance: bool | None = None

    def __post_init__(self) -> None:
        """Check the order. Raises ValueError."""
        if isinstance(self.order, str) and self.order not in ORDERS:
            raise ValueError(f"{OP}: order must be one of {ORDERS}, got {self.order!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `ring_attention`, which documents them.

    Attributes:
      zigzag: tokens are in zig-zag order for so many devices, which may differ from the mesh's; 1: in order.

    Raises:
      ValueError: a value that is invalid for all operands.
    """

    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    strategy: str | None = None
    zigzag: int = 1
    both_ways: bool = True
    implementation: str | None = None
    chunks: tuple[int, int] = (Q_CHUNK, K_CHUNK)
    scatter: str | None = None
    balance: bool | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises ValueError."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"{OP}: window={self.window} must be at least 1, the query itself")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"{OP}: softcap={self.softcap} must be above 0")
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ValueError(f"{OP}: strategy must be one of {STRATEGIES} or None, got {self.strategy!r}")
        if self.scatter not in (None, "xla", "ring"):
            raise ValueError(f"{OP}: scatter must be 'xla', 'ring' or None, got {self.scatter!r}")
        if min(self.chunks) < 1:
            raise ValueError(f"{OP}: chunks={self.chunks} must be at least 1")
        if self.zigzag < 1:
            raise ValueError(f"{OP}: zigzag={self.zigzag} must be at least 1")

    def softmax(self, head_dim: int) -> Softmax:
        """Mask and scores of heads of this width."""
        scale = head_dim**-0.5 if self.scale is None else float(self.scale)
        return Softmax(Mask(self.causal, self.window), scale, self.softcap, self.chunks)


class Operands(NamedTuple):
    """Arrays of one device, or their shapes and dtypes.

    Attributes:
      q: [B, Q, H, D]; k: [B, K, Hkv, D]; v: [B, K, Hkv, Dv].
      q_seg, k_seg: int [B, Q] and [B, K], or None; without k_seg the keys have the segments of the queries.
      pos: int32 [Q], the positions of the queries and keys; None: they follow from the order of the tokens.
    """

    q: Any
    k: Any
    v: Any
    q_seg: Any = None
    k_seg: Any = None
    pos: Any = None

    @property
    def key_segments(self) -> jax.Array | None:
        """Segment ids of the keys."""
        return self.q_seg if self.k_seg is None else self.k_seg

    @property
    def segments(self) -> int:
        """Number of arrays of segment ids."""
        return (self.q_seg is not None) + (self.k_seg is not None)

    def check(self, devices: int, zigzag: int) -> None:
        """Check that the operands fit together, for this number of devices and this order of tokens.

        Raises:
          ValueError: with the operand that does not fit.
        """
        q, k, v, q_seg, k_seg, pos = self
        if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
            raise ValueError(
                f"{OP}: q, k and v must be [B, S, H, D], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
            )
        fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
        if not fits:
            raise ValueError(
                f"{OP}: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit: they are [B, Sq, H, D], "
                f"[B, Skv, Hkv, D] and [B, Skv, Hkv, Dv]"
            )
        if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
            raise ValueError(f"{OP}: {q.shape[2]} heads of q are no multiple of the {k.shape[2]} heads of k and v")
        if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
            raise ValueError(
                f"{OP}: q, k and v must have one dtype, {', '.join(DTYPES)}; got {q.dtype}, {k.dtype}, {v.dtype}"
            )
        if q_seg is None and k_seg is not None:
            raise ValueError(f"{OP}: segment ids are of queries and keys, or of neither")
        if q_seg is not None and k_seg is None and q.shape[1] != k.shape[1]:
            raise ValueError(f"{OP}: segment ids of {q.shape[1]} queries and {k.shape[1]} keys are two arrays, a pair")
        for name, seg, x in (("queries", q_seg, q), ("keys", k_seg, k)):
            if seg is not None and (seg.shape != x.shape[:2] or not jnp.issubdtype(seg.dtype, jnp.integer)):
                raise ValueError(
                    f"{OP}: segment ids of the {name} must be int {list(x.shape[:2])}, got {seg.dtype}{list(seg.shape)}"
                )
        together = q.shape[1] == k.shape[1] and zigzag == 1
        if pos is not None and not (together and pos.shape == q.shape[1:2] and pos.dtype == jnp.int32):
            raise ValueError(
                f"{OP}: positions must be int32 {list(q.shape[1:2])}, of as many queries as keys, and not in zig-zag order; "
                f"got {pos.dtype}{list(pos.shape)} for {k.shape[1]} keys"
            )
        for name, x in (("queries", q), ("keys", k)):
            if zigzag > 1 and x.shape[1] * devices % (2 * zigzag):
                raise ValueError(
                    f"{OP}: zig-zag order is made of 2·{zigzag} blocks, but there are {x.shape[1] * devices} {name} "
                    f"({x.shape[1]} on each of {devices} devices); pad to a multiple of {2 * zigzag}"
                )

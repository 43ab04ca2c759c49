"""Cost of each attention strategy on one device: transfers, memory, FLOPs and seconds; and the choice of a strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from meshpar_kernels.attention import ring, ulysses
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.masks import visible_pairs
from meshpar_kernels.attention.options import STRATEGIES

RING_FROM = 256 * 1024
"""Number of tokens from which ring attention is chosen by its estimated time; with fewer tokens only if nothing else fits."""

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hardware rates of one device, by default of a TPU v5p (JAX scaling book).

    Attributes:
      flops: FLOP/s of dense matmuls.
      link: bytes/s in one direction over one link of a ring whose directions can be used at the same time.
      memory_bandwidth: bytes/s.
      latency: seconds of one hop.
      memory: bytes that attention may allocate in addition to its operands and results.
    """

    flops: float = 4.59e14
    link: float = 9e10
    memory_bandwidth: float = 2.77e12
    latency: float = 1e-6
    memory: float = 2 * GIB


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of one strategy.

    Attributes:
      op: "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
      shape, dtype: of the operand on one device.
      times: number of executions.
      why: name of the arrays that are sent, for reports.
      step: of a permute: distance on the ring.
      stage: (mesh axis, its size); None: all axes.
    """

    op: str
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int = 1
    step: int = 1
    stage: tuple[str, int] | None = None

    def bytes(self, devices: int) -> float:
        """Bytes that a device sends in total; `devices`: number of devices on all axes."""
        devices = devices if self.stage is None else self.stage[1]
        full = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        part = {"all-gather": devices - 1, "collective-permute": 1}.get(self.op, (devices - 1) / devices)
        return full * part * self.times

    def seconds(self, devices: int, machine: Machine) -> float:
        """Seconds on a ring of devices with links in both directions."""
        devices = devices if self.stage is None else self.stage[1]
        full = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        hops = {"collective-permute": abs(self.step)}.get(self.op, devices // 2)
        carried = {
            "all-gather": full * (devices - 1) / 2,
            "reduce-scatter": full * (devices - 1) / devices / 2,
            "all-to-all": full * devices / 8,  # traffic over the bisection of the ring
            "collective-permute": full * min(abs(self.step), devices - abs(self.step)),
        }[self.op]
        if self.op == "collective-permute" and self.stage is not None and devices > 2:
            carried /= 2  # blocks of a stage are sent in both directions at once
        return self.times * (hops * machine.latency + carried / machine.link)


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """Cost of one strategy on the device with the most work; of forward and backward pass together unless stated
    otherwise.

    Attributes:
      forward, backward: the collectives of each pass.
      bytes_sent: of both passes.
      memory: largest number of bytes, in the backward pass, in addition to operands, results and their gradients.
      flops: of 7 matmuls over unmasked pairs: 2 in the forward pass, 5 in the backward pass.
      seconds: estimate. Transfers of "ring" are overlapped with the attention, transfers of the other strategies are
        not.
      refused: the reason why this strategy cannot run; None if it can.
    """

    strategy: str
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    bytes_sent: float
    memory: float
    flops: float
    seconds: float
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class AttentionCosts:
    """Cost of all strategies, and the chosen one.

    Attributes:
      of: cost by strategy.
      strategy: the chosen strategy.
      reason: the reason for the choice, in words.
    """

    of: dict[str, AttentionCost]
    strategy: str
    reason: str


def sends(c: Context, strategy: str, q: Any, k: Any, v: Any, segments: int) -> tuple[list[Sent], list[Sent]]:
    """The collectives that one device takes part in: (forward pass, backward pass).

    Args:
      q, k, v: shapes and dtypes on one device.
      segments: number of arrays of segment ids: 0, 1 (queries and keys have the same) or 2.
    """
    if c.devices == 1:
        return [], []
    keys = [("keys", k.shape, k.dtype), ("values", v.shape, v.dtype)]
    ids = [("their segment ids", k.shape[:2], jnp.int32)] if segments else []
    wide = jnp.float32
    out_shape = (*q.shape[:3], v.shape[3])
    if strategy == "gathered":
        there = [Sent("all-gather", s, d, f"{name} of all devices") for name, s, d in keys + ids]
        back, left = [], c.devices
        for axis, size in c.stages:
            for name, s, _ in keys:
                full, why = (s[0], s[1] * left, *s[2:]), f"gradients of {name}, summed"
                block = (s[0], s[1] * left // size, *s[2:])
                back.append(
                    Sent("collective-permute", block, wide, why, size - 1, stage=(axis, size))
                    if c.ring_scatter
                    else Sent("reduce-scatter", full, wide, why, stage=(axis, size))
                )
            left //= size
        return there, [*there, *back]
    if strategy == "ulysses":
        many = ulysses.copies(k.shape[2], c.devices)
        more = f", each sent to {many} devices" if many > 1 else ""
        copied = [(name, (*s[:2], s[2] * many, s[3]), d) for name, s, d in keys]
        into = [Sent("all-to-all", s, d, f"{name} of this device's heads{more}") for name, s, d in copied]
        full = Sent("all-to-all", q.shape, q.dtype, "queries of this device's heads")
        into += [Sent("all-gather", x.shape[:2], jnp.int32, "segment ids of all tokens") for x in (q, k)[:segments]]
        there = [full, *into, _ulysses(out_shape, q.dtype, "results back to their tokens"),
                 _ulysses(q.shape[:3], wide, "log-sum-exp back to their tokens")]  # fmt: skip
        per_row = [
            _ulysses(q.shape[:3], wide, f"{name} of this device's heads")
            for name in ("log-sum-exp", "row sum of grad·out")
        ]
        home = [(name, (*s[:2], s[2] * many, s[3]), wide if many > 1 else d) for name, s, d in keys]
        back = [full, *into, _ulysses(out_shape, q.dtype, "gradients of this device's heads"), *per_row,
                _ulysses(q.shape, q.dtype, "gradients of queries back to their tokens"),
                *(_ulysses(s, d, f"gradients of {name} back to their tokens") for name, s, d in home)]  # fmt: skip
        return there, back
    there, back = [], []
    for s in ring.streams(c, q.shape[1], k.shape[1]):
        way = "up" if s.step > 0 else "down"
        for name, shape, dtype in keys + ids:
            part = (shape[0], s.high - s.low, *shape[2:])
            there.append(Sent("collective-permute", part, dtype, f"{name} go {way} the ring", s.hops))
        for name, shape, _ in keys:
            part = (shape[0], s.high - s.low, *shape[2:])
            if s.hops > 1:
                why = f"gradients of {name} go {way} with them"
                back.append(Sent("collective-permute", part, wide, why, s.hops - 1))
            back.append(Sent("collective-permute", part, wide, f"gradients of {name} go home", step=s.hops))
    return there, [*there, *back]


def _ulysses(shape: Sequence[int], dtype: Any, why: str) -> Sent:
    return Sent("all-to-all", tuple(shape), dtype, why)


def costs(c: Context, q: Any, k: Any, v: Any, *, segments: int = 0, machine: Machine | None = None) -> AttentionCosts:
    """Cost of every strategy, and the chosen one: see `attention_costs`. q, k, v: shapes and dtypes on one device."""
    m = Machine() if machine is None else machine
    of = {name: _cost(c, name, q, k, v, segments, m) for name in STRATEGIES}
    return AttentionCosts(of, *_choose(of, k.shape[1] * c.devices, m))


def work(c: Context, strategy: str, q: Any, k: Any, v: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """(FLOPs of the device with the most work, bytes in addition to operands and results), of the forward and of the
    backward pass.

    FLOPs count two matmuls over unmasked pairs in the forward pass, five in the backward pass. Shapes are of one
    device.
    """
    batch, each, heads, _ = q.shape
    pairs = visible_pairs(c.softmax.mask, c.devices, each * c.devices, k.shape[1] * c.devices, c.zigzag)
    most = max(pairs) if strategy != "ulysses" else math.ceil(sum(pairs) / c.devices)
    one = 2.0 * batch * heads * most
    return (
        (one * (q.shape[3] + v.shape[3]), _memory(c, strategy, q, k, v, backward=False)),
        (one * (3 * q.shape[3] + 2 * v.shape[3]), _memory(c, strategy, q, k, v, backward=True)),
    )


def _cost(c: Context, strategy: str, q: Any, k: Any, v: Any, segments: int, m: Machine) -> AttentionCost:
    """The cost of one strategy, forward and backward: transfers, bytes sent, memory, FLOPs and seconds; infinite if it
    is refused.

    Transfers of a ring are overlapped with its computation; transfers of the other strategies are not.
    """
    refused = ulysses.refusal(q.shape[2], k.shape[2], c.devices) if strategy == "ulysses" else None
    if refused is not None:
        return AttentionCost(strategy, (), (), 0.0, 0.0, 0.0, math.inf, refused)
    sent = sends(c, strategy, q, k, v, segments)
    works = work(c, strategy, q, k, v)
    flops, memory = sum(w[0] for w in works), max(w[1] for w in works)
    comm = sum(s.seconds(c.devices, m) for s in (*sent[0], *sent[1]))
    seconds = flops / m.flops
    if strategy == "ring":
        # two streams use links of their own; every hop reads and writes its accumulators
        moving = ring.streams(c, q.shape[1], k.shape[1])
        hops = max((s.hops for s in moving), default=0)
        touched = math.prod(q.shape[:3]) * (q.shape[3] + v.shape[3]) * 4 * 2 * hops
        seconds = max(seconds, comm / max(1, len(moving))) + touched / m.memory_bandwidth
    else:
        seconds += comm
    total = sum(s.bytes(c.devices) for s in (*sent[0], *sent[1]))
    return AttentionCost(strategy, tuple(sent[0]), tuple(sent[1]), total, memory, flops, seconds)


def _memory(c: Context, strategy: str, q: Any, k: Any, v: Any, *, backward: bool) -> float:
    """Bytes in addition to operands and results: scores of one chunk, received blocks, float32 accumulators, chunked
    copies."""

    def size(*xs: Any, wide: bool = False) -> float:
        return sum(math.prod(x.shape) * (4 if wide else jnp.dtype(x.dtype).itemsize) for x in xs)

    chunks = min(c.softmax.chunks[0], q.shape[1]), min(c.softmax.chunks[1], k.shape[1])
    split = c.devices if strategy == "ulysses" else 1
    block = q.shape[0] * q.shape[2] // split * math.prod(chunks) * 4.0
    # accumulators of the results, or of the queries' gradients; scores and weights, in the backward pass their gradients too
    weighted = size(q, wide=True) if backward else 4.0 * math.prod(q.shape[:3]) * v.shape[3]
    base = weighted + block * (4 if backward else 2) + size(q) + (size(q) + weighted if backward else 0)
    keys, grads = size(k, v), size(k, v, wide=True) if backward else 0.0
    if c.devices == 1:
        return base + grads
    if strategy == "gathered":
        # on rings also two sent and two received blocks of one of the gradients
        first = next(n for _, n in c.stages if n > 1)
        moving = max(size(k, wide=True), size(v, wide=True)) * min(1.0, 4 / first)
        return base + c.devices * (keys + grads + moving * (backward and c.ring_scatter))
    if strategy == "ulysses":
        rest = size(q) * (2 if backward else 1)  # with the gradients of the results
        return base + rest + ulysses.copies(k.shape[2], c.devices) * (keys + grads)
    # a block's contribution; local K/V and K/V in flight; gradients of the local K/V, of the received ones, in flight,
    # and of one block
    return base + weighted + 2 * keys + 4 * grads


def _choose(of: dict[str, AttentionCost], tokens: int, m: Machine) -> tuple[str, str]:
    """(name of the strategy to use, the reason in words).

    Among the strategies that can run and fit the memory it is the fastest; below `RING_FROM` tokens a ring is only used
    if nothing else fits. If none fits, it is the one that needs the least memory.
    """
    able = {name: cost for name, cost in of.items() if cost.refused is None}
    fit = {name: cost for name, cost in able.items() if cost.memory <= m.memory}
    limit = f"{m.memory / GIB:.3g} GiB"
    if not fit:
        name = _least(able, lambda cost: cost.memory)
        return (
            name,
            f"none stays within {limit} in addition to its operands; {name} needs the least, {_gib(able[name])}",
        )
    short = tokens < RING_FROM and len(fit) > 1
    names = [n for n in fit if n != "ring"] if short else list(fit)
    name = _least({n: fit[n] for n in names}, lambda cost: cost.seconds)
    out = [f"{n}: {cost.refused}" for n, cost in of.items() if cost.refused is not None]
    out += [f"{n} needs {_gib(cost)}, above {limit}" for n, cost in able.items() if n not in fit]
    if short and "ring" in fit:
        out.append(f"ring pays from {RING_FROM // 1024}K tokens")
    why = f"{name} takes the least time of those that can" if len(names) > 1 else f"{name} is left"
    return name, "; ".join([why, *out])


def _least(of: dict[str, AttentionCost], key: Callable[[AttentionCost], float]) -> str:
    return min(of, key=lambda name: key(of[name]))


def _gib(cost: AttentionCost) -> str:
    return f"{cost.memory / GIB:.3g} GiB"

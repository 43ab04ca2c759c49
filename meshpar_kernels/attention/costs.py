"""Cost of each attention strategy on one device: transfers, memory, FLOPs and seconds; and the choice of a strategy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels._numerics import wide
from meshpar_kernels.attention import ring, ulysses
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.masks import visible_pairs
from meshpar_kernels.attention.options import STRATEGIES

RING_FROM = 256 * 1024, 8 * 1024
"""Number of tokens, of all devices or of one, from which ring attention is chosen by its estimated time; with fewer tokens
only if nothing else fits, or has as little work."""

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
      step: of a permute: number of its messages on the busiest link of a ring.
      stage: (mesh axes, number of devices on them); None: all axes.
      route: of a permute: to the "next" device; "both" if another one runs in the other direction meanwhile; "any next" and
        "any both" if the ring may visit the devices in any order; "mirror": to device A - 1 - i.
      hidden: FLOPs of the attention that are computed meanwhile; infinite for the hops of a ring.
    """

    op: str
    shape: tuple[int, ...]
    dtype: Any
    why: str
    times: int = 1
    step: int = 1
    stage: tuple[tuple[str, ...], int] | None = None
    route: str = "next"
    hidden: float = 0.0

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
            "collective-permute": full
            * min(abs(self.step), devices - abs(self.step))
            / (2 if self.route.endswith("both") else 1),
        }[self.op]
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
      seconds: estimate. The hops of a ring are overlapped with the attention, and the queries of a balanced one with the
        attention to local keys; other transfers are not.
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
      c: of this strategy (`ready`).
      q, k, v: shapes and dtypes on one device.
      segments: number of arrays of segment ids: 0, 1 (queries and keys have the same) or 2.
    """
    if c.devices == 1:
        return [], []
    if c.inner:
        return _exchanged(c, q, k, v, segments)
    keys = [("keys", k.shape, k.dtype), ("values", v.shape, v.dtype)]
    ids = [("their segment ids", k.shape[:2], jnp.int32)] if segments else []
    ids += [("their positions", k.shape[1:2], jnp.int32)] if c.placed else []
    acc = wide(q)
    if strategy == "gathered":
        there = [Sent("all-gather", s, d, f"{name} of all devices") for name, s, d in keys + ids]
        back, left = [], c.devices
        for axis, size in c.stages:
            for name, s, _ in keys:
                op, length, times = "reduce-scatter", s[1] * left, 1
                if c.ring_scatter:
                    op, length, times = "collective-permute", length // size, size - 1
                why, stage, route = f"gradients of {name}, summed", ((axis,), size), "both" if size > 2 else "next"
                back.append(Sent(op, (s[0], length, *s[2:]), acc, why, times, stage=stage, route=route))
            left //= size
        return there, [*there, *back]
    there, back = [], []
    moving = ring.streams(c, q.shape[1], k.shape[1])
    route = "any " * ring.any_order(c, q.shape[1], k.shape[1]) + ("both" if len(moving) > 1 else "next")
    hop = functools.partial(Sent, "collective-permute", hidden=math.inf, route=route)
    for s in moving:
        way = "up" if s.step > 0 else "down"
        for name, shape, dtype in keys + ids:
            part = tuple(s.high - s.low if n == (len(shape) > 1) else size for n, size in enumerate(shape))
            there.append(hop(part, dtype, f"{name} go {way} the ring", s.hops))
        for name, shape, _ in keys:
            part = (shape[0], s.high - s.low, *shape[2:])
            if s.hops > 1:
                back.append(hop(part, acc, f"gradients of {name} go {way} with them", s.hops - 1))
            back.append(hop(part, acc, f"gradients of {name} go home", step=s.hops))
    return [*_swaps(c, q, v, segments, 0), *there], [*_swaps(c, q, v, segments, 1), *there, *back]


def _swaps(c: Context, q: Any, v: Any, segments: int, way: int) -> list[Sent]:
    """The permutes of a balanced ring between mirrored devices. Operands are sent while the local keys attend."""
    if not c.balanced:
        return []
    rows, acc = (q.shape[0], q.shape[1] // 2, q.shape[2]), wide(q)
    half, out = ((*rows, q.shape[3]), q.dtype), ((*rows, v.shape[3]), q.dtype)
    into = [(*half, "queries"), *[(rows[:2], jnp.int32, "their segment ids")][:segments]]
    home = [(*out, "results"), (rows, acc, "log-sum-exps")]
    if way:
        into += [(*out, "gradients of results"), (rows, acc, "log-sum-exps"), (rows, acc, "row sums of grad·out")]
        home = [(*half, "gradients of queries")]
    swap = functools.partial(Sent, "collective-permute", route="mirror", step=max(1, max(n for _, n in c.stages) // 4))
    there = [swap(s, d, f"{name} of the mirrored device") for s, d, name in into]
    local = sum(visible_pairs(c.softmax.mask, 1, q.shape[1], q.shape[1], 1)) * _pair_flops(q, v)[way]
    share = local / sum(s.bytes(1) for s in there)
    there = [dataclasses.replace(s, hidden=share * s.bytes(1)) for s in there]
    return there + [swap(s, d, f"{name} back to their device") for s, d, name in home]


def _exchanged(c: Context, q: Any, k: Any, v: Any, segments: int) -> tuple[list[Sent], list[Sent]]:
    """`sends` of a strategy that exchanges heads, with the hops of the ring over the other axes."""
    inner, outer, acc, here = c.exchange, c.outer, wide(q), "of this device's heads"
    many, out, rows = ulysses.copies(k.shape[2], inner.devices), (*q.shape[:3], v.shape[3]), (q.shape[:3], wide(q))
    more = f", each sent to {many} devices" if many > 1 else ""
    copied = [((*x.shape[:2], x.shape[2] * many, x.shape[3]), s) for x, s in ((k, "keys"), (v, "values"))]
    ids = [(x.shape[:2], "segment ids") for x in (q, k)[:segments]] + [(q.shape[1:2], "positions")] * c.placed

    def sent(shape: tuple[int, ...], dtype: Any, why: str, op: str = "all-to-all") -> Sent:
        return Sent(op, shape, dtype, why, stage=(inner.axes, inner.devices))

    into = [sent(q.shape, q.dtype, f"queries {here}"), *(sent(s, q.dtype, f"{x} {here}{more}") for s, x in copied)]
    into += [sent(s, jnp.int32, f"{name} of all tokens", "all-gather") for s, name in ids]
    home = [sent(out, q.dtype, "results back to their tokens"), sent(*rows, "log-sum-exp back to their tokens")]
    given = [sent(out, q.dtype, f"gradients {here}"), sent(*rows, f"log-sum-exp {here}")]
    given += [sent(*rows, f"row sum of grad·out {here}")]
    grads = [sent(q.shape, q.dtype, "gradients of queries back to their tokens")]
    grads += [sent(s, acc if many > 1 else q.dtype, f"gradients of {x} back to their tokens") for s, x in copied]
    there, back = (
        [dataclasses.replace(s, stage=(outer.axes, outer.devices)) for s in hops]
        for hops in sends(outer, "ring", *_of_group(c, q, k, v), segments)
    )
    return [*into, *there, *home], [*into, *given, *back, *grads]


def _of_group(c: Context, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v of one device after an exchange of heads."""
    n, many = c.exchange.devices, ulysses.copies(k.shape[2], c.exchange.devices)

    def part(x: Any, copies: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * n, x.shape[2] * copies // n, x.shape[3]), x.dtype)

    return part(q, 1), part(k, many), part(v, many)


def ready(c: Context, strategy: str, q: Any, k: Any, v: Any, segments: int, m: Machine) -> Context | str:
    """The context of a strategy, with the axes over which it exchanges heads and whether its ring is balanced; or the
    reason why it cannot run."""
    inner = ulysses.inner_axes(c, strategy, q.shape[2], k.shape[2])
    if isinstance(inner, str):
        return inner
    c = dataclasses.replace(c, inner=inner)
    plain, balanced = (dataclasses.replace(c, balanced=x) for x in (False, True))
    if c.balanced is False or strategy == "gathered" or c.outer.devices == 1:
        return plain
    if not c.in_order or q.shape[1] != k.shape[1] or _of_group(c, q, k, v)[0].shape[1] % 2:
        return "a balanced ring needs as many queries as keys, in order, an even number" if c.balanced else plain

    def seconds(c: Context) -> float:
        return _cost(c, strategy, q, k, v, segments, m).seconds

    even = c.balanced or max(_pairs(balanced, q, k)) < max(_pairs(plain, q, k))
    return balanced if even and (c.balanced or seconds(balanced) < seconds(plain)) else plain


def costs(c: Context, q: Any, k: Any, v: Any, *, segments: int = 0, machine: Machine | None = None) -> AttentionCosts:
    """Cost of every strategy, and the chosen one: see `attention_costs`. q, k, v: shapes and dtypes on one device."""
    m = Machine() if machine is None else machine
    contexts = {name: ready(c, name, q, k, v, segments, m) for name in STRATEGIES if "+" not in name or len(c.axes) > 1}
    of = {name: _cost(c, name, q, k, v, segments, m) for name, c in contexts.items()}
    return AttentionCosts(of, *_choose(of, k.shape[1], c.devices, m))


def _pair_flops(q: Any, v: Any) -> tuple[float, float]:
    """FLOPs of a pair of a query and a visible key, all rows and heads of a device together: (forward, backward)."""
    one = 2.0 * q.shape[0] * q.shape[2]
    return one * (q.shape[3] + v.shape[3]), one * (3 * q.shape[3] + 2 * v.shape[3])


def _pairs(c: Context, q: Any, k: Any) -> list[float]:
    """The number of visible pairs for each device of one group of heads, per head of a device. Given positions are assumed
    to be balanced."""
    outer, lengths = c.outer, (q.shape[1] * c.devices, k.shape[1] * c.devices)
    pairs = visible_pairs(c.softmax.mask, outer.devices * (2 if c.balanced else 1), *lengths, c.zigzag)
    if c.balanced:
        pairs = [a + b for a, b in zip(pairs[::2], pairs[::-2], strict=True)]
    pairs = [sum(pairs) / len(pairs)] if c.placed else pairs
    return [n * outer.devices / c.devices for n in pairs]


def work(c: Context, strategy: str, q: Any, k: Any, v: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """(FLOPs of the device with the most work, bytes in addition to operands and results), of the forward and of the
    backward pass.

    FLOPs count two matmuls over unmasked pairs in the forward pass, five in the backward pass. Shapes are of one
    device.
    """
    most, flops = math.ceil(max(_pairs(c, q, k))), _pair_flops(q, v)
    return (
        (most * flops[0], _memory(c, strategy, q, k, v, backward=False)),
        (most * flops[1], _memory(c, strategy, q, k, v, backward=True)),
    )


def _cost(c: Context | str, strategy: str, q: Any, k: Any, v: Any, segments: int, m: Machine) -> AttentionCost:
    """The cost of one strategy, forward and backward: transfers, bytes sent, memory, FLOPs and seconds; infinite if it
    is refused, for the reason `c`.

    The hops of a ring are overlapped with its computation, and the operands of a balanced one with the attention to local
    keys; other transfers are not.
    """
    if isinstance(c, str):
        return AttentionCost(strategy, (), (), 0.0, 0.0, 0.0, math.inf, c)
    there, back = sends(c, strategy, q, k, v, segments)
    works = work(c, strategy, q, k, v)
    flops, memory = sum(w[0] for w in works), max(w[1] for w in works)
    hops = [s.seconds(c.devices, m) for s in (*there, *back) if s.hidden == math.inf]
    seconds = flops / m.flops
    if hops:
        # every hop reads and writes its accumulators
        moving = ring.streams(c.outer, *(x.shape[1] for x in _of_group(c, q, k, v)[:2]))
        touched = math.prod(q.shape[:3]) * (q.shape[3] + v.shape[3]) * 4 * 2 * max(s.hops for s in moving)
        seconds = max(seconds, sum(hops)) + touched / m.memory_bandwidth
    others = [s for s in (*there, *back) if s.hidden < math.inf]
    seconds += sum(max(0.0, s.seconds(c.devices, m) - s.hidden / m.flops) for s in others)
    total = sum(s.bytes(c.devices) for s in (*there, *back))
    return AttentionCost(strategy, tuple(there), tuple(back), total, memory, flops, seconds)


def _memory(c: Context, strategy: str, q: Any, k: Any, v: Any, *, backward: bool) -> float:
    """Bytes in addition to operands and results: scores of one chunk, received blocks, float32 accumulators, chunked
    copies."""

    def size(*xs: Any, wide: bool = False) -> float:
        return sum(math.prod(x.shape) * (4 if wide else jnp.dtype(x.dtype).itemsize) for x in xs)

    chunks = min(c.softmax.chunks[0], q.shape[1]), min(c.softmax.chunks[1], k.shape[1])
    split = c.exchange.devices
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
    if c.inner:
        base += size(q) * (2 if backward else 1)  # with the gradients of the results
        keys, grads = (ulysses.copies(k.shape[2], split) * x for x in (keys, grads))
    if c.outer.devices == 1:
        return base + keys + grads
    # a block's contribution; local K/V and K/V in flight; gradients of the local K/V, of the received ones, in flight,
    # and of one block; the results of a balanced ring's local keys, and the exchanged queries
    return base + weighted + 2 * keys + 4 * grads + (weighted + size(q) if c.balanced else 0)


def _choose(of: dict[str, AttentionCost], tokens: int, devices: int, m: Machine) -> tuple[str, str]:
    """(name of the strategy to use, the reason in words).

    Among the strategies that can run and fit the memory it is the fastest; below `RING_FROM` tokens a ring is only used
    if nothing else fits, or if it balances causal work that the others do not. If none fits, it is the one that needs
    the least memory.
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
    others = [cost.flops for n, cost in fit.items() if n != "ring"]
    few = tokens * devices < RING_FROM[0] and tokens < RING_FROM[1]
    short = few and "ring" in fit and bool(others) and fit["ring"].flops > 0.9 * min(others)
    names = [n for n in fit if n != "ring"] if short else list(fit)
    name = _least({n: fit[n] for n in names}, lambda cost: cost.seconds)
    out = [f"{n}: {cost.refused}" for n, cost in of.items() if cost.refused is not None]
    out += [f"{n} needs {_gib(cost)}, above {limit}" for n, cost in able.items() if n not in fit]
    if short:
        out.append(f"ring pays from {RING_FROM[0] // 1024}K tokens, or {RING_FROM[1] // 1024}K a device")
    why = f"{name} takes the least time of those that can" if len(names) > 1 else f"{name} is left"
    return name, "; ".join([why, *out])


def _least(of: dict[str, AttentionCost], key: Callable[[AttentionCost], float]) -> str:
    return min(of, key=lambda name: key(of[name]))


def _gib(cost: AttentionCost) -> str:
    return f"{cost.memory / GIB:.3g} GiB"

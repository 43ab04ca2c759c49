"""Ring attention: queries stay, and keys and values are sent round a ring (Liu et al. 2023), overlapped with the
attention to received keys.

The K/V of a device are sent in streams. If all devices see each other, one half of every device's tokens is sent up the
ring and the other half down, so that both directions of a link are used. With a window, full blocks are sent only as
far as a query sees them. Each send is issued before the attention to the received keys, so that XLA can hide it.

In the backward pass K and V are sent again, and their gradients with them, in float32, one hop behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels.attention.blocks import Layout
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.flash import Keys, Queries, merge, nothing
from meshpar_kernels.attention.masks import devices_seen
from meshpar_kernels.attention.options import Operands


@dataclasses.dataclass(frozen=True)
class Stream:
    """Tokens low…high-1 of every device, which are sent `hops` hops, in steps of +1 or -1 on the ring."""

    low: int
    high: int
    step: int
    hops: int


def streams(c: Context, q_len: int, k_len: int) -> list[Stream]:
    """The streams of K and V; lengths of one device. Segment ids are unknown at trace time, so they shorten no stream."""
    is_visible = [d for d in devices_seen(c.softmax.mask, c.devices, q_len, k_len, c.zigzag) if d]
    if not is_visible:
        return []
    # of the ways to split the offsets between up and down, the one with the fewest hops; then the most even
    cuts = range(len(is_visible) + 1) if c.both_ways else (len(is_visible),)

    def hops(cut: int) -> tuple[int, int]:
        return (is_visible[cut - 1] if cut else 0), (c.devices - is_visible[cut] if cut < len(is_visible) else 0)

    up, down = min((hops(cut) for cut in cuts), key=lambda h: (sum(h), max(h)))
    half = k_len // 2
    if up + down == c.devices - 1 and c.both_ways and c.devices > 2 and half:
        return [Stream(0, half, 1, c.devices - 1), Stream(half, k_len, -1, c.devices - 1)]
    return [Stream(0, k_len, step, n) for step, n in ((1, up), (-1, down)) if n]


@dataclasses.dataclass(frozen=True)
class Leg:
    """Consecutive hops in which the same streams (by index) arrive, and the same streams are sent on.

    Attributes:
      first: number of the first hop; hop 0 is the device's own block.
      count: number of hops.
      block_indices: streams that arrive.
      onward: streams that are sent on.
    """

    first: int
    count: int
    block_indices: tuple[int, ...]
    onward: tuple[int, ...]


def legs(moving: Sequence[Stream], start: int, *, first_alone: bool = False) -> list[Leg]:
    """The hops from `start` on; equal consecutive hops are joined to one leg (except the first one with `first_alone`)."""
    out: list[Leg] = []
    for t in range(start, max((s.hops for s in moving), default=0) + 1):
        block_indices, onward = (tuple(i for i, s in enumerate(moving) if s.hops >= n) for n in (t, t + 1))
        last = out[-1] if out else None
        same = last is not None and block_indices == onward == last.block_indices == last.onward
        if last is not None and same and not (first_alone and last.first == start):
            out[-1] = dataclasses.replace(last, count=last.count + 1)
        else:
            out.append(Leg(t, 1, block_indices, onward))
    return out


Cargo = tuple[jax.Array, jax.Array, jax.Array | None]
"""(k, v, segment ids or None)."""


def _load(moving: Sequence[Stream], k: jax.Array, v: jax.Array, seg: jax.Array | None) -> dict[int, Cargo]:
    def part(x: jax.Array, s: Stream) -> jax.Array:
        return lax.slice_in_dim(x, s.low, s.high, axis=1)

    return {i: (part(k, s), part(v, s), None if seg is None else part(seg, s)) for i, s in enumerate(moving)}


def _keys(c: Context, moving: Sequence[Stream], leg: Leg, cargo: dict[int, Cargo], t: Any, each: int) -> Keys:
    """The keys, values, positions and segment ids that have arrived after t hops, concatenated over the streams."""
    pos = [
        c.positions((c.rank() - moving[i].step * t) % c.devices, each, moving[i].low, moving[i].high)
        for i in leg.block_indices
    ]
    k, v, seg = zip(*(cargo[i] for i in leg.block_indices), strict=True)
    ids = None if seg[0] is None else jnp.concatenate(seg, 1)
    return Keys(jnp.concatenate(k, 1), jnp.concatenate(v, 1), jnp.concatenate(pos), ids)


def _lengths(moving: Sequence[Stream], leg: Leg) -> tuple[int, ...]:
    """Tokens of each stream among the received keys of a leg."""
    return tuple(moving[i].high - moving[i].low for i in leg.block_indices)


def _repeat(leg: Leg, step: Any, carry: Any) -> Any:
    """Run `step(carry, hop number)` for all hops of a leg, as a `lax.scan` if there are several; returns the carry."""
    if leg.count == 1:
        return step(carry, leg.first)
    hops = jnp.arange(leg.first, leg.first + leg.count, dtype=jnp.int32)
    return lax.scan(lambda carry, t: (step(carry, t), None), carry, hops)[0]


def forward(c: Context, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(float32 [B, Q, H, Dv], log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    q, k, v, q_seg, _ = x
    each, k_seg = k.shape[1], x.key_segments
    moving = streams(c, q.shape[1], each)
    own_block = Queries(q, c.positions(c.rank(), q.shape[1]), q_seg)
    cargo = _load(moving, k, v, k_seg)
    blocks = c.all_or_none(q.shape[1], each)
    if (
        sum(s.high - s.low for s in moving) == each and not blocks
    ):  # the streams together start with this device's block
        done, start = nothing(q, v.shape[3]), 0
    else:
        cargo = {i: c.shift(cargo[i], s.step) for i, s in enumerate(moving)}
        done, start = c.forward(own_block, Keys(k, v, c.positions(c.rank(), each), k_seg), Layout(c.in_order)), 1

    for leg in legs(moving, start):

        def hop(carry: Any, t: Any, leg: Leg = leg) -> Any:
            """Hop t of a leg: send the blocks that travel farther, and merge the attention over the received keys into
            the result."""
            done, cargo = carry
            sent = {i: c.shift(cargo[i], moving[i].step) for i in leg.onward}
            keys = _keys(c, moving, leg, cargo, t, each)
            is_visible = c.softmax.mask.any_visible(own_block.pos, keys.pos, q_seg, keys.seg)
            layout = Layout(parts=_lengths(moving, leg) if blocks else ())
            merged = lambda done: merge(done, c.forward(own_block, keys, layout))  # noqa: E731
            done = lax.cond(is_visible, merged, lambda done: done, done)
            return done, sent

        done, cargo = _repeat(leg, hop, (done, cargo))
    return done


def backward(
    c: Context, x: Operands, out: jax.Array, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Float32 gradients of q, k and v; arguments as in `gathered.backward`."""
    q, k, v, q_seg, _ = x
    each, k_seg = k.shape[1], x.key_segments
    moving = streams(c, q.shape[1], each)
    cargo = _load(moving, k, v, k_seg)
    cargo = {i: c.shift(cargo[i], s.step) for i, s in enumerate(moving)}
    own_block = Queries(q, c.positions(c.rank(), q.shape[1]), q_seg)
    own = Keys(k, v, c.positions(c.rank(), each), k_seg)
    d_q, d_k, d_v = c.backward(own_block, own, grad, lse, dots, out, Layout(c.in_order))
    blocks = c.all_or_none(q.shape[1], each)

    def through(d_q: jax.Array, keys: Keys, lengths: tuple[int, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(d_q plus the contribution of these keys, (d_k, d_v) of these keys)."""

        def block(d_q: jax.Array) -> Any:
            more, d_k, d_v = c.backward(own_block, keys, grad, lse, dots, out, Layout(parts=lengths if blocks else ()))
            return d_q + more, (d_k, d_v)

        zeros = _compat.same_varying(q, *(jnp.zeros(x.shape, jnp.float32) for x in (keys.k, keys.v)))[1:]
        is_visible = c.softmax.mask.any_visible(own_block.pos, keys.pos, q_seg, keys.seg)
        return lax.cond(is_visible, block, lambda d_q: (d_q, zeros), d_q)

    in_flight: dict[int, Any] = {}  # partial gradients of the received blocks
    for leg in legs(moving, 1, first_alone=True):  # no gradients are in flight yet
        lengths = _lengths(moving, leg)
        cuts = [sum(lengths[:n]) for n in range(1, len(lengths))]

        def hop(
            carry: Any, t: Any, leg: Leg = leg, cuts: Sequence[int] = cuts, lengths: tuple[int, ...] = lengths
        ) -> Any:
            """Hop t of a leg: send on the keys and their gradients so far, and add the gradients from the received
            keys.

            The gradients of a block travel with the block, one hop behind; the carry is (d_q, blocks, gradients of
            blocks).
            """
            d_q, cargo, in_flight = carry
            sent = {i: c.shift(cargo[i], moving[i].step) for i in leg.onward}
            followed = {i: c.shift(in_flight[i], moving[i].step) for i in leg.block_indices if i in in_flight}
            d_q, share = through(d_q, _keys(c, moving, leg, cargo, t, each), lengths)
            for i, *own_block in zip(leg.block_indices, *(jnp.split(x, cuts, 1) for x in share), strict=True):
                before = followed.get(i)
                followed[i] = own_block if before is None else jax.tree.map(jnp.add, before, own_block)
            return d_q, sent, followed

        d_q, cargo, in_flight = _repeat(leg, hop, (d_q, cargo, in_flight))
        for i in set(leg.block_indices) - set(leg.onward):  # send the gradients back to the devices of the keys
            s = moving[i]
            home = c.shift(in_flight.pop(i), -s.step * s.hops)
            d_k, d_v = (a.at[:, s.low : s.high].add(b) for a, b in zip((d_k, d_v), home, strict=True))
    return d_q, d_k, d_v

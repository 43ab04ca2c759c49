"""Ring attention: queries stay, and keys and values are sent round a ring (Liu et al. 2023), overlapped with the
attention to received keys.

The K/V of a device are sent in streams. If all devices see each other, one half of every device's tokens is sent up the
ring and the other half down, so that both directions of a link are used. With a window, full blocks are sent only as
far as a query sees them. Each send is issued before the attention to the received keys, so that XLA can hide it.

In the backward pass K and V are sent again, and their gradients with them, in float32, one hop behind.

A causal mask gives the last device A times the work of the first one. A balanced ring (`Context.balanced`) therefore lets
devices i and A - 1 - i exchange the second half of their queries, by one permute, and sends the results back by another.
Every pair of halves has the same work, and with it every device. The queries travel while their own device's keys
attend; so elsewhere they see only keys of other devices, all or none of each device, as in the contiguous ring. The
hops of one device differ in work: by a simulation without transfer times, 8 devices take 9/8 of the mean, since some
wait for keys; with `both_ways=False` they take the mean.

A ring in which all devices see each other may visit them in any order (`Context.order`): work and result of a device do
not depend on it. So its steps cross one link each, where the order of the ranks is no cycle of neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._numerics import wide
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.flash import Keys, Queries, merge, nothing
from meshpar_kernels.attention.library_calls_per_block import Layout
from meshpar_kernels.attention.masks import NOWHERE, devices_seen
from meshpar_kernels.attention.options import Operands


@dataclasses.dataclass(frozen=True)
class Stream:
    """Tokens low…high-1 of every device, which are sent `hops` hops, in steps of +1 or -1 on the ring."""

    low: int
    high: int
    step: int
    hops: int


def any_order(c: Context, q_len: int, k_len: int) -> bool:
    """Whether K and V pass all devices, so that the ring may visit these in any order; lengths of one device."""
    return len(_met(c, q_len, k_len)) == c.devices


def _met(c: Context, q_len: int, k_len: int) -> Sequence[int]:
    """The offsets d for which some device needs keys of the device d below it on the ring."""
    if c.placed or c.balanced or c.order:
        return range(c.devices)
    return devices_seen(c.softmax.mask, c.devices, q_len, k_len, c.zigzag)


def streams(c: Context, q_len: int, k_len: int) -> list[Stream]:
    """The streams of K and V; lengths of one device. Segment ids are unknown at trace time, so they shorten no stream."""
    is_visible = [d for d in _met(c, q_len, k_len) if d]
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


def _load(moving: Sequence[Stream], keys: Keys, placed: bool) -> dict[int, Keys]:
    """The arrays of each stream: keys, values, segment ids, and positions if they are `placed`."""

    def part(x: jax.Array | None, s: Stream, axis: int = 1) -> Any:
        return None if x is None else lax.slice_in_dim(x, s.low, s.high, axis=axis)

    pos = keys.pos if placed else None
    return {i: Keys(part(keys.k, s), part(keys.v, s), part(pos, s, 0), part(keys.seg, s)) for i, s in enumerate(moving)}


def _keys(c: Context, moving: Sequence[Stream], leg: Leg, cargo: dict[int, Keys], t: Any, each: int) -> Keys:
    """The keys, values, positions and segment ids that have arrived after t hops, concatenated over the streams."""
    k, v, pos, seg = zip(*(cargo[i] for i in leg.block_indices), strict=True)
    if not c.placed:
        pos = [c.positions(c.below(moving[i].step * t), each, moving[i].low, moving[i].high) for i in leg.block_indices]
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


def _halves(c: Context, own: Queries, *more: jax.Array) -> list[tuple[Queries, Sequence[Any]]]:
    """The queries that attend to received keys, and the same rows of the other arrays: all of this device, or balanced,
    its first half and the second half of the mirrored device."""
    if not c.balanced:
        return [(own, more)]
    each = own.x.shape[1]
    rows = own.x, own.seg, *more
    first, second = (jax.tree.map(lambda a, at=at: a[:, at], rows) for at in _cut(each))
    pos = own.pos[: each // 2], c.positions(c.devices - 1 - c.rank(), each, each // 2)
    return [(Queries(x, p, seg), rest) for p, (x, seg, *rest) in zip(pos, (first, c.mirrored(second)), strict=True)]


def _cut(length: int) -> tuple[slice, slice]:
    """Both halves of the tokens of a device."""
    return slice(length // 2), slice(length // 2, None)


def _elsewhere(c: Context, q: Queries, keys: Keys, each: int) -> Keys:
    """The keys, but none of the device of these queries: a balanced ring attends to them there."""
    if not c.balanced:
        return keys
    return keys._replace(pos=jnp.where(keys.pos // each == q.pos[0] // each, NOWHERE, keys.pos))


def _start(c: Context, x: Operands) -> tuple[list[Stream], Queries, Keys, dict[int, Keys], bool]:
    """(streams, local queries, local keys, the streams' first arrays, whether keys are visible by `all_or_none`)."""
    lengths = x.q.shape[1], x.k.shape[1]
    own, each = (c.own_positions(x.pos, n) for n in lengths)
    keys, moving = Keys(x.k, x.v, each, x.key_segments), streams(c, *lengths)
    return moving, Queries(x.q, own, x.q_seg), keys, _load(moving, keys, c.placed), c.all_or_none(*lengths)


def forward(c: Context, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(float32 [B, Q, H, Dv], log-sum-exp float32 [B, Q, H]) of this device's queries over all devices' keys."""
    q, v, each = x.q, x.v, x.k.shape[1]
    moving, own_block, own, cargo, blocks = _start(c, x)
    groups, home = [q for q, _ in _halves(c, own_block)], nothing(q, v.shape[3])

    def merged(done: Any, q: Queries, keys: Keys, layout: Layout) -> Any:
        """The result with the attention to these keys merged into it, if they are visible."""
        keys = _elsewhere(c, q, keys, each)
        is_visible = c.softmax.mask.any_visible(q.pos, keys.pos, q.seg, keys.seg)
        return lax.cond(is_visible, lambda done: merge(done, c.forward(q, keys, layout)), lambda done: done, done)

    # do the streams together start with this device's block?
    if sum(s.high - s.low for s in moving) == each and not blocks and not c.balanced:
        done, start = [home], 0
    else:
        cargo = {i: c.shift(cargo[i], s.step) for i, s in enumerate(moving)}
        done, start = [c.forward(own_block, own, Layout(c.in_order))], 1
    if c.balanced:
        kept, home = (jax.tree.map(lambda a, at=at: a[:, at], done[0]) for at in _cut(each))
        moved = merged(nothing(groups[1].x, v.shape[3]), groups[1], own, Layout(parts=(each,) if blocks else ()))
        done = [kept, moved]

    for leg in legs(moving, start):

        def hop(carry: Any, t: Any, leg: Leg = leg) -> Any:
            """Hop t of a leg: send the blocks that travel farther, and merge the attention over the received keys into
            the results."""
            done, cargo = carry
            sent = {i: c.shift(cargo[i], moving[i].step) for i in leg.onward}
            keys = _keys(c, moving, leg, cargo, t, each)
            layout = Layout(parts=_lengths(moving, leg) if blocks else ())
            return [merged(d, q, keys, layout) for d, q in zip(done, groups, strict=True)], sent

        done, cargo = _repeat(leg, hop, (done, cargo))
    if not c.balanced:
        return done[0]
    out, lse = c.mirrored((done[1][0].astype(q.dtype), done[1][1]))
    second = merge(home, (out.astype(wide(q)), lse))
    return jnp.concatenate([done[0][0], second[0]], 1), jnp.concatenate([done[0][1], second[1]], 1)


def backward(
    c: Context, x: Operands, out: jax.Array, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, float32 or wider; arguments as in `gathered.backward`."""
    q, each = x.q, x.k.shape[1]
    moving, own_block, own, cargo, blocks = _start(c, x)
    cargo = {i: c.shift(cargo[i], s.step) for i, s in enumerate(moving)}
    groups = _halves(c, own_block, grad, lse, dots, out)
    home, d_k, d_v = c.backward(own_block, own, grad, lse, dots, out, Layout(c.in_order))

    def through(d_q: jax.Array, n: int, keys: Keys, lengths: tuple[int, ...]) -> tuple[jax.Array, Any]:
        """(d_q of group n plus the contribution of these keys, (d_k, d_v) of these keys)."""
        q, rows = groups[n]
        keys = _elsewhere(c, q, keys, each)

        def block(d_q: jax.Array) -> Any:
            more, d_k, d_v = c.backward(q, keys, *rows, layout=Layout(parts=lengths if blocks else ()))
            return d_q + more, (d_k, d_v)

        zeros = _compat.same_varying(q.x, *(jnp.zeros(x.shape, wide(x)) for x in (keys.k, keys.v)))[1:]
        is_visible = c.softmax.mask.any_visible(q.pos, keys.pos, q.seg, keys.seg)
        return lax.cond(is_visible, block, lambda d_q: (d_q, zeros), d_q)

    d_qs = [home]
    if c.balanced:
        moved = _compat.same_varying(q, jnp.zeros(groups[1][0].x.shape, wide(q)))[1]
        moved, share = through(moved, 1, own, (each,))
        d_qs, d_k, d_v = [home[:, _cut(each)[0]], moved], d_k + share[0], d_v + share[1]

    in_flight: dict[int, Any] = {}  # partial gradients of the received blocks
    for leg in legs(moving, 1, first_alone=True):  # no gradients are in flight yet
        lengths = _lengths(moving, leg)
        cuts = [sum(lengths[:n]) for n in range(1, len(lengths))]

        def hop(
            carry: Any, t: Any, leg: Leg = leg, cuts: Sequence[int] = cuts, lengths: tuple[int, ...] = lengths
        ) -> Any:
            """Hop t of a leg: send on the keys and their gradients so far, and add the gradients from the received
            keys.

            The gradients of a block travel with the block, one hop behind; the carry is (d_q of each group, blocks,
            gradients of blocks).
            """
            d_qs, cargo, in_flight = carry
            sent = {i: c.shift(cargo[i], moving[i].step) for i in leg.onward}
            followed = {i: c.shift(in_flight[i], moving[i].step) for i in leg.block_indices if i in in_flight}
            keys = _keys(c, moving, leg, cargo, t, each)
            d_qs, shares = zip(*(through(d, n, keys, lengths) for n, d in enumerate(d_qs)), strict=True)
            share = functools.reduce(functools.partial(jax.tree.map, jnp.add), shares)
            for i, *own_block in zip(leg.block_indices, *(jnp.split(x, cuts, 1) for x in share), strict=True):
                before = followed.get(i)
                followed[i] = own_block if before is None else jax.tree.map(jnp.add, before, own_block)
            return list(d_qs), sent, followed

        d_qs, cargo, in_flight = _repeat(leg, hop, (d_qs, cargo, in_flight))
        for i in set(leg.block_indices) - set(leg.onward):  # send the gradients back to the devices of the keys
            s = moving[i]
            home_sent = c.shift(in_flight.pop(i), -s.step * s.hops)
            d_k, d_v = (a.at[:, s.low : s.high].add(b) for a, b in zip((d_k, d_v), home_sent, strict=True))
    if not c.balanced:
        return d_qs[0], d_k, d_v
    back = c.mirrored(d_qs[1].astype(q.dtype))
    return jnp.concatenate([d_qs[0], home[:, _cut(each)[1]] + back], 1), d_k, d_v

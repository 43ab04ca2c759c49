"""Routing on TPU (Mosaic): the kernel that chooses experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._numerics import cost
from meshpar_kernels.routing.reference import Choice, Router

MAX_COUNT = 1 << 24
"""Ranks are added in float32 on the matrix unit, which is exact below this number."""


BLOCK = 256
"""Most tokens of a block."""


def _block(experts: int, most: int) -> int:
    """Tokens of a block, at most `most`: a multiple of 128 for which 8 arrays of float32 logits fit VMEM; 0: none fits."""
    return min(most, int(_compat.tpu_vmem_limit() / (8 * 4 * max(experts, 1))) // 128 * 128)


def route_unsupported(logits: jax.Array, how: Router) -> Unsupported:
    """Reasons why the TPU kernel cannot route these logits; empty if it can."""
    reasons = []
    tokens, experts = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"logits are {logits.dtype}; the kernel takes float32 and bfloat16")
    if tokens >= MAX_COUNT:
        reasons.append(f"T={tokens} reaches 2^24, above which float32 counts are not exact")
    if not _block(experts, BLOCK):
        reasons.append(f"E={experts}: a block of logits does not fit {_compat.tpu_vmem_limit() >> 20} MiB of VMEM")
    if how.k > 128:
        reasons.append(f"k={how.k} is above 128: the choices of a token must fit one vector register")
    return Unsupported(reasons)


def _top(x: jax.Array) -> jax.Array:
    """Largest value over the experts (rows): [1, tokens]."""
    return jnp.max(x, axis=0, keepdims=True)


def _total(x: jax.Array) -> jax.Array:
    """Sum over the experts (rows): [1, tokens]."""
    return jnp.sum(x, axis=0, keepdims=True)


def _first(hit: jax.Array, row: jax.Array, none: int) -> jax.Array:
    """int32 [1, tokens]: lowest row with `hit`; `none` without one."""
    return jnp.min(jnp.where(hit, row, none), axis=0, keepdims=True)


def _best_groups(value: jax.Array, how: Router) -> jax.Array:
    """bool [E, tokens]: experts of the best groups. `value` is -inf for experts that cannot be chosen."""
    experts, tokens = value.shape
    groups, top_groups, group_top = how.groups, how.top_groups, how.group_top
    size = experts // groups
    totals = []
    row = lax.broadcasted_iota(jnp.int32, (size, tokens), 0)
    for g in range(groups):
        left = value[g * size : (g + 1) * size]
        total = None
        for _ in range(min(group_top, size)):
            best = _top(left)
            left = jnp.where(row == _first(left == best, row, size), -jnp.inf, left)
            total = best if total is None else total + jnp.where(best > -jnp.inf, best, 0.0)
        totals.append(total)
    # A group is among the best if fewer than `top_groups` groups precede it: a larger total, or an equal
    # one with a lower index.
    expert = lax.broadcasted_iota(jnp.int32, (experts, tokens), 0)
    allowed = jnp.zeros((experts, tokens), jnp.int32)
    for g, total in enumerate(totals):
        before = jnp.zeros((1, tokens), jnp.int32)
        for other, other_total in enumerate(totals):
            if other != g:
                ahead = other_total >= total if other < g else other_total > total
                before += ahead.astype(jnp.int32)
        inside = (expert >= g * size) & (expert < (g + 1) * size)
        allowed = jnp.where(inside & (before < top_groups), 1, allowed)
    return allowed > 0


def _route_kernel(*refs, tokens: int, how: Router, by_expert: bool):
    """One grid step: routes one block of tokens; experts are along the sublanes, tokens along the lanes.

    The grid is (blocks of tokens,), executed sequentially: the scratch buffer `seen` carries each expert's count from
    block to block.

    Args:
      refs: inputs in VMEM: logits [block, E], or [E, block] with `by_expert`, optionally bias [E, 1]; outputs: experts
        int32, weights float32 and ranks int32 [k, block], counts int32 [E, 1]; scratch: `seen` float32 [E, 1].
      tokens: T; the last block may exceed it.
      by_expert: the logits are transposed.
    """
    logits_ref, *bias_ref, expert_ref, weight_ref, rank_ref, counts_ref, seen = refs
    step = pl.program_id(0)

    @pl.when(step == 0)
    def start():
        seen[...] = jnp.zeros_like(seen)

    logits = logits_ref[...].astype(jnp.float32)
    logits = logits if by_expert else logits.T
    experts, block = logits.shape
    row = lax.broadcasted_iota(jnp.int32, (experts, block), 0)
    token = step * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
    bad = (logits != logits) | (logits == jnp.inf)
    top = _top(jnp.where(bad, -jnp.inf, logits))
    any_bad = _top(jnp.where(bad, 1.0, 0.0)) > 0
    valid = (top > -jnp.inf) & ~any_bad & (token < tokens)

    safe = jnp.where(valid, logits, 0.0)
    if how.score == "softmax":
        power = jnp.exp(safe - jnp.where(valid, top, 0.0))
        value = power / _total(power)
    else:
        value = 1.0 / (1.0 + jnp.exp(-safe))
    reachable = valid & (safe > -jnp.inf)
    key, choice_value = safe, value
    if bias_ref:
        bias = bias_ref[0][...].astype(jnp.float32)
        reachable &= bias == bias
        key = choice_value = value + bias
    if how.groups > how.top_groups:
        reachable &= _best_groups(jnp.where(reachable, choice_value, -jnp.inf), how)
    left = jnp.where(reachable, key, -jnp.inf)

    chosen = jnp.zeros((experts, block), jnp.float32)
    index, weight = [], []
    for _ in range(how.k):
        best = _top(left)
        index.append(_first((left == best) & (left > -jnp.inf), row, experts))
        selected = row == index[-1]
        chosen = jnp.where(selected, 1.0, chosen)
        left = jnp.where(selected, -jnp.inf, left)
        weight.append(_total(jnp.where(selected, value, 0.0)))
    if how.renormalize:
        total = sum(weight[1:], start=weight[0])
        inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        weight = [w * inverse for w in weight]

    # Rank: choices of the same expert by earlier tokens, in this block (a matmul with a strict
    # triangle; a token chooses an expert at most once) and in blocks before it.
    earlier = lax.broadcasted_iota(jnp.int32, (block, block), 0) < lax.broadcasted_iota(jnp.int32, (block, block), 1)
    before = seen[...] + jnp.dot(
        chosen.astype(jnp.bfloat16),
        jnp.where(earlier, 1.0, 0.0).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    for j in range(how.k):
        rank = _total(jnp.where(row == index[j], before, 0.0)).astype(jnp.int32)
        expert_ref[j : j + 1, :] = index[j]
        weight_ref[j : j + 1, :] = weight[j] * how.scale
        rank_ref[j : j + 1, :] = jnp.where(index[j] < experts, rank, -1)
    seen[...] += jnp.sum(chosen, axis=1, keepdims=True)
    counts_ref[...] = seen[...].astype(jnp.int32)


def route(logits: jax.Array, bias: jax.Array | None, how: Router, *, block: int = BLOCK) -> Choice:
    """As `reference.route`; reads the logits once, at most `block` tokens at a time.

    Each of the k rounds selects the largest key, and then the lowest expert with it. Results are written as [k, T],
    since an array with k lanes would be padded to 128. If E is no multiple of 128, the logits are read as [E, T] for
    the same reason; XLA chooses the layout of the matmul that produces them accordingly.
    """
    (tokens, experts), k = logits.shape, how.k
    by_expert = experts % 128 != 0
    block = min(_block(experts, block), pl.cdiv(tokens, 128) * 128)
    if by_expert:
        operands = [logits.T]
        in_specs = [pl.BlockSpec((experts, block), lambda i: (0, i))]
    else:
        operands = [logits]
        in_specs = [pl.BlockSpec((block, experts), lambda i: (i, 0))]
    per_expert = pl.BlockSpec((experts, 1), lambda i: (0, 0))
    if bias is not None:
        operands.append(bias.reshape(experts, 1))
        in_specs.append(per_expert)
    bytes_moved = logits.nbytes + 12 * tokens * k + 4 * experts
    per_token = pl.BlockSpec((k, block), lambda i: (0, i))
    expert, weight, rank, counts = pl.pallas_call(
        functools.partial(_route_kernel, tokens=tokens, by_expert=by_expert, how=how),
        grid=(pl.cdiv(tokens, block),),
        in_specs=in_specs,
        out_specs=[per_token, per_token, per_token, per_expert],
        out_shape=[
            _compat.out_struct((k, tokens), jnp.int32, logits),
            _compat.out_struct((k, tokens), jnp.float32, logits),
            _compat.out_struct((k, tokens), jnp.int32, logits),
            _compat.out_struct((experts, 1), jnp.int32, logits),
        ],
        scratch_shapes=[pltpu.VMEM((experts, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_compat.tpu_vmem_limit()
        ),
        cost_estimate=cost(2 * tokens * experts * (4 * k + block), bytes_moved, transcendentals=tokens * experts),
        name="meshpar_route",
    )(*operands)
    return expert.T, weight.T, rank.T, counts.reshape(experts)

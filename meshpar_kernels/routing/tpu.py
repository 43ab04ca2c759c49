"""Routing on TPU (Mosaic): one kernel that chooses, one that gathers rows and sums them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels.routing import reference

__all__ = ["gather_sum", "gather_sum_unsupported", "route", "route_unsupported"]

MAX_COUNT = 1 << 24
"""Ranks are summed in float32 on the matrix unit: exact below this."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _cdiv(a, b) * b


# --- route ---------------------------------------------------------------------------------------


def route_unsupported(logits: jax.Array, *, k: int, **_) -> Unsupported:
    """Why the TPU kernel cannot route these logits."""
    reasons = []
    tokens, experts = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"logits are {logits.dtype}; the kernel takes float32 and bfloat16")
    if tokens >= MAX_COUNT:
        reasons.append(f"T={tokens} reaches 2^24, above which float32 counts are not exact")
    if experts > 4096:
        reasons.append(f"E={experts} is above 4096, where a block of logits leaves no room in VMEM")
    if k > 128:
        reasons.append(f"k={k} is above 128: the choices of a token must fit one vector register")
    return Unsupported(reasons)


def _top(x: jax.Array) -> jax.Array:
    """Largest over the experts (rows): [1, tokens]."""
    return jnp.max(x, axis=0, keepdims=True)


def _total(x: jax.Array) -> jax.Array:
    """Sum over the experts (rows): [1, tokens]."""
    return jnp.sum(x, axis=0, keepdims=True)


def _first(hit: jax.Array, row: jax.Array, none: int) -> jax.Array:
    """Lowest row where `hit`, `none` if nowhere: int32 [1, tokens]."""
    return jnp.min(jnp.where(hit, row, none), axis=0, keepdims=True)


def _best_groups(value: jax.Array, *, groups: int, top_groups: int, group_top: int) -> jax.Array:
    """Experts of the best groups: bool [E, tokens]. `value` is -inf where an expert cannot be
    chosen."""
    experts, tokens = value.shape
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
    # A group is among the best if fewer than `top_groups` come before it: larger, or equal and
    # lower.
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


def _route_kernel(
    *refs,
    tokens: int,
    k: int,
    score: str,
    groups: int,
    top_groups: int,
    group_top: int,
    renormalize: bool,
    scale: float,
    by_expert: bool,
):
    """One block of tokens: experts along the sublanes, tokens along the lanes.

    `seen` carries each expert's count from block to block.
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
    if score == "softmax":
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
    if groups > top_groups:
        reachable &= _best_groups(
            jnp.where(reachable, choice_value, -jnp.inf),
            groups=groups,
            top_groups=top_groups,
            group_top=group_top,
        )
    left = jnp.where(reachable, key, -jnp.inf)

    chosen = jnp.zeros((experts, block), jnp.float32)
    index, weight = [], []
    for _ in range(k):
        best = _top(left)
        index.append(_first((left == best) & (left > -jnp.inf), row, experts))
        here = row == index[-1]
        chosen = jnp.where(here, 1.0, chosen)
        left = jnp.where(here, -jnp.inf, left)
        weight.append(_total(jnp.where(here, value, 0.0)))
    if renormalize:
        total = sum(weight[1:], start=weight[0])
        inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)
        weight = [w * inverse for w in weight]

    # Rank: choices of the same expert by earlier tokens, in this block (a product with a strict
    # triangle; a token takes an expert once at most) and before it.
    earlier = lax.broadcasted_iota(jnp.int32, (block, block), 0) < lax.broadcasted_iota(jnp.int32, (block, block), 1)
    before = seen[...] + jnp.dot(
        chosen.astype(jnp.bfloat16),
        jnp.where(earlier, 1.0, 0.0).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    for j in range(k):
        rank = _total(jnp.where(row == index[j], before, 0.0)).astype(jnp.int32)
        expert_ref[j : j + 1, :] = index[j]
        weight_ref[j : j + 1, :] = weight[j] * scale
        rank_ref[j : j + 1, :] = jnp.where(index[j] < experts, rank, -1)
    seen[...] += jnp.sum(chosen, axis=1, keepdims=True)
    counts_ref[...] = seen[...].astype(jnp.int32)


def route(logits: jax.Array, bias: jax.Array | None, *, block: int = 256, **options) -> reference.Choice:
    """As `reference.route`, reading the logits once; `block` tokens at a time.

    Each of the k rounds takes the largest key and then the lowest expert that holds it. Results
    are written as [k, T], since an array with k lanes would fill 128. Where E is no multiple of
    128 the logits are read as [E, T] for the same reason; XLA lays out the product that makes them
    accordingly.
    """
    tokens, experts = logits.shape
    k = options["k"]
    by_expert = experts % 128 != 0
    block = min(block, _round_up(tokens, 128))
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
    per_token = pl.BlockSpec((k, block), lambda i: (0, i))
    expert, weight, rank, counts = pl.pallas_call(
        functools.partial(_route_kernel, tokens=tokens, by_expert=by_expert, **options),
        grid=(_cdiv(tokens, block),),
        in_specs=in_specs,
        out_specs=[per_token, per_token, per_token, per_expert],
        out_shape=[
            _compat.out_struct((k, tokens), jnp.int32, logits),
            _compat.out_struct((k, tokens), jnp.float32, logits),
            _compat.out_struct((k, tokens), jnp.int32, logits),
            _compat.out_struct((experts, 1), jnp.int32, logits),
        ],
        scratch_shapes=[pltpu.VMEM((experts, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=48 << 20),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * experts * (4 * k + block),
            transcendentals=tokens * experts,
            bytes_accessed=logits.size * logits.dtype.itemsize + 12 * tokens * k + 4 * experts,
        ),
        name="meshpar_route",
    )(*operands)
    return expert.T, weight.T, rank.T, counts.reshape(experts)


# --- gather and sum ------------------------------------------------------------------------------


def gather_sum_unsupported(x: jax.Array, index: jax.Array) -> Unsupported:
    """Why the TPU kernel cannot gather these rows."""
    reasons = []
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"rows are {x.dtype}; the kernel takes float32 and bfloat16")
    if index.shape[1] > 32:
        reasons.append(f"k={index.shape[1]} rows to sum are more than 32, which VMEM has no room for")
    if x.shape[1] > 32768:
        reasons.append(f"H={x.shape[1]} is above 32768, where a block of rows leaves no room in VMEM")
    return Unsupported(reasons)


def _as_words(x: jax.Array) -> jax.Array:
    """bfloat16 [N, H] → int32 [N/2, H] with row 2i in the low halves, as the TPU packs them.

    In a compiled kernel this is a view of the same memory (`Ref.bitcast`). The interpreter has no
    such view.
    """
    rows, width = x.shape
    pairs = x.reshape(rows // 2, 2, width).swapaxes(1, 2)
    return lax.bitcast_convert_type(pairs, jnp.int32)


def _gather_sum_kernel(
    now_smem,
    next_smem,
    *refs,
    rows: int,
    k: int,
    limit: int,
    packed: bool,
    view: bool,
    weighted: bool,
):
    """One block of result rows and one slab of columns.

    The rows of the next block are on their way while this one is summed.
    """
    if weighted:
        index_ref, weight_ref, x_ref, out_ref, buffer, arrived, index_col, weight_col = refs
        weight_col[...] = weight_ref[0].T
    else:
        index_ref, x_ref, out_ref, buffer, arrived, index_col = refs
        weight_col = None
    index_col[...] = index_ref[0].T
    slab, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    width = out_ref.shape[1]
    words = x_ref.bitcast(jnp.int32) if view else x_ref

    def fetch(indices, slot):
        def one_row(r, _):
            for j in range(k):
                row = jnp.clip(indices[0, j, r], 0, limit - 1)
                row = lax.shift_right_logical(row, 1) if packed else row
                pltpu.make_async_copy(
                    words.at[pl.ds(row, 1), pl.ds(slab * width, width)],
                    buffer.at[slot, pl.ds(j * rows + r, 1)],
                    arrived.at[slot],
                ).start()
            return 0

        lax.fori_loop(0, rows, one_row, 0)

    @pl.when(step == 0)
    def _():
        fetch(now_smem, 0)

    @pl.when(step + 1 < steps)
    def _():
        fetch(next_smem, (step + 1) % 2)

    slot = step % 2
    pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], arrived.at[slot]).wait()

    def one_strip(s, _):
        first = pl.multiple_of(s * 16, 16)
        index = index_col[pl.ds(first, 16), :]
        for left in range(0, width, 512):
            lanes = slice(left, min(left + 512, width))
            total = jnp.zeros((16, lanes.stop - lanes.start), jnp.float32)
            for j in range(k):
                word = buffer[slot, pl.ds(pl.multiple_of(j * rows + first, 16), 16), lanes]
                here = index[:, j : j + 1]
                if packed:
                    odd = (here & 1) > 0
                    word = jnp.where(odd, word & jnp.int32(-65536), word << 16)
                    word = lax.bitcast_convert_type(word, jnp.float32)
                if weight_col is not None:
                    word = word * weight_col[pl.ds(first, 16), j : j + 1]
                total += jnp.where((here >= 0) & (here < limit), word, 0.0)
            out_ref[pl.ds(first, 16), lanes] = total.astype(out_ref.dtype)
        return 0

    lax.fori_loop(0, rows // 16, one_strip, 0)


def gather_sum(x: jax.Array, index: jax.Array, weight: jax.Array | None, *, block: int = 256) -> jax.Array:
    """As `reference.gather_sum`: one copy per row from HBM to VMEM, summed there in float32,
    written once.

    Two bfloat16 rows share 32-bit words in HBM, and a copy moves whole words: so bfloat16 reads
    twice the bytes it needs. About `block` rows are in flight while as many are summed. Unused
    choices (-1) fetch row 0 and are masked. An odd number of bfloat16 rows is padded by one first.
    """
    packed = x.dtype == jnp.bfloat16
    if packed and x.shape[0] % 2:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    total_rows, k = index.shape
    limit, width = x.shape
    rows = min(max(16, block // k // 16 * 16), _round_up(total_rows, 16))
    steps = _cdiv(total_rows, rows)
    padding = steps * rows - total_rows

    def by_block(values, fill):
        values = jnp.pad(values, ((0, padding), (0, 0)), constant_values=fill)
        return values.reshape(steps, rows, k).swapaxes(1, 2)

    slabs = 2 if width % 4096 == 0 else 1  # of columns: one for each core of a megacore chip
    while width // slabs > 4096 and width % (256 * slabs) == 0:
        slabs *= 2
    slab = width // slabs
    view = packed and not _compat.interpreting()
    blocks = by_block(index, -1)
    block_shape = (1, k, rows)
    operands = [blocks, blocks, blocks]
    in_specs = [
        pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec(
            block_shape,
            lambda h, i: (jnp.minimum(i + 1, steps - 1), 0, 0),
            memory_space=pltpu.SMEM,
        ),
        pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0)),
    ]
    columns = [pltpu.VMEM((rows, k), jnp.int32)]
    if weight is not None:
        operands.append(by_block(weight.astype(jnp.float32), 0.0))
        in_specs.append(pl.BlockSpec(block_shape, lambda h, i: (i, 0, 0)))
        columns.append(pltpu.VMEM((rows, k), jnp.float32))
    operands.append(_as_words(x) if packed and not view else x)
    in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    word = jnp.int32 if packed else jnp.float32
    return pl.pallas_call(
        functools.partial(
            _gather_sum_kernel,
            rows=rows,
            k=k,
            limit=limit,
            packed=packed,
            view=view,
            weighted=weight is not None,
        ),
        grid=(slabs, steps),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((rows, slab), lambda h, i: (i, h)),
        out_shape=_compat.out_struct((total_rows, width), x.dtype, *operands),
        scratch_shapes=[
            pltpu.VMEM((2, k * rows, slab), word),
            pltpu.SemaphoreType.DMA((2,)),
            *columns,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=48 << 20),
        cost_estimate=pl.CostEstimate(
            flops=2 * total_rows * k * width,
            transcendentals=0,
            bytes_accessed=(total_rows * k * 4 + total_rows * x.dtype.itemsize) * width,
        ),
        name="meshpar_gather_sum",
    )(*operands)

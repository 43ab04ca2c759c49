"""Routing on NVIDIA GPUs (Pallas-Triton): a kernel that chooses experts, and a kernel that gathers and adds up rows where the
Mosaic GPU kernel of `gpu_rows` cannot (GPUs before Hopper, columns that are no multiple of 128).

Triton has reductions and scans over either dim of a block, and runs on older GPUs. There are no barriers: programs do not
communicate. jax 0.12 deprecates Pallas-Triton, and warns once for each kernel that it lowers. `route` has to move to Mosaic
GPU when the package supports a version of JAX without Pallas-Triton.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._numerics import cost
from meshpar_kernels.routing import gpu_rows
from meshpar_kernels.routing.reference import Choice, Router

BLOCK = 8192
"""Logits of one program of `route`."""

ELEMENTS = 4096
"""Elements of the result that one program of `gather_sum` computes: 32 for each of 128 threads."""


def _power(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def _no_triton() -> list[str]:
    """[] if Pallas-Triton can be imported, else the reason."""
    try:
        _compat.pallas_triton()
    except ImportError as error:
        return [f"jax.experimental.pallas.triton cannot be imported: {error}"]
    return []


# --- route ---------------------------------------------------------------------------------------


def route_unsupported(logits: jax.Array, how: Router) -> Unsupported:
    """Reasons why the GPU kernel cannot route these logits; empty if it can."""
    reasons = _no_triton()
    tokens, experts = logits.shape
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        reasons.append(f"logits are {logits.dtype}; the kernel takes float32, bfloat16 and float16")
    if experts > BLOCK // 2:
        reasons.append(f"E={experts} is above {BLOCK // 2}, at which a token's logits exceed the registers")
    if how.groups > how.top_groups and (_power(experts) != experts or _power(how.groups) != how.groups):
        reasons.append(f"{how.groups} groups of {experts} experts: with groups, both must be powers of two")
    if tokens * max(experts, how.k) >= 2**31:
        reasons.append(f"T={tokens} times E={experts} is above 2^31, which 32-bit offsets cannot hold")
    return Unsupported(reasons)


def _top(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


def _first(hit: jax.Array, column_index: jax.Array, none: int) -> jax.Array:
    """Lowest column index with `hit`; `none` without one."""
    return jnp.min(jnp.where(hit, column_index, none), axis=-1, keepdims=True)


def _best_groups(value: jax.Array, how: Router) -> jax.Array:
    """bool [tokens, E]: experts of the best groups. `value` is -inf for experts that cannot be chosen."""
    tokens, experts = value.shape
    groups, top_groups, group_top = how.groups, how.top_groups, how.group_top
    size = experts // groups
    left = value.reshape(tokens, groups, size)
    column_index = lax.broadcasted_iota(jnp.int32, left.shape, 2)
    total = None
    for _ in range(min(group_top, size)):
        best = _top(left)
        left = jnp.where(column_index == _first(left == best, column_index, size), -jnp.inf, left)
        total = best if total is None else total + jnp.where(best > -jnp.inf, best, 0.0)
    assert total is not None
    # The best group of a round is the first one of the largest; a group that was chosen before is NaN, which equals nothing.
    left = total.reshape(tokens, groups)
    group = lax.broadcasted_iota(jnp.int32, left.shape, 1)
    taken = jnp.zeros(left.shape, jnp.int32)
    for _ in range(top_groups):
        open_ = taken == 0
        best = _top(jnp.where(open_, left, -jnp.inf))
        selected = group == _first(open_ & (left == best), group, groups)
        taken = jnp.where(selected, 1, taken)
    spread = jnp.broadcast_to(taken.reshape(tokens, groups, 1), (tokens, groups, size))
    return spread.reshape(tokens, experts) > 0


def _route_kernel(*refs, shape: tuple[int, int], block: int, width: int, how: Router):
    """One program: routes one block of tokens; tokens are rows, experts columns. Ranks count from the start of the
    block.

    Args:
      refs: inputs in GMEM: logits [T, E], optionally bias [E]; outputs: see `route`.
      shape: (T, E).
      block: tokens of a program, a power of two.
      width: E rounded up to a power of two.
    """
    triton = _compat.pallas_triton()
    logits_ref, *bias_ref, expert_ref, weight_ref, rank_ref, counts_ref = refs
    tokens, experts = shape
    step = pl.program_id(0)
    token = step * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    column_index = lax.broadcasted_iota(jnp.int32, (block, width), 1)
    in_bounds = (token < tokens) & (column_index < experts)
    row = jnp.broadcast_to(token, (block, width))
    logits = triton.load(logits_ref.at[row, column_index], mask=in_bounds, other=-jnp.inf).astype(jnp.float32)

    bad = (logits != logits) | (logits == jnp.inf)
    top = _top(jnp.where(bad, -jnp.inf, logits))
    any_bad = jnp.max(bad.astype(jnp.int32), axis=-1, keepdims=True) > 0
    valid = (top > -jnp.inf) & ~any_bad
    safe = jnp.where(in_bounds, jnp.where(valid, logits, 0.0), -jnp.inf)
    if how.score == "softmax":
        power = jnp.exp(safe - jnp.where(valid, top, 0.0))
        value = power / jnp.sum(power, axis=-1, keepdims=True)
    else:
        value = 1.0 / (1.0 + jnp.exp(-safe))
    reachable = valid & (safe > -jnp.inf)
    key, choice_value = safe, value
    if bias_ref:
        line = lax.broadcasted_iota(jnp.int32, (width,), 0)
        bias = triton.load(bias_ref[0].at[line], mask=line < experts, other=0.0)
        bias = bias.astype(jnp.float32).reshape(1, width)
        reachable &= bias == bias
        key = choice_value = value + bias
    if how.groups > how.top_groups:
        reachable &= _best_groups(jnp.where(reachable, choice_value, -jnp.inf), how)
    left = jnp.where(reachable, key, -jnp.inf)

    # A loop, not unrolled, since an iteration is long. It writes its choice to one column of [tokens, k].
    results = (block, max(_power(how.k), 2))
    position = lax.broadcasted_iota(jnp.int32, results, 1)

    def choose(j, carry):
        """Loop body: the j-th choice of all tokens; the carry is (remaining keys, bool chosen, indices, weights)."""
        left, chosen, index, weight = carry
        best = _first((left == _top(left)) & (left > -jnp.inf), column_index, experts)
        selected = (column_index == best) & (column_index < experts)
        share = jnp.sum(jnp.where(selected, value, 0.0), axis=-1, keepdims=True)
        left = jnp.where(selected, -jnp.inf, left)
        chosen = jnp.where(selected, 1, chosen)
        return left, chosen, jnp.where(position == j, best, index), jnp.where(position == j, share, weight)

    none = jnp.zeros((block, width), jnp.int32)
    index, weight = jnp.full(results, experts, jnp.int32), jnp.zeros(results, jnp.float32)
    _, chosen, index, weight = lax.fori_loop(0, how.k, choose, (left, none, index, weight))
    if how.renormalize:
        total = jnp.sum(weight, axis=-1, keepdims=True)
        weight = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1.0), 0.0)

    before = lax.cumsum(chosen, axis=0) - chosen

    def look_up(j, rank):
        expert = jnp.sum(jnp.where(position == j, index, 0), axis=-1, keepdims=True)
        expert_rank = jnp.sum(jnp.where(column_index == expert, before, 0), axis=-1, keepdims=True)
        return jnp.where((position == j) & (expert < experts), expert_rank, rank)

    rank = lax.fori_loop(0, how.k, look_up, jnp.full(results, -1, jnp.int32))
    selected = (jnp.broadcast_to(token, results), position)
    made = (token < tokens) & (position < how.k)
    triton.store(expert_ref.at[selected], index, mask=made)
    triton.store(weight_ref.at[selected], weight * how.scale, mask=made)
    triton.store(rank_ref.at[selected], rank, mask=made)
    line = lax.broadcasted_iota(jnp.int32, (width,), 0)
    counts = (jnp.full((width,), step, jnp.int32), line)
    triton.store(counts_ref.at[counts], jnp.sum(chosen, axis=0), mask=line < experts)


def route(
    logits: jax.Array, bias: jax.Array | None, how: Router, *, block: int | None = None, interpret: bool = False
) -> Choice:
    """As `reference.route`; reads the logits once.

    Each of the k rounds selects the largest key, and then the lowest expert with it. A program counts only within its
    block of tokens; the counts of the blocks before, [blocks, E], are added to the ranks [T, k] afterwards.

    Args:
      block: tokens of one program, a power of two; None: as many as registers can hold.
      interpret: run on the CPU, for tests.
    """
    triton = _compat.pallas_triton()
    (tokens, experts), k = logits.shape, how.k
    width = max(_power(experts), 2)
    if block is None:
        block = min(max(BLOCK // width, 2), 128, max(_power(tokens), 2))
    blocks = pl.cdiv(tokens, block)
    operands = [logits] if bias is None else [logits, bias]
    full_array = pl.BlockSpec(memory_space=pl.ANY)
    bytes_moved = logits.nbytes + 12 * tokens * k + 4 * blocks * experts
    expert, weight, rank, counts = pl.pallas_call(
        functools.partial(_route_kernel, shape=(tokens, experts), block=block, width=width, how=how),
        grid=(blocks,),
        in_specs=[full_array] * len(operands),
        out_specs=[full_array] * 4,
        out_shape=[
            _compat.out_struct((tokens, k), jnp.int32, logits),
            _compat.out_struct((tokens, k), jnp.float32, logits),
            _compat.out_struct((tokens, k), jnp.int32, logits),
            _compat.out_struct((blocks, experts), jnp.int32, logits),
        ],
        compiler_params=triton.CompilerParams(num_warps=8 if block * width > 4096 else 4, num_stages=1),
        cost_estimate=cost(8 * tokens * experts * k, bytes_moved, transcendentals=tokens * experts),
        interpret=interpret,
        name="meshpar_route",
    )(*operands)
    until = jnp.cumsum(counts, axis=0, dtype=jnp.int32)
    before = (until - counts)[jnp.arange(tokens)[:, None] // block, jnp.minimum(expert, experts - 1)]
    return expert, weight, jnp.where(expert < experts, rank + before, -1), until[-1]


# --- gather and sum ------------------------------------------------------------------------------


def gather_sum_unsupported(x: jax.Array, index: jax.Array) -> Unsupported:
    """Reasons why neither GPU kernel can gather these rows; empty if one can."""
    if not gpu_rows.unsupported(x, index):
        return Unsupported()
    reasons = _no_triton()
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        reasons.append(f"rows are {x.dtype}; the kernel takes float32, bfloat16 and float16")
    if index.shape[1] > 32:
        reasons.append(f"k={index.shape[1]} rows to sum are more than 32: they are unrolled")
    return Unsupported(reasons)


def _gather_sum_kernel(index_ref, *refs, shape: tuple[int, int, int], k: int, rows: int, width: int):
    """One program: adds up the k chosen rows for a block of `rows` result rows and a slab of `width` columns. All loads
    are independent."""
    triton = _compat.pallas_triton()
    *weight_ref, x_ref, out_ref = refs
    total_rows, limit, columns = shape
    row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0)
    column = pl.program_id(1) * width + lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    inside = row < total_rows
    total = jnp.zeros((rows, width), jnp.float32)
    for j in range(k):
        selected = (row, jnp.full((rows,), j, jnp.int32))
        index = triton.load(index_ref.at[selected], mask=inside, other=-1)
        wanted = (index >= 0) & (index < limit)
        mask = wanted[:, None] & (column < columns)
        source = jnp.broadcast_to(index[:, None], (rows, width))
        term = triton.load(x_ref.at[source, column], mask=mask, other=0.0).astype(jnp.float32)
        if weight_ref:
            factor = triton.load(weight_ref[0].at[selected], mask=wanted, other=0.0)
            term = term * factor.astype(jnp.float32)[:, None]
        total += jnp.where(mask, term, 0.0)
    target = jnp.broadcast_to(row[:, None], (rows, width))
    mask = inside[:, None] & (column < columns)
    triton.store(out_ref.at[target, column], total.astype(out_ref.dtype), mask=mask)


def gather_sum(x: jax.Array, index: jax.Array, weight: jax.Array | None) -> jax.Array:
    """As `reference.gather_sum`, by the faster kernel on an H200 (`benchmarks/results/device.md`): to gather single rows
    Triton's (0.76 and 0.90 times as long), to sum several the one of `gpu_rows` (0.92 and 0.98 times as long)."""
    mosaic_can = not gpu_rows.unsupported(x, index)
    if mosaic_can and (index.shape[1] > 1 or _no_triton()):
        return gpu_rows.gather_sum(x, index, weight)
    return triton_gather_sum(x, index, weight)


def triton_gather_sum(
    x: jax.Array, index: jax.Array, weight: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """As `reference.gather_sum`, by a Triton kernel: rows are read once, summed in float32 registers, and written once.

    Args:
      interpret: run it on the CPU.
    """
    triton = _compat.pallas_triton()
    total_rows, k = index.shape
    limit, columns = x.shape
    width = min(_power(columns), 1024)
    rows = max(1, min(ELEMENTS // width, _power(total_rows)))
    operands = [index.astype(jnp.int32)] + ([] if weight is None else [weight]) + [x]
    full_array = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_gather_sum_kernel, shape=(total_rows, limit, columns), k=k, rows=rows, width=width),
        grid=(pl.cdiv(total_rows, rows), pl.cdiv(columns, width)),
        in_specs=[full_array] * len(operands),
        out_specs=full_array,
        out_shape=_compat.out_struct((total_rows, columns), x.dtype, *operands),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=cost(2 * total_rows * k * columns, (k + 1) * total_rows * columns * x.dtype.itemsize),
        interpret=interpret,
        name="meshpar_gather_sum",
    )(*operands)

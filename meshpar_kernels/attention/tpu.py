"""Attention of the queries and keys on one device in three TPU kernels: result, gradients of queries, gradients of keys
and values.

A grid step computes one block of scores in VMEM, transposed ([keys, queries]), so that per-query values are stored
along lanes. Before the kernel a table is computed from positions and segment ids: whether none, some or all pairs of a
block are visible. Blocks without visible pairs are not computed, and not fetched either, since their entry names the
next block that is needed. Blocks with all pairs visible need no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat
from meshpar_kernels._choose import Unsupported
from meshpar_kernels._numerics import cost, dot
from meshpar_kernels.attention.flash import Keys, Queries, Softmax

BLOCKS = (512, 256, 128)
MOST_BLOCKS = 1 << 16  # entries of `_table`, which is in scalar memory
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
WIDTH = 64
"""The width of a head must be a multiple of this."""

SOME, ALL = 1, 2
"""Whether some or all pairs of a block are visible: the lowest two bits of a table entry (`_table`)."""


def unsupported(q: Queries, k: Keys) -> Unsupported:
    """Why the kernels cannot take these operands."""
    reasons = []
    if q.x.dtype not in (jnp.float32, jnp.bfloat16):
        reasons.append(f"operands are {q.x.dtype}; the kernels take float32 and bfloat16")
    widths = q.x.shape[3], k.v.shape[3]
    if any(n % WIDTH for n in widths):
        reasons.append(f"head_dim is {' and '.join(map(str, widths))}, no multiple of {WIDTH}")
    lengths = q.x.shape[1], k.pos.shape[0]
    if any(n % BLOCKS[-1] or n == 0 for n in lengths) or 0 in q.x.shape:
        reasons.append(f"{lengths[0]} queries and {lengths[1]} keys on a device are no multiples of {BLOCKS[-1]}")
    elif (
        blocks := q.x.shape[0] * (lengths[0] // _block(lengths[0])) * (lengths[1] // _block(lengths[1]))
    ) > MOST_BLOCKS:
        reasons.append(f"{blocks} blocks of scores are more than {MOST_BLOCKS}")
    return Unsupported(reasons)


def _block(length: int) -> int:
    return next(b for b in BLOCKS if length % b == 0)


def _heads_first(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def _sight(s: Softmax, q: Queries, k: Keys, bq: int, bk: int) -> jax.Array:
    """int32 [B, nq, nk]: whether no (0), `SOME` or `ALL` pairs of a block of queries and a block of keys are visible."""

    def one(q_pos, k_pos, q_seg, k_seg):
        some, every = (f(q_pos, k_pos, q_seg, k_seg) for f in (s.mask.any_visible, s.mask.all_visible))
        return jnp.where(some, jnp.where(every, ALL, SOME), 0).astype(jnp.int32)

    q_pos, k_pos = q.pos.reshape(-1, bq), k.pos.reshape(-1, bk)
    batch = q.x.shape[0]
    if q.seg is None or k.seg is None:
        is_visible = jax.vmap(lambda a: jax.vmap(lambda b: one(a, b, None, None))(k_pos))(q_pos)
        return jnp.broadcast_to(is_visible, (batch, *is_visible.shape))
    q_seg, k_seg = q.seg.reshape(batch, -1, 1, bq), k.seg.reshape(batch, -1, 1, bk)
    by_key = jax.vmap(one, (None, 0, None, 0))
    return jax.vmap(lambda a, b: jax.vmap(by_key, (0, None, 0, None))(q_pos, k_pos, a, b))(q_seg, k_seg)


def _table(sight: jax.Array, axis: int) -> jax.Array:
    """int32 [B·nq·nk], for scalar prefetch: the visibility of each block in the lowest two bits, and above them the
    block to fetch in its step.

    The block to fetch is the block itself if it has visible pairs, else the next one with visible pairs along `axis`
    (1: queries, 2: keys), and after the last one that one. So no grid step fetches a block that no step computes with.
    """
    number = lax.broadcasted_iota(jnp.int32, sight.shape, axis)
    beyond = sight.shape[axis]
    following = lax.cummin(jnp.where(sight > 0, number, beyond), axis=axis, reverse=True)
    last = jnp.where(sight > 0, number, 0).max(axis, keepdims=True)
    return (jnp.where(following < beyond, following, last) * 4 + sight).reshape(-1)


class _Ids:
    """Inputs of the kernels for masks: positions int32 [1, Q] and [1, K], and segment ids int32 [B, 1, Q] and [B, 1, K]
    if there are any.

    Ids are stored along lanes; a block that needs a mask transposes the ids of its keys.

    Attributes:
      arrays: the inputs.
      specs: their block specs.
    """

    def __init__(self, q: Queries, k: Keys, bq: int, bk: int, of_q: Any, of_k: Any):
        """`of_q`, `of_k`: indices of the grid → block of queries and of keys (after the batch, which is the first)."""
        self.arrays = [q.pos[None, :], k.pos[None, :]]
        self.specs = [
            pl.BlockSpec((1, bq), lambda *at: (0, of_q(*at))),
            pl.BlockSpec((1, bk), lambda *at: (0, of_k(*at))),
        ]
        if q.seg is not None and k.seg is not None:
            self.arrays += [q.seg[:, None, :], k.seg[:, None, :]]
            self.specs += [
                pl.BlockSpec((1, 1, bq), lambda *at: (at[0], 0, of_q(*at))),
                pl.BlockSpec((1, 1, bk), lambda *at: (at[0], 0, of_k(*at))),
            ]


def _scores(s: Softmax, q_ref, k_ref, ids: tuple[Any, ...] | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(scores [keys, queries], derivative of the softcap at each score, bool [keys, queries] visible or None: all),
    from one block of q and of k."""
    scores = dot(k_ref[0, 0], q_ref[0, 0], (1, 1)) * s.scale
    slope = jnp.ones((), jnp.float32)
    if s.softcap is not None:
        turned = jnp.tanh(scores / s.softcap)
        scores, slope = s.softcap * turned, 1.0 - turned * turned
    if ids is None:
        return scores, slope, None
    is_visible = s.mask.allowed(ids[0][...], ids[1][...].T)
    if len(ids) == 4:
        is_visible &= ids[2][0] == ids[3][0].T
    return scores, slope, is_visible


def _hide(values: jax.Array, is_visible: jax.Array | None, instead: float) -> jax.Array:
    return values if is_visible is None else jnp.where(is_visible, values, instead)


def _by_sight(entry: jax.Array, ids: tuple[Any, ...], work: Any) -> None:
    """Call `work(ids)` if some pairs of the block are visible (see `_table`), `work(None)` if all are; nothing if none
    is."""
    pl.when((entry & 3) == SOME)(lambda: work(ids))
    pl.when((entry & 3) == ALL)(lambda: work(None))


# -- forward


def _forward_kernel(table, *refs, s: Softmax, ids: int):
    """One grid step of the forward pass: adds one block of keys to the running softmax of one block of queries.

    The grid is (batch, head, block of queries, block of keys); the last block of keys writes the result.

    Args:
      table: scalar prefetch, see `_table`.
      refs: inputs in VMEM: q [1, 1, bq, D], k [1, 1, bk, D], v [1, 1, bk, Dv], `ids` refs of `_Ids`; outputs: result
        float32 [1, 1, bq, Dv], log-sum-exp float32 [1, 1, 1, bq]; scratch float32: maximum [1, bq], sum [1, bq],
        weighted values [Dv, bq].
      s: mask, scale and softcap.
      ids: number of refs of `_Ids`, 2 or 4.
    """
    q_ref, k_ref, v_ref, *rest = refs
    id_refs, (out_ref, lse_ref, top, total, weighted) = tuple(rest[:ids]), rest[ids:]
    batch, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    many = pl.num_programs(3)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, HIDDEN)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)

    def add(ids):
        """Add this block of keys to maximum, sum and weighted values; `ids` is None if no mask is needed."""
        scores, _, is_visible = _scores(s, q_ref, k_ref, ids)
        scores = _hide(scores, is_visible, HIDDEN)
        new = jnp.maximum(top[...], scores.max(0, keepdims=True))
        p = _hide(jnp.exp(scores - new), is_visible, 0.0)
        fade = jnp.exp(top[...] - new)
        total[...] = total[...] * fade + p.sum(0, keepdims=True)
        weighted[...] = weighted[...] * fade + dot(v_ref[0, 0], p.astype(v_ref.dtype), (0, 0))
        top[...] = new

    _by_sight(table[(batch * pl.num_programs(2) + i) * many + j], id_refs, add)

    @pl.when(j == many - 1)
    def _():
        some = total[...] > 0
        divisor = jnp.where(some, total[...], 1.0)
        out_ref[0, 0] = (weighted[...] / divisor).T
        lse_ref[0, 0] = jnp.where(some, top[...] + jnp.log(divisor), -jnp.inf)


def forward(s: Softmax, q: Queries, k: Keys) -> tuple[jax.Array, jax.Array]:
    """See `flash.forward`."""
    batch, length, heads, width = q.x.shape
    keys, kv_heads, v_width = k.v.shape[1:]
    bq, bk, group = _block(length), _block(keys), heads // kv_heads
    many = (length // bq, keys // bk)

    def fetched(b: Any, _: Any, i: Any, j: Any, table: Any) -> Any:
        return table[(b * many[0] + i) * many[1] + j] >> 2

    def at_keys(b: Any, h: Any, *at: Any) -> Any:
        return b, lax.div(h, group), fetched(b, h, *at), 0

    ids = _Ids(q, k, bq, bk, lambda b, h, i, *_: i, fetched)
    rows = pltpu.VMEM((1, bq), jnp.float32)
    pairs = batch * heads * length * keys
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, s=s, ids=len(ids.arrays)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, *many),
            in_specs=[
                pl.BlockSpec((1, 1, bq, width), lambda b, h, i, j, _: (b, h, i, 0)),
                pl.BlockSpec((1, 1, bk, width), at_keys),
                pl.BlockSpec((1, 1, bk, v_width), at_keys),
                *ids.specs,
            ],
            out_specs=[
                pl.BlockSpec((1, 1, bq, v_width), lambda b, h, i, j, _: (b, h, i, 0)),
                pl.BlockSpec((1, 1, 1, bq), lambda b, h, i, j, _: (b, h, 0, i)),
            ],
            scratch_shapes=[rows, rows, pltpu.VMEM((v_width, bq), jnp.float32)],
        ),
        out_shape=[
            _compat.out_struct((batch, heads, length, v_width), jnp.float32, q.x, k.k),
            _compat.out_struct((batch, heads, 1, length), jnp.float32, q.x, k.k),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=_estimate(pairs, width + v_width, q, k),
        name="meshpar_attention",
    )(_table(_sight(s, q, k, bq, bk), 2), *map(_heads_first, (q.x, k.k, k.v)), *ids.arrays)
    return _heads_first(out), _heads_first(lse[:, :, 0])


def _estimate(pairs: int, width: int, q: Queries, k: Keys) -> pl.CostEstimate:
    """Cost of all pairs of queries and keys, visible or not (that is unknown at compile time); `width` multiply-adds
    for a pair."""
    size = q.x.dtype.itemsize
    again = max(1, q.x.shape[1] // _block(q.x.shape[1]))
    nbytes = size * (q.x.size + (k.k.size + k.v.size) * again) + 4 * q.x.size
    return cost(2 * pairs * width, nbytes, transcendentals=pairs)


# -- backward


def _weights(s: Softmax, q_ref, k_ref, v_ref, grad_ref, lse_ref, dots_ref, ids) -> tuple[jax.Array, jax.Array]:
    """(softmax weights, gradients of the unscaled scores), both [keys, queries]."""
    scores, slope, is_visible = _scores(s, q_ref, k_ref, ids)
    p = _hide(jnp.exp(scores - lse_ref[0, 0]), is_visible, 0.0)
    d_p = dot(v_ref[0, 0], grad_ref[0, 0], (1, 1))
    return p, p * (d_p - dots_ref[0, 0]) * slope * s.scale


def _queries_kernel(table, *refs, s: Softmax, ids: int):
    """One grid step of the gradient of q: adds the contribution of one block of keys to one block of queries.

    The grid is (batch, head, block of queries, block of keys); the last block of keys writes the gradient.

    Args:
      table: scalar prefetch, see `_table`.
      refs: inputs in VMEM: q [1, 1, bq, D], k [1, 1, bk, D], v [1, 1, bk, Dv], gradient of the result [1, 1, bq, Dv],
        log-sum-exp and `row_dots` float32 [1, 1, 1, bq], `ids` refs of `_Ids`; output float32 [1, 1, bq, D]; scratch
        float32 [bq, D].
      s: mask, scale and softcap.
      ids: number of refs of `_Ids`, 2 or 4.
    """
    q_ref, k_ref, v_ref, grad_ref, lse_ref, dots_ref, *rest = refs
    id_refs, (out_ref, weighted) = tuple(rest[:ids]), rest[ids:]
    batch, i, j, many = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    @pl.when(j == 0)
    def _():
        weighted[...] = jnp.zeros_like(weighted)

    def add(ids):
        _, d_s = _weights(s, q_ref, k_ref, v_ref, grad_ref, lse_ref, dots_ref, ids)
        weighted[...] += dot(d_s.astype(k_ref.dtype), k_ref[0, 0], (0, 0))

    _by_sight(table[(batch * pl.num_programs(2) + i) * many + j], id_refs, add)

    @pl.when(j == many - 1)
    def _():
        out_ref[0, 0] = weighted[...]


def _keys_kernel(table, *refs, s: Softmax, ids: int, blocks: int):
    """One grid step of the gradients of k and v: adds the contribution of one block of queries to one block of keys.

    The grid is (batch, K/V head, block of keys, n); n iterates over the query heads of the K/V head and, within each,
    over the blocks of queries. The last n writes the gradients.

    Args:
      table, s, ids: as in `_queries_kernel`.
      refs: inputs as in `_queries_kernel`; outputs float32 [1, 1, bk, D] and [1, 1, bk, Dv]; scratch float32 [bk, D]
        and [bk, Dv].
      blocks: blocks of queries of one head.
    """
    q_ref, k_ref, v_ref, grad_ref, lse_ref, dots_ref, *rest = refs
    id_refs, (d_k_ref, d_v_ref, d_k, d_v) = tuple(rest[:ids]), rest[ids:]
    batch, j, n = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(n == 0)
    def _():
        d_k[...] = jnp.zeros_like(d_k)
        d_v[...] = jnp.zeros_like(d_v)

    def add(ids):
        p, d_s = _weights(s, q_ref, k_ref, v_ref, grad_ref, lse_ref, dots_ref, ids)
        d_v[...] += dot(p.astype(grad_ref.dtype), grad_ref[0, 0], (1, 0))
        d_k[...] += dot(d_s.astype(q_ref.dtype), q_ref[0, 0], (1, 0))

    _by_sight(table[(batch * blocks + lax.rem(n, blocks)) * pl.num_programs(2) + j], id_refs, add)

    @pl.when(n == pl.num_programs(3) - 1)
    def _():
        d_k_ref[0, 0] = d_k[...]
        d_v_ref[0, 0] = d_v[...]


Blocks = Callable[..., tuple[Any, Any, Any]]
"""Indices of the grid and the table → (batch, head, block) of queries, or of keys."""


class _Backward:
    """Operands and sizes that both gradient kernels have in common."""

    def __init__(self, s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array):
        self.s, self.q, self.k = s, q, k
        self.bq, self.bk = _block(q.x.shape[1]), _block(k.v.shape[1])
        self.sight = _sight(s, q, k, self.bq, self.bk)
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a query that sees no key: every exp(score - lse) is 0
        rows = [_heads_first(x)[:, :, None] for x in (lse, dots)]
        self.operands = [*map(_heads_first, (q.x, k.k, k.v, grad.astype(q.x.dtype))), *rows]

    def specs(self, of_q: Blocks, of_k: Blocks) -> list[pl.BlockSpec]:
        """Block specs of the operands."""

        def block(at: Blocks, size: int, last: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, 1, size, last), lambda *g: (*at(*g), 0))

        def row(*g: Any) -> Any:
            b, h, i = of_q(*g)
            return b, h, 0, i

        width, v_width = self.q.x.shape[3], self.k.v.shape[3]
        sizes = ((of_q, self.bq, width), (of_k, self.bk, width), (of_k, self.bk, v_width), (of_q, self.bq, v_width))
        return [*(block(*size) for size in sizes), *[pl.BlockSpec((1, 1, 1, self.bq), row)] * 2]

    def call(
        self, kernel: Any, name: str, grid: tuple[int, ...], axis: int, of_q: Blocks, of_k: Blocks, outs: list[Any],
        matmuls: int,
    ) -> list[jax.Array]:  # fmt: skip
        """Run one of the two gradient kernels.

        Args:
          kernel, grid: its body and its grid.
          axis: of `_table`: 1 if the grid iterates over queries last, 2 over keys.
          outs: (shape, shape of a block) of each output, whose blocks are the ones of the third dim of the grid.
          matmuls: multiply-adds of one pair of a query and a key, for the cost estimate.
        """
        q, k = self.q, self.k
        ids = _Ids(q, k, self.bq, self.bk, lambda *g: of_q(*g)[2], lambda *g: of_k(*g)[2])
        return pl.pallas_call(
            functools.partial(kernel, s=self.s, ids=len(ids.arrays)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[*self.specs(of_q, of_k), *ids.specs],
                out_specs=[pl.BlockSpec((1, 1, *block), lambda b, h, i, *_: (b, h, i, 0)) for _, block in outs],
                scratch_shapes=[pltpu.VMEM(block, jnp.float32) for _, block in outs],
            ),
            out_shape=[_compat.out_struct(shape, jnp.float32, q.x, k.k) for shape, _ in outs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            cost_estimate=_estimate(q.x.size // q.x.shape[3] * k.v.shape[1], matmuls, q, k),
            name=name,
        )(_table(self.sight, axis), *self.operands, *ids.arrays)


def backward(
    s: Softmax, q: Queries, k: Keys, grad: jax.Array, lse: jax.Array, dots: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `flash.backward`."""
    batch, length, heads, width = q.x.shape
    keys, kv_heads, v_width = k.v.shape[1:]
    run = _Backward(s, q, k, grad, lse, dots)
    group, blocks, columns = heads // kv_heads, length // run.bq, keys // run.bk
    (d_q,) = run.call(
        _queries_kernel,
        "meshpar_attention_d_queries",
        (batch, heads, blocks, columns),
        2,
        lambda b, h, i, j, _: (b, h, i),
        lambda b, h, i, j, table: (b, lax.div(h, group), table[(b * blocks + i) * columns + j] >> 2),
        [((batch, heads, length, width), (run.bq, width))],
        2 * width + v_width,
    )

    def of_q(b: Any, h: Any, j: Any, n: Any, table: Any) -> tuple[Any, Any, Any]:
        return b, h * group + lax.div(n, blocks), table[(b * blocks + lax.rem(n, blocks)) * columns + j] >> 2

    d_k, d_v = run.call(
        functools.partial(_keys_kernel, blocks=blocks), "meshpar_attention_d_keys",
        (batch, kv_heads, columns, group * blocks), 1, of_q, lambda b, h, j, n, _: (b, h, j),
        [((batch, kv_heads, keys, n), (run.bk, n)) for n in (width, v_width)],
        2 * width + 2 * v_width,
    )  # fmt: skip
    return _heads_first(d_q), _heads_first(d_k), _heads_first(d_v)

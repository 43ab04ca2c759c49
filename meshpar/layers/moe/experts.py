"""The experts' product as one op: its factor rule, what a device does under any split of tokens and experts, what it sends.

Tokens and experts may be split over the same mesh axes or others; embed is whole on every device, and mlp is contracted, so a
split of it leaves unreduced sums that the plan reduces. No load overflows: rows beyond a buffer go in another round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import RoutePlan, expert_combine, expert_dispatch, grouped_matmul
from meshpar_kernels.grouped_matmul.reference import activate

from ...compat.jax import default_promotion
from ...program.declare import kernel_rule
from ...program.kernels import KernelSend, KernelWork, Parts
from .choice import KERNELS
from .strategy import Ways, find_ways

__all__ = ["run_experts"]


def run_experts(
    x: jax.Array, expert: jax.Array, weight: jax.Array, matrices: Sequence[jax.Array], **options: Any
) -> jax.Array:
    """Σ_j weight[t, j] · f_{expert[t, j]}(x[t]) with f(x) = (act(x·gate) ⊙ x·up)·down, or act(x·up)·down.

    Args:
      x: [*tokens, H].
      expert: int32 [*tokens, k]; E where there is no choice.
      weight: float32 [*tokens, k].
      matrices: gate and up [*E, H, M] (or up alone), down [*E, M, H]; x's dtype; *E is one dim, or two.
      options: activation, and what :func:`find_ways` takes: rate, most_per_expert, slack, strategy, distinct, exchange;
        implementation of the grouped products.

    Returns:
      [*tokens, H].
    """
    op = _op(x.ndim - 1, matrices[0].ndim - 2, len(matrices) == 3)
    return _run(functools.partial(op, **options), x, expert, weight, *matrices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(op: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """Gate and up as one product; where it is differentiated as two, which the backward pass needs and XLA finds it has."""
    return op(*args, fused=True)


_run.defvjp(
    default_promotion()(lambda op, *args: jax.vjp(lambda *a: op(*a, fused=False), *args)),
    default_promotion()(lambda op, pull, grad: pull(grad)),
)


@functools.cache
def _op(token_dims: int, expert_dims: int, gated: bool) -> Callable[..., jax.Array]:
    """The op for so many dims of tokens and experts."""
    tokens = " ".join(f"t{i}~" for i in range(token_dims))
    experts = " ".join(f"e{i}~" for i in range(expert_dims))
    inward = ", ".join([f"{experts} embed! mlp"] * (1 + gated))
    text = f"{tokens} embed!, {tokens} k!, {tokens} k!, {inward}, {experts} mlp embed! -> {tokens} embed!"
    local: Any = functools.partial(_local, token_dims=token_dims)
    sends: Any = functools.partial(_sends, token_dims=token_dims)

    def moe_experts(*args, **options):
        return local(*args, axes={}, **options)

    works: Any = functools.partial(_works, token_dims=token_dims)
    return kernel_rule(text, local=local, sends=sends, works=works)(moe_experts)


def _ways(args: Sequence[Any], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], token_dims: int,
          **options: Any) -> Ways:  # fmt: skip
    x, expert, _, *matrices = args
    dims = matrices[0].ndim - 2
    return find_ways(
        [a for i in range(token_dims) for a in axes.get(f"t{i}", ())],
        [axes.get(f"e{i}", ()) for i in range(dims)],
        sizes,
        tokens=math.prod(x.shape[:-1]),
        k=expert.shape[-1],
        embed=x.shape[-1],
        local_experts=math.prod(matrices[0].shape[:dims]),
        weights=sum(math.prod(m.shape) for m in matrices),
        **options,
    )


def _local(
    x, expert, weight, *matrices, axes: Mapping[str, tuple[str, ...]], token_dims: int, activation: str,
    implementation: str | None = None, exchange: str | None = None, fused: bool = False, **options: Any,
) -> jax.Array:  # fmt: skip
    """One device's part; `fused`: gate, up and activation as one product."""
    sizes = {a: lax.axis_size(a) for got in axes.values() for a in got}
    ways = _ways((x, expert, weight, *matrices), axes, sizes, token_dims, exchange=exchange, **options)
    dims = matrices[0].ndim - 2
    expert_axes = [axes.get(f"e{i}", ()) for i in range(dims)]
    if ways.strategy == "dense":
        matrices = [_gathered(m, expert_axes, ways.over) for m in matrices]
        expert_axes = [tuple(a for a in got if a in ways.rest) for got in expert_axes]
    target, experts = _targets(expert.reshape(-1, expert.shape[-1]), matrices[0].shape[:dims], expert_axes, sizes, ways)
    matrices = [m.reshape(-1, *m.shape[dims:]) for m in matrices]
    moves = ways.strategy in ("a2a", "ring")
    how = {
        "experts": experts,
        "axis_name": ways.over if moves else None,
        "rows": ways.rows,
        "strategy": ways.strategy if moves else "a2a",
        "exchange": exchange,
    }
    multiply = functools.partial(grouped_matmul, implementation=implementation)
    copies = implementation if implementation in KERNELS else None
    # sorted once, for all rounds; on a ring devices sort what comes to them
    target = target if how["strategy"] == "ring" else RoutePlan.of(target, experts)

    def one_round(first, target, x, weight, *matrices):
        """(what the rows first… of each buffer contribute, rows that one buffer would have to hold for all)."""
        rows, d = expert_dispatch(x, target, weight=weight, first=first, copy=False, implementation=copies, **how)
        *inward, down = matrices
        gathered = {"lhs_indices": d.lhs_indices, "lhs_rows": d.lhs_rows}
        if fused:
            pair = (inward[0], inward[1]) if len(inward) == 2 else inward[0]
            h = multiply(rows, pair, d.group_sizes, activation=activation, **gathered)
        else:
            products = [multiply(rows, m, d.group_sizes, **gathered) for m in inward]
            h = activate([p.astype(jnp.float32) for p in products], activation).astype(rows.dtype)
        y = multiply(h, down, d.group_sizes, row_scale=d.row_scale)
        return expert_combine(y, d, implementation=copies), d.most

    flat = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1]), *matrices
    y, most = one_round(0, target, *flat)
    if ways.rounds > 1:
        everyone = tuple(dict.fromkeys(a for got in axes.values() for a in got))
        most = lax.pmax(most, everyone) if everyone else most
        y = y + _further_rounds(lambda *args: one_round(*args)[0], ways.rows)(most, target, *flat)
    if ways.rest:
        summed: Any = _sum_alike(y, ways.rest)
        y = summed
    return y.reshape(x.shape)


def _gathered(matrix: jax.Array, expert_axes: Sequence[tuple[str, ...]], over: tuple[str, ...]) -> jax.Array:
    """The experts of all devices along the axes of the exchange."""
    for i, got in enumerate(expert_axes):
        mine = tuple(a for a in got if a in over)
        if mine:
            matrix = lax.all_gather(matrix, mine, axis=i, tiled=True)
    return matrix


def _targets(
    expert: jax.Array,
    local: Sequence[int],
    expert_axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
    ways: Ways,
) -> tuple[jax.Array, int]:
    """Experts by number among those that this device exchanges with, the owner's place along the exchange major.

    Returns:
      (int32 [T, k], the number of experts, which also stands for a choice that is none of theirs; that number).
    """
    parts = [math.prod(sizes[a] for a in got) for got in expert_axes]
    total = math.prod(n * p for n, p in zip(local, parts, strict=True))
    mine = (expert >= 0) & (expert < total)
    place: dict[str, jax.Array] = {}
    inner, stride, left = jnp.zeros_like(expert), 1, expert
    for n, p, got in reversed(list(zip(local, parts, expert_axes, strict=True))):
        index, left = left % (n * p), left // (n * p)
        inner, stride = inner + index % n * stride, stride * n
        owner = index // n
        for a in reversed(got):
            place[a], owner = owner % sizes[a], owner // sizes[a]
    for a in ways.rest:
        mine &= place[a] == lax.axis_index(a)
    over = [a for a in ways.over if a in place]  # dense: none
    device = jnp.zeros_like(expert)
    for a in over:
        device = device * sizes[a] + place[a]
    number = stride * math.prod(sizes[a] for a in over)
    return jnp.where(mine, device * stride + inner, number).astype(jnp.int32), number


def _further_rounds(one_round: Callable[..., jax.Array], rows: int) -> Callable[..., jax.Array]:
    """The sum of ``one_round`` over the rows beyond the first buffer, as many rounds as the load needs.

    Both directions loop; the backward one runs each round again.
    """

    def loop(most, step, start):
        return lax.while_loop(lambda c: c[0] < most, lambda c: (c[0] + rows, step(c[0], c[1])), (rows, start))[1]

    def wide(x):
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    @jax.custom_vjp
    def run(most, target, *floats):
        total = loop(most, lambda first, y: y + one_round(first, target, *floats), wide(floats[0]))
        return total.astype(floats[0].dtype)

    def forward(most, target, *floats):
        return run(most, target, *floats), (most, target, floats)

    def backward(saved, grad):
        most, target, floats = saved

        def step(first, totals):
            _, pull = jax.vjp(lambda *f: one_round(first, target, *f), *floats)
            return [t + g.astype(t.dtype) for t, g in zip(totals, pull(grad), strict=True)]

        grads = loop(most, step, [wide(f) for f in floats])
        return (None, None, *(g.astype(f.dtype) for g, f in zip(grads, floats, strict=True)))

    run.defvjp(forward, backward)
    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_alike(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum over devices. Their cotangents are equal shares of one, so the transposed sum is a product."""
    return lax.psum(y, axes)


_sum_alike.defvjp(
    lambda y, axes: (lax.psum(y, axes), None), lambda axes, _, grad: (grad * math.prod(map(lax.axis_size, axes)),)
)


def _sends(avals: Sequence[Any], parts: Parts, *, token_dims: int, activation: str, implementation: str | None = None,
           fused: bool = False, **options: Any) -> list[KernelSend]:  # fmt: skip
    """What `_local` sends."""
    ways = _ways(avals, parts.axes, parts.sizes, token_dims, **options)
    x, expert, weight, *matrices = avals
    embed, tokens, k = x.shape[-1], math.prod(x.shape[:-1]), expert.shape[-1]
    more = ""
    if ways.rounds > 1:
        more = f"; a load that fills a buffer of {ways.rows:,} rows takes another round, {ways.rounds} at the very most"
    out: list[KernelSend] = []

    def send(op: str, shape: tuple[int, ...], dtype: Any, why: str, axes: tuple[str, ...] = ways.over) -> None:
        out.append(KernelSend(op, (), shape, dtype, why, axes=axes))

    if ways.strategy == "a2a":
        slots, moved = (ways.devices * ways.rows,), (ways.devices * ways.sends, embed)
        counts = (math.prod(matrices[0].shape[:-2]) * ways.devices,)
        if ways.sends < ways.rows:
            more = f", of a balanced load: only rows in use are sent{more}"
        send("all-to-all", moved, x.dtype, f"tokens to the devices of their experts{more}")
        send("all-to-all", counts, jnp.int32, "how many to which expert")
        send("all-to-all", slots, weight.dtype, "their weights")
        send("all-to-all", moved, x.dtype, f"results back to the tokens{more}")
    elif ways.strategy == "ring":
        whole = (ways.devices * tokens, embed)
        send("all-gather", (tokens, embed), x.dtype, f"all tokens to every device{more}")
        send("all-gather", (tokens, k), jnp.int32, "their experts")
        send("all-gather", (tokens, k), weight.dtype, "their weights")
        send("reduce-scatter", whole, x.dtype, f"results back to the tokens{more}")
    elif ways.strategy == "dense":
        for m in matrices:
            send("all-gather", m.shape, m.dtype, "the experts' weights, since they are smaller than the tokens")
    if ways.rounds > 1:
        everyone = tuple(dict.fromkeys(a for got in parts.axes.values() for a in got))
        send("all-reduce", (), jnp.int32, "whether another round is needed", everyone)
    if ways.rest:
        send("all-reduce", x.shape, x.dtype, "sums over the devices that hold other experts", ways.rest)
    return out


def _works(avals: Sequence[Any], parts: Parts, *, token_dims: int, activation: str, implementation: str | None = None,
           fused: bool = False, **options: Any) -> KernelWork:  # fmt: skip
    """What `_local` computes and holds.

    Every token's products with its k experts, a device its share of the rows.

    Forward: the rows that came, what each inward matrix makes of them (fused: all together) and, at last, the rows that go back.
    Backward, first what the last matrix needs and its gradient, with all of the others and what each made; then, without that
    matrix, their gradients.
    Where further rounds may follow, all matrices and gradients are there to the end, and sums of these in float32.
    """
    ways = _ways(avals, parts.axes, parts.sizes, token_dims, **options)
    x, expert, _, *matrices = avals
    split = {a for i in range(token_dims) for a in parts.axes.get(f"t{i}", ())}
    others = {a for i in range(matrices[0].ndim - 2) for a in parts.axes.get(f"e{i}", ())} - split
    products = 2 * math.prod(expert.shape) * sum(math.prod(m.shape[-2:]) for m in matrices)
    flops = products / math.prod(parts.sizes[a] for a in others)
    dense = ways.strategy == "dense"  # of all devices' experts, beside its own
    *inward, down = (math.prod(m.shape) * m.dtype.itemsize * (ways.devices if dense else 1) for m in matrices)
    rows = ways.rows * (ways.devices if ways.strategy == "a2a" else 1)
    row, hidden = (n * rows * x.dtype.itemsize for n in (x.shape[-1], matrices[0].shape[-1]))
    n, more = len(inward), 0
    if dense:
        more = sum(inward) + down
    elif ways.strategy == "ring":  # every token there, and its sum
        more = 2 * ways.devices * math.prod(x.shape) * x.dtype.itemsize
    forward = more + row + max(row, hidden if fused else n * hidden)
    if ways.rounds > 1:
        sums = 4 * (math.prod(x.shape) + sum(math.prod(m.shape) for m in matrices))
        return KernelWork(flops, forward, more + sums + 4 * row + (2 * n + 1) * hidden)
    first, then = (2 + n) * hidden + 2 * row - sum(inward), n * hidden + 3 * row - down
    return KernelWork(flops, forward, more * (2 if dense else 1) + max(first, then))

"""The experts' feed-forward network as one op: its factor rule, its local form under any sharding, and its collectives.

Tokens and experts may be split over the same mesh axes or different ones. ``embed`` is replicated. ``mlp`` is contracted, so that a
result of experts with ``mlp`` split is partial, and the plan reduces it. No choice is dropped: rows that do not fit into a buffer
are exchanged in another round.
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
from meshpar_kernels.dispatch.api import CODE_BLOCK
from meshpar_kernels.dispatch.differentiable import KERNELS
from meshpar_kernels.grouped_matmul.activations import activate

from ...compat.jax import default_promotion
from ...program.declare_kernel_rule import kernel_rule
from ...program.kernels import KernelSend, KernelWork, ShardCounts
from ..scaled_matmul import FORMATS_OF_EXPERTS, rounded, with_rounded_gradient
from .exchange_choice import OVERLAPS, Exchange, choose_exchange


def run_experts(
    x: jax.Array, expert: jax.Array, weight: jax.Array, matrices: Sequence[jax.Array], **options: Any
) -> jax.Array:
    """Σ_j weight[t, j] · f_{expert[t, j]}(x[t]) with f(x) = (act(x·gate) ⊙ x·up)·down, or act(x·up)·down.

    Args:
      x: [*tokens, H].
      expert: int32 [*tokens, k]; E where there is no choice.
      weight: float32 [*tokens, k].
      matrices: gate and up [*E, H, M] (or up alone), down [*E, M, H]; x's dtype; *E is one dim, or two.
      options: activation; rate, most_per_expert, slack, distinct, exchange, strategy and overlap of
        :class:`Exchange`; implementation of the grouped matmuls; scaled, the format of their operands: a key of
        :data:`..scaled_matmul.FORMATS_OF_EXPERTS`. Then ``matrices`` are values of its codes.

    Returns:
      [*tokens, H].
    """
    op = _op(x.ndim - 1, matrices[0].ndim - 2, len(matrices) == 3)
    return _run(functools.partial(op, **options), x, expert, weight, *matrices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(op: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """One matmul for gate and up in a forward pass; two where it is differentiated, since the backward pass needs both results."""
    return op(*args, fused=True)


_run.defvjp(
    default_promotion()(lambda op, *args: jax.vjp(lambda *a: op(*a, fused=False), *args)),
    default_promotion()(lambda op, pull, grad: pull(grad)),
)


NAME = "moe_experts"
"""Of the op, among the kernels of a program."""


@functools.cache
def _op(token_dims: int, expert_dims: int, gated: bool) -> Callable[..., jax.Array]:
    """The op for arrays with these numbers of token and expert dims; ``gated``: there is a gate matrix."""
    tokens = " ".join(f"t{i}~" for i in range(token_dims))
    experts = " ".join(f"e{i}~" for i in range(expert_dims))
    inward = ", ".join([f"{experts} embed! mlp"] * (1 + gated))
    text = f"{tokens} embed!, {tokens} k!, {tokens} k!, {inward}, {experts} mlp embed! -> {tokens} embed!"
    parts: Any = [functools.partial(f, token_dims=token_dims) for f in (_local, _sends, _works)]
    local, sends, works = parts

    def moe_experts(*args, **options):
        return local(*args, axes={}, **options)

    moe_experts.__name__ = NAME
    return kernel_rule(text, local=local, sends=sends, works=works, choices={"overlap": OVERLAPS})(moe_experts)


def _exchange(
    args: Sequence[Any], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], token_dims: int, **options: Any
) -> Exchange:
    """The exchange for local operands; ``axes``: factor of the rule → the mesh axes that split it."""
    x, expert, _, *matrices = args
    dims = matrices[0].ndim - 2
    problem = Exchange(
        [a for i in range(token_dims) for a in axes.get(f"t{i}", ())],
        [axes.get(f"e{i}", ()) for i in range(dims)],
        sizes,
        tokens=math.prod(x.shape[:-1]),
        k=expert.shape[-1],
        embed=x.shape[-1],
        local_experts=math.prod(matrices[0].shape[:dims]),
        weights=sum(math.prod(m.shape) for m in matrices),
        **{name: options[name] for name in Exchange.__dataclass_fields__ if name in options},
    )
    return choose_exchange(problem)


def _local(
    *args: Any, axes: Mapping[str, tuple[str, ...]], token_dims: int, fused: bool = False, **options: Any
) -> jax.Array:
    """The local form of the op: this device's shard of the result, from its tokens and its shards of the experts'
    matrices.

    Args:
      args: shards of the tokens [*tokens, H], their experts [*tokens, k], the weights of these experts [*tokens, k], and
        the matrices ``gate`` (if there is one), ``up`` and ``down``.
      axes: factor of the op's rule → the mesh axes that shard it.
      token_dims: the number of token dims.
      fused: one matmul kernel for gate, up and activation.
    """
    sizes = {a: lax.axis_size(a) for split in axes.values() for a in split}
    chosen = _exchange(args, axes, sizes, token_dims, **options)
    x, expert, weight, *matrices = args
    activation, implementation = options["activation"], options.get("implementation")
    dims = matrices[0].ndim - 2
    expert_axes = [axes.get(f"e{i}", ()) for i in range(dims)]
    if chosen.strategy == "dense":
        matrices = [_gathered(m, expert_axes, chosen.over) for m in matrices]
        expert_axes = [tuple(a for a in split if a in chosen.rest) for split in expert_axes]
    expert = expert.reshape(-1, expert.shape[-1])
    target, experts = _targets(expert, matrices[0].shape[:dims], expert_axes, sizes, chosen)
    matrices = [m.reshape(-1, *m.shape[dims:]) for m in matrices]
    how = {
        "experts": experts,
        "axis_name": chosen.over if chosen.way.moves_tokens else None,
        "rows": chosen.rows,
        "strategy": chosen.strategy if chosen.way.moves_tokens else "a2a",
        "exchange": options.get("exchange"),
    }
    form = FORMATS_OF_EXPERTS.get(options.get("scaled", ""))

    def encoded(rows: jax.Array) -> Any:
        return rows if form is None else rounded(form, ((1, form.block),), "", rows)

    def multiply(rows: jax.Array, matrix: Any, sizes: jax.Array, **how: Any) -> Any:
        y = grouped_matmul(rows, matrix, sizes, implementation=implementation, **how)
        return y if form is None or "activation" in how else with_rounded_gradient(form, y)

    copies = implementation if implementation in KERNELS else None
    # sorted once, for all rounds; on a ring each device sorts the tokens that it receives
    targets = _split(target, chosen.overlap)
    targets = targets if how["strategy"] == "ring" else [RoutePlan.of(t, experts) for t in targets]

    def one_part(first, target, x, weight, *matrices):
        """(the sum over one round of the tokens' contributions, the number of rows that a single round would need).

        The round processes the rows ``first``, ``first + 1``, … of each buffer.
        """
        rows, d = expert_dispatch(x, target, weight=weight, first=first, copy=False, implementation=copies, **how)
        *inward, down = matrices
        rows, indices = encoded(rows), d.lhs_indices
        if fused:
            pair = (inward[0], inward[1]) if len(inward) == 2 else inward[0]
            h = multiply(rows, pair, d.group_sizes, activation=activation, lhs_indices=indices)
        else:
            hidden = [multiply(rows, m, d.group_sizes, lhs_indices=indices) for m in inward]
            h = activate([m.astype(jnp.float32) for m in hidden], activation).astype(rows.dtype)
        y = multiply(encoded(h), down, d.group_sizes, row_scale=d.row_scale)
        return expert_combine(y, d, implementation=copies), d.most

    def one_round(first, targets, x, weight, *matrices):
        """``one_part`` of all parts: none waits for another, so that one is exchanged while experts compute another."""
        parts = zip(targets, _split(x, chosen.overlap), _split(weight, chosen.overlap), strict=True)
        sums, needed = zip(*(one_part(first, *part, *matrices) for part in parts), strict=True)
        return (jnp.concatenate(sums), functools.reduce(jnp.maximum, needed)) if sums[1:] else (sums[0], needed[0])

    flat = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1]), *matrices
    y, rows_needed = one_round(0, targets, *flat)
    if chosen.rounds > 1:
        all_axes = tuple(dict.fromkeys(a for split in axes.values() for a in split))
        rows_needed = lax.pmax(rows_needed, all_axes) if all_axes else rows_needed
        y = y + _further_rounds(lambda *args: one_round(*args)[0], chosen.rows)(rows_needed, targets, *flat)
    if chosen.rest:
        reduced: Any = _all_reduce(y, chosen.rest)
        y = reduced
    return y.reshape(x.shape)


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    """x in equal parts along its first dim."""
    return jnp.split(x, parts) if parts > 1 else [x]


def _gathered(matrix: jax.Array, expert_axes: Sequence[tuple[str, ...]], over: tuple[str, ...]) -> jax.Array:
    """The expert matrices of all devices along the axes ``over`` of the exchange."""
    for i, split in enumerate(expert_axes):
        gathered = tuple(a for a in split if a in over)
        if gathered:
            matrix = lax.all_gather(matrix, gathered, axis=i, tiled=True)
    return matrix


def _targets(
    expert: jax.Array,
    local: Sequence[int],
    expert_axes: Sequence[tuple[str, ...]],
    sizes: Mapping[str, int],
    chosen: Exchange,
) -> tuple[jax.Array, int]:
    """The experts that the devices of this exchange own, numbered from 0: first by device, then by local expert.

    Args:
      expert: int32 [T, k], global numbers; out of range for no choice.
      local: sizes of the expert dims on this device.
      expert_axes: for each expert dim, the mesh axes that split it.

    Returns:
      (int32 [T, k], the numbers; N for no choice, and for an expert that no device of the exchange owns; N, the number of experts).
    """
    parts = [math.prod(sizes[a] for a in split) for split in expert_axes]
    total = math.prod(n * p for n, p in zip(local, parts, strict=True))
    served = (expert >= 0) & (expert < total)
    coordinate: dict[str, jax.Array] = {}  # mesh axis -> index of the device that owns the expert
    inner, stride, left = jnp.zeros_like(expert), 1, expert
    for n, p, split in reversed(list(zip(local, parts, expert_axes, strict=True))):
        index, left = left % (n * p), left // (n * p)
        inner, stride = inner + index % n * stride, stride * n
        owner = index // n
        for a in reversed(split):
            coordinate[a], owner = owner % sizes[a], owner // sizes[a]
    for a in chosen.rest:
        served &= coordinate[a] == lax.axis_index(a)
    over = [a for a in chosen.over if a in coordinate]  # "dense": none
    device = jnp.zeros_like(expert)
    for a in over:
        device = device * sizes[a] + coordinate[a]
    number = stride * math.prod(sizes[a] for a in over)
    return jnp.where(served, device * stride + inner, number).astype(jnp.int32), number


def _further_rounds(one_round: Callable[..., jax.Array], rows: int) -> Callable[..., jax.Array]:
    """A differentiable function: the sum of ``one_round`` over all rounds after the first, of ``rows`` rows each.

    Both passes are while loops; the backward pass recomputes each round.
    """

    def loop(needed, step, start):
        return lax.while_loop(lambda c: c[0] < needed, lambda c: (c[0] + rows, step(c[0], c[1])), (rows, start))[1]

    def wide(x):
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    @jax.custom_vjp
    def run(needed, target, *floats):
        total = loop(needed, lambda first, y: y + one_round(first, target, *floats), wide(floats[0]))
        return total.astype(floats[0].dtype)

    def forward(needed, target, *floats):
        return run(needed, target, *floats), (needed, target, floats)

    def backward(saved, grad):
        """Backward pass: recompute each round in a while loop, and add its cotangents in at least float32.

        Args:
          saved: residuals of ``forward``: (number of rows needed, targets, the float operands of ``one_round``).
          grad: the cotangent of the sum over rounds.

        Returns:
          None for ``needed`` and ``target``, and a cotangent for each float operand, in its dtype.
        """
        needed, target, floats = saved

        def step(first, totals):
            _, pull = jax.vjp(lambda *f: one_round(first, target, *f), *floats)
            return [t + g.astype(t.dtype) for t, g in zip(totals, pull(grad), strict=True)]

        grads = loop(needed, step, [wide(f) for f in floats])
        return (None, None, *(g.astype(f.dtype) for g, f in zip(grads, floats, strict=True)))

    run.defvjp(forward, backward)
    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_reduce(y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``lax.psum`` whose cotangents are equal shares of one cotangent: its transpose multiplies by the number of devices."""
    return lax.psum(y, axes)


_all_reduce.defvjp(
    lambda y, axes: (lax.psum(y, axes), None), lambda axes, _, grad: (grad * math.prod(map(lax.axis_size, axes)),)
)


def _sends(avals: Sequence[Any], parts: ShardCounts, *, token_dims: int, **options: Any) -> list[KernelSend]:
    """The collectives of :func:`_local`."""
    chosen = _exchange(avals, parts.axes, parts.sizes, token_dims, **options)
    x, expert, weight, *matrices = avals
    embed, tokens, k, n = x.shape[-1], chosen.part, expert.shape[-1], chosen.overlap
    more = ""
    if chosen.rounds > 1:
        more = f"; a load that fills a buffer of {chosen.rows:,} rows takes another round, {chosen.rounds} at the very most"
    over, out = chosen.over, list[KernelSend]()
    during = 0.0 if n == 1 else _flops(avals, parts, token_dims) / (2 * n - 2)  # of an exchange or return of a part

    def send(op: str, shape: tuple[int, ...], dtype: Any, why: str, axes: tuple[str, ...] = over, **how: Any) -> None:
        out.append(KernelSend(op, (), shape, dtype, why, axes=axes, **how))

    def move(
        op: str, shape: tuple[int, int], why: str, hidden: float, transpose: str | None = None, **how: Any
    ) -> None:
        """Rows of x's dtype, or codes and their scales; ``transpose``: of an op of codes."""
        part_of = "" if n == 1 else f", part {part + 1} of {n}"
        why = f"{why}{part_of}{', while experts compute another part' * (hidden > 0)}"
        if options.get("exchange") != "float8":
            send(op, shape, x.dtype, f"{why}{more}", hidden=hidden, **how)
            return
        scales = (shape[0] * -(-embed // CODE_BLOCK),)
        send(op, shape, jnp.int8, f"{why}, as codes of 8 bits{more}", hidden=hidden, transpose=transpose or op, **how)
        send(op, scales, jnp.float32, "the scales of the codes", transpose=transpose, **how)

    for part in range(n if chosen.way.moves_tokens else 0):
        # the exchange of the first part and the return of the last one have nothing to compute meanwhile
        into, back = during * (part > 0), during * (part < n - 1)
        if chosen.strategy == "a2a":
            moved = chosen.devices * chosen.rows_sent, embed
            counts = (math.prod(matrices[0].shape[:-2]) * chosen.devices,)
            used = ", of a balanced load: only rows in use are sent" if chosen.rows_sent < chosen.rows else ""
            move("all-to-all", moved, f"tokens to the devices of their experts{used}", into)
            send("all-to-all", counts, jnp.int32, "how many to which expert")
            send("all-to-all", (chosen.devices * chosen.rows,), weight.dtype, "their weights")
            move("all-to-all", moved, f"results back to the tokens{used}", back, recomputed=False)
        else:
            move("all-gather", (tokens, embed), "all tokens to every device", into, "all-to-all")
            send("all-gather", (tokens, k), jnp.int32, "their experts")
            send("all-gather", (tokens, k), weight.dtype, "their weights")
            result, why = (chosen.devices * tokens, embed), "results back to the tokens"
            if options.get("exchange") == "float8":
                move("all-to-all", result, why, back, "all-gather", recomputed=False)
            else:
                move("reduce-scatter", result, why, back, recomputed=False)
    out.sort(key=lambda s: s.hidden > 0)  # the hidden ones last, next to the kernel in a timeline
    if chosen.strategy == "dense":
        for m in matrices:
            send("all-gather", m.shape, m.dtype, "the experts' weights, since they are smaller than the tokens")
    if chosen.rounds > 1:
        all_axes = tuple(dict.fromkeys(a for split in parts.axes.values() for a in split))
        send("all-reduce", (), jnp.int32, "whether another round is needed", all_axes)
    if chosen.rest:
        why = "results of the devices that have other experts"
        send("all-reduce", x.shape, x.dtype, why, chosen.rest, recomputed=False, transpose="")
    return out


def _flops(avals: Sequence[Any], parts: ShardCounts, token_dims: int) -> float:
    """FLOPs of each token's matmuls with its k experts, divided among the devices."""
    _, expert, _, *matrices = avals
    token_axes = {a for i in range(token_dims) for a in parts.axes.get(f"t{i}", ())}
    expert_axes = {a for i in range(matrices[0].ndim - 2) for a in parts.axes.get(f"e{i}", ())} - token_axes
    matmul_flops = 2 * math.prod(expert.shape) * sum(math.prod(m.shape[-2:]) for m in matrices)
    return matmul_flops / math.prod(parts.sizes[a] for a in expert_axes)


def _works(
    avals: Sequence[Any], parts: ShardCounts, *, token_dims: int, fused: bool = False, **options: Any
) -> KernelWork:
    """FLOPs and temporary bytes of :func:`_local`, forward and backward.

    Bytes, forward: the rows received, the result of each inward matrix (fused: of all together), and the rows returned. Backward:
    first the operands and the gradient of the last matrix, next to the inward results; then the gradients of the inward matrices.
    With further rounds, all matrices and their gradients are live until the end, and gradients accumulate in float32.
    """
    chosen = _exchange(avals, parts.axes, parts.sizes, token_dims, **options)
    x, _, _, *matrices = avals
    flops = _flops(avals, parts, token_dims)
    dense = chosen.strategy == "dense"  # the gathered matrices are live as well as the device's own
    *inward, down = (math.prod(m.shape) * m.dtype.itemsize * (chosen.devices if dense else 1) for m in matrices)
    rows = chosen.overlap * chosen.rows * (chosen.devices if chosen.strategy == "a2a" else 1)
    row, hidden = (n * rows * x.dtype.itemsize for n in (x.shape[-1], matrices[0].shape[-1]))
    n, more = len(inward), 0
    if dense:
        more = sum(inward) + down
    elif chosen.strategy == "ring":  # the tokens of all devices, and their results
        more = 2 * chosen.devices * math.prod(x.shape) * x.dtype.itemsize
    forward = more + row + max(row, hidden if fused else n * hidden)
    if chosen.rounds > 1:
        accumulators = 4 * (math.prod(x.shape) + sum(math.prod(m.shape) for m in matrices))
        return KernelWork(flops, forward, more + accumulators + 4 * row + (2 * n + 1) * hidden)
    last, inner = (2 + n) * hidden + 2 * row - sum(inward), n * hidden + 3 * row - down
    return KernelWork(flops, forward, more * (2 if dense else 1) + max(last, inner))

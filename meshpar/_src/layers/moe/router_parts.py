"""What all routers share: checked logits, the choice by value or by a kernel, the result, positions within an expert's capacity,
drops, and the losses.

Positions are counted over the tokens in their global order, so that a mesh that shards the tokens changes neither capacity nor
drops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import route

from ....errors import MeshparError
from ...program.declare import kernel_rule


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["expert", "weight", "losses", "load", "dropped"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """The choices of the tokens, k of E experts each. A pytree.

    Attributes:
      expert: int32 ``[*tokens, k]``; E where a choice was dropped or not made. The k experts of a token differ.
      weight: float32 ``[*tokens, k]``, differentiable; 0 where there is no choice.
      losses: float32 scalars by name: ``balance``, ``z``, ``importance``, ``load``, those that the router defines.
      load: int32 [E], choices of each expert before drops.
      dropped: int32 [], choices of real tokens that reach no expert (for Expert Choice: real tokens without an expert).
    """

    expert: jax.Array
    weight: jax.Array
    losses: dict[str, jax.Array]
    load: jax.Array
    dropped: jax.Array


def refused(message: str, *fixes: str) -> MeshparError:
    """The error for arguments that do not fit."""
    return MeshparError(f"mp.layers.moe: {message}", fixes=fixes)


# -- logits and choices


def read_logits(logits: jax.Array, k: int, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(float32 logits, 0 where a token cannot be routed; whether each token is real; whether it can be routed).

    Raises:
      MeshparError: logits, k or a mask that do not fit.
    """
    experts = logits.shape[-1]
    if logits.ndim < 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise refused(
            f"logits must be float [*tokens, E], got {logits.dtype}{list(logits.shape)}",
            "logits.astype(jnp.float32), with a last dim for the experts",
        )
    check_k(k, experts)
    if mask is not None and mask.shape != logits.shape[:-1]:
        raise refused(
            f"mask must be {list(logits.shape[:-1])}, got {list(mask.shape)}",
            f"a boolean for every token: {list(logits.shape[:-1])}",
        )
    logits = logits.astype(jnp.float32)
    fine = ~(jnp.isnan(logits) | (logits == jnp.inf)).any(-1) & (logits > -jnp.inf).any(-1)
    real = real_tokens(mask, fine.shape)
    return jnp.where((real & fine)[..., None], logits, 0.0), real, real & fine


def check_k(k: int, experts: int, name: str = "k", of: str = "experts") -> None:
    """Raise a MeshparError unless a token can have k different experts (or ``of``); ``name``: of the argument."""
    if not 1 <= k <= experts:
        raise refused(f"{name}={k} is not within 1…{experts}, the number of {of}", f"{name} from 1 to {experts}")


def check_own_k(router: str, own: str, fits: bool, k: int) -> None:
    """Raise a MeshparError unless ``k`` is the only number of experts that a router gives a token."""
    if not fits:
        raise refused(f'router="{router}": a token goes to {own}, not k={k}', 'router="top_k" takes any k')


def real_tokens(mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Which tokens are real, not padding: bool [*tokens]."""
    return jnp.ones(shape, bool) if mask is None else mask.astype(bool)


def best_experts(key: jax.Array, k: int, which: jax.Array) -> jax.Array:
    """The experts with the k largest keys: int32 [*tokens, k]; E where a key is -inf or the token cannot be routed."""
    value, expert = lax.top_k(lax.stop_gradient(key), k)
    made = (value > -jnp.inf) & which[..., None]
    return jnp.where(made, expert, key.shape[-1]).astype(jnp.int32)


def normalised(weight: jax.Array) -> jax.Array:
    """Weights [*tokens, k] divided by their sum over k; 0 where the sum is 0."""
    total = weight.sum(-1, keepdims=True)
    return jnp.where(total > 0, weight / jnp.where(total > 0, total, 1.0), 0.0)


def route_by_kernel(
    logits: jax.Array, which: jax.Array, bias: jax.Array | None = None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """(int32 experts [*tokens, k], float32 weights [*tokens, k]) by a kernel of ``meshpar_kernels.route``, as one op.

    Args:
      logits: float32 [*tokens, E].
      which: the tokens that can be routed.
      bias: [E], added to the scores for the choice only.
      options: k, score, groups, top_groups, group_top, renormalize, scale, implementation, as of ``meshpar_kernels.route``.

    Raises:
      NotImplementedError: the kernel cannot take these arguments; with every reason.
    """
    routable = jnp.where(which[..., None], logits, -jnp.inf)
    return _route_op(logits.ndim - 1, bias is not None)(routable, *([] if bias is None else [bias]), **options)


@functools.cache
def _route_op(token_dims: int, biased: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The routing op for logits with ``token_dims`` leading dims, as a kernel whose token dims may be sharded.

    Args:
      biased: whether it takes a bias [E] as its second operand.

    Returns:
      (logits [*tokens, E], bias) → (int32 experts [*tokens, k], float32 weights [*tokens, k]).
    """
    tokens = " ".join(f"t{i}" for i in range(token_dims))

    def moe_route(logits: jax.Array, bias: jax.Array | None = None, **options: Any) -> tuple[jax.Array, jax.Array]:
        plan = route(logits.reshape(-1, logits.shape[-1]), bias=bias, **options)
        shape = (*logits.shape[:-1], options["k"])
        return plan.expert.reshape(shape), plan.weight.reshape(shape)

    operands = f"{tokens} experts!, experts!" if biased else f"{tokens} experts!"
    return kernel_rule(f"{operands} -> {tokens} k!, {tokens} k!")(moe_route)


# -- capacity


def capacity_of(group_size: int, experts: int, k: int, factor: float) -> int:
    """Most choices an expert takes from one group: ceil(group_size·k·factor / experts), within 1…group_size.

    Raises:
      MeshparError: the factor is not positive.
    """
    if not factor > 0:
        raise refused(
            f"capacity={factor} must be above 0, or None for a router without drops", "capacity=1.25, or capacity=None"
        )
    return max(1, min(group_size, math.ceil(group_size * k * factor / experts)))


def in_groups(tokens: Sequence[int], groups: int) -> tuple[int, ...]:
    """The shape of the tokens with a leading dim for the groups, which are consecutive tokens and have equal sizes.

    A group is an integer number of rows, or a row is an integer number of groups.

    Raises:
      MeshparError: the tokens cannot be divided in this way.
    """
    total, left, shape = math.prod(tokens), groups, []
    if groups < 1 or total % groups:
        raise refused(
            f"groups={groups} does not divide the {total} tokens of {list(tokens)}", "groups that divides their number"
        )
    for n in tokens:
        outer = math.gcd(left, n)
        if outer not in (left, n):
            break
        left //= outer
        shape.append(n // outer)
    if left > 1:
        raise refused(
            f"groups={groups} does not cut tokens of shape {list(tokens)} into rows or parts of rows",
            "take a divisor of the first size, or a multiple of it that divides into the next",
        )
    return (groups, *shape, *tokens[len(shape) :])


def one_hots(expert: jax.Array, experts: int) -> list[jax.Array]:
    """One mask a choice: bool [*tokens, E]. The choice E has none."""
    every = jnp.arange(experts, dtype=jnp.int32)
    return [expert[..., j : j + 1] == every for j in range(expert.shape[-1])]


def pick(values: jax.Array, chosen: Sequence[jax.Array]) -> jax.Array:
    """The value of each choice: [*tokens, E] → [*tokens, k]; 0 without a choice."""
    zero = jnp.zeros((), values.dtype)
    return jnp.stack([jnp.where(mask, values, zero).sum(-1, dtype=values.dtype) for mask in chosen], -1)


def before(counts: jax.Array, dims: int) -> jax.Array:
    """Sum over all earlier tokens, in row-major order of the ``dims`` dims after the first: int32 [G, *tokens, E]."""
    last = dims
    out = jnp.cumsum(counts, axis=last, dtype=jnp.int32) - counts
    if dims > 1:
        out = out + jnp.expand_dims(before(counts.sum(last, dtype=jnp.int32), dims - 1), last)
    return out


def places(expert: jax.Array, experts: int, groups: int, *, first_choices_first: bool = False) -> jax.Array:
    """The place of each choice among the choices of the same expert in its group.

    Args:
      expert: int32 [*tokens, k].
      first_choices_first: all first choices come before all second ones (GShard); else the order of tokens alone counts.

    Returns:
      int32 [*tokens, k]; 0 without a choice.
    """
    tokens = expert.shape[:-1]
    shape = in_groups(tokens, groups)
    dims = len(shape) - 1
    chosen = [h.astype(jnp.int32).reshape(*shape, experts) for h in one_hots(expert, experts)]
    over = tuple(range(1, dims + 1))
    if first_choices_first:
        found, earlier = [], jnp.zeros((groups, *(1,) * dims, experts), jnp.int32)
        for mask in chosen:
            found.append(jnp.where(mask > 0, before(mask, dims) + earlier, 0).sum(-1))
            earlier = earlier + mask.sum(over, keepdims=True)
    else:
        total = before(functools.reduce(jnp.add, chosen), dims)
        found = [jnp.where(mask > 0, total, 0).sum(-1) for mask in chosen]
    return jnp.stack([f.reshape(tokens) for f in found], -1).astype(jnp.int32)


def finish(
    expert: jax.Array,
    weight: jax.Array,
    losses: dict[str, jax.Array],
    *,
    experts: int,
    real: jax.Array,
    capacity: float | None,
    groups: int,
    first_choices_first: bool = False,
) -> Routing:
    """Count the load, drop what goes beyond the capacity, and count the drops."""
    k = expert.shape[-1]
    load = functools.reduce(jnp.add, [h.astype(jnp.int32) for h in one_hots(expert, experts)])
    load = load.sum(tuple(range(load.ndim - 1)), dtype=jnp.int32)
    kept = expert < experts
    in_groups(expert.shape[:-1], groups)  # raises before a division
    if capacity is not None:
        most = capacity_of(math.prod(expert.shape[:-1]) // groups, experts, k, capacity)
        kept &= places(expert, experts, groups, first_choices_first=first_choices_first) < most
    wanted = real.sum(dtype=jnp.int32) * k
    return Routing(
        expert=jnp.where(kept, expert, experts),
        weight=jnp.where(kept, weight, 0.0),
        losses=losses,
        load=load,
        dropped=wanted - kept.sum(dtype=jnp.int32),
    )


# -- losses


def _mean(values: jax.Array, which: jax.Array) -> jax.Array:
    """Mean over the selected tokens: [*tokens, …] → […]; 0 if no token is selected."""
    over = tuple(range(which.ndim))
    wide = which.reshape(*which.shape, *(1,) * (values.ndim - which.ndim))
    return jnp.where(wide, values, 0.0).sum(over) / jnp.maximum(which.sum(), 1)


def balance_loss(probability: jax.Array, expert: jax.Array, which: jax.Array, *, by_row: bool = False) -> jax.Array:
    """E·Σ_i f_i·P_i: 1 when balanced (Switch Transformer, eq. 4–6; with k choices, f counts each as 1/k).

    GShard's loss is this divided by E². With ``by_row``, the mean of the losses of all sequences, the last dim of the tokens
    (DeepSeek-V3, eq. 17–20).

    Args:
      probability: float32 [*tokens, E], summing to one over the experts.
      expert: int32 [*tokens, k], before drops.
      which: bool [*tokens], the tokens to include.
    """
    experts, k = probability.shape[-1], expert.shape[-1]
    share = functools.reduce(jnp.add, [h.astype(jnp.float32) for h in one_hots(expert, experts)]) / k
    if not by_row or which.ndim < 2:
        return experts * (_mean(share, which) * _mean(probability, which)).sum()
    number = jnp.maximum(which.sum(-1), 1)[..., None]
    f = jnp.where(which[..., None], share, 0.0).sum(-2) / number
    p = jnp.where(which[..., None], probability, 0.0).sum(-2) / number
    return experts * _mean((f * p).sum(-1), which.any(-1))


def z_loss(logits: jax.Array, which: jax.Array) -> jax.Array:
    """Mean of logsumexp(logits)²: keeps logits small (ST-MoE, eq. 5)."""
    safe = jnp.where(which[..., None], logits, 0.0)
    return _mean(jnp.square(jax.nn.logsumexp(safe, -1)), which)


def cv_squared(values: jax.Array) -> jax.Array:
    """Variance over squared mean of a vector: the loss of Shazeer et al. 2017, eq. 6–7; 0 for a zero vector."""
    mean = values.mean()
    return jnp.square(values - mean).mean() / jnp.where(mean == 0, 1.0, jnp.square(mean))

"""Routers: pure functions from logits to the experts of each token, their weights, and the losses that balance them.

Each takes float logits [*tokens, E], computes in float32, and returns a :class:`Routing`. Shared arguments:

  k: experts per token.
  capacity: None: no drops; else an expert takes at most ceil(group size · k · capacity / E) choices of a group,
    in the order of the tokens.
  groups: number of equal groups into which the tokens, in row-major order, are divided; each has its own capacity.
  mask: bool [*tokens]; False for padding, which is not routed, not counted, and in no loss.

A token whose logits contain NaN or +inf, or are all -inf, has no expert and is counted as dropped; a logit of -inf excludes one
expert. Of equal logits the lowest expert wins. Only weights and losses have gradients. Positions within a capacity are counted over
the tokens in their global order, so that a mesh that shards the tokens changes neither capacity nor drops.

Raises (all): MeshparError for arguments out of range.
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
from meshpar_kernels.dispatch.differentiable import KERNELS

from ....errors import MeshparError
from ...compat.jax import default_promotion
from ...program.declare_kernel_rule import kernel_rule


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
        text = f"logits must be float [*tokens, E], got {logits.dtype}{list(logits.shape)}"
        raise refused(text, "logits.astype(jnp.float32), with a last dim for the experts")
    check_k(k, experts)
    if mask is not None and mask.shape != logits.shape[:-1]:
        text = f"mask must be {list(logits.shape[:-1])}, got {list(mask.shape)}"
        raise refused(text, f"a boolean for every token: {list(logits.shape[:-1])}")
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
        text = f"capacity={factor} must be above 0, or None for a router without drops"
        raise refused(text, "capacity=1.25, or capacity=None")
    return max(1, min(group_size, math.ceil(group_size * k * factor / experts)))


def in_groups(tokens: Sequence[int], groups: int) -> tuple[int, ...]:
    """The shape of the tokens with a leading dim for the groups, which are consecutive tokens and have equal sizes.

    A group is an integer number of rows, or a row is an integer number of groups.

    Raises:
      MeshparError: the tokens cannot be divided in this way.
    """
    total, left, shape = math.prod(tokens), groups, []
    if groups < 1 or total % groups:
        text = f"groups={groups} does not divide the {total} tokens of {list(tokens)}"
        raise refused(text, "groups that divides their number")
    for n in tokens:
        outer = math.gcd(left, n)
        if outer not in (left, n):
            break
        left //= outer
        shape.append(n // outer)
    if left > 1:
        text = f"groups={groups} does not cut tokens of shape {list(tokens)} into rows or parts of rows"
        raise refused(text, "take a divisor of the first size, or a multiple of it that divides into the next")
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


# -- routers


@default_promotion()
def top_k(
    logits, *, k, capacity=None, groups=1, mask=None, renormalize: bool = True, implementation: str | None = None
) -> Routing:
    """The k largest of a softmax (Shazeer et al. 2017 without noise; Mixtral).

    Args:
      renormalize: divide the weights of a token by their sum, which is the softmax over its choices alone.
      implementation: a kernel of ``meshpar_kernels.route`` for choices and weights; anything else: by JAX's ops.
    """
    logits, real, which = read_logits(logits, k, mask)
    probability = jax.nn.softmax(logits, -1)
    if implementation in KERNELS:
        expert, weight = route_by_kernel(logits, which, k=k, renormalize=renormalize, implementation=implementation)
    else:
        expert = best_experts(logits, k, which)
        weight = pick(probability, one_hots(expert, logits.shape[-1]))
        weight = normalised(weight) if renormalize else weight
    losses = {"balance": balance_loss(probability, expert, which), "z": z_loss(logits, which)}
    return finish(expert, weight, losses, experts=logits.shape[-1], real=real, capacity=capacity, groups=groups)


@default_promotion()
def switch(logits, *, k=1, capacity=None, groups=1, mask=None, implementation: str | None = None) -> Routing:
    """The best expert, weighted by its probability (Switch Transformer, Fedus et al. 2021)."""
    check_own_k("switch", "one expert", k == 1, k)
    return top_k(
        logits, k=1, capacity=capacity, groups=groups, mask=mask, renormalize=False, implementation=implementation
    )


@default_promotion()
def gshard(logits, *, k=2, capacity=None, groups=1, mask=None, key: jax.Array | None = None) -> Routing:
    """The best two, weights summing to one; all first choices come before all second ones (GShard, Lepikhin et al. 2020).

    Args:
      key: a random key: the second expert is used with probability min(1, 2·its weight). None: always.
    """
    check_own_k("gshard", "two experts", k == 2, k)
    logits, real, which = read_logits(logits, 2, mask)
    experts = logits.shape[-1]
    probability = jax.nn.softmax(logits, -1)
    expert = best_experts(logits, 2, which)
    losses = {"balance": balance_loss(probability, expert[..., :1], which), "z": z_loss(logits, which)}
    weight = normalised(pick(probability, one_hots(expert, experts)))
    skip = jnp.zeros(which.shape, bool)
    if key is not None:
        first, second = expert[..., 0], expert[..., 1]
        skip = (2 * lax.stop_gradient(weight[..., 1]) <= jax.random.uniform(key, which.shape)) & (second < experts)
        expert = jnp.stack([first, jnp.where(skip, experts, second)], -1)
    routing = finish(
        expert, weight, losses, experts=experts, real=real, capacity=capacity, groups=groups, first_choices_first=True
    )
    return dataclasses.replace(routing, dropped=routing.dropped - skip.sum(dtype=jnp.int32))


@default_promotion()
def noisy_top_k(
    logits, *, k, capacity=None, groups=1, mask=None, noise: jax.Array | None = None, key: jax.Array | None = None
) -> Routing:
    """The k largest of the logits with learned noise, softmax over those (Shazeer et al. 2017, eq. 3–10).

    Losses ``importance`` and ``load`` are the squared coefficients of variation of the summed weights, and of the smooth
    estimate of how many tokens each expert gets.

    Args:
      noise: float [*tokens, E], a second projection of the tokens; its softplus is the noise's standard deviation.
        None: no noise, and ``load`` counts the choices, without a gradient.
      key: a random key; None (evaluation) adds no noise.
    """
    clean, real, which = read_logits(logits, k, mask)
    experts = clean.shape[-1]
    noisy, width = clean, None
    if noise is not None:
        width = jax.nn.softplus(jnp.where(which[..., None], noise.astype(jnp.float32), 0.0)) + 1e-2
        if key is not None:
            noisy = clean + width * jax.random.normal(key, clean.shape)
    expert = best_experts(noisy, k, which)
    chosen = one_hots(expert, experts)
    taken = functools.reduce(jnp.logical_or, chosen)
    weight = pick(jax.nn.softmax(jnp.where(taken | ~which[..., None], noisy, -jnp.inf), -1), chosen)
    tokens = tuple(range(which.ndim))
    gates = functools.reduce(jnp.add, [jnp.where(h, weight[..., j : j + 1], 0.0) for j, h in enumerate(chosen)])
    if width is None or k == experts:
        load = taken.sum(tokens).astype(jnp.float32)
    else:
        # threshold for this expert if its noise were resampled: the k-th largest noisy logit of the others (eq. 9)
        largest = lax.top_k(noisy, k + 1)[0]
        beat = jnp.where(taken, largest[..., k : k + 1], largest[..., k - 1 : k])
        far = 1e9  # in place of the infinities of excluded experts, whose derivatives would be NaN
        z = (jnp.maximum(clean, -far) - jnp.clip(beat, -far, far)) / width
        chance = jnp.where(which[..., None] & (clean > -jnp.inf), jax.scipy.stats.norm.cdf(z), 0.0)
        load = chance.sum(tokens)
    losses = {"importance": cv_squared(gates.sum(tokens)), "load": cv_squared(load), "z": z_loss(clean, which)}
    return finish(expert, weight, losses, experts=experts, real=real, capacity=capacity, groups=groups)


@default_promotion()
def switch_max(logits, *, k=1, capacity=None, groups=1, mask=None) -> Routing:
    """The best expert, as ``switch``; an expert at its capacity takes the tokens with the largest probabilities, not the first
    ones (batch prioritized routing of Riquelme et al. 2021). It is not causal.
    """
    check_own_k("switch_max", "one expert", k == 1, k)
    routing = switch(logits, groups=groups, mask=mask)
    if capacity is None:
        return routing
    experts, tokens = logits.shape[-1], logits.shape[:-1]
    (chosen,) = one_hots(routing.expert, experts)
    shape = in_groups(tokens, groups)
    scores = jnp.where(chosen, lax.stop_gradient(routing.weight), -1.0).reshape(*shape, experts)
    most = capacity_of(math.prod(tokens) // groups, experts, 1, capacity)
    taken = _largest(scores, most).reshape(chosen.shape).any(-1, keepdims=True)
    expert, weight = jnp.where(taken, routing.expert, experts), jnp.where(taken, routing.weight, 0.0)
    dropped = routing.dropped + (chosen.any(-1, keepdims=True) & ~taken).sum(dtype=jnp.int32)
    return dataclasses.replace(routing, expert=expert, weight=weight, dropped=dropped)


@default_promotion()
def ntlb(logits, *, k=1, capacity=None, groups=1, mask=None, stages: int = 2) -> Routing:
    """Switch with "no token left behind" (Fedus et al. 2021, appendix B): a token whose expert is at its capacity goes to its
    next best expert, if that has a free position, weighted by its probability.

    Args:
      stages: experts that a token tries, at most E; the tokens without an expert after that are dropped. 1: as ``switch``.
    """
    logits, real, which = read_logits(logits, 1, mask)
    experts, tokens = logits.shape[-1], logits.shape[:-1]
    if k != 1 or not 1 <= stages <= experts:
        text = f'router="ntlb": a token goes to one expert after 1 to E={experts} stages, not k={k} after {stages=}'
        raise refused(text, "k=1, and stages from 1 to the number of experts")
    probability = jax.nn.softmax(logits, -1)
    ranked = one_hots(best_experts(logits, stages, which), experts)
    shape = in_groups(tokens, groups)
    over = tuple(range(1, len(shape)))
    group_size = math.prod(tokens) // groups
    most = group_size if capacity is None else capacity_of(group_size, experts, 1, capacity)
    taken = jnp.zeros((*shape, experts), bool)
    for wanted in ranked:
        asked = wanted.reshape(taken.shape) & ~taken.any(-1, keepdims=True)
        place = before(asked.astype(jnp.int32), len(over)) + taken.sum(over, keepdims=True, dtype=jnp.int32)
        taken |= asked & (place < most)
    taken = taken.reshape(logits.shape)
    found = taken.any(-1, keepdims=True)
    every = jnp.arange(experts, dtype=jnp.int32)
    first = ranked[0]
    best = jnp.where(first, every, 0).sum(-1, keepdims=True)
    losses = {"balance": balance_loss(probability, best, which), "z": z_loss(logits, which)}
    return Routing(
        expert=jnp.where(found, jnp.where(taken, every, 0).sum(-1, keepdims=True, dtype=jnp.int32), experts),
        weight=jnp.where(taken, probability, 0.0).sum(-1, keepdims=True),
        losses=losses,
        load=first.sum(tuple(range(len(tokens))), dtype=jnp.int32),
        dropped=(real & ~found[..., 0]).sum(dtype=jnp.int32),
    )


@default_promotion()
def expert_choice(logits, *, capacity: float = 2.0, groups=1, mask=None, k=1) -> Routing:
    """Each expert selects its best tokens (Zhou et al. 2022): ceil(group size · capacity / E) of a group; no imbalance.

    Any number of experts may select a token; the result has E entries per token. It is not causal: the selection of a token
    depends on later ones. Of equal scores the first tokens win.

    Args:
      k: multiplies the capacity, as in the other routers.
    """
    if capacity is None:
        raise refused('router="expert_choice" takes a capacity: each expert selects so many tokens', "capacity=2.0")
    logits, real, which = read_logits(logits, 1, mask)
    experts, shape = logits.shape[-1], in_groups(which.shape, groups)
    most = capacity_of(which.size // groups, experts, k, capacity)
    probability = jax.nn.softmax(logits, -1)
    grouped = lax.stop_gradient(jnp.where(which[..., None] & (logits > -jnp.inf), probability, -1.0))
    taken = _largest(grouped.reshape(*shape, experts), most).reshape(logits.shape)
    expert = jnp.where(taken, jnp.arange(experts, dtype=jnp.int32), experts)
    nobody = real & ~taken.any(-1)
    return Routing(
        expert=expert,
        weight=jnp.where(taken, probability, 0.0),
        losses={"z": z_loss(logits, which)},
        load=taken.sum(tuple(range(which.ndim)), dtype=jnp.int32),
        dropped=nobody.sum(dtype=jnp.int32),
    )


def _largest(scores: jax.Array, most: int) -> jax.Array:
    """The ``most`` largest nonnegative scores of each expert in each group; of equal scores the first tokens win.

    The smallest score that is taken is determined bit by bit, two at a time, so that devices all-reduce counts and not scores.

    Args:
      scores: float32 [G, *tokens, E] in 0…1; a negative one is never taken.

    Returns:
      bool, of the same shape.
    """
    # nonnegative floats have the order of their bits
    bits = jnp.where(scores >= 0, lax.bitcast_convert_type(jnp.maximum(scores, 0.0), jnp.int32) + 1, 0)
    over = tuple(range(1, scores.ndim - 1))

    def count(which_ones: jax.Array) -> jax.Array:
        return which_ones.sum(over, keepdims=True, dtype=jnp.int32)

    def refine(bound: jax.Array, shift: jax.Array) -> tuple[jax.Array, None]:
        steps = [count(bits >= bound + (d << shift)) >= most for d in (1, 2, 3)]
        return bound + (sum(s.astype(jnp.int32) for s in steps) << shift), None

    start = jnp.zeros((scores.shape[0], *(1,) * len(over), scores.shape[-1]), jnp.int32)
    bound, _ = lax.scan(refine, start, jnp.arange(28, -1, -2, dtype=jnp.int32))
    above, level = bits > bound, (bits == bound) & (bits > 0)
    return above | (level & (before(level.astype(jnp.int32), len(over)) < most - count(above)))


@default_promotion()
def deepseek_v3(
    logits,
    *,
    k,
    capacity=None,
    groups=1,
    mask=None,
    bias: jax.Array | None = None,
    expert_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    implementation: str | None = None,
) -> Routing:
    """Sigmoid scores, a bias that balances the load without a loss, choices from a few groups of experts (DeepSeek-V3).

    A token first takes the ``top_groups`` groups of adjacent experts whose two best biased scores have the largest sum, then
    its k best experts in them. Weights are the scores, without the bias, divided by their sum, times ``scale``. The loss
    ``balance`` is the complementary one, of each sequence.

    Args:
      bias: [E], moved after each step by :func:`update_bias`; no gradient.
      expert_groups: must divide E.
      top_groups: groups a token may use; None: all.
      implementation: as in :func:`top_k`.
    """
    logits, real, which = read_logits(logits, k, mask)
    experts = logits.shape[-1]
    top_groups = expert_groups if top_groups is None else top_groups
    if expert_groups < 1 or experts % expert_groups or not 1 <= top_groups <= expert_groups:
        text = f'router="deepseek_v3": {top_groups} of {expert_groups} groups of {experts} experts'
        raise refused(text, "expert_groups divides the number of experts, and top_groups is at most expert_groups")
    if top_groups * (experts // expert_groups) < k:
        text = f'router="deepseek_v3": {top_groups} groups of {experts // expert_groups} experts hold fewer than k={k}'
        raise refused(text, "more top_groups, or a smaller k")
    score = jax.nn.sigmoid(logits)
    if implementation in KERNELS:
        options = {"score": "sigmoid", "groups": expert_groups, "top_groups": top_groups, "scale": scale}
        expert, weight = route_by_kernel(logits, which, bias, k=k, **options, implementation=implementation)
    else:
        expert = _by_groups(logits, score, bias, k, expert_groups, top_groups, which)
        weight = normalised(pick(score, one_hots(expert, experts))) * scale
    balance = balance_loss(normalised(score), expert, which, by_row=True)
    losses = {"balance": balance, "z": z_loss(logits, which)}
    return finish(expert, weight, losses, experts=experts, real=real, capacity=capacity, groups=groups)


def _by_groups(
    logits: jax.Array, score: jax.Array, bias: jax.Array | None, k: int, groups: int, top_groups: int, which: jax.Array
) -> jax.Array:
    """The k best by score and bias, within the best groups: int32 [*tokens, k]."""
    experts = logits.shape[-1]
    value = lax.stop_gradient(score)
    if bias is not None:
        value = value + lax.stop_gradient(bias.astype(jnp.float32))
    value = jnp.where(jnp.isnan(value) | (logits == -jnp.inf), -jnp.inf, value)
    if top_groups < groups:
        by_group = value.reshape(*value.shape[:-1], groups, experts // groups)
        best = lax.top_k(by_group, min(2, experts // groups))[0]
        total = jnp.where(best > -jnp.inf, best, 0.0).sum(-1)
        total = jnp.where(best[..., 0] > -jnp.inf, total, -jnp.inf)
        group = best_experts(total, top_groups, which)
        allowed = functools.reduce(jnp.logical_or, one_hots(group, groups))
        value = jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(value.shape)
    return best_experts(value, k, which)


@default_promotion()
def update_bias(bias: jax.Array, load: jax.Array, rate: float = 1e-3) -> jax.Array:
    """The balancing bias after a step: up by ``rate`` for experts with less than the mean load, down for those with more.

    Args:
      bias: float [E], or [layers, E].
      load: int, of the bias's shape, `Routing.load` of the step.

    Example:
      >>> [round(float(b), 3) for b in mp.layers.update_bias(jnp.zeros(3), jnp.array([4, 1, 1]))]
      [-0.001, 0.001, 0.001]
    """
    load = load.astype(jnp.float32)
    return bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load).astype(bias.dtype)


@default_promotion()
def hash_router(ids: jax.Array, *, experts: int, k=1, capacity=None, groups=1, mask=None) -> Routing:
    """A fixed expert for each token id, with weight 1/k (Roller et al. 2021); nothing is learned.

    Args:
      ids: int [*tokens], such as the vocabulary index.
      experts: E. The k experts of an id have numbers that differ by E//k.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise refused(f'router="hash": ids must be integers, got {ids.dtype}', "ids.astype(jnp.int32)")
    check_k(k, experts)
    real = real_tokens(mask, ids.shape)
    h = ids.astype(jnp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a bijection of 32 bits that mixes them
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    first = ((h ^ (h >> 16)) % jnp.uint32(experts)).astype(jnp.int32)
    expert = jnp.stack([(first + j * (experts // k)) % experts for j in range(k)], -1)
    expert = jnp.where(real[..., None], expert, experts)
    weight = jnp.where(expert < experts, jnp.float32(1 / k), 0.0)
    return finish(expert, weight, {}, experts=experts, real=real, capacity=capacity, groups=groups)


@default_promotion()
def two_level(outer, inner, *, k, outer_k: int = 1, capacity=None, groups=1, mask=None) -> Routing:
    """Experts in two levels (Shazeer et al. 2017, appendix B): first groups of experts, then experts in each of them.

    Args:
      outer: float [*tokens, O], logits of the groups.
      inner: float [*tokens, O, I], logits of the experts in each. Expert (o, i) is number o·I + i of E = O·I.
        A group whose experts are all -inf is excluded.
      k: experts per token in total, a multiple of ``outer_k``: k / outer_k in each of its groups.
      outer_k: groups per token. A weight is the product of two softmaxes, each over the selected entries.
    """
    if outer_k < 1 or k % outer_k:
        raise refused(f'router="two_level": outer_k={outer_k} does not divide k={k}', f"outer_k that divides {k}")
    if not 1 <= k // max(outer_k, 1) <= inner.shape[-1]:
        text = f'router="two_level": k={k} in {outer_k} groups is more than the {inner.shape[-1]} experts of a group'
        raise refused(text, "a smaller k, or a larger outer_k")
    if inner.shape[:-1] != outer.shape:
        text = f'router="two_level": inner must be {[*outer.shape, "I"]}, got {list(inner.shape)}'
        raise refused(text, "logits of the groups and, with one more dim, of the experts of each")
    many, each = inner.shape[-2:]
    check_k(outer_k, many, "outer_k", "groups")
    flat = inner.reshape(*outer.shape[:-1], many * each)
    joined, real, which = read_logits(jnp.concatenate([outer, flat], -1), 1, mask)
    outer, inner = joined[..., :many], joined[..., many:].reshape(inner.shape)
    usable = (outer > -jnp.inf) & (inner > -jnp.inf).any(-1)  # the others are excluded with all of their experts
    which &= usable.any(-1)
    wide = which[..., None] & usable
    outer = jnp.where(wide, outer, jnp.where(which[..., None], -jnp.inf, 0.0))
    inner = jnp.where(wide[..., None], inner, 0.0)
    group = best_experts(outer, outer_k, which)
    best = best_experts(inner, k // outer_k, wide)
    p_group = normalised(pick(jax.nn.softmax(outer, -1), one_hots(group, many)))
    p_inner = jax.nn.softmax(inner, -1)
    p_best = normalised(pick(p_inner, one_hots(best, each)))  # [*tokens, O, k/outer_k]
    experts, weights = [], []
    for j, mine in enumerate(one_hots(group, many)):
        place, chosen = jnp.where(mine[..., None], best, 0).sum(-2), group[..., j : j + 1]
        experts.append(jnp.where((chosen < many) & (place < each), chosen * each + place, many * each))
        weights.append(p_group[..., j : j + 1] * jnp.where(mine[..., None], p_best, 0.0).sum(-2))
    expert = jnp.concatenate(experts, -1).astype(jnp.int32)
    weight = jnp.where(expert < many * each, jnp.concatenate(weights, -1), 0.0)
    probability = (jax.nn.softmax(outer, -1)[..., None] * p_inner).reshape(flat.shape)
    z = z_loss(outer, which) + z_loss(inner, wide)
    losses = {"balance": balance_loss(probability, expert, which), "z": z}
    return finish(expert, weight, losses, experts=many * each, real=real, capacity=capacity, groups=groups)


ROUTERS = {
    **{f.__name__: f for f in (top_k, noisy_top_k, gshard, switch, switch_max, ntlb, expert_choice, deepseek_v3)},
    "hash": hash_router,
    "two_level": two_level,
}
"""By name, as ``moe(router=…)`` takes them."""

ROUTED_BY_KERNELS = ("top_k", "switch", "deepseek_v3")
"""Those that take ``implementation=``."""

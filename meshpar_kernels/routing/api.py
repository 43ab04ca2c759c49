"""`route`, `permute`, `combine`: checks, choice of implementation, gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshpar_kernels import _compat
from meshpar_kernels._choose import dispatch, refuse_sharded
from meshpar_kernels._numerics import no_tangent, row_dots
from meshpar_kernels.routing import gpu, reference, tpu, tpu_gather
from meshpar_kernels.routing.plan import RoutePlan

SCORES = ("softmax", "sigmoid")


def route(
    logits: jax.Array,
    k: int,
    *,
    score: str = "softmax",
    bias: jax.Array | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    group_top: int = 2,
    renormalize: bool = True,
    scale: float = 1.0,
    capacity: int | None = None,
    implementation: str | None = None,
) -> RoutePlan:
    """Choose the k best experts of each token, and assign each choice a row in the experts' buffer.

    With score s = softmax(logits) or sigmoid(logits), the experts are chosen by s + bias (without a bias, by the
    logits: the same order, and no ties if s underflows), and weighted by s, never by the bias. Ties go to the lowest
    index. With groups, a token first chooses its `top_groups` groups of adjacent experts by the sum of the `group_top`
    largest s + bias in each. Rows are assigned in the order of the tokens, so the result is a function of the arguments
    only.

    A logit of -inf masks an expert. A token whose logits contain NaN or +inf, or are all -inf, is routed to no expert:
    its weights are 0, it has no row, and its choices are counted in `dropped`. So padding tokens can be masked. They do
    not influence other tokens.

    Sources: Shazeer et al. 2017 (top-k gating), Mixtral (softmax, renormalized), DeepSeek-V2 (groups by their best
    expert: `group_top=1`), DeepSeek-V3 (sigmoid, bias for the choice only, groups by their best two experts).

    Args:
      logits: float [T, E], any float dtype; computed in float32.
      k: experts per token, 1…E.
      score: "softmax" or "sigmoid".
      bias: [E], added for the choice only; no gradient. An expert whose bias is NaN is never chosen.
      groups: number of groups; must divide E.
      top_groups: groups that a token may use; None: all.
      group_top: number of experts whose scores are added up to the score of a group.
      renormalize: divide a token's weights by their sum (over all its choices, dropped ones too).
      scale: factor on the weights, after that.
      capacity: largest number of rows of an expert; later choices are dropped and counted. None: no limit, nothing is
        dropped.
      implementation: "pallas_tpu", "pallas_gpu", "pallas" (the kernel for the platform) or "reference". None:
        "reference", unless `MESHPAR_KERNELS=pallas`; see `meshpar_kernels._choose.dispatch`.

    Returns:
      A `RoutePlan`. Its `weight` is differentiable with respect to the logits; the choice itself is not.

    Raises:
      ValueError: k, groups, top_groups, group_top or capacity out of range, shapes that do not fit, an unknown score,
        or logits sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot take these arguments; with every reason.
    """
    top_groups = groups if top_groups is None else top_groups
    how = reference.Router(k, score, groups, top_groups, group_top, renormalize, float(scale))
    _check_route(logits, bias, how, capacity)
    refuse_sharded("route", logits=logits, bias=bias)
    logits, bias = _compat.same_varying(logits, bias)
    return _route(how, capacity, implementation, logits, bias)


def _check_route(logits: jax.Array, bias: jax.Array | None, how: reference.Router, capacity: int | None) -> None:
    """Check the arguments of `route`. Raises ValueError."""
    k, score, groups, top_groups, group_top, *_ = how
    if logits.ndim != 2:
        raise ValueError(f"route: logits must be [T, E], got shape {logits.shape}")
    experts = logits.shape[1]
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"route: logits must be floating point, got {logits.dtype}")
    if score not in SCORES:
        raise ValueError(f"route: score must be one of {SCORES}, got {score!r}")
    if not 1 <= k <= experts:
        raise ValueError(f"route: k={k} is not within 1…E, E={experts}")
    if groups < 1 or experts % groups:
        raise ValueError(f"route: groups={groups} does not divide E={experts}")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"route: top_groups={top_groups} is not within 1…groups, groups={groups}")
    if top_groups * (experts // groups) < k:
        raise ValueError(f"route: top_groups={top_groups} groups of {experts // groups} experts hold fewer than k={k}")
    if group_top < 1:
        raise ValueError(f"route: group_top={group_top} must be at least 1")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"route: bias must be [E]=[{experts}], got shape {bias.shape}")
    if capacity is not None and capacity < 0:
        raise ValueError(f"route: capacity={capacity} is negative")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _route(
    how: reference.Router, capacity: int | None, implementation: str | None, logits: jax.Array, bias: jax.Array | None
) -> RoutePlan:
    """The `RoutePlan` of logits [T, E]; experts by `_choose`, offsets by the counts, which `capacity` limits."""
    choice: Any = _choose(how, implementation, logits, bias)
    expert, weight, rank, counts = choice
    admitted = counts if capacity is None else jnp.minimum(counts, capacity)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(admitted, dtype=jnp.int32)])
    return RoutePlan(expert, weight, counts, rank, offsets, expert.size - offsets[-1], capacity)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _choose(how: reference.Router, implementation: str | None, logits: jax.Array, bias: jax.Array | None):
    """(expert, weight, rank, counts) by the chosen implementation of `reference.route`; differentiable in the logits."""
    if logits.shape[0] == 0:  # no token: nothing for a kernel to do
        return reference.route(logits, bias, how)
    functions: dict[str, Any] = {
        "pallas_tpu": tpu.route_unsupported(logits, how) or functools.partial(tpu.route, how=how),
        "pallas_gpu": gpu.route_unsupported(logits, how) or functools.partial(gpu.route, how=how),
        "reference": functools.partial(reference.route, how=how),
    }
    return dispatch("route", implementation, functions, "reference", logits, bias)


def _choose_fwd(how, implementation, logits, bias):
    out: Any = _choose(how, implementation, logits, bias)
    return out, (logits, bias, out[0])


def _choose_bwd(how, implementation, saved, cotangents):
    logits, bias, expert = saved
    _, pull = jax.vjp(lambda x: reference.weights(x, expert, how), logits)
    return (*pull(cotangents[1]), None if bias is None else jnp.zeros_like(bias))


_choose.defvjp(_choose_fwd, _choose_bwd)


def permute(
    x: jax.Array, plan: RoutePlan, *, weight: jax.Array | None = None, implementation: str | None = None
) -> jax.Array:
    """Copy each token to the rows of its choices: the experts' buffer [R, H].

    Row `plan.rows[t, j]` becomes `x[t]` (times `weight[t, j]`); unused rows become 0. It is the transpose of `combine`
    with the same weight. With T = 0 the buffer is empty.

    Args:
      x: [T, H], float32 or bfloat16 (other dtypes: implementation "reference").
      plan: from `route`.
      weight: float32 [T, k], or None for ones; differentiable.
      implementation: "pallas_tpu", "pallas_gpu", "pallas" (the kernel for the platform) or "reference". None:
        "reference", unless `MESHPAR_KERNELS=pallas`.

    Returns:
      [R, H] in x's dtype, R = `plan.buffer_rows`.

    Raises:
      ValueError: shapes that do not fit the plan, or operands sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot take these arguments; with every reason.
    """
    _check("permute", "x", x, plan.expert.shape[0], plan, weight)
    return _moved_jit("permute", implementation, x, plan, weight)


def combine(
    y: jax.Array, plan: RoutePlan, *, weight: jax.Array | None = None, implementation: str | None = None
) -> jax.Array:
    """Sum the rows of each token's choices: out[t] = Σ_j weight[t, j] · y[plan.rows[t, j]], in float32.

    A dropped choice adds nothing. Unused rows are never read: they may contain NaN. It is the transpose of `permute`
    with the same weight. The usual weight is `plan.weight`; omit it if the rows are already weighted (`row_scale` of
    `grouped_matmul`).

    Args:
      y: [R, H], R = `plan.buffer_rows`; float32 or bfloat16 (other dtypes: implementation "reference").
      plan: from `route`.
      weight: float32 [T, k], or None for ones; differentiable.
      implementation: as in `permute`.

    Returns:
      [T, H] in y's dtype.

    Raises:
      ValueError: shapes that do not fit the plan, or operands sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot take these arguments; with every reason.
    """
    _check("combine", "y", y, plan.buffer_rows, plan, weight)
    return _moved_jit("combine", implementation, y, plan, weight)


def _check(op: str, name: str, x: jax.Array, rows: int, plan: RoutePlan, weight: jax.Array | None) -> None:
    """Check the operands of `permute` and `combine`.

    Raises:
      ValueError: x is not [rows, H], weight does not have the plan's shape [T, k], or an operand is sharded outside of
        `shard_map`.
    """
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(f"{op}: {name} must be [{rows}, H] for this plan, got shape {x.shape}")
    if weight is not None and weight.shape != plan.expert.shape:
        raise ValueError(f"{op}: weight must be [T, k]={list(plan.expert.shape)}, got shape {weight.shape}")
    refuse_sharded(op, **{name: x}, weight=weight)


def _gather_sum(
    op: str, implementation: str | None, x: jax.Array, index: jax.Array, weight: jax.Array | None
) -> jax.Array:
    """`reference.gather_sum` by the requested implementation."""
    if 0 in x.shape or 0 in index.shape:
        return reference.gather_sum(x, index, weight)
    functions: dict[str, Any] = {
        "pallas_tpu": tpu_gather.gather_sum_unsupported(x, index) or tpu_gather.gather_sum,
        "pallas_gpu": gpu.gather_sum_unsupported(x, index) or gpu.gather_sum,
        "reference": reference.gather_sum,
    }
    return dispatch(op, implementation, functions, "reference", x, index, weight)


def _by_row(choices: jax.Array, sources: jax.Array) -> jax.Array:
    """[T, k] → [R]: the value of each row's choice; 0 for an unused row.

    Values of choices are flattened column by column: as [T, k] they would fill 128 lanes on a TPU.
    """
    tokens, k = choices.shape
    if choices.size == 0:
        return jnp.zeros(sources.shape, choices.dtype)
    choice = jnp.maximum(sources, 0)
    return jnp.where(sources >= 0, choices.T.reshape(-1)[choice % k * tokens + choice // k], 0)


def _by_choice(values: jax.Array, rows: jax.Array) -> jax.Array:
    """[R] → [T, k], the inverse of `_by_row`; 0 for a choice without a row."""
    if values.size == 0:
        return jnp.zeros(rows.shape, values.dtype)
    flat = rows.T.reshape(-1)
    return jnp.where(flat >= 0, values[jnp.maximum(flat, 0)], 0).reshape(rows.shape[::-1]).T


def _spread(
    op: str, implementation: str | None, x: jax.Array, weight: jax.Array | None, rows: jax.Array, sources: jax.Array
) -> jax.Array:
    """[T, H] → [R, H]: each token copied to the rows of its choices, times `weight`; 0 in unused rows."""
    k = max(rows.shape[1], 1)
    tokens = jnp.where(sources >= 0, sources // k, -1)[:, None]
    row_weight = None if weight is None else _by_row(weight, sources)[:, None]
    return _gather_sum(op, implementation, x, tokens, row_weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def moved(op, implementation, x, weight, rows, sources):
    """`permute` or `combine`, of which each is the transpose of the other."""
    if op == "permute":
        return _spread(op, implementation, x, weight, rows, sources)
    return _gather_sum(op, implementation, x, rows, weight)


def _moved_fwd(op, implementation, x, weight, rows, sources):
    saved = (None if weight is None else x, weight, rows, sources)
    return moved(op, implementation, x, weight, rows, sources), saved


def _moved_bwd(op, implementation, saved, grad):
    """Backward rule of `moved`: gradients of x and weight; the indices get float0 zeros."""
    x, weight, rows, sources = saved
    name = f"{op}'s gradient"
    pair: Any  # arrays [R, H] whose product, summed over H, are the gradients of the rows' weights
    if op == "permute":
        grad_x = _gather_sum(name, implementation, grad, rows, weight)
        pair = (None, None) if weight is None else (_spread(name, implementation, x, None, rows, sources), grad)
    else:
        grad_x = _spread(name, implementation, grad, None, rows, sources)
        pair = grad_x, x
        if weight is not None:
            grad_x = (grad_x.astype(jnp.float32) * _by_row(weight, sources)[:, None]).astype(grad.dtype)
    grad_weight = None if weight is None else _by_choice(row_dots(*pair), rows).astype(weight.dtype)
    return grad_x, grad_weight, no_tangent(rows), no_tangent(sources)


moved.defvjp(_moved_fwd, _moved_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _moved_jit(op, implementation, x, plan, weight):
    x, weight, rows, sources = _compat.same_varying(x, weight, plan.rows, plan.sources)
    return moved(op, implementation, x, weight, rows, sources)

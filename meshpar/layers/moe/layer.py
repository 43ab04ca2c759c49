"""``moe``: route, bring tokens and experts together, sum. One semantic, whatever the layout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...compat.jax import default_promotion
from ...dims import did_you_mean
from ...errors import MeshparError
from .choice import KERNELS
from .experts import run_experts
from .routers import ROUTED_BY_KERNELS, ROUTERS
from .routing import Routing, capacity_of

__all__ = ["MoEAux", "moe"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class MoEAux(NamedTuple):
    """What a mixture of experts did besides its output.

    Attributes:
      losses: float32 scalars by name, unscaled: those that the router defines (``balance``, ``z``, ``importance``, ``load``).
      load: int32 [E], choices of each expert before drops.
      dropped: int32 [], choices of real tokens that no expert served (Expert Choice: real tokens without an expert).
    """

    losses: dict[str, jax.Array]
    load: jax.Array
    dropped: jax.Array


@default_promotion()
def moe(
    x: jax.Array,
    router_weights: Any,
    experts: Mapping[str, jax.Array],
    *,
    router: str | Callable[..., Routing] = "top_k",
    k: int | None = None,
    capacity: float | None = None,
    groups: int = 1,
    mask: jax.Array | None = None,
    shared: Mapping[str, jax.Array] | None = None,
    activation: str = "silu",
    strategy: str | None = None,
    slack: float = 1.25,
    implementation: str | None = None,
    exchange: str | None = None,
    **options: Any,
) -> tuple[jax.Array, MoEAux]:
    """A mixture of experts: each token goes to a few of E experts, and their results are summed by weight.

    Name the experts' dims, e.g. ``expert embed mlp``, and a layout splits them as it likes: ``expert: data`` (the tokens of
    all devices are exchanged), ``expert: model`` (each device serves its experts for its tokens), ``mlp: model``, both, with
    FSDP, or nothing. None changes the result: routing, capacity and drops depend on the tokens in their global order.
    Without a capacity nothing is ever dropped: buffers hold ``slack`` times a balanced load, and what goes beyond is
    exchanged in further rounds. Call the router weights' last dim otherwise than ``expert`` (``router``), so that
    splitting experts leaves the small router whole.

    Args:
      x: float [*tokens, H].
      router_weights: [H, E]. For "noisy_top_k" also ``{"kernel": …, "noise": …}``; for "two_level" ``{"outer": [H, O],
        "inner": [H, O, I]}``; None for "hash", which needs ``ids=``. Logits are computed in float32.
      experts: ``gate`` and ``up`` [E, H, M] (or ``up`` alone) and ``down`` [E, M, H]; two dims O, I in place of E are one in
        row-major order. Converted to x's dtype.
      router: a name in :data:`meshpar.layers.moe.ROUTERS`, or a function as those are (it may send a token to one expert twice).
      k: experts a token goes to; None: the router's default, which "top_k", "noisy_top_k", "deepseek_v3" and "two_level" lack.
      capacity: None: no drops. A number: most rows of an expert are group size · k · capacity / E, the rest is dropped.
        For "expert_choice" the number of experts a token has on average (2 by default).
      groups: the tokens are cut into so many groups, each with its own capacity.
      mask: bool [*tokens], False for padding, which is never routed and gets 0 (and what ``shared`` gives).
      shared: ``gate``, ``up``, ``down`` of an expert that all tokens go to: [H, M] and [M, H].
      activation: "silu" (with ``gate``: SwiGLU), "gelu", "relu".
      strategy: "a2a", "ring", "dense", or None for the one that sends the fewest bytes
        (:class:`meshpar.layers.moe.strategy.Ways`); concerns layouts that split tokens and experts over the same axis.
      slack: size of the exchange's buffers, in balanced loads; at least 1. No result depends on it.
      implementation: of the grouped products, as in ``meshpar_kernels.grouped_matmul``. "pallas", "pallas_tpu" and
        "pallas_gpu" take the kernels for all else too: for the choice of experts (with "top_k", "switch" and "deepseek_v3"),
        the copies of rows and their sums.
      exchange: how "a2a" sends rows, as in ``meshpar_kernels.expert_dispatch``: None and "padded" in whole buffers by XLA;
        "pallas", "pallas_tpu", "pallas_gpu" by a kernel, only those in use (H must be a multiple of 128). No default, as no
        accelerator has timed it. No result depends on it.
      **options: for the router: ``key``, ``bias``, ``expert_groups``, ``ids``, …

    Returns:
      ([*tokens, H] in x's dtype, :class:`MoEAux`).

    Raises:
      MeshparError: shapes or options that do not fit.
      NotImplementedError: a kernel that was asked for cannot take these arguments; with every reason.
    """
    number = _check(x, experts, activation)
    route = _named_router(router)
    if k is not None:
        options["k"] = k
    if capacity is not None:
        options["capacity"] = capacity
    if implementation in KERNELS and router in ROUTED_BY_KERNELS:
        options["implementation"] = implementation
    _check_options(router, route, options)
    routing = _route(route, x, router_weights, number, {**options, "groups": groups, "mask": mask})
    places = routing.expert.shape[-1]
    tokens = math.prod(x.shape[:-1])
    rate, most = float(places), None
    if isinstance(router, str) and (
        router == "expert_choice" or capacity is not None
    ):  # of other routers nothing is known
        factor = 2.0 if capacity is None else capacity
        per_token = options.get("k", 1) if router == "expert_choice" else places
        most = groups * capacity_of(tokens // groups, number, per_token, factor)
        rate = min(rate, most * number / max(tokens, 1))
    names = ("gate", "up", "down") if "gate" in experts else ("up", "down")
    y = run_experts(
        x, routing.expert, routing.weight, [experts[n].astype(x.dtype) for n in names], activation=activation, rate=rate,
        most_per_expert=most, slack=float(slack), strategy=strategy, distinct=not callable(router),
        implementation=implementation, exchange=exchange,
    )  # fmt: skip
    if shared is not None:
        y = y + _dense(x, shared, activation)
    return y, MoEAux(routing.losses, routing.load, routing.dropped)


def _named_router(router: str | Callable[..., Routing]) -> Callable[..., Routing]:
    if callable(router):
        return router
    if router not in ROUTERS:
        raise MeshparError(f"moe: no router {router!r}", fixes=did_you_mean(router, ROUTERS, "routers"))
    return ROUTERS[router]


_FROM_WEIGHTS = ("noise", "experts", "groups", "mask")
"""Arguments of routers that :func:`moe` gives them."""


def _check_options(
    router: str | Callable[..., Routing], route: Callable[..., Routing], options: Mapping[str, Any]
) -> None:
    """Raises MeshparError for options that a named router needs and lacks, or does not take."""
    if callable(router):
        return
    takes = {p.name: p for p in inspect.signature(route).parameters.values() if p.kind is p.KEYWORD_ONLY}
    ours = {name: p for name, p in takes.items() if name not in _FROM_WEIGHTS}
    missing = [name for name, p in ours.items() if p.default is p.empty and name not in options]
    if missing:
        what = {"k": "k, the number of experts that each token goes to"}
        fixes = {"k": ["k=2 for two experts a token, as in Mixtral", 'router="switch" sends a token to one expert']}
        raise MeshparError(
            f'moe: router="{router}" needs {what.get(missing[0], missing[0])}', fixes=fixes.get(missing[0], ())
        )
    if unknown := [name for name in options if name not in ours and name != "ids"]:
        raise MeshparError(
            f'moe: router="{router}" takes no {unknown[0]}=; it takes {", ".join(f"{n}=" for n in ours)}',
            fixes=did_you_mean(unknown[0], ours, "options"),
        )


def _check(x: jax.Array, experts: Mapping[str, jax.Array], activation: str) -> int:
    """The number of experts."""
    shapes = {name: tuple(w.shape) for name, w in experts.items()}
    if not {"up", "down"} <= set(shapes) <= {"gate", "up", "down"}:
        raise MeshparError(
            f"moe: experts must be `up`, `down` and, for a gated one, `gate`; got {', '.join(shapes)}",
            fixes=['experts={"up": …, "down": …}, with "gate" for gated experts'],
        )
    up, down = shapes["up"], shapes["down"]
    lead = len(up) - 2
    fits = lead in (1, 2) and x.ndim >= 2 and up[lead] == x.shape[-1] and shapes.get("gate", up) == up
    if not fits or down != (*up[:lead], up[-1], up[-2]):
        raise MeshparError(
            f"moe: x {list(x.shape)} and experts "
            + ", ".join(f"{n} {list(s)}" for n, s in shapes.items())
            + " do not fit: gate and up are [E, H, M] (or [O, I, H, M]), down [E, M, H], x [*tokens, H]",
            fixes=["x is [*tokens, H], `up` and `gate` are [*E, H, F], `down` is [*E, F, H]"],
        )
    whole = [f"{n} {w.dtype}" for n, w in experts.items() if not jnp.issubdtype(w.dtype, jnp.floating)]
    if whole:
        raise MeshparError(
            f"moe: experts are floating-point, got {', '.join(whole)}: quantized ones would be read without their scales",
            fixes=["dequantize them", "meshpar_kernels.grouped_matmul takes them with rhs_scale="],
        )
    if activation not in ACTIVATIONS:
        raise MeshparError(
            f"moe: no activation {activation!r}", fixes=did_you_mean(activation, ACTIVATIONS, "activations")
        )
    return math.prod(up[:lead])


def _project(x: jax.Array, w: jax.Array) -> jax.Array:
    """Logits in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(
        x.astype(wide), w.astype(wide), (((x.ndim - 1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    )


def _route(route: Callable[..., Routing], x: jax.Array, weights: Any, experts: int, options: dict[str, Any]) -> Routing:
    if weights is None:
        if "ids" not in options:
            raise MeshparError(
                "moe: without router weights the router needs ids=, the token ids", fixes=['router="hash"']
            )
        return route(options.pop("ids"), experts=experts, **options)
    parts = weights if isinstance(weights, Mapping) else {"kernel": weights}
    known = ({"kernel"}, {"kernel", "noise"}, {"outer", "inner"})
    if set(parts) not in known or any(w.ndim < 2 or w.shape[0] != x.shape[-1] for w in parts.values()):
        raise MeshparError(
            "moe: router_weights must be [H, E], or a dict of kernel and noise, or of outer and inner, each [H, …]; got "
            + ", ".join(f"{n} {list(w.shape)}" for n, w in parts.items()),
            fixes=["x is [*tokens, H]: the first dim of router weights is H"],
        )
    logits = {name: _project(x, w) for name, w in parts.items()}
    count = math.prod(parts["inner"].shape[1:]) if "inner" in parts else parts["kernel"].shape[1]
    if count != experts:
        raise MeshparError(
            f"moe: router weights for {count} experts, of which there are {experts}",
            fixes=[f"give the router a last dim of {experts}"],
        )
    if "inner" in logits:
        return route(logits["outer"], logits["inner"], **options)
    if "noise" in logits:
        options["noise"] = logits["noise"]
    return route(logits["kernel"], **options)


def _dense(x: jax.Array, weights: Mapping[str, jax.Array], activation: str) -> jax.Array:
    """The expert that all tokens go to."""
    act = ACTIVATIONS[activation]
    up = x @ weights["up"].astype(x.dtype)
    h = act(x @ weights["gate"].astype(x.dtype)) * up if "gate" in weights else act(up)
    return h @ weights["down"].astype(x.dtype)

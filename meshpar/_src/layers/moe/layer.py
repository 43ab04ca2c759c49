"""``moe``: a layer with a mixture of experts, whose result no layout changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels.dispatch.differentiable import KERNELS
from meshpar_kernels.grouped_matmul.activations import ACTIVATIONS, activate

from ...compat.jax import default_promotion
from ...dims import did_you_mean
from .experts import run_experts
from .routers import ROUTED_BY_KERNELS, ROUTERS, Routing, capacity_of, refused

EXPERT: Mapping[str, tuple[str, ...]] = {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
"""The matrices of a gated expert, and their dims."""


class MoEAux(NamedTuple):
    """The second result of :func:`moe`: losses and statistics of the routing.

    Attributes:
      losses: float32 scalars by name, unscaled: those that the router defines (``balance``, ``z``, ``importance``, ``load``).
      load: int32 [E], choices of each expert before drops.
      dropped: int32 [], choices of real tokens that no expert served (Expert Choice: real tokens without an expert).
    """

    losses: dict[str, jax.Array]
    load: jax.Array
    dropped: jax.Array


@dataclass(frozen=True)
class MoEExecution:
    """How :func:`moe` runs on devices. No result depends on it, except for the rounding of "float8".

    Attributes:
      strategy: "a2a", "ring", "dense", or None for the one that sends the fewest bytes
        (:data:`layers.moe.exchange_choice.STRATEGIES`), for layouts that split tokens and experts over the same axis.
      slack: size of the exchange's buffers, relative to a balanced load; at least 1.
      implementation: of the grouped matmuls, as in ``meshpar_kernels.grouped_matmul``. With "pallas", "pallas_tpu" and
        "pallas_gpu", kernels also route (with "top_k", "switch" and "deepseek_v3"), copy rows and sum them.
      exchange: how "a2a" sends rows, as in ``meshpar_kernels.expert_dispatch``: None and "padded": full buffers, by XLA; "pallas",
        "pallas_tpu", "pallas_gpu": only the rows in use, by a kernel (H must be a multiple of 128), which is opt-in because it
        was not measured on an accelerator. "float8", also for "ring": rows, and in the backward pass their cotangents, as
        float8_e4m3fn with a float32 scale for each 128 elements, as DeepSeek-V3 (2024, section 3.3) sends tokens; gradients are
        straight-through.
      overlap: 1, 2 or 4: the tokens of a device are exchanged in so many parts (or a factor of it that divides them), so that one
        part can be exchanged while the experts compute another. Each part has its own buffers of ``slack`` times its balanced load;
        capacity and drops are the router's, over all tokens. "auto": the plan chooses the number, for the forward and the backward
        pass, by the seconds in which nothing is computed; 1 where the chip is not known.

    Example:
      >>> ring = mp.layers.MoEExecution(strategy="ring", slack=1.5)
      >>> layer = lambda x, weights, experts: mp.layers.moe(x, weights, experts, k=2, execution=ring)
    """

    strategy: str | None = None
    slack: float = 1.25
    implementation: str | None = None
    exchange: str | None = None
    overlap: int | Literal["auto"] = 1


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
    execution: MoEExecution | None = None,
    **options: Any,
) -> tuple[jax.Array, MoEAux]:
    """A mixture of experts: a router selects a few of E experts for each token; the result is the weighted sum of their outputs.

    Name the experts' dims, e.g. ``expert embed mlp``, and a layout may shard any of them: ``expert: data`` (tokens are exchanged
    between devices), ``expert: model`` (each device applies its experts to its tokens), ``mlp: model``, or several of these. No
    layout changes the result: routing, capacity and drops depend on the global order of the tokens. Without a capacity no choice
    is dropped: buffers have ``execution.slack`` times the size of a balanced load, and rows beyond that are exchanged in further
    rounds. Give the router weights' last dim another name than ``expert`` (``router``), so that the small router stays replicated.

    Args:
      x: float ``[*tokens, H]``.
      router_weights: [H, E]. For "noisy_top_k" also ``{"kernel": …, "noise": …}``; for "two_level" ``{"outer": [H, O],
        "inner": [H, O, I]}``; None for "hash", which needs ``ids=``. Logits are computed in float32.
      experts: ``gate`` and ``up`` [E, H, M] (or ``up`` alone) and ``down`` [E, M, H]; two dims O, I in place of E are one in
        row-major order. Converted to x's dtype.
      router: a name in :data:`meshpar.layers.ROUTERS`, or a function with their signature (it may select an expert twice).
      k: experts per token; None: the router's default, which "top_k", "noisy_top_k", "deepseek_v3" and "two_level" lack.
      capacity: None: no drops. A number: an expert takes at most group size · k · capacity / E choices; others are dropped.
        For "expert_choice": the average number of experts per token (2 by default).
      groups: number of groups of consecutive tokens, each with its own capacity.
      mask: bool ``[*tokens]``, False for padding, which is not routed: its result is 0 (plus the result of ``shared``).
      shared: ``gate``, ``up``, ``down`` of an expert for all tokens: [H, M] and [M, H].
      activation: "silu" (with ``gate``: SwiGLU), "gelu", "relu".
      execution: how it runs on devices, a :class:`meshpar.layers.MoEExecution`: the exchange of tokens, and kernels.
      **options: for the router: ``key``, ``bias``, ``expert_groups``, ``ids``, …

    Returns:
      (``[*tokens, H]`` in x's dtype, :class:`MoEAux`).

    Raises:
      MeshparError: shapes or options that do not fit.
      NotImplementedError: a kernel that was asked for cannot take these arguments; with every reason.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> shapes = {"gate": (8, 64, 32), "up": (8, 64, 32), "down": (8, 32, 64)}
      >>> experts = {name: jax.random.normal(k, shapes[name]) / 8 for name, k in zip(shapes, keys)}
      >>> y, aux = mp.layers.moe(x, jax.random.normal(keys[3], (64, 8)), experts, k=2)
      >>> y.shape, int(aux.load.sum())
      ((32, 64), 64)
    """
    execution = execution or MoEExecution()
    number = _check(x, experts, activation)
    if not callable(router) and router not in ROUTERS:
        raise refused(f"no router {router!r}", *did_you_mean(router, ROUTERS, "routers"))
    route = router if callable(router) else ROUTERS[router]
    options |= {name: value for name, value in (("k", k), ("capacity", capacity)) if value is not None}
    if execution.implementation in KERNELS and router in ROUTED_BY_KERNELS:
        options["implementation"] = execution.implementation
    _check_options(router, route, options)
    named = _router_weights(router, x, router_weights, options.get("ids"))
    routing = _route(route, x, named, number, {**options, "groups": groups, "mask": mask})
    rate, most = _row_bounds(router, routing, number, groups, capacity, options.get("k", 1))
    matrices = [experts[n].astype(x.dtype) for n in EXPERT if n in experts]
    how = {"activation": activation, "rate": rate, "most_per_expert": most, "distinct": not callable(router)}
    y = run_experts(x, routing.expert, routing.weight, matrices, **how, **vars(execution))
    if shared is not None:
        y = y + _dense(x, shared, activation)
    return y, MoEAux(routing.losses, routing.load, routing.dropped)


def _row_bounds(
    router: str | Callable[..., Routing], routing: Routing, experts: int, groups: int, capacity: float | None, k: int
) -> tuple[float, int | None]:
    """(average number of experts per token, largest number of tokens per expert; None: not bounded).

    Args:
      k: of "expert_choice", whose :attr:`Routing.expert` has one entry per expert; of other routers, the number of these entries.
    """
    places = routing.expert.shape[-1]
    chooses_tokens = router == "expert_choice"
    if callable(router) or (capacity is None and not chooses_tokens):  # nothing is known of a user's router
        return float(places), None
    tokens = math.prod(routing.expert.shape[:-1])
    factor = 2.0 if capacity is None else capacity
    most = groups * capacity_of(tokens // groups, experts, k if chooses_tokens else places, factor)
    return min(float(places), most * experts / max(tokens, 1)), most


_FROM_WEIGHTS = ("noise", "experts", "groups", "mask")
"""Arguments of routers that :func:`moe` passes itself, not from its ``**options``."""


def _check_options(
    router: str | Callable[..., Routing], route: Callable[..., Routing], options: Mapping[str, Any]
) -> None:
    """Raise a MeshparError for a missing or unknown option of a named router."""
    if callable(router):
        return
    takes = {p.name: p for p in inspect.signature(route).parameters.values() if p.kind is p.KEYWORD_ONLY}
    ours = {name: p for name, p in takes.items() if name not in _FROM_WEIGHTS}
    missing = [name for name, p in ours.items() if p.default is p.empty and name not in options]
    if missing:
        what = {"k": "k, the number of experts per token"}
        fixes = {"k": ["k=2 for two experts per token, as in Mixtral", 'router="switch" selects one expert per token']}
        raise refused(f'router="{router}" needs {what.get(missing[0], missing[0])}', *fixes.get(missing[0], ()))
    if unknown := [name for name in options if name not in ours and (name, router) != ("ids", "hash")]:
        text = f'router="{router}" takes no {unknown[0]}=; it takes {", ".join(f"{n}=" for n in ours)}'
        raise refused(text, *did_you_mean(unknown[0], ours, "options"))


def _check(x: jax.Array, experts: Mapping[str, jax.Array], activation: str) -> int:
    """Check the operands of :func:`moe`, and return the number of experts, E.

    Raises:
      MeshparError: shapes, dtypes or an activation that :func:`moe` does not take.
    """
    shapes = {name: tuple(w.shape) for name, w in experts.items()}
    if not {"up", "down"} <= set(shapes) <= set(EXPERT):
        text = f"experts must be `up`, `down` and, for a gated one, `gate`; got {', '.join(shapes)}"
        raise refused(text, 'experts={"up": …, "down": …}, with "gate" for gated experts')
    up, down = shapes["up"], shapes["down"]
    lead = len(up) - 2
    fits = lead in (1, 2) and x.ndim >= 2 and up[lead] == x.shape[-1] and shapes.get("gate", up) == up
    if not fits or down != (*up[:lead], up[-1], up[-2]):
        raise refused(
            f"x {list(x.shape)} and experts "
            + ", ".join(f"{n} {list(s)}" for n, s in shapes.items())
            + " do not fit: gate and up are [E, H, M] (or [O, I, H, M]), down [E, M, H], x [*tokens, H]",
            "x is [*tokens, H], `up` and `gate` are [*E, H, F], `down` is [*E, F, H]",
        )
    quantized = ", ".join(f"{n} {w.dtype}" for n, w in experts.items() if not jnp.issubdtype(w.dtype, jnp.floating))
    if quantized:
        text = f"experts are floating-point, got {quantized}: quantized ones would be read without their scales"
        raise refused(text, "dequantize them", "meshpar_kernels.grouped_matmul takes them with rhs_scale=")
    if activation not in (named := list(filter(None, ACTIVATIONS))):
        raise refused(f"no activation {activation!r}", *did_you_mean(activation, named, "activations"))
    return math.prod(up[:lead])


def _project(x: jax.Array, w: jax.Array) -> jax.Array:
    """x · w in float32, or in a wider dtype of x."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dims = ((x.ndim - 1,), (0,)), ((), ())
    return lax.dot_general(x.astype(wide), w.astype(wide), dims, precision=lax.Precision.HIGHEST)


_WEIGHTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "hash": ((),),
    "two_level": (("outer", "inner"),),
    "noisy_top_k": (("kernel",), ("kernel", "noise")),
}
"""Router → the parts of its weights, where these are not ``kernel`` alone."""

_DIMS = {"kernel": "HE", "noise": "HE", "outer": "HO", "inner": "HOI"}
"""The dims of each part."""


def _shapes_text(form: tuple[str, ...]) -> str:
    """``[H, E]`` of the kernel alone, else ``{"outer": [H, O], "inner": [H, O, I]}``."""
    shapes = {n: f"[{', '.join(_DIMS[n])}]" for n in form}
    return shapes["kernel"] if form == ("kernel",) else "{" + ", ".join(f'"{n}": {s}' for n, s in shapes.items()) + "}"


def _router_weights(router: str | Callable[..., Routing], x: jax.Array, weights: Any, ids: Any) -> dict[str, jax.Array]:
    """The parts of the ``router_weights`` of :func:`moe` by name; none for token ids.

    Raises:
      MeshparError: router weights of another router, or of another shape; token ids that are missing or do not fit.
    """
    any_form = (*_WEIGHTS["noisy_top_k"], *_WEIGHTS["two_level"], *_WEIGHTS["hash"])
    forms = any_form if callable(router) else _WEIGHTS.get(router, (("kernel",),))
    named = dict(weights) if isinstance(weights, Mapping) else {} if weights is None else {"kernel": weights}
    fits = all(hasattr(w, "ndim") and w.ndim == len(_DIMS.get(n, "")) for n, w in named.items())
    if {*named} not in map(set, forms) or not fits or any(w.shape[0] != x.shape[-1] for w in named.values()):
        texts = [_shapes_text(form) for form in forms if form]
        wanted = " or ".join(texts) or "None, and ids= with the id of each token"
        got = ", ".join(f"{n} {list(getattr(w, 'shape', [])) or type(w).__name__}" for n, w in named.items()) or "None"
        text = f"router_weights of router={router!r} must be {wanted}; got {got}, and x is {list(x.shape)}"
        raise refused(text, f"router_weights={wanted}, with H = {x.shape[-1]}")
    if not named and (ids is None or tuple(getattr(ids, "shape", ())) != x.shape[:-1]):
        got = "none" if ids is None else list(getattr(ids, "shape", [])) or type(ids).__name__
        text = f"router={router!r} needs ids=, an integer array {list(x.shape[:-1])}, the id of each token; got {got}"
        raise refused(text, "ids=tokens, the batch from which x is made")
    return named


def _route(
    route: Callable[..., Routing], x: jax.Array, named: Mapping[str, jax.Array], experts: int, options: dict[str, Any]
) -> Routing:
    """The router's result for tokens x; ``named``: from :func:`_router_weights`.

    Raises:
      MeshparError: router weights for another number of experts.
    """
    if not named:
        return route(options.pop("ids"), experts=experts, **options)
    logits = {name: _project(x, w) for name, w in named.items()}
    count = math.prod(named["inner"].shape[1:]) if "inner" in named else named["kernel"].shape[1]
    if count != experts:
        text = f"router_weights are for {count} experts, but `up` and `down` have {experts}"
        raise refused(text, f"give the router a last dim of {experts}")
    first = [logits.pop("kernel")] if "kernel" in logits else []  # a user's router may have another name for it
    return route(*first, **logits, **options)


def _dense(x: jax.Array, weights: Mapping[str, jax.Array], activation: str) -> jax.Array:
    """A gated or plain feed-forward network, the expert that all tokens share: x [*tokens, H] → [*tokens, H]."""
    *inward, down = (weights[name].astype(x.dtype) for name in EXPERT if name in weights)
    return activate([x @ w for w in inward], activation) @ down


def moe_of_weights(
    x: jax.Array, weights: Mapping[str, jax.Array], *, router: str, k: int, key: jax.Array | None, **options: Any
) -> tuple[jax.Array, MoEAux]:
    """:func:`moe` with the weights of a module.

    Args:
      weights: ``gate``, ``up``, ``down``, ``router``; where there are any, ``noise`` and ``bias`` of the router, and the matrices
        of the shared expert: ``shared_gate``, …
      k: experts per token; "expert_choice" has none.
      key: for routers with random numbers; the others ignore it.
      options: further arguments of :func:`moe`.
    """
    kernel: Any = weights["router"]
    if "noise" in weights:
        kernel = {"kernel": kernel, "noise": weights["noise"]}
    if "bias" in weights:
        options["bias"] = weights["bias"]
    if router in ("noisy_top_k", "gshard"):
        options["key"] = key
    shared = {name: weights[f"shared_{name}"] for name in EXPERT} if "shared_up" in weights else None
    experts, k_of_router = {name: weights[name] for name in EXPERT}, None if router == "expert_choice" else k
    return moe(x, kernel, experts, router=router, k=k_of_router, shared=shared, **options)


class Weight(NamedTuple):
    """One weight of a module: the names of its dims, its shape, its initializer, and whether it is always float32."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    init: Callable[..., jax.Array]
    is_float32: bool = False


def weights_of_module(embed: int, mlp: int, experts: int, router: str, shared: int) -> dict[str, Weight]:
    """The weights of a module by the names that :func:`moe_of_weights` reads, in the order in which they are initialized.

    Args:
      embed, mlp: width of a token, and hidden width of an expert.
      router: "deepseek_v3" has a bias, "noisy_top_k" noise.
      shared: number of experts that every token goes to, as one of so many times the width.
    """
    named: dict[str, tuple[str, ...]] = {name: ("expert", *dims) for name, dims in EXPERT.items()}
    named["router"] = ("embed", "router")
    if router == "noisy_top_k":
        named["noise"] = ("embed", "router")
    if router == "deepseek_v3":
        named["bias"] = ("router",)
    if shared:
        named |= {f"shared_{name}": dims for name, dims in EXPERT.items()}

    def weight(name: str, dims: tuple[str, ...]) -> Weight:
        width = mlp * shared if name.startswith("shared_") else mlp
        sizes = {"embed": embed, "mlp": width, "expert": experts, "router": experts}
        init = jax.nn.initializers.lecun_normal(batch_axis=(0,) if "expert" in dims else ())
        init = jax.nn.initializers.zeros if name in ("noise", "bias") else init
        return Weight(dims, tuple(sizes[d] for d in dims), init, "router" in dims)

    return {name: weight(name, dims) for name, dims in named.items()}

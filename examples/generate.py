"""Text generation with a cache of keys and values, for the models of llama.py, mixtral.py, deepseek.py and train_lm.py.

    meshpar plan examples/generate.py:llama3_70b_decode --topology v6e:2x4 --mesh "data=1, model=8" --layout heads
    python examples/train_lm.py --checkpoint runs/a && python examples/generate.py --checkpoint runs/a --prompt "def "

Ordinary JAX on the weights of a trained model. Nothing here knows a mesh: layouts (:data:`LAYOUTS`) shard the functions. Each row
of a batch is at a position of its own, so that a server can replace finished sequences by new ones (:class:`Server`). A cache may
be sharded by heads, or by its length (`cache: model`): each device then attends to its part, and all-reduces of the softmax
statistics combine the results (flash decoding). Options: keys and values in 8 bits, and a cache in pages, of which sequences take
as many as they need.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import train_lm
from flax import linen as nn
from flax import nnx

import deepseek
import llama
import meshpar as mp
import mixtral
from meshpar.layers import moe

LAYOUTS = {
    "data": "batch: data",
    "heads": "batch?: data; heads, kv_heads?, mlp, vocab: model",
    "cache": "cache: model",
    "cache+batch": "batch: data; cache: model",
    "cache-all": "cache: data+model",
    "cache+tensor": "batch?: data; cache: model; heads, kv_heads?, mlp, vocab: model",
    "expert": "batch?: data; cache: model; heads, kv_heads?, mlp, vocab, expert: model",
}
STATE = {
    "state/cache/*/*": "layers batch kv_heads cache _",
    "state/{token,position,end,active}": "batch",
}
PROMPT = {
    "prompt/cache/*/*": "layers prompt kv_heads seq _",
    "prompt/{token,position}": "prompt",
    "{rows,end}": "prompt",
}
DIMS = {"prefill": {"tokens": "prompt seq", "lengths": "prompt"}, "insert": STATE | PROMPT, "decode": STATE}
PAGES = {
    "state/cache/*/*": "layers pages kv_heads cache _",
    "state/table": "batch blocks",
}
PAGED_DIMS = {
    "prefill": DIMS["prefill"],
    "insert": DIMS["insert"] | PAGES | {"prompt/table": "prompt blocks"},
    "decode": DIMS["decode"] | PAGES,
}
"""With a cache in pages; `cache` is the dim of the slots of a page."""
PROMPT_SCALES = {"prompt/cache/*/scales": "layers kv_heads prompt seq"}
SCALES = {"state/cache/*/scales": "layers kv_heads batch cache"}
PAGE_SCALES = {"state/cache/*/scales": "layers kv_heads pages cache"}
"""Of a cache in 8 bits, see :class:`Codes`."""
STACKS = ("dense_layers", "layers")
CONTRACT = {
    "*/{query,key,value,gate,up}/kernel": "embed", "*/out/kernel": "heads head_dim", "*/down/kernel": "mlp", "head/kernel": "embed"
}  # fmt: skip
"""Contracted dims of the weights of llama.py, for ``mp.layers.quantize``."""

MERGED = (("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim"))
"""Dims of the kernels of queries, keys and values that :func:`merge_heads` changes; latent attention has others."""

State = dict[str, Any]
"""``cache``; of each row [batch]: ``token`` (the last one), its ``position``, ``end``, ``active``; ``key``: for sampling.

``table`` [batch, blocks], of a cache in pages: the page of each block of slots of a row; the number of pages: it has none.
"""


def dims_of(options: "Options", paged: bool = False) -> dict[str, dict[str, str]]:
    """The dims of the steps of a server, by step."""
    dims = PAGED_DIMS if paged else DIMS
    if options.cache is None:
        return dims
    scales = PAGE_SCALES if paged else SCALES
    return {
        "prefill": dims["prefill"],
        "insert": scales | PROMPT_SCALES | dims["insert"],
        "decode": scales | dims["decode"],
    }


class Codes(NamedTuple):
    """Keys or values in 8 bits.

    Attributes:
      codes: [layers, batch, kv_heads, cache, size].
      scales: of each head and position, float32 [layers, kv_heads, batch, cache]. The TPU compiler stores the last two dims in
        tiles, and reads the rows of a head without a copy in another order.
    """

    codes: jax.Array
    scales: jax.Array


@dataclass(frozen=True)
class Options:
    """Facts of a model that its weights do not state.

    Attributes:
      rope_base: of the rotary position embeddings.
      epsilon: of the norms.
      window: a token attends to itself and the window - 1 tokens before it; None: to all.
      chosen, groups, top_groups: of a mixture of experts, see ``deepseek.Config``.
      cache: dtype of cached keys and values in 8 bits, ``"int8"`` or ``"float8_e4m3fn"``, with a scale for each head and position;
        None: the dtype in which they are computed.
      unroll: whether layers are written one after another in place of a loop. On GPUs a loop copies the weights and the cache of
        each layer, and matmuls then read the copies; without a loop they read slices of the stacked arrays.
    """

    rope_base: float = 500_000.0
    epsilon: float = 1e-5
    window: int | None = None
    chosen: int = 2
    groups: int = 1
    top_groups: int = 1
    cache: str | None = None
    unroll: bool = False

    @classmethod
    def of(cls, config: Any, **changes: Any) -> "Options":
        """The options of the config of a model in these examples."""
        known = {name: getattr(config, name) for name in cls.__annotations__ if hasattr(config, name)}
        return cls(**known | changes)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the most likely one at ``temperature`` 0; else of the ``top_k`` most likely (None: all), of which the
    first ones with a total probability of ``top_p`` are candidates."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0


# -- the model


def weights_of(model: Any) -> Any:
    """The weights as a tree of arrays, of an NNX model or of boxed Linen params."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param)) if isinstance(model, nnx.Module) else nn.unbox(model)


def forward(
    options: Options,
    model: Any,
    tokens: jax.Array,
    position: jax.Array,
    cache: Any = None,
    last: jax.Array | None = None,
    table: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Logits of the token after the last one, and the keys and values of `tokens`.

    Args:
      tokens: [batch, seq].
      position: of the first of them, [batch].
      cache: keys and values of the tokens before; None: the first token.
      last: index of the last token of each row, [batch]; None: of the sequence.
      table: of a cache in pages, see :data:`State`.

    Returns:
      (float32 [batch, vocab], a tree like the cache with seq in place of its length). Arrays of the cache are
      [layers, batch, kv_heads, cache, size]: matmuls over each head's slots read it as it is.
    """
    params = weights_of(model)
    x = params["embedding"]["embedding"][tokens]
    new = {}
    for stack in (s for s in STACKS if s in params):
        old = None if cache is None else cache[stack]
        one = functools.partial(layer, options, position, table)
        x, new[stack] = jax.lax.scan(one, x, (params[stack], old), unroll=options.unroll)
    x = x[:, -1] if last is None else jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    x = norm(options, x, params["norm"])
    return jnp.einsum("be,ev->bv", x, params["head"]["kernel"], preferred_element_type=jnp.float32), new


def layer(
    options: Options, position: jax.Array, table: jax.Array | None, x: jax.Array, weights_and_cache: Any
) -> tuple[jax.Array, Any]:
    """One layer for `x` [batch, seq, embed]: (the same shape, its new keys and values)."""
    w, old = weights_and_cache
    if table is not None:
        old = jax.tree.map(functools.partial(from_pages, table), old)
    attend = latent_attention if "kv_down" in w["attention"] else attention
    y, new = attend(options, w["attention"], norm(options, x, w["attention_norm"]), position, old, table)
    x += y
    if "mlp" in w:
        return x + mlp(w["mlp"], norm(options, x, w["mlp_norm"])), new
    return x + experts(options, w["experts"], norm(options, x, w["experts_norm"])), new


def attention(
    options: Options, w: Any, x: jax.Array, position: jax.Array, old: Any, table: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """Attention of `x` [batch, seq, embed] over itself and the cache of its layer (None: empty)."""
    size = w["out"]["kernel"].shape[-2]
    q, k, v = (heads_of(x, w[name]["kernel"], size) for name in ("query", "key", "value"))
    q, k = rotate(q, position, options.rope_base), rotate(k, position, options.rope_base)
    if old is None:
        y = mp.layers.attention(q, k, v, causal=True, window=options.window)
    else:
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]) * q.shape[3] ** -0.5
        held = slot_positions(position, length_of(old["value"]), table)
        y = attend([q], [k], v, [old["key"]], old["value"], position, held, options.window)
    new = {"key": k.swapaxes(1, 2), "value": v.swapaxes(1, 2)}
    return jnp.einsum("bshd,hde->bse", y, w["out"]["kernel"]), new


def heads_of(x: jax.Array, kernel: Any, size: int) -> jax.Array:
    """Queries, keys or values [batch, seq, heads, size] of `x` [batch, seq, embed].

    Args:
      kernel: [embed, heads, size], or of :func:`merge_heads` [embed, heads * size].
    """
    if kernel.ndim == 3:
        return jnp.einsum("bse,ehd->bshd", x, kernel)
    y = x @ kernel
    return y.reshape(*y.shape[:2], -1, size)


def merge_heads(params: Any) -> Any:
    """Linen params with kernels of queries, keys and values [..., embed, heads * size] in place of [..., embed, heads, size].

    A server does this once, when it loads the weights. The TPU compiler copies a kernel with three dims to another order of its
    elements before the matmul of each layer, which takes several times as long as the matmul of a few tokens.
    """

    def merged(path: Any, kernel: Any) -> Any:
        words = {getattr(k, "key", "") for k in path}
        if (
            not isinstance(kernel, nn.Partitioned)
            or kernel.names[-3:] not in MERGED
            or not words & {"query", "key", "value"}
        ):
            return kernel
        value = kernel.value.reshape(*kernel.value.shape[:-2], -1)
        return kernel.replace(value=value, names=(*kernel.names[:-2], None))

    return jax.tree_util.tree_map_with_path(merged, params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def latent_attention(
    options: Options, w: Any, x: jax.Array, position: jax.Array, old: Any, table: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """Attention with one latent vector a token as key and value of all heads (DeepSeek-V2, 2024), which is all that is cached.

    The matmuls from latent vectors to keys and values are applied to queries and outputs instead.
    """
    if "query_down" in w:
        q = norm(options, jnp.einsum("bse,er->bsr", x, w["query_down"]["kernel"]), w["query_norm"], 1e-6)
        q = jnp.einsum("bsr,rhd->bshd", q, w["query"]["kernel"])
    else:
        q = jnp.einsum("bse,ehd->bshd", x, w["query"]["kernel"])
    latent = norm(options, jnp.einsum("bse,er->bsr", x, w["kv_down"]["kernel"]), w["kv_norm"], 1e-6)
    turned = rotate(jnp.einsum("bse,ehd->bshd", x, w["key_rotated"]["kernel"]), position, options.rope_base)
    latent = latent[:, :, None]  # one head of keys and values
    size = w["key"]["kernel"].shape[-1]
    scale = q.shape[-1] ** -0.5
    queries = [jnp.einsum("bshd,rhd->bshr", q[..., :size], w["key"]["kernel"]) * scale,
               rotate(q[..., size:], position, options.rope_base) * scale]  # fmt: skip
    if old is None:
        q, k = jnp.concatenate(queries, -1), jnp.concatenate([latent, turned], -1)
        v = jnp.pad(latent, [(0, 0)] * 3 + [(0, turned.shape[-1])])  # as wide as the keys
        y = mp.layers.attention(q, k, v, causal=True, window=options.window, scale=1.0)[..., : latent.shape[-1]]
    else:
        queries, keys = [u[:, :, None] for u in queries], [old["latent"], old["rotated"]]
        held = slot_positions(position, length_of(old["latent"]), table)
        y = attend(queries, [latent, turned], latent, keys, old["latent"], position, held, options.window)
    y = jnp.einsum("bshr,rhd->bshd", y, w["value"]["kernel"])
    new = {"latent": latent.swapaxes(1, 2), "rotated": turned.swapaxes(1, 2)}
    return jnp.einsum("bshd,hde->bse", y, w["out"]["kernel"]), new


def attend(
    q: Sequence[jax.Array], k: Sequence[jax.Array], v: jax.Array, old_k: Sequence[jax.Array], old_v: jax.Array,
    position: jax.Array, held: jax.Array, window: int | None,
) -> jax.Array:  # fmt: skip
    """Attention of new tokens over the cache and each other: softmax over the scores of both, without joining the two arrays.

    Args:
      q: scaled queries [batch, seq, kv_heads, group, size]; scores are the sum over the arrays in `q` and `k`.
      k, v: of the new tokens, [batch, seq, kv_heads, size].
      old_k, old_v: the cache [batch, kv_heads, cache, size].
      position: of the first new token, [batch].
      held: position of the token in each slot of the cache, [batch, cache]; negative: the slot is empty.

    Returns:
      [batch, seq, heads, size of v].
    """
    seq = v.shape[1]
    own = position[:, None] + jnp.arange(seq)
    far = own[:, :, None] - held[:, None]  # [batch, seq, cache]
    seen = (far <= own[:, :, None]) & ((far < window) if window else True)
    causal = jnp.arange(seq)[:, None] - jnp.arange(seq)
    past = sum(map(past_scores, q, old_k))
    now = sum(
        jnp.einsum("bskgd,btkd->bkgst", *pair, preferred_element_type=jnp.float32) for pair in zip(q, k, strict=True)
    )
    past = jnp.where(seen[:, None, None], past, -jnp.inf)
    now = jnp.where((causal >= 0) & ((causal < window) if window else True), now, -jnp.inf)
    top = jnp.maximum(past.max(-1), now.max(-1))[..., None]
    past, now = jnp.exp(past - top), jnp.exp(now - top)
    total = past.sum(-1) + now.sum(-1)
    if isinstance(old_v, Codes):
        past *= old_v.scales.swapaxes(0, 1)[:, :, None, None]
        old_v = old_v.codes
    y = jnp.einsum("bkgsc,bkcd->bkgsd", past.astype(v.dtype), old_v.astype(v.dtype), preferred_element_type=jnp.float32)
    y += jnp.einsum("bkgst,btkd->bkgsd", now.astype(v.dtype), v, preferred_element_type=jnp.float32)
    y = jnp.moveaxis(y / total[..., None], 3, 1)
    return y.reshape(*y.shape[:2], -1, y.shape[-1]).astype(v.dtype)


def length_of(old: jax.Array | Codes) -> int:
    """The number of slots of a cache [batch, kv_heads, cache, size]."""
    return jax.tree.leaves(old)[0].shape[2]


def past_scores(q: jax.Array, old_k: jax.Array | Codes) -> jax.Array:
    """Scores of queries [batch, seq, kv_heads, group, size] and cached keys, float32 [batch, kv_heads, group, seq, cache].

    Codes are multiplied by scales after the matmul, which has more to add up than results.
    """
    codes = old_k.codes if isinstance(old_k, Codes) else old_k
    scores = jnp.einsum("bskgd,bkcd->bkgsc", q, codes.astype(q.dtype), preferred_element_type=jnp.float32)
    if isinstance(old_k, Codes):
        scores *= old_k.scales.swapaxes(0, 1)[:, :, None, None]
    return scores


def slot_positions(position: jax.Array, length: int, table: jax.Array | None = None) -> jax.Array:
    """The position of the token in each slot of a cache, [batch, length]; negative: the slot is empty.

    Token t is in slot t % length, so a cache of a sliding window needs no more slots than the window. With a ``table`` the slots
    are in the order of :func:`from_pages`.
    """
    before, slot = position[:, None] - 1, jnp.arange(length)
    if table is not None:
        blocks = table.shape[1]
        slot = slot % blocks * (length // blocks) + slot // blocks
    return before - (before - slot) % length


def from_pages(table: jax.Array, pages: jax.Array) -> jax.Array:
    """The cache [batch, kv_heads, cache, size] of each row from `pages` [pages, kv_heads, page, size]; of scales
    [kv_heads, batch, cache] from [kv_heads, pages, page].

    Slots with the same index in their page are next to each other, so that the dim of a page may be sharded.
    """
    if pages.ndim == 3:
        return from_pages(table, pages.swapaxes(0, 1)[..., None])[..., 0].swapaxes(0, 1)
    blocks = jnp.moveaxis(pages[table.clip(0, pages.shape[0] - 1)], 1, 3)  # [batch, kv_heads, page, blocks, size]
    return blocks.reshape(*blocks.shape[:2], -1, blocks.shape[-1])


def cached(options: Options, new: Any) -> Any:
    """Keys and values [..., size] as they are in the cache."""
    if options.cache is None:
        return new
    small = (mp.layers.quantize({"x": x}, options.cache, contract={"x": -1})["x"] for x in jax.tree.leaves(new))
    return jax.tree.unflatten(jax.tree.structure(new), [Codes(x.codes, by_rows(x.scales[..., 0])) for x in small])


def by_rows(x: jax.Array) -> jax.Array:
    """Scales [layers, kv_heads, batch, cache] with the dims of rows and heads in the order of codes, and the reverse; codes as they
    are."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x


def mlp(w: Any, x: jax.Array) -> jax.Array:
    gate, up = (jnp.einsum("bse,em->bsm", x, w[name]["kernel"]) for name in ("gate", "up"))
    return jnp.einsum("bsm,me->bse", jax.nn.silu(gate) * up, w["down"]["kernel"])


def experts(options: Options, w: Any, x: jax.Array) -> jax.Array:
    """The mixtures of experts of mixtral.py (in which no token is dropped here) and of deepseek.py.

    If a step of decoding has as many choices as there are experts, it reads them all: each is then applied to all tokens. A grouped
    matmul would read copies of their weights, since a loop over layers slices them out of the stacks.
    """
    each = {name: w[name] for name in ("gate", "up", "down")}
    router, shared = "top_k", None
    how: dict[str, Any] = {"k": options.chosen}
    if "bias" in w:
        router, shared = "deepseek_v3", {name: w[f"shared_{name}"] for name in each}
        how |= {"bias": w["bias"], "scale": 2.5, "expert_groups": options.groups, "top_groups": options.top_groups}
    if x.shape[1] > 1 or x.shape[0] * options.chosen < len(each["up"]):
        return moe(x, w["router"], each, router=router, shared=shared, **how)[0]
    logits = jnp.einsum("bse,er->bsr", x.astype(jnp.float32), w["router"].astype(jnp.float32))
    routing = mp.layers.ROUTERS[router](logits, **how)
    weight = (jax.nn.one_hot(routing.expert, len(each["up"])) * routing.weight[..., None]).sum(-2)
    gate, up = (jnp.einsum("bse,xem->bsxm", x, each[name]) for name in ("gate", "up"))
    hidden = (jax.nn.silu(gate) * up * weight[..., None]).astype(x.dtype)
    y = jnp.einsum("bsxm,xme->bse", hidden, each["down"])
    return y if shared is None else y + mlp({name: {"kernel": kernel} for name, kernel in shared.items()}, x)


def norm(options: Options, x: jax.Array, w: Any, epsilon: float | None = None) -> jax.Array:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + (epsilon or options.epsilon))
    return (y * w["scale"]).astype(x.dtype)


def rotate(x: jax.Array, position: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding of `x` [batch, seq, heads, size], whose first token is at `position` [batch]."""
    half = x.shape[-1] // 2
    angle = (position[:, None] + jnp.arange(x.shape[1]))[..., None, None] * base ** (-jnp.arange(half) / half)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def sample(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """A token of each row of `logits` [batch, vocab], int32 [batch]."""
    if how.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits, tokens = jax.lax.top_k(logits / how.temperature, how.top_k or logits.shape[-1])
    chances = jax.nn.softmax(logits)
    logits = jnp.where(jnp.cumsum(chances, -1) - chances < how.top_p, logits, -jnp.inf)
    drawn = jax.random.categorical(key, logits)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)


# -- the steps of a server


def empty_state(prompt: Any, batch: int, length: int, seed: int = 0, *, page: int = 0, pages: int = 0) -> State:
    """The state of a server without sequences.

    Args:
      prompt: the cache of a prefill, or its shapes.
      batch: number of sequences at the same time.
      length: slots of a row, at least the window's or the longest sequence's.
      page, pages: of a cache in pages, the slots of a page, which divide ``length``, and the number of pages. Without, each row has
        slots of its own.
    """
    rows = {
        name: jnp.zeros((batch,), jnp.int32) for name in ("token", "position", "end")
    }  # separate arrays: they are donated
    entries, slots = (pages, page) if page else (batch, length)

    def empty(x: Any) -> jax.Array:
        layers, _, heads, _, *size = jax.eval_shape(by_rows, x).shape
        return by_rows(jnp.zeros((layers, entries, heads, slots, *size), x.dtype))

    cache = jax.tree.map(empty, prompt)
    if page:
        rows["table"] = jnp.full((batch, length // page), pages, jnp.int32)
    return {"cache": cache, **rows, "active": jnp.zeros((batch,), bool), "key": jax.random.key(seed)}


def prefill_step(options: Options, how: Sampling = Sampling()) -> Callable[..., Any]:
    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array, key: jax.Array) -> dict[str, Any]:
        """Keys and values of prompts `tokens` [prompt, seq], of which `lengths` [prompt] are used, and their next tokens."""
        logits, new = forward(options, params, tokens, jnp.zeros_like(lengths), last=lengths - 1)
        return {"cache": cached(options, new), "token": sample(logits, key, how), "position": lengths}

    return prefill


def insert_prompts(state: State, prompt: dict[str, Any], rows: jax.Array, end: jax.Array) -> State:
    """Put prefilled prompts into `rows` [prompt] of the state; they stop at positions `end` [prompt].

    With a cache in pages, `prompt["table"]` has the pages of each row.

    The dims of a prompt and of the state have different names, so a layout may shard both differently: the plan of this
    step shows how keys and values are resharded.
    """

    def put(cache: jax.Array, new: jax.Array) -> jax.Array:
        return by_rows(put_rows(by_rows(cache), by_rows(new)))

    def put_rows(cache: jax.Array, new: jax.Array) -> jax.Array:
        table, seq = prompt.get("table"), new.shape[3]
        length = cache.shape[3] * (1 if table is None else table.shape[1])
        if seq > length:  # a sliding window: its last tokens, each in its slot
            slots = slot_positions(prompt["position"], length).clip(0)
            new = jnp.take_along_axis(new, slots.reshape(1, -1, 1, length, *[1] * (new.ndim - 4)), axis=3)
        else:
            new = jnp.pad(new, [(0, length - seq) if d == 3 else (0, 0) for d in range(new.ndim)])
            new = new if table is not None else mp.rename(new, seq="cache")
        if table is None:
            return cache.at[:, rows].set(new)
        blocks = new.reshape(*new.shape[:3], table.shape[1], cache.shape[3], *new.shape[4:])
        return cache.at[:, table].set(jnp.moveaxis(blocks, 3, 2), mode="drop")

    values = {"token": prompt["token"], "position": prompt["position"], "end": end, "active": end > prompt["position"]}
    if "table" in prompt:
        values["table"] = prompt["table"]
    return {
        **state,
        "cache": jax.tree.map(put, state["cache"], prompt["cache"]),
        **{name: state[name].at[rows].set(x) for name, x in values.items()},
    }


def decode_step(options: Options, how: Sampling = Sampling(), stop: Sequence[int] = ()) -> Callable[..., Any]:
    """The step of a server: the next token of every active row."""

    def decode(params: Any, state: State) -> tuple[State, jax.Array]:
        """(the new state, int32 [batch]: the tokens; -1 for rows that are not active)."""
        position, active = state["position"], state["active"]
        table = state.get("table")
        logits, new = forward(options, params, state["token"][:, None], position, state["cache"], table=table)
        key, draw = jax.random.split(state["key"])
        token = sample(logits, draw, how)
        stopped = functools.reduce(jnp.logical_or, [token == s for s in stop], position + 1 >= state["end"])
        return {
            **state,
            "cache": jax.tree.map(
                functools.partial(write, position, active, table), state["cache"], cached(options, new)
            ),
            "token": jnp.where(active, token, state["token"]),
            "position": jnp.where(active, position + 1, position),
            "active": active & ~stopped,
            "key": key,
        }, jnp.where(active, token, -1)

    return decode


def write(
    position: jax.Array, active: jax.Array, table: jax.Array | None, cache: jax.Array, new: jax.Array
) -> jax.Array:
    """`cache` [layers, batch, kv_heads, cache, size] with `new` [layers, batch, kv_heads, 1, size] in the slots of the positions
    of active rows; scales are [layers, kv_heads, batch, cache].

    Each layer, row and head has an index of its own: the TPU compiler writes such a scatter in place, without a transposed copy of
    the cache. So it does with pages if layers and pages are indexed too.
    """
    length = cache.shape[3]
    if table is None:
        slot = jnp.where(active, position % length, length)  # beyond the cache: not written
        update = new[:, :, :, 0]
        index = jnp.broadcast_to(slot if cache.ndim == 4 else slot[:, None], update.shape[:3])[..., None]
        each = (0, 1, 2)
        numbers = jax.lax.ScatterDimensionNumbers(tuple(range(3, update.ndim)), (3,), (3,), each, each)
        return jax.lax.scatter(cache, index, update, numbers, mode="drop")
    layers, rows = jnp.arange(cache.shape[0])[:, None], jnp.arange(position.shape[0])
    block, slot = jnp.divmod(position % (table.shape[1] * length), length)
    rows = jnp.where(active, table[rows, block], by_rows(cache).shape[1])
    if cache.ndim == 4:
        return cache.at[layers, :, rows, slot].set(by_rows(new)[:, :, :, 0], mode="drop")
    return cache.at[layers, rows, :, slot].set(new[:, :, :, 0], mode="drop")


@dataclass(frozen=True)
class Steps:
    """The three steps of a server, compiled, each under its own layout."""

    prefill: Callable[..., Any]
    insert: Callable[..., Any]
    decode: Callable[..., Any]

    @classmethod
    def of(
        cls, options: Options, mesh: Any, *, prefill: str, insert: str, decode: str, how: Sampling = Sampling(),
        stop: Sequence[int] = (), lowering: str = "auto", paged: bool = False,
    ) -> "Steps":  # fmt: skip
        """The steps under the layouts ``prefill``, ``insert`` and ``decode``; ``paged``: for a cache in pages."""
        make: Any = mp.jit
        dims = dims_of(options, paged)
        jit = functools.partial(make, mesh=mesh, lowering=lowering)
        return cls(
            jit(prefill_step(options, how), layout=prefill, dims=dims["prefill"]),
            jit(insert_prompts, layout=insert, dims=dims["insert"], donate_argnames="state"),
            jit(decode_step(options, how, stop), layout=decode, dims=dims["decode"], donate_argnames="state"),
        )


def serve(
    steps: Steps, params: Any, prompts: Sequence[Sequence[int]], *, batch: int, length: int, new: int, pad: int,
    stop: Sequence[int] = (), seed: int = 0, page: int = 0, pages: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Continuous batching: whenever a sequence ends, the next prompt takes its row.

    Args:
      prompts: token numbers; each is padded to a multiple of ``pad``, so that few shapes are compiled.
      batch, length: rows and slots of the cache.
      page, pages: of a cache in pages, as in :func:`empty_state`. A prompt waits until there are enough free pages for it.
      new: largest number of tokens to generate for a prompt; ``stop``: tokens after which to end earlier.

    Returns:
      The new tokens of each prompt, the stop token included.
    """
    waiting = list(enumerate(prompts))[::-1]
    results: list[list[int]] = [[] for _ in prompts]
    rows: list[int | None] = [None] * batch
    key, state = jax.random.key(seed), None
    free = list(range(pages))
    taken: dict[int, list[int]] = {}

    def pages_for(n: int) -> int:
        """The number of pages of a prompt and its new tokens."""
        return -(-min(len(prompts[n]) + new, length) // page) if page else 0

    def page_table(row: int, n: int) -> np.ndarray:
        """The pages of a row, taken from the free ones, [1, blocks]."""
        taken[row] = [free.pop() for _ in range(pages_for(n))]
        return np.array([taken[row] + [pages] * (length // page - len(taken[row]))], np.int32)

    def finished(n: int) -> bool:
        return len(results[n]) >= new or results[n][-1] in stop

    while waiting or any(n is not None for n in rows):
        for row in (r for r, n in enumerate(rows) if n is None):
            while waiting and rows[row] is None and pages_for(waiting[-1][0]) <= len(free):
                n, tokens = waiting.pop()
                key, draw = jax.random.split(key)
                padded = np.zeros((1, -(-len(tokens) // pad) * pad), np.int32)
                padded[0, : len(tokens)] = tokens
                prompt = steps.prefill(params, padded, np.array([len(tokens)], np.int32), draw)
                results[n].append(int(prompt["token"][0]))
                if not finished(n):
                    if state is None:
                        state = empty_state(prompt["cache"], batch, length, seed, page=page, pages=pages)
                    if page:
                        prompt["table"] = page_table(row, n)
                    end = np.array([len(tokens) + new - 1], np.int32)
                    state, rows[row] = steps.insert(state, prompt, np.array([row], np.int32), end), n
        if waiting and not any(n is not None for n in rows) and pages_for(waiting[-1][0]) > pages:
            raise ValueError(f"a prompt needs {pages_for(waiting[-1][0])} pages, and there are {pages}")
        if state is not None:
            state, drawn = steps.decode(params, state)
            for row, token in enumerate(np.asarray(drawn)):
                n = rows[row]
                if n is not None:
                    results[n].append(int(token))
                    if finished(n):
                        rows[row] = None
                        free += taken.pop(row, [])
    return results


# -- targets of the command line


def llama3_8b_decode(batch: int = 32, length: int = 8192, **changes: Any) -> llama.Target:
    """Llama 3 8B: a token of each of ``batch`` sequences, with ``length`` slots of cache.

    ``changes``: options of :func:`weights_and_options`.
    """
    return decode_target(llama.Llama, llama.LLAMA3_8B, batch, length, **changes)


def llama3_70b_decode(batch: int = 32, length: int = 8192, **changes: Any) -> llama.Target:
    """Llama 3 70B, as above."""
    return decode_target(llama.Llama, llama.LLAMA3_70B, batch, length, **changes)


def llama31_405b_decode(batch: int = 32, length: int = 8192, **changes: Any) -> llama.Target:
    """Llama 3.1 405B, as above."""
    return decode_target(llama.Llama, llama.LLAMA31_405B, batch, length, **changes)


def mixtral_8x7b_decode(batch: int = 32, length: int = 8192, **changes: Any) -> llama.Target:
    """Mixtral 8x7B, as above."""
    return decode_target(mixtral.Mixtral, mixtral.MIXTRAL_8X7B, batch, length, **changes)


def deepseek_671b_decode(batch: int = 32, length: int = 8192) -> llama.Target:
    """The sizes of DeepSeek-V3, as above; the cache has 576 numbers a token and layer."""
    return decode_target(deepseek.DeepSeek, deepseek.DEEPSEEK_671B, batch, length)


def llama3_70b_prefill(batch: int = 1, seq: int = 8192, **changes: Any) -> llama.Target:
    """Llama 3 70B: prompts of ``seq`` tokens."""
    params, options = weights_and_options(llama.Llama, llama.LLAMA3_70B, **changes)
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, seq), (batch,)))
    return prefill_step(options), (params, tokens, lengths, jax.eval_shape(jax.random.key, 0)), DIMS["prefill"]


def decode_target(model: Any, config: Any, batch: int, length: int, **changes: Any) -> llama.Target:
    """(the step of :func:`decode_step`, (weights, state), dims) as shapes."""
    params, options = weights_and_options(model, config, **changes)
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 128), (1,)))
    prompt = jax.eval_shape(prefill_step(options), params, tokens, lengths, jax.eval_shape(jax.random.key, 0))
    state = jax.eval_shape(lambda: empty_state(prompt["cache"], batch, length))
    return decode_step(options), (params, state), dims_of(options)["decode"]


def weights_and_options(
    model: Any, config: Any, weights: str = "bfloat16", cache: str = "bfloat16", layers: int = 0, unroll: bool = False
) -> tuple[Any, Options]:
    """The shapes of the weights, and the options.

    Args:
      weights, cache: their dtypes: bfloat16, int8 or float8_e4m3fn. Matmuls of Llama read weights in 8 bits as codes.
      layers: fewer layers than the model has; 0: all.
      unroll: see :class:`Options`.
    """
    config = replace(config, layers=layers) if layers else config
    params = jax.eval_shape(lambda: llama.state_of(model, config, jax.random.key(0))["params"])
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), params)
    params = jax.eval_shape(merge_heads, params)
    if weights != "bfloat16":
        params = jax.eval_shape(lambda params: mp.layers.quantize(params, weights, contract=CONTRACT), params)
    return params, Options.of(config, cache=None if cache == "bfloat16" else cache, unroll=unroll)


# -- generation with the model of train_lm.py


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Print and return the text that the model of a checkpoint of train_lm.py writes after each prompt."""
    args = parse(argv)
    mp.virtual_devices(8)
    config = train_lm.Config(layers=args.layers, embed=args.embed, mlp=3 * args.embed)
    mesh = mp.mesh(args.mesh)

    def create(key: jax.Array) -> Any:
        model = train_lm.Transformer(config, nnx.Rngs(key))
        return model, nnx.Optimizer(model, train_lm.adamw(1e-3, 1), wrt=nnx.Param)

    init = mp.init(create, mesh=mesh, layout=mp.Layout(args.decode, optional=True))
    (model, _), step = mp.Checkpoints(args.checkpoint).restore_or(init, jax.random.key(0))
    print(f"weights of step {step}, on {train_lm.axes_of(mesh)}; decoding under {args.decode}")
    how = Sampling(args.temperature, args.top_k, args.top_p)
    steps = Steps.of(
        Options.of(config, epsilon=1e-6), mesh, how=how, stop=[0],
        prefill=args.prefill, insert=args.insert, decode=args.decode,
    )  # fmt: skip
    prompts = [list(text.encode()) for text in args.prompt]
    length = -(-(max(map(len, prompts)) + args.new) // 64) * 64
    tokens = serve(
        steps, model, prompts, batch=args.batch, length=length, new=args.new, pad=16, stop=[0], seed=args.seed
    )
    texts = [bytes(t).decode(errors="replace") for t in tokens]
    for prompt, text in zip(args.prompt, texts, strict=True):
        print(f"\n{prompt}{text}")
    return texts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a folder that train_lm.py --checkpoint wrote")
    add("--prompt", action="append", required=True, help="text to continue; several are decoded at the same time")
    add("--mesh", default="data=2, model=4")
    add("--prefill", default="heads, mlp, vocab: model", metavar="LAYOUT", help="(%(default)s)")
    add("--insert", default="batch: data; kv_heads?: model", metavar="LAYOUT", help="(%(default)s)")
    add("--decode", default="batch: data; heads, kv_heads?, mlp, vocab: model", metavar="LAYOUT", help="(%(default)s)")
    add("--new", type=train_lm.positive, default=128, help="bytes to generate (%(default)s)")
    add("--batch", type=train_lm.positive, default=8, help="sequences that are decoded at the same time (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: the most likely byte (%(default)s)")
    add("--top-k", type=train_lm.positive, help="draw from the K most likely bytes")
    add("--top-p", type=float, default=0.95, help="draw from bytes with this total probability (%(default)s)")
    add("--layers", type=train_lm.positive, default=4)
    add("--embed", type=train_lm.positive, default=128)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

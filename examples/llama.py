"""Llama in Flax Linen, at its real sizes, to be planned and compiled for pods that are not attached.

    meshpar plan examples/llama.py:llama3_8b --topology v5p:4x4x8
    meshpar plan examples/llama.py:llama3_70b --topology v5p:8x8x8 --mesh "data=64, model=8" --layout fsdp_tensor

Each target returns a train step, its arguments as shapes (nothing is allocated), and the dims of the batch; the weights
carry their names as Linen metadata. Weights and AdamW moments are float32, the compute dtype is bfloat16: weights are
cast before use, so they are gathered, and their gradients reduced, in bfloat16. Attention is JAX's splash kernel for TPUs;
`attention=xla` runs everywhere, and materializes the scores.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention

import meshpar as mp

DATA = "batch: data"
FSDP = "batch: data; embed: data"
ZERO1 = "batch: data; opt.embed: data"
TENSOR = "batch: data; heads, kv_heads?, mlp, vocab: model"
FSDP_TENSOR = f"{TENSOR}; embed: data"
FSDP_TENSOR_SEQUENCE = f"{TENSOR}; embed: data; seq: model"
LAYOUTS = {
    "data_parallel": DATA,
    "fsdp": FSDP,
    "hsdp": "batch: slice+data; embed: data",  # of several slices: FSDP within each, data parallel across
    "zero1": ZERO1,
    "tensor_parallel": TENSOR,
    "fsdp_tensor": FSDP_TENSOR,
    "sequence_parallel": FSDP_TENSOR_SEQUENCE,
}

DIMS = {"batch/*": "batch seq"}
CONTRACTED = {  # dims of the weights that matmuls contract
    "*/attention/{query,key,value}/kernel": "embed",
    "*/attention/out/kernel": "heads head_dim",
    "*/mlp/{gate,up}/kernel": "embed",
    "*/mlp/down/kernel": "mlp",
}
CONTEXT_PARALLEL = ("ring", "ulysses", "gathered")

Target = tuple[Callable[..., Any], tuple[Any, ...], dict[str, str]]
"""(train step, its arguments as ``jax.ShapeDtypeStruct``, the dims of its batch)."""


@dataclass(frozen=True)
class Config:
    """Sizes and options of a Llama.

    Attributes:
      dtype: the compute dtype; weights are float32.
      loss_chunks: chunks of the vocabulary, see :func:`cross_entropy`.
      loss: implementation of the loss, see :meth:`Head.__call__`.
      attention: implementation of attention, see :func:`attention`.
      remat: residuals that a layer saves for the backward pass, see :data:`REMAT`.
      interleave: number of interleaved microbatches in a layer, see :class:`Layer`.
      rotary: implementation of rotary position embeddings, see :func:`rotate`.
      microbatches: number of sequential microbatches of a step, whose gradients are averaged.
    """

    embed: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    head_dim: int = 128
    rope_base: float = 500_000.0
    loss_chunks: int = 8
    loss: str = "recomputed"
    dtype: Any = jnp.bfloat16
    attention: Literal["splash", "xla", "ring", "ulysses", "gathered"] = "splash"
    remat: str = "full"
    interleave: int = 1
    rotary: str = "halves"
    microbatches: int = 1


_save, _and = jax.checkpoint_policies.save_only_these_names, jax.checkpoint_policies.save_from_both_policies
_offload = functools.partial(jax.checkpoint_policies.save_and_offload_only_these_names, names_which_can_be_saved=[])
_to_host = functools.partial(_offload, offload_src="device", offload_dst="pinned_host")
_QKV, _MLP = ("query_proj", "key_proj", "value_proj"), ("gate_proj", "up_proj")
_ATTENTION = _and(_save(*_QKV, "residual"), mp.train.checkpoint_policies.kernels_saveable)
_MINIMAL = _and(_ATTENTION, _save(*_MLP))
_COLLECTIVES = mp.train.checkpoint_policies.collectives_saveable
REMAT: dict[str, Callable[..., bool] | None] = {  # residuals that a layer saves, besides its input
    "full": None,  # nothing
    "save_out_proj": _save("residual"),  # the residual stream between the blocks, after the reduction over `heads`
    "save_qkv_context": _and(_save(*_QKV), mp.train.checkpoint_policies.kernels_saveable),
    "save_dot_with_context_except_mlp": _ATTENTION,  # also queries, keys, values and the attention kernel's results
    "minimal_except_gate": _and(_ATTENTION, _save("up_proj")),  # also one of the MLP's two matmuls
    "minimal_with_context": _MINIMAL,  # also the other: only norms and activations are recomputed
    "none": jax.checkpoint_policies.everything_saveable,  # all residuals of the backward pass
    "keep_collectives": _COLLECTIVES,  # results of collectives
    "minimal_with_collectives": _and(_MINIMAL, _COLLECTIVES),
    "offload_input": _to_host(names_which_can_be_offloaded=["input"]),  # the input is stored in host memory
    "offload_input_qkv": _to_host(names_which_can_be_offloaded=["input", *_QKV]),
    "offload_input_qkv_out": _to_host(names_which_can_be_offloaded=["input", *_QKV, "residual"]),
}
EXPLICIT = ("keep_collectives", "minimal_with_collectives")  # their layers mark where the sequence is unsharded

LLAMA2_7B = Config(embed=4096, layers=32, heads=32, kv_heads=32, mlp=11008, vocab=32000, rope_base=10_000.0)
LLAMA3_8B = Config(embed=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256)
LLAMA3_70B = Config(embed=8192, layers=80, heads=64, kv_heads=8, mlp=28672, vocab=128256)
LLAMA31_405B = Config(embed=16384, layers=126, heads=128, kv_heads=8, mlp=53248, vocab=128256)
TINY = Config(
    embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=48, dtype=jnp.float32, attention="xla"
)  # fmt: skip


def llama2_7b(batch: int = 256, seq: int = 2048, **changes: Any) -> Target:
    """Llama 2 7B: 6.74e9 weights."""
    return target(LLAMA2_7B, batch, seq, **changes)


def llama3_8b(batch: int = 256, seq: int = 2048, **changes: Any) -> Target:
    """Llama 3 8B: 8.03e9 weights."""
    return target(LLAMA3_8B, batch, seq, **changes)


def llama3_8b_lora(batch: int = 256, seq: int = 2048, rank: int = 16, base: str = "", **changes: Any) -> Target:
    """Adapters of the query and value projections of Llama 3 8B: 6.8e6 trained weights, and others that do not change.

    Args:
      base: ``int8`` or ``float8_e4m3fn``: the matmuls' weights that do not change are stored in 8 bits; by default bfloat16.
    """
    return adapters_target(dataclasses.replace(LLAMA3_8B, **changes), batch, seq, rank, base)


def llama3_70b(batch: int = 512, seq: int = 4096, **changes: Any) -> Target:
    """Llama 3 70B: 70.6e9 weights."""
    return target(LLAMA3_70B, batch, seq, **changes)


def llama31_405b(batch: int = 512, seq: int = 4096, **changes: Any) -> Target:
    """Llama 3.1 405B: 406e9 weights."""
    return target(LLAMA31_405B, batch, seq, **changes)


def tiny(batch: int = 8, seq: int = 16, **changes: Any) -> Target:
    """Two layers of everything, in float32, for a laptop and for `meshpar check`."""
    return target(TINY, batch, seq, **changes)


def target(
    config: Config, batch: int, seq: int, model: Callable[[Any], nn.Module] | None = None, **changes: Any
) -> Target:
    """The train step of a model with its arguments: (step, (state, batch), dims).

    Args:
      config: sizes; ``changes`` replaces some of them (``layers=2``).
      batch: sequences in a step.
      seq: tokens in a sequence.
      model: from sizes to the model; by default a Llama.
    """
    config, model = dataclasses.replace(config, **changes), model or Llama
    if config.interleave > 1 and model is not Llama:
        raise ValueError(f"{model.__name__} does not support interleave={config.interleave}")
    state = jax.eval_shape(lambda: state_of(model, config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    step = step_of(model(config), config.microbatches)
    return step, (state, {"inputs": tokens, "targets": tokens}), DIMS


def adapters_target(config: Config, batch: int, seq: int, rank: int, base: str = "") -> Target:
    """The step that trains adapters alone: (step, (state, weights, batch), dims); ``base``: as for :func:`llama3_8b_lora`."""
    model, tokens = Llama(config), jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        loss: Any = model.apply({"params": params}, batch["inputs"], batch["targets"])
        return loss

    adapted = mp.train.lora(loss_of, "*/attention/{query,value}", rank=rank, dtype=jnp.float32)

    def create(key: jax.Array, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        params = state_of(Llama, config, key)["params"]
        params = jax.tree.map(lambda x: x.astype(config.dtype), params)
        if base:
            params = mp.layers.quantize(params, base, contract=CONTRACTED)
        adapters: Any = adapted.init(key, params, batch)
        return {"params": adapters, "opt": optimizer().init(adapters)}, params

    def step(state: dict[str, Any], weights: Any, batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update of AdamW on the adapters; returns the new state and the mean loss in nats a token."""
        loss, gradients = jax.value_and_grad(adapted)(state["params"], weights, batch)
        updates, opt = optimizer().update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    inputs = {"inputs": tokens, "targets": tokens}
    return step, (*jax.eval_shape(create, jax.random.key(0), inputs), inputs), DIMS


def create_state(config: Config, key: jax.Array) -> dict[str, Any]:
    """Weights and AdamW moments, float32, boxed with the names of their dims."""
    return state_of(Llama, config, key)


def state_of(model: Callable[[Any], nn.Module], config: Config, key: jax.Array) -> dict[str, Any]:
    """:func:`create_state` of any model."""
    tokens = jnp.zeros((config.interleave, 1), jnp.int32)
    plain = model(dataclasses.replace(config, attention="xla"))  # the same weights; splash wants a long seq
    params = plain.init(key, tokens, tokens)["params"]
    return {"params": params, "opt": optimizer().init(params)}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1))


def train_step(config: Config) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    return step_of(Llama(config), config.microbatches)


def step_of(model: nn.Module, microbatches: int = 1) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    def step(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
        """One update of AdamW; returns the new state and the mean loss in nats a token."""

        def loss_of(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            loss: Any = model.apply({"params": params}, batch["inputs"], batch["targets"])
            return loss

        gradient = mp.train.accumulate_gradients(jax.value_and_grad(loss_of), microbatches)
        loss, gradients = gradient(state["params"], batch)
        updates, opt = optimizer().update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


class Llama(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy of `targets` [batch, seq] given `inputs` [batch, seq], int32 tokens."""
        c = self.config
        embedding = named(nn.initializers.normal(1.0), "vocab", "embed")
        x = nn.Embed(c.vocab, c.embed, dtype=c.dtype, embedding_init=embedding, name="embedding")(inputs)
        layer = Layer if c.interleave == 1 else nn.map_variables(Layer, "params", functools.partial(cast, c), init=True)
        xs, _ = scanned(layer, c)(microbatches_of(x, c.interleave), None)
        return Head(c, name="head")(norm(c, "norm")(batch_of(xs)), targets)


def scanned(layer: type[nn.Module], config: Any, length: int | None = None, name: str = "layers") -> nn.Module:
    """The layers as one scan with rematerialisation; their weights are stacked along a dim `layers`.

    Args:
      length: number of layers; by default ``config.layers``.
    """
    if config.remat not in REMAT:
        near = difflib.get_close_matches(str(config.remat), REMAT, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(REMAT)}"
        raise mp.errors.TargetError(f"there is no remat {config.remat!r}", fixes=[fix])
    # a loop already keeps XLA from merging the two forward passes
    layer = nn.remat(layer, prevent_cse=False, policy=REMAT[config.remat])
    loop = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=config.layers if length is None else length,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return loop(config, name=name)


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, xs: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
        """`xs`: interleaved microbatches, each [batch, seq, embed]; collectives of one can overlap with matmuls of another."""
        c = self.config
        xs = tuple(checkpoint_name(x, "input") for x in xs)
        before, block = norm(c, "attention_norm"), Attention(c, name="attention")
        xs = tuple(checkpoint_name(x + leave(c, block(enter(c, before(x)))), "residual") for x in xs)
        before, block = norm(c, "mlp_norm"), SwiGLU(c, name="mlp")
        return tuple(x + leave(c, block(enter(c, before(x)))) for x in xs), None


def microbatches_of(x: jax.Array, parts: int) -> tuple[jax.Array, ...]:
    """`x` [batch, ...] as `parts` microbatches of equal size: microbatch i has the sequences i, i + parts, …, so each device has
    sequences of every microbatch."""
    if parts == 1:
        return (x,)
    if x.shape[0] % parts:
        raise ValueError(
            f"a batch of {x.shape[0]} cannot be divided into interleave={parts} microbatches of equal size"
        )
    cut = x.reshape(-1, parts, *x.shape[1:])
    return tuple(cut[:, part] for part in range(parts))


def batch_of(xs: tuple[jax.Array, ...]) -> jax.Array:
    """The batch of the microbatches of :func:`microbatches_of`."""
    return xs[0] if len(xs) == 1 else jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:])


def cast(config: Config, weights: Any) -> Any:
    """The matmul weights in the compute dtype, cast once for all microbatches, which then share their all-gathers and gradient
    reductions."""
    return jax.tree.map(lambda w: w.astype(config.dtype) if w.ndim > 1 else w, weights)


def enter(config: Config, x: jax.Array) -> jax.Array:
    """The input of a block, `x` [batch, seq, embed], with the sequence renamed to `block_seq` (unsharded) if it is to be saved."""
    return mp.rename(x, seq="block_seq") if config.remat in EXPLICIT else x


def leave(config: Config, x: jax.Array) -> jax.Array:
    """The output of a block, `x` [batch, block_seq, embed], with the sequence renamed back to `seq`, which the layout may shard."""
    return mp.rename(x, block_seq="seq") if config.remat in EXPLICIT else x


class Attention(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        shared = "kv_heads" if c.kv_heads < c.heads else "heads"  # equal numbers: one dim, with one name
        q = dense(c, (c.heads, c.head_dim), ("embed", "heads", "head_dim"), name="query")(x)
        k = dense(c, (c.kv_heads, c.head_dim), ("embed", shared, "head_dim"), name="key")(x)
        v = dense(c, (c.kv_heads, c.head_dim), ("embed", shared, "head_dim"), name="value")(x)
        q = checkpoint_name(
            rotate(q, c.rope_base, c.rotary), "query_proj"
        )  # after the rotation, which is then not recomputed
        k = checkpoint_name(rotate(k, c.rope_base, c.rotary), "key_proj")
        y = attention(q, k, checkpoint_name(v, "value_proj"), c.attention)
        return dense(c, (c.embed,), ("heads", "head_dim", "embed"), axis=(-2, -1), name="out")(y)


class Head(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy of `targets` [batch, seq] by the logits of `x` [batch, seq, embed].

        ``"recomputed"``: :func:`cross_entropy`, which needs the least memory. ``"vocab"``, ``"tokens"``:
        :func:`meshpar.layers.cross_entropy`, over chunks of the vocabulary (for FSDP) or of the tokens (where a layout shards the
        vocabulary), without recomputed logits.
        """
        c = self.config
        init = named(nn.initializers.lecun_normal(), "embed", "vocab")
        kernel = jnp.asarray(self.param("kernel", init, (c.embed, c.vocab)), c.dtype)
        if c.loss == "recomputed":
            return cross_entropy(x, kernel, targets, c.loss_chunks).mean()
        return mp.layers.cross_entropy((x, kernel), targets, over=c.loss, chunks=c.loss_chunks)


class SwiGLU(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = checkpoint_name(dense(c, (c.mlp,), ("embed", "mlp"), name="gate")(x), "gate_proj")
        up = checkpoint_name(dense(c, (c.mlp,), ("embed", "mlp"), name="up")(x), "up_proj")
        return dense(c, (c.embed,), ("mlp", "embed"), name="down")(nn.silu(gate) * up)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str = "splash") -> jax.Array:
    """Causal attention of `q` [batch, seq, heads, head_dim] over `k`, `v` [batch, seq, kv_heads, head_dim], as `q`.

    ``"splash"``: the Pallas kernel for TPUs; head_dim and seq are multiples of 128. ``"xla"``: any platform; it materializes scores
    [batch, heads, seq, seq]. ``"ring"``, ``"ulysses"``, ``"gathered"``: any platform, and seq may be sharded.
    """
    if implementation == "splash":
        return splash(q, k, v)
    if implementation == "xla":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    if implementation in CONTEXT_PARALLEL:
        return mp.layers.attention(q, k, v, causal=True, strategy=implementation)
    raise ValueError(
        f"there is no attention {implementation!r}; there are {', '.join(('splash', 'xla', *CONTEXT_PARALLEL))}"
    )


def splash(q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool = False) -> jax.Array:
    """:func:`attention` by the Pallas kernel for TPUs; batch and heads may be sharded."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    return jnp.swapaxes(heads_first(q, k, v, interpret=interpret), 1, 2)


@mp.kernel_rule(
    "batch (kv_heads group) seq! head_dim!, batch kv_heads seq! head_dim!, batch kv_heads seq! head_dim!"
    " -> batch (kv_heads group) seq! head_dim!"
)
def heads_first(q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Causal attention of scaled `q` [batch, heads, seq, head_dim] over `k`, `v` [batch, kv_heads, seq, head_dim], as `q`."""
    _, heads, seq, _ = q.shape
    block = math.gcd(seq, 512)
    if block < 128:
        raise ValueError(f"splash attention takes a seq that is a multiple of 128, not {seq}; there is attention=xla")
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([splash_attention.CausalMask((seq, seq))] * heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block,
            block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
            block_q_dq=block, block_kv_dq=block,
        ),
        interpret=interpret,
    )  # fmt: skip
    y: Any = jax.vmap(kernel)(q, k, v)
    return y


def rotate(x: jax.Array, base: float, by: str = "halves") -> jax.Array:
    """Rotary position embedding of `x` [batch, seq, heads, head_dim]: rotates pairs of features by an angle proportional to the
    position.

    ``"halves"``: by a split and a concatenation, which on TPUs are arrays in memory, since kernels do not shift lanes.
    ``"matmul"``: a matmul with a permutation matrix exchanges the features of each pair; the result is bitwise equal.
    """
    if by == "matmul":
        return turned(x, base)
    if by != "halves":
        raise ValueError(f"there is no rotary {by!r}; there are halves, matmul")
    angle = angles(x, base)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def angles(x: jax.Array, base: float) -> jax.Array:
    """The rotation angle of each pair of `x` in radians, float32 [seq, 1, head_dim / 2]."""
    seq, half = x.shape[1], x.shape[-1] // 2
    return jnp.arange(seq)[:, None, None] * base ** (-jnp.arange(half) / half)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def turned(x: jax.Array, base: float, back: bool = False) -> jax.Array:
    """:func:`rotate` by a matmul; with ``back`` its inverse, which is its transpose (for the backward pass)."""
    angle = angles(x, base)
    cos, sin = (jnp.concatenate([u, u], axis=-1) for u in (jnp.cos(angle), jnp.sin(angle)))
    partner = np.kron([[0, -1], [1, 0]] if back else [[0, 1], [-1, 0]], np.eye(x.shape[-1] // 2))
    other = jnp.matmul(x, jnp.asarray(partner, x.dtype), precision="highest", preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + other * sin).astype(x.dtype)


turned.defvjp(
    lambda x, base, back: (turned(x, base, back), None),
    lambda base, back, _, cotangent: (turned(cotangent, base, not back),),
)


def cross_entropy(x: jax.Array, kernel: jax.Array, targets: jax.Array, chunks: int = 1) -> jax.Array:
    """The loss in nats, float32 [batch, seq], of `x` [batch, seq, embed] @ `kernel` [embed, vocab] at `targets` [batch, seq].

    Computes `vocab // chunks` logits at a time, recomputed in the backward pass, with a running maximum and sum (Milakov &
    Gimelshein, "Online normalizer calculation for softmax", 2018): all logits, the full kernel and its gradient would be the
    largest arrays of a step. Token v is in chunk `v % chunks`, so every device has tokens of each chunk of a sharded vocabulary.
    The logit of the target is selected by comparison, not by indexing, so a sharded vocabulary stays sharded.
    """
    n = math.gcd(chunks, kernel.shape[1])
    words = jnp.arange(kernel.shape[1]).reshape(-1, n).T
    parts = jnp.moveaxis(kernel.reshape(kernel.shape[0], -1, n), 2, 0)

    def add(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        largest, total, chosen = carry
        part, word = chunk
        logits = (x @ part).astype(jnp.float32)
        top = jax.lax.stop_gradient(jnp.maximum(largest, logits.max(-1)))
        total = total * jnp.exp(largest - top) + jnp.exp(logits - top[..., None]).sum(-1)
        chosen += jnp.where(word == targets[..., None], logits, 0.0).sum(-1)
        return (top, total, chosen), None

    zero = jnp.zeros(targets.shape, jnp.float32)
    (top, total, chosen), _ = jax.lax.scan(jax.checkpoint(add), (zero - jnp.inf, zero, zero), (parts, words))
    return top + jnp.log(total) - chosen


def named(init: nn.initializers.Initializer, *dims: str | None) -> Any:
    """An initializer that adds the names of the weight's dims (None: unnamed)."""
    return nn.with_logical_partitioning(init, dims)


def dense(
    config: Any, out: tuple[int, ...], dims: tuple[str | None, ...], *, axis: Any = -1, name: str
) -> nn.DenseGeneral:
    init = named(nn.initializers.lecun_normal(), *dims)
    return nn.DenseGeneral(out, axis=axis, use_bias=False, dtype=config.dtype, kernel_init=init, name=name)


def norm(config: Any, name: str) -> nn.RMSNorm:
    scale = named(nn.initializers.ones, "embed")
    return nn.RMSNorm(epsilon=1e-5, dtype=config.dtype, scale_init=scale, name=name)

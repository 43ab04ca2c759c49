"""`ring_attention` and its cost estimate: checks, choice of strategy, gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels import _compat
from meshpar_kernels._choose import devices_on, refuse_sharded
from meshpar_kernels._numerics import no_tangent, row_dots
from meshpar_kernels.attention import gathered, ring, ulysses
from meshpar_kernels.attention.context import Context
from meshpar_kernels.attention.costs import AttentionCosts, Machine, costs, ready
from meshpar_kernels.attention.flash import K_CHUNK, Q_CHUNK
from meshpar_kernels.attention.options import OP, ContextParallel, Operands, Options

MODULES: dict[str, Any] = {"ring": ring, "ulysses": ulysses, "ring+ulysses": ulysses, "gathered": gathered}
Axes = str | tuple[str, ...]
Devices = int | Mapping[str, int]
Segments = jax.Array | tuple[jax.Array, jax.Array] | None


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: Axes | None,
    *,
    causal: bool = False,
    segment_ids: Segments = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
    chunks: tuple[int, int] = (Q_CHUNK, K_CHUNK),
    parallel: ContextParallel | None = None,
) -> jax.Array:
    """Attention over a sequence that is sharded over devices (context parallelism). Call it inside `jax.shard_map`.

    The strategies of `parallel`:

    - "ring": K and V circulate by `ppermute`, overlapped with the attention to the blocks that have arrived. Fully
      masked blocks are skipped; with a window, K and V are sent only to devices that use them. Causal work is balanced
      by an exchange of queries (`ContextParallel.balance`). Memory: a few K/V blocks of one device. Source: Liu et al.
      2023, "Ring Attention with Blockwise Transformers".
    - "ulysses": all-to-alls reshard from the sequence to the heads. H must divide over the A devices, and so must Hkv,
      or A over Hkv: then each K/V head is copied to the A/Hkv devices that use it. Source: Jacobs et al. 2023.
    - "ring+ulysses": over several mesh axes, Ulysses over the last ones, as many as the heads permit, and a ring over the
      others. Source: Fang & Zhao 2024, "USP".
    - "gathered": K and V are all-gathered, in the backward pass as well; their gradients are reduce-scattered in
      float32.

    Scores are computed in chunks, forward and backward: no S×S scores in memory. Saved for the backward pass are q, k, v,
    the result, and one float32 log-sum-exp for each row and head. Softmax and accumulators are in float32; float32
    operands are multiplied in full precision.

    Args:
      q: [B, Sq/A, H, D]; float32, bfloat16 or float16; or float64, with accumulators in float64.
      k: [B, Skv/A, Hkv, D], q's dtype; H is a multiple of Hkv.
      v: [B, Skv/A, Hkv, Dv].
      axis_name: the mesh axis (or several as one, the first major) over which the sequence is sharded; None: one
        device.
      causal: a query sees no later key; positions count from the start of each sequence.
      segment_ids: int [B, Sq/A], of queries and keys (Sq = Skv), or a pair ([B, Sq/A], [B, Skv/A]): a query sees the
        keys of its own segment.
      window: a query sees the keys less than `window` positions away; with `causal` itself and the window - 1 keys
        before it.
      scale: factor on q·k; None: 1/√D.
      softcap: scores become softcap·tanh(score/softcap).
      implementation: of the attention on a device. "pallas" and "pallas_tpu": kernels, for D and Dv that are multiples
        of 64 and lengths on a device that are multiples of 128. "cudnn": NVIDIA's library, for bfloat16 and float16,
        without segment ids and softcap, and causal masks only of tokens in order (with a window only a device's own
        block). "splash": JAX's splash attention for TPUs, for bfloat16, at most 32768 queries and keys in one call, and the
        masks of "cudnn" and segment ids of aligned tokens. "xla": in chunks. "reference": with all scores of the
        device in memory. None: on GPUs "cudnn", on TPUs "splash", for each block that they can take, else "xla", unless
        `MESHPAR_KERNELS=pallas`; with `MESHPAR_KERNELS=reference` always "xla".
      chunks: queries and keys in one block of scores of "xla".
      parallel: strategy, order of the tokens, and transfers over `axis_name`; see `ContextParallel`.

    Returns:
      [B, Sq/A, H, Dv], q's dtype. The result of a query that sees no key is 0, and its gradients are 0. Differentiable
      in q, k and v.

    Raises:
      ValueError: shapes, dtypes or options that do not fit, or operands sharded outside of `shard_map`.
      NotImplementedError: the requested implementation cannot run.
    """
    refuse_sharded(OP, q=q, k=k, v=v)
    parallel = parallel or ContextParallel()
    positions = None if isinstance(parallel.order, str) else parallel.order
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    sizes = {a: devices_on(OP, "q, k, v", a) for a in axes}
    options = Options(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        strategy=parallel.strategy,
        zigzag=math.prod(sizes.values()) if positions is None and parallel.order == "zigzag" else 1,
        both_ways=parallel.both_ways,
        balance=parallel.balance,
        implementation=implementation,
        chunks=chunks,
        scatter=parallel.scatter,
    )
    x = Operands(q, k, v, *(segment_ids if isinstance(segment_ids, tuple) else (segment_ids, None)), positions)
    return _attention_jit(plan(x, sizes, options), *x)


class Plan(NamedTuple):
    """Static arguments: a `Context` and the strategy."""

    context: Context
    strategy: str


def plan(x: Operands, axes: Mapping[str, int], options: Options) -> Plan:
    """Check the arguments of `ring_attention` (arrays of one device, or their shapes and dtypes), and choose a
    strategy.

    Args:
      axes: {mesh axis over which the sequence is sharded: its size}, the first major.

    Raises:
      ValueError: arguments that do not fit.
    """
    devices = math.prod(axes.values())
    x.check(devices, options.zigzag)
    context = Context(
        axes=tuple(axes),
        devices=devices,
        softmax=options.softmax(x.q.shape[3]),
        zigzag=options.zigzag,
        both_ways=options.both_ways,
        implementation=options.implementation,
        sizes=tuple(axes.values()),
        scatter=options.scatter,
        balanced=options.balance,
        placed=x.pos is not None,
    )
    strategy = options.strategy
    if strategy is None:
        strategy = "ring" if devices == 1 else costs(context, *x[:3], segments=x.segments).strategy
    found = ready(context, strategy, *x[:3], x.segments, Machine())
    if isinstance(found, str):
        hint = (
            "; it needs heads that divide over the devices, and K/V heads that do, or whose number divides the number of "
            'devices. "ring" and "gathered" take any heads'
        )
        raise ValueError(f'{OP}: strategy="{strategy}": {found}{hint * ("ulysses" in strategy)}')
    return Plan(found, strategy)


def attention_costs(
    q: Any, k: Any, v: Any, devices: Devices, *, segments: int = 0, machine: Machine | None = None, **options: Any
) -> AttentionCosts:
    """Transfers, memory, FLOPs and estimated seconds of each strategy of `ring_attention` on one device, and the
    strategy that it chooses.

    Time is estimated by an α-β model of a ring with links in both directions: all-gather and reduce-scatter send
    (A-1)/2 local blocks over a link, an all-to-all A/8 of its operand, a permute its operand. FLOPs count the visible
    pairs of the busiest device, at the peak rate. The hops of a ring are overlapped with its attention, but each
    of them reads and writes the float32 accumulators once more.

    Args:
      q, k, v: arrays or `jax.ShapeDtypeStruct`, of one device: [B, S/A, H, D].
      devices: A; or {mesh axis: its size}, the first major, for "ring+ulysses".
      segments: number of arrays of segment ids: 0, 1 (queries and keys have the same) or 2. The pairs that they mask
        are unknown.
      machine: hardware rates of a device, and the memory that attention may use; None: a TPU v5p, 2 GiB.
      options: causal, window, scale, softcap, chunks as in `ring_attention`; both_ways, balance and scatter as in
        `ContextParallel`; zigzag: the number of devices for which the tokens are in zig-zag order.

    Returns:
      `AttentionCosts`: `.of[strategy]` with bytes, memory, FLOPs and seconds of forward and backward pass together;
        `.strategy` and `.reason`.

    Raises:
      ValueError: arguments that do not fit.
    """
    over = {"ring": devices} if isinstance(devices, int) else devices
    c = plan(Operands(q, k, v), over, Options(strategy="ring", **options)).context
    c = dataclasses.replace(c, balanced=options.get("balance"))
    return costs(c, q, k, v, segments=segments, machine=machine)


# -- forward and backward pass as separate functions, for callers that save the residuals themselves


def forward(p: Plan, x: Operands) -> tuple[jax.Array, jax.Array]:
    """([B, Q, H, Dv] in q's dtype, log-sum-exp float32 [B, Q, H]), inside `shard_map`."""
    x = Operands(*_same_varying(p, *x))
    module = ring if p.context.devices == 1 else MODULES[p.strategy]
    out, lse = module.forward(p.context, x)
    return out.astype(x.q.dtype), lse


def backward(
    p: Plan, x: Operands, out: jax.Array, lse: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v in their dtypes, from the operands and results of `forward`."""
    given = _same_varying(p, *x, out, lse, grad)
    # else XLA reuses the received arrays of the forward pass, and holds them in memory until here
    *given, out, lse, grad = lax.optimization_barrier(given)
    x = Operands(*given)
    module = ring if p.context.devices == 1 else MODULES[p.strategy]
    grads = module.backward(p.context, x, out, grad, lse, row_dots(grad, out))
    d_q, d_k, d_v = (g.astype(a.dtype) for g, a in zip(grads, x[:3], strict=True))
    return d_q, d_k, d_v


def _same_varying(p: Plan, *arrays: Any) -> tuple[Any, ...]:
    """The arrays, varying over the ring's axes too, since positions vary over them."""
    rank = jnp.asarray(p.context.rank())
    return _compat.same_varying(rank, *arrays)[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(p: Plan, *x):
    return forward(p, Operands(*x))[0]


def _attention_fwd(p, *x):
    out, lse = forward(p, Operands(*x))
    return out, (x, out, lse)


def _attention_bwd(p, saved, grad):
    """Backward rule: gradients of q, k and v; segment ids get float0 zeros."""
    x, out, lse = saved
    return *backward(p, Operands(*x), out, lse, grad), *map(no_tangent, x[3:])


_attention.defvjp(_attention_fwd, _attention_bwd)


@functools.partial(jax.jit, static_argnums=0)
def _attention_jit(p, *args):
    return _attention(p, *_same_varying(p, *args))

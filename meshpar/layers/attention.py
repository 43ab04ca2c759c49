"""``attention``: one op, whose sequence a layout may split. Ring, Ulysses or gathered K/V bring keys and queries together.

Two opaque ops with a rule, one for each direction, so that the backward pass has the result and its log-sum-exp and does not
run the forward one again. The numbers do not depend on the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels.attention import api
from meshpar_kernels.attention.costs import sends as sends_of
from meshpar_kernels.attention.costs import work as work_of

from ..compat.jax import default_promotion
from ..errors import MeshparError, RankError
from ..program.declare import kernel_rule
from ..program.kernels import KernelSend, KernelWork, Parts

__all__ = ["attention"]

Options = tuple[tuple[str, Any], ...]
OUT = "batch {seq} (kv_heads group) value_dim!"
ROWS = "batch {seq} (kv_heads group)"


@default_promotion()
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    strategy: str | None = None,
    zigzag: int = 1,
    implementation: str | None = None,
    **tuning: Any,
) -> jax.Array:
    """Attention whose batch, heads and sequence a layout may split: ``seq: context`` is context parallelism.

    Batch and heads that are split stay where they are. Where the sequence is split, ``strategy`` says how queries and keys come
    together: ``"ring"`` (K/V go round while attention is computed), ``"ulysses"`` (all-to-alls trade sequence for heads) or
    ``"gathered"`` (K/V are all-gathered); None: by :func:`meshpar_kernels.attention_costs`, from the shapes of one device. The
    plan lists what it sends, the backward pass as well, and counts what it holds. No scores [seq, seq] are ever held. Call the
    dim of q and of k and v by the same name (no ``rename``): as many queries as keys are one dim here. Where their number
    differs, the sequence is gathered.

    Args:
      q: [batch, seq, heads, head_dim]; float32, bfloat16 or float16.
      k: [batch, seq, kv_heads, head_dim]; heads are a multiple of kv_heads. v: [batch, seq, kv_heads, any].
      causal, segment_ids, window, scale, softcap, implementation: as in :func:`meshpar_kernels.ring_attention`, on whole arrays.
      strategy: see above; it concerns a split sequence alone.
      zigzag: the tokens are in the order of :func:`meshpar_kernels.zigzag` for so many devices: with a sequence that is split
        over as many, causal work balances. It says where tokens belong, so the result depends on it, and on no layout.
      tuning: ``both_ways``, ``chunks``, ``scatter`` as in ``ring_attention``.

    Returns:
      [batch, seq, heads, any], q's dtype. Differentiable in q, k and v.

    Raises:
      MeshparError: shapes or options that do not fit; when planned, a strategy that the layout's split does not allow.
    """
    ids = () if segment_ids is None else segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise RankError(
                f"attention: {name} must be [batch, seq, heads, head_dim], got rank {x.ndim}",
                shape=x.shape,
                fixes=[f"reshape {name} to [batch, seq, heads, head_dim]; a dim may be of size 1"],
            )
    together = q.shape[1] == k.shape[1]
    options = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "strategy": strategy, "zigzag": zigzag,
        "implementation": implementation, **tuning,
    }  # fmt: skip
    static = tuple(sorted(options.items()))
    _plan(
        _unpack((q, k, v, *ids), len(ids)), {}, {**options, "strategy": "ring"}
    )  # on one device: all but the strategy
    if strategy not in (None, "ring"):
        _plan(_unpack((q, k, v, *ids), len(ids)), {}, options)
    return _attend(static, together, q, k, v, *ids)


def _unpack(args: Sequence[Any], ids: int) -> api.Operands:
    return api.Operands(*args[: 3 + ids])


def _plan(
    operands: api.Operands,
    axes: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
    sizes: Mapping[str, int] | None = None,
) -> api.Plan:
    """How one device does it, its operands being these."""
    over = {a: lax.axis_size(a) if sizes is None else sizes[a] for a in axes.get("seq", ())}
    try:
        return api.plan(operands, {a: n for a, n in over.items() if n > 1}, api.Options(**options))
    except ValueError as error:
        raise MeshparError(
            str(error).replace("ring_attention:", "attention:", 1),
            fixes=["sizes, axes and options as in the docstring of mp.attention"],
        ) from None


# -- the two ops


@functools.cache
def _ops(ids: int, together: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, backward) with so many arrays of segment ids; ``together``: queries and keys are one dim."""
    seq, keys = ("seq~", "seq~") if together else ("seq!", "kv_seq!")
    q, k = f"batch {seq} (kv_heads group) head_dim!", f"batch {keys} kv_heads head_dim!"
    v, out, rows = f"batch {keys} kv_heads value_dim!", OUT.format(seq=seq), ROWS.format(seq=seq)
    operands = [q, k, v, *[f"batch {seq}", f"batch {keys}"][:ids]]
    forward_text = f"{', '.join(operands)} -> {out}, {rows}"
    backward_text = f"{', '.join([*operands, out, rows, out])} -> {q}, {k}, {v}"

    def forward_local(*args: Any, axes: Mapping[str, tuple[str, ...]], **options: Any) -> Any:
        operands = _unpack(args, ids)
        return api.forward(_plan(operands, axes, options), operands)

    def backward_local(*args: Any, axes: Mapping[str, tuple[str, ...]], **options: Any) -> Any:
        operands, (out, lse, grad) = _unpack(args, ids), args[3 + ids :]
        return api.backward(_plan(operands, axes, options), operands, out, lse, grad)

    def sends(avals: Sequence[Any], parts: Parts, *, way: int, **options: Any) -> list[KernelSend]:
        operands = _unpack(avals, ids)
        c, strategy = _plan(operands, parts.axes, options, parts.sizes)
        sent = sends_of(c, strategy, *operands[:3], segments=ids)[way]
        over = [c.axes if s.stage is None else s.stage[:1] for s in sent]
        return [
            KernelSend(s.op, (), tuple(s.shape), s.dtype, s.why, s.times, axes=a)
            for s, a in zip(sent, over, strict=True)
        ]

    def works(avals: Sequence[Any], parts: Parts, *, way: int, **options: Any) -> KernelWork:
        operands = _unpack(avals, ids)
        c, strategy = _plan(operands, parts.axes, options, parts.sizes)
        return KernelWork(*work_of(c, strategy, *operands[:3])[way])

    def made(text: str, local: Callable[..., Any], way: int, name: str) -> Callable[..., Any]:
        def whole(*args: Any, **options: Any) -> Any:
            return local(*args, axes={}, **options)

        whole.__name__ = name
        rule = kernel_rule(
            text, local=local, sends=functools.partial(sends, way=way), works=functools.partial(works, way=way)
        )
        return rule(whole)

    return made(forward_text, forward_local, 0, "attention"), made(
        backward_text, backward_local, 1, "attention backward"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: Options, together: bool, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
    return _ops(len(ids), together)[0](q, k, v, *ids, **dict(options))[0]


@default_promotion()
def _attend_fwd(options: Options, together: bool, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> Any:
    out, lse = _ops(len(ids), together)[0](q, k, v, *ids, **dict(options))
    return out, (q, k, v, ids, out, lse)


@default_promotion()
def _attend_bwd(options: Options, together: bool, saved: Any, grad: jax.Array) -> Any:
    q, k, v, ids, out, lse = saved
    grads = _ops(len(ids), together)[1](q, k, v, *ids, out, lse, grad.astype(jnp.result_type(out)), **dict(options))
    return *grads, *(np.zeros(x.shape, jax.dtypes.float0) for x in ids)


_attend.defvjp(_attend_fwd, _attend_bwd)

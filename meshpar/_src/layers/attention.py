"""``attention``: one op, whose sequence a layout may shard, by a ring, by Ulysses' all-to-alls, or with all-gathered K and V.

It consists of two opaque ops with factor rules, forward and backward. The backward op reads the saved output and log-sum-exp, so
that the forward op is not recomputed. The result does not depend on the layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar_kernels.attention import api
from meshpar_kernels.attention.costs import sends as sends_of
from meshpar_kernels.attention.costs import work as work_of
from meshpar_kernels.attention.ring import any_order

from ...errors import MeshparError, RankError
from ..compat.jax import default_promotion
from ..hardware.topology import Stage, ring_order
from ..program.declare_kernel_rule import kernel_rule
from ..program.kernels import KernelSend, KernelWork, ShardCounts
from ..rules.mesh_in_shard_map import GroupedAxes

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
    positions: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    strategy: str | None = None,
    implementation: str | None = None,
    **tuning: Any,
) -> jax.Array:
    """Attention whose batch, heads and sequence a layout may shard: ``seq: context`` is context parallelism.

    Sharded batch and heads need no communication. For a sharded sequence, ``strategy`` is ``"ring"`` (K and V circulate while
    attention is computed; Liu et al. 2023), ``"ulysses"`` (all-to-alls exchange the sequence for heads; Jacobs et al. 2023),
    ``"ring+ulysses"`` (over two axes, ``seq: ring+uly``: Ulysses over the last one inside of a ring over the first; Fang & Zhao
    2024) or ``"gathered"`` (K and V are all-gathered); None: the one that :func:`meshpar_kernels.attention_costs` estimates as
    fastest for the shapes on one device. A ring balances causal work where that takes less time, and visits neighbours of the torus
    in whatever order the mesh has them. The plan lists the collectives of both passes and counts the memory. Scores [seq, seq] are
    never stored. Give the sequence dims of q and of k and v the same name (no ``rename``), since they are one dim of this op; if
    their sizes differ, the sequence is all-gathered.

    Args:
      q: [batch, seq, heads, head_dim]; float32, bfloat16, float16 or float64.
      k: [batch, seq, kv_heads, head_dim]; heads are a multiple of kv_heads. v: [batch, seq, kv_heads, any].
      positions: int32 [seq], the positions of the tokens, the same in all rows, where they are in another order
        (:func:`meshpar.data.balance`); None: in order.
      causal, segment_ids, window, scale, softcap, implementation: as in :func:`meshpar_kernels.ring_attention`, for
        global arrays.
      strategy: see above; only for a sharded sequence.
      tuning: ``balance``, ``both_ways``, ``chunks``, ``scatter`` as in ``ring_attention``; and ``zigzag``, the number of devices
        for which the tokens are in the order of :func:`meshpar_kernels.zigzag`, which balances causal attention over that many
        shards of the sequence. It determines the positions of tokens, so the result depends on it.

    Returns:
      [batch, seq, heads, any], q's dtype. Differentiable in q, k and v.

    Raises:
      MeshparError: shapes or options that do not fit; when planned, a strategy that the sharding does not allow.

    Example:
      >>> q = k = v = jnp.ones((2, 64, 4, 16))
      >>> attend = mp.jit(
      ...     lambda q, k, v: mp.layers.attention(q, k, v, causal=True), mesh=mesh, layout="batch: model; seq: data",
      ...     dims={"*": "batch seq heads head_dim"},
      ... )
      >>> attend(q, k, v).shape
      (2, 64, 4, 16)
    """
    ids = () if segment_ids is None else segment_ids if isinstance(segment_ids, tuple) else (segment_ids,)
    more = ids if positions is None else (*ids, positions)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise RankError(
                f"mp.layers.attention: {name} must be [batch, seq, heads, head_dim], got rank {x.ndim}",
                shape=x.shape,
                fixes=[f"reshape {name} to [batch, seq, heads, head_dim]; a dim may be of size 1"],
            )
    form = Form(len(ids), positions is not None, q.shape[1] == k.shape[1])
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap, "implementation": implementation}
    options |= {"strategy": strategy, "zigzag": 1, **tuning}
    static = tuple(sorted(options.items()))
    operands = _unpack((q, k, v, *more), form)
    _plan(operands, {}, {**options, "strategy": "ring"}, {})  # on one device: all but the strategy
    if strategy not in (None, "ring"):
        _plan(operands, {}, options, {})
    return _attend(static, form, q, k, v, *more)


class Form(NamedTuple):
    """The operands of an op: number of arrays of segment ids, whether positions follow them, and whether the sequences of
    queries and keys are one dim."""

    ids: int
    placed: bool
    together: bool


def _unpack(args: Sequence[Any], form: Form) -> api.Operands:
    """q, k, v, segment ids and positions, without the arguments after them."""
    pos = args[3 + form.ids] if form.placed else None
    q_seg, k_seg = (*args[3 : 3 + form.ids], None, None)[:2]
    return api.Operands(args[0], args[1], args[2], q_seg, k_seg, pos)


def _plan(
    operands: api.Operands,
    axes: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> api.Plan:
    """The :class:`Plan` of ``meshpar_kernels.ring_attention``: the strategy, kernel and block sizes for the operands of
    one device.

    Args:
      operands: q, k, v and segment ids; shards, or their ``ShapeDtypeStruct``s.
      axes: ``"seq"`` → the mesh axes that shard the sequence; other factors are ignored.
      options: keyword arguments of ``ring_attention.Options``.
      sizes: mesh axis → size.

    Raises:
      MeshparError: shapes or options that do not fit.
    """
    over = {a: sizes[a] for a in axes.get("seq", ()) if sizes[a] > 1}
    try:
        return api.plan(operands, over, api.Options(**options))
    except ValueError as error:
        text = str(error).replace("ring_attention:", "mp.layers.attention:", 1)
        raise MeshparError(text, fixes=["sizes, axes and options as in the docstring of mp.layers.attention"]) from None


def _local_plan(operands: api.Operands, axes: Mapping[str, tuple[str, ...]], options: Mapping[str, Any]) -> api.Plan:
    """The plan within a ``shard_map``. The strategy is chosen for the axes of the planned mesh, as the planner chooses it, and runs
    over the axes that these are divided into on a torus; a ring that takes any order visits neighbours."""
    over = axes.get("seq", ())
    over = over if isinstance(over, GroupedAxes) else GroupedAxes({a: (a,) for a in over}, {})
    groups = over.groups
    sizes = {a: math.prod(map(lax.axis_size, names)) for a, names in groups.items()}
    c, strategy = _plan(operands, {"seq": tuple(groups)}, options, sizes)
    names = tuple(n for a in c.axes for n in groups[a])
    inner = sum(len(groups[a]) for a in c.axes[len(c.axes) - c.inner :])
    lengths = (x.shape[1] * c.exchange.devices for x in operands[:2])
    stages = tuple(s for a in c.outer.axes for s in over.torus.get(a, (Stage(sizes[a]),)))
    order = ring_order(stages) if any_order(c.outer, *lengths) else ()
    own = tuple(map(lax.axis_size, names))
    return api.Plan(dataclasses.replace(c, axes=names, sizes=own, inner=inner, order=order), strategy)


# -- the two ops


@functools.cache
def _ops(form: Form) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(forward, backward) ops."""
    seq, keys = ("seq~", "seq~") if form.together else ("seq!", "kv_seq!")
    q, k = f"batch {seq} (kv_heads group) head_dim!", f"batch {keys} kv_heads head_dim!"
    v, out, rows = f"batch {keys} kv_heads value_dim!", OUT.format(seq=seq), ROWS.format(seq=seq)
    operands = [q, k, v, *[f"batch {seq}", f"batch {keys}"][: form.ids], *[seq][: form.placed]]
    forward_text = f"{', '.join(operands)} -> {out}, {rows}"
    backward_text = f"{', '.join([*operands, out, rows, out])} -> {q}, {k}, {v}"

    def local(*args: Any, way: int, axes: Mapping[str, tuple[str, ...]], **options: Any) -> Any:
        operands, results = _unpack(args, form), args[3 + form.ids + form.placed :]
        run = api.backward if way else api.forward
        return run(_local_plan(operands, axes, options), operands, *results)

    def sends(avals: Sequence[Any], parts: ShardCounts, *, way: int, **options: Any) -> list[KernelSend]:
        """The collectives of one pass on one device; ``way`` is 0 for the forward pass, and 1 for the backward pass."""
        operands = _unpack(avals, form)
        c, strategy = _plan(operands, parts.axes, options, parts.sizes)
        sent = sends_of(c, strategy, *operands[:3], segments=form.ids)[way]
        over = [c.axes if s.stage is None else s.stage[0] for s in sent]
        hidden = [s.hidden if s.hidden < math.inf else 0.0 for s in sent]  # one hop of a ring is exposed
        return [
            KernelSend(s.op, (), tuple(s.shape), s.dtype, s.why, s.times, axes, s.route, flops)
            for s, axes, flops in zip(sent, over, hidden, strict=True)
        ]

    def works(avals: Sequence[Any], parts: ShardCounts, *, way: int, **options: Any) -> KernelWork:
        operands = _unpack(avals, form)
        c, strategy = _plan(operands, parts.axes, options, parts.sizes)
        q, k, v = operands[:3]
        matmuls = 2.0 * math.prod(q.shape[:3]) * k.shape[1] * (q.shape[3] + v.shape[3])  # of all scores
        return KernelWork(*work_of(c, strategy, q, k, v)[way], model_flops=(1 + way) * matmuls)

    def op(text: str, way: int, name: str) -> Callable[..., Any]:
        """The kernel with the rule ``text`` and the name ``name``."""

        def unsharded(*args: Any, **options: Any) -> Any:
            return local(*args, way=way, axes={}, **options)

        unsharded.__name__ = name
        sent, work = functools.partial(sends, way=way), functools.partial(works, way=way)
        return kernel_rule(text, local=functools.partial(local, way=way), sends=sent, works=work)(unsharded)

    return op(forward_text, 0, "attention"), op(backward_text, 1, "attention backward")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(options: Options, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> jax.Array:
    return _ops(form)[0](q, k, v, *more, **dict(options))[0]


@default_promotion()
def _attend_fwd(options: Options, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, *more: jax.Array) -> Any:
    out, lse = _ops(form)[0](q, k, v, *more, **dict(options))
    return out, (q, k, v, more, out, lse)


@default_promotion()
def _attend_bwd(options: Options, form: Form, saved: Any, grad: jax.Array) -> Any:
    q, k, v, more, out, lse = saved
    grads = _ops(form)[1](q, k, v, *more, out, lse, grad.astype(jnp.result_type(out)), **dict(options))
    return *grads, *(np.zeros(x.shape, jax.dtypes.float0) for x in more)


_attend.defvjp(_attend_fwd, _attend_bwd)

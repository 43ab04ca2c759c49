"""`ragged_all_to_all`, `expert_dispatch`, `expert_combine`: on the arrays of one device, inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar_kernels._choose import devices_on
from meshpar_kernels.collectives import coded
from meshpar_kernels.dispatch import reference
from meshpar_kernels.dispatch.differentiable import KERNELS, exchange_slots, move_rows
from meshpar_kernels.dispatch.plan import Dispatch, Sorted, merge, window
from meshpar_kernels.dispatch.rows import choices_to_rows, spread, sum_back
from meshpar_kernels.dispatch.runs import Axes, clip
from meshpar_kernels.routing.plan import RoutePlan

STRATEGIES = ("a2a", "ring")
EXCHANGES = (None, "padded", "float8", *KERNELS)
CODE_BLOCK = 128
"""Elements of a row that share a scale with "float8"; all of them, if there are fewer."""


def _size(op: str, operands: str, axis_name: Axes | None) -> int:
    return 1 if axis_name is None or axis_name == () else devices_on(op, operands, axis_name)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Axes,
    rows: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Send a run of rows to every device, of different lengths: `jax.lax.ragged_all_to_all` that runs on all platforms.

    The rows `input_offsets[i]` … `input_offsets[i] + send_sizes[i] - 1` of the operand are sent to device i, and
    written from row `output_offsets[i]` on; the other rows of `output` are unchanged. If runs overlap at a receiver,
    the run that arrives last wins.

    - "padded" pads every run to `rows` and uses a plain all-to-all. It sends devices·rows rows, however few are valid,
      and needs no support for ragged collectives, which CPUs and TPU slices with limited routing (v5e) do not have.
    - "pallas" is a kernel that copies each run from the operand to its final rows at the receiver, by remote DMA. It
      sends only valid rows, and needs no buffers and no support by XLA. The length of a row is a multiple of 128
      elements.

    Args:
      operand: [N, …].
      output: [M, …], operand's dtype and trailing dims.
      input_offsets, send_sizes, output_offsets, recv_sizes: int32 [devices of `axis_name`]. `recv_sizes[i]` is the
        number of rows that device i sends to this device, as in JAX; the padded form receives it from the senders.
      axis_name: one mesh axis, or several as one.
      rows: length of the longest run in the buffers ("padded"); None: N.
      implementation: None and "padded"; "pallas" (not the default, since it was not timed on a TPU); "xla" for JAX's
        own, which checks nothing; "reference".

    Returns:
      (output, int32 [] rows of this device that were not sent: beyond `rows`, beyond the end of the operand or of the
      receiver's output, or all of a run
      with a negative offset). Nothing is read or written out of bounds. Differentiable in operand and output. With
      "pallas", the gradient of
      an operand of which a row is sent twice is NaN, since it would be a sum (with "xla" it is wrong).

    Raises:
      ValueError: shapes or dtypes that do not fit, or an unknown implementation.
      NotImplementedError: the kernel cannot take these arguments; with every reason.
    """
    op = "ragged_all_to_all"
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"{op}: operand {operand.dtype}{list(operand.shape)} and output "
            f"{output.dtype}{list(output.shape)} must have one dtype and the same trailing dims"
        )
    devices = _size(op, "operand, output, *runs", axis_name)
    for name, x in {"input_offsets": input_offsets, "send_sizes": send_sizes, "output_offsets": output_offsets,
                    "recv_sizes": recv_sizes}.items():  # fmt: skip
        if x.shape != (devices,) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{op}: {name} must be int [{devices}], one a device, got {x.dtype}{list(x.shape)}")
    rows = operand.shape[0] if rows is None else rows
    if rows < 1:
        raise ValueError(f"{op}: rows={rows} must be at least 1")
    if implementation == "xla":
        out = lax.ragged_all_to_all(
            operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name=axis_name
        )
        return out, jnp.zeros((), jnp.int32)
    sent, dropped = clip(input_offsets, send_sizes, output_offsets, rows=rows, sends=len(operand), receives=len(output))
    if implementation == "reference":
        return reference.ragged_all_to_all(operand, output, input_offsets, sent, output_offsets, axis_name), dropped
    if implementation not in (None, "padded", *KERNELS):
        raise ValueError(
            f"{op}: no implementation {implementation!r}; there are None, 'padded', 'pallas', 'pallas_tpu', "
            "'pallas_gpu', 'xla', 'reference'"
        )
    if 0 in operand.shape or 0 in output.shape:
        return output, dropped
    if implementation in KERNELS and devices > 1:
        out = move_rows(op, implementation, operand, output, input_offsets, sent, output_offsets, axis_name)
        return out, dropped
    ahead = jnp.arange(rows, dtype=jnp.int32)[None, :]
    index = jnp.clip(input_offsets[:, None] + ahead, 0, operand.shape[0] - 1).reshape(-1)
    arrived = lax.all_to_all(operand[index], axis_name, 0, 0, tiled=True)
    target = jnp.where(ahead < sent[:, None], output_offsets[:, None] + ahead, -1).astype(jnp.int32)
    target = lax.all_to_all(target, axis_name, 0, 0, tiled=True).reshape(-1)
    return output.at[jnp.where(target < 0, output.shape[0], target)].set(arrived, mode="drop"), dropped


def expert_dispatch(
    x: jax.Array,
    expert: jax.Array | RoutePlan,
    *,
    experts: int | None = None,
    weight: jax.Array | None = None,
    copy: bool = True,
    axis_name: Axes | None = None,
    rows: int | None = None,
    first: jax.Array | int = 0,
    strategy: str = "a2a",
    implementation: str | None = None,
    exchange: str | None = None,
) -> tuple[jax.Array, Dispatch]:
    """Send tokens to the devices of their experts, sorted by expert.

    Device i of `axis_name` has the experts i·E/devices … (i+1)·E/devices - 1. Buffers are bounded. Tokens that do not
    fit are counted, and a further call with `first` increased by `rows` sends them: no load needs more than one buffer
    at a time.

    - "a2a": each device sends at most `rows` rows to each other one (an all-to-all of devices·rows rows in each
      direction; with the exchange "pallas" only the valid ones).
    - "ring": all tokens are sent to all devices, each of which selects at most `rows` (an all-gather, and in the
      reverse direction a reduce-scatter, which XLA runs as rings). It sends fewer bytes if devices ≤ about k.

    Without an axis, or with one device, nothing is sent, and `rows` bounds the one buffer.

    Args:
      x: [T, H], this device's tokens.
      expert: int [T, k]; numbers outside of 0…E-1 are ignored. Or the plan of `route`, which contains the sorted order
        of the choices (with "ring", received choices are still sorted); dropped choices are ignored.
      experts: E, a multiple of the number of devices; None with a plan, which has it.
      weight: float32 [T, k], sent along to scale the rows on the experts' devices (`Dispatch.row_scale`): then the
        backward pass needs no row of the result. None: see `expert_combine`.
      copy: False leaves the rows in order of arrival; the matmul with the experts' first matrices gathers them by
        `Dispatch.lhs_indices`.
      axis_name: mesh axis over which the experts, and the tokens, are sharded; several count as one, the first major.
      rows: see above; None: enough for every load (T·k for a2a, T·k·devices for the others).
      first: int32 [], position of the first choice in this window among the choices for one device (a2a) or for this
        buffer.
      implementation: of the copies of rows on one device, as in `permute`.
      exchange: how rows are sent to other devices with "a2a", in this function and in `expert_combine`. None and
        "padded": XLA's all-to-all of full buffers. "pallas": the kernel of `ragged_all_to_all`, directly from buffer to
        buffer; H must be a multiple of 128, and `rows` should be a multiple of 16. It is not the default, since it was
        not timed on a TPU. "float8", with every strategy: rows, and in the backward pass their cotangents, are sent as
        float8_e4m3fn with a float32 scale for each 128 elements (for each row, if H is less), as by `quantized_all_to_all`;
        with "ring" as by `quantized_all_gather` and `quantized_reduce_scatter`.

    Returns:
      (buffer [R, H], `Dispatch`): R = devices·rows (a2a) or rows. The rows of the buffer are grouped by expert, in the
      order of this device's experts,
      `Dispatch.group_sizes` rows each; unused rows are 0. Without `copy` the received tokens: [T, H] (local),
      [devices·T, H] (ring) or [R, H] (a2a;
      unused rows are undefined). Differentiable in x and weight.

    Raises:
      ValueError: shapes or options that do not fit.
      NotImplementedError: a requested kernel cannot take these arguments; with every reason.
    """
    op = "expert_dispatch"
    plan = None
    if isinstance(expert, RoutePlan):
        plan, expert = expert, expert.expert
        if experts not in (None, plan.counts.shape[0]):
            raise ValueError(f"{op}: experts={experts}, but the plan is of {plan.counts.shape[0]}")
        experts = plan.counts.shape[0]
    elif experts is None:
        raise ValueError(f"{op}: experts=, the number of experts, is required with an array of experts")
    devices = _size(op, "x, expert", axis_name)
    _check_dispatch(x, expert, experts, weight, rows, devices, strategy, exchange)
    tokens, each = x.shape[0], experts // devices

    def arranged(x: jax.Array, slots: jax.Array, sources: jax.Array) -> jax.Array:
        return spread(x, slots, sources, implementation) if copy else x

    if devices == 1:
        choices = Sorted.of(plan or RoutePlan.of(expert, experts))
        d = _pick(choices, expert.shape[1], weight, rows, first, strategy="local", tokens=tokens)
        return arranged(x, d.slots, d.sources), d
    assert axis_name is not None
    if strategy == "ring":
        if exchange == "float8":
            x = coded.gather(_float8(x, axis_name, devices), x)
        else:
            x = lax.all_gather(x, axis_name, tiled=True)
        if plan is not None:
            expert = jnp.where(plan.rows >= 0, expert, -1)
        expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
        own = lax.all_gather(expert, axis_name, tiled=True) - lax.axis_index(axis_name) * each
        weight = None if weight is None else lax.all_gather(weight, axis_name, tiled=True)
        d = _pick(Sorted.of(RoutePlan.of(own, each)), expert.shape[1], weight, rows, first, strategy="ring",
                  axis_name=axis_name, devices=devices, tokens=tokens, exchange=exchange)  # fmt: skip
        return arranged(x, d.slots, d.sources), d
    rows = max(expert.size, 1) if rows is None else rows
    slots, sources, goes, counts = window(Sorted.of(plan or RoutePlan.of(expert, experts)), devices, rows, first)
    slots = slots.reshape(expert.shape)
    sent = spread(x, slots, sources, implementation)
    comes = lax.all_to_all(goes, axis_name, 0, 0, tiled=True)
    arrived = _exchange(op, exchange, sent, goes.sum(1), comes.sum(1), axis_name)
    position, row_sources = merge(comes, rows)
    scale = None
    if weight is not None:
        scale = lax.all_to_all(choices_to_rows(weight, slots, sources), axis_name, 0, 0, tiled=True)
        scale = choices_to_rows(scale[:, None], position[:, None], row_sources)
    return arranged(arrived, position[:, None], row_sources), Dispatch(
        slots=slots,
        sources=sources,
        rows=position[:, None],
        row_sources=row_sources,
        row_scale=scale,
        group_sizes=comes.sum(0, dtype=jnp.int32),
        most=counts.max(),
        dropped=jnp.maximum(counts - first - rows, 0).sum(),
        strategy="a2a",
        axis_name=axis_name,
        devices=devices,
        tokens=tokens,
        exchange=exchange,
    )


def _check_dispatch(
    x: jax.Array, expert: jax.Array, experts: int, weight: jax.Array | None, rows: int | None, devices: int, strategy: str,
    exchange: str | None,
) -> None:  # fmt: skip
    """Check the arguments of `expert_dispatch`. Raises ValueError."""
    op = "expert_dispatch"
    if x.ndim != 2 or expert.ndim != 2 or expert.shape[0] != x.shape[0]:
        raise ValueError(f"{op}: x must be [T, H] and expert [T, k], got {list(x.shape)} and {list(expert.shape)}")
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise ValueError(f"{op}: expert must be integers, got {expert.dtype}")
    if strategy not in STRATEGIES:
        raise ValueError(f"{op}: strategy must be one of {STRATEGIES}, got {strategy!r}")
    if exchange not in EXCHANGES:
        raise ValueError(f"{op}: exchange must be one of {EXCHANGES}, got {exchange!r}")
    if exchange == "float8" and ((x.shape[1] > CODE_BLOCK and x.shape[1] % CODE_BLOCK) or x.dtype.itemsize < 2):
        raise ValueError(
            f"{op}: exchange='float8' scales blocks of {CODE_BLOCK} elements of a row, and x is {x.dtype}{list(x.shape)}; "
            f"H must be a multiple of {CODE_BLOCK}, or less, in float32, bfloat16 or float16"
        )
    if weight is not None and weight.shape != expert.shape:
        raise ValueError(f"{op}: weight must be {list(expert.shape)}, got {list(weight.shape)}")
    if experts < 1 or experts % devices:
        raise ValueError(f"{op}: experts={experts} do not divide over {devices} devices")
    if rows is not None and rows < 1:
        raise ValueError(f"{op}: rows={rows} must be at least 1")


def _exchange(
    op: str, exchange: str | None, x: jax.Array, goes: jax.Array, comes: jax.Array, axis_name: Axes
) -> jax.Array:
    """All-to-all of slots, [devices·rows, H]. `goes` and `comes`: the numbers of valid rows, the first ones of every
    sent and received slot."""
    if exchange == "float8":
        return coded.swap(_float8(x, axis_name, len(goes)), x)
    if exchange not in KERNELS or 0 in x.shape:
        return lax.all_to_all(x, axis_name, 0, 0, tiled=True)
    return exchange_slots(op, exchange, x, goes.astype(jnp.int32), comes.astype(jnp.int32), axis_name)


def _float8(x: jax.Array, axis_name: Axes, devices: int) -> coded.How:
    """How rows x [R, H], and the cotangents that are sent back, become codes."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    codes = jnp.dtype(jnp.float8_e4m3fn)
    return coded.How(axes, devices, codes, min(x.shape[1], CODE_BLOCK), backward_dtype=codes)


def _pick(
    choices: Sorted, k: int, weight: jax.Array | None, rows: int | None, first: jax.Array | int, **how: Any
) -> Dispatch:
    """The `Dispatch` of one buffer for this device's experts: the choices at positions first…first+rows-1; rows None:
    enough for every load."""
    n = choices.position.shape[0]
    rows = max(n, 1) if rows is None else rows
    slots, sources, sizes, counts = window(choices, 1, rows, first)
    slots = slots.reshape(-1, k)
    return Dispatch(
        slots=slots,
        sources=sources,
        rows=None,
        row_sources=None,
        row_scale=None if weight is None else choices_to_rows(weight, slots, sources),
        group_sizes=sizes[0],
        most=counts[0],
        dropped=jnp.maximum(counts[0] - first - rows, 0),
        **{"axis_name": None, "devices": 1, **how},
    )


def expert_combine(
    y: jax.Array, dispatch: Dispatch, *, weight: jax.Array | None = None, implementation: str | None = None
) -> jax.Array:
    """Send the experts' rows back to their tokens and sum: out[t] = Σ_j weight[t, j] · y[row of choice (t, j)].

    A choice outside of the window adds nothing; unused rows are never read.

    Args:
      y: [R, H], in the order of the buffer of `expert_dispatch`.
      dispatch: from it.
      weight: float32 [T, k] of this device's tokens, or None for ones.
      implementation: of the weighted sum, as in `combine`.

    Returns:
      [T, H] in y's dtype, summed in float32 on one device. Differentiable in y and weight.

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: a kernel requested in this function, or in `expert_dispatch`, cannot take these arguments.
    """
    op = "expert_combine"
    d = dispatch
    size = d.sources.shape[0]
    if y.ndim != 2 or y.shape[0] != size:
        raise ValueError(f"{op}: y must be [{size}, H] for this dispatch, got {list(y.shape)}")
    expected = (d.tokens, d.slots.shape[1])
    if weight is not None and weight.shape != expected:
        raise ValueError(f"{op}: weight must be {list(expected)}, got {list(weight.shape)}")
    if d.strategy == "local":
        return sum_back(y, weight, d.slots, d.sources, implementation)
    assert d.axis_name is not None
    if d.strategy == "ring":
        if weight is not None:
            weight = lax.all_gather(weight, d.axis_name, tiled=True)
        total = sum_back(y, weight, d.slots, d.sources, implementation)
        if d.exchange == "float8":
            return coded.scatter(_float8(total, d.axis_name, d.devices), total)
        return lax.psum_scatter(total, d.axis_name, scatter_dimension=0, tiled=True)
    assert d.rows is not None
    assert d.row_sources is not None
    back = sum_back(y, None, d.rows, d.row_sources, implementation)
    comes, goes = ((used >= 0).reshape(d.devices, -1).sum(1) for used in (d.sources, d.rows))
    back = _exchange(op, d.exchange, back, goes, comes, d.axis_name)
    return sum_back(back, weight, d.slots, d.sources, implementation)

"""What is expected to stay exposed of a pair: sent by a collective of its own, on a ring, or by a fused kernel.

With A devices on a ring, t the seconds of a hop (blocks go both ways at once), m those of the products of a block:

- a collective of its own is exposed for as long as it takes; but the gather of what waits for nothing (a weight) is not: the
  TPU compiler sends for it while the products before it run;
- a ring takes ``(A-1)/2`` steps of ``max(t, 2·m)``, the first of ``max(t, m)``, and if A is even a last one of ``max(t/2, m)``;
  what that is longer than the products themselves is exposed. Every block costs a start and the memory traffic of
  :func:`between_hops`; sums that travel are added up before they go on, so that their hop is that much longer, while those of the
  other way can be added during it. Rows that do not fill the matrix unit are paid for;
- a kernel takes ``max(T_matmul, T_comm)`` and one hop more, the first or the last, beside which there is nothing to multiply; and
  what is copied to bring its operands into the form that it takes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from .._compat import scan_counts, user_stacklevel
from ..errors import TorusWarning
from ..program.graph import Op, Value
from .collectives import Collective, duration, local_shape
from .flops import padded_flops
from .fusion import FUSED, VIEWS
from .hardware import Chip, hop_seconds, seconds_of, volume_of
from .pairs import GatherRing, ScatterRing, describe
from .torus import Stage

if TYPE_CHECKING:
    from .plan import Plan, Sent

BLOCK = 2e-6
"""Seconds that starting the products of one more block takes, or a kernel."""
BETWEEN = 0.5
"""Part of HBM's bandwidth at which what stands between hops runs: blocks are small, and rounded on the way."""


def major_of(plan: Plan, axes: Sequence[str]) -> list[Stage]:
    """The stage that the ring runs over: the major one of the torus."""
    return [s for a in axes for s in plan.torus[a] if s.size > 1][:1]


def devices_of(plan: Plan, axes: Sequence[str]) -> int:
    """How many devices the ring has."""
    return math.prod(s.size for s in major_of(plan, axes))


def is_line(stage: Stage) -> bool:
    """Whether blocks that go around come back over the links on which they went: two devices have nothing to come back from."""
    return stage.dim not in ("switch", "slice", "core") and not stage.wraps and stage.size > 2


def exposed_by(
    plan: Plan, chip: Chip, sent: Sent, pair: GatherRing | ScatterRing, dots: Sequence[Op], hops: Sequence[Collective],
    fused: FusedGather | FusedScatter | None,
) -> dict[str, float]:  # fmt: skip
    """Seconds, once, in which nothing is multiplied, by choice; ``pallas`` where there is a kernel.

    Args:
      dots: the products of the pair.
      hops: what a ring would send instead.
      fused: the kernel that takes the pair.
    """
    device = chip.per_device()
    stages = [s for a in pair.axes for s in plan.torus[a]]
    first = sent.collectives[0]
    alone = seconds_of(first.op, volume_of(first, plan.sizes), stages, chip, first.form)
    total = 0.0
    for op in dots:
        rate = device.matmul_rate(str(op.eqn.invars[0].aval.dtype)) * chip.matmul_efficiency
        total += padded_flops(op, plan, chip.lanes) / rate
    memory = device.hbm_bandwidth * chip.hbm_efficiency
    devices, (stage, *_) = devices_of(plan, pair.axes), major_of(plan, pair.axes) or [Stage(1)]
    rest = sum(c.seconds or 0.0 for c in hops if c.form != "ring")
    hop = hop_seconds(max((c.bytes for c in hops if c.form == "ring"), default=0.0), stage, chip)
    last = 0.0 if devices % 2 else hop / (1 if devices == 2 else 2)
    steps = (devices - 1) // 2
    each, ends = (n / (BETWEEN * memory) for n in between_hops(plan, pair, devices))
    block = total / devices + BLOCK * len(dots) + each
    wait = (
        each if isinstance(pair, ScatterRing) else 0.0
    )  # sums go on when what came is in them; what is gathered goes on at once
    took = block + ends
    if steps:
        took = max(hop + wait, block) + (steps - 1) * max(hop + wait, 2 * block) + 2 * block + ends
    if devices % 2 == 0:
        took += max(0.0, last + wait - 2 * block) + block
    if isinstance(pair, GatherRing) and waits_for_nothing(pair.value, _carried(plan)):
        alone = 0.0
    out = {"xla": alone, "ring": rest + max(0.0, took - total)}
    if fused is not None:
        sending = steps * hop + last
        out["pallas"] = rest + max(0.0, sending - total) + min(hop, sending) + BLOCK + fused.copied / memory
    return out


def between_hops(plan: Plan, pair: GatherRing | ScatterRing, devices: int) -> tuple[float, float]:
    """Bytes that a ring reads and writes beside what its products do at once: (for each block, once).

    The TPU compiler (libtpu 0.0.42) does not fuse what stands between hops with the products. As the schedules of Llama-3-8B
    layers have it (``benchmarks/overlap.py``; counted op by op on v5p, where this is three quarters of the time between
    products; on v5e it is what compute as a whole grows by), in blocks of what is sent:

    - a scatter: of every block that comes, the sums that came and this device's products are read, and their sum written: 3;
      where there is a device opposite, its block is cut, rounded and added in halves: 4, once;
    - a gather: the block of the device opposite is cut, joined and copied: 6, once; results are written in place by the
      products. Over contracted blocks, the float32 sum of each product is read and written for each block.
    """
    if devices == 1:
        return 0.0, 0.0
    opposite = devices % 2 == 0 and devices > 2
    size = np.dtype(pair.value.aval.dtype).itemsize
    if isinstance(pair, ScatterRing):
        (op, _), *_ = pair.leaves
        block = size * math.prod(local_shape(op.outs[0].shape, plan.ops[id(op)].outs[0], plan.sizes)) / devices
        return 3.0 * block * (devices - 1) / devices, 4.0 * block * opposite
    each = 0.0
    for op, side in pair.dots:
        (lc, rc), _ = op.eqn.params["dimension_numbers"]
        if pair.dim in (lc, rc)[side]:
            each += 8.0 * math.prod(local_shape(op.outs[0].shape, plan.ops[id(op)].outs[0], plan.sizes))
    block = size * math.prod(local_shape(pair.value.shape, pair.need, plan.sizes)) / devices
    return each, 6.0 * block * opposite


def waits_for_nothing(value: Value, carried: set[int]) -> bool:
    """Whether a value follows from what its body is given for reading (a weight), not from what it carries or makes."""
    todo, seen = [value], set[int]()
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if v.op is not None:
            if v.op.name not in FUSED | VIEWS:
                return False
            todo += [x for x in v.op.ins if x is not None]
        elif id(v) in carried:
            return False
    return True


def _carried(plan: Plan) -> set[int]:
    """Ids of what loops carry, as their bodies see it."""
    found: set[int] = set()
    for op in plan.program.root.walk():
        if op.name == "scan":
            nc, nk = scan_counts(op.eqn.params)
            found.update(map(id, op.frames[0].ins()[nc : nc + nk]))
        elif op.name == "while":
            found.update(id(v) for f in op.frames for v in f.ins())
    return found


def warn_of_lines(plan: Plan) -> None:
    """Warn once of the axes that blocks go around although they are no rings of the torus, and say what that costs."""
    if plan.chip is None:
        return
    lines: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        if c.form in ("ring", "pallas") and any(map(is_line, major_of(plan, c.axes))):
            lines.setdefault(c.axes, []).append(c)
    parts = []
    for axes, hops in lines.items():
        (stage,) = major_of(plan, axes)
        lie = (
            f"{stage.size} devices in a line along {stage.dim}"
            if stage.dim
            else f"{stage.size} devices that jump about"
        )
        lie += f", {stage.stride} places apart" if stage.stride > 1 else ""
        took, round_ = 0.0, 0.0
        for c in hops:
            runs, both = 1 if c.count is None else c.count, min(2, stage.size - 1)
            took += runs * hop_seconds(c.bytes, stage, plan.chip) / both
            round_ += runs * hop_seconds(c.bytes, replace(stage, wraps=True), plan.chip) / both
        parts.append(
            f"{describe(axes)} is no ring of the torus ({lie}): what goes around it in blocks comes back over the same links, "
            f"and takes {duration(took)} a step, around a ring {duration(round_)}"
        )
    if parts:
        where = f" on {plan.topology or plan.chip.name}"
        text = "; ".join(parts) + f"; costed so{where}. A mesh whose axis covers a whole side that wraps has rings"
        warnings.warn(text, TorusWarning, stacklevel=user_stacklevel())

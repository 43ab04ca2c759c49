"""What is expected to stay exposed of a pair: sent by a collective of its own, on a ring, or by a fused kernel.

With A devices on a ring, t the seconds of a hop (blocks go both ways at once), m those of the products of a block:

- a collective of its own is exposed for as long as it takes; but the gather of what waits for nothing (a weight) is not: the
  TPU compiler sends for it while the products before it run; nor is, on chips that can, as much of a gather as other products of
  its body run meanwhile (:mod:`meshpar.passes.ahead`);
- a ring takes the time of all it computes, and waits: ``(A-1)/2`` times for what of t is longer than what runs beside it, 2·m, the
  first time m, and if A is even a last time for t/2; a product of no pair that can run meanwhile hides one of these. On devices
  of two cores the compiler orders one product beside a hop, whatever there is (in every ring of the Llama layers on v5p). What
  that is longer than the products themselves is exposed. Every block costs a start, and :func:`light_work` is computed apart;
  sums that travel are added up before they go on, so that their hop is that much longer, while those of the other way can be
  added during it. Rows that do not fill the matrix unit are paid for; a product takes the longer of its arithmetic and of its
  memory traffic;
- a kernel takes ``max(T_matmul, T_comm)`` and one hop more, the first or the last, beside which there is nothing to multiply; and
  what is copied to bring its operands into the form that it takes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from ..compat.jax import scan_counts, user_stacklevel
from ..errors import TorusWarning
from ..hardware.chips import Chip
from ..hardware.collective_time import hop_seconds, seconds_of
from ..hardware.topology import Stage
from ..layout import Spec
from ..passes.pairs import GatherRing, ScatterRing, describe
from ..plan.collectives import Collective, duration, local_bytes, local_shape, volume_of
from ..program.ir import Op, Value
from .flops import padded_flops
from .fusion import FUSED, VIEWS, itemsize

if TYPE_CHECKING:
    from ..plan.plan import Plan, Sent

BLOCK = 2e-6
"""Seconds that starting the products of one more block takes, or a kernel."""
LANES = 64
"""Elements that the vector units of a core compute in a cycle in an op that is not fused with a product: additions of two blocks of
bfloat16, cuts, conversions alike come out at 57 to 70 in the compiler's own estimates for v5e and for v5p."""
BETWEEN = 0.5
"""Part of HBM's bandwidth at which such ops run where the chip's clock is not known."""


def major_of(plan: Plan, axes: Sequence[str]) -> list[Stage]:
    """The stage that the ring runs over: the major one of the torus."""
    return [s for a in axes for s in plan.torus[a] if s.size > 1][:1]


def devices_of(plan: Plan, axes: Sequence[str]) -> int:
    """How many devices the ring has."""
    return math.prod(s.size for s in major_of(plan, axes))


def is_line(stage: Stage) -> bool:
    """Whether blocks that go around come back over the links on which they went: two devices have nothing to come back from."""
    return stage.line


def exposed_by(
    plan: Plan, chip: Chip, sent: Sent, pair: GatherRing | ScatterRing, hops: Sequence[Collective],
    fused: FusedGather | FusedScatter | None, chained: bool, others: Sequence[float] = (),
) -> dict[str, float]:  # fmt: skip
    """Seconds, once, in which nothing is multiplied, by choice; ``pallas`` where there is a kernel.

    Args:
      hops: what a ring would send instead.
      fused: the kernel that takes the pair.
      chained: it waits for something, or something for it: it is no gather of a weight.
      others: seconds of the products of no pair that can run while a gather is sent.
    """
    dots = [op for op, _ in (pair.dots if isinstance(pair, GatherRing) else pair.leaves)]
    device = chip.per_device()
    stages = [s for a in pair.axes for s in plan.torus[a]]
    first = sent.collectives[0]
    alone = seconds_of(first.op, volume_of(first, plan.sizes), stages, chip, first.algorithm)
    memory = device.hbm_bandwidth * chip.hbm_efficiency
    products = [product_seconds(plan, chip, op) for op in dots]
    total = sum(products)
    devices, (stage, *_) = devices_of(plan, pair.axes), major_of(plan, pair.axes) or [Stage(1)]
    rest = sum(c.seconds or 0.0 for c in hops if c.algorithm != "ring")
    hop = hop_seconds(max((c.bytes for c in hops if c.algorithm == "ring"), default=0.0), stage, chip)
    last = 0.0 if devices % 2 else hop / (1 if devices == 2 else 2)
    steps = (devices - 1) // 2
    each, once = light_work(plan, chip, pair, devices)
    block = total / devices + BLOCK * len(dots) + each
    waits: list[float] = []
    if chip.cores > 1:
        one = total / devices / max(1, len(dots))
        waits += [max(0.0, hop - one)] * steps + [max(0.0, last - one)]
    else:
        # sums go on when what came is in them; what is gathered goes on at once
        added = each if isinstance(pair, ScatterRing) else 0.0
        waits += [max(0.0, hop + added - block)] * (steps > 0) + [max(0.0, hop + added - 2 * block)] * (steps - 1)
        waits += [max(0.0, last + added - (2 if steps else 1) * block)] * (last > 0)
    waits = [max(0.0, w - other) for w, other in zip_longest(waits, others[: len(waits)], fillvalue=0.0)]
    if isinstance(pair, GatherRing):
        beside = sum(others) if "all-gather" not in chip.waits else 0.0
        alone = max(0.0, alone - beside) if chained else 0.0
    if isinstance(pair, ScatterRing):  # whole sums of several products go through memory, blocks of them do not
        summed = pair.leaves[0][0]
        more = itemsize(pair.value.aval) * _local(plan, summed.outs[0], plan.ops[id(summed)].outs[0])
        total += (len(dots) - 1) * more / memory
    out = {"xla": alone, "ring": rest + max(0.0, block * devices + once - total) + sum(waits)}
    if fused is not None:
        sending = steps * hop + last
        out["pallas"] = rest + max(0.0, sending - total) + min(hop, sending) + BLOCK + fused.copied / memory
    return out


def product_seconds(plan: Plan, chip: Chip, op: Op) -> float:
    """A product on one device: the longer of its arithmetic, rounded up to the matrix unit, and of its traffic with HBM."""
    device = chip.per_device()
    rate = device.matmul_rate(str(op.eqn.invars[0].aval.dtype)) * chip.matmul_efficiency
    planned = plan.ops[id(op)]
    traffic = sum(
        local_bytes(v.aval.shape, itemsize(v.aval), spec or ((),) * len(v.aval.shape), plan.sizes)
        for v, spec in zip((*op.eqn.invars, *op.eqn.outvars), (*planned.ins, *planned.outs), strict=True)
    )
    return max(padded_flops(op, plan, chip.lanes) / rate, traffic / (device.hbm_bandwidth * chip.hbm_efficiency))


def light_seconds(chip: Chip, elements: float, size: float) -> float:
    """Seconds of elementwise work apart from products.

    Args:
      elements: that come out.
      size: bytes of each, read and written together.
    """
    memory = elements * size / (chip.per_device().hbm_bandwidth * chip.hbm_efficiency)
    return max(memory, elements / (LANES * chip.cores * chip.clock)) if chip.clock else memory / BETWEEN


def light_work(plan: Plan, chip: Chip, pair: GatherRing | ScatterRing, devices: int) -> tuple[float, float]:
    """Seconds of what a ring computes beside its products: (for each block, once).

    The TPU compiler (libtpu 0.0.42) does not fuse what stands between hops with the products. As the schedules of Llama-3-8B
    layers have it (``benchmarks/overlap.py``), in blocks of what is sent:

    - a scatter: of every block that comes but the first, the sum of what came and of this device's products; where there is a
      device opposite, once, its block is added in halves and each half is joined to the rest: 3;
    - a gather: the block of the device opposite is cut and joined: 2, once. Results are written in place by the products; over
      contracted blocks, the float32 sum of each product is read and written for each block;

    What a whole product computes as it reads it (a converted weight, an activation) is there before products in blocks; but these
    are then so much shorter.
    """
    if devices == 1:
        return 0.0, 0.0
    opposite = devices % 2 == 0 and devices > 2
    size = itemsize(pair.value.aval)
    if isinstance(pair, ScatterRing):
        (op, _), *_ = pair.leaves
        block = _local(plan, op.outs[0], plan.ops[id(op)].outs[0]) / devices
        sums = devices - 1 - opposite
        return sums / devices * light_seconds(chip, block, 3 * size), 3 * opposite * light_seconds(
            chip, block, 3 * size
        )
    each = 0.0
    for op, side in pair.dots:
        (lc, rc), _ = op.eqn.params["dimension_numbers"]
        if pair.dim in (lc, rc)[side]:
            each += light_seconds(chip, _local(plan, op.outs[0], plan.ops[id(op)].outs[0]), 8.0)
    block = _local(plan, pair.value, pair.need) / devices
    return each, 2 * opposite * light_seconds(chip, block, 2 * size)


def _local(plan: Plan, value: Value, spec: Spec) -> int:
    return math.prod(local_shape(value.shape, spec, plan.sizes))


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


def carried(plan: Plan) -> set[int]:
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
        if c.algorithm in ("ring", "pallas") and any(map(is_line, major_of(plan, c.axes))):
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

"""What is expected to stay exposed of a pair: sent by a collective of its own, on a ring, or by a fused kernel.

With A devices on a ring, t the seconds of a hop (blocks go both ways at once), m those of the products of a block:

- a collective of its own is exposed for as long as it takes; but on chips whose programs go on beside gathers the gather of what
  waits for nothing (a weight) is not: the TPU compiler sends for it while the products before it run; nor is as much of a gather
  as other products of its body run meanwhile (:class:`meshpar.passes.overlap.Free`); of a sum that
  nothing waits for see :func:`reduction_costs`;
- a ring takes the time of all it computes, and waits: ``(A-1)/2`` times for what of t is longer than what runs beside it, 2·m, the
  first time m, and if A is even a last time for t/2; a product of no pair that can run meanwhile hides one of these. On devices
  of two cores whose programs wait for gathers, as by default, the compiler orders one product beside a hop, whatever there is (in
  every ring of the Llama layers on v5p); with the options that plans come with it does as elsewhere. What that is longer than the
  products themselves is exposed. Every block costs a start, and :func:`ring_overhead_seconds` is computed apart; sums that travel
  are added
  up before they go on, so that their hop is that much longer, while those of the other way can be added during it. Rows that do
  not fill the matrix unit are paid for; a product takes the longer of its arithmetic and of its memory traffic, and each of its
  blocks reads all of the operand that is not cut; around a line hops may be synchronous (``Chip.lines_wait``);
- a kernel takes ``max(T_matmul, T_comm)`` and one hop more, the first or the last, beside which there is nothing to multiply; and
  what is copied to bring its operands into the form that it takes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from ..compat.jax import user_stacklevel
from ..errors import TorusWarning
from ..hardware.algorithms import AlgorithmName, wire_bytes
from ..hardware.chips import Chip
from ..hardware.collective_time import hop_seconds, seconds_of
from ..hardware.topology import Stage, devices_of, joined, major_of
from ..plan.collectives import Collective, duration, volume_of
from ..plan.plan import Plan
from ..plan.spec import itemsize, local_bytes, local_shape, names_of, parts_of, unsplit
from ..plan.steps import Reduce, Reshard, Run, Shard
from ..program.ir import Value
from .flops import flops_on, reread_bytes_on

BLOCK_START_SECONDS = 2e-6
"""Seconds that starting the products of one more block takes, or a kernel."""
GATHER_COPY_CYCLES, SCATTER_COPY_CYCLES = 1 / 36 + 2 / 172, 1 / 36 + 1 / 92 + 2 / 64
"""Cycles of a core for each element of the block of the device opposite, which comes in halves: the halves are cut out one by one
(36 elements a cycle) and written into their place (172); of a sum cut out once more, both at once (92), and padded to be joined
(64). So the TPU compiler (libtpu 0.0.42) has it on v5e and v5p, whatever their HBM."""
ELEMENTWISE_HBM_EFFICIENCY = 0.5
"""Part of HBM's bandwidth at which such ops run where the chip's clock is not known."""


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveMatmul:
    """Products beside a collective: they multiply what it gathers, or it reduce-scatters what they add up to.

    Attributes:
      step: the resharding that gathers, or the reduction.
      dim, axes: the dim that is gathered or scattered, over these axes.
      dots: the products, each with which operand is gathered, or the dim of its result that is scattered.
      keep: others read the gathered value too.
    """

    step: Reshard | Reduce
    dim: int
    axes: tuple[str, ...]
    dots: tuple[tuple[Run, int], ...]
    keep: bool = False

    @property
    def gather(self) -> bool:
        return isinstance(self.step, Reshard)

    @property
    def value(self) -> Value:
        return self.step.result.value


def exposed_seconds(
    plan: Plan, chip: Chip, pair: CollectiveMatmul, hops: Sequence[Collective],
    fused: FusedGather | FusedScatter | None, chained: bool,
    others: Sequence[float] = (), whole: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Seconds, once, in which nothing is multiplied, by choice; ``pallas`` where there is a kernel.

    Args:
      hops: what a ring would send instead.
      fused: the kernel that takes the pair.
      chained: it waits for something, or something for it: it is no gather of a weight, and no scatter that products follow.
      others: seconds of the products of no pair that can run while a gather is sent.
      whole: a scatter of its own may be sent as a whole sum.
    """
    runs = [run for run, _ in pair.dots]
    device = chip.per_device()
    stages = [s for a in pair.axes for s in plan.torus[a]]
    first = pair.step.collectives[0]
    alone = seconds_of(
        first.op, volume_of(first.op, first.bytes, parts_of(first.axes, plan.sizes)), stages, chip, first.algorithm
    )
    memory = device.hbm_bandwidth * chip.hbm_efficiency
    products = [matmul_seconds(plan, chip, run) for run in runs]
    total = sum(products)
    devices, (stage, *_) = devices_of(plan.torus, pair.axes), major_of(plan.torus, pair.axes) or [Stage(1)]
    rest = sum(c.seconds or 0.0 for c in hops if c.algorithm != "ring")
    hop = hop_seconds(max((c.bytes for c in hops if c.algorithm == "ring"), default=0.0), stage, chip)
    last = 0.0 if devices % 2 else hop / (1 if devices == 2 else 2)
    steps = (devices - 1) // 2
    each, once = ring_overhead_seconds(plan, chip, pair, devices)
    blocks = sum(matmul_seconds(plan, chip, run, pair, devices) for run in runs)
    block = blocks + BLOCK_START_SECONDS * len(runs) + each
    waits: list[float] = []
    if stage.line and chip.lines_wait:
        waits.append(
            sum((c.seconds or 0.0) * (c.count or 1) for c in hops if c.algorithm == "ring") / (first.count or 1)
        )
        others = ()
    elif chip.cores > 1 and not plan.goes_on("all-gather"):
        one = blocks / max(1, len(runs))
        waits += [max(0.0, hop - one)] * steps + [max(0.0, last - one)]
    else:
        # sums go on when what came is in them; what is gathered goes on at once
        added = each if not pair.gather else 0.0
        waits += [max(0.0, hop + added - block)] * (steps > 0) + [max(0.0, hop + added - 2 * block)] * (steps - 1)
        waits += [max(0.0, last + added - (2 if steps else 1) * block)] * (last > 0)
    waits = [max(0.0, w - other) for w, other in zip_longest(waits, others[: len(waits)], fillvalue=0.0)]
    if pair.gather and plan.goes_on("all-gather"):
        alone = max(0.0, alone - sum(others)) if chained else 0.0
    elif not pair.gather:
        forms = reduction_costs(plan, first, 0.0 if chained else total, whole=whole)
        alone = min(form.exposed for form in forms.values())
    if not pair.gather:  # whole sums of several products go through memory, blocks of them do not
        more = itemsize(pair.value.aval) * _elements(plan, runs[0].results[0])
        total += (len(runs) - 1) * more / memory
    out = {"xla": alone, "ring": rest + max(0.0, block * devices + once - total) + sum(waits)}
    if fused is not None:
        sending = steps * hop + last
        out["pallas"] = (
            rest + max(0.0, sending - total) + min(hop, sending) + BLOCK_START_SECONDS + fused.copied / memory
        )
    return out


@dataclass(frozen=True, slots=True)
class ReductionCost:
    """A form of a sum that ends split, once: bytes that a device sends, seconds on its links, and how many of these are exposed."""

    bytes: float
    seconds: float
    exposed: float


def reduction_costs(
    plan: Plan, c: Collective, products: float, *, whole: bool = True
) -> dict[AlgorithmName, ReductionCost]:
    """The forms of a reduce-scatter: as it is, and ``whole`` if it is staged over torus dimensions of a slice.

    Where programs need not wait for them, the TPU compiler (libtpu 0.0.42) runs the next product beside all of a whole sum, and
    beside the first stage of a staged one (:func:`later_stage_seconds`).

    Args:
      products: seconds of what is multiplied meanwhile; 0: nothing is.
      whole: with the whole sum.
    """
    assert plan.chip is not None
    late, seconds = later_stage_seconds(plan, c), c.seconds or 0.0
    hidden = products if plan.goes_on(c.op) else 0.0
    found: dict[AlgorithmName, ReductionCost] = {
        c.algorithm: ReductionCost(c.bytes, seconds, late + max(0.0, seconds - late - hidden))
    }
    if whole and c.algorithm == "staged" and (one := all_reduce_cost(plan, c, products)) is not None:
        found["whole"] = one
    return found


def all_reduce_cost(plan: Plan, c: Collective, products: float) -> ReductionCost | None:
    """A reduce-scatter as an all-reduce over the torus of one slice; None: it is none, or it crosses slices."""
    stages = [s for a in c.axes for s in plan.torus[a]]
    if c.op != "reduce-scatter" or plan.chip is None or any(s.dim == "slice" for s in stages):
        return None
    devices = math.prod(s.size for s in stages)
    volume = volume_of(c.op, c.bytes, devices)
    seconds = seconds_of("all-reduce", volume, stages, plan.chip, "whole")
    hidden = products if plan.goes_on("all-reduce") else 0.0
    return ReductionCost(wire_bytes("all-reduce", volume, devices), seconds, max(0.0, seconds - hidden))


def later_stage_seconds(plan: Plan, c: Collective) -> float:
    """Seconds, once, of a staged reduce-scatter after its first stage.

    Where programs need not wait for reduce-scatters, the TPU compiler (libtpu 0.0.42) runs the next product beside the first stage
    of a gradient's, and waits for the later ones (backward layers of Llama on v5p, sums on the SparseCores).
    """
    stages = [s for s, _ in joined(s for a in c.axes for s in plan.torus[a])]
    if c.op != "reduce-scatter" or c.algorithm != "staged" or len(stages) < 2 or plan.chip is None:
        return 0.0
    volume = volume_of(c.op, c.bytes, math.prod(s.size for s in stages))
    return seconds_of(c.op, volume / stages[0].size, stages[1:], plan.chip, c.algorithm)


def matmul_seconds(plan: Plan, chip: Chip, run: Run, pair: CollectiveMatmul | None = None, blocks: int = 1) -> float:
    """A product on one device: its arithmetic, rounded up to the matrix unit, beside its traffic with HBM and its results' way
    through the vector units.

    Args:
      pair, blocks: of one of so many blocks in which it is made: what is not cut along the pair's dim is read anew for each.
    """
    device, op = chip.per_device(), run.op
    rate = device.matmul_rate(str(op.eqn.invars[0].aval.dtype)) * chip.matmul_efficiency
    shards = zip((*op.eqn.invars, *op.eqn.outvars), (*run.operands, *run.results), strict=True)
    sizes = [
        local_bytes(v.aval.shape, itemsize(v.aval), unsplit(v.aval.ndim) if s is None else s.spec, plan.sizes)
        for v, s in shards
    ]
    cut = [True] * len(sizes) if pair is None else _cut(pair, run)
    traffic = sum(size / blocks if mine else size for size, mine in zip(sizes, cut, strict=True))
    traffic += reread_bytes_on(plan, chip)(run, 0, cut[:3], blocks)
    return kernel_seconds(
        chip,
        flops_on(plan, chip.lanes)(run) / rate / blocks,
        traffic / (device.hbm_bandwidth * chip.hbm_efficiency),
        _elements(plan, run.results[0]) / (blocks if cut[-1] else 1),
    )


def kernel_seconds(chip: Chip, products: float, traffic: float, elements: float, convolves: bool = False) -> float:
    """Seconds of a kernel: on GPUs the longer of its products and its traffic.

    On TPUs the vector units work on its elements and then on the next operand, so that they and its traffic add up
    (:func:`vector_seconds`); products go on beside both. The TPU compiler's own estimates (libtpu 0.0.42, Llama on v5e and v5p)
    are near the longer of the two where one is much longer, and some 1.4 times that where they are alike: blocks of a weight's
    gradient of 229,000 cycles of products and 245,000 of traffic take 343,000. Convolutions wait for their traffic: of ResNet-50 on
    v5e a weight's gradient of 33 µs of products and 143 of traffic takes 174, one of 83 and 71 takes 161.

    Args:
      products: seconds on the matrix units.
      traffic: seconds of reading and writing HBM.
      elements: that go through the vector units.
      convolves: the products are convolutions.
    """
    if chip.switch:
        return max(products, traffic)
    if convolves:
        return math.hypot(products, vector_seconds(chip, elements)) + traffic
    return math.hypot(products, traffic + vector_seconds(chip, elements))


def _cut(pair: CollectiveMatmul, run: Run) -> list[bool]:
    """Which of a product's operands and results a block has a part of."""
    side = next(side for other, side in pair.dots if other is run)
    (lc, rc), (lb, rb) = run.op.eqn.params["dimension_numbers"]
    if pair.gather:
        contracted, batch = pair.dim in (lc, rc)[side], pair.dim in (lb, rb)[side]
        mine = [contracted or batch] * 2
        mine[side] = True
        return [*mine, not contracted]
    if side < len(lb):
        return [True, True, True]
    left = side - len(lb) < len(run.op.eqn.invars[0].aval.shape) - len(lc) - len(lb)
    return [left, not left, True]


def elementwise_seconds(chip: Chip, elements: float, size: float) -> float:
    """Seconds of elementwise work apart from products.

    Args:
      elements: that come out.
      size: bytes of each, read and written together.
    """
    memory = elements * size / (chip.per_device().hbm_bandwidth * chip.hbm_efficiency)
    return memory + vector_seconds(chip, elements) if chip.clock else memory / ELEMENTWISE_HBM_EFFICIENCY


def vector_seconds(chip: Chip, elements: float) -> float:
    """Seconds that so many elements take through the vector units of a device, if its clock is known, else 0.

    So the TPU compiler (libtpu 0.0.42) has it of residual sums, norms, activations, conversions and the optimizer's sums alike,
    beside some 1 to 1.2 times their traffic with HBM: on v5e 1024 elements take 10 cycles, and 4.3 for each 2 kB that they read
    or write, be it one array or fourteen; and so on the other chips.
    """
    return elements / (chip.vector * chip.cores * chip.clock) if chip.clock else 0.0


def ring_overhead_seconds(plan: Plan, chip: Chip, pair: CollectiveMatmul, devices: int) -> tuple[float, float]:
    """Seconds of what a ring computes beside its products: (for each block, once).

    The TPU compiler (libtpu 0.0.42) does not fuse what stands between hops with the products. As the schedules of Llama-3-8B
    layers have it (``benchmarks/overlap.py``), in blocks of what is sent:

    - a scatter: of every block that comes but the first, the sum of what came and of this device's products; where there is a
      device opposite, its block is added in halves, which are cut out of it and joined to the rest, once;
    - a gather: the block of the device opposite is cut and joined, once. Results are written in place by the products; over
      contracted blocks, the float32 sum of each product is read and written for each block;

    What a whole product computes as it reads it (a converted weight, an activation) is there before products in blocks; but these
    are then so much shorter.
    """
    if devices == 1:
        return 0.0, 0.0
    opposite = devices % 2 == 0 and devices > 2
    size = itemsize(pair.value.aval)
    if not pair.gather:
        block = _elements(plan, pair.dots[0][0].results[0]) / devices
        added = elementwise_seconds(chip, block, 3 * size)
        return (devices - 1 - opposite) / devices * added, opposite * (
            added + _halves(chip, block, size, SCATTER_COPY_CYCLES)
        )
    each = 0.0
    for run, side in pair.dots:
        (lc, rc), _ = run.op.eqn.params["dimension_numbers"]
        if pair.dim in (lc, rc)[side]:
            each += elementwise_seconds(chip, _elements(plan, run.results[0]), 8.0)
    block = _elements(plan, pair.step.result) / devices
    return each, opposite * _halves(chip, block, size, GATHER_COPY_CYCLES)


def _halves(chip: Chip, block: float, size: float, cycles: float) -> float:
    """Seconds in which halves of a block of so many elements are cut out and joined."""
    return cycles * block / (chip.cores * chip.clock) if chip.clock else 2 * elementwise_seconds(chip, block, 2 * size)


def _elements(plan: Plan, shard: Shard) -> int:
    return math.prod(local_shape(shard.value.shape, shard.spec, plan.sizes))


def warn_about_lines(plan: Plan) -> None:
    """Warn once of the axes that blocks go around although they are no rings of the torus, and say what that costs."""
    if plan.chip is None:
        return
    lines: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        if c.algorithm in ("ring", "pallas") and any(s.line for s in major_of(plan.torus, c.axes)):
            lines.setdefault(c.axes, []).append(c)
    parts = []
    for axes, hops in lines.items():
        (stage,) = major_of(plan.torus, axes)
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
            f"{names_of(axes)} is no ring of the torus ({lie}): what goes around it in blocks comes back over the same links, "
            f"and takes {duration(took)} a step, around a ring {duration(round_)}"
        )
    if parts:
        where = f" on {plan.topology or plan.chip.name}"
        text = "; ".join(parts) + f"; costed so{where}. A mesh whose axis covers a whole side that wraps has rings"
        warnings.warn(text, TorusWarning, stacklevel=user_stacklevel())

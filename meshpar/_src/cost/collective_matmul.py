"""Exposed seconds of a collective next to matmuls: as a collective of its own, as a ring, or in a fused kernel.

A collective matmul is an all-gather whose result matmuls read, or a reduce-scatter of what matmuls compute. With A devices on a
ring, t the seconds of a ring step (chunks are sent both ways at once) and m the seconds of the matmuls of a chunk:

- A separate collective is exposed for its full duration. Where the kind is asynchronous (``Plan.is_async``), the all-gather of a
  weight is prefetched, and not exposed. For reductions see :func:`reduction_costs`.
- A ring takes the seconds of all that it computes, plus stalls. Each of the (A-1)/2 ring steps stalls for max(0, t - 2m), the first
  one for max(0, t - m); an even A adds a step of t/2. On chips of
  two cores whose programs block on all-gathers (the default), the compiler overlaps one matmul with a ring step, whatever their
  number (in every ring of Llama layers on v5p). The seconds beyond the time of the matmuls alone are exposed.
  Each chunk costs a start, and :func:`ring_overhead_seconds` is added. The received chunk of a reduction is added before it is sent
  on, which lengthens the ring step; the addition for the other direction overlaps. Rows that do not fill the matrix unit are
  rounded up. A matmul of a chunk rereads the operand that is not chunked. Around a line, ring steps may be synchronous
  (``CompilerModel.line_permutes_are_sync``).
- A fused kernel takes max(matmuls, communication) plus one ring step, the first or the last, which no matmul overlaps, plus the
  copies that bring its operands into its layout.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshpar_kernels.collective_matmul import FusedGather, FusedScatter

from ...errors import TorusWarning
from ..compat.jax import user_stacklevel
from ..hardware.chips import Chip
from ..hardware.collective_algorithms import AlgorithmName
from ..hardware.collective_ops import collective_volume, wire_bytes
from ..hardware.collective_time import hop_seconds, seconds_of
from ..hardware.topology import Stage, devices_of, joined, major_of
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.shard_shapes import format_axes, itemsize, local_shape
from ..plan.steps import Reduce, Reshard, Run, Shard
from ..program.ir import Value
from ..units import format_seconds
from .flops import padded_flops, reread_bytes


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveMatmul:
    """An all-gather with the matmuls that read its result, or a reduce-scatter with the matmuls whose sum it reduces.

    Attributes:
      step: the all-gather, or the reduction.
      dim, axes: the dim that is gathered or scattered, and the mesh axes.
      dots: (matmul, index of its gathered operand), or (matmul, dim of its result that is scattered).
      keep: other steps read the gathered value too.
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
    fused: FusedGather | FusedScatter | None, on_critical_path: bool,
    allow_all_reduce: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Exposed seconds of one run, by implementation: ``xla`` (a separate collective), ``ring``, and ``pallas`` if ``fused``.

    Args:
      hops: the collectives of the ring.
      fused: the fused kernel for these matmuls, or None.
      on_critical_path: kernels depend on the collective and it on them. False for an all-gather of a weight, and for a
        reduce-scatter on which no matmul depends.
      allow_all_reduce: a separate reduce-scatter may be an all-reduce followed by a local slice.
    """
    runs = [run for run, _ in pair.dots]
    device = chip.per_device()
    first = pair.step.collectives[0]
    separate = first.seconds or 0.0
    memory = device.hbm_bandwidth * chip.compiler.hbm_efficiency
    total = sum(matmul_seconds(plan, chip, run) for run in runs)
    devices, (stage, *_) = devices_of(plan.torus, pair.axes), major_of(plan.torus, pair.axes) or [Stage(1)]
    minor = sum(c.seconds or 0.0 for c in hops if not c.entry.ring_step)
    hop = hop_seconds(max((c.bytes for c in hops if c.entry.ring_step), default=0.0), stage, chip)
    last = 0.0 if devices % 2 else hop / (1 if devices == 2 else 2)
    steps = (devices - 1) // 2
    per_chunk, once = ring_overhead_seconds(plan, chip, pair, devices)
    matmuls = sum(matmul_seconds(plan, chip, run, pair, devices) for run in runs)
    start = chip.compiler.ring_chunk_start_seconds
    chunk = matmuls + start * len(runs) + per_chunk
    stalls: list[float] = []
    if stage.line and chip.compiler.line_permutes_are_sync:
        stalls.append(sum(c.total_seconds for c in hops if c.entry.ring_step) / (first.count or 1))
    elif chip.cores > 1 and not plan.is_async("all-gather"):
        one = matmuls / max(1, len(runs))
        stalls += [max(0.0, hop - one)] * steps + [max(0.0, last - one)]
    else:
        # a chunk of a reduction is sent on after the addition, a gathered one immediately
        added = per_chunk if not pair.gather else 0.0
        stalls += [max(0.0, hop + added - chunk)] * (steps > 0) + [max(0.0, hop + added - 2 * chunk)] * (steps - 1)
        stalls += [max(0.0, last + added - (2 if steps else 1) * chunk)] * (last > 0)
    if pair.gather and plan.is_async("all-gather"):
        separate = separate if on_critical_path else 0.0
    elif not pair.gather:
        hidden_by = 0.0 if on_critical_path else total
        costs = reduction_costs(plan, first, hidden_by, allow_all_reduce=allow_all_reduce)
        separate = min(cost.exposed for cost in costs.values())
    if not pair.gather:  # a full-size sum of several matmuls is written and read again, a chunk of it is not
        more = itemsize(pair.value.aval) * _elements(plan, runs[0].results[0])
        total += (len(runs) - 1) * more / memory
    out = {"xla": separate, "ring": minor + max(0.0, chunk * devices + once - total) + sum(stalls)}
    if fused is not None:
        sending = steps * hop + last
        out["pallas"] = minor + max(0.0, sending - total) + min(hop, sending) + start + fused.copied / memory
    return out


@dataclass(frozen=True, slots=True)
class ReductionCost:
    """The cost of one run of a reduction whose result is sharded, on one device.

    Attributes:
      bytes: sent.
      seconds: on the links.
      exposed: of these seconds, those that no matmul hides.
    """

    bytes: float
    seconds: float
    exposed: float


def reduction_costs(
    plan: Plan, c: Collective, matmuls: float, *, allow_all_reduce: bool = True
) -> dict[AlgorithmName, ReductionCost]:
    """Algorithm → cost of a reduce-scatter: its own, and ``all_reduce`` (an all-reduce, then a local slice) if that is staged.

    Where reductions are asynchronous, the TPU compiler (libtpu 0.0.42) overlaps the next matmul with all of an all-reduce, but only
    with the first stage of a staged reduce-scatter (:func:`later_stage_seconds`).

    Args:
      matmuls: seconds of the matmuls that run meanwhile.
      allow_all_reduce: include ``all_reduce``.
    """
    assert plan.chip is not None
    late, seconds = later_stage_seconds(plan, c), c.seconds or 0.0
    hidden = matmuls if plan.is_async(c.op) else 0.0
    costs: dict[AlgorithmName, ReductionCost] = {
        c.algorithm: ReductionCost(c.bytes, seconds, late + max(0.0, seconds - late - hidden))
    }
    if allow_all_reduce and c.entry.stage_by_stage and (one := all_reduce_cost(plan, c, matmuls)) is not None:
        costs["all_reduce"] = one
    return costs


def all_reduce_cost(plan: Plan, c: Collective, matmuls: float) -> ReductionCost | None:
    """The cost of an all-reduce in place of a reduce-scatter ``c``.

    None if ``c`` is not a reduce-scatter, the chip is not known, or devices of several slices take part.

    Args:
      matmuls: seconds of the matmuls that run meanwhile, if all-reduces are asynchronous.
    """
    stages = [s for a in c.axes for s in plan.torus[a]]
    if c.op != "reduce-scatter" or plan.chip is None or any(s.between for s in stages):
        return None
    devices = math.prod(s.size for s in stages)
    volume = collective_volume(c.op, c.bytes, devices)
    seconds = seconds_of("all-reduce", volume, stages, plan.chip, "all_reduce")
    hidden = matmuls if plan.is_async("all-reduce") else 0.0
    return ReductionCost(wire_bytes("all-reduce", volume, devices), seconds, max(0.0, seconds - hidden))


def merged_seconds(plan: Plan, c: Collective) -> float:
    """Seconds that a collective adds to an all-reduce that the TPU compiler merges it into: its bytes, without a latency."""
    assert plan.chip is not None
    stages = [s for a in c.axes for s in plan.torus[a]]
    volume = collective_volume(c.op, c.bytes, math.prod(s.size for s in stages))
    return seconds_of("all-reduce", volume, stages, replace(plan.chip, latency=0.0))


def later_stage_seconds(plan: Plan, c: Collective) -> float:
    """Seconds of one run of a staged reduce-scatter after its first stage; 0 for other collectives.

    Where reduce-scatters are asynchronous, the TPU compiler (libtpu 0.0.42) overlaps the next matmul with the first stage of a
    gradient's reduction, and blocks on the later ones (backward layers of Llama on v5p, reductions on the SparseCores).
    """
    stages = [s for s, _ in joined(s for a in c.axes for s in plan.torus[a])]
    if c.op != "reduce-scatter" or not c.entry.stage_by_stage or len(stages) < 2 or plan.chip is None:
        return 0.0
    volume = collective_volume(c.op, c.bytes, math.prod(s.size for s in stages))
    return seconds_of(c.op, volume / stages[0].size, stages[1:], plan.chip, c.algorithm)


def matmul_seconds(plan: Plan, chip: Chip, run: Run, pair: CollectiveMatmul | None = None, blocks: int = 1) -> float:
    """Seconds of a matmul on one device: arithmetic rounded up to the matrix unit, HBM traffic, vector units for its result.

    Args:
      pair, blocks: the seconds of one chunk of ``blocks`` instead; operands that are not chunked along the dim of ``pair`` are
        read in full for each chunk.
    """
    device, op = chip.per_device(), run.op
    rate = device.matmul_rate(str(op.eqn.invars[0].aval.dtype)) * chip.compiler.matmul_efficiency
    shards = zip((*op.eqn.invars, *op.eqn.outvars), (*run.operands, *run.results), strict=True)
    sizes = [v.aval.size * itemsize(v.aval) if s is None else plan.shard_bytes(s) for v, s in shards]
    cut = [True] * len(sizes) if pair is None else _cut(pair, run)
    traffic = sum(size / blocks if is_cut else size for size, is_cut in zip(sizes, cut, strict=True))
    traffic += reread_bytes(plan, chip, run, 0, cut[:3], blocks)
    return kernel_seconds(
        chip,
        padded_flops(run, plan.sizes, chip.lanes) / rate / blocks,
        traffic / (device.hbm_bandwidth * chip.compiler.hbm_efficiency),
        _elements(plan, run.results[0]) / (blocks if cut[-1] else 1),
    )


def kernel_seconds(chip: Chip, matmuls: float, traffic: float, elements: float, convolves: bool = False) -> float:
    """Seconds of a kernel: on GPUs max(matmuls, traffic), on TPUs hypot(matmuls, traffic + vector units).

    On TPUs HBM traffic and vector units alternate: their seconds add up (:func:`vector_seconds`). Matmuls overlap with both.
    The TPU compiler's estimates (libtpu 0.0.42, Llama on v5e and v5p) are near the longer one where one is much longer, and some
    1.4 times that where they are equal: a chunk of a weight gradient with 229,000 cycles of matmuls and 245,000 of traffic takes
    343,000. Convolutions do not overlap with their traffic: in ResNet-50 on v5e a weight gradient with 33 µs of arithmetic and 143
    of traffic takes 174, one with 83 and 71 takes 161.

    Args:
      matmuls: seconds on the matrix units.
      traffic: seconds of reading and writing HBM.
      elements: number that the vector units process.
      convolves: the matmuls are convolutions.
    """
    if chip.switch:
        return max(matmuls, traffic)
    if convolves:
        return math.hypot(matmuls, vector_seconds(chip, elements)) + traffic
    return math.hypot(matmuls, traffic + vector_seconds(chip, elements))


def _cut(pair: CollectiveMatmul, run: Run) -> list[bool]:
    """For (left operand, right operand, result) of a matmul: whether a chunk has only a part of it."""
    side = next(side for other, side in pair.dots if other is run)
    (lc, rc), (lb, rb) = run.op.eqn.params["dimension_numbers"]
    if pair.gather:
        contracted, batch = pair.dim in (lc, rc)[side], pair.dim in (lb, rb)[side]
        operands = [contracted or batch] * 2
        operands[side] = True
        return [*operands, not contracted]
    if side < len(lb):
        return [True, True, True]
    left = side - len(lb) < len(run.op.eqn.invars[0].aval.shape) - len(lc) - len(lb)
    return [left, not left, True]


def elementwise_seconds(chip: Chip, elements: float, size: float) -> float:
    """Seconds of an elementwise kernel of its own.

    Args:
      elements: of its result.
      size: bytes read and written for each element.
    """
    memory = elements * size / (chip.per_device().hbm_bandwidth * chip.compiler.hbm_efficiency)
    if not chip.compiler.clock_hz:
        return memory / chip.compiler.elementwise_hbm_efficiency
    return memory + vector_seconds(chip, elements)


def vector_seconds(chip: Chip, elements: float) -> float:
    """Seconds in which a device's vector units process ``elements``; 0 if the chip's clock is not known.

    Fitted to the TPU compiler's estimates (libtpu 0.0.42) of residual sums, norms, activations, conversions and optimizer updates:
    on v5e 10 cycles for 1024 elements, and 4.3 for each 2 kB that they read or write, in one array or fourteen. Their HBM traffic
    takes 1 to 1.2 times its seconds at full bandwidth.
    """
    rate = chip.compiler.vector_elements_per_cycle * chip.cores * chip.compiler.clock_hz
    return elements / rate if rate else 0.0


def ring_overhead_seconds(plan: Plan, chip: Chip, pair: CollectiveMatmul, devices: int) -> tuple[float, float]:
    """(seconds for each chunk, seconds once) of the elementwise work of a ring.

    The TPU compiler (libtpu 0.0.42) does not fuse the ops between ring steps with the matmuls. By the schedules of Llama 3 8B
    layers (``benchmarks/overlap.py``):

    - A reduce-scatter adds each received chunk but the first to the matmuls' result. For an even number of devices, the chunk of
      the opposite device is added in halves, which are sliced and concatenated once.
    - An all-gather slices and concatenates the chunk of the opposite device once. Matmuls write their results in place; if the
      contracted dim is chunked, the float32 accumulator of each matmul is read and written for each chunk.

    Producers that a full-size matmul would fuse (a converted weight, an activation) are computed before a chunked one; the matmuls
    are shorter by as much.
    """
    if devices == 1:
        return 0.0, 0.0
    opposite = devices % 2 == 0 and devices > 2
    size = itemsize(pair.value.aval)
    if not pair.gather:
        block = _elements(plan, pair.dots[0][0].results[0]) / devices
        added = elementwise_seconds(chip, block, 3 * size)
        return (devices - 1 - opposite) / devices * added, opposite * (
            added + _halves(chip, block, size, chip.compiler.scatter_copy_cycles)
        )
    each = 0.0
    for run, side in pair.dots:
        (lc, rc), _ = run.op.eqn.params["dimension_numbers"]
        if pair.dim in (lc, rc)[side]:
            each += elementwise_seconds(chip, _elements(plan, run.results[0]), 8.0)
    block = _elements(plan, pair.step.result) / devices
    return each, opposite * _halves(chip, block, size, chip.compiler.gather_copy_cycles)


def _halves(chip: Chip, block: float, size: float, cycles: float) -> float:
    """Seconds to slice and concatenate the halves of a chunk of ``block`` elements of ``size`` bytes, at ``cycles`` an element."""
    if not chip.compiler.clock_hz:
        return 2 * elementwise_seconds(chip, block, 2 * size)
    return cycles * block / (chip.cores * chip.compiler.clock_hz)


def _elements(plan: Plan, shard: Shard) -> int:
    """The number of elements of a shard on one device."""
    return math.prod(local_shape(shard.value.shape, shard.spec, plan.sizes))


def warn_about_lines(plan: Plan) -> None:
    """Warn (``TorusWarning``) of mesh axes with rings whose devices form no ring of the torus, with the seconds that this costs."""
    if plan.chip is None:
        return
    lines: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        if c.entry.ring_step and any(s.line for s in major_of(plan.torus, c.axes)):
            lines.setdefault(c.axes, []).append(c)
    parts = []
    for axes, hops in lines.items():
        (stage,) = major_of(plan.torus, axes)
        shape = f"in a line along {stage.dim}" if stage.dim else "that are no neighbours"
        stride = f", {stage.stride} positions apart" if stage.stride > 1 else ""
        line_seconds, ring_seconds = 0.0, 0.0
        for c in hops:
            directions = min(2, stage.size - 1)
            line_seconds += c.runs * hop_seconds(c.bytes, stage, plan.chip) / directions
            ring_seconds += c.runs * hop_seconds(c.bytes, replace(stage, wraps=True), plan.chip) / directions
        parts.append(
            f"{format_axes(axes)} is no ring of the torus ({stage.size} devices {shape}{stride}): its ring steps share links in "
            f"both directions and take {format_seconds(line_seconds)} a step; around a ring they would take "
            f"{format_seconds(ring_seconds)}"
        )
    if parts:
        where = f" on {plan.topology or plan.chip.name}"
        advice = "A mesh axis along a full torus dimension that wraps is a ring"
        text = f"{'; '.join(parts)}. The plan's seconds{where} include this. {advice}"
        warnings.warn(text, TorusWarning, stacklevel=user_stacklevel())

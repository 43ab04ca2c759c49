"""The contents of reports as data: what each rule does, groups of arguments and collectives, large values.

The terminal (:mod:`.text`), pages (:mod:`.html`) and comparisons (:mod:`.diff`) render these.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..compat.jax import function_name
from ..cost.caching import cached_on_plan
from ..cost.fusion import Computation, Kernel
from ..cost.memory import memory_of
from ..cost.tiles import LANES, SUBLANES
from ..cost.time import Time, time_of
from ..hardware.calibration import EFFICIENCIES
from ..iterables import grouped, grouped_by
from ..layout import EXPERTS, UNSHARDED, Rule, Spec
from ..plan.checks import sizes_of_results
from ..plan.collectives import Collective
from ..plan.plan import Arrival, Plan, ShardedArray
from ..plan.steps import Reduce, Reshard
from ..program.ir import Op, Value
from ..units import format_bytes, format_memory, format_seconds
from .tables import Cell, number

DimAxes = tuple[str, tuple[str, ...]]
"""A dim of an array: its name, and the mesh axes that shard it."""

USABLE_FRACTION = 0.85
"""Fraction of the memory of a device that a search lets the peak of a plan take: the rest is for errors of the estimate."""
MIN_PADDING_SHARE = 0.01
"""Fraction of the peak memory from which on padding is reported."""
MIN_LARGE_SHARE = 0.05
"""Fraction of the peak memory of the smallest array that is reported by name; :data:`MAX_LARGE` are at most."""
MAX_LARGE = 3
MEASURED_GPU_STEPS = (1.0, 1.03)
"""Smallest and largest ratio of the measured to the planned time of train steps on one H200; source:
``benchmarks/results/device.md``. The rate of matmuls is fitted to the step with the smallest."""
PUBLISHED_GPU_STEP = 1.14
"""Ratio of the measured to the planned time of a step of MaxText on eight H100s; source: ``benchmarks/results/published.md``."""
TORCHTITAN_GPU_STEPS = (1.55, 1.76)
"""Smallest and largest ratio of the measured to the planned time of steps of torchtitan on H100s that are limited to 500 of 700 W;
source: ``benchmarks/results/published.md``."""
COMPILED_STEP_ERROR = 0.24
"""Largest difference of planned steps from the TPU compiler's schedules, without the kernels that these count as 0 s; source:
``benchmarks/results/agreement.md``."""
STARTS = "starts of kernels"
"""Part of a step: the seconds of short kernels beyond their work."""
KINDS = {"params": "parameters", "opt": "optimizer state", None: "other inputs", "constant": "constants"}
"""Label of each kind of argument, in the order of reports."""


# -- the plan in short


def title(plan: Plan) -> str:
    """The model of a plan: the name of its target, or of the function that was traced."""
    return plan.request.name or function_name(plan.program.traced.closed) or "step"


def crossing(plan: Plan) -> tuple[list[str], str]:
    """The axes that connect devices of different slices of TPUs, or nodes of GPUs, and the name of the latter: ``slices``."""
    axes = [axis for axis, stages in plan.torus.items() if any(part.between for s in stages for part in s.parts)]
    return axes, "nodes" if plan.chip is not None and plan.chip.switch else "slices"


def layout_text(plan: Plan) -> str:
    """The layout of a plan, with the rules that the plan adds for Flax metadata, and whether it is resolved by cost;
    ``(nothing sharded)`` for an empty one."""
    return (str(plan.layout) or UNSHARDED) + plan.layout.by_cost


def lowering_text(plan: Plan) -> str:
    """The lowering of a plan; under ``"jit"`` that its numbers are estimates, and why ``"auto"`` chose it."""
    if plan.lowering != "jit":
        return plan.lowering
    because = f"; {plan.lowering_reason}" if plan.lowering_reason else ""
    return f"jit (estimate: XLA partitions this program{because})"


def fits(plan: Plan) -> bool | None:
    """Whether the peak memory of the plan fits the memory of a device; None: the chip is not known."""
    return None if plan.chip is None else memory_of(plan).peak <= plan.chip.per_device().hbm


def takes_text(fits: bool | None) -> str:
    """``a step takes`` or, of a plan that does not fit, ``a step that fitted would take``."""
    return "a step that fitted would take" if fits is False else "a step takes"


def fit(peak: float, capacity: float) -> str:
    """``fits``, ``tight`` (above the part that a search allows, :data:`USABLE_FRACTION`) or ``too large``; both are bytes."""
    return "too large" if peak > capacity else "tight" if peak > USABLE_FRACTION * capacity else "fits"


def inputs_text(plan: Plan) -> str:
    """``batch 32 × seq 2,048``: the named dims of the integer inputs (of all inputs if there are none), the parameters and the
    state excluded, with their sizes; "" without such dims."""
    inputs = [h for h in sorted(plan.inputs, key=lambda h: "batch" not in h.dims) if h.kind is None]
    integers = [h for h in inputs if "int" in h.dtype]
    sizes = {name: n for h in integers or inputs for name, n in zip(h.dims, h.shape, strict=True) if name}
    return " × ".join(f"{name} {n:,}{_in_activations(plan, name, n)}" for name, n in sizes.items())


def _in_activations(plan: Plan, name: str, n: int) -> str:
    """`` (2,048 in activations, split over model)`` of a dim of ``n`` tokens of which a step reads all but one as inputs; "" of
    others."""
    if plan.program.cached(sizes_of_results).get(name) != n - 1:
        return ""
    results = (v for op in plan.program.root.walk() for v in op.outs)
    own = (name, n - 1)
    dims = (d for v in results for m, d in zip(v.shape, value_dims(plan, v), strict=True) if (d[0], m) == own)
    axes = "+".join(next((axes for _, axes in dims if axes), ()))
    return f" ({n - 1:,} in activations{f', split over {axes}' if axes else ''})"


def step_tokens(plan: Plan) -> int:
    """Number of elements of the largest argument of integers with a dim ``batch``; 0 without one."""
    integers = (h for h in plan.inputs if "int" in h.dtype and "batch" in h.dims)
    return max((math.prod(h.shape) for h in integers), default=0)


def step_rate(plan: Plan, seconds: float) -> str:
    """``6,107 tokens/s a chip``: the elements of a batch of integers with further dims (not of bytes, as of images); without one
    the rows of a batch; "" without arrays whose first dim is ``batch``."""
    batches = [h for h in plan.inputs if h.kind is None and len(h.shape) > 1 and "batch" in h.dims]
    tokens = max((math.prod(h.shape) for h in batches if re.fullmatch("u?int(16|32|64)", h.dtype)), default=0)
    count = tokens or max((h.shape[0] for h in batches if h.dims[0] == "batch"), default=0)
    if plan.chip is None or not count:
        return ""
    rate = count / seconds / math.ceil(plan.mesh.size / plan.chip.devices)
    return f"{rate:,.0f} {'tokens' if tokens else 'examples'}/s a chip"


def kernel_seconds(time: Time) -> float:
    """Seconds of the estimated step in which kernels run; the remaining time is exposed communication."""
    return sum(op.seconds * op.count for op in time.ops)


def time_bounds(time: Time) -> str:
    """The two bounds of a step's estimate, as text."""
    ends = format_seconds(time.overlapped), format_seconds(time.serial)
    return f"{ends[0]} if everything overlaps, {ends[1]} if nothing overlaps"


def parts_text(time: Time) -> str:
    """The parts of a step if nothing overlaps, longest first, without those below a thousandth of it: ``communication 212 ms,
    matmuls 80.9 ms, memory traffic 50.8 ms``."""
    parts = {"matmuls": time.compute, "memory traffic": time.memory, "vector units": time.vector, STARTS: time.starts}
    parts |= {"communication": time.communication, "copies to and from the host": time.to_host + time.to_device}
    ranked = sorted(parts.items(), key=lambda x: -x[1])
    return ", ".join(f"{k} {format_seconds(v)}" for k, v in ranked if v > 1e-3 * time.serial)


def accuracy_text(plan: Plan) -> str:
    """The measured times of GPU steps relative to their plans; "" for other chips, and for calibrated ones."""
    if plan.chip is None or not plan.chip.switch or plan.chip.calibration:
        return ""
    (low, high), (least, most) = MEASURED_GPU_STEPS, TORCHTITAN_GPU_STEPS
    return (
        f"measured steps took {low} to {high} times as long as planned on one H200, {PUBLISHED_GPU_STEP} times on eight "
        f"H100s (MaxText, by NVIDIA), {least} to {most} times on H100s limited to 500 W (torchtitan, in PyTorch)"
    )


def step_range(plan: Plan) -> tuple[tuple[float, float], str]:
    """(smallest and largest time of a step, as fractions of the planned time; their source); (1, 1) for calibrated chips."""
    if plan.chip is None or plan.chip.calibration:
        return (1.0, 1.0), ""
    if plan.chip.switch:
        return (1.0, PUBLISHED_GPU_STEP), "a step of MaxText that NVIDIA measured on eight H100s"
    return (1 - COMPILED_STEP_ERROR, 1 + COMPILED_STEP_ERROR), "the TPU compiler's schedules, estimates as well"


def largest_text(plan: Plan) -> str:
    """The largest arrays at the peak other than parameters and optimizer state, with their number; "" if all are small."""
    memory = memory_of(plan)
    others = [array for array in memory.largest if array[2] not in ("parameters", "optimizer state")]
    sizes = grouped((name, size) for name, size, *_ in others if size >= MIN_LARGE_SHARE * memory.peak)
    texts = [f"{k} {format_memory(max(of))}" + f" (× {len(of)})" * (len(of) > 1) for k, of in sizes.items()]
    return f"largest: {', '.join(texts[:MAX_LARGE])}" if texts else ""


def padding_text(plan: Plan) -> str:
    """The part of the peak memory that is padding to tiles, and its largest roles; "" where it is a small part."""
    memory = memory_of(plan)
    total = sum(memory.padding.values())
    if total < MIN_PADDING_SHARE * memory.peak:
        return ""
    ranked = sorted(memory.padding.items(), key=lambda x: -x[1])
    kinds = ", ".join(f"{kind} {format_memory(n)}" for kind, n in ranked if n >= MIN_PADDING_SHARE * memory.peak)
    return (
        f"{format_memory(total)} of the peak are padding: a TPU stores arrays in tiles of {SUBLANES} × {LANES} elements, images of "
        f"batch and channels ({kinds})"
    )


def host_copies(plan: Plan) -> str:
    """The copies of a step to and from the host, with their seconds and lines; "" if the plan does not use the host's memory."""
    transfers, time = plan.transfers, time_of(plan)
    if not memory_of(plan).host and not transfers:
        return ""
    copies = []
    for to, seconds in (("host", time.to_host if time else 0.0), ("device", time.to_device if time else 0.0)):
        size = sum(t.total_bytes for t in transfers if t.to == to)
        if size:
            copies.append(f"{format_bytes(size)} to the {to}" + (f" ({format_seconds(seconds)})" if seconds else ""))
    lines = list(dict.fromkeys(t.source for t in transfers))
    where = f", at {', '.join(lines[:3])}{', …' if len(lines) > 3 else ''}" if lines else ""
    return f"a step copies {' and '.join(copies)}{where}" if copies else "a step copies nothing to or from it"


def arrivals_text(arrivals: Sequence[Arrival]) -> str:
    """The arguments that each call reshards before the step runs, the bytes that a device receives, and how to reshard once."""
    names = list(dict.fromkeys(a.argument for a in sorted(arrivals, key=lambda a: -a.bytes)))
    largest = max(arrivals, key=lambda a: a.bytes)
    return (
        f"each call reshards {' and '.join(f'`{name}`' for name in names)}: a device receives "
        f"{format_bytes(sum(a.bytes for a in arrivals))}, {format_bytes(largest.bytes)} of it for {largest.path}, from "
        f"{largest.source} to {largest.spec}. Reshard once, before the calls: "
        f"{', '.join(names)} = step.put({', '.join(f'{name}={name}' for name in names)})"
    )


def blocking_collectives(plan: Plan) -> str:
    """The kinds of collectives that are synchronous on the plan's chip, with their seconds in a step, or ""."""
    chip = plan.chip
    if chip is None:
        return ""
    rings = (step for step in plan.body.all_steps if isinstance(step, Reshard | Reduce) and step.ring)
    in_rings = {c for step in rings for c in step.sends}
    blocking = [c for c in plan.collectives if not plan.is_async(c.op) and c not in in_rings]
    if not blocking:
        return ""
    kinds = " and ".join(f"{op}s" for op in sorted({c.op for c in blocking}))
    return f"{kinds} are synchronous on {chip.name}: {format_seconds(sum(c.total_seconds for c in blocking))}"


def calibration_text(plan: Plan) -> str:
    """The calibration of the plan's chip: fractions of the peak rates; "" if the chip table is used."""
    chip = plan.chip
    if chip is None or not chip.calibration:
        return ""
    rates = zip(("matmuls", "memory traffic", "links"), (getattr(chip.compiler, k) for k in EFFICIENCIES), strict=True)
    return f"calibrated on {chip.calibration}: {', '.join(f'{of} {rate:.2g}' for of, rate in rates)} of the peak rate"


# -- dims and arguments


def value_dims(plan: Plan, value: Value) -> list[DimAxes]:
    """The dims of a value, with the axes that shard them in its stored sharding."""
    placed = plan.placements.get(value)
    spec: Spec = ((),) * len(value.shape) if placed is None else placed.stored.spec
    return [(plan.program.dim_name(value, i) or "_", tuple(axes)) for i, axes in enumerate(spec)]


def argument_dims(h: ShardedArray) -> list[DimAxes]:
    """The dims of an argument or result, with the axes that shard them."""
    return [(name or "_", axes) for name, axes in h.split]


def dims_text(dims: Iterable[DimAxes]) -> str:
    """``embed:data mlp:model head_dim``: dims with the axes that shard them; ``(scalar)`` without dims."""
    return " ".join(name + (f":{'+'.join(axes)}" if axes else "") for name, axes in dims) or "(scalar)"


def global_bytes(h: ShardedArray) -> float:
    """Bytes of the full array of an argument, over all devices."""
    number = re.search(r"\d+", h.dtype)
    bits = 64 if "key" in h.dtype else 8 if h.dtype == "bool" else int(number[0]) if number else 32
    return math.prod(h.shape) * bits / 8


@dataclass(frozen=True, slots=True)
class ArgumentGroup:
    """Arguments that a report shows as one row: their dims and sharding are equal.

    Attributes:
      members: the arguments.
      bytes: on a device, of all of them.
      global_bytes: of the full arrays.
    """

    members: tuple[ShardedArray, ...]

    @property
    def bytes(self) -> float:
        return sum(h.bytes for h in self.members)

    @property
    def global_bytes(self) -> float:
        return sum(map(global_bytes, self.members))

    @property
    def dims(self) -> list[DimAxes]:
        return argument_dims(self.members[0])

    @property
    def shape(self) -> str:
        return shape_text(self.members[0].dtype, self.members[0].shape)

    def cells(self) -> list[Cell]:
        """The number of arguments, and their bytes: of the full arrays, and on a device."""
        count = number(str(len(self.members)), len(self.members), css="more")
        full = number(format_memory(self.global_bytes), self.global_bytes, css="more")
        return [count, full, number(format_memory(self.bytes), self.bytes)]


def argument_groups(
    plan: Plan, key: Callable[[ShardedArray], Hashable]
) -> Iterator[tuple[str, ArgumentGroup, list[ArgumentGroup]]]:
    """(label of a kind, all of its arguments, those with equal keys as groups, largest first), for parameters, optimizer state, ….

    Constants that the function closes over are a kind of their own. The label says whether all or some of its arrays are donated.
    """
    for kind, label in KINDS.items():
        donated = [i in plan.donated for i, h in enumerate(plan.inputs) if h.kind == kind]
        members = [h for h in (*plan.inputs, *plan.constants) if h.kind == kind]
        if members:
            ranked = sorted((ArgumentGroup(tuple(g)) for g in grouped_by(members, key)), key=lambda g: -g.bytes)
            how = " (some donated)" if any(donated) and not all(donated) else " (donated)" if any(donated) else ""
            yield label + how, ArgumentGroup(tuple(members)), ranked


def shape_text(dtype: str, shape: Iterable[int]) -> str:
    """``float32[8, 128]``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


# -- collectives


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """Collectives that a report shows as one row.

    Attributes:
      members: largest first.
      calls: executions in a step; None: a loop's trip count is not known.
      bytes: that a device sends in a step.
      seconds: of all of them in a step.
    """

    members: tuple[Collective, ...]

    @property
    def first(self) -> Collective:
        return self.members[0]

    @property
    def calls(self) -> int | None:
        counts = [c.count for c in self.members]
        return None if None in counts else sum(n for n in counts if n is not None)

    @property
    def bytes(self) -> float:
        return sum(c.total_bytes for c in self.members)

    @property
    def seconds(self) -> float:
        return sum(c.total_seconds for c in self.members)

    @property
    def dims(self) -> str:
        """The dims of the tensors; three of them, and how many more there are."""
        dims = list(dict.fromkeys(c.dims or "(scalar)" for c in self.members))
        return " | ".join(dims[:3]) + (f" | {len(dims) - 3} more" if len(dims) > 3 else "")

    @property
    def location(self) -> str:
        """The part of the model and the user's line that need them, with ``*`` for numbers of layers that differ, and the number
        of further ones."""
        if len({c.location for c in self.members}) == 1:
            return self.first.location
        more = len({location_of_op(c.origin) for c in self.members}) - 1
        return location_of_op(self.first.origin) + f" and {more} more place{'s' * (more > 1)}" * bool(more)

    def explanation(self, compared: bool = True) -> str:
        """The place, and the cause: ``in mlp/up (llama.py:324): `batch` already takes …``; if ``compared``, of an all-reduce in
        place of a reduce-scatter also the numbers of both, for the longest call."""
        first = self.first
        where = "" if not self.location else f"{'in' if first.module else 'at'} {self.location}: "
        largest = "for the longest call, " * (len({c.why for c in self.members}) > 1)
        numbers = f"; {largest}{first.why.partition('; ')[2]}" if compared and first.entry.slices_locally else ""
        return f"{where}{first.explanation}{numbers}"

    def cells(self) -> list[Cell]:
        """Total bytes, calls, bytes per call (``~``: the mean of calls that differ) and seconds."""
        calls, about = self.calls, "~" if len({c.bytes for c in self.members}) > 1 else ""
        each = f"{about}{format_bytes(self.bytes / calls)}" if calls else about
        return [
            number(format_bytes(self.bytes), self.bytes),
            number("?" if calls is None else str(calls), calls or 0),
            number(each, self.first.bytes, css="more"),
            number(format_seconds(self.seconds), self.seconds),
        ]


def location_of_op(op: Op | None) -> str:
    """The location of an op, with ``*`` for numbers of layers; "" without one."""
    return "" if op is None else op.location_of_layers


def collective_groups(
    collectives: Iterable[Collective], key: Callable[[Collective], Hashable] = lambda c: (c.op, c.axes, c.explanation)
) -> list[CollectiveGroup]:
    """Collectives with equal keys (by default kind, axes and cause) as groups, those that take longest first; where no time is
    estimated, those that send most first."""
    groups = [tuple(sorted(g, key=lambda c: (-c.total_seconds, -c.total_bytes))) for g in grouped_by(collectives, key)]
    return sorted(map(CollectiveGroup, groups), key=lambda g: (-g.seconds, -g.bytes))


# -- rules


@dataclass(frozen=True, slots=True)
class RuleEffect:
    """The effect of one rule of the layout on memory and communication.

    Attributes:
      rule: the rule; None: the collectives that no single rule causes.
      parallelism: its name in the literature, ``"FSDP"``; "" for another use of its axes.
      arguments: the arguments that it shards.
      values: number of values of the program that it shards, arguments included.
      collectives: those that it causes: another rule uses its axis, or a dim that it shards is contracted.
      unused: why it shards nothing and causes nothing; "" if it does, or if the program has no such dim.
    """

    rule: Rule | None
    parallelism: str
    arguments: ArgumentGroup
    values: int
    collectives: CollectiveGroup
    unused: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.rule is None else self.rule.axes

    @property
    def size_text(self) -> str:
        """``16.00 GiB → 0.50 GiB``: global bytes and bytes on a device of the arguments; "" if it shards none."""
        size = self.arguments
        return f"{format_memory(size.global_bytes)} → {format_memory(size.bytes)}" if size.members else ""


@cached_on_plan
def rule_effects(plan: Plan) -> list[RuleEffect]:
    """One effect per rule, in the layout's order; a last one for collectives that no single rule causes, if there are any."""
    rules = plan.layout.rules
    arguments = grouped((k, h) for h in plan.inputs for k in rules_of(plan, h))
    every = dict.fromkeys((*plan.program.inputs, *(v for op in plan.program.root.walk() for v in op.outs)))
    values = Counter(k for v in every for k in _rule_indices(plan, value_dims(plan, v), v.path or "", v.kind))
    caused = grouped((plan.rule_of(c), c) for c in plan.collectives)
    out = []
    for k, rule in enumerate(rules):
        group, causes = ArgumentGroup(tuple(arguments.get(k, ()))), CollectiveGroup(tuple(caused.pop(rule, ())))
        unused = "" if not rule.axes or values[k] or causes.members else _why_unused(plan, rule, every)
        out.append(RuleEffect(rule, parallelism(rule, rules[:k]), group, values[k], causes, unused))
    return out + [RuleEffect(None, "", ArgumentGroup(()), 0, CollectiveGroup(tuple(c))) for c in caused.values()]


def _why_unused(plan: Plan, rule: Rule, values: Iterable[Value]) -> str:
    """Why a rule shards none of the values that have its dim; "" if none has."""
    of, axes, n = plan.program.dims, "+".join(rule.axes), math.prod(plan.sizes[a] for a in rule.axes)
    scoped = (v for v in values if rule.scope in (None, *plan.layout.scopes_of(v.path or "", v.kind)))
    arrays = [v for v in scoped if rule.dim in of(v)]
    owners = {v: [name for name, axes in value_dims(plan, v) if not {*axes}.isdisjoint(rule.axes)] for v in arrays}
    names = " or ".join(f"`{name}`" for name in dict.fromkeys(itertools.chain(*owners.values())))
    taken = f"{names} already takes `{axes}` in {sum(map(bool, owners.values()))} of the {len(arrays)} arrays with `{rule.dim}`"
    odd = {v.shape[of(v).index(rule.dim)] for v in arrays if not owners[v]}
    uneven = ", ".join(str(size) for size in sorted(odd) if size % n)
    return "; ".join([taken] * bool(names) + [f"{n} does not divide {uneven}"] * bool(uneven))


def rules_of(plan: Plan, h: ShardedArray) -> list[int]:
    """Indices of the rules of the layout that shard an argument."""
    return sorted(set(_rule_indices(plan, argument_dims(h), h.path, h.kind)))


TENSOR_DIMS = ("heads", "kv_heads", "mlp", "vocab")
_OF_DIM = {"batch": "data parallel", **dict.fromkeys(EXPERTS, "expert parallel")}
_OF_DIM |= dict.fromkeys(TENSOR_DIMS, "tensor parallel")


def parallelism(rule: Rule, earlier: Sequence[Rule]) -> str:
    """The name of the parallelism of a rule that has the dims of a scheme of :mod:`meshpar.layouts`; "" for other rules.

    Args:
      earlier: the rules before it. With ``batch: data`` before it, ``embed: data`` is FSDP.
    """
    axes = set(rule.axes)
    batch_axes = {a for r in earlier if r.dim == "batch" for a in r.axes}
    tensor_axes = {a for r in earlier if r.dim in TENSOR_DIMS for a in r.axes}
    if not axes:
        return ""
    if rule.dim == "seq":
        other = "" if axes & batch_axes else "context parallel"
        return "sequence parallel" if axes <= tensor_axes else other
    if rule.dim in (*TENSOR_DIMS, "embed") and axes <= batch_axes:
        return "ZeRO-1" if rule.scope == "opt" else "FSDP"
    return _OF_DIM.get(rule.dim, "")


def _rule_indices(plan: Plan, dims: Iterable[DimAxes], path: str, kind: str | None) -> Iterator[int]:
    """For each sharded dim, the index of the first rule that gives one of its axes to a dim of its name, if there is one."""
    rules = plan.layout.rules
    for name, axes in dims:
        if axes:
            names = name.strip("()").split()  # a merged dim: (heads head_dim)
            candidates = plan.layout.rules_of(names, plan.layout.scopes_of(path, kind))
            yield from [k for k in candidates if not set(axes).isdisjoint(rules[k].axes)][:1]


def kernels_of(computation: Computation) -> Iterator[Kernel]:
    """The kernels of a computation, also in the bodies of its loops."""
    for kernel in computation.kernels:
        yield kernel
        for body in kernel.bodies:
            yield from kernels_of(body)

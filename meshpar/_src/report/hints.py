"""Hints of a plan: edits that make the step shorter, send fewer bytes or need less memory, by their gain."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...errors import MeshparError
from ..compat.jax import in_recomputation
from ..cost.buffer_roles import buffer_roles
from ..cost.device_computation import computation_of
from ..cost.donation import donatable
from ..cost.kernel_time import kernel_times
from ..cost.memory import memory_of, with_donated
from ..cost.time import time_of
from ..dims import format_dims
from ..hardware.topology import Topology, larger_topologies
from ..iterables import grouped_by
from ..layers.checkpoint_policies import NAMED
from ..layout import Layout
from ..passes import replan
from ..passes.advice import idle_axes, slice_traffic
from ..plan.causes import name_of
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.shard_shapes import shard_count, value_bytes
from ..plan.steps import Step
from ..program.ir import Frame, Op, Program, Value, location_of
from ..program.pipeline import layer_loops
from ..program.roles import elementwise_flow
from ..units import format_bytes, format_memory, format_seconds, with_article
from .facts import TENSOR_DIMS, USABLE_FRACTION, fits, global_bytes, kernels_of

MAX_HINTS = 3
MIN_SAVED_SHARE = 0.01
"""Smallest saving of an edit that a hint mentions, as a fraction of the peak memory."""
MAX_MICROBATCHES = 64
"""The largest number of microbatches that a hint suggests."""
MIN_MATMUL_SHARE = 0.03
"""Smallest time of recomputed matmuls, or of matmuls in float32, that a hint mentions, as a fraction of the step."""


class Hint(NamedTuple):
    """An edit of the program, of the layout or of a call.

    Attributes:
      text: the edit, after its gain.
      seconds: of the step that it saves at most; 0: not known.
      bytes: of the peak that it saves; 0: not known.
    """

    text: str
    seconds: float = 0.0
    bytes: float = 0.0


def hints(plan: Plan) -> list[str]:
    """The hints of a plan, the largest gain first: in seconds of the step, or in bytes of the peak if it does not fit."""
    found = [
        *_memory_hints(plan),
        slices_hint(plan),
        attention_hint(plan),
        recomputation_hint(plan),
        repeated_exchange_hint(plan),
        float32_hint(plan),
        *fused_hints(plan),
        *_exchanges(plan),
    ]
    largest = (lambda h: (-h.bytes, -h.seconds)) if fits(plan) is False else (lambda h: (-h.seconds, -h.bytes))
    return [hint.text for hint in sorted(filter(None, found), key=largest)]


def donation_hint(plan: Plan) -> Hint | None:
    """The arguments that a step returns updated but that are not donated, with the memory that donation saves at the peak, or,
    where the plan fits, at the end of the step; None where both are little."""
    arguments = donatable(plan)
    donated = plan.donated | arguments.keys()
    peak, at_end = memory_of(plan).peak, sum(plan.inputs[i].bytes for i in arguments)
    saved = peak - memory_of(with_donated(plan, donated)).peak if arguments else 0.0
    gain = f"{format_memory(saved)} of the peak of {format_memory(peak)}"
    at_peak = saved >= MIN_SAVED_SHARE * peak or fits(plan) is False
    if not at_peak:
        saved, gain = at_end, f"{format_memory(at_end)} at the end of the step, which is not its peak"
    if saved < MIN_SAVED_SHARE * peak or saved <= 0:
        return None
    names = list(dict.fromkeys(path.partition("/")[0] for path in arguments.values()))
    given = f'"{names[0]}"' if len(names) == 1 else str(tuple(names)).replace("'", '"')
    listed, verb = " and ".join(f"`{name}`" for name in names), "are" if names[1:] else "is"
    flags = " ".join(f"--donate {name}" for name in names)
    return Hint(
        f"{gain}: {listed} {verb} returned updated but not donated, so that the old and the new arrays are live at once: "
        f"donate_argnames={given} ({flags})",
        bytes=saved if at_peak else 0.0,
    )


def _memory_hints(plan: Plan) -> list[Hint | None]:
    """The edits that save memory: more devices if the state alone does not fit; donation, also where the plan fits; where it does
    not fit, rules for unused axes, other rules, rematerialization and microbatches."""
    donation = donation_hint(plan)
    if fits(plan) is not False:
        return [donation]
    if state := _state_hint(plan):
        return [state, donation]
    idle = _idle_hints(plan)
    return [*idle, donation, _rule_hint(plan, idle_axes(plan) if idle else []), _activations_hint(plan)]


def _idle_hints(plan: Plan) -> list[Hint]:
    """For each axis that no rule uses, rules for the batch and for dims of tensor parallelism, each with the memory of its plan."""
    sizes = {dim: size for h in plan.inputs for dim, size in zip(h.dims, h.shape, strict=True) if dim}
    rules = {rule.dim: rule.axes for rule in plan.requested_layout.rules if rule.scope is None}
    found = []
    for axis in idle_axes(plan):
        over = (*rules.get("batch", ()), axis)
        tensor = [d for d in TENSOR_DIMS if d in sizes and d not in rules and sizes[d] % plan.sizes[axis] == 0]
        texts = [f"batch: {'+'.join(over)}"] * ("batch" in sizes) + [f"{', '.join(tensor)}: {axis}"] * bool(tensor)
        edits, peaks = [], list[float]()
        for text in texts:
            with contextlib.suppress(MeshparError):
                layout = plan.requested_layout.with_first(Layout(text).rules)
                peak = memory_of(replan(plan, replace(plan.request, layout=layout))).peak
                if peak <= (1 - MIN_SAVED_SHARE) * memory_of(plan).peak:
                    edits.append(f"`{text}`, with a peak of {format_memory(peak)}")
                    peaks.append(peak)
        if edits:
            work = f"its {plan.sizes[axis]} devices do the same work: write {', or '.join(edits)}"
            saved = memory_of(plan).peak - min(peaks)
            found.append(Hint(f"{format_memory(saved)} less: no rule uses `{axis}`, so that {work}", bytes=saved))
    return found


def topology_for_state(plan: Plan) -> Topology | None:
    """The smallest topology that holds the state of a step (:func:`_state_bytes`), if the plan's devices do not; None elsewhere."""
    if plan.chip is None or plan.topology is None:
        return None
    usable = USABLE_FRACTION * plan.chip.per_device().hbm
    if _state_bytes(plan) <= usable * math.prod(plan.sizes.values()):
        return None
    return next((t for t in larger_topologies(plan.topology) if _state_bytes(plan) <= usable * t.devices), None)


def _state_bytes(plan: Plan) -> float:
    """Bytes of the full arrays of the parameters and the optimizer state; with the latter, also of gradients, one a parameter."""
    params, opt = (sum(global_bytes(h) for h in plan.inputs if h.kind == kind) for kind in ("params", "opt"))
    return params + opt + (params if opt else 0)


def _state_hint(plan: Plan) -> Hint | None:
    """The smallest topology for the state, if no layout on the plan's devices fits; None elsewhere."""
    where = topology_for_state(plan)
    if where is None or plan.chip is None:
        return None
    has = math.prod(plan.sizes.values()) * plan.chip.per_device().hbm
    return Hint(
        f"no layout fits: parameters, gradients and optimizer state are {format_memory(_state_bytes(plan))}, and "
        f"{plan.topology} has {format_memory(has)} in all, of which a search allows {100 * USABLE_FRACTION:.0f} %. "
        f"They fit on {where.devices} devices: {where}",
        bytes=math.inf,
    )


def slices_hint(plan: Plan) -> Hint | None:
    """The traffic between slices that each layer waits for, with the seconds of it that are not hidden; None: there is none."""
    text, collectives = slice_traffic(plan)
    took = sum(c.total_seconds - c.hidden * c.runs for c in collectives)
    return Hint(f"up to {format_seconds(took)}: {text}", took) if text else None


def attention_scores(program: Program) -> tuple[list[Op], set[Value]]:
    """The matmuls of queries and keys; their results, and what is computed elementwise of these.

    Scores are the results of a batched matmul that are larger than its operands, and of which an exponential (the softmax) is
    computed elementwise.
    """
    flow = program.cached(elementwise_flow)
    exponentials = {v for op in program.root.walk() if op.name in ("exp", "exp2") for v in op.outs}
    made, scores = list[Op](), set[Value]()
    for op in program.root.walk():
        batch, *sides, contracted = _matmul_sides(op)
        if batch > 1 and min(sides) > contracted and not exponentials.isdisjoint(flow.after(op.outs)):
            made.append(op)
            scores |= {v for v in flow.spread(op.outs, ()) if v.elements == op.outs[0].elements}
    return made, scores


def attention_hint(plan: Plan) -> Hint | None:
    """The attention scores that kernels store in memory, and the op that does not store them; None: there are none."""
    (made, scores), time = plan.program.cached(attention_scores), time_of(plan)
    kernels = [k for k in kernels_of(computation_of(plan)) if any(b.value in scores for b in (*k.reads, *k.writes))]
    stored = [b.bytes for k in kernels for b in k.writes if b.value in scores]
    if not stored:
        return None
    took = sum(t.seconds * t.count for k in kernels if (t := kernel_times(plan).get(k)))
    gain = f"up to {format_seconds(took)}: " if time else ""
    place = f"{'in' if made[0].module else 'at'} {location_of(made) or '?'}"
    return Hint(
        f"{gain}attention scores of {format_memory(max(stored))} are stored {place}, and read by other kernels. "
        "mp.layers.attention, also in place of dot_product_attention or as attention_fn= of Flax's modules, computes them in "
        "chunks and stores none: docs/slow.md",
        took,
    )


def fused_hints(plan: Plan) -> list[Hint]:
    """The weights with several arrays in one dim (queries, keys and values; gate and up) that the program cuts: the all-to-alls of
    the shards or, where the dim has no name, so that no rule shards it, the redundant matmuls."""
    program, root_of = plan.program, plan.program.unifier.weak_root
    cuts: dict[int, tuple[Op, int, int]] = {}  # dim that is cut → (op, size, number of arrays)
    for op in program.root.walk():
        if op.primitive.family in ("split", "slice") and (operand := op.ins[0]) is not None:
            for node, size, part in zip(operand.nodes, operand.shape, op.outs[0].shape, strict=True):
                if 1 < part < size and size % part == 0 and node >= 0:
                    cuts.setdefault(root_of(node), (op, size, size // part))
    weights = sorted((v for v in program.inputs if v.kind == "params"), key=lambda v: v.elements)
    weight_of = {
        root_of(n): (v, i) for v in weights for i, n in enumerate(v.nodes) if n >= 0
    }  # the largest, not a bias

    def roots(op: Op) -> set[int]:
        """The dims of the operands and results of an op that are cut, and are dims of weights."""
        nodes = (node for v in (*op.ins, *op.outs) if v is not None for node in v.nodes if node >= 0)
        return {root_of(node) for node in nodes} & cuts.keys() & weight_of.keys()

    lost, sent = defaultdict[int, float](float), defaultdict[int, float](float)
    for c in plan.collectives:
        if c.op == "all-to-all" and c.origin is not None and c.origin.rule is not None and c.origin.rule.sharded_like:
            for root in roots(c.origin):
                lost[root] += c.total_seconds
                sent[root] += c.total_bytes
    for kernel, of in kernel_times(plan).items() if cuts else ():
        for step in kernel.matmuls:
            times = plan.mesh.size // shard_count([a for axes in step.axes or () for a in axes], plan.sizes)
            for root in roots(step.op):
                if not program.dim_name(*weight_of[root]):
                    lost[root] += of.count * of.seconds * (1 - 1 / times)
    time, found = time_of(plan), dict[str, Hint]()
    for root in sorted({*lost, *sent}, key=lambda root: (-lost[root], -sent[root])):
        if not sent[root] and (time is None or lost[root] < MIN_MATMUL_SHARE * time.seconds):
            continue
        (weight, i), (op, size, count) = weight_of[root], cuts[root]
        names = [name or "_" for name in program.dims(weight)]
        own = ", ".join((*names[:i], str(count), "mlp" if names[i] == "_" else names[i], *names[i + 1 :]))
        effect = (
            "its shards are cut"
            if sent[root]
            else "no rule shards it, and several devices compute its matmuls redundantly"
        )
        gain = f"{format_bytes(sent[root])} of all-to-alls" if sent[root] else f"up to {format_seconds(lost[root])}"
        path = re.sub(r"(?<![A-Za-z\d])\d+", "*", weight.path or "")
        text = (
            f"{gain}: `{path}` has {count} arrays in a dim of {size:,}, which {op.name} cuts at {op.location or '?'}: {effect}. "
            f"Use one weight for each array, or a dim of its own for the arrays, as in [{own}]; for heads, reshape the result "
            "before the cut (this changes the order of a checkpoint's elements): docs/names.md#fused-kernels"
        )
        found.setdefault(path, Hint(text, lost[root]))
    return list(found.values())[:MAX_HINTS]


def recomputation_hint(plan: Plan) -> Hint | None:
    """The matmuls that the backward pass recomputes, if the results of all of them fit the free memory; None: they do not, or are
    copied in about the time that computes them. Batched matmuls, as of attention scores, are left out.

    A loop copies each result to the stack of all iterations, and the loop of the backward pass copies it from there.
    """
    time, memory, took, size = time_of(plan), memory_of(plan), 0.0, 0.0
    if plan.chip is None or time is None:
        return None
    device = plan.chip.per_device()
    for kernel, of in kernel_times(plan).items():
        ops = [step.op for step in kernel.matmuls]
        if ops and all(in_recomputation(op.eqn) and _matmul_sides(op)[0] == 1 for op in ops):
            made = sum(value_bytes(s.value, s.spec, plan.sizes) for step in kernel.matmuls for s in step.makes)
            took += of.count * (of.seconds - (of.count > 1) * 4 * made / device.hbm_bandwidth)
            size += of.count * made
    if took < MIN_MATMUL_SHARE * time.seconds or memory.peak + size > USABLE_FRACTION * device.hbm:
        return None
    return Hint(
        f"up to {format_seconds(took)}, less where they hide communication: the backward pass recomputes matmuls, and "
        f"{format_memory(device.hbm - memory.peak)} are free. "
        "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable of jax.checkpoint saves their results, "
        f"{format_memory(size)}; a larger batch uses free memory too: docs/faster.md#use-the-memory",
        took,
    )


def repeated_exchange_hint(plan: Plan) -> Hint | None:
    """The collectives of named values, as of the tokens of experts, that the backward pass repeats, if all named values fit the
    free memory; None: they do not, or take a small part of the step."""
    time, memory = time_of(plan), memory_of(plan)
    if plan.chip is None or time is None:
        return None
    named = [(op, n) for op, n in _with_counts(plan.program.root) if op.name in NAMED and in_recomputation(op.eqn)]
    origins = {op for op, _ in named}
    took = sum(c.total_seconds - c.hidden * c.runs for c in plan.collectives if c.origin in origins)
    size = sum(n * value_bytes(v, plan.placements[v].stored.spec, plan.sizes) for op, n in named for v in op.outs)
    if took < MIN_MATMUL_SHARE * time.seconds or memory.peak + size > USABLE_FRACTION * plan.chip.per_device().hbm:
        return None
    return Hint(
        f"{format_seconds(took)} or more: the backward pass repeats collectives of named values. "
        "policy=mp.train.checkpoint_policies.collectives_saveable of jax.checkpoint saves these values, at most "
        f"{format_memory(size)}: docs/moe.md#what-to-save",
        took,
    )


def _with_counts(frame: Frame, count: int = 1) -> Iterator[tuple[Op, int]]:
    """The ops of a frame and of its bodies, each with the number of its runs; a loop of unknown length runs once."""
    for op in frame.ops:
        yield op, count
        for body in op.frames:
            yield from _with_counts(body, count * (body.trip_count or 1))


def float32_hint(plan: Plan) -> Hint | None:
    """The matmuls in float32 of a chip that multiplies bfloat16 faster, as GPUs do; None: they are few."""
    time = time_of(plan)
    if plan.chip is None or time is None:
        return None
    rate = plan.chip.matmul_rate("float32") / plan.chip.matmul_rate("bfloat16")
    in_float32 = (
        of.count * of.matmul_seconds
        for kernel, of in kernel_times(plan).items()
        if kernel.matmuls and str(kernel.matmuls[0].op.eqn.invars[0].aval.dtype) == "float32"
    )
    saved = (1 - rate) * sum(in_float32)
    if saved < MIN_MATMUL_SHARE * time.seconds:
        return None
    return Hint(
        f"up to {format_seconds(saved)}: matmuls are in float32, for which {with_article(plan.chip.name)} has {rate:.2g} of the "
        'rate of bfloat16. dtype=jnp.bfloat16 of Flax\'s layers, or mp.train.Precision(compute="bfloat16")(loss), leaves the '
        "weights in float32; a layer with a dtype of its own, as nnx.Embed has, makes later matmuls float32 again",
        saved,
    )


def _matmul_sides(op: Op) -> Sequence[int]:
    """(batch, rows, columns, contracted) of a ``dot_general``; zeros for other ops."""
    if op.primitive.family != "dot" or op.primitive.matmul_dims is None:
        return (0, 0, 0, 0)
    return op.primitive.matmul_dims(op.eqn, *(v.aval.shape for v in op.eqn.invars[:2]))


def _exchanges(plan: Plan) -> list[Hint]:
    """The hints of :func:`exchange_hints`, with the time that their bytes take of all that the plan sends."""
    time, found = time_of(plan), [(h, h.sent - h.exchanged) for h in exchange_hints(plan)]
    rate = time.communication / plan.bytes_sent if time and plan.bytes_sent else 0.0
    return [Hint(f"{format_bytes(less)} less to send: {h.text(plan)}", less * rate) for h, less in found]


def rule_gains(plan: Plan) -> defaultdict[str, float]:
    """The rules that shard a further dim of arguments → the bytes that each saves at the end of the layout."""
    gains: defaultdict[str, float] = defaultdict(float)
    for h in plan.inputs:
        used = {a for _, axes in h.split for a in axes}
        for (dim, axes), size in zip(h.split, h.shape, strict=True):
            for axis, n in plan.sizes.items():
                if dim and dim.isidentifier() and not axes and axis not in used and n > 1 and size % n == 0:
                    gains[f"{dim}: {axis}"] += h.bytes * (1 - 1 / n)
    return gains


def _rule_hint(plan: Plan, without: Sequence[str]) -> Hint | None:
    """The rule that, at the end of the layout, saves most memory of arguments; None: none saves a considerable part.

    A rule for an axis of ``without``, or one that makes a pipeline although another one saves memory, is no such rule.
    """
    gains = {rule: n for rule, n in rule_gains(plan).items() if rule.partition(": ")[2] not in without}
    stacks = {loop.dim for loop in plan.program.traced.cached(layer_loops)}
    rule = max(gains, key=lambda rule: (rule.partition(":")[0] not in stacks, gains[rule]), default="")
    if gains.get(rule, 0.0) < MIN_SAVED_SHARE * memory_of(plan).peak:
        return None
    stages = " (the axis is then one of stages, of a pipeline)" * (rule.partition(":")[0] in stacks)
    text = f"{format_memory(gains[rule])} less of arguments: add a rule `{rule}` at the end of the layout{stages}"
    return Hint(text, bytes=gains[rule])


def _activations_hint(plan: Plan) -> Hint | None:
    """Rematerialization and microbatches, if saved activations are the largest part of the peak; None elsewhere.

    Saved activations of one microbatch of M take 1/M of their bytes. A rematerialized layer saves its inputs alone, whose bytes
    depend on the layer.
    """
    memory = memory_of(plan)
    saved = memory.by_kind.get("saved activations", 0.0)
    if plan.chip is None or not saved or saved < max(memory.by_kind.values()):
        return None
    capacity = plan.chip.per_device().hbm
    head = (
        f"{format_memory(saved)} of the peak of {format_memory(memory.peak)} are saved activations, and "
        f"{with_article(plan.chip.name)} has {format_memory(capacity)}: "
    )
    roles = buffer_roles(plan)
    largest = max(memory.live, key=lambda live: live[1] * (roles(live[0]) == "saved activations"))[0]
    if not _is_stack_of_inputs(largest.value):
        head += (
            "jax.checkpoint (Linen: nn.remat, NNX: nnx.remat) around each layer saves only the inputs of the layer; "
        )
    counts = (2**k for k in range(1, MAX_MICROBATCHES.bit_length()))
    count = next((m for m in counts if memory.peak - saved * (1 - 1 / m) <= capacity), None)
    m = count or MAX_MICROBATCHES
    enough, less = "" if count else ", which is not enough by itself", saved * (1 - 1 / m)
    return Hint(
        f"about {format_memory(less)}: {head}mp.train.accumulate_gradients(…, {m}) stores the activations of one of {m} "
        f"microbatches at a time{enough}",
        bytes=less,
    )


def _is_stack_of_inputs(value: Value) -> bool:
    """Whether a value stacks the input of each iteration of a scan: what rematerialized layers save."""
    if value.op is None or value.op.primitive.family != "scan":
        return False
    (body,) = value.op.frames
    return body.outs()[value.op.outs.index(value)] in body.ins()


@dataclass(frozen=True, slots=True)
class ExchangeHint:
    """Operands of a matmul that are all-gathered because a dim of another kind has their axis, where an all-to-all of another array
    of the matmul would send less.

    Attributes:
      op: the matmul.
      axis: the axis that both dims would have.
      gathered: the dim that is all-gathered over it.
      owner: the dim that the axis shards in the matmul instead.
      array: the operand or result with both dims, which an all-to-all would move from one to the other.
      is_result: it is the result.
      sent: bytes that a device sends in a step for the all-gathers.
      exchanged: bytes that it would send for the all-to-all.
    """

    op: Op
    axis: str
    gathered: str
    owner: str
    array: Value
    is_result: bool
    sent: float
    exchanged: float

    def text(self, plan: Plan) -> str:
        """The edit, with the bytes of both."""
        head = (
            f"{name_of(self.op)} at {self.op.location or '?'} all-gathers `{self.gathered}`, {format_bytes(self.sent)}, since "
            f"`{self.owner}` has `{self.axis}`. "
        )
        edit = f'Rename `{self.owner}` in both of its operands, mp.rename(x, {self.owner}="other")'
        if self.is_result:
            edit = f"Name `{self.owner}` otherwise in both of its operands, and rename the result: "
            edit += f'mp.rename(result, other="{self.owner}")'
        moved = f"an all-to-all of [{format_dims(plan.program.dims(self.array))}]"
        return f"{head}{edit}. Then {moved} sends {format_bytes(self.exchanged)}: docs/moe-einsums.md"


def exchange_hints(plan: Plan) -> list[ExchangeHint]:
    """The hints of a plan, the largest gain first, at most ``MAX_HINTS``.

    A matmul gets one if

    - an operand is all-gathered over an axis along a dim that is also a dim of the result;
    - the axis shards another dim of the matmul, and every array of the matmul with that dim has the gathered dim too: all of them
      may be sharded along the gathered dim instead, as the tokens of a mixture of experts are before their exchange;
    - an all-to-all of the result, if it has both dims, else of another operand with both, sends fewer bytes than the all-gathers.
    """
    gathers = ((c, step, count) for step, count in plan.body.walk() for c in step.sends if c.op == "all-gather")
    found = filter(None, (_exchange_hint(plan, *gather) for gather in gathers))
    hints: dict[tuple[Op, str], ExchangeHint] = {}
    for same in grouped_by(found, lambda h: (h.op, h.axis, h.gathered, h.owner)):
        sent = sum(h.sent for h in same)
        if same[0].exchanged < sent:
            hints[same[0].op, same[0].axis] = replace(same[0], sent=sent)
    by_line = grouped_by(sorted(hints.values(), key=lambda h: h.exchanged - h.sent), lambda h: h.op.location_of_layers)
    return [same[0] for same in by_line][:MAX_HINTS]


def _exchange_hint(plan: Plan, c: Collective, step: Step, count: int) -> ExchangeHint | None:
    """The hint for an all-gather; None: it is not of an operand of a matmul, or the matmul's dims allow no exchange.

    Args:
      step: its step, which runs ``count`` times.
    """
    op = c.origin
    if op is None or op.rule is None or not op.primitive.matmul or len(c.axes) != 1 or len(step.reads) != 1:
        return None
    (axis,), (source,), run = c.axes, step.reads, plan.body.runs.get(op)
    if run is None or source.value not in op.ins:
        return None
    along = [i for i, axes in enumerate(source.spec) if axis in axes and axis not in step.makes[0].spec[i]]
    owners = [factor for factor, axes in enumerate(run.axes or ()) if axis in axes]
    factors = op.rule.ins[op.ins.index(source.value)][along[0]] if len(along) == 1 else ()
    if not factors or len(owners) != 1:
        return None
    gathered, owned = (_dims_of_factor(op, factor) for factor in (factors[0], owners[0]))
    in_result = op.rule.kinds[factors[0]] == "pass_through" and not gathered.keys().isdisjoint(op.outs)
    if not in_result or not owned.keys() <= gathered.keys():
        return None  # an array with the owner's dim cannot be sharded along the gathered dim instead
    moved = [v for v in owned if v in op.outs] or [v for v in owned if v is not source.value]
    sizes = {s.value: value_bytes(s.value, s.spec, plan.sizes) for s in (*run.reads, *run.makes) if s.value in moved}
    name = plan.program.dim_name(source.value, along[0])
    owner = next(plan.program.dim_name(v, dim) for v, dim in owned.items())
    if not sizes or not name or not owner or name == owner:
        return None
    array, group = max(sizes, key=sizes.__getitem__), shard_count((axis,), plan.sizes)
    exchanged = count * sizes[array] * (group - 1) / group
    return ExchangeHint(op, axis, name, owner, array, array in op.outs, c.total_bytes, exchanged)


def _dims_of_factor(op: Op, factor: int) -> dict[Value, int]:
    """The operands and results of an op that have a factor of its rule, each with the dim that is this factor."""
    assert op.rule is not None
    pairs = zip((*op.ins, *op.outs), (*op.rule.ins, *op.rule.outs), strict=True)
    return {v: dim for v, dims in pairs if v is not None for dim, factors in enumerate(dims) if factor in factors}

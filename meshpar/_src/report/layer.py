"""One layer of a plan: the steps of its forward pass, which the script of the page draws as parts of the model with collectives."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product, takewhile

import jax.numpy as jnp

from ..cost.device_computation import computation_of
from ..cost.kernel_time import kernel_times
from ..cost.schedule import schedules
from ..plan.causes import name_of
from ..plan.plan import Plan
from ..plan.steps import Barrier, Body, Constant, Loop, Run, Shard, ShardingChange, Step
from ..program.ir import Op, path_in_model
from .colours import AxisColours
from .facts import kernels_of
from .hints import attention_scores
from .tables import html_picture
from .timeline import timeline_of

LAYER = (
    "One layer in the forward pass, from top to bottom. A box is a part of the model: the time of its kernels, the dims of its "
    "weights as they are stored, and the collectives that gather these. A wire is an array with its dims; dim:axis is sharded."
)
"""The content of the section."""
MAX_STEPS = 400
"""Of a layer that is drawn."""
Layer = tuple[Body, Sequence[Step], dict[Shard, str], Sequence[Shard]]
"""(body, steps, the weights with their paths in the model, inputs)."""


def layer_of(plan: Plan) -> Layer | str:
    """The first loop whose own steps have a matmul; without one, the first module with a number in its path that
    has one activation as its input and one of the same shape as its output. Without one, the reason; "": no matmul."""
    for loop in plan.body.loops:
        if ((body := loop.body).trip_count or 1) > 1 and any(map(_is_matmul, body.with_calls)):
            weights = {s: path_in_model(s.value, loop.op.frames[-1]) for s in body.inputs[len(loop.inits) :]}
            return body, body.with_calls, weights, [s for s in body.inputs if s not in weights]
    weights = {s: path_in_model(s.value, plan.program.root) for s in plan.body.inputs if s.value.kind == "params"}
    steps = [*takewhile(lambda step: not step.op or step.op.derivative_pass != "backward", plan.body.with_calls)]
    numbered = re.compile(r"[^/]*/(?:.*?/)??[^/]*?\d+(?=/|$)")  # up to the first module after the root with a number
    matmuls = {k: numbered.match(step.op.module) for k, step in enumerate(steps) if step.op and _is_matmul(step)}
    layers = dict.fromkeys(m[0] for m in matmuls.values() if m)
    active = {s for s in plan.body.inputs if s not in weights}  # values that depend on more than weights and constants
    for step in steps:
        active.update(() if active.isdisjoint(step.reads) else step.makes)
    last = {s: k for k, step in enumerate(steps) for s in step.reads if s in active}
    floats = {s for s in last if jnp.issubdtype(s.value.aval.dtype, jnp.floating)}
    live = [floats.intersection(plan.body.inputs)]  # before each step
    for k, step in enumerate(steps):
        live.append({s for s in (*live[-1], *floats.intersection(step.makes)) if last[s] > k})
    for layer in layers:
        own = [k for k, m in matmuls.items() if m and m[0] == layer]
        before = max((k for k in matmuls if k < own[0]), default=-1)
        after = min((k for k in matmuls if k > own[-1]), default=len(steps))
        for end, begin in product(range(after, own[-1], -1), range(own[0], before, -1)):
            came, goes = live[begin] - live[end], live[end] - live[begin]
            if len(came) == len(goes) == 1 and {s.value.shape for s in came} == {s.value.shape for s in goes}:
                constant = (s for s in steps[:begin] if active.isdisjoint(s.reads))
                return plan.body, [*constant, *steps[begin:end]], weights, [*came]
    if layers:
        return "no module with a number in its path has one activation as its input and one of the same shape as its output"
    return "the program has no loop over layers, and no modules with numbers in their paths" if matmuls else ""


def _is_matmul(step: Step) -> bool:
    return isinstance(step, Run) and bool(step.op.primitive.matmul_dims)


def _matmul_title(plan: Plan, step: Step) -> str:
    """``embed → mlp``: the dims that a matmul contracts, and those that its second operand adds; of attention what it
    multiplies; "" for another op, or without names."""
    if not isinstance(step, Run) or len(step.op.ins) != 2 or not step.op.primitive.matmul:
        return ""
    made, scores = plan.program.cached(attention_scores)
    if step.op in made or not scores.isdisjoint(step.op.ins):
        return "queries × keys" if step.op in made else "scores × values"
    values = (*step.op.ins, *step.op.outs)
    left, right, out = ([name for name in plan.program.dims(v) if name] if v is not None else [] for v in values)
    contracted, added = [d for d in left if d not in out], [d for d in out if d in right and d not in left]
    return f"{' '.join(contracted)} → {' '.join(added)}" if contracted and added else ""


def _parts_of(weights: Mapping[Shard, str]) -> Callable[[str], str]:
    """Path of a weight → the part of the model that it belongs to: its module or, where a dict has several matrices, as in plain
    JAX, the weight itself."""
    modules = Counter(path.rpartition("/")[0] for s, path in weights.items() if len(s.value.shape) > 1)
    return lambda path: path if modules[path.rpartition("/")[0]] > 1 else path.rpartition("/")[0]


def layer_picture(plan: Plan, colours: AxisColours) -> str:
    """The place in which a layer is drawn, or why none is; "" for a program without matmuls."""
    found = layer_of(plan)
    if not isinstance(found, str) and sum(not isinstance(step, Constant) for step in found[1]) > MAX_STEPS:
        found = f"the first one has more than {MAX_STEPS} steps"
    if isinstance(found, str):
        return found and f'<p class="dim">No layer is drawn: {found}.</p>'
    body, steps, weights, inputs = found
    bodies = {k.step.body: b for k in kernels_of(computation_of(plan)) if isinstance(k.step, Loop) for b in k.bodies}
    part, times, seconds = bodies.get(body, computation_of(plan)), kernel_times(plan), defaultdict[Op, float](float)
    for kernel in part.kernels:
        if kernel.origin is not None and kernel in times:
            seconds[kernel.origin] += times[kernel].seconds
    transfers = schedules(plan)[part].transfers if plan.chip else ()
    spans = [s for s in timeline_of(plan, part).spans if s.axes] if transfers else []
    exposed = {id(t.collective): span.exposed for t, span in zip(transfers, spans, strict=True)}
    numbers: dict[Shard, int] = {}
    part_of, drawn = _parts_of(weights), []
    for step in (step for step in steps if not isinstance(step, Constant)):
        op, every = step.op, (*step.sends, *(c for inner in step.bodies for c in inner.sends))
        reads, makes = ([numbers.setdefault(s, len(numbers)) for s in of] for of in (step.reads, step.makes))
        sends = [
            (c.op, colours.first(c.axes), "+".join(c.axes), c.bytes, c.seconds, exposed.get(id(c)), c.explanation)
            for c in every
        ]
        row = {"reads": reads, "makes": makes, "sends": sends, "moves": isinstance(step, ShardingChange)}
        if op is not None and not isinstance(step, Barrier | ShardingChange):
            read = (path_in_model(v, op.frame) for v in op.ins if v is not None and op.primitive.matmul)
            own = next((path for path in read if path.rpartition("/")[0] == op.module), None)
            row |= {
                "op": op.label,
                "path": op.module if own is None else part_of(own),
                "source": op.source,
                "seconds": seconds.pop(op, 0.0),
            }
            row["title"] = _matmul_title(plan, step) or name_of(op).removeprefix("the ")
        drawn.append({**row, "matmul": _is_matmul(step)})

    def dims(s: Shard) -> list[tuple[str, str, str]]:
        names = (plan.program.dim_name(s.value, i) or "_" for i in range(len(s.spec)))
        return [(name, colours.first(axes), "+".join(axes)) for name, axes in zip(names, s.spec, strict=True)]

    data = {
        "weights": [(numbers[s], part_of(path)) for s, path in weights.items() if s in numbers],
        "inputs": [numbers[s] for s in inputs if s in numbers],
        "dims": [dims(s) for s in numbers],
        "steps": drawn,
    }
    return html_picture("drawLayer", "one layer with its collectives", data)

"""One layer of a plan: the steps of its forward pass, which the script of the page draws as parts of the model with collectives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from ..cost.kernel_time import kernel_times
from ..cost.kernels import computation_of
from ..cost.schedule import schedules
from ..plan.plan import Plan
from ..plan.steps import Barrier, Body, Constant, Loop, Run, Shard, ShardingChange, Step
from ..program.ir import Op
from .colours import AxisColours
from .facts import kernels_of
from .tables import html_picture
from .timeline import timeline_of

LAYER = (
    "One layer in the forward pass, from top to bottom. A box is a part of the model: the time of its kernels, the dims of its "
    "weights as they are stored, and the collectives that gather these. A wire is an array with its dims; dim:axis is sharded."
)
"""The content of the section."""
MAX_STEPS = 400
"""Of a layer that is drawn."""


def layer_of(plan: Plan) -> tuple[Body, Sequence[Step], Sequence[Shard]] | None:
    """(body, steps, weights) of the first loop whose own steps have a matmul; without one, the steps of the program's first layer,
    or all. The weights are the arrays that the loop slices, or the parameters of the program. None: there is no matmul."""
    for loop in plan.body.loops:
        if (loop.body.trip_count or 1) > 1 and any(map(_is_matmul, loop.body.with_calls)):
            return loop.body, loop.body.with_calls, loop.body.inputs[len(loop.inits) :]
    steps, weights = plan.body.with_calls, [s for s in plan.body.inputs if s.value.kind == "params"]
    modules = [step.op.module if step.op else "" for step in steps]
    layers = [m[0] if (m := re.match(r"[^/]*/(?:.*?/)??[^/]*?\d+(?=/|$)", module)) else "" for module in modules]
    matmuls = [layer for layer, step in zip(layers, steps, strict=True) if _is_matmul(step)]
    first = next(filter(None, matmuls), "")
    begin = layers.index(first)
    end = next((k for k, layer in enumerate(layers) if k > begin and layer and layer != first), len(steps))
    own = [
        s for s, name in zip(steps[begin:end], modules[begin:end], strict=True) if name.startswith(first) or not name
    ]
    return (plan.body, own, weights) if matmuls else None


def _is_matmul(step: Step) -> bool:
    return isinstance(step, Run) and bool(step.op.primitive.matmul_dims)


def _matmul_title(plan: Plan, step: Step) -> str:
    """``embed → mlp``: the dims that a matmul contracts, and those that its second operand adds; "" for another op."""
    if not isinstance(step, Run) or len(step.op.ins) != 2 or not step.op.primitive.matmul:
        return ""
    left, right, out = (
        [name or "_" for name in plan.program.dims(v)] if v is not None else [] for v in (*step.op.ins, *step.op.outs)
    )
    contracted, added = [d for d in left if d not in out], [d for d in out if d in right and d not in left]
    return f"{' '.join(contracted)} → {' '.join(added)}" if contracted or added else ""


def layer_picture(plan: Plan, colours: AxisColours) -> str:
    """The place in which a layer is drawn; "" for a program without matmuls, or for a long one without layers."""
    found = layer_of(plan)
    if found is None or len(found[1]) > MAX_STEPS:
        return ""
    body, steps, weights = found
    bodies = {k.step.body: b for k in kernels_of(computation_of(plan)) if isinstance(k.step, Loop) for b in k.bodies}
    part, times, seconds = bodies.get(body, computation_of(plan)), kernel_times(plan), defaultdict[Op, float](float)
    for kernel in part.kernels:
        if kernel.op is not None and kernel in times:
            seconds[kernel.op] += times[kernel].seconds
    transfers = schedules(plan)[part].transfers if plan.chip else ()
    spans = [s for s in timeline_of(plan, part).spans if s.axes] if transfers else []
    exposed = {id(t.collective): span.exposed for t, span in zip(transfers, spans, strict=True)}
    numbers: dict[Shard, int] = {}
    drawn = []
    for step in (step for step in steps if not isinstance(step, Constant)):
        op, every = step.op, (*step.sends, *(c for inner in step.bodies for c in inner.sends))
        reads, makes = ([numbers.setdefault(s, len(numbers)) for s in of] for of in (step.reads, step.makes))
        sends = [
            (c.op, colours.first(c.axes), "+".join(c.axes), c.bytes, c.seconds, exposed.get(id(c)), c.explanation)
            for c in every
        ]
        row = {"reads": reads, "makes": makes, "sends": sends, "moves": isinstance(step, ShardingChange)}
        if op is not None and not isinstance(step, Barrier | ShardingChange):
            row |= {"op": op.label, "path": op.module, "source": op.source, "seconds": seconds.pop(op, 0.0)}
            row["title"] = _matmul_title(plan, step) or op.source.partition(" ")[0].rpartition("/")[2]
        drawn.append({**row, "matmul": _is_matmul(step)})
    inputs = body.inputs if body is not plan.body else [s for step in steps for s in step.reads]

    def dims(s: Shard) -> list[tuple[str, str, str]]:
        names = (plan.program.dim_name(s.value, i) or "_" for i in range(len(s.spec)))
        return [(name, colours.first(axes), "+".join(axes)) for name, axes in zip(names, s.spec, strict=True)]

    data = {
        "weights": [numbers[s] for s in weights if s in numbers],
        "inputs": [numbers[s] for s in dict.fromkeys(inputs) if s in numbers and s not in weights],
        "dims": [dims(s) for s in numbers],
        "steps": drawn,
    }
    return html_picture("drawLayer", "one layer with its collectives", data)

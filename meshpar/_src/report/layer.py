"""One layer as a graph: parts of the model, the sharded arrays between them, and collectives."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cost.kernel_time import kernel_times
from ..cost.kernels import computation_of
from ..cost.schedule import schedules
from ..plan.collectives import Collective
from ..plan.plan import Plan
from ..plan.steps import Barrier, Body, Constant, Loop, Run, Shard, ShardingChange, Step
from ..program.ir import Op
from ..units import format_bytes, format_seconds
from .colours import AxisColours
from .facts import kernels_of
from .tables import html_picture

MAX_NODES = 60
"""Larger graphs are not drawn."""
LAYER = (
    "One layer in the forward pass: boxes are parts of the model with the stored sharding of their weights, wires are arrays with "
    "the axes that shard their dims, and pills are collectives: bytes that a device sends, and seconds. Paler pills overlap with "
    "kernels."
)
"""The content of the section."""


@dataclass(eq=False)
class Node:
    """A part of the model, or a collective between two parts.

    Attributes:
      path: the path of its modules; of a collective its cause.
      ops: of a part.
      sends: the collectives of a node that has no ops, or of the part itself.
      weights: (the stored shard, the collectives before it is used) of each weight of a part.
      sources: (node, array) that it reads.
    """

    path: str
    ops: list[Op] = field(default_factory=list)
    sends: tuple[Collective, ...] = ()
    weights: dict[Shard, tuple[Collective, ...]] = field(default_factory=dict)
    sources: dict[Node, Shard] = field(default_factory=dict)

    def after(self, node: Node) -> bool:
        """Whether it reads a result of another node, also indirectly."""
        return any(source is node or source.after(node) for source in self.sources)


def layer_of(plan: Plan) -> tuple[Body, Sequence[Step], Sequence[Shard]] | None:
    """(body, steps, weights) of the first loop whose own steps have a matmul; without one, the steps of the program's first layer,
    or all. The weights are the arrays that the loop slices, or the parameters of the program."""
    for loop in plan.body.loops:
        if (loop.body.trip_count or 1) > 1 and any(map(_is_matmul, loop.body.with_calls)):
            return loop.body, loop.body.with_calls, loop.body.inputs[len(loop.inits) :]
    steps, weights = plan.body.with_calls, [s for s in plan.body.inputs if s.value.kind == "params"]
    layers = [re.match(r"[^/]*/(?:.*?/)??[^/]*?\d+(?=/|$)", step.op.module if step.op else "") for step in steps]
    first = next((m[0] for m, step in zip(layers, steps, strict=True) if m and _is_matmul(step)), None)
    if first is None:
        return (plan.body, steps, weights) if any(map(_is_matmul, steps)) else None
    chosen = [k for k, m in enumerate(layers) if m and m[0] == first]
    end = next((k for k, m in enumerate(layers) if k > chosen[0] and m and m[0] != first), len(steps))
    return (
        plan.body,
        [step for step in steps[chosen[0] : end] if step.op is None or step.op.module.startswith(first)],
        weights,
    )


def _is_matmul(step: Step) -> bool:
    return isinstance(step, Run) and bool(step.op.primitive.matmul_dims)


def layer_graph(steps: Iterable[Step], inputs: Sequence[Shard], weights: Sequence[Shard]) -> list[Node]:
    """The nodes of some steps in order; the first one is their input, without a path.

    Ops of one module are one node, unless a node between them would read and feed it; without modules each matmul begins a node.
    """
    start = Node("")
    nodes, made = [start], dict[Shard, Node]()
    stored: dict[Shard, tuple[Shard, tuple[Collective, ...]]] = {w: (w, ()) for w in weights}
    fixed = set[Shard]()
    made.update((s, start) for s in inputs if s not in stored)

    def read(node: Node, shards: Iterable[Shard]) -> None:
        for shard in shards:
            if shard in stored:
                weight, sends = stored[shard]
                node.weights[weight] = node.weights.get(weight, ()) or sends
            elif shard in made and made[shard] is not node:
                node.sources.setdefault(made[shard], shard)

    for step in steps:
        pairs = list(zip(step.reads, step.makes, strict=False))
        active = [s for s in step.reads if s in made]
        if isinstance(step, Constant) or (not active and not any(s in stored for s in step.reads)):
            fixed.update(step.makes)
        elif isinstance(step, Barrier) or (isinstance(step, ShardingChange) and not step.sends):
            for before, after in pairs:
                made.update([(after, made[before])] if before in made else [])
                stored.update([(after, stored[before])] if before in stored else [])
        elif not active:  # a weight, or what is computed from it alone
            weight, sends = next(stored[s] for s in step.reads if s in stored)
            stored.update((s, (weight, (*sends, *step.sends))) for s in step.makes)
        elif isinstance(step, ShardingChange):
            nodes.append(Node(step.sends[0].explanation, [], step.sends))
            read(nodes[-1], [step.source])
            made[step.result] = nodes[-1]
        elif step.op is not None:
            path, matmul = step.op.module, _is_matmul(step)
            same = [n for n in nodes if n.ops and n.path == (path or n.path)]
            sources = {made[s] for s in active}
            node = same[-1] if same else None
            new = node is None or any(s is not node and s.after(node) for s in sources)
            if new or (not path and (matmul or node not in sources)):
                node = Node(path)
                nodes.append(node)
            assert node is not None
            node.ops.append(step.op)
            node.sends += step.sends
            read(node, step.reads)
            made.update((s, node) for s in step.makes)
    return nodes


def layer_html(plan: Plan, colours: AxisColours) -> str:
    """The data of the drawing of a layer; "" for a program without matmuls, or one whose graph is too large."""
    found = layer_of(plan)
    if found is None:
        return ""
    body, steps, weights = found
    inputs = (
        [s for s in body.inputs if s not in weights]
        if steps == body.with_calls
        else [s for x in steps for s in x.reads]
    )
    nodes = [n for n in layer_graph(steps, inputs, weights) if n.sources or not (n.ops or n.sends)]
    if not 2 < len(nodes) <= MAX_NODES:
        return ""
    part = next(
        (b for k in kernels_of(computation_of(plan)) for b in k.bodies if _loop_body(k.step) is body),
        computation_of(plan),
    )
    times, seconds, hidden = kernel_times(plan), dict[Op, float](), set[int]()
    for kernel in part.kernels:
        if kernel.op is not None and kernel in times:
            seconds[kernel.op] = seconds.get(kernel.op, 0.0) + times[kernel].seconds
    if plan.chip is not None:
        hidden = {id(t.collective) for t in schedules(plan)[part].transfers if t.is_async}
    paths = [n.path for n in nodes if n.ops and n.path]
    prefix = os.path.commonpath(paths) if paths else ""

    def dims(shard: Shard) -> list[Any]:
        names = (plan.program.dim_name(shard.value, i) or "_" for i in range(len(shard.spec)))
        return [[name, colours.first(axes), "+".join(axes)] for name, axes in zip(names, shard.spec, strict=True)]

    def gates(sends: Iterable[Collective]) -> list[dict[str, Any]]:
        return [
            {
                "text": c.op, "colour": colours.first(c.axes), "axes": "+".join(c.axes), "hidden": id(c) in hidden,
                "bytes": c.bytes,
                "cost": format_bytes(c.bytes) + (f", {format_seconds(c.seconds)}" if c.seconds else ""), "why": c.explanation,
            }
            for c in sends
        ]  # fmt: skip

    def shown(node: Node) -> dict[str, Any]:
        matmuls = [op for op in node.ops if op.primitive.matmul_dims or op.primitive.family == "kernel"]
        others = [op for op in node.ops if op.name not in ("name", "convert_element_type")]
        what = next((op.label for op in (*matmuls, *others, *node.ops)), "")
        name = node.path.removeprefix(prefix).rpartition("/")[2] if node.ops else ""
        took = sum(seconds.get(op, 0.0) for op in node.ops)
        return {
            "name": name or what, "about": "\n".join(filter(None, (node.path, node.ops[0].source if node.ops else ""))),
            "detail": what if name and matmuls else "", "time": format_seconds(took) if took else "", "gates": gates(node.sends),
            "weights": [{"dims": dims(w), "gates": gates(sends)} for w, sends in node.weights.items()],
            "sources": [[nodes.index(n), dims(s)] for n, s in node.sources.items() if n in nodes],
        }  # fmt: skip

    label = f"one layer: {', '.join(n['name'] for n in map(shown, nodes) if n['name'])}"
    return f'<div class="layer">{html_picture("drawLayer", label, [shown(n) for n in nodes])}</div>'


def _loop_body(step: Step | None) -> Body | None:
    return step.body if isinstance(step, Loop) else None

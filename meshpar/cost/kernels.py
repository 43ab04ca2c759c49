"""A walk over a plan's frames in step with the planner's, which lists what one device does: ops, moves, loops with their bodies.

Calls are in place; a loop body is a region of its own. :mod:`meshpar.cost.fusion` then joins the ops to kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..compat.jax import scan_counts
from ..layout import Spec
from ..passes.pairs import BLOCKS
from ..plan.collectives import local_bytes
from ..plan.resharding import relayout
from ..program.ir import Frame, Op, Value
from .fusion import FUSED, VIEWS, Item, Node, Region, fuse, itemsize
from .tiles import Tiles

if TYPE_CHECKING:
    from ..plan.plan import Plan


def kernels_of(plan: Plan) -> Region:
    """The kernels of a plan: the region of the whole program, its loops inside."""
    return _Walk(plan).run()


class _Walk:
    def __init__(self, plan: Plan):
        self.plan, self.sizes, self.tiles = plan, plan.sizes, Tiles(plan)
        self.items: dict[int, Item] = {}
        self.copies: dict[tuple[int, int, Spec], Item] = {}
        self.region = Region(1)
        self.position = 0
        self.hoisted: dict[tuple[int, Spec], Item] = {}  # what a body finds in another spec: moved before the loop

    def run(self) -> Region:
        plan, region = self.plan, self.region
        for value in plan.program.inputs:
            region.inputs.append(self.enter(value, plan.specs[id(value)]))
        self.frame(plan.program.root)
        for value, spec in zip(plan.program.outputs, plan.out_specs, strict=True):
            item = self.item(value)
            if item is None:  # made from no data, but it must be there in the end
                item = self.out(self.node("copy!", value.op, []), value, spec)
            else:
                item = self.moved(item, value, plan.specs[id(value)], spec, None)
            self.node("leave!", value.op, [item])
            region.outputs.append(item)
        fuse(region)
        return region

    # -- items and nodes

    def bytes(self, value: Value, spec: Spec) -> float:
        return local_bytes(value.shape, itemsize(value.aval), spec, self.sizes) * self.tiles.padding(value, spec)

    def enter(self, value: Value, spec: Spec) -> Item:
        item = self.items[id(value)] = Item(self.bytes(value, spec), value, None)
        return item

    def item(self, value: Value | None) -> Item | None:
        """The shard of a value where it lies; None for literals and what is made from no data."""
        if value is None or id(value) in self.plan.generated:
            return None
        return self.items.get(id(value))

    def node(self, name: str, op: Op | None, ins: Sequence[Item | None]) -> Node:
        node = Node(name, op, [i for i in ins if i is not None], self.position)
        self.region.nodes.append(node)
        return node

    def out(self, node: Node, value: Value, spec: Spec) -> Item:
        item = Item(self.bytes(value, spec), value, node)
        item.held *= min(1.0, BLOCKS / self.plan.rings.parts.get(id(value), BLOCKS)) if node.name != "move!" else 1.0
        node.outs.append(item)
        if node.name in FUSED:
            found = {id(b): b for i in node.ins if i.bytes * 8 > item.bytes for b in i.bases}
            node.joins = node.joins or len(found) > 1
            item.bases = tuple(found.values()) if len(found) <= 1 else (item,)
        return item

    def moved(self, item: Item, value: Value, have: Spec, need: Spec, op: Op | None, settles: bool = False) -> Item:
        """A shard in another spec: sent for, or cut out of what is here."""
        if have == need and not settles:
            return item
        sent = settles or any(s.op != "slice" for s in relayout(have, need, value.shape, self.sizes))
        node = self.node("move!" if sent else "slice", op, [item])
        out = self.out(node, value, need)
        return out

    def operand(self, op: Op, value: Value | None, need: Spec | None) -> Item | None:
        item = self.item(value)
        if item is None or need is None or value is None:
            return item
        have = self.plan.specs[id(value)]
        if have == need:
            return item
        if (id(value), need) in self.hoisted:
            return self.hoisted[id(value), need]
        key = (id(op.frame), id(value), need)
        if key not in self.copies:
            made = self.copies[key] = self.moved(item, value, have, need, op)
            ring = self.plan.rings.gathers.get(id(op))
            if ring is not None and ring.value is value and not ring.keep:
                made.held = 0.0  # its blocks are gone when they are multiplied: memory.py counts those in flight
        return self.copies[key]

    def finish(self, op: Op, out: Value, item: Item, natural: Spec) -> None:
        """Settle a partial result, or bring it to where it rests."""
        settled = id(out) in self.plan.settled
        self.items[id(out)] = self.moved(item, out, natural, self.plan.specs[id(out)], op, settled)

    # -- ops

    def frame(self, frame: Frame) -> None:
        for op in self.plan.order.ops(frame):
            self.position += 1
            if op.name in ("scan", "while", "cond"):
                self.loop(op)
            elif op.frames:
                for inner in op.frames:
                    self.frame(inner)
            elif op.outs and all(id(v) in self.plan.generated for v in op.outs):
                pass
            elif op.name == "optimization_barrier":
                for value, out in zip(op.ins, op.outs, strict=True):
                    item = self.item(value)
                    if item is not None:
                        self.items[id(out)] = item
            else:
                self.plain(op)

    def plain(self, op: Op) -> None:
        planned = self.plan.passed.get(id(op.outs[0])) if op.outs else None
        planned = planned or self.plan.ops.get(id(op))
        if planned is None:
            needs: list[Spec | None] = [None] * len(op.ins)
            naturals = [self.plan.specs.get(id(v), ((),) * len(v.shape)) for v in op.outs]
        else:
            needs = list(planned.ins) if len(planned.ins) == len(op.ins) else [None] * len(op.ins)
            naturals = planned.outs
        ins = [self.operand(op, v, need) for v, need in zip(op.ins, needs, strict=True)]
        some = [i for i in ins if i is not None]
        if op.name in FUSED and all(math.prod(i.value.shape) == 1 for i in some) and _grows(op):
            return  # spread from scalars: as good as made from no data
        if op.name in VIEWS and len(some) <= 1 and len(op.outs) == 1:
            if some:
                view, out, natural = some[0], op.outs[0], naturals[0]
                if view.bytes != self.bytes(out, natural):
                    view = self.out(self.node("slice", op, some), out, natural)
                self.finish(op, out, view, natural)
            return
        node = self.node("one_hot!" if self.one_hot(op) else op.name, op, ins)
        for out, natural in zip(op.outs, naturals, strict=True):
            self.finish(op, out, self.out(node, out, natural), natural)

    def one_hot(self, op: Op) -> bool:
        """Whether a scatter only puts one element into each row of zeros: a comparison with the index, in effect."""
        if op.name not in ("scatter-add", "scatter_add", "scatter") or self.item(op.ins[0]) is not None:
            return False
        dn = op.eqn.params["dimension_numbers"]
        rank = len(op.outs[0].shape)
        written = set(dn.inserted_window_dims) | set(dn.operand_batching_dims)
        sizes = [n for i, n in enumerate(op.outs[0].shape) if i not in written]
        return len(dn.scatter_dims_to_operand_dims) == 1 and rank > 1 and math.prod(sizes) == 1

    # -- loops and branches

    def loop(self, op: Op) -> None:
        """A loop or branch: its operands in memory, a region for each body, its results."""
        p, name = op.eqn.params, op.name
        consts = carries = 0
        if name == "scan":
            consts, carries = scan_counts(p)
        firsts: list[int] = []  # for each body, where its operands start
        if name == "while":
            consts, carries = p["cond_nconsts"] + p["body_nconsts"], len(op.outs)
            firsts = [0, p["cond_nconsts"]]
        inner = [f.ins() for f in op.frames]
        specs = self.plan.specs
        ins: list[Item | None] = []
        carried = inner[-1][len(inner[-1]) - carries :] if name == "while" else inner[0][consts : consts + carries]
        for i, v in enumerate(op.ins):
            if name != "cond" and consts <= i < consts + carries:
                w = carried[i - consts]
                ins.append(self.operand(op, v, specs[id(w)]) if v is not None else None)
            else:
                ins.append(self.item(v))
        moved = []
        for w, v in zip(inner[0], op.ins, strict=False):
            for spec in self.plan.hoisted.get(id(w), ()):
                item = self.operand(op, v, spec)
                if item is not None:
                    self.hoisted[id(w), spec] = item
                    moved.append(item)
        node = self.node(name, op, [*ins, *moved])
        outer = self.region
        for k, frame in enumerate(op.frames):
            region = self.region = Region(frame.trips)
            for j, w in enumerate(inner[k]):
                if name == "cond":
                    source, role = j + 1, "const"
                elif name == "while":
                    own = len(inner[k]) - carries
                    source, role = (firsts[k] + j, "const") if j < own else (consts + j - own, "carry")
                else:
                    source, role = j, "const" if j < consts else "carry" if j < consts + carries else "slice"
                self.inside(op, w, ins[source], role)
            self.frame(frame)
            last_carry = carries if name != "while" or k == 1 else 0
            for j, var in enumerate(frame.jaxpr.outvars):
                if hasattr(var, "val"):
                    continue
                item = self.item(frame.env[var])
                if item is None:
                    continue
                if j < last_carry:
                    need = specs[id(inner[k][len(inner[k]) - carries + j if name == "while" else consts + j])]
                    self.node("leave!", op, [self.operand_at(op, frame.env[var], item, need)])
                else:
                    self.node("stack!" if name == "scan" else "leave!", op, [item])
            fuse(region)
            node.regions.append(region)
        self.region = outer
        for k, out in enumerate(op.outs):
            natural = self.natural(op, k, carries)
            made = self.out(node, out, natural)
            if k < carries:
                node.carries.append((ins[consts + k], made))
            self.finish(op, out, made, natural)

    def operand_at(self, op: Op, value: Value, item: Item, need: Spec) -> Item:
        return self.moved(item, value, self.plan.specs[id(value)], need, op)

    def natural(self, op: Op, k: int, carries: int) -> Spec:
        """The spec in which a loop leaves a result."""
        rest = self.plan.specs[id(op.outs[k])]
        if op.name != "scan" or (k < carries and id(op.outs[k]) not in self.plan.waiting):
            return rest
        frame = op.frames[0]
        var = frame.jaxpr.outvars[k]
        inner = None if hasattr(var, "val") else self.plan.specs.get(id(frame.env[var]))
        return rest if inner is None else inner if k < carries else ((), *inner)

    def inside(self, op: Op, inner: Value, item: Item | None, role: str) -> None:
        """What a body reads: the array outside, its own copy of a carry, or a slice of what the loop runs over."""
        spec = self.plan.specs.get(id(inner), ((),) * len(inner.shape))
        if role == "carry":
            mine = self.enter(inner, spec)
            mine.carried = True
            self.region.inputs.append(mine)
        elif item is None:
            return
        elif role == "const":
            self.items[id(inner)] = item
        else:
            node = self.node("slice", op, [item])
            self.items[id(inner)] = self.out(node, inner, spec)


def _grows(op: Op) -> bool:
    return all(math.prod(out.shape) > 1 for out in op.outs)

"""The computation of one device, from the steps of a plan: its ops, collectives and loops, fused into kernels.

Calls are inlined; the body of a loop is a computation of its own. :mod:`cost.fusion` fuses the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..layout import Spec
from ..plan.plan import Plan
from ..plan.shard_shapes import local_shape, value_bytes
from ..plan.steps import Barrier, Body, Branch, Call, Loop, Reduce, Reshard, Run, Shard, Step
from ..program.ir import Op, Program, Value
from ..rules.random import drawn_by_index
from .caching import cached_on_plan, key_on_plan
from .fusion import MAX_RECOMPUTED_OPS, Buffer, Computation, Kernel, Kind, fuse
from .tiles import LANES, SUBLANES, Tiles

MAX_SOFTMAX_ROW = 2048
"""Elements of a row up to which one kernel computes their maximum and what depends on it. The TPU compiler (libtpu 0.0.42) does so
for 197 and 2,048 scores, and not for 32,000 logits."""
REDUCE_RING_BUFFERS = 4
"""Chunks of a reduction ring that are live at once: two are sent while the next two are computed."""


@cached_on_plan
def computation_of(plan: Plan) -> Computation:
    """The computation of a plan's program, with the bodies of its loops inside, fused."""
    return _Reader(plan).run()


def free_caches(plan: Plan) -> None:
    """Clear the cached results of a plan that is no longer used, so that reference counting frees them.

    Kernels and buffers refer to each other. Left to the garbage collector, the ones of the many plans of a search would make it
    traverse all objects of the program repeatedly.
    """
    cache, key = vars(plan), key_on_plan(computation_of)
    todo = [cache[key]] if key in cache else []
    while todo:
        for node in todo.pop().nodes:
            todo += node.bodies
            node.ins, node.outs, node.reads, node.writes, node.carries = [], [], (), (), ()
    cache.clear()


def _is_softmax(node: Kernel) -> bool:
    """Whether it casts an array that was divided by a value for each of its rows: the result of a softmax of scores."""
    divided = node.ins[0].made_by if node.traits.family == "cast" and node.ins else None
    return (
        divided is not None
        and divided.traits.family == "div"
        and len(divided.ins) == 2
        and divided.ins[1].bytes * 8 <= divided.outs[0].bytes
    )


def _fused_maximum(node: Kernel) -> Kernel | None:
    """The maximum of each row that an op subtracts from scores, where one kernel computes both; None elsewhere."""
    if node.op is None or node.op.name != "sub" or len(node.ins) < 2:
        return None
    maximum = node.ins[1].made_by
    while maximum is not None and maximum.traits.fusible and maximum.ins:
        maximum = maximum.ins[0].made_by
    if maximum is None or maximum.op is None or maximum.op.name != "reduce_max" or maximum.ins != node.ins[:1]:
        return None
    return maximum if _row(node, maximum) <= MAX_SOFTMAX_ROW else None


def _row(node: Kernel, maximum: Kernel) -> int:
    """The number of elements in a row of scores."""
    return node.outs[0].value.elements // maximum.outs[0].value.elements


def _fuse_maximum(node: Kernel, maximum: Kernel) -> None:
    """Have the kernel that subtracts the maxima from scores compute these maxima."""
    node.is_softmax, maximum.traits = True, node.traits
    scores = node.ins[0]
    while scores.made_by is not None and scores.made_by.traits.fusible and scores.made_by.ins:
        scores = max(scores.made_by.ins, key=lambda i: i.bytes)
    scores.must_store |= _row(node, maximum) % LANES != 0  # the matmul of padded rows is a kernel of its own


def _byte_table(program: Program, *key: Any) -> dict[tuple[Value, Spec], tuple[float, float]]:
    """An empty table for a mesh, with or without padding: (value, spec) → (bytes of its shard on a device, part that is padding).

    It shortens a replan of Llama 3 8B by a third: two layouts share most of the shards of a program.
    """
    return {}


class _Reader:
    """Builds the computation of a plan, step by step, and then fuses its ops.

    Attributes:
      tiles: the padding of its arrays; None: the chip stores them unpadded.
      tables: lookup tables are copied (:meth:`transposed`) after an all-gather of their columns, and their gradients before a
        reduce-scatter: the TPU compiler (libtpu 0.0.42) makes the dim that is gathered or scattered the outermost in memory.
        Matmuls read any layout; a lookup reads rows. Where collectives run on cores of their own (tpu7x), these order rows.
      items: shard → its buffer; copies: computation and buffer → its copy.
      bases: buffer → the one large array that it depends on, if it is another one; None: it depends on none.
      chains: buffer → the smallest number of fusible ops, one after the other, that compute it from an array in memory.
      region: the computation to which ops are added.
      position: the index of the current step.
      parts: :func:`ring_block_counts`.
    """

    def __init__(self, plan: Plan):
        """A reader of ``plan`` before its first step, with an empty computation."""
        self.plan, self.sizes = plan, plan.sizes
        self.tiles = None if plan.chip is None or plan.chip.switch else plan.program.cached(Tiles)
        self.tables = self.tiles is not None and bool(plan.compiler.sync_collectives)
        self.items: dict[Shard, Buffer] = {}
        self.copies: dict[tuple[Computation, Buffer], Buffer] = {}
        self.bases: dict[Buffer, Buffer | None] = {}
        self.chains: dict[Buffer, int] = {}
        self.region = Computation(1)
        self.position = 0
        self._bytes = plan.program.cached(_byte_table, tuple(self.sizes.items()), self.tiles is None)
        self.parts = ring_block_counts(plan)

    def run(self) -> Computation:
        """The fused computation of the program."""
        body, region = self.plan.body, self.region
        constants = len(body.inputs) - len(self.plan.program.inputs)
        region.constants += map(self.new, body.inputs[:constants])
        region.inputs += map(self.new, body.inputs[constants:])
        self.steps(body)
        for shard in body.outputs:
            assert shard is not None
            item = self.items.get(shard)
            if item is None:  # a constant that the program returns
                item = self.out(self.node(Kind.COPY, None, shard.value.op, []), shard)
            self.node(Kind.LEAVE, None, shard.value.op, [item])
            region.outputs.append(item)
        fuse(region, self.plan.compiler.row_ratio)
        return region

    # -- buffers and kernels

    def new(self, shard: Shard, node: Kernel | None = None) -> Buffer:
        """A new buffer for a shard that ``node`` computes; None: an input of the computation."""
        value = shard.value
        size, padding = self.bytes(value, shard.spec)
        item = self.items[shard] = Buffer(0.0 if value.on_host else size, value, node)
        if value.on_host:
            item.host_bytes = size
        else:
            item.padding = padding
        return item

    def bytes(self, value: Value, spec: Spec) -> tuple[float, float]:
        """(bytes of a value's shard on a device, with the padding of its array; the part of them that is padding)."""
        key = value, spec
        known = self._bytes.get(key)
        if known is None:
            factor = 1.0 if self.tiles is None else self.tiles.padding(value, spec, self.sizes)
            known = self._bytes[key] = value_bytes(value, spec, self.sizes) * factor, 1.0 - 1.0 / factor
        return known

    def item(self, shard: Shard | None) -> Buffer | None:
        """The buffer of a shard; None for literals and input-independent shards."""
        return None if shard is None else self.items.get(shard)

    def node(self, kind: Kind, step: Step | None, op: Op | None, ins: Sequence[Buffer | None]) -> Kernel:
        """A new kernel of the current computation, without results; operands that are None are constants."""
        node = Kernel(kind, step, op, [i for i in ins if i is not None], self.position)
        if node.traits.slice:
            for item in node.ins:
                item.sliced = True
        self.region.nodes.append(node)
        return node

    def out(self, node: Kernel, shard: Shard) -> Buffer:
        """A new buffer for a result of a kernel."""
        item = self.new(shard, node)
        if self.parts and node.kind is not Kind.MOVE and shard in self.parts:
            item.live_bytes *= min(1.0, REDUCE_RING_BUFFERS / self.parts[shard])
        node.outs.append(item)
        if node.traits.fusible:
            size, base, bases = item.bytes, None, self.bases
            # operands of less than an eighth of the result are rows or scalars, which every reader can read
            for i in node.ins:
                if i.bytes * 8 > size and (other := bases.get(i, i)) is not base:
                    if other is not None and base is not None:
                        node.from_several = True
                        break
                    base = base or other
            else:
                bases[item] = base
            large = [i for i in node.ins if i.bytes * 8 > size and bases.get(i, i) is not None]
            chain = 0 if node.from_several else 1 + min([self.chains.get(i, 0) for i in large], default=0)
            stored = self.plan.compiler.stores_softmax and _is_softmax(node)
            fuses = self.plan.compiler.fused_softmax_fraction is not None
            if fuses and (maximum := _fused_maximum(node)) is not None:
                _fuse_maximum(node, maximum)
            node.ends_chain = chain >= MAX_RECOMPUTED_OPS or stored or node.is_softmax
            self.chains[item] = 0 if node.ends_chain else chain
        return item

    # -- steps

    def steps(self, body: Body) -> None:
        """Add the steps of a body to the current computation."""
        for step in body.steps:
            self.position += 1
            read = _READ.get(type(step))
            if read is not None:
                read(self, step)

    def reshard(self, step: Reshard) -> None:
        """Add a resharding: a ``MOVE`` if it sends anything, else a slice."""
        item = self.item(step.source)
        if item is None:
            return
        sent = any(m.op != "slice" for m in step.path)
        out = self.out(self.node(Kind.MOVE if sent else Kind.SLICE, step, step.op, [item]), step.result)
        if step.ring is not None and not step.ring.keep_gathered:
            out.live_bytes = 0.0  # its chunks are freed after their matmuls; memory.py counts those in flight

    def reduce(self, step: Reduce) -> None:
        """Add a reduction, as a ``MOVE``."""
        item = self.item(step.source)
        if item is not None:
            if (
                self.tables
                and (rows := _rows_scattered(item.made_by))
                and any(s.dim not in rows for s in step.scatters)
            ):
                item = self.transposed(item)
            self.out(self.node(Kind.MOVE, step, step.source.value.op, [item]), step.result)

    def transposed(self, item: Buffer) -> Buffer:
        """The copy of a buffer in another layout."""
        key = self.region, item
        if key not in self.copies:
            node = self.node(Kind.TRANSPOSE, None, item.value.op, [item])
            node.outs.append(copy := Buffer(item.bytes, item.value, node, padding=item.padding))
            self.copies[key] = copy
        return self.copies[key]

    def barrier(self, step: Barrier) -> None:
        """Let the results of a barrier be the buffers of its operands, in memory; an opaque barrier copies them."""
        for after in filter(None, map(self.item, step.after)):
            after.awaited = True
        for source, result in zip(step.sources, step.results, strict=True):
            item = self.item(source)
            if item is not None and step.opaque:  # through integers: a copy
                self.out(self.node(Kind.COPY, step, result.value.op, [item]), result)
            elif item is not None:
                item.must_store |= not step.after  # it is in memory, whatever reads it
                self.items[result] = item

    def call(self, step: Call) -> None:
        """Add the steps of a call."""
        self.steps(step.body)

    def op(self, step: Run) -> None:
        """Add an op: a kernel, a view of its operand, or nothing if its results are constants."""
        op, operands, results = step.op, step.operands, step.results
        if results and results[0].is_constant:
            return
        kind, items = Kind.OP, self.items
        if op.primitive.family == "barrier":
            for shard, out in zip(operands, results, strict=True):
                item = self.item(shard)
                if item is not None:
                    items[out] = item
            return
        some = [item for s in operands if s is not None and (item := items.get(s)) is not None]
        scalars = op.primitive.fusible and all(item.value.elements == 1 for item in some)
        if scalars and all(out.elements > 1 for out in op.outs):
            return  # a broadcast scalar costs as little as a constant
        if op.primitive.view and self.placed(step, some):
            return
        if op.primitive.family == "scatter" and self.one_hot(step):
            kind = Kind.ONE_HOT
        elif op.primitive.family == "random" and drawn_by_index(op.eqn):
            kind = Kind.RANDOM_BITS
        elif op.primitive.family == "gather" and self.one_window(step):
            kind = Kind.SLICE
        elif op.primitive.family == "gather" and self.tables and some and not _gathers_rows(some[0].made_by, op):
            some[0] = self.transposed(some[0])
        node = self.node(kind, step, op, some)
        for out in results:
            self.out(node, out)

    def placed(self, step: Run, some: list[Buffer]) -> bool:
        """Add a view, or a copy to or from host memory; False if the op is neither, and needs a kernel that computes."""
        op = step.op
        if op.primitive.family == "transfer" and some and some[0].value.on_host != step.results[0].on_host:
            node = self.node(Kind.TRANSFER, step, op, some)
            for out in step.results:
                self.out(node, out)
            return True
        if len(some) <= 1 and len(step.results) == 1:
            if some:
                (view,), (out,) = some, step.results
                if self.tiles is not None and (self.tiles.moves(view.value, out.value) or self.is_image_argument(view)):
                    view.must_store = view.must_store or len(view.value.shape) > len(out.value.shape)
                    self.out(self.node(Kind.TRANSPOSE, step, op, some), out)
                elif (view.bytes or view.host_bytes) != self.bytes(out.value, out.spec)[0]:
                    self.out(self.node(Kind.SLICE, step, op, some), out)
                else:
                    view.transposed |= op.primitive.family == "transpose"
                    self.items[out] = view
            return True
        return False

    def is_image_argument(self, item: Buffer) -> bool:
        """Whether a buffer is an argument, or a copy of one, with fewer channels innermost than a tile has rows.

        The TPU compiler (libtpu 0.0.42) stores such images with the images of the batch innermost, and copies them for each reshape
        and transposition: three times for the patches of a ViT.
        """
        first = item.made_by is None or (
            item.made_by.kind is Kind.TRANSPOSE and self.is_image_argument(item.made_by.ins[0])
        )
        return first and len(item.value.shape) > 3 and item.value.shape[-1] < SUBLANES

    def one_hot(self, step: Run) -> bool:
        """Whether a scatter writes one element into each row of zeros: a one-hot encoding, which is elementwise."""
        op = step.op
        if self.item(step.operands[0]) is not None:
            return False
        dn = op.eqn.params["dimension_numbers"]
        rank = len(op.outs[0].shape)
        written = set(dn.inserted_window_dims) | set(dn.operand_batching_dims)
        sizes = [n for i, n in enumerate(op.outs[0].shape) if i not in written]
        return len(dn.scatter_dims_to_operand_dims) == 1 and rank > 1 and math.prod(sizes) == 1

    def one_window(self, step: Run) -> bool:
        """Whether a gather reads one window on each device: a slice at a run-time index, as a layer of a local stage."""
        indices = step.operands[1]
        return indices is not None and math.prod(local_shape(indices.value.shape, indices.spec, self.sizes)[:-1]) == 1

    def branch(self, step: Branch) -> None:
        """Add a conditional: a kernel with its operands and results, and a computation for each branch."""
        reads = [step.index, *step.operands]
        node = self.node(Kind.OP, step, step.op, [self.item(s) for s in reads])
        for body in step.branches:
            self.inside(node, body, Kind.LEAVE)
        for out in step.results:
            self.out(node, out)

    def loop(self, step: Loop) -> None:
        """Add a loop: a kernel with its operands and results, and a computation for each body."""
        scan = step.op.primitive.family == "scan"
        carries = len(step.inits)
        firsts = [self.item(s) for s in step.inits]
        stacks = [self.item(s) for s in step.stacks]
        consts, hoisted = ([self.item(s) for s in shards] for shards in (step.consts, step.hoisted))
        node = self.node(Kind.OP, step, step.op, [*consts, *firsts, *stacks, *hoisted])
        for body in step.bodies:
            self.inside(node, body, Kind.STACK if scan else Kind.LEAVE, stacks, carries if body is step.body else 0)
        for k, out in enumerate(step.results):
            made = self.out(node, out)
            if k < carries:
                node.carries = (*node.carries, (firsts[k], made))

    def store_slices(self) -> None:
        """Store the slices of a loop's stacks that matmuls of its body read, as they are or cast.

        XLA for GPUs (jaxlib 0.10.2, h200) copies the weights and the cache of a layer out of their stacks in every iteration: in a
        step of decoding, and in the forward and the backward loop of a train step of Llama. Without a loop most matmuls read slices
        of the stacks.
        """
        for item in (item for node in self.region.nodes if node.traits.matmul for item in node.ins):
            made = item.made_by
            while made is not None and made.traits.family == "cast":
                item = made.ins[0]
                made = item.made_by
            if made is not None and made.kind is Kind.SLICE and made.step is None:
                made.from_several = item.must_store = True

    def inside(
        self, node: Kernel, body: Body, leaves: Kind, stacks: Sequence[Buffer | None] = (), carries: int = 0
    ) -> None:
        """Add the computation of a body to a kernel; results from index ``carries`` on end in a kernel of kind ``leaves``.

        The inputs of a loop's body are its carries, then a slice of each of ``stacks``.
        """
        outer, self.region = self.region, Computation(body.trip_count)
        count = len(body.inputs) - len(stacks)
        for shard in body.inputs[:count]:
            mine = self.new(shard)
            mine.carried = True
            self.region.inputs.append(mine)
        for shard, item in zip(body.inputs[count:], stacks, strict=True):
            if item is not None:
                self.out(self.node(Kind.SLICE, None, node.op, [item]), shard).host_bytes = 0.0
        self.steps(body)
        for k, shard in enumerate(body.outputs):
            item = self.item(shard)
            if item is not None:
                self.node(Kind.LEAVE if k < carries else leaves, None, node.op, [item])
                if k >= carries and leaves is Kind.STACK:
                    item.host_bytes = 0.0  # it is copied into the stack on the host
        chip, op = self.plan.chip, node.op
        if leaves is Kind.STACK and chip is not None and chip.switch and op is not None and not _is_unrolled(op):
            self.store_slices()
        fuse(self.region, self.plan.compiler.row_ratio)
        node.bodies = (*node.bodies, self.region)
        self.region = outer


def _is_unrolled(loop: Op) -> bool:
    """Whether a scan is lowered without a loop."""
    return loop.eqn.params["unroll"] >= loop.eqn.params["length"]


def _gathers_rows(node: Kernel | None, lookup: Op) -> bool:
    """Whether a kernel all-gathers no dim of a table but those that a lookup indexes, or dims after dims of size 1 (row-major)."""
    if node is None or node.kind is not Kind.MOVE or not isinstance(node.step, Reshard):
        return True
    rows, shape = lookup.eqn.params["dimension_numbers"].start_index_map, node.step.result.value.shape
    dims = {dim for move in node.step.path if move.op == "all-gather" for dim in move.dims}
    return all(dim in rows or math.prod(shape[:dim]) == 1 for dim in dims)


def _rows_scattered(node: Kernel | None) -> tuple[int, ...]:
    """The dims that the indices of a scatter index, also if a kernel adds its result to another gradient; () for other kernels."""
    if node is None:
        return ()
    makers = [node, *(i.made_by for i in node.ins if node.traits.fusible)]
    ops = [n.op for n in makers if n is not None and n.op is not None and n.traits.family == "scatter"]
    return tuple(ops[0].eqn.params["dimension_numbers"].scatter_dims_to_operand_dims) if ops else ()


_READ: dict[type[Step], Callable[[_Reader, Step], None]] = {
    Reshard: _Reader.reshard, Reduce: _Reader.reduce, Barrier: _Reader.barrier, Call: _Reader.call,
    Run: _Reader.op, Branch: _Reader.branch, Loop: _Reader.loop,
}  # type: ignore[dict-item]  # fmt: skip


def ring_block_counts(plan: Plan) -> dict[Shard, int]:
    """Number of chunks, one for each ring step, in which a ring computes a shard.

    The keys are the partial shards that a matmul and a ring reduce-scatter compute chunk by chunk, and the shards from which such a
    shard is added up.
    """
    counts: dict[Shard, int] = {}
    maker = {s: step for step in plan.body.all_steps if isinstance(step, Run) for s in step.results}
    for step in plan.body.all_steps:
        todo = [step.source] if isinstance(step, Reduce) and step.ring is not None else []
        leaves = {s for s, _ in step.ring.leaves} if isinstance(step, Reduce) and step.ring is not None else set()
        while todo:
            shard = todo.pop()
            counts[shard] = step.ring.num_blocks  # type: ignore[union-attr]
            if shard not in leaves and shard in maker:
                todo += maker[shard].reads
    return counts

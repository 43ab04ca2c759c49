"""What of a planned program reaches a device's memory: the kernels into which a compiler fuses it, and what each reads and writes.

:mod:`meshpar.cost.kernels` lists the ops; the rule by which they are joined:

- reshapes, transposes and names are views of their operand; what is made from no data is free;
- elementwise ops, broadcasts, slices, one-hot scatters and their like are computed inside the kernels that read them: where one
  kernel reads them, or where they follow from one array (rows and scalars aside), so that doing them twice reads no more;
- products, reductions and writes into a stack take such producers in; collectives, loops, sorts and gathers take arrays;
- a product takes in the elementwise ops that alone read it, unless they read another product, or slices of it;
- what is joined along its last dim (the halves of a rotary embedding) is in memory before, as lanes do not shift inside a kernel;
- a reduction is done by the kernel that makes what it reads, or by one that reads the same for a reduction; a product reads for
  it what it does not make (both sums of a norm's gradient, in the kernel that makes the cotangent); what reductions alone read is
  not written;
- the rest is written to memory and read from there.

It is what XLA's TPU compiler was seen to do with Transformer train steps (libtpu 0.0.42): exponentials too are done twice rather
than stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.steps import Run, Step
from ..program.ir import Op, Value
from ..rules import having

VIEWS = having(lambda p: p.view)
FUSIBLE = having(lambda p: p.fusible) | {"one_hot!"}
SLICES = frozenset({"slice", "dynamic_slice", "gather"})
MATMULS = having(lambda p: p.product)
REDUCTIONS = having(lambda p: p.reduction)
_TAKES = REDUCTIONS | MATMULS | {"stack!", "copy!"}  # kernels that compute their operands as they read them
_SMALL = 8
"""By how much what a kernel reads is smaller than the largest of it, to be rows and scalars."""


class Buffer:
    """One shard of one value, in memory or only inside a kernel.

    Attributes:
      bytes: on this device.
      held: bytes of it that are there at once: less, if it is made and sent block by block.
      host: its bytes in the host's memory, if it lies there; a device has none of it then.
      value: whose shard it is; elements: of that value.
      node: what makes it; None: it comes into its region from outside.
      must: some reader takes arrays only; joined: it is joined with others along its last dim.
      stored: it is in memory.
      sliced: one of :data:`SLICES` reads it.
      through: kernels that can compute it do so, though it is in memory for others.
    """

    __slots__ = (
        "bytes",
        "carried",
        "concatenated",
        "elements",
        "host_bytes",
        "live_bytes",
        "made_by",
        "must_store",
        "readers",
        "recomputed",
        "sliced",
        "stored",
        "value",
    )

    def __init__(self, bytes_: float, value: Value, node: Kernel | None):
        self.bytes, self.value, self.made_by = bytes_, value, node
        self.elements = value.elements
        self.live_bytes = bytes_
        self.host_bytes = 0.0
        self.must_store = False
        self.concatenated = False
        self.stored = node is None
        self.carried = False
        self.readers: Sequence[Kernel] = ()
        self.recomputed = False
        self.sliced = False


class Kernel:
    """An op on one device, or a move between specs; after fusion, a kernel where ``root``.

    Attributes:
      name: of the primitive; ``move!``, ``stack!`` (a loop writes a slice), ``leave!`` (a result or carry),
        ``transfer!`` (a copy to or from the host's memory).
      step: the step of the plan that it stands for; None: the ends of bodies.
      op: the op of the program it belongs to.
      reads, writes: of a kernel: what it takes from memory and puts there.
      regions: the bodies of a loop.
      carries: of a loop: (first value, last value) of what it carries; None: made from no data.
      products: the products it computes.
      joins: it follows from more than one array.
    """

    __slots__ = (
        "bodies",
        "carries",
        "from_several",
        "ins",
        "is_root",
        "matmuls",
        "name",
        "op",
        "outs",
        "position",
        "reads",
        "step",
        "writes",
    )

    def __init__(self, name: str, step: Step | None, op: Op | None, ins: list[Buffer], position: int):
        self.name, self.step, self.op, self.ins, self.position = name, step, op, ins, position
        self.outs: list[Buffer] = []
        self.is_root = False
        self.from_several = False
        self.reads: Sequence[Buffer] = ()
        self.writes: Sequence[Buffer] = ()
        self.bodies: tuple[Computation, ...] = ()
        self.carries: tuple[tuple[Buffer | None, Buffer], ...] = ()
        self.matmuls: tuple[Run, ...] = ()

    @property
    def source(self) -> str:
        """The user's line, ``file.py:12 (function)``."""
        return line_of(self.op)


class Computation:
    """The program, or the body of a loop: kernels in program order.

    Attributes:
      trips: how often it runs each time the kernel that holds it runs (None: not known).
      inputs: of the program: its arguments; of a loop body: what it carries, its own to overwrite.
      constants: of the program: arrays that it closes over, whole; they are part of the compiled program.
      outputs: of the program: its results.
    """

    def __init__(self, trips: int | None):
        self.trips = trips
        self.nodes: list[Kernel] = []
        self.inputs: list[Buffer] = []
        self.constants: list[Buffer] = []
        self.outputs: list[Buffer] = []
        self.kernels: list[Kernel] = []


def fuse(region: Computation) -> None:
    """Decide what a region keeps in memory, and list its kernels with what they read and write."""
    roots: dict[Buffer, tuple[Kernel, ...]] = {}  # of each, the kernels that read it

    def read(items: Sequence[Buffer], readers: tuple[Kernel, ...]) -> None:
        for item in items:
            have = roots.get(item)
            if have is None:
                roots[item] = readers
            elif have is not readers:
                roots[item] = tuple(dict.fromkeys((*have, *readers)))

    for node in reversed(region.nodes):
        name = node.name
        if name not in FUSIBLE:
            node.is_root = True
            takes = name in _TAKES
            if not takes:
                for item in node.ins:
                    item.must_store = True
            if name not in MATMULS or not isinstance(node.step, Run):
                read(node.ins, (node,))
                continue
            if len(node.outs) == 1:
                (out,) = node.outs
                if not out.must_store and not out.sliced and len(readers := roots.get(out, ())) == 1:
                    (reader,) = readers
                    if (reader.name in FUSIBLE or reader.name == "stack!") and not reader.matmuls:
                        reader.matmuls = (node.step,)
                        node.is_root = False
                        read(node.ins, readers)
                        continue
            node.matmuls = (*node.matmuls, node.step)
            read(node.ins, (node,))
            continue
        readers, must = (), False
        for out in node.outs:
            if mine := roots.get(out):
                readers = tuple(dict.fromkeys((*readers, *mine))) if readers else mine
                must |= out.must_store
        if not readers:
            continue  # nobody reads it
        twice = not node.from_several
        if must or (len(readers) > 1 and not twice and not all(r.name in REDUCTIONS for r in readers)):
            node.is_root = True
            again = twice and not any(out.concatenated for out in node.outs)
            through = [r for r in readers if r.name in _TAKES or r.name in FUSIBLE] if again else []
            for out in node.outs:
                out.recomputed = bool(through)
            readers = (node, *through)
        read(node.ins, readers)
        if _joins_lanes(node):
            for item in node.ins:
                item.must_store = item.concatenated = True
    kernels = [node for node in region.nodes if node.is_root]
    for node in kernels:
        for out in node.outs:
            out.stored = True
    own = set(region.nodes)  # what comes from outside a loop is in memory
    done: dict[Kernel, int] = {}
    for node in kernels:
        found: dict[Buffer, None] = {}
        _sources(node.ins, found, set(), node.name in _TAKES or node.name in FUSIBLE, own)
        node.reads = list(found)
        node.writes = node.outs
        other = _also(node, done) if node.name in REDUCTIONS else None
        if other is None:
            other = node
            done[node] = len(region.kernels)
            region.kernels.append(node)
        else:
            mine = set(other.writes)
            other.reads = list(dict.fromkeys([*other.reads, *(i for i in found if i not in mine)]))
            other.writes = [*other.writes, *node.outs]
            done[node] = done[other]
            found = {i: None for i in found if i not in mine}
        for item in found:
            item.readers = (*item.readers, other)


def _joins_lanes(node: Kernel) -> bool:
    """Whether an op joins arrays along their last dim."""
    if node.name != "concatenate" or node.op is None:
        return False
    return node.op.eqn.params["dimension"] == len(node.op.eqn.outvars[0].aval.shape) - 1


def _also(node: Kernel, done: dict[Kernel, int]) -> Kernel | None:
    """The kernel that does a reduction as well: it makes, or reads for a reduction, all that is large of what this one reads; or is
    a product that makes a part of it.

    What it needs besides must be there before: so the greatest element and the sum of what is less it are two kernels.
    """
    most = max((i.bytes for i in node.reads), default=0.0)
    large = [i for i in node.reads if i.bytes * _SMALL > most]
    rows = [i for i in node.reads if i.bytes * _SMALL <= most]
    makers = [i.made_by for i in large if i.made_by is not None and i.made_by in done]
    readers = (
        r for i in large[:1] for r in i.readers if r.name in REDUCTIONS and r in done
    )  # not those of other regions
    for other in (*makers, *readers):
        more = [i for i in large if i not in other.writes and i not in other.reads]
        before = all(i.made_by not in done or done[i.made_by] < done[other] for i in (*rows, *more))
        if (other.name in FUSIBLE or other.name in _TAKES) and before and (other.matmuls or not more):
            return other
    return None


def _sources(
    items: Sequence[Buffer], found: dict[Buffer, None], seen: set[Buffer], takes: bool, own: set[Kernel]
) -> None:
    """What a kernel reads from memory, of what these items are computed from."""
    for item in items:
        if (item.stored and not (takes and item.recomputed)) or item.made_by not in own:
            found[item] = None
        elif item.made_by is not None and item not in seen:
            seen.add(item)
            _sources(item.made_by.ins, found, seen, takes, own)


def line_of(op: Op | None) -> str:
    """The user's line of an op, if there is one."""
    return "" if op is None else op.source

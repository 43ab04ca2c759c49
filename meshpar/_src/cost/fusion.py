"""Fusion of the ops of one device into kernels, with the buffers that each kernel reads from and writes to memory.

:mod:`cost.device_computation` lists the ops. The rules by which :func:`fuse` joins them:

- Reshapes, transposes and names are views of their operand, but copies if they split or merge the channels of images, or change an
  argument of images with a few channels. Input-independent values cost nothing.
- Elementwise ops, broadcasts, slices, one-hot scatters and the like are computed inside the kernels that read them, if one kernel
  reads them, or if they depend on one array (besides rows and scalars), so that computing them twice reads no more.
- Of an array from several that a chain of ops alone reads, and casts to a narrower dtype for matmuls, the cast is stored.
- Matmuls, reductions and writes into a loop's stack fuse such producers; collectives, loops, sorts and gathers read buffers.
- Operands of a batched matmul that are slices of a matmul's result are buffers.
- A matmul fuses the elementwise ops that only it feeds, unless they read another matmul, or slices of its result.
- Operands of a concatenation along the last dim (the halves of a rotary embedding) are buffers, as a kernel does not shift lanes.
- A reduction is computed by the kernel that makes its operand, or by one that reads the same for a reduction. A matmul reads what
  it does not make for it (both sums of a norm's gradient, in the kernel of the cotangent). Operands of reductions only are not
  written.
- A write into a window of an array (``dynamic_update_slice``) fuses the producers of the window. It overwrites the array.
- Random bits of a threefry key are elementwise functions of their index: the kernels that read a dropout mask recompute it, in
  the forward and in the backward pass. Other generators write their bits.
- All other values are written to memory and read from there.

XLA's TPU compiler was observed to fuse Transformer train steps so (libtpu 0.0.42); it recomputes exponentials rather than storing
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ..plan.shard_shapes import itemsize
from ..plan.steps import Run, Step
from ..program.ir import Op, Value
from ..program.primitives import add_row_p
from ..rules import Primitive, primitive

MAX_RECOMPUTED_OPS = 16
"""Fusible ops one after the other that every reader of an array recomputes; longer chains are stored in between.

In chains of 24 to 192 such ops and their gradients, the TPU compiler (libtpu 0.0.42) stores an array every 6 to 48 ops.
"""


class Kind(StrEnum):
    """The computation of a kernel."""

    OP = "op"
    """The op of its step."""
    SLICE = "slice"
    """A part of its operand."""
    COPY = "copy"
    """A copy in another buffer."""
    TRANSPOSE = "transpose"
    """A copy in another layout."""
    MOVE = "move"
    """The collectives of a resharding or reduction."""
    TRANSFER = "transfer"
    """A copy to or from host memory."""
    STACK = "stack"
    """A loop writes its slice of a stack."""
    LEAVE = "leave"
    """A result or carry of a body."""
    RANDOM_BITS = "random_bits"
    """Bits of a threefry key: a function of their index."""
    ONE_HOT = "one_hot"
    """A scatter of one element into each row of zeros."""


_TRAITS = {kind: Primitive(name=kind, fusible=kind in (Kind.RANDOM_BITS, Kind.ONE_HOT)) for kind in Kind}
_TRAITS[Kind.SLICE] = primitive("slice")


@dataclass(eq=False, slots=True)
class Buffer:
    """The shard of one value on a device: in memory, or only an intermediate inside a kernel.

    Attributes:
      bytes: on a device; 0 for a value in host memory.
      value: the value.
      made_by: the kernel that computes it; None for inputs of the computation.
      live_bytes: of ``bytes``, those allocated at once: fewer if a ring computes and sends it in chunks.
      host_bytes: its bytes in host memory.
      padding: the fraction of its bytes that are padding to the tiles of the chip's memory, in [0, 1).
      must_store: some reader needs it in memory.
      concatenated: it is an operand of a concatenation along its last dim.
      stored: it is in memory.
      carried: it is the carry of a loop, inside the body.
      readers: the kernels that read it.
      recomputed: kernels that can compute it do so, although it is in memory for others.
      sliced: a kernel that reads a part of its operand reads it.
      transposed: some reader reads it with its dims in another order, in which its kernel may write it.
      awaited: a barrier holds other buffers until it is computed.
    """

    bytes: float
    value: Value
    made_by: Kernel | None
    live_bytes: float = field(init=False)
    host_bytes: float = 0.0
    padding: float = 0.0
    must_store: bool = False
    concatenated: bool = False
    stored: bool = field(init=False)
    carried: bool = False
    readers: Sequence[Kernel] = ()
    recomputed: bool = False
    sliced: bool = False
    transposed: bool = False
    awaited: bool = False

    def __post_init__(self) -> None:
        self.live_bytes, self.stored = self.bytes, self.made_by is None


@dataclass(eq=False, slots=True)
class Kernel:
    """An op or a resharding on one device; after :func:`fuse`, a kernel if it is the root of a fusion.

    Attributes:
      kind: its computation.
      step: the step of the plan; None at the ends of bodies.
      op: the op of the program that the step is for.
      ins, outs: its operands and results, in memory or not; position: index of its step in program order.
      traits: of the primitive that it computes; of other kinds than an op, what fusion needs to know of them.
      is_root: it is a kernel; reads, writes: the buffers that this kernel reads from and writes to memory.
      bodies: of a loop or branch.
      carries: of a loop, (first value, last value) of each carry; None: the first value is input-independent.
      matmuls: the steps of the matmuls that the kernel computes.
      random_elements: the number of threefry bit patterns that the kernel computes on a device.
      from_several: it depends on more than one array (rows and scalars do not count).
      is_softmax: it subtracts from scores the maximum of each row, which it computes itself.
      ends_chain: several kernels do not recompute it, since that takes a chain of :data:`MAX_RECOMPUTED_OPS` ops.
    """

    kind: Kind
    step: Step | None
    op: Op | None
    ins: list[Buffer]
    position: int
    outs: list[Buffer] = field(default_factory=list)
    traits: Primitive = field(init=False)
    is_root: bool = False
    from_several: bool = False
    ends_chain: bool = False
    is_softmax: bool = False
    random_elements: float = 0.0
    reads: Sequence[Buffer] = ()
    writes: Sequence[Buffer] = ()
    bodies: tuple[Computation, ...] = ()
    carries: tuple[tuple[Buffer | None, Buffer], ...] = ()
    matmuls: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        self.traits = self.op.primitive if self.kind is Kind.OP and self.op is not None else _TRAITS[self.kind]

    @property
    def fuses(self) -> bool:
        """Whether it computes the producers of its operands."""
        entry, copies = self.traits, self.kind in (Kind.STACK, Kind.COPY, Kind.TRANSPOSE)
        return entry.fusible or entry.matmul or entry.family in ("reduction", "update") or copies

    @property
    def is_light(self) -> bool:
        """Whether it is elementwise, a copy or a collective."""
        return self.traits.fusible or self.traits.view or self.kind in (Kind.MOVE, Kind.COPY, Kind.TRANSPOSE)

    @property
    def source(self) -> str:
        """The user's line, and the part of the model (:attr:`Op.location`)."""
        return line_of(self.op)

    @property
    def origin(self) -> Op | None:
        """The op that takes most of its time: its first matmul, else the op whose result it computes."""
        return self.matmuls[0].op if self.matmuls else self.op

    @property
    def name(self) -> str:
        """The name of the primitive whose result it computes, or of its kind: ``add``, ``move``, ``stack``, …"""
        return self.traits.name

    @property
    def origin_name(self) -> str:
        """The name of the primitive of :attr:`origin`, or of its kind."""
        return self.matmuls[0].op.name if self.matmuls else self.name


@dataclass(eq=False, slots=True, weakref_slot=True)
class Computation:
    """The kernels of the program, or of the body of a loop or branch, in program order.

    Attributes:
      trip_count: trip count each time its loop runs; None: not known.
      nodes: all ops; kernels: those that are kernels after fusion.
      inputs: the program's arguments, or the carries of a loop body, which it may overwrite.
      constants: of the program, the arrays that it closes over, replicated; they are part of the compiled program.
      outputs: the program's results.
    """

    trip_count: int | None
    nodes: list[Kernel] = field(default_factory=list)
    inputs: list[Buffer] = field(default_factory=list)
    constants: list[Buffer] = field(default_factory=list)
    outputs: list[Buffer] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    def walk(self, count: int = 1) -> Iterator[tuple[Kernel, int]]:
        """(kernel, runs in a step) of the computation, and after each kernel those of its bodies, at any depth.

        A loop of unknown length counts once; so does every branch of a ``cond``.

        Args:
          count: runs of the computation.
        """
        for kernel in self.kernels:
            yield kernel, count
            for body in kernel.bodies:
                yield from body.walk(count * (1 if body.trip_count is None else body.trip_count))

    def with_bodies(self) -> list[Computation]:
        """The computation and the bodies in it, at any depth, each before those inside it."""
        return [self, *(body for kernel, _ in self.walk() for body in kernel.bodies)]


def fuse(computation: Computation, row_ratio: int) -> None:
    """Fuse the ops of a computation: set ``kernels``, their ``reads``, ``writes`` and ``matmuls``, and which buffers are stored.

    Args:
      row_ratio: an operand is a row or a scalar if the largest operand of its kernel has at least this many times its bytes.
    """
    roots: dict[Buffer, tuple[Kernel, ...]] = {}  # of each, the kernels that read it

    def read(items: Sequence[Buffer], readers: tuple[Kernel, ...]) -> None:
        """Add ``readers`` to the kernels that read each of ``items``."""
        for item in items:
            have = roots.get(item)
            if have is None:
                roots[item] = readers
            elif have is not readers:
                roots[item] = tuple(dict.fromkeys((*have, *readers)))

    uses = Counter(item for node in computation.nodes for item in node.ins)
    # readers first: the kernels that read an op decide whether it is a kernel itself
    for node in reversed(computation.nodes):
        if not node.traits.fusible:
            node.is_root = True
            if not node.fuses:
                for item in node.ins:
                    item.must_store = True
            elif (array := array_written(node)) is not None:
                array.must_store = True
            elif (
                node.traits.family == "dot" and node.op is not None and any(node.op.eqn.params["dimension_numbers"][1])
            ):
                for item in node.ins:
                    item.must_store |= _slices_matmul(item.made_by)
            if not node.traits.matmul or not isinstance(node.step, Run):
                read(node.ins, (node,))
                continue
            if len(node.outs) == 1:
                (out,) = node.outs
                if not out.must_store and not out.sliced and len(readers := roots.get(out, ())) == 1:
                    (reader,) = readers
                    entry = reader.traits
                    fuses = entry.fusible or entry.family == "update" or reader.kind is Kind.STACK
                    if fuses and not reader.matmuls:
                        reader.matmuls = (node.step,)
                        node.is_root = False
                        read(node.ins, readers)
                        continue
            node.matmuls = (*node.matmuls, node.step)
            read(node.ins, (node,))
            continue
        readers, must = (), False
        for out in node.outs:
            if out_readers := roots.get(out):
                readers = tuple(dict.fromkeys((*readers, *out_readers))) if readers else out_readers
                must |= out.must_store
        if not readers:
            continue  # dead code
        twice = not node.from_several and not (len(readers) > 1 and _narrows_alone(node, uses, readers))
        if node.ends_chain and len(readers) > 1:
            must, twice = True, False
        if must or (len(readers) > 1 and not twice and not all(r.traits.family == "reduction" for r in readers)):
            node.is_root = True
            recompute = twice and not any(out.concatenated for out in node.outs)
            through = [r for r in readers if r.fuses] if recompute else []
            for out in node.outs:
                out.recomputed = bool(through)
            readers = (node, *through)
        read(node.ins, readers)
        if _joins_lanes(node):
            for item in node.ins:
                item.must_store = item.concatenated = True
    _form_kernels(computation, row_ratio)


def _form_kernels(computation: Computation, row_ratio: int) -> None:
    """Set ``kernels`` of a computation from the ops that are roots of fusions, with the buffers that they read and write."""
    kernels = [node for node in computation.nodes if node.is_root]
    for node in kernels:
        for out in node.outs:
            out.stored = True
    own = set(computation.nodes)  # values from outside a loop are in memory
    done: dict[Kernel, int] = {}
    for node in kernels:
        read: dict[Buffer, None] = {}
        inside: set[Buffer] = set()
        _sources(node.ins, read, inside, node.fuses, own)
        node.reads = list(read)
        drawn = [i for i in (*node.outs, *inside) if i.made_by is not None and i.made_by.kind is Kind.RANDOM_BITS]
        node.random_elements = sum(i.bytes / itemsize(i.value.aval) for i in drawn)
        node.writes = node.outs
        other = _merged_with(node, done, row_ratio) if node.traits.family == "reduction" else None
        if other is None:
            other = node
            done[node] = len(computation.kernels)
            computation.kernels.append(node)
        else:
            read = {i: None for i in read if i not in set(other.writes)}
            other.reads = list(dict.fromkeys([*other.reads, *read]))
            other.writes = [*other.writes, *node.outs]
            other.random_elements = max(other.random_elements, node.random_elements)
            done[node] = done[other]
        for item in read:
            item.readers = (*item.readers, other)


def _narrows_alone(node: Kernel, uses: Mapping[Buffer, int], readers: Sequence[Kernel]) -> bool:
    """Whether it ends a chain of ops, each of which alone reads the one before, that begins with an op on several arrays and whose
    result has fewer bytes, for matmuls only: the gradient of scores in float32, cast for two matmuls. Only the result is stored."""
    if not all(any(run.op.primitive.family == "dot" for run in reader.matmuls) for reader in readers):
        return False
    size = node.outs[0].bytes
    while not node.from_several:
        item = max(node.ins, key=lambda i: i.bytes, default=None)
        if item is None or uses[item] > 1 or item.made_by is None or not item.made_by.traits.fusible:
            return False
        node = item.made_by
    return size < node.outs[0].bytes


def _slices_matmul(node: Kernel | None) -> bool:
    """Whether an op takes a slice of the result of a matmul: the queries of one array of queries, keys and values."""
    made = node.ins[0].made_by if node is not None and node.traits.contiguous_slice and node.ins else None
    return made is not None and made.traits.matmul


def _joins_lanes(node: Kernel) -> bool:
    """Whether an op joins arrays along their last dim."""
    if node.op is None or node.traits.family != "concatenate":
        return False
    return node.op.eqn.params["dimension"] == len(node.op.eqn.outvars[0].aval.shape) - 1


def _merged_with(node: Kernel, done: dict[Kernel, int], row_ratio: int) -> Kernel | None:
    """The earlier kernel that also computes a reduction; None: the reduction is a kernel of its own.

    It computes, or reads for another reduction, all large operands of this one, or is a matmul that computes one of them. The
    other operands must exist before it: the maximum of a softmax and the sum of exponentials are two kernels.
    """
    most = max((i.bytes for i in node.reads), default=0.0)
    large = [i for i in node.reads if i.bytes * row_ratio > most]
    rows = [i for i in node.reads if i.bytes * row_ratio <= most]
    makers = [i.made_by for i in large if i.made_by is not None and i.made_by in done]
    readers = (
        r for i in large[:1] for r in i.readers if r.traits.family == "reduction" and r in done
    )  # not the nodes of other computations
    for other in (*makers, *readers):
        more = [i for i in large if i not in other.writes and i not in other.reads]
        before = all(i.made_by not in done or done[i.made_by] < done[other] for i in (*rows, *more))
        if other.fuses and before and (other.matmuls or not more):
            return other
    return None


def _sources(
    items: Sequence[Buffer], found: dict[Buffer, None], seen: set[Buffer], takes: bool, own: set[Kernel]
) -> None:
    """Add to ``found`` the buffers in memory that ``items`` are computed from, and to ``seen`` those between them, which the kernel
    computes itself."""
    pending = list(reversed(items))
    while pending:  # not recursive: a chain of fused ops may be longer than Python's stack
        item = pending.pop()
        if (item.stored and not (takes and item.recomputed)) or item.made_by not in own:
            found[item] = None
        elif item.made_by is not None and item not in seen:
            seen.add(item)
            pending += reversed(item.made_by.ins)


def array_written(node: Kernel) -> Buffer | None:
    """The array into a window of which a kernel writes; None: it is no such kernel, or the array is a constant."""
    return _operand_overwritten(node) if node.traits.family == "update" else None


def array_scattered_into(node: Kernel) -> Buffer | None:
    """The array into which a scatter writes rows; None: it is no scatter, or the array is a constant."""
    return _operand_overwritten(node) if node.traits.family == "scatter" else None


def _operand_overwritten(node: Kernel) -> Buffer | None:
    """The buffer of the first operand of a kernel's op; None: that is a constant."""
    return node.ins[0] if node.op is not None and node.ins and node.ins[0].value is node.op.ins[0] else None


def window_bytes(node: Kernel) -> float:
    """Bytes of the window that a kernel writes (:func:`array_written`), and if it adds, also of the window that it reads."""
    assert node.op is not None
    array, window, *_ = (v.aval for v in node.op.eqn.invars)
    times = 2 if node.op.eqn.primitive is add_row_p else 1
    return times * node.outs[0].bytes * window.size / array.size


def line_of(op: Op | None) -> str:
    """The user's line of an op and the part of the model (:attr:`Op.location`), if there is one."""
    return "" if op is None else op.location

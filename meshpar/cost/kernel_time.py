"""The time of each kernel of a plan on its chip: its products, its traffic with HBM, its elements' way through the vector units.

Traffic is what :mod:`meshpar.cost.fusion` says a kernel reads and writes: each array once, but operands of products that do not
stay on the chip as often as their tiles need (:func:`meshpar.cost.flops.reread_bytes`), and images that are in VMEM not at all
(:mod:`meshpar.cost.vmem`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..plan.plan import Plan
from ..plan.spec import itemsize
from ..plan.steps import Run
from .caching import cached_on_plan
from .collective_matmul import kernel_seconds
from .donation import aliased_inputs, gathered_then_copied
from .flops import OPAQUE, VMEM_RESERVED_BYTES, flops_on, local_opaque_flops, reread_bytes_on
from .fusion import SLICES, Buffer, Computation, Kernel
from .kernels import computation_of
from .tiles import Tiles
from .vmem import buffers_in_vmem


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel on one device, once.

    Attributes:
      flops: of its products, dims rounded up to the matrix unit.
      bytes: to and from HBM, without what is copied to and from VMEM beside kernels.
      busy, moved: seconds of its products at the matrix unit's rate, of its traffic at HBM's rate.
      seconds: of both, and the way through the vector units, together.
      count: how often it runs in a step; loops of unknown length count once.
    """

    flops: float
    bytes: float
    busy: float
    moved: float
    seconds: float
    count: int


@cached_on_plan
def kernel_times(plan: Plan) -> dict[Kernel, KernelTime]:
    """The kernels of a plan that take time, in order; none where the chip is not known."""
    if plan.chip is None:
        return {}
    chip, region = plan.chip, computation_of(plan)
    device = chip.per_device()
    out: dict[Kernel, KernelTime] = {}
    flops_of, again = flops_on(plan, chip.lanes), reread_bytes_on(plan, chip)
    results = {id(region.outputs[k]) for k in aliased_inputs(plan)} if chip.torus else set()
    kernels = list(kernels_with_counts(region))
    near: dict[Kernel, set[Buffer]] = {}
    if chip.torus and device.vmem is not None and chip.cores == 1:  # what two cores share is in HBM
        near = buffers_in_vmem(
            [node for node, *_ in kernels], plan.program.once(Tiles), device.vmem - VMEM_RESERVED_BYTES
        )
    for node, _, count in kernels:
        if node.regions:
            continue
        flops = sum(map(flops_of, node.products))
        if node.name in OPAQUE and isinstance(node.step, Run):
            flops += local_opaque_flops(node.step, plan.sizes)
        traffic = 0.0
        if node.name not in ("move!", "leave!"):
            here = near.get(node, ())
            traffic = sum(item.bytes for item in node.writes if item not in here)
            traffic += sum(read_bytes(node, i) for i in node.reads if not (node.products and i in here))
            traffic += sum(i.bytes for i in node.ins) if node.name == "stack!" else 0.0
            for run in node.products:
                traffic += again(run, _beside(node, run))
        elif any(
            id(i) in results and gathered_then_copied(i.bytes, sum(j.bytes for j in node.reads)) for i in node.writes
        ):
            traffic = 2 * node.writes[0].bytes  # it is gathered into other memory, and copied to its place
        rate = device.flops
        if node.products:
            rate = device.matmul_rate(str(node.products[0].op.eqn.invars[0].aval.dtype))
        busy, moved = flops / (rate * chip.matmul_efficiency), traffic / (device.hbm_bandwidth * chip.hbm_efficiency)
        if busy or moved:
            convolves = any(run.op.name == "conv_general_dilated" for run in node.products)
            seconds = kernel_seconds(chip, busy, moved, _elements(node) if moved else 0.0, convolves)
            out[node] = KernelTime(flops, traffic, busy, moved, seconds, count)
    return out


def kernels_with_counts(region: Computation, count: int = 1, loop: int = 0) -> Iterator[tuple[Kernel, int, int]]:
    """(kernel, id of its region, how often it runs in a step); loops of unknown length once, every branch of a condition."""
    loop = id(region)
    for node in region.kernels:
        yield node, loop, count
        for body in node.regions:
            yield from kernels_with_counts(body, count * (1 if body.trips is None else body.trips))


def _elements(node: Kernel) -> float:
    """Elements that go through the vector units in a kernel: what it writes, or what it reads to add up."""
    written = sum(item.bytes / itemsize(item.value.aval) for item in node.writes)
    if node.products or node.name == "kernel":
        return written
    return max([written, *(read_bytes(node, item) / itemsize(item.value.aval) for item in node.reads)])


def _beside(node: Kernel, run: Run) -> int:
    """How many arrays as large as a matmul's result its kernel reads or writes, other than the result or what replaces it: none in
    the kernel of a concatenation or pad, whose result is larger."""
    size = run.results[0].value.elements
    return max(0, sum(i.value.elements == size for i in (*node.reads, *node.writes)) - 1)


def read_bytes(node: Kernel, item: Buffer) -> float:
    """What a kernel reads of an array: all of it, or of a stack the slice that it works on."""
    if node.name in ("slice", "dynamic_slice") and item in node.ins:
        return min(item.bytes, sum(out.bytes for out in node.outs))
    if not item.sliced or any(item is i for i in node.ins):
        return item.bytes
    todo, least = list(node.ins), item.bytes
    seen: set[int] = set()
    while todo:
        i = todo.pop()
        if id(i) in seen or (i.stored and not i.through) or i.node is None:
            continue
        seen.add(id(i))
        if i.node.name in SLICES and any(j is item for j in i.node.ins):
            least = min(least, i.bytes)
        todo += i.node.ins
    return least

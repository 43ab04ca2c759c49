"""The seconds of each kernel of a plan on its chip: matmuls, HBM traffic, vector units.

Traffic is the bytes of the buffers that a kernel reads and writes (:mod:`cost.fusion`), each once. But a matmul operand
that does not fit into VMEM counts once for each tile of the result (:func:`cost.flops.reread_bytes`); an image that is
in VMEM does not count (:mod:`cost.vmem_resident_buffers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan.plan import Plan
from ..plan.shard_shapes import itemsize
from ..plan.steps import Run
from ..program.ir import Op
from .caching import cached_on_plan
from .collective_matmul import kernel_seconds, vector_seconds
from .device_computation import computation_of
from .donation import aliased_inputs, gathered_then_copied
from .flops import few_rows, loading_flops, local_opaque_flops, padded_flops, reread_bytes, single_row_elements
from .fusion import Buffer, Kernel, Kind, array_scattered_into, array_written, line_of, window_bytes
from .tiles import Tiles
from .vmem_resident_buffers import buffers_in_vmem

THREEFRY_ELEMENTS = 2.0
"""Elements that the vector units process in the time in which they compute one threefry bit pattern.

By the TPU compiler's estimates (libtpu 0.0.42), 1024 elements of a dropout of its own take 34.8 cycles on v5e, and 17.7 on v5p; a
``where`` by comparison takes 18.6 and 7.3. Matmuls whose operands have dropout take longer: they compute the bits for each tile.
"""


PACKED = 2.0
"""Elements that the vector units process in the time in which they transpose one of less than 4 bytes, or write a zero.

By the TPU compiler's estimates (libtpu 0.0.42), 65.5 million bfloat16 elements of a table take 431 µs on v5p, of which 112 are
traffic; float32 elements take as long as those of other kernels. 4.2 million zeros take 61 µs on v5e.
"""


EXPONENTIALS = 0.15
"""Elements of a softmax's exponents that count for the vector units of a matmul's kernel, which computes their exponentials.

By the TPU compiler's estimates (libtpu 0.0.42) of attention in plain Llama layers on v5e and v6e.
"""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One run of a kernel on one device. It does not refer to the kernel, and so outlives the plan without its kernels.

    Attributes:
      name: the primitive that takes most of its time, or the kernel's kind.
      origin: the op of the program that it computes.
      flops: of its matmuls, dims rounded up to the matrix unit.
      bytes: read from and written to HBM; copies to and from VMEM during other kernels do not count.
      matmul_seconds: of the FLOPs at the matrix unit's rate, or of loading weights for few rows.
      traffic_seconds: of the bytes at HBM's rate.
      vector_seconds: of the vector units; 0 on GPUs, and on chips whose clock is not known.
      seconds: of the kernel, with its overlap of matmuls, traffic and vector units (:func:`kernel_seconds`).
      count: runs in a step; a loop of unknown length counts once.
    """

    name: str
    origin: Op | None
    flops: float
    bytes: float
    matmul_seconds: float
    traffic_seconds: float
    vector_seconds: float
    seconds: float
    count: int

    @property
    def start_seconds(self) -> float:
        """The seconds that a kernel takes longer than its work, since none is shorter than ``min_kernel_seconds``."""
        work = self.matmul_seconds + self.traffic_seconds + self.vector_seconds
        return self.seconds - work if self.seconds > (1 + 1e-9) * work else 0.0  # not what rounding leaves

    @property
    def source(self) -> str:
        """The user's line, and the part of the model (:attr:`Op.location`)."""
        return line_of(self.origin)

    def to_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("name", "flops", "bytes", "seconds", "count", "source")}


@cached_on_plan
def kernel_times(plan: Plan) -> dict[Kernel, KernelTime]:
    """Kernel → its time, for the plan's kernels that compute or move data, in program order; empty without a chip."""
    if plan.chip is None:
        return {}
    chip, computation = plan.chip, computation_of(plan)
    device = chip.per_device()
    out: dict[Kernel, KernelTime] = {}
    results = {computation.outputs[k] for k in aliased_inputs(plan)} if chip.torus else set()
    kernels = list(computation.walk())
    overwritten = {computation.inputs[k] for k in aliased_inputs(plan).values()}
    in_vmem = vmem_buffers(plan)
    for kernel, count in kernels:
        if kernel.bodies or kernel.kind is Kind.TRANSFER:  # copies to and from the host run concurrently with kernels
            continue
        flops = sum(padded_flops(run, plan.sizes, chip.lanes) for run in kernel.matmuls)
        if isinstance(kernel.step, Run) and kernel.kind is Kind.OP:
            flops += local_opaque_flops(kernel.step, plan.sizes)
        traffic, elements = 0.0, _elements(kernel)
        if kernel.kind not in (Kind.MOVE, Kind.LEAVE):
            resident, array, rows = in_vmem.get(kernel, ()), array_written(kernel), array_scattered_into(kernel)
            reads = [i for i in kernel.reads if not (kernel.matmuls and i in resident)]
            if rows is not None and (rows.carried or rows in overwritten):  # written in place, as the updates are read
                reads = [i for i in reads if i is not rows]
                traffic = sum(read_bytes(kernel, i) for i in reads)
                elements = sum(read_bytes(kernel, i) / itemsize(i.value.aval) for i in reads)
            elif array is None:
                traffic = sum(buffer.bytes for buffer in kernel.writes if buffer not in resident)
            else:  # the rest of the array is not touched
                traffic, reads = window_bytes(kernel), [i for i in reads if i is not array]
            traffic += sum(read_bytes(kernel, i) for i in reads)
            traffic += sum(i.bytes for i in kernel.ins) if kernel.kind is Kind.STACK else 0.0
            for run in kernel.matmuls:
                traffic += reread_bytes(plan, chip, run, _other_result_sized_buffers(kernel, run))
        elif any(
            i in results and gathered_then_copied(plan, i.bytes, sum(j.bytes for j in kernel.reads))
            for i in kernel.writes
        ):
            traffic = 2 * kernel.writes[0].bytes  # gathered into a buffer of its own, then copied
        rate = device.flops
        if kernel.matmuls:
            rate = device.matmul_rate(str(kernel.matmuls[0].op.eqn.invars[0].aval.dtype))
        least = chip.compiler.min_matmul_rows if kernel.matmuls and reads_argument(kernel) else 0
        loading = sum(loading_flops(run, plan.sizes, least) for run in kernel.matmuls)
        matmul_seconds = max(flops, loading) / (rate * chip.compiler.matmul_efficiency)
        traffic_seconds = traffic / (device.hbm_bandwidth * chip.compiler.hbm_efficiency)
        if not (matmul_seconds or traffic_seconds):
            continue
        convolves = any(run.op.primitive.family == "conv" for run in kernel.matmuls)
        elements = elements if traffic_seconds else 0.0
        if kernel.kind is Kind.TRANSPOSE and itemsize(kernel.outs[0].value.aval) < 4:
            elements *= PACKED
        if kernel.traits.family == "dot" and len(kernel.writes) == 1:
            elements *= chip.compiler.matmul_result_fraction
        if kernel.is_softmax:
            elements *= chip.compiler.fused_softmax_fraction or 1.0
        elif kernel.matmuls:  # of exponents, the exponentials
            exponents = (i for i in kernel.reads if i.made_by is not None and i.made_by.is_softmax)
            elements = max([elements, *(EXPONENTIALS * i.bytes / itemsize(i.value.aval) for i in exponents)])
        if any(few_rows(run, plan.sizes) for run in kernel.matmuls):
            first = min(traffic, chip.compiler.first_tile_bytes) / device.hbm_bandwidth
            traffic_seconds = (traffic_seconds + first) / chip.compiler.row_hbm_efficiency
        if chip.torus:
            elements += sum(single_row_elements(run, plan.sizes) for run in kernel.matmuls)
        seconds = kernel_seconds(chip, matmul_seconds, traffic_seconds, elements, convolves)
        seconds = max(seconds, chip.compiler.min_kernel_seconds)
        vector = 0.0 if chip.switch else vector_seconds(chip, elements)
        out[kernel] = KernelTime(
            kernel.origin_name, kernel.origin, flops, traffic, matmul_seconds, traffic_seconds, vector, seconds, count
        )
    return out


@cached_on_plan
def vmem_buffers(plan: Plan) -> dict[Kernel, set[Buffer]]:
    """Kernel → the buffers that it reads or writes in VMEM instead of HBM; empty on chips of two cores, which share HBM only."""
    vmem = None if plan.chip is None or not plan.chip.torus or plan.chip.cores > 1 else plan.chip.per_device().vmem
    if vmem is None:
        return {}
    kernels = [kernel for kernel, _ in computation_of(plan).walk()]
    return buffers_in_vmem(kernels, plan.program.cached(Tiles), vmem - plan.compiler.vmem_reserved_bytes)


def _elements(kernel: Kernel) -> float:
    """The number of elements that a kernel's vector units process: those written, or those read if it reduces more, and
    :data:`THREEFRY_ELEMENTS` for each that it draws."""
    if array_written(kernel) is not None:
        return window_bytes(kernel) / itemsize(kernel.outs[0].value.aval)
    written = sum(buffer.bytes / itemsize(buffer.value.aval) for buffer in kernel.writes)
    drawn = THREEFRY_ELEMENTS * kernel.random_elements
    if kernel.matmuls or kernel.traits.family == "kernel":
        return drawn + written
    return drawn + max(
        [written, *(read_bytes(kernel, buffer) / itemsize(buffer.value.aval) for buffer in kernel.reads)]
    )


def _other_result_sized_buffers(kernel: Kernel, run: Run) -> int:
    """The number of buffers that a matmul's kernel reads or writes besides the result, of as many elements as the result.

    Examples: 1 for ``x @ w + y``; 0 for ``x @ w``, and for a kernel that pads the result (the written buffer is larger).
    """
    size = run.results[0].value.elements
    return max(0, sum(i.value.elements == size for i in (*kernel.reads, *kernel.writes)) - 1)


def reads_argument(kernel: Kernel) -> bool:
    """Whether the array of which a kernel reads most is an argument, or a loop's slice of one: weights or a cache."""
    most = max(kernel.reads, key=lambda i: read_bytes(kernel, i), default=None)
    return most is not None and most.made_by is None and not most.carried


def read_bytes(kernel: Kernel, buffer: Buffer) -> float:
    """The bytes of a buffer that a kernel reads: all, or only the bytes of the slices that it takes of it (of a loop's stack), or
    of the rows that it looks up."""
    looked_up = kernel.traits.family == "gather" and buffer is kernel.ins[0] and not kernel.matmuls
    if looked_up or (kernel.traits.contiguous_slice and buffer in kernel.ins):
        return min(buffer.bytes, sum(out.bytes for out in kernel.outs))
    if not buffer.sliced or any(buffer is i for i in kernel.ins):
        return buffer.bytes
    todo, smallest, seen = list(kernel.ins), buffer.bytes, set[Buffer]()
    while todo:
        i = todo.pop()
        if i in seen or (i.stored and not i.recomputed) or i.made_by is None:
            continue
        seen.add(i)
        if i.made_by.traits.slice and any(j is buffer for j in i.made_by.ins):
            smallest = min(smallest, i.bytes)
        todo += i.made_by.ins
    return smallest

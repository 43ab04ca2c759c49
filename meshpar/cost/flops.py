"""FLOPs of products: on one device with dims rounded up to its matrix unit, of the model, and inside opaque kernels."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshpar_kernels._choose import OUTLINE

from ..caches import LRUCache
from ..compat.jax import closed_parts, in_recomputation, make_jaxpr
from ..hardware.chips import Chip
from ..plan.memo import MESHES
from ..plan.plan import Plan
from ..plan.spec import itemsize, local_shape, parts_of
from ..plan.steps import Body, Run
from ..program.ir import Frame, Op, Program
from ..program.kernels import KernelWork
from ..program.names import Part
from .caching import cached_on_plan
from .fusion import MATMULS

OPAQUE = frozenset({"kernel", "pallas_call", "shard_map"})
"""Ops whose products are inside them."""
VMEM_RESERVED_BYTES = 16 * 2.0**20
"""Bytes of VMEM in which a kernel works."""
VMEM_TILE_BYTES = 9.4e6
"""Bytes of these for a product's results: the sums of a tile and its arrays' buffers; the rest is for operands."""
MIN_REDUNDANT_SHARE = 0.5  # of the products' FLOPs, from which on a call warns that they are done more than once
MIN_REDUNDANT_FLOPS = 1e9  # FLOPs of a device in a step, below which it does not

_opaque: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()


def padded_flops(run: Run, sizes: Mapping[str, int], lanes: int = 1) -> float:
    """FLOPs of one device's part of a product, dims rounded up to the matrix unit.

    Args:
      sizes: axis → size of the mesh.
      lanes: side of the matrix unit: free and contracted dims round up to it, the other free dim to 8 (4 bytes) or 16 (2
        bytes) rows; 1: nothing is rounded.
    """
    op = run.op
    rows = 1 if lanes == 1 else max(8, int(32 // itemsize(op.eqn.invars[0].aval)))
    batch, m, n, k = _local_sizes(run, sizes)
    if 0 in (batch, m, n, k):
        return 0.0

    def up(size: int, to: int) -> int:
        return -(-size // to) * to

    return 2.0 * batch * up(k, lanes) * min(up(m, rows) * up(n, lanes), up(n, rows) * up(m, lanes))


def reread_bytes(
    run: Run, sizes: Mapping[str, int], vmem: float, beside: int = 0, cut: Sequence[bool] = (True,) * 3, blocks: int = 1
) -> float:
    """Bytes of one device's part of a product that are read from HBM more than once.

    The TPU compiler (libtpu 0.0.42) keeps an operand in VMEM where it fits beside what kernels work in, 16 MiB, and reads both
    once. Else it multiplies tiles of results, for each of which rows of one operand and columns of the other are read: as large as
    their sums, in float32, and two buffers of each array fit (1024 by 1152 of 2 bytes for Llama 3 70B on v5p, 416 by 640 with five
    arrays beside).

    Args:
      vmem: bytes of on-chip memory.
      beside: arrays as large as the result that are read or written with it.
      cut, blocks: of one of so many blocks in which it is made: whether each operand and the result is cut for it.
    """
    op = run.op
    if op.name != "dot_general":
        return 0.0
    batch, m, n, k = _local_sizes(run, sizes)
    left, right, result = cut
    batch, k = batch // (blocks if left and right and result else 1), k // (1 if result else blocks)
    m, n = m // (blocks if left and not right else 1), n // (blocks if right and not left else 1)
    lhs, rhs = (k * size * itemsize(v.aval) for size, v in zip((m, n), op.eqn.invars, strict=False))
    if min(lhs, rhs) <= vmem - VMEM_RESERVED_BYTES:
        return 0.0
    side = math.sqrt(VMEM_TILE_BYTES / (4.0 + 2.0 * itemsize(op.eqn.outvars[0].aval) * (1 + beside)))
    return batch * (lhs * (max(1.0, n / side) - 1) + rhs * (max(1.0, m / side) - 1))


def smaller_operand_bytes(run: Run, sizes: Mapping[str, int]) -> float:
    """Bytes of the smaller operand of one device's part of a product, of one element of its batch."""
    _, m, n, k = _local_sizes(run, sizes)
    return min(k * size * itemsize(v.aval) for size, v in zip((m, n), run.op.eqn.invars, strict=False))


def _local_sizes(run: Run, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """:func:`matmul_dims` of one device's part of a product."""
    lhs, rhs = (
        local_shape(var.aval.shape, None if shard is None else shard.spec, sizes)
        for var, shard in zip(run.op.eqn.invars[:2], run.operands, strict=False)
    )
    return matmul_dims(run.op.eqn, lhs, rhs)


class _Products:
    """What is known of a program's products on one device: by what meshes and chips are like, then by op and specs of operands."""

    def __init__(self, program: Program):
        self.found: LRUCache[tuple[Any, ...], dict[tuple[Any, ...], float]] = LRUCache(2 * MESHES)


def flops_on(plan: Plan, lanes: int) -> Callable[[Run], float]:
    """:func:`padded_flops` on a plan's mesh, worked out once for every way in which operands lie in the plans of a program."""
    sizes = plan.sizes
    found = plan.program.once(_Products).found.setdefault((tuple(sizes.items()), lanes), dict)

    def flops(run: Run) -> float:
        lhs, rhs = run.operands[:2]
        key = run.op, lhs and lhs.spec, rhs and rhs.spec
        if key not in found:
            found[key] = padded_flops(run, sizes, lanes)
        return found[key]

    return flops


def reread_bytes_on(plan: Plan, chip: Chip) -> Callable[..., float]:
    """:func:`reread_bytes` on a plan's mesh and a TPU, worked out once as :func:`flops_on` is; 0 elsewhere."""
    sizes, vmem = plan.sizes, chip.per_device().vmem
    if vmem is None or chip.switch:
        return lambda *of: 0.0
    found = plan.program.once(_Products).found.setdefault((tuple(sizes.items()), "again", vmem), dict)

    def again(run: Run, beside: int, cut: Sequence[bool] = (True,) * 3, blocks: int = 1) -> float:
        lhs, rhs = run.operands[:2]
        key = run.op, lhs and lhs.spec, rhs and rhs.spec, beside, *cut, blocks
        if key not in found:
            found[key] = reread_bytes(run, sizes, vmem, beside, cut, blocks)
        return found[key]

    return again


def matmul_dims(eqn: Any, lhs: Sequence[int], rhs: Sequence[int]) -> tuple[int, int, int, int]:
    """(batch, rows, columns, contracted) of a product with operands of these shapes."""
    p = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        dn = p["dimension_numbers"]
        kernel = math.prod(rhs) // max(1, rhs[dn.rhs_spec[0]])
        out = eqn.outvars[0].aval.shape
        kernel //= math.prod(p["lhs_dilation"])  # the gradient of a strided one: what lies between is zero
        places = lhs[dn.lhs_spec[0]] * math.prod(out[i] for i in dn.out_spec[2:]) // p["batch_group_count"]
        return 1, places, rhs[dn.rhs_spec[0]], kernel
    if eqn.primitive.name == "ragged_dot_general":
        dn = p["ragged_dot_dimension_numbers"]
        (lc, rc), (lb, rb) = dn.dot_dimension_numbers
        groups = set(dn.rhs_group_dimensions)
    else:
        ((lc, rc), (lb, rb)), groups = p["dimension_numbers"], set()
    batch = math.prod(lhs[i] for i in lb)
    k = math.prod(lhs[i] for i in lc)
    m = math.prod(x for i, x in enumerate(lhs) if i not in lc and i not in lb)
    n = math.prod(x for i, x in enumerate(rhs) if i not in rc and i not in rb and i not in groups)
    return batch, m, n, k


def model_flops(plan: Plan) -> float:
    """FLOPs of the program's products on whole arrays, recomputation left out."""
    return plan.program.once(_model_flops)


def _model_flops(program: Program) -> float:
    return _flops_of(program.root, 1)


def _flops_of(frame: Frame, count: int) -> float:
    """FLOPs of a frame that runs ``count`` times, recomputation left out."""
    total = 0.0
    for op in frame.ops:
        for inner in op.frames:
            total += _flops_of(inner, count * (1 if inner.trips is None else inner.trips))
        if not in_recomputation(op.eqn):
            total += count * (matmul_flops(op.eqn) if op.name in MATMULS else opaque_flops(op))
    return total


@dataclass(frozen=True, slots=True)
class RedundantMatmul:
    """Products of one line that several devices do alike.

    Attributes:
      name: the primitive.
      axes: the axes along which every device does the same; times: how many devices that are.
      dims: the names of the dims of their operands.
      flops: of a device in a step, those of the products as a whole; share: the part of all products' FLOPs that is done again.
      source: the user's line.
      fix: what would split them.
    """

    name: str
    axes: tuple[str, ...]
    times: int
    dims: tuple[str, ...]
    flops: float
    share: float
    source: str
    fix: str

    def __str__(self) -> str:
        return (
            f"every device along {'+'.join(self.axes)} does all of {self.name} at {self.source}: "
            f"{self.times} × the FLOPs needed; {self.fix}"
        )


def redundant_matmuls_despite_layout(plan: Plan) -> list[RedundantMatmul]:
    """The repeated products along axes that a rule of the layout gives to some dim, where they are much of the step."""
    asked = {a for rule in plan.layout.rules for a in rule.axes}
    found = [r for r in redundant_matmuls(plan) if asked.intersection(r.axes)]
    again = sum(r.flops * (1 - 1 / r.times) for r in found)
    return found if again >= MIN_REDUNDANT_FLOPS and sum(r.share for r in found) >= MIN_REDUNDANT_SHARE else []


@cached_on_plan
def redundant_matmuls(plan: Plan) -> list[RedundantMatmul]:
    """The products that a layout leaves whole on an axis of the mesh, those that cost most first."""
    total = 0.0
    found: dict[tuple[str, tuple[str, ...], str], list[Any]] = {}
    for step, count in _runs(plan.body, 1):
        if step.op.name not in MATMULS:
            total += count * local_opaque_flops(step, plan.sizes)
            continue
        if step.axes is None:
            continue
        flops = count * padded_flops(step, plan.sizes)
        total += flops
        used = {a for got in step.axes for a in got}
        idle = tuple(a for a, n in plan.sizes.items() if n > 1 and a not in used)
        if idle:
            entry = found.setdefault((step.op.name, idle, step.op.source), [0.0, {}])
            entry[0] += flops
            for v in step.op.ins:
                for i, dim in enumerate(() if v is None else plan.program.dims(v)):
                    if v is not None and dim is not None:
                        entry[1][dim] = plan.program.parts(v, i)[0]
    out = []
    for (name, idle, source), (flops, dims) in found.items():
        times = parts_of(idle, plan.sizes)
        share = flops * (1 - 1 / times) / total if total else 0.0
        fix = _what_splits(plan, idle, dims)
        out.append(RedundantMatmul(name, idle, times, tuple(dims), flops, share, source, fix))
    return sorted(out, key=lambda r: -r.share)


def _runs(body: Body, count: int) -> Iterator[tuple[Run, int]]:
    """The ops of a body that runs ``count`` times, those of inner bodies too, each with how often it runs."""
    for step in body.steps:
        for inner in step.bodies:
            yield from _runs(inner, count * (1 if inner.trips is None else inner.trips))
        if isinstance(step, Run):
            yield step, count


def _what_splits(plan: Plan, idle: Sequence[str], dims: Mapping[str, Part]) -> str:
    """What would split products with these dims (the major part of each) over an axis that none of them has."""
    for names, size in dims.values():
        for rule in (plan.layout.rules[i] for i in plan.layout.rules_of(names)):
            parts = parts_of(rule.axes, plan.sizes)
            if size % parts and set(idle) & set(rule.axes):
                return f"`{rule}` does not divide `{names[0]}` of {size}: make it a multiple of {parts}"
    names = " ".join(dims) or "that have names"
    return f"a rule `dim: {idle[0]}` for one of its dims ({names}) splits it"


def local_opaque_flops(run: Run, sizes: Mapping[str, int]) -> float:
    """FLOPs of one device's part of an opaque kernel: what it says itself, else its share of the factors that are split."""
    work = local_work(run, sizes)
    if work is not None and work.flops is not None:
        return work.flops
    axes = (
        run.op.eqn.params["newly_manual_axes"]
        if run.op.name == "shard_map"
        else {a for got in run.axes or () for a in got}
    )
    return opaque_flops(run.op) / parts_of(sorted(axes), sizes)


def local_work(run: Run, sizes: Mapping[str, int]) -> KernelWork | None:
    """What a kernel of :func:`meshpar.kernel_rule` says that one device computes and holds; None: it does not say."""
    op = run.op
    if op.name != "kernel" or op.eqn.params["kernel"].works is None:
        return None
    kernel = op.eqn.params["kernel"]
    avals, axes = [v.aval for v in op.eqn.invars], {}
    if run.axes and op.rule is not None:
        names = list(kernel.sizes([a.shape for a in avals], [v.aval.shape for v in op.eqn.outvars]))
        axes = dict(zip(names, run.axes, strict=False))
        avals = [
            jax.ShapeDtypeStruct(a.shape if shard is None else local_shape(a.shape, shard.spec, sizes), a.dtype)
            for a, shard in zip(avals, run.operands, strict=True)
        ]
    return kernel.work(avals, axes, dict(sizes))


def opaque_flops(op: Op) -> float:
    """FLOPs of the products inside a kernel of :func:`meshpar.kernel_rule` or a ``pallas_call``; those of a ``shard_map`` of the
    user's own, on all devices together; 0 for other ops.

    Of a Pallas kernel, what its ``cost_estimate`` says, else its products at every step of its grid (the larger branch of a
    condition; a block that it skips counts).
    """
    if op.name == "pallas_call":
        return _eqn_flops(op.eqn)
    if op.name == "shard_map":
        p = op.eqn.params
        return _flops_in(p["jaxpr"]) * math.prod(p["mesh"].shape[a] for a in p["newly_manual_axes"])
    if op.name != "kernel":
        return 0.0
    kernel, avals = op.eqn.params["kernel"], [v.aval for v in op.eqn.invars]
    if (whole := kernel.work(avals, {}, {})) is not None and whole.flops is not None:
        return whole.flops
    memo = _opaque.setdefault(kernel, {})
    key = tuple((a.shape, str(a.dtype)) for a in avals)
    if key not in memo:
        with OUTLINE(True):
            memo[key] = _flops_in(make_jaxpr(kernel.jitted, *avals).jaxpr)
    return memo[key]


def _flops_in(jaxpr: Any) -> float:
    return sum(map(_eqn_flops, jaxpr.eqns))


def _eqn_flops(eqn: Any) -> float:
    name, p = eqn.primitive.name, eqn.params
    if name in MATMULS:
        return matmul_flops(eqn)
    if name == "pallas_call":
        estimate = p.get("cost_estimate")
        if estimate is not None:
            return float(estimate.flops)
        return _flops_in(p["jaxpr"]) * math.prod(n for n in p["grid_mapping"].grid if isinstance(n, int))
    if name == "cond":
        return max(_flops_in(closed_parts(b)[0]) for b in p["branches"])
    bodies = [
        closed_parts(x)[0]
        for v in p.values()
        for x in (v if isinstance(v, tuple | list) else (v,))
        if hasattr(closed_parts(x)[0], "eqns")
    ]
    return sum(map(_flops_in, bodies)) * (p["length"] if name == "scan" else 1)


def matmul_flops(eqn: Any) -> float:
    """FLOPs of a product on whole arrays."""
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    batch, m, n, k = matmul_dims(eqn, lhs, rhs)
    return 2.0 * batch * m * n * k

"""FLOPs of matmuls and convolutions: of one device, of the model, inside opaque kernels, and redundant ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from ..compat.jax import in_recomputation, literal_array
from ..compat.loop_operands import loop_parts, operands_of_bodies
from ..hardware.chips import Chip
from ..plan.causes import name_of
from ..plan.plan import Plan
from ..plan.shard_shapes import itemsize, local_shape, shard_count
from ..plan.steps import Run
from ..program.ir import Frame, Op, Program, Value, location_of
from ..program.kernels import KernelWork
from ..program.names import SubDim
from ..rules.partial import MOVES, NEGATES
from .caching import cached_on_plan
from .tiles import padding_of

MIN_WARNED_SHARE = 0.5
"""Part of a step's FLOPs that must be redundant for a call to warn."""
MIN_WARNED_FLOPS = 1e9
"""FLOPs of a device in a step that must be redundant for a call to warn."""
MAX_FEW_ROWS = 32
"""Rows up to which a matmul takes as long as reading its larger operand: 8 and 32 were measured."""


def padded_flops(run: Run, sizes: Mapping[str, int], lanes: int = 1) -> float:
    """FLOPs of one device's share of a matmul, dims rounded up to the matrix unit.

    Args:
      sizes: axis → size of the mesh.
      lanes: side of the matrix unit. The contracted dim and one free dim round up to it, the other free dim to 8 rows (4 bytes an
        element) or 16 (2 bytes), whichever free dim gives less; of a convolution with more output channels than ``lanes``, these
        (libtpu 0.0.42: 320 channels take as long as 384); 1: nothing is rounded.
    """
    op = run.op
    rows = 1 if lanes == 1 else max(8, int(32 // itemsize(op.eqn.invars[0].aval)))
    batch, m, n, k = _local_matmul_dims(run, sizes)
    if 0 in (batch, m, n, k):
        return 0.0

    def up(size: int, to: int) -> int:
        return -(-size // to) * to

    result = up(m, rows) * up(n, lanes)
    if op.primitive.family != "conv" or n <= lanes:
        result = min(result, up(n, rows) * up(m, lanes))
    return 2.0 * batch * up(k, lanes) * result * (1.0 if lanes == 1 else _padding_of_heads(run, sizes))


def _padding_of_heads(run: Run, sizes: Mapping[str, int]) -> float:
    """The factor by which tiles increase the FLOPs of a device's share of a matmul that contracts or keeps the last two dims of an
    operand together: heads, and features that do not fill the lanes.

    The TPU compiler (libtpu 0.0.42) multiplies tiles of 8 heads by 128 features: the projections of a ViT with 16 heads of 64 take
    twice their FLOPs, with 12 heads 2.7 times. It merges heads and features only where it can choose the layout of the weight: if
    they are kept, in the forward pass (in the backward pass the features are innermost), without a further dim that they share the
    weight with (queries, keys and values as one array).
    """
    if run.op.primitive.family != "dot":
        return 1.0
    contracts, batches = run.op.eqn.params["dimension_numbers"]
    factors = [1.0]
    for var, shard, contracted, batch in zip(run.op.eqn.invars, run.operands, contracts, batches, strict=True):
        shape = local_shape(var.aval.shape, None if shard is None else shard.spec, sizes)
        groups = contracted, [i for i in range(len(shape)) if i not in (*contracted, *batch)]
        for group in groups:
            heads = [shape[i] for i in sorted(group) if shape[i] > 1]
            if max(group, default=-1) != len(shape) - 1 or len(heads) < 2:
                continue
            if group is contracted or len(heads) > 2 or in_recomputation(run.op.eqn):
                factors.append(padding_of(tuple(heads)))
    return max(factors)


def reread_bytes(
    plan: Plan, chip: Chip, run: Run, other_arrays: int = 0, cut: Sequence[bool] = (True,) * 3, blocks: int = 1
) -> float:
    """Bytes of the operands of one device's share of a matmul that are read from HBM beyond the first time; 0 on chips other
    than TPUs.

    The TPU compiler (libtpu 0.0.42) reads both operands once if one fits into VMEM, less ``vmem_reserved_bytes``. Otherwise it
    computes the result in tiles, and reads rows of one operand and columns of the other for each. A tile is as large as its float32
    accumulator and two buffers of each array allow: 1024 by 1152 for 2-byte elements in Llama 3 70B on v5p, 416 by 640 with five
    other arrays.

    Args:
      other_arrays: other arrays of the result's size that the kernel reads or writes.
      cut, blocks: for one of ``blocks`` chunks instead: whether (left operand, right operand, result) are chunked.
    """
    op, compiler, vmem = run.op, chip.compiler, chip.per_device().vmem
    if op.primitive.family != "dot" or vmem is None or chip.switch:
        return 0.0
    batch, m, n, k = _local_matmul_dims(run, plan.sizes)
    left, right, result = cut
    batch, k = batch // (blocks if left and right and result else 1), k // (1 if result else blocks)
    m, n = m // (blocks if left and not right else 1), n // (blocks if right and not left else 1)
    lhs, rhs = (k * size * itemsize(v.aval) for size, v in zip((m, n), op.eqn.invars, strict=False))
    if min(lhs, rhs) <= vmem - compiler.vmem_reserved_bytes:
        return 0.0
    side = math.sqrt(compiler.vmem_tile_bytes / (4.0 + 2.0 * itemsize(op.eqn.outvars[0].aval) * (1 + other_arrays)))
    return batch * (lhs * (max(1.0, n / side) - 1) + rhs * (max(1.0, m / side) - 1))


def smaller_operand_bytes(run: Run, sizes: Mapping[str, int]) -> float:
    """Bytes of the smaller operand of one device's share of a matmul, for one element of its batch dims."""
    _, m, n, k = _local_matmul_dims(run, sizes)
    return min(k * size * itemsize(v.aval) for size, v in zip((m, n), run.op.eqn.invars, strict=False))


def few_rows(run: Run, sizes: Mapping[str, int]) -> bool:
    """Whether one operand of a device's share of a matmul has at most :data:`MAX_FEW_ROWS` rows, and the other one more."""
    if run.op.primitive.family != "dot":
        return False
    _, m, n, _ = _local_matmul_dims(run, sizes)
    return min(m, n) <= MAX_FEW_ROWS < max(m, n)


def loading_flops(run: Run, sizes: Mapping[str, int], min_rows: int) -> float:
    """FLOPs of the time in which the matrix units load the larger operand of a device's share of a matmul with few rows, else 0.

    Args:
      min_rows: rows that take as long (``CompilerModel.min_matmul_rows``).
    """
    batch, m, n, k = _local_matmul_dims(run, sizes)
    return 2.0 * batch * min_rows * max(m, n) * k if few_rows(run, sizes) else 0.0


def single_row_elements(run: Run, sizes: Mapping[str, int]) -> float:
    """Elements of the larger operand of one device's share of a matmul whose other operand is one row; 0 for other matmuls.

    The TPU compiler (libtpu 0.0.42) computes such a matmul on the vector units, as multiplications and a reduction: on v6e it takes
    361,500 cycles for the 58.7 million weights of two projections, 162 elements per cycle. With 8 rows it uses the matrix units.
    """
    if run.op.primitive.family != "dot" or run.rows > 1:
        return 0.0
    batch, m, n, k = _local_matmul_dims(run, sizes)
    return float(batch * max(m, n) * k) if min(m, n) == 1 and k > 1 else 0.0


def _local_matmul_dims(run: Run, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    """(batch, rows, columns, contracted) sizes of one device's share of a matmul or convolution."""
    lhs, rhs = (
        local_shape(var.aval.shape, None if shard is None else shard.spec, sizes)
        for var, shard in zip(run.op.eqn.invars[:2], run.operands, strict=False)
    )
    assert run.op.primitive.matmul_dims is not None
    return run.op.primitive.matmul_dims(run.op.eqn, lhs, rhs)


def model_flops(plan: Plan) -> float:
    """FLOPs of the program's matmuls on all devices together, without recomputation, redundant work and idle slots of pipelines.

    Attention counts two matmuls with all scores in the forward pass and four in the backward pass, whatever the mask and the kernel
    are (Chowdhery et al., PaLM, 2022, appendix B: 6 FLOPs a parameter and token, and 12 · layers · heads · head_dim · seq). Of a
    mixture of experts the active parameters count: matmuls with one-hot masks are lookups, without FLOPs, and rows that such a
    mask leaves empty, as padding of the capacity of experts, count for nothing (:func:`needed_fractions`).
    """
    return plan.program.traced.cached(_model_flops)


def _model_flops(program: Program, frame: Frame | None = None) -> float:
    """The model FLOPs of one run of a frame, by default of the program.

    A recomputed call is left out with its ops, which do not say that they are recomputed."""
    total, needed = 0.0, program.cached(needed_fractions)
    for op in (frame or program.root).ops:
        if not in_recomputation(op.eqn):
            inner = (_model_flops(program, f) * (1 if f.trip_count is None else f.trip_count) for f in op.frames)
            total += op.primitive.flops(op.eqn, model=True) * needed.get(op, 1.0) + sum(inner)
    return total


def _keeps_zeros(op: Op) -> bool:
    """Whether the result has the nonzero elements of the operand: rearranged, repeated, converted, negated or added up."""
    entry = op.primitive
    moves = not {MOVES, NEGATES}.isdisjoint(entry.partial) and entry.family != "barrier"
    return moves or entry.family in ("broadcast", "cast", "rounding") or op.name == "reduce_sum"


def needed_fractions(program: Program) -> dict[Op, float]:
    """Matmul → the fraction of its FLOPs that the model needs, if it is below 1: 0 with a one-hot mask as operand or as the factor
    of the result; of rows that a mask selected, the nonzero elements of the mask per row.

    A mask is the comparison of indices with an iota, and what multiplications, additions and :func:`_keeps_zeros` make of it. With
    8 experts of 640 slots for 2,048 tokens of two experts each, 4,096 of 5,120 rows are needed.
    """
    iota, share = dict[Value, float](), dict[Value, float]()
    nonzero = dict[Value, float]()  # the number of these elements of a mask
    valid = dict[Value, float]()  # the number of indices that are not negative
    needed, readers = dict[Op, float](), defaultdict[Value, list[Op]](list)

    def passed(a: Value | None, b: Value | None) -> None:
        """``b`` is a part or a stack of ``a``, or ``a`` moved."""
        if a is not None and b is not None and a is not b and a.elements:
            more = b.elements / a.elements
            for table, scale in ((iota, 1.0), (share, 1.0), (nonzero, more), (valid, more)):
                if a in table:
                    table[b] = table[a] * scale

    def visit(frame: Frame) -> None:
        for op in frame.ops:
            for body, operands in zip(op.frames, operands_of_bodies(op.eqn, op.ins) if op.frames else (), strict=True):
                carries = loop_parts(op.eqn).carries if op.primitive.loop else ()
                for k, (outer, inner) in enumerate(zip(operands, body.ins(), strict=True)):
                    passed(None if k in carries else outer, inner)
                visit(body)
                for k, (inner, outer) in enumerate(zip(body.outs(), op.outs, strict=False)):
                    passed(None if k < len(carries) else inner, outer)
            if op.frames or not op.outs:
                continue
            (out, *_), ins = op.outs, [v for v in op.ins if v is not None]
            for v in ins:
                readers[v].append(op)
            masks, shares = [nonzero[v] for v in ins if v in nonzero], [share[v] for v in ins if v in share]
            if op.name == "iota":
                iota[out] = op.eqn.params["shape"][op.eqn.params["dimension"]]
            elif _keeps_zeros(op) and ins:
                passed(ins[0], out)
                if masks:  # a sum has as many, at most
                    nonzero[out] = min(masks[0] * max(1.0, out.elements / ins[0].elements), out.elements)
            elif op.name == "eq" and sum(v in iota for v in ins) == 1 and len(ins) == 2:
                index, size = sorted(ins, key=lambda v: v in iota)[0], next(iota[v] for v in ins if v in iota)
                nonzero[out] = valid.get(index, index.elements) * out.elements / index.elements / size
            elif op.primitive.family == "dot" and masks:
                needed[op] = 0.0
                mask = next(v for v in ins if v in nonzero)
                own, kept = op.factor_rule.ins[op.ins.index(mask)], op.factor_rule.outs[0]
                rows = math.prod(n for n, factors in zip(out.shape, kept, strict=True) if factors in own)
                if (
                    len(masks) == 2 or rows == mask.elements
                ):  # of two masks, or of a mask and a factor of each of its rows
                    nonzero[out] = min(masks)
                elif masks[0] < rows:
                    share[out] = masks[0] / rows
            elif op.primitive.family == "dot" and shares:
                needed[op] = min(shares)
                if len(shares) == 1:
                    share[out] = shares[0]
            elif op.primitive.elementwise:
                zeros = all(not literal_array(x).any() for x in op.eqn.invars if isinstance(x, Literal))
                if masks and op.name in ("mul", "and"):
                    nonzero[out] = min(masks)
                elif masks and zeros and len(masks) == len(ins) and op.name in ("add", "add_any", "or", "gt", "ne"):
                    nonzero[out] = sum(masks)
                elif masks and op.name in ("sub", "add") and len(ins) == 1:
                    valid[out] = masks[0]  # one less than a position: -1 where there is none
                elif shares and all(v in share or (v.op is not None and v.op.name == "broadcast_in_dim") for v in ins):
                    share[out] = min(shares)  # the bias of a row is no row of its own

    def multiplies(op: Op, value: Value) -> bool:
        """Whether an op multiplies the elements of a value by a mask."""
        masks = [k for k, v in enumerate(op.ins) if v in nonzero and v is not value]
        if op.primitive.family != "dot" or not masks:
            return op.name == "mul" and bool(masks)
        dims = op.factor_rule.ins
        return set(dims[masks[0]]) <= set(dims[op.ins.index(value)])

    def only_masked(value: Value) -> bool:
        """Whether masks multiply a value before it is used: the gradient of a mask."""
        through = readers[value]
        return bool(through) and all(
            (_keeps_zeros(op) and only_masked(op.outs[0])) or multiplies(op, value) for op in through
        )

    visit(program.root)
    return {op: 0.0 if only_masked(op.outs[0]) else n for op, n in needed.items()}


@dataclass(frozen=True, slots=True)
class RedundantMatmul:
    """The matmuls of one source line, or of one part of all layers, that several devices compute redundantly.

    Attributes:
      name: the primitive, as causes call it.
      axes: mesh axes along which all devices compute the same.
      times: number of these devices.
      dims: names of the operands' dims.
      flops: of these matmuls, of one device in a step.
      share: the redundant part of the FLOPs of all matmuls, in [0, 1].
      source: the user's line, and the part of the model.
      fix: a change of the layout that splits them.
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
            f"{self.name} at {self.source}: every device along `{'+'.join(self.axes)}` computes all of it, "
            f"{self.times} × the FLOPs needed; {self.fix}"
        )


def redundant_matmuls_despite_layout(plan: Plan) -> list[RedundantMatmul]:
    """The redundant matmuls along axes that some rule of the layout uses; empty if they are a small part of the step."""
    used = set(plan.layout.axes)
    redundant = [r for r in redundant_matmuls(plan) if used.intersection(r.axes)]
    flops = sum(r.flops * (1 - 1 / r.times) for r in redundant)
    share = sum(r.share for r in redundant)
    return redundant if flops >= MIN_WARNED_FLOPS and share >= MIN_WARNED_SHARE else []


@cached_on_plan
def redundant_matmuls(plan: Plan) -> list[RedundantMatmul]:
    """The matmuls that are replicated over some mesh axis, one entry for each line or part of all layers and set of axes."""
    total = 0.0
    found: dict[tuple[str, tuple[str, ...], str], list[Any]] = {}
    for step, count in plan.body.walk():
        if not isinstance(step, Run):
            continue
        if not step.op.primitive.matmul:
            total += count * local_opaque_flops(step, plan.sizes)
            continue
        if step.axes is None:
            continue
        flops = count * padded_flops(step, plan.sizes)
        total += flops
        used = {a for got in step.axes for a in got}
        idle = tuple(a for a, n in plan.sizes.items() if n > 1 and a not in used)
        if idle:
            entry = found.setdefault((step.op.name, idle, step.op.location_of_layers), [0.0, {}, []])
            entry[0] += flops
            entry[2].append(step.op)
            for v in step.op.ins:
                for i, dim in enumerate(() if v is None else plan.program.dims(v)):
                    if v is not None and dim is not None:
                        entry[1][dim] = plan.program.sub_dims(v, i)[0]
    out = []
    for (_, idle, _), (flops, dims, ops) in found.items():
        times = shard_count(idle, plan.sizes)
        share = flops * (1 - 1 / times) / total if total else 0.0
        fix = _suggested_fix(plan, idle, dims)
        out.append(RedundantMatmul(name_of(ops[0]), idle, times, tuple(dims), flops, share, location_of(ops), fix))
    return sorted(out, key=lambda r: -r.share)


def _suggested_fix(plan: Plan, idle: Sequence[str], dims: Mapping[str, SubDim]) -> str:
    """Advice: a rule or a size with which matmuls with these dims (name → its major part) are split over an idle axis."""
    for names, size in dims.values():
        for rule in (plan.layout.rules[i] for i in plan.layout.rules_of(names)):
            parts = shard_count(rule.axes, plan.sizes)
            if size % parts and set(idle) & set(rule.axes):
                return f"`{rule}` does not divide `{names[0]}` of {size}: make it a multiple of {parts}"
    return f"a rule for one of `{' '.join(dims)}` over `{idle[0]}` splits it" if dims else "its dims have no names"


def local_opaque_flops(run: Run, sizes: Mapping[str, int]) -> float:
    """FLOPs of one device's share of an opaque kernel; 0 for other ops.

    As the kernel declares, else the FLOPs of the unsharded op divided by the axes of its split factors.
    """
    if run.op.primitive.nested_flops is None:
        return 0.0
    work = local_work(run, sizes)
    if work is not None and work.flops is not None:
        return work.flops
    axes = (
        run.op.eqn.params["newly_manual_axes"]
        if run.op.primitive.family == "shard_map"
        else {a for got in run.axes or () for a in got}
    )
    return run.op.primitive.flops(run.op.eqn) / shard_count(sorted(axes), sizes)


def local_work(run: Run, sizes: Mapping[str, int]) -> KernelWork | None:
    """The FLOPs and memory that a kernel of :func:`meshpar.kernel_rule` declares for one device; None: it declares none."""
    op = run.op
    if op.primitive.family != "kernel" or op.eqn.params["kernel"].works is None:
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

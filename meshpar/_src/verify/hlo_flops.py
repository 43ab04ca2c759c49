"""Floating-point operations of a compiled program, from its HLO text: matmuls, convolutions and cost estimates of kernels."""

from __future__ import annotations

import math
import re

import numpy as np

from .hlo import Run, total
from .hlo_text import Computation, Instruction, arrays

_STATED = re.compile(r'"cost_estimate":\{"flops":"?(\d+)')


def flops(text: str, *, unknown: int = 1) -> float:
    """Floating-point operations of one device in a step: 2 per multiply-add of matmuls and convolutions, nothing for other ops.

    Multiplications with padding are not counted: the TPU compiler expresses a batched matmul as a convolution most of whose taps
    are padding. A Pallas kernel counts with its ``cost_estimate``, a conditional with its most expensive branch.

    Args:
      text: an HLO module, right after partitioning or final.
      unknown: trip count of loops whose trip count is not known.

    Raises:
      ValueError: the text is no HLO module.
    """
    return total(text, _of, unknown)


def _of(run: Run) -> int:
    """Floating-point operations of one execution of an instruction."""
    i = run.instruction
    if i.opcode == "dot":
        return _dot(i, run.scope.computation)
    if i.opcode == "convolution":
        return _convolution(i, run.scope.computation)
    if i.opcode == "custom-call" and (stated := _STATED.search(i.attributes)):
        return int(stated[1])
    return 0


def _sizes(shape: str) -> tuple[int, ...]:
    return arrays(shape)[0][1]


def _operand(i: Instruction, number: int, computation: Computation) -> tuple[int, ...]:
    operand = computation.get(i.operands[number])
    if operand is None:
        raise ValueError(f"operand {i.operands[number]} of {i.name} is not in its computation")
    return _sizes(operand.shape)


def _dot(i: Instruction, computation: Computation) -> int:
    left = _operand(i, 0, computation)
    m = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    contracted = [int(n) for n in m[1].split(",") if n] if m else []
    return 2 * math.prod(_sizes(i.shape)) * math.prod(left[d] for d in contracted)


def _convolution(i: Instruction, computation: Computation) -> int:
    """2 · batch size · output features · input features per group · pairs (position, tap) that read an element."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    assert labels is not None, i.attributes[:200]
    left, right = _operand(i, 0, computation), _operand(i, 1, computation)
    out = _sizes(i.shape)
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    total = 2 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
    otherwise = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    for d in range(len(out) - 2):
        sizes = [of[labels[k].index(str(d))] for k, of in enumerate((left, right, out), 1)]
        options = [int(given[key].split("x")[d].split("_")[0]) if key in given else n for key, n in otherwise.items()]
        total *= _taps(*sizes, *options)
    return total


def _taps(size: int, taps: int, positions: int, stride: int, pad: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Pairs (position, tap) of one dimension that read an element of the operand, not padding or a gap of the dilation."""
    at = np.arange(positions)[:, None] * stride + np.arange(taps)[None, :] * rhs_dilation - pad
    return int(((at >= 0) & (at <= (size - 1) * lhs_dilation) & (at % lhs_dilation == 0)).sum())

"""PyTorch's and DeepGEMM's counterparts of the cases that `benchmarks/device.py` times, where they are installed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import device_cases

from meshpar_kernels.published_model_shapes import MATMULS, MODELS

CALLS, REPEATS = 20, 5


def seconds(kernel: str, shape: str, load: str, name: str) -> tuple[float, str]:
    """Median seconds of a call by CUDA events, and the library's version.

    Raises:
      NotImplementedError: the library is not installed, or has no counterpart of the kernel.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError(f"torch is not installed: {error}") from None
    call = _deep_gemm(kernel, shape, load, torch) if name == "deep_gemm" else _torch(kernel, shape, load, torch)
    for _ in range(3):
        call()
    results = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        results.append(begin.elapsed_time(end) / CALLS / 1e3)
    return statistics.median(results), str(torch.__version__)


def _torch(kernel: str, shape: str, load: str, torch: Any) -> Callable[[], Any]:
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    if kernel in device_cases.ATTENTION_KERNELS:
        return _attention(kernel, shape, torch)
    if kernel == "scaled":
        return _scaled(shape, load, torch)
    if shape in MATMULS:
        s = MATMULS[shape]
        sizes = torch.tensor(device_cases.group_sizes(s.m, s.groups, load), device="cuda")
        ends = torch.cumsum(sizes, 0).to(torch.int32)
        grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        lhs, grad = normal((s.m, s.k)), normal((s.m, s.n))
        if kernel == "d rhs":
            return functools.partial(grouped, lhs.t(), grad, offs=ends)
        if kernel == "d lhs":
            return functools.partial(grouped, grad, normal((s.groups, s.k, s.n)).transpose(-2, -1), offs=ends)
        if kernel == "forward":
            return functools.partial(grouped, lhs, normal((s.groups, s.k, s.n)), offs=ends)
        raise NotImplementedError(f"torch has no {kernel}")
    m = MODELS[shape]
    rows = device_cases.TOKENS * m.k
    if kernel == "permute":
        x, index = normal((device_cases.TOKENS, m.embed)), torch.randperm(rows, device="cuda") % device_cases.TOKENS
        return functools.partial(torch.index_select, x, 0, index)
    if kernel == "combine":
        y = normal((rows, m.embed))
        index = torch.randperm(rows, device="cuda").reshape(-1, m.k)
        weight = torch.rand((device_cases.TOKENS, m.k, 1), device="cuda", dtype=torch.bfloat16)
        return lambda: (y[index] * weight).sum(1)
    raise NotImplementedError(f"torch has no {kernel}")


def _attention(kernel: str, shape: str, torch: Any) -> Callable[[], Any]:
    """Causal attention with grouped K/V heads, by the backend that torch chooses."""
    s = device_cases.ATTENTION[shape]
    grad = kernel == "d attention"

    def normal(heads: int) -> Any:
        return torch.randn((1, heads, s.tokens, s.head_dim), device="cuda", dtype=torch.bfloat16, requires_grad=grad)

    q, k, v = (normal(heads) for heads in (s.heads, s.kv_heads, s.kv_heads))
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True
    )
    if not grad:
        return attend
    cotangent = torch.randn_like(q)
    return lambda: torch.autograd.grad(attend(), (q, k, v), cotangent)


def _scaled(shape: str, load: str, torch: Any) -> Callable[[], Any]:
    """torch's grouped matmul of float8_e4m3fn with one scale a row and column, not one a block."""
    s = MATMULS[shape]
    ends = torch.cumsum(torch.tensor(device_cases.group_sizes(s.m, s.groups, load), device="cuda"), 0).to(torch.int32)
    lhs = torch.randn((s.m, s.k), device="cuda").to(torch.float8_e4m3fn)
    rhs = torch.randn((s.groups, s.n, s.k), device="cuda").to(torch.float8_e4m3fn).transpose(-2, -1)
    scales = torch.rand((s.m,), device="cuda"), torch.rand((s.groups, s.n), device="cuda")
    return lambda: torch._scaled_grouped_mm(lhs, rhs, *scales, offs=ends, out_dtype=torch.bfloat16)


def _deep_gemm(kernel: str, shape: str, load: str, torch: Any) -> Callable[[], Any]:
    """DeepGEMM's contiguous grouped matmul, which needs groups of a multiple of 128 rows and weights [G, N, K]."""
    try:
        import deep_gemm  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError(f"deep_gemm is not installed: {error}") from None
    if kernel != "forward" or shape not in MATMULS:
        raise NotImplementedError(f"deep_gemm is compared in the forward matmul only, not in {kernel}")
    s = MATMULS[shape]
    sizes = device_cases.group_sizes(s.m, s.groups, load)
    if (sizes % 128).any():
        raise NotImplementedError("deep_gemm takes groups of a multiple of 128 rows; this load has others")
    normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    group = torch.repeat_interleave(torch.arange(s.groups), torch.tensor(sizes)).to(device="cuda", dtype=torch.int32)
    lhs, rhs, out = normal((s.m, s.k)), normal((s.groups, s.n, s.k)), normal((s.m, s.n))
    return lambda: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(lhs, rhs, out, group)

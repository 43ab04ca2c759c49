"""What `benchmarks/gpu.py` measures on a GPU, each call in a process of its own: times, the machine, PyTorch."""

from __future__ import annotations

import functools
import json
import time
from typing import Any


def seconds_per_call(function, arguments, rough_limit: float = 0.4, inside=lambda calls: calls) -> float:
    """Seconds of one call on the device, from loops of two lengths inside of one program. A few microseconds of
    the loop itself are in it. `inside` puts a loop of calls on several devices."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def calls(times, first, *rest):
        # Each call needs one element that the call before decided, and all results are kept: else XLA would take
        # the call out of the loop, or compute a part of it.
        def one(_, state):
            first, before = state
            corner = (0,) * first.ndim
            decided = sum((x.reshape(-1)[0].astype(jnp.float32) for x in before), start=jnp.float32(0))
            first = first.at[corner].set(jnp.where(decided == 1234.5, 1, first[corner]))
            return first, jax.tree.leaves(function(first, *rest))

        shapes = jax.tree.leaves(jax.eval_shape(function, first, *rest))
        return lax.fori_loop(0, times, one, (first, [jnp.zeros(s.shape, s.dtype) for s in shapes]))[1]

    @functools.partial(jax.jit, static_argnums=0)
    def loop(times, *arguments):
        return inside(functools.partial(calls, times))(*arguments)

    def wall(times: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(loop(times, *arguments))
        return time.perf_counter() - began

    wall(2)
    rough = max(wall(2) / 2, 1e-6)
    long = min(max(int(rough_limit / rough), 6), 2000)
    short = max(long // 6, 2)
    wall(long), wall(short)
    results = sorted((wall(long) - wall(short)) / (long - short) for _ in range(5))
    return results[2]


def machine() -> dict[str, Any]:
    """The device's name, its copy bandwidth in GB/s, and its TFLOP/s in a large dense bfloat16 product."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    if device.platform not in ("gpu", "tpu"):
        raise SystemExit("no GPU and no TPU")
    x = jnp.ones((1 << 29,), jnp.bfloat16)
    copy = seconds_per_call(lambda x: x + 1, [x])
    del x
    best = 0.0
    for size in (4096, 8192):
        a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        best = max(best, 2 * size**3 / seconds_per_call(lambda a: a @ a, [a]) / 1e12)
    facts = {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
    }
    return facts | {"copy": 2 * 2 * (1 << 29) / copy / 1e9, "peak": best}


def measure(kernel: str, shape: str, load: str) -> None:
    """Print a row (JSON) for each implementation in JAX; ours last, with its error."""
    import gpu_cases
    import jax
    import numpy as np

    case = gpu_cases.make(kernel, shape)
    arguments = gpu_cases.draw(case, kernel, shape, load)
    want = None

    def row(name, function, timed=True):
        facts: dict[str, Any] = {"name": name}
        try:
            got = jax.block_until_ready(jax.jit(function)(*arguments))
            if want is not None:
                facts["error"] = difference(got, want)
            del got
            if timed:
                facts["seconds"] = seconds_per_call(function, arguments)
        except Exception as error:  # a row that fails must not cost the others
            facts["failed"] = f"{type(error).__name__}: {error}"[:300]
        print("ROW " + json.dumps(facts), flush=True)

    try:
        reference = jax.jit(case.others["reference"])(*arguments)
        want = [np.asarray(x, np.float32) for x in jax.tree.leaves(reference)]
        del reference
    except Exception as error:
        print("ROW " + json.dumps({"name": "reference", "failed": str(error)[:300]}), flush=True)
    routing = kernel in gpu_cases.ROUTING_KERNELS
    for name, function in case.others.items():
        if name != "reference" or routing:  # the reference of a product multiplies all by all
            row(name, function)
    row("meshpar", case.ours)


def tune(kernel: str, shape: str, load: str) -> None:
    """Print a row for each tile that runs: its seconds, and its error against the tile that the kernel picks."""
    import gpu_cases
    import jax
    import numpy as np

    case = gpu_cases.make(kernel, shape)
    arguments = gpu_cases.draw(case, kernel, shape, load)
    want = [np.asarray(jax.jit(case.ours)(*arguments), np.float32)]
    print("ROW " + json.dumps({"tile": None, "seconds": seconds_per_call(case.ours, arguments, 0.1)}), flush=True)
    for how in gpu_cases.choices(kernel, shape):
        row: dict[str, Any] = dict(how)
        function = gpu_cases.with_options(kernel, how)
        try:
            row["error"] = difference(jax.jit(function)(*arguments), want)
            row["seconds"] = seconds_per_call(function, arguments, 0.1)
        except Exception as error:  # tiles that do not fit
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        print("ROW " + json.dumps(row), flush=True)


def difference(got: Any, want: list[Any]) -> float:
    """Largest difference over the largest value, over all results; NaN counts as infinite."""
    import jax
    import numpy as np

    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), want, strict=False):
        delta = np.abs(np.asarray(g, np.float32) - w).max() / max(float(np.abs(w).max()), 1e-30)
        worst = max(worst, float(delta) if np.isfinite(delta) else float("inf"))
    return worst


def measure_torch(kernel: str, shape: str, load: str) -> None:
    """Print a row for PyTorch's grouped product, or its way of routing."""
    import gpu_cases
    import torch  # pyright: ignore[reportMissingImports]

    from meshpar_kernels.shapes import MATMULS, MODELS

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    if shape in MATMULS:
        s = MATMULS[shape]
        sizes = torch.tensor(gpu_cases.group_sizes(s.m, s.groups, load), device="cuda")
        ends = torch.cumsum(sizes, 0).to(torch.int32)
        product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        lhs, grad = normal(s.m, s.k), normal(s.m, s.n)
        if kernel == "d rhs":
            call = functools.partial(product, lhs.t(), grad, offs=ends)
        elif kernel == "d lhs":
            call = functools.partial(product, grad, normal(s.groups, s.k, s.n).transpose(-2, -1), offs=ends)
        elif kernel == "forward":
            call = functools.partial(product, lhs, normal(s.groups, s.k, s.n), offs=ends)
        else:
            return
        name = "torch grouped_mm"
    else:
        m = MODELS[shape]
        name = "torch"
        if kernel == "permute":
            x = normal(gpu_cases.TOKENS, m.embed)
            index = torch.randperm(gpu_cases.TOKENS * m.k, device="cuda") % gpu_cases.TOKENS
            call = functools.partial(torch.index_select, x, 0, index)
        elif kernel == "combine":
            y = normal(gpu_cases.TOKENS * m.k, m.embed)
            index = torch.randperm(gpu_cases.TOKENS * m.k, device="cuda").reshape(-1, m.k)
            weight = torch.rand(gpu_cases.TOKENS, m.k, 1, device="cuda", dtype=torch.bfloat16)

            def call():
                return (y[index] * weight).sum(1)
        else:
            return
    for _ in range(3):
        call()
    results = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            call()
        end.record()
        torch.cuda.synchronize()
        results.append(begin.elapsed_time(end) / 20e3)
    facts = {"name": f"{name} {torch.__version__}", "seconds": sorted(results)[2]}
    print("ROW " + json.dumps(facts), flush=True)

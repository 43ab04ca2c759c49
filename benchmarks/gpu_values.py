"""Values of the GPU kernels at small and odd shapes against NumPy in float64; a part of `benchmarks/gpu.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import gpu_shared
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np

from meshpar_kernels import combine, grouped_matmul, grouped_matmul_transpose, permute, route

RNG = np.random.default_rng(7)
SIZES = {
    "uneven": [129, 0, 100, 41],
    "one group": [0, 300, 0, 0],
    "none": [0, 0, 0, 0],
    "with a tail": [64, 1, 63, 7],
    "too many": [200, 200, 2**31 - 1, 4],
}
ROWS, K, N, GROUPS = 300, 192, 320, 4


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def error(got: jax.Array, want: np.ndarray) -> float:
    """Largest difference over the largest value; infinite for NaN."""
    delta = np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0)
    return float(delta) if np.isfinite(delta) else float("inf")


def cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Name, and the error of our kernel."""
    for name, sizes in SIZES.items():
        yield f"grouped_matmul, {name}", lambda sizes=sizes: product(sizes)
        yield f"grouped_matmul_transpose, {name}", lambda sizes=sizes: transpose(sizes)
    sizes = SIZES["uneven"]
    yield "grouped_matmul, transpose_rhs", lambda: product(sizes, transpose_rhs=True)
    yield "grouped_matmul, swiglu", lambda: product(sizes, activation="swiglu")
    scaled = {"row_scale": normal(ROWS, dtype=jnp.float32)}
    yield "grouped_matmul, row_scale", lambda: product(sizes, **scaled)
    both = scaled | {"activation": "swiglu", "transpose_rhs": True, "group_offset": 1}
    yield "grouped_matmul, everything", lambda: product(sizes, **both)
    indices = jnp.asarray([*RNG.integers(0, 50, ROWS - 2), -1, 50], jnp.int32)
    yield "grouped_matmul, lhs_indices", lambda: product(sizes, rows=50, lhs_indices=indices)
    yield "grouped_matmul, 40 rows", lambda: product([9, 0, 11, 14], rows=40)
    yield "grouped_matmul, float16", lambda: product(sizes, dtype=jnp.float16)
    yield "grouped_matmul, float32 result", lambda: product(sizes, out_dtype=jnp.dtype(jnp.float32))
    yield "grouped_matmul, large", lambda: product([700, 0, 1000, 348], rows=2048, k=1024, n=768)
    yield "grouped_matmul_transpose, row_scale", lambda: transpose(sizes, **scaled)
    yield "grouped_matmul_transpose, large", lambda: transpose([700, 0, 1000, 348], rows=2048, k=768, n=512)
    for tokens in (1, 40, 1000):
        yield f"route, mixtral, {tokens} tokens", lambda tokens=tokens: routed(tokens, 8, 2)
        options = {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5, "bias": True}
        yield (
            f"route, deepseek-v3, {tokens} tokens",
            lambda tokens=tokens, options=options: routed(tokens, 256, 8, **options),
        )
    yield "permute and combine", moved
    if jax.device_count() > 1:
        yield from gpu_shared.value_cases()


def product(sizes, *, rows=ROWS, k=K, n=N, dtype=jnp.bfloat16, out_dtype=None, **options) -> float:
    """Of `grouped_matmul`, with NaN in the rows of no group."""
    groups = 2 if "group_offset" in options else GROUPS
    wide = 2 * n if "activation" in options else n
    lhs = normal(rows, k, dtype=dtype)
    if "lhs_indices" not in options:
        lhs = lhs.at[min(sum(sizes), rows) :].set(jnp.nan)
    rhs = normal(groups, wide, k, dtype=dtype) if options.get("transpose_rhs") else normal(groups, k, wide, dtype=dtype)
    got = grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation="pallas_gpu", out_dtype=out_dtype, **options)
    return error(got, oracle.grouped_matmul(lhs, rhs, sizes, **options))


def transpose(sizes, *, rows=ROWS, k=K, n=N, **options) -> float:
    """Of `grouped_matmul_transpose`, with NaN in the rows of no group."""
    used = min(sum(sizes), rows)
    lhs, rhs = normal(rows, k).at[used:].set(jnp.nan), normal(rows, n).at[used:].set(jnp.nan)
    got = grouped_matmul_transpose(lhs, rhs, jnp.asarray(sizes), implementation="pallas_gpu", **options)
    return error(got, oracle.grouped_matmul_transpose(lhs, rhs, sizes, **options))


def routed(tokens, experts, k, *, bias=False, **options) -> float:
    """Of `route`: its weights; infinite if a choice, rank or count is another."""
    logits = np.asarray(RNG.normal(size=(tokens, experts)), np.float32)
    if tokens > 20:
        logits[3, 2], logits[5], logits[9], logits[11, 4] = np.nan, -np.inf, 0.0, np.inf
    shift = np.asarray(RNG.normal(size=experts), np.float32) if bias else None
    with_bias = {} if shift is None else {"bias": jnp.asarray(shift)}
    plan = route(jnp.asarray(logits), k, implementation="pallas_gpu", **options, **with_bias)
    want = oracle.route(logits, k, bias=shift, **options)
    pairs = zip((plan.expert, plan.counts, plan.rank), (want[0], *want[2:4]), strict=True)
    same = all((np.asarray(a) == b).all() for a, b in pairs)
    return error(plan.weight, want[1]) if same else float("inf")


def moved() -> float:
    """Of `permute` and `combine`, with a capacity that drops some."""
    plan = route(normal(100, 8, dtype=jnp.float32), 2, capacity=20, implementation="pallas_gpu")
    rows = oracle.buffer_rows(*(np.asarray(x) for x in (plan.expert, plan.rank, plan.offsets)))
    x, y = normal(100, 1096), normal(plan.buffer_rows, 1096)
    there = permute(x, plan, weight=plan.weight, implementation="pallas_gpu")
    back = combine(y, plan, weight=plan.weight, implementation="pallas_gpu")
    return max(
        error(there, oracle.permute(x, rows, plan.buffer_rows, plan.weight)),
        error(back, oracle.combine(y, rows, plan.weight)),
    )


def main() -> None:
    """Print one row (JSON) for each case."""
    for name, run in cases():
        row: dict[str, object] = {"name": name}
        try:
            row["error"] = run()
        except Exception as problem:  # a case that fails must not cost the others
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

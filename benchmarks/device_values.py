"""Values of the kernels over random loads and odd shapes, against NumPy in float64: the first tasks of `benchmarks/device.py`."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import attention_oracle
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import nvlink_cases
from device_cases import FORMS, forms
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from meshpar_kernels import (
    combine,
    grouped_matmul,
    grouped_matmul_transpose,
    permute,
    quantized_grouped_matmul,
    ring_attention,
    route,
    scaled_grouped_matmul,
)
from meshpar_kernels.collective_matmul import gpu as collective_matmul_gpu

RNG = np.random.default_rng(7)
SIZES = {
    "uneven": [129, 0, 100, 41],
    "one group": [0, 300, 0, 0],
    "none": [0, 0, 0, 0],
    "with a tail": [64, 1, 63, 7],
    "too many": [200, 200, 2**31 - 1, 4],
}
ROWS, K, N, GROUPS = 300, 192, 320, 4


LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4}
"""Largest error over the largest value, by the dtype of the result: a few roundings of it. A lost row is an error of about 1."""


def kernel() -> str:
    """The implementation under test: the kernel of this device."""
    return {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}[jax.default_backend()]


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def error(got: jax.Array, want: np.ndarray) -> float:
    """Largest difference over the largest value; infinite for NaN."""
    delta = np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0)
    return float(delta) if np.isfinite(delta) else float("inf")


def cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields (`"kernel: case"`, function that returns the largest error), the most error-prone loads first."""
    for seed in range(6):
        rows, k, n, groups = ((1000, 192, 320, 16), (2046, 64, 256, 64), (129, 256, 128, 7))[seed % 3]
        sizes = np.random.default_rng(seed).multinomial(rows - 3 * (seed > 2), np.full(groups, 1 / groups)).tolist()
        shape = {"rows": rows, "k": k, "n": n}
        yield f"grouped_matmul: random load {seed}", lambda s=sizes, o=shape: matmul(s, **o)
        yield f"d lhs: random load {seed}", lambda s=sizes, o=shape: matmul(s, transpose_rhs=True, **o)
        yield f"grouped_matmul_transpose: random load {seed}", lambda s=sizes, o=shape: transpose(s, **o)
    for rows, k, n in [(1, 64, 64), (7, 40, 64), (50, 64, 40), (257, 128, 64)]:
        sizes, shape = [rows // 2, 0, rows - rows // 2, 0], {"rows": rows, "k": k, "n": n}
        yield f"grouped_matmul: [{rows}, {k}] by {n}", lambda s=sizes, o=shape: matmul(s, **o)
        yield f"grouped_matmul_transpose: [{rows}, {k}] by {n}", lambda s=sizes, o=shape: transpose(s, **o)
    for name, sizes in SIZES.items():
        yield f"grouped_matmul: {name}", lambda sizes=sizes: matmul(sizes)
        yield f"grouped_matmul_transpose: {name}", lambda sizes=sizes: transpose(sizes)
    sizes = SIZES["uneven"]
    yield "grouped_matmul: transpose_rhs", lambda: matmul(sizes, transpose_rhs=True)
    yield "grouped_matmul: swiglu", lambda: matmul(sizes, activation="silu")
    yield "grouped_matmul: geglu", lambda: matmul(sizes, activation="gelu")
    scaled = {"row_scale": normal(ROWS, dtype=jnp.float32)}
    yield "grouped_matmul: row_scale", lambda: matmul(sizes, **scaled)
    both = scaled | {"activation": "silu", "transpose_rhs": True, "group_offset": 1}
    yield "grouped_matmul: everything", lambda: matmul(sizes, **both)
    indices = jnp.asarray([*RNG.integers(0, 50, ROWS - 2), -1, 50], jnp.int32)
    yield "grouped_matmul: lhs_indices", lambda: matmul(sizes, rows=50, lhs_indices=indices)
    yield "grouped_matmul: 40 rows", lambda: matmul([9, 0, 11, 14], rows=40)
    if kernel() == "pallas_gpu":
        yield "grouped_matmul: float16", lambda: matmul(sizes, dtype=jnp.float16)
    yield "grouped_matmul: float32 result", lambda: matmul(sizes, out_dtype=jnp.dtype(jnp.float32))
    yield "grouped_matmul: large", lambda: matmul([700, 0, 1000, 348], rows=2048, k=1024, n=768)
    yield "grouped_matmul_transpose: row_scale", lambda: transpose(sizes, **scaled)
    yield "grouped_matmul_transpose: large", lambda: transpose([700, 0, 1000, 348], rows=2048, k=768, n=512)
    for tokens in (1, 40, 1000):
        yield f"route: mixtral, {tokens} tokens", lambda tokens=tokens: routed(tokens, 8, 2)
        options = {"score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5, "bias": True}
        yield (
            f"route: deepseek-v3, {tokens} tokens",
            lambda tokens=tokens, options=options: routed(tokens, 256, 8, **options),
        )
    yield "permute and combine: with a capacity", moved
    for name, sizes in SIZES.items():
        yield f"xla loop: grouped_matmul, {name}", lambda sizes=sizes: matmul(sizes, implementation="xla")
        yield f"xla loop: transpose, {name}", lambda sizes=sizes: transpose(sizes, implementation="xla")
    if kernel() == "pallas_gpu":
        yield from gpu_cases()


def gpu_cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Yields the cases of GPUs: opt-in forms, cuDNN attention, loops of the collective matmuls on one device, NVLink kernels."""
    target = {9: "sm_90a", 10: "sm_100a"}.get(int(jax.devices()[0].compute_capability[0]), "")
    for number, sizes in enumerate(([129, 0, 100, 41, 0, 30], [700, 0, 1000, 348])):
        size = {"rows": sum(sizes), "k": 768, "n": 512}
        for form in filter(None, forms("forward", target)):
            yield f"grouped_matmul {form}: load {number}", functools.partial(matmul, sizes, **size, config=FORMS[form])
        for form in filter(None, forms("d rhs", target)):
            yield (
                f"grouped_matmul_transpose {form}: load {number}",
                functools.partial(transpose, sizes, **size, config=FORMS[form]),
            )
    for causal in (False, True):
        for heads in (4, 2):
            name = f"attention cudnn: {'causal, ' if causal else ''}{heads} heads, 2 K/V heads"
            yield name, functools.partial(attention, heads, causal)
    for gathers in (True, False):
        name = "all_gather_matmul" if gathers else "matmul_reduce_scatter"
        for size in ((1000, 1024, 512), (128, 64, 64)):
            yield f"{name}: one device, {size}", functools.partial(own_block, gathers, *size)
    for columns, dtype in ((2048, jnp.bfloat16), (7168, jnp.bfloat16), (1152, jnp.float32), (200, jnp.bfloat16)):
        name = f"permute and combine: {jnp.dtype(dtype).name} [3000, {columns}]"
        yield name, functools.partial(moved, 3000, columns, dtype)
    if target == "sm_90a":
        for dtype in ("float8_e4m3fn", "int8"):
            for sizes in ([128, 9, 0, 100], [70, 0, 60, 77], [0, 256, 0, 0], [3, 5, 2, 300]):
                yield f"scaled_grouped_matmul: {dtype}, {sizes}", functools.partial(scaled, sizes, dtype)
            yield (
                f"scaled_grouped_matmul: {dtype}, large",
                functools.partial(scaled, [700, 0, 1000, 348], dtype, 1024, 768),
            )
            yield f"scaled_grouped_matmul: {dtype}, gradients", functools.partial(quantized, [129, 0, 100, 41], dtype)
    if jax.device_count() > 1:
        yield from nvlink_cases.value_cases()


def scaled(sizes: list[int], dtype: str, k: int = 256, n: int = 384) -> float:
    """Error of `scaled_grouped_matmul` on codes and scales that are given."""
    rows, groups = sum(sizes) + 3, len(sizes)
    lhs, rhs = (jnp.asarray(RNG.integers(-100, 100, shape), dtype) for shape in ((rows, k), (groups, n, k)))
    lhs_scale = RNG.uniform(0.1, 3, (rows, k // 128)).astype(np.float32)
    rhs_scale = RNG.uniform(0.1, 3, (groups, n // 128, k // 128)).astype(np.float32)
    got = scaled_grouped_matmul(lhs, lhs_scale, rhs, rhs_scale, jnp.asarray(sizes), implementation="pallas")
    wide = np.asarray(lhs, np.float64) * np.repeat(lhs_scale, 128, 1)
    weights = np.asarray(rhs, np.float64) * np.repeat(np.repeat(rhs_scale, 128, 1), 128, 2)
    return error(got, oracle.grouped_matmul(wide, weights, sizes, transpose_rhs=True))


def quantized(sizes: list[int], dtype: str) -> float:
    """Largest error of `quantized_grouped_matmul` and its gradients by the kernel, against the same by XLA."""
    rows, k, n = sum(sizes), 256, 384
    lhs, rhs, grad = normal(rows, k), normal(len(sizes), k, n), normal(rows, n)

    def run(implementation: str) -> list[jax.Array]:
        def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
            return quantized_grouped_matmul(x, w, jnp.asarray(sizes), dtype=dtype, implementation=implementation)

        out, pull = jax.vjp(matmul, lhs, rhs)
        return [out, *pull(grad)]

    return max(error(a, np.asarray(b, np.float64)) for a, b in zip(run("pallas"), run("xla"), strict=True))


def attention(heads: int, causal: bool) -> float:
    """Largest error of `ring_attention` by cuDNN on one device, in its result and its gradients."""
    q, k, v = (normal(2, 256, h, 64) for h in (heads, 2, 2))
    read = normal(2, 256, heads, 64)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ring_attention(q, k, v, None, causal=causal, implementation="cudnn")
        return (out.astype(jnp.float32) * read).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    want, want_grads = attention_oracle.attention(q, k, v, read, causal=causal)
    return max(error(a, b) for a, b in zip((out, *grads), (want, *want_grads), strict=True))


def own_block(gathers: bool, rows: int, k: int, n: int) -> float:
    """Of the collective matmul kernels' loops with a single device, which the public functions replace by a plain matmul."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",), axis_types=(AxisType.Auto,))
    x, w = normal(rows, k), normal(k, n)
    options = {"out_dtype": jnp.bfloat16, "transposed": False}

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        if gathers:
            order = collective_matmul_gpu.gather_order(rows, k, n, 1, 2)
            return collective_matmul_gpu.all_gather_matmul(x, w, "a", order, **options)
        dtypes = {"comm_dtype": jnp.dtype(jnp.float32), "out_dtype": jnp.bfloat16}
        order = collective_matmul_gpu.scatter_order(rows, k, n, 1, 2, **dtypes)
        return collective_matmul_gpu.matmul_reduce_scatter(x, w, "a", order, **options | dtypes)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    return error(run(x, w), np.asarray(x, np.float64) @ np.asarray(w, np.float64))


def matmul(sizes, *, rows=ROWS, k=K, n=N, dtype=jnp.bfloat16, out_dtype=None, implementation=None, **options) -> float:
    """Error of `grouped_matmul`, with NaN in rows outside all groups."""
    groups = 2 if "group_offset" in options else len(sizes)
    lhs = normal(rows, k, dtype=dtype)
    if "lhs_indices" not in options:
        lhs = lhs.at[min(sum(sizes), rows) :].set(jnp.nan)
    shape = (groups, n, k) if options.get("transpose_rhs") else (groups, k, n)
    rhs = normal(*shape, dtype=dtype)
    if "activation" in options:
        rhs = (rhs, normal(*shape, dtype=dtype))
    implementation = implementation or kernel()
    got = grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation=implementation, out_dtype=out_dtype, **options)
    how = {name: value for name, value in options.items() if name != "config"}
    return error(got, oracle.grouped_matmul(lhs, rhs, sizes, **how))


def transpose(sizes, *, rows=ROWS, k=K, n=N, implementation=None, **options) -> float:
    """Error of `grouped_matmul_transpose`, with NaN in rows outside all groups."""
    used = min(sum(sizes), rows)
    lhs, rhs = normal(rows, k).at[used:].set(jnp.nan), normal(rows, n).at[used:].set(jnp.nan)
    implementation = implementation or kernel()
    got = grouped_matmul_transpose(lhs, rhs, jnp.asarray(sizes), implementation=implementation, **options)
    how = {name: value for name, value in options.items() if name != "config"}
    return error(got, oracle.grouped_matmul_transpose(lhs, rhs, sizes, **how))


def routed(tokens, experts, k, *, bias=False, **options) -> float:
    """Error of the weights of `route`; infinite if a choice, rank or count differs."""
    logits = np.asarray(RNG.normal(size=(tokens, experts)), np.float32)
    if tokens > 20:
        logits[3, 2], logits[5], logits[9], logits[11, 4] = np.nan, -np.inf, 0.0, np.inf
    shift = np.asarray(RNG.normal(size=experts), np.float32) if bias else None
    with_bias = {} if shift is None else {"bias": jnp.asarray(shift)}
    plan = route(jnp.asarray(logits), k, implementation=kernel(), **options, **with_bias)
    want = oracle.route(logits, k, bias=shift, **options)
    pairs = zip((plan.expert, plan.counts, plan.rank), (want[0], *want[2:4]), strict=True)
    same = all((np.asarray(a) == b).all() for a, b in pairs)
    return error(plan.weight, want[1]) if same else float("inf")


def moved(tokens: int = 100, columns: int = 1152, dtype=jnp.bfloat16) -> float:
    """Largest error of `permute` and `combine`, with a capacity that drops tokens."""
    plan = route(normal(tokens, 8, dtype=jnp.float32), 2, capacity=tokens // 5, implementation=kernel())
    rows = oracle.buffer_rows(*(np.asarray(x) for x in (plan.expert, plan.rank, plan.offsets)))
    x, y = normal(tokens, columns, dtype=dtype), normal(plan.buffer_rows, columns, dtype=dtype)
    permuted = permute(x, plan, weight=plan.weight, implementation=kernel())
    combined = combine(y, plan, weight=plan.weight, implementation=kernel())
    return max(
        error(permuted, oracle.permute(x, rows, plan.buffer_rows, plan.weight)),
        error(combined, oracle.combine(y, rows, plan.weight)),
    )


def limit_of(name: str) -> float:
    """The largest error that a case may have."""
    if name.startswith("route") or "float32" in name:
        return LIMITS["float32"]
    return LIMITS["float16"] if ": float16" in name else LIMITS["bfloat16"]


@functools.cache
def all_cases() -> dict[str, Callable[[], float]]:
    """The cases of this machine's devices by name."""
    return dict(cases())


def check(name: str) -> dict[str, float]:
    """Run a case, with operands that depend on its name alone."""
    RNG.bit_generator.state = np.random.default_rng(zlib.crc32(name.encode())).bit_generator.state
    return {"error": all_cases()[name](), "limit": limit_of(name)}

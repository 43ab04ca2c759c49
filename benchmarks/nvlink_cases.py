"""The kernels that write to other GPUs over NVLink: collective matmuls, the small all-reduce, and the exchange of rows.

`benchmarks/gpu_compile.py` compiles them for 8 GPUs; `benchmarks/device.py` checks and times them where there are two or more."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar_kernels import all_gather_matmul, all_reduce_small, matmul_reduce_scatter, ragged_all_to_all
from meshpar_kernels.published_model_shapes import FUSED, MODELS

KERNELS = {True: "ag-matmul", False: "matmul-rs"}
"""By whether rows are gathered."""

COMPILED_FOR = 8
BF16, F32 = jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(11)


SMALL = {"64KiB": 64 << 10, "1MiB": 1 << 20, "4MiB": 4 << 20}
"""Bytes of the small all-reduce's array, in float32."""

EXCHANGED = ("mixtral-8x7b", "deepseek-v3")
"""Models whose tokens are exchanged."""

ROWS = 8192
"""Rows that a device sends in all, as many to each."""


def names() -> list[tuple[str, str]]:
    """(kernel, shape) of every case."""
    found = [(KERNELS[s.gathers], name) for name, s in FUSED.items()] + [("allreduce", size) for size in SMALL]
    return found + [("exchange", model) for model in EXCHANGED]


def mesh_of(devices: Any) -> Mesh:
    return Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at a shape.

    Attributes:
      arguments: shapes and dtypes, in all devices together; the size of a shard does not depend on their number.
      into, out: PartitionSpecs of the arguments and of the result.
      local: implementation → the function of one device.
      others: the implementations to compare with, the reference first.
      want: the arguments in float64 → the result.
      flops, bytes: operations that a device makes, or None; bytes that it sends.
    """

    arguments: list[tuple[tuple[int, ...], Any]]
    into: tuple[P, ...]
    out: P
    local: Callable[[str], Callable[..., jax.Array]]
    others: tuple[str, ...]
    want: Callable[..., np.ndarray]
    flops: int | None
    bytes: int


def fused(gathers: bool, rows: int, k: int, n: int, devices: int, **options: Any) -> Case:
    """A collective matmul; partial sums are sent as bfloat16 by default."""
    split, columns = P("a", None), P(None, "a")
    flops, sent = 2 * devices * rows * k * n, (devices - 1) * rows * (k if gathers else n) * 2
    if gathers:
        arguments: list[Any] = [((devices * rows, k), BF16), ((k, devices * n), BF16)]
        into, out, op = (split, columns), columns, all_gather_matmul
    else:
        arguments = [((devices * rows, devices * k), BF16), ((devices * k, n), BF16)]
        into, out, op = (columns, split), split, matmul_reduce_scatter
        options = {"comm_dtype": BF16, **options}

    def local(implementation: str) -> Callable[..., jax.Array]:
        return lambda x, w: op(x, w, "a", implementation=implementation, **options)

    return Case(arguments, into, out, local, ("xla", "ring"), np.matmul, flops, sent)


def small(nbytes: int, devices: int, dtype: Any = F32) -> Case:
    """The small all-reduce of arrays of so many bytes."""
    elements = nbytes // jnp.dtype(dtype).itemsize

    def local(implementation: str) -> Callable[..., jax.Array]:
        if implementation == "psum":
            return lambda x: jax.lax.psum(x[0], "a")[None]
        return lambda x: all_reduce_small(x[0], "a", implementation=implementation)[None]

    arguments = [((devices, elements), dtype)]

    def want(x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x.sum(0), x.shape)

    return Case(arguments, (P("a"),), P("a"), local, ("gather", "psum"), want, None, (devices - 1) * nbytes)


def exchange(sizes: np.ndarray, width: int, dtype: Any = BF16) -> Case:
    """An exchange of `sizes[from, to]` rows, contiguous at the sender and at the receiver; rows that receive nothing are zero."""
    devices = len(sizes)
    start, target = np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes
    sends, receives = sizes.sum(1).max(), sizes.sum(0).max()

    def local(implementation: str) -> Callable[..., jax.Array]:
        def one(x: jax.Array) -> jax.Array:
            rank = jax.lax.axis_index("a")
            mine = [jnp.asarray(n, jnp.int32)[rank] for n in (start, sizes, target, sizes.T)]
            out = jnp.zeros((receives, width), dtype)
            return ragged_all_to_all(
                x, out, *mine, axis_name="a", rows=int(sizes.max()), implementation=implementation
            )[0]  # fmt: skip

        return one

    def want(x: np.ndarray) -> np.ndarray:
        blocks, out = x.reshape(devices, sends, width), np.zeros((devices, receives, width))
        for i, j in np.ndindex(devices, devices):
            n, s, t = sizes[i, j], start[i, j], target[i, j]
            out[j, t : t + n] = blocks[i, s : s + n]
        return out.reshape(-1, width)

    sent = int((sizes.sum(1) - np.diag(sizes)).max()) * width * jnp.dtype(dtype).itemsize
    split = P("a", None)
    return Case([((devices * sends, width), dtype)], (split,), split, local, ("padded", "xla"), want, None, sent)


def make(shape: str, devices: int) -> Case:
    """The case of this name."""
    if shape in SMALL:
        return small(SMALL[shape], devices)
    if shape in EXCHANGED:
        return exchange(np.full((devices, devices), ROWS // devices), MODELS[shape].embed)
    s = FUSED[shape]
    return fused(s.gathers, s.rows, s.k, s.n, devices)


def on(mesh: Mesh, case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh, in_specs=case.into, out_specs=case.out, check_vma=False)


def compile_case(shape: str, devices: Any) -> Any:
    """Compile our kernel for these GPUs, which need not be here."""
    case, mesh = make(shape, len(devices)), mesh_of(devices)
    structs = [
        jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
        for (size, dtype), spec in zip(case.arguments, case.into, strict=True)
    ]
    function = jax.jit(on(mesh, case, case.local("pallas")))
    with jax.default_device(devices[0]):
        return function.trace(*structs).lower(lowering_platforms=("cuda",)).compile()


def error(got: Any, want: np.ndarray) -> float:
    """Largest difference over the largest value; infinite for NaN."""
    delta = np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0)
    return float(delta) if np.isfinite(delta) else float("inf")


def draw(case: Case, mesh: Mesh) -> list[jax.Array]:
    """Arguments with values, on the devices."""
    return [
        jax.device_put(jnp.asarray(RNG.normal(size=size), dtype), NamedSharding(mesh, spec))
        for (size, dtype), spec in zip(case.arguments, case.into, strict=True)
    ]


def value_cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Name, and the largest error of our kernel against NumPy in float64: on all GPUs that are there, and on two."""
    for devices in sorted({min(8, jax.device_count()), 2}):
        for gathers in (True, False):
            kernel = f"{KERNELS[gathers]}, {devices} GPUs"
            for size in [(100, 200, 264), (128, 64, 64), (1000, 1024, 520)]:
                case = fused(gathers, *size, devices)
                yield f"{kernel}, rows, K, columns {size}", functools.partial(value, case, devices)
            case = fused(gathers, 200, 136, 264, devices)
            yield f"{kernel}, gradients", functools.partial(gradients, case, devices)
        case = fused(False, 100, 200, 264, devices, comm_dtype=F32)
        yield f"matmul-rs, {devices} GPUs, float32 accumulation", functools.partial(value, case, devices)
        for dtype in (F32, BF16):
            case = small(300_000, devices, dtype)
            yield f"allreduce, {devices} GPUs, {jnp.dtype(dtype)}", functools.partial(value, case, devices)
            case = exchange(RNG.integers(0, 90, (devices, devices)), 384, dtype)
            yield f"exchange, {devices} GPUs, {jnp.dtype(dtype)}", functools.partial(value, case, devices)


def value(case: Case, devices: int) -> float:
    """Largest error of ten calls: a race may not show in the first."""
    mesh = mesh_of(jax.devices()[:devices])
    arguments = draw(case, mesh)
    wide = [np.asarray(x, np.float64) for x in arguments]
    want = case.want(*wide)
    function = jax.jit(on(mesh, case, case.local("pallas")))
    return max(error(function(*arguments), want) for _ in range(10))


def gradients(case: Case, devices: int) -> float:
    """Largest error of the gradients of x and w."""
    mesh = mesh_of(jax.devices()[:devices])
    x, w = draw(case, mesh)
    matmul = on(mesh, case, case.local("pallas"))
    read = jnp.asarray(RNG.normal(size=(x.shape[0], w.shape[1])), BF16)
    got = jax.jit(jax.grad(lambda x, w: (matmul(x, w) * read).astype(F32).sum(), (0, 1)))(x, w)
    g = np.asarray(read, np.float64)
    want = g @ np.asarray(w, np.float64).T, np.asarray(x, np.float64).T @ g
    return max(error(a, b) for a, b in zip(got, want, strict=True))

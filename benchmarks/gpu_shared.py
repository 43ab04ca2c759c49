"""The products fused with their gather or scatter over NVLink: what `benchmarks/gpu.py` compiles for 8 GPUs, and checks and times
where there are two or more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar_kernels import all_gather_matmul, matmul_reduce_scatter
from meshpar_kernels.shapes import FUSED

KERNELS = {True: "ag-matmul", False: "matmul-rs"}
"""By whether rows are gathered."""

COMPILED_FOR = 8
BF16, F32 = jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(11)
Local = Callable[[jax.Array, jax.Array], jax.Array]


def names() -> list[tuple[str, str]]:
    """(kernel, shape) of every case."""
    return [(KERNELS[s.gathers], name) for name, s in FUSED.items()]


def mesh_of(devices: Any) -> Mesh:
    return Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))


def specs(gathers: bool) -> tuple[tuple[P, P], P]:
    """Of x and w, and of the result."""
    rows, columns = P("a", None), P(None, "a")
    return ((rows, columns), columns) if gathers else ((columns, rows), rows)


def shapes(shape: str, devices: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of x and w in all devices together; what each of them holds does not depend on their number."""
    s = FUSED[shape]
    if s.gathers:
        return (devices * s.rows, s.k), (s.k, devices * s.n)
    return (devices * s.rows, devices * s.k), (devices * s.k, s.n)


def local(gathers: bool, implementation: str, **options: Any) -> Local:
    """The product as one device calls it; sums travel as bfloat16."""
    if gathers:
        return lambda x, w: all_gather_matmul(x, w, "a", implementation=implementation, **options)
    options = {"wire_dtype": BF16, **options}
    return lambda x, w: matmul_reduce_scatter(x, w, "a", implementation=implementation, **options)


def on(mesh: Mesh, gathers: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    into, out = specs(gathers)
    return jax.shard_map(function, mesh=mesh, in_specs=into, out_specs=out, check_vma=False)


def compile_case(shape: str, devices: Any) -> Any:
    """Compile our kernel for these GPUs, which need not be here."""
    s, mesh = FUSED[shape], mesh_of(devices)
    structs = [
        jax.ShapeDtypeStruct(size, BF16, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(shapes(shape, len(devices)), specs(s.gathers)[0], strict=True)
    ]
    function = jax.jit(on(mesh, s.gathers, local(s.gathers, "pallas")))
    with jax.default_device(devices[0]):
        return function.trace(*structs).lower(lowering_platforms=("cuda",)).compile()


def facts(shape: str, devices: int) -> dict[str, int]:
    """Operations that a device makes, and bytes that it sends."""
    s = FUSED[shape]
    sent = (devices - 1) * s.rows * (s.k if s.gathers else s.n) * 2
    return {"flops": 2 * devices * s.rows * s.k * s.n, "bytes": sent}


def error(got: Any, want: np.ndarray) -> float:
    """Largest difference over the largest value; infinite for NaN."""
    delta = np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0)
    return float(delta) if np.isfinite(delta) else float("inf")


def placed(mesh: Mesh, gathers: bool, x: Any, w: Any) -> list[jax.Array]:
    """The operands on the devices."""
    pairs = zip((x, w), specs(gathers)[0], strict=True)
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]


def value_cases() -> Iterator[tuple[str, Callable[[], float]]]:
    """Name, and the largest error of our kernel against NumPy in float64: all GPUs that are there, and two."""
    for devices in sorted({min(8, jax.device_count()), 2}):
        for gathers in (True, False):
            sizes = [(100, 200, 264), (128, 64, 64), (1000, 1024, 520)]
            for rows, k, n in sizes:
                name = f"{KERNELS[gathers]}, {devices} GPUs, {rows} rows, K={k}, {n} columns"
                yield name, lambda d=devices, g=gathers, r=rows, k=k, n=n: value(d, g, r, k, n)
            yield (
                f"{KERNELS[gathers]}, {devices} GPUs, gradients",
                lambda d=devices, g=gathers: gradients(d, g, 200, 136, 264),
            )
        yield (
            f"matmul-rs, {devices} GPUs, float32 sums",
            lambda d=devices: value(d, False, 100, 200, 264, wire_dtype=F32),
        )


def draw(devices: int, gathers: bool, rows: int, k: int, n: int) -> tuple[Mesh, list[jax.Array]]:
    mesh = mesh_of(jax.devices()[:devices])
    x = RNG.normal(size=(devices * rows, k if gathers else devices * k))
    w = RNG.normal(size=(k, devices * n) if gathers else (devices * k, n))
    return mesh, placed(mesh, gathers, jnp.asarray(x, BF16), jnp.asarray(w, BF16))


def value(devices: int, gathers: bool, rows: int, k: int, n: int, **options: Any) -> float:
    """Of ten calls in a row, the worst: a race need not show in the first."""
    mesh, (x, w) = draw(devices, gathers, rows, k, n)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    function = jax.jit(on(mesh, gathers, local(gathers, "pallas", **options)))
    return max(error(function(x, w), want) for _ in range(10))


def gradients(devices: int, gathers: bool, rows: int, k: int, n: int) -> float:
    """Of x and w, the worse."""
    mesh, (x, w) = draw(devices, gathers, rows, k, n)
    product = on(mesh, gathers, local(gathers, "pallas"))
    read = RNG.normal(size=(x.shape[0], w.shape[1]))
    got = jax.jit(jax.grad(lambda x, w: (product(x, w) * jnp.asarray(read, BF16)).astype(F32).sum(), (0, 1)))(x, w)
    g = np.asarray(jnp.asarray(read, BF16), np.float64)
    want = g @ np.asarray(w, np.float64).T, np.asarray(x, np.float64).T @ g
    return max(error(a, b) for a, b in zip(got, want, strict=True))


def measure(shape: str, seconds_per_call: Callable[..., float]) -> None:
    """Print a row (JSON) for XLA's collective, the ring, and ours, with its error against the first."""
    s, devices = FUSED[shape], min(8, jax.device_count())
    mesh = mesh_of(jax.devices()[:devices])
    keys = jax.random.split(jax.random.key(0))
    x, w = (
        jax.random.normal(key, size, F32).astype(BF16) for key, size in zip(keys, shapes(shape, devices), strict=True)
    )
    arguments = placed(mesh, s.gathers, x, w)
    want = None
    for name, implementation in (("xla", "xla"), ("ring", "ring"), ("meshpar", "pallas")):
        row: dict[str, Any] = {"name": name, "devices": devices}
        function = local(s.gathers, implementation)
        try:
            got = np.asarray(jax.jit(on(mesh, s.gathers, function))(*arguments), np.float64)
            want = got if want is None else want
            row["error"] = error(got, want)
            row["seconds"] = seconds_per_call(function, arguments, inside=lambda f: on(mesh, s.gathers, f))
        except Exception as problem:  # a row that fails must not cost the others
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
        print("ROW " + json.dumps(row), flush=True)


def table(
    only: str,
    machine: dict[str, Any],
    run: Callable[[list[str]], tuple[list[dict[str, Any]], str]],
    reason: Callable[[str], str],
    line: Callable[..., str],
) -> list[dict[str, Any]]:
    """Print what the products over NVLink take.

    Args:
      machine: as `gpu.machine` says.
      run: options of `benchmarks/gpu.py` → the rows that a process of it printed, and all of its output.
      reason: output → why it ended.
      line: a row, the machine, and the seconds of our kernel → text.
    """
    devices = min(8, machine["devices"])
    print(f"\nOver NVLink, {devices} GPUs:")
    found: list[dict[str, Any]] = []
    for kernel, shape in names():
        if only not in f"{kernel} {shape}":
            continue
        rows, text = run(["--measure-shared", shape])
        if not any(row["name"] == "meshpar" for row in rows):
            rows.append({"name": "meshpar", "failed": reason(text)})
        ours = next((r.get("seconds") for r in rows if r["name"] == "meshpar"), None)
        for row in rows:
            row |= {"kernel": kernel, "shape": shape, "load": ""} | facts(shape, devices)
            print(line(row, machine, ours), flush=True)
        found += rows
    return found

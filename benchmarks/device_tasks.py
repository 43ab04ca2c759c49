"""Tasks of the worker processes of `benchmarks/device.py`: one request, one JSON result.

A request names its `kind`:

- `machine`: the name of the device, its copy bandwidth and its dense bfloat16 matmul rate, which the tables compare with.
- `value_names`, `value`: the cases of `device_values.py`, and the error of one.
- `compile`, `time`: compile, or compile and time, one implementation of one case of `device_cases.py`.
- `step`: run one variant of a whole step of `device_steps.py`.
- `time_nvlink`: the same for a case of `nvlink_cases.py`.
- `configs`, `tune`: the configurations of one matmul (`meshpar_kernels.grouped_matmul.tuner`), and error and time of one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

import device_cases
import jax
import jax.numpy as jnp
import numpy as np

from meshpar_kernels.grouped_matmul import tuner
from meshpar_kernels.timing import device_seconds
from meshpar_kernels.tuning_table import MatmulKey

OURS = "meshpar"


def run(kind: str, **fields: Any) -> Any:
    """The result of a request."""
    return KINDS[kind](**fields)


def machine() -> dict[str, Any]:
    """Platform, name and number of the devices; copy bandwidth in GB/s, and TFLOP/s of the largest dense bfloat16 matmul."""
    device = jax.devices()[0]
    facts = {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
    }
    if device.platform not in ("gpu", "tpu"):
        return facts
    x = jnp.ones((1 << 29,), jnp.bfloat16)
    copy, method = device_seconds(lambda x: x + 1, [x])
    del x
    rate = 0.0
    for size in (4096, 8192):
        a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        rate = max(rate, 2 * size**3 / device_seconds(jnp.matmul, [a, a])[0] / 1e12)
    return facts | {"copy": 2 * 2 * (1 << 29) / copy / 1e9, "peak": rate, "method": method}


def value_names() -> list[str]:
    import device_values

    return list(device_values.all_cases())


def value(name: str) -> dict[str, float]:
    """Error and limit of a case of `device_values`."""
    import device_values

    return device_values.check(name)


@functools.lru_cache(maxsize=1)
def _operands(kernel: str, shape: str, load: str) -> tuple[device_cases.Case, list[jax.Array]]:
    case = device_cases.make(kernel, shape)
    return case, device_cases.draw(case, kernel, shape, load)


@functools.lru_cache(maxsize=1)
def _reference(kernel: str, shape: str, load: str) -> list[np.ndarray]:
    """The result of XLA's loop, or of the reference where there is no such loop, in float32."""
    case, operands = _operands(kernel, shape, load)
    function = case.others.get("xla loop", case.others["reference"])
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(function)(*operands))]


def _implementation(case: device_cases.Case, kernel: str, name: str) -> Callable[..., Any]:
    if name == OURS:
        return case.ours
    form = name.removeprefix(f"{OURS}, ")
    if form in device_cases.FORMS:
        return device_cases.with_config(kernel, device_cases.FORMS[form])
    if name not in case.others:
        raise NotImplementedError(f"{name} is not installed, or has no such kernel")
    return case.others[name]


def compile_only(kernel: str, shape: str, name: str) -> None:
    """Compile a program that `time` will run, for the persistent compilation cache."""
    case = device_cases.make(kernel, shape)
    structs = [jax.ShapeDtypeStruct(s, d) for s, d in case.arguments]
    jax.jit(_implementation(case, kernel, name)).lower(*structs).compile()


def time(kernel: str, shape: str, load: str, name: str) -> dict[str, Any]:
    """Seconds of a call and its error; with the FLOPs that the result needs, and the bytes that must be moved once."""
    if name.startswith("torch") or name == "deep_gemm":
        import torch_cases

        seconds, version = torch_cases.seconds(kernel, shape, load, name)
        case = device_cases.make(kernel, shape)
        return {"seconds": seconds, "method": "events", "version": version, "flops": case.flops, "bytes": case.bytes}
    case, operands = _operands(kernel, shape, load)
    function = _implementation(case, kernel, name)
    got = jax.jit(function)(*operands)
    found = None if name == "dense matmul" else difference(got, _reference(kernel, shape, load))
    del got
    seconds, method = device_seconds(function, operands)
    return {"seconds": seconds, "method": method, "error": found, "flops": case.flops, "bytes": case.bytes}


def step(name: str, variant: str) -> dict[str, Any]:
    """One variant of a step of `device_steps.py`."""
    import device_steps

    return device_steps.run(name, variant)


def time_nvlink(shape: str, name: str) -> dict[str, Any]:
    """As `time`, of a kernel over NVLink on at most 8 GPUs; `bytes` are those that a device sends."""
    import nvlink_cases

    devices = min(8, jax.device_count())
    case, mesh = nvlink_cases.make(shape, devices), nvlink_cases.mesh_of(jax.devices()[:devices])
    operands = nvlink_cases.draw(case, mesh)
    want = case.want(*(np.asarray(x, np.float64) for x in operands))
    function = nvlink_cases.on(mesh, case, case.local("pallas" if name == OURS else name))
    found = nvlink_cases.error(jax.jit(function)(*operands), want)
    seconds, method = device_seconds(function, operands)
    return {"seconds": seconds, "method": method, "error": found, "flops": case.flops, "bytes": case.bytes}


def configs(matmul: dict[str, Any], dtype: str) -> list[dict[str, Any]]:
    """The tuner's candidates, the analytic choice first; of several numbers of stages the largest alone."""
    candidates = tuner.candidates(MatmulKey(**matmul), dtype, tuner.platform())
    first, *rest = candidates
    fewer = dict.fromkeys(dataclasses.replace(config, stages=None) for config in rest)
    return [vars(config) for config in (first, *fewer)]


def difference(got: Any, want: list[np.ndarray]) -> float:
    """Largest difference over the largest value, over all results; infinite for NaN."""
    largest = 0.0
    for g, w in zip(jax.tree.leaves(got), want, strict=True):
        delta = np.abs(np.asarray(g, np.float32) - w).max() / max(float(np.abs(w).max()), 1e-30)
        largest = max(largest, float(delta) if np.isfinite(delta) else float("inf"))
    return largest


KINDS: dict[str, Callable[..., Any]] = {
    "machine": machine,
    "value_names": value_names,
    "value": value,
    "compile": compile_only,
    "time": time,
    "time_nvlink": time_nvlink,
    "step": step,
    "configs": configs,
    "tune": tuner.measure,
}

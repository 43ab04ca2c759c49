"""Stands for `benchmarks/device_tasks.py` in tests: a GPU with a few kernels, some of which are wrong, crash or hang."""

import os
import time

VALUES = {
    "grouped_matmul: right": {"error": 1e-4, "limit": 1e-2},
    "grouped_matmul_transpose: wrong": {"error": 0.5, "limit": 1e-2},
    "route: crash": None,
    "route: after a crash": {"error": 0.0, "limit": 1e-4},
    "permute and combine: hang": None,
    "grouped_matmul: refused": None,
}
SECONDS = {"meshpar": 1e-3, "ragged_dot": 3e-3, "torch": 0.8e-3, "meshpar, cluster": 1.2e-3, "dense matmul": 0.5e-3}
CONFIGS = [
    {"tile": [128, 64, n], "stages": None, "num_sms": None, "cluster": None, "pingpong": None} for n in (256, 128, 64)
]
TUNED = {256: 2e-3, 128: 1e-3}


def run(kind, **request):
    """As `device_tasks.run`."""
    log = os.environ.get("DEVICE_STUB_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{kind} {request.get('name', '')}\n")
    return KINDS[kind](**request)


def machine():
    platform = os.environ.get("DEVICE_STUB_PLATFORM", "gpu")
    return {"platform": platform, "device": "Stub", "devices": 1, "jax": "0.11", "copy": 4000.0, "peak": 800.0}


def value(name):
    if name.endswith("crash") and "after" not in name:
        os.abort()
    if name.endswith("hang"):
        time.sleep(600)
    if name.endswith("refused"):
        raise NotImplementedError("no such kernel")
    return VALUES[name]


def timing(kernel, shape, load, name):
    if name not in SECONDS:
        raise NotImplementedError(f"{name} is not installed")
    return {"seconds": SECONDS[name], "method": "stub", "error": 1e-3, "flops": 10**11, "bytes": 10**8}


def tune(matmul, dtype, config):
    width = config["tile"][2]
    if width not in TUNED:
        os.abort()
    return {"error": 1e-3, "limit": 1e-2, "seconds": [TUNED[width]]}


KINDS = {
    "machine": machine,
    "value_names": lambda: list(VALUES),
    "value": value,
    "compile": lambda **_: None,
    "time": timing,
    "configs": lambda **_: CONFIGS,
    "tune": tune,
}

"""Functions that `test_isolation.py` and `tests/benchmarks/test_device.py` call in worker processes."""

import os
import time

SECONDS = {256: 2e-3, 128: 1e-3, 64: 1e-4}
"""By the columns of a tile."""


def behave(how: str, count: list[int] | None = None):
    """Return, raise, print, crash or hang, as told."""
    print("output of the function")
    if how == "refuse":
        raise NotImplementedError("no kernel for this shape")
    if how == "raise":
        raise ValueError("bad value")
    if how == "exit":
        os.write(2, b"illegal memory access\n")
        os._exit(3)
    if how == "abort":
        os.abort()
    if how == "hang":
        time.sleep(600)
    return {"pid": os.getpid(), "how": how, "count": count}


def measure(matmul: dict, dtype: str, config: dict):
    """As `tuner.measure`: a tile of 192 columns aborts, one of 64 is wrong."""
    columns = config["tile"][2]
    if columns == 192:
        os.abort()
    wrong = columns == 64
    return {"error": 0.5 if wrong else 1e-3, "limit": 1e-2, "seconds": [] if wrong else [SECONDS[columns]]}

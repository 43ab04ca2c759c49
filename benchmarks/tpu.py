"""The kernels on a TPU, in ten minutes: values, then times, then the tuner, in one table.

    python benchmarks/tpu.py                       # everything; needs a TPU
    python benchmarks/tpu.py --only g64            # a part of it
    python benchmarks/tpu.py --json tpu.json       # where the table is written too (tpu.json)

As `benchmarks/gpu.py`, whose parts it runs: at the first wrong value it stops, with exit status 1. What the compiler makes of the
kernels without a TPU is in `benchmarks/kernels_aot.py`.
"""

from __future__ import annotations

import gpu

if __name__ == "__main__":
    gpu.main("tpu")

"""How tests have XLA's CPU compiler take less time: numbers are as good, code is slower."""

from typing import Any

import jax

OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # two workers have the cores to themselves
}
if jax.__version_info__ < (0, 11):  # since then there is no choice; it takes two thirds of the time
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""The same in `XLA_FLAGS`."""

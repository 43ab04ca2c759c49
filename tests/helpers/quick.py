"""Flags that make XLA's CPU compiler faster: results are as accurate, the compiled code is slower."""

from typing import Any

import jax

OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # two workers use all cores
}
if jax.__version_info__ < (0, 11):  # removed in jax 0.11; reduces compile time by two thirds
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""The options as text for `XLA_FLAGS`."""

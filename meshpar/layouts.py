"""The known schemes as layouts: ``mp.layouts.fsdp()``, ``mp.layouts.megatron(model="tensor")``.

With the default axes the name of a scheme is a layout too: ``mp.jit(step, layout="fsdp", ...)``.
"""

from ._src.layouts import (
    PRESETS,
    context_parallel,
    data_parallel,
    expert_megatron,
    expert_parallel,
    expert_tensor,
    fsdp,
    fsdp_megatron,
    fsdp_tensor,
    hsdp,
    megatron,
    pipeline,
    sequence_parallel,
    tensor_parallel,
    zero1,
)

__all__ = [
    "PRESETS",
    "context_parallel",
    "data_parallel",
    "expert_megatron",
    "expert_parallel",
    "expert_tensor",
    "fsdp",
    "fsdp_megatron",
    "fsdp_tensor",
    "hsdp",
    "megatron",
    "pipeline",
    "sequence_parallel",
    "tensor_parallel",
    "zero1",
]

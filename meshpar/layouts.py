"""The known schemes as layouts: ``mp.layouts.fsdp()``, ``mp.layouts.megatron(model="tensor")``.

Each is a function of the names of mesh axes, and returns a :class:`meshpar.Layout` that can be printed, copied and edited. Dims
are called as they mostly are: ``batch``, ``seq``, ``embed``, ``heads``, ``kv_heads``, ``mlp``, ``vocab``, ``experts``. All but
``batch`` are marked ``?``: a program need not have them, and one that does not divide is left whole, which the plan notes.
"""

from __future__ import annotations

from collections.abc import Callable

from .layout import Layout


def data_parallel(data: str = "data") -> Layout:
    """The batch is split, weights are whole; gradients are all-reduced."""
    return Layout(f"batch: {data}")


def zero1(data: str = "data") -> Layout:
    """Data parallel, with the optimizer's state split: gradients are reduce-scattered, new weights all-gathered (ZeRO-1)."""
    return Layout(f"batch: {data}; opt.embed?: {data}")


def fsdp(data: str = "data") -> Layout:
    """Batch and weights are split over one axis; weights are all-gathered at use, gradients reduce-scattered (ZeRO-3)."""
    return Layout(f"batch, embed?: {data}")


def hsdp(data: str = "data", replica: str = "replica") -> Layout:
    """FSDP over ``data``, and whole copies of that over ``replica``: the axis that joins slices or nodes."""
    return Layout(f"batch: {replica}+{data}; embed?: {data}")


def megatron(data: str = "data", model: str = "model") -> Layout:
    """Tensor parallel: heads, MLP and vocabulary over ``model``; one all-reduce after each block, each way."""
    return Layout(f"batch: {data}; heads?, kv_heads?, mlp?, vocab?: {model}")


def fsdp_megatron(data: str = "data", model: str = "model") -> Layout:
    """Megatron over ``model``, and what is left of the weights over ``data``."""
    return Layout(f"batch: {data}; heads?, kv_heads?, mlp?, vocab?: {model}; embed?: {data}")


def sequence_parallel(data: str = "data", model: str = "model") -> Layout:
    """:func:`fsdp_megatron` with activations between the blocks split along the sequence: gathers and scatters, no all-reduce."""
    return Layout(f"batch: {data}; heads?, kv_heads?, mlp?, vocab?: {model}; embed?: {data}; seq?: {model}")


def context_parallel(data: str = "data", context: str = "context") -> Layout:
    """The sequence is split everywhere; keys and values are gathered, or sent around (``mp.attention``)."""
    return Layout(f"batch: {data}; seq?: {context}")


def expert_parallel(data: str = "data", expert: str = "expert") -> Layout:
    """FSDP, with the experts of a mixture over ``expert``, which splits the batch too: tokens travel to their experts.

    Their dim is ``expert``, as in :mod:`meshpar.layers.moe`, or ``experts``.
    """
    return Layout(f"expert?, experts?: {expert}; batch: {data}+{expert}; embed?: {data}")


PRESETS: dict[str, Callable[..., Layout]] = {
    f.__name__: f
    for f in (
        data_parallel, zero1, fsdp, hsdp, megatron, fsdp_megatron, sequence_parallel, context_parallel, expert_parallel,
    )
}  # fmt: skip
"""By the names that the command line takes."""

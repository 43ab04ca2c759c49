"""The known schemes as layouts: ``mp.layouts.fsdp()``, ``mp.layouts.megatron(model="tensor")``.

With the default axes the name of a scheme is a layout too: ``mp.jit(step, layout="fsdp", ...)``.

Each is a function of the names of mesh axes, and returns a :class:`meshpar.Layout` that can be printed, copied and edited. Dims
are called as they mostly are: ``batch``, ``seq``, ``embed``, ``heads``, ``kv_heads``, ``mlp``, ``vocab``, ``expert``. All but
``batch`` are marked ``?``: a program need not have them, and one that does not divide is left unsharded, which the plan notes.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UnsupportedError
from .layout import BETWEEN_SLICES, PIPELINE, SCHEMES, Layout, with_stages

__all__ = ["PRESETS", "pipeline", *SCHEMES]  # pyright: ignore[reportUnsupportedDunderAll]


def _scheme(name: str, **axes: str) -> Layout:
    """The layout of a scheme with its fields replaced by names of mesh axes."""
    return Layout(SCHEMES[name].format_map(axes), scheme=name)


def data_parallel(data: str = "data") -> Layout:
    """The batch is sharded, weights are replicated; gradients are all-reduced.

    Example:
      >>> print(mp.layouts.data_parallel())
      batch: data
    """
    return _scheme("data_parallel", data=data)


def zero1(data: str = "data") -> Layout:
    """Data parallel, with the optimizer's state split: gradients are reduce-scattered, new weights all-gathered (ZeRO-1).

    Example:
      >>> print(mp.layouts.zero1())
      batch, opt.embed?: data
    """
    return _scheme("zero1", data=data)


def fsdp(data: str = "data") -> Layout:
    """Batch and weights are split over one axis; weights are all-gathered at use, gradients reduce-scattered (ZeRO-3).

    Example:
      >>> print(mp.layouts.fsdp())
      batch, embed?: data
    """
    return _scheme("fsdp", data=data)


def hsdp(data: str = "data", slice: str = BETWEEN_SLICES) -> Layout:
    """FSDP over ``data``, and replicated over ``slice``, the axis between slices of TPUs or nodes of GPUs.

    Example:
      >>> print(mp.layouts.hsdp())
      batch: slice+data; embed?: data
    """
    return _scheme("hsdp", data=data, slice=slice)


def megatron(data: str = "data", model: str = "model") -> Layout:
    """Tensor parallel: heads, MLP and vocabulary over ``model``; one all-reduce after each block, each way.

    Example:
      >>> print(mp.layouts.megatron())
      batch: data; heads?, kv_heads?, mlp?, vocab?: model
    """
    return _scheme("megatron", data=data, model=model)


def tensor_parallel(data: str = "data", model: str = "model") -> Layout:
    """Another name of :func:`megatron`.

    Example:
      >>> print(mp.layouts.tensor_parallel())
      batch: data; heads?, kv_heads?, mlp?, vocab?: model
    """
    return _scheme("tensor_parallel", data=data, model=model)


def fsdp_tensor(data: str = "data", model: str = "model") -> Layout:
    """Another name of :func:`fsdp_megatron`; on text also ``"fsdp+tensor"``.

    Example:
      >>> print(mp.layouts.fsdp_tensor())
      batch: data; heads?, kv_heads?, mlp?, vocab?: model; embed?: data
    """
    return _scheme("fsdp_tensor", data=data, model=model)


def fsdp_megatron(data: str = "data", model: str = "model") -> Layout:
    """Megatron over ``model``, and FSDP of the other dims of the weights over ``data``.

    Example:
      >>> print(mp.layouts.fsdp_megatron())
      batch: data; heads?, kv_heads?, mlp?, vocab?: model; embed?: data
    """
    return _scheme("fsdp_megatron", data=data, model=model)


def sequence_parallel(data: str = "data", model: str = "model") -> Layout:
    """:func:`fsdp_megatron` with activations between the blocks split along the sequence: gathers and scatters, no all-reduce.

    Example:
      >>> print(mp.layouts.sequence_parallel())
      batch: data; heads?, kv_heads?, mlp?, vocab?: model; embed?: data; seq?: model
    """
    return _scheme("sequence_parallel", data=data, model=model)


def context_parallel(data: str = "data", context: str = "context") -> Layout:
    """The sequence is split everywhere; keys and values are gathered, or sent around (``mp.layers.attention``).

    Example:
      >>> print(mp.layouts.context_parallel())
      batch: data; seq?: context
    """
    return _scheme("context_parallel", data=data, context=context)


def expert_parallel(data: str = "data", expert: str = "expert") -> Layout:
    """FSDP, with the experts of a mixture over ``expert``, which splits the batch too: tokens travel to their experts.

    Their dim is ``expert``, as in :func:`meshpar.layers.moe` and in inferred names; ``experts``, and ``exp`` of
    MaxText, are accepted.

    Example:
      >>> print(mp.layouts.expert_parallel())
      expert?, experts?, exp?: expert; batch: data+expert; embed?: data
    """
    return _scheme("expert_parallel", data=data, expert=expert)


def expert_megatron(data: str = "data", model: str = "model") -> Layout:
    """:func:`sequence_parallel`, with the experts of a mixture over ``data``: an all-to-all sends tokens to their experts.

    The weights of an expert are sharded by ``embed`` over ``model``. The dim of its MLP is replicated if it is called
    ``expert_mlp``. It is meant for small batches of models with many experts. Source: Megatron Core's expert parallelism within the
    data parallel group.

    Example:
      >>> print(mp.layouts.expert_megatron())
      expert?, experts?, exp?, batch: data; heads?, kv_heads?, mlp?, vocab?, seq?: model; embed?: data+model
    """
    return _scheme("expert_megatron", data=data, model=model)


def expert_tensor(data: str = "data", expert: str = "expert", model: str = "model") -> Layout:
    """FSDP, with experts and heads over ``expert``, and the MLP of each expert over ``model`` (expert tensor parallelism).

    Experts are sharded twice, so that a device gathers and reduces less of them: for small batches on many devices. Tokens are
    replicated over ``expert``; no all-to-all sends them. Source: Megatron Core's "expert tensor parallelism".

    Example:
      >>> print(mp.layouts.expert_tensor("d", "e", "m"))
      expert?, experts?, exp?: e; mlp?, expert_mlp?: m; batch: d+m; heads?, kv_heads?, vocab?: e; embed?: d+e+m
    """
    return _scheme("expert_tensor", data=data, expert=expert, model=model)


def pipeline(
    layout: str | Layout = "data_parallel", stage: str = "stage", layers: str = "layers", rounds: int = 1
) -> Layout:
    """Another layout inside of the stages of a pipeline: the dim of stacked layers is split over an axis of stages.

    Embedding and head, which have no layers, are split by their vocabulary over the same axis. With the default names, the names
    of schemes can be joined: ``"pipeline"``, ``"fsdp+pipeline"``, ``"fsdp+megatron+pipeline"``. Pipelines are described in the
    documentation under "Pipelines".

    Args:
      layout: the name of a scheme, rules, or a layout.
      stage: the axis of stages.
      layers: the dim of stacked layers.
      rounds: how often each microbatch passes all stages.

    Raises:
      UnsupportedError: less than one round.

    Example:
      >>> print(mp.layouts.pipeline())
      layers: stage; batch: data; vocab?: stage
      >>> print(mp.layouts.pipeline("fsdp_megatron"))
      layers: stage; batch: data; heads?, kv_heads?, mlp?: model; vocab?: stage+model; embed?: data
    """
    if rounds < 1:
        raise UnsupportedError(f"rounds={rounds!r}: a pipeline has at least one", fixes=["rounds=1, or leave it out"])
    inner = Layout(layout)
    scheme = PIPELINE if inner.scheme == "data_parallel" else f"{inner.scheme}_{PIPELINE}" if inner.scheme else ""
    return Layout(with_stages(inner, stage, layers, rounds), scheme=scheme)


PRESETS: dict[str, Callable[..., Layout]] = {name: globals()[name] for name in SCHEMES}
"""Name of a scheme → its function."""

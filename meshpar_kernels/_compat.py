"""Everything that depends on JAX versions (0.10.2 to 0.12), and the known facts of the device that is traced for.

Other modules import from it the names that differ between versions, or are not public in all of them; the kind, memory and
cores of the device; and the reasons why a kernel cannot run on it.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax._src import xla_bridge
from jax.core import Tracer
from jax.extend import backend
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def interpreting() -> bool:
    """Whether Pallas TPU kernels traced now run in the interpreter.

    True inside JAX's `pltpu.force_tpu_interpret_mode`. The value
    is part of JAX's trace-cache key, so a jitted function is retraced on entering or leaving.
    """
    value = _config.pallas_tpu_interpret_mode_context_manager.value
    return bool(value) and "GPU" not in type(value).__name__


def interpreting_gpu() -> bool:
    """Whether Mosaic GPU kernels traced now run in the interpreter: inside JAX's `force_gpu_interpret_mode` (from jax 0.11 on)."""
    value = _config.pallas_tpu_interpret_mode_context_manager.value
    return bool(value) and "GPU" in type(value).__name__


def _varying(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def mosaic_gpu() -> Any:
    """`jax.experimental.pallas.mosaic_gpu`; it is not in every jaxlib, so it is imported when it is needed.

    Raises:
      ImportError: this jaxlib has none, or absl-py is missing.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu


def mosaic_reasons(architectures: Iterable[int]) -> list[str]:
    """Reasons why the GPU that kernels traced now are for cannot run Mosaic GPU kernels; empty if it can.

    Args:
      architectures: major numbers of the compute capabilities that have a kernel.
    """
    reasons, (major, minor) = [], gpu_architecture()
    if major not in architectures:
        known = " and ".join(f"sm_{number}0a" for number in architectures)
        reasons.append(f"the GPU is sm_{major}{minor}; there is a kernel for {known}")
    try:
        mosaic_gpu()
    except ImportError as error:
        reasons.append(f"jax.experimental.pallas.mosaic_gpu cannot be imported: {error}")
    return reasons


def pallas_triton() -> Any:
    """`jax.experimental.pallas.triton`, imported when it is needed.

    Raises:
      ImportError: this jaxlib has none.
    """
    from jax.experimental.pallas import triton

    return triton


def _cudnn() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused


def cudnn_reasons() -> list[str]:
    """Reasons why JAX cannot use cuDNN's attention on the GPUs that it has found; without GPUs cuDNN is assumed to be
    available."""
    if backend_platform() != "cuda":
        return []
    versions = _cudnn().cuda_versions
    return [] if versions is not None else ["JAX finds no cuDNN"]


def _cudnn_operands(q: Any, causal: bool, window: int | None, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(empty bias, lengths, offsets and pages; static arguments)."""
    fused = _cudnn()
    static = {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "sliding_window_length": window,
        "mask_type": fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK, "layout": fused.AttentionLayout.BTNH.value,
    }  # fmt: skip
    if "score_mod" in inspect.signature(fused._dot_product_attention_fwd_impl).parameters:  # from jax 0.12 on
        static["score_mod"] = None
    return (jnp.zeros(0, q.dtype),) * 7, static


def cudnn_forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool, window: int | None) -> tuple[Any, Any]:
    """(result [B, Q, H, D], log-sum-exp float32 [B, H, Q]), for a GPU.

    The primitives beneath `jax.nn.dot_product_attention(implementation="cudnn")`, which asks the machine that traces for a GPU
    and has no backward pass over some of the keys.

    Args:
      q: [B, Q, H, D]; k, v: [B, K, Hkv, D]; bfloat16 or float16.
      window: a query sees itself and the window - 1 keys before it; None: all before it.
    """
    none, static = _cudnn_operands(q, causal, window, scale)
    return tuple(_cudnn()._dot_product_attention_fwd_p_wrapper.bind(q, k, v, *none, **static, is_training=True))


def cudnn_backward(
    q: Any, k: Any, v: Any, lse: Any, out: Any, grad: Any, *, scale: float, causal: bool, window: int | None
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v through these keys; `lse` [B, H, Q] and `out` are of the softmax over all keys."""
    none, static = _cudnn_operands(q, causal, window, scale)
    return tuple(_cudnn()._dot_product_attention_bwd_p_wrapper.bind(q, k, v, *none, lse, out, grad, **static))


def _splash(causal: bool, window: int | None, softcap: float | None, heads: int, lengths: tuple[int, int]) -> Any:
    """JAX's splash attention kernel for aligned queries and keys of these lengths, with residuals."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    if window is not None:
        mask = splash.LocalMask(lengths, (window - 1, 0 if causal else window - 1), 0)
    else:
        mask = splash.CausalMask(lengths) if causal else splash.FullMask(lengths)
    bq, bk = (next(b for b in (512, 256, 128) if n % b == 0) for n in lengths)
    sizes = splash.BlockSizes(
        block_q=bq, block_kv=bk, block_kv_compute=bk, block_q_dkv=bq, block_kv_dkv=bk, block_kv_dkv_compute=bk,
        block_q_dq=bq, block_kv_dq=bk,
    )  # fmt: skip
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), block_sizes=sizes, save_residuals=True, attn_logits_soft_cap=softcap,
        head_shards=1, q_seq_shards=1,
    )  # fmt: skip


def _over_batch(one: Callable[..., Any], *arrays: Any) -> Any:
    """`one` over the first dim of the arrays, by `jax.vmap`; sequentially in the TPU interpreter, which cannot batch kernels
    with dimension semantics."""
    if not interpreting():
        return jax.vmap(one)(*arrays)
    results = [one(*jax.tree.map(lambda a, i=i: a[i], arrays)) for i in range(len(arrays[0]))]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


def splash_forward(
    q: Any, k: Any, v: Any, segments: tuple[Any, Any] | None, *, causal: bool, window: int | None, softcap: float | None
) -> tuple[Any, Any]:
    """(result [B, H, Q, Dv], log-sum-exp float32 [B, H, Q]) by JAX's splash attention, for a TPU.

    Args:
      q: [B, H, Q, D], scaled; k: [B, Hkv, K, D]; v: [B, Hkv, K, Dv].
      segments: int [B, Q] and [B, K], or None.
      causal, window: a mask by the indices of queries and keys.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    kernel = _splash(causal, window, softcap, q.shape[1], (q.shape[2], k.shape[2]))

    def one(q: Any, k: Any, v: Any, segments: Any) -> Any:
        out, (lse,) = kernel(q, k, v, None if segments is None else splash.SegmentIds(*segments))
        return out, lse

    with _config._check_vma(False):  # its results have no varying mesh axes
        return _over_batch(one, q, k, v, segments)


def splash_backward(
    q: Any, k: Any, v: Any, segments: tuple[Any, Any] | None, lse: Any, dots: Any, grad: Any, *, causal: bool,
    window: int | None, softcap: float | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients of q (as it is given, scaled), k and v through these keys; `lse` and `dots` [B, H, Q], Σ grad·out of each row, are
    of the softmax over all keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    kernels: Any = splash_attention_kernel
    kernel = _splash(causal, window, softcap, q.shape[1], (q.shape[2], k.shape[2]))
    sizes = kernel.kwargs["block_sizes"]
    same = {name: kernel.kwargs[name] for name in _SPLASH_OPTIONS}
    same |= {name: getattr(sizes, name) for name in ("q_layout", "k_layout", "v_layout")}

    def one(q: Any, k: Any, v: Any, segments: Any, lse: Any, dots: Any, grad: Any) -> Any:
        segments = None if segments is None else kernels.SegmentIds(*segments)
        args = q, k, v, segments, None, lse, grad, dots
        _, d_k, d_v = kernels._splash_attention_bwd_dkv(
            *args, **same, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv, bkv_compute=sizes.block_kv_dkv_compute,
            mask_info=kernel.dkv_mask_info, use_fused_bwd_kernel=False,
        )  # fmt: skip
        d_q = kernels._splash_attention_bwd_dq(
            *args, **same, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info
        )
        return d_q, d_k, d_v

    with _config._check_vma(False):
        return _over_batch(one, q, k, v, segments, lse, dots, grad)


_SPLASH_OPTIONS = "mask_value", "is_mqa", "mask_function", "attn_logits_soft_cap", "interpret"


def _mesh_kind() -> str:
    return getattr(jax.sharding.get_abstract_mesh().abstract_device, "device_kind", "")


def device_kind() -> str:
    """`device_kind` of the device that is traced for, looked up as in `gpu_architecture`; "" if unknown."""
    kind = _mesh_kind()
    device: Any = _config.default_device.value
    if not kind and device is None and xla_bridge.backends_are_initialized():
        device = backend.get_default_device()
    return kind or getattr(device, "device_kind", "")


def backend_platform() -> str:
    """ "cpu", "tpu" or "cuda" of the devices that JAX has found; "" where it has not looked for any yet."""
    if not xla_bridge.backends_are_initialized():
        return ""
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def multiprocessors() -> int:
    """Number of multiprocessors of the GPU that kernels traced now are for.

    It is the device's own number if JAX has found it, else the number for its kind, else the number of an H100 or H200
    with SXM (132) or a B200 (148).
    """
    kind, device = _mesh_kind(), _config.default_device.value
    if device is None and xla_bridge.backends_are_initialized():
        device = backend.get_default_device()
    if not kind or kind == getattr(device, "device_kind", ""):
        kind, count = getattr(device, "device_kind", ""), getattr(device, "core_count", None)
        if getattr(device, "platform", "") == "gpu" and isinstance(count, int):
            return count
    known = {r"\bH20\b": 78, r"\bH100 PCIe\b": 114}
    found = [n for pattern, n in known.items() if re.search(pattern, kind)]
    return found[0] if found else {10: 148}.get(gpu_architecture()[0], 132)


def host_reasons(axes: Sequence[str]) -> list[str]:
    """Reasons why kernels cannot write to the memory of the other GPUs along these mesh axes: the allocator, the order of
    the devices, or devices of several machines (up to jax 0.11.1, of several processes). Empty if JAX has found no GPU."""
    if backend_platform() != "cuda":
        return []
    reasons = []
    if os.environ.get(ALLOCATOR, "").lower() == "platform":
        reasons.append(f"{ALLOCATOR}=platform allocates no memory that other GPUs can write to: unset it")
    mesh = _mesh.get_concrete_mesh()
    if mesh.empty or not set(axes) <= set(mesh.axis_names):
        if jax.process_count() > 1:
            reasons.append(
                f"there are {jax.process_count()} processes, and no jax.set_mesh(mesh) says which devices {axes} joins"
            )
        return reasons
    ids = [d.id for d in mesh.devices.flat]
    if ids != sorted(ids):
        reasons.append(f"the mesh has its devices in the order {ids}; the kernel needs the order of their ids")
    joined = f"{', '.join(map(repr, axes))} joins devices of the"
    if jax.__version_info__ >= MULTIPROCESS_SYMMETRIC_MEMORY:
        if machines := _joined(mesh, axes, _slice_index):
            reasons.append(f"{joined} machines {machines}; NVLink joins the devices of one")
    elif processes := _joined(mesh, axes, lambda d: d.process_index):
        reasons.append(f"{joined} processes {processes}; kernels join the GPUs of one process up to jax 0.11.1")
    return reasons


ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
"""Environment variable: the allocator of JAX's GPU client. "platform" calls cudaMalloc for every array, outside of the
memory that the GPUs of a collective share."""

MULTIPROCESS_SYMMETRIC_MEMORY = (0, 11, 2)
"""First version of JAX in which Mosaic GPU kernels write to GPUs of other processes."""


def _slice_index(device: Any) -> int:
    """The slice of a TPU; the machine (or NVLink domain) of a GPU of a distributed program; else 0."""
    return getattr(device, "slice_index", None) or 0


def _joined(mesh: Any, axes: Sequence[str], index: Callable[[Any], int]) -> list[int]:
    """The sorted values of `index` over the first group of devices along `axes` that has several of them; [] if every
    group has one."""
    rest = [d for d, name in enumerate(mesh.axis_names) if name not in axes]
    groups = np.moveaxis(mesh.devices, rest, range(len(rest))).reshape(-1, math.prod(mesh.shape[a] for a in axes))
    found = [sorted({index(d) for d in group}) for group in groups]
    return next((values for values in found if len(values) > 1), [])


def _ici_reasons(mesh: Any, axes: Sequence[str]) -> list[str]:
    """As `ici_reasons`, for a mesh that may be abstract."""
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty or not set(axes) <= set(mesh.axis_names):
        return []
    slices = _joined(mesh, axes, _slice_index)
    if not slices:
        return []
    return [
        f"{', '.join(map(repr, axes))} joins the slices {slices}; remote DMA uses ICI, which does not leave a slice"
    ]


def ici_reasons(axes: Sequence[str]) -> list[str]:
    """Reasons why remote DMA cannot reach all TPUs along these mesh axes: they are in several slices. Empty if the devices
    are not known while JAX traces (no `jax.set_mesh`); `one_slice` refuses those when the program is lowered."""
    return _ici_reasons(_mesh.get_concrete_mesh(), axes)


_one_slice_p = Primitive("meshpar_one_slice")
_one_slice_p.def_abstract_eval(lambda x, *, op, axes: x)
_one_slice_p.def_impl(lambda x, *, op, axes: x)
batching.defvectorized(_one_slice_p)


def _lower_one_slice(ctx: Any, x: Any, *, op: str, axes: tuple[str, ...]) -> Sequence[Any]:
    """Lowering rule of `one_slice`: the identity. Raises NotImplementedError if the mesh of the surrounding `shard_map`
    joins several slices along `axes`."""
    reasons = _ici_reasons(getattr(ctx.module_context.axis_context, "mesh", None), axes)
    if reasons:
        raise NotImplementedError(
            f"{op}: the Pallas TPU kernel cannot run here:\n  - {reasons[0]}\n  Pass another implementation=, or unset "
            "MESHPAR_KERNELS; with jax.set_mesh(mesh) around the call, None selects another implementation."
        )
    return [x]


mlir.register_lowering(_one_slice_p, _lower_one_slice)


def one_slice(op: str, axes: Sequence[str], x: jax.Array) -> jax.Array:
    """x, an operand of a kernel with remote DMA along these mesh axes. Lowering raises NotImplementedError if they join
    several slices: devices of a mesh that is an argument of `shard_map` are not known before."""
    return _one_slice_p.bind(x, op=op, axes=tuple(axes))


_refused_p = Primitive("meshpar_refused")
_refused_p.multiple_results = True
_refused_p.def_abstract_eval(lambda *, op, message, avals: avals)


def _lower_refused(ctx: Any, *, op: str, message: str, avals: Any) -> Sequence[Any]:
    """Lowering rule of `refused`: raises NotImplementedError."""
    platforms = " and ".join(ctx.module_context.platforms)
    raise NotImplementedError(f"{op}: {message.replace('PLATFORMS', platforms)}")


mlir.register_lowering(_refused_p, _lower_refused)


def refused(op: str, message: str, function: Callable[..., Any], *args: Any) -> Any:
    """Results of the shapes and types of `function(*args)`. Lowering raises NotImplementedError with this message, in which
    `PLATFORMS` is replaced by the platforms that the program is lowered for."""
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    results = _refused_p.bind(op=op, message=message, avals=tuple(jaxpr.out_avals))
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def tpu_vmem() -> int:
    """Bytes of VMEM of the TPU core that kernels traced now are for: 16 MiB up to v4; else 64 MiB, the least of newer
    ones (v5p, tpu7x; v5e and v6e: 128 MiB)."""
    return (16 if re.match(r"TPU v[234]\b", device_kind()) else 64) << 20


def tpu_vmem_limit() -> int:
    """Bytes of VMEM that the compiler may use for one kernel: its buffers and the compiler's own temporaries."""
    return tpu_vmem() * 7 // 8


def tpu_cores() -> int:
    """TensorCores that share the work of one kernel ("megacore") on the TPU that kernels traced now are for: 2 of v4 and v5p."""
    return 2 if re.match(r"TPU (v4|v5p?)$", device_kind()) else 1


def gpu_architecture() -> tuple[int, int]:
    """Compute capability of the GPU that kernels traced now are for.

    It is taken from the mesh of the current `shard_map`, if its devices are of a known kind; else from
    `jax.default_device`, which may be a device of a topology; else from the first device, if JAX has initialized
    its devices. (9, 0) if that is not a GPU, as JAX assumes when it compiles for one.
    """
    kind = _mesh_kind()
    for pattern, capability in ((r"\bG?H[12]00\b", (9, 0)), (r"\bG?B200\b", (10, 0))):
        if re.search(pattern, kind):
            return capability
    device: Any = _config.default_device.value
    if device is None and xla_bridge.backends_are_initialized():
        device = backend.get_default_device()
    capability = getattr(device, "compute_capability", None)
    if not isinstance(capability, str) or not re.fullmatch(r"\d+\.\d+", capability):
        return 9, 0
    major, minor = capability.split(".")
    return int(major), int(minor)


def load_gmem(ref: Any, index: Any, layout: Any) -> Any:
    """`ref[index]` loaded from global memory into registers with this `layout`, for any alignment of the index.

    From jax 0.11 on the index is part of the reference.
    """
    gpu = mosaic_gpu()
    if jax.__version_info__ < (0, 11):
        return gpu.load(ref, index, layout=layout, optimized=False)
    return gpu.load(ref.at[index], layout=layout, optimized=False)


def store_smem(ref: Any, value: Any) -> None:
    """`ref[...] = value` into shared memory that is not swizzled, with possible bank conflicts.

    Newer versions of JAX refuse it without an option.
    """
    gpu = mosaic_gpu()
    if hasattr(gpu, "store"):
        gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def same_varying(*arrays: Any) -> tuple[Any, ...]:
    """Make every array vary over the mesh axes that any of them varies over (`shard_map`,
    `check_vma=True`).

    Outside of such a `shard_map` this is the identity. Its transpose sums over the axes that were
    added, so the gradient of a weight that is the same on all devices is summed as for any other
    op. `None` passes through.
    """
    axes = frozenset().union(*(_varying(a) for a in arrays if a is not None))
    return tuple(None if a is None else _vary(a, axes) for a in arrays)


def _vary(x: Any, axes: Set[str]) -> Any:
    missing = tuple(sorted(axes - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def has_varying_types(axis: str) -> bool:
    """Whether types have varying axes: inside a `shard_map` over this axis with `check_vma=True`."""
    return bool(_varying(lax.axis_index(axis)))


_invariant_p = Primitive("meshpar_invariant")
_invariant_p.def_impl(lambda x, *, axes: x)
_invariant_p.def_abstract_eval(
    lambda x, *, axes: x.update(
        manual_axis_type=x.manual_axis_type.update(varying=x.manual_axis_type.varying - set(axes))
    )
)
batching.defvectorized(_invariant_p)
mlir.register_lowering(_invariant_p, lambda ctx, x, *, axes: [x])


def invariant_over(axes: Sequence[str], x: jax.Array) -> jax.Array:
    """x, which is the same on all devices along these mesh axes, without them among its varying axes. It has no
    derivative."""
    return _invariant_p.bind(x, axes=tuple(axes)) if _varying(x) & set(axes) else x


def varying_over(axes: Sequence[str], *arrays: Any) -> tuple[Any, ...]:
    """Make every array vary over these mesh axes of the surrounding `shard_map` (`check_vma=True`).

    With `check_vma=False`, where types do not have varying axes, this is the identity.
    """
    return tuple(_vary(a, set(axes)) for a in arrays) if has_varying_types(axes[0]) else arrays


def out_struct(shape: Sequence[int], dtype: Any, *operands: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result, varying over the mesh axes that its operands vary
    over."""
    for x in operands:
        if x is not None and _varying(x):
            return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype)


def sharded_axes(x: Any) -> tuple[Any, ...] | None:
    """Mesh axes over which `x` is visibly sharded outside of `shard_map`, one entry a dimension,
    or None.

    Visible are concrete arrays over several devices and, on a mesh with Explicit axes, traced
    ones. Under a plain `jit` on a mesh with Auto axes the sharding is not known while tracing;
    there JAX itself refuses to partition a Mosaic kernel.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", None)
    if spec is not None and any(entry is not None for entry in spec):
        return tuple(spec)
    concrete = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    if concrete and not x.sharding.is_fully_replicated:
        return tuple(getattr(x.sharding, "spec", ("?",)))
    return None

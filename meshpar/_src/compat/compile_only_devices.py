"""Compile-only devices, and ahead-of-time compilation for them, in JAX 0.10.2 to 0.12."""

from __future__ import annotations

import base64
import contextlib
import functools
import glob
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...errors import MeshError, UnsupportedError


def device_mesh(shape: Sequence[int], devices: Sequence[Any], slices: int, text: str) -> np.ndarray:
    """The devices of slices in the shape of a mesh, with mesh axes along torus dimensions where possible."""
    from jax.experimental import mesh_utils

    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    dcn, ici, remaining = [], [], slices
    for n in shape:  # the first axes connect the slices
        outer = int(np.gcd(n, remaining))
        dcn.append(outer)
        ici.append(n // outer)
        remaining //= outer
    if remaining != 1:
        raise MeshError(
            f"mesh ({text}): the sizes of the first axes must multiply to the {slices} slices",
            fixes=[f"begin the mesh with an axis for the slices: slice={slices}, …"],
        )
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)


def tpu_topology(target: str, chips: Sequence[int], slices: int, wrap: tuple[bool, ...], config: str = "") -> list[Any]:
    """The compile-only devices of TPU slices, from libtpu.

    Args:
      target: the chip in libtpu's topology names.
      chips: chips along each torus dimension.
      slices: number of slices.
      wrap: for each torus dimension, whether it is a ring.
      config: libtpu's ``chip_config_name``; empty: its default.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(
            "a TPU topology needs the TPU compiler, which is not installed",
            fixes=['pip install "jax[tpu]"   # installs libtpu; no TPU is needed'],
        )
    # JAX sets TPU_SKIP_MDS_QUERY itself if there is no TPU; on a TPU host it must be unset, or JAX finds no cluster
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options: dict[str, Any] = {"wrap": wrap}
    if slices > 1:
        options["num_slices"] = slices
    if config:
        options["chip_config_name"] = config
    if max(chips) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    with _stderr_on_failure():
        return list(
            topologies.get_topology_desc(
                platform="tpu", topology_name=f"{target}:{'x'.join(map(str, chips))}", **options
            ).devices
        )


@contextlib.contextmanager
def _stderr_on_failure() -> Iterator[None]:
    """Hide output of native code to stderr (libtpu reports that there is no TPU), except if the block raises."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            log.seek(0)
            os.write(before, log.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def gpu_topology(target: str, hosts: int, per_host: int) -> list[Any]:
    """The compile-only devices of CUDA hosts.

    Args:
      target: XLA's description of the GPU, in protobuf text format.
      hosts: number of hosts; per_host: GPUs of each.
    """
    from jax.experimental import topologies

    if not glob.glob("/dev/nvidia[0-9]*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin refuses to load without a GPU

    def describe() -> Any:
        return topologies.get_topology_desc("", platform="cuda", target_config=target, topology=f"1x{hosts}x{per_host}")

    try:
        topology = describe()
    except NotImplementedError:  # JAX loaded plugins before that variable was set, and this one failed
        for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name).initialize()
                break
        topology = describe()
    return list(topology.devices)


def is_compile_only(device: Any) -> bool:
    """Whether programs can be compiled for a device but not run (a device of a topology)."""
    from jax._src.lib import _jax

    return isinstance(device.client, _jax.CompileOnlyPyClient)


def unknown_options(device: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """The options that a TPU's compiler rejects → its message; determined by compiling one addition."""
    return dict(_refused(device, tuple(sorted(values.items()))))


@functools.lru_cache
def _refused(device: Any, values: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    """(option, message) of the options that the compiler rejects; cached."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    addition = jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding).lower(
        jax.ShapeDtypeStruct((8, 128), np.float32)
    )
    remaining, refused = dict(values), {}
    while remaining:
        try:
            addition.compile(compiler_options=remaining)
            break
        except jax.errors.JaxRuntimeError as error:
            line = str(error).splitlines()[0]
            named = [k for k in remaining if re.search(rf"\b{k}\b", line)]
            for k in named or list(remaining):  # an error that names no option is attributed to all of them
                refused[k] = f"the installed compiler: {line}"
                del remaining[k]
    return tuple(refused.items())


def hlo_text(module: bytes) -> str:
    """The text of a serialized ``HloModuleProto``."""
    from jax._src.lib import hlo  # pyright: ignore[reportAttributeAccessIssue]

    return hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()


def lowered_parts(lowered: jax.stages.Lowered) -> tuple[bytes, bytes, list[Any], dict[str, Any]]:
    """The inputs of a compiler for a lowered program.

    Returns:
      (StableHLO as MLIR bytecode, the same without source lines for cache keys, devices in the order of partitions, and what
      JAX stores outside the module: which shardings XLA may choose, and options).
    """
    from jax._src.interpreters import mlir, pxla

    low: Any = lowered._lowering
    args = low.compile_args
    devices = list(low._device_list or ())
    if args.get("host_callbacks"):
        raise UnsupportedError(
            "a program with callbacks into Python (jax.debug.print, pure_callback) cannot be compiled ahead of time",
            fixes=["remove the callback from the compiled function"],
        )
    ins, outs = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args.get("ordered_effects") or ())
    )
    module = low.stablehlo()
    facts = {
        "tupled": bool(args.get("tuple_args", False)),
        "free_inputs": [bool(x) for x in ins],
        "free_outputs": [bool(x) for x in outs],
        "options": dict(low._compiler_options_kvs),
        "shardy": bool(getattr(jax.config, "jax_use_shardy_partitioner", True)),
    }
    bare = module.operation.get_asm(binary=False, enable_debug_info=False, large_elements_limit=None)
    return mlir.module_to_bytecode(module), bare_kernels(bare).encode(), devices, facts


def bare_kernels(text: str) -> str:
    """The text of a program, with the bytecode of its Pallas TPU kernels replaced by text without source lines."""

    def bare(found: re.Match[str]) -> str:
        """The replacement of one kernel: its text, or the match itself if the bytecode is of another format."""
        from jax._src.interpreters import mlir
        from jax._src.lib import tpu
        from jaxlib.mlir import ir

        context = mlir.make_ir_context()
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        try:
            kernel = ir.Module.parse(base64.b64decode(found[2]), context)
        except (ir.MLIRError, ValueError):  # of another format: keep its source lines
            return found[0]
        return found[1] + str(kernel.operation.get_asm(enable_debug_info=False))

    text = re.sub(
        r"\\22debug_locations\\22: \\22[A-Za-z0-9+/]+=*", "", text
    )  # JAX 0.12 has locations outside the kernel too
    return re.sub(r"(custom_call_config\\22: \{\\22body\\22: \\22)([A-Za-z0-9+/]+=*)", bare, text)


def compile_parts(module: bytes, devices: Any, facts: dict[str, Any], options: dict[str, Any], fast: bool) -> Any:
    """Compile the result of :func:`lowered_parts` for an array of devices; the executable is loaded if they are attached.

    Args:
      fast: compile with the lowest effort.
    """
    from jax._src.interpreters import mlir, pxla
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    jax.config.update("jax_use_shardy_partitioner", facts["shardy"])
    if fast:
        if hasattr(jax.config, "jax_exec_time_optimization_effort"):
            jax.config.update("jax_exec_time_optimization_effort", -1.0)
        else:  # JAX 0.12 has optimization levels instead
            jax.config.update("jax_optimization_level", "O1")
    array = np.asarray(devices, dtype=object).ravel()
    client = array[0].client
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        every = {**facts["options"], **options}
        made = pxla.create_compile_options(
            parsed, facts["tupled"], facts["free_inputs"], facts["free_outputs"], client, array, every
        )
        run = client.compile if is_compile_only(array[0]) else client.compile_and_load
        return run(parsed, executable_devices=xla_client.DeviceList(tuple(array)), compile_options=made)

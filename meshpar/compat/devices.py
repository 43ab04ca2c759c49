"""Devices that are not here, and the compilers for them: what differs between JAX versions (with `jax.py`)."""

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

from ..errors import MeshError, UnsupportedError


def device_mesh(shape: Sequence[int], devices: Sequence[Any], slices: int, text: str) -> np.ndarray:
    """Devices of a slice in the shape of a mesh, axes on torus dimensions where they fit."""
    from jax.experimental import mesh_utils

    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    dcn, ici, left = [], [], slices
    for n in shape:  # the first axes join the slices
        outer = int(np.gcd(n, left))
        dcn.append(outer)
        ici.append(n // outer)
        left //= outer
    if left != 1:
        raise MeshError(
            f"mesh ({text}): the first axes must hold the {slices} slices",
            fixes=[f"begin the mesh with an axis for the slices: slice={slices}, …"],
        )
    return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)


def tpu_topology(target: str, chips: Sequence[int], slices: int, wrap: tuple[bool, ...], config: str = "") -> list[Any]:
    """The devices of a TPU slice that is not here, from the compiler's description of it.

    Args:
      target: the chip, as libtpu's topology names have it.
      chips: along each dim of the torus.
      slices: how many such slices.
      wrap: which dims close to a ring.
      config: libtpu's ``chip_config_name``; empty: its default.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(
            "a TPU topology needs the TPU compiler, which is not installed",
            fixes=['pip install "jax[tpu]"   # installs libtpu; no TPU is needed'],
        )
    # JAX sets TPU_SKIP_MDS_QUERY by itself where there is no TPU; on a TPU host it must stay unset, or JAX finds no cluster
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options: dict[str, Any] = {"wrap": wrap}
    if slices > 1:
        options["num_slices"] = slices
    if config:
        options["chip_config_name"] = config
    if max(chips) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    with _stderr_kept():
        return list(
            topologies.get_topology_desc(
                platform="tpu", topology_name=f"{target}:{'x'.join(map(str, chips))}", **options
            ).devices
        )


@contextlib.contextmanager
def _stderr_kept() -> Iterator[None]:
    """Keep back what native code writes to stderr (libtpu, as it starts: that there is no TPU here); it is shown if it fails."""
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
    """The devices of a CUDA machine that is not here; ``target`` is the text of XLA's description of the GPU."""
    from jax.experimental import topologies

    if not glob.glob("/dev/nvidia[0-9]*"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # or the plugin refuses to load without a GPU

    def describe() -> Any:
        return topologies.get_topology_desc("", platform="cuda", target_config=target, topology=f"1x{hosts}x{per_host}")

    try:
        found = describe()
    except NotImplementedError:  # JAX looked for plugins before that variable was set, and this one had refused
        for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name).initialize()
                break
        found = describe()
    return list(found.devices)


def is_compile_only(device: Any) -> bool:
    """Whether a device is only described (a topology), so that programs can be compiled for it but not run."""
    from jax._src.lib import _jax

    return isinstance(device.client, _jax.CompileOnlyPyClient)


def unknown_options(device: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """The options of a TPU's compiler, of some, that it refuses → what it says: tried on a program of one addition."""
    return dict(_refused(device, tuple(sorted(values.items()))))


@functools.lru_cache
def _refused(device: Any, values: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, str], ...]:
    here = jax.sharding.SingleDeviceSharding(device)
    one = jax.jit(lambda x: x + 1, in_shardings=here, out_shardings=here).lower(
        jax.ShapeDtypeStruct((8, 128), np.float32)
    )
    left, refused = dict(values), {}
    while left:
        try:
            one.compile(compiler_options=left)
            break
        except jax.errors.JaxRuntimeError as error:
            line = str(error).splitlines()[0]
            named = [k for k in left if re.search(rf"\b{k}\b", line)]
            for k in named or list(left):  # an error that names none is one of them all
                refused[k] = f"the compiler at hand says {line}"
                del left[k]
    return tuple(refused.items())


def lowered_parts(lowered: jax.stages.Lowered) -> tuple[bytes, bytes, list[Any], dict[str, Any]]:
    """What a compiler needs of a lowered program.

    Returns:
      Its StableHLO as MLIR bytecode; the same without source lines, to tell programs apart; its devices, in the order of its
      partitions; and the facts that JAX keeps beside the module: which shardings XLA may choose, and options.
    """
    from jax._src.interpreters import mlir, pxla

    low: Any = lowered._lowering
    args = low.compile_args
    devices = list(low._device_list or ())
    if args.get("host_callbacks"):
        raise UnsupportedError(
            "a program that calls back into Python (jax.debug.print, pure_callback) cannot be compiled ahead of time",
            fixes=["leave the callback out of the function that is compiled"],
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
    """The text of a program whose Pallas TPU kernels, which are bytecode with source lines in it, stand as text without."""

    def bare(found: re.Match[str]) -> str:
        from jax._src.interpreters import mlir
        from jax._src.lib import tpu
        from jaxlib.mlir import ir

        context = mlir.make_ir_context()
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        try:
            kernel = ir.Module.parse(base64.b64decode(found[2]), context)
        except (ir.MLIRError, ValueError):  # of another form: it is told apart by its lines too
            return found[0]
        return found[1] + str(kernel.operation.get_asm(enable_debug_info=False))

    text = re.sub(
        r"\\22debug_locations\\22: \\22[A-Za-z0-9+/]+=*", "", text
    )  # JAX 0.12 has them beside the kernel as well
    return re.sub(r"(custom_call_config\\22: \{\\22body\\22: \\22)([A-Za-z0-9+/]+=*)", bare, text)


def compile_parts(module: bytes, devices: Any, facts: dict[str, Any], options: dict[str, Any], fast: bool) -> Any:
    """Compile what :func:`lowered_parts` gave, for an array of devices; the runtime's executable, loaded where they are here."""
    from jax._src.interpreters import mlir, pxla
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    jax.config.update("jax_use_shardy_partitioner", facts["shardy"])
    if fast:
        if hasattr(jax.config, "jax_exec_time_optimization_effort"):
            jax.config.update("jax_exec_time_optimization_effort", -1.0)
        else:  # JAX 0.12 has levels in its place
            jax.config.update("jax_optimization_level", "O1")
    array = np.asarray(devices, dtype=object).ravel()
    client = array[0].client
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        made = pxla.create_compile_options(
            parsed, facts["tupled"], facts["free_inputs"], facts["free_outputs"], client, array,
            {**facts["options"], **options},
        )  # fmt: skip
        run = client.compile if is_compile_only(array[0]) else client.compile_and_load
        return run(parsed, executable_devices=xla_client.DeviceList(tuple(array)), compile_options=made)

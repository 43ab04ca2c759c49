"""Measured constants of a compiler for each chip, one table per compiler version (``tables/*.toml``)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..compat.versions import installed_version, version_numbers
from .collective_ops import CollectiveOp

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerModel:
    """What one compiler version does on one chip: constants of the cost model, thresholds of passes, defects to work around.

    Attributes:
      compiler: the compiler and the version of its table, ``"libtpu 0.0.42"``.
      requested: the compiler and the version that this model is for; another one than ``compiler`` if that has no table.
      fit: the commands that print the numbers which the constants were fitted to.
      matmul_efficiency, hbm_efficiency, link_efficiency: fractions of the peak FLOP/s, HBM bytes/s and link bytes/s that are
        reached.
      clock_hz: cycles/s of the matrix units, peak FLOP/s ÷ FLOPs in a cycle (libtpu counts four units of ``lanes``² for v4 to v6e
        and tpu7x); 0: not known.
      vector_elements_per_cycle: elements that the vector units of a core process, HBM traffic not included: by the compiler's
        estimates for reductions, norms, conversions and optimizers of 1 to 14 operands.
      sync_collectives: collectives that are synchronous with the compiler's default options.
      line_permutes_are_sync: collective-permutes around a line of the torus are synchronous.
      partitioner_prefers_all_reduce: XLA's partitioner makes an all-reduce and a local slice where a reduce-scatter is possible.
      vmem_reserved_bytes: bytes of VMEM that are not available for the operands of a kernel.
      vmem_tile_bytes: bytes of VMEM for one tile of a matmul's result: its accumulator, and two buffers of each array of that size.
      row_ratio: an operand is a row or a scalar if the largest operand of its kernel has at least this many times its bytes.
      ring_chunk_start_seconds: seconds to start the matmuls of one more chunk, or a fused kernel.
      slice_elements_per_cycle: elements per core cycle at which the opposite device's chunk is sliced into the halves that are sent
        in both directions.
      gather_write_elements_per_cycle: the same of writing the received halves into the gathered array.
      reduce_slice_elements_per_cycle, reduce_pad_elements_per_cycle: the same of slicing both halves of a reduction once more, and
        of padding them to be concatenated.
      elementwise_hbm_efficiency: fraction of HBM's bandwidth that elementwise ops between ring steps reach on chips of unknown
        clock.
      min_gain_seconds: seconds per run that a ring, or an all-reduce in place of a reduce-scatter, must save.
      min_joint_gain: fraction of a step that rings decided together must save. They need more memory and longer compilation, and
        smaller differences are within the error of the cost model.
      max_ring_size: devices of the longest ring.
      max_blocking_fraction: fraction of the seconds of a body's reductions that matmuls may wait for, if no reduction is to be
        treated as queued behind the gradients' collectives.
      max_hidden_fraction: fraction of the bytes that one plan sends beyond another which may be hidden.
      large_buffer_bytes: bytes of a value on a device from which its live range matters.
      serialized_reduction_bytes: bytes of a reduce-scatter's operand on a device from which the next loop waits for it.
      slice_barrier_bytes: bytes of a reduce-scatter's operand on a device from which its result is behind a barrier.
      epilogue_max_matmuls: the largest number of matmuls in whose kernel several arrays are computed without loss; if more, the
        matmuls become separate kernels.
      epilogue_operand_bytes: bytes of the largest operand that stays in VMEM during a matmul. If both are larger, the matmul is
        always a separate kernel.
      row_hbm_efficiency: fraction of HBM's bandwidth at which a matmul reads its larger operand, relative to ``hbm_efficiency``, if
        the other one has few rows (:data:`meshpar.cost.flops.MAX_FEW_ROWS`).
      first_tile_bytes: bytes of the operand's first tile, which such a matmul reads before it computes.
      min_kernel_seconds: seconds of the shortest kernel.
      option_groups: names of the :data:`meshpar.hardware.options.GROUPS` that plans for this chip may use.
      quirks: names of the entries of :mod:`meshpar.compat.quirks` whose workarounds this version needs on this chip.
    """

    compiler: str
    requested: str
    fit: tuple[str, ...]
    matmul_efficiency: float
    hbm_efficiency: float
    link_efficiency: float
    clock_hz: float
    vector_elements_per_cycle: int
    sync_collectives: frozenset[CollectiveOp]
    line_permutes_are_sync: bool
    partitioner_prefers_all_reduce: bool
    vmem_reserved_bytes: int
    vmem_tile_bytes: int
    row_ratio: int
    ring_chunk_start_seconds: float
    slice_elements_per_cycle: float
    gather_write_elements_per_cycle: float
    reduce_slice_elements_per_cycle: float
    reduce_pad_elements_per_cycle: float
    elementwise_hbm_efficiency: float
    min_gain_seconds: float
    min_joint_gain: float
    max_ring_size: int
    max_blocking_fraction: float
    max_hidden_fraction: float
    large_buffer_bytes: int
    serialized_reduction_bytes: int
    slice_barrier_bytes: int
    epilogue_max_matmuls: int
    epilogue_operand_bytes: int
    row_hbm_efficiency: float = 1.0
    first_tile_bytes: int = 0
    min_kernel_seconds: float = 0.0
    option_groups: tuple[str, ...] = ()
    quirks: frozenset[str] = frozenset()

    @property
    def gather_copy_cycles(self) -> float:
        """Core cycles for each element of the opposite device's chunk of an all-gather ring: sliced, and both halves written."""
        return 1 / self.slice_elements_per_cycle + 2 / self.gather_write_elements_per_cycle

    @property
    def scatter_copy_cycles(self) -> float:
        """The same of a reduction ring: sliced, both halves sliced once more, and both padded."""
        return (
            1 / self.slice_elements_per_cycle
            + 1 / self.reduce_slice_elements_per_cycle
            + 2 / self.reduce_pad_elements_per_cycle
        )

    @property
    def note(self) -> str | None:
        """What plans say if there is no table for the requested version."""
        if self.compiler == self.requested:
            return None
        return f"seconds and passes use the constants of {self.compiler}; there is no table for {self.requested}"


def compiler_model(chip: str | None, package: str = "libtpu", version: str | None = None) -> CompilerModel:
    """The constants for a chip under a compiler version, from the table of this version or the nearest older one.

    A table for ``0.0.42`` is used for ``0.0.42.1`` too. A version older than every table uses the oldest.

    Args:
      chip: its name; None, or a name without a section: the values of section ``all``.
      package: the distribution that the compiler is part of: ``"libtpu"`` for TPUs, ``"jaxlib"`` for GPUs.
      version: its version; None: the installed one, or the version of the newest table if it is not installed.
    """
    return _compiler_model(chip, package, version or _installed(package))


@functools.lru_cache
def _compiler_model(chip: str | None, package: str, version: str | None) -> CompilerModel:
    """:func:`compiler_model` for a resolved version; cached."""
    versions = sorted((v for name, v in _tables() if name == package), key=version_numbers)
    if version is None:
        chosen = requested = versions[-1]
    else:
        chosen = max(
            (v for v in versions if version_numbers(v) <= version_numbers(version)),
            key=version_numbers,
            default=versions[0],
        )
        same = version_numbers(version)[: len(version_numbers(chosen))] == version_numbers(chosen)
        requested = chosen if same else version
    table = _tables()[package, chosen]
    constants, fits = _flat(table["all"])
    for k, v in table.get(chip or "", {}).items():
        if k == "fit":
            fits[v] = None
        else:
            constants[k] = [*constants["quirks"], *v] if k == "quirks" else v
    frozen = {k: _frozen(k, v) for k, v in constants.items()}
    return CompilerModel(compiler=f"{package} {chosen}", requested=f"{package} {requested}", fit=tuple(fits), **frozen)


@functools.lru_cache
def _tables() -> dict[tuple[str, str], dict[str, Any]]:
    """(package, version) → the content of its file, with the ``all`` of the table that it inherits."""
    read = {path.stem: tomllib.loads(path.read_text("utf8")) for path in sorted(TABLES.glob("*.toml"))}
    for table in read.values():
        if "inherits" in table:
            table["all"] = read[table["inherits"]]["all"]
    return {(name.rpartition("-")[0], name.rpartition("-")[2]): table for name, table in read.items()}


def _flat(groups: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, None]]:
    """(constants, fit commands) of all subsections of a section."""
    constants, fits = {}, {}
    for group in groups.values():
        constants.update({k: v for k, v in group.items() if k != "fit"})
        fits[group["fit"]] = None
    return constants, fits


def _frozen(name: str, value: Any) -> Any:
    """A value of a table as its field has it: lists as frozensets or tuples, numbers of the field's type."""
    kind = _TYPES[name]
    if kind.startswith("frozenset"):
        return frozenset(value)
    if kind.startswith("tuple"):
        return tuple(value)
    return float(value) if kind == "float" else value


_TYPES: dict[str, str] = {f.name: str(f.type) for f in fields(CompilerModel)}


_installed = functools.lru_cache(installed_version)

"""Measured constants of a compiler for each chip, one table per compiler version (``tables/*.toml``)."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compat.installed_versions import installed_version, version_numbers
from .collective_ops import CollectiveOp

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerModel:
    """What one compiler version does on one chip: constants of the cost model, thresholds of passes, defects to work around.

    Attributes:
      compiler: the compiler and the version of its table, ``"libtpu 0.0.42"``.
      note: what plans say if there is no table for the requested version; None: there is one.
      matmul_efficiency, hbm_efficiency, link_efficiency: fractions of the peak FLOP/s, HBM bytes/s and link bytes/s that are
        reached.
      clock_hz: cycles/s of the matrix units, peak FLOP/s ÷ FLOPs in a cycle (libtpu counts four units of ``lanes``² for v4 to v6e
        and tpu7x); 0: not known.
      vector_elements_per_cycle: elements that the vector units of a core process, HBM traffic not included: by the compiler's
        estimates for reductions, norms, conversions and optimizers of 1 to 14 operands.
      matmul_result_fraction: fraction of the elements of a matmul's result that count for the vector units if its kernel has no
        other op: the result is only converted and stored.
      sync_collectives: collectives that are synchronous with the compiler's default options.
      line_permutes_are_sync: collective-permutes around a line of the torus are synchronous.
      partitioner_prefers_all_reduce: XLA's partitioner makes an all-reduce and a local slice where a reduce-scatter is possible.
      vmem_reserved_bytes: bytes of VMEM that are not available for the operands of a kernel.
      vmem_tile_bytes: bytes of VMEM for one tile of a matmul's result: its accumulator, and two buffers of each array of that size.
      row_ratio: an operand is a row or a scalar if the largest operand of its kernel has at least this many times its bytes.
      ring_chunk_start_seconds: seconds to start the matmuls of one more chunk, or a fused kernel.
      gather_copy_cycles: core cycles for each element of the opposite device's chunk of an all-gather ring: sliced into the halves
        that are sent in both directions, and both written into the gathered array.
      scatter_copy_cycles: the same of a reduction ring: sliced, both halves sliced once more, and both padded to be concatenated.
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
        the other one has few rows (:data:`cost.flops.MAX_FEW_ROWS`).
      first_tile_bytes: bytes of the operand's first tile, which such a matmul reads before it computes.
      min_matmul_rows: rows of a matmul that take as long as fewer ones, for which the matrix units load weights or a cache
        (:func:`cost.flops.loading_flops`).
      min_kernel_seconds: seconds of the shortest kernel.
      stores_softmax: the result of a softmax that several matmuls read is computed by a kernel of its own; otherwise each matmul
        divides the exponentials again.
      fused_softmax_fraction: fraction of the elements of a softmax that count for the vector units in the kernel that computes its
        scores, their maximum and the sum of exponentials, and stores the exponents in float32; None: there is no such kernel.
      merged_gather_bytes: bytes of an all-gather up to which it becomes a part of a synchronous all-reduce; 0: all-reduces are not
        merged.
      option_groups: names of the :data:`hardware.compiler_options.GROUPS` that plans for this chip may use.
      quirks: names of the entries of :mod:`compat.quirks` whose workarounds this version needs on this chip.
    """

    compiler: str
    note: str | None
    matmul_efficiency: float
    hbm_efficiency: float
    link_efficiency: float
    clock_hz: float
    vector_elements_per_cycle: int
    matmul_result_fraction: float
    sync_collectives: frozenset[CollectiveOp]
    line_permutes_are_sync: bool
    partitioner_prefers_all_reduce: bool
    vmem_reserved_bytes: int
    vmem_tile_bytes: int
    row_ratio: int
    ring_chunk_start_seconds: float
    gather_copy_cycles: float
    scatter_copy_cycles: float
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
    min_matmul_rows: int = 0
    min_kernel_seconds: float = 0.0
    stores_softmax: bool = False
    fused_softmax_fraction: float | None = None
    merged_gather_bytes: int = 0
    option_groups: frozenset[str] = frozenset()
    quirks: frozenset[str] = frozenset()


@functools.lru_cache
def compiler_model(chip: str | None, package: str = "libtpu", version: str | None = None) -> CompilerModel:
    """The constants for a chip under a compiler version, from the table of this version or the nearest older one; cached.

    A table for ``0.0.42`` is used for ``0.0.42.1`` too. A version older than every table uses the oldest.

    Args:
      chip: its name; None, or a name without a section: the values of section ``all``.
      package: the distribution that the compiler is part of: ``"libtpu"`` for TPUs, ``"jaxlib"`` for GPUs.
      version: its version; None: the installed one, or the version of the newest table if it is not installed.
    """
    version = version or installed_version(package)
    versions = sorted((v for name, v in _tables() if name == package), key=version_numbers)
    numbers = version_numbers(version or versions[-1])
    chosen = max((v for v in versions if version_numbers(v) <= numbers), key=version_numbers, default=versions[0])
    table, note = _tables()[package, chosen], None
    if numbers[: len(version_numbers(chosen))] != version_numbers(chosen):
        note = f"seconds and passes use the constants of {package} {chosen}; there is no table for {package} {version}"
    own = table.get(chip or "", {})
    constants = {k: v for group in (*table["all"].values(), own) for k, v in group.items() if k != "fit"}
    constants["quirks"] = [q for group in (table["all"]["quirks"], own) for q in group.get("quirks", ())]
    frozen: dict[str, Any] = {k: frozenset(v) if isinstance(v, list) else v for k, v in constants.items()}
    return CompilerModel(compiler=f"{package} {chosen}", note=note, **frozen)


@functools.lru_cache
def _tables() -> dict[tuple[str, str], dict[str, Any]]:
    """(package, version) → the content of its file, with the ``all`` of the table that it inherits."""
    read = {path.stem: tomllib.loads(path.read_text("utf8")) for path in sorted(TABLES.glob("*.toml"))}
    for table in read.values():
        if "inherits" in table:
            table["all"] = read[table["inherits"]]["all"]
    return {(name.rpartition("-")[0], name.rpartition("-")[2]): table for name, table in read.items()}

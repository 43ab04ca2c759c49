"""The chip table: FLOP/s, memory, links, names of devices and shapes of slices of every chip.

To add a chip, add an entry to ``_TABLE``, and a section to the tables of its compiler (``tables/``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .compiler_constants import CompilerModel, compiler_model

GIB = 2.0**30
"""Bytes of a GiB."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Hardware properties of a chip. Rates and sizes are per chip; :meth:`per_device` returns them per JAX device.

    Attributes:
      name: in topology texts: ``v5p``, ``h100``.
      kinds: values of ``jax.Device.device_kind``; case does not matter.
      flops, flops_8bit: FLOP/s of dense matmuls in bf16, and in int8 (None: not supported).
      float8: its matrix units multiply fp8 as fast as int8; else its compiler converts fp8 to bf16.
      hbm: bytes that a program may use, of all devices of the chip, as the compiler reports it.
      hbm_bandwidth: bytes/s, reads and writes together.
      link, links: bytes/s in one direction of one ICI link, and the number of links; for a GPU, of all its NVLinks together.
      torus: sides of the largest torus; ``()``: chips are connected by a switch.
      dcn: bytes/s of one chip to other slices or nodes.
      host_link: bytes/s in one direction between one chip and the memory of its host (0: not known).
      vmem: bytes of on-chip memory (None: caches).
      devices: JAX devices of one chip. JAX maps a mesh to chips of several devices only for kinds that it knows
        (``jax.experimental.mesh_utils``).
      lanes: side of the matrix unit: dims of matmuls are rounded up to it.
      switch: GPUs of one host, on one NVSwitch (0: a torus).
      host, single_host: TPU chips of each host of a slice, and the largest slice of a single host.
      gke: the chip in GKE's node label ``cloud.google.com/gke-tpu-accelerator``; empty: GKE has no such nodes.
      slices: shapes of the slices smaller than a cube, or of all slices if there are no cubes.
      cube: side of the cubes that larger slices are built of (0: none). Optical switches connect the ends of a slice of full
        cubes, so that all its dimensions are rings. Without cubes a dimension is a ring if it has the length of the torus.
      accelerators: prefixes of cloud accelerator types: ``v5litepod`` of ``v5litepod-8``.
      counted: units per chip that the number of an accelerator type counts: 1: chips; 2: TensorCores.
      target: name for its compiler: libtpu's topology name, or the file in ``targets/`` that describes a GPU; empty: it can only be
        planned for.
      target_config: libtpu's ``chip_config_name``; empty: its default.
      core_link: bytes/s in one direction between the devices of one chip.
      latency: seconds per link that a message passes.
      cores: TensorCores of one JAX device.
      source: source of these values; ``~`` marks less certain ones.
      calibration: the devices and the version of jaxlib on which the efficiencies were measured; "": the efficiencies of the table.
      compiler: measured constants of its compiler; by default the constants for a chip without measurements.
    """

    name: str
    kinds: tuple[str, ...]
    flops: float
    flops_8bit: float | None
    hbm: float
    hbm_bandwidth: float
    link: float
    links: int
    torus: tuple[int, ...]
    dcn: float
    vmem: float | None
    devices: int = 1
    lanes: int = 128
    switch: int = 0
    host: int = 4
    single_host: int = 4
    gke: str = ""
    slices: tuple[tuple[int, ...], ...] = ()
    cube: int = 0
    accelerators: tuple[str, ...] = ()
    counted: int = 1
    target: str = ""
    target_config: str = ""
    core_link: float = 0.0
    host_link: float = 0.0
    latency: float = 1e-6
    cores: int = 1
    float8: bool = False
    source: str = ""
    calibration: str = ""
    compiler: CompilerModel = field(default_factory=lambda: compiler_model(None))

    def per_device(self) -> Chip:
        """The properties of one JAX device: its share of the chip."""
        n = self.devices
        if n == 1:
            return self
        shared = ("flops", "flops_8bit", "hbm", "hbm_bandwidth", "link", "dcn", "host_link", "vmem")
        shares = {key: None if (value := getattr(self, key)) is None else value / n for key in shared}
        return replace(self, **shares, devices=1)

    def ideal(self) -> Chip:
        """The same chip with every efficiency 1, for lower bounds and textbook estimates."""
        return self.with_efficiencies(matmul_efficiency=1.0, hbm_efficiency=1.0, link_efficiency=1.0)

    def with_efficiencies(self, **fractions: float) -> Chip:
        """The same chip with other ``matmul_efficiency``, ``hbm_efficiency`` or ``link_efficiency``."""
        return replace(self, compiler=replace(self.compiler, **fractions))

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of a matmul of this dtype at default precision.

        int8, and fp8 if the chip has it, have the 8-bit rate; float32 has the bf16 rate on TPUs, and half of it (TF32) on GPUs.
        """
        if ("int8" in dtype or ("float8" in dtype and self.float8)) and self.flops_8bit is not None:
            return self.flops_8bit
        return self.flops / 2 if self.switch and dtype == "float32" else self.flops

    def rate(self, dim: str, stride: int = 1) -> float:
        """Bytes/s in one direction that one JAX device reaches over the links of a dimension.

        Args:
          dim: of a :class:`hardware.topology.Stage`: ``slice``, ``switch``, ``core``, else a torus dimension.
          stride: number of groups that share each link of the torus.
        """
        if dim == "core":
            return self.core_link * self.compiler.link_efficiency
        device = self.per_device()
        link = {"slice": device.dcn, "switch": device.link}.get(dim, device.link / stride)
        return link * self.compiler.link_efficiency

    def rings(self, shape: Sequence[int]) -> tuple[bool, ...]:
        """For each torus dimension of a slice, whether it is a ring; else it is a line. Compilers assume lines by default.

        Args:
          shape: chips along each torus dimension.
        """
        if self.cube:
            return (all(n % self.cube == 0 for n in shape),) * len(shape)
        return tuple(n == side for n, side in zip(shape, self.torus, strict=True))

    def exists(self, shape: Sequence[int]) -> bool:
        """Whether slices of this shape exist, in any order of its dimensions; for GPUs, (number,) fills hosts."""
        if min(shape) < 1:
            return False
        if self.switch:
            return len(shape) == 1 and (shape[0] <= self.switch or shape[0] % self.switch == 0)
        if len(shape) != len(self.torus):
            return False
        cubes = self.cube > 0 and all(n % self.cube == 0 for n in shape) and math.prod(shape) <= math.prod(self.torus)
        return cubes or any(sorted(shape) == sorted(s) for s in self.slices)

    def shapes(self, chips: int | None = None) -> list[tuple[int, ...]]:
        """The shapes of slices on a torus, each in one order of its dimensions: smallest first, then squarest.

        Args:
          chips: only slices of this many chips.
        """
        shapes = list(self.slices)
        if self.cube:
            sides = range(self.cube, max(self.torus) + 1, self.cube)
            shapes += [s for s in itertools.combinations_with_replacement(sides, len(self.torus)) if self.exists(s)]
        shapes = [s for s in dict.fromkeys(shapes) if chips is None or math.prod(s) == chips]
        return sorted(shapes, key=lambda s: (math.prod(s), sum(s)))


_BOOK = "JAX scaling book (tpus.md)"
_USABLE = "hbm as libtpu 0.0.42 reports it for a device"
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_PCIE = 1.5e10
"""Bytes/s of a TPU's PCIe link: "typically around 1.5e10 per chip" in the JAX scaling book, which has twice that for v6e."""
_PCIE4, _PCIE5 = 3.2e10, 6.4e10
"""Bytes/s in one direction of 16 lanes of PCIe 4 and 5: half of the 64 and 128 GB/s of both directions in NVIDIA's datasheets."""
# Less certain: DCN of all TPUs, ICI, host link and the die-to-die link (six ICI links, says the vendor) of tpu7x.
_TABLE = (
    Chip("v4", ("TPU v4",), 2.75e14, None, 30.75 * GIB, 1.23e12, 4.5e10, 6, (16, 16, 16), 6.2e9, 128 * 2**20,
         slices=_SMALL, cube=4, accelerators=("v4",), counted=2, gke="tpu-v4-podslice", target="v4", target_config="megacore",
         cores=2, host_link=_PCIE, source=f"{_BOOK}; {_USABLE}; ~dcn"),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 1.97e14, 3.94e14, 15.75 * GIB, 8.1e11, 4.5e10, 4, (16, 16), 3.1e9, 128 * 2**20,
         slices=_FLAT, accelerators=("v5litepod", "v5e"), gke="tpu-v5-lite-podslice", single_host=8, target="v5e",
         host_link=_PCIE, source=f"{_BOOK}; {_USABLE}; ~dcn"),
    Chip("v5p", ("TPU v5", "TPU v5p"), 4.59e14, 9.18e14, 95.74 * GIB, 2.77e12, 9e10, 6, (16, 20, 28), 6.2e9, 64 * 2**20,
         slices=_SMALL, cube=4, accelerators=("v5p",), counted=2, gke="tpu-v5p-slice", target="v5p",
         cores=2, host_link=_PCIE, source=f"{_BOOK}; {_USABLE}; ~dcn"),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 9.18e14, 1.84e15, 31.25 * GIB, 1.64e12, 9e10, 4, (16, 16), 1.25e10, 128 * 2**20,
         lanes=256, slices=_FLAT, accelerators=("v6e",), gke="tpu-v6e-slice", single_host=8, target="v6e",
         host_link=3.2e10, source=f"vendor page; {_USABLE}; ~dcn"),
    Chip("tpu7x", ("TPU7x",), 2.31e15, 4.61e15, 2 * 94.75 * GIB, 7.38e12, 9.5e10, 6, (16, 16, 36), 1.25e10, 64 * 2**20,
         devices=2, lanes=256, slices=_SMALL, cube=4, accelerators=("tpu7x",), counted=2, gke="tpu7x", target="tpu7x",
         core_link=6 * 9.5e10, host_link=3.2e10, float8=True,
         source=f"vendor page; {_USABLE}; ~link, ~core_link, ~host_link, ~dcn, ~torus"),
    Chip("a100", ("NVIDIA A100-SXM4-80GB",), 3.12e14, 6.24e14, 85100068864, 2.039e12, 3e11, 1, (), 2.5e10, None, switch=8,
         target="a100", host_link=_PCIE4, source="datasheet (SXM, 80 GB); 8-bit: int8 alone; hbm as CUDA reports it; "
         "dcn of a DGX A100 (200 Gb/s); link efficiency as of an H200"),
    Chip("h100", ("NVIDIA H100", "NVIDIA H100 80GB HBM3"), 9.89e14, 1.98e15, 84942979072, 3.35e12, 4.5e11, 1, (), 5e10,
         None, switch=8, target="h100", float8=True,
         host_link=_PCIE5, source="datasheet (SXM); hbm as CUDA reports it; efficiencies as measured on an H200"),
    Chip("h200", ("NVIDIA H200",), 9.89e14, 1.98e15, 151397597184, 4.8e12, 4.5e11, 1, (), 5e10, None, switch=8,
         target="h200", float8=True,
         host_link=_PCIE5, source="datasheet; hbm as CUDA reports it; efficiencies measured (8192³ bf16, copies)"),
    Chip("b200", ("NVIDIA B200",), 2.25e15, 4.5e15, 191514411008, 8e12, 9e11, 1, (), 5e10, None, switch=8, target="b200",
         float8=True, host_link=_PCIE5, source="datasheet; hbm as CUDA reports it; ~dcn (5e10 to 1e11), switch of 72 in an NVL72"),
)  # fmt: skip
CHIPS: dict[str, Chip] = {
    chip.name: replace(chip, compiler=compiler_model(chip.name, "jaxlib" if chip.switch else "libtpu"))
    for chip in _TABLE
}
"""Every chip that plans can be made for, by name."""


def chip_of_kind(device_kind: str) -> Chip | None:
    """The chip of a ``jax.Device.device_kind``; None: not in the table."""
    kind = device_kind.lower()
    return next((c for c in CHIPS.values() if any(kind == k.lower() for k in c.kinds)), None)

"""The machines that plans are for: what a chip computes, holds and sends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import MeshError
from ..layout import AnyMesh
from ..mesh import fill_mesh, parse_mesh, parse_topology

CollectiveOp = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


@dataclass(frozen=True, slots=True)
class Chip:
    """The figures of a chip. Those of a JAX device are a chip's, divided by ``devices`` (:meth:`per_device`).

    Attributes:
      name: ``v5p``, ``h100``; what a topology text calls it.
      flops, flops_8bit: FLOP/s of dense bf16 and of int8 or fp8 products (None: no such unit).
      hbm: bytes that a program may use.
      hbm_bandwidth: bytes/s, read and write together.
      link, links: bytes/s one way over one ICI link, and their number; of a GPU, over all its NVLinks to the switch.
      torus: the longest sides of a slice; ``()``: the chips hang on a switch.
      dcn: bytes/s of one chip to other slices or nodes.
      vmem: bytes of on-chip memory (None: caches).
      devices: JAX devices of one chip; they share all of the above.
      lanes: side of the matrix unit: the dims of a product round up to it.
      switch: chips on one NVSwitch (0: a torus).
      core_link: bytes/s one way between the devices of one chip.
      latency: seconds a hop.
      matmul_efficiency, hbm_efficiency, link_efficiency: the part of the peak that is reached; 1 where nothing was measured.
      clock: cycles/s of the matrix units: peak FLOP/s by what their units of ``lanes``² do in a cycle; 0: not known.
      cores: that one JAX device has.
      waits: collectives beside which a compiled program does not go on, with the compiler's default options. libtpu 0.0.42: of
        103 programs compiled for devices of two cores none has an asynchronous gather, of 132 for others 39 do; reduce-scatters
        are synchronous but on tpu7x, where collectives run on cores of their own.
      source: where the figures are from; ``~`` before those that are less certain.
    """

    name: str
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
    core_link: float = 0.0
    latency: float = 1e-6
    matmul_efficiency: float = 1.0
    hbm_efficiency: float = 1.0
    link_efficiency: float = 0.8
    clock: float = 0.0
    cores: int = 1
    waits: frozenset[CollectiveOp] = frozenset()
    source: str = ""

    def per_device(self) -> Chip:
        """The figures of one JAX device: its share of the chip."""
        n = self.devices
        if n == 1:
            return self
        return replace(
            self, flops=self.flops / n, flops_8bit=None if self.flops_8bit is None else self.flops_8bit / n,
            hbm=self.hbm / n, hbm_bandwidth=self.hbm_bandwidth / n, link=self.link / n, dcn=self.dcn / n,
            vmem=None if self.vmem is None else self.vmem / n, devices=1,
        )  # fmt: skip

    def ideal(self) -> Chip:
        """The same chip with every efficiency 1: for bounds and for the rules of thumb that assume peak rates."""
        return replace(self, matmul_efficiency=1.0, hbm_efficiency=1.0, link_efficiency=1.0)

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of a product of this dtype at default precision: 8-bit types at the 8-bit rate; f32 as bf16 on TPUs, as
        TF32, at half that rate, on GPUs."""
        if ("int8" in dtype or "float8" in dtype) and self.flops_8bit is not None:
            return self.flops_8bit
        return self.flops / 2 if self.switch and dtype == "float32" else self.flops


_BOOK = "JAX scaling book (tpus.md)"
_GIB = 2.0**30
_SCATTERS: frozenset[CollectiveOp] = frozenset({"reduce-scatter"})
_BOTH: frozenset[CollectiveOp] = frozenset({"reduce-scatter", "all-gather"})
# Less certain: DCN of all TPUs, ICI and the die-to-die link (six ICI links, says the vendor) of tpu7x, HBM of b200.
_TABLE = (
    Chip("v4", 2.75e14, None, 32 * _GIB, 1.23e12, 4.5e10, 6, (16, 16, 16), 6.2e9, 128 * 2**20, clock=1.05e9, cores=2,
         waits=_BOTH, source=f"{_BOOK}; ~dcn"),
    Chip("v5e", 1.97e14, 3.94e14, 15.75 * _GIB, 8.1e11, 4.5e10, 4, (16, 16), 3.1e9, 128 * 2**20, clock=1.5e9,
         waits=_SCATTERS, source=f"{_BOOK}; hbm as the compiler reports it; ~dcn"),
    Chip("v5p", 4.59e14, 9.18e14, 95 * _GIB, 2.77e12, 9e10, 6, (16, 20, 28), 6.2e9, 64 * 2**20, clock=1.75e9, cores=2,
         waits=_BOTH, source=f"{_BOOK}; ~dcn"),
    Chip("v6e", 9.18e14, 1.84e15, 32 * _GIB, 1.64e12, 9e10, 4, (16, 16), 1.25e10, 128 * 2**20, lanes=256,
         waits=_SCATTERS, source="vendor page; ~dcn"),
    Chip("tpu7x", 2.31e15, 4.61e15, 192 * _GIB, 7.38e12, 9.5e10, 6, (16, 16, 36), 1.25e10, 64 * 2**20, devices=2,
         lanes=256, core_link=6 * 9.5e10, source="vendor page; ~link, ~core_link, ~dcn, ~torus"),
    Chip("h100", 9.89e14, 1.98e15, 80e9, 3.35e12, 4.5e11, 1, (), 5e10, None, switch=8, matmul_efficiency=0.79,
         hbm_efficiency=0.9, link_efficiency=0.83, source="datasheet (SXM); efficiencies as measured on an H200"),
    Chip("h200", 9.89e14, 1.98e15, 141e9, 4.8e12, 4.5e11, 1, (), 5e10, None, switch=8, matmul_efficiency=0.79,
         hbm_efficiency=0.9, link_efficiency=0.83, source="datasheet; efficiencies measured (8192³ bf16, copies)"),
    Chip("b200", 2.25e15, 4.5e15, 180e9, 8e12, 9e11, 1, (), 5e10, None, switch=8, link_efficiency=0.83,
         source="datasheet; ~hbm, ~dcn (5e10 to 1e11), switch of 72 in an NVL72"),
)  # fmt: skip
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TABLE}
"""Every chip that plans can be made for, by name."""

_DEVICE_KINDS = (
    ("tpu v4", "v4"), ("tpu v5 lite", "v5e"), ("tpu v5e", "v5e"), ("tpu v5", "v5p"), ("tpu v6", "v6e"), ("tpu7x", "tpu7x"),
    ("h100", "h100"), ("h200", "h200"), ("b200", "b200"),
)  # fmt: skip


def chip_of(where: AnyMesh | Sequence[Any] | str) -> Chip | None:
    """The chip of a topology text (``"v5p:8x8x8"``, ``"4x h100:8"``), a mesh or a list of devices; None: not known (CPUs).

    Raises:
      MeshError: a text that is no topology.
    """
    if isinstance(where, str):
        return CHIPS[parse_topology(where)[1]]
    if isinstance(where, Mesh):
        where = list(where.devices.flat)
    elif not isinstance(where, Sequence):
        return None
    kind = str(getattr(where[0], "device_kind", "")).lower() if len(where) else ""
    return next((CHIPS[name] for text, name in _DEVICE_KINDS if text in kind), None)


def device_count(text: str) -> int:
    """How many JAX devices a topology has."""
    slices, kind, chips = parse_topology(text)
    return slices * math.prod(chips) * CHIPS[kind].devices


def planned_mesh(mesh: AnyMesh | str, topology: str | None) -> AnyMesh:
    """The mesh to plan on: text becomes an abstract mesh, of which one size may be -1 where a topology says how many.

    Raises:
      LayoutSyntaxError: text that is no mesh.
      MeshError: a mesh that does not fill the topology, or a topology beside devices.
    """
    if isinstance(mesh, Mesh) and topology is not None:
        raise MeshError(
            f"topology {topology!r} beside a mesh of devices, which know where they are",
            fixes=["leave it out, or give the mesh as text"],
        )
    total = None if topology is None else device_count(topology)
    if isinstance(mesh, str):
        sizes = parse_mesh(mesh)
        if -1 in sizes.values():
            if total is None:
                raise MeshError(f"mesh ({mesh}): -1 needs a topology to fill")
            fill_mesh(sizes, total)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    if total is not None and math.prod(mesh.shape.values()) != total:
        text = ", ".join(f"{a}={n}" for a, n in mesh.shape.items())
        raise MeshError(
            f"mesh ({text}) has {math.prod(mesh.shape.values())} devices, but {topology} has {total}",
            fixes=["make the sizes multiply to that number, or write -1 for one of them"],
        )
    return mesh

"""The machines that plans are for: what a chip computes, holds and sends, and how long a collective takes on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from ..errors import MeshError
from ..layout import AnyMesh
from ..mesh import fill_mesh, parse_mesh, parse_topology
from .collectives import Collective, CollectiveOp, Form
from .torus import Stage

if TYPE_CHECKING:
    from .plan import Plan


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


# -- collectives


@dataclass(frozen=True, slots=True)
class _Level:
    """A part of a group that sends over links of one kind: devices, bytes/s of one device both ways together, hops."""

    size: int
    rate: float
    hops: int
    longest: float  # of the all-to-all: the largest size/rate of its dimensions
    ring: bool = False


_INWARD = ("slice", "torus", "switch", "core")


def seconds_of(kind: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip, form: Form = "native") -> float:
    """How long one collective takes.

    α-β: a level takes the longer of its latency, ``latency · hops``, and its traffic. With A devices, W bytes/s both ways over
    one torus dimension that is a ring (a line has half), n dimensions together:

    - all-gather, reduce-scatter: ``V·(A-1)/A / (W·n)``; all-reduce: both;
    - all-to-all: ``V·max(Aᵢ) / (4·A·W)``, the traffic through the middle (a quarter of an all-gather on one ring);
    - a permute: V over one link;
    - NVSwitch: ``V·(A-1)/A`` over the GPU's NVLinks one way; DCN likewise over a chip's share;
    - several levels (slices, torus, cores of a chip): each in turn, the outer ones on what the inner ones have cut:
      an all-reduce over slices is a reduce-scatter inside, an all-reduce of ``V/inner`` across, an all-gather inside.

    ``staged`` takes the torus dimensions in turn, the major one on all of V. Groups that are interleaved along a dimension
    share its links.

    Args:
      kind: the collective.
      volume: V, bytes of the whole array of one group: gathered (all-gather), before scattering (reduce-scatter), the operand
        (all-reduce), the operands of all its devices together (all-to-all), one device's operand (permute).
      stages: the stages of the axes it runs over, major to minor (:func:`meshpar.plan.torus.torus_of`).
      chip: of the table, per chip; efficiencies as it has them.
      form: how it uses the torus.

    Returns:
      Seconds. 0 for a group of one.
    """
    levels = _levels(stages, chip, form if kind != "collective-permute" else "staged")
    if not levels:
        return 0.0
    if kind == "collective-permute":  # to a neighbour, one way, over the slowest links there are
        return max(max(chip.latency, volume / level.rate * (2 if level.ring else 1)) for level in levels)
    if kind == "all-to-all":
        own = volume / math.prod(level.size for level in levels)
        return sum(max(chip.latency * level.hops, own * level.longest / 4) for level in levels)
    seconds, rest = 0.0, volume
    for level in reversed(levels):  # the innermost has all of it
        seconds += max(chip.latency * level.hops, rest * (level.size - 1) / level.size / level.rate)
        rest /= level.size
    return 2 * seconds if kind == "all-reduce" else seconds


def hop_seconds(size: float, stage: Stage, chip: Chip) -> float:
    """Seconds of a hop to both neighbours at once, ``size`` bytes to each.

    Over a line the way back from its end shares the links of one direction (two devices have no way back); over a switch both
    hops share the device's.
    """
    device = chip.per_device()
    if stage.dim == "switch":
        rate = device.link / 2
    elif stage.dim == "slice":
        rate = device.dcn / 2
    elif stage.dim == "core":
        rate = chip.core_link
    else:
        rate = device.link / (stage.stride * (1 if stage.wraps or stage.size <= 2 else 2))
    return max(chip.latency, size / (rate * chip.link_efficiency))


def _levels(stages: Sequence[Stage], chip: Chip, form: Form) -> list[_Level]:
    """The levels of a group, outermost first."""
    device = chip.per_device()
    found: dict[str, list[_Level]] = {name: [] for name in _INWARD}
    for stage in merged(stages):
        n = stage.size
        if stage.dim in ("slice", "switch", "core"):
            rate = {"slice": device.dcn, "switch": device.link, "core": chip.core_link}[
                stage.dim
            ] * chip.link_efficiency
            # a switch takes from all sources at once: no middle to squeeze through
            found[stage.dim].append(_Level(n, rate, 1, 4 * (n - 1) / n / rate))
        else:
            rate = (2 if stage.wraps else 1) * device.link * chip.link_efficiency / stage.stride
            hops = -(-n // 2) if stage.wraps else n - 1
            found["torus"].append(_Level(n, rate, hops * stage.stride, n / rate, stage.wraps))
    out: list[_Level] = []
    for name in _INWARD:
        levels = found[name]
        if name == "torus" and form == "native" and len(levels) > 1:
            size, rate = math.prod(x.size for x in levels), sum(x.rate for x in levels)
            levels = [_Level(size, rate, sum(x.hops for x in levels), max(x.longest for x in levels))]
        # the major dimension comes last when gathering, so it stands innermost: it has all of V
        out += reversed(levels)
    return out


def merged(stages: Sequence[Stage]) -> list[Stage]:
    """Stages of one torus dimension as one, where they are nested in it; those of size 1 go."""
    out: list[Stage] = []
    for stage in stages:
        if stage.size == 1:
            continue
        same = next((i for i, s in enumerate(out) if s.dim == stage.dim != ""), None)
        if same is None:
            out.append(stage)
            continue
        minor, major = sorted((out[same], stage), key=lambda s: s.stride)
        if major.dim in ("slice", "switch", "core") or major.stride == minor.stride * minor.size:
            out[same] = Stage(minor.size * major.size, major.dim, major.wraps, minor.stride)
        else:
            out.append(stage)
    return out


def price(plan: Plan) -> None:
    """Fill in the seconds of every collective of a plan, where its chip is known."""
    chip = plan.chip
    if chip is None:
        return
    memo: dict[Any, float] = {}
    for c in plan.collectives:
        if c.seconds is not None:  # of a ring
            continue
        key = (c.op, c.axes, c.bytes, c.form)
        if key not in memo:
            stages = [s for a in c.axes for s in plan.torus[a]]
            memo[key] = seconds_of(c.op, volume_of(c, plan.sizes), stages, chip, c.form)
        c.seconds = memo[key]


def volume_of(collective: Collective, sizes: Mapping[str, int]) -> float:
    """The V of :func:`seconds_of`, from the bytes on the wire."""
    group = math.prod(sizes[a] for a in collective.axes)
    if group == 1:
        return 0.0
    if collective.op == "collective-permute":
        return collective.bytes
    operand = collective.bytes * group / (group - 1)
    if collective.op == "all-reduce":
        return operand / 2
    return operand * group if collective.op == "all-to-all" else operand


def dcn_bytes_of(collective: Collective, plan: Plan) -> float:
    """Bytes that a device sends to other slices (or nodes) in one run of a collective; 0 where its axes stay within a slice.

    As in :func:`seconds_of`, what crosses has been cut by the levels within a slice: V/inner, of which a part (S-1)/S leaves,
    twice for an all-reduce; of an all-to-all a device's own V/group. A permute counts whole, as for the devices at the edge.
    """
    stages = [s for a in collective.axes for s in plan.torus.get(a, ())]
    slices = math.prod(s.size for s in stages if s.dim == "slice")
    if slices == 1:
        return 0.0
    if collective.op == "collective-permute":
        return collective.bytes
    group, volume = math.prod(plan.sizes[a] for a in collective.axes), volume_of(collective, plan.sizes)
    own = volume / group if collective.op == "all-to-all" else volume * slices / group
    return own * (slices - 1) / slices * (2 if collective.op == "all-reduce" else 1)


def note_crossings(plan: Plan) -> None:
    """Note what crosses slices in every layer: gathered weights, and activations; sums of gradients are what slices are for."""
    if plan.chip is None or not plan.chip.torus:
        return  # nodes of GPUs have a link to others for every GPU
    weights = {d for h in plan.inputs if h.kind in ("params", "opt") for d in h.dims.split()}
    crossing = [
        (dcn_bytes_of(c, plan) * (c.count or 1), c)
        for c in plan.collectives
        if c.count != 1 and (c.op not in ("all-reduce", "reduce-scatter") or set(c.dims.split()) - weights)
    ]
    crossing = [(sent, c) for sent, c in crossing if sent]
    if crossing:
        total, (_, worst) = sum(sent for sent, _ in crossing), max(crossing, key=lambda x: x[0])
        plan.notes.append(
            f"each layer waits for other slices: {total / 1e9:.3g} GB a device in a step, most of it {worst.op} over "
            f"{'+'.join(worst.axes)} of `{worst.dims}` ({worst.cause}); keep weights within a slice, and split only the batch "
            "over slices: `batch: slice+data; embed: data`"
        )

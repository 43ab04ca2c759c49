"""Which form a collective over several torus dimensions takes: the fewest bytes first, then the least time.

The times are those of :func:`meshpar_kernels.collectives.choose`, the one α-β family that kernels and planner share. Of its forms
the lowering emits these:

- a reduce-scatter: ``native``, ``staged``, ``coloured``, and across slices ``hierarchical``. Over several torus dimensions
  XLA makes an all-reduce of the native one, which sends twice the bytes and holds the whole array: it is left out, also where it
  would be as fast. Coloured is modelled, and never taken by default: XLA runs the stages of colours one after the other (seen in
  compiled schedules, ``benchmarks/collectives.py``), so that all it could gain is that a slow dimension has less to carry, which
  no compiled program has shown.
- an all-gather and an all-reduce: ``native``. No form sends less, and it alone has the links of all dimensions at once.

A stand-alone ring of ``ppermute``s is not among them: in compiled schedules its sums and copies cost more than its links save,
for every reduce-scatter that was compiled. Beside products rings are decided on by :mod:`meshpar.passes.overlap`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from meshpar_kernels.collectives import Axis, choose

from ..hardware.chips import Chip
from ..hardware.topology import Stage
from ..plan.collectives import CollectiveOp, Form


def form_for(op: CollectiveOp, volume: float, stages: Sequence[Stage], chip: Chip | None) -> tuple[Form, str]:
    """How a collective is made, and why (empty where there is no choice).

    Args:
      op: its kind.
      volume: bytes of the whole array of one group, as in :func:`meshpar.hardware.chips.seconds_of`.
      stages: of the axes that it runs over, major to minor.
      chip: None: all links are taken to be alike, but between slices a tenth of that.
    """
    if op != "reduce-scatter":
        return "native", ""
    return _scatter_form(volume, tuple(s for s in stages if s.size > 1), chip)


@functools.lru_cache(maxsize=4096)
def _scatter_form(volume: float, stages: tuple[Stage, ...], chip: Chip | None) -> tuple[Form, str]:
    if len(stages) < 2 or not volume:
        return "native", ""
    outer = sum(s.dim == "slice" for s in stages)
    if outer == len(stages):
        return "native", ""
    hbm = None if chip is None else chip.per_device().hbm_bandwidth * chip.hbm_efficiency / 1e9
    axes, names = [_axis(s, chip) for s in stages], ("staged", *(("hierarchical",) if outer else ()))
    found = choose("reduce_scatter", volume, axes, hbm=hbm, candidates=names)
    why = found.reason
    if not outer:
        colours = choose("reduce_scatter", volume, axes, hbm=hbm, candidates=("coloured",)).seconds["coloured"]
        why += f"; coloured {colours * 1e6:.0f}, but XLA runs its colours one after the other"
        why += "; native is compiled to an all-reduce, of twice the bytes"
    return found.algorithm, why  # type: ignore[return-value]


def _axis(stage: Stage, chip: Chip | None) -> Axis:
    """A stage as the α-β family takes it."""
    outer = stage.dim == "slice"
    if chip is None:
        return Axis(stage.size, stage.wraps, 0.1 if outer else 1.0, 0.0, outer)
    device = chip.per_device()
    link = {"slice": device.dcn, "switch": device.link, "core": chip.core_link}.get(
        stage.dim, device.link / stage.stride
    )
    return Axis(stage.size, stage.wraps, link * chip.link_efficiency / 1e9, chip.latency, outer)

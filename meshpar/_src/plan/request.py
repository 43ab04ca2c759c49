"""The request for a plan: layout, mesh and options, as one value that the planner and the passes read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..hardware.calibration import Calibrations
from ..hardware.compiler_options import OptionsMode, TunedOptions
from ..layout import AnyMesh, Layout


@dataclass(frozen=True)
class PlanRequest:
    """All that a plan depends on besides its program. Another plan of the program is made for ``dataclasses.replace`` of it.

    Attributes:
      layout: as the user gave it.
      topology: the slices that an abstract mesh is on, ``"v5p:8x8x8"``, for estimates of time; None: the devices of the mesh tell.
      strict: two names for one dim are an error instead of a warning.
      init: the program initializes the state, so it need not have the dims of the batch.
      donated: indices of the flat inputs whose memory the results may use.
      lowering: ``"auto"``, ``"shard_map"``, or ``"jit"`` (XLA partitions); see :mod:`passes.lowering`.
      overlap: the implementation of all-gathers before matmuls and reduce-scatters after them, one of
        :data:`passes.collective_matmul.MODES`, and whether a reduce-scatter may be replaced by an all-reduce
        (:mod:`passes.all_reduce_choice`). None: the default of the lowering.
      schedule: of pipelines, one of :data:`program.pipeline.SCHEDULES`.
      gather: when loops over microbatches all-gather weights, one of :data:`program.pipeline.GATHERS`; ``auto``: as is
        cheaper. None: ``microbatch`` in pipelines; in other loops ``step``, unless that plan exceeds the memory.
      options: ``"auto"``: use the compiler options of :mod:`hardware.compiler_options`.
      compiler_options: the user's own compiler options.
      calibrations: measured efficiencies of devices, among them the plan's.
      tokens: of a step that generates one token of each sequence, the dim of the sequences; None: another step.
      name: of the model, in the titles of reports; "": the name of the function.
    """

    layout: Layout
    mesh: AnyMesh
    topology: str | None = None
    strict: bool = False
    init: bool = False
    donated: frozenset[int] = frozenset()
    lowering: str = "auto"
    overlap: str | None = "off"
    schedule: str = "1f1b"
    gather: str | None = None
    options: OptionsMode | TunedOptions = "off"
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    calibrations: Calibrations = ()
    tokens: str | None = None
    name: str = ""

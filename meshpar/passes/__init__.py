"""Functions from plan to plan.

The first, :func:`meshpar.passes.overlap.overlap`, chooses between forms by their steps: it runs the others on each, those of
:data:`PASSES`, which are in their order.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..compat.jax import without_gc
from ..errors import JoinWarning
from ..hardware.calibration import Calibrations
from ..hardware.chips import CollectiveOp
from ..hardware.options import Options, OptionsMode, choose_options
from ..hardware.topology import refused_options
from ..layout import AnyMesh, Layout
from ..plan.plan import Plan
from ..plan.planner import planned
from ..program.ir import Program
from .barriers import loops_in_turn, products_apart, results_in_turn, slices_apart, stacks_in_order
from .crossings import note_crossings
from .overlap import overlap as send
from .schedule import schedule
from .sums import whole_sums

PASSES: tuple[Callable[[Plan], Plan], ...] = (
    whole_sums,
    schedule,
    products_apart,
    stacks_in_order,
    loops_in_turn,
    results_in_turn,
    slices_apart,
    note_crossings,
)


def make_plan(
    program: Program, layout: Layout, mesh: AnyMesh, *, strict: bool = False, init: bool = False,
    topology: str | None = None, donated: Iterable[int] = (), lowering: str = "shard_map", overlap: str = "off",
    options: OptionsMode = "off", compiler_options: Mapping[str, Any] | None = None, calibrations: Calibrations = (),
) -> Plan:  # fmt: skip
    """Plan a program under a layout on a mesh, through every pass.

    Args:
      strict: two names for one dim are an error instead of a warning.
      init: the program makes the state, so it need not have the dims of the batch.
      topology: the slices that an abstract mesh lies on, ``"v5p:8x8x8"``: for times.
      donated: positions of the flat inputs whose memory the results may take.
      lowering: ``"shard_map"``, or ``"jit"``, under which XLA partitions.
      overlap: how gathers before products and reduce-scatters after them are made: :data:`meshpar.passes.overlap.MODES`; and
        whether sums may be sent whole (:mod:`meshpar.passes.sums`).
      options: ``auto``: the compiler's options of :mod:`meshpar.hardware.options`; ``compiler_options``: the user's own.
      calibrations: what was measured of devices.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist.
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError.
    """
    with without_gc():
        plan = planned(program, layout, mesh, strict=strict, init=init, topology=topology, donated=frozenset(donated),
                       calibrations=calibrations)  # fmt: skip
    asked = Options(options, tuple((compiler_options or {}).items()))
    return with_passes(replace(plan, lowering=lowering, overlap=overlap, options=asked))


def with_passes(plan: Plan) -> Plan:
    """A plan as the walk over its program made it, through every pass: for the lowering, overlap and options asked for in it.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist.
    """
    sends: set[CollectiveOp] = {c.op for c in plan.collectives}
    asked = plan.options
    chosen = choose_options(
        plan.chip, sends, asked.mode, dict(asked.given), lambda values: refused_options(plan.mesh, values)
    )
    with without_gc():
        return send(replace(plan, options=chosen), _passed)


def _passed(plan: Plan) -> Plan:
    for run in PASSES:
        plan = run(plan)
    return plan


def replan(
    plan: Plan, *, layout: Layout | None = None, mesh: AnyMesh | None = None, topology: str | None = None,
    strict: bool = False, overlap: str | None = None, options: OptionsMode | None = None,
    calibrations: Calibrations | None = None,
) -> Plan:  # fmt: skip
    """The plan of the same program under another layout or on another mesh; what is not given is as in ``plan``.

    An ``overlap`` other than ``"off"`` means ``lowering="shard_map"``.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
    """
    walked = walked_again(plan, layout=layout, mesh=mesh, topology=topology, strict=strict, calibrations=calibrations)
    return with_passes(
        replace(
            walked,
            lowering=plan.lowering if overlap in (None, "off") else "shard_map",
            overlap=plan.overlap if overlap is None else overlap,
            options=Options(plan.options.mode if options is None else options, plan.options.given),
        )
    )


def walked_again(
    plan: Plan, *, layout: Layout | None = None, mesh: AnyMesh | None = None, topology: str | None = None,
    strict: bool = False, calibrations: Calibrations | None = None, most: float = math.inf,
) -> Plan:  # fmt: skip
    """As :func:`replan`, before the passes; it asks for the lowering, overlap and options of ``plan``.

    Args:
      most: seconds of a step that its collectives may take, one after the other.

    Raises:
      TooLong: they take longer.
    """
    with warnings.catch_warnings(), without_gc():
        warnings.simplefilter("ignore", JoinWarning)  # the first plan has told
        walked = planned(
            plan.program,
            plan.asked if layout is None else layout,
            plan.mesh if mesh is None else mesh,
            strict=strict,
            topology=plan.topology if mesh is None and topology is None else topology,
            donated=plan.donated,
            calibrations=plan.calibrations if calibrations is None else calibrations,
            most=most,
        )
    asked = Options(plan.options.mode, plan.options.given)
    return replace(walked, lowering=plan.lowering, overlap=plan.overlap, options=asked)

"""Functions from plan to plan.

An implementation of each collective next to matmuls comes first (:mod:`meshpar.passes.collective_matmul`); then :data:`PASSES`, in
that order. Where cost decides about rings, plans with and without them are compared after all passes.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from ..compat.jax import user_stacklevel, without_gc
from ..cost.caching import free_caches, with_reasons
from ..cost.collective_matmul import warn_about_lines
from ..cost.memory import memory_of
from ..cost.time import time_of
from ..dims import did_you_mean
from ..errors import (
    IndivisibleWarning,
    JoinWarning,
    LoweringWarning,
    MeshparError,
    ReplicatedWarning,
    UnsupportedError,
)
from ..hardware.calibration import Calibrations
from ..hardware.collective_ops import CollectiveOp
from ..hardware.options import Options, OptionsMode, choose_options
from ..hardware.topology import refused_options
from ..layout import AnyMesh, Layout
from ..plan.checks import kernel_rule_text, unnamed_results, unnamed_weights
from ..plan.plan import Choice, Plan
from ..plan.planner import planned
from ..plan.spec import format_axes
from ..program.ir import Op, Program
from ..program.pipeline import stack_notes
from ..program.roles import unread_state
from ..units import format_bytes, format_seconds
from .all_reduce_choice import choose_all_reduce
from .barriers import pad_rows, separate_matmuls, separate_slices, serialize_loops, serialize_results
from .collective_matmul import MODES, CollectiveMatmulPairs, activation_axes, with_overlaps
from .equal_sends import merge_equal_sends
from .indivisible import (
    MIN_EXCESS_BYTES,
    abstract_mesh,
    bytes_caused,
    dividing_meshes,
    excess_text,
    indivisible_dims,
    microbatch_text,
)
from .lowering import AUTO, resolve_lowering
from .schedule import schedule
from .slice_traffic import note_slice_traffic

P = TypeVar("P", bound=Plan)


class Pass(NamedTuple):
    """A function from plan to plan, and the plans that it is for.

    Attributes:
      run: the function.
      lowerings: the ones that emit its additions to a plan: barriers exist in ``"shard_map"`` alone. For the
        others it does not run, so that no estimate contains a step that the program does not have.
      quirk: the entry of :mod:`meshpar.compat.quirks` that it works around; it does not run for chips and compiler versions without
        it (:class:`meshpar.hardware.compiler.CompilerModel`). None: it is for all of them.
    """

    run: Callable[[Plan], Plan]
    lowerings: tuple[str, ...] = ("shard_map",)
    quirk: str | None = None

    def applies_to(self, plan: Plan) -> bool:
        """Whether it is for the lowering of a plan and the compiler of its chip."""
        return plan.lowering in self.lowerings and (self.quirk is None or self.quirk in plan.compiler.quirks)


PASSES: tuple[Pass, ...] = (
    Pass(choose_all_reduce, ("shard_map", "jit")),
    Pass(schedule, quirk="LATE_GRADIENTS"),
    Pass(separate_matmuls, quirk="FUSED_EPILOGUE"),
    Pass(serialize_loops, quirk="LOOPS_BEFORE_REDUCTIONS"),
    Pass(serialize_results, quirk="GATHER_NOT_IN_PLACE"),
    Pass(separate_slices, quirk="STACK_CAST_BEFORE_LOOP"),
    Pass(pad_rows, quirk="SINGLE_ROW"),
    Pass(merge_equal_sends),
    Pass(note_slice_traffic, ("shard_map", "jit")),
)


def make_plan(
    program: Program, layout: Layout, mesh: AnyMesh, *, strict: bool = False, init: bool = False,
    topology: str | None = None, donated: Iterable[int] = (), lowering: str = AUTO, overlap: str | None = "off",
    options: OptionsMode = "off", compiler_options: Mapping[str, Any] | None = None, calibrations: Calibrations = (),
    schedule: str = "1f1b", gather: str | None = None, plan_type: type[P] = Plan,
) -> P:  # fmt: skip
    """The plan of a program under a layout on a mesh, after all passes.

    Args:
      strict: two names for one dim are an error instead of a warning.
      init: the program initializes the state, so it need not have the dims of the batch.
      topology: the slices that an abstract mesh is on, ``"v5p:8x8x8"``, for estimates of time.
      donated: indices of the flat inputs whose memory the results may use.
      lowering: ``"auto"``, ``"shard_map"``, or ``"jit"`` (XLA partitions); see :func:`resolve_lowering`.
      overlap: the implementation of all-gathers before matmuls and reduce-scatters after them, one of
        :data:`meshpar.passes.collective_matmul.MODES`, and whether a reduce-scatter may be replaced by an all-reduce
        (:mod:`meshpar.passes.all_reduce_choice`). None: the lowering's default.
      options: ``"auto"``: use the compiler options of :mod:`meshpar.hardware.options`.
      compiler_options: the user's own compiler options.
      calibrations: measured efficiencies of devices.
      schedule: of pipelines, one of :data:`meshpar.program.pipeline.SCHEDULES`.
      gather: of loops over microbatches, one of :data:`meshpar.program.pipeline.GATHERS`; None: the default.
      plan_type: the class of the plan.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist; layers that cannot be a pipeline.
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError.
    """
    with without_gc():
        plan = planned(program, layout, mesh, strict=strict, init=init, topology=topology, donated=frozenset(donated),
                       calibrations=calibrations, rank=_rank, schedule=schedule, gather=gather,
                       plan_type=plan_type)  # fmt: skip
    requested = Options(options, tuple((compiler_options or {}).items()))
    plan = replace(plan, requested_lowering=lowering, requested_overlap=overlap, options=requested)
    plan = _with_notes(with_passes(plan))
    if init:
        _warn_of_unnamed_results(plan)
    else:
        _warn_of_replication(plan)
        _warn_of_scheme(plan)
        _warn_of_indivisible(plan)
        _warn_of_undeclared_state(plan)
        _warn_of_unrolled_layers(plan)
    _warn_of_kernels(plan)
    if plan.lowering_reason is not None:
        text = f'lowering="auto" is "jit" for this program, whose plan is an estimate: {plan.lowering_reason}'
        warnings.warn(text, LoweringWarning, stacklevel=user_stacklevel())
    return plan


def _rank(plan: Plan) -> tuple[bool, float]:
    """A sort key for plans of one step: (whether it exceeds the chip's memory, seconds); (False, bytes sent) if the
    chip is unknown."""
    time = time_of(plan)
    if plan.chip is None or time is None:
        return False, plan.bytes_sent
    return memory_of(plan).peak > plan.chip.per_device().hbm, time.seconds


def _seconds(plan: Plan) -> float:
    """The estimated seconds of a step of a plan with a known chip."""
    time = time_of(plan)
    assert time is not None
    return time.seconds


def _idle_axes(plan: Plan) -> list[str]:
    """The axes of size > 1 over which no input or output is split, and no collective runs."""
    used = {a for h in (*plan.inputs, *plan.outputs) for _, axes in h.split for a in axes}
    used |= {a for c in plan.collectives for a in c.axes}
    return [a for a, n in plan.sizes.items() if n > 1 and a not in used]


def _with_notes(plan: P) -> P:
    """The plan with notes: axes and rules without effect on its program, and a compiler version without a table."""
    notes = []
    idle = ", ".join(f"`{a}`" for a in _idle_axes(plan))
    if idle:
        notes.append(f"no value is split over {idle}: its devices all do the same work")
    unused = sorted({r.dim for r in plan.layout.rules} - plan.program.all_names())
    if unused:
        notes.append(f"rules without effect, since the program has no such dim: {', '.join(unused)}")
    if plan.uncounted_loops:
        lines = ", ".join(dict.fromkeys(loop.op.source for loop in plan.uncounted_loops))
        notes.append(
            f"the number of iterations of a while loop is not known ({lines}): it is counted as one iteration, and the bytes, "
            "FLOPs and seconds of the step are lower bounds"
        )
    if plan.compiler.note is not None and plan.chip is not None:
        notes.append(plan.compiler.note)
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _warn_of_replication(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of each axis for which the layout has rules, none of which has an effect."""
    layout = plan.requested_layout
    rules = [r for r in layout.rules if not (r.optional or r.dim in layout.optional)]
    for axis in _idle_axes(plan):
        unused = [str(r) for r in rules if axis in r.axes]
        if unused:
            shown = "; ".join(unused[:4]) + ("; …" if unused[4:] else "")
            names = ", ".join(sorted(plan.program.all_names())[:8]) or "none: name some with dims={path pattern: dims}"
            text = (
                f"nothing of this program is split over `{axis}`, of size {plan.sizes[axis]}, though the layout has rules for it "
                f"({shown}): its devices all do the same work. Dims of the program: {names}"
            )
            warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())


def _warn_of_undeclared_state(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of arrays that are updated as optimizer state is, but not declared as such: rules with the scope
    ``opt`` do not apply to them."""
    program, split = plan.program, {h.path: {a for _, axes in h.split for a in axes} for h in plan.inputs}
    for rule in plan.requested_layout.rules:
        axes = {a for a in rule.axes if plan.sizes[a] > 1} if rule.scope == "opt" else set()
        paths = [
            str(v.path)
            for v in (program.cached(unread_state) if axes else ())
            if rule.dim in program.dims(v) and not axes & split[str(v.path)]
        ]
        if paths:
            more = f" and {len(paths) - 1} more" if paths[1:] else ""
            text = (
                f"`{rule}` does not apply to {paths[0]}{more}: only the update reads it, elementwise, as it reads optimizer state, "
                "but neither its type nor its path declares it as such, so it is stored as a parameter. Call it `opt_state`, or "
                f'give it a rule of its own: "{paths[0]}".{rule.dim}: {"+".join(rule.axes)}'
            )
            warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())


def _warn_of_unrolled_layers(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of stacked layers that are split over axes without the batch, as stages are, and are not looped
    over."""
    program, specs = plan.program.traced, dict[Any, tuple[tuple[str, ...], ...]]()
    for value, held in zip(program.inputs, plan.inputs, strict=True):
        specs[value] = tuple(axes for _, axes in held.split)
    of_batch = {a for v, spec in specs.items() if "batch" in program.dims(v) for axes in spec for a in axes}
    sizes = {a: 1 if a in of_batch else n for a, n in plan.sizes.items()}
    for text in stack_notes(program, specs.__getitem__, {r.dim for r in plan.layout.rules if r.scope is None}, sizes):
        warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())


def _warn_of_unnamed_results(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of an initializer whose weights are replicated, since no rule has a name of theirs."""
    template = unnamed_results(plan.program, plan.requested_layout)
    if template and plan.mesh.size > 1:
        text = (
            "mp.init: the weights have no names that the layout has a rule for, so they are replicated: every device allocates "
            "all of them. Names that only the step infers are not known here. Name their dims:\n"
        )
        warnings.warn(text + "\n".join(template), ReplicatedWarning, stacklevel=user_stacklevel())


def _warn_of_kernels(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of kernels without a factor rule whose operands are all-gathered, with the bytes, once for each
    line of the program."""
    sends: dict[str, tuple[Op, float]] = {}
    for c in plan.collectives:
        if c.origin is not None and c.origin.primitive.opaque:
            op, sent = sends.get(c.origin.location, (c.origin, 0.0))
            sends[c.origin.location] = op, sent + c.total_bytes
    for location, (op, sent) in sends.items():
        text = (
            f"{op.name} has no factor rule, so its operands are all-gathered, {format_bytes(sent)} sent by each device a step, and "
            f"every device runs all of it, at {location}. Declare which dims may be split, on the function around it; `!` marks a "
            f'dim that may not: for example @mp.kernel_rule("{kernel_rule_text(op, plan.program)}")'
        )
        warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())


def _warn_of_scheme(plan: Plan) -> None:
    """Warn (``ReplicatedWarning``) of rules of a known scheme for whose dims the program has no name.

    All dims of a scheme but ``batch`` are optional, so that a model need not have each of them. If it has none of those over one
    axis, it is not sharded as the scheme says, mostly because its dims have other names.
    """
    layout, names = plan.requested_layout, plan.program.all_names()
    groups: dict[tuple[str, ...], list[str]] = {}
    for rule in layout.rules if layout.scheme else ():
        if rule.optional and any(plan.sizes[a] > 1 for a in rule.axes):
            groups.setdefault(rule.axes, []).append(rule.dim)
    template = unnamed_weights(plan.program)
    for axes, dims in groups.items():
        if names.intersection(dims):
            continue
        over, missing = "+".join(axes), " and ".join(f"`{d}`" for d in dims)
        if template:
            fix = "The weights have no names, so they are replicated. Name their dims:\n" + "\n".join(template)
        else:
            free = names.difference(rule.dim for rule in layout.rules)
            weights = {d for v in plan.program.inputs if v.kind == "params" for d in plan.program.dims(v)}
            dim = min(free & weights or free or {"dim"})
            fix = (
                f"Its dims are {', '.join(sorted(names)) or 'unnamed'}: rename them in dims=, or add a rule for one: "
                f'mp.Layout("{layout.scheme}") | "{dim}: {over}"'
            )
        text = f"the scheme `{layout.scheme}` shards {missing} over `{over}`, but no dim of the program has such a name. {fix}"
        warnings.warn(text, ReplicatedWarning, stacklevel=user_stacklevel())
        if template:
            return  # it is the same for every axis


def _warn_of_indivisible(plan: Plan) -> None:
    """Warn (``IndivisibleWarning``) of dims of intermediate values that a rule does not divide, where it costs bytes or FLOPs.

    Programs with a ``shard_map`` of the user's own are planned for its mesh only, and are left out.
    """
    if any(op.primitive.shard_map for op in plan.program.root.walk()):
        return
    for dim in indivisible_dims(plan):
        if not dim.rule.optional and (text := microbatch_text(plan, dim)):
            warnings.warn(text, IndivisibleWarning, stacklevel=user_stacklevel())
            continue
        if bytes_caused(plan, dim.rule) < MIN_EXCESS_BYTES:
            continue
        others = []
        for sizes in dividing_meshes(plan, dim):
            if others and math.prod(sizes.values()) < plan.mesh.size:
                break
            with contextlib.suppress(MeshparError):  # a mesh that another dim does not allow is not proposed
                others.append(plan_without_passes(plan, mesh=abstract_mesh(sizes)))
        if text := excess_text(plan, dim, others):
            warnings.warn(text, IndivisibleWarning, stacklevel=user_stacklevel())


def with_passes(plan: P) -> P:
    """A plan of :func:`plan_without_passes` after all passes.

    It resolves the plan's ``requested_lowering``, ``requested_overlap`` and requested compiler options.

    Raises:
      UnsupportedError: an ``overlap`` that does not exist.
    """
    sends: set[CollectiveOp] = {c.op for c in plan.collectives}
    requested = plan.options
    lowering, overlap, reason = resolve_lowering(plan, plan.requested_lowering, plan.requested_overlap)
    plan = replace(plan, lowering=lowering, overlap=overlap, lowering_reason=reason)
    chosen = choose_options(
        plan.chip, sends, requested.mode, dict(requested.given), lambda values: refused_options(plan.mesh, values)
    )
    with without_gc():
        # passes change fields by `dataclasses.replace`, so the class of the plan stays
        return cast(P, _with_better_overlaps(replace(plan, options=chosen)))


def _with_better_overlaps(plan: Plan) -> Plan:
    """The plan after all passes, with rings over those axes of activations where the step then is shorter.

    Raises:
      UnsupportedError: the mode ``plan.overlap`` is not one of :data:`meshpar.passes.collective_matmul.MODES`.
    """
    if plan.overlap not in MODES:
        fixes = did_you_mean(plan.overlap, MODES, "modes")
        raise UnsupportedError(f"there is no overlap {plan.overlap!r}", fixes=fixes)
    if plan.overlap == "off":
        return _run_passes(plan)
    pairs = CollectiveMatmulPairs(plan)
    joint: dict[tuple[str, ...], Choice] = dict.fromkeys(activation_axes(pairs), "xla")
    best = _run_passes(with_overlaps(pairs, joint))
    reasons: dict[tuple[str, ...], str] = {}
    for axes in joint:
        if not any(o.together and o.axes == axes for o in best.overlaps):
            continue
        with_rings = _run_passes(with_overlaps(pairs, {**joint, axes: "ring"}))
        xla, ring = _seconds(best), _seconds(with_rings)
        reasons[axes] = (
            f"the step takes {format_seconds(ring)} with rings over {format_axes(axes)}, {format_seconds(xla)} without"
        )
        if xla - ring >= max(plan.compiler.min_gain_seconds, plan.compiler.min_joint_gain * xla):
            best, with_rings, joint[axes] = with_rings, best, "ring"
        free_caches(with_rings)
    if reasons:
        explained = [replace(o, reason=f"{o.reason}; {reasons[o.axes]}") if o.together else o for o in best.overlaps]
        best = with_reasons(best, overlaps=tuple(explained))
    warn_about_lines(best)
    return best


def _run_passes(plan: Plan) -> Plan:
    """The plan after all of :data:`PASSES` that apply to it."""
    for each in PASSES:
        if each.applies_to(plan):
            plan = each.run(plan)
    return plan


def replan(
    plan: P, *, layout: Layout | None = None, mesh: AnyMesh | None = None, topology: str | None = None,
    strict: bool = False, lowering: str | None = None, overlap: str | None = None, options: OptionsMode | None = None,
    calibrations: Calibrations | None = None,
) -> P:  # fmt: skip
    """The plan of the same program under another layout or on another mesh; arguments that are None are as requested in ``plan``.

    An ``overlap`` other than ``"off"`` for a plan of ``lowering="jit"`` means ``lowering="auto"``.

    Raises:
      UnknownAxisError, UnknownDimError, DivisibilityError, JoinError: as for any plan.
    """
    if lowering is None:
        lowering = (
            AUTO if plan.requested_lowering == "jit" and overlap not in (None, "off") else plan.requested_lowering
        )
    without_passes = plan_without_passes(
        plan, layout=layout, mesh=mesh, topology=topology, strict=strict, calibrations=calibrations
    )
    return _with_notes(
        with_passes(
            replace(
                without_passes,
                requested_lowering=lowering,
                requested_overlap=plan.requested_overlap if overlap is None else overlap,
                options=Options(plan.options.mode if options is None else options, plan.options.given),
                tokens=plan.tokens,
            )
        )
    )


def plan_without_passes(
    plan: P, *, layout: Layout | None = None, mesh: AnyMesh | None = None, topology: str | None = None,
    strict: bool = False, calibrations: Calibrations | None = None, max_seconds: float = math.inf,
) -> P:  # fmt: skip
    """As :func:`replan`, without passes; it requests the lowering, overlap and options of ``plan``.

    Args:
      max_seconds: the largest sum of the seconds of a step's collectives.

    Raises:
      TooLong: the sum is larger.
    """
    with warnings.catch_warnings(), without_gc():
        warnings.simplefilter("ignore", JoinWarning)  # the first plan has warned
        without_passes = planned(
            plan.program,
            plan.requested_layout if layout is None else layout,
            plan.mesh if mesh is None else mesh,
            strict=strict,
            topology=plan.topology if mesh is None and topology is None else topology,
            donated=plan.donated,
            calibrations=plan.calibrations if calibrations is None else calibrations,
            max_seconds=max_seconds,
            rank=_rank,
            plan_type=type(plan),
            schedule=plan.schedule,
            gather=plan.gather,
        )
    requested = Options(plan.options.mode, plan.options.given)
    return replace(
        without_passes,
        requested_lowering=plan.requested_lowering,
        requested_overlap=plan.requested_overlap,
        options=requested,
    )

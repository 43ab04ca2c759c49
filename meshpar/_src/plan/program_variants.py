"""The forms in which a program can be planned: as traced, as pipelines, with slices that the mesh divides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout import Layout
from ..program.divisible_rewrite import rewrite_indivisible_slices
from ..program.ir import Program, Value
from ..program.pipeline import rewrite_pipelines, stack_notes
from .assignment import AxisAssignment
from .request import PlanRequest
from .shard_shapes import shard_count


@dataclass(frozen=True, eq=False)
class Variant:
    """A form in which a program can be planned.

    Attributes:
      program: as traced, or rewritten.
      layout: the rules of the request, then those for names of Flax metadata that are axes of the mesh.
      notes: about the form.
      gather: when loops over microbatches gather weights, as ``PlanRequest.gather``; ``step`` for loops that are not
        pipelines, whose rewrite decides for their own.
      divisible: the same form with the slices rewritten that the mesh does not divide; None: it has no such slices.
    """

    program: Program
    layout: Layout
    notes: tuple[str, ...]
    gather: str | None
    divisible: Variant | None = None


def variants(program: Program, request: PlanRequest) -> list[Variant]:
    """The forms in which a traced program can be planned.

    A program whose stacked layers are split has the form of :mod:`program.pipeline`; with ``gather="auto"`` two of them, in
    which weights are gathered once a step and in every microbatch, if any are gathered.

    Raises:
      UnsupportedError: layers that cannot be a pipeline.
    """
    mesh, sizes = request.mesh, dict(request.mesh.shape)
    layout = request.layout.with_axis_names(program.metadata_names, mesh)
    assignment = AxisAssignment(program, layout, sizes)
    rules = layout.unscoped
    about_layout = [
        f"Flax metadata names a dim `{rule.dim}`, which is an axis of the mesh and has no rule: the plan adds `{rule}` after the "
        f"rules of the layout; `{rule.dim}: none` turns this off"
        for rule in layout.rules[len(request.layout.rules) :]
    ]
    about_layout += stack_notes(program, assignment.value_spec, rules, sizes)
    out: list[Variant] = []
    for gather in ("step", "microbatch") if request.gather == "auto" else (request.gather,):
        pipelined = rewrite_pipelines(program, assignment.value_spec, rules, sizes, request.schedule, gather)
        notes = about_layout.copy()
        if pipelined is not None:
            notes += [p.note for p in pipelined.pipelines if p.note]
        form = program if pipelined is None else pipelined
        if not request.init:
            notes += _rounds_without_effect(request.layout, form)
        of_form = assignment if pipelined is None else AxisAssignment(form, layout, sizes)
        variant = Variant(form, layout, tuple(notes), request.gather if pipelined is None else "step")
        out.append(replace(variant, divisible=_divisible(variant, of_form)))
        if pipelined is None or all(p.gather != gather for p in pipelined.pipelines):
            break  # no weight is gathered
    return out


def _divisible(form: Variant, assignment: AxisAssignment) -> Variant | None:
    """A form with the slices rewritten that the mesh does not divide (:mod:`program.divisible_rewrite`); None: it has none."""

    def shards(value: Value, dim: int) -> int:
        return shard_count(assignment.value_spec(value)[dim], assignment.sizes)

    padded: list[str] = []
    rewritten = rewrite_indivisible_slices(form.program, shards, padded)
    return None if rewritten is None else replace(form, program=rewritten, notes=(*form.notes, *padded))


def _rounds_without_effect(layout: Layout, program: Program) -> list[str]:
    """Notes about rules with rounds of which no loop of a program makes a pipeline."""
    used = {p.dim for p in program.pipelines}
    return [
        f"rule `{rule}`: no loop over `{rule.dim}` is a pipeline, so its {rule.rounds} rounds have no effect"
        for rule in layout.rules
        if rule.rounds > 1 and rule.dim not in used
    ]

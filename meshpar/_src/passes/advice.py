"""Notes and warnings of a plan: rules without effect, dims that do not divide, weights without names, kernels without rules."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ...errors import IndivisibleWarning, LoweringWarning, MeshparError, ReplicatedWarning
from ..compat.jax import function_name, user_stacklevel
from ..cost.caching import with_shared_results
from ..hardware.topology import parse_topology
from ..iterables import grouped_by
from ..layout import BETWEEN_SLICES, Layout
from ..mesh import planned_mesh
from ..plan.assignment import AxisAssignment
from ..plan.checks import division_error, kernel_rule_text, sequence_name, unnamed_results, unnamed_weights
from ..plan.collectives import Collective, dcn_bytes_sent
from ..plan.plan import Plan
from ..program.ir import Op
from ..program.names_from_uses import GIVEN
from ..program.pipeline import stack_notes
from ..program.roles import unread_state
from ..units import format_bytes, mesh_text
from .best_plan_before_passes import plan_without_passes
from .indivisible_dims import (
    MIN_EXCESS_BYTES,
    bytes_caused,
    dividing_meshes,
    excess_text,
    indivisible_dims,
    microbatch_text,
)
from .lowering import without_local_form


def idle_axes(plan: Plan) -> list[str]:
    """The axes of size > 1 over which no input or output is split, and no collective runs."""
    used = {a for h in (*plan.inputs, *plan.outputs) for _, axes in h.split for a in axes}
    used |= {a for c in plan.collectives for a in c.axes}
    return [a for a, n in plan.sizes.items() if n > 1 and a not in used]


def with_notes(plan: Plan) -> Plan:
    """The plan with notes: axes and rules without effect on its program, a compiler without a table."""
    notes = [note] if (note := _scaled_matmuls(plan)) else []
    idle = ", ".join(f"`{a}`" for a in idle_axes(plan))
    if idle:
        notes.append(f"no value is split over {idle}: its devices all do the same work")
    guessed = plan.program.traced.inferred.items()
    if inferred := [path for path, votes in guessed if any(vote and vote.weight < GIVEN for vote in votes)]:
        weights = any(v.kind == "params" and v.path in inferred for v in plan.program.inputs)
        names = "the names of dims" + f" of {', '.join(inferred)}" * (not weights)
        notes.append(f"{names} are inferred from their uses: mp.infer_dims or `meshpar names` lists the names")
    unused = sorted({r.dim for r in plan.layout.rules if r.axes} - plan.program.all_names())
    if unused:
        fix = [f"; {line}" for line in sequence_name(plan.program, unused)]
        notes.append(f"rules without effect, since the program has no such dim: {', '.join(unused)}{''.join(fix)}")
    if plan.uncounted_loops:
        lines = ", ".join(dict.fromkeys(loop.op.source for loop in plan.uncounted_loops))
        notes.append(
            f"the number of iterations of a while loop is not known ({lines}): it is counted as one iteration, and the bytes, "
            "FLOPs and seconds of the step are lower bounds"
        )
    if plan.compiler.note is not None and plan.chip is not None:
        notes.append(plan.compiler.note)
    return with_shared_results(plan, notes=(*plan.notes, *notes)) if notes else plan


def _scaled_matmuls(plan: Plan) -> str | None:
    """A note of the matmuls whose operands have scales, and of the dtype in which the chip computes them; None: there are none."""
    if (chip := plan.chip) is None:
        return None
    ops = list(plan.program.root.walk())
    codes = sum(op.primitive.family == "dot" and "float8" in str(op.eqn.invars[0].aval.dtype) for op in ops)
    if codes:
        how = "natively on" if chip.float8 else "converted to bfloat16 by the compiler of"
        return f"{codes} matmuls of the program multiply float8 operands, {how} {chip.name}"
    if blocks := {str(max(op.eqn.params["blocks"])) for op in ops if op.primitive.family == "blocks"}:
        sizes = ", ".join(sorted(blocks))
        return f"matmuls with scales for blocks of {sizes} are emulated on {chip.name}: codes times scales in bfloat16"
    return None


def slice_traffic(plan: Plan) -> tuple[str, list[Collective]]:
    """The weights and activations that each layer receives from other slices, as text with the edits that avoid them, and the
    collectives; ("", []): no such values.

    Slices are meant to exchange gradients only.
    """
    if plan.chip is None or not plan.chip.torus:
        return "", []  # nodes of GPUs have a link to others for every GPU
    weights = {d for h in plan.inputs if h.kind in ("params", "opt") for d in h.dims if d}
    traffic = [
        (sent, c)
        for c in plan.collectives
        if c.count != 1
        and (c.op not in ("all-reduce", "reduce-scatter") or set(c.dims.split()) - {*weights, "_"})
        and (sent := dcn_bytes_sent(c, plan.torus) * c.runs)
    ]
    if not traffic:
        return "", []
    total, (_, largest) = sum(sent for sent, _ in traffic), max(traffic, key=lambda x: x[0])
    advice, changes = fix_of_slices(plan)
    fix = f"; {advice}: {flags_of(changes)}" if changes else ""
    text = (
        f"each layer waits for other slices: {total / 1e9:.3g} GB a device in a step, most of it {largest.op} over "
        f"{'+'.join(largest.axes)} of `{largest.dims}` ({largest.cause}){fix}"
    )
    return text, [c for _, c in traffic]


def flags_of(changes: Mapping[str, str]) -> str:
    """``--mesh "slice=2, data=8" --layout "batch: slice+data"``."""
    return " ".join(f'--{name} "{value}"' for name, value in changes.items())


def fix_of_slices(plan: Plan) -> tuple[str, dict[str, str]]:
    """The advice, and the mesh and layout, with which only the batch is split over slices: a first axis of the mesh between slices
    alone, and rules that shard nothing else over it; without those that the plan has."""
    given, rules = plan.topology and parse_topology(plan.topology).slices, plan.requested_layout.rules
    slices = given or len({d.slice_index for d in np.ravel(plan.mesh.devices)})  # type: ignore[arg-type]
    sizes, within, over, left = dict(plan.sizes), dict(plan.sizes), list[str](), slices
    for axis, size in sizes.items():  # the first axes are between slices
        if left > 1:
            over.append(axis)
            within[axis], left = size // math.gcd(size, left), left // math.gcd(size, left)
    text, edits = "keep weights within a slice, and split only the batch over slices", dict[str, str]()
    if within[over[-1]] > 1 or (sizes.get(BETWEEN_SLICES) == slices and BETWEEN_SLICES not in over):
        text = f"the mesh axis `{over[-1]}` crosses slices"
        of_batch = (a for a in sizes if {r.dim for r in rules if a in r.axes} == {"batch"})
        own = next((a for a in (BETWEEN_SLICES, *of_batch) if sizes.get(a) == slices), None)
        if own is not None:
            within, text = sizes, f"{text}, since `{own}` is not first"
        first = own or BETWEEN_SLICES
        mesh = {first: slices, **{a: n for a, n in within.items() if a != first and n > 1}}
        edits, over = {"mesh": mesh_text(mesh)}, [first]
    inside = [replace(r, axes=tuple(a for a in r.axes if a in sizes and a not in over)) for r in rules]
    inside = [replace(r, axes=(*over, *r.axes)) if (r.dim, r.scope) == ("batch", None) else r for r in inside]
    layout = Layout("; ".join(str(r) for r in inside if r.axes))
    return text, edits | ({"layout": str(layout)} if layout != plan.requested_layout else {})


def warn(plan: Plan) -> None:
    """Warn of what costs memory, bytes or time in a plan and was probably not intended."""
    checks = ((_unnamed_results, ReplicatedWarning),) if plan.request.init else _CHECKS
    for texts, category in (*checks, (_kernels, ReplicatedWarning), (_lowering, LoweringWarning)):
        for text in texts(plan):
            warnings.warn(text, category, stacklevel=user_stacklevel())


def _lowering(plan: Plan) -> Iterator[str]:
    """Yields the reason why ``lowering="auto"`` is ``"jit"``, if an op has no local form; a shorter step needs no warning."""
    if plan.lowering_reason is not None and without_local_form(plan) is not None:
        yield f'lowering="auto" is "jit" for this program, whose plan is an estimate: {plan.lowering_reason}'


def _replication(plan: Plan) -> Iterator[str]:
    """Yields a warning of each axis for which the layout has rules, none of which has an effect."""
    layout = plan.requested_layout
    undivided = {rule.dim for _, _, rule in AxisAssignment(plan.program, plan.layout, plan.sizes).all_indivisible()}
    rules = [r for r in layout.rules if not (r.optional or r.dim in layout.optional or r.dim in undivided)]
    for axis in idle_axes(plan):
        unused = [str(r) for r in rules if axis in r.axes]
        if unused:
            shown = "; ".join(unused[:4]) + ("; …" if unused[4:] else "")
            names = ", ".join(sorted(plan.program.all_names())[:8]) or "none: name some with dims={path pattern: dims}"
            yield (
                f"nothing of this program is split over `{axis}`, of size {plan.sizes[axis]}, though the layout has rules for it "
                f"({shown}): its devices all do the same work. Dims of the program: {names}"
            )


def _undivided(plan: Plan) -> Iterator[str]:
    """Yields a warning of each rule that does not divide a dim of arguments that only constraints of the model name: such arguments
    are replicated, where the user's own names are errors."""
    assignment, arguments = AxisAssignment(plan.program, plan.layout, plan.sizes), set(plan.program.inputs)
    given = {name for v in arguments for name in v.annotation or ()}
    found = (x for x in assignment.all_indivisible() if x[0] in arguments and x[2].dim not in given)
    for same in grouped_by(found, lambda x: (x[2], x[0].shape[x[1]])):
        first, *others = sorted(same, key=lambda x: (x[0].kind == "opt", -x[0].elements))
        head, *lines = str(division_error(*first, assignment)).split("\n")
        what = f"it and {len(others)} more argument{'s' * (len(others) > 1)} have" if others else "it has"
        yield "\n".join([f"{head}, so {what} no shards", *lines])


def _undeclared_state(plan: Plan) -> Iterator[str]:
    """Yields a warning of arrays that are updated as optimizer state is, but not declared as such: rules with the scope
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
            yield (
                f"`{rule}` does not apply to {paths[0]}{more}: only the update reads it, elementwise, as it reads optimizer state, "
                "but it has the path or the update of a parameter, so it is stored as one. Call it `opt_state`, or "
                f'give it a rule of its own: "{paths[0]}".{rule.dim}: {"+".join(rule.axes)}'
            )


def _unrolled_layers(plan: Plan) -> list[str]:
    """Warnings of stacked layers that are split over axes without the batch, as stages are, and are not looped over."""
    program = plan.program.traced
    specs = {v: tuple(axes for _, axes in h.split) for v, h in zip(program.inputs, plan.inputs, strict=True)}
    of_batch = {a for v, spec in specs.items() if "batch" in program.dims(v) for axes in spec for a in axes}
    sizes = {a: 1 if a in of_batch else n for a, n in plan.sizes.items()}
    return stack_notes(program, specs.__getitem__, {r.dim for r in plan.layout.rules if r.scope is None}, sizes)


def _unnamed_results(plan: Plan) -> Iterator[str]:
    """Yields a warning of an initializer whose weights are replicated, since no rule has a name of theirs."""
    template = unnamed_results(plan.program, plan.requested_layout)
    if template and plan.mesh.size > 1:
        create = function_name(plan.program.traced.closed) or "create"
        text = (
            "mp.init: the weights have no names that the layout has a rule for, so they are replicated: every device allocates "
            f"all of them. Names are inferred from uses, and only the step uses them: give {create} the names of the step, dims="
            f"mp.infer_dims(step, jax.eval_shape({create}, …), batch) (nnx.eval_shape for nnx modules), or your own:\n"
        )
        yield text + "\n".join(template)


def _kernels(plan: Plan) -> Iterator[str]:
    """Yields a warning of kernels without a factor rule whose operands are all-gathered, with the bytes, for each line of the
    program."""
    sends: dict[str, tuple[Op, float]] = {}
    for c in plan.collectives:
        if c.origin is not None and c.origin.primitive.family == "opaque":
            op, sent = sends.get(c.origin.location, (c.origin, 0.0))
            sends[c.origin.location] = op, sent + c.total_bytes
    for location, (op, sent) in sends.items():
        yield (
            f"{op.name} has no factor rule, so its operands are all-gathered, {format_bytes(sent)} sent by each device a step, and "
            f"every device runs all of it, at {location}. Declare which dims may be split, on the function around it; `!` marks a "
            f'dim that may not: for example @mp.kernel_rule("{kernel_rule_text(op, plan.program)}")'
        )


def _scheme(plan: Plan) -> Iterator[str]:
    """Yields a warning of rules of a known scheme for whose dims the program has no name.

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
        yield f"the scheme `{layout.scheme}` shards {missing} over `{over}`, but no dim of the program has such a name. {fix}"
        if template:
            return  # it is the same for every axis


def _indivisible(plan: Plan) -> Iterator[str]:
    """Yields a warning of dims of intermediate values that a rule does not divide, where it costs bytes or FLOPs.

    Programs with a ``shard_map`` of the user's own are planned for its mesh only, and are left out.
    """
    if any(op.primitive.family == "shard_map" for op in plan.program.root.walk()):
        return
    for dim in indivisible_dims(plan):
        if not dim.rule.optional and (text := microbatch_text(plan, dim)):
            yield text
            continue
        if bytes_caused(plan, dim.rule) < MIN_EXCESS_BYTES:
            continue
        others = []
        for sizes in dividing_meshes(plan, dim):
            if others and math.prod(sizes.values()) < plan.mesh.size:
                break
            with contextlib.suppress(MeshparError):  # a mesh that another dim does not allow is not proposed
                request = replace(plan.request, mesh=planned_mesh(sizes, None), topology=None)
                others.append(plan_without_passes(plan, request))
        if text := excess_text(plan, dim, others):
            yield text


_CHECKS: tuple[tuple[Callable[[Plan], Iterable[str]], type[Warning]], ...] = (
    (_replication, ReplicatedWarning),
    (_scheme, ReplicatedWarning),
    (_indivisible, IndivisibleWarning),
    (_undivided, ReplicatedWarning),
    (_undeclared_state, ReplicatedWarning),
    (_unrolled_layers, ReplicatedWarning),
)
"""The checks of plans that are not of an initializer, and their warnings."""

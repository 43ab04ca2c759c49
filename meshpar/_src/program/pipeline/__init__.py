"""Pipeline parallelism: rewrites a program whose stacked layers are split over devices, so that activations move, not weights.

A scan over stacked weights whose stacked dim is split over axes of K devices is a pipeline of K stages. The loop around it is the
loop over microbatches. It is rewritten, in terms of global arrays, as loops over the ticks of a schedule (:mod:`.schedule`), in
which every value of a stage has a leading dim of K stages (:mod:`.rewrite`). The layout splits this dim like the stacked dim, whose
name it has. The rewritten program is planned like any other.

.. code-block:: text

    find                     loops over stacked layers whose stacked dim is split
    segments                 the body of a microbatch loop, divided around its layer loops
    schedule                 arithmetic: which microbatch a stage processes at each tick, idle slots
    rewrite                  the microbatch loop as loops over ticks
    run_all_stages           one tick of a layer loop: all stages run their own layers
    split_backward_loops     input and weight gradients in separate loops (zero bubble)
    hoist_casts_and_gathers  stacked weights cast and gathered once, before the loop
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ....errors import UnsupportedError
from ...compat.jax import is_of_memories, make_generated_jaxpr, replace_body, without_dead_code
from ...dims import format_dims
from ...iterables import grouped
from ...layout import Rule
from ..infer import infer_like
from ..ir import Frame, Op, Program
from ..jaxprs import abstract, inline, renamed
from .find import LayerLoop, indexed_stacks, layer_loops, microbatch_loop
from .hoist_casts_and_gathers import Gathered, ValueAxes, cast_stacks, gather_stacks, gathered_dims
from .rewrite import TickLoops, one_microbatch
from .run_all_stages import Stages
from .schedule import GATHERS, SCHEDULES, GatherName, Schedule, ScheduleName
from .segments import divide, order_of
from .split_backward_loops import split_backward


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A loop of a program that is run as a pipeline.

    Attributes:
      dim: the name of the stacked dim.
      axes: the axes that split it.
      layers: its size.
      schedule: with the number of stages and microbatches.
      source: the user's line.
      gather: ``"step"``: weights are all-gathered once a step; ``"microbatch"``: where they are used, or no weight is.
      bytes_between_stages: bytes that a device sends to other stages in a step, as planned.
    """

    dim: str
    axes: tuple[str, ...]
    layers: int
    schedule: Schedule
    source: str
    gather: str = "microbatch"
    bytes_between_stages: float = 0.0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.schedule.stages

    @property
    def rounds(self) -> int:
        """The groups of layers of a stage; each microbatch passes all stages once for each of them."""
        return self.schedule.rounds

    @property
    def microbatches(self) -> int:
        """The number of microbatches; 1 without a loop over them."""
        return self.schedule.microbatches

    @property
    def ticks(self) -> int:
        """The number of ticks of a step."""
        return self.schedule.ticks

    @property
    def bubble(self) -> float:
        """The fraction of the slots of a stage, and so of the layers' time, in which it is idle."""
        return float(self.schedule.bubble)

    @property
    def in_flight(self) -> float:
        """The most microbatches whose activations a stage stores at once."""
        return float(self.schedule.in_flight)

    @property
    def masked(self) -> int:
        """The layers that are computed but change nothing, because the stages do not divide the layers."""
        return Stages(self.stages, self.dim, self.rounds, self.layers).masked

    @property
    def note(self) -> str | None:
        """What to do if all but one stage are idle at any time, or if layers are masked; else None."""
        k = self.schedule.stages
        if self.masked:
            parts = [n for n in range(2, 2 * k) if self.layers % n == 0]
            nearest = [*[n for n in parts if n < k][-1:], *[n for n in parts if n > k][:1]]
            others = f"; {_numbers(nearest)} stages divide {self.layers}" if nearest else ""
            return (
                f"the {self.layers} `{self.dim}` at {self.source} are padded with {_masked_text(self.masked)} for {k} stages, "
                f"which lengthens the time of the layers by {self.masked / self.layers:.1%}{others}"
            )
        if self.schedule.microbatches > 1:
            return None
        return (
            f"the {self.layers} `{self.dim}` at {self.source} are a pipeline of {k} stages without microbatches: one stage works "
            f"at a time, and the bubble is {k - 1}/{k} of the layers' time; wrap the loss in mp.train.accumulate_gradients"
        )


@dataclass(frozen=True, slots=True)
class _Split:
    """A layer loop, and the split of its stacked dim.

    Attributes:
      loop: the loop.
      axes: the axes that split it.
      stages: the number of devices along them.
      rounds: of the pipeline.
      gathered: dims of stacked operands that are all-gathered before the loop over microbatches.
    """

    loop: LayerLoop
    axes: tuple[str, ...]
    stages: int
    rounds: int
    gathered: Gathered = ()

    @property
    def rule(self) -> str:
        """The rule that splits the dim so, as a layout has it."""
        return f"{self.loop.dim}: {'+'.join(self.axes)}{f'*{self.rounds}' if self.rounds > 1 else ''}"


def rewrite_pipelines(
    program: Program,
    axes: ValueAxes,
    rules: Mapping[str, Rule],
    sizes: Mapping[str, int],
    schedule: str,
    gather: str | None = None,
) -> Program | None:
    """The program with its pipelines; None: no stacked dim of a layer loop is split. Results are cached by the axes of the loops.

    A loop whose carries are split over the same axes (``batch: data; layers: data``) is not a pipeline: its weights are gathered.

    Args:
      axes: the axes that the layout assigns to a value.
      rules: dim → its rule without a scope: rules for parameters or optimizer state alone say where these are stored.
      sizes: of the mesh.
      schedule: one of :data:`SCHEDULES`.
      gather: one of :data:`GATHERS`; ``auto`` and None are ``microbatch``.

    Raises:
      UnsupportedError: layers that cannot be a pipeline.
    """
    found = []
    for loop in program.cached(layer_loops):
        rule = rules.get(loop.dim)
        if rule is None:
            continue
        split = axes(loop.weight)[0]
        if not split and rule.optional and _masked_stages(loop, rule, sizes) is not None:
            split = rule.axes
        over = tuple(a for a in split if sizes[a] > 1)
        if not over or any(a in over for v in loop.carries for entry in axes(v) for a in entry):
            continue
        gathered = gathered_dims(loop, program.dims, axes) if gather == "step" else ()
        found.append(_Split(loop, over, math.prod(sizes[a] for a in over), rule.rounds, gathered))
    return program.cached(_rewritten, schedule, tuple(found)) if found else None


def _masked_stages(loop: LayerLoop, rule: Rule, sizes: Mapping[str, int]) -> Stages | None:
    """The stages of layers that a rule does not divide; None: it divides them, or the time of the layers is shorter if all devices
    run all layers than with stages and masked layers."""
    around, layers = microbatch_loop(loop.op), loop.op.eqn.params["length"]
    stages = Stages(math.prod(sizes[a] for a in rule.axes), loop.dim, rule.rounds, layers)
    if around is None or layers % stages.count == 0 or stages.masked > layers:
        return None
    microbatches = around.eqn.params["length"]
    slots = rule.rounds * microbatches + stages.count - 1
    return stages if slots * stages.length < microbatches * layers else None


def masking_text(program: Program, rule: Rule, sizes: Mapping[str, int]) -> str | None:
    """The effect of an optional rule for stacked layers that its axes do not divide; None: these would not be a pipeline.

    For 126 layers over 8 stages it begins with "for a pipeline with 2 masked layers".
    """
    for loop in program.traced.cached(layer_loops):
        if loop.dim == rule.dim and rule.scope is None and (stages := _masked_stages(loop, rule, sizes)) is not None:
            return (
                f"for a pipeline with {_masked_text(stages.masked)}, which lengthens the time of the layers by "
                f"{stages.masked / stages.layers:.1%}; the weights are stored unsharded over {'+'.join(rule.axes)}, "
                "unless the rule of another dim has it as well"
            )
    return None


def _masked_text(count: int) -> str:
    return f"{count} masked layer{'s' * (count > 1)}"


def stack_notes(program: Program, axes: ValueAxes, dims: Collection[str], sizes: Mapping[str, int]) -> list[str]:
    """Notes about split stacks of weights over which no loop runs; the arguments are as in :func:`rewrite_pipelines`."""
    notes = []
    for dim, source in program.cached(indexed_stacks).items() if dims else ():
        weight = next(v for v in program.inputs if len(v.shape) > 1 and program.dim_name(v, 0) == dim)
        over = [a for a in axes(weight)[0] if sizes[a] > 1]
        if dim in dims and over:
            notes.append(
                f"`{dim}` is split over {'+'.join(over)}, and {source or 'the program'} takes its elements one by one, so that "
                "they are sent to all devices, and there is no pipeline: loop over them with jax.lax.scan in place of a Python "
                f"loop, or do not shard `{dim}`"
            )
    return notes


def _rewritten(program: Program, schedule: str, found: Sequence[_Split]) -> Program:
    """The program with some of its layer loops as pipelines."""
    groups = grouped((microbatch_loop(split.loop.op) or split.loop.op, split) for split in found)
    replacements: dict[Op, Any] = {}
    pipelines = []
    for op, splits in groups.items():
        try:
            replacements[op], pipeline = _replacement(op, splits, schedule)
        except UnsupportedError as e:
            raise _with_facts(e, program, splits[0]) from e.__cause__
        pipelines += [] if op is splits[0].loop.op and not splits[0].loop.carries else [pipeline]
    closed = ClosedJaxpr(_with_replacements(program.root, replacements), program.closed.consts)
    rewritten = infer_like(program, without_dead_code(closed))  # idle slots compute values that nobody reads
    rewritten.original = program
    rewritten.joins[:] = program.joins  # gather_stacks joins further names
    rewritten.pipelines = tuple(pipelines)
    return rewritten


def _with_facts(error: UnsupportedError, program: Program, split: _Split) -> UnsupportedError:
    """The error with the stacked dim of a loop, the rule that splits it, its line, and the first tensor that has the dim."""
    dim, source = split.loop.dim, error.source or split.loop.op.source
    facts: dict[str, Any] = {"dim": dim, "axis": "+".join(split.axes), "rule": split.rule, "source": source}
    weight = next((v for v in program.inputs if v.shape and program.dim_name(v, 0) == dim), None)
    if weight is not None:
        dims = format_dims(program.dims(weight))
        facts |= {"path": weight.path, "shape": weight.shape, "dtype": weight.aval.dtype, "dims": dims}
    return UnsupportedError(error.headline, fixes=error.fixes, **facts)


def _replacement(op: Op, splits: Sequence[_Split], schedule: str) -> tuple[Any, Pipeline]:
    """(the closed jaxpr that computes a loop as a pipeline, its record).

    Args:
      op: the loop over microbatches, or a layer loop without one.
      splits: of the layer loops in it.
      schedule: one of :data:`SCHEDULES`.

    Raises:
      UnsupportedError: loops of different stages; layers with side effects, or of a number that cannot be divided.
    """
    loops = [s.loop for s in splits]
    loop, axes, count, gather = loops[0], splits[0].axes, splits[0].stages, "microbatch"
    rounds = splits[0].rounds if op is not loop.op else 1  # one microbatch has the same bubble in any number of rounds
    if any((s.axes, s.rounds) != (axes, splits[0].rounds) for s in splits):
        text = dict.fromkeys(f"`{s.rule}`" for s in splits)
        raise UnsupportedError(
            f"a microbatch has loops over stacked layers with different stages: {', '.join(text)}",
            fixes=[
                "split all stacks of a microbatch over the same axes, in the same number of rounds",
                "or shard one of them only",
            ],
        )
    for member in loops:
        _check(member, count, rounds)
    if op is loop.op:
        order = "B" if op.derivative_pass == "backward" else "F"
        plan = Schedule(schedule, count, 1, order=order, reverse=(op.eqn.params["reverse"],))
        run: Callable[..., Any] = one_microbatch(op.eqn, Stages(count, loop.dim, 1, loop.op.eqn.params["length"]))
    else:
        body = divide(op, loops)
        plan = Schedule(schedule, count, op.eqn.params["length"], rounds, order_of(body, loops))
        _check_microbatches(op, loop, plan)
        cast_stacks(body, loops)
        gather_stacks(body, [s.gathered for s in splits])
        gather = "step" if body.gathered else gather
        parts = loops
        if schedule == "zb" and "B" in plan.order:
            parts, order = split_backward(body, op, loops, plan.order)
            if "W" not in order:
                raise UnsupportedError(
                    f'schedule="zb": the backward pass of `{loop.dim}` has no gradients of stacked weights that could be computed '
                    "later",
                    fixes=['schedule="1f1b"'],
                )
            plan = replace(plan, order=order)
        plan = replace(plan, reverse=tuple(eqn.params["reverse"] for eqn in body.loops))
        run = TickLoops(op.eqn, body, plan, parts)
    try:
        jaxpr = make_generated_jaxpr(run, *map(abstract, op.eqn.invars))
    except (NotImplementedError, ValueError) as e:
        if is_of_memories(e):  # jax.vmap turns a selection at a run-time index into a gather
            raise loop.unsupported(
                f"layers whose stacked dim `{loop.dim}` is sharded select rows of an array in host memory at a run-time index: "
                "each stage has another array, and JAX cannot select from all of them in one op",
                "copy the array to the device before: jax.device_put(x, jax.memory.Space.Device)",
            ) from e
        if isinstance(e, ValueError):
            raise
        raise loop.unsupported(
            f"the layers cannot be a pipeline over {'+'.join(axes)}: {e}",
            "the stages run as one jax.vmap of the layers: give the op a batching rule",
        ) from e
    return jaxpr, Pipeline(loop.dim, axes, loop.op.eqn.params["length"], plan, loop.op.source, gather)


def _check(loop: LayerLoop, stages: int, rounds: int) -> None:
    """Raise UnsupportedError for layers with side effects, or of a number per stage that the rounds do not divide."""
    length = loop.op.eqn.params["length"]
    if loop.op.eqn.effects:
        raise loop.unsupported(
            "the layers have side effects, which idle slots of a pipeline would have too",
            "remove jax.debug.print, io_callback, … from the layers",
        )
    parts = stages * rounds
    if length % stages == 0 and length % parts:
        fits = [v for v in range(1, length // stages + 1) if length % (stages * v) == 0]
        raise UnsupportedError(
            f"the {length} layers of `{loop.dim}` cannot be divided into {stages} stages of {rounds} rounds: {parts} does not "
            f"divide {length}",
            source=loop.op.source,
            fixes=[
                f"{length} layers in {stages} stages allow {_numbers(fits)} rounds",
                f"make the number of layers a multiple of {parts}: {_multiples(length, parts)}",
            ],
        )


def _check_microbatches(op: Op, loop: LayerLoop, schedule: Schedule) -> None:
    """Raise UnsupportedError if several rounds have a number of microbatches that the stages do not divide."""
    m, k = schedule.microbatches, schedule.stages
    if schedule.rounds > 1 and m % k:
        raise UnsupportedError(
            f"{m} microbatches cannot pass {k} stages in {schedule.rounds} rounds: they enter in groups of {k}",
            source=op.source,
            fixes=[
                f"make the number of microbatches a multiple of {k}: {_multiples(m, k)}",
                f"or one round: `{loop.dim}` without `*{schedule.rounds}`",
            ],
        )


def _multiples(n: int, of: int) -> str:
    """The multiples of a number around another one: ``_multiples(10, 4)`` is ``"8 or 12"``."""
    return _numbers([x for x in (n // of * of, -(-n // of) * of) if x])


def _numbers(numbers: Sequence[int]) -> str:
    """``[1, 2, 4]`` → ``"1, 2 or 4"``."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _with_replacements(frame: Frame, replacements: Mapping[Op, Any]) -> Any:
    """The jaxpr of a frame with the equations of some ops replaced by closed jaxprs."""
    eqns: list[JaxprEqn] = []
    names: dict[Any, Any] = {}
    for op in frame.ops:
        eqn = op.eqn.replace(invars=renamed(op.eqn.invars, names))
        if op in replacements:
            closed = replacements[op]
            names.update(zip(eqn.outvars, inline(eqns, closed.jaxpr, closed.consts, eqn.invars), strict=True))
        elif any(inner in replacements for body in op.frames for inner in body.walk()):
            eqns.append(replace_body(eqn, [_with_replacements(body, replacements) for body in op.frames]))
        else:
            eqns.append(eqn)
    return frame.jaxpr.replace(eqns=eqns, outvars=renamed(frame.jaxpr.outvars, names))

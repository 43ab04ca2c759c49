"""Layouts in which the layers of a program are a pipeline: which numbers of stages are searched, and whether they pay.

Stages are searched for programs with a loop over layers inside of a loop over microbatches. Each number of stages is a program of
its own, rewritten by :mod:`program.pipeline`. The known schemes are planned inside of the stages, and the search descends
from the best of them if it is close to the best layout without stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...errors import MeshparError
from ..layout import BETWEEN_SLICES, Layout, Rule
from ..mesh import planned_mesh
from ..passes import plan_without_passes
from ..plan.assignment import AxisAssignment
from ..plan_api import Plan
from ..program.ir import Op, Program
from ..program.pipeline import layer_loops, microbatch_loop, rewrite_pipelines
from ..units import format_seconds
from .evaluation import Settings
from .row import Row
from .space import Point, Sizes, Space, meshes

STAGE = "stage"
"""Name of the axis of stages."""
SCHEMES = ("zero1", "fsdp", "hsdp", "fsdp_megatron", "sequence_parallel", "expert_parallel")
"""The known schemes that are planned inside of stages; the search changes the best of them further."""


@dataclass(frozen=True)
class LayerStack:
    """The layers that a loop over microbatches runs.

    Attributes:
      dims: the names of their stacked dims.
      layers: the greatest common divisor of the sizes of these dims.
      microbatches: iterations of the loop around them.
      ops: the ops in their loops.
    """

    dims: tuple[str, ...]
    layers: int
    microbatches: int
    ops: frozenset[Op]

    @classmethod
    def of(cls, program: Program) -> LayerStack | None:
        """The stack of a program; None: it has no loop over layers inside of a loop over microbatches."""
        loops = [(loop, microbatch_loop(loop.op)) for loop in program.traced.cached(layer_loops)]
        around = next((op for _, op in loops if op is not None), None)
        if around is None:
            return None
        inside = [loop for loop, op in loops if op is around]
        ops = frozenset(op for loop in inside for body in loop.op.frames for op in body.walk())
        layers = math.gcd(*(loop.op.eqn.params["length"] for loop in inside))
        return cls(tuple(dict.fromkeys(loop.dim for loop in inside)), layers, around.eqn.params["length"], ops)

    def slowdown(self, stages: int) -> float:
        """The time of the layers relative to their time without a bubble."""
        return (self.microbatches + stages - 1) / self.microbatches

    def stage_counts(self, devices: int) -> list[int]:
        """The numbers of stages of equal size that devices can be divided into, with a bubble of less than a half."""
        most = min(self.layers, self.microbatches, devices // 2)
        return [k for k in range(2, most + 1) if self.layers % k == 0 and devices % k == 0]

    def rounds(self, stages: int) -> list[int]:
        """The numbers of rounds above 1 that so many stages may have, powers of two."""
        counts = (2**i for i in range(1, self.layers.bit_length()))
        return [v for v in counts if self.layers % (stages * v) == 0 and self.microbatches % stages == 0]


def staged_space(
    base: Plan, stack: LayerStack, settings: Settings, among: Sequence[Sizes], rounds: int = 1
) -> Space | None:
    """The candidates of a program with one number of stages; None: its layers cannot be stages.

    The rules of the stacked dims are fixed. The program is rewritten for this number, as the plan of the first scheme has it.

    Args:
      among: meshes with an axis of stages, of equal size.
      rounds: how often a microbatch passes all stages.
    """
    rules = Layout("; ".join([str(settings.options.fixed), *(f"{dim}: {STAGE}*{rounds}" for dim in stack.dims)]))
    traced, topology = base.program.traced, settings.topology
    try:
        assignment = AxisAssignment(traced, rules, dict(among[0]))
        how = base.request.schedule, base.request.gather
        program = rewrite_pipelines(traced, assignment.value_spec, rules.unscoped, assignment.sizes, *how)
        if program is None:
            return None
        space = Space.of(program, among, rules, settings.options.forbid)
        first = next(staged_schemes(space))
        mesh = planned_mesh(first.mesh, topology)
        request = replace(base.request, layout=Layout(first.layout), mesh=mesh, topology=topology)
        plan = plan_without_passes(base, request)
    except MeshparError:
        return None
    return replace(space, program=plan.program)


def staged_schemes(space: Space) -> Iterator[Point]:
    """The known schemes inside of the stages, on every mesh, with the vocabulary over the stages as well."""
    for sizes in space.meshes:
        multislice = any(a == BETWEEN_SLICES for a, _ in sizes)
        for name, point in space.presets(tuple(size for size in sizes if size[0] != STAGE)):
            if name not in SCHEMES or (name == "hsdp" and not multislice):
                continue
            rules = {(r.dim, r.scope): r for r in space.free(point)}
            vocab = rules.get(("vocab", None), Rule("vocab", ()))
            rules["vocab", None] = replace(vocab, axes=(STAGE, *vocab.axes))
            yield space.point(sizes, rules.values())


def staged_meshes(stages: int, devices: int, slices: int, axes: int) -> list[Sizes]:
    """Meshes with an axis of so many stages and at most ``axes`` others. Of several slices, the stages are divided over the slices,
    or each slice has all of them."""
    axis = ((STAGE, stages),)
    each, out = devices // slices, list[Sizes]()
    if stages % slices == 0 and devices > stages:
        out += [(*axis, *rest) for rest in meshes(devices // stages, 1, axes)]
    if slices > 1 and each % stages == 0 and each > stages:
        out += [((BETWEEN_SLICES, slices), *axis, *rest) for rest in meshes(each // stages, 1, max(1, axes - 1))]
    return out


def verdict(without: Row, staged: Row) -> str:
    """Whether stages pay, as text: the best candidate without stages compared with the best one that has some.

    Both are layouts of the same program, with its microbatches; without stages fewer microbatches may be faster.
    """
    best = f"best with {format_seconds(staged.seconds)} ({staged.mesh}; {staged.schedule})"
    other, pays = f"best without {format_seconds(without.seconds)}", staged.seconds < without.seconds
    text = f"{other}, {best}"
    if staged.fits != without.fits:
        pays = staged.fits
        text = f"without them nothing fits; {best}" if pays else f"nothing fits with them; {other}"
    return f"stages {'pay' if pays else 'do not pay'} with these microbatches: {text}"

"""Random cases: a program, a mesh and a layout, as functions of a random generator."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

import bodies
from statements import STATEMENTS
from writer import OUTER, Program, Writer

import meshpar as mp

MESHES = ("x=8", "x=4, y=2", "x=2, y=4", "x=2, y=2, z=2", "x=2, y=2, idle=2", "x=4, idle=2", "x=1, y=8")
SIZES = (2, 4, 4, 8, 8, 8, 16, 16, 12, 6, 3, 5)


EVERY = 4
"""One program in so many is differentiated from outside."""


@dataclass(frozen=True)
class Call:
    """How the function is called once.

    Attributes:
      context: JAX's configuration at the time of the call, see :data:`run.CONTEXTS`.
      axis: the name of the axis of a ``jax.vmap`` around the function, ``size`` of which there are; none if empty.
    """

    context: str = ""
    axis: str = ""
    size: int = 0


@dataclass
class Case:
    """What one run of the fuzzer compares with the unsharded run.

    Attributes:
      outside: how the lowered function itself is differentiated, ``"vjp"`` or ``"jvp"``; else gradients are taken inside it.
      calls: the calls that are made of one lowered function, each of which is compared.
      overlap: the option of that name of `meshpar.jit`, where the lowering has it.
      schedule: of pipelines.
    """

    program: Program
    mesh: str
    layout: mp.Layout
    outside: str = ""
    calls: tuple[Call, ...] = (Call(),)
    overlap: str = "off"
    schedule: str = "1f1b"

    def __str__(self) -> str:
        """A script's worth of it: the program, its dims and shapes, mesh and layout."""
        p = self.program
        inputs = [f"#   {i.name}: {i.kind}{list(i.shape)}  {' '.join(d or '_' for d in i.dims)}" for i in p.inputs]
        where = f"# mesh {self.mesh!r}, {self.layout!r}, resolve={self.layout.resolve!r}"
        how = [f"# jax.{self.outside} of the lowered `forward` by {', '.join(p.grads)}"] if self.outside else []
        how += [f"# {call}" for call in self.calls if call != Call()]
        how += [f"# schedule={self.schedule!r}"] if self.schedule != "1f1b" else []
        how += [f"# overlap={self.overlap!r}"] if self.overlap != "off" else []
        return "\n".join([p.text, f"# inputs (seed {p.seed})", *inputs, where, *how])


def make_program(
    rng: random.Random, statements: int = 7, control: int = 0, among: Collection[str] = (), split: Collection[int] = (2, 4, 8)
) -> Program:  # fmt: skip
    """A random program.

    Args:
      statements, control: how many statements, and how many further ones that are loops and conditionals.
      among: the names of the statements to draw from; all if empty.
      split: the sizes that a dim may be split into.
    """
    names = list("abcdefg")
    sizes = {c: SIZES[rng.randrange(len(SIZES))] for c in names}
    even = [n for n in sizes.values() if any(n % k == 0 for k in split)]
    w = Writer(rng, sizes, split=rng.sample(even, min(2, len(even))))
    for _ in range(2 + rng.randrange(2)):
        rank = (1, 2, 2, 3, 3, 4)[rng.randrange(6)]
        shape = [sizes[names[rng.randrange(len(names))]] for _ in range(rank)]
        while math.prod(shape) > 1024:
            shape.pop()
        w.fresh(shape)
    if among:
        missing = set(among) - set(STATEMENTS)
        if missing:
            raise ValueError(f"no statements named {sorted(missing)}; there are {sorted(STATEMENTS)}")
    bodies.fill(w, statements, among or STATEMENTS)
    bodies.fill(w, control, bodies.CONTROL)
    made = {v.name for v in w.vars} - {i.name for i in w.inputs}
    outs = [v for v in w.vars if v.name in made and v.kind != "k" and (v.name not in w.used or rng.random() < 0.15)][
        -8:
    ]
    outs = outs or [v for v in w.vars if v.name in made and v.kind != "k"][-1:] or w.vars[-1:]
    grads = (
        [i.name for i in w.inputs if i.kind == "f" and i.name in w.used]
        if rng.random() < 0.75 and not w.forward_only
        else []
    )
    return Program(w.inputs, w.lines, [v.name for v in outs], grads, rng.randrange(1 << 20),
                   {v.name: (v.shape, v.kind) for v in w.vars}, tuple(sorted(w.needs)), tuple(sorted(w.renamed)))  # fmt: skip


def axes_of(mesh: str) -> dict[str, int]:
    """The axes of a mesh that layouts may use."""
    return {a.split("=")[0].strip(): int(a.split("=")[1]) for a in mesh.split(",") if "idle" not in a}


def make_layout(rng: random.Random, program: Program, mesh: str) -> mp.Layout:
    """Rules for dims of the inputs: several axes, any order, ``?`` where a size does not divide and elsewhere by chance."""
    axes = axes_of(mesh)
    sizes: dict[str, set[int]] = {}
    dims_of_inputs = [(name, n) for i in program.inputs for name, n in zip(i.dims, i.shape, strict=True) if name]
    for name, n in (*dims_of_inputs, *program.renamed):
        sizes.setdefault(name, set()).add(n)
    dims = list(sizes)
    rng.shuffle(dims)
    rules = []
    for dim in dims:
        if rng.random() < 0.1:
            continue
        which = list(axes)
        rng.shuffle(which)
        which = [] if rng.random() < 0.05 else which[: 1 + (rng.random() < 0.25)]
        fits = all(n % math.prod(axes[a] for a in which) == 0 for n in sizes[dim])
        scope = f'"{program.inputs[rng.randrange(len(program.inputs))].name}".' if rng.random() < 0.05 else ""
        optional = "?" if not fits or rng.random() < 0.2 else ""
        rules.append(f"{scope}{dim}{optional}: {'+'.join(which) or 'none'}")
    return mp.Layout("; ".join(rules), resolve="cost" if rng.random() < 0.2 else "order")


def way_outside(program: Program, every: int) -> str:
    """How a program is differentiated from outside, by its seed: one in ``every``, four fifths of them in reverse; none for 0.

    None with special numbers (``s``): the lowered function has a derivative rule, in which the tangent of such an input, by which
    nobody differentiates, is an array of zeros; times infinity it is NaN, as in any function with a rule.
    """
    if not every or program.seed % every or not program.grads or any(i.kind == "s" for i in program.inputs):
        return ""
    forward = program.seed // every % 5 == 0 and "custom_vjp" not in program.text  # which has no forward mode
    return "jvp" if forward else "vjp"


def make_calls(rng: random.Random, program: Program, mesh: str) -> tuple[Call, ...]:
    """The calls that a program asks for, and by chance some in another configuration."""
    needs = set(program.needs)
    calls = [Call()]
    other = sorted(needs & {"x64", "threefry"})
    if other:
        calls = [Call(), Call(other[0])]
        if rng.random() < 0.3:
            calls = calls[::-1]
    elif rng.random() < 0.06:
        calls = [Call("x64")]
    if "axis" in needs:
        calls = [Call(calls[0].context, OUTER, n) for n in (2, 3)]
    elif rng.random() < 0.04:  # an axis that is named as one of the mesh
        calls = [Call(calls[0].context, rng.choice(sorted(axes_of(mesh))), 2)]
    return tuple(calls)


def make_case(
    rng: random.Random, statements: int = 7, every: int = EVERY, control: int = 0, among: Collection[str] = ()
) -> Case:
    """A random case; ``every``: see :func:`way_outside`; the rest as in :func:`make_program`."""
    mesh = MESHES[rng.randrange(len(MESHES))]
    program = make_program(rng, statements, control, among, sorted(set(axes_of(mesh).values()) - {1}))
    calls = make_calls(rng, program, mesh)
    overlap = "ring" if "ring" in program.needs or rng.random() < 0.1 else "off"
    outside = way_outside(program, every) if calls == (Call(),) else ""
    return Case(program, mesh, make_layout(rng, program, mesh), outside, calls, overlap)

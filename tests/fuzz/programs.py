"""Random cases: a program, a mesh and a layout; as functions of a random generator, and as hypothesis strategies."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import bodies
from hypothesis import strategies as st
from writer import Program, Writer

import meshpar as mp

MESHES = ("x=8", "x=4, y=2", "x=2, y=4", "x=2, y=2, z=2", "x=2, y=2, idle=2", "x=1, y=8")
SIZES = (2, 4, 4, 8, 8, 8, 16, 16, 12, 6, 3, 5)


EVERY = 4
"""One program in so many is differentiated from outside."""


@dataclass
class Case:
    """What one run of the fuzzer compares with the unsharded run.

    Attributes:
      outside: how the lowered function itself is differentiated, ``"vjp"`` or ``"jvp"``; else gradients are taken inside it.
    """

    program: Program
    mesh: str
    layout: mp.Layout
    outside: str = ""

    def __str__(self) -> str:
        """A script's worth of it: the program, its dims and shapes, mesh and layout."""
        p = self.program
        inputs = [f"#   {i.name}: {i.kind}{list(i.shape)}  {' '.join(d or '_' for d in i.dims)}" for i in p.inputs]
        where = f"# mesh {self.mesh!r}, {self.layout!r}, resolve={self.layout.resolve!r}"
        how = [f"# jax.{self.outside} of the lowered `forward` by {', '.join(p.grads)}"] if self.outside else []
        return "\n".join([p.text, f"# inputs (seed {p.seed})", *inputs, where, *how])


def make_program(rng: random.Random, statements: int = 7, control: int = 0) -> Program:
    """A random program; ``control``: further statements that are loops and conditionals."""
    names = list("abcdefg")
    sizes = {c: SIZES[rng.randrange(len(SIZES))] for c in names}
    w = Writer(rng, sizes)
    for _ in range(2 + rng.randrange(2)):
        rank = (1, 2, 2, 3, 3, 4)[rng.randrange(6)]
        shape = [sizes[names[rng.randrange(len(names))]] for _ in range(rank)]
        while math.prod(shape) > 1024:
            shape.pop()
        w.fresh(shape)
    bodies.fill(w, statements)
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
                   {v.name: (v.shape, v.kind) for v in w.vars})  # fmt: skip


def make_layout(rng: random.Random, program: Program, mesh: str) -> mp.Layout:
    """Rules for dims of the inputs: several axes, any order, ``?`` where a size does not divide and elsewhere by chance."""
    axes = {a.split("=")[0].strip(): int(a.split("=")[1]) for a in mesh.split(",") if "idle" not in a}
    sizes: dict[str, set[int]] = {}
    for i in program.inputs:
        for name, n in zip(i.dims, i.shape, strict=True):
            if name:
                sizes.setdefault(name, set()).add(n)
    dims = list(sizes)
    rng.shuffle(dims)
    rules = []
    for dim in dims:
        if rng.random() < 0.2:
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
    """How a program is differentiated from outside, by its seed: one in ``every``, four fifths of them in reverse; none for 0."""
    if not every or program.seed % every or not program.grads:
        return ""
    forward = program.seed // every % 5 == 0 and "custom_vjp" not in program.text  # which has no forward mode
    return "jvp" if forward else "vjp"


def make_case(rng: random.Random, statements: int = 7, every: int = EVERY, control: int = 0) -> Case:
    program = make_program(rng, statements, control)
    mesh = MESHES[rng.randrange(len(MESHES))]
    return Case(program, mesh, make_layout(rng, program, mesh), way_outside(program, every))


def cases(statements: int = 7) -> st.SearchStrategy[Case]:
    """Random cases, which hypothesis shrinks."""
    return st.randoms(use_true_random=False).map(lambda rng: make_case(rng, statements))

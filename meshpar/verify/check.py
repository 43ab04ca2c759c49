"""``mp.check``: the sharded run equals the unsharded one up to floating-point rounding, or the first op that goes wrong is named.

Every leaf of the results is compared with the run of the same function on one device. A leaf that differs by more
than the tolerance may still differ by *rounding*: the program amplifies it (Adam turns a gradient that is zero but for
rounding into a full step), or computes in a narrower dtype than its results have. To tell, both programs are run again
with all intermediate values as further results, and the leaf is followed back to values on which both runs agree. It is
rounding if every op on the way does to the *sharded* run's operands what one device does to them, within one of:

- the tolerance;
- what the op makes of operands that differ by the tolerance (its backward error: a sum of terms that cancel has the
  rounding of its terms);
- a few times what one device is off by from the same op in a wider dtype (:mod:`meshpar.verify.wide`): loops that add
  up in bfloat16 are as far from float32 in either run.

An op that does something else is wrong, and the error names its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ..errors import CheckError, DivisibilityError
from ..layout import Layout
from ..mesh import MeshSizes
from ..mesh import mesh as make_mesh
from ..plan.plan import Plan
from .localize import Localizer
from .numbers import compiled, host, mesh_text, on_device, worst_of

Lowering = Literal["auto", "jit", "shard_map"]

WHOLE = "(nothing split)"
IDLE = "idle"
"""The axis of the default meshes that no rule uses: XLA's partitioner gets some gradients wrong by its size."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome for one layout on one mesh.

    Attributes:
      mesh, layout, lowering: what ran; the mesh as ``"data=2, model=4"``.
      path: the tree path of the leaf that differs most, those of ``explained`` left out.
      difference: of that leaf, as a part of its largest value.
      leaves: how many were compared.
      explained: paths of the leaves that differ by more than the tolerance, but by rounding only.
      rounding: the largest difference of these, as a part of the leaf's largest value.
      error: what went wrong, or None.
    """

    mesh: str
    layout: str
    lowering: str
    path: str
    difference: float
    leaves: int
    explained: tuple[str, ...] = ()
    error: CheckError | None = None
    rounding: float = 0.0


@dataclass(slots=True)
class Report:
    """What :func:`meshpar.check` found; print it.

    Attributes:
      rows: one for every mesh, layout and lowering.
      skipped: (mesh, layout, reason) for the default meshes that a size does not divide over.
      tolerance: as it was asked for.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    tolerance: float = 1e-5

    @property
    def ok(self) -> bool:
        """Whether something ran, and nothing differed."""
        return bool(self.rows) and all(r.error is None for r in self.rows)

    def __str__(self) -> str:
        cells = [("layout", "mesh", "lowering", "leaves", "rounding", "largest", "of", "")]
        for r in self.rows:
            verdict = "equal" if r.error is None else "DIFFERS"
            counts = str(r.leaves), f"{len(r.explained)} ({r.rounding:.1e})" if r.explained else ""
            cells.append((r.layout or WHOLE, r.mesh, r.lowering, *counts, f"{r.difference:.1e}", r.path, verdict))
        cells += [(layout or WHOLE, mesh, "", "", "", "", "", "skipped") for mesh, layout, _ in self.skipped]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        bad = sum(r.error is not None for r in self.rows)
        head = (
            f"{len(self.rows) - bad} of {len(self.rows)} runs equal to the unsharded one, "
            f"to {self.tolerance:g} of each leaf's largest value"
        )
        if any(r.explained for r in self.rows):
            lines.append(
                "rounding: leaves that differ by more, but by rounding only, and the largest difference: each op on the way to "
                "them does the same on one device on the sharded run's operands, or is as close to its results in a wider dtype"
            )
        notes = [f"skipped {mesh}: {reason}" for mesh, _, reason in self.skipped]
        errors = [str(r.error) for r in self.rows if r.error is not None]
        return "\n".join([head, *lines, *notes, *errors])


@dataclass(frozen=True, slots=True)
class Subject:
    """A step under one layout, with its arguments.

    Attributes:
      plan: for the mesh that it runs on.
      arrays: its flat arguments.
      alone: flat arguments → flat results, to be traced: the step as written, for one device.
      sharded: the same, compiled under the layout.
      shardings: of its flat arguments.
    """

    plan: Plan
    arrays: list[Any]
    alone: Callable[..., list[Any]]
    sharded: Callable[[list[Any]], list[Any]]
    shardings: Sequence[NamedSharding] = ()


def check_layouts(
    subject: Callable[[Mesh, Layout, Lowering], AbstractContextManager[Subject]],
    *,
    layouts: Any,
    meshes: Mesh | MeshSizes | Sequence[Mesh | MeshSizes] | None,
    lowerings: Sequence[Lowering],
    tolerance: float = 1e-5,
    raises: bool = True,
) -> Report:
    """:func:`meshpar.check`, for a step that ``subject`` lowers for a mesh, a layout and a lowering."""
    asked = [meshes] if isinstance(meshes, Mesh | str | Mapping) else None if meshes is None else list(meshes)
    case = _Case(tolerance)
    report = Report(tolerance=tolerance)
    refused: DivisibilityError | None = None
    for layout in each_layout(layouts):
        for m in _default_meshes(layout) if asked is None else asked:
            m = make_mesh(m) if isinstance(m, str | Mapping) else m
            for lowering in lowerings:
                try:
                    with subject(m, layout, lowering) as it:
                        row = case.run(it, it.plan.lowering)
                except DivisibilityError as e:
                    if asked is not None:
                        raise
                    refused = refused or e
                    report.skipped.append((mesh_text(m), str(layout), e.headline))
                    break
                report.rows.append(row)
                if row.error is not None and raises:
                    raise row.error
    if refused is not None and not report.rows:
        raise refused
    return report


def check_subject(subject: Subject, lowering: str, tolerance: float) -> Row:
    """One layout beside the unsharded run."""
    return _Case(tolerance).run(subject, lowering)


def each_layout(layouts: Any) -> list[Layout]:
    if isinstance(layouts, str | Layout | Mapping):
        return [Layout(layouts)]
    layouts = list(layouts)
    if layouts and all(isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str) for p in layouts):
        rest = [p[1] for p in layouts]
        if all(a is None or isinstance(a, str | tuple | list) for a in rest) and not any(":" in p[0] for p in layouts):
            return [Layout(layouts)]  # one Flax rule list
    return [Layout(x) for x in layouts]


def _default_meshes(layout: Layout) -> list[Mesh]:
    """All n devices as 1×n, 2×n/2, 2×2×n/4; what the layout has no axis for is an idle axis."""
    n = len(jax.devices())
    n = n if n >= 4 else 8  # too few: let the error say how to get eight
    axes = list(dict.fromkeys(a for r in layout.rules for a in r.axes))
    idle = next(name for name in (IDLE, *(f"{IDLE}_{i}" for i in range(len(axes)))) if name not in axes)
    shapes = [(1, n), (2, n // 2), (2, 2, n // 4)]
    if len(axes) == 1:
        shapes = [(n,), (n // 2, 2), (2, n // 2)]
    texts: dict[str, None] = {}
    for shape in shapes:
        if math.prod(shape) != n:
            continue
        sizes = dict.fromkeys(axes, 1)
        for k, size in enumerate(shape):
            if k < len(axes):
                sizes[axes[k]] = size
            else:
                sizes[idle] = sizes.get(idle, 1) * size
        texts[", ".join(f"{a}={size}" for a, size in sizes.items() if a != idle or size > 1)] = None
    return [make_mesh(text) for text in texts]


@dataclass(eq=False, slots=True)
class _Reference:
    """The run on one device: its flat arguments, the results, and the compiled function."""

    leaves: list[Any]
    results: list[np.ndarray]
    run: Callable[[list[Any]], list[Any]]
    spread: list[float] | None = None


class _Case:
    """A step and its arguments; the unsharded run is made once."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self.device = jax.local_devices()[0]  # every process makes the unsharded run for itself
        self.reference: _Reference | None = None
        self.between: tuple[object, list[Any]] | None = None  # (which program, all values of it on one device)

    def fresh(self, xs: Sequence[Any]) -> list[Any]:
        """Copies of arrays, on one device."""
        return [on_device(x, self.device) if isinstance(x, jax.Array) else x for x in xs]

    def run(self, subject: Subject, lowering: str) -> Row:
        reference = self.reference or self.unsharded(subject)
        self.reference, plan = reference, subject.plan
        outs = subject.sharded(self.fresh(subject.arrays))
        found = [worst_of(a, b, self.tolerance) for a, b in zip(outs, reference.results, strict=True)]
        failed = [k for k, d in enumerate(found) if not d.ok]
        explained: list[int] = []
        error = None
        if failed:
            localizer = Localizer(self, plan, reference, lowering, self.device)
            explained = [k for k in failed if localizer.explains(k, found[k], outs[k])]
            failed = [k for k in failed if k not in explained]
            if failed:
                error = localizer.error(failed, found, outs)
        paths = [h.path for h in plan.outputs]
        rest = [k for k in range(len(found)) if k not in explained]
        worst = failed[0] if failed else max(rest, key=lambda k: found[k].relative, default=None)
        return Row(
            mesh_text(plan.mesh), str(plan.layout), lowering, "" if worst is None else paths[worst],
            0.0 if worst is None else found[worst].relative, len(found), tuple(paths[k] for k in explained), error,
            max((found[k].relative for k in explained), default=0.0),
        )  # fmt: skip

    def unsharded(self, subject: Subject) -> _Reference:
        """The run on one device, under ``jax.jit`` alone."""
        leaves = self.fresh(subject.arrays)
        run = compiled(subject.alone, leaves)
        return _Reference(leaves, [host(x) for x in run(*leaves)], lambda xs: run(*xs))

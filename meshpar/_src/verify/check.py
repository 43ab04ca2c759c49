"""``mp.check``: compares the sharded run with the unsharded one up to rounding, and names the first op that is wrong.

Every leaf of the results is compared with the run of the same function on one device. A leaf that differs by more
than the tolerance may still differ only by *rounding*: the program amplifies it (Adam turns a gradient that is zero up to
rounding into a full step), or computes in a narrower dtype than its results have. To distinguish these cases, both programs
are run again with all intermediate values as additional results, and the leaf is traced back to values on which both runs agree.
The difference is rounding if every op on this path, applied on one device to the operands of the *sharded* run, has the results
of the sharded run within one of:

- the tolerance;
- the change of its results when its operands change by the tolerance (its backward error: a sum with cancellation has the
  rounding of its terms);
- a small multiple of the error of one device against the same op in a wider dtype (:mod:`verify.wide`): a loop that
  accumulates in bfloat16 is equally far from float32 in both runs.

Otherwise the op is wrong, and the error names its source line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from rich.console import Group
from rich.text import Text

from ...errors import CheckError, DivisibilityError
from ..layout import UNSHARDED, Layout
from ..mesh import MeshSizes
from ..mesh import mesh as make_mesh
from ..plan.plan import Plan
from ..progress import Counted
from ..report.document import shown_text
from ..report.tables import Wrapped, hanging
from ..units import mesh_text
from .localize import Localizer, Reference
from .numbers import allowed, compiled, host, on_device, worst_of
from .wide import narrowest

Lowering = Literal["auto", "jit", "shard_map"]

IDLE = "idle"
"""Name of the axis of default meshes that no rule uses. It is there because XLA's partitioner scales some gradients by its size."""


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome for one layout on one mesh.

    Attributes:
      mesh, layout, lowering: what ran; the mesh as ``"data=2, model=4"``.
      path: the tree path of the leaf with the largest difference: of those that fail, else of those that are not ``explained``.
      difference: of that leaf, relative to its largest value.
      leaves: number of leaves that were compared.
      explained: paths of the leaves that differ by more than the tolerance, but only by rounding.
      rounding: the largest difference of these leaves, relative to the leaf's largest value; ``rounding_path``: its leaf.
      dtype: the least precise dtype in which the step computes; "": it computes with integers only.
      error: the error if the layout changes a result; None.
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
    rounding_path: str = ""
    dtype: str = ""

    def cells(self) -> tuple[str, str, str, str, str]:
        """The mark, mesh, layout, lowering and difference of a line of the report, without the size of what rounding explains."""
        some = len(self.explained)
        place = "/".join(self.path.split("/")[-MAX_COMPONENTS:])
        leaf = f"largest difference {self.difference:.1e} in {place}" if self.difference else "no difference"
        if some and self.error is None:
            within = f"{self.leaves - some} of {self.leaves} leaves within {self.difference:.1e}"
            leaf = f"{within}; {some} by up to {self.rounding:.1e}, which is rounding"
        mark = "✓" if self.error is None else "✗"
        return mark, self.mesh, self.layout or UNSHARDED, self.lowering, leaf


MAX_COMPONENTS = 3
"""Components of the path of a leaf in a line, the last ones."""
MAX_ROUNDING_PATHS = 8
"""Paths of leaves that differ by rounding in a printed report."""


@dataclass(slots=True)
class Report:
    """The result of :func:`meshpar.check`; print it.

    Attributes:
      rows: one for every mesh, layout and lowering.
      skipped: (mesh, layout, reason) of the default meshes over which a size does not divide.
      tolerance: the relative tolerance of float32 results.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    tolerance: float = 1e-5

    @property
    def ok(self) -> bool:
        """Whether at least one layout ran, and no result differed."""
        return bool(self.rows) and all(r.error is None for r in self.rows)

    def __str__(self) -> str:
        return shown_text(self)

    def __rich__(self) -> Any:
        """The result, a line per run, and the errors in full: ``✓ data=4  batch: data  1.2e-07 in nu/up``."""
        lines = [r.cells() for r in self.rows]
        lines += [("–", mesh, layout or UNSHARDED, "", "skipped") for mesh, layout, _ in self.skipped]
        layouts = {layout for _, _, layout, _, _ in lines}
        of = f" of `{layouts.pop()}`" if len(layouts) == 1 else ""
        # of layout, lowering and difference; the first two have a column where they differ
        columns = [0] * (not of) + [1] * (len({r.lowering for r in self.rows}) > 1) + [2]
        table = [(_mark(f"{mark} {mesh}"), *(Text(of_run[k]) for k in columns)) for mark, mesh, *of_run in lines]
        errors, rounding = [str(r.error) for r in self.rows if r.error is not None], self._rounding()
        equal = f"{len(self.rows) - len(errors)} of {len(self.rows)} runs{of} equal to the unsharded one"
        narrow = {r.dtype for r in self.rows if r.error is None and r.dtype and r.difference > self.tolerance}
        more = "".join(f" ({allowed(jnp.dtype(of), self.tolerance):.2g} in {of})" for of in sorted(narrow))
        head = f"{'✓' if self.ok else '✗'} {equal}, to {self.tolerance:g}{more} of each leaf's largest value"
        notes = map(Text, [*rounding, *(f"skipped {mesh}: {reason}" for mesh, _, reason in self.skipped)])
        texts = _mark(head + " or, each op verified, up to rounding" * bool(rounding)), *notes
        first, *below = (Wrapped([text], hang=2) for text in texts)
        return Group(first, hanging(table), *below, *map(Text, errors))

    def _rounding(self) -> list[str]:
        """The notes about the leaves that differ by rounding; empty if there are none."""
        rows = [r for r in self.rows if r.explained]
        if not rows:
            return []
        paths = list(dict.fromkeys(path for r in rows for path in r.explained))
        more = len(paths) - MAX_ROUNDING_PATHS
        largest = max(rows, key=lambda r: r.rounding)
        of = largest.dtype
        digits = (
            f": the step computes in {of}, which rounds by up to {jnp.finfo(of).eps / 2:.1e} of a value" if of else ""
        )
        return [
            f"rounding, no error{digits}. Leaves that differ by more than the tolerance, though no op is wrong:",
            f"  {', '.join(paths[:MAX_ROUNDING_PATHS])}" + f" and {more} more" * (more > 0),
            "  Each op that these leaves depend on was run on one device with the operands of the sharded run: its result is "
            "the same, or has an error as small as the sharded run's, compared with a wider dtype.",
            f"  These leaves differ by at most {largest.rounding:.1e} of their largest value ({largest.rounding_path}). A "
            "leaf that is zero up to rounding, as a gradient whose terms cancel, may differ by its largest value or more.",
        ]


def _mark(text: str) -> Text:
    """A text whose first character is ✓, green, ✗, red, or –."""
    out = Text(text)
    out.stylize({"✓": "green", "✗": "bold red"}.get(text[0], ""), 0, 1)
    return out


@dataclass(frozen=True, slots=True)
class Subject:
    """A step compiled under one layout, with its arguments, to be compared or measured.

    Attributes:
      plan: for the mesh that it runs on.
      arrays: its flat arguments.
      unsharded: flat arguments → flat results; a traceable function: the step for one device.
      sharded: the same, compiled under the layout.
      shardings: of its flat arguments.
    """

    plan: Plan
    arrays: list[Any]
    unsharded: Callable[..., list[Any]]
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
    tell: Callable[[str], None] = lambda text: None,
) -> Report:
    """:func:`meshpar.check`, for a step that ``subject`` lowers for a mesh, a layout and a lowering.

    Args:
      tolerance: allowed difference of a result, relative to its largest absolute value.
      raises: a difference is a CheckError; False: it is in the report only.
      tell: progress callback.
    """
    given = [meshes] if isinstance(meshes, Mesh | str | Mapping) else None if meshes is None else list(meshes)
    case = _Case(tolerance)
    report = Report(tolerance=tolerance)
    refused: DivisibilityError | None = None
    pairs = [(x, m) for x in each_layout(layouts) for m in (_default_meshes(x) if given is None else given)]
    for k, (layout, m) in enumerate(pairs):
        m = make_mesh(m) if isinstance(m, str | Mapping) else m
        for j, lowering in enumerate(lowerings):
            name = f"{mesh_text(m.shape)}: {layout or UNSHARDED}"
            how = k * len(lowerings) + j, len(pairs) * len(lowerings), ["  ".join(r.cells()) for r in report.rows]
            begin = f"run {how[0] + 1} of {how[1]}"
            case.tell = lambda text, begin=begin, name=name, how=how: tell(Counted(f"{begin}, {text}, {name}", *how))
            case.tell("planning")
            try:
                with subject(m, layout, lowering) as it:
                    row = case.run(it)
            except DivisibilityError as e:
                if given is not None:
                    raise
                refused = refused or e
                report.skipped.append((mesh_text(m.shape), str(layout), e.headline))
                break
            report.rows.append(row)
            if row.error is not None and raises:
                raise row.error
    if refused is not None and not report.rows:
        raise refused
    return report


def check_subject(subject: Subject, tolerance: float) -> Row:
    """The row of one layout, compared with the unsharded run."""
    return _Case(tolerance).run(subject)


def each_layout(layouts: Any) -> list[Layout]:
    """The layouts of one layout, of a list of layouts, or of one Flax rule list."""
    if isinstance(layouts, str | Layout | Mapping):
        return [Layout(layouts)]
    layouts = list(layouts)
    if layouts and all(isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str) for p in layouts):
        axes = [p[1] for p in layouts]
        if all(a is None or isinstance(a, str | tuple | list) for a in axes) and not any(":" in p[0] for p in layouts):
            return [Layout(layouts)]  # one Flax rule list
    return [Layout(x) for x in layouts]


def _default_meshes(layout: Layout) -> list[Mesh]:
    """Meshes of all n devices with sizes 1×n, 2×n/2 and 2×2×n/4; sizes beyond the axes of the layout form an idle axis."""
    n = len(jax.devices())
    n = n if n >= 4 else 8  # too few: the error of the mesh shows how to get eight
    axes = layout.axes
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
        texts[mesh_text({a: size for a, size in sizes.items() if a != idle or size > 1})] = None
    return [make_mesh(text) for text in texts]


class _Case:
    """A step with its arguments that is run under several layouts; the reference run without sharding is made once.

    ``tell`` receives a progress text before each stage of a run.
    """

    def __init__(self, tolerance: float):
        """A case whose results may differ by ``tolerance`` of the largest value."""
        self.tolerance = tolerance
        self.tell: Callable[[str], None] = lambda text: None
        self.device = jax.local_devices()[0]  # every process runs the unsharded step
        self.reference: Reference | None = None

    def fresh(self, xs: Sequence[Any]) -> list[Any]:
        """Copies of arrays, on one device."""
        return [on_device(x, self.device) if isinstance(x, jax.Array) else x for x in xs]

    def run(self, subject: Subject) -> Row:
        """Run a step under its layout, and compare every result with the unsharded run."""
        if self.reference is None:
            self.tell("the unsharded step")
            self.reference = self.unsharded(subject)
        reference, plan = self.reference, subject.plan
        self.tell("the sharded step")
        outs = subject.sharded(self.fresh(subject.arrays))
        differences = [worst_of(a, b, self.tolerance) for a, b in zip(outs, reference.results, strict=True)]
        failed = [k for k, d in enumerate(differences) if not d.ok]
        explained: list[int] = []
        error = None
        if failed:
            self.tell(
                f"{len(failed)} results differ by more than one rounding: computing their ops again on one device"
            )
            localizer = Localizer(plan, reference, self.tolerance)
            explained = [k for k in failed if localizer.explains(k, differences[k], outs[k])]
            failed = [k for k in failed if k not in explained]
            if failed:
                error = localizer.error(failed, differences, outs)
        paths = [h.path for h in plan.outputs]

        def largest(results: Iterable[int]) -> tuple[str, float]:
            """(path, difference) of the result that differs most."""
            return max(((paths[k], differences[k].relative) for k in results), key=lambda x: x[1], default=("", 0.0))

        others = [k for k in range(len(paths)) if k not in explained]
        rounding_path, rounding = largest(explained)
        where, names = (mesh_text(plan.sizes), str(plan.layout), plan.lowering), tuple(paths[k] for k in explained)
        dtype = str(narrowest(plan.program.traced.closed) or "")
        return Row(*where, *largest(failed or others), len(paths), names, error, rounding, rounding_path, dtype)

    def unsharded(self, subject: Subject) -> Reference:
        """The run on one device, under ``jax.jit`` alone."""
        leaves = self.fresh(subject.arrays)
        run = compiled(subject.unsharded, leaves)
        return Reference(self.device, leaves, [host(x) for x in run(*leaves)], lambda xs: run(*xs))

"""The options of a search: what ``mp.search`` and the command line share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, get_args

from ...errors import UnsupportedError
from ..dims import check_choice
from ..keywords_and_flags import option
from ..layout import Layout
from ..mesh import MeshSizes, parse_mesh
from ..report.facts import USABLE_FRACTION
from ..units import mesh_text
from .row import Objective

LayoutText = Layout | str | Mapping[str, Any] | Sequence[Any]


class SearchKeywords(TypedDict, total=False):
    """The options of a search as keyword arguments; :func:`meshpar.search` describes them."""

    mesh: MeshSizes | None
    fixed: LayoutText
    forbid: str | Sequence[str]
    layouts: Iterable[LayoutText]
    objective: Objective
    memory_fraction: float
    max_axes: int
    max_plans: int
    time_limit: float | None
    verify: int


@dataclass(frozen=True)
class SearchOptions:
    """Which layouts and meshes a search tries, which of them is the best, and how many it plans. :func:`meshpar.search` describes
    each.

    Options are normalized when one is made: ``mesh`` becomes text, ``fixed`` a :class:`Layout`, ``forbid`` and ``layouts`` tuples.

    Raises:
      UnsupportedError: a value that is out of range, or a layout with ``resolve="cost"``.
      LayoutSyntaxError: rules that cannot be read.
    """

    mesh: str | None = option(None, 'the only mesh to try, "data=64, model=8" (default: all that the topology has)')
    fixed: Layout = option("", 'rules that every layout begins with: "batch: data"', metavar="RULES")
    forbid: tuple[str, ...] = option("", 'dims that are never split: "head_dim, seq"', metavar="DIMS")
    layouts: tuple[Layout, ...] = ()
    objective: Objective = option("time", "the shortest step, or the smallest peak memory (%(default)s)")
    memory_fraction: float = option(USABLE_FRACTION, "fraction of the memory that may be used (%(default)s)")
    max_axes: int = option(3, "the most axes of a mesh (%(default)s)")
    max_plans: int = option(400, "the most candidates that are planned (%(default)s)")
    time_limit: float | None = option(
        None, "seconds after which no more plans are begun; a plan of a large unrolled model takes 20 s"
    )
    verify: int = option(0, "compile the best N with the real compiler (%(default)s)", metavar="N")

    def __post_init__(self) -> None:
        """Check the options, and replace each by its normal form."""
        check_choice("objective", self.objective, get_args(Objective), "objectives")
        for name, valid, rule in (
            ("memory_fraction", 0 < self.memory_fraction <= 1, "above 0 and at most 1, the memory of the device"),
            ("max_axes", self.max_axes >= 1, "at least 1: a mesh has an axis"),
            ("max_plans", self.max_plans >= 1, "at least 1: a search plans a candidate"),
            ("verify", self.verify >= 0, "at least 0, the number of candidates that are compiled"),
            ("time_limit", self.time_limit is None or self.time_limit > 0, "above 0 seconds, or None for no limit"),
        ):
            if not valid:
                default = type(self).__dataclass_fields__[name].default
                raise UnsupportedError(f"{name}={getattr(self, name)!r}: it is {rule}", fixes=[f"{name}={default}"])
        forbid = self.forbid.replace(",", " ").split() if isinstance(self.forbid, str) else self.forbid
        normalized: dict[str, Any] = {
            "mesh": mesh_text(parse_mesh(self.mesh)) if isinstance(self.mesh, Mapping) else self.mesh,
            "fixed": Layout(self.fixed),
            "forbid": tuple(forbid),
            "layouts": tuple(map(Layout, self.layouts)),
        }
        for layout in normalized["layouts"]:
            if layout.resolve != "order":
                raise UnsupportedError(
                    f"{layout!r}: a search reads rules in order",
                    fixes=["give its text", "or plan it by itself with mp.plan"],
                )
        vars(self).update(normalized)

"""The options of a step: what ``mp.jit``, ``mp.plan``, ``mp.compile``, ``mp.search``, … and the command line share.

To add an option, add it to :class:`StepKeywords` (its type, as users give it) and to :class:`StepOptions` (its default, the type
that it is normalized to, and its command-line flag, if it has one).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ...errors import UnsupportedError
from ..dims import DimsLike, PathDims, check_choice, did_you_mean, parse_names
from ..hardware.calibration import CalibrationLike, Calibrations, calibrations
from ..hardware.compiler_options import OptionsLike, check_options
from ..keywords_and_flags import names, option
from ..lower import LOWERINGS
from ..passes.collective_matmul import MODES
from ..program.pipeline import GATHERS, SCHEDULES, GatherName, ScheduleName
from ..search import SearchKeywords

Lowering = Literal["auto", "jit", "shard_map"]
Mode = Literal["auto", "xla", "ring", "pallas", "off"]
DimsPatterns = Mapping[str, DimsLike] | Iterable[tuple[str, DimsLike]] | PathDims | None


class StepKeywords(TypedDict, total=False):
    """The options of a step as keyword arguments; :func:`meshpar.jit` describes them."""

    dims: DimsPatterns
    names: Mapping[str, str | None] | None
    lowering: Lowering
    overlap: Mode | None
    schedule: ScheduleName
    gather: GatherName
    strict: bool
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    options: OptionsLike | None
    compiler_options: Mapping[str, Any] | None
    calibration: CalibrationLike


if TYPE_CHECKING:
    from typing_extensions import TypedDict as OpenTypedDict

    class CallKeywords(StepKeywords, OpenTypedDict, total=False, extra_items=Any):
        """The options of a step, and keyword arguments of the step itself."""

    class SearchCallKeywords(SearchKeywords, CallKeywords, total=False):
        """The options of a search and of a step, and keyword arguments of the step itself."""

else:
    CallKeywords = SearchCallKeywords = dict


@dataclass(frozen=True)
class StepOptions:
    """How a function is traced, planned and compiled, without its mesh and its layout. :func:`meshpar.jit` describes each.

    Options are normalized when one is made: ``dims`` becomes a :class:`~dims.PathDims`, ``calibration`` a tuple of
    calibrations (read from its file), ``options=None`` becomes ``"off"``, and ``lowering="jit"`` has no ``overlap``.

    Raises:
      UnsupportedError: a value that an option does not have, or a combination that does not exist.
      LayoutSyntaxError: ``dims`` that cannot be read.
    """

    dims: PathDims = option(None)
    names: Mapping[str, str | None] | None = option(
        None, "other names for names in the model: act_batch=batch, act_emb=_", type=parse_names, metavar="OLD=NEW,…"
    )
    lowering: Lowering = option(
        "auto",
        "who partitions: meshpar (shard_map), XLA (jit), or meshpar unless an op has no local form (%(default)s)",
    )
    overlap: Mode | None = option(None, "collective-matmul mode of the shard_map lowering (default: auto)")
    schedule: ScheduleName = option("1f1b", "order of the slots of a pipeline (%(default)s)")
    gather: GatherName | None = option(None, "when a loop over microbatches all-gathers weights (FSDP)")
    strict: bool = option(False, "two names for one dim are an error")
    static_argnums: int | Sequence[int] | None = None
    static_argnames: str | Iterable[str] | None = None
    donate_argnums: int | Sequence[int] | None = None
    donate_argnames: str | Iterable[str] | None = option(
        None,
        "an argument that the step may overwrite; several may be given (default: `state`, and nnx objects with an nnx.Optimizer)",
        metavar="NAME",
        action="append",
        flag="--donate",
    )
    keep_unused: bool = False
    options: OptionsLike = option(
        "auto",
        "options of the TPU compiler: auto, off, or a file of `meshpar tune-options` (%(default)s)",
        choices=None,
        metavar="MODE",
    )
    compiler_options: Mapping[str, Any] = option(None)
    calibration: Calibrations = option(
        None, "the result of `meshpar calibrate` on such devices, instead of the chip table", metavar="FILE"
    )

    def __post_init__(self) -> None:
        """Check the options, and replace each by its normal form (parsed dims, a dict of compiler options, …)."""
        check_choice("lowering", self.lowering, ("auto", *LOWERINGS), "lowerings")
        check_choice("overlap", self.overlap, (*MODES, None), "modes")
        if self.lowering == "jit" and self.overlap in ("ring", "pallas"):
            raise UnsupportedError(
                f'overlap={self.overlap!r} belongs to lowering="shard_map": in lowering="jit" XLA partitions, and decides what '
                "overlaps",
                fixes=['leave lowering out, or lowering="shard_map"', "or leave overlap out"],
            )
        check_choice("schedule", self.schedule, SCHEDULES, "schedules")
        check_choice("gather", self.gather, (*GATHERS, None), "values of gather")
        normalized = {
            "dims": path_dims(self.dims, self.names),
            "overlap": None if self.lowering == "jit" else self.overlap,
            "options": check_options(self.options),
            "compiler_options": dict(self.compiler_options or {}),
            "calibration": calibrations(self.calibration),
        }
        vars(self).update(normalized)

    @property
    def of_plan(self) -> dict[str, Any]:
        """The options that a plan depends on, as arguments of :class:`plan.request.PlanRequest`."""
        names = ("strict", "lowering", "overlap", "schedule", "gather", "options", "compiler_options")
        return {**{name: getattr(self, name) for name in names}, "calibrations": self.calibration}

    def changed(self, **options: Any) -> StepOptions:
        """These options with others in place of some. ``lowering="jit"`` without an ``overlap`` leaves theirs out."""
        if options.get("lowering") == "jit":
            options.setdefault("overlap", None)
        return replace(self, **options)

    def with_static(self, names: Iterable[str]) -> StepOptions:
        """These options with more static arguments, by name."""
        given = self.static_argnames or ()
        return self.changed(static_argnames=(*([given] if isinstance(given, str) else given), *names))


OPTIONS = tuple(names(StepOptions))
"""The names of the options."""
if set(OPTIONS) != set(StepKeywords.__annotations__):
    raise AssertionError("StepKeywords and StepOptions have different options")


# -- values of options


def path_dims(dims: DimsPatterns, names: Mapping[str, str | None] | None = None) -> PathDims:
    """Tree-path patterns → dims, and other names for names in the model, as :func:`meshpar.jit` takes ``dims=`` and ``names=``.

    Raises:
      LayoutSyntaxError: something else.
    """
    return dims if isinstance(dims, PathDims) else PathDims(dims, names)


def selected_arguments(signature: inspect.Signature | None, nums: Any, names: Any, what: str) -> frozenset[int | str]:
    """The positions and names of the arguments that ``<what>_argnums`` and ``<what>_argnames`` select, as ``jax.jit`` reads them.

    If only positions or only names are given, the signature adds the others. A negative position counts from the end of the
    parameters, or, if the function has ``*args``, from the end of the positional arguments of a call.

    Raises:
      UnsupportedError: an argument that the function does not have.
    """
    infer = (nums is None) != (names is None)
    nums = () if nums is None else (nums,) if isinstance(nums, int) else tuple(nums)
    names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    out: set[int | str] = {*names, *map(operator.index, nums)}
    if signature is None:
        return frozenset(out)
    params = list(signature.parameters.values())
    kinds = {p.kind for p in params}
    positional = [p.name for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p.name for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for n in names:
        if inspect.Parameter.VAR_KEYWORD not in kinds and n not in by_name:
            raise UnsupportedError(
                f"{what}_argnames: the function has no argument `{n}` that can be passed by name",
                fixes=did_you_mean(n, by_name, "arguments"),
            )
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        for n in nums:
            if not -len(positional) <= n < len(positional):
                raise UnsupportedError(
                    f"{what}_argnums: the function has {len(positional)} positional arguments, so there is no argument {n}",
                    fixes=[f"arguments are {', '.join(f'{i}: {p}' for i, p in enumerate(positional))}"],
                )
        out = {n % len(positional) if isinstance(n, int) else n for n in out}
    if infer:
        out |= {positional[i] for i in out if isinstance(i, int) and 0 <= i < len(positional)} & set(by_name)
        out |= {positional.index(n) for n in names if n in positional}
    return frozenset(out)

"""Searches options of the TPU compiler for one program: the compiler itself, at full effort, is the judge.

The options of :data:`CANDIDATES` change schedules, fusions and the placement of buffers, and no arithmetic. Each is compiled in
addition to those that have shortened the step so far, most promising first, until the time is over. Fast effort would be of no use:
its schedules say nothing about those of full effort.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.text import Text

from ...errors import MeshparError
from ..compat.installed_versions import installed_version
from ..hardware.compiler_options import OptionGroup, TunedOptions, flags_text
from ..report.tables import Cell, Table, ratio
from ..units import format_memory, format_seconds
from .aot import Compiled

MIN_GAIN = 0.002
"""Fraction of the step by which a candidate must shorten it: schedules of equal programs differ by less."""

Value = bool | int | str
CANDIDATES: tuple[Mapping[str, Value], ...] = (
    {"xla_tpu_scoped_vmem_limit_kib": 65536},
    {"xla_tpu_scoped_vmem_limit_kib": 98304},
    {"xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True},
    {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True},
    {"xla_latency_hiding_scheduler_rerun": 2},
    {"xla_tpu_enable_all_experimental_scheduler_features": True},
    {"xla_lhs_prioritize_async_depth_over_stall": "ENABLED"},
    {"xla_tpu_memory_bound_loop_optimizer_options": "enabled:true"},
    {"xla_tpu_enable_sparse_core_collective_offload_all_gather": True},
    {"xla_tpu_enable_data_parallel_all_reduce_opt": True, "xla_tpu_data_parallel_opt_different_sized_ops": True},
    {"xla_tpu_aggressive_opt_barrier_removal": "ENABLED"},
    {
        "xla_should_allow_loop_variant_parameter_in_chain": "ENABLED",
        "xla_should_add_loop_invariant_op_in_chain": "ENABLED",
    },
    {"xla_tpu_use_repeated_instance_for_preferred_prefetch_time": True},
    {"xla_vf_vmem_enable_cross_program_prefetch_freeing": False},
    {"xla_tpu_order_dot_after_layout": False},
    {"xla_tpu_rwb_fusion": False},
    {"xla_tpu_dot_dot_fusion": False},
    {"xla_tpu_enable_copy_fusion": False},
)
"""Option → value of each candidate. Source of the names: the options of libtpu 0.0.42, and those that MaxText's recipes set."""


@dataclass(frozen=True)
class Try:
    """A compilation of the program with some options.

    Attributes:
      values: the options that it has in addition to those accepted before.
      seconds, peak: of a step in its schedule, and bytes of a device; None: the compiler refused it, or it does not fit.
      kept: whether the next candidates have these options too.
      reason: why it was refused.
    """

    values: Mapping[str, Value]
    seconds: float | None
    peak: int | None
    kept: bool
    reason: str = ""


@dataclass(frozen=True)
class Tuning:
    """The candidates that were compiled, the first without options of its own, and how many were not, for lack of time."""

    tries: list[Try] = field(default_factory=list)
    left: int = 0

    @property
    def values(self) -> dict[str, Value]:
        """The options that were kept."""
        return {name: value for t in self.tries if t.kept for name, value in t.values.items()}

    @property
    def seconds(self) -> float:
        """Of a step in the schedule with them."""
        return min(t.seconds for t in self.tries if t.kept and t.seconds is not None)

    def tuned(self, target: str, chip: str) -> TunedOptions:
        """The options that were kept, to be written to a file."""
        first = self.tries[0].seconds or 0.0
        return TunedOptions(target, chip, installed_version("libtpu") or "", self.values, self.seconds, first)

    def __rich__(self) -> Group:
        """A row for each compilation, and how many candidates are left."""
        base, rows = self.tries[0].seconds, []
        for t in self.tries:
            name = flags_text(t.values) or "as planned"
            if t.seconds is None or t.peak is None:
                rows.append([Cell(name), *[Cell("–")] * 3, Cell(t.reason)])
                continue
            numbers = (
                Cell(format_seconds(t.seconds), t.seconds),
                ratio(t.seconds, base),
                Cell(format_memory(t.peak), t.peak),
            )
            rows.append([Cell(name), *numbers, Cell("✓" if t.kept and t.values else "")])
        columns = [("options", ""), ("step", "n"), ("ratio", "n"), ("peak memory", "n"), ("kept", "")]
        title = f"steps by the compiler's schedules, at full effort; options of {format_seconds(self.seconds)} below"
        table = Table(columns, rows, title)
        lines = [Text(flags_text(self.values) or "none")]
        if self.left:
            lines.append(Text(f"{self.left} candidates were not compiled: a longer --budget", "yellow"))
        return Group(table.terminal(), *lines)


def tune(
    compiled: Callable[[Mapping[str, Value]], Compiled],
    budget: float,
    groups: Sequence[OptionGroup] = (),
    tell: Callable[[Tuning], None] = lambda found: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Compile candidates one after the other, and return what was found.

    The first compilation has no options of the search. A candidate is kept if its step is shorter than the shortest so far by
    :data:`MIN_GAIN`. No compilation is started that would end after the budget if it took as long as the longest one.

    Args:
      compiled: the program compiled at full effort with more options.
      budget: seconds.
      groups: groups of options that the plan sets, which are no candidates; the program without each of them is one.
      tell: called with what is found, after each compilation.

    Raises:
      MeshparError: the program cannot be compiled without options of the search.
    """
    unset = [dict.fromkeys(g.values, False) for g in groups if all(v is True for v in g.values.values())]
    planned = {option for g in groups for option in g.values.items()}
    began, longest = clock(), 0.0
    candidates: list[Mapping[str, Value]] = [{}, *(c for c in CANDIDATES if not c.items() <= planned), *unset]
    tries: list[Try] = []
    values: dict[str, Value] = {}
    best = float("inf")
    for n, candidate in enumerate(candidates):
        if tries and clock() - began + longest > budget:
            return Tuning(tries, len(candidates) - n)
        started = clock()
        try:
            program = compiled({**values, **candidate})
            seconds, peak, reason = program.scheduled_seconds, program.memory.peak, ""
        except MeshparError as error:
            if not tries:
                raise
            seconds, peak, reason = None, None, str(error).splitlines()[0]
        longest = max(longest, clock() - started)
        kept = seconds is not None and seconds < best * (1 - MIN_GAIN)
        if kept and seconds is not None:
            values, best = {**values, **candidate}, seconds
        tries = [*tries, Try(candidate, seconds, peak, kept, reason)]
        tell(Tuning(tries, len(candidates) - n - 1))
    return Tuning(tries)

"""Options of the TPU compiler that plans come with: which, on what chip, when, why, and what was measured.

To have one more set is to add one entry to ``_TABLE``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..dims import did_you_mean
from ..errors import UnsupportedError
from .chips import Chip, CollectiveOp

OptionsMode = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of the compiler that serve one purpose, and are set together or not at all.

    Attributes:
      name: what they do.
      values: option → value.
      chips: for which chips of the table.
      when: set where a plan sends by one of these.
      frees: collectives that are no longer synchronous with them (``Chip.sync_collectives``).
      why: what the compiler does without them.
      measured: what they changed in compiled programs, with which compiler.
    """

    name: str
    values: Mapping[str, bool | int]
    chips: tuple[str, ...]
    when: frozenset[CollectiveOp]
    frees: frozenset[CollectiveOp]
    why: str
    measured: str


def _true(*names: str) -> dict[str, bool | int]:
    return dict.fromkeys(names, True)


_ALL: frozenset[CollectiveOp] = frozenset(get_args(CollectiveOp))
_SUMS: frozenset[CollectiveOp] = frozenset({"reduce-scatter", "all-reduce"})
_TABLE = (
    OptionGroup(
        "asynchronous gathers",
        _true(
            "xla_tpu_enable_async_collective_fusion",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            "xla_tpu_overlap_compute_collective_tc",
            "xla_enable_async_all_gather",
        ),
        ("v4", "v5p", "v6e"),
        when=frozenset({"all-gather"}),
        frees=frozenset({"all-gather"}),
        why="by default programs wait for gathers; on the other chips they do not",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, exposed gathers: FSDP 69 → 6 ms (jit, shard_map), peak memory "
        "+0 and +4 %; data=16, model=8 (shard_map) 330 → 184 ms, +7 %; v6e:16x16, FSDP (shard_map) 104 → 24 ms, whole step "
        "638 → 537 ms, +2 %",
    ),
    OptionGroup(
        "sums on the SparseCores",
        _true(
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2",
            "xla_tpu_use_tc_device_shape_on_sc",
        ),
        ("v5p", "v6e"),
        when=_SUMS,
        frees=_SUMS,
        why="by default programs wait for reduce-scatters, and for all-reduces of gradients",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, computation and exposed communication with asynchronous "
        "gathers: FSDP 722 → 630 ms (jit), 730 → 668 ms (shard_map); all three groups, data=16, model=8: 1592 → 1182 ms (jit), "
        "1333 → 1171 ms (shard_map), peak memory +1 % and +11 %; v6e:16x16, FSDP (shard_map), without asynchronous "
        "gathers 638 → 587 ms, with them 537 → 475 ms (sums sent whole), +0 %; compilation takes up to twice as long",
    ),
    OptionGroup(
        "no windowed einsums",
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
        ("v4", "v5p"),
        when=_ALL,
        frees=frozenset(),
        why="XLA's partitioner makes loops of permutes of the largest gathers and scatters that cost more than they hide",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, data=16, model=8 (jit): 1.59 → 1.47 s, peak memory -7 %",
    ),
)
GROUPS: tuple[OptionGroup, ...] = _TABLE
"""Every group of options that plans may come with."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the compiler that a plan comes with.

    Attributes:
      mode: ``auto``: by the table; ``off``: the user's alone.
      given: the user's own, which win.
      groups: of the table, that are set.
      left_out: groups that the chip and the plan ask for and that are not set, with the reason.
    """

    mode: OptionsMode = "off"
    given: tuple[tuple[str, Any], ...] = ()
    groups: tuple[OptionGroup, ...] = ()
    left_out: tuple[tuple[OptionGroup, str], ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """All that is set, as ``jax.jit(compiler_options=…)`` takes it."""
        out: dict[str, Any] = {}
        for group in self.groups:
            out.update(group.values)
        return {**out, **dict(self.given)}

    def sync_collectives(self, chip: Chip | None) -> frozenset[CollectiveOp]:
        """The collectives that programs for a chip wait for when they are compiled with these options."""
        if chip is None:
            return frozenset()
        mine = {k: str(v).lower() for k, v in self.values.items()}
        freed: set[CollectiveOp] = set()
        for group in GROUPS:
            if chip.name in group.chips and all(mine.get(k) == str(v).lower() for k, v in group.values.items()):
                freed |= group.frees
        return chip.sync_collectives - freed

    def to_dict(self) -> dict[str, Any]:
        def shown(group: OptionGroup) -> dict[str, Any]:
            return {"name": group.name, "options": list(group.values), "why": group.why, "measured": group.measured}

        return {
            "mode": self.mode, "values": self.values, "groups": [shown(g) for g in self.groups],
            "left_out": [{**shown(g), "reason": reason} for g, reason in self.left_out],
        }  # fmt: skip


def check_options(mode: Any) -> OptionsMode:
    """``options=`` as users give it; None is ``"off"``.

    Raises:
      UnsupportedError: another value.
    """
    if mode is None or mode in get_args(OptionsMode):
        return mode or "off"
    fixes = [
        *did_you_mean(str(mode), list(get_args(OptionsMode)), "modes"),
        "the compiler's own go to compiler_options={…}",
    ]
    raise UnsupportedError(f"there is no options={mode!r}", fixes=fixes)


def choose_options(
    chip: Chip | None, sends: Collection[CollectiveOp], mode: OptionsMode = "auto", given: Mapping[str, Any] | None = None,
    unknown: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda values: {},
) -> Options:  # fmt: skip
    """The options for a plan.

    Args:
      chip: that it is for; on others than TPUs nothing is chosen.
      sends: the collectives that it has.
      mode: ``off``: nothing is chosen.
      given: the user's own.
      unknown: those of some options that the compiler at hand refuses → what it says.
    """
    own = tuple((given or {}).items())
    wanted = [g for g in GROUPS if chip is not None and chip.name in g.chips and not g.when.isdisjoint(sends)]
    if mode == "off" or not wanted:
        return Options(mode, own)
    names = {k for k, _ in own}
    refused = unknown({k: v for g in wanted for k, v in g.values.items() if k not in names})
    why = {g.name: "; ".join(refused[k] for k in g.values if k in refused) for g in wanted}
    return Options(
        mode, own, tuple(g for g in wanted if not why[g.name]), tuple((g, why[g.name]) for g in wanted if why[g.name])
    )

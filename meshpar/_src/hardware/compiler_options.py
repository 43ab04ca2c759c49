"""Options of the TPU compiler that a plan sets: when, why, and their measured effect on compiled programs.

To add a group of options, add an entry to ``GROUPS`` and its name to the chips of a table in ``tables/``. ``meshpar tune-options``
writes a file of more options for one program (:class:`TunedOptions`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ...errors import UnsupportedError
from ..compat.installed_versions import installed_version
from ..dims import did_you_mean
from .chips import Chip
from .collective_ops import CollectiveOp

OptionsMode = Literal["auto", "off"]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Compiler options with one purpose, which are set together or not at all.

    Attributes:
      name: their purpose; chips list it in ``CompilerModel.option_groups``.
      values: option → value.
      when: the kinds of collectives; set if a plan has one of them.
      frees: kinds of collectives that the options make asynchronous (see ``CompilerModel.sync_collectives``).
      why: behaviour of the compiler without them.
      measured: their effect on compiled programs, and the version of the compiler.
    """

    name: str
    values: Mapping[str, bool | int | str]
    when: frozenset[CollectiveOp]
    frees: frozenset[CollectiveOp]
    why: str
    measured: str


def flags_text(values: Mapping[str, Any]) -> str:
    """``xla_enable_async_all_gather=True xla_…=1``: compiler options in one line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _true(*names: str) -> dict[str, bool | int]:
    return dict.fromkeys(names, True)


_ALL: frozenset[CollectiveOp] = frozenset(get_args(CollectiveOp))
_REDUCTIONS: frozenset[CollectiveOp] = frozenset({"reduce-scatter", "all-reduce"})
GROUPS: tuple[OptionGroup, ...] = (
    OptionGroup(
        "asynchronous all-gathers",
        _true(
            "xla_tpu_enable_async_collective_fusion",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            "xla_tpu_overlap_compute_collective_tc",
            "xla_enable_async_all_gather",
        ),
        when=frozenset({"all-gather"}),
        frees=frozenset({"all-gather"}),
        why="by default all-gathers are synchronous on this chip",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, exposed all-gathers: FSDP 69 → 6 ms (jit, shard_map), peak "
        "memory +0 and +4 %; data=16, model=8 (shard_map) 330 → 184 ms, +7 %; v6e:16x16, FSDP (shard_map) 104 → 24 ms, full depth "
        "step 638 → 537 ms, +2 %",
    ),
    OptionGroup(
        "reductions on the SparseCores",
        _true(
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2",
            "xla_tpu_use_tc_device_shape_on_sc",
        ),
        when=_REDUCTIONS,
        frees=_REDUCTIONS,
        why="by default reduce-scatters, and all-reduces of gradients, are synchronous",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, computation and exposed communication with asynchronous "
        "all-gathers: FSDP 722 → 630 ms (jit), 730 → 668 ms (shard_map); all three groups, data=16, model=8: 1592 → 1182 ms "
        "(jit), 1333 → 1171 ms (shard_map), peak memory +1 % and +11 %; v6e:16x16, FSDP (shard_map), without asynchronous "
        "all-gathers 638 → 587 ms, with them 537 → 475 ms (all-reduces in place of reduce-scatters), +0 %; compilation takes up "
        "to twice as long",
    ),
    OptionGroup(
        "asynchronous all-to-alls",
        _true("xla_tpu_enable_async_all_to_all"),
        when=frozenset({"all-to-all"}),
        frees=frozenset({"all-to-all"}),
        why="by default all-to-alls are synchronous on this chip",
        measured="libtpu 0.0.42.1, v5p:4x4x4 and v6e:8x8, two parts of tokens, each sent, multiplied twice, and sent back: "
        "without it (v5p) four synchronous all-to-alls; with it the exchange of the second part runs during the matmuls of the "
        "first one, and the return of the first part during the matmuls of the second one",
    ),
    OptionGroup(
        "no windowed einsums",
        {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
        when=_ALL,
        frees=frozenset(),
        why="XLA's partitioner decomposes the largest all-gathers and reduce-scatters into loops of collective-permutes, which "
        "cost more than they hide",
        measured="libtpu 0.0.42, v5p:4x4x8, a step of Llama 3 8B, data=16, model=8 (jit): 1.59 → 1.47 s, peak memory -7 %",
    ),
    OptionGroup(
        "64 MiB of VMEM for a kernel",
        {"xla_tpu_scoped_vmem_limit_kib": 65536},
        when=_ALL,
        frees=frozenset(),
        why="with the compiler's own limit, matmuls fused with other ops, such as the backward pass of a norm, take longer",
        measured="libtpu 0.0.42.1, steps (shard_map) without and with it: v5p:4x4x8, Llama 3 8B, FSDP 634 → 607 ms, peak memory "
        "+0 %; v5p:4x4x4, two layers of a plain Llama 23.7 → 23.1 ms, +2 %, a plain ViT 8.19 → 7.99 ms, +0 %; v5e:16x16, the same "
        "models 61.9 → 58.9 ms, +0 %, and 19.1 → 18.8 ms, -1 %; v6e:16x16, Llama 3 8B, FSDP 452 (an earlier version) and 469 ms: "
        "not set",
    ),
)
"""Every group of options that plans may set."""


@dataclass(frozen=True, slots=True)
class TunedOptions:
    """Options that shortened the schedule of one program, which are set in addition to those of ``"auto"``.

    Attributes:
      target: the program, its mesh and its layout, in words.
      chip: the name of the chip that they were searched for.
      compiler: the version of libtpu that compiled the schedules.
      values: option → value.
      seconds, auto_seconds: of a step in the schedule with them, and with the options of ``"auto"``.
      file: where they were read from.
    """

    target: str
    chip: str
    compiler: str
    values: Mapping[str, bool | int | str]
    seconds: float
    auto_seconds: float
    file: str = ""

    def __str__(self) -> str:
        return self.file

    @property
    def group(self) -> OptionGroup:
        """The options as a group of a plan, whatever it sends."""
        measured = f"libtpu {self.compiler}, {self.target}: {1e3 * self.auto_seconds:.1f} → {1e3 * self.seconds:.1f} ms"
        why = f"the schedule of {self.target} is shorter"
        return OptionGroup(f"tuned ({self.file})", self.values, _ALL, frozenset(), why, measured)

    def unsuited(self, chip: Chip | None) -> str:
        """Why they are not set in a plan for a chip, since nobody has compiled them for it; "" if they are."""
        if chip is None or chip.name != self.chip:
            return f"searched for {self.chip}, not for {'this machine' if chip is None else chip.name}"
        installed = installed_version("libtpu")
        if installed not in (None, self.compiler):
            again = "run `meshpar tune-options` again"
            return f"searched with libtpu {self.compiler}; {installed} is installed, whose schedules differ: {again}"
        return ""

    def write(self, file: Path) -> None:
        """Write the options as JSON."""
        content = {k: v for k, v in asdict(self).items() if k != "file"}
        file.write_text(json.dumps(content, indent=2) + "\n", "utf8")


OptionsLike: TypeAlias = OptionsMode | str | Path | TunedOptions
"""A mode, or options that ``meshpar tune-options`` found: the path of its file, or what was read from it."""


def read_tuned(file: str | Path) -> TunedOptions:
    """The options of a file that :meth:`TunedOptions.write` wrote.

    Raises:
      UnsupportedError: there is no such file, or it has other content.
    """
    try:
        return TunedOptions(**json.loads(Path(file).read_text("utf8")), file=str(file))
    except (OSError, ValueError, TypeError) as error:
        fix = "`meshpar tune-options TARGET --topology T --out FILE` writes one"
        raise UnsupportedError(f"options={str(file)!r}: not a file of tuned options: {error}", fixes=[fix]) from None


@dataclass(frozen=True, slots=True)
class Options:
    """The compiler options of a plan.

    Attributes:
      mode: ``"auto"``: the groups that apply, and the user's options; ``"off"``: the user's options only; tuned options: those of
        ``"auto"``, and these.
      given: (option, value) pairs of the user, which win.
      groups: the groups that are set.
      left_out: (group, reason) of groups that apply and are not set.
    """

    mode: OptionsMode | TunedOptions = "off"
    given: tuple[tuple[str, Any], ...] = ()
    groups: tuple[OptionGroup, ...] = ()
    left_out: tuple[tuple[OptionGroup, str], ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """Option → value, for ``jax.jit(compiler_options=…)``."""
        out: dict[str, Any] = {}
        for group in self.groups:
            out.update(group.values)
        return {**out, **dict(self.given)}

    def sync_collectives(self, chip: Chip | None) -> frozenset[CollectiveOp]:
        """The kinds of collectives that are synchronous in programs compiled for a chip with these options."""
        if chip is None:
            return frozenset()
        values = {k: str(v).lower() for k, v in self.values.items()}
        freed: set[CollectiveOp] = set()
        for group in GROUPS:
            if group.name in chip.compiler.option_groups and all(
                values.get(k) == str(v).lower() for k, v in group.values.items()
            ):
                freed |= group.frees
        return chip.compiler.sync_collectives - freed

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON data: ``mode``, ``values``, and ``groups`` and ``left_out`` with the reason of each
        group."""

        def shown(group: OptionGroup) -> dict[str, Any]:
            return {"name": group.name, "options": list(group.values), "why": group.why, "measured": group.measured}

        groups = [shown(g) for g in self.groups]
        left_out = [{**shown(g), "reason": reason} for g, reason in self.left_out]
        return {"mode": str(self.mode), "values": self.values, "groups": groups, "left_out": left_out}


def check_options(mode: Any) -> OptionsMode | TunedOptions:
    """The mode, or the tuned options, for the value of a user's ``options=``; ``"off"`` for None.

    Raises:
      UnsupportedError: the value is not a mode, and no file of tuned options.
    """
    if mode is None or mode in get_args(OptionsMode):
        return mode or "off"
    if isinstance(mode, TunedOptions):
        return mode
    if isinstance(mode, Path) or str(mode).endswith(".json"):
        return read_tuned(mode)
    fixes = [
        *did_you_mean(str(mode), list(get_args(OptionsMode)), "modes"),
        "options of the compiler: compiler_options={…}; of a file of `meshpar tune-options`: options=FILE.json",
    ]
    raise UnsupportedError(f"there is no options={mode!r}", fixes=fixes)


def choose_options(
    chip: Chip | None,
    sends: Collection[CollectiveOp],
    mode: OptionsMode | TunedOptions = "auto",
    given: Mapping[str, Any] | None = None,
    unknown: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda values: {},
) -> Options:
    """The compiler options for a plan.

    Args:
      chip: the chip of the plan; groups apply to TPUs only.
      sends: the kinds of collectives of the plan.
      mode: ``"off"``: no groups. Tuned options are the last group, so that they win over the others.
      given: the user's options.
      unknown: function from options to those that the installed compiler rejects → its message.
    """
    own = tuple((given or {}).items())
    wanted = [
        g for g in GROUPS if chip is not None and g.name in chip.compiler.option_groups and not g.when.isdisjoint(sends)
    ]
    unsuited: tuple[tuple[OptionGroup, str], ...] = ()
    if isinstance(mode, TunedOptions):
        if reason := mode.unsuited(chip):
            unsuited = ((mode.group, reason),)
        else:
            wanted.append(mode.group)
    if mode == "off" or not wanted:
        return Options(mode, own, left_out=unsuited)
    names = {k for k, _ in own}
    refused = unknown({k: v for g in wanted for k, v in g.values.items() if k not in names})
    why = {g.name: "; ".join(refused[k] for k in g.values if k in refused) for g in wanted}
    left_out = tuple((g, why[g.name]) for g in wanted if why[g.name])
    return Options(mode, own, tuple(g for g in wanted if not why[g.name]), unsuited + left_out)

"""Thresholds and limits of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchPolicy:
    """Which candidates a search descends from, prunes, and treats as equal. Fractions are relative to the metric of the objective.

    Attributes:
      tie_fraction: layouts whose step times (or peaks) differ by less count as equally good; the one with the fewest rules is
        chosen, since the estimate is no more accurate than that.
      scheme_slack_fraction: the choice may be longer (or larger) than a known scheme or a layout of the user's by at most this.
      max_peak_fraction: of candidates that tie and need more than half of the usable memory, one is not chosen if a faster one has
        a peak below this fraction of its peak.
      min_gain_fraction: a descent moves to a candidate only if it is better by more than this.
      rejected_loss_fraction: a move that made a candidate worse by more than this is not tried again from another candidate.
      other_mesh_error_fraction: a candidate on another mesh is planned if its expected time is at most this much above the time
        that it has to beat. Of 490 neighbours of candidates of Llama 3, Mixtral, DeepSeek-V3 and ResNet-50, those that were
        better by more than 0.5 % were expected to take at most 1.04 times the time of the candidate that they derive from.
      max_time_ratio: schemes that take more than this many times the best step time are not descended from, and a candidate whose
        communication alone takes longer is planned no further. Of 800 candidates the passes hid or saved at most 0.27 of it.
      max_starts: number of candidates that fit, and of shorter ones that do not fit, from which the search descends.
      max_ties: number of candidates from which the search descends that are as good as the best, and shard other dims or
        have more axes.
      tie_patience: such a descent ends after this many plans, if none of them is better than the best.
      patience_candidates: a descent ends after this many candidates without a gain.
      patience_ops: ops of the largest program for which all of ``patience_candidates`` are planned; larger programs, whose
        plans take longer, get proportionally fewer.
      max_stage_counts: numbers of stages of a pipeline whose layouts are planned: those with the smallest lower bounds.
      stage_plans_fraction: of the plans and of the time, reserved for stages; the search without stages gets the rest.
      max_stage_ratio: the search descends from the best layout with stages if it takes at most this many times the best step time.
      stage_patience: such a descent ends after this many plans without a gain; their programs are larger.
      same_row_fraction: rows of the same kind of layout whose step times and peaks differ by at most this are shown as one.
      max_rows: candidates in the result, besides the known schemes and the Pareto front.
    """

    tie_fraction: float = 0.03
    scheme_slack_fraction: float = 0.002
    max_peak_fraction: float = 0.9
    min_gain_fraction: float = 0.005
    rejected_loss_fraction: float = 0.1
    other_mesh_error_fraction: float = 0.08
    max_time_ratio: float = 1.5
    max_starts: int = 3
    max_ties: int = 2
    tie_patience: int = 15
    patience_candidates: int = 40
    patience_ops: int = 2000
    max_stage_counts: int = 2
    stage_plans_fraction: float = 0.4
    max_stage_ratio: float = 1.15
    stage_patience: int = 6
    same_row_fraction: float = 0.01
    max_rows: int = 64


POLICY = SearchPolicy()
"""The policy of :func:`meshpar.search`."""

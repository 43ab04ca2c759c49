"""The search of compiler options, with schedules that are made up: which are kept, what is left out, and the file."""

import itertools
from types import SimpleNamespace

import pytest

from meshpar._src.hardware.compiler_options import GROUPS, flags_text
from meshpar._src.report.document import shown_text
from meshpar._src.verify.tuned_options import CANDIDATES, tune
from meshpar.errors import OutOfMemoryError

FIRST, SECOND, THIRD = CANDIDATES[:3]


def schedules(*effects, peak=100):
    """The function that compiles: each candidate multiplies the seconds of the step, in the order given."""
    factor = dict(zip(map(str, CANDIDATES), effects, strict=False))
    compiled = []

    def compile_with(values):
        compiled.append(dict(values))
        own = [c for c in CANDIDATES if c.items() <= values.items()]
        seconds = 1.0
        for c in own:
            effect = factor.get(str(c), 1.0)
            if isinstance(effect, Exception):
                raise effect
            seconds *= effect
        return SimpleNamespace(scheduled_seconds=seconds, memory=SimpleNamespace(peak=peak), topology="v5p:2x2x1")

    return compile_with, compiled


def test_candidates_that_shorten_the_step_are_kept_and_added_to():
    compile_with, compiled = schedules(0.9, 1.1, 0.95)
    found = tune(compile_with, budget=1e9)
    assert found.values == FIRST | THIRD
    assert found.seconds == pytest.approx(0.9 * 0.95)
    assert compiled[0] == {}
    assert compiled[2] == FIRST | SECOND  # the same option: the candidate's value
    assert all((FIRST | THIRD).keys() <= values.keys() for values in compiled[4:])
    assert len(found.tries) == 1 + len(CANDIDATES)
    assert found.left == 0
    assert flags_text(found.values) in " ".join(shown_text(found).split())


def test_a_gain_within_the_noise_of_schedules_is_not_kept():
    found = tune(schedules(0.999)[0], budget=1e9)
    assert (found.values, found.seconds) == ({}, 1.0)


def test_what_the_compiler_refuses_is_left_out_with_the_reason():
    found = tune(schedules(OutOfMemoryError("needs 200 GB"), 0.9)[0], budget=1e9)
    assert found.values == SECOND
    assert found.tries[1].reason.endswith("needs 200 GB")
    assert "needs 200 GB" in " ".join(shown_text(found).split())


def test_a_program_that_does_not_compile_is_an_error():
    def refuse(values):
        raise OutOfMemoryError("needs 200 GB")

    with pytest.raises(OutOfMemoryError):
        tune(refuse, budget=1e9)


def test_no_compilation_is_started_that_would_end_after_the_budget():
    """A clock that is read three times for each compilation: each takes 10 s of these."""
    now = itertools.count(0, 5)
    told = []
    found = tune(schedules(0.9)[0], budget=40, tell=told.append, clock=lambda: next(now))
    assert 1 < len(found.tries) < len(CANDIDATES)
    assert found.left == 1 + len(CANDIDATES) - len(found.tries)
    assert [len(t.tries) for t in told] == list(range(1, len(found.tries) + 1))
    assert f"{found.left} candidates were not compiled" in " ".join(shown_text(found).split())


def test_groups_of_the_plan_are_no_candidates_and_the_program_without_each_is_one():
    gathers = next(g for g in GROUPS if "all-gather" in g.frees)
    compile_with, compiled = schedules()
    tune(compile_with, budget=1e9, groups=GROUPS)
    assert dict.fromkeys(gathers.values, False) in compiled
    assert [c for c in CANDIDATES if any(c.items() <= g.values.items() for g in GROUPS)] == [FIRST]
    assert FIRST not in compiled
    assert len(compiled) == 1 + len(CANDIDATES) - 1 + 3  # limits of VMEM and of windowed einsums are no switches

"""The comparison of small programs with XLA's partitioner: a few programs, and the rows of the table."""

import pytest
from primitives import above, report, run_case


def line(**changed):
    return {"program": "p", "layout": "batch", "what": "value", "bytes": 100.0, "planned": 100.0, "xla": 100.0,
            "differs": 0.0, "xla_differs": 0.0, "ops": [], **changed}  # fmt: skip


def test_the_report_counts_what_is_wrong_fails_or_sends_more():
    lines = [line(), line(program="wrong", differs=0.5), line(program="fails", error="ValueError: x")]
    lines += [line(program="more", bytes=1000.0), line(program="much more", bytes=5000.0)]
    text = report([*lines, line(program="less", bytes=1.0, xla=1000.0)])
    rows = [x.split(" | ")[0] for x in text.splitlines() if x.startswith("| m")]
    assert rows == ["| much more", "| more"]
    assert "6 cases of 6 programs: 1 wrong, 1 errors." in text
    assert "2 cases are above the bound, 2 of them without a reason; 1 send less" in text
    assert "wrong: wrong, batch, value: 0.5" in text
    assert "error: fails, batch, value: ValueError: x" in text


@pytest.mark.parametrize("name", ["attention_causal", "cumsum", "roll"])
@pytest.mark.parametrize("what", ["value", "gradient"])
def test_results_are_right_and_no_more_is_sent(name, what):
    found = run_case(name, "sequence", what, lowering="shard_map")
    assert found["differs"] < 1e-5
    assert found["planned"] == pytest.approx(found["bytes"], abs=64)
    assert not above(found)

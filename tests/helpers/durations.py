"""Durations of slow tests: the file `tests/durations.json`, by which tests get the mark ``slow``.

The file has every case of at least :data:`SLOW` seconds: `{test: {case: seconds}}`, or `{test: seconds}` for a test without
parameters, or for all cases of one with parameters.
``pytest --record-durations`` replaces the entries of the cases that it runs.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parents[1] / "durations.json"
SLOW = 1.0
"""Seconds from which a case is slow, with its fixtures, on a machine of two cores that run nothing but the tests."""

Durations = dict[str, float | dict[str, float]]


def split(nodeid: str) -> tuple[str, str]:
    """(Test, case) of a pytest id; the case is empty if the test is not parametrized."""
    test, bracket, case = nodeid.partition("[")
    return test, case.removesuffix("]") if bracket else ""


def load() -> Durations:
    return json.loads(FILE.read_text())


def seconds_of(nodeid: str, durations: Durations) -> float:
    """The recorded seconds of a case, 0 if it is not recorded."""
    test, case = split(nodeid)
    recorded = durations.get(test, 0.0)
    return recorded.get(case, 0.0) if isinstance(recorded, dict) else recorded


def is_slow(nodeid: str, durations: Durations, seconds: float = SLOW) -> bool:
    """Whether a case is recorded with at least so many seconds."""
    return seconds_of(nodeid, durations) >= seconds


def all_but_one_case(nodeids: Iterable[str], durations: Durations) -> set[str]:
    """The pytest ids without one case of each test.

    One below :data:`SLOW`, which the test's name selects, so that not all have the first parameters, else the shortest one.
    """
    cases = defaultdict(list)
    for nodeid in nodeids:
        cases[split(nodeid)[0]].append(nodeid)
    left = set()
    for test, of in cases.items():
        fast = [x for x in of if not is_slow(x, durations)] or [min(of, key=lambda x: seconds_of(x, durations))]
        left |= set(of) - {fast[zlib.crc32(test.encode()) % len(fast)]}
    return left


def updated(durations: Durations, measured: dict[str, float]) -> Durations:
    """The durations with those of the cases that ran, by pytest id."""
    cases = {test: dict(x) if isinstance(x, dict) else {"": x} for test, x in durations.items()}
    for nodeid, seconds in measured.items():
        test, case = split(nodeid)
        cases.setdefault(test, {}).pop(case, None)
        cases[test].pop("", None)
        if seconds >= SLOW:
            cases[test][case] = round(seconds, 1)
    return {test: of.get("", dict(sorted(of.items()))) for test, of in sorted(cases.items()) if of}


class Recorder:
    """A plugin of pytest that writes the durations of a run to :data:`FILE`."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report) -> None:
        self.measured[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        FILE.write_text(json.dumps(updated(load(), self.measured), indent=1, ensure_ascii=False) + "\n")

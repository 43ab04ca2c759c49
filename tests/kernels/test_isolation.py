"""Calls in a child process: results, exceptions, crashes, hangs, and the state of the next call."""

import os
from pathlib import Path

import pytest

from meshpar_kernels.isolation import Worker, WorkerError

HERE = str(Path(__file__).parent)
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def worker():
    with Worker("isolated_calls:behave", paths=[HERE, ROOT]) as worker:
        yield worker


def test_one_process_answers_all_calls_also_after_exceptions(worker):
    first = worker.call({"how": "return", "count": [1, 2]}, limit=60)
    assert first["count"] == [1, 2]
    assert first["pid"] != os.getpid()
    with pytest.raises(WorkerError, match="no kernel for this shape") as refused:
        worker.call({"how": "refuse"}, limit=60)
    with pytest.raises(WorkerError, match="ValueError: bad value") as failed:
        worker.call({"how": "raise"}, limit=60)
    assert (refused.value.status, failed.value.status) == ("refused", "failed")
    assert worker.call({"how": "return"}, limit=60)["pid"] == first["pid"]


@pytest.mark.parametrize(
    ("how", "limit", "status", "message"),
    [
        ("exit", 60, "crashed", r"exit status 3: .*illegal memory access"),
        ("abort", 60, "crashed", "signal SIGABRT"),
        ("hang", 1, "timeout", "no result within 1 s"),
    ],
)
def test_after_a_crash_or_a_hang_a_new_process_answers(worker, how, limit, status, message):
    pid = worker.call({"how": "return"}, limit=60)["pid"]
    with pytest.raises(WorkerError, match=message) as error:
        worker.call({"how": how}, limit=limit)
    assert error.value.status == status
    assert worker.call({"how": "return"}, limit=60)["pid"] != pid

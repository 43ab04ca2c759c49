"""A process that is lost, stopped, stuck, or fails, in every rank: the others end, with its cause, in time."""

import os
import shutil
import signal
import subprocess
import time

import pod_programs as programs
import pytest

from meshpar._src.pods.watch import Calls, Judge

TIMEOUT = 3.0


def test_an_exception_ends_all(pods):
    end = pods.run(2, programs.go_wrong, "raise", 1, timeout=TIMEOUT)
    assert end.codes == [1, 1], end.texts
    assert "RuntimeError: no such luck" in end.texts[1]
    assert "process 0 ends because of process 1: RuntimeError: no such luck" in end.texts[0]


@pytest.mark.parametrize(
    ("odd", "says"), [(1, "process 1 is lost: no sign of life"), (0, "process 0, the coordinator at")]
)
def test_a_lost_process_ends_the_others(pods, odd, says):
    group = pods.start(2, programs.go_wrong, "SIGSTOP", odd, timeout=TIMEOUT)
    group.wait_for("at step 3", odd)
    group.signalled = time.monotonic()
    end = group.end(without=(odd,))
    assert end.codes[odd] == -signal.SIGKILL, end.texts
    assert end.codes[1 - odd] == 75
    assert says in end.texts[1 - odd]
    assert end.after_signal <= TIMEOUT + 2, end.texts


def test_a_killed_coordinator_ends_the_others(pods):
    group = pods.start(2, programs.go_wrong, "SIGKILL", 0, timeout=TIMEOUT)
    end = group.end()  # JAX itself ends them, before the watch can speak; the launcher says the cause
    assert end.codes[0] == -signal.SIGKILL
    assert end.codes[1] != 0


@pytest.fixture
def cable():
    """Two networks with a cable between them: (their names, the address of the first, a function that pulls the cable)."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs `ip netns`, and the right to use it")
    names = [f"meshpar-{os.getpid()}-{k}" for k in range(2)]
    ends = [f"mp{os.getpid() % 100000}{k}" for k in "ab"]

    def ip(*words: str) -> int:
        return subprocess.run(["ip", *words], capture_output=True).returncode

    try:
        link = "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]
        if any(ip("netns", "add", name) for name in names) or ip(*link):
            pytest.skip("`ip netns` does not work here")
        for k, (name, end) in enumerate(zip(names, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.7.{k + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names, "10.213.7.1", lambda: ip("-n", names[1], "link", "set", ends[1], "down")
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
def test_one_that_is_cut_off_the_network(pods, cable):
    networks, address, pull = cable
    env = {"MESHPAR_COORDINATOR": f"{address}:12321"}
    group = pods.start(2, programs.wait_here, timeout=TIMEOUT, networks=networks, env=env)
    for p in range(2):
        group.wait_for("here", p)
    time.sleep(1.5)
    pull()
    group.signalled = time.monotonic()
    end = group.end()
    assert end.codes == [75, 75], end.texts
    assert "process 1 is lost: no sign of life" in end.texts[0]
    assert "process 0, the coordinator at 10.213.7.1:12321, has not answered" in end.texts[1]
    assert end.after_signal <= TIMEOUT + 2


@pytest.mark.slow
def test_one_that_does_not_call_is_stuck(pods):
    end = pods.run(2, programs.go_wrong, "sleep", 1, timeout=TIMEOUT, stuck=8.0)
    assert end.codes == [75, 75], end.texts
    assert "process 1 is stuck: it is alive, but has not gone on from call 3 of `train_step`" in end.texts[1]
    assert "process 0 waits in call 4 of `train_step`" in end.texts[1]


def test_one_that_ends_early(pods):
    end = pods.run(2, programs.go_wrong, "exit", 1, timeout=TIMEOUT)
    assert end.codes == [1, 1], end.texts
    assert "process 1 ended its script after call 3 of `train_step`" in end.texts[0] + end.texts[1]


def test_of_two_processes_the_one_that_skips_a_call_is_named(pods):
    end = pods.run(2, programs.go_wrong, "skip", 0, timeout=TIMEOUT)
    assert end.codes == [1, 1], end.texts
    text = "in call 4 of `train_step` process 0 has other values of `x` than process 1: process 0 skipped a call"
    assert text in end.texts[0] + end.texts[1]


def beats(*calls: Calls, over: tuple[int, ...] = ()):
    return {
        p: {"beat": 1, "count": c.count, "calls": [[k, *v] for k, v in c.recent.items()], "over": p in over}
        for p, c in enumerate(calls)
    }


def steps(*values: dict[str, int]) -> Calls:
    calls = Calls()
    for each in values:
        calls.note("step", each)
    return calls


def test_calls_in_another_order():
    def order(count: int, odd: int):
        a, b = Calls(), Calls()
        for n in range(count):
            a.note("step" if n != odd else "evaluate", {})
            b.note("step", {})
        return Judge(2, 5, 5).order(beats(a, b))

    long_past = order(100, 50)
    assert "call 1 of `evaluate` where process 1 is in call 51" not in str(long_past)
    cause = order(10, 8)
    assert cause is not None
    assert (cause.process, cause.kind, cause.status) == (1, "order", 1)
    assert "process 1 is in call 9 of `step` where process 0 is in call 1 of `evaluate`" in cause.text


@pytest.mark.parametrize(("odd", "what"), [(0, "order"), (1, "values"), (2, "values"), (3, "order")])
def test_the_process_that_skips_a_call_is_blamed(odd, what):
    each = [Calls() for _ in range(4)]
    for p, calls in enumerate(each):
        for n in range(10):
            if p != odd or n != 4:
                function = "evaluate" if what == "order" and n % 5 == 4 else "step"
                calls.note(function, {"n": n if what == "values" else 0})
    cause = Judge(4, 5, 5).order(beats(*each))
    assert cause is not None
    assert (cause.process, cause.kind) == (odd, what)


@pytest.mark.parametrize("odd", range(2))
@pytest.mark.parametrize("what", ["order", "values"])
def test_of_two_processes_the_next_calls_tell_which_one_skipped(odd, what):
    """Process 0 evaluates after every fourth step; until the other process has made its next call, the cause is undecided."""
    each = [Calls(), Calls()]
    for n in range(10):
        for p, calls in enumerate(each):
            if p != odd or n != 4:
                function = "evaluate" if what == "order" and n % 5 == 4 else "step"
                calls.note(function, {"n": n if what == "values" else 0})
        cause = Judge(2, 5, 5).order(beats(*each))
        if each[odd].count < 5:
            assert cause is None
            continue
        assert cause is not None
        assert (cause.process, cause.kind) == (odd, what)
        assert f"process {odd} skipped a call" in cause.text
    a, b = (steps(*({"n": sign * n} for n in range(3))) for sign in (1, -1))
    undecided = Judge(2, 5, 5).order(beats(a, b))
    assert undecided is not None
    assert "process 1 or process 0 is wrong, which of them is undecided" in undecided.text


def test_one_that_is_only_ahead_is_no_cause():
    a, b = steps({"x": 1}, {"x": 1}, {"x": 1}, {"x": 2}), steps(*[{"x": 1}] * 3)
    judge = Judge(2, 5.0, 5.0)
    assert judge.verdict(beats(a, b), 0.0) is None
    assert judge.verdict(beats(a, b), 4.9) is None
    late = judge.verdict(beats(a, b), 5.1)
    assert late is not None  # the beats did not change
    assert late.kind == "lost"

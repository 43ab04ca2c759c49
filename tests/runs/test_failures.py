"""The time of a job with failures, against Young's and Daly's formulas and against runs that are replayed event by event."""

import math

import numpy as np
import pytest

from meshpar._src.runs import RunOptions
from meshpar._src.runs.failures import Job, best_work

MTBF = 6 * 3600.0
JOB = Job(step=4.0, steps=200_000, mtbf=MTBF, save=10.0, write=120.0, restart=700.0, start=60.0)


def daly(save, mtbf):
    """The optimum of Daly (2006), equation 37."""
    x = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save


def replay(job, every, times):
    """Seconds of a job whose failures come at these times, step by step and event by event."""
    failures = iter(times)
    now, safe, at = 0.0, 0, next(failures)
    before = job.start
    while True:
        now, done, written, fails = now + before, safe, [], False  # written: (time when complete, step)
        before = job.restart
        if at <= now:
            fails = True
        while not fails and done < job.steps:
            now += job.step
            done += 1
            if done % every == 0 or done == job.steps:
                now += job.save
                written.append((now + job.write, done))
            fails = at < now
        if not fails and at >= written[-1][0]:
            return written[-1][0]
        safe = max([safe, *(step for complete, step in written if complete <= at)])
        now, at = at, next(failures)


def traces(shape):
    """Ten traces of failures with gaps of a Weibull distribution of this shape and the mean of the job."""
    for seed in range(10):
        gaps = np.random.default_rng([seed, 7]).weibull(shape, 4000)
        yield np.cumsum(MTBF / math.gamma(1 + 1 / shape) * gaps)


@pytest.mark.parametrize(("save", "mtbf"), [(1, 86400), (10, 20000), (60, 86400), (120, 7200)])
def test_the_interval_of_young_and_daly(save, mtbf):
    work = best_work(save, mtbf)
    assert work == pytest.approx(daly(save, mtbf), rel=0.002)
    if save / mtbf < 1e-4:  # where Young's first order applies
        assert work == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.02)
    job = Job(step=1.0, steps=10**7, mtbf=mtbf, save=save, write=0.0, restart=300.0)
    assert job.best_interval() == pytest.approx(daly(save, mtbf), rel=0.02)


def test_the_interval_has_the_least_expected_time():
    best = JOB.best_interval()
    others = (JOB.expected(n) for n in range(1, 2000) if n != best)
    assert JOB.expected(best) < min(others)


def test_the_interval_is_no_shorter_than_a_write_and_no_longer_than_the_job():
    slow = Job(step=4.0, steps=200_000, mtbf=MTBF, save=1.0, write=3601.0, restart=1.0)
    assert slow.best_interval() == 900
    assert Job(step=4.0, steps=5, mtbf=1e9, save=10.0, write=1.0, restart=1.0).best_interval() == 5


@pytest.mark.parametrize("shape", [1.0, 0.8])
def test_the_time_of_replayed_failures(shape):
    """Twenty replayed traces: exponential gaps, and Weibull gaps, which come in bursts as in the logs of clusters."""
    every = JOB.best_interval()
    median = np.median(JOB.simulate(every, 1000).seconds)
    replayed = [replay(JOB, every, times) for times in traces(shape)]
    np.testing.assert_allclose(replayed, median, rtol=0.05)


@pytest.mark.parametrize("job", [JOB, Job(7.0, 30_001, 3600.0, 20.0, 100.0, 900.0, 30.0)])
def test_the_expected_time_is_the_mean_of_simulated_runs(job):
    for every in (job.best_interval(), 3 * job.best_interval()):
        out = job.simulate(every, 2000)
        assert np.mean(out.seconds) == pytest.approx(job.expected(every), rel=0.01)
        assert (out.seconds >= job.step * job.steps + out.saving + out.restarting - 1e-6).all()


def test_a_simulated_run_is_the_replayed_one(monkeypatch):
    """The same failures in both."""
    job = Job(7.0, 3001, 3600.0, 20.0, 100.0, 900.0, 30.0)
    gaps = np.random.default_rng(3).exponential(job.mtbf, 2000)
    served = iter(gaps)

    class Random:
        def exponential(self, mean, size):
            return np.full(size, next(served))

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Random())
    for every in (40, 3001, 7):
        served = iter(gaps)
        (seconds,) = job.simulate(every, 1).seconds
        assert seconds == pytest.approx(replay(job, every, np.cumsum(gaps)), rel=1e-9)


def test_without_failures():
    job = Job(2.0, 1001, 1e12, 3.0, 5.0, 100.0, 60.0)
    out = job.simulate(100, 3)
    np.testing.assert_allclose(out.seconds, 60 + 2002 + 11 * 3 + 5)
    np.testing.assert_allclose(out.saving, 33)
    np.testing.assert_allclose(out.restarting, 60)
    assert not out.failures.any()


def test_a_job_that_never_ends():
    assert Job(1.0, 100, 1.0, 1.0, 1.0, 2000.0).expected(10) == math.inf


def test_the_goodput_of_a_published_run():
    """Llama 3 405B on 16,384 GPUs: 419 interruptions in 54 days, more than 90 % effective training time (Dubey et al. 2024)."""
    days, size = 54 * 86400.0, 405e9 * 14  # bfloat16 weights and three float32 arrays of the optimizer
    options = RunOptions()
    save, disk = size / 16384 / 5.5e10, size / (16384 * options.bandwidth)
    again = options.restart + options.compile_time + disk
    job = Job(5.0, int(0.93 * days / 5), days / 419, save, disk, again, options.compile_time)
    out = job.simulate(job.best_interval(), 200)
    assert np.median(out.failures) == pytest.approx(419, rel=0.1)
    assert 0.9 < np.median(job.step * job.steps / out.seconds) == pytest.approx(0.94, abs=0.005)
    assert RunOptions().mtbf == pytest.approx(days * 16384 / 419, rel=0.05)

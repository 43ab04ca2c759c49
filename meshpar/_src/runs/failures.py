"""The time of a job whose chips fail: its expectation, the save interval that minimises it, and simulated runs.

The model is from Young (A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974) and Daly (A higher
order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006): failures are a Poisson process, and each one
returns the job to its last complete checkpoint. A checkpoint blocks the job while it is copied to host memory, and is complete when
it has been written in the background; Young's and Daly's jobs are those with ``write=0``.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np

KEPT = 2
"""Complete copies in memory that remain when a process begins to write another one. Then all processes have begun the one before,
so that they have completed the second last; the last one may be incomplete in some."""


def best_work(save: float, mtbf: float) -> float:
    """The seconds of work between two saves that minimise the expected time of a job.

    It is the root τ of ``(1 − τ/M) e^((τ+δ)/M) = 1`` with δ = ``save`` and M = ``mtbf``, where the derivative of Daly's expected
    time is 0. Young's ``sqrt(2 δ M)`` is its first term for small δ/M, and Daly's (2006) optimum a series of it.

    Args:
      save: seconds for which a save blocks the job.
      mtbf: mean seconds between failures of the job.

    Example:
      >>> round(best_work(60.0, 86400.0)), round((2 * 60 * 86400) ** 0.5)
      (3180, 3220)
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log1p(-middle) + middle + save / mtbf > 0 else (low, middle)
    return low * mtbf


@dataclass(frozen=True, slots=True)
class Outcome:
    """Simulated runs of a job: an array each, with an entry for each run.

    Attributes:
      seconds: from the start of the job to its last complete checkpoint.
      failures: their number.
      restarting: seconds of the start and of restarts.
      saving: seconds for which saves blocked the job.
    """

    seconds: np.ndarray
    failures: np.ndarray
    restarting: np.ndarray
    saving: np.ndarray


@dataclass(frozen=True, slots=True)
class Job:
    """A job of equal steps that saves every few steps, and restarts from its last complete checkpoint.

    Attributes:
      step: seconds of a step.
      steps: their number.
      mtbf: mean seconds between failures of the job, of which any chip can be the cause.
      save: seconds for which a save blocks the job.
      write: seconds from then until the checkpoint is complete, during which the job runs; the next save is not earlier.
      restart: seconds from a failure to the first step after it; a failure during them starts them again.
      start: seconds before the first step of the job.
    """

    step: float
    steps: int
    mtbf: float
    save: float
    write: float
    restart: float
    start: float = 0.0

    def expected(self, every: float) -> float:
        """The expected seconds of the job with a save after every ``every`` steps; infinite where they exceed all floats.

        Daly's equation ``M e^(R/M) (e^((τ+δ)/M) − 1) T/τ``. With a write of W seconds in the background the restart R becomes
        R + W: when a checkpoint is complete, W seconds of the work for the next one are done already.
        """
        period = every * self.step + self.save
        try:
            each = self.mtbf * math.exp((self.restart + self.write) / self.mtbf) * math.expm1(period / self.mtbf)
        except OverflowError:
            return math.inf
        return self.start + each * self.steps / every

    def best_interval(self) -> int:
        """The number of steps between saves with the least expected time; at least as long as a write."""
        work = best_work(self.save, self.mtbf) / self.step
        least = max(1, math.ceil((self.write - self.save) / self.step))
        choices = {min(max(least, n), self.steps) for n in (math.floor(work), math.ceil(work))}
        return min(choices, key=lambda every: (self.expected(every), every))

    def longest_interval(self, more: float) -> int:
        """The largest number of steps between saves whose expected time is at most ``1 + more`` times the least."""
        best = self.best_interval()
        most = (1 + more) * self.expected(best)
        return best - 1 + bisect.bisect(range(best, self.steps + 1), most, key=self.expected)

    def simulate(self, every: int, runs: int, seed: int = 0) -> Outcome:
        """Run the job ``runs`` times with random failures.

        Args:
          every: steps between saves; the last step is saved as well.
          runs: their number; all advance together, from failure to failure.
          seed: of the times of failures, which are exponentially distributed.
        """
        random, period = np.random.default_rng(seed), every * self.step + self.save
        safe, seconds, failures, restarting, saving = np.zeros((5, runs))  # safe: steps in the last complete checkpoint
        before, active = np.full(runs, self.start), np.ones(runs, bool)
        while active.any():
            gap = np.where(active, random.exponential(self.mtbf, runs), 0.0)
            left = self.steps - safe
            saves = np.ceil(left / every)
            needed = before + left * self.step + saves * self.save + self.write
            ends, worked = gap >= needed, gap - before
            fails = active & ~ends
            seconds += np.where(fails, gap, np.where(active, needed, 0.0))
            restarting += np.where(active, np.minimum(gap, before), 0.0)
            begun, blocked = np.divmod(np.maximum(worked, 0.0), period)
            blocked = begun * self.save + np.maximum(0.0, blocked - every * self.step)
            saving += np.where(active, np.where(ends, saves * self.save, blocked), 0.0)
            safe += np.where(fails, every * np.floor(np.maximum(0.0, worked - self.write) / period), 0.0)
            failures += fails
            active, before = fails, np.full(runs, self.restart)
        return Outcome(seconds, failures, restarting, saving)

"""Training runs: days, cost, goodput and save interval by the plan, with failures of chips; the measured goodput of a run.

.. code-block:: text

    run_plan  the forecast of a run on one or several topologies
    failures  the time of a job whose chips fail: expectation, save interval, simulation
    goodput   how a run spent its time
"""

from .goodput import Goodput
from .run_plan import RunOptions, RunPlan, RunRow, run_plan_of

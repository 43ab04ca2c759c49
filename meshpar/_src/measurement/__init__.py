"""Measures layouts on attached devices, and fits the chip's efficiencies to the measured seconds.

.. code-block:: text

    calibrate  measures layouts in interleaved rounds
    agreement  results of the layouts are compared before they are measured
    fit        efficiencies that fit the measured seconds
    result     measured layouts, best first, and the efficiencies
"""

from .agreement import Candidate
from .calibrate import calibrate, request_as_measured
from .fit import Fit, fit
from .result import CalibrationResult, CalibrationRow

"""Measures layouts on attached devices, and fits the chip's efficiencies to the measured seconds.

.. code-block:: text

    calibrate  compares the results of layouts, and measures them in interleaved rounds
    fit        efficiencies that fit the measured seconds
    result     measured layouts, best first, and the efficiencies
"""

from .calibrate import Candidate, calibrate, request_as_measured
from .fit import Fit, fit
from .result import CalibrationResult, CalibrationRow

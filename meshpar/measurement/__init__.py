"""Layouts measured on the devices at hand, and the chip's efficiencies fitted to what was measured."""

from .fit import Fit, fit
from .measure import Candidate, calibrate
from .result import CalibrationResult, CalibrationRow

__all__ = ["CalibrationResult", "CalibrationRow", "Candidate", "Fit", "calibrate", "fit"]

"""Measures layouts on attached devices, and fits the chip's efficiencies to the measured seconds."""

from .agreement import Candidate
from .calibrate import calibrate, request_as_measured
from .fit import Fit, fit
from .result import CalibrationResult, CalibrationRow

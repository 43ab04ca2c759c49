"""Measures layouts on attached devices, and fits the chip's efficiencies to the measured seconds."""

from .fit import Fit, fit
from .measure import Candidate, calibrate
from .result import CalibrationResult, CalibrationRow

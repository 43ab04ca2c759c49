"""Layouts measured on the devices at hand, and the chip's efficiencies fitted to what was measured."""

from .answer import TunedRow, Tuning
from .fit import Fit, fit
from .measure import Candidate, tune

__all__ = ["Candidate", "Fit", "TunedRow", "Tuning", "fit", "tune"]

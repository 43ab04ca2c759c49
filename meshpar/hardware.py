"""Measurements of the attached devices, for plans."""

from ._src.entry.api import calibrate

__all__ = ["calibrate"]

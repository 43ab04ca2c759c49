"""Measurements of a training loop, written to logging libraries."""

from ._src.meter import Meter, MlLog

__all__ = ["Meter", "MlLog"]

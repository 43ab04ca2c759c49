"""Plan → a function that runs."""

from .constraints import lower_to_jit

__all__ = ["lower_to_jit"]

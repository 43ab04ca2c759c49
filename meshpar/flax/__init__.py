"""Linen and NNX: names in, modules as arguments."""

from .metadata import Leaf, capture_names, flatten_named

__all__ = ["Leaf", "capture_names", "flatten_named"]

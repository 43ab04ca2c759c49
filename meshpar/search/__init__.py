"""The best layout of a program on a slice."""

from .answer import Objective, Search
from .descent import search
from .row import Row

__all__ = ["Objective", "Row", "Search", "search"]

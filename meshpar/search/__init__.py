"""The best layout of a program on a slice."""

from .answer import Objective, Row, Search
from .descent import search

__all__ = ["Objective", "Row", "Search", "search"]

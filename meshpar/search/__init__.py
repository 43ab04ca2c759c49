"""The best layout of a program on a slice."""

from .descent import Objective, Row, Search, search, told

__all__ = ["Objective", "Row", "Search", "search", "told"]

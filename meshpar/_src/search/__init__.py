"""The best layout of a program on a slice."""

from .descent import search
from .policy import SearchPolicy
from .result import Search
from .row import Objective, Row

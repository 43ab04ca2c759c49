"""The best layout of a program on a slice."""

from .descent import search
from .options import SearchKeywords, SearchOptions
from .result import Search
from .row import Row

"""The best layout of a program on a slice.

.. code-block:: text

    descent          mp.search: schemes, then coordinate descent
    evaluation       plans candidates that may be better
    bounds           lower bounds without planning
    space            the candidates
    pipeline_stages  candidates with pipelines
    selection        which of the evaluated candidates are shown
    result           the result, and why a layout is not the best
    picture          time against memory
    row              one planned candidate
    options          the options of mp.search
    thresholds       thresholds and limits
"""

from .descent import search
from .options import SearchKeywords, SearchOptions
from .result import Search
from .row import Row

"""Reports of plans: text for the terminal, pages, notebook cells, comparisons, the steps as a program.

.. code-block:: text

    document              the class of all reports: text, HTML, a file
    plan_terminal_text    a plan in the terminal
    plan_html_page        a plan as a page or a notebook cell
    diff                  two plans compared
    data                  a plan as JSON
    timeline              the schedule of a step as spans, for pages and trace viewers
    sections              the parts that text and page share
    pipeline              the part about pipelines
    layer                 the part about one layer, as a drawing
    shards                the part about how arguments are sharded, as a drawing
    torus                 the part about mesh axes on the chips of slices, and bytes on links
    hints                 changes that would save memory or bytes
    facts                 groups of arguments and collectives, effects of rules
    inferred_names_table  the table of inferred names
    tables                tables for terminals and pages
    colours               colours of mesh axes and of kinds of memory; dims, axes and meshes as coloured cells
"""

from .data import calibration_rates, plan_json
from .diff import PlanDiff
from .document import Document, shown_text
from .facts import arrivals_text
from .plan_html_page import plan_cell, plan_page
from .plan_terminal_text import plan_line, plan_renderable
from .shards import shards_renderable
from .timeline import trace_json

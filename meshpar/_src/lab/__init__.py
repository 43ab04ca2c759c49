"""An interactive page on which rules and meshes are edited and the plan updates.

.. code-block:: text

    lab      what Python has: the plan that the page shows, a server, a widget for notebooks
    session  drafts of layouts in, plans as JSON out
    view     a plan as JSON for the page
    jobs     searches and compilations in the background
    server   the page in a browser of this machine
"""

from .lab import Lab

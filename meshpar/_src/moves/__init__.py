"""Moves of trees between layouts and meshes: planned, costed, and run in rounds that bound the memory.

.. code-block:: text

    plan                     routes, bytes, seconds, rounds and the peak
    route                    how one array moves: collectives if its devices stay, else permutes
    factored                 two meshes of the same devices as one mesh of prime axes
    target_paths_and_dtypes  paths and dtypes at the target: `rename`, `dtype`
    run                      the programs of the rounds
    move, report             the result of `mp.move`; its text and page
"""

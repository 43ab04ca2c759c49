"""Chips, slices and how long a collective takes on them; nothing here knows programs or plans.

.. code-block:: text

    chips                  FLOP/s, memory, links and slices of every chip
    topology               slices by name, their devices, and the torus dimensions of each mesh axis
    collective_ops         the kinds of collectives, and the bytes that each device sends
    collective_algorithms  a collective over several stages of a slice, as collectives over fewer
    collective_time        seconds of a collective on the links of a slice and between slices
    compiler_constants     measured constants of a compiler, one table for each version
    compiler_options       options of the TPU compiler that a plan sets
    calibration            measured efficiencies of devices, in files
"""

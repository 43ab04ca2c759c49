"""Collectives over the axes of a torus: one table, several backends, one choice by cost.

.. code-block:: text

    api                                               the public functions: checks, choice of algorithm, gradients
    choose                                            the fastest algorithm by latency, bytes per link and copies
    schedule_table                                    schedules: which rank sends which slot to which rank in which step
    run_by_ppermute, ring_tpu                         run a table: in JAX; in a TPU kernel
    coded                                             collectives of 8-bit codes with block scales, on arrays of one device
    native                                            XLA's own collectives, over axes in any order
    tpu_one_shot_all_reduce, gpu_one_shot_all_reduce  one-shot all-reduce kernels
    gpu_nvls_gather_and_scatter                       all-gather and reduce-scatter in the NVLink switch
"""

from meshpar_kernels.collectives.api import all_gather as all_gather
from meshpar_kernels.collectives.api import all_reduce as all_reduce
from meshpar_kernels.collectives.api import all_reduce_small as all_reduce_small
from meshpar_kernels.collectives.api import reduce_scatter as reduce_scatter
from meshpar_kernels.collectives.choose import Axis as Axis
from meshpar_kernels.collectives.choose import Choice as Choice
from meshpar_kernels.collectives.choose import choose as choose
from meshpar_kernels.collectives.native import scatter_in_order as scatter_in_order

"""Dense exchanges between devices, of blocks with all devices and of an array with one; and collectives of quantized arrays.

.. code-block:: text

    dense      all-to-all and collective-permute: checks, choice of implementation, gradients
    tpu, gpu   their kernels
    quantized  all-gather, reduce-scatter and all-to-all of 8-bit codes with block scales
"""

from meshpar_kernels.exchange.dense import all_to_all as all_to_all
from meshpar_kernels.exchange.dense import collective_permute as collective_permute
from meshpar_kernels.exchange.quantized import quantized_all_gather as quantized_all_gather
from meshpar_kernels.exchange.quantized import quantized_all_to_all as quantized_all_to_all
from meshpar_kernels.exchange.quantized import quantized_reduce_scatter as quantized_reduce_scatter

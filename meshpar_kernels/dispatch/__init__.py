"""Exchange of tokens with the devices of their experts, and the ragged all-to-all that it uses.

.. code-block:: text

    api             the public functions, on the arrays of one device
    plan            the row of each choice in a buffer
    runs            offsets and sizes of the rows that devices send each other
    rows            copies rows into a buffer, and sums them back
    tpu, gpu        the ragged all-to-all as a kernel
    differentiable  gradients of the kernels
    reference       definitions for tests
"""

from meshpar_kernels.dispatch.api import expert_combine as expert_combine
from meshpar_kernels.dispatch.api import expert_dispatch as expert_dispatch
from meshpar_kernels.dispatch.api import ragged_all_to_all as ragged_all_to_all
from meshpar_kernels.dispatch.plan import Dispatch as Dispatch

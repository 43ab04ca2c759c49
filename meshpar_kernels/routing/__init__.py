"""Routing tokens to experts: `route` decides, `permute` copies rows to the experts, `combine` adds
them back.

.. code-block:: text

    api              the public functions: checks, choice of implementation, gradients
    plan             `RoutePlan`: experts of tokens, and rows of choices
    tpu, tpu_gather  TPU kernels: choice of experts; rows gathered and summed
    gpu, gpu_rows    GPU kernels: Triton; Mosaic GPU for Hopper and newer
    reference        the definition, and the implementation where no kernel runs
"""

from meshpar_kernels.routing.api import combine as combine
from meshpar_kernels.routing.api import permute as permute
from meshpar_kernels.routing.api import route as route
from meshpar_kernels.routing.plan import RoutePlan as RoutePlan

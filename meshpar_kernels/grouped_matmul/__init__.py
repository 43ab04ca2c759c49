"""Matmuls of ragged groups of rows, each with a matrix of its own, as in a mixture of experts.

.. code-block:: text

    api                               `grouped_matmul` and its transpose with respect to the weights: checks of arguments
    scaled                            8-bit operands with block scales: public functions, quantization, gradients
    problem                           operands (arrays) and options of one matmul: the argument of every implementation
    choose_implementation             one matmul without gradient: choice of implementation and tile
    gradients                         the gradient of each function by the other
    schedule                          the list of (row tile, group) pairs that kernels iterate over
    activations                       of the fused epilogue
    tpu, tpu_transpose                TPU kernels
    tpu_tile_sizes                    their tiles
    tpu_tile_matmul                   the `dot_general`s of a tile
    gpu                               GPUs: choice of kernel and tile
    hopper, hopper_scaled, blackwell  GPU kernels
    gpu_launch, gpu_common            their launches; tile sizes and loops over tiles
    tokamax_dot                       by the library tokamax
    xla_tile_loop                     a loop over the tile steps of `schedule`, for any backend
    reference                         the definition
    tuner                             tiles and stages by measurements
"""

from meshpar_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from meshpar_kernels.grouped_matmul.api import grouped_matmul_transpose as grouped_matmul_transpose
from meshpar_kernels.grouped_matmul.api import warn_about_group_sizes as warn_about_group_sizes
from meshpar_kernels.grouped_matmul.scaled import quantized_grouped_matmul as quantized_grouped_matmul
from meshpar_kernels.grouped_matmul.scaled import scaled_grouped_matmul as scaled_grouped_matmul

"""Matmuls of ragged groups of rows, each with a matrix of its own, as in a mixture of experts."""

from meshpar_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from meshpar_kernels.grouped_matmul.api import grouped_matmul_transpose as grouped_matmul_transpose
from meshpar_kernels.grouped_matmul.api import warn_about_group_sizes as warn_about_group_sizes
from meshpar_kernels.grouped_matmul.scaled import quantized_grouped_matmul as quantized_grouped_matmul
from meshpar_kernels.grouped_matmul.scaled import scaled_grouped_matmul as scaled_grouped_matmul

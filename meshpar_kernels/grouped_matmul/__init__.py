"""Matrix products of ragged groups of rows, each with its own matrix: the arithmetic of a mixture
of experts."""

from meshpar_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from meshpar_kernels.grouped_matmul.api import grouped_matmul_transpose as grouped_matmul_transpose

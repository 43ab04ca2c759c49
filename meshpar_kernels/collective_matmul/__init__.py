"""Matmuls fused with the all-gather of an operand, or with the reduce-scatter of the result.

Status of the kernels of one launch (modules `tpu*`, `gpu*` and `fused`): opt-in by name until they are timed on hardware.
"""

from meshpar_kernels._compat import interpreting as interpreting
from meshpar_kernels.collective_matmul.api import all_gather_matmul as all_gather_matmul
from meshpar_kernels.collective_matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
from meshpar_kernels.collective_matmul.dots import Dot as Dot
from meshpar_kernels.collective_matmul.fused import FusedGather as FusedGather
from meshpar_kernels.collective_matmul.fused import FusedScatter as FusedScatter
from meshpar_kernels.collective_matmul.ring import dot_scatter as dot_scatter
from meshpar_kernels.collective_matmul.ring import dots_scatter as dots_scatter
from meshpar_kernels.collective_matmul.ring import gather_dots as gather_dots
from meshpar_kernels.collective_matmul.schedule import gather_hops as gather_hops

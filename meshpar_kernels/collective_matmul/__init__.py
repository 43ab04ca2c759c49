"""Matmuls fused with the all-gather of an operand, or with the reduce-scatter of the result.

Status of the kernels of one launch (modules `tpu*`, `gpu*` and `fused`): opt-in by name until they are timed on hardware.

.. code-block:: text

    api                                  the public functions, on the arrays of one device
    dot_dims                             a `dot_general` by the dims along which its blocks are received or sent
    schedule                             which blocks a bidirectional ring sends in each ring step
    ring, xla                            in JAX: a ring of `ppermute`s, and XLA's own collectives
    tpu_fused_dot_general                TPU kernels for `dot_general`s of any rank
    tpu_common, tpu_gather, tpu_scatter  TPU kernels: shared parts; all-gather matmul; matmul reduce-scatter
    gpu                                  GPUs with NVLink: choice of kernel and tile
    gpu_kernels                          both GPU kernels, of an architecture that is an argument
    gpu_hopper, gpu_blackwell            the architectures: one tile is loaded, multiplied and stored
    gpu_order, gpu_peers                 order of tiles; copies to other GPUs and arrival semaphores
    reference                            definitions for tests
"""

from meshpar_kernels._compat import interpreting as interpreting
from meshpar_kernels.collective_matmul.api import all_gather_matmul as all_gather_matmul
from meshpar_kernels.collective_matmul.api import matmul_reduce_scatter as matmul_reduce_scatter
from meshpar_kernels.collective_matmul.dot_dims import Dot as Dot
from meshpar_kernels.collective_matmul.ring import dot_scatter as dot_scatter
from meshpar_kernels.collective_matmul.ring import dots_scatter as dots_scatter
from meshpar_kernels.collective_matmul.ring import gather_dots as gather_dots
from meshpar_kernels.collective_matmul.schedule import gather_hops as gather_hops
from meshpar_kernels.collective_matmul.tpu_fused_dot_general import FusedGather as FusedGather
from meshpar_kernels.collective_matmul.tpu_fused_dot_general import FusedScatter as FusedScatter

"""Pallas kernels for meshes and mixtures of experts, each with a plain `jax.numpy` reference that
runs on any platform.

The package needs only jax and numpy. Functions work on the arrays of one device (inside
`jax.shard_map`).
"""

from meshpar_kernels.attention import ContextParallel as ContextParallel
from meshpar_kernels.attention import attention_costs as attention_costs
from meshpar_kernels.attention import ring_attention as ring_attention
from meshpar_kernels.attention import unzigzag as unzigzag
from meshpar_kernels.attention import zigzag as zigzag
from meshpar_kernels.collective_matmul import all_gather_matmul as all_gather_matmul
from meshpar_kernels.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from meshpar_kernels.collectives import all_gather as all_gather
from meshpar_kernels.collectives import all_reduce as all_reduce
from meshpar_kernels.collectives import all_reduce_small as all_reduce_small
from meshpar_kernels.collectives import reduce_scatter as reduce_scatter
from meshpar_kernels.config import Config as Config
from meshpar_kernels.dispatch import Dispatch as Dispatch
from meshpar_kernels.dispatch import expert_combine as expert_combine
from meshpar_kernels.dispatch import expert_dispatch as expert_dispatch
from meshpar_kernels.dispatch import ragged_all_to_all as ragged_all_to_all
from meshpar_kernels.exchange import all_to_all as all_to_all
from meshpar_kernels.exchange import collective_permute as collective_permute
from meshpar_kernels.exchange import quantized_all_gather as quantized_all_gather
from meshpar_kernels.exchange import quantized_all_to_all as quantized_all_to_all
from meshpar_kernels.exchange import quantized_reduce_scatter as quantized_reduce_scatter
from meshpar_kernels.grouped_matmul import grouped_matmul as grouped_matmul
from meshpar_kernels.grouped_matmul import grouped_matmul_transpose as grouped_matmul_transpose
from meshpar_kernels.grouped_matmul import quantized_grouped_matmul as quantized_grouped_matmul
from meshpar_kernels.grouped_matmul import scaled_grouped_matmul as scaled_grouped_matmul
from meshpar_kernels.grouped_matmul import warn_about_group_sizes as warn_about_group_sizes
from meshpar_kernels.routing import RoutePlan as RoutePlan
from meshpar_kernels.routing import combine as combine
from meshpar_kernels.routing import permute as permute
from meshpar_kernels.routing import route as route

"""Attention over a sequence that is split over devices: ring, Ulysses, gathered K/V."""

from meshpar_kernels.attention.api import attention_costs as attention_costs
from meshpar_kernels.attention.api import ring_attention as ring_attention
from meshpar_kernels.attention.costs import AttentionCost as AttentionCost
from meshpar_kernels.attention.costs import AttentionCosts as AttentionCosts
from meshpar_kernels.attention.costs import Machine as Machine
from meshpar_kernels.attention.masks import unzigzag as unzigzag
from meshpar_kernels.attention.masks import zigzag as zigzag
from meshpar_kernels.attention.options import ContextParallel as ContextParallel

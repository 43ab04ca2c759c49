"""Attention over a sequence that is split over devices: ring, Ulysses, gathered K/V.

.. code-block:: text

    api                      the public function: checks, choice of strategy, gradients
    options                  the records of options and operands
    costs                    transfers, memory, FLOPs and seconds of each strategy, and the choice
    context                  shared by the strategies: axes of the sequence, positions, the attention on one device
    ring, ulysses, gathered  the strategies
    masks                    which keys a query sees; the zig-zag order of tokens
    library_calls_per_block  attention on one device by a library, for each block of visible keys
    splash, cudnn            attention on one device by the libraries of TPUs and of NVIDIA GPUs
    tpu                      attention on one device in Pallas kernels of this package, with positions
    flash                    attention on one device in plain JAX, chunk by chunk; partial results are merged here
    reference                the definition, and gradients by their formulas
"""

from meshpar_kernels.attention.api import attention_costs as attention_costs
from meshpar_kernels.attention.api import ring_attention as ring_attention
from meshpar_kernels.attention.costs import AttentionCost as AttentionCost
from meshpar_kernels.attention.costs import AttentionCosts as AttentionCosts
from meshpar_kernels.attention.costs import Machine as Machine
from meshpar_kernels.attention.masks import unzigzag as unzigzag
from meshpar_kernels.attention.masks import zigzag as zigzag
from meshpar_kernels.attention.options import ContextParallel as ContextParallel

"""Functions that a model calls: attention, cross entropy, mixtures of experts, quantized weights.

The experts as modules are ``meshpar.layers.nnx.MoE`` and ``meshpar.layers.linen.MoE``.
"""

from .._src.layers.attention import attention
from .._src.layers.loss import cross_entropy
from .._src.layers.moe import ROUTERS, MoEAux, Routing, moe, update_bias
from .._src.quantization import dequantize, quantize

__all__ = ["ROUTERS", "MoEAux", "Routing", "attention", "cross_entropy", "dequantize", "moe", "quantize", "update_bias"]

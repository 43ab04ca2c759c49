"""Functions that a model calls: attention, cross entropy, mixtures of experts, recurrences, quantized weights.

The experts as modules are ``meshpar.layers.nnx.MoE`` and ``meshpar.layers.linen.MoE``: these two are imported when they are used.
"""

import importlib
from types import ModuleType

from .._src.eight_bit_weights import dequantize, quantize
from .._src.layers.attention import attention
from .._src.layers.loss import cross_entropy
from .._src.layers.moe import ROUTERS, MoEAux, MoEExecution, Routing, moe, update_bias
from .._src.layers.recurrence import recurrence

__all__ = [
    "ROUTERS",
    "MoEAux",
    "MoEExecution",
    "Routing",
    "attention",
    "cross_entropy",
    "dequantize",
    "moe",
    "quantize",
    "recurrence",
    "update_bias",
]


def __getattr__(name: str) -> ModuleType:
    """The module ``nnx`` or ``linen``, each of which imports an API of Flax."""
    if name in ("nnx", "linen"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)

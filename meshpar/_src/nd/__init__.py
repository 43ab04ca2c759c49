"""Named arrays, as in Mesh-TensorFlow: every function addresses dims by name.

>>> from meshpar import nd
>>> hidden = nd.relu(nd.einsum(images, w1, out="batch hidden"))

.. code-block:: text

    named      the pytree, elementwise functions, errors
    ops        einsum, `reduce` and `along` for any function of an axis, reshapes, indexing, new arrays
    functions  reductions, functions along a dim and elementwise functions of JAX
    layers     dense, convolution, pooling, norm, attention, dropout, loss
"""

# ruff: noqa: F403, F405 (the names in `__all__`)
from .functions import *
from .layers import *
from .named import *
from .ops import *

__all__ = [
    "Named", "all", "along", "any", "arange", "argmax", "argmin", "attention", "concat", "conv", "cross_entropy",
    "cummax", "cumprod", "cumsum", "dense", "dropout", "einsum", "elementwise", "exp", "full", "gather", "gelu",
    "index", "layer_norm", "leaky_relu", "log", "log_softmax", "logsumexp", "max", "maximum", "mean", "merge",
    "min", "minimum", "named", "normal", "one_hot", "pad", "pool", "prod", "reduce", "relu", "rename", "reshape",
    "rsqrt", "shift", "sigmoid", "silu", "softmax", "sort", "split", "sqrt", "std", "sum", "tanh", "top_k",
    "transpose", "var", "where",
]  # fmt: skip

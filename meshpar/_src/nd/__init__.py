"""Named arrays, as in Mesh-TensorFlow: every function addresses dims by name.

>>> from meshpar import nd
>>> hidden = nd.relu(nd.einsum(images, w1, out="batch hidden"))
"""

# ruff: noqa: I001 (several names a line)
from .functions import (
    all, any, argmax, argmin, cummax, cumprod, cumsum, exp, gelu, leaky_relu, log, log_softmax, logsumexp, max,
    maximum, mean, min, minimum, prod, relu, rsqrt, sigmoid, silu, softmax, sort, sqrt, std, sum, tanh, var, where,
)  # fmt: skip
from .layers import (
    attention, conv, cross_entropy, dense, dropout, layer_norm, pool,
)  # fmt: skip
from .named import (
    Named, elementwise, named, rename,
)  # fmt: skip
from .ops import (
    along, arange, concat, einsum, full, gather, index, merge, normal, one_hot, pad, reduce, reshape, shift, split,
    top_k, transpose,
)  # fmt: skip

__all__ = [
    "Named", "all", "along", "any", "arange", "argmax", "argmin", "attention", "concat", "conv", "cross_entropy",
    "cummax", "cumprod", "cumsum", "dense", "dropout", "einsum", "elementwise", "exp", "full", "gather", "gelu",
    "index", "layer_norm", "leaky_relu", "log", "log_softmax", "logsumexp", "max", "maximum", "mean", "merge",
    "min", "minimum", "named", "normal", "one_hot", "pad", "pool", "prod", "reduce", "relu", "rename", "reshape",
    "rsqrt", "shift", "sigmoid", "silu", "softmax", "sort", "split", "sqrt", "std", "sum", "tanh", "top_k",
    "transpose", "var", "where",
]  # fmt: skip

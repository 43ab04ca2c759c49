"""Inputs that several tests of the kernels share."""

import jax.numpy as jnp
import numpy as np

from meshpar_kernels import RoutePlan, route

RNG = np.random.default_rng(0)

ROUTERS = {
    "mixtral": {"k": 2},
    "top1": {"k": 1, "renormalize": False},
    "deepseek-v2": {"k": 3, "groups": 4, "top_groups": 2, "group_top": 1, "renormalize": False, "scale": 4.0},
    "deepseek-v3": {
        "k": 4,
        "score": "sigmoid",
        "groups": 4,
        "top_groups": 2,
        "scale": 2.5,
        "bias": RNG.normal(size=16),
    },
    "capacity": {"k": 2, "capacity": 5},
    "all": {"k": 16, "score": "sigmoid"},
}


def odd_logits(tokens=40, experts=16):
    """Ordinary rows, and every kind of odd one."""
    logits = RNG.normal(size=(tokens, experts)).astype(np.float32)
    logits[3, 2] = np.nan
    logits[5] = -np.inf
    logits[7, 1:] = -np.inf
    logits[9] = 0.0
    logits[11, 4] = np.inf
    logits[13] = 1e30
    logits[15] = np.arange(experts) * 100.0
    logits[17, ::2] = logits[17, 1::2]
    return logits


def make(logits, k, bias=None, **options) -> RoutePlan:
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    return route(jnp.asarray(logits), k, bias=bias, **options)


def quantized(dtype, *shape):
    """Random weights of all sizes that int8 or float8_e4m3fn has."""
    return jnp.asarray(RNG.integers(-127, 128, shape) if dtype == jnp.int8 else 30 * RNG.normal(size=shape), dtype)


SIZES = {
    "uneven": [9, 0, 11, 14],
    "full": [10, 10, 10, 10],
    "one group": [0, 40, 0, 0],
    "none": [0, 0, 0, 0],
    "negative": [5, -7, 20, 3],
    "too many": [30, 30, 2**31 - 1, 4],
}
"""Group sizes for 40 rows of four groups."""

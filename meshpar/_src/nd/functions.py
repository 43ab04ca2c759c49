"""Reductions, functions along a dim and elementwise functions of JAX, for named arrays.

``nd.sum(x, "seq")`` is ``nd.reduce(jnp.sum, x, "seq")``; ``nd.softmax(x, "vocab")`` is ``nd.along(jax.nn.softmax, x, "vocab")``;
``nd.relu(x)`` is ``nd.elementwise(jax.nn.relu, x)``. Any other function of JAX with these arguments can be used in the same way.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .named import elementwise
from .ops import along, reduce

sum, mean, max, min, prod = (partial(reduce, fn) for fn in (jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.prod))
any, all, var, std = (partial(reduce, fn) for fn in (jnp.any, jnp.all, jnp.var, jnp.std))
argmax, argmin, logsumexp = (partial(reduce, fn) for fn in (jnp.argmax, jnp.argmin, jax.nn.logsumexp))

softmax, log_softmax = partial(along, jax.nn.softmax), partial(along, jax.nn.log_softmax)
cumsum, cumprod, cummax, sort = (partial(along, fn) for fn in (jnp.cumsum, jnp.cumprod, lax.cummax, jnp.sort))

exp, log, sqrt, rsqrt, tanh = (partial(elementwise, fn) for fn in (jnp.exp, jnp.log, jnp.sqrt, lax.rsqrt, jnp.tanh))
relu, gelu, silu, sigmoid, leaky_relu = (
    partial(elementwise, fn) for fn in (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.sigmoid, jax.nn.leaky_relu)
)
where, maximum, minimum = (partial(elementwise, fn) for fn in (jnp.where, jnp.maximum, jnp.minimum))

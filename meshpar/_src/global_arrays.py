"""Arrays of several processes: made of host values, and brought to every host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.dtype(object)), jax.dtypes.prng_key)


def data_of(x: Any) -> Any:
    """The array itself; of PRNG keys, their data."""
    return jax.random.key_data(x) if is_key(x) else x


def is_global(x: Any) -> bool:
    """Whether it is an array with parts on other processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def on_mesh(x: Any) -> bool:
    """Whether an array, or its shape, has a sharding over a mesh of devices."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)


def of_parts(shape: tuple[int, ...], sharding: Any, part: Callable[[tuple[slice, ...]], Any]) -> jax.Array:
    """An array made of host parts: ``part`` gives the one at an index, once for every index of this process's devices."""
    return jax.make_array_from_callback(shape, sharding, lambda index: part(index or ()))


def global_array(x: Any, sharding: Any) -> Any:
    """An argument as an array over the devices of several processes.

    A host array, or an array on the devices of one process, is the global value and is equal in every process; each process
    transfers the shards of its devices. Python numbers and uncommitted arrays are returned unchanged, since ``jax.jit`` treats
    them in the same way.
    """
    if isinstance(x, jax.Array):
        if is_global(x):
            return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)
        if not x.committed:
            return x
        if is_key(x):
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(data_of(x))), impl=jax.random.key_impl(x))
    elif not isinstance(x, np.ndarray) or x.ndim == 0:
        return x
    array = np.asarray(x)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    return of_parts(array.shape, sharding, lambda index: array[index])


def place(x: Any, sharding: Any, copy: bool = False) -> Any:
    """An array where a sharding says, on devices of this process or of several; arguments as for :func:`global_array`.

    Args:
      copy: the result shares no memory with ``x``, also where ``x`` has this sharding.
    """
    x = x if sharding.is_fully_addressable else global_array(x, sharding)
    return jax.device_put(x, sharding, may_alias=False if copy else None)


def _same(x: jax.Array) -> jax.Array:
    return x  # of the module, so that it is compiled once


def fetch(x: Any) -> np.ndarray:
    """The full array in host memory of every process; all processes must call it. Each process receives the bytes of the array.

    Example:
      >>> sharded = mp.data.put(np.arange(8), mesh=mesh, layout="batch: data")
      >>> mp.data.fetch(sharded)
      array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    if is_global(x) and not x.is_fully_replicated:
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        x = jax.jit(_same, out_shardings=everywhere)(x)
    if is_global(x):
        x = x.addressable_data(0)
    return np.asarray(x)

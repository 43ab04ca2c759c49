"""What is emitted otherwise than one would for the sake of a compiler; :mod:`meshpar.compat.quirks` has the thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def opaque(x: Any) -> Any:
    """An array of floats as it is, behind an optimization barrier through integers of the same width.

    Seen: libtpu 0.0.42: all of a stack that a loop rounds slice by slice is rounded before the loop, and both are held; casts and
    copies pass a plain barrier. Test: tests/lower/test_shard_map.py. Remove when a plain barrier is enough.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    (bits,) = lax.optimization_barrier([lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))])
    return lax.bitcast_convert_type(bits, x.dtype)


def gathered_apart(x: Any, axes: Sequence[str], dim: int) -> Any:
    """An all-gather into other memory than that of the result.

    Seen: libtpu 0.0.42: nothing is gathered into the memory of an argument; all of these arguments are copied when the program
    begins. Test: tests/lower/test_shard_map.py. Remove when it gathers in place.
    """
    pieces = lax.all_gather(x, tuple(axes), axis=0, tiled=False)
    y = jnp.moveaxis(pieces, 0, dim).reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return y if dim else opaque(y)  # there is nothing to move in front


def before_exchange(x: Any, cpu: bool) -> Any:
    """What is sent in an all-to-all or a permute.

    Seen: XLA's CPU compiler of jax 0.10.2: a slice of the program's own before an all-to-all is taken for one that the all-to-all
    cuts, and may lie otherwise. Test: tests/lower/test_collectives.py. Remove when the fuzzer finds nothing without it.
    """
    return lax.optimization_barrier([x])[0] if cpu else x

"""A function and its arguments → a closed jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..compat.jax import make_jaxpr


def trace(fn: Callable[..., Any], leaves: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """Trace a function of flat arguments.

    Args:
      fn: takes ``*leaves``, returns any tree.
      leaves: arrays, numbers or ``ShapeDtypeStruct``.

    Returns:
      (closed jaxpr, tree of results as ``ShapeDtypeStruct``, its flat leaves).
    """
    closed, shapes = make_jaxpr(fn, *leaves, return_shape=True)
    return closed, shapes, jax.tree.leaves(shapes)

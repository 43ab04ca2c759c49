"""``mp.infer_dims``: the names that meshpar would infer for the dims of a step's arguments, to be read, edited and pasted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..program import Program
from ..program.patterns import patterns_of
from .api import plan


def infer_dims(fn: Callable[..., Any], *args: Any, dims: Any = None, **keywords: Any) -> dict[str, str]:
    """Names for the dims of a step's arguments, from their uses in the step.

    The known schemes have the same names: ``batch``, ``seq``, ``vocab``, ``embed``, ``mlp``, ``heads``, ``kv_heads``,
    ``head_dim``, ``layers``, ``expert``, ``channels``, ``height``, ``width``, ``classes``, ``rank``. A step without ``dims=`` and
    without Flax metadata gets the same names, so this function is needed only to read or change them, and for the
    weights of :func:`meshpar.init`, which sees no use of them. A wrong name costs time, never a result.

    Args:
      fn: a function, e.g. a train step. It is traced, nothing is compiled.
      *args: its arguments; arrays or ``jax.ShapeDtypeStruct``.
      **keywords: its keyword arguments, and options of :func:`meshpar.jit`.
      dims: tree-path patterns → dims that are known, as in :func:`meshpar.jit`: these names win, and other dims are inferred.

    Returns:
      Tree-path patterns → dims, for ``dims=``: the shortest patterns that fit, ``dims`` first. Dims without evidence are ``_``.

    Example:
      >>> mp.infer_dims(train_step, params, x)
      {'*/down': 'mlp embed', '*/up': 'embed mlp', 'x': 'batch embed'}
    """
    patterns = _given(dims)
    return {**patterns, **patterns_of(named_program(fn, *args, dims=dims, **keywords))}


def _given(dims: Any) -> dict[str, Any]:
    """The patterns of ``dims=`` without ``"*": "auto"``."""
    pairs = () if dims is None or dims == "auto" else dims.items() if isinstance(dims, Mapping) else dims
    return {pattern: names for pattern, names in pairs if (pattern, names) != ("*", "auto")}


def named_program(fn: Callable[..., Any], *args: Any, dims: Any = None, **keywords: Any) -> Program:
    """The program of a step with inferred names for all dims that ``dims`` and metadata leave unnamed."""
    where = {"mesh": "data=1", "layout": "", "dims": [*_given(dims).items(), ("*", "auto")]}
    return plan(fn, *args, **where, **keywords).program.traced

"""``mp.infer_dims``: the names that meshpar would infer for the dims of a step's arguments, to be read, edited and pasted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..program.naming import patterns_of
from .api import plan


def infer_dims(fn: Callable[..., Any], *args: Any, dims: Any = None, **keywords: Any) -> dict[str, str]:
    """Names for the dims of a step's arguments, from what the step does with them.

    The names are those of the known schemes: ``batch``, ``seq``, ``vocab``, ``embed``, ``mlp``, ``heads``, ``kv_heads``,
    ``head_dim``, ``layers``, ``experts``, ``channels``, ``height``, ``width``, ``classes``, ``rank``. A step without ``dims=`` and
    without Flax metadata gets the same names, so this function is needed only to read or change them, and for :func:`meshpar.init`.
    A wrong name costs time, never a result.

    Args:
      fn: a function, e.g. a train step. It is traced, nothing is compiled.
      *args, **keywords: its arguments; arrays or ``jax.ShapeDtypeStruct``. Also options of :func:`meshpar.jit`.
      dims: tree-path patterns → dims that are known, as in :func:`meshpar.jit`: these names win, and other dims are inferred.

    Returns:
      Tree-path patterns → dims, for ``dims=``: the shortest patterns that fit, ``dims`` first. Dims without evidence are ``_``.

    Example:
      >>> mp.infer_dims(train_step, params, x)
      {'*/up': 'embed mlp', '*/down': 'mlp embed', 'x': 'batch embed'}
    """
    given = {} if dims is None or dims == "auto" else dict(dims.items() if isinstance(dims, Mapping) else dims)
    given.pop("*", None)
    known = plan(fn, *args, mesh="data=1", layout="", dims=[*given.items(), ("*", "auto")], **keywords)
    return {**given, **patterns_of(known.program.traced.inferred)}

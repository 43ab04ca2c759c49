"""The names of ``flax.nnx``, which is imported when one of them is first used: its import takes 0.15 s and loads IPython."""

from typing import Any


def __getattr__(name: str) -> Any:
    """An attribute of ``flax.nnx``; stored, so that this function is called once for each."""
    from flax import nnx

    value = globals()[name] = getattr(nnx, name)
    return value

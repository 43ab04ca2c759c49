"""What ``mp.Checkpoints`` needs of orbax, etils, tensorstore and Python that is not in their interfaces (orbax 0.12)."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  its thread pools end before functions that were registered earlier
import functools
import glob
import threading
from collections.abc import Callable
from typing import Any


def at_end_of_script(function: Callable[[], None]) -> None:
    """Have ``function`` called when the main thread ends, while thread pools can still be used.

    ``atexit`` calls after that: a checkpoint that is being written then fails.
    """
    threading._register_atexit(function)  # pyright: ignore[reportAttributeAccessIssue]


def late_json_handler() -> Any:
    """A ``JsonCheckpointHandler`` whose item is a function that returns the JSON value.

    All processes call the function, in a background thread; if it raises, the checkpoint is not committed.
    """
    import orbax.checkpoint as ocp

    handler = ocp.JsonCheckpointHandler()
    write = handler._save_fn

    async def call_and_write(x: Callable[[], Any], directory: Any) -> None:
        await write(x(), directory)

    handler._save_fn = call_and_write
    return handler


@functools.cache
def literal_folders() -> None:
    """Make ``glob`` of etils' paths treat the path itself as text, as ``pathlib`` does: only the argument is a pattern.

    orbax lists the files of a checkpoint by this method, and finds none below a folder such as ``runs/lr=[0.1]``.
    """
    from etils.epath import gpath

    def escaped(self: Any, pattern: str) -> Any:
        found = self._backend.glob(self._PATH.join(glob.escape(self._path_str), pattern))
        return (self._new(name) for name in found)

    gpath._GPath.glob = escaped


@functools.cache
def can_store(dtype: str) -> bool:
    """Whether tensorstore's zarr driver writes arrays of this dtype."""
    import tensorstore

    try:
        tensorstore.Spec({"driver": "zarr", "kvstore": {"driver": "memory"}, "dtype": dtype})
    except ValueError:
        return False
    return True

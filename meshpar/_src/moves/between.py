"""Arrays from one job to another, by ``jax.experimental.transfer``."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from ...errors import UnsupportedError


@functools.cache
def server(host: str) -> Any:
    """The transfer server of this process, at an address that other jobs reach.

    Raises:
      UnsupportedError: this JAX has none, or the job has several processes.
    """
    fixes = ["save a checkpoint (mp.Checkpoints), and restore it under the other layout"]
    try:
        transfer = importlib.import_module("jax.experimental.transfer")
    except ImportError:
        raise UnsupportedError("this JAX has no jax.experimental.transfer", fixes=fixes) from None
    if jax.process_count() > 1:
        raise UnsupportedError("arrays of several processes cannot be offered to another job", fixes=fixes)
    return transfer.start_transfer_server(jax.local_devices()[0].client, f"{host}:0", [f"{host}:0"])

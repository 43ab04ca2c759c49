"""Kernels broken on purpose, and whether the interpreter notices."""

import contextlib
import types

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def without(monkeypatch, method):
    """Remote copies whose `method` does nothing."""
    make = pltpu.make_async_remote_copy

    def broken(*args, **options):
        copy = make(*args, **options)
        methods = {name: getattr(copy, name) for name in ("start", "wait", "wait_send", "wait_recv")}
        return types.SimpleNamespace(**methods | {method: lambda: None})

    monkeypatch.setattr(pltpu, "make_async_remote_copy", broken)


def without_word(monkeypatch):
    """Senders that do not wait until a buffer is free again; the barrier's wait, of more than one, stays."""
    wait = pl.semaphore_wait
    monkeypatch.setattr(pl, "semaphore_wait", lambda sem, value=1, **o: wait(sem, value, **o) if value > 1 else None)


def caught(run, want) -> bool:
    """Whether `run()` races, or its result is wrong."""
    try:
        got = run()
    except Exception as error:
        if "race" not in str(error).lower():
            raise
        with contextlib.suppress(Exception):  # or the next program, and the end of the process, raise it again
            jax.effects_barrier()
        return True
    return not np.allclose(got, want, atol=1e-2)

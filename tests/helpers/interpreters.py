"""Pallas kernels in JAX's interpreters for TPUs and GPUs, with race detection."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import jax
from jax.experimental.pallas import tpu as pltpu

from meshpar_kernels import _compat

RACE = "the TPU interpreter found a race between two memory accesses"


def _races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpret

    return bool(interpret.races is not None and interpret.races.races_found)


@contextlib.contextmanager
def race_detection(
    *, dma_execution_mode: Literal["eager", "on_wait"] = "on_wait", random_seed: int | None = None
) -> Iterator[None]:
    """Context manager: run Pallas TPU kernels in the interpreter, and raise RuntimeError if two accesses race.

    Up to jax 0.11 the interpreter only prints a race and records it; from 0.12 on it raises. Block on the results
    inside the context: code that runs later is not checked.

    Args:
      dma_execution_mode: `"on_wait"` runs each copy as late as its semaphore allows, `"eager"` at its start.
      random_seed: order of the simulated devices' steps, for kernels that communicate.
    """
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=dma_execution_mode, random_seed=random_seed, uninitialized_memory="nan"
    )
    try:
        try:
            with pltpu.force_tpu_interpret_mode(params):
                yield
        except Exception as error:
            if "RACE DETECTED" not in str(error):
                raise
            with contextlib.suppress(Exception):  # or the next program, and the end of the process, raise it again
                jax.effects_barrier()
            raise RuntimeError(f"{RACE}: {error}") from error
        if _races_found():
            raise RuntimeError(RACE)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def has_gpu_interpreter() -> bool:
    """Whether this JAX can run Mosaic GPU kernels without a GPU (from 0.11 on)."""
    return hasattr(_compat.mosaic_gpu(), "force_gpu_interpret_mode")


@contextlib.contextmanager
def gpu_race_detection() -> Iterator[None]:
    """Context manager: run Mosaic GPU kernels in the interpreter, which raises if two accesses race.

    Block on the results inside it.
    """
    gpu = _compat.mosaic_gpu()
    with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(detect_races=True)):
        yield

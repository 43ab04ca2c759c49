"""Seconds that a call takes on a device, from the device's own clock where one can be read."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ITERATIONS = 11
"""Calls that CUPTI measures; the median is returned."""
LOOP_SECONDS = 0.25
"""Seconds of the longer one of the two loops that are timed if CUPTI cannot be used."""


def device_seconds(function: Callable[..., Any], operands: Sequence[jax.Array]) -> tuple[float, str]:
    """Median seconds of `function(*operands)` on the device of the operands, and how they were measured.

    - `"cupti"`, on an NVIDIA GPU: the time of the call's kernels by CUPTI (`jax.experimental.mosaic.gpu.profiler.measure`).
      The program is compiled once, and launch gaps are not counted.
    - `"loop"`, otherwise, and where CUPTI is not available: two loops of different trip counts around the call, in one
      program whose trip count is an argument; the difference of their wall times per iteration. Every iteration reads a value
      of the iteration before, so that XLA cannot hoist the call. A few microseconds of the loop itself are included.

    Args:
      function: pure; takes and returns arrays.
    """
    if jax.devices()[0].platform == "gpu":
        seconds = _cupti_seconds(function, operands)
        if seconds is not None:
            return seconds, "cupti"
    return _loop_seconds(function, operands), "loop"


def _cupti_seconds(function: Callable[..., Any], operands: Sequence[jax.Array]) -> float | None:
    """Median seconds by CUPTI; None where it is not available (another subscriber, no permission, an older jax)."""
    try:
        from jax.experimental.mosaic.gpu import profiler
    except ImportError:
        return None
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*operands))
    try:
        _, milliseconds = profiler.measure(jitted, iterations=ITERATIONS)(*operands)
    except (RuntimeError, TypeError, AttributeError):
        return None
    return statistics.median(milliseconds) / 1e3 if milliseconds else None


def _loop_seconds(function: Callable[..., Any], operands: Sequence[jax.Array]) -> float:
    """Median seconds of one call, from the difference of a long and a short `fori_loop` of calls.

    Each iteration's first operand depends on the results of the iteration before, so that XLA cannot hoist the call.
    """
    first, rest = operands[0], operands[1:]
    results = [jnp.zeros(s.shape, s.dtype) for s in jax.tree.leaves(jax.eval_shape(function, *operands))]

    def one(_: Any, state: tuple[jax.Array, list[jax.Array]], rest: Sequence[jax.Array]) -> Any:
        """Loop body: one call. An element of its first operand depends on the results before, though in practice its
        value stays."""
        first, before = state
        corner = (0,) * first.ndim
        read = sum((x.reshape(-1)[0].astype(jnp.float32) for x in before), start=jnp.float32(0))
        first = first.at[corner].set(jnp.where(read == 1234.5, 1, first[corner]).astype(first.dtype))
        return first, jax.tree.leaves(function(first, *rest))

    @jax.jit
    def loop(times: jax.Array, first: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        return lax.fori_loop(0, times, functools.partial(one, rest=rest), (first, results))[1]

    def wall(times: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(times), first, *rest))
        return time.perf_counter() - began

    wall(2)
    estimate = max(wall(2) / 2, 1e-6)
    long = min(max(int(LOOP_SECONDS / estimate), 6), 2000)
    short = max(long // 6, 2)
    return max(statistics.median((wall(long) - wall(short)) / (long - short) for _ in range(5)), 1e-9)

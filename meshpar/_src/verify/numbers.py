"""Comparison of arrays: their difference, the tolerance of their dtype, and the effect of rounding on a program."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..global_arrays import data_of, fetch, is_global, is_key

QUICK: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0},  # since 0.12 there is no choice of emitters
)
"""Compiler options of the reference and of programs that return all values; the first that this XLA version accepts is used.
Unoptimised code compiles several times faster and is equally good as a reference. The sharded program is compiled with the user's
options."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two arrays.

    Attributes:
      largest: max |sharded − unsharded|; infinite if only one is NaN, or if infinities differ.
      scale: the largest finite |unsharded|.
      allowed: the tolerance of ``largest``, relative to ``scale``; 0 for integers and booleans.
      at: the index of the largest difference.
      sharded, unsharded: the two values at this index.
    """

    largest: float
    scale: float
    allowed: float
    at: tuple[int, ...] = ()
    sharded: Any = 0
    unsharded: Any = 0

    @property
    def ok(self) -> bool:
        """Whether the arrays are equal within the tolerance."""
        return self.largest <= self.allowed * self.scale

    @property
    def relative(self) -> float:
        """The largest difference, relative to the largest value."""
        return self.largest / self.scale if self.scale else math.inf if self.largest else 0.0

    def __str__(self) -> str:
        """One line: the largest difference, its index, both values, and the allowed relative difference."""
        where = f" at [{', '.join(map(str, self.at))}]" if self.at else ""
        return (
            f"largest difference {self.largest:.3g}{where} ({self.sharded} sharded, {self.unsharded} unsharded): "
            f"{self.relative:.2g} of the largest value {self.scale:.3g}; allowed: {self.allowed:.2g}"
        )


def allowed(dtype: Any, tolerance: float) -> float:
    """The relative difference allowed in a dtype: 0 for integers; scaled to the precision of narrow floats."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    scaled = tolerance * eps / float(np.finfo(np.float32).eps)
    return max(tolerance, min(scaled, 16 * eps, 0.5))


def compare(sharded: np.ndarray, unsharded: np.ndarray, tolerance: float) -> Difference:
    """The difference of two arrays; infinite if shapes or dtypes differ. NaNs are equal to each other.

    ``tolerance``: the allowed difference, relative to the largest absolute value of ``unsharded``; more for narrow
    dtypes (:func:`allowed`).
    """
    limit = allowed(unsharded.dtype, tolerance)
    if sharded.shape != unsharded.shape or sharded.dtype != unsharded.dtype:
        kinds = [f"{x.dtype}{list(x.shape)}" for x in (sharded, unsharded)]
        return Difference(math.inf, 0.0, limit, (), *kinds)
    if not unsharded.size:
        return Difference(0.0, 0.0, limit)
    same = np.asarray(sharded == unsharded)
    a, b = wide(sharded), wide(unsharded)
    with np.errstate(invalid="ignore", over="ignore"):
        same = same | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
    gap = np.where(np.isfinite(gap), gap, math.inf)
    at = tuple(map(int, np.unravel_index(int(np.argmax(gap)), gap.shape)))
    sizes = np.abs(b[np.isfinite(b)])
    scale = float(sizes.max()) if sizes.size else 0.0
    return Difference(float(gap[at]), scale, limit, at, sharded[at], unsharded[at])


def wide(x: np.ndarray) -> np.ndarray:
    """The array as float64 or complex128."""
    return x.astype(np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64)


def host(x: Any) -> np.ndarray:
    """The full array on the host, also if it is distributed over processes; PRNG keys as their data."""
    return fetch(data_of(x))


def on_device(x: Any, device: Any) -> Any:
    """A copy of an array on one device of this process."""
    if not is_global(x):
        return jax.device_put(x, device, may_alias=False)
    copy = jax.device_put(host(x), device)
    return jax.random.wrap_key_data(copy, impl=jax.random.key_impl(x)) if is_key(x) else copy


def copies(x: Any) -> Iterator[np.ndarray]:
    """The full array, then one more version of it for every device whose replica of a shard differs."""
    x = data_of(x)
    full = fetch(x)
    yield full
    for shard in getattr(x, "addressable_shards", ()):
        if shard.replica_id:
            replica = np.asarray(shard.data)
            if replica.tobytes() != full[shard.index].tobytes():
                other = full.copy()
                other[shard.index] = replica
                yield other


def worst_of(sharded: Any, unsharded: np.ndarray, tolerance: float) -> Difference:
    """The largest difference of any replica of a sharded array from the unsharded one."""
    return max((compare(c, unsharded, tolerance) for c in copies(sharded)), key=lambda d: d.largest)


def perturbed(x: Any, by: float | None, tolerance: float, draw: np.random.Generator) -> Any:
    """A float array with random relative perturbations of at most ``by`` ulps (None: of the tolerance); other values unchanged."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or getattr(x, "weak_type", False) or is_key(x) or not jnp.issubdtype(dtype, jnp.inexact):
        return x
    relative = allowed(dtype, tolerance) if by is None else by * float(jnp.finfo(dtype).eps)
    values = wide(np.asarray(x))
    out = (values * (1 + relative * draw.uniform(-1, 1, values.shape))).astype(dtype)
    return jax.device_put(out, x.sharding) if isinstance(x, jax.Array) else out


def spread_of(run: Callable[[list[Any]], Sequence[Any]], xs: Sequence[Any], base: Sequence[np.ndarray], by: float | None,
            tolerance: float) -> list[float]:  # fmt: skip
    """Per result, its largest absolute difference from ``base`` in three runs of ``run`` on randomly perturbed
    operands.

    Args:
      xs: the operands.
      base: the results of ``run(xs)``.
      by, tolerance: the size of the perturbations, as in :func:`perturbed`.
    """
    out = [0.0] * len(base)
    draw = np.random.default_rng(0)
    for _ in range(3):
        results = run([perturbed(x, by, tolerance, draw) for x in xs])
        for k, (a, b) in enumerate(zip(results, base, strict=True)):
            out[k] = max(out[k], compare(host(a), b, tolerance).largest)
    return out


def compiled(fn: Callable[..., Any], xs: Sequence[Any], **shardings: Any) -> Callable[..., Any]:
    """``jax.jit(fn)`` compiled for these arguments, on CPUs without optimisations."""
    lowered = jax.jit(fn, keep_unused=True, **shardings).lower(*xs)
    if jax.default_backend() == "cpu":
        for options in QUICK:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # another version, other options
                return lowered.compile(compiler_options=options)
    return lowered.compile()

"""Loss scaling for float16, and the noise scale of gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "steps", "skipped"],
    meta_fields=["period", "factor", "smallest", "largest"],
)
@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale for float16: part of the train state.

    Gradients of ``loss · scale`` are representable in float16 where gradients of the loss would vanish. After a step with an
    infinite or NaN gradient the scale is divided by ``factor`` and the step is skipped; after ``period`` steps without one, it is
    multiplied (Micikevicius et al., *Mixed Precision Training*, 2018). bfloat16 has the range of float32 and needs no scale.

    Attributes:
      scale: the factor of the loss, float32.
      steps: int32, steps since the scale last changed.
      skipped: int32, how many steps were skipped in all.
      period: steps without an infinity after which the scale grows.
      factor: by which it grows and shrinks.
      smallest, largest: bounds of the scale.

    Example:
      >>> scale = mp.train.LossScale(1024.0)
      >>> def loss_and_gradients(params, x):
      ...     return jax.value_and_grad(lambda p: scale(loss_of(p, x)))(params)
      >>> loss, gradients = loss_and_gradients(params, x)
      >>> gradients, finite = scale.unscale(gradients)
      >>> new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
      >>> params, scale = scale.select(finite, new, params), scale.adjust(finite)
      >>> float(scale.scale), int(scale.skipped)
      (1024.0, 0)
    """

    scale: Any = 2.0**15
    steps: Any = 0
    skipped: Any = 0
    period: int = 2000
    factor: float = 2.0
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        """Convert Python numbers to arrays of fixed dtypes, so that the state has the same types before and after a step.

        Raises:
          UnsupportedError: a scale that is not above 0, a factor that is not above 1, or a period below 1.
        """
        if isinstance(self.scale, int | float) and not 0 < self.scale < float("inf"):
            raise UnsupportedError(f"mp.train.LossScale: scale={self.scale}, which must be above 0", fixes=["2.0**15"])
        if not self.factor > 1 or self.period < 1:
            text = f"mp.train.LossScale: factor={self.factor} and period={self.period}; the scale would not grow"
            raise UnsupportedError(text, fixes=["factor=2.0, period=2000"])
        for name, dtype in (("scale", np.float32), ("steps", np.int32), ("skipped", np.int32)):
            if isinstance(getattr(self, name), int | float):
                object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    def __call__(self, loss: Any) -> Any:
        """The scaled loss, in its dtype: differentiate this one. Leaves that are no floats are unchanged."""
        return jax.tree.map(lambda x: x * jnp.asarray(self.scale, jnp.result_type(x)) if _is_float(x) else x, loss)

    def unscale(self, gradients: Any) -> tuple[Any, jax.Array]:
        """(gradients of the loss in float32, whether all of them are finite); derivatives by integers are unchanged."""
        inverse = 1.0 / jnp.asarray(self.scale)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * inverse if _is_float(g) else g, gradients)
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(gradients) if _is_float(g)]
        return gradients, jnp.stack(finite).all() if finite else jnp.array(True)

    def adjust(self, finite: jax.Array) -> LossScale:
        """The scale of the next step."""
        grown = self.steps + 1 >= self.period
        larger = jnp.where(grown, jnp.minimum(self.scale * self.factor, self.largest), self.scale)
        smaller = jnp.maximum(self.scale / self.factor, self.smallest)
        scale = jnp.where(finite, larger, smaller).astype(jnp.float32)
        steps = jnp.where(finite & ~jnp.asarray(grown), self.steps + 1, 0).astype(jnp.int32)
        skipped = (self.skipped + jnp.where(finite, 0, 1)).astype(jnp.int32)
        return replace(self, scale=scale, steps=steps, skipped=skipped)

    @staticmethod
    def select(finite: jax.Array, new: Any, old: Any) -> Any:
        """``new`` if the gradients were finite, else ``old``: parameters and optimizer state of the next step."""
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class NoiseScale(NamedTuple):
    """Result of :func:`noise_scale`.

    Attributes:
      batch: ``variance / squared_norm``, the batch size at which the noise of a gradient is as large as the gradient. Estimates of
        one step are noisy: average the other two over steps, and divide afterwards.
      squared_norm: estimate of ``|G|²``, for the gradient G of the expected loss.
      variance: estimate of the trace of the covariance of one example's gradient.
    """

    batch: jax.Array
    squared_norm: jax.Array
    variance: jax.Array


def noise_scale(small: Any, large: Any, *, batch: tuple[int, int]) -> NoiseScale:
    """The gradient noise scale from gradients at two batch sizes.

    McCandlish et al., *An Empirical Model of Large-Batch Training* (2018), appendix A.1, with batch sizes b and B:
    ``|G|² = (B |g_B|² - b |g_b|²) / (B - b)``, ``S = (|g_b|² - |g_B|²) / (1/b - 1/B)``.

    Args:
      small: gradients of batches of b examples: of one, or with a leading replica dim, over which ``|g_b|²`` is averaged.
      large: gradients of a batch of B examples, such as the mean of ``small`` over replicas.
      batch: (b, B).

    Raises:
      UnsupportedError: b is not below B, or the trees differ.

    Example:
      >>> small = jnp.array([[3.0], [1.0]])
      >>> noise = mp.train.noise_scale(small, small.mean(0), batch=(1, 2))
      >>> float(noise.squared_norm), float(noise.variance)
      (3.0, 2.0)
    """
    b, large_batch = batch
    if not 0 < b < large_batch:
        text = f"mp.train.noise_scale: batch={batch}: the first size must be below the second"
        raise UnsupportedError(text, fixes=["batch=(32, 256)"])
    if jax.tree.structure(small) != jax.tree.structure(large):
        text = "mp.train.noise_scale: the trees of gradients have different structures"
        raise UnsupportedError(text, fixes=["gradients of the same parameters"])

    def squared(g: jax.Array, like: jax.Array) -> jax.Array:
        total = jnp.square(g.astype(jnp.float32)).sum()
        return total / g.shape[0] if g.ndim > like.ndim else total

    large_leaves = jax.tree.leaves(large)
    of_small = sum(squared(g, x) for g, x in zip(jax.tree.leaves(small), large_leaves, strict=True))
    of_large = sum(squared(x, x) for x in large_leaves)
    norm = (large_batch * of_large - b * of_small) / (large_batch - b)
    variance = (of_small - of_large) / (1 / b - 1 / large_batch)
    return NoiseScale(jnp.asarray(variance / norm), jnp.asarray(norm), jnp.asarray(variance))

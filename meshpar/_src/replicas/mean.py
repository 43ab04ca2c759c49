"""The weighted mean over replicas, and means of codes with error feedback."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from .codes import code_of
from .trees import as_updates, gathered, map_updates, per_replica, weighted_mean, weights_of, wide, zeros_for


def mean(
    weight: Any = None, *, dtype: DTypeLike | None = None, replicas: int | None = None, dim: str = "replica"
) -> optax.GradientTransformationExtraArgs:
    """The weighted mean of the updates over replicas: ``Σ_r w_r g_r / Σ_r w_r``.

    A replica of weight 0 is left out: with more replicas than are needed, the slowest ones are (backup workers; Chen et al.,
    *Revisiting Distributed Synchronous SGD*, 2016). So is a replica with a NaN or infinity in any update.

    Args:
      weight: one weight per replica, at least 0; None: all 1. ``update(..., weight=)`` overrides it. If all are 0, a concrete
        array raises an error, and the updates of a traced one are NaN.
      dtype: floating-point type in which the sum is sent; None: float32, or float64 for updates in it.
      replicas: number of replicas, if their parameters are shared and have no replica dim; None: parameters have it first.
      dim: name of the replica dim.

    Returns:
      A transformation of updates [replica, ...]. Its result has the replica dim if the parameters have it.

    Raises:
      UnsupportedError, RankError, DivisibilityError: (when updating) bad weights, or updates without a replica dim.
      UnknownDimError: (when planning) no dim of the updates is called ``dim``.

    Example:
      >>> import optax
      >>> tx = optax.chain(mp.replicas.mean(replicas=2), optax.sgd(1.0))
      >>> w = jnp.zeros(3)
      >>> gradients = jnp.stack([jnp.ones(3), jnp.full(3, 3.0)])
      >>> tx.update(gradients, tx.init(w), w)[0].tolist()
      [-2.0, -2.0, -2.0]
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        weights, shared = weights_of("mean", updates, params, extra.get("weight"), weight, dim=dim, replicas=replicas)
        return jax.tree.map(lambda x: as_updates(weighted_mean(x, weights, dtype), x, shared), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class CodedState(NamedTuple):
    """State of :func:`coded`.

    Attributes:
      error: for each update [replica, ...], the encoded array minus the decoded one; None without feedback.
    """

    error: Any


def coded(
    code: str, *, feedback: bool = True, weight: Any = None, replicas: int | None = None, dim: str = "replica"
) -> optax.GradientTransformationExtraArgs:
    """The mean of the updates over replicas; only codes are sent.

    Each replica encodes its update, the codes are all-gathered, and every replica decodes and averages them: ``R - 1`` times the
    bytes of a code per device, for R replicas. With error feedback, ``a_r = g_r + e_r`` is encoded, and
    ``e_r = a_r - decode(encode(a_r))`` is added to the next update (Seide et al., *1-Bit Stochastic Gradient Descent*, 2014;
    Strom, *Scalable Distributed DNN Training Using Commodity GPU Cloud Computing*, 2015; Karimireddy et al., *Error Feedback Fixes
    SignSGD*, 2019).

    ========================== ============================ ===================================================================
    code                       bits per element             decoded
    ========================== ============================ ===================================================================
    ``int8, float8_e4m3fn``    8, and 8 per row             rounded; rows (last dim) are scaled by powers of two (MX formats)
    ``sign``                   1                            the sign, times the mean magnitude
    ``topk:0.01``              0.48, or 0.64                the largest 1 % of each row, else 0 (Aji and Heafield, 2017)
    ``threshold:0.001``        2                            ``±0.001`` beyond the threshold, else 0 (Strom, 2015)
    ========================== ============================ ===================================================================

    Args:
      code: one of the table, with another number.
      feedback: whether to add the error to the next update.
      weight, replicas, dim: as for :func:`mean`. The error of a replica that is left out does not change.

    Returns:
      A transformation of updates [replica, ...]. Its result has the replica dim if the parameters have it.

    Raises:
      UnsupportedError: there is no such code; (when updating) an update is not floating-point, or all weights are 0.
      RankError, DivisibilityError, UnknownDimError: as for :func:`mean`.

    Example:
      >>> tx = mp.replicas.coded("sign", replicas=2)
      >>> w = jnp.zeros(3)
      >>> gradients = jnp.array([[1.0, -2.0, 3.0], [1.0, 1.0, -4.0]])
      >>> updates, state = tx.update(gradients, tx.init(w), w)
      >>> updates.tolist(), state.error[0].tolist()
      ([2.0, 0.0, 0.0], [-1.0, 0.0, 1.0])
    """
    codec = code_of(code)

    def init(params: Any) -> CodedState:
        return CodedState(zeros_for(params, replicas, dim) if feedback else None)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, CodedState]:
        weights, shared = weights_of("coded", updates, params, extra.get("weight"), weight, dim=dim, replicas=replicas)
        every_weight = gathered(weights, dim)

        def one(_: str, x: jax.Array, error: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            """An update and its error → the decoded mean, the next error."""
            total = wide(x) if error is None else wide(x) + error
            codes = codec.encode(total)
            mean = weighted_mean(codec.decode(gathered(codes, dim), x.shape), every_weight)
            if error is not None:
                lost = (total - codec.decode(codes, x.shape)).astype(error.dtype)
                error = jnp.where(per_replica(weights, x) > 0, lost, error)
            return as_updates(mean, x, shared), error

        means, errors = map_updates(one, updates, state.error)
        return means, CodedState(errors if feedback else None)

    return optax.GradientTransformationExtraArgs(init, update)

"""Names of traced programs: the dims of optimizer state that is smaller than its parameter, suggestions for patterns."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.tracing import _dims_like, _similar_pattern

NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("shape", "param_shape", "dims"),
    [
        ((8, 16), (8, 16), ("a", "b")),  # a moment of Adam
        ((8, 8), (8, 8), ("a", "b")),
        ((8,), (8, 16), ("a",)),  # the factored moments of Adafactor
        ((16,), (8, 16), ("b",)),
        ((8, 4), (8, 2, 4), ("a", "c")),
        ((1, 16), (8, 16), (None, "b")),  # of SM3
        ((8, 1), (8, 16), ("a", None)),
        ((1, 1), (8, 16), (None, None)),
        ((16, 8), (8, 16), None),  # of the parameter's rank, and no part of it
        ((4, 16), (8, 16), None),  # blocks
        ((8,), (8, 8), None),  # rows or columns
        ((1,), (8, 16), None),  # what Adafactor stores for a moment that is not factored
        ((), (8, 16), None),
        ((8, 16, 2), (8, 16), None),
    ],
)
def test_dims_of_optimizer_state_by_the_sizes_of_its_parameter(shape, param_shape, dims):
    assert _dims_like(shape, param_shape, NAMES[: len(param_shape)]) == dims


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (8, 8), (4, 8, 8), (8, 4, 8), (16, 4, 8)])
def test_dims_of_the_factored_moments_of_optax(shape):
    """By optax itself: a gradient whose rows are zero but for one has that pattern in one of the two moments."""
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    for k, name in enumerate(NAMES[: len(shape)]):
        along = [1] * len(shape)
        along[k] = shape[k]
        gradient = jnp.broadcast_to((jnp.arange(shape[k]) + 1.0).reshape(along), shape)
        params = {"w": jnp.ones(shape)}
        state = optimizer.update({"w": gradient}, optimizer.init(params), params)[1][0]
        for moment in ("v_row", "v_col"):
            array = getattr(state, moment)["w"]
            dims = _dims_like(array.shape, shape, NAMES[: len(shape)], f"opt/0/{moment}/w")
            varies = [bool(np.ptp(array, axis=i).any()) for i in range(array.ndim)]
            assert varies == [d == name for d in dims]


@pytest.mark.parametrize(
    ("pattern", "suggested"),
    [
        ("kernel", "*/kernel"),  # a pattern matches a complete path
        ("mlp/*", "*/mlp/*"),
        ("*/kernal", "*/kernel"),
        ("state/mlp/kernels", "state/mlp/kernel"),
        ("x/y/z/unrelated", None),
    ],
)
def test_a_pattern_is_suggested_for_one_that_matches_nothing(pattern, suggested):
    found = _similar_pattern(pattern, ["state/mlp/kernel", "state/mlp/bias", "batch"])
    if suggested is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"did you mean {suggested!r}")

"""Names of traced programs: the dims of optimizer state that is smaller than its parameter, suggestions for patterns."""

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

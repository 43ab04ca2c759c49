"""Records are dataclasses with slots that are compared by identity."""

import dataclasses

import pytest

from meshpar._src.records import record


@record
class Pair:
    """Two numbers."""

    first: int
    second: int = 2


def test_records_are_compared_by_identity_and_have_their_attributes_alone():
    one, other = Pair(1), Pair(1)
    assert one == one
    assert one != other
    changed = dataclasses.replace(one, second=5)
    assert (one.second, changed.first, changed.second) == (2, 1, 5)
    with pytest.raises(AttributeError):
        one.third = 4  # pyright: ignore[reportAttributeAccessIssue]

"""Records are dataclasses with slots that are compared by identity."""

import dataclasses

import pytest

from meshpar._src.records import record


@record
class Pair:
    """Two numbers."""

    first: int
    second: int = 2


@record
class Triple(Pair):
    """Three numbers."""

    third: int = 3


def test_records_are_compared_by_identity():
    one, other = Pair(1), Pair(1)
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_changed_copy_leaves_the_record_as_it_is():
    one = Triple(1)
    changed = dataclasses.replace(one, second=5)
    assert (changed.first, changed.second, changed.third) == (1, 5, 3)
    assert one.second == 2


def test_records_have_the_attributes_of_their_class_alone():
    with pytest.raises(AttributeError):
        Triple(1).fourth = 4

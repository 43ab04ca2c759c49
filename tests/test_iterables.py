"""Groups of pairs, and items after those that they are computed from."""

from meshpar._src.iterables import grouped, operands_first


def test_values_of_a_key_are_in_the_order_of_the_pairs():
    assert grouped([("b", 1), ("a", 2), ("b", 3)]) == {"b": [1, 3], "a": [2]}
    assert list(grouped([("b", 1), ("a", 2)])) == ["b", "a"]


def test_items_follow_their_operands_once_and_known_ones_are_left_out():
    operands = {"sum": ["x", "y", "x"], "x": ["w"], "y": ["w", "x"], "w": []}
    assert list(operands_first("sum", operands.__getitem__)) == ["w", "x", "y", "sum"]
    assert list(operands_first("sum", operands.__getitem__, {"x"})) == ["w", "y", "sum"]
    assert not list(operands_first("sum", operands.__getitem__, {"sum"}))


def test_a_chain_may_be_longer_than_the_stack_of_python():
    assert list(operands_first(20_000, lambda n: [n - 1] if n else []))[-2:] == [19_999, 20_000]


def test_what_becomes_known_meanwhile_is_left_out():
    """One op makes two results: with the first of them, the other is known too."""
    known, seen = set(), []
    for item in operands_first("both", lambda item: ["one", "other"] if item == "both" else [], known):
        seen.append(item)
        known |= {"one", "other"}
    assert seen == ["one", "both"]

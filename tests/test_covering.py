"""Cases that cover the parameters of a test."""

import itertools

import covering


def test_every_value_and_every_pair_are_in_a_case():
    lists = "abcde", (1, 2, 3), (True, False)
    assert covering.each(*lists) == [("a", 1, True), ("b", 2, False), ("c", 3, True), ("d", 1, False), ("e", 2, True)]
    cases = covering.pairs(*lists)
    assert len(cases) == 15
    for i, j in itertools.combinations(range(3), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(lists[i], lists[j]))

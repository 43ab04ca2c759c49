"""Cases that cover the parameters of a test without their product; `benchmarks/fuzz.py` draws from the product."""

import itertools
from collections.abc import Iterable
from typing import Any


def each(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest list has: every value of every list is in one, the shorter ones are repeated."""
    lists = [list(values) for values in parameters]
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]


def pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every two values of two lists are in a case: of the product, repeatedly the first case with most of the missing pairs."""
    lists = [list(values) for values in parameters]
    product = list(itertools.product(*map(range, map(len, lists))))
    of = [set(itertools.combinations(enumerate(case), 2)) for case in product]
    missing, chosen = set().union(*of), []
    while missing:
        best = max(range(len(product)), key=lambda i: len(of[i] & missing))
        missing -= of[best]
        chosen.append(best)
    return [tuple(values[k] for values, k in zip(lists, product[i], strict=True)) for i in sorted(chosen)]

"""``mp.jit`` behaves as ``jax.jit``: values, dtypes, weak types, trees, deleted arguments and exceptions, call by call.

The table is ``tests/helpers/parity_table.py``: every function under one of ``shard_map`` and ``jit``, by turns, and a sample of
its calls under all lowerings.
"""

import itertools
import warnings

import jax.numpy as jnp
import pytest
from parity_table import CASES, LOWERINGS, Call, difference, differences, outcome


def run(name: str, lowering: str, calls: tuple[Call, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both warn: donated arrays without a result like them, float64 without x64
        found = list(differences(CASES[name], lowering, calls))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "lowering"), [(n, x) for n, case in CASES.items() for x in LOWERINGS if case.sample(x)]
)
def test_a_sample_of_the_table(name, lowering):
    run(name, lowering, CASES[name].sample(lowering))


@pytest.mark.slow  # each function takes seconds, all of them minutes
@pytest.mark.parametrize(("name", "lowering"), [*zip(CASES, itertools.cycle(["shard_map", "jit"]), strict=False)])
def test_the_table(name, lowering):
    run(name, lowering, CASES[name].calls)


def test_the_table_has_1000_comparisons():
    assert sum(len(case.calls) * case.functions for case in CASES.values()) >= 1000


@pytest.mark.parametrize(
    ("theirs", "seen"),
    [
        (lambda x: x * 2, False),
        (lambda x: x * 3, True),
        (lambda x: (x * 2).astype(jnp.float16), True),
        (lambda x: [x * 2], True),
        (lambda x: x["missing"], True),
        (lambda x: 2.0, True),
    ],
)
def test_differences_are_seen(theirs, seen):
    """The comparison itself: of ``x * 2`` with another function."""
    call = Call("array", (lambda: jnp.ones((8, 8)),))
    found = difference(outcome(lambda x: x * 2, call), outcome(theirs, call))
    assert (found is not None) is seen

"""The functions of the page of methods have the same results under both of their layouts as on one device."""

import blocks
import pytest

import meshpar as mp


@pytest.fixture(scope="module")
def shown():
    """(function, arguments, layouts, dims) of every call of ``show`` on the page."""
    names: dict = {"__name__": "methods"}
    calls = []
    for i, block in enumerate(blocks.blocks_of((blocks.ROOT / "docs" / "methods.md").read_text())):
        if "local_sgd(" in block.code:  # has tests of its own
            continue
        exec(compile(block.code, "methods.md", "exec"), names)
        if i == 0:
            names["show"] = lambda fn, *args, layouts, dims: calls.append((fn, args, layouts, dims))
    return calls


@pytest.mark.parametrize("number", range(11))
def test_the_results_are_those_of_one_device(shown, number):
    fn, args, layouts, dims = shown[number]
    assert len(layouts) == 2
    lowering = ("shard_map", "jit")[number % 2]
    report = mp.check(
        fn, *args, layout=layouts, mesh="data=4, model=2", dims=dims, lowerings=[lowering], progress=False
    )
    assert report.ok
    assert len(report.rows) == 2


def test_every_function_is_checked(shown):
    assert len(shown) == 11

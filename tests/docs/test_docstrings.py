"""The examples in the docstrings of public functions run, and print what they say."""

import doctest
import inspect
import warnings

import blocks
import pytest

import meshpar as mp

MODULES = (
    mp.data,
    mp.hardware,
    mp.layers,
    mp.layouts,
    mp.log,
    mp.nd,
    mp.replicas,
    mp.train,
    mp.train.checkpoint_policies,
)
RETURNED = {"CodedState", "GossipState", "MoEAux", "Named", "PowerSGDState", "Routing"}
"""Classes that functions return, without examples of their own."""


def public_objects():
    """Name → every public function and class, without errors and without the classes that functions return."""
    found = {name: getattr(mp, name) for name in mp.__all__}
    for module in MODULES:
        stem = module.__name__.rpartition(".")[2]
        found |= {f"{stem}.{name}": getattr(module, name) for name in module.__all__ if name not in RETURNED}
    return {name: x for name, x in found.items() if inspect.isfunction(x) or inspect.isclass(x)}


OBJECTS = public_objects()


@pytest.fixture(scope="module")
def names():
    """The names of the program in docs/api.md, which the examples continue."""
    page = (blocks.ROOT / "docs" / "api.md").read_text()
    found: dict = {"__name__": "api"}
    exec(compile(blocks.blocks_of(page)[0].code, "api.md", "exec", dont_inherit=True), found)
    return found


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_the_example_of_a_docstring_runs(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(OBJECTS[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, None, None)
    assert test.examples, f"{name} has no example"
    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = doctest.DocTestRunner(verbose=False).run(test, out=lines.append)
    assert result.failed == 0, "".join(lines)


def test_a_wrong_output_fails(names):
    text = ">>> mp.train.microbatches_for(8, rows=2, mesh=mesh, layout='')\n0\n"
    test = doctest.DocTestParser().get_doctest(text, dict(names), "x", None, None)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 1

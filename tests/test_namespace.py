"""Public names of ``meshpar`` and of its modules, and modules behind them."""

import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

import meshpar as mp

MODULES = [name for name in mp.__all__ if isinstance(getattr(mp, name), ModuleType)]


def test_dir_lists_the_public_names():
    shown = {name for name in dir(mp) if not name.startswith("_")}
    assert shown == set(mp.__all__)
    assert len(set(mp.__all__) - set(MODULES)) <= 20
    assert all(isinstance(getattr(mp.types, name), type) for name in mp.types.__all__)
    assert all(issubclass(getattr(mp.errors, name), mp.errors.MeshparError | UserWarning) for name in mp.errors.__all__)


@pytest.mark.parametrize("name", [*MODULES, "layers.nnx", "layers.linen"])
def test_a_module_lists_its_public_names(name: str):
    module = importlib.import_module(f"meshpar.{name}")
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        value = getattr(module, public)
        assert not callable(value) or value.__doc__, public


@pytest.mark.parametrize("package", ["plan", "search", "lab", "mesh"])
def test_a_function_shadows_no_module(package: str):
    module = importlib.import_module(f"meshpar._src.{package}")
    assert sys.modules[module.__name__] is module
    assert callable(getattr(mp, package))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'meshpar' has no attribute 'jitt'"):
        mp.jitt  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_the_import_loads_no_notebook_server_or_module_library():
    """Of the modules that ``import meshpar`` adds to jax, flax and optax: the slow ones are loaded when they are used. Submodules
    with the name of a function are imported by attribute."""
    program = """
import json, sys
import jax, flax, optax
before = set(sys.modules)
import meshpar
print(json.dumps(sorted(set(sys.modules) - before)))
import meshpar._src.plan as m, meshpar._src.search as n, meshpar._src.lab as o, meshpar._src.mesh as p
[x.__file__ for x in (m, n, o, p)]
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = set(json.loads(run.stdout))
    assert "meshpar._src.entry.api" in added
    slow = "IPython http.server flax.nnx treescope anywidget orbax.checkpoint rich.progress"
    assert not added & set(slow.split())

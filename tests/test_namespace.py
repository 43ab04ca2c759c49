"""Public names of ``meshpar``."""

import json
import subprocess
import sys

import pytest

import meshpar as mp


def test_dir_lists_the_public_names():
    shown = {name for name in dir(mp) if not name.startswith("_")}
    assert shown == set(mp.__all__)
    assert all(hasattr(mp, name) for name in mp.__all__)
    assert all(isinstance(getattr(mp.types, name), type) for name in mp.types.__all__)
    assert all(issubclass(getattr(mp.errors, name), mp.MeshparError | UserWarning) for name in mp.errors.__all__)


@pytest.mark.parametrize("module", [mp.errors, mp.types])
def test_a_name_of_a_submodule_says_where_it_is(module):
    for name in module.__all__:
        if name not in mp.__all__:
            with pytest.raises(AttributeError, match=rf"`{module.__name__.replace('meshpar', 'mp')}.{name}`"):
                getattr(mp, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'meshpar' has no attribute 'jitt'"):
        mp.jitt  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_the_import_loads_no_notebook_server_or_module_library():
    """Of the modules that ``import meshpar`` adds to jax, flax and optax: the slow ones are loaded when they are used."""
    program = """
import json, sys
import jax, flax, optax
before = set(sys.modules)
import meshpar
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = set(json.loads(run.stdout))
    assert "meshpar.api" in added
    assert not added & {
        "IPython",
        "http.server",
        "flax.nnx",
        "treescope",
        "anywidget",
        "orbax.checkpoint",
        "rich.progress",
    }

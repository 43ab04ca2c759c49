"""The docstring of a large package lists its modules, one line each."""

import ast
import re
from pathlib import Path

import pytest

import meshpar

SOURCE = Path(meshpar.__file__).parent / "_src"
MANY = 9
"""Modules from which on a package lists them."""


def modules_of(package):
    return {p.stem for p in package.glob("*.py")} - {"__init__"} | {
        p.parent.name for p in package.glob("*/__init__.py")
    }


LARGE = [p.parent for p in sorted(SOURCE.glob("*/__init__.py")) if len(modules_of(p.parent)) >= MANY]


@pytest.mark.parametrize("package", LARGE, ids=lambda p: p.name)
def test_the_docstring_of_a_package_lists_its_modules(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    listed = re.findall(r"^    (\w+)  +\S", text.partition(".. code-block:: text")[2], re.MULTILINE)
    assert sorted(listed) == sorted(modules_of(package))

"""Rules for the code of the package: docstrings list modules; what a primitive is, the registry says."""

import ast
import re
from pathlib import Path

import pytest

import meshpar
import meshpar_kernels
from meshpar._src.rules import PRIMITIVES

SOURCE = Path(meshpar.__file__).parent / "_src"
KERNELS = Path(meshpar_kernels.__file__).parent
MANY = 4
"""Modules from which on a package lists them."""


def modules_of(package):
    return {p.stem for p in package.glob("*.py")} - {"__init__"} | {
        p.parent.name for p in package.glob("*/__init__.py")
    }


PACKAGES = [p.parent for p in sorted([*SOURCE.rglob("*/__init__.py"), *KERNELS.glob("*/__init__.py")])]
LARGE = [p for p in PACKAGES if len(modules_of(p)) >= MANY]


@pytest.mark.parametrize("package", LARGE, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_the_docstring_of_a_package_lists_its_modules(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    rows = re.findall(r"^    (\w+(?:, \w+)*)  +\S", text.partition(".. code-block:: text")[2], re.MULTILINE)
    assert sorted(name for row in rows for name in row.split(", ")) == sorted(modules_of(package))


OWN_LISTS = {
    "layers/recurrence.py:_LINEAR": "ops that this function composes: linear in a float, rounding aside",
    "plan/emit.py:_NOT_RECOMPUTED": "a choice of the planner among cheap ops, not a property of an op",
    "program/divisible_rewrite/constant_integers.py:_MOVES": "ops that this module evaluates on integers",
    "verify/wide.py:_OWN_DTYPES": "ops whose operands have a dtype by contract",
}
"""Module constants that list primitives although the registry is to be asked, and why."""


def strings_of(node):
    """The strings of a list, tuple or set, also of one passed to ``frozenset`` and the like, and of a union; else None."""
    match node:
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            texts = [x.value for x in items if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            return texts if len(texts) == len(items) else None
        case ast.Call(ast.Name("frozenset" | "set" | "tuple" | "list"), [argument]):
            return strings_of(argument)
        case ast.BinOp(left, ast.BitOr() | ast.Add(), right):
            return (strings_of(left) or []) + (strings_of(right) or [])
    return None


def lists_of_primitives(source):
    """The module constants with the names of several primitives and nothing else."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            texts = strings_of(node.value) or []
            if len(texts) > 1 and set(texts) <= PRIMITIVES.keys():
                yield ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def test_modules_ask_the_registry_instead_of_listing_primitives():
    found = {
        f"{path.relative_to(SOURCE).as_posix()}:{name}"
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "rules"
        for name in lists_of_primitives(path.read_text())
    }
    assert found == OWN_LISTS.keys()


@pytest.mark.parametrize("value", ["('add', 'mul')", "frozenset({'add', 'mul'})", "BASE | {'add', 'mul'}"])
def test_a_list_of_primitives_is_found(value):
    assert list(lists_of_primitives(f"NAMES = {value}")) == ["NAMES"]
    assert not list(lists_of_primitives(f"NAMES = {value.replace('mul', 'no primitive')}"))

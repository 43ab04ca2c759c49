"""What a primitive is stands in its registry entry: other packages read traits and do not compare names of primitives."""

import ast
import re
from collections import Counter
from pathlib import Path

import meshpar
from meshpar._src.rules import PRIMITIVES

PACKAGE = Path(meshpar.__file__).parent / "_src"
ALLOWED = {
    "compat/jax.py": (
        4,
        "below the registry: where each JAX version keeps the bodies of control flow; what nobody reads: a `while`'s constants, "
        "no operands of a `pallas_call`, and what is a constant already",
    ),
    "compat/loop_operands.py": (3, "below the registry: the operands of a scan, a while loop and a conditional"),
    "cost/flops.py": (8, "what keeps the zeros of a one-hot mask: products, sums and comparisons of it"),
    "cost/device_computation.py": (2, "the maximum that a softmax subtracts: `reduce_max` of what `sub` reads"),
    "layers/checkpoint_policies.py": (1, "JAX asks policies about this call, by its primitive"),
    "layers/recurrence.py": (
        4,
        "whether an op scales a state: `mul`, `div` by it, `select_n` on it; broadcasts of factors",
    ),
    "lower/jit.py": (2, "`slice` by its parameters; `reshard`, from jax.random, says nothing without Explicit axes"),
    "lower/shard_map.py": (
        1,
        "of custom derivatives, JAX has no vmap of the forward derivative of a `custom_vjp` only",
    ),
    "plan/decide.py": (1, "`random_bits` of a key that is the same everywhere"),
    "program/divisible_rewrite/constant_integers.py": (
        4,
        "what `jnp.put_along_axis` makes of an iota, followed without an evaluation of so many elements",
    ),
    "report/hints.py": (1, "the exponential of a softmax: `exp`, `exp2`"),
    "program/reorder_additions.py": (2, "`add_any`, which only JAX's transposition makes"),
}
"""File → number of comparisons, and why they are not a trait."""


COMPARED = re.compile(r"\bname\b\s*(==|!=|in\b|not\b|\.startswith)|(==|!=|\bin\b)\s*[\w.]*\bname\b")
"""Text that every comparison of a name contains: other files need not be parsed."""


def names_compared(tree):
    """The names of primitives that expressions ``….name`` or ``name`` are compared with, one tuple for each comparison."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            sides = [node.func.value, *node.args]
        else:
            continue
        if not any("name" in (getattr(s, "attr", ""), getattr(s, "id", "")) for s in sides):
            continue
        constants = [c.value for s in sides for c in ast.walk(s) if isinstance(c, ast.Constant)]
        texts = [c for c in constants if isinstance(c, str)]
        begins = not isinstance(node, ast.Compare)
        if texts and all(any(p.startswith(t) if begins else p == t for p in PRIMITIVES) for t in texts):
            yield tuple(texts), node.lineno


def test_other_packages_do_not_compare_names_of_primitives():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if {"rules", "prove"} & {
            *path.relative_to(PACKAGE).parts
        }:  # lemmas are by op, and share no table with the rules
            continue
        text = path.read_text()
        for names, line in names_compared(ast.parse(text)) if COMPARED.search(text) else ():
            found.setdefault(str(path.relative_to(PACKAGE)), []).append((line, names))
    allowed = {file: count for file, (count, _) in ALLOWED.items()}
    assert Counter({file: len(rows) for file, rows in found.items()}) == allowed, found


def test_a_comparison_is_recognized():
    code = 'op.name == "scan"; eqn.primitive.name in ("slice", "cond"); name != "add"; op.name.startswith("scatter")'
    assert len(list(names_compared(ast.parse(code)))) == 4
    assert not list(names_compared(ast.parse('dim == "slice"; name in ("jit", "plan")')))

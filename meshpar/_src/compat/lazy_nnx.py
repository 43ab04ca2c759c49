"""The names of ``flax.nnx``, which is imported when one of them is first used: its import takes 0.15 s and loads IPython.

Also the objects of a tree with identity: no object exists before ``flax.nnx`` is imported.
"""

import sys
from typing import Any

import jax


def __getattr__(name: str) -> Any:
    """An attribute of ``flax.nnx``; stored, so that this function is called once for each."""
    from flax import nnx

    value = globals()[name] = getattr(nnx, name)
    return value


def is_graph_node(x: Any) -> bool:
    """Whether flax.nnx treats a value as an object with identity (a module, an optimizer, a variable)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(x, nnx.Variable) or nnx.graphlib.is_graph_node(x))


def flatten_to_nodes(tree: Any) -> tuple[list[Any], Any]:
    """(leaves, structure) of a tree whose nnx objects are leaves, and ``nnx.State``s, which are trees of arrays, as well."""
    nnx = sys.modules.get("flax.nnx")
    return jax.tree.flatten(tree, is_leaf=nnx and (lambda x: is_graph_node(x) or isinstance(x, nnx.State)))


def has_graph_nodes(tree: Any) -> bool:
    """Whether a tree contains nnx objects with identity, modules or optimizers."""
    return any(map(is_graph_node, flatten_to_nodes(tree)[0]))

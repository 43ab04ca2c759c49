"""State trees as name → array and back, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from ...errors import CheckpointError
from ..compat import lazy_nnx as nnx
from ..flax import flatten_named


def by_name(tree: Any) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """(tree path → leaf of a state, the inverse: a function from tree path → leaf to a state).

    Args:
      tree: arrays (or ``ShapeDtypeStruct``) in plain trees, linen boxes, nnx modules and optimizers. Paths are the same as
        in plans: ``params/layers/wq``; in nnx objects without ``.value``.

    Raises:
      CheckpointError: two leaves with the same path.
    """
    tops, top = jax.tree.flatten(tree, is_leaf=nnx.is_graph_node)
    nodes = [i for i, x in enumerate(tops) if nnx.is_graph_node(x)]
    graph, states = nnx.split(tuple(tops[i] for i in nodes)) if nodes else (None, {})
    for k, i in enumerate(nodes):
        tops[i] = states.get(k, {})
    tree = jax.tree.unflatten(top, tops)
    leaves, structure = jax.tree.flatten(tree)
    paths = [leaf.path or "value" for leaf in flatten_named(tree)]
    if len(set(paths)) != len(leaves):
        twice = next((p for p in paths if paths.count(p) > 1), "")
        fix = "give the two their own keys: a path names one leaf of a checkpoint"
        raise CheckpointError(f"two leaves of the state have the path {twice!r}", path=twice, fixes=[fix])

    def back(found: Mapping[str, Any]) -> Any:
        """A tree with the structure of ``tree`` and the leaves of ``found`` (path → leaf); nnx objects are new ones."""
        out = jax.tree.unflatten(structure, [found[p] for p in paths])
        if not nodes:
            return out
        parts = top.flatten_up_to(out)
        mine = [x for i in nodes for x in jax.tree.leaves(parts[i])]
        merged = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(states), mine))
        for k, i in enumerate(nodes):
            parts[i] = merged[k]
        return jax.tree.unflatten(top, parts)

    return dict(zip(paths, leaves, strict=True)), back


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a/b": x}`` → ``{"a": {"b": x}}``."""
    return unflatten_dict(flat, sep="/")


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`nested`."""
    return flatten_dict(tree, sep="/")


def stored_names(paths: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Path → the keys under which orbax stores the leaf, all different also when they are joined by dots, as orbax does.

    A path is stored under its parts: ``a/b`` as ``("a", "b")``. In parts ``.`` is written as ``%2E``, ``%`` as ``%25``, and no text
    as ``%00``: ``a.b`` → ``("a%2Eb",)``. A leaf whose path others continue ends with ``%2F``.
    """
    inner = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    quoted = lambda part: part.replace("%", "%25").replace(".", "%2E") or "%00"  # noqa: E731
    return {
        path: (*map(quoted, parts[:-1]), quoted(parts[-1]) + "%2F" * (path in inner))
        for path in paths
        for parts in [path.split("/")]
    }

"""Names that Flax models carry: boxes of linen, variables of nnx, logical constraints inside a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.core.meta
import jax
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import RankError
from ..compat import lazy_nnx as nnx
from ..compat.jax import axes_of_spec, patched_constraints
from ..dims import Dims, PathDims, fit_dims, format_dims, join_path, parse_dims
from ..program.primitives import name_dims_p, place_p

OPT_NAMES = frozenset({"opt", "opt_state", "optimizer", "optimizer_state"})
PARAM_NAMES = frozenset({"params", "param"})


@dataclass(slots=True)
class Leaf:
    """An array of an argument or result: its tree path, its value, the names it carries, and its kind.

    ``kind`` is ``"params"``, ``"opt"`` or None.
    """

    path: str
    value: Any
    dims: Dims | None
    kind: str | None


def flatten_named(tree: Any, path: tuple[str, ...] = ()) -> list[Leaf]:
    """The leaves of a tree in JAX's order, with paths, and with the names of linen boxes and nnx variables.

    Raises:
      RankError: metadata whose number of names is not the rank of the value.
    """
    out: list[Leaf] = []
    _walk(tree, path, None, out)
    return out


def dims_of(leaf: Leaf, patterns: PathDims) -> Dims | None:
    """The names of a leaf's dims by the first pattern that matches its path, else by its metadata.

    Raises:
      RankError: a pattern with another number of names.
    """
    if (match := patterns.match(leaf.path)) is None:
        return leaf.dims
    return fit_dims(match[1], jax.numpy.shape(leaf.value), path=leaf.path, origin=f"the pattern {match[0]!r}")


def _kind_of_path(path: Iterable[str]) -> str | None:
    """The kind a path tells: the last component that says one decides, but nothing inside optimizer state is a parameter."""
    path = set(path)
    return "opt" if path & OPT_NAMES else "params" if path & PARAM_NAMES else None


def _kind_of_optax(x: Any) -> str | None:
    """``opt`` for the state of a transformation, of optax or of this package; ``params`` for ``LookaheadParams``; else None."""
    of = type(x)
    if not (isinstance(x, tuple) and hasattr(x, "_fields") and of.__module__.split(".")[0] in ("optax", "meshpar")):
        return None
    return "params" if of.__name__ == "LookaheadParams" else "opt"


def _is_node_states(x: Any) -> bool:
    return type(x).__name__ == "NodeStates" and type(x).__module__.startswith("flax.nnx")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["tree"])
@dataclass(slots=True)
class _PureState:
    """An ``nnx.State`` among arguments that also have modules: its variables are arrays of a tree, and are not updated."""

    leaves: list[Any]
    tree: Any

    @property
    def state(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)


def variables(x: Any) -> Any:
    """A tree as it is; an nnx module by its ``nnx.state``."""
    return nnx.state(x) if nnx.is_graph_node(x) else x


def pure_states(tree: Any) -> Any:
    """The tree with every ``nnx.State`` as a node without identity; modules stay as they are."""
    return jax.tree.map(
        lambda x: _PureState(*jax.tree.flatten(x)) if isinstance(x, nnx.State) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.State) or nnx.is_graph_node(x),
    )


def with_states(tree: Any) -> Any:
    """The inverse of :func:`pure_states`."""
    return jax.tree.map(
        lambda x: x.state if isinstance(x, _PureState) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _PureState) or nnx.is_graph_node(x),
    )


def _special(x: Any) -> bool:
    """Whether a node of a tree is read by its type: a Flax box, an nnx variable or state, or the state of an optax
    transformation."""
    return (
        isinstance(x, flax.core.meta.AxisMetadata | nnx.Variable | _PureState)
        or _kind_of_optax(x) is not None
        or _is_node_states(x)
    )


def _walk(tree: Any, path: tuple[str, ...], kind: str | None, out: list[Leaf], module: bool = False) -> None:
    """Append a :class:`Leaf` for every leaf of ``tree`` to ``out``.

    Args:
      path: path of the tree.
      kind: of all its leaves (``params``, ``opt``, …), by the type of a tree around them; None: from the path of each.
      module: it is the state of an nnx module, whose variables have the kind of their type: ``optimizer/model/kernel`` of an
        ``nnx.ModelAndOptimizer`` is a parameter.
    """
    if isinstance(tree, flax.core.meta.AxisMetadata | nnx.Variable):
        _open(tree, path, kind, out, module)
        return
    if isinstance(tree, _PureState):
        tree = tree.state
    if _is_node_states(tree):
        for state in tree.states:
            _walk(state, path, kind, out, module=True)
        return
    if of_optax := _kind_of_optax(tree):
        kind = "opt" if kind == "opt" else of_optax
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree and _special(x))
    for keys, x in entries:
        here = path + tuple(map(key_text, keys))
        if x is not tree and _special(x):
            _walk(x, here, kind, out, module)
        else:
            out.append(Leaf(join_path(here), x, None, kind or _kind_of_path(here)))


def _open(box: Any, path: tuple[str, ...], kind: str | None, out: list[Leaf], module: bool) -> None:
    """Append the leaves of a Flax box or nnx variable to ``out``, with the dims of its metadata.

    Raises:
      RankError: the metadata names another number of dims than the array has, except in optimizer state.
    """
    if isinstance(box, nnx.Variable):
        if isinstance(box, nnx.optimizer.OptState):
            kind = "opt"
        elif isinstance(box, nnx.Param):
            kind = kind or (None if module else _kind_of_path(path)) or "params"
        meta = box.get_metadata()
        names = next((meta[k] for k in ("out_sharding", "sharding_names", "sharding") if meta.get(k)), None)
    else:
        names = getattr(box, "names", None)
    names, kind = _as_names(names), kind or _kind_of_path(path)
    text = "/".join(path)
    for keys, value in jax.tree_util.tree_flatten_with_path(box)[0]:
        extra = tuple(map(key_text, keys[1:]))
        shape = getattr(value, "shape", ())
        dims: Dims | None = None
        if names is not None:
            if len(names) == len(shape):
                parse_dims(names, what=f"Flax metadata of {text}")
                # optax makes accumulators of other shapes inside its parameters' boxes; those dims have no name
                dims = tuple(None if n == 1 else d for d, n in zip(names, shape, strict=True))
            elif kind != "opt":
                raise RankError(
                    f"{text} has {len(shape)} dimensions, but its Flax metadata names {len(names)}",
                    path=text,
                    shape=shape,
                    dims=format_dims(names),
                    fixes=["name every dimension in the metadata, None for one without a name"],
                )
        out.append(Leaf(join_path(path + extra), value, dims, kind))


def _as_names(names: Any) -> Dims | None:
    """Names from metadata: a tuple of names, a PartitionSpec or a NamedSharding over names."""
    if isinstance(names, NamedSharding):
        names = names.spec
    if names is None or not isinstance(names, tuple | list | PartitionSpec):
        return None
    return tuple(n if isinstance(n, str) else n[0] if isinstance(n, tuple) and len(n) == 1 else None for n in names)


def key_text(key: Any) -> str:
    """A component of a tree path as text."""
    return jax.tree_util.keystr((key,), simple=True)


@contextlib.contextmanager
def capture_names(axes: Iterable[str], explicit: Any = None, patterns: PathDims | None = None) -> Iterator[set[str]]:
    """While a function is traced, turn sharding constraints over names into names.

    ``linen.with_logical_constraint`` and ``jax.lax.with_sharding_constraint`` over dim names become ``mp.named``; over the mesh's
    ``axes`` they become explicit specs. NNX variables are made without a mesh.

    Args:
      explicit: a mesh with Explicit axes, for a function that uses JAX's explicit sharding: ``jax.sharding.reshard`` is a sharding
        constraint as well.
      patterns: they may give the names of constraints other names.

    Yields:
      The names of the constraints so far, as the function has them.
    """
    axes, seen = frozenset(axes), set[str]()

    def name(x: Any, names: tuple[Any, ...], origin: str) -> Any:
        seen.update(n for n in names if isinstance(n, str))
        return _name(x, patterns.own(names) if patterns else names, origin)

    def logical(names: Any, x: Any) -> Any:
        return x if names is None else name(x, tuple(names), "nn.with_logical_constraint")

    def constraint(x: Any, shardings: Any) -> Any | None:
        """An array tree after ``with_sharding_constraint``: dims named or placed; None: JAX applies the constraint
        itself."""
        spec = shardings.spec if isinstance(shardings, NamedSharding) else shardings
        if not isinstance(spec, PartitionSpec | tuple) or spec is None:
            return None
        flat = [a for e in spec for a in (e if isinstance(e, tuple) else (e,))]
        if not all(a is None or isinstance(a, str) for a in flat):
            return None  # UNCONSTRAINED: leave it open
        if any(a is not None and a not in axes for a in flat):
            return jax.tree.map(lambda v: name(v, tuple(spec), "with_sharding_constraint"), x)
        return jax.tree.map(lambda v: place_p.bind(v, spec=axes_of_spec(spec, v.ndim)), x)

    with patched_constraints(logical, constraint, explicit), nnx.use_eager_sharding(False):
        yield seen


def _name(x: Any, names: tuple[Any, ...], origin: str) -> Any:
    """An array whose dims are named by ``mp.named``'s primitive; a name that is not text, and missing trailing names,
    are None. ``origin`` is the function that the model calls, for reports."""
    names = tuple(n if isinstance(n, str) else None for n in names)
    names += (None,) * (x.ndim - len(names))
    dims = fit_dims(
        parse_dims(names, what="sharding constraint"), x.shape, path="the value", origin="its sharding constraint"
    )
    return name_dims_p.bind(x, names=dims, origin=origin)

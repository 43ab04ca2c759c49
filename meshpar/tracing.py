"""From a call of a step to its program: the flattened arguments, the traced function, and the dims of every argument and result."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import jax
import numpy as np

from .compat import nnx
from .compat.jax import (
    abstract_array,
    is_graph_node,
    is_ref,
    on_host,
    traced_as,
    user_line,
    without_gc,
)
from .dims import Dims, PathDims, fit_dims, format_dims, near, path_matches
from .errors import PatternError, UnsupportedError
from .flax import Leaf, capture_names, flatten_named, key_text, with_states
from .options import StepOptions
from .program import Program, infer, trace

OPTION_NAMES = {"mesh", "layout", "topology", *(option.name for option in fields(StepOptions))}
"""Names of options that a user may pass to a step by mistake."""

ArgumentPath = Callable[[int], tuple[str, ...]]
"""Position of an argument → the beginning of its leaves' paths."""

# -- the arguments of one call


@dataclass(eq=False, slots=True)
class Call:
    """The arguments of one call, taken apart once; all that names, plans, lowers or runs them reads this.

    Attributes:
      tree: of (args, kwargs) without the static ones, in whose places positional ones leave a None.
      leaves: of that tree; arrays, numbers, ``ShapeDtypeStruct``, and the static leaves of modules.
      leaf_keys: :func:`leaf_key` of every leaf.
      statics: (position or keyword, value) of the static arguments; keywords in alphabetical order.
      key: identifies the program: JAX's trace context, the tree, the static arguments with their types, and ``leaf_keys``.
      nodes: nnx objects were taken apart, so that the results have what updates them.
    """

    tree: Any
    leaves: list[Any]
    leaf_keys: tuple[Hashable, ...]
    statics: tuple[tuple[int | str, Any], ...]
    key: tuple[Any, ...]
    nodes: bool

    @property
    def fixed(self) -> dict[int, Any]:
        """The leaves that are no arrays, by position."""
        return {i: k.value for i, k in enumerate(self.leaf_keys) if isinstance(k, Fixed)}

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) as the tree has them."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def without_leaves(self) -> Call:
        """The same call without its arrays: what a cached program refers to, so that it keeps no array alive."""
        return replace(self, leaves=[None] * len(self.leaves))


def type_key(x: Any) -> Hashable:
    """The type of a static value, and of its parts if it is a tuple, a frozenset or a dataclass.

    ``1 == 1.0 == True``, but a function of them returns different dtypes, so that a program is looked up by the types as well.
    """
    kind = type(x)
    if isinstance(x, tuple):
        return kind, *map(type_key, x)
    if isinstance(x, frozenset):
        return kind, frozenset((e, type_key(e)) for e in x)
    if is_dataclass(x) and not isinstance(x, type):
        return kind, *(type_key(getattr(x, f.name, None)) for f in fields(x) if f.compare)
    return kind


@dataclass(frozen=True, slots=True)
class Fixed:
    """A leaf that is no array: part of the program.

    Attributes:
      types: :func:`type_key` of the value.
    """

    value: Any
    types: Hashable


def _joined(arrays: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
    """All leaves of a tree: the arrays, with those that are none in their positions."""
    rest = iter(arrays)
    return [fixed[i] if i in fixed else next(rest) for i in range(len(arrays) + len(fixed))]


def with_statics(
    args: Sequence[Any], kwargs: Mapping[str, Any], statics: Sequence[tuple[int | str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with the static arguments in their places."""
    places = {k: v for k, v in statics if isinstance(k, int)}
    names = {k: v for k, v in statics if isinstance(k, str)}
    return tuple(places.get(i, x) for i, x in enumerate(args)), {**kwargs, **names}


_NOT_NUMBERS = tuple("OUSMm")
"""NumPy's kinds of dtypes for objects, texts and dates."""


_NUMBERS = {bool: False, int: True, float: True, complex: True}
"""Python's numbers → whether JAX gives them a weak type."""


def leaf_key(x: Any) -> Hashable:
    """The facts of a leaf that a program depends on: (shape, dtype, weak type, whether it is on the host); :class:`Fixed` for a
    leaf that is no array. A Python number has the key of the weakly typed scalar that JAX makes of it."""
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type, on_host(aval)
    weak = _NUMBERS.get(type(x))
    if weak is not None:
        return (), jax.dtypes.canonicalize_dtype(type(x)), weak, False
    dtype = getattr(x, "dtype", None)
    if dtype is None and isinstance(x, bool | int | float | complex):  # a subclass, such as an IntEnum
        base = next(t for t in _NUMBERS if isinstance(x, t))
        return (), jax.dtypes.canonicalize_dtype(base), _NUMBERS[base], False
    if dtype is None or not hasattr(x, "shape") or getattr(dtype, "kind", None) in _NOT_NUMBERS:
        return Fixed(x, type_key(x))
    return (
        tuple(x.shape),
        jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True),
        getattr(x, "weak_type", False),
        on_host(x),
    )


def is_static(x: Any) -> bool:
    """Whether a leaf is no array or number: text, a function, a NumPy array of objects."""
    return isinstance(leaf_key(x), Fixed)


def _abstract(shape: tuple[int, ...], dtype: Any, weak_type: bool, host: bool) -> Any:
    """What a leaf is traced as: its shape, dtype and memory, and nothing of how it is split."""
    return abstract_array(shape, jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True), weak_type, host)


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _described(x: Any) -> str:
    if isinstance(x, str):
        return f"the text {x!r}"
    if isinstance(x, np.ndarray):
        return f"an array of {x.dtype}"
    return f"a {type(x).__name__}"


def _no_array(path: str, value: Any) -> UnsupportedError:
    name, _, rest = path.partition("/")
    fixes = [
        f"make `{name}` static: static_argnames={name!r}"
        if not rest
        else "take it out of the tree, and pass it as a static argument"
    ]
    if name in OPTION_NAMES:
        fixes.insert(0, f"`{name}` is an option of mp.plan and mp.compile, not of a step: mp.plan(fn, …, {name}=…)")
    return UnsupportedError(f"{path}: {_described(value)} is no JAX array", path=path, fixes=fixes)


def unhashable(call: Call, argument_path: ArgumentPath) -> UnsupportedError:
    """The error for a call that no hash can tell from others: which argument it is about."""
    for ident, value in call.statics:
        if not _hashable(value):
            name = ident if isinstance(ident, str) else "/".join(argument_path(ident))
            return UnsupportedError(
                f"{name}: a static argument must have a hash, and {_described(value)} has none",
                path=name,
                fixes=[
                    "a tuple, a frozenset or a frozen dataclass has one",
                    "or pass arrays, and leave it out of static_argnames",
                ],
            )
    leaves = zip(named_arguments(*call.dynamic, argument_path), call.leaf_keys, strict=True)
    leaf = next(leaf for leaf, key in leaves if not _hashable(key))
    return _no_array(leaf.path, leaf.value)


def _check_fixed(tree: Any, argument_path: ArgumentPath | None = None) -> None:
    """Leaves that are no arrays belong to modules (nodes with attributes), of which they are a part as static ones are.

    Raises:
      UnsupportedError: one in a plain container.
    """
    for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf_key(x), Fixed) and not any(isinstance(k, jax.tree_util.GetAttrKey) for k in keys):
            names = [key_text(k) for k in keys]
            if argument_path is not None:
                names = [*(argument_path(int(names[1])) if names[0] == "0" else names[1:2]), *names[2:]]
            path = "/".join(names) or "the result"
            if argument_path is None:
                raise UnsupportedError(
                    f"{path}: a function returns JAX arrays, and {_described(x)} is none",
                    path=path,
                    fixes=["return arrays and numbers only; what is static belongs outside of the step"],
                )
            raise _no_array(path, x)


@contextlib.contextmanager
def _axis_names_refused() -> Iterator[None]:
    """Say what a ``pmean`` over an axis means here: nothing, since sums over devices are the layout's."""
    try:
        yield
    except NameError as e:
        if "unbound axis name" not in str(e):
            raise
        axis = str(e).partition("unbound axis name:")[2].split(".")[0].split()[0]
        raise UnsupportedError(
            f"`{axis}` is no axis inside a step: it is written for whole arrays, and a mean over the batch is one over all devices",
            axis=axis,
            source=user_line(e),
            fixes=["delete the pmean, psum, axis_index, …: what crosses devices follows from the layout"],
        ) from e


def has_graph_nodes(tree: Any) -> bool:
    """Whether nnx objects with identity, modules and optimizers, are in a tree; an ``nnx.State`` is a tree of arrays."""
    stop = lambda x: is_graph_node(x) or isinstance(x, nnx.State)  # noqa: E731
    return any(map(is_graph_node, jax.tree.leaves(tree, is_leaf=stop)))


# -- the program of a call


@dataclass(eq=False, slots=True)
class TracedStep:
    """A program with its trees, before any layout.

    Attributes:
      out_tree: of the results.
      fixed: the static leaves of the results, by position; the program has the others.
      avals: of the program's arguments.
    """

    program: Program
    out_tree: Any
    fixed: dict[int, Any]
    avals: tuple[Any, ...]

    def result(self, outs: Sequence[Any]) -> Any:
        """The results as the function returns them."""
        return jax.tree.unflatten(self.out_tree, _joined(outs, self.fixed) if self.fixed else outs)


@dataclass(eq=False)
class FlatFunction:
    """A function over the arrays of a call: it puts its arguments together, and takes apart what it updates and returns.

    Its result has None for the leaves that are no arrays.

    Attributes:
      tag: that under which nnx objects were taken apart; None: there are none.
      out_tree, fixed: of the results, once it has been called: their tree, and the leaves that are no arrays by position.
    """

    fn: Callable[..., Any]
    call: Call
    tag: Hashable | None
    out_tree: Any = None
    fixed: dict[int, Any] = field(default_factory=dict)

    def __call__(self, *xs: Any) -> Any:
        args, kwargs = jax.tree.unflatten(self.call.tree, _joined(xs, self.call.fixed))
        args, kwargs = with_statics(args, kwargs, self.call.statics)
        if self.tag is not None:
            opened = nnx.from_tree((args, kwargs), ctxtag=self.tag, is_inner=True)
            args, kwargs = with_states(opened)
            out = self.fn(*args, **kwargs)
            kept = jax.tree.map(lambda x: x if is_graph_node(x) else None, opened, is_leaf=is_graph_node)
            out = nnx.to_tree((*kept, out), ctxtag=self.tag)
        else:
            out = self.fn(*args, **kwargs)
        leaves, self.out_tree = jax.tree.flatten(out)
        self.fixed = {i: x for i, x in enumerate(leaves) if isinstance(leaf_key(x), Fixed)}
        if not self.fixed:
            return out
        _check_fixed(out)
        return jax.tree.unflatten(self.out_tree, [None if i in self.fixed else x for i, x in enumerate(leaves)])


def trace_call(
    call: Call, flat: FlatFunction, argument_path: ArgumentPath, patterns: PathDims, axes: Iterable[str], init: bool
) -> TracedStep:
    """The program of a call, its dims named.

    Args:
      call: with its leaves, of which the shapes and names are read.
      flat: the function over the call's arrays.
      patterns: ``dims=`` of :func:`meshpar.jit`; with ``init``, of the results as well, fresh state.
      axes: the mesh's.

    Raises:
      PatternError, RankError, UnsupportedError: patterns that fit no tensor, a leaf that is no array, a sum over devices.
    """
    named = named_arguments(*call.dynamic, argument_path)
    for leaf in named:
        if is_ref(leaf.value):
            raise UnsupportedError(
                f"{leaf.path}: a mutable array (jax.Ref) cannot be an argument of a sharded step",
                path=leaf.path,
                fixes=["pass its value, ref[...], return the new one, and write that: ref[...] = step(ref[...])"],
            )
    keys = call.leaf_keys
    if len(named) != len(keys):
        raise AssertionError("paths and leaves do not match")
    arrays = [
        (_abstract(*cast(tuple, key)), leaf)
        for leaf, key in zip(named, keys, strict=True)
        if not isinstance(key, Fixed)
    ]
    named = [leaf for _, leaf in arrays]
    used: set[str] = set()
    annotations = [annotation_of(leaf, patterns, used, named) for leaf in named]

    if call.fixed:
        _check_fixed(call.dynamic, argument_path)
    with capture_names(axes), _axis_names_refused():
        traced_as(flat, flat.fn, [leaf.path for leaf in named])
        closed, shapes, out_leaves = trace(flat, [x for x, _ in arrays])
    if any(map(is_ref, closed.consts)):
        raise UnsupportedError(
            f"{getattr(flat.fn, '__name__', 'the step')} closes over a mutable array (jax.Ref): a sharded step cannot use it",
            fixes=[
                "pass its value as an argument, and return the new one",
                "or make it inside of the step: jax.new_ref(x)",
            ],
        )
    if flat.tag is None:
        results = flatten_named(shapes)
    else:  # what is updated keeps its own path
        args, kwargs, out = shapes
        results = [*named_arguments(args, kwargs, argument_path), *flatten_named(out)]
    if len(results) != len(out_leaves):
        raise AssertionError("paths and results do not match")
    twin_of = _twins(named, annotations)
    out_annotations: list[Dims | None] = []
    for leaf in results:
        mine = annotation_of(leaf, patterns, used, results) if init else leaf.dims
        twin = twin_of(leaf)
        if twin is not None:
            mine = mine or twin[1]
            leaf.kind = leaf.kind or twin[0].kind
        out_annotations.append(mine)
    if init:
        _name_state(results, out_annotations)
    _check_patterns(patterns, used, [leaf.path for leaf in (*named, *(results if init else ()))])
    with without_gc():
        program = infer(
            closed, annotations, [leaf.path for leaf in named], out_annotations, [leaf.path for leaf in results]
        )
    for value, leaf in zip(program.inputs, named, strict=True):
        value.kind = leaf.kind
    for value, leaf in zip(program.outputs, results, strict=True):
        value.kind = value.kind or leaf.kind
    return TracedStep(program, flat.out_tree, flat.fixed, tuple(closed.in_avals))


# -- what arguments and results are called


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], argument_path: ArgumentPath) -> list[Leaf]:
    """The leaves with their tree paths, names and kinds."""
    out: list[Leaf] = []
    for i, x in enumerate(args):
        out += flatten_named(x, argument_path(i))
    for k in sorted(kwargs):
        out += flatten_named(kwargs[k], (k,))
    return out


def named_tree(tree: Any, patterns: PathDims) -> list[tuple[Leaf, Dims | None]]:
    """The leaves of a tree, each with its dims: those of a pattern, of its Flax metadata, or, of optimizer state, of its parameter.

    Raises:
      PatternError, RankError: a pattern that matches no leaf, or one of another rank.
    """
    leaves = flatten_named(tree)
    used: set[str] = set()
    dims = [annotation_of(leaf, patterns, used, leaves) for leaf in leaves]
    _name_state(leaves, dims)
    _check_patterns(patterns, used, [leaf.path for leaf in leaves])
    return list(zip(leaves, dims, strict=True))


def _twins(named: list[Leaf], annotations: list[Dims | None]) -> Callable[[Leaf], tuple[Leaf, Dims | None] | None]:
    """Finds the input that a result continues: ``0/params/w`` of a returned state is ``state/params/w`` of the argument."""
    exact = {leaf.path: (leaf, dims) for leaf, dims in zip(named, annotations, strict=True)}
    tails: dict[str, list[str]] = {}
    for path in exact:
        tails.setdefault(path.partition("/")[2], []).append(path)

    def find(result: Leaf) -> tuple[Leaf, Dims | None] | None:
        twin = exact.get(result.path)
        for tail in (result.path, result.path.partition("/")[2]):
            if twin is None and tail and len(tails.get(tail, ())) == 1:
                twin = exact[tails[tail][0]]
        return twin if twin is not None and np.shape(twin[0].value) == np.shape(result.value) else None

    return find


def _name_state(results: list[Leaf], annotations: list[Dims | None]) -> None:
    """Give fresh optimizer state the names of its parameter: the one whose path ends alike.

    A moment has the parameter's shape; factored ones (Adafactor, SM3) have some of its dims, if the sizes leave no doubt.
    """
    params = [(leaf, dims) for leaf, dims in zip(results, annotations, strict=True) if leaf.kind == "params" and dims]
    by_end: dict[str, list[tuple[Leaf, Dims]]] = {}
    for leaf, dims in params:
        by_end.setdefault(leaf.path.rsplit("/", 1)[-1], []).append((leaf, dims))
    for k, leaf in enumerate(results):
        if leaf.kind != "opt" or annotations[k] is not None:
            continue
        mine = leaf.path.split("/")[::-1]
        best, length = None, 0
        for other, dims in by_end.get(mine[0], ()):
            theirs = other.path.split("/")[::-1]
            same = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            if same > length:
                best, length = (other, dims), same
        if best is not None:
            annotations[k] = _dims_like(leaf.value.shape, best[0].value.shape, best[1])


def _dims_like(shape: Sequence[int], whole: Sequence[int], dims: Dims) -> Dims | None:
    """The names of an array whose dims are some of a parameter's; None where the sizes do not tell which."""
    if len(shape) == len(whole) and all(n in (1, m) for n, m in zip(shape, whole, strict=True)):
        return tuple(None if n == 1 else d for n, d in zip(shape, dims, strict=True))
    found = {
        picks
        for picks in itertools.combinations(range(len(whole)), len(shape))
        if tuple(whole[i] for i in picks) == tuple(shape)
    }
    if len(found) == 1 and shape:
        return tuple(dims[i] for i in found.pop())
    return None


def annotation_of(leaf: Leaf, patterns: PathDims, used: set[str], leaves: Sequence[Leaf] = ()) -> Dims | None:
    """The dims that a pattern gives a leaf, else its own.

    Args:
      used: the pattern is added to it.
      leaves: all of them; an error suggests a pattern that matches only those of the right rank.

    Raises:
      RankError: the pattern names more or fewer dims than the leaf has.
    """
    found = patterns.match(leaf.path)
    if found is None:
        return leaf.dims
    pattern, dims = found
    used.add(pattern)
    shape, fixes = np.shape(leaf.value), []
    if len(shape) != len(dims) and (narrower := _narrower(pattern, dims, leaves)) is not None:
        fixes.append(f'match only arrays with {len(dims)} dims: {{"{narrower}": "{format_dims(dims)}"}}')
    return fit_dims(dims, shape, path=leaf.path, origin=f"the pattern {pattern!r}", fixes=fixes)


def _narrower(pattern: str, dims: Sequence[Any], leaves: Sequence[Leaf]) -> str | None:
    """A pattern that matches, of the leaves that ``pattern`` matches, only some of the right rank: ``*params/down`` for ``*/down``,
    which matches the factored moments of Adafactor too. The first that matches as many as another; None: there is none."""
    if not pattern.startswith("*") or ... in dims:
        return None
    fits: dict[str, bool] = {
        leaf.path: np.ndim(leaf.value) == len(dims) for leaf in leaves if path_matches(pattern, leaf.path)
    }
    parts = dict.fromkeys(part for path, good in fits.items() if good for part in path.split("/")[:-1])
    tried = [f"*{part}{between}{pattern[1:]}" for between in ("", "*") for part in parts]
    matched = {p: [good for path, good in fits.items() if path_matches(p, path)] for p in tried}
    return max((p for p, found in matched.items() if found and all(found)), key=lambda p: len(matched[p]), default=None)


def _similar_pattern(pattern: str, paths: Sequence[str]) -> list[str]:
    """The fix for a pattern that matches no path: with ``*/`` in front, or spelled as a similar path; empty if there is none."""
    if any(path_matches(f"*/{pattern}", path) for path in paths):
        return [f"did you mean {f'*/{pattern}'!r}?"]
    similar = near(pattern, [*paths, *({f"*/{path.rpartition('/')[2]}" for path in paths} if "*" in pattern else ())])
    return [f"did you mean {' or '.join(map(repr, similar))}?"] if similar else []


def _check_patterns(patterns: PathDims, used: set[str], paths: list[str]) -> None:
    """Every pattern is used.

    Raises:
      PatternError: one matches nothing, or only what an earlier one matches.
    """
    for pattern, _ in patterns.items:
        if pattern in used:
            continue
        shadow = next((p for p in paths if path_matches(pattern, p)), None)
        if shadow is not None:
            earlier = patterns.match(shadow)
            assert earlier is not None
            raise PatternError(
                f"the dims= pattern {pattern!r} is never used: {earlier[0]!r} stands before it and matches the same tensors",
                path=shadow,
                fixes=["the first pattern that matches wins: put the narrower one first"],
            )
        listed = sorted(paths, key=lambda path: -difflib.SequenceMatcher(None, pattern, path).ratio())
        raise PatternError(
            f"the dims= pattern {pattern!r} matches no tensor; a pattern matches a complete path",
            pattern=pattern,
            fixes=[
                *_similar_pattern(pattern, paths),
                f"paths are: {', '.join(listed[:8])}{', …' if len(paths) > 8 else ''}",
            ],
        )

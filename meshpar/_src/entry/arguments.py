"""The arguments of one call of a step: which are static or donated, their flat leaves, and the key of the call's program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import jax
import numpy as np

from ...errors import UnsupportedError
from ..compat.jax import on_host, trace_context
from ..flax import Leaf, flatten_named, key_text
from .options import OPTIONS, StepOptions, selected_arguments

OPTION_NAMES = {"mesh", "layout", "topology", *OPTIONS}
"""Names of options that a user may pass to a step by mistake."""

ArgumentPath = Callable[[int], tuple[str, ...]]
"""Position of an argument → the beginning of its leaves' paths."""


@dataclass(eq=False, slots=True)
class Call:
    """The flattened arguments of one call.

    Attributes:
      tree: structure of (args, kwargs) without the static arguments; a positional one is replaced by None.
      leaves: the leaves of ``tree``: arrays, numbers, ``ShapeDtypeStruct``, and the static leaves of modules.
      leaf_keys: :func:`leaf_key` of every leaf.
      statics: (position or keyword, value) of the static arguments; keywords in alphabetical order.
      key: identifies the program: JAX's trace context, the tree, the static arguments with their types, and ``leaf_keys``.
      nodes: the arguments have nnx objects, which were split into trees; the results contain their updates.
    """

    tree: Any
    leaves: list[Any]
    leaf_keys: tuple[Hashable, ...]
    statics: tuple[tuple[int | str, Any], ...]
    key: tuple[Any, ...]
    nodes: bool

    @property
    def fixed(self) -> dict[int, Any]:
        """Position → leaf, of the leaves that are not arrays."""
        return {i: k.value for i, k in enumerate(self.leaf_keys) if isinstance(k, Fixed)}

    @property
    def dynamic(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with None in place of static positional arguments."""
        return jax.tree.unflatten(self.tree, self.leaves)

    def without_leaves(self) -> Call:
        """The call with None for every leaf. Cached programs refer to this one, so that they keep no array alive."""
        return replace(self, leaves=[None] * len(self.leaves))


class ArgumentRoles:
    """Which arguments of a function are static and which are donated, and how its calls are flattened.

    Attributes:
      signature: of the function; None if it has none.
      static, donated: positions and names; a negative position counts from the end of a call's positional arguments.

    Raises:
      UnsupportedError: an argument that the function does not have, or one that is both static and donated.
    """

    def __init__(self, fn: Callable[..., Any], options: StepOptions):
        """Resolve the static and donated arguments of ``fn`` (by number and by name) through its signature.

        Raises:
          UnsupportedError: an argument is both static and donated, or a name is unknown.
        """
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        self.static = selected_arguments(self.signature, options.static_argnums, options.static_argnames, "static")
        self.donated = selected_arguments(self.signature, options.donate_argnums, options.donate_argnames, "donate")
        self._from_end = frozenset(n for n in self.static if isinstance(n, int) and n < 0) or None
        both = sorted(n for n in self.static & self.donated if isinstance(n, str)) or self.static & self.donated
        if both:
            raise UnsupportedError(
                f"argument {', '.join(map(repr, both))} is both static and donated; a static argument has no memory to donate",
                fixes=["leave it out of donate_argnums and donate_argnames"],
            )

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any], nodes: bool = False) -> Call:
        """The flattened call; ``nodes``: the arguments contain nnx objects that were split into trees."""
        statics: tuple[tuple[int | str, Any], ...] = ()
        if self.static:
            at = self.static if self._from_end is None else self.static | {len(args) + n for n in self._from_end}
            statics = (
                *((i, x) for i, x in enumerate(args) if i in at),
                *((k, kwargs[k]) for k in sorted(kwargs) if k in at),
            )
            args = [None if i in at else x for i, x in enumerate(args)]
            kwargs = {k: x for k, x in kwargs.items() if k not in at}
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        leaf_keys = tuple(map(leaf_key, leaves))
        types = tuple([type_key(x) for _, x in statics]) if statics else ()
        return Call(tree, leaves, leaf_keys, statics, (trace_context(), tree, statics, types, leaf_keys), nodes)

    def path(self, i: int) -> tuple[str, ...]:
        """The tree path of positional argument ``i``: its name, or (name, number) within ``*args``."""
        params = list(self.signature.parameters.values()) if self.signature else []
        for k, p in enumerate(params):
            if p.kind is p.VAR_POSITIONAL and i >= k:
                return p.name, str(i - k)
        return (params[i].name if i < len(params) else str(i),)

    def donated_arrays(self, call: Call) -> frozenset[int]:
        """Positions, among the arrays of a call, of the leaves of donated arguments."""
        if not self.donated:
            return frozenset()
        donated: list[int] = []
        for argument, leaves in _leaf_ranges(*call.dynamic):
            donated += leaves if argument in self.donated else ()
        position = {i: k for k, i in enumerate(i for i in range(len(call.leaves)) if i not in call.fixed)}
        return frozenset(position[i] for i in donated if i in position)


def _leaf_ranges(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int | str, range]]:
    """(position or keyword of an argument, positions of its leaves) of all arguments."""
    ranges: list[tuple[int | str, range]] = []
    first = 0
    for argument, x in [*enumerate(args), *sorted(kwargs.items())]:
        size = len(jax.tree.leaves(x))
        ranges.append((argument, range(first, first + size)))
        first += size
    return ranges


def fully_donated(args: Sequence[Any], kwargs: Mapping[str, Any], donated: set[int]) -> tuple[list[int], list[str]]:
    """(positions, keywords) of the arguments whose leaves are all in ``donated``, positions of leaves."""
    arguments = [a for a, leaves in _leaf_ranges(args, kwargs) if leaves and donated.issuperset(leaves)]
    return [a for a in arguments if isinstance(a, int)], [a for a in arguments if isinstance(a, str)]


def type_key(x: Any) -> Hashable:
    """The type of a static value, and the types of its elements if it is a tuple, a frozenset or a dataclass.

    ``1 == 1.0 == True``, but a function of them returns different dtypes, so that the key of a program contains the types as well.
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
    """The key of a leaf that is not an array: it is part of the program.

    Attributes:
      types: :func:`type_key` of the value.
    """

    value: Any
    types: Hashable


def join_leaves(arrays: Sequence[Any], fixed: Mapping[int, Any]) -> list[Any]:
    """All leaves of a tree, from its arrays and its other leaves (position → leaf)."""
    rest = iter(arrays)
    return [fixed[i] if i in fixed else next(rest) for i in range(len(arrays) + len(fixed))]


def with_statics(
    args: Sequence[Any], kwargs: Mapping[str, Any], statics: Sequence[tuple[int | str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with the static arguments at their positions and names."""
    positional = {k: v for k, v in statics if isinstance(k, int)}
    names = {k: v for k, v in statics if isinstance(k, str)}
    return tuple(positional.get(i, x) for i, x in enumerate(args)), {**kwargs, **names}


_NOT_NUMBERS = tuple("OUSMm")
"""NumPy's kinds of dtypes for objects, texts and dates."""


_NUMBERS = {bool: False, int: True, float: True, complex: True}
"""Type of a Python number → whether JAX gives it a weak type."""


def leaf_key(x: Any) -> Hashable:
    """The properties of a leaf that a program depends on: (shape, dtype, weak type, whether it is in host memory);
    :class:`Fixed` for a leaf that is not an array. A Python number has the key of the weakly typed scalar that JAX makes of it."""
    aval = getattr(x, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type, on_host(aval)
    dtype = getattr(x, "dtype", None)
    number = next((t for t in _NUMBERS if isinstance(x, t)), None) if dtype is None else None
    if number is not None:  # or a subclass, such as an IntEnum
        return (), jax.dtypes.canonicalize_dtype(number), _NUMBERS[number], False
    if dtype is None or not hasattr(x, "shape") or getattr(dtype, "kind", None) in _NOT_NUMBERS:
        return Fixed(x, type_key(x))
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return tuple(x.shape), dtype, getattr(x, "weak_type", False), on_host(x)


def is_static(x: Any) -> bool:
    """Whether a leaf is neither array nor number: text, a function, a NumPy array of objects."""
    return isinstance(leaf_key(x), Fixed)


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], argument_path: ArgumentPath) -> list[Leaf]:
    """The leaves of all arguments with their tree paths, names and kinds."""
    out: list[Leaf] = []
    for i, x in enumerate(args):
        out += flatten_named(x, argument_path(i))
    for k in sorted(kwargs):
        out += flatten_named(kwargs[k], (k,))
    return out


# -- errors


def check_fixed(tree: Any, argument_path: ArgumentPath | None = None) -> None:
    """Check that leaves other than arrays belong to modules (nodes with attributes), whose static leaves are part of the program.

    Args:
      tree: the result of a function; or, with ``argument_path``, (args, kwargs).

    Raises:
      UnsupportedError: such a leaf in another container.
    """
    for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf_key(x), Fixed) and not any(isinstance(k, jax.tree_util.GetAttrKey) for k in keys):
            names = [key_text(k) for k in keys]
            if argument_path is not None:
                names = [*(argument_path(int(names[1])) if names[0] == "0" else names[1:2]), *names[2:]]
            path = "/".join(names) or "the result"
            if argument_path is None:
                raise UnsupportedError(
                    f"{path}: a function returns JAX arrays, and {_described(x)} is not one",
                    path=path,
                    fixes=["return arrays and numbers only; static values belong outside of the step"],
                )
            raise _not_an_array(path, x)


def unhashable(call: Call, argument_path: ArgumentPath) -> UnsupportedError:
    """The error for a call whose key has no hash; it names the argument."""
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
    return _not_an_array(leaf.path, leaf.value)


def _hashable(x: Any) -> bool:
    """Whether ``hash(x)`` succeeds."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _described(x: Any) -> str:
    """The kind of a value, in words: ``the text 'adam'``, ``a dict``."""
    if isinstance(x, str):
        return f"the text {x!r}"
    if isinstance(x, np.ndarray):
        return f"an array of {x.dtype}"
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _not_an_array(path: str, value: Any) -> UnsupportedError:
    """The error for a leaf of an argument, at ``path``, that is neither an array nor static."""
    name, _, rest = path.partition("/")
    static = f"make `{name}` static: static_argnames={name!r}"
    fixes = ["take it out of the tree, and pass it as a static argument" if rest else static]
    if name in OPTION_NAMES:
        fixes.insert(0, f"`{name}` is an option of mp.plan and mp.compile, not of a step: mp.plan(fn, …, {name}=…)")
    return UnsupportedError(f"{path}: {_described(value)} is not a JAX array", path=path, fixes=fixes)

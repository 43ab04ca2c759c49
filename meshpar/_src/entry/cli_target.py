"""Targets of the command line: a function that returns a step, its arguments as shapes, and the dims of what has no names."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import MeshparError, TargetError
from ..compat import lazy_nnx as nnx
from ..compat.jax import without_gc
from ..dims import did_you_mean, parse_pairs
from ..flax import flatten_named
from ..global_arrays import is_key
from ..units import format_memory

MOST_BYTES, SMALL_SIZE = 2e9, 64
"""Bytes of the arguments of a target that a check runs; the size of a dim that the error for more proposes."""
_SHAPE = (
    "it returns (step, arguments) or (step, arguments, dims): a function, a tuple of jax.ShapeDtypeStruct trees, "
    "tree-path patterns → dims"
)


@dataclass(frozen=True)
class Target:
    """The result of a target function.

    Attributes:
      name: as the user wrote it.
      step, args, dims: for :func:`meshpar.plan`.
      layouts: the layouts that its module offers by name (``LAYOUTS``).
      options: the keyword arguments of the target function, from ``--set`` and from its defaults.
      open_ended: the target function takes keyword arguments of any name, for its model.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    dims: Any
    layouts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    open_ended: bool = False


def load_target(text: str, options: Mapping[str, Any] | None = None, arguments: str | None = None) -> Target:
    """The target that ``file.py:function`` or ``package.module:function`` names.

    Args:
      text: a function that returns the target; a file's own folder is importable for it, as for a script.
      options: keyword arguments for the function.
      arguments: ``text`` is the step itself, and this function, of any module or, without a colon, of the same one, takes
        ``options`` and returns the tuple of its arguments.

    Raises:
      TargetError: no such file, module or function; it fails; it returns something else.
    """
    module, function = _function(text)
    layouts = getattr(module, "LAYOUTS", {})
    offered = dict(layouts) if isinstance(layouts, Mapping) else {}
    if arguments is None:
        if isinstance(function, type):
            fix = "a target returns (step, arguments); for a step use --args FUNCTION, which returns its arguments"
            raise TargetError(f"{text} is a class", fixes=[fix])
        returned, options, open_ended = _called(text, module, function, options, _SHAPE)
        step, args, *dims = returned if isinstance(returned, tuple) and len(returned) in (2, 3) else (None, None)
        if callable(step) and isinstance(args, tuple | list):
            return Target(text, step, tuple(args), dims[0] if dims else None, offered, options, open_ended)
        kind = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        raise TargetError(f"{text} returned {kind}", fixes=[_SHAPE])
    where = arguments if ":" in arguments else f"{text.rpartition(':')[0]}:{arguments}"
    returns = "it returns the tuple of the step's arguments"
    args, options, open_ended = _called(where, *_function(where), options, returns)
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    return Target(text, function, args, None, offered, options, open_ended)


def _function(text: str) -> tuple[ModuleType, Callable[..., Any]]:
    """The function that a text names, and its module.

    Raises:
      TargetError: there is no such function.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise TargetError(
            f"target {text!r} is not `file.py:function` or `package.module:function`",
            fixes=["examples/llama.py:llama3_8b"],
        )
    module = _file(where) if where.endswith(".py") or "/" in where else _module(where)
    function = getattr(module, name, None)
    if callable(function):
        return module, function
    offered = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    raise TargetError(f"{where} has no function `{name}`", fixes=did_you_mean(name, offered, "functions"))


def _called(
    text: str, module: ModuleType, function: Callable[..., Any], options: Mapping[str, Any] | None, returns: str
) -> tuple[Any, dict[str, Any], bool]:
    """The result of a function with these keyword arguments, the keyword arguments with its defaults, and whether it takes any.

    Raises:
      TargetError: it cannot be called with them, or fails.
    """
    defaults: dict[str, Any] = {}
    try:
        signature = inspect.signature(function)
        defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
        signature.bind(**(options or {}))
    except TypeError as e:
        of_step = "or, if it is the step itself, --args names a function that returns its arguments"
        raise TargetError(
            f"{text} cannot be called without arguments, or with the ones from --set: {e}",
            fixes=[*_similar_options(e, defaults, module), returns, *([of_step] if returns is _SHAPE else [])],
        ) from None
    _check_choices(options or {}, function, module)
    with without_gc(), nnx.use_eager_sharding(False):  # names in metadata of NNX are no axes of a current mesh
        similar = functools.partial(_similar_options, defaults=defaults, module=module)
        returned = failing_as_target(text, lambda: function(**(options or {})), similar)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return returned, {**defaults, **(options or {})}, open_ended


def _check_choices(options: Mapping[str, Any], function: Callable[..., Any], module: ModuleType) -> None:
    """Raise TargetError for a value of an option that is in no ``Literal`` type of its name: of a parameter of the target function,
    or of fields of dataclasses of its module. A name that has another type as well is not checked."""
    types: defaultdict[str, list[Any]] = defaultdict(list)
    for annotated in (function, *filter(dataclasses.is_dataclass, vars(module).values())):
        with contextlib.suppress(Exception):  # annotations that cannot be evaluated, for any reason
            for name, kind in get_type_hints(annotated).items():
                types[name].append(kind)
    for name, value in options.items():
        known = [choice for kind in types[name] if get_origin(kind) is Literal for choice in get_args(kind)]
        if known and all(get_origin(kind) is Literal for kind in types[name]) and value not in known:
            fixes = did_you_mean(str(value), map(str, known), "values")
            raise TargetError(f"--set {name}={value}: `{name}` is one of {', '.join(map(str, known))}", fixes=fixes)


def _similar_options(error: Exception, defaults: Mapping[str, Any], module: ModuleType) -> list[str]:
    """The fix for an unknown name in ``--set``: similar options of the target, or of the class of its module that refused it."""
    refused = re.search(r"(?:(\w+)\.__init__\(\) )?got an unexpected keyword argument '(\w+)'", str(error))
    if not isinstance(error, TypeError) or refused is None:
        return []
    known = set(defaults)
    with contextlib.suppress(TypeError, ValueError):
        known |= set(inspect.signature(getattr(module, refused[1] or "", None)).parameters)  # type: ignore[arg-type]
    return did_you_mean(refused[2], known, "options")


def failing_as_target(
    name: str, run: Callable[[], Any], fixes_of: Callable[[Exception], list[str]] = lambda e: []
) -> Any:
    """The result of ``run``; an exception of the user's own code becomes a :class:`TargetError` that names its line.

    Args:
      fixes_of: exception → fixes for its error, before the general one.
    """
    try:
        return run()
    except MeshparError:
        raise
    except Exception as e:
        not_the_users = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
        own = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(not_the_users)]
        line = f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})" if own else None
        first, *more = [" ".join(text.split()) for text in str(e).split("\n\n")]
        text = f"{first} {more[0]}" if more and first.endswith(":") else first  # JAX states the difference below
        fixes = [*fixes_of(e), "--debug shows the traceback"]
        raise TargetError(f"{name} fails: {type(e).__name__}: {text}", source=line, fixes=fixes) from e


def _file(where: str) -> ModuleType:
    """The module of a Python file, imported with its folder on ``sys.path``.

    Raises:
      TargetError: there is no such file, it is not Python, or its import fails.
    """
    path = Path(where).resolve()
    if not path.is_file():
        fix = "the path of a Python file, from the folder that the command runs in"
        raise TargetError(f"there is no file {where}", fixes=[fix])
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{where} is no Python file", fixes=["a file whose name ends in .py"])
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    failing_as_target(where, lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _make_importable(folder: Path) -> None:
    """Make a folder the first entry of ``sys.path``, once: a lab loads its target again for other sizes."""
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]


def _module(where: str) -> ModuleType:
    """The module with this dotted name, imported with the current folder on ``sys.path``.

    Raises:
      TargetError: there is no such module, or it imports one that is absent.
    """
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not where.startswith(e.name):
            raise TargetError(
                f"{where} fails: {e}",
                fixes=["install the packages that the module imports, or run with --debug for the traceback"],
            ) from e
        fix = "a file is written with its suffix: file.py:function"
        raise TargetError(f"there is no module {where}", fixes=[fix]) from e


def parse_options(texts: list[str]) -> dict[str, Any]:
    """``["batch=512, seq=4096", "attention=xla"]`` → keyword arguments: numbers, True, False, None, else text.

    Raises:
      TargetError: something that is not ``name=value``.
    """

    def wrong(part: str) -> TargetError:
        return TargetError(f"--set {part!r} is not `name=value`", fixes=['--set "batch=512, seq=4096"'])

    out: dict[str, Any] = {}
    for name, value in parse_pairs(",".join(texts), wrong).items():
        if not name.isidentifier():
            raise wrong(f"{name}={value}")
        try:
            out[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[name] = value
    return out


def concrete(target: Target, ints: int = 8) -> tuple[Any, ...]:
    """The target's arguments with numbers in them, as a check needs them; arrays stay as they are.

    Floats are random, scaled by the size of the dim before the last; optimizer state and scalars are zero; integers are random
    below ``ints``. The same at every call.

    Raises:
      TargetError: more than 2 GB.
    """
    leaves, tree = jax.tree.flatten(target.args)
    total = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves if not is_key(x))
    if total > MOST_BYTES:
        raise TargetError(
            f"{target.name}: a check runs the step, and its arguments are {format_memory(total)}",
            fixes=[*_smaller_sizes(target), "check a smaller target of the same model"],
        )
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [_filled(x, kind, rng, ints) for x, kind in _leaves(target)])


def _smaller_sizes(target: Target) -> list[str]:
    """The fix for a target that is too large: its own sizes, the largest first.

    These are its integer arguments and, if it takes arguments of any name, the dims that Flax metadata names.
    """
    known = {name: size for name, size in target.options.items() if type(size) is int}
    for leaf in flatten_named(target.args) if target.open_ended else ():
        known |= {name: size for name, size in zip(leaf.dims or (), np.shape(leaf.value), strict=False) if name}
    large = sorted((name for name in known if known[name] > SMALL_SIZE), key=lambda name: -known[name])
    sizes = ", ".join(f"{name}={SMALL_SIZE}" for name in large)
    return [f'smaller sizes: --set "{sizes}"'] * bool(large)


def has_drawn_integers(target: Target) -> bool:
    """Whether :func:`concrete` draws integers: the target has arrays of them as shapes."""
    return any(
        isinstance(x, jax.ShapeDtypeStruct) and x.shape and kind != "opt" and jnp.issubdtype(x.dtype, jnp.integer)
        for x, kind in _leaves(target)
    )


def _leaves(target: Target) -> Iterator[tuple[Any, str | None]]:
    """The leaves of the arguments, each with its kind."""
    kinds = (leaf.kind for leaf in flatten_named(target.args))
    return zip(jax.tree.leaves(target.args), kinds, strict=True)


def _filled(x: Any, kind: str | None, rng: np.random.Generator, ints: int) -> Any:
    """An array for a ``ShapeDtypeStruct``; anything else unchanged.

    Args:
      kind: "opt": zeros; otherwise random values of unit variance, divided by the root of the second to last dim.
      rng: source of the values.
      ints: exclusive upper bound of integers.
    """
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if is_key(x):
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    if kind == "opt" or not x.shape:
        return jnp.zeros(x.shape, x.dtype)
    if x.dtype == jnp.bool_:
        return jnp.asarray(rng.random(x.shape) < 0.5)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, ints, x.shape), x.dtype)
    scale = 1.0 if len(x.shape) < 2 else x.shape[-2] ** -0.5
    return jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype)

"""Options as the fields of a frozen dataclass: a function takes them as keywords, a command as flags.

The dataclass has the default of each option, checks and normalizes the values, and is what functions pass on.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from ..errors import UnsupportedError
from .dims import near

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def option(default: Any, about: str = "", flag: str = "", **more: Any) -> Any:
    """A field of a class of options.

    Args:
      default: as users give it; ``__post_init__`` of the class normalizes it.
      about: the help of the option's flag on the command line; "": it has no flag.
      flag: default: the name of the field. Its choices, or the type of its value, are those of the field's annotation.
      more: for ``argparse``'s ``add_argument``.
    """
    return field(default=default, metadata={"flag": flag, "argparse": {"help": about, **more}} if about else {})


def options_of(kind: type[T], keywords: Mapping[str, Any]) -> T:
    """The options of one class, from keyword arguments of :func:`takes_options`, which may be options of several."""
    return kind(**{name: keywords[name] for name in names(kind) if name in keywords})


def names(kind: type[Any]) -> list[str]:
    """The names of the options of a class."""
    return [f.name for f in fields(kind)]


def add_flags(add: Callable[..., Any], kind: type[Any], without: Iterable[str] = ()) -> None:
    """Add the flags of a class of options to a command: ``add`` is its parser's ``add_argument``; ``without``: fields left out."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        if "flag" in f.metadata and f.name not in without:
            how = {**_values_of(hints[f.name]), **f.metadata["argparse"]}
            add(flag_of(f), dest=f.name, default=f.default, **how)


def flag_of(option: Field[Any]) -> str:
    """The flag of a field that has one: by default ``--`` and its name."""
    return option.metadata["flag"] or f"--{option.name.replace('_', '-')}"


def _values_of(hint: Any) -> dict[str, Any]:
    """The arguments of ``add_argument`` for the values of an annotation, perhaps with None; of text, none."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is Literal:
            return {"choices": get_args(kind)}
        if kind in (int, float, Path):
            return {"type": kind}
        if kind is bool:
            return {"action": "store_true"}
    return {}


def given_flags(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """The options that the flags of a command line set, as keyword arguments; a command may lack some of the flags."""
    return {f.name: getattr(args, f.name) for f in fields(kind) if "flag" in f.metadata and hasattr(args, f.name)}


def takes_options(*kinds: type[Any]) -> Callable[[F], F]:
    """Decorates a function whose ``**`` keywords are fields of these classes of options.

    A function with a parameter ``kwargs`` also takes keyword arguments of the user's function that is its first argument:
    ``api(fn, *args, …, kwargs=…, **keywords)``. It receives all of these in ``kwargs``, and options in ``**keywords``. A keyword
    with the name of an option is the option. It is refused if ``fn`` has an argument of that name too, unless that argument is
    given by position or in ``kwargs``, or ``kwargs={}`` says that it keeps its default.

    The decorated function raises:
      TypeError: a keyword that is no option, of a function without ``kwargs``.
      UnsupportedError: a keyword that is refused.
    """
    options = {name for kind in kinds for name in names(kind)}

    def decorate(api: F) -> F:
        """The function, with the check of its keywords."""
        parameters = inspect.signature(api).parameters
        own = {name for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        known = own | options

        @functools.wraps(api)
        def call(*args: Any, **keywords: Any) -> Any:
            """Call the function with the keywords that are options."""
            given = {name: value for name, value in keywords.items() if name in known}
            others = {name: value for name, value in keywords.items() if name not in known}
            if "kwargs" in own:
                if given and "kwargs" not in given:
                    _refuse_ambiguous(api.__name__, args, given)
                return api(*args, **{**given, "kwargs": {**others, **(given.get("kwargs") or {})}})
            for name in others:
                similar = near(name, known)
                did_you_mean = f"; did you mean {similar[0]!r}?" if similar else ""
                raise TypeError(f"{api.__name__}() got an unexpected keyword argument {name!r}{did_you_mean}")
            return api(*args, **given)

        return cast(F, call)

    return decorate


def _refuse_ambiguous(api: str, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for an option with the name of an argument of the function ``args[0]`` that ``args[1:]`` does not
    give."""
    try:
        signature = inspect.signature(getattr(args[0], "__wrapped__", args[0]))
        positional = signature.bind_partial(*args[1:]).arguments
    except (IndexError, TypeError, ValueError):  # no signature, or arguments that do not fit: the call will say so
        return
    for name in sorted(given.keys() & signature.parameters.keys() - positional.keys()):
        called = getattr(args[0], "__name__", "the function")
        raise UnsupportedError(
            f"`{name}` is an option of {api} and an argument of {called}: `{name}=` does not say which",
            fixes=[
                f"give the argument by position, or in kwargs={{{name!r}: …}}; `{name}=` is then the option",
                f"kwargs={{}} leaves the argument of {called} at its default",
            ],
        )

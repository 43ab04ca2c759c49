"""Options of a function that takes another one's arguments, told apart from these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from .errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

RENAMED_OPTIONS = {
    "search": {
        "axes": "max_axes",
        "margin": "memory_fraction",
        "most": "max_plans",
        "seconds": "time_limit",
        "vary": "choices",
    },
    "calibrate": {"most": "max_layouts"},
}
"""Function → former names of its options → what they are called now."""


def refuse_renamed_options(api: str, fn: Any, keywords: Iterable[str]) -> None:
    """Raise the TypeError for an option that has another name now, unless ``fn`` has an argument of that name.

    Args:
      api: the meshpar function, ``"search"``.
      fn: the user's function, or several by name.
      keywords: the keyword arguments that are no options of ``api``.
    """
    renamed = RENAMED_OPTIONS.get(api, {})
    for old in sorted(renamed.keys() & set(keywords)):
        functions = fn.values() if isinstance(fn, Mapping) else [fn]
        if not any(_takes(f, old) for f in functions):
            raise TypeError(f"mp.{api}: the option `{old}` is now `{renamed[old]}`")


def _takes(fn: Any, name: str) -> bool:
    """Whether a function accepts a keyword argument of this name; False where its signature cannot be read."""
    try:
        parameters = inspect.signature(getattr(fn, "__wrapped__", fn)).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def options_apart(api: F) -> F:
    """Refuse a keyword that is an option of ``api`` and an argument of the function at once, unless it is clear which is meant.

    ``api(fn, *args, <options>, kwargs=…, **keywords)``: the option is meant where the function's argument of that name is
    given by position or in ``kwargs``, or where ``kwargs={}`` says that it keeps its default.
    """
    named = inspect.signature(api).parameters.values()
    options = {p.name for p in named if p.kind is p.KEYWORD_ONLY} - {"kwargs"}

    @functools.wraps(api)
    def checked(fn: Any, *args: Any, **keywords: Any) -> Any:
        refuse_renamed_options(api.__name__, fn, keywords.keys() - options)
        shared = options & keywords.keys()
        if shared and "kwargs" not in keywords:
            try:
                signature = inspect.signature(getattr(fn, "__wrapped__", fn))
                given = signature.bind_partial(*args).arguments
            except (TypeError, ValueError):  # no signature, or arguments that do not fit: the call will say so
                return api(fn, *args, **keywords)
            for name in sorted(shared & signature.parameters.keys() - given.keys()):
                called = getattr(fn, "__name__", "the function")
                raise UnsupportedError(
                    f"`{name}` is an option of {api.__name__} and an argument of {called}: `{name}=` does not say which",
                    fixes=[
                        f"give the argument by position, or in kwargs={{{name!r}: …}}; `{name}=` is then the option",
                        f"kwargs={{}} leaves the argument of {called} at its default",
                    ],
                )
        return api(fn, *args, **keywords)

    return cast(F, checked)

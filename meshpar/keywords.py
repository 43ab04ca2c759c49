"""Options of a function that takes another one's arguments, told apart from these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])


def options_apart(api: F) -> F:
    """Refuse a keyword that is an option of ``api`` and an argument of the function at once, unless it is clear which is meant.

    ``api(fn, *args, <options>, kwargs=…, **keywords)``: the option is meant where the function's argument of that name is
    given by position or in ``kwargs``, or where ``kwargs={}`` says that it keeps its default.
    """
    named = inspect.signature(api).parameters.values()
    options = {p.name for p in named if p.kind is p.KEYWORD_ONLY} - {"kwargs"}

    @functools.wraps(api)
    def checked(fn: Any, *args: Any, **keywords: Any) -> Any:
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

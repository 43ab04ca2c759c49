"""Paths and dtypes of the arrays of the target, by the rules ``rename`` and ``dtype`` of a move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ...errors import PatternError, UnsupportedError
from ..dims import did_you_mean, path_matches

Rename = Mapping[str | tuple[str, ...], str | tuple[str | int, str | Mapping[str, int]]]


@dataclass(frozen=True, slots=True)
class TreeArray:
    """An array of a tree: its shape and dtype, its sharding (None: it is in host memory), the names of its dims ("": not known)."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding | None
    dims: str


@dataclass(frozen=True, slots=True)
class Made:
    """An array of the target before it has a sharding: paths of the source, and the index of the first element of each."""

    sources: tuple[str, ...]
    shifts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]


def made_of(arrays: Mapping[str, TreeArray], rename: Rename) -> dict[str, Made]:
    """Path in the target → the arrays of which it is made.

    Args:
      arrays: path → array of the source.

    Raises:
      PatternError: a pattern that matches no array, or two arrays with one path.
      UnsupportedError: sizes that do not add up.
    """
    out: dict[str, Made] = {}
    patterns = {rule: (rule,) if isinstance(rule, str) else rule for rule in rename}
    used: set[Any] = set()
    done: set[str] = set()
    for path, array in arrays.items():
        if path in done:
            continue
        made = {path: Made((path,), ((0,) * len(array.shape),), array.shape)}
        for rule, of in patterns.items():
            if (texts := _captured(of[0], path)) is not None:
                sources = (path, *(_filled(p, texts) for p in of[1:]))
                made = dict(_renamed(rule, sources, rename[rule], texts, arrays))
                used.add(rule)
                done.update(sources)
                break
        twice = next((p for p in made if p in out), None)
        if twice is not None:
            fixes = ["another path in rename="]
            raise PatternError(f"two arrays of the source become `{twice}`", path=twice, fixes=fixes)
        out.update(made)
    for rule in rename:
        if rule not in used:
            fixes = did_you_mean(str(rule), arrays, "arrays")
            raise PatternError(f"rename={{{rule!r}: …}} matches no array", fixes=fixes)
    return out


def _captured(pattern: str, path: str) -> list[str] | None:
    """The texts of the ``*`` of a pattern in a path; None: it does not match. A leading ``*/`` also matches no text."""
    for text in (path, "/" + path):
        if m := re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), text):
            return list(m.groups())
    return None


def _filled(template: str, texts: Sequence[str]) -> str:
    """The template with its ``*`` replaced."""
    found = iter(texts)
    return re.sub(r"\*", lambda _: next(found, "*"), template).removeprefix("/")


def _renamed(
    rule: Any,
    sources: tuple[str, ...],
    to: str | tuple[str | int, str | Mapping[str, int]],
    texts: Sequence[str],
    arrays: Mapping[str, TreeArray],
) -> Iterator[tuple[str, Made]]:
    """(path, the arrays of which it is made) for each array of the target that a rule of ``rename`` makes."""
    for p in sources:
        if p not in arrays:
            fixes = did_you_mean(p, arrays, "arrays")
            raise PatternError(f"rename={{{rule!r}: …}}: there is no `{p}`", path=p, fixes=fixes)
    shape, names = arrays[sources[0]].shape, arrays[sources[0]].dims.split()
    if isinstance(to, str):
        if len(sources) > 1:
            fixes = [f"rename={{{rule!r}: (DIM, {to!r})}} with the dim along which they are joined"]
            raise PatternError(f"rename={{{rule!r}: {to!r}}} names no dim to join {len(sources)} arrays", fixes=fixes)
        yield _filled(to, texts), Made(sources, ((0,) * len(shape),), shape)
        return
    dim, into = to
    if dim not in names and not (isinstance(dim, int) and -len(shape) <= dim < len(shape)):
        fixes = did_you_mean(str(dim), names, "dims")
        raise PatternError(f"{sources[0]} has no dim {dim!r}", path=sources[0], fixes=fixes)
    axis = names.index(dim) if isinstance(dim, str) else dim % len(shape)
    *starts, total = np.cumsum([0, *(arrays[p].shape[axis] for p in sources)]).tolist()
    parts = {into: total} if isinstance(into, str) else into
    if sum(parts.values()) != total:
        text = f"the parts along {dim!r} have {sum(parts.values())} elements, and the array {total}"
        raise UnsupportedError(f"{sources[0]}: {text}", path=sources[0], shape=shape, fixes=["sizes that add up to it"])
    begin = 0
    for path, n in parts.items():
        shifts = tuple(tuple(start - begin if k == axis else 0 for k in range(len(shape))) for start in starts)
        yield _filled(path, texts), Made(sources, shifts, (*shape[:axis], n, *shape[axis + 1 :]))
        begin += n


def dtype_of(dtype: Any) -> Any:
    """The dtype of a name.

    Raises:
      UnsupportedError: there is no such dtype.
    """
    try:
        return jnp.dtype(dtype)
    except TypeError:
        known = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
        fixes = did_you_mean(str(dtype), known, "dtypes")
        raise UnsupportedError(f"dtype={dtype!r} is no dtype", fixes=fixes) from None


def dtypes_of(arrays: Mapping[str, TreeArray], made: Mapping[str, Made], dtype: Any) -> dict[str, Any]:
    """Path in the target → dtype.

    Raises:
      PatternError: a pattern that matches no array.
    """
    patterns = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {"*": dtype}
    for pattern in patterns:
        if not any(path_matches(pattern, p) for p in made):
            fixes = did_you_mean(pattern, made, "arrays")
            raise PatternError(f"dtype={{{pattern!r}: …}} matches no array", fixes=fixes)
    out = {}
    for path, m in made.items():
        own = arrays[m.sources[0]].dtype
        new = next((d for p, d in patterns.items() if path_matches(p, path)), own)
        casts = isinstance(dtype, Mapping) or jnp.issubdtype(own, jnp.floating)
        out[path] = dtype_of(new) if casts and new is not own else own
    return out

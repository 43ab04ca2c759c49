"""Inferred names as tree-path patterns: the shortest patterns of ``dims=`` that give every argument its names."""

from __future__ import annotations

import re
from collections import defaultdict

from ..dims import path_matches
from .ir import Program, Value


def patterns_of(program: Program) -> dict[str, str]:
    """The inferred names of a program as tree-path patterns → dims, as ``dims=`` takes them.

    Each array has the shortest pattern whose matches all have its dims. Optimizer state may match as well if its path has the
    end that the pattern has, as the path of its parameter: ``*/n*``, of weights ``n1`` and ``n2``, must not match
    ``opt/nu/up``. Patterns begin with ``*/`` where they can, so that they fit the initializer of the state too, whose results
    have no name of an argument.
    """
    texts = {path: " ".join(vote.name if vote else "_" for vote in dims) for path, dims in program.inferred.items()}
    others = [v for v in program.inputs if v.path not in texts]  # optimizer state, scalars, equal paths
    by_end: defaultdict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        for end in _ends(path):
            by_end[end].add(text)
    found: dict[str, str] = {}
    covered: set[str] = set()
    for path, text in texts.items():
        if path in covered or not text.replace("_", "").strip():
            continue
        for pattern in (*(end for end in _ends(path) if by_end[end] == {text}), *_ends(path, numbers=True)):
            matches = {p for p in texts if path_matches(pattern, p)}
            only = not any(path_matches(pattern, v.path or "") and not _is_state(v, pattern) for v in others)
            if path in matches and only and all(texts[p] == text for p in matches):
                found[pattern] = text
                covered |= matches
                break  # else the path has characters of a pattern, and its array has no name
    return found


def _is_state(value: Value, pattern: str) -> bool:
    """Whether a value is optimizer state of a parameter whose path ends as ``pattern``; it may be a part of a quantized array."""
    path = (value.path or "").removesuffix(".codes").removesuffix(".scales")
    return value.kind == "opt" and value.shape != () and pattern in (*_ends(path), *_ends(path, numbers=True))


def _ends(path: str, numbers: bool = False) -> list[str]:
    """``a/b_3/c`` → ``*/c``, ``*/b_*/c``, ``a/b_*/c``: the patterns of the last components, with ``*`` for numbers, which
    ``numbers`` keeps."""
    parts = (path if numbers else re.sub(r"\d+", "*", path)).split("/")
    return [*("/".join(("*", *parts[-k:])) for k in range(1, len(parts))), "/".join(parts)]

"""The notation for dims: ``"batch seq embed"``, path patterns over trees, near names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import Any

from ..errors import LayoutSyntaxError, MeshparError, RankError, UnsupportedError

Dims = tuple[str | None, ...]
"""One name, or None (no name), for every dimension of a value."""

DimsLike = str | Sequence[str | None]

SPELLING_SIMILARITY = 0.8
"""Similarity above which two names are one name, misspelled: `heads` is no misspelled `head_dim`."""
MAX_LISTED = 12
"""Names that an error lists if none is similar."""
NAME = re.compile(r"[A-Za-z_][\w\-]*\Z")
"""Of a dim or an axis. A prime marks the second of two dims of one value: ``seq'``."""


def parse_dims(text: DimsLike, *, what: str = "dims") -> tuple[str | EllipsisType | None, ...]:
    """Read ``"batch seq embed"`` or ``("batch", "seq", None)``.

    ``_`` is a dimension without a name; ``...`` (once) represents any number of them.

    Raises:
      LayoutSyntaxError: a name that is no identifier, or one that stands twice.
    """
    if not isinstance(text, str | Sequence):
        raise LayoutSyntaxError(f"{what} {text!r} are no dims", fixes=['a text or a tuple of names: "batch seq embed"'])
    words = text.split() if isinstance(text, str) else list(text)
    out: list[str | EllipsisType | None] = []
    for word in words:
        if word is None or word == "_":
            out.append(None)
        elif word == "...":
            out.append(...)
        elif isinstance(word, str) and NAME.match(word):
            if word in out:
                raise LayoutSyntaxError(
                    f"{what} {text!r}: the dim `{word}` stands twice in one value",
                    dim=word,
                    fixes=[f"give the second one another name, e.g. `{word}_out` or `kv_{word}`"],
                )
            out.append(word)
        else:
            raise LayoutSyntaxError(
                f"{what} {text!r}: {word!r} is not a name",
                fixes=['names are separated by spaces: "batch seq embed"; `_` leaves one unnamed'],
            )
    if out.count(...) > 1:
        raise LayoutSyntaxError(
            f"{what} {text!r}: `...` stands twice",
            fixes=["keep one `...`, and write `_` for each other dim without a name"],
        )
    return tuple(out)


def fit_dims(
    dims: Sequence[str | EllipsisType | None],
    shape: Sequence[int],
    *,
    path: str,
    origin: str,
    fixes: Sequence[str] = (),
) -> Dims:
    """The dims of a value of this shape, ``...`` filled in.

    Args:
      path, origin: of the value and of the dims, for the error.
      fixes: for the error, before the general one.

    Raises:
      RankError: the number of names is not the rank.
    """
    rank = len(shape)
    if ... in dims:
        i = list(dims).index(...)
        fill = rank - len(dims) + 1
        if fill >= 0:
            return tuple(dims[:i]) + (None,) * fill + tuple(dims[i + 1 :])  # type: ignore[return-value]
    elif len(dims) == rank:
        return tuple(dims)  # type: ignore[return-value]
    names = format_dims(dims)
    raise RankError(
        f"{path} has {rank} dimension{'s' * (rank != 1)}, but {origin} names {len(dims)}: `{names}`",
        path=path,
        shape=shape,
        dims=names,
        fixes=[*fixes, f"name {rank} dims (`_` for one without a name, `...` for any number of them)"],
    )


def format_dims(dims: Iterable[str | EllipsisType | None]) -> str:
    """``("batch", None)`` → ``"batch _"``; of two dims with one name the later one is primed: ``"seq seq'"``."""
    seen: list[Any] = []
    for d in dims:
        seen.append(f"{d}'" if isinstance(d, str) and d in seen else d)
    return " ".join("_" if d is None else "..." if d is ... else str(d) for d in seen)


def near(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The candidates that a misspelt name may have meant, best first, at most three; ``cutoff``: the least likeness, of 1."""
    return difflib.get_close_matches(name, sorted(set(candidates)), n=3, cutoff=cutoff)


def check_choice(option: str, value: object, known: Sequence[str | None], nouns: str) -> None:
    """Raise UnsupportedError if an option has a value that does not exist; ``nouns``: the plural of the values' name."""
    if value not in known:
        fixes = did_you_mean(str(value), [name for name in known if name is not None], nouns)
        raise UnsupportedError(f"there is no {option} {value!r}", fixes=fixes)


def did_you_mean(name: str, candidates: Iterable[str], kind: str) -> list[str]:
    """Fix lines for an unknown name: the near ones, else those that there are, at most :data:`MAX_LISTED`."""
    candidates = sorted(set(candidates))
    close = near(name, candidates)
    if close:
        return [f"did you mean {' or '.join(f'`{c}`' for c in close)}?"]
    more = f" and {len(candidates) - MAX_LISTED} more" if len(candidates) > MAX_LISTED else ""
    return [f"{kind} there are: {', '.join(candidates[:MAX_LISTED]) or 'none'}{more}"]


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    """The regular expression of a path pattern; see :func:`path_matches`.

    What follows a ``*``, up to the next one, is an atomic group: where it is found first is kept, so that the time is not
    exponential in the number of ``*``. Texts in braces may have several lengths, and the first place need not be the right one.

    Raises:
      LayoutSyntaxError: a range of characters whose ends are in the wrong order.
    """
    between = [""]
    for token in re.findall(r"\*+|\?|\[[^\[\]/]+\]|\{[^{}]*\}|[^*?\[{]+|[\[{]", pattern):
        if token.startswith("*"):
            between.append("")
        else:
            between[-1] += _regex_of(token, pattern)
    first, *others = between
    groups = [f".*?{x}" if "(?:" in x else f"(?>.*?{x})" for x in others[:-1]]
    return re.compile("".join([first, *groups, *(f".*{x}" for x in others[-1:])]), re.DOTALL)


def _regex_of(token: str, pattern: str) -> str:
    """The regular expression of a token: ``?``, ``[qkv]``, ``{up,down}`` or literal text."""
    if token == "?":
        return "[^/]"
    if token.startswith("{") and token.endswith("}"):
        return f"(?:{'|'.join(map(re.escape, token[1:-1].split(',')))})"
    if not (token.startswith("[") and token.endswith("]")):
        return re.escape(token)
    ranges = [(m[1], m[2] or m[1]) for m in re.finditer(r"(.)(?:-(.))?", token[1:-1], re.DOTALL)]
    for first, last in ranges:
        if first > last:
            raise LayoutSyntaxError(
                f"the pattern {pattern!r} has the range {first}-{last}, whose end is before its start",
                pattern=pattern,
                fixes=[f"write [{last}-{first}], or list the characters, `-` last"],
            )
    return "[" + "".join(f"{re.escape(first)}-{re.escape(last)}" for first, last in ranges) + "]"


def alternatives(pattern: str) -> list[tuple[str, str]]:
    """(text, pattern with that text alone) for every text of every ``{up,down}`` of a path pattern."""
    return [
        (text, pattern[: group.start()] + text + pattern[group.end() :])
        for group in re.finditer(r"\{([^{}]*)\}", pattern)
        for text in group[1].split(",")
    ]


def path_matches(pattern: str, path: str) -> bool:
    """Whether a path pattern matches a path.

    ``*`` matches any text, ``/`` included; a leading ``*/`` also matches no text. ``?`` matches one character, ``[qkv]`` one of
    these, ``[a-c]`` one of a range, and ``{up,down}`` one of the texts. A pattern without its special meaning matches too: a path
    that contains brackets matches itself. A pattern for a quantized array matches its codes and scales.
    """
    owner = path.removesuffix(".codes").removesuffix(".scales")
    names = (path,) if owner == path else (path, owner)  # the second of a part of a quantized array
    if any(pattern in (name, "/" + name) for name in names):
        return True
    regex, bare = _regex(pattern), not pattern.startswith("*")  # a leading * also matches the slash that is added
    return any(regex.fullmatch("/" + name) or (bare and regex.fullmatch(name)) for name in names)


@dataclass(frozen=True, slots=True)
class PartKey:
    """The key of an array that is a part of a value with the dims of that value: codes or scales of a quantized array."""

    name: str

    def __str__(self) -> str:
        return "." + self.name


def join_path(components: Iterable[str]) -> str:
    """``("up", "kernel", ".codes")`` → ``"up/kernel.codes"``."""
    return "/".join(components).replace("/.codes", ".codes").replace("/.scales", ".scales")


def parse_pairs(text: str, error: Callable[[str], MeshparError]) -> dict[str, str]:
    """``"batch=32, seq=4096"`` → name → value, both as text without spaces around; "" has no pairs.

    Raises:
      MeshparError: ``error(part)`` of the first part that is not ``name=value``.
    """
    out: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name:
            raise error(part)
        out[name] = value
    return out


def parse_names(text: str) -> dict[str, str]:
    """``"act_batch=batch, act_emb=_"`` → old name → new name, as ``names=`` of :func:`meshpar.jit`.

    Raises:
      LayoutSyntaxError: something else.
    """

    def wrong(_: str) -> LayoutSyntaxError:
        return LayoutSyntaxError(f"names {text!r} are no pairs old=new", fixes=['"act_batch=batch, act_emb=_"'])

    pairs = parse_pairs(text, wrong)
    if not pairs or not all(new and "=" not in new for new in pairs.values()):
        raise wrong(text)
    return pairs


def _one_name(old: str, new: str | None) -> str | None:
    """The new name of an entry of ``names=``; None for None and ``_``."""
    found = parse_dims("_" if new is None else new, what=f"names={{{old!r}: …}}:")
    if len(found) != 1 or found[0] is ...:
        raise LayoutSyntaxError(
            f"names={{{old!r}: {new!r}}}: {new!r} is not one name",
            dim=old,
            fixes=[f'one name, or None to ignore it: names={{{old!r}: "batch"}}'],
        )
    return found[0]


class PathDims:
    """Ordered path patterns → dims; the first that matches wins.

    Args:
      patterns: e.g. ``{"batch/tokens": "batch seq", "*/kernel": "embed mlp"}``, or pairs. ``"auto"``, or the pattern
        ``"*": "auto"``: names are inferred for the arrays that no other pattern matches (:mod:`program.names_from_uses`).
      names: name that a model carries in metadata and constraints → the name that it has here; None: none.

    Attributes:
      items: (pattern, dims).
      names: as given.
      auto: whether names are inferred: True, False, or None: if nothing else names a dim.
    """

    auto: bool | None

    def __init__(
        self,
        patterns: Mapping[str, DimsLike] | Iterable[tuple[str, DimsLike]] | None,
        names: Mapping[str, str | None] | None = None,
    ):
        """Parse pairs (tree-path pattern, dims), or a mapping of patterns to dims; None: no pattern.

        Raises:
          LayoutSyntaxError: the argument is neither, or the dims of a pattern or a new name cannot be parsed.
        """
        self.names = {old: _one_name(old, new) for old, new in (names or {}).items()}
        self.auto = None if patterns is None else False
        if patterns == "auto":
            patterns = {"*": "auto"}
        items = patterns.items() if isinstance(patterns, Mapping) else (patterns or ())
        if isinstance(patterns, str) or not isinstance(items, Iterable):
            dims = patterns if isinstance(patterns, str) else "batch seq"
            raise LayoutSyntaxError(
                f"dims={patterns!r} are no tree-path patterns → dims",
                fixes=[f'say what has these dims: dims={{"batch/tokens": {dims!r}}}'],
            )
        items = list(items)
        for item in items:
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise LayoutSyntaxError(
                    f"dims={patterns!r}: {item!r} is not a pair (pattern, dims)",
                    fixes=['dims={"batch/tokens": "batch seq"}, or pairs: dims=[("batch/tokens", "batch seq")]'],
                )
        if ("*", "auto") in items:
            self.auto = True
            items.remove(("*", "auto"))
        self.items = tuple((str(p), parse_dims(d, what=f"dims of pattern {p!r}")) for p, d in items)

    def then(self, others: Mapping[str, str]) -> PathDims:
        """These patterns, then others, for paths that no pattern of these matches."""
        new = PathDims(others, self.names)
        new.items, new.auto = (*self.items, *new.items), self.auto
        return new

    def match(self, path: str) -> tuple[str, tuple[str | EllipsisType | None, ...]] | None:
        """(pattern, dims) of the first pattern that matches the path."""
        for pattern, dims in self.items:
            if path_matches(pattern, path):
                return pattern, dims
        return None

    def own(self, dims: Dims) -> Dims:
        """The dims of metadata or of a constraint with the names that ``names`` gives them; of two equal names, the first stays."""
        new = [self.names.get(d, d) if isinstance(d, str) else d for d in dims]
        return tuple(None if d in new[:i] else d for i, d in enumerate(new)) if self.names else dims

    @property
    def _key(self) -> tuple[object, ...]:
        return self.items, self.auto, tuple(self.names.items())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PathDims) and self._key == other._key

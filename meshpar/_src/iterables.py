"""Groups of items, and items in the order in which they are computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key → its values, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def grouped_by(items: Iterable[V], key: Callable[[V], Hashable]) -> list[list[V]]:
    """The items with equal keys, in the order of their first members."""
    return list(grouped((key(item), item) for item in items).values())


def operands_first(item: K, operands: Callable[[K], Iterable[K]], known: Container[K] = ()) -> Iterator[K]:
    """Yields an item after those that it is computed from, directly or through others, each of them once.

    Not recursive: a chain of ops may be longer than Python's stack.

    Args:
      operands: the items from which an item is computed.
      known: items that are left out, and with them what only they are computed from; it may grow meanwhile.
    """
    pending, entered = [] if item in known else [(item, iter(operands(item)))], {item}
    while pending:
        last, rest = pending[-1]
        new = next((x for x in rest if x not in entered and x not in known), None)
        if new is None:
            pending.pop()
            yield last
        else:
            entered.add(new)
            pending.append((new, iter(operands(new))))

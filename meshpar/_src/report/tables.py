"""Tables as data: columns and cells that are rendered for the terminal (rich) and for pages (HTML)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

MAX_PATH_SHARE = 0.35
"""Fraction of the width of the terminal that a path may take."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table, for the terminal and for HTML pages.

    Attributes:
      text: as the terminal prints it.
      value: the number that ``text`` shows, by which pages sort the column; None: the cell is text.
      markup: HTML for pages; "": ``text``, escaped.
      css: classes of the ``td``, besides ``n`` for numbers.
      terminal: the text that the terminal prints in place of ``text``, if it is not plain text.
    """

    text: str
    value: float | None = None
    markup: str = ""
    css: str = ""
    terminal: Any = None

    def html(self) -> str:
        """The ``td`` element."""
        kind = " ".join(filter(None, ("n" if self.value is not None else "", self.css)))
        attributes = f' class="{kind}"' if kind else ""
        attributes += "" if self.value is None else f' data-v="{self.value:.6g}"'
        return f"<td{attributes}>{self.markup or escape(self.text)}</td>"


@dataclass(frozen=True, slots=True)
class PathText:
    """A path that the terminal prints in one line: where it is too long, ``…`` replaces components in its middle."""

    path: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = min(len(self.path), int(MAX_PATH_SHARE * console.width), options.max_width)
        return Measurement(columns, columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shortened(self.path, options.max_width), self.style, no_wrap=True, overflow="ellipsis")


def shortened(path: str, width: int) -> str:
    """The path in at most ``width`` characters: with ``…`` for components in its middle, if at least the last one fits."""
    parts = path.split("/")
    for gone in range(len(parts)):
        first = (len(parts) - gone) // 2
        text = "/".join([*parts[:first], *["…"] * (gone > 0), *parts[first + gone :]])
        if len(text) <= width:
            return text
    return parts[-1]


def number(text: str, value: float, bar: str = "", css: str = "") -> Cell:
    """A right-aligned cell that sorts by ``value``; ``bar`` is markup below the number."""
    return Cell(text, value, escape(text) + bar, css)


def html_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell] | str], sortable: bool = False) -> str:
    """A table that scrolls horizontally within the page.

    Args:
      columns: (heading, CSS classes: ``n`` for numbers, ``more`` for columns that narrow screens hide, ``path`` for paths).
      rows: cells, or a complete ``tr`` element as text.
      sortable: headings are buttons that sort the rows.
    """
    heads = ""
    for heading, kind in columns:
        text = escape(heading)
        of = f' class="{kind}"' if kind else ""
        heads += f'<th scope="col"{of}>{f"<button>{text}</button>" if sortable and heading else text}</th>'
    body = "".join(row if isinstance(row, str) else f"<tr>{''.join(c.html() for c in row)}</tr>" for row in rows)
    kind = ' class="sort"' if sortable else ""
    return f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def key(kinds: Iterable[tuple[str, str]], more: str = "") -> str:
    """The explanation of colours: (CSS class, text) of each, then more markup."""
    spans = "".join(f'<span class="{kind}"><i></i>{escape(of)}</span>' for kind, of in kinds)
    return f'<div class="key">{spans}{more}</div>'


def rich_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Cell | Any]], **style: Any) -> RichTable:
    """The same table for the terminal: cells are :class:`Cell`, or anything that rich renders."""
    out = RichTable(box=None, pad_edge=False, **style)
    for heading, kind in columns:
        numeric = "n" in kind.split()
        no_wrap = numeric or "path" in kind.split()
        out.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=no_wrap)
    for row in rows:
        out.add_row(*((c.text if c.terminal is None else c.terminal) if isinstance(c, Cell) else c for c in row))
    return out

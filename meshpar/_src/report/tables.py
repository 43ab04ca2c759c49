"""Tables as data: columns and cells that are rendered for the terminal (rich) and for pages (HTML)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..console import wrapped

MAX_PATH_SHARE = 0.3
"""Fraction of the width of the terminal that a path may take."""

NARROW_COLUMNS = 100
"""Width of the terminal below which columns of the class ``more`` are left out."""
MAX_ERROR = 0.1
"""Difference from a planned number, as a fraction of it, from which on a ratio is red."""


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
    """A path that the terminal prints in one line: where it is too long, ``…`` replaces its first components."""

    path: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        columns = min(len(self.path), int(MAX_PATH_SHARE * console.width), options.max_width)
        return Measurement(columns, columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(shortened(self.path, options.max_width), self.style, no_wrap=True, overflow="ellipsis")


def shortened(path: str, width: int) -> str:
    """The path in at most ``width`` characters: with ``…`` for its first components, if at least the last one fits."""
    parts = path.split("/")
    texts = (path, *("/".join(["…", *parts[gone:]]) for gone in range(1, len(parts))))
    return next((text for text in texts if len(text) <= width), parts[-1])


def number(text: str, value: float, bar: str = "", css: str = "") -> Cell:
    """A right-aligned cell that sorts by ``value``; ``bar`` is markup below the number."""
    return Cell(text, value, escape(text) + bar, css)


def ratio(actual: float | None, planned: float | None) -> Cell:
    """An actual number over the planned one, ``1.27``; red where they differ by more than :data:`MAX_ERROR`."""
    if actual is None or not planned:
        return number("", 0.0)
    text, far = f"{actual / planned:.2f}", abs(actual / planned - 1) > MAX_ERROR
    return Cell(text, actual / planned, css="up" * far, terminal=Text(text, "red" * far))


def code(text: str) -> Cell:
    """A cell whose text is code in pages."""
    return Cell(text, markup=f"<code>{escape(text)}</code>")


def prose(text: str) -> str:
    """A text as HTML, with the words between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


GROUP = 'class="group"'
"""Attribute of the rows of a table that are headings of the rows below them."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report.

    Attributes:
      columns: (heading, CSS classes: ``n`` for numbers, ``more`` for columns that narrow screens hide, ``path`` for paths,
        ``word`` for words that are not cut).
      rows: the cells of each row.
      title: above the table; "": none.
      attributes: of the ``tr`` elements of pages; empty: they have none.
    """

    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    attributes: Sequence[str] = ()

    def html(self, most: int | None = None, sortable: bool = False) -> str:
        """The table without its title, which scrolls horizontally within the page.

        Args:
          most: number of rows; None: all.
          sortable: headings are buttons that sort the rows.
        """
        heads = ""
        for heading, kind in self.columns:
            text = escape(heading)
            of = f' class="{kind}"' if kind else ""
            heads += f'<th scope="col"{of}>{f"<button>{text}</button>" if sortable and heading else text}</th>'
        shown = self.rows[:most]
        grouped = _with_common_prefixes(shown) if self.columns[0][1] == "path" and not sortable else shown
        rows = zip(grouped, self.attributes or itertools.repeat(""), strict=False)
        body = "".join(f"<tr{of and f' {of}'}>{''.join(cell.html() for cell in row)}</tr>" for row, of in rows)
        kind = ' class="sort"' if sortable else ""
        more = f'<p class="dim">{self._more(shown)}</p>' if len(self.rows) > len(shown) else ""
        return (
            f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{more}'
        )

    def terminal(self, most: int | None = None) -> Group:
        """The table with its title for rich: where the first column has paths, their common prefixes are in rows above them, and
        in narrow terminals without columns of the class ``more``.

        Args:
          most: as in :meth:`html`.
        """
        table = _Narrowed(box=None, pad_edge=False, header_style="dim")
        table.optional = [k for k, (_, kind) in enumerate(self.columns) if "more" in kind.split()]
        for heading, kind in self.columns:
            numeric = "n" in kind.split()
            no_wrap = bool({"n", "path", "word"} & set(kind.split()))
            table.add_column(heading, justify="right" if numeric else "left", overflow="fold", no_wrap=no_wrap)
        shown = self.rows[:most]
        rows = _with_common_prefixes(shown) if self.columns[0][1] == "path" else shown
        for row, of in zip(rows, self.attributes or itertools.repeat(""), strict=False):
            table.add_row(*(cell.terminal or cell.text for cell in row), style="bold" * (of == GROUP))
        title = [Text(self.title, "bold")] if self.title else []
        return Group(*title, table, *([Text(self._more(shown), "dim")] if len(self.rows) > len(shown) else []))

    def _more(self, shown: Sequence[Any]) -> str:
        return f"and {len(self.rows) - len(shown)} more"


class _Narrowed(RichTable):
    """A table without its ``optional`` columns in terminals of less than :data:`NARROW_COLUMNS`."""

    optional: Sequence[int] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = copy(self)
        if options.max_width < NARROW_COLUMNS:
            wide = [column for k, column in enumerate(self.columns) if k not in self.optional]
            table.columns = [replace(column, _index=k) for k, column in enumerate(wide)]
        return RichTable.__rich_console__(table, console, options)


def _with_common_prefixes(rows: Sequence[Sequence[Cell]]) -> Iterator[Sequence[Cell]]:
    """Rows that begin with paths, with the common prefix of adjacent paths in a row above them."""
    for _, group in itertools.groupby(rows, key=lambda row: row[0].text.split("/")[:2]):
        same = list(group)
        parents = [row[0].text.split("/")[:-1] for row in same]
        shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parents, strict=False))
        prefix = "".join(f"{level[0]}/" for level in shared) if len(same) > 1 else ""
        if prefix:
            head = prefix.rstrip("/")
            bold = Cell(head, markup=f"<b>{escape(head)}</b>", terminal=PathText(head, "bold"))
            yield [bold, *[Cell("")] * (len(same[0]) - 1)]
        for path, *others in same:
            text = path.text.removeprefix(prefix)
            yield [replace(code(text), css="in" * bool(prefix), terminal=PathText("  " * bool(prefix) + text)), *others]


@dataclass(frozen=True)
class Wrapped:
    """Texts in one line with ``separator`` between them, as far as they fit, after a text ``head``; one that is longer than a line
    wraps at spaces. Further lines begin with ``hang`` spaces."""

    items: Sequence[Text]
    separator: str = ""
    head: Text = field(default_factory=Text)
    hang: int = 0

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        text = Text.assemble(self.head, "  ", Text(self.separator).join(self.items))
        return Measurement.get(console, options, text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line, between, end = self.head.copy(), "  ", ""
        for item in self.items:
            if line and line.cell_len + len(between) + item.cell_len + len(end) > options.max_width:
                yield from self._broken(line, end, console, options.max_width)
                line = Text()
            line, between = Text.assemble(line, between if line else "", item), self.separator
            end = self.separator.rstrip()
        yield from self._broken(line, "", console, options.max_width)

    def _broken(self, line: Text, end: str, console: Console, width: int) -> Iterator[Any]:
        """A line that ends with a separator; if it is too long, as several lines."""
        fits = line.cell_len + len(end) <= width
        first, *others = [line] if fits else wrapped(line, console, width - self.hang - len(end))
        (others or [first])[-1].append(end)
        yield first
        if others:
            yield Padding(Group(*others), (0, 0, 0, self.hang))


def hanging(rows: Iterable[Sequence[Any]], gap: int = 2) -> RichTable:
    """Texts in columns; all but the first one wrap within their column."""
    grid = RichTable.grid(padding=(0, gap))
    grid.add_column(no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def key(kinds: Iterable[tuple[str, str]], more: str = "") -> str:
    """The explanation of colours: (CSS class, text) of each, then more markup."""
    spans = "".join(f'<span class="{kind}"><i></i>{escape(of)}</span>' for kind, of in kinds)
    return f'<div class="key">{spans}{more}</div>'


def html_picture(name: str, label: str, data: Any) -> str:
    """The place in which the function ``name`` of the page's script draws some data; ``label``: for screen readers."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    script = f'<script type="application/json">{text}</script>'
    return f'<div class="picture" data-draw="{name}" data-label="{escape(label)}">{script}</div>'

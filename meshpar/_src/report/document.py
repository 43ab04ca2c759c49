"""Documents: reports that a terminal, notebooks and files show."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

from ...errors import UnsupportedError
from ..console import PLAIN_WIDTH, columns, has_colours, made_console


class Document:
    """A report that prints itself with rich, shows itself in notebooks, and is saved as a page, as JSON or as text.

    Subclasses have ``__rich__`` for the terminal, and the methods that raise NotImplementedError here.
    """

    def to_json(self) -> str:
        """The report as JSON."""
        raise NotImplementedError

    def _title(self) -> str:
        """The title of the page, as plain text."""
        raise NotImplementedError

    def _html(self) -> str:
        """The body of the page, and of the cell of a notebook."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the report to a file: ``.html``, a page of its own (nothing from the network); ``.json``; ``.txt``.

        Raises:
          UnsupportedError: another suffix.
        """
        path, writers = Path(path), self._writers()
        write = next((write for suffix, write in writers.items() if path.name.endswith(suffix)), None)
        if write is None:
            fix = f"suffixes are {', '.join(writers)}"
            raise UnsupportedError(f"{path.name}: cannot be saved as `{path.suffix}`", fixes=[fix])
        path.write_text(write(), encoding="utf8")

    def _writers(self) -> dict[str, Callable[[], str]]:
        """Suffix of a file → its text."""
        return {".html": self._page, ".json": self.to_json, ".txt": lambda: plain(self)}

    def _page(self) -> str:
        """The report as a self-contained HTML document."""
        return page(self._title(), self._html())

    def _repr_html_(self) -> str:
        return cell(self._html())

    def __str__(self) -> str:
        return shown_text(self)


def shown_text(shown: Any, stream: TextIO | None = None) -> str:
    """A rich renderable as text for a stream, by default standard output, with its width and colours (:mod:`console`)."""
    out: TextIO = sys.stdout if stream is None else stream
    return plain(shown, columns(out), has_colours(out))


def plain(shown: Any, width: int = PLAIN_WIDTH, colour: bool = False) -> str:
    """A rich renderable as text of at most ``width`` columns, with escape sequences for colours if ``colour``."""
    out = io.StringIO()
    made_console(out, width, colour).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))


def page(title: str, body: str) -> str:
    """A self-contained HTML document: style and script inline, nothing from the network."""
    css, js = front_end()
    script = f'<script>{js}\nstartPage(document.querySelector("main"));</script>'
    return html_document(title, css, f'<main class="mp page">{body}</main>{script}')


def html_document(title: str, css: str, body: str) -> str:
    """An HTML document for light and dark colour schemes."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{css}</style></head>\n'
        f"<body>{body}</body></html>\n"
    )


def cell(body: str) -> str:
    """The HTML of a notebook's cell, without a script."""
    css, _ = front_end()
    return f'<div class="mp"><style>{css}</style>{body}</div>'


def front_end(*packages: str) -> tuple[str, str]:
    """The CSS and the script of pages, each followed by the CSS and scripts of further packages, such as the lab's."""
    folders = [resources.files("meshpar._src").joinpath(package) for package in ("report", *packages)]
    files = [file for folder in folders for file in sorted(folder.iterdir(), key=lambda f: f.name)]
    css, js = ("".join(f.read_text("utf8") for f in files if f.name.endswith(end)) for end in (".css", ".js"))
    return css, js

"""The consoles of all output: their width, and whether it has colours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

PLAIN_WIDTH = 120
"""Columns of output that no terminal shows."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|[KMGT]iB|µs|ms|s|min|h|d|%|×)(?!\w))")
_GLUE = "\ue000"
"""A character of one column, in place of a space at which lines do not wrap; rich wraps at no-break spaces as well."""


def columns(stream: TextIO) -> int:
    """The width of output: ``COLUMNS`` if it is set, else the width of the terminal, else :data:`PLAIN_WIDTH`."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else PLAIN_WIDTH
    except (OSError, ValueError):  # a terminal of unknown size, or a stream without a file
        return PLAIN_WIDTH


def _is_dumb() -> bool:
    """Whether the terminal has no escape sequences, as ``TERM`` says."""
    return os.environ.get("TERM") in ("dumb", "unknown")


def has_colours(stream: TextIO) -> bool:
    """Whether output has colours: in a terminal, or with ``FORCE_COLOR``, and never with ``NO_COLOR``."""
    wanted = bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and not _is_dumb())
    return wanted and not os.environ.get("NO_COLOR")


def console_of(stream: TextIO) -> Console:
    """The console of standard output or standard error."""
    return made_console(stream, columns(stream), has_colours(stream))


def made_console(stream: TextIO, width: int, colour: bool) -> Console:
    """A console of ``width`` columns, with the colours of the terminal, or with none."""
    return ReportConsole(
        file=stream,
        width=width,
        no_color=not colour,
        force_terminal=colour or stream.isatty(),
        color_system=("truecolor" if _is_dumb() else "auto") if colour else None,
        highlight=False,
    )


def with_units(text: Text) -> Text:
    """A text that wraps with each number in the line of its unit, for a console of :func:`made_console`."""
    text = text.copy()
    text.plain = _BEFORE_UNIT.sub(_GLUE, text.plain)
    return text


def wrapped(text: Text, console: Console, width: int) -> list[Text]:
    """The lines of a text that wraps with each number in the line of its unit, for any console."""
    lines = list(with_units(text).wrap(console, width))
    for line in lines:
        line.plain = line.plain.replace(_GLUE, " ")
    return lines


class ReportConsole(Console):
    """Wraps texts by :func:`with_units`."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        shown = self.render_str(renderable) if isinstance(renderable, str) else renderable
        for segment in super().render(with_units(shown) if isinstance(shown, Text) else shown, options):
            yield segment._replace(text=segment.text.replace(_GLUE, " "))

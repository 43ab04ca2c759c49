"""Progress of a long activity in one line, with its elapsed time: in a terminal, in a notebook cell, or as a callback."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from ..errors import UnsupportedError
from .console import console_of

Progress = Literal["auto"] | bool | Callable[[str], None]
"""Where progress is shown: ``"auto"``: in a terminal or a notebook only; True: elsewhere too, as lines on stderr; False: nowhere;
or a function that is called with each text."""

NOTEBOOK_COLUMNS = 110
"""Characters of the line in a notebook cell; longer texts end in ``…``."""
TICK_SECONDS = 1.0
"""Interval at which the elapsed time in a notebook cell is updated."""
MAX_RESULTS = 12
"""Results that a terminal shows above a bar, the last ones."""
REPEAT_SECONDS = 30
"""Without a terminal, the interval at which a line is printed while no new text comes."""


Say = Callable[[str], None]
"""A function of a text, which follows the title. With an empty text only the elapsed time changes."""


class Counted(str):
    """A text of an activity that has done some of a known number of parts: a terminal shows a bar and the time left.

    Attributes:
      done, total: numbers of parts.
      results: a line for each part that is done, shown above the bar.
    """

    __slots__ = ("done", "results", "total")

    def __new__(cls, text: str, done: int, total: int, results: Sequence[str] = ()) -> Counted:
        """The text with these attributes."""
        out = super().__new__(cls, text)
        out.done, out.total, out.results = done, total, results
        return out


def progress_line(title: str, progress: Progress) -> AbstractContextManager[Say]:
    """A context that shows the progress of an activity, with the function to which the activity gives texts.

    Raises:
      UnsupportedError: ``progress`` is not a :data:`Progress`.
    """
    if not callable(progress) and progress not in ("auto", True, False):
        raise UnsupportedError(
            f"progress={progress!r}: it is 'auto', True, False or a function of a text",
            fixes=['progress="auto": in a terminal or a notebook only; False: never'],
        )
    console = console_of(sys.stderr)
    if callable(progress):
        return _callback(title, progress)
    if progress is not False and console.is_jupyter:
        return _notebook(title)
    if progress is not False and sys.stderr.isatty():
        return _terminal(title, console)
    return _lines(title, console) if progress is True else contextlib.nullcontext(lambda text: None)


@contextlib.contextmanager
def _callback(title: str, progress: Callable[[str], None]) -> Iterator[Say]:
    """Calls ``progress`` with the title, then with the title and each text, or the elapsed seconds."""
    began = time.monotonic()
    progress(title)
    yield lambda text: progress(f"{title}  {text or f'{time.monotonic() - began:.0f} s'}")


@contextlib.contextmanager
def _terminal(title: str, console: Console) -> Iterator[Say]:
    """A line of the width of the terminal, which disappears at the end: spinner, elapsed time, title and text; for a
    :class:`Counted` text also a bar with the time left, and above it the results."""
    from rich import progress as parts
    from rich.table import Column

    one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    text = parts.TextColumn("{task.description}", markup=False, table_column=one_line)
    shown = Counted(title, 0, 0)

    class Bar(parts.Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in shown.results[-MAX_RESULTS:])
            self.columns = (*counted, *plain) if shown.total else plain
            yield self.make_tasks_table(self.tasks)

    plain = parts.SpinnerColumn(), parts.TimeElapsedColumn(), text
    counted = parts.BarColumn(12), parts.MofNCompleteColumn(), parts.TimeRemainingColumn(compact=True)
    with Bar(*plain, console=console, transient=True, expand=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=None)

        def say(text: str) -> None:
            nonlocal shown
            if isinstance(text, Counted):
                shown = text
                bar.update(task, completed=text.done, total=text.total)
            bar.update(task, description=_one_line(title, text))

        yield say


@contextlib.contextmanager
def _notebook(title: str) -> Iterator[Say]:
    """A line in the output of a notebook cell, which is empty at the end."""
    from IPython.display import display

    began, shown, done = time.monotonic(), title, threading.Event()
    handle: Any = display({"text/plain": title}, raw=True, display_id=True)

    def show() -> None:
        """Update the line, cut to ``NOTEBOOK_COLUMNS``."""
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        line = f"{minutes}:{seconds:02d} {shown}"
        line = line if len(line) <= NOTEBOOK_COLUMNS else f"{line[: NOTEBOOK_COLUMNS - 1]}…"
        handle.update({"text/plain": line}, raw=True)

    def tick() -> None:
        """Update the elapsed time, until the activity ends."""
        while not done.wait(TICK_SECONDS):
            show()

    def say(text: str) -> None:
        """Set the text, which the next update shows."""
        nonlocal shown
        shown = _one_line(title, text)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        done.set()
        thread.join()
        handle.update({"text/plain": ""}, raw=True)


@contextlib.contextmanager
def _lines(title: str, console: Console) -> Iterator[Say]:
    """Lines on stderr: the title, each new text once, the elapsed seconds every ``REPEAT_SECONDS``, and the total at the end."""
    began = shown = time.monotonic()
    reported = ""
    console.print(title)

    def say(text: str) -> None:
        """Print a new text at once, and the elapsed seconds at intervals."""
        nonlocal reported, shown
        now = time.monotonic()
        if (text and text != reported) or now - shown > REPEAT_SECONDS:
            reported, shown = text or reported, now
            console.print(f"{title}  {text or f'{now - began:.0f} s'}", soft_wrap=True)

    yield say
    console.print(f"{title}: {time.monotonic() - began:.1f} s")


def _one_line(title: str, text: str) -> str:
    """The title and the text without line breaks."""
    return " ".join(f"{title}  {text}".split("\n")).rstrip()

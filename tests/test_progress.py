"""Progress in one line: nowhere, in a terminal, in a notebook, as lines, and as a callback."""

import io
import sys
import time
import types

import jax.numpy as jnp
import pytest
from rich.ansi import AnsiDecoder

import meshpar as mp
from meshpar._src import progress
from meshpar._src.progress import Counted, progress_line


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self):
        return True

    def lines(self):
        """The lines without control codes."""
        texts = self.getvalue().replace("\r", "\n").split("\n")
        return [line.plain for text in texts for line in AnsiDecoder().decode(text)]


def in_terminal(monkeypatch):
    """The terminal that stderr is; no fixture, as pytest replaces stderr after these."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return terminal


def test_nothing_is_shown_without_a_terminal(capsys):
    for where in ("auto", False):
        with progress_line("searching", where) as say:
            say("plan 1")
    assert capsys.readouterr() == ("", "")


def test_lines_without_a_terminal(capsys, monkeypatch):
    with progress_line("compiling", True) as say:
        say("")
        say("one")
        say("one")
        monkeypatch.setattr(progress, "REPEAT_SECONDS", -1)
        say("")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["compiling", "compiling  one"]
    assert lines[2] == "compiling  0 s"
    assert lines[3].startswith("compiling: 0.")
    assert len(lines) == 4


def test_a_callback_gets_each_text():
    texts = []
    with progress_line("compiling", texts.append) as say:
        say("waiting")
        say("")
    assert texts == ["compiling", "compiling  waiting", "compiling  0 s"]


def test_a_terminal_has_a_bar_with_the_results_of_a_counted_activity(monkeypatch):
    terminal = in_terminal(monkeypatch)
    with progress_line("checking", "auto") as say:
        say("planning")
        say(Counted("run 2 of 6, planning", 1, 6, ["✓  data=8  batch: data"]))
    lines = terminal.lines()
    (bar,) = {line for line in lines if "run 2 of 6" in line}
    assert "1/6" in bar
    assert "━" in bar
    assert any(line.rstrip() == "✓  data=8  batch: data" for line in lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_notebook_has_one_line_that_is_empty_at_the_end(monkeypatch):
    updates = []
    handle = types.SimpleNamespace(update=lambda data, raw: updates.append(data["text/plain"]))

    def display(data, raw, display_id):
        updates.append(data["text/plain"])
        return handle

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.001)
    with progress_line("checking", "auto") as say:
        say("x" * 500 + "\n")
        while not any("xxx" in text for text in updates):
            time.sleep(0.001)
    assert updates[0] == "checking"
    assert updates[-1] == ""
    assert any(text.startswith("0:0") for text in updates)
    assert all("\n" not in text and len(text) <= progress.NOTEBOOK_COLUMNS for text in updates)


def test_what_is_no_progress():
    with pytest.raises(mp.errors.UnsupportedError, match="progress='off'"), progress_line("checking", "off"):
        pass


def test_a_check_reports_its_runs():
    mp.virtual_devices(8)
    texts = []
    x = jnp.ones((8, 16))
    how = {"dims": {"x": "batch embed"}, "layout": ["batch: data"], "mesh": ["data=8", "data=2"]}
    mp.check(lambda x: x * 2, x, **how, progress=texts.append)
    assert texts[0] == "checking"
    assert texts[1] == "checking  run 1 of 2, planning, data=8: batch: data"
    assert "checking  run 1 of 2, the unsharded step, data=8: batch: data" in texts
    assert texts[-1] == "checking  run 2 of 2, the sharded step, data=2: batch: data"

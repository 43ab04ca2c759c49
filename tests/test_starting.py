"""The line of the command while it imports JAX: at once, in a terminal only."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar._src.entry import starting

ROOT = Path(__file__).resolve().parents[1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_it_is_shown_before_anything_is_imported():
    """Of a process that ends before JAX could be imported: its standard error is a pseudo-terminal."""
    pseudo, stderr = os.openpty()
    command = [sys.executable, "-X", "importtime", "-m", "meshpar", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as process:
        os.close(stderr)
        seen = b""
        while starting.TEXT.encode() not in seen:
            seen += os.read(pseudo, 4096)
        process.kill()
    os.close(pseudo)
    imported = {
        line.rpartition("|")[2].strip() for line in seen.decode(errors="ignore").split(starting.TEXT)[0].splitlines()
    }
    assert "os" in imported
    assert "jax" not in imported


@pytest.mark.parametrize(
    ("argv", "original", "shown"),
    [
        (["/usr/bin/meshpar", "plan"], ["python", "/usr/bin/meshpar", "plan"], True),
        (["C:\\Scripts\\meshpar.exe".replace("\\", os.sep), "plan"], [], True),
        (["-m", "plan"], ["python", "-m", "meshpar", "plan"], True),
        (["/lib/meshpar/__main__.py", "plan"], ["python", "-mmeshpar", "plan"], True),
        (["/usr/bin/meshpar"], ["python", "/usr/bin/meshpar"], False),  # its help is shown
        (["train.py", "plan"], ["python", "train.py", "plan"], False),
        (["-m", "tests"], ["python", "-m", "pytest", "tests"], False),
        ([], [], False),
    ],
)
def test_it_is_the_line_of_the_command_in_a_terminal(monkeypatch, argv, original, shown):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        starting.show()
        assert stream.getvalue() == (starting.TEXT + "\r") * (shown and stream.isatty())
        starting.clear()
        assert stream.getvalue().split("\r")[1:] == [" " * len(starting.TEXT), ""] * (shown and stream.isatty())

"""The line of the command while it imports JAX: at once, in a terminal only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar._src.entry import startup_message as starting

ROOT = Path(__file__).resolve().parents[1]


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

"""The line that the command shows while Python imports JAX, which takes seconds; it imports nothing that does."""

from __future__ import annotations

import os
import sys

TEXT = "meshpar: importing JAX …"


def show(text: str = TEXT) -> None:
    """Show the line on stderr, if that is a terminal and this process is the command with arguments."""
    if len(sys.argv) > 1 and _is_command() and sys.stderr.isatty():
        print(text, end="\r", file=sys.stderr, flush=True)


def clear() -> None:
    """Overwrite the line with spaces, where it is shown."""
    show(" " * len(TEXT))


def _is_command() -> bool:
    """Whether this process is the command ``meshpar``: the installed script, or ``python -m meshpar``.

    Python has ``-m`` in place of the latter's path until it has imported the package.
    """
    script = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    as_module = script in ("-m", "__main__") and not {"meshpar", "-mmeshpar"}.isdisjoint(sys.orig_argv)
    return script == "meshpar" or as_module


show()

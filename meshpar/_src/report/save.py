"""Writes a report to a file in the format of its suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError


def save(what: Any, path: str | Path, writers: Mapping[str, Callable[[Any], str]]) -> None:
    """Write a report to a file.

    Args:
      what: the report.
      writers: suffix → function from the report to text.

    Raises:
      UnsupportedError: a suffix that ``writers`` does not have.
    """
    path = Path(path)
    if path.suffix not in writers:
        raise UnsupportedError(
            f"{path.name}: cannot be saved as `{path.suffix}`", fixes=[f"suffixes are {', '.join(writers)}"]
        )
    path.write_text(writers[path.suffix](what), encoding="utf8")

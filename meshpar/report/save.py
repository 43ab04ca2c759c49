"""Writing a report to a file in the form that its suffix asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError


def save(what: Any, path: str | Path, writers: Mapping[str, Callable[[Any], str]]) -> None:
    """Write something to a file.

    Args:
      writers: suffix → what writes it as text.

    Raises:
      UnsupportedError: a suffix that ``writers`` does not have.
    """
    path = Path(path)
    if path.suffix not in writers:
        raise UnsupportedError(
            f"{path.name}: cannot be saved as `{path.suffix}`", fixes=[f"suffixes are {', '.join(writers)}"]
        )
    path.write_text(writers[path.suffix](what), encoding="utf8")

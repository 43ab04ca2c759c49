"""Versions of installed distributions."""

from __future__ import annotations

import importlib.metadata
import re


def installed_version(package: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, by which versions compare: ``"0.12.0.dev3"`` → ``(0, 12, 0)``."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()

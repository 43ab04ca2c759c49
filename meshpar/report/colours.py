"""Colours of mesh axes in the terminal: one for each axis, in the order of the colours of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.text import Text

PALETTE = ("#4a90e2", "#d9782d", "#27a17a", "#d0578f", "#8f74e0", "#a08c1e")
"""Legible on light and dark backgrounds; further axes reuse them."""


class AxisStyles:
    """Rich styles of the axes of some meshes.

    Attributes:
      of: axis → style.
    """

    def __init__(self, *meshes: Iterable[str]):
        """Styles for the axes of these meshes, in order."""
        axes = dict.fromkeys(a for mesh in meshes for a in mesh)
        self.of = {a: PALETTE[k % len(PALETTE)] for k, a in enumerate(axes)}

    def axes(self, axes: Iterable[str]) -> Text:
        """``data+model``, each axis in its colour."""
        return Text("+").join(Text(a, self.of.get(a, "")) for a in axes)

    def sizes(self, sizes: dict[str, int]) -> Text:
        """``data 16 × model 8``."""
        return Text(" × ").join(Text(f"{a} {n}", self.of.get(a, "")) for a, n in sizes.items())

    def mesh(self, mesh: str) -> Text:
        """The text of a mesh, ``data=16, model=8``, with coloured axes."""
        text = Text(mesh)
        for axis, style in self.of.items():
            text.highlight_regex(rf"(?<![\w-]){re.escape(axis)}=\d+", style)
        return text

    def layout(self, layout: str) -> Text:
        """The text of a layout with coloured axes."""
        text = Text(layout)
        for axis, style in self.of.items():
            text.highlight_regex(rf"(?<=[\s+]){re.escape(axis)}(?=\s*(?:[+;]|$))", style)
        return text

    def dims(self, dims: str) -> Text:
        """The text of dims, ``embed:data mlp:model``, with coloured axes."""
        text = Text(dims)
        for axis, style in self.of.items():
            text.highlight_regex(rf"(?<=[:+]){re.escape(axis)}(?=[\s+]|$)", style)
        return text

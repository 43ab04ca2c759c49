"""Colours of mesh axes and of roles of memory: one for each name, the same in the terminal (rich) and in pages (HTML)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.text import Text

from ..cost.buffer_roles import ROLES
from .facts import DimAxes, dims_text
from .tables import Cell

PALETTE = ("#4a90e2", "#d9782d", "#27a17a", "#d0578f", "#8f74e0", "#a08c1e")
"""Legible on light and dark backgrounds, in the order of the classes ``c0``, ``c1``, … of pages; further axes reuse them."""

ROLE_PALETTE = ("#0f7c8a", "#63b3bd", "#8a6450", "#c39a6b", "#94a1ae", "#6f8558", "#b3c19b")
"""Of the roles of memory, in the order of :data:`cost.buffer_roles.ROLES`: classes ``m0``, … of pages."""
ROLE_CLASSES = {role: f"m{k}" for k, role in enumerate(ROLES)}
ROLE_STYLES = dict(zip(ROLE_CLASSES, ROLE_PALETTE, strict=True))
"""Role of memory → CSS class, and rich style."""

_USUAL = ("data dp fsdp", "model tp tensor", "stage pp", "expert ep", "context cp seq", "replica slice")
KNOWN = {axis: k for k, axes in enumerate(_USUAL) for axis in axes.split()}
"""Usual names of axes → positions in the palette; others have one by a hash of the name."""


class AxisColours:
    """The colours of the axes of some meshes.

    Attributes:
      of: axis → CSS class.
      styles: axis → rich style.
    """

    def __init__(self, *meshes: Iterable[str]):
        """Colours for the axes of these meshes, by their names, whatever their order.

        An axis whose colour is taken by another one of these has the next free one.
        """
        chosen: dict[str, int] = {}
        axes = dict.fromkeys(a for mesh in meshes for a in mesh)
        for axis in sorted(axes, key=lambda a: (a not in KNOWN, a)):
            wanted = KNOWN.get(axis, zlib.crc32(axis.encode()))
            free = [k for k in range(wanted, wanted + len(PALETTE)) if k % len(PALETTE) not in chosen.values()]
            chosen[axis] = (free or [wanted])[0] % len(PALETTE)
        self.of = {a: f"c{chosen[a]}" for a in axes}
        self.styles = {a: PALETTE[chosen[a]] for a in axes}

    def first(self, axes: Sequence[str]) -> str:
        """The class of the first of some axes; a neutral one without axes."""
        return self.of.get(axes[0], "cn") if axes else "cn"

    def axes(self, axes: Iterable[str]) -> Cell:
        """``data+model``, each axis in its colour; labels in pages."""
        names = list(axes)
        text = Text("+").join(Text(a, self.styles.get(a, "")) for a in names)
        return Cell(text.plain, markup="".join(self._chip(a, (a,)) for a in names), terminal=text)

    def dims(self, dims: Iterable[DimAxes]) -> Cell:
        """``embed:data mlp:model``, each axis in its colour; in pages labels, sharded ones in the colour of their first axis."""
        shown = list(dims)
        chips = (self._chip(":".join(filter(None, (name, "+".join(axes)))), axes) for name, axes in shown)
        text = dims_text(shown)
        markup = "".join(chips) or '<span class="dim">scalar</span>'
        return Cell(text, markup=markup, terminal=self._coloured(text, r"(?<=[:+]){}(?=[\s+]|$)"))

    def sizes(self, sizes: Mapping[str, int]) -> Cell:
        """``data 16 × model 8``; labels in pages."""
        text = Text(" × ").join(Text(f"{a} {n}", self.styles.get(a, "")) for a, n in sizes.items())
        return Cell(text.plain, markup=" ".join(self._chip(f"{a} {n}", (a,)) for a, n in sizes.items()), terminal=text)

    def mesh(self, mesh: str) -> Text:
        """The text of a mesh, ``data=16, model=8``, with coloured axes."""
        return self._coloured(mesh, r"(?<![\w-]){}=\d+")

    def layout(self, layout: str) -> Text:
        """The text of a layout, or a text with `rules` and `axes` in it, with coloured axes."""
        return self._coloured(layout, r"(?<=[\s+`]){}(?=\s*(?:[+;`(]|$))")

    def _chip(self, text: str, axes: Sequence[str]) -> str:
        """A label of a page in the colour of the first of some axes; without axes in the text's."""
        return f'<span class="chip{f" on {self.first(axes)}" if axes else ""}">{escape(text)}</span>'

    def _coloured(self, text: str, pattern: str) -> Text:
        """The text with the matches of a pattern, in which ``{}`` is the name of an axis, in the colour of the axis."""
        out = Text(text)
        for axis, style in self.styles.items():
            out.highlight_regex(pattern.replace("{}", re.escape(axis)), style)
        return out

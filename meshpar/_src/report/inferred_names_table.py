"""The inferred names of a program as a table, for the terminal and the lab."""

from __future__ import annotations

import re

from ..dims import format_dims
from ..program import Program
from ..program.names_from_uses import GIVEN, inferred_names
from .tables import Cell, Table, code, number


def unnamed_table(program: Program) -> Table:
    """The arguments with dims that have neither a name nor size 1, optimizer state excluded: paths, with ``*`` for numbers of
    layers, shapes, and dims with ``_`` for the ones without a name."""
    rows = {}
    for value in program.inputs:
        dims = program.dims(value)
        if value.kind != "opt" and any(not name and size > 1 for name, size in zip(dims, value.shape, strict=True)):
            path = re.sub(r"(?<![A-Za-z\d])\d+", "*", value.path or "")
            rows[path, value.shape] = [code(path), Cell(str(list(value.shape))), code(format_dims(dims))]
    return Table([("dims without a name (_), in", "path"), ("shape", ""), ("dims", "")], list(rows.values()))


def names_table(program: Program) -> Table:
    """For each name its sizes, the number of arrays that have it, whether a use shows it, and the best evidence."""
    rows = []
    for name, dims in sorted(inferred_names(program).items(), key=lambda item: -len(item[1])):
        sizes = sorted({size for size, _ in dims}, key=lambda size: int(size.partition(" ")[0]))
        best = max((vote for _, vote in dims), key=lambda vote: vote.weight)
        shown = ", ".join(sizes[:4]) + (", …" if len(sizes) > 4 else "")
        certain = "given" if best.weight == GIVEN else "yes" if best.certain else "guessed"
        rows.append([code(name), Cell(shown), number(str(len(dims)), len(dims)), Cell(certain), Cell(str(best))])
    columns = [("dim", ""), ("size", ""), ("arrays", "n"), ("certain", ""), ("evidence", "")]
    return Table(columns, rows)

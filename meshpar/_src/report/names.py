"""The inferred names of a program as a table, for the terminal and the lab."""

from __future__ import annotations

from ..program import Program
from ..program.inferred_names import GIVEN, inferred_names
from .tables import Cell, Table, code, number


def names_table(program: Program) -> Table:
    """For each name its sizes, the number of arrays that have it, whether a use shows it, and the best evidence."""
    rows = []
    for name, dims in sorted(inferred_names(program).items(), key=lambda item: -len(item[1])):
        sizes = sorted({size for size, _ in dims})
        best = max((vote for _, vote in dims), key=lambda vote: vote.weight)
        shown = ", ".join(map(str, sizes[:4])) + (", …" if len(sizes) > 4 else "")
        certain = "given" if best.weight == GIVEN else "yes" if best.certain else "guessed"
        rows.append([code(name), Cell(shown), number(str(len(dims)), len(dims)), Cell(certain), Cell(str(best))])
    columns = [("dim", ""), ("size", ""), ("arrays", "n"), ("certain", ""), ("evidence", "")]
    return Table(columns, rows)

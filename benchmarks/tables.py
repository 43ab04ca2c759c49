"""Markdown tables, the format in which the commands of this folder print their results and `suite.py` collects them."""

from __future__ import annotations

from collections.abc import Sequence


class Table:
    """A Markdown table that is printed to standard output row by row, as results arrive.

    Args:
      headers: the column heads.
      title: a line above the table.
    """

    def __init__(self, *headers: str, title: str = ""):
        self.rows: list[tuple[str, ...]] = []
        self._columns = len(headers)
        if title:
            print(f"{title}\n")
        print(line(headers))
        print("|" + "---|" * len(headers), flush=True)

    def add_row(self, *cells: str) -> None:
        """Print a row; missing cells at its end are empty.

        Raises:
          ValueError: there are more cells than columns.
        """
        if len(cells) > self._columns:
            raise ValueError(f"{len(cells)} cells for {self._columns} columns")
        self.rows.append((*cells, *[""] * (self._columns - len(cells))))
        print(line(self.rows[-1]), flush=True)


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table: ``["a", "b"]`` → ``"| a | b |"``."""
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def tables_of(text: str) -> list[list[str]]:
    """The Markdown tables of a command's output, each as its lines."""
    tables: list[list[str]] = []
    inside = False
    for row in text.splitlines():
        if row.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1].append(row)
        inside = row.startswith("|")
    return tables

"""Each measured or planned number in the text of README and the pages has a source, and is the number of that source.

A number is one with a unit of time, memory, traffic or ratio (``286 ms``, ``0.75``, ``1.14 to 1.18 times``). Its source is a code
block of the page, the stored output of one, or the file of a comment in the same paragraph. A comment in an item of a list or in a
row of a table is for that item or row. The text in quotes is a regular expression of lines; of a page, code and outputs count::

    <!-- from benchmarks/results/search.md "llama3_8b, 32" -->             the numbers of these lines
    <!-- from benchmarks/results/overhead.md "dispatch" c["ratio"] -->     the smallest and the largest value of a column in them
    <!-- from docs/faster.md "MFU" -->
    <!-- from = (4 + 4 - 1) / 4 -->
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import blocks
import numpy as np
import pytest

BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SCALES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "×": 1.0, "x": 1.0, "times": 1.0, "": 1.0, **BYTES}
RATES = {f"{unit}/s": scale for unit, scale in {**BYTES, "GFLOP": 1e9, "TFLOP": 1e12}.items()}
KINDS = dict.fromkeys(BYTES, "bytes") | dict.fromkeys(RATES, "rate") | dict.fromkeys(("ns", "µs", "ms", "s"), "time")
SCALES |= RATES
UNIT = "|".join(sorted(filter(None, SCALES), key=len, reverse=True))
FIGURE = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
SOURCED = re.compile(rf"(?<![\w.])(?P<figure>{FIGURE})(?:\s?(?P<unit>{UNIT})(?![\w/]))?")
CLAIMED = re.compile(
    rf"(?<![\w.-])(?P<figures>{FIGURE}(?:\s?(?:to|–|→|and|or|of)\s{FIGURE})*)\s?(?P<unit>{UNIT})(?![\w/]|\s?\d)|(?<![\w.=-])(?P<bare>\d+\.\d+)(?!\w|\.\d)"
)
NAMES = re.compile(
    r"(?:Apache|Python|jax|JAX|Llama|libtpu|[Bb]efore|version):? \d[\w.]*(?: \d+B)?(?:(?:,| to| and) \d[\d.]*(?: \d+B)?)*|\b\d+B\b"
)
SOURCE = re.compile(r'<!-- from (?P<file>[\w/.-]+|=)(?: "(?P<lines>[^"]*)")?(?: (?P<value>(?!-->).+?))? -->')
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILES = [blocks.README, *blocks.PAGES]


class Number(NamedTuple):
    value: float
    unit: str
    """Empty: a ratio, or in a source the unit of the column, which is not written."""

    def is_rounded(self, text: str, other: "Number") -> bool:
        """Whether this number, written as ``text``, is ``other`` rounded."""
        if other.unit and KINDS.get(self.unit) != KINDS.get(other.unit):
            return False
        scale = SCALES[self.unit]
        candidates = {other.value * SCALES[other.unit] / scale} | (set() if other.unit else {other.value})
        digits = len(text.partition(".")[2])
        return any(abs(abs(x) - self.value) <= 0.5001 * 10**-digits for x in candidates)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def numbers(text: str) -> Iterator[Number]:
    """The numbers of a source, each with the unit behind it."""
    for m in SOURCED.finditer(text):
        yield Number(number(m["figure"]), m["unit"] or "")


def columns(lines: list[str], wanted: re.Pattern[str]) -> dict[str, np.ndarray]:
    """Column → its numbers in the rows that match, of all tables of a file."""
    found: dict[str, list[float]] = {}
    heads: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if set(line) <= set("|- "):
            heads = [cell.strip() for cell in before.strip("| ").split(" | ")]
        elif line.startswith("|") and wanted.search(line) and len(cells) == len(heads):
            for head, cell in zip(heads, cells, strict=True):
                if m := SOURCED.search(cell):
                    found.setdefault(head, []).append(number(m["figure"]))
    return {head: np.array(values) for head, values in found.items()}


def values_of(source: re.Match[str]) -> list[Number]:
    """The numbers of a comment's source."""
    if source["file"] == "=":
        return [Number(float(eval(source["value"])), "")]
    text = (blocks.ROOT / source["file"]).read_text()
    if source["file"].startswith("docs/"):
        text = "\n".join(FENCE.findall(text))
    wanted = re.compile((source["lines"] or "").replace(r"\|", "|"))  # a row of a table escapes the bar
    lines = [line for line in text.splitlines() if wanted.search(line)]
    assert lines, f"{source['file']} has no line {source['lines']}"
    if source["value"]:
        values = eval(source["value"], {"c": columns(text.splitlines(), wanted)})
        return [Number(float(x), "") for x in (np.min(values), np.max(values))]
    return [n for line in lines for n in numbers(line)]


def items(paragraph: str) -> list[str]:
    """The rows of a table, the items of a list, or the paragraph."""
    return re.split(r"\n(?=\||\s*(?:-|\d+\.) )", paragraph)


def unsourced(page: str) -> list[str]:
    """The numbers in the text of a page without a source, each with the text around it."""
    printed = [n for fence in FENCE.findall(page) for n in numbers(fence) if n.unit or n.value % 1]
    missing = []
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("", page)):
        for item in items(paragraph):
            comments = [m for m in SOURCE.finditer(paragraph) if m[0] in item or f"\n{m[0]}\n" in f"\n{paragraph}\n"]
            sources = [*printed, *(n for m in comments for n in values_of(m))]
            text = NAMES.sub("", re.sub(r"`[^`\n]*`|<!--.*?-->|\]\([^)]*\)", "``", item))
            for m in CLAIMED.finditer(text):
                for figure in re.findall(FIGURE, m["figures"] or m["bare"]):
                    claim = Number(number(figure), m["unit"] or "")
                    if not any(claim.is_rounded(figure, n) for n in sources):
                        missing.append(f"{figure} {claim.unit}: … {text[max(0, m.start() - 60) : m.end() + 20]!r}")
    return missing


@pytest.mark.parametrize("page", FILES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_numbers_have_sources(page):
    assert unsourced(page.read_text()) == []


OUTPUT = "```python\nprint(1)\n```\n<!-- output -->\n\n```text\nstep 12783 ms, peak 10.03 GiB, 5.2 %\n```\n\n"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("It takes 12.8 s and 10.0 GiB.", 0),
        ("It takes 12.9 s.", 1),
        ("It takes 12 to 13 s.", 1),  # 12.783 is rounded to 13
        ("It takes 13 times as long, 10 GB, `5 ms`, Python 3.11, Llama 3.1 405B, 128 × 128, 5 %.", 2),
        (
            "It is 0.927 to 1.002.\n<!-- from benchmarks/results/search.md \"llama3_8b|mixtral.*32, v5e\" c['ratio'] -->",
            0,
        ),
        (
            "It is 0.927 to 1.000.\n<!-- from benchmarks/results/search.md \"llama3_8b|mixtral.*32, v5e\" c['ratio'] -->",
            1,
        ),
        ("- 1.75 <!-- from = (4 + 4 - 1) / 4 -->\n- 1.75", 1),
        ("| 1.75 |\n|---|\n| 1.75 |\n<!-- from = 7 / 4 -->", 0),
    ],
)
def test_what_is_missing(text, missing):
    assert len(unsourced(OUTPUT + text)) == missing


def test_a_source_without_such_a_line_is_an_error():
    with pytest.raises(AssertionError, match="has no line"):
        unsourced('1.5 s <!-- from benchmarks/results/search.md "no such model" -->')

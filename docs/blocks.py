"""Runs the fenced code blocks of the docs pages, in the order of each page, and inserts their output.

A fence is ``python`` or ``bash``, optionally followed by a word:

- ``error``: the block must fail, and its output is the error;
- ``no-run`` (bash only): commands that need a network, another machine or minutes;
- ``if-equinox``: the block runs if that package is installed; a line of the page says if it did not run.

In a bash block the lines that begin with ``meshpar`` run. The blocks of a page share one module, and a working directory with a
copy of ``examples/``.

``<!-- output -->`` right after a block is replaced by its output; ``<!-- output from="each device sends" to="note" -->`` by the
output lines from the first one whose beginning matches the regular expression ``from``, up to the next one that matches ``to``;
``<!-- output lines="  step|next" -->`` by each line whose beginning matches, with the lines below it that are indented further.
A ``text`` fence right after the marker is the stored output, which readers of the Markdown see. A build warns, and the tests fail,
if it differs from the output of the block, except for rounding errors, which depend on the CPU, and for what matches the regular
expression of ``<!-- output varies="…" -->`` (durations, versions).

    python docs/blocks.py [PAGE...]      # store the output of these pages, by default of the README, all pages and the notebook

``<!-- generated: chips -->`` is replaced by the Markdown that the function ``chips`` of ``docs/generated.py`` returns, and
``<!-- generated: command plan -->`` by ``command("plan")``.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import importlib.util
import io
import itertools
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NOTEBOOK = ROOT / "examples" / "lab.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WIDTH = 100
"""Width of shown output in columns."""

_FENCE = re.compile(
    r"^```(?P<language>python|bash)(?: (?P<word>error|no-run|if-\w+))?\n(?P<code>.*?)^```\n"
    r'(?:\s*<!-- output(?: from="(?P<start>[^"]*)")?(?: to="(?P<stop>[^"]*)")?(?: lines="(?P<lines>[^"]*)")?'
    r'(?: varies="(?P<varies>[^"]*)")? -->(?P<shown>)'
    r"(?:\n\n```text\n(?P<stored>.*?)^```$)?)?",
    re.MULTILINE | re.DOTALL,
)
ROUNDING = r"\d(?:\.\d+)?e-\d\d(?: in \S+)?"
"""A rounding error, as ``2.4e-07``, with the array that has the largest one."""
_ESCAPE = re.compile("\x1b\\[([0-9;]*)m")
_GENERATED = re.compile(r"^<!-- generated: (?P<function>\w+)(?P<arguments>(?: [\w./-]+)*) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its code, the first line of the code in the page, its offsets in the page's text, and its stored output."""

    language: str
    word: str | None
    code: str
    line: int
    begin: int
    end: int
    shown: bool
    start: str | None
    stop: str | None
    lines: str | None
    varies: str | None
    stored: str | None

    @property
    def needs(self) -> str | None:
        """The package that the block needs; None if it always runs."""
        return self.word.removeprefix("if-") if self.word and self.word.startswith("if-") else None

    @property
    def runs(self) -> bool:
        """Whether the block runs in this environment."""
        return self.word != "no-run" and (self.needs is None or importlib.util.find_spec(self.needs) is not None)

    def is_stored(self, lines: str) -> bool:
        """Whether the stored output is these lines, except for rounding errors and for what varies."""
        varies = f"(?:{self.varies})|{ROUNDING}" if self.varies else ROUNDING
        return re.sub(varies, "…", (self.stored or "").rstrip("\n")) == re.sub(varies, "…", lines)

    @property
    def commands(self) -> list[str]:
        """The meshpar command lines of a bash block."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.startswith("meshpar ")]


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of Python and bash in a page.

    Raises:
      ValueError: a malformed fence of these languages, or an output marker without a block.
    """
    found = []
    for m in _FENCE.finditer(text):
        line = text.count("\n", 0, m.start("code")) + 1
        if m["language"] == "python" and m["word"] == "no-run":
            raise ValueError(f"line {line}: Python is always run")
        found.append(
            Block(
                m["language"],
                m["word"],
                m["code"],
                line,
                m.start(),
                m.end(),
                m["shown"] is not None,
                m["start"],
                m["stop"],
                m["lines"],
                m["varies"],
                m["stored"],
            )
        )
    fences = len(re.findall(r"^[\s>*-]*```+\s*(?:python|py|bash)\b", text, re.MULTILINE))
    places = text.count("<!-- output")
    if fences != len(found) or places != sum(b.shown for b in found):
        raise ValueError(
            f"{fences} fences and {places} output markers, but only {len(found)} and {sum(b.shown for b in found)} can be parsed: "
            "a fence begins its line, and an output marker follows it"
        )
    return found


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A temporary working directory with a copy of the examples."""
    before, path, modules, finders = os.getcwd(), list(sys.path), set(sys.modules), set(sys.path_importer_cache)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        shutil.copytree(ROOT / "examples", root / "examples", ignore=shutil.ignore_patterns("*.png", "__pycache__"))
        os.chdir(root)
        try:
            yield root
        finally:
            os.chdir(before)
            sys.path[:] = path
            for entry in set(sys.path_importer_cache) - finders:  # of a relative entry it is this folder's
                del sys.path_importer_cache[entry]
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(root)):
                    del sys.modules[name]


def run_page(text: str, name: str) -> list[str]:
    """Run the blocks of a page and return the output of each, with escape sequences for colours; warnings are errors.

    Args:
      text: the page.
      name: the file name that plans show with the lines of the page.

    Raises:
      AssertionError: a block that must fail succeeds, or a command that must succeed fails.
      Exception: any exception that a block raises.
    """
    from meshpar._src.plan.checks import REPORTED_JOINS

    REPORTED_JOINS.clear()  # a page is a program of its own: its warnings do not depend on other pages
    module = types.ModuleType(f"page_{Path(name).stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        with warnings.catch_warnings(), _narrow_reports(), mock.patch.dict(os.environ, FORCE_COLOR="1"):
            warnings.simplefilter("error")
            here = f"{os.getcwd()}{os.sep}"
            return [_run(block, module, name).replace(here, "") for block in blocks_of(text)]
    finally:
        del sys.modules[module.__name__]


@contextlib.contextmanager
def _narrow_reports() -> Iterator[None]:
    """Limit meshpar's reports to ``WIDTH`` columns."""
    from meshpar._src import console

    class NarrowConsole(console.ReportConsole):
        def __init__(self, *args: Any, width: int, **options: Any):
            super().__init__(*args, width=min(width, WIDTH), **options)

    with mock.patch.object(console, "ReportConsole", NarrowConsole):
        yield


def _run(block: Block, module: types.ModuleType, name: str) -> str:
    out = io.StringIO()
    if not block.runs:
        return ""
    if block.language == "python":
        code = compile("\n" * (block.line - 1) + block.code, os.path.join(os.getcwd(), name), "exec", dont_inherit=True)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):  # progress
                exec(code, module.__dict__)
        except Exception as error:
            if block.word != "error":
                raise
            return f"{out.getvalue()}{type(error).__name__}: {error}\n"
        assert block.word != "error", f"{name}, line {block.line}: this must fail"
        return out.getvalue()

    from meshpar._src.entry.cli import main

    for command in block.commands:
        errors = io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
            warnings.catch_warnings(),
            mock.patch.dict(os.environ),
        ):
            if block.word == "error":  # no progress among its errors
                del os.environ["FORCE_COLOR"]
            status = main(shlex.split(command, comments=True)[1:])
        if block.word == "error":
            out.write(errors.getvalue())
        assert (status != 0) == (block.word == "error"), (
            f"{name}: {command}: status {status}\n{out.getvalue()}{errors.getvalue()}"
        )
    return out.getvalue()


def shown(block: Block, printed: str) -> str:
    """The part of a block's output that its page selects, with ``…`` for omitted lines.

    Raises:
      ValueError: the output is empty, or no line matches.
    """
    printed = printed.rstrip("\n")
    lines, found = printed.split("\n"), plain(printed).split("\n")
    first, last = 0, len(lines)
    if block.start is not None:
        first = next((k for k, line in enumerate(found) if re.match(block.start, line)), -1)
    if block.stop is not None:
        last = next((k for k, line in enumerate(found) if k > first and re.match(block.stop, line)), -1)
    chosen = list(range(first, last)) if first >= 0 else []
    if block.lines is not None:
        chosen = _matching(found, block.lines)
    while chosen and not found[chosen[-1]]:
        del chosen[-1]
    if not chosen:
        wanted = f"from {block.start!r} to {block.stop!r}" if block.lines is None else repr(block.lines)
        raise ValueError(f"line {block.line}: no lines {wanted} in\n{plain(printed)}")
    selected: list[str] = []
    for before, k in itertools.pairwise([-1, *chosen, len(lines)]):
        selected += ["…"] * any(found[before + 1 : k]) + lines[k : k + 1]
    return "\n".join(part for line in selected for part in _wrapped(line.rstrip()))


def _matching(lines: list[str], wanted: str) -> list[int]:
    """Which lines match at their beginning, or follow one that does and are indented further by at least 4 columns."""
    found, indent = [], float("inf")
    for k, line in enumerate(lines):
        here = len(line) - len(line.lstrip())
        if re.match(wanted, line):
            indent = here
        elif not line or here < indent + 4:
            indent = float("inf")
        if indent < float("inf"):
            found.append(k)
    return found


def plain(text: str) -> str:
    """The text without escape sequences, and without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in _ESCAPE.sub("", text).split("\n"))


def coloured(text: str) -> str:
    """The text as HTML, with a ``span`` of the class ``sgr-N`` for each escape sequence of colour or weight N."""
    parts, is_open = [], False
    for k, run in enumerate(_ESCAPE.split(text)):
        if k % 2 == 0:
            parts.append(html.escape(run))
            continue
        codes = [code for code in run.split(";") if code not in ("", "0")]
        parts.append("</span>" * is_open)
        is_open = bool(codes)
        parts.append(f'<span class="{" ".join(f"sgr-{code}" for code in codes)}">' * is_open)
    return "".join([*parts, "</span>" * is_open])


def _wrapped(line: str) -> list[str]:
    """A line as a terminal of ``WIDTH`` columns shows it, cut between words."""
    if len(plain(line)) <= WIDTH:
        return [line]
    line = plain(line)
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False)


def fail(message: str) -> None:
    """Raise a ValueError with this message."""
    raise ValueError(message)


def rendered(text: str, name: str, report: Callable[[str], None] = fail) -> str:
    """The page with the output of its blocks and the generated parts inserted, and with standard Markdown fences.

    Args:
      text: the page.
      name: its file name.
      report: is called with a message if a stored output differs from the output of its block; by default it raises a ValueError.
    """
    blocks = blocks_of(text)
    parts, at = [], 0
    for block, output in zip(blocks, run_page(text, name), strict=True):
        parts += [_with_generated(text[at : block.begin]), f"```{block.language}\n{block.code}```\n"]
        if block.shown and block.runs:
            lines = shown(block, output)
            if block.stored is not None and not block.is_stored(plain(lines)):
                report(
                    f"{name}, line {block.line}: the stored output differs from the printed one; "
                    f"`python docs/blocks.py docs/{name}` writes it:\n{plain(lines)}"
                )
            parts.append(_shown_on_the_site(lines))
        elif not block.runs and block.needs:
            parts.append(f"\n*Not run for this page: {block.needs} is not installed.*\n")
            parts.append(_shown_on_the_site(block.stored.rstrip("\n")) if block.stored else "")
        at = block.end
    return "".join([*parts, _with_generated(text[at:])])


def _shown_on_the_site(lines: str) -> str:
    """The Markdown of an output."""
    if _ESCAPE.search(lines):
        return f'\n<pre class="output">{coloured(lines)}</pre>\n'
    return f"\n```{{code-block}} text\n:class: output\n\n{lines}\n```\n"


def render(text: str, name: str, folder: Path, report: Callable[[str], None] = fail) -> str:
    """`rendered` in a workplace of its own; the page, and the HTML files that its blocks save, are also written to a folder."""
    with workplace() as place:
        page = rendered(text, name, report)
        folder.mkdir(parents=True, exist_ok=True)
        for plan in place.glob("*.html"):
            shutil.copy(plan, folder)
    (folder / name).write_text(page)
    return page


def _with_generated(text: str) -> str:
    """The text with each ``generated`` marker replaced by the result of its function in ``docs/generated.py``."""

    def result(match: re.Match[str]) -> str:
        return getattr(importlib.import_module("generated"), match["function"])(*match["arguments"].split())

    return _GENERATED.sub(result, text)


def with_stored_output(text: str, name: str) -> str:
    """The page with the output that its blocks print now behind each output marker; what only varies remains as it was."""
    parts, at = [], 0
    for block, output in zip(blocks_of(text), run_page(text, name), strict=True):
        if block.shown and block.runs and not block.is_stored(lines := plain(shown(block, output))):
            stored = "" if block.stored is None else f"\n\n```text\n{block.stored}```"
            parts += [text[at : block.end - len(stored)], f"\n\n```text\n{lines}\n```"]
            at = block.end
    return "".join([*parts, text[at:]])


def executed(notebook: Path) -> Any:
    """The notebook with the printed output of its cells, which a code host can show, without colours.

    Needs the extra ``notebook``. Pages and widgets, which need a style sheet and a script, are left out.
    """
    import nbclient
    import nbformat

    cells = nbformat.read(notebook, as_version=4)
    with mock.patch.dict(os.environ, NO_COLOR="1"):
        nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    cells.metadata.pop("widgets", None)
    for cell in cells.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            text = plain("".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs))
            is_page = any({"text/html", WIDGET} & set(out.get("data", ())) for out in cell.outputs) and not text.count(
                "\n"
            )
            cell.outputs = (
                [] if is_page else [nbformat.v4.new_output("stream", name="stdout", text=f"{text.strip()}\n")]
            )
    return cells


def prepare() -> None:
    """Eight CPU devices in this process, with the compiler flags of the tests; before JAX is used."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "tests" / "helpers")]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # pages show plans, which need no accelerator
    import quick

    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick.FLAGS}".strip()
    import meshpar as mp

    mp.virtual_devices(8)


if __name__ == "__main__":
    prepare()
    for page in [Path(name).resolve() for name in sys.argv[1:]] or [README, *PAGES, NOTEBOOK]:
        if page.suffix == ".ipynb":
            import nbformat

            nbformat.write(executed(page), page)
            continue
        for _ in range(3):  # an output may contain the numbers of the page's lines, which it moves
            before = page.read_text()
            with workplace():
                after = with_stored_output(before, page.name)
            if after == before:
                break
            page.write_text(after)
            print(f"{page.relative_to(ROOT)}: outputs stored", flush=True)
            if f"{page.name}:" not in after:
                break

"""Every block of the README and the pages runs, without a warning, and prints the output that its page shows."""

import os
import pathlib
import re
import sys
import tomllib
from types import ModuleType

import blocks
import generated
import pytest

import meshpar as mp
from meshpar._src.entry import cli
from meshpar._src.hardware.chips import CHIPS

ERRORS = blocks.ROOT / "docs" / "errors.md"
PAGES = [pytest.param(p, id=p.stem) for p in blocks.PAGES if p != ERRORS]


def render(page, folder):
    """Run a page and write it to ``folder``, or to that of the variable ``MESHPAR_PAGES``, where a build of the docs reads it."""
    folder = pathlib.Path(os.environ.get("MESHPAR_PAGES", folder))
    blocks.render(page.read_text(), page.name, folder / page.stem)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page, tmp_path):
    render(page, tmp_path)


def test_the_readme_runs_and_shows_what_its_example_prints():
    with blocks.workplace():
        blocks.rendered(blocks.README.read_text(), "README.md")


def test_the_readme_has_at_most_165_lines():
    assert blocks.README.read_text().count("\n") <= 165


def test_no_page_takes_the_place_of_one_that_sphinx_makes():
    assert {"search", "genindex", "py-modindex"}.isdisjoint(page.stem for page in blocks.PAGES)


def test_the_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in blocks.PAGES if page.stem.startswith("api-"))
    listed = set(re.findall(r":: (?:meshpar\.)?(?:\w+\.)*(\w+)", reference))
    groups = (mp.data, mp.hardware, mp.layers, mp.log, mp.train, mp.types, mp.train.checkpoint_policies)
    names = {*mp.layouts.PRESETS, *mp.__all__, *(name for group in groups for name in group.__all__)}
    constants = {name for name in names if name.isupper()}
    modules = {name for name in names if isinstance(getattr(mp, name, getattr(mp.train, name, None)), ModuleType)}
    assert names - modules - constants - listed == set()
    named_arrays = (blocks.ROOT / "docs" / "api-nd.md").read_text()
    assert set(mp.nd.__all__) - set(re.findall(r"(?:nd\.|`)(\w+)(?=`|$)", named_arrays, re.MULTILINE)) == set()


def test_every_error_has_a_section():
    sections = re.findall(r"^## (\w+)$", ERRORS.read_text(), re.MULTILINE)
    assert set(mp.errors.__all__) - {"MeshparError"} == set(sections) - {"Classes"}


def test_the_page_of_errors_runs_and_each_section_shows_its_class(tmp_path, monkeypatch):
    text, printed, run_page = ERRORS.read_text(), [], blocks.run_page
    monkeypatch.setattr(blocks, "run_page", lambda *page: printed.extend(run_page(*page)) or printed)
    render(ERRORS, tmp_path)
    raised = 0
    for block, output in zip(blocks.blocks_of(text), printed, strict=True):
        sections = re.findall(r"^## (\w+)$", text[: block.begin], re.MULTILINE)
        if block.word == "error" or "show_warning(lambda" in block.code:
            raised += 1
            assert blocks.plain(output).startswith(f"{sections[-1]}: ")
    assert raised >= 15


def test_every_command_has_a_page():
    commands = {name for names in cli.GROUPS.values() for name in names}
    assert commands == {page.stem.removeprefix("cli-") for page in blocks.PAGES if page.stem.startswith("cli-")}


def test_the_page_of_a_command_lists_its_flags():
    page = generated.command("plan")
    flags = {flag for action in cli.command_parser().commands["plan"]._actions for flag in action.option_strings}
    assert [flag for flag in flags - {"-h", "--help"} if f"`{flag}" not in page] == []


def test_the_table_of_chips_has_the_rates_of_the_library():
    rows = [line.split(" | ") for line in generated.chips().splitlines()[2:]]
    assert [row[0].strip("| `") for row in rows] == list(CHIPS)
    assert [row[1] for row in rows] == [f"{chip.flops / 1e12:.0f} TFLOP/s" for chip in CHIPS.values()]


def test_links_of_an_included_file_lead_to_pages_or_name_files():
    text = generated.file("CONTRIBUTING.md")
    assert "(architecture.md)" in text
    assert "](docs/" not in text
    assert "](SECURITY.md)" not in text


@pytest.mark.parametrize(
    ("which", "shown"),
    [
        ('from="b" to="e"', "…\nb\n    c\n  d\n…"),
        ('lines="b|e"', "…\nb\n    c\n…\ne"),  # with the lines that continue them
        ('lines="  d|a"', "a\n…\n  d\n…"),
        ("", "a\nb\n    c\n  d\n\ne"),
    ],
)
def test_output_stands_where_the_page_asks_for_it(which, shown):
    code = '```python\nprint("a\\nb\\n    c\\n  d\\n\\ne")\n```\n'
    page = f"Text.\n\n{code}<!-- output {which} -->\n\nMore.\n".replace("output  -->", "output -->")
    output = f"```{{code-block}} text\n:class: output\n\n{shown}\n```\n"
    assert blocks.rendered(page, "page.md") == f"Text.\n\n{code}\n{output}\n\nMore.\n"


def test_colours_are_on_the_site_only():
    page = '```python\nprint("\\x1b[1;94mdata\\x1b[0m < 4", "\\x1b[91mmodel\\x1b[0m")\n```\n<!-- output -->\n'
    html = '<pre class="output"><span class="sgr-1 sgr-94">data</span> &lt; 4 <span class="sgr-91">model</span></pre>'
    assert html in blocks.rendered(page, "page.md")
    assert blocks.with_stored_output(page, "page.md").endswith("```text\ndata < 4 model\n```\n")


STORED = "```python\nprint(1)\n```\n<!-- output -->\n\n```text\n{}\n```\n\nMore.\n"


def test_a_stored_output_is_shown_once():
    page = blocks.rendered(STORED.format(1), "page.md")
    assert page == "```python\nprint(1)\n```\n\n```{code-block} text\n:class: output\n\n1\n```\n\n\nMore.\n"


def test_a_stale_stored_output_is_an_error_and_can_be_rewritten():
    with pytest.raises(ValueError, match="the stored output differs from the printed one"):
        blocks.rendered(STORED.format(2), "page.md")
    assert blocks.with_stored_output(STORED.format(2), "page.md") == STORED.format(1)


def test_a_build_reports_a_stale_output_and_shows_the_printed_one():
    reported = []
    assert "\n1\n" in blocks.rendered(STORED.format(2), "page.md", reported.append)
    assert len(reported) == 1


def test_rounding_errors_are_not_compared():
    stored = "✓ data=2  largest difference 1.7e-06 in mlp/up"
    page = STORED.format(stored).replace(
        "print(1)", f"print({stored.replace('1.7e-06 in mlp/up', '4.0e-07 in out')!r})"
    )
    assert "4.0e-07 in out" in blocks.rendered(page, "page.md")
    with pytest.raises(ValueError, match="differs"):
        blocks.rendered(page.replace("print('✓", "print('✗"), "page.md")


def test_pages_import_the_examples_of_their_own_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("examples")])
    monkeypatch.delitem(sys.modules, "llama", raising=False)
    page = "```python\nimport sys\nsys.path.insert(0, 'examples')\nimport llama\nprint(llama.FSDP)\n```\n"
    for _ in range(2):
        with blocks.workplace():
            assert blocks.run_page(page, "a.md") == ["batch: data; embed: data\n"]


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python error\nx = 1\n```\n", AssertionError),  # it does not fail
        ("```python\nimport warnings\nwarnings.warn('w')\n```\n", UserWarning),
        ("```python no-run\nx = 1\n```\n", ValueError),
        ("- ```python\n  x = 1\n  ```\n", ValueError),  # a fence that would not be run
        ("  ```python\n  x = 1\n  ```\n", ValueError),
        ("```python\nx = 1\n```\n\nText.\n\n<!-- output -->\n", ValueError),  # output of no block
        ("```python\nx = 1\n```\n<!-- output -->\n", ValueError),  # nothing is printed
        ('```python\nprint(1)\n```\n<!-- output from="2" -->\n', ValueError),
        ('```python\nprint(1)\n```\n<!-- output lines="2" -->\n', ValueError),
        ("```bash\nmeshpar plan nothing.py:step --mesh data=2\n```\n", AssertionError),
        ("```bash error\nmeshpar plan examples/llama.py:tiny --layout fsdp --mesh data=2\n```\n", AssertionError),
    ],
)
def test_what_is_wrong_is_an_error(page, error):
    with blocks.workplace(), pytest.raises(error):
        blocks.rendered(page, "page.md")


def test_long_lines_are_wrapped():
    page = "```python\nprint('  ' + 'word ' * 40)\n```\n<!-- output -->\n"
    lines = blocks.rendered(page, "page.md").splitlines()
    assert max(map(len, lines)) <= blocks.WIDTH
    assert " ".join(lines).count("word ") >= 40


OWN = [page for page in blocks.PAGES if not page.read_text().startswith("<!-- generated: file ")]


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.stem)
def test_a_page_begins_with_a_sentence_that_says_what_it_is_for(page):
    paragraph = r"(?:# [^\n]+\n+)?(.*?)(?:\n\s*\n|\Z)"
    first = re.match(paragraph, page.read_text(), re.DOTALL)[1]
    first = re.match(paragraph, blocks._with_generated(first), re.DOTALL)[1]  # of a command: its help
    sentence = re.split(r"(?<=\.)\s", first.replace("\n", " "))[0]
    assert re.match(r"[\w`*\[]", sentence), f"{page.name} begins with {sentence[:60]!r}"
    assert sentence[-1] in ".:"
    assert len(sentence.split()) >= 4


def test_the_table_of_extras_is_that_of_the_package():
    project = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"^\| (`.*?) \|", (blocks.ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(listed))) == set(project["optional-dependencies"])


@pytest.mark.parametrize("page", [blocks.README, *blocks.PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_what_needs_a_release_is_not_on_a_page(page):
    assert re.findall(r'pip install "?meshpar|do(?:es)? not exist yet', page.read_text()) == []


@pytest.mark.parametrize("page", [blocks.README, *blocks.PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_output_is_stored(page):
    assert [b.line for b in blocks.blocks_of(page.read_text()) if b.shown and b.runs and b.stored is None] == []


def test_what_varies_is_not_compared():
    page = "```python\nprint({})\n```\n" + '<!-- output varies="[0-9.]+ s" -->\n\n```text\n{}\n```\n'
    assert "took 2.5 s" in blocks.rendered(page.format("'took 2.5 s'", "took 1 s"), "page.md")
    assert blocks.with_stored_output(page.format("'took 2.5 s'", "took 1 s"), "page.md") == page.format(
        "'took 2.5 s'", "took 1 s"
    )
    with pytest.raises(ValueError, match="differs"):
        blocks.rendered(page.format("'it took 2.5 s'", "took 1 s"), "page.md")


def test_an_output_is_stored_behind_its_marker():
    page = "```python\nprint(1)\n```\n<!-- output -->\n\nMore.\n"
    assert blocks.with_stored_output(page, "page.md") == STORED.format(1)

"""Every block of the README and the pages runs, without a warning, and prints the output that its page shows."""

import re
import sys

import blocks
import pytest

import meshpar as mp

SLOW = {"models", "finding", "schemes", "debugging"}
PAGES = [pytest.param(p, marks=pytest.mark.slow if p.stem in SLOW else (), id=p.stem) for p in blocks.PAGES]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page):
    with blocks.workplace():
        blocks.rendered(page.read_text(), page.name)


def test_the_readme_shows_what_its_example_prints():
    text = blocks.README.read_text()
    with blocks.workplace():
        printed = "".join(blocks.run_page(text, "README.md"))
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown in printed


def test_no_page_takes_the_place_of_one_that_sphinx_makes():
    assert {"search", "genindex", "py-modindex"}.isdisjoint(page.stem for page in blocks.PAGES)


def test_the_reference_has_every_public_name():
    reference = (blocks.ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r":: (?:meshpar\.)?(?:\w+\.)*(\w+)", reference))
    assert {*mp.__all__, *mp.types.__all__} - {"types", *mp.errors.__all__} - listed == set()


def test_output_stands_where_the_page_asks_for_it():
    page = 'Text.\n\n```python\nprint("a\\nb\\nc 1\\nd")\n```\n<!-- output from="b" to="d" -->\n\nMore.\n'
    output = "```{code-block} text\n:class: output\n\n…\nb\nc 1\n…\n```\n"
    want = f'Text.\n\n```python\nprint("a\\nb\\nc 1\\nd")\n```\n\n{output}\n\nMore.\n'
    assert blocks.rendered(page, "page.md") == want


def test_blocks_of_a_page_share_names_and_pages_do_not():
    assert blocks.run_page("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", "a.md") == ["", "1\n"]
    with pytest.raises(NameError):
        blocks.run_page("```python\nprint(x)\n```\n", "b.md")


def test_pages_import_the_examples_of_their_own_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("examples")])
    monkeypatch.delitem(sys.modules, "llama", raising=False)
    page = "```python\nimport sys\nsys.path.insert(0, 'examples')\nimport llama\nprint(llama.FSDP)\n```\n"
    for _ in range(2):
        with blocks.workplace():
            assert blocks.run_page(page, "a.md") == ["batch: data; embed: data\n"]


def test_an_error_is_shown():
    page = "```python error\nprint(1)\nraise ValueError('no')\n```\n"
    assert blocks.run_page(page, "a.md") == ["1\nValueError: no\n"]


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

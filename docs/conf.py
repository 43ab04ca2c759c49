"""Sphinx's settings, and the extension that runs the blocks of the pages during a build."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import blocks  # noqa: E402

blocks.prepare()

from sphinx.util.logging import getLogger  # noqa: E402

import meshpar as mp  # noqa: E402

logging.getLogger("absl").setLevel(logging.WARNING)  # Sphinx shows what others log

project = "meshpar"
version = release = mp.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]  # for readers of the Markdown
templates_path: list[str] = []
myst_heading_anchors = 3
smartquotes_action = "D"  # dashes, but straight quotes, which layouts need

html_theme = "furo"
html_title = f"meshpar {mp.__version__}"
html_favicon = "static/favicon.svg"
copybutton_selector = "div:not(.output) > div.highlight > pre"  # not the output of blocks
html_static_path = ["static"]
html_css_files = ["docs.css"]
html_show_copyright = html_show_sourcelink = html_copy_source = False

add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autosummary_generate = False  # tables only: the pages of the reference list the names
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # one line may say several


def run_blocks(app: Any, name: str, source: list[str]) -> None:
    """The page with the output of its blocks inserted, and a warning for each stored output that differs.

    A page that the tests have rendered into the folder `MESHPAR_PAGES` does not run again, unless a block needs a package that
    the tests may lack.
    """
    page = f"{name}.md"
    folder = Path(os.environ.get("MESHPAR_PAGES") or tempfile.mkdtemp()) / name
    if (folder / page).exists() and not any(block.needs for block in blocks.blocks_of(source[0])):
        source[0] = (folder / page).read_text()
    else:
        source[0] = blocks.render(source[0], page, folder, getLogger(__name__).warning)
    Path(app.outdir).mkdir(parents=True, exist_ok=True)
    for plan in folder.glob("*.html"):  # plans that blocks save, and that the page shows
        shutil.copy(plan, app.outdir)


def whole_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A property's docstring as it is, of which napoleon takes what stands before a colon for a type."""
    if what == "property":
        lines[:] = inspect.cleandoc(obj.__doc__).splitlines()


def heading_levels(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Give the captions of the sidebar, which are headings, the level that WAI-ARIA requires."""
    if "furo_navigation_tree" in context:
        tree = context["furo_navigation_tree"]
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app: Any) -> None:
    app.connect("source-read", run_blocks)
    app.connect("html-page-context", heading_levels, priority=900)  # after the theme's
    app.connect("autodoc-process-docstring", whole_docstring, priority=600)  # napoleon's is 500

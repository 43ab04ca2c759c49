"""The checks of a release: the version, what says that there is none, and the contents of wheel and sdist."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import meshpar as mp

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)

CHANGELOG = "# Changelog\n\n## [1.2.0] - 2026-01-31\n\n- a line\n\n## [1.1.0] - 2025-01-31\n"
CITATION = "title: meshpar\nversion: 1.2.0\nlicense: Apache-2.0\n"


def test_the_version_has_one_source():
    version = release.version_of((ROOT / "meshpar" / "__init__.py").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert version == mp.__version__
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "meshpar.__version__"}
    head = release.HEAD.search((ROOT / "CHANGELOG.md").read_text())
    assert head[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    with pytest.raises(ValueError, match="__version__"):
        release.version_of("version = 1\n")


@pytest.mark.parametrize(
    ("changelog", "citation", "says"),
    [
        (CHANGELOG, CITATION, []),
        (CHANGELOG.replace("2026-01-31", "unreleased"), CITATION, ["1.2.0 has no date"]),
        (CHANGELOG.replace("1.2.0", "1.3.0"), CITATION, ["begins with 1.3.0, the package has 1.2.0"]),
        ("# Changelog\n", CITATION.replace("1.2.0", "1.2.0rc1"), ["no heading", "CITATION.cff"]),
    ],
)
def test_a_version_that_differs(changelog, citation, says):
    found = list(release.version_problems("1.2.0", changelog, citation))
    assert len(found) == len(says)
    assert all(text in problem for text, problem in zip(says, found, strict=True))


def test_lines_that_say_that_there_is_no_release():
    texts = {"a.md": "released\nAlpha; not released yet.\n", "b.md": "## [0.1.0] - Unreleased\n"}
    assert list(release.leftovers(texts)) == ["a.md:2: Alpha; not released yet.", "b.md:1: ## [0.1.0] - Unreleased"]


def test_what_an_archive_lacks_and_has_beyond():
    tracked = ["meshpar/__init__.py", "meshpar/_src/lab/page.js", "meshpar_kernels/README.md", "tests/test_api.py"]
    expected = release.packaged(tracked)
    assert expected == {"meshpar/__init__.py", "meshpar/_src/lab/page.js"}
    names = ["meshpar/__init__.py", "meshpar/old.py", "meshpar-1.2.0.dist-info/RECORD"]
    assert list(release.content_problems("a.whl", names, expected)) == [
        "a.whl lacks meshpar/_src/lab/page.js",
        "a.whl has meshpar/old.py, which is not tracked",
    ]
    assert list(release.content_problems("a.whl", tracked, expected)) == []


def test_the_badges_of_the_readme_are_those_of_the_project():
    """Python, JAX and licence, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = {}
    for about, path in re.findall(
        r"!\[(\w+: [^\]]+)\]\((docs/static/badge-\w+\.svg)\)", (ROOT / "README.md").read_text()
    ):
        name, value = about.split(": ")
        assert re.findall("<text [^>]*>([^<]+)</text>", (ROOT / path).read_text()) == [name, value]
        badges[name] = value
    least, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    jax = next(re.match(r"jax>=([\d.]+),<0\.(\d+)", d) for d in project["dependencies"] if d.startswith("jax"))
    assert badges == {
        "Python": f"3.{least} to 3.{int(below) - 1}",
        "JAX": f"{jax[1]} to 0.{int(jax[2]) - 1}",
        "licence": project["license"],
    }

#!/usr/bin/env python3
"""The checks of a release: version, changelog, wheel and sdist, commands of an installation in an empty folder, and the docs.

    python .ci/release.py [--dependencies SITE_PACKAGES --setuptools SITE_PACKAGES] [--keep FOLDER] [--no-docs]

Wheel and sdist are built from the files of the last commit, and the wheel is installed into a new environment. Nothing is
published. Each check is one line, and its problems follow; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("meshpar", "meshpar_kernels")
UNRELEASED = re.compile(r"\bunreleased\b|\bnot (yet )?released\b", re.IGNORECASE)
HEAD = re.compile(r"^## \[(.+?)\] - (.+)$", re.MULTILINE)
TARGET = '''
"""A small target, whose dims get their names from their uses."""

import jax
import jax.numpy as jnp


def step():
    shapes = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32), "v": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    return train_step, (shapes, jax.ShapeDtypeStruct((64, 256), jnp.float32))


def train_step(state, x):
    grads = jax.grad(lambda state: jnp.mean((jnp.tanh(x @ state["w"]) @ state["v"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
'''


# -- pure parts


def version_of(source: str) -> str:
    """The version in the source of ``meshpar/__init__.py``, from which pyproject.toml and the docs take it.

    Raises:
      ValueError: it has none.
    """
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError('meshpar/__init__.py has no line `__version__ = "…"`')
    return found[1]


def version_problems(version: str, changelog: str, citation: str) -> Iterator[str]:
    """What differs from ``version`` in the first heading of the changelog and in CITATION.cff."""
    head = HEAD.search(changelog)
    if head is None:
        yield "CHANGELOG.md has no heading `## [version] - date`"
    elif head[1] != version:
        yield f"CHANGELOG.md begins with {head[1]}, the package has {version}"
    elif not re.fullmatch(r"\d{4}-\d{2}-\d{2}", head[2]):
        yield f"CHANGELOG.md: {version} has no date (2026-01-31) but `{head[2]}`"
    if f"\nversion: {version}\n" not in citation:
        yield f"CITATION.cff has no line `version: {version}`"


def leftovers(texts: Mapping[str, str]) -> Iterator[str]:
    """The lines of files that say that there is no release."""
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if UNRELEASED.search(line):
                yield f"{name}:{number}: {line.strip()[:100]}"


def packaged(tracked: Collection[str]) -> set[str]:
    """Of all tracked files those that wheel and sdist must have: the files of the packages, without pages for their readers."""
    return {name for name in tracked if name.split("/")[0] in PACKAGES and not name.endswith(".md")}


def content_problems(archive: str, names: Collection[str], expected: Collection[str]) -> Iterator[str]:
    """The files that an archive lacks, and those of the packages that it has beyond the expected ones."""
    yield from (f"{archive} lacks {name}" for name in sorted(set(expected) - set(names)))
    yield from (f"{archive} has {name}, which is not tracked" for name in sorted(packaged(names) - set(expected)))


# -- checks


class Failed(Exception):
    """A command that ends with another status than 0; the text has the end of its output."""


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    """The standard output of a command.

    Raises:
      Failed: its exit status is not 0.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        end = "\n      ".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise Failed(f"{' '.join(map(str, command))}: exit status {done.returncode}\n      {end}")
    return done.stdout


def check_version() -> Iterator[str]:
    """The version is the same everywhere, and the changelog has a date for it."""
    texts = [(ROOT / name).read_text() for name in ("meshpar/__init__.py", "CHANGELOG.md", "CITATION.cff")]
    yield from version_problems(version_of(texts[0]), *texts[1:])


def check_leftovers() -> Iterator[str]:
    """No page says that there is no release."""
    names = [name for name in output("git", "ls-files").splitlines() if name.endswith((".md", ".toml", ".cff"))]
    yield from leftovers({name: (ROOT / name).read_text() for name in names})


def check_tree() -> Iterator[str]:
    """All files are committed."""
    yield from (f"not committed: {line}" for line in output("git", "status", "--porcelain").splitlines())


def environment(folder: Path, installed: Path | None, *wanted: str | Path) -> Path:
    """The Python of a new virtual environment with the packages ``wanted``; if a folder of installed packages is given, with these,
    which precede the environment's own, and of the wanted ones with files alone."""
    output(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    offline = []
    if installed is not None:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "installed.pth").write_text(f"import sys; sys.path.insert(0, {str(installed.resolve())!r})\n")
        wanted, offline = tuple(x for x in wanted if isinstance(x, Path)), ["--no-deps", "--no-index"]
    if wanted:
        output(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *offline, *wanted)
    return python


def build(folder: Path, setuptools: Path | None) -> tuple[Path, Path]:
    """(wheel, sdist) of the last commit, in a folder."""
    source = folder / "source"
    source.mkdir()
    output("git", "archive", "-o", folder / "source.tar", "HEAD")
    with tarfile.open(folder / "source.tar") as tar:
        tar.extractall(source, filter="data")
    needs = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    python = environment(folder / "build", setuptools, *needs)
    return built(python, "wheel", source, folder), built(python, "sdist", source, folder)


def built(python: Path, what: str, source: Path, folder: Path) -> Path:
    """The wheel or sdist of the source in a folder, by the build backend of ``python``."""
    hook = f"from setuptools import build_meta; print(build_meta.build_{what}({str(folder)!r}))"
    return folder / output(python, "-c", hook, cwd=source).splitlines()[-1]


def check_contents(wheel: Path, sdist: Path, folder: Path) -> Iterator[str]:
    """Wheel and sdist have every file of the packages and no other, and the sdist builds the same wheel."""
    expected = packaged(output("git", "ls-tree", "-r", "--name-only", "HEAD").splitlines())
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
        archive.extractall(folder / "sdist", filter="data")
    yield from content_problems(sdist.name, names, {*expected, "pyproject.toml", "README.md", "LICENSE"})
    (source,) = (folder / "sdist").iterdir()
    (folder / "again").mkdir()
    for archive in (wheel, built(folder / "build" / "bin" / "python", "wheel", source, folder / "again")):
        with zipfile.ZipFile(archive) as opened:
            yield from content_problems(str(archive.relative_to(folder)), opened.namelist(), expected)


def check_installed(wheel: Path, folder: Path, dependencies: Path | None) -> Iterator[str]:
    """The commands run in an empty folder, in a new environment that has nothing but the wheel and its dependencies."""
    empty = folder / "empty"
    empty.mkdir()
    python = environment(folder / "venv", dependencies, wheel)
    meshpar = python.with_name("meshpar")
    version = version_of((ROOT / "meshpar/__init__.py").read_text())
    if (said := output(meshpar, "--version", cwd=empty).strip()) != f"meshpar {version}":
        yield f"`meshpar --version` says {said}"
    where = output(
        python, "-c", "import meshpar, meshpar_kernels; print(meshpar.__file__, meshpar_kernels.__file__)", cwd=empty
    )
    others = [path for path in where.split() if folder / "venv" not in Path(path).parents]
    yield from (f"{path} is imported, not the installed package" for path in others)
    if "meshpar plan" not in output(meshpar, "--help", cwd=empty):
        yield "`meshpar --help` does not name `meshpar plan`"
    (empty / "target.py").write_text(TARGET)
    words = ("target.py:step", "--topology", "v5e:2x4", "--mesh", "data=4, model=2", "--layout", "fsdp")
    if "step" not in output(meshpar, "plan", *words, "--html", "plan.html", cwd=empty):
        yield "`meshpar plan` shows no step time"
    if "<script" not in (empty / "plan.html").read_text():
        yield "the page of the plan has no script"
    output(python, "-c", "from meshpar._src.report.document import front_end; assert all(front_end('lab'))", cwd=empty)


def check_docs(folder: Path) -> Iterator[str]:
    """The docs are built without a warning, and show the version."""
    output(sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", ROOT / "docs", folder / "site")
    version = version_of((ROOT / "meshpar/__init__.py").read_text())
    if f"meshpar {version}" not in (folder / "site" / "index.html").read_text():
        yield f"the site does not show {version}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for what in ("dependencies", "setuptools"):
        about = f"a folder with the installed {what}, instead of a package index"
        parser.add_argument(f"--{what}", type=Path, metavar="SITE_PACKAGES", help=about)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder that keeps wheel, sdist and site")
    parser.add_argument("--no-docs", action="store_true", help="do not build the docs, which takes half an hour")
    args = parser.parse_args()
    failed = 0

    def check(what: str, run: Callable[[], Iterator[str]]) -> None:
        nonlocal failed
        try:
            problems = list(run())
        except Failed as e:
            problems = [str(e)]
        print(f"{'FAIL' if problems else 'ok  '}  {what}", *problems, sep="\n      ", flush=True)
        failed += bool(problems)

    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=args.keep is None)
        check("the version is one, and dated in the changelog", check_version)
        check("no page says that there is no release", check_leftovers)
        check("all files are committed", check_tree)
        try:
            wheel, sdist = build(folder, args.setuptools)
        except Failed as e:
            print(f"FAIL  wheel and sdist are built\n      {e}")
            return 1
        check("wheel and sdist have the files of the packages", lambda: check_contents(wheel, sdist, folder))
        check(f"{wheel.name} runs in an empty folder", lambda: check_installed(wheel, folder, args.dependencies))
        if not args.no_docs:
            check("the docs are built without warnings", lambda: check_docs(folder))
    print("ready" if not failed else f"not ready: {failed} checks failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

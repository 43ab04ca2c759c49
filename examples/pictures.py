"""Makes the pictures of the README and the docs: examples/poster.png, two layouts side by side, also in dark;
examples/plan.png, the top of a plan's page; examples/layer.png, a layer of this plan, also in dark; and examples/lab.png, the lab.

    python examples/pictures.py            # needs Chromium or Chrome (CHROMIUM=google-chrome)
    python examples/pictures.py --check    # exit status 1 if a plan's numbers differ from its picture

examples/pictures.json has the numbers that each picture shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import meshpar as mp

HERE = Path(__file__).resolve().parent
NUMBERS = HERE / "pictures.json"


@dataclass(frozen=True)
class Picture:
    """A screenshot of a page.

    Attributes:
      words: of the command line, after ``meshpar plan`` or ``meshpar lab``: target, slice, mesh and layout.
      size: width and height of the window in pixels.
      lab: whether it shows the lab instead of a plan's page.
      left: the words of another plan, which is shown at the left of this one.
      dark: whether the page prefers dark colours.
      section: the id of the section of the page that is shown alone; "": the page.
    """

    words: tuple[str, ...]
    size: tuple[int, int]
    lab: bool = False
    left: tuple[str, ...] = ()
    dark: bool = False
    section: str = ""


SMALL_BATCH = ("examples/llama.py:llama3_8b", "--topology", "v5e:16x16", "--set", "batch=32")
SEQUENCE = ("--layout", "batch: data; heads, kv_heads, mlp, vocab: model; embed: data; seq: model")
POSTER = Picture(
    (*SMALL_BATCH, "--mesh", "model=8, data=32", *SEQUENCE),
    (1500, 532),
    left=(*SMALL_BATCH, "--mesh", "data=32, model=8", *SEQUENCE),
)
"""The result of a search; at its left the fastest known scheme."""
PLAN = Picture(
    (
        "examples/llama.py:llama3_8b",
        "--topology",
        "v5p:4x4x8",
        "--mesh",
        "data=32, model=4",
        "--layout",
        "batch: data; heads, kv_heads?, mlp, vocab: model; embed: data; seq: model",
    ),
    (1100, 1190),
)
LAYER = replace(PLAN, size=(1100, 620), section="layer")
PICTURES = {
    "poster.png": POSTER,
    "poster-dark.png": replace(POSTER, dark=True),
    "plan.png": PLAN,
    "layer.png": LAYER,
    "layer-dark.png": replace(LAYER, dark=True),
    "lab.png": Picture(
        (
            *SMALL_BATCH, "--mesh", "data=32, model=8", "--layout", "sequence_parallel",
        ),
        (1400, 1000),
        lab=True,
    ),
}  # fmt: skip


PLANS = {name: picture.words for name, picture in PICTURES.items()} | {"poster.png, left": POSTER.left}
"""Plan of a picture → its words on the command line."""
ALONE = "main > :not(#{0}), #{0} > :not(div) {{ display: none }} .mp.mp.page {{ padding: 8px 16px }}"
POSTER_STYLE = (
    "nav, .verdict, .card .dim, section p, .facts > :nth-child(n + 3):nth-child(-n + 5) {{ display: none !important }} "
    ".parts .track {{ width: {0:.2f}% }} .mp.mp .card b {{ font-size: 32px }} .card {{ font-size: 16px }} "
    "mark {{ background: none; color: inherit; outline: 2.5px solid var(--a5); outline-offset: 2px; "
    "border-radius: 4px; margin-left: 6px }}"
)
"""Of a page of two side by side, without details, whose bars have the scale of the longer step."""
SIDE_BY_SIDE = "body { margin: 0; display: flex } iframe { width: 50%; height: 532px; border: 0 }"


def meshpar(*words: str) -> list[str]:
    """The command line of ``meshpar`` with these words."""
    return [sys.executable, "-m", "meshpar", *words]


def numbers(words: Sequence[str]) -> dict[str, str]:
    """Step time, peak memory and traffic of a plan, rounded to three digits as the page shows them."""
    done = subprocess.run(meshpar("plan", *words, "--json"), capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode > 1:  # 1: the layout does not fit
        raise RuntimeError(done.stderr)
    plan = json.loads(done.stdout)
    sent = sum(c["bytes"] * c["count"] for c in plan["collectives"])
    shown = {"seconds": plan["time"]["seconds"], "peak bytes": plan["memory"]["peak"], "bytes sent": sent}
    return {name: f"{value:.3g}" for name, value in shown.items()}


def marked(page: str, picture: Picture) -> str:
    """The page of the second plan of a picture with marks at what the first one has differently: dims of rules, the mesh."""
    before, after = (
        {flag: words[words.index(flag) + 1] for flag in ("--mesh", "--layout")}
        for words in (picture.left, picture.words)
    )
    layout = after["--layout"]
    if f"<code>{layout}</code>" not in page:
        return page  # the first plan's
    dims = {rule.dim for rule in set(mp.Layout(layout).rules) - set(mp.Layout(before["--layout"]).rules)}
    shown = re.sub(rf"\b({'|'.join(dims)})\b(?=[^;]*:)", r"<mark>\1</mark>", layout) if dims else layout
    page = page.replace(f"<code>{layout}</code>", f"<code>{shown}</code>")
    if before["--mesh"] != after["--mesh"]:
        page = re.sub(r"(<dt>mesh</dt><dd>)(.*?)(</dd>)", r"\1<mark>\2</mark>\3", page, count=1)
    return page


def draw(name: str, picture: Picture) -> None:
    """Write a picture.

    Raises:
      subprocess.CalledProcessError: a command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not picture.lab:
            pages = []
            for words in filter(None, (picture.left, picture.words)):
                pages.append(Path(folder) / f"plan{len(pages)}.html")
                to = meshpar("plan", *words, "--html", str(pages[-1]))
                subprocess.run(to, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parent)
            if picture.section:
                text = pages[-1].read_text()
                pages[-1].write_text(text.replace("</style>", f"{ALONE.format(picture.section)}</style>", 1))
            if picture.left:
                seconds = [float(numbers(words)["seconds"]) for words in (picture.left, picture.words)]
                for page, step in zip(pages, seconds, strict=True):
                    text = marked(page.read_text(), picture)
                    style = POSTER_STYLE.format(100 * step / max(seconds))
                    page.write_text(text.replace("</style>", f"{style}</style>", 1))
                frames = "".join(f'<iframe src="{page.name}"></iframe>' for page in pages)
                pages.append(Path(folder) / "both.html")
                pages[-1].write_text(f"<style>{SIDE_BY_SIDE}</style>{frames}")
            return screenshot(name, picture, pages[-1].as_uri(), folder)
        words = meshpar("lab", *picture.words, "--no-browser")
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE.parent
        ) as server:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            screenshot(name, picture, address[0], folder)
            server.terminate()
    return None


def screenshot(name: str, picture: Picture, address: str, folder: str) -> None:
    """Open an address in a headless browser, and save a screenshot."""
    browser = [os.environ.get("CHROMIUM", "chromium"), "--headless", "--no-sandbox", "--hide-scrollbars"]
    size = f"--window-size={picture.size[0]},{picture.size[1]}"
    dark = ["--force-dark-mode"] if picture.dark else []
    options = [
        *dark,
        f"--user-data-dir={folder}/profile",
        "--virtual-time-budget=30000",
        size,
        f"--screenshot={HERE / name}",
    ]
    subprocess.run([*browser, *options, address], check=True, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare numbers instead of making pictures")
    args = parser.parse_args()
    current = {name: numbers(words) for name, words in PLANS.items()}
    if args.check:
        stored = json.loads(NUMBERS.read_text())
        for name in current:
            if current[name] != stored.get(name):
                print(f"{name} shows {stored.get(name)}; its plan has {current[name]}", file=sys.stderr)
        return int(current != stored)
    for name, picture in PICTURES.items():
        draw(name, picture)
    NUMBERS.write_text(json.dumps(current, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

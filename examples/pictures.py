"""Makes the pictures of the README and the docs: examples/plan.png, the top of a plan's page, and examples/lab.png, the lab.

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
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUMBERS = HERE / "pictures.json"


@dataclass(frozen=True)
class Picture:
    """A screenshot of a page.

    Attributes:
      words: of the command line, after ``meshpar plan`` or ``meshpar lab``: target, slice, mesh and layout.
      size: width and height of the window in pixels.
      lab: whether it shows the lab instead of a plan's page.
    """

    words: tuple[str, ...]
    size: tuple[int, int]
    lab: bool = False


PICTURES = {
    "plan.png": Picture(
        (
            "examples/llama.py:llama3_8b", "--topology", "v5p:4x4x8", "--mesh", "data=32, model=4", "--layout",
            "batch: data; heads, kv_heads?, mlp, vocab: model; embed: data; seq: model",
        ),
        (1100, 1190),
    ),
    "lab.png": Picture(
        (
            "examples/llama.py:llama3_8b", "--topology", "v5e:16x16", "--set", "batch=32", "--mesh", "data=32, model=8",
            "--layout", "fsdp+tensor+sequence",
        ),
        (1400, 1000),
        lab=True,
    ),
}  # fmt: skip


def meshpar(*words: str) -> list[str]:
    """The command line of ``meshpar`` with these words."""
    return [sys.executable, "-m", "meshpar", *words]


def numbers(picture: Picture) -> dict[str, str]:
    """Step time, peak memory and traffic of a picture's plan, rounded to three digits as the page shows them."""
    done = subprocess.run(meshpar("plan", *picture.words, "--json"), capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode > 1:  # 1: the layout does not fit
        raise RuntimeError(done.stderr)
    plan = json.loads(done.stdout)
    sent = sum(c["bytes"] * c["count"] for c in plan["collectives"])
    shown = {"seconds": plan["time"]["seconds"], "peak bytes": plan["memory"]["peak"], "bytes sent": sent}
    return {name: f"{value:.3g}" for name, value in shown.items()}


def draw(name: str, picture: Picture) -> None:
    """Write a picture.

    Raises:
      subprocess.CalledProcessError: a command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not picture.lab:
            page = Path(folder) / "plan.html"
            subprocess.run(
                meshpar("plan", *picture.words, "--html", str(page)),
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=HERE.parent,
            )
            return screenshot(name, picture, page.as_uri(), folder)
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
    options = [f"--user-data-dir={folder}/profile", "--virtual-time-budget=30000", size, f"--screenshot={HERE / name}"]
    subprocess.run([*browser, *options, address], check=True, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare numbers instead of making pictures")
    args = parser.parse_args()
    current = {name: numbers(picture) for name, picture in PICTURES.items()}
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

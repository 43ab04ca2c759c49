"""Makes the pictures of the README and the docs: examples/poster.png, two layouts side by side, also in dark;
examples/axes.png, two orders of the axes on the chips; examples/plan.png, the top of a plan's page; examples/layer.png, a layer of
this plan, also in dark; and examples/lab.png, the lab.

    python examples/pictures.py            # needs Chromium or Chrome, and Playwright: pip install -e ".[browser]"
    python examples/pictures.py --check    # exit status 1 if a plan's numbers differ from its picture

examples/pictures.json has the numbers that each picture shows.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshpar._src.entry import cli
from meshpar._src.units import format_seconds

HERE = Path(__file__).resolve().parent
NUMBERS = HERE / "pictures.json"


@dataclass(frozen=True)
class Picture:
    """A screenshot of a page.

    Attributes:
      words: of the command line, after ``meshpar plan`` or ``meshpar lab``: target, slice, mesh and layout.
      width: of the window in pixels.
      title: of the page of a plan, before its devices; "": the name of the function.
      style: CSS that hides parts of the page of a plan.
      left: the words of another plan, which is compared with this one.
      sides: titles of the two plans.
      dark: whether the page prefers dark colours.
      height: of the window with the lab; 0: a page of a plan, which is shown as a whole.
    """

    words: tuple[str, ...]
    width: int
    title: str = ""
    style: str = ""
    left: tuple[str, ...] = ()
    sides: tuple[str, str] = ("", "")
    dark: bool = False
    height: int = 0


SMALL_BATCH = ("examples/llama.py:llama3_8b", "--topology", "v5e:16x16", "--set", "batch=32")
SEQUENCE = ("--layout", "batch: data; heads, kv_heads?, mlp, vocab: model; embed: data; seq: model")
COLUMNS = (
    ".sides { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; margin-top: 14px } "
    ".torus .wide { display: none } "
    ".side { border: 1px solid var(--line); border-radius: 8px; padding: 4px 14px } .mp .side h2 { margin: 8px 0 } "
    ".side .time { display: flex; gap: 10px; align-items: baseline; white-space: nowrap } .side .time b { font-size: 32px } "
    ".mp .side .parts > div { font-weight: 400; grid-template-columns: 132px 1fr 62px } .mp .side .parts b { font-weight: 650 } "
    ".mp .side mark { background: none; color: inherit; display: inline-block; padding: 2px 6px 2px 4px; margin-bottom: 3px; "
    "border: 2.5px solid var(--a5); border-radius: 7px } "
    ".side .down, .side .up { font-weight: 650; font-size: 18px } .mp .side .chips svg { margin: 4px auto; width: 330px }"
)
MIXTRAL = ("examples/mixtral.py:mixtral_8x7b", "--topology", "v5e:16x16", "--set", "batch=256")
POSTER = Picture(
    (*MIXTRAL, "--mesh", "expert=8, data=32", "--layout", "expert: expert; batch: expert+data; embed: data"),
    900,
    "A train step of Mixtral 8x7B",
    f"{COLUMNS} .side .picture, .links {{ display: none }} .side .parts {{ margin-bottom: 10px }} "
    ".mp .side .parts > div { grid-template-columns: 170px 1fr 62px; white-space: nowrap } "
    ".side code, .side mark { font-size: 12px }",
    left=(*MIXTRAL, "--mesh", "data=32, expert=8", "--layout", "expert: expert; batch: data+expert; embed: data"),
    sides=("Fastest known scheme: expert parallel", "Found by a search"),
)
"""The result of a search; at its left the fastest known scheme."""
AXES = Picture(
    (*SMALL_BATCH, "--mesh", "model=8, data=32", *SEQUENCE),
    900,
    "A train step of Llama 3 8B",
    COLUMNS,
    left=(*SMALL_BATCH, "--mesh", "data=32, model=8", *SEQUENCE),
    sides=("Step 2: data is the first axis", "Step 3: model is the first axis"),
)
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
    1000,
    style="nav, #timeline ~ section { display: none !important }",
)
LAYER = replace(
    PLAN,
    width=900,
    title="A layer of Llama 3 8B",
    style="main > :not(h1, .facts, #layer), #layer h2, .facts :nth-child(n + 3):nth-child(-n + 5) { display: none }",
)
PICTURES = {
    "poster.png": POSTER,
    "poster-dark.png": replace(POSTER, dark=True),
    "axes.png": AXES,
    "plan.png": PLAN,
    "layer.png": LAYER,
    "layer-dark.png": replace(LAYER, dark=True),
    "lab.png": Picture(
        (*SMALL_BATCH, "--mesh", "data=32, model=8", "--layout", "sequence_parallel"), 1160, height=1000
    ),
}
PLANS = {name: picture.words for name, picture in PICTURES.items()} | {
    f"{name}, left": picture.left for name, picture in (("poster.png", POSTER), ("axes.png", AXES))
}
"""Plan of a picture → its words on the command line."""
CROP = ".mp.mp.page { padding: 12px 16px }"


def meshpar(*words: str) -> list[str]:
    """The command line of ``meshpar`` with these words."""
    return [sys.executable, "-m", "meshpar", *words]


@functools.cache
def numbers(words: tuple[str, ...]) -> dict[str, str]:
    """Step time, peak memory and traffic of a plan, rounded to three digits as the page shows them."""
    with contextlib.chdir(HERE.parent), contextlib.redirect_stdout(io.StringIO()) as out:
        if cli.main(["plan", *words, "--json"]) > 1:  # 1: the layout does not fit
            raise RuntimeError(f"no plan of {' '.join(words)}")
    plan = json.loads(out.getvalue())
    sent = sum(c["bytes"] * c["count"] for c in plan["collectives"])
    shown = {"seconds": plan["time"]["seconds"], "peak bytes": plan["memory"]["peak"], "bytes sent": sent}
    return {name: f"{value:.3g}" for name, value in shown.items()}


@functools.cache
def page_of(words: tuple[str, ...]) -> str:
    """The page of a plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        to = meshpar("plan", *words, "--html", str(file))
        subprocess.run(to, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parent)
        return file.read_text()


def part(pattern: str, page: str) -> str:
    """The only group of the first match of a pattern in a page."""
    found = re.search(pattern, page, re.DOTALL)
    assert found is not None, pattern
    return found[1]


def striped(bar: str, colour: Mapping[str, str]) -> str:
    """The style of a bar such as ``collectives over data+model``: a stripe in the colour of each of its axes; "" for one axis."""
    axes = bar.split()[-1].split("+")
    stops = [
        f"{colour[a]} {100 * k / len(axes):.0f}% {100 * (k + 1) / len(axes):.0f}%"
        for k, a in enumerate(axes)
        if axes[1:]
    ]
    return f"background:linear-gradient({','.join(stops)})" if stops else ""


def compared(pages: Sequence[str], titles: Sequence[str]) -> str:
    """A page with two plans side by side: mesh, step time, its parts on one scale, and the axes on the chips.

    The difference of the step times is computed, and what the second plan has in another way, mesh or layout, is marked.
    """
    bars = (json.loads(part(r'"drawParts".*?json">(.*?)</script>', p)) for p in pages)
    parts = [{name: of for name, *of in rows} for rows in bars]
    longest, sides = max(p["step, estimated"][0] for p in parts), []
    meshes = [part(r"<dt>mesh</dt><dd>(.*?)</dd>", p) for p in pages]
    layouts = [part(r"<dt>layout</dt><dd>(.*?)</dd>", p) for p in pages]
    mesh = "<mark>{}</mark>" if meshes[0] != meshes[1] else "{}"
    layout = "<div><mark>{}</mark></div>" if layouts[0] != layouts[1] else ""
    same = "" if layout else "same rules: "
    change = 100 * (parts[1]["step, estimated"][0] / parts[0]["step, estimated"][0] - 1)
    for k, (p, of) in enumerate(zip(pages, parts, strict=True)):
        (seconds, both), (_, sent) = of["step, estimated"], of["collectives alone"]
        rows = [("<b>step</b>", seconds, both)]
        shown = [*both, *(bar for bar in sorted(sent) if bar[1] > 0.02 * seconds)]
        rows += [(name.replace(" over", ":"), n, [[css, n, name]]) for css, n, name in shown]
        colour = {axis: f"var(--a{n})" for n, axis in re.findall(r'chip on c(\d)">(\w+) ', meshes[k])}
        drawn = "".join(
            f'<div><span>{name.removesuffix(" communication")}</span><span class="track">'
            + "".join(
                f'<i class="{css}" style="width:{100 * n / longest:.1f}%;{striped(of, colour)}"></i>'
                for css, n, of in stack
            )
            + f'</span><span class="n">{format_seconds(n)}</span></div>'
            for name, n, stack in rows
        )
        torus = part(r'(<div class="picture" data-draw="drawTorus".*?</script></div>)', p)
        less = f'<span class="{"up" if change > 0 else "down"}">{same}{change:+.0f} %</span>'.replace("-", "−") * k
        sides.append(
            f'<div class="side"><h2>{titles[k]}</h2><div>mesh &nbsp;{mesh.format(meshes[k])}</div>{layout.format(layouts[k])}'
            f'<div class="time"><b>{format_seconds(seconds)}</b>a step{less}'
            f'</div><div class="parts">{drawn}</div>{torus}</div>'
        )
    head = part(r"(<h1>.*?</h1>)", pages[0])
    inputs = part(r"<dt>inputs</dt><dd>(.*?)</dd>", pages[0])
    rules = "" if layout else f"<br>rules of both: {layouts[0]}"
    body = (
        f'{head}<div>{inputs}, planned{rules}</div><div class="sides">{"".join(sides)}</div><p class="dim" style="max-width:none">'
        "Framed: what differs. step = kernels + exposed communication: kernels wait for it. Collectives: all of them, also those "
        "that overlap with kernels, in the colours of their mesh axes. "
        '<span class="links">Squares: chips. Black: one chip; blue and orange: the chips that it communicates with over each axis, '
        "and the links between them, wider for more bytes.</span></p>"
    )
    return re.sub(r'(?s)(<main class="mp page">).*?(</main>|<script>)', lambda m: m[1] + body + m[2], pages[0], count=1)


def draw(name: str, picture: Picture) -> None:
    """Write a picture.

    Raises:
      subprocess.CalledProcessError: a command fails.
    """
    if picture.height:
        words = meshpar("lab", *picture.words, "--no-browser")
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=HERE.parent
        ) as server:
            assert server.stdout is not None
            screenshot(name, picture, part(r"(http://\S+)", server.stdout.readline()))
            server.terminate()
        return
    pages = [page_of(words) for words in (picture.left, picture.words) if words]
    if picture.title:
        pages = [re.sub(r"<h1>\w+", f"<h1>{picture.title}", page) for page in pages]
    text = compared(pages, picture.sides) if picture.left else pages[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        file.write_text(text.replace("</style>", f"{CROP} {picture.style}</style>", 1))
        screenshot(name, picture, file.as_uri())


def screenshot(name: str, picture: Picture, address: str) -> None:
    """Open an address in a headless browser, and save a screenshot."""
    from playwright.sync_api import sync_playwright

    browsers = os.environ.get("CHROMIUM"), *map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers)), args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": picture.width, "height": picture.height or 900},
            device_scale_factor=1.5 if picture.height else 2,
            color_scheme="dark" if picture.dark else "light",
        )
        page.goto(address, wait_until="networkidle")
        if picture.height:
            page.wait_for_timeout(20_000)  # until the known layouts are planned
            page.screenshot(path=HERE / name)
        else:
            page.locator("main").screenshot(path=HERE / name)
        browser.close()


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

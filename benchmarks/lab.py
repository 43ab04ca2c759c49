"""Time of an edit in the lab: of the server's reply, and in headless Chromium from the input event to the drawn numbers.

    python benchmarks/lab.py [--edits 60] [--only llama]

Each edit needs a new plan: rules switched on, off and reordered, other mesh sizes. The server and the page are the ones that
`meshpar lab` uses. Without Playwright or Chromium the page's column is empty and the reason is printed.
"""

import argparse
import contextlib
import http.client
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from tables import Table

import meshpar as mp
from meshpar._src.entry.cli_target import load_target
from meshpar._src.lab.server import Server

EXAMPLES = Path(__file__).parent.parent / "examples"
CASES = [
    ("llama.py:llama3_8b", {"batch": 32}, "v5e:16x16", "sequence_parallel", ("data", "model"), 200),
    ("deepseek.py:deepseek_671b", {}, "v5p:8x8x8", "fsdp+expert", ("data", "model"), 500),
]
"""(target, its arguments, slice, layout, axes, limit in milliseconds)."""

EDIT = """async ([mesh, rules]) => {
    const main = document.querySelector("main"), mesh_ = document.querySelector("input[aria-label=mesh]");
    const text = document.querySelector("textarea");
    const began = performance.now();
    const drawn = new Promise((done) => new MutationObserver((_, watch) => {
        if (main.getAttribute("aria-busy") === "false") { watch.disconnect(); requestAnimationFrame(() => setTimeout(done)); }
    }).observe(main, { attributes: true }));
    const [input, value] = mesh_.value === mesh ? [text, rules] : [mesh_, mesh];
    input.value = value;
    input.dispatchEvent(new Event("input"));
    await drawn;
    return performance.now() - began;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=60)
    parser.add_argument("--only", default="", help="targets whose name contains this text")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(EXAMPLES))
    heads = ("model", "start-up, s", "server CPU, ms", "server, ms", "page, ms", "limit, ms")
    table = Table(*heads, title=f"{args.edits} edits: median, 95th percentile, longest")
    with browser() as page:
        for text, options, topology, layout, axes, limit in CASES:
            if args.only not in text:
                continue
            target = load_target(str(EXAMPLES / text), options)
            began = time.perf_counter()
            lab = mp.lab(
                target.step, *target.args, mesh=f"{axes[0]}=-1, {axes[1]}=8", topology=topology,
                layout=target.layouts[layout], dims=target.dims, donate_argnames="state",
            )  # fmt: skip
            startup = time.perf_counter() - began
            server = Server(lab.session)
            server.start()
            devices = math.prod(dict(lab.session.base.mesh.shape).values())
            todo = edits(target.layouts[layout], axes, devices)
            replies = [ask(server, topology, *next(todo)) for _ in range(args.edits)]
            drawn = [] if page is None else edit_in(page, server, todo, args.edits)
            server.stop()
            walls, busy = zip(*replies, strict=True)
            table.add_row(text.partition(":")[2], f"{startup:.1f}", row(busy), row(walls), row(drawn), str(limit))


def edits(layout: str, axes: tuple[str, ...], devices: int) -> Iterator[tuple[str, list[str]]]:
    """Yields (mesh, rules): random edits, each of the previous one, without repetition."""
    draw = random.Random(0)
    rules = [rule.strip() for rule in layout.split(";")]
    enabled, size = list(rules), 8
    seen = set()
    while True:
        edit = draw.choice(["mesh", "order", "switch"])
        if edit == "mesh":
            size = draw.choice([2**k for k in range(1, int(math.log2(devices)))])
        elif edit == "order":
            draw.shuffle(enabled)
        else:
            rule = draw.choice(rules)
            enabled = [r for r in enabled if r != rule] if rule in enabled else [*enabled, rule]
        mesh = f"{axes[0]}={devices // size}, {axes[1]}={size}"
        state = (mesh, tuple(enabled))
        if state not in seen:
            seen.add(state)
            yield mesh, list(enabled)


def ask(server: Server, topology: str, mesh: str, rules: list[str]) -> tuple[float, float]:
    """(wall milliseconds, CPU milliseconds of this process) of one request for a plan over a new HTTP connection."""
    rows = [{"text": rule, "on": True} for rule in rules]
    body = json.dumps({"ask": "plan", "mesh": mesh, "topology": topology, "rules": rows, "pinned": None})
    began, busy = time.perf_counter(), time.process_time()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.server_port)) as connection:
        connection.request("POST", "/ask", body, {"Authorization": f"Bearer {server.token}"})
        reply = json.loads(connection.getresponse().read())
    assert "failed" not in reply, reply
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - busy)


@contextlib.contextmanager
def browser() -> Iterator[object]:
    """A page of headless Chromium, or None if it is not installed (the reason is printed to stderr)."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None or importlib.util.find_spec("playwright") is None:
        print(f"no browser: {'Chromium' if path is None else 'Playwright'} is not installed", file=sys.stderr)
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium.new_page(viewport={"width": 1400, "height": 1000})
        finally:
            chromium.close()


def edit_in(page, server: Server, todo: Iterator[tuple[str, list[str]]], n: int) -> list[float]:
    """Milliseconds from the input event of each of ``n`` edits to the frame that shows its numbers."""
    page.goto(server.url)
    page.locator("main[data-metrics]").wait_for()
    page.locator(".start[aria-busy=false]").wait_for(timeout=120_000)
    page.get_by_role("button", name="As text").click()
    out = []
    for _ in range(n):
        mesh, rules = next(todo)
        out.append(page.evaluate(EDIT, [mesh, "\n".join(rules)]))
    return out


def row(times: Sequence[float]) -> str:
    """Median, 95th percentile and maximum; a dash if there are no times."""
    if not times:
        return "–"
    ranked = sorted(times)
    return f"{statistics.median(times):.0f}, {ranked[int(0.95 * (len(ranked) - 1))]:.0f}, {ranked[-1]:.0f}"


if __name__ == "__main__":
    main()

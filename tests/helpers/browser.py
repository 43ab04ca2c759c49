"""Headless Chromium, driven by Playwright; tests that need it are skipped where one of them is not here."""

import contextlib
import importlib.util
import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def chromium():
    """A browser; skips the test, with the reason, if none is installed."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("Playwright is not installed: pip install 'meshpar[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on the PATH: apt-get install chromium, or CHROMIUM=/path/of/it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened_page(browser, address="about:blank", **options):
    """A page in a context of its own with these options; its script must log no error and no warning."""
    context, wrong = browser.new_context(**options), []
    page = context.new_page()
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(address)
    yield page
    context.close()
    assert wrong == []


CONTRASTS = """() => {
    const rgb = (text) => (text.match(/[\\d.]+/g) ?? []).map((n, k) => (text.startsWith("color(") && k < 3 ? 255 * n : +n));
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = (x) => {
        const style = getComputedStyle(x), colour = rgb(style.backgroundColor);
        if (style.backgroundImage !== "none") return null;
        return colour[3] !== 0 ? colour : x.parentElement ? ground(x.parentElement) : [255, 255, 255];
    };
    const pill = (x) => x.closest("g.gate")?.querySelector("rect");
    const groundOf = (x) => (pill(x) ? rgb(getComputedStyle(pill(x)).fill) : ground(x.closest("svg")?.parentElement ?? x));
    const all = [...document.querySelectorAll("main *")].filter((x) => x.checkVisibility() && !x.disabled);
    const texts = all.filter((x) => [...x.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
    return texts.filter(groundOf).map((x) => {
        const style = getComputedStyle(x), of = x.closest("svg") ? style.fill : style.color;
        const [a, b] = [light(rgb(of)), light(groundOf(x))].sort((p, q) => q - p);
        return [(a + 0.05) / (b + 0.05), x.textContent.trim().slice(0, 40), x.tagName];
    }).filter(([ratio]) => ratio < 4.5);
}"""
"""A script: [contrast, text, tag] of the texts of a page with a contrast below 4.5 to 1, except on hatched and graded grounds."""

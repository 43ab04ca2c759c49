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

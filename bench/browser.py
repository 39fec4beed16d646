"""A page in headless Chromium, for pictures of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright


@contextmanager
def picture(url: str, size: ViewportSize, out: Path) -> Iterator[Page]:
    """The page at `url`; at the end of the `with` block its picture is saved as `out`, a PNG file."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=size, color_scheme="light")
        tab.goto(url)
        yield tab
        out.parent.mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=out)
        browser.close()

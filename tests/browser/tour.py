"""A tour of pages: strict Content-Security-Policy, accessibility, and width on a desktop and on a phone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .chromium import expect, inaccessible, settle
from .conftest import DESKTOP

SIZES = {
    "desktop": DESKTOP,
    "laptop": {"width": 1366, "height": 768},
    "tablet": {"width": 1024, "height": 768},
    "phone": {"width": 390, "height": 844},
}
# The folder for screenshots of the pages, if any.
TALLEST = 2000
SCREENSHOTS = os.environ.get("DELAYQ_SCREENSHOTS", "")


class Tour:
    """A tour of pages in each theme and width, which reports all problems at its end."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.add_init_script(
            "window.violations = [];"
            "document.addEventListener('securitypolicyviolation', (event) => window.violations.push("
            "`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile || ''}:${event.lineNumber || ''}`));"
        )

    def visit(self, name: str, path: str, *, do: Callable[[Any], None] | None = None, dark: bool = True) -> None:
        self.page.goto(path)
        if do is not None:
            do(self.page)
        self.look(name, dark=dark)

    def look(self, name: str, *, dark: bool = True) -> None:
        page = self.page
        expect(page.locator("body.delayq"), f"{name}: another page came").to_have_count(1)
        self.faults += [f"{name}: violates {violation}" for violation in page.evaluate("window.violations")]
        self.faults += [f"{name}: {fault}" for fault in inaccessible(page)]
        if dark:
            page.emulate_media(color_scheme="dark")
            self.faults += [f"{name}, dark: {fault}" for fault in inaccessible(page, "color-contrast")]
            self._keep(f"{name}-dark")
            page.emulate_media(color_scheme="light")
        for device, size in SIZES.items():
            page.set_viewport_size(size)
            if too_wide := page.evaluate(TOO_WIDE):
                self.faults.append(f"{name}: wider than a {device}: {too_wide}")
            self._keep(f"{name}-{device}")
        page.set_viewport_size(DESKTOP)

    def _keep(self, name: str) -> None:
        if SCREENSHOTS:
            settle(self.page)
            folder = Path(SCREENSHOTS)
            folder.mkdir(parents=True, exist_ok=True)
            width, height = self.page.evaluate("[window.innerWidth, document.documentElement.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST)}
            self.page.screenshot(path=folder / f"{name}.png", full_page=True, clip=clip)

    def end(self) -> None:
        assert not self.faults, "\n".join(self.faults)


# Finds a document that is too wide for the window, and elements that stick out of it without a scrolling parent.
TOO_WIDE = """() => {
  const most = window.innerWidth, whole = document.documentElement;
  const scrolls = (one) => one && one.id !== "content-main" &&
    (/auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
  const wide = [...document.querySelectorAll("#container *")].filter((one) =>
    one.getBoundingClientRect().right > most + 1 && one.checkVisibility() && !scrolls(one.parentElement));
  const named = wide.slice(0, 5).map((one) =>
    `${one.tagName.toLowerCase()}.${one.getAttribute("class") || ""}#${one.id}`);
  return (whole.scrollWidth > most ? [`the document, ${whole.scrollWidth} px`, ...named] : named).join(", ");
}"""

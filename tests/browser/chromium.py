"""The browser of the tests: the Chromium on PATH, if there is one, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    Axe = expect = sync_playwright = None
else:
    expect.set_options(timeout=60_000)

__all__ = ["MISSING", "STEP_TIMEOUT_MS", "expect", "inaccessible", "launched", "settle"]

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# The reason why these tests cannot run here; empty when they can.
if sync_playwright is None:
    MISSING = "needs playwright: dependency group browser"
elif PROGRAM is None:
    MISSING = "needs Chromium on PATH"
else:
    MISSING = ""

# How long a step in the browser may take. Milliseconds.
STEP_TIMEOUT_MS = 60_000


@contextmanager
def launched() -> Iterator[Any]:
    """A running browser."""
    arguments = ["--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


# Findings of axe-core on Django's own pages as well: rule and beginning of the selector. In their breadcrumbs, a link
# differs from the text beside it by its colour alone.
OF_DJANGO = {("link-in-text-block", ".breadcrumbs ")}


def settle(page: Any) -> None:
    """Wait until the colour transitions of Django's admin have ended, or were given up with what they changed.

    Within closed details none goes on.
    """
    seen = "document.getAnimations().filter((one) => one.effect.target.checkVisibility())"
    page.evaluate(f"Promise.allSettled({seen}.map((one) => one.finished)).then(() => null)")


def inaccessible(page: Any, *rules: str) -> list[str]:
    """Return the serious findings of axe-core on the page (by all rules, or these): rule, target and measurement."""
    settle(page)
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(Axe().axe_script)
    # Otherwise axe-core applies style sheets inline, which the policy of the page forbids.
    options = {"resultTypes": ["violations"], "preload": False, **({"runOnly": list(rules)} if rules else {})}
    return [
        f"{rule['id']}: {_target(node)}: {_measured(node)}"
        for rule in page.evaluate("(options) => axe.run(options)", options)["violations"]
        for node in rule["nodes"]
        if rule["impact"] in ("serious", "critical") and not _is_of_django(rule["id"], _target(node))
    ]


def _is_of_django(rule: str, target: str) -> bool:
    return any(rule == known and target.startswith(selector) for known, selector in OF_DJANGO)


def _target(node: Any) -> str:
    return " ".join(str(part) for part in node["target"])


def _measured(node: Any) -> str:
    checks = [*node["any"], *node["all"], *node["none"]]
    return "; ".join(check["message"] for check in checks)

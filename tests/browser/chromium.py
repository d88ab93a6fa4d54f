"""The browser of the tests, where there is one: Chromium of this machine, driven by Playwright."""

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

# Why these tests cannot run here; empty when they can.
if sync_playwright is None:
    MISSING = "needs playwright: dependency group browser"
elif PROGRAM is None:
    MISSING = "needs Chromium on PATH"
else:
    MISSING = ""

# What takes longer than this does not happen any more. Milliseconds.
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


# What axe-core says of Django's own pages too: rule and the beginning of the selector. In their breadcrumbs, a link
# stands beside other text and is told from it by its colour alone.
OF_DJANGO = {("link-in-text-block", ".breadcrumbs ")}


def settle(page: Any) -> None:
    """Colours of Django's admin fade over: wait until they have."""
    page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")


def inaccessible(page: Any, *rules: str) -> list[str]:
    """What axe-core finds serious on the page as it is (by all rules, or these): rule, target and what was measured."""
    settle(page)
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(Axe().axe_script)
    # It fetches style sheets and applies them inline otherwise, which the page's policy forbids.
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

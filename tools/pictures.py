"""Takes the pictures of the documentation anew: ``tox -e pictures``, with Chromium on PATH."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import MISSING, launched

from .pythons import ROOT

WIDTH = 1000
# The pictures of the browser's tests, the names that they get, and how much of each is shown, in pixels.
PICTURES = {
    "now-laptop": ("dashboard", 950),
    "now-dark": ("dashboard-dark", 930),
    "now-list-laptop": ("messages", 642),
}
TESTS = ["tests/browser/test_pages.py", "-k", "busy_day"]


def main() -> None:
    if MISSING:
        sys.exit(f"No pictures: {MISSING}")
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "DELAYQ_SCREENSHOTS": name}
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS], cwd=ROOT, env=environment)
        if done.returncode:
            sys.exit(done.returncode)
        with launched() as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": WIDTH})
            for taken, (shown, height) in PICTURES.items():
                page.set_content(_html(Path(name) / f"{taken}.png"))
                clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
                page.screenshot(path=ROOT / "docs" / "images" / f"{shown}.png", clip=clip)
                print(f"docs/images/{shown}.png")


def _html(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<body style="margin: 0"><img style="width: {WIDTH}px" src="data:image/png;base64,{data}">'


if __name__ == "__main__":
    main()

"""Only the settings of the tests switch failpoints on, and each has a place in the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import django_delayq
from tests.support import failpoints

PACKAGE = Path(django_delayq.__file__).parent


def test_no_variable_switches_them_on_in_the_package() -> None:
    program = "from django_delayq.core import failpoints; failpoints.reach('after_claim')"
    environment = {**os.environ, failpoints.ENVIRONMENT: "after_claim:kill:1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, cwd=PACKAGE.parent, check=False)
    assert ended.returncode == 0


def test_no_module_of_the_package_can_switch_them_on() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for use in re.findall(r"failpoints\.(?!py\b)(\w+)", text):
            assert use == "reach", path
        assert path.name == "failpoints.py" or "in_tests.failpoint" not in text


def test_only_the_testing_module_takes_anything_over() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "testing" not in path.relative_to(PACKAGE).parts:
            assert not re.search(r"in_tests\.\w+ = |import in_tests as|setattr\(in_tests", path.read_text()), path


def test_every_name_is_a_place_in_the_code_and_every_place_has_a_name() -> None:
    # Those of a load and of a restore are given to the function that does the work of both.
    place = re.compile(r'(?:failpoints\.reach\(|failpoint=)"(\w+)"')
    names = {name for path in PACKAGE.rglob("*.py") for name in place.findall(path.read_text())}
    assert names == failpoints.NAMES

"""Only the settings of the tests switch failpoints on. They refuse unknown names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

import django_delayq
from django_delayq.core import failpoints as places
from tests.support import failpoints

PACKAGE = Path(django_delayq.__file__).parent


def test_no_variable_switches_them_on_in_the_package() -> None:
    program = "from django_delayq.core import failpoints; failpoints.reach('after_claim')"
    environment = {**os.environ, failpoints.ENVIRONMENT: "after_claim:kill:1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, cwd=PACKAGE.parent, check=False)
    assert ended.returncode == 0


def test_no_module_of_the_package_can_switch_them_on() -> None:
    for path in PACKAGE.rglob("*.py"):
        for use in re.findall(r"failpoints\.(?!py\b)(\w+)", path.read_text()):
            assert use == "reach", path


def test_the_action_happens_at_the_nth_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "hook", places.hook)
    monkeypatch.setenv(failpoints.ENVIRONMENT, "after_claim:raise:2")
    failpoints.install()
    places.reach("after_claim")
    with pytest.raises(failpoints.Broken):
        places.reach("after_claim")
    places.reach("after_claim")


@pytest.mark.parametrize(
    "text",
    ["after_clam:kill:1", "after_claim:murder:1", "after_claim:kill:0", "after_claim:kill", "after_claim:delay=long:1"],
)
def test_a_malformed_failpoint_is_an_error_at_the_start(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT, text)
    with pytest.raises(ImproperlyConfigured, match="DELAYQ_FAILPOINTS: "):
        failpoints.install()


def test_every_name_is_a_place_in_the_code_and_every_place_has_a_name() -> None:
    # Those of a load and of a restore are given to the function that does the work of both.
    place = re.compile(r'(?:failpoints\.reach\(|failpoint=)"(\w+)"')
    names = {name for path in PACKAGE.rglob("*.py") for name in place.findall(path.read_text())}
    assert names == failpoints.NAMES

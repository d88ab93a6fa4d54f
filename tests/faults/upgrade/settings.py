"""The settings of all processes of both versions. The environment names the servers."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import INSTALLED_APPS
from tests.support.parent import end_with_parent

DEBUG = False
INSTALLED_APPS = [*INSTALLED_APPS, "tests.app", "tests.faults.upgrade"]

# No process survives the trial.
end_with_parent()

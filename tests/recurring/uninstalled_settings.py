"""The settings of the tests without the app that runs schedules. The handlers of the tests declare some."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS.remove("django_delayq.recurring")

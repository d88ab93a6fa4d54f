"""The settings of the tests, with tasks that run here."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import TASKS

TASKS = {**TASKS, "default": {"BACKEND": "tests.contrib.tasks.contract.backends.Inspectable", "QUEUES": []}}
LOGGING = {"version": 1, "disable_existing_loggers": False, "loggers": {"django_delayq": {"level": "CRITICAL"}}}

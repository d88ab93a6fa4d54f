"""The shop's settings with the benchmark's handlers; DATABASE_URL and REDIS_URL say where."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import INSTALLED_APPS, LOGGING

DEBUG = False
INSTALLED_APPS = [*INSTALLED_APPS, "benchmarks.app"]
_level = os.environ.get("LOG_LEVEL", "WARNING")
LOGGING = {**LOGGING, "loggers": {"django_delayq": {"handlers": ["console"], "level": _level, "propagate": False}}}

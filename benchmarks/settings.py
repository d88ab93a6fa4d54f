"""Settings: those of the demo without its pages, with the benchmarks' handlers, on DATABASE_URL and REDIS_URL."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DELAYQ, LOGGING

DEBUG = False
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_delayq", "benchmarks.app"]
if os.environ.get("BENCH_RECURRING"):
    INSTALLED_APPS.append("django_delayq.recurring")
ROOT_URLCONF = ""
TEMPLATES = []
MIDDLEWARE = []
if os.environ.get("BENCH_HORIZON"):
    DELAYQ = {**DELAYQ, "HORIZON": float(os.environ["BENCH_HORIZON"])}
if os.environ.get("BENCH_RETENTION"):
    DELAYQ = {**DELAYQ, "RETENTION": float(os.environ["BENCH_RETENTION"])}
_level = os.environ.get("LOG_LEVEL", "WARNING")
LOGGING = {**LOGGING, "loggers": {"django_delayq": {"handlers": ["console"], "level": _level, "propagate": False}}}

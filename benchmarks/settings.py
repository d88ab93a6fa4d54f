"""Settings: those of the demo without its pages and its log, with the benchmarks' handlers."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from testproject.settings import DELAYQ

DEBUG = False
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_delayq", "benchmarks.app"]
if os.environ.get("BENCH_RECURRING"):
    INSTALLED_APPS.append("django_delayq.recurring")
if os.environ.get("BENCH_HTTP"):
    INSTALLED_APPS.append("django_delayq.http")
if os.environ.get("BENCH_REDIS"):
    DELAYQ["REDIS"] = os.environ["BENCH_REDIS"]
ROOT_URLCONF = ""
TEMPLATES = []
MIDDLEWARE = []
# The worker writes its log as for a project that has set up none.
LOGGING = {}
DELAYQ = {**DELAYQ, "PULL_QUEUES": ["bench.pull"]}

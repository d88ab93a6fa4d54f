"""A project that starts imports no more than it needs."""

from __future__ import annotations

import os

import pytest

from .sources import report_of

PROGRAM = """
import json, sys
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_delayq"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DELAYQ={"REDIS": "redis://user:secret@redis.example:6379/0"},
)
import django
django.setup()
from django.core.management import call_command, load_command_class
from django_delayq import schedule_message
call_command("check")
call_command("migrate", verbosity=0)
load_command_class("django_delayq", "run_delayq")
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in ("redis", "django_redis"))))
"""


def test_a_command_that_does_not_use_redis_does_not_import_it() -> None:
    pytest.importorskip("redis")
    assert report_of(PROGRAM, {**os.environ}) == []

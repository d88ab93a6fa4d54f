"""A project that starts imports no more than it needs."""

from __future__ import annotations

import subprocess
import sys

from tests.support.workers import ROOT

PROGRAM = """
import sys
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
print("imported:", sorted(name for name in sys.modules if name.split(".")[0] in ("redis", "django_redis")))
"""


def test_a_command_that_does_not_use_redis_does_not_import_it() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert answer.stdout.endswith("imported: []\n"), answer.stdout[-1000:] + answer.stderr

"""The adapter of django.tasks with the database backend, django-tasks-db. This module is its settings too."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import django
from djangos import database

os.environ["DJANGO_SETTINGS_MODULE"] = __name__
SECRET_KEY = "bench"
USE_TZ = True
# Django has the API itself from 6.0 on; for older versions it is a package.
BACKPORT = [] if find_spec("django.tasks") else ["django_tasks"]
INSTALLED_APPS = ["django.contrib.contenttypes", *BACKPORT, "django_tasks_db"]
DATABASES = {"default": database()}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
OPEN = "FROM django_tasks_database_dbtaskresult WHERE status NOT IN ('SUCCESSFUL', 'FAILED')"
TABLES = ["django_tasks_database_dbtaskresult"]


def setup():
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def ready():
    django.setup()


def send(payload, due):
    from django_tasks_work import task

    if due is not None:
        task = task.using(run_after=datetime.fromtimestamp(due, UTC))
    task.enqueue(payload)


def worker():
    here = str(Path(__file__).parent)
    return ["-m", "django", "db_worker", "--no-startup-delay", "--settings", __name__, "--pythonpath", here]

"""The adapter of django-q2 with the ORM broker. This module is its settings too."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import django
from adapter_process import handle
from djangos import database

os.environ["DJANGO_SETTINGS_MODULE"] = __name__
SECRET_KEY = "bench"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django_q"]
DATABASES = {"default": database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
# As in its example of the ORM broker, but for the number of workers.
Q_CLUSTER = {
    "name": "bench",
    "orm": "default",
    "workers": 1,
    "timeout": 90,
    "retry": 120,
    "queue_limit": 50,
    "bulk": 10,
    "log_level": "WARNING",
}
OPEN = "FROM django_q_ormq"
TABLES = ["django_q_ormq", "django_q_schedule", "django_q_task"]


def task(payload):
    handle(payload)


def setup():
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def ready():
    django.setup()


def _schedule(payload, due):
    from django_q.models import Schedule

    when = datetime.fromtimestamp(due, UTC)
    return Schedule(
        func="django_q2_orm.task", args=repr((payload,)), schedule_type=Schedule.ONCE, next_run=when, repeats=-1
    )


def send(payload, due):
    from django_q.tasks import async_task

    if due is None:
        async_task("django_q2_orm.task", payload)
    else:
        _schedule(payload, due).save()


def send_many(payloads, due):
    from django_q.models import Schedule

    if due is None:
        for payload in payloads:
            send(payload, due)
    else:
        Schedule.objects.bulk_create([_schedule(payload, due) for payload in payloads], batch_size=1000)


def worker():
    here = str(Path(__file__).parent)
    return ["-m", "django", "qcluster", "--settings", __name__, "--pythonpath", here]

"""The task of django_tasks_database. It can be imported only when Django is set up."""

from __future__ import annotations

from adapter_process import handle

try:
    from django.tasks import task as make
except ImportError:
    from django_tasks import task as make


@make
def task(payload):
    handle(payload)

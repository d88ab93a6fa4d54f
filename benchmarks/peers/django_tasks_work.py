"""The task of django_tasks_database: it can only be made once Django is set up."""

from __future__ import annotations

from line import mark

try:
    from django.tasks import task as make
except ImportError:
    from django_tasks import task as make


@make
def task(payload):
    mark(payload)

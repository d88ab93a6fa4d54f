"""A backend of Django's task framework: tasks are messages, and workers run them like handlers.

``django.tasks`` is part of Django 6.0; for Django 5.2 the extra ``tasks-backport`` installs the package django-tasks.
Nothing here is imported unless ``TASKS`` names the backend.
"""

from __future__ import annotations

from .backend import DelayqBackend
from .errors import TaskCancelled, TaskExpired, TaskGivenUp
from .known import options
from .task import DelayqResult

__all__ = ["DelayqBackend", "DelayqResult", "TaskCancelled", "TaskExpired", "TaskGivenUp", "options"]

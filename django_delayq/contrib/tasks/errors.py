"""The classes that ``result.errors`` names when a task failed without an exception of its own."""

from __future__ import annotations

from ...core.exceptions import DelayqError


class TaskCancelled(DelayqError):
    """The message of the task was cancelled."""


class TaskExpired(DelayqError):
    """The message of the task expired before it was started."""


class TaskGivenUp(DelayqError):
    """The task was given up without an error of its own: its worker crashed, or a restore gave it up."""

"""Delayed messages for Django that survive losing Redis.

A message is a row that commits with your own transaction. Redis only times it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.lazy import at_first_use

if TYPE_CHECKING:
    from .api.actions import (
        acancel_message,
        amove_message,
        arequeue_message,
        areschedule_message,
        arun_message,
        cancel_message,
        move_message,
        requeue_message,
        reschedule_message,
        run_message,
    )
    from .api.limiting import aoverride_limit, areset_limit, override_limit, reset_limit
    from .api.pausing import apause_queue, aresume_queue, pause_queue, resume_queue
    from .api.repeating import arepeat_message, repeat_message
    from .api.scheduling import (
        aschedule_message,
        aschedule_messages,
        schedule_message,
        schedule_messages,
    )
    from .core.exceptions import (
        DelayqError,
        HandlerConflict,
        HandlerTimeout,
        InvalidMessage,
        KeyConflict,
        LeaseLost,
        MessageCancelled,
        PayloadTooLarge,
    )
    from .core.retry import RetryPolicy
    from .core.verdicts import Verdict
    from .project.answers import Reject, RetryLater
    from .project.message_options import MessageDict, MessageOptions, OnConflict
    from .project.process_start import worker_started
    from .project.registry import Delivered, HandlerFunction, RegisteredBatchHandler, RegisteredHandler, handler
    from .record.transitions import Answer

__version__ = "0.9.0"

# The names are loaded at first use: importing the package must not import models before the apps are ready.
_HOMES = {
    "api.actions": (
        "acancel_message",
        "amove_message",
        "arequeue_message",
        "areschedule_message",
        "arun_message",
        "cancel_message",
        "move_message",
        "requeue_message",
        "reschedule_message",
        "run_message",
    ),
    "api.repeating": ("arepeat_message", "repeat_message"),
    "project.answers": ("Reject", "RetryLater"),
    "core.exceptions": (
        "DelayqError",
        "HandlerConflict",
        "HandlerTimeout",
        "InvalidMessage",
        "KeyConflict",
        "LeaseLost",
        "MessageCancelled",
        "PayloadTooLarge",
    ),
    "api.limiting": ("aoverride_limit", "areset_limit", "override_limit", "reset_limit"),
    "api.pausing": ("apause_queue", "aresume_queue", "pause_queue", "resume_queue"),
    "project.message_options": ("MessageDict", "MessageOptions", "OnConflict"),
    "project.process_start": ("worker_started",),
    "project.registry": ("Delivered", "HandlerFunction", "RegisteredBatchHandler", "RegisteredHandler", "handler"),
    "core.retry": ("RetryPolicy",),
    "api.scheduling": (
        "aschedule_message",
        "aschedule_messages",
        "schedule_message",
        "schedule_messages",
    ),
    "record.transitions": ("Answer",),
    "core.verdicts": ("Verdict",),
}
# Public names of other modules, which somebody may look for here.
_ELSEWHERE = {
    "from django_delayq.middleware import": ("Middleware",),
    "from django_delayq.models import": ("Message", "Queue", "Transition", "Worker"),
    "from django_delayq.recurring import": ("Missed", "Schedule", "create_schedule", "delete_schedule", "run_schedule"),
    "from django_delayq.testing import": ("Delayq", "DelayqMixin"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  grouped by purpose
    "schedule_message",
    "schedule_messages",
    "cancel_message",
    "reschedule_message",
    "run_message",
    "move_message",
    "requeue_message",
    "repeat_message",
    "aschedule_message",
    "aschedule_messages",
    "acancel_message",
    "areschedule_message",
    "arun_message",
    "amove_message",
    "arequeue_message",
    "arepeat_message",
    "pause_queue",
    "resume_queue",
    "apause_queue",
    "aresume_queue",
    "override_limit",
    "reset_limit",
    "aoverride_limit",
    "areset_limit",
    "Answer",
    "Verdict",
    "OnConflict",
    "handler",
    "worker_started",
    "Delivered",
    "HandlerFunction",
    "RegisteredHandler",
    "RegisteredBatchHandler",
    "MessageOptions",
    "MessageDict",
    "RetryPolicy",
    "RetryLater",
    "Reject",
    "HandlerTimeout",
    "LeaseLost",
    "MessageCancelled",
    "DelayqError",
    "InvalidMessage",
    "PayloadTooLarge",
    "KeyConflict",
    "HandlerConflict",
]


# Names that are elsewhere, and those of other queues.
_MEANT = {
    **{name: f"{line} {name}" for line, names in _ELSEWHERE.items() for name in names},
    **dict.fromkeys(("actor", "db_task", "job", "shared_task", "task"), '@handler("orders.close")'),
    **dict.fromkeys(
        ("crontab", "db_periodic_task", "periodic", "periodic_task"),
        'from django_delayq.recurring import recurring, then @recurring("0 3 * * *")',
    ),
    **dict.fromkeys(("async_task", "defer", "enqueue", "schedule", "send_task"), "schedule_message"),
    **dict.fromkeys(("cancel", "revoke"), "cancel_message"),
    **dict.fromkeys(("Retry", "RetryTask", "SnoozeJob"), "RetryLater"),
    **dict.fromkeys(("chain", "chord", "group", "pipeline"), "schedule_message at the end of the handler before"),
}

# A type checker would take any name for one that there is.
if not TYPE_CHECKING:
    __getattr__ = at_first_use(__name__, _HOME, _MEANT)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

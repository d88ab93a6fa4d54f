"""The audit: what people and commands did, apart from the log of each message."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..core import actors
from ..core.outcomes import storable
from .models import AuditEvent, Operation

logger = logging.getLogger("django_delayq.audit")


def record(
    using: str,
    action: str,
    target: str,
    *,
    message_id: int | None = None,
    reason: str = "",
    outcomes: Mapping[str, int] | None = None,
    operation: Operation | None = None,
    user: Any = None,
    nonce: str | None = None,
) -> AuditEvent:
    """Save an audit event: the current actor did ``action`` to ``target`` (both in words), with these ``outcomes``.

    The logger ``django_delayq.audit`` gets a line too. ``user`` is the user object, if there is one: its key is kept.
    No argument may hold a payload. A second event with the same ``nonce`` raises ``IntegrityError``: call this function
    in the transaction of the action itself.
    """
    event = AuditEvent.objects.using(using).create(
        actor=actors.current(),
        user_key=str(getattr(user, "pk", None) or "")[:100],
        action=action,
        target=storable(target),
        message_id=message_id,
        reason=storable(reason),
        outcomes=dict(outcomes or {}),
        operation=operation,
        nonce=nonce,
    )
    logger.info("%s: %s %s %s", event.actor, action, event.target, event.outcomes)
    return event

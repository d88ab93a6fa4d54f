"""The options that a message may have: the arguments of ``schedule_message``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Required, TypedDict

from ..core.durations import Duration
from ..core.retry import StorableRetry


class OnConflict(StrEnum):
    """The ways to schedule a message when another one holds its topic and key."""

    # Raise KeyConflict.
    ERROR = "error"
    # Leave the old message as it is, and return it.
    KEEP = "keep"
    # Give the old message the new payload, due time and options.
    REPLACE = "replace"
    # Push the old message's due time further out, to the new one; keep its payload.
    DEBOUNCE = "debounce"


OnConflictLike = OnConflict | Literal["error", "keep", "replace", "debounce"]
# How long a message holds its key: "live", "scheduled", or a time after its end.
Unique = Literal["live", "scheduled"] | Duration


class MessageOptions(TypedDict, total=False):
    """The options that one message may have: the keyword arguments of ``schedule_message`` but ``using``."""

    delay: Duration | None
    due_at: datetime | None
    queue: str | None
    priority: int | None
    key: str | None
    unique: Unique
    on_conflict: OnConflictLike
    expires: Duration | None
    max_attempts: int | None
    retry: StorableRetry | None
    timeout: Duration | Literal[False] | None
    lease: Duration | None
    headers: Mapping[str, Any] | None
    limit_key: str | None


class MessageDict(MessageOptions, total=False):
    """One message for ``schedule_messages``: a topic, a payload, and the options of ``schedule_message``."""

    topic: Required[str]
    payload: Any

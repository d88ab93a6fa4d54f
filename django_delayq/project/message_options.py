"""The options that a message may have: the arguments of ``schedule_message``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Required, TypedDict

from ..core.durations import Duration
from ..core.exceptions import InvalidMessage
from ..core.retry import StorableRetry, as_policy
from ..core.text import shown
from . import validation


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
    # Join the new payload to that of the old message, which keeps its due time and options.
    MERGE = "merge"
    # The same, and push the due time out as "debounce" does.
    MERGE_DEBOUNCE = "merge_debounce"

    @property
    def merges(self) -> bool:
        """Whether the payloads are joined."""
        return self in (OnConflict.MERGE, OnConflict.MERGE_DEBOUNCE)


OnConflictLike = OnConflict | Literal["error", "keep", "replace", "debounce", "merge", "merge_debounce"]
# How long a message holds its key: "live", "scheduled", or a time after its end.
Unique = Literal["live", "scheduled"] | Duration


def _stored_policy(value: StorableRetry) -> str:
    try:
        return json.dumps(as_policy(value).to_json())
    except ValueError as error:
        raise InvalidMessage(str(error)) from error


def _on_conflict(value: Any) -> OnConflict:
    if isinstance(value, str) and value in tuple(OnConflict):
        return OnConflict(value)
    raise InvalidMessage(f"on_conflict is one of {', '.join(OnConflict)}, not {shown(value)}")


class MessageOptions(TypedDict, total=False):
    """The options that one message may have: the keyword arguments of ``schedule_message`` but ``using``.

    Beside the type of each stands its check, which returns the value of its column (for ``unique`` of its two columns).
    """

    delay: Annotated[Duration | None, validation.delay]
    due_at: Annotated[datetime | None, validation.due]
    queue: Annotated[str | None, validation.queue]
    priority: Annotated[int | None, validation.priority]
    key: Annotated[str | None, validation.key]
    unique: Annotated[Unique, validation.unique]
    on_conflict: Annotated[OnConflictLike, _on_conflict]
    expires: Annotated[Duration | Literal[False] | None, validation.expires]
    max_attempts: Annotated[int | None, validation.max_attempts]
    retry: Annotated[StorableRetry | None, _stored_policy]
    timeout: Annotated[Duration | Literal[False] | None, validation.timeout]
    lease: Annotated[Duration | None, validation.lease]
    headers: Annotated[Mapping[str, Any] | None, validation.given_headers]
    limit_key: Annotated[str | None, validation.limit_key]
    on_dead: Annotated[str | Literal[False] | None, validation.follow_up]
    on_expired: Annotated[str | Literal[False] | None, validation.follow_up]


class MessageDict(MessageOptions, total=False):
    """One message for ``schedule_messages``: a topic, a payload, and the options of ``schedule_message``."""

    topic: Required[str]
    payload: Any

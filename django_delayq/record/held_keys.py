"""Says which message is in the way of another one with its topic and key, and which one its handler scheduled next.

Nothing here changes a state: ``transitions`` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet

from ..core.chunks import chunks
from ..core.states import FINAL, LIVE, State
from ..models import Message
from ..models.messages import HOLDS_KEY, WAITS_AGAIN
from .sql import statements
from .sql.expressions import HasKey, HoldsKeyAt
from .sql.moves import locked, writing

# The most keys or ids in one statement. It is also the most rows that one transaction locks and moves: other
# transactions wait for these locks.
ROWS_TOGETHER = 1000

# A message that is cancelled, or will be unless its handler succeeds.
CANCELLED = Q(cancel_requested=True) | Q(state=State.CANCELLED)

# The most attempts of one call to find the message that has a key: between the look and the lock on the row the key may
# change hands.
KEY_ROUNDS = 20

# A topic and a key.
Key = tuple[str, str]


def in_the_way(using: str, topic: str, key: str) -> Message | None:
    """Return the message that keeps others with its key out: the one that holds it, or one that waits again."""
    rows = Message.objects.using(using).filter(topic=topic, key=key).order_by()
    return _one(rows.filter(HOLDS_KEY)) or _one(rows.filter(WAITS_AGAIN))


def all_in_the_way(using: str, keys: Iterable[Key]) -> defaultdict[Key, list[Message]]:
    """Return the messages that keep others with these keys out, with what ``actions.make_way`` asks of them.

    The one that holds a key comes first. Two statements read a thousand keys of one topic.
    """
    by_topic: defaultdict[str, set[str]] = defaultdict(set)
    for topic, key in keys:
        by_topic[topic].add(key)
    found: defaultdict[Key, list[Message]] = defaultdict(list)
    for topic, some in by_topic.items():
        for part in chunks(sorted(some), ROWS_TOGETHER):
            for where in (HOLDS_KEY, WAITS_AGAIN):
                rows = Message.objects.using(using).filter(where, HasKey(part), topic=topic).order_by()
                for message in rows.only("key", "state", "expires_at", "finished_at", "key_for"):
                    found[topic, message.key or ""].append(message)
    return found


def holder(using: str, topic: str, key: str) -> Message | None:
    """Return the message that holds a key: only that is in the way of a handler that schedules under its own key."""
    return _one(Message.objects.using(using).filter(HOLDS_KEY, topic=topic, key=key).order_by())


def named(using: str, topic: str, key: str) -> Message | None:
    """Return the live message that a topic and a key name, without its content.

    It is the one that holds the key, else the youngest one that has not handed it over, else the youngest one.
    """
    live = Message.objects.using(using).filter(topic=topic, key=key, state__in=LIVE).order_by()
    return max(
        live.defer("payload", "headers"),
        key=lambda message: (message.holds_key, message.next_id is None, message.pk),
        default=None,
    )


def lock_keys(using: str, keys: Iterable[Key], changing: Collection[Key]) -> set[Key]:
    """Return those of the keys for which a message is in the way.

    The messages that may change, as those of the keys in ``changing`` and finished ones, are locked until the end of
    the transaction, in the order of their ids, as each action on many messages locks them.
    """
    found = all_in_the_way(using, keys)
    to_lock = {row.pk for key, rows in found.items() for row in rows if key in changing or row.state in FINAL}
    for ids in chunks(sorted(to_lock), ROWS_TOGETHER):
        lock(using, ids)
    return set(found)


def lock(using: str, ids: Collection[int]) -> None:
    """Lock messages until the end of the transaction, in the order of their ids."""
    rows = Message.objects.using(using).filter(pk__in=ids).order_by("pk")
    list(locked(using, rows, wait=True).values_list("pk"))


def is_over(other: Message, now: datetime) -> bool:
    """Tell whether the time is over for which a message is in the way: ``actions.make_way`` takes its key."""
    if other.finished_at is not None:
        return other.finished_at + timedelta(seconds=other.key_for or 0.0) <= now
    return other.state == State.SCHEDULED and other.is_expired(now)


def free_keys(using: str, others: Iterable[Message]) -> bool:
    """Free the keys of those of these messages that are finished, if the time for which they held it is over.

    Return whether one of these keys may be free.
    """
    finished = [row for row in others if row.finished_at is not None]
    if not finished:
        return False
    now = statements(using).now()
    over = [row.pk for row in finished if is_over(row, now)]
    if not over:
        return False
    with writing(using):
        if len(over) > 1:
            lock(using, over)
        # A message that was requeued meanwhile is not finished.
        rows = Message._base_manager.using(using).filter(~Q(HoldsKeyAt(now)), pk__in=over)
        rows.update(key_for=None)
    return True


def next_of(using: str, own: int) -> Message | None:
    """Return the next message of ``own``; None when its handler has scheduled none.

    If the next message was purged, return ``own``, so that the step is not repeated. Return ``own`` also if it was
    cancelled: then no next message may follow.
    """
    rows = Message.objects.using(using)
    message = _one(rows.filter(pk=own))
    if message is not None and message.next_id is not None:
        return _one(rows.filter(pk=message.next_id)) or message
    if message is not None and (message.cancel_requested or message.state == State.CANCELLED):
        return message
    return None


def note_next(using: str, own: int, message_id: int) -> None:
    """Note a message of another caller as the next one of ``own``, unless ``own`` has a next one already."""
    row = Message._base_manager.using(using).filter(pk=own, state__in=LIVE, next_id=None)
    row.exclude(pk=message_id).update(next_id=message_id)


def _one(rows: QuerySet[Message]) -> Message | None:
    """Return one of the rows; None when there is none."""
    return next(iter(rows[:1]), None)

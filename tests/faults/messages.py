"""The messages of one case: half have transactional handlers, the others have effects that no rollback undoes."""

from __future__ import annotations

from django.db import transaction

from django_delayq import MessageDict, schedule_message, schedule_messages
from django_delayq.models import Message
from tests.app.models import Effect

NUMBER = 20
# Seconds from the due time of the first message to that of the last.
SPREAD = 1.0


def message(queue: str, lines: str, number: int) -> MessageDict:
    """Return one of the messages: half write to the database, most others to a file, three fail at first.

    Half of those that write to a file do so as tasks on the event loop.
    """
    # In pairs, so that one of each kind is taken together.
    terms: MessageDict = {"topic": "t.file", "queue": queue, "delay": SPREAD * (number // 2) / (NUMBER // 2)}
    if number % 2:
        return {**terms, "topic": "t.tx"}
    if number in (8, 12, 16):
        return {**terms, "topic": "t.second_time"}
    if number % 4:
        # The handler is a task on the event loop.
        terms["topic"] = "t.file_async"
    return {**terms, "payload": lines}


def schedule_all(queue: str, lines: str) -> list[Message]:
    return schedule_messages([message(queue, lines, number) for number in range(NUMBER)])


def schedule(queue: str, lines: str, number: int) -> None:
    """Schedule one message, with a row that exists exactly when the transaction is committed."""
    with transaction.atomic():
        scheduled = schedule_message(**message(queue, lines, number))
        Effect.objects.create(message_id=scheduled.pk, delivery=0, note=queue)


def committed(queue: str) -> int:
    return Effect.objects.filter(delivery=0, note=queue).count()

"""A batch handler in a process whose largest batch is a small one."""

from __future__ import annotations

import time

from django_delayq import handler
from django_delayq.project.registry import Delivered

from .models import Effect


@handler("b.pair", batch=2, linger="10s")
def affect_in_pairs(messages: list[Delivered]) -> None:
    note = f"{messages[0].id} of {len(messages)}"
    Effect.objects.bulk_create(
        Effect(message_id=message.id, delivery=message.deliveries, note=note) for message in messages
    )
    # So slow that no other delivery is queued for it.
    time.sleep(0.06)

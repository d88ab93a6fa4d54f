"""Deletes finished messages, with their log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from django.db import connections, transaction
from django.db.models import Q, QuerySet

from . import transitions
from .models import Message, Transition
from .states import FINAL, State

# Rows per transaction.
BATCH = 1000


def finished(using: str, states: Iterable[State], older_than: float) -> QuerySet[Message]:
    """The finished messages of these states that finished more than ``older_than`` seconds ago."""
    before = transitions.now(using) - timedelta(seconds=older_than)
    return Message.objects.using(using).filter(
        finished_at__isnull=False, finished_at__lt=before, state__in=sorted(FINAL & set(states))
    )


def purge(
    using: str,
    states: Iterable[State],
    older_than: float,
    *,
    limit: int | None = None,
    batch_size: int = BATCH,
) -> Iterator[int]:
    """Delete messages that finished more than ``older_than`` seconds ago, in batches; yields each batch's size.

    Only finished messages are ever deleted. It goes along the index of what is finished, each batch in a transaction.
    """
    doomed = finished(using, states, older_than)
    after: tuple[datetime, int] | None = None
    deleted = 0
    while limit is None or deleted < limit:
        size = batch_size if limit is None else min(batch_size, limit - deleted)
        with transaction.atomic(using=using):
            batch = _page(doomed, after, size)
            gone = delete(using, doomed, [pk for _at, pk in batch])
        if batch:
            deleted += gone
            yield gone
        if len(batch) < size:
            return
        # Those that somebody else has locked are passed by, not waited for.
        after = batch[-1]


def _page(rows: QuerySet[Message], after: tuple[datetime, int] | None, size: int) -> list[tuple[datetime, int]]:
    if after is not None:
        at, pk = after
        rows = rows.filter(Q(finished_at__gte=at) & (Q(finished_at__gt=at) | Q(pk__gt=pk)))
    found = rows.order_by("finished_at", "id").values_list("finished_at", "pk")[:size]
    return [(at, pk) for at, pk in found if at is not None]


def delete(using: str, rows: QuerySet[Message], ids: Sequence[int]) -> int:
    """Delete those of ``rows`` with these ids that nobody has locked, in a transaction of the caller's."""
    # The state again: one of them may have been requeued since.
    locked = rows.filter(pk__in=ids)
    features = connections[using].features
    if features.has_select_for_update:
        locked = locked.select_for_update(skip_locked=features.has_select_for_update_skip_locked)
    gone = list(locked.values_list("pk", flat=True))
    Transition.objects.using(using).filter(message_id__in=gone)._raw_delete(using)
    Message.objects.using(using).filter(pk__in=gone)._raw_delete(using)
    return len(gone)

"""Deletes finished messages, with their log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta

from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Left
from django.db.models.lookups import Exact

from ..core import retention
from ..core.chunks import chunks
from ..core.states import FINAL, State
from ..core.verdicts import Verdict
from ..models import Message
from . import reads, transitions
from .sql import statements
from .sql.expressions import HoldsKeyAt, ReferredTo
from .sql.moves import locked, writing

# The most messages that one transaction deletes.
PURGED_PER_TRANSACTION = transitions.MOVES_PER_TRANSACTION
# Ids that an answer names as examples of the messages that stay.
MOST_NAMED = 3


def finished(using: str, states: Iterable[State], older_than: float) -> QuerySet[Message]:
    """Return the messages of these states that finished more than ``older_than`` seconds before now.

    Messages that finish after this call never belong to them, nor do those that still hold their keys.
    """
    now = reads.now(using)
    return Message.objects.using(using).filter(
        Q(key_for__isnull=True) | Q(next_id__isnull=False) | ~Q(HoldsKeyAt(now)),
        finished_at__isnull=False,
        finished_at__lt=now - timedelta(seconds=older_than),
        state__in=sorted(FINAL & set(states)),
    )


def of_rule(rules: Sequence[retention.Rule], number: int) -> Q:
    """Return the condition of the messages for which the rule with this number is the first that holds."""
    where = Q()
    for place, rule in enumerate(rules[: number + 1]):
        # Not by LIKE, for which on SQLite case does not matter.
        named = Q(Exact(Left(rule.column, len(rule.name)), Value(rule.name))) if rule.name else Q()
        if not rule.is_prefix:
            named = Q((rule.column, rule.name))
        where &= named if place == number else ~named
    return where


def spans(using: str, after: datetime, until: datetime, size: int) -> Iterator[tuple[datetime, datetime]]:
    """Yield spans of time in each of which about this many messages ended, the latest first."""
    ended = Message.objects.using(using).order_by("-finished_at").values_list("finished_at", flat=True)
    while until > after:
        # Read along the index of finished messages, without their rows.
        some = ended.filter(finished_at__isnull=False, finished_at__gt=after, finished_at__lt=until)
        begin = next(iter(some[size - 1 : size]), None) or after
        yield begin, until
        until = begin


def deletable(rows: QuerySet[Message]) -> QuerySet[Message]:
    """Return the messages without those that a row of another table refers to: the database would not delete them."""
    for reference in statements(rows.db).references():
        rows = rows.filter(~Q(ReferredTo(reference)))
    return rows


def referred_to(rows: QuerySet[Message]) -> dict[str, list[int]]:
    """Return the foreign keys by which rows of other tables refer to these messages, each with some of their ids."""
    found = {}
    for reference in statements(rows.db).references():
        some = rows.filter(ReferredTo(reference)).order_by("finished_at", "id").values_list("pk", flat=True)
        found[str(reference)] = list(some[:MOST_NAMED])
    return {name: ids for name, ids in found.items() if ids}


def passed_over(name: str, ids: Sequence[int]) -> str:
    """Say that messages stay because of a foreign key, and what to do."""
    return (
        f"Passed over messages such as {', '.join(map(str, ids))}: rows of {name} refer to them."
        " Keep the id of a message in a plain column instead of a foreign key"
    )


def purge(
    doomed: QuerySet[Message], *, limit: int | None = None, batch_size: int = PURGED_PER_TRANSACTION
) -> Iterator[int]:
    """Delete messages that ``finished`` has found, in batches; yields each batch's size.

    Only finished messages are ever deleted. Each batch is a transaction, and read along the index of finished messages.
    A message that another transaction has locked is passed over, and not waited for; so is what is not ``deletable``.
    """
    delete = statements(doomed.db).deletion(deletable(doomed))
    deleted = 0
    while limit is None or deleted < limit:
        size = batch_size if limit is None else min(batch_size, limit - deleted)
        gone = delete(size)
        if gone:
            deleted += gone
            yield gone
        if gone < size:
            return


def purge_ids(using: str, ids: Sequence[int]) -> dict[int, Verdict]:
    """Delete the finished ones of these messages, in batches. Return the verdict of each message that there was."""
    rows = Message.objects.using(using)
    doomed = rows.filter(finished_at__isnull=False, state__in=sorted(FINAL))
    verdicts: dict[int, Verdict] = {}
    for part in chunks(ids, PURGED_PER_TRANSACTION):
        with writing(using):
            some = doomed.filter(pk__in=part)
            mine = list(locked(using, some, wait=False, to_delete=True).values_list("pk", flat=True))
            # The references are read when the messages are locked: no row can begin to refer to them any more.
            gone = list(deletable(doomed.filter(pk__in=mine)).values_list("pk", flat=True))
            others = rows.filter(pk__in=set(part).difference(mine)).values_list("pk", flat=True)
            verdicts |= dict.fromkeys(others, Verdict.TOO_LATE)
            statements(using).delete(gone)
            verdicts |= dict.fromkeys(mine, Verdict.REFERRED_TO) | dict.fromkeys(gone, Verdict.PURGED)
    return verdicts

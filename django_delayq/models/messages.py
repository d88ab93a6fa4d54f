"""The record: every message, and every move that it made."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, models, router
from django.db.models import Exists, F, Func, OuterRef, Q
from django.db.transaction import TransactionManagementError
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..core import bounds, names, states, values, verbs
from ..core.durations import Duration
from ..core.own_header import own_part
from ..core.states import State as _State
from .fields import UTCDateTimeField

# The condition that a message holds its key: no other message of its topic can hold it then. A message whose handler
# has scheduled the next one under the same key has given the key to that one. A finished message goes on holding it
# until another one wants the key and the time is over, so that one constraint decides every race.
HOLDS_KEY = Q(key__isnull=False, next_id__isnull=True) & (
    Q(key_for__isnull=False)
    | Q(Q(key_deliveries__isnull=True) | Q(deliveries__lte=F("key_deliveries")), state__in=sorted(states.LIVE))
)
# The condition that a message whose delivery has freed its key waits again, for a retry. No new message may wait beside
# it, unless its handler has scheduled its next one already. One whose delivery crashed may still succeed: it counts as
# running.
WAITS_AGAIN = Q(
    key__isnull=False,
    next_id__isnull=True,
    state=_State.SCHEDULED,
    deliveries__gt=F("key_deliveries"),
    deliveries=F("reported"),
)

# The condition that a message keeps out others with its key, except those that a handler schedules under the key of its
# own message.
IN_THE_WAY = HOLDS_KEY | WAITS_AGAIN
# A condition that each row meets after each statement. It is no constraint of the table: PostgreSQL reads the text of a
# constraint anew for each statement, which took half the time of the statement of one success. The tests check all rows
# after each test, and ``delayq_check record`` checks them when somebody calls it.
IS_CONSISTENT = Q(
    Q(state=_State.SCHEDULED, leased_until__isnull=True, finished_at__isnull=True)
    | Q(state=_State.RUNNING, leased_until__isnull=False, finished_at__isnull=True)
    | Q(state__in=sorted(states.FINAL), leased_until__isnull=True, finished_at__isnull=False),
    attempts__gte=0,
    attempts__lte=F("reported"),
    excused__gte=0,
    reported__lte=F("deliveries") - F("excused"),
    moves__gte=1,
)

# ``Message.wait`` looks again after the first time, then after twice as long each time, up to the last. Seconds.
FIRST_LOOK, LAST_LOOK = 0.005, 0.5

AModel = TypeVar("AModel", bound=models.Model)


def _refuse_write(rows: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"rows of {getattr(rows, 'model', type(rows)).__name__} are not written directly, for that would bypass the "
        "log and Redis: schedule_message() makes a message; reschedule_message(), run_message(), move_message(), "
        "cancel_message() and requeue_message() change one"
    )


def _refuse_delete(rows: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
        f"rows of {getattr(rows, 'model', type(rows)).__name__} are not deleted directly, for a worker may be running "
        "the message: cancel_message() keeps it from running; delayq_act purge deletes finished messages with their log"
    )


class RecordQuerySet(models.QuerySet[AModel]):
    """Reads rows of the record, and refuses to write them.

    ``create()`` and its kind end in ``save()``. The statements of this package go by ``_base_manager``, fixtures by
    ``save_base()``, and cascades by neither.
    """

    bulk_create = bulk_update = update = _refuse_write
    delete = _refuse_delete


class _Record(models.Model):
    """A row of the record, which only ``django_delayq.record`` writes."""

    objects = RecordQuerySet.as_manager()

    save = _refuse_write
    delete = _refuse_delete

    class Meta:
        abstract = True


# Attributes that messages have in other queues.
_MEANT = {
    **dict.fromkeys(("abort", "cancel", "revoke"), "cancel_message(message)"),
    "reschedule": 'reschedule_message(message, delay="5m")',
    "move": 'move_message(message, queue="other")',
    **dict.fromkeys(("requeue", "restart"), "requeue_message(message)"),
    **dict.fromkeys(("enqueue", "perform", "run", "run_now"), "run_message(message)"),
    **dict.fromkeys(
        ("get", "return_value"), 'message.wait("10s"), then message.result, with keep_result=True at @handler'
    ),
    **dict.fromkeys(("get_status", "ready", "status", "successful"), "message.refresh_from_db(), then message.state"),
    **dict.fromkeys(("args", "body", "data", "kwargs"), "message.payload"),
    **dict.fromkeys(("eta", "run_at", "scheduled_at"), "message.due_at"),
    **dict.fromkeys(("job_id", "task_id"), "message.id"),
}


@names.refuse_attributes("A message", _MEANT)
class Message(_Record):
    """A message to deliver at its due time.

    Rows are only read here. ``schedule_message()``, ``cancel_message()`` and the like write them, with the log and
    Redis: ``save()``, ``delete()`` and ``QuerySet.update()`` say so.
    """

    State = _State

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(_("topic"), max_length=bounds.LENGTHS.topic)
    queue = models.CharField(_("queue"), max_length=bounds.LENGTHS.queue)
    # NULL means no key: any number of live messages may have none.
    key = models.CharField(_("key"), max_length=bounds.LENGTHS.key, null=True, blank=True)  # noqa: DJ001
    priority = models.SmallIntegerField(_("priority"), default=0)
    payload = models.JSONField(_("payload"), null=True, blank=True)
    headers = models.JSONField(_("headers"), default=dict, blank=True)
    due_at = UTCDateTimeField(_("due"))
    expires_at = UTCDateTimeField(_("expires"), null=True, blank=True)
    created_at = UTCDateTimeField(_("created"), default=timezone.now)
    # A retry policy of the message's own (RetryPolicy.to_json), and its own limit.
    retry = models.JSONField(_("retry policy"), null=True, blank=True)
    max_attempts = models.SmallIntegerField(_("attempts at most"), null=True, blank=True)
    # Its own timeout (0: none) and lease. Seconds; NULL: the handler's.
    timeout = models.FloatField(_("timeout"), null=True, blank=True)
    lease = models.FloatField(_("lease"), null=True, blank=True)
    # The limits of the topic count the messages with this key by themselves. NULL: those without a key.
    limit_key = models.CharField(  # noqa: DJ001
        _("limit key"), max_length=bounds.LENGTHS.key, null=True, blank=True
    )
    # How long the message holds its key after its end. Seconds; NULL: its end frees the key.
    key_for = models.FloatField(_("key held after the end"), null=True, blank=True)
    # While it is live, the message holds its key up to this number of deliveries; NULL: up to its end. No move takes
    # the key again: a retry cannot violate the constraint when another message has the key by then.
    key_deliveries = models.IntegerField(_("deliveries with the key"), null=True, blank=True)
    # The message that its handler scheduled under its key, whatever has become of that since: it has the key instead,
    # and a delivery that is repeated finds it. NULL: there is none yet, or a requeue has begun a new life.
    next_id = models.BigIntegerField(null=True, editable=False)
    # The actor of the first row of the log, while only this row has it: see ``log_in_row``.
    created_by = models.CharField(max_length=200, null=True, editable=False)  # noqa: DJ001
    # The columns that moves change stand together at the end: when a row is updated, PostgreSQL logs only the bytes
    # from the first difference to the last.
    # Text, not varchar: PostgreSQL casts a varchar in each comparison, and constraints and indexes are full of them.
    state = models.TextField(_("state"), choices=_State.choices, default=_State.SCHEDULED)
    finished_at = UTCDateTimeField(_("finished"), null=True, blank=True)
    # Deliveries that failed and that the retry policy counts. A requeue sets the number back to 0.
    attempts = models.IntegerField(_("attempts"), default=0)
    # The number of claims. It never goes down and serves as a fence: the report of a failure must name it.
    deliveries = models.IntegerField(_("deliveries"), default=0)
    # Deliveries that reported an outcome. deliveries - reported = the crashed ones, plus the one that is running now.
    reported = models.IntegerField(_("reported deliveries"), default=0)
    # Crashed deliveries that do not count as crashes of the message: a requeue or an ordered shutdown excused them, or
    # too little spoke against the message (crashes.judge).
    excused = models.IntegerField(_("excused deliveries"), default=0)
    # Reported deliveries that failed only because their transaction met another one, and that cost no attempt. A
    # requeue sets the number back to 0.
    conflicts = models.SmallIntegerField(default=0, db_default=0, editable=False)
    # The number of moves, and of the last row in the log.
    moves = models.IntegerField(_("moves"), default=1)
    leased_until = UTCDateTimeField(_("leased until"), null=True, blank=True)
    # The last claim and the success while only this row has them: see ``log_in_row``.
    claimed_at = UTCDateTimeField(null=True, editable=False)
    ready_at = UTCDateTimeField(null=True, editable=False)
    claimed_by = models.CharField(max_length=200, null=True, editable=False)  # noqa: DJ001
    consumed_by = models.CharField(max_length=200, null=True, editable=False)  # noqa: DJ001
    worker = models.CharField(_("worker"), max_length=200, default="", blank=True)
    cancel_requested = models.BooleanField(_("cancel requested"), default=False)
    # The kind of the last error (outcomes.error_kind): the same for like failures, so that they can be counted and
    # found.
    error = models.CharField(_("error"), max_length=bounds.LENGTHS.kind, default="", db_default="", blank=True)
    # The value that the handler returned, if the handler keeps its results. It is written with the success.
    result = models.JSONField(_("result"), null=True, blank=True)

    # Set on the message that schedule_message() returns: whether it existed already, and kept the new one out.
    existed = False

    class Meta:
        db_table = "delayq_message"
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        default_permissions = ("view",)
        permissions: ClassVar = verbs.permissions("message")
        indexes: ClassVar = [
            # Scheduled messages. Loading, sweeping, restoring and delivery by query all read along it. With the
            # priority it holds all that Redis needs: vacuumed rows are loaded without reading the table.
            models.Index(
                fields=["queue", "due_at", "id", "priority"], name="delayq_todo", condition=Q(state=_State.SCHEDULED)
            ),
            models.Index(fields=["leased_until"], name="delayq_leased", condition=Q(state=_State.RUNNING)),
            models.Index(
                fields=["expires_at"],
                name="delayq_expiring",
                condition=Q(state=_State.SCHEDULED, expires_at__isnull=False),
            ),
            # For live messages with a key, also those that do not hold it, and for people who look up finished ones.
            models.Index(fields=["key", "topic", "state"], name="delayq_key", condition=Q(key__isnull=False)),
            # Finished messages without the consumed ones: they are few, and people look at them most. With the queue in
            # it, a bulk action on those of one queue reads no row of others.
            models.Index(
                fields=["state", "finished_at", "id", "queue"],
                name="delayq_unconsumed",
                condition=Q(state__in=sorted(states.REQUEUEABLE)),
            ),
            # Messages that failed, with all columns that a search for a part of the error needs.
            models.Index(fields=["error", "state", "finished_at", "id"], name="delayq_error", condition=~Q(error="")),
            models.Index(fields=["finished_at", "id"], name="delayq_finished", condition=Q(finished_at__isnull=False)),
        ]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["topic", "key"], name="delayq_held_key", condition=HOLDS_KEY),
            # The server parses each constraint anew for every statement: see ``IS_CONSISTENT``.
            models.CheckConstraint(
                name="delayq_priority",
                condition=Q(priority__gte=bounds.PRIORITIES[0], priority__lte=bounds.PRIORITIES[1]),
            ),
            # 'infinity' and years that no datetime can hold would break everything that reads the row.
            models.CheckConstraint(
                name="delayq_due",
                condition=Q(due_at__gte="2000-01-01T00:00:00Z", due_at__lte="2200-01-01T00:00:00Z"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.topic} #{self.pk}"

    def wait(self, timeout: Duration) -> Self:
        """Wait until the message has ended, read it again, and return it: ``state`` says how it has ended.

        It looks at the row at once, and then after 5, 10, 20 … 500 ms. A message that waits for a retry has not ended.

        Raises ``TimeoutError`` after this time (seconds, a timedelta, or text such as ``"30s"``; 0: it looks once), and
        names the message and its state; ``TransactionManagementError`` within a transaction, unless the message has
        ended already: one that the transaction has scheduled begins only after the commit, and a snapshot shows no end;
        ``DoesNotExist`` when it was purged; ``ValueError`` for an impossible time. Async code awaits ``await_end``.
        """
        for pause in self._looks(timeout):
            time.sleep(pause)
        return self

    async def await_end(self, timeout: Duration) -> Self:
        """Wait from async code as ``wait`` does."""
        looks = self._looks(timeout)
        while (pause := await sync_to_async(lambda: next(looks, None))()) is not None:
            await asyncio.sleep(pause)
        return self

    def _looks(self, timeout: Duration) -> Iterator[float]:
        """Look at the row until the message has ended, and read it then. Yields the seconds until the next look."""
        try:
            span = values.span(timeout)
        except ValueError as error:
            raise ValueError(f"timeout {error}") from None
        using, over, pause = router.db_for_write(Message, instance=self), time.monotonic() + span, FIRST_LOOK
        rows = Message.objects.using(using).filter(pk=self.pk).values_list("state", flat=True)
        while (state := rows.get()) not in states.FINAL:
            if not connections[using].get_autocommit():
                raise TransactionManagementError(
                    f"message {self.pk} has not ended, and within this transaction that may never be seen: "
                    "wait for it after the commit"
                )
            left = over - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"message {self.pk} of topic {self.topic!r} has not ended: it is {state}")
            yield min(pause, left)
            pause = min(2 * pause, LAST_LOOK)
        self.refresh_from_db(using=using)

    @property
    def repeats(self) -> int | None:
        """The id of the message that this one repeats; None: it repeats none."""
        found = own_part(self.headers).get("repeats")
        return found if isinstance(found, int) else None

    @property
    def crashes(self) -> int:
        """The deliveries that crashed and are not excused."""
        return self.deliveries - self.reported - self.excused - (self.state == _State.RUNNING)

    @property
    def holds_key(self) -> bool:
        """True while the message holds its key: ``HOLDS_KEY``."""
        if self.key is None or self.next_id is not None:
            return False
        if self.key_for is not None:
            return True
        return self.state in states.LIVE and (self.key_deliveries is None or self.deliveries <= self.key_deliveries)

    @property
    def unique(self) -> str | timedelta:
        """How long the message holds its key: ``"live"``, ``"scheduled"``, or a time after its end."""
        if self.key_for is not None:
            return timedelta(seconds=self.key_for)
        return "live" if self.key_deliveries is None else "scheduled"

    def is_expired(self, at: datetime) -> bool:
        """Return whether it is too late at ``at`` for the message to begin."""
        return self.expires_at is not None and self.expires_at <= at

    @property
    def lease_ends_at(self) -> datetime | None:
        """When the lease of the running delivery ends, with its renewals; None while the message does not run."""
        if self.leased_until is None:
            return None
        renewed = Lease.objects.using(self._state.db).filter(message_id=self.pk, delivery=self.deliveries).first()
        return self.leased_until if renewed is None else max(self.leased_until, renewed.until)


class Lease(models.Model):
    """The end of a lease that was renewed. The first lease of a delivery is in the row of its message.

    A renewal must not change that row: a transactional handler changes it at its end, and at REPEATABLE READ and above
    its transaction could not be committed if another one had changed the row meanwhile. The janitor deletes leases of
    deliveries that have ended.

    When the success of an earlier delivery ends the message while a later one runs, that one's lease gets a row here
    with the negative number of the delivery: it keeps the permits.
    """

    pk = models.CompositePrimaryKey("message_id", "delivery")
    message_id = models.BigIntegerField()
    # Negative: of a delivery whose message is over.
    delivery = models.IntegerField()
    until = models.DateTimeField()

    class Meta:
        db_table = "delayq_lease"
        default_permissions = ()

    def __str__(self) -> str:
        return f"#{self.message_id} {self.delivery}: {self.until}"


def not_expired(at: datetime | Func) -> Q:
    """Return the condition that a message may still begin at ``at``."""
    return Q(expires_at__isnull=True) | Q(expires_at__gt=at)


def lease_is_over(at: datetime) -> Q:
    """Return the condition that a message runs and that its lease, also a renewed one, has ended before ``at``."""
    renewed = Lease.objects.filter(message_id=OuterRef("pk"), delivery=OuterRef("deliveries"), until__gte=at)
    return Q(~Exists(renewed), state=_State.RUNNING, leased_until__lt=at)


class Unannounced(models.Model):
    """A message that SQL has scheduled: Redis was not told of it. The sweeper tells Redis, and deletes the row.

    Without Redis nobody reads the rows, and the janitor deletes them.
    """

    message_id = models.BigIntegerField(primary_key=True)
    at = UTCDateTimeField()

    class Meta:
        db_table = "delayq_unannounced"
        default_permissions = ()

    def __str__(self) -> str:
        return f"#{self.message_id}"


class Place(models.Model):
    """A permit: one unit of a limit, which a running delivery holds.

    It counts while its message runs with that delivery, so nothing has to be given back: whatever ends the delivery
    frees the permit. It counts, too, while that delivery runs on though an earlier one has ended the message: see
    ``Lease``. Rows of permits that are free are deleted later.
    """

    pk = models.CompositePrimaryKey("name", "message_id")
    # The name of the limit: ``limits.topic_name`` or ``limits.queue_name``.
    name = models.CharField(max_length=bounds.LENGTHS.limit)
    message_id = models.BigIntegerField()
    # The number of the delivery that holds the permit.
    delivery = models.IntegerField()

    class Meta:
        db_table = "delayq_place"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.name}: #{self.message_id} {self.delivery}"


class Rate(models.Model):
    """How much of the rate of a limit is used up. A limit without a row has its whole burst available."""

    # The name of the limit: ``limits.topic_name`` or ``limits.queue_name``.
    name = models.CharField(max_length=bounds.LENGTHS.limit, primary_key=True)
    # When the whole burst is available again, if no delivery begins until then.
    full_at = UTCDateTimeField()

    class Meta:
        db_table = "delayq_rate"
        default_permissions = ()
        indexes: ClassVar = [models.Index(fields=["full_at"], name="delayq_rate_full")]

    def __str__(self) -> str:
        return f"{self.name}: {self.full_at}"


class _Move(_Record):
    """The columns of a logged move of the state machine."""

    number = models.IntegerField(_("number"))
    at = UTCDateTimeField(_("at"))
    # NULL: the message did not exist before this move.
    from_state = models.CharField(_("from"), max_length=9, choices=_State.choices, null=True)  # noqa: DJ001
    to_state = models.CharField(_("to"), max_length=9, choices=_State.choices)
    # The delivery that the move belongs to (0 before the first).
    delivery = models.IntegerField(_("delivery"), default=0)
    # The due time after the move.
    due_at = UTCDateTimeField(_("due"))
    # For a claim through Redis: the due time that Redis had for the message. NULL when a query found it.
    ready_at = UTCDateTimeField(_("ready"), null=True)
    actor = models.CharField(_("actor"), max_length=200, default="")
    reason = models.TextField(_("reason"), default="")
    error = models.TextField(_("error"), default="")
    traceback = models.TextField(_("traceback"), default="")
    # The class of what the handler raised, with its module (outcomes.class_path).
    exception = models.CharField(_("exception"), max_length=bounds.LENGTHS.error_class, default="", db_default="")

    class Meta:
        abstract = True
        default_permissions = ()
        ordering: ClassVar = ["message_id", "number"]

    def __str__(self) -> str:
        message_id, number = self.pk
        return f"#{message_id} {number}: {self.from_state or 'new'} → {self.to_state}"


class LogRow(_Move):
    """A row of the log that is stored as such; ``Transition`` shows the whole log.

    The usual life of a message needs no such row on PostgreSQL: ``record/sql/log_in_row.py``.
    """

    pk = models.CompositePrimaryKey("message_id", "number")
    # No constraint in the database: its check would lock a row for every move, and one statement writes both rows
    # anyway.
    message = models.ForeignKey(
        Message, on_delete=models.CASCADE, related_name="+", db_constraint=False, db_index=False
    )

    class Meta(_Move.Meta):
        db_table = "delayq_log"

    @classmethod
    def of(cls, move: Transition) -> LogRow:
        """Return the row, not yet written, that says what a row of the whole log says."""
        columns = [field.attname for field in cls._meta.local_concrete_fields if field.column]
        return cls(**{name: getattr(move, name) for name in columns})


class Transition(_Move):
    """A logged move of the state machine: a view of the rows of the log and of what messages say of themselves."""

    pk = models.CompositePrimaryKey("message_id", "number")
    message = models.ForeignKey(
        Message, on_delete=models.DO_NOTHING, related_name="transitions", db_constraint=False, db_index=False
    )

    class Meta(_Move.Meta):
        managed = False
        db_table = "delayq_transition"
        verbose_name = _("transition")
        verbose_name_plural = _("transitions")

    def _save_table(self, raw: bool, cls: Any, force_insert: bool, force_update: bool, using: str, *rest: Any) -> bool:
        """Write the move, which a fixture brings, to the log unless the log shows it already."""
        known = Transition.objects.using(using).filter(message_id=self.message_id, number=self.number).exists()
        if not known:
            LogRow.of(self).save_base(using=using, force_insert=True)
        return known


class Identity(models.Model):
    """The identity of this database, in one row. Redis carries the same value, so that a wrong Redis is refused."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    value = models.UUIDField(default=uuid.uuid4)

    class Meta:
        db_table = "delayq_identity"
        default_permissions = ()
        constraints: ClassVar = [models.CheckConstraint(name="delayq_one_identity", condition=Q(id=1))]

    def __str__(self) -> str:
        return str(self.value)
